/*
 * test_protocol.c - bad datagrams, versions, verbs and rights, against a running daemon
 */
#include "daemon.h"

static struct daemon d;
static struct client c;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    daemon_start(&d, NULL, "hello_timeout_ms = 700; uid_connections = 60;");
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

static void answers_a_clean_client(void **state)
{
    struct proto_request ping = {.verb = VERB_PING};
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    client_call(&c, &ping, -1, &reply, NULL);
    assert_ok(&reply);
    client_close(&c);
    assert_healthy(&d);
}

/* P-01, P-03: headers that claim gigabytes, nesting. */
static void refuses_lying_headers(void **state)
{
    static const struct {
        uint8_t bytes[8];
        size_t n;
    } rows[] = {
        {{0xdd, 0xff, 0, 0, 0}, 5},
        {{0xc6, 0xff, 0xff, 0xff, 0xff}, 5},
        {{0xc9, 0xff, 0xff, 0xff, 0xff, 1}, 6},
        {{0xdf, 0xff, 0xff, 0xff, 0xff}, 5},
        {{0x80}, 1},
        {{0xc1}, 1},
        {{0x90}, 1},
        {{0xd4}, 1},
        {{0x81, 0xa2, 'i', 'd'}, 4},
    };
    static uint8_t nested[PROTO_DATAGRAM_MAX];
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        client_send_raw(&c, rows[i].bytes, rows[i].n, -1);
        assert_true(client_recv(&c, &reply, NULL));
        assert_false(reply.has_id);
        assert_error(&reply, ERR_BAD_MESSAGE);
    }
    memset(nested, 0x91, sizeof(nested));
    client_send_raw(&c, nested, sizeof(nested), -1);
    assert_true(client_recv(&c, &reply, NULL));
    assert_error(&reply, ERR_BAD_MESSAGE);
    client_close(&c);
    assert_healthy(&d);
}

/* P-02: every prefix of a valid message. */
static void refuses_every_prefix(void **state)
{
    struct proto_request request = infer_a(x);
    static uint8_t bytes[PROTO_DATAGRAM_MAX];
    struct proto_reply reply;
    int n;

    (void)state;
    request.id = 1;
    n = codec_encode_request(&request, bytes, sizeof(bytes));
    assert_true(n > 0);
    for (int i = 1; i < n; i += i < 300 ? 7 : 211) {
        client_start(&c, &d);
        client_send_raw(&c, bytes, (size_t)i, -1);
        assert_true(client_recv(&c, &reply, NULL));
        assert_error(&reply, ERR_BAD_MESSAGE);
        client_close(&c);
    }
    assert_healthy(&d);
}

/* P-06: nothing, the limit, one more. */
static void bounds_the_size(void **state)
{
    static uint8_t bytes[PROTO_DATAGRAM_MAX + 1];
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    memset(bytes, 0xc0, sizeof(bytes));
    for (size_t n = PROTO_DATAGRAM_MAX; n <= PROTO_DATAGRAM_MAX + 1; n++) {
        assert_int_equal(send(c.fd, bytes, n, MSG_NOSIGNAL), n);
        assert_true(client_recv(&c, &reply, NULL));
        assert_error(&reply, ERR_BAD_MESSAGE);
    }
    assert_int_equal(send(c.fd, bytes, 0, MSG_NOSIGNAL), 0);
    assert_true(client_is_closed(&c));
    client_close(&c);
    assert_healthy(&d);
}

static void closes_after_sixteen(void **state)
{
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    for (unsigned i = 0; i < PROTO_BAD_MESSAGES_MAX; i++) {
        client_send_raw(&c, "x", 1, -1);
        assert_true(client_recv(&c, &reply, NULL));
    }
    assert_true(client_is_closed(&c));
    client_close(&c);
    assert_healthy(&d);
}

