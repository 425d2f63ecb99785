/*
 * test_wire.c - clients that break the protocol in every way that a table can list
 */
#include "hostile.h"

static struct daemon d;
static struct baseline before;
static struct client c;
static struct raw raw;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    daemon_start(&d, NULL, "uid_buffer_bytes = 1000000; uid_connections = 200;");
    judge_first(&d, &before);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

/* A connection that said hello, again if the last one was closed. */
static void reopen(bool *open)
{
    if (!*open)
        client_start(&c, &d);
    *open = true;
}

static void drop(bool *open)
{
    if (*open)
        client_close(&c);
    *open = false;
}

/* Sends raw; one answer, or the end after too many bad ones. */
static int try_raw(bool *open)
{
    struct proto_reply reply;
    int r;

    reopen(open);
    r = client_try(&c, raw.bytes, raw.n, -1, &reply);
    if (r < 0) { /* the sixteenth bad one was the last of its connection */
        drop(open);
        reopen(open);
        r = client_try(&c, raw.bytes, raw.n, -1, &reply);
    }
    if (r < 0)
        fail_msg("no answer on a fresh connection");
    return r;
}

/* A message of each verb, as complete as it can be. */
static int complete(enum verb verb, uint8_t *bytes, size_t size)
{
    struct proto_request request = {.id = 9, .verb = verb};

    if (verb == VERB_INFER) {
        request = infer_a(x);
        request.id = 9;
        request.infer.input.shape[0] = 1;
        request.infer.input.n_bytes = A_IN * 4;
        request.infer.has_deadline = true;
        request.infer.deadline_us = 1000000;
        request.infer.has_output = true;
        request.infer.output = (struct proto_tensor){
            .dtype = PROTO_FLOAT32, .rank = 4, .shape = {1, A_OUT, 1, 1}, .buffer = 1};
    } else if (verb == VERB_HELLO) {
        request.hello.version = 1;
        request.hello.name = str(SECRET);
    } else if (verb == VERB_LOG) {
        request.log.level = str("info");
    } else if (verb == VERB_MODEL_LIST) {
        request.model_list.after = str(SECRET);
    } else if (verb >= VERB_MODEL_DESCRIBE && verb <= VERB_MODEL_RELOAD) {
        request.model.name = str(SECRET);
    } else if (verb == VERB_BUFFER_CREATE || verb == VERB_BUFFER_REGISTER) {
        request.buffer_create.size_bytes = 4096;
    }
    return codec_encode_request(&request, bytes, size);
}

/* P-02: a message of each verb, cut at every byte. */
static void cuts_every_message(void **state)
{
    static uint8_t bytes[PROTO_DATAGRAM_MAX];
    bool open = false;

    (void)state;
    for (enum verb verb = 0; verb < VERB_COUNT; verb++) {
        int n = complete(verb, bytes, sizeof(bytes));

        assert_true(n > 0);
        for (int i = 1; i < n; i++) {
            memcpy(raw.bytes, bytes, (size_t)i);
            raw.n = (size_t)i;
            assert_int_equal(try_raw(&open), ERR_BAD_MESSAGE);
        }
    }
    drop(&open);
    judge(&d, &before);
}