/* P-15 */
static void wants_hello_once(void **state)
{
    static const uint32_t versions[] = {0, PROTO_VERSION_MAX + 1, 0x7fffffff, 0x80000000u};
    struct proto_request ping = {.verb = VERB_PING};
    struct proto_request hello = {.verb = VERB_HELLO,
                                  .hello = {.version = PROTO_VERSION_MAX, .name = str("t")}};
    struct proto_reply reply;

    (void)state;
    client_open(&c, &d);
    client_call(&c, &ping, -1, &reply, NULL);
    assert_error(&reply, ERR_BAD_MESSAGE);
    for (size_t i = 0; i < ARRAY_SIZE(versions); i++) {
        struct proto_request wrong = hello;

        wrong.hello.version = versions[i];
        client_call(&c, &wrong, -1, &reply, NULL);
        assert_error(&reply, ERR_UNSUPPORTED);
        assert_non_null(memmem(reply.text.s, reply.text.n, "1", 1));
    }
    client_hello(&c);
    client_call(&c, &hello, -1, &reply, NULL);
    assert_error(&reply, ERR_BAD_MESSAGE);
    ping.id = 0;
    client_call(&c, &ping, -1, &reply, NULL);
    assert_ok(&reply);
    client_close(&c);
    assert_healthy(&d);
}

static void knows_no_other_verb(void **state)
{
    /* {"id": 7, "verb": "shutdown"} */
    static const char bytes[] = "\x82\xa2id\x07\xa4verb\xa8shutdown";
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    client_send_raw(&c, bytes, sizeof(bytes) - 1, -1);
    assert_true(client_recv(&c, &reply, NULL));
    assert_error(&reply, ERR_UNSUPPORTED);
    assert_true(reply.has_id);
    assert_int_equal(reply.id, 7);
    client_close(&c);
    assert_healthy(&d);
}

/* connections that say nothing. */
static void closes_the_silent(void **state)
{
    static struct client silent[20];
    struct proto_request request;
    struct proto_reply reply;
    double begin = now_s();

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(silent); i++)
        client_open(&silent[i], &d);
    request = infer_a(x);
    client_start(&c, &d);
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    client_close(&c);
    for (size_t i = 0; i < ARRAY_SIZE(silent); i++) {
        assert_true(client_is_closed(&silent[i]));
        client_close(&silent[i]);
    }
    assert_true(now_s() - begin > 0.5);
    assert_healthy(&d);
}

/* S-14: descriptors that come with messages which take none, or are refused. */
static void closes_unwanted_descriptors(void **state)
{
    struct proto_request ping = {.verb = VERB_PING};
    struct proto_reply reply;
    int pipes[2];

    (void)state;
    assert_int_equal(pipe(pipes), 0);
    client_start(&c, &d);
    for (int i = 0; i < 500; i++) {
        ping.id = 0;
        client_call(&c, &ping, pipes[0], &reply, NULL);
        assert_ok(&reply);
    }
    for (int i = 0; i < 10; i++) {
        client_send_raw(&c, "x", 1, pipes[0]);
        assert_true(client_recv(&c, &reply, NULL));
    }
    assert_fds(&d, 1);
    client_close(&c);
    close(pipes[0]);
    close(pipes[1]);
    assert_healthy(&d);
}

/* a client that never reads. */
static void closes_who_does_not_read(void **state)
{
    struct proto_request ping = {.verb = VERB_PING};
    int n, sent = 0, r = 0;

    (void)state;
    client_start(&c, &d);
    ping.id = 9;
    n = codec_encode_request(&ping, c.tx, sizeof(c.tx));
    while (sent < 100000 && (r = wire_send(c.fd, c.tx, (size_t)n, -1)) == 0)
        sent++;
    assert_int_equal(r, -EPIPE);
    client_close(&c);
    assert_healthy(&d);
}

static void limits_connections(void **state)
{
    static struct client many[61];
    struct proto_reply reply;

    (void)state;
    sleep_ms(50);
    for (size_t i = 0; i < 60; i++)
        client_open(&many[i], &d);
    client_open(&many[60], &d);
    assert_true(client_recv(&many[60], &reply, NULL));
    assert_refused(&reply, ERR_QUOTA, "uid_connections is 60, 60 in use, 1 more asked for");
    assert_true(client_is_closed(&many[60]));
    for (size_t i = 0; i < ARRAY_SIZE(many); i++)
        client_close(&many[i]);
    sleep_ms(50);
    assert_healthy(&d);
}