/* P-02, second half, and P-03: extensions that do not end, nesting of every kind. */
static void nests_and_extends(void **state)
{
    static const uint8_t opens[][2] = {{0x91, 1}, {0x81, 1}, {0xdc, 3}, {0xde, 3}, {0xdd, 5}};
    static const unsigned depths[] = {9, 33, 1000, 10000};
    bool open = false;

    (void)state;
    for (unsigned code = 0xc7; code <= 0xd8; code++) {
        if (code >= 0xca && code <= 0xd3)
            continue;
        for (unsigned n = 1; n <= 4; n++) {
            if (code >= 0xd4 && n == 2 + (1u << (code - 0xd4)))
                continue; /* whole, under a key that nobody reads */
            raw_begin(&raw, "ping", 1);
            raw_str(&raw, "more");
            raw_byte(&raw, code);
            for (unsigned i = 1; i < n; i++)
                raw_byte(&raw, 0xff);
            assert_int_equal(try_raw(&open), ERR_BAD_MESSAGE);
        }
    }
    for (size_t k = 0; k < ARRAY_SIZE(opens); k++) {
        for (size_t i = 0; i < ARRAY_SIZE(depths); i++) {
            raw_begin(&raw, "ping", 1);
            raw_str(&raw, "more");
            for (unsigned n = 0; n < depths[i]; n++) {
                raw_byte(&raw, opens[k][0]);
                if (opens[k][1] > 1)
                    raw_big(&raw, 1, opens[k][1] - 1u);
                if (opens[k][0] == 0x81 || opens[k][0] == 0xde)
                    raw_byte(&raw, 1); /* a key */
            }
            raw_byte(&raw, 0xc0);
            if (raw.n <= PROTO_DATAGRAM_MAX)
                assert_int_equal(try_raw(&open), ERR_BAD_MESSAGE);
        }
    }
    drop(&open);
    judge(&d, &before);
}

/* ---- P-08: what is no count, size or time ---- */

static const struct {
    const char *verb, *key;
    bool in_tensor;
} integers[] = {
    {"hello", "version", false},        {"infer", "deadline_us", false},
    {"infer", "priority", false},       {"infer", "seed", false},
    {"infer", "offset", false},         {"infer", "buffer", true},
    {"infer", "offset", true},          {"infer", "shape", true},
    {"cancel", "target", false},        {"buffer.create", "size", false},
    {"buffer.register", "size", false}, {"buffer.release", "buffer", false},
};

enum { N_VALUES = 12 };

static void raw_value(unsigned which)
{
    static const int64_t below[] = {-1, -128, INT32_MIN, INT64_MIN};
    static const uint64_t above[] = {0, INT32_MAX + UINT64_C(1), UINT64_C(1) << 32,
                                     UINT64_C(1) << 63, UINT64_MAX};

    if (which < 4) {
        raw_int(&raw, below[which]);
    } else if (which < 7) {
        raw_byte(&raw, which == 4 ? 0xc0 : which == 5 ? 0xc3 : 0xcb); /* nil, true, 1.5 */
        if (which == 6)
            raw_big(&raw, UINT64_C(0x3ff8000000000000), 8);
    } else {
        raw_uint(&raw, above[which - 7]);
    }
}

static void raw_tensor(const char *key, unsigned which)
{
    raw_str(&raw, "input");
    raw_map(&raw, 4);
    raw_str(&raw, "dtype");
    raw_str(&raw, "float32");
    raw_str(&raw, "shape");
    raw_byte(&raw, 0x92);
    if (strcmp(key, "shape") == 0)
        raw_value(which);
    else
        raw_uint(&raw, 1);
    raw_uint(&raw, A_IN);
    raw_str(&raw, "buffer");
    if (strcmp(key, "buffer") == 0)
        raw_value(which);
    else
        raw_uint(&raw, 1);
    raw_str(&raw, "offset");
    if (strcmp(key, "offset") == 0)
        raw_value(which);
    else
        raw_uint(&raw, 0);
}