static void wants_ids_to_differ(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;

    (void)state;
    /* The id of an answered request may come again. */
    client_start(&c, &d);
    request.id = 5;
    for (int i = 0; i < 3; i++) {
        client_call(&c, &request, -1, &reply, NULL);
        assert_is_a(&reply);
    }
    client_close(&c);
}

/* P-17: as another uid, in a child. Its exit status says which check failed. */
static int as_nobody_in_particular(void)
{
    static const enum verb verbs[] = {VERB_MODEL_LOAD, VERB_MODEL_UNLOAD, VERB_MODEL_RELOAD,
                                      VERB_DRAIN, VERB_LOG};
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    char *text = NULL;

    if (setresgid(1234, 1234, 1234) != 0 || setresuid(1234, 1234, 1234) != 0)
        return 1;
    client_start(&c, &d);
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
        struct proto_request admin = {.verb = verbs[i]};

        if (verbs[i] == VERB_LOG)
            admin.log.level = str("debug");
        else if (verbs[i] != VERB_DRAIN)
            admin.model.name = str(MODEL_A);
        client_call(&c, &admin, -1, &reply, NULL);
        if (reply.error != ERR_DENIED)
            return 2;
    }
    client_call(&c, &request, -1, &reply, NULL);
    if (reply.error != ERR_NONE)
        return 3;
    request.id = 0;
    request.infer.priority = PROTO_PRIORITY_MAX;
    client_call(&c, &request, -1, &reply, NULL);
    if (reply.error != ERR_DENIED)
        return 4;
    request = (struct proto_request){.verb = VERB_STATUS};
    client_call(&c, &request, -1, &reply, NULL);
    if (reply.error != ERR_NONE ||
        codec_json(reply.document.bytes, reply.document.n_bytes, &text) != 0)
        return 5;
    return strstr(text, "\"uids\"") || strstr(text, "\"admin\":true") ? 6 : 0;
}

static void denies_others(void **state)
{
    pid_t child;
    int status;

    (void)state;
    if (getuid() != 0)
        skip();
    assert_int_equal(chmod(d.dir, 0711), 0);
    assert_int_equal(chmod(d.socket, 0666), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(as_nobody_in_particular());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(chmod(d.dir, 0700), 0);
    assert_healthy(&d);
}

/* P-16, in small: noise from some, answers to others. */
static void survives_noise(void **state)
{
    static struct client noisy[8];
    struct proto_request request = infer_a(x);
    static uint8_t bytes[4096];
    struct proto_reply reply;
    uint64_t seed = 12345;

    (void)state;
    print_message("seed %llu\n", (unsigned long long)seed);
    client_start(&c, &d);
    for (int round = 0; round < 60; round++) {
        for (size_t i = 0; i < ARRAY_SIZE(noisy); i++) {
            size_t n;

            client_open(&noisy[i], &d);
            for (size_t k = 0; k < sizeof(bytes); k++) {
                seed = seed * 6364136223846793005ull + 1442695040888963407ull;
                bytes[k] = (uint8_t)(seed >> 56);
            }
            n = 1 + (seed >> 33) % sizeof(bytes);
            if (round % 2)
                bytes[0] = 0x80 | (bytes[0] & 15);
            client_send_raw(&noisy[i], bytes, n, -1);
        }
        request.id = 0;
        client_call(&c, &request, -1, &reply, NULL);
        assert_is_a(&reply);
        for (size_t i = 0; i < ARRAY_SIZE(noisy); i++)
            client_close(&noisy[i]);
    }
    client_close(&c);
    assert_healthy(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_a_clean_client),
        cmocka_unit_test(refuses_lying_headers),
        cmocka_unit_test(refuses_every_prefix),
        cmocka_unit_test(bounds_the_size),
        cmocka_unit_test(closes_after_sixteen),
        cmocka_unit_test(wants_hello_once),
        cmocka_unit_test(knows_no_other_verb),
        cmocka_unit_test(closes_the_silent),
        cmocka_unit_test(closes_unwanted_descriptors),
        cmocka_unit_test(closes_who_does_not_read),
        cmocka_unit_test(limits_connections),
        cmocka_unit_test(wants_ids_to_differ),
        cmocka_unit_test(denies_others),
        cmocka_unit_test(survives_noise),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