static void refuses_what_is_no_number(void **state)
{
    unsigned n = 0;
    bool open = false;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(integers); i++) {
        bool is_infer = strcmp(integers[i].verb, "infer") == 0;

        for (unsigned which = 0; which < N_VALUES; which++) {
            int error;

            raw_begin(&raw, integers[i].verb, (is_infer ? 2 : 0) + !integers[i].in_tensor);
            if (is_infer) {
                raw_str(&raw, "model");
                raw_str(&raw, MODEL_A);
                raw_tensor(integers[i].in_tensor ? integers[i].key : "", which);
            }
            if (!integers[i].in_tensor) {
                raw_str(&raw, integers[i].key);
                raw_value(which);
            }
            error = try_raw(&open);
            /* nil is the same as leaving an optional key out */
            if (which < 7 && error != ERR_BAD_MESSAGE && !(which == 4 && is_infer))
                fail_msg("%s.%s, value %u: error %d", integers[i].verb, integers[i].key, which,
                         error);
            if (error == ERR_NONE && strcmp(integers[i].verb, "cancel") != 0)
                fail_msg("%s.%s, value %u was accepted", integers[i].verb, integers[i].key, which);
            n++;
        }
    }
    /* The id itself: what is none is refused without one. */
    for (unsigned which = 0; which < 7; which++) {
        raw.n = 0;
        raw_map(&raw, 2);
        raw_str(&raw, "verb");
        raw_str(&raw, "ping");
        raw_str(&raw, "id");
        raw_value(which);
        assert_int_equal(try_raw(&open), ERR_BAD_MESSAGE);
        n++;
    }
    drop(&open);
    print_message("%u messages\n", n);
    judge(&d, &before);
}

/* P-10 */
static void refuses_what_is_no_name(void **state)
{
    static char long_name[60000];
    static const struct {
        const char *verb, *key;
    } fields[] = {{"hello", "name"},      {"infer", "model"},          {"model.list", "after"},
                  {"model.load", "name"}, {"model.describe", "model"}, {"stats", "model"},
                  {"log", "level"}};
    static const struct {
        const char *s;
        size_t n;
    } names[] = {
        {"", 0},
        {SECRET "\0x", 8},
        {"\xff" SECRET, 7},
        {"\xc3\x28", 2},
        {"\xed\xa0\x80", 3},
        {SECRET "\n", 7},
        {"\x1b]0;" SECRET "\x07", 11},
        {"\x7f", 1},
        {"\xc2\x85", 2},
        {"\xf4\x90\x80\x80", 4},
        {long_name, 65},
        {long_name, sizeof(long_name)},
    };
    bool open = false;

    (void)state;
    memset(long_name, 'a', sizeof(long_name));
    for (size_t i = 0; i < ARRAY_SIZE(fields); i++) {
        for (size_t k = 0; k < ARRAY_SIZE(names); k++) {
            int error;

            raw_begin(&raw, fields[i].verb, 1);
            raw_str(&raw, fields[i].key);
            raw_str_n(&raw, names[k].s, names[k].n);
            error = try_raw(&open);
            /* the empty one is the same as none, where none is needed */
            if (error != ERR_BAD_MESSAGE && !(k == 0 && error == ERR_NONE))
                fail_msg("%s.%s, name %zu: error %d", fields[i].verb, fields[i].key, k, error);
        }
    }
    drop(&open);
    judge(&d, &before);
}

/* P-11, P-12: products that wrap, ranks and dtypes that are none, rows beyond counting. */
static void refuses_shapes(void **state)
{
    static const struct {
        unsigned rank;
        int64_t dims[9];
    } rows[] = {
        {2, {INT64_C(1) << 62, A_IN}},
        {2, {INT64_MAX, A_IN}},
        {2, {1000000000, A_IN}},
        {2, {(INT64_C(1) << 56) + 1, A_IN}}, /* right modulo 2^64 */
        {3, {INT64_C(1) << 32, INT64_C(1) << 32, A_IN}},
        {8, {65536, 65536, 65536, 65536, 1, 1, 1, A_IN}},
        {9, {1, 1, 1, 1, 1, 1, 1, 1, A_IN}},
        {1, {A_IN}},
        {0, {0}},
        {2, {0, A_IN}},
        {2, {A_IN, 1}},
    };
    static const char *const dtypes[] = {"float32", "uint8", "float64", "", SECRET};
    bool open = false;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        for (size_t k = 0; k < ARRAY_SIZE(dtypes); k++) {
            double begin = now_s();
            int error;

            raw_begin(&raw, "infer", 2);
            raw_str(&raw, "model");
            raw_str(&raw, MODEL_A);
            raw_str(&raw, "input");
            raw_map(&raw, 3);
            raw_str(&raw, "dtype");
            raw_str(&raw, dtypes[k]);
            raw_str(&raw, "shape");
            raw_byte(&raw, 0x90 | rows[i].rank);
            for (unsigned j = 0; j < rows[i].rank; j++)
                raw_int(&raw, rows[i].dims[j]);
            raw_str(&raw, "bytes");
            raw_byte(&raw, 0xc5);
            raw_big(&raw, A_IN * 4, 2);
            memset(raw.bytes + raw.n, 0x41, A_IN * 4);
            raw.n += A_IN * 4;
            error = try_raw(&open);
            if (error != ERR_BAD_TENSOR && error != ERR_BAD_MESSAGE)
                fail_msg("row %zu, %s: error %d", i, dtypes[k], error);
            assert_true(now_s() - begin < 0.5);
        }
    }
    drop(&open);
    judge(&d, &before);
}

/* P-09: what belongs to another connection looks like what never was. */
static void hides_what_is_others(void **state)
{
    static struct client owner;
    char first[PROTO_TEXT_MAX + 1], second[PROTO_TEXT_MAX + 1];
    struct proto_request release = {.verb = VERB_BUFFER_RELEASE};
    struct proto_reply reply;
    uint32_t handle = 0;
    struct shm shm;

    (void)state;
    client_start(&owner, &d);
    for (int i = 0; i < 4; i++) {
        handle = client_buffer(&owner, 4096, &shm);
        shm_deinit(&shm);
    }
    client_start(&c, &d);
    for (int infer = 0; infer < 2; infer++) {
        for (int i = 0; i < 2; i++) {
            struct proto_request request = release;

            if (infer) {
                request = infer_a(x);
                request.infer.input.is_inline = false;
                request.infer.input.buffer = i ? 123456 : handle;
            } else {
                request.buffer_release.buffer = i ? 123456 : handle;
            }
            client_call(&c, &request, -1, &reply, NULL);
            assert_error(&reply, ERR_NOT_FOUND);
            snprintf(i ? second : first, sizeof(first), "%.*s", (int)reply.text.n, reply.text.s);
        }
        assert_string_equal(first, second);
    }
    client_close(&c);
    client_close(&owner);
    judge(&d, &before);
}

/* P-05: floods of the smallest and the largest, and of fair ones, while others are served. */
static void bears_floods(void **state)
{
    static struct client other;
    struct proto_request infer = infer_a(x);
    unsigned n_sent = 0, n_closed = 0, total = times_long(3000);
    struct proto_reply reply;
    double begin = now_s(), worst = 0;

    (void)state;
    memset(raw.bytes, 0xc1, PROTO_DATAGRAM_MAX);
    client_start(&other, &d);
    while (n_sent < total) {
        size_t size = n_sent % 5 == 4 ? PROTO_DATAGRAM_MAX : 1;
        double asked;

        client_start(&c, &d);
        for (int i = 0; i < 40; i++)
            n_sent += send(c.fd, raw.bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
        client_close(&c);
        n_closed++;
        asked = now_s();
        infer.id = 0;
        client_call(&other, &infer, -1, &reply, NULL);
        assert_is_a(&reply);
        if (now_s() - asked > worst)
            worst = now_s() - asked;
    }
    client_close(&other);
    print_message("%u bad datagrams on %u connections in %.2f s; another waited %.1f ms at most\n",
                  n_sent, n_closed, now_s() - begin, worst * 1e3);
    assert_true(worst < 1);
    judge(&d, &before);
}

/* P-16: noise on 50 connections, valid requests on one. */
static void answers_through_noise(void **state)
{
    enum { N = 50 };
    static struct client noisy[N];
    double until = now_s() + times_long(2);
    struct proto_request infer = infer_a(x);
    uint64_t seed = 20240229;
    struct proto_reply reply;
    unsigned n_noise = 0, n_right = 0;
    bool open[N] = {false};

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    client_start(&c, &d);
    while (now_s() < until) {
        for (int i = 0; i < N; i++) {
            size_t n;

            for (size_t k = 0; k < 300; k += 8) {
                seed = seed * 6364136223846793005ull + 1442695040888963407ull;
                memcpy(raw.bytes + k, &seed, 8);
            }
            n = 1 + (seed >> 33) % 300;
            if (n % 2)
                raw.bytes[0] = 0x80 | (raw.bytes[0] & 15);
            if (!open[i])
                client_open(&noisy[i], &d);
            open[i] = send(noisy[i].fd, raw.bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
            if (!open[i])
                client_close(&noisy[i]);
            n_noise++;
        }
        infer.id = 0;
        client_call(&c, &infer, -1, &reply, NULL);
        assert_is_a(&reply);
        n_right++;
    }
    for (int i = 0; i < N; i++) {
        if (open[i])
            client_close(&noisy[i]);
    }
    client_close(&c);
    print_message("%u messages of noise, %u of %u valid ones answered\n", n_noise, n_right,
                  n_right);
    judge(&d, &before);
}

/* P-17: what the table of verbs says, for each of its rows. */
static int asks_for_everything(void)
{
    static uint8_t bytes[PROTO_DATAGRAM_MAX];
    struct proto_reply reply;

    client_start(&c, &d);
    for (enum verb verb = 0; verb < VERB_COUNT; verb++) {
        int n = complete(verb, bytes, sizeof(bytes)), error;

        error = client_try(&c, bytes, (size_t)n, -1, &reply);
        if ((error == ERR_DENIED) != (proto_verb_right(verb) == RIGHT_ADMIN))
            return 1 + (int)verb;
    }
    client_close(&c);
    return 0;
}

static void denies_by_one_table(void **state)
{
    static const uid_t uids[] = {1234, 65534};

    (void)state;
    let_others_in(&d);
    for (size_t i = 0; i < ARRAY_SIZE(uids); i++) {
        if (!as_uid(uids[i], asks_for_everything))
            skip();
    }
    judge(&d, &before);
}

/* Many descriptors in one datagram: none is kept. */
static void takes_one_descriptor(void **state)
{
    static const unsigned counts[] = {2, 3, 16, 253};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(253 * sizeof(int))];
    } control;
    struct proto_reply reply;
    bool open = false;
    int fds[253];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        fds[i] = 2;
    raw_begin(&raw, "ping", 0);
    for (unsigned round = 0; round < times_long(100); round++) {
        unsigned n = counts[round % ARRAY_SIZE(counts)];
        struct iovec io = {raw.bytes, raw.n};
        struct msghdr message = {.msg_iov = &io,
                                 .msg_iovlen = 1,
                                 .msg_control = &control,
                                 .msg_controllen = CMSG_SPACE(n * sizeof(int))};

        memset(&control, 0, sizeof(control));
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(&control.head), fds, n * sizeof(int));
        reopen(&open);
        assert_int_equal(sendmsg(c.fd, &message, MSG_NOSIGNAL), raw.n);
        assert_true(client_recv(&c, &reply, NULL));
        assert_error(&reply, ERR_BAD_MESSAGE);
        if (round % 8 == 7)
            drop(&open);
    }
    drop(&open);
    judge(&d, &before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts_every_message),
        cmocka_unit_test(nests_and_extends),
        cmocka_unit_test(refuses_what_is_no_number),
        cmocka_unit_test(refuses_what_is_no_name),
        cmocka_unit_test(refuses_shapes),
        cmocka_unit_test(hides_what_is_others),
        cmocka_unit_test(bears_floods),
        cmocka_unit_test(answers_through_noise),
        cmocka_unit_test(denies_by_one_table),
        cmocka_unit_test(takes_one_descriptor),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
