/*
 * test_codec.c - messages survive the way out and back, and nothing else gets in
 */
#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "pack.h"
#include "proto/base.h"
#include "proto/codec.h"
#include "proto/json.h"
#include "proto/scan.h"
#include "samples.h"

#define SPACE (2 * PROTO_DATAGRAM_MAX)

/* Memory figures mean nothing where a sanitizer replaces the allocator. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HEAP_IS_KNOWN 0
#else
#define HEAP_IS_KNOWN 1
#endif

static struct codec *codec;

static int set_up(void **state)
{
    (void)state;
    codec = codec_new();
    return codec ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    codec = codec_free(codec);
    return 0;
}

static size_t heap_bytes(void)
{
    struct mallinfo2 m = mallinfo2();

    return m.uordblks + m.hblkhd;
}

/* Decodes from a block of exactly n bytes, so that a sanitizer sees a read past the end. */
static int decode_request(const uint8_t *bytes, size_t n, struct proto_request *ret,
                          const char **ret_reason, bool *ret_has_id, uint64_t *ret_id)
{
    uint8_t *exact = malloc(n ? n : 1);
    int r;

    assert_non_null(exact);
    memcpy(exact, bytes, n);
    *ret_reason = NULL;
    r = codec_decode_request(codec, exact, n, ret, ret_has_id, ret_id, ret_reason);
    free(exact);
    return r;
}

/* What the text decodes to: NULL, or the reason of the refusal. */
static const char *reason_of(const char *text)
{
    static uint8_t bytes[SPACE];
    struct proto_request request;
    const char *reason;
    uint64_t id;
    bool has_id;
    int r;

    r = decode_request(bytes, pack(text, bytes, sizeof bytes), &request, &reason, &has_id, &id);
    if (r == 0)
        return NULL;
    assert_int_equal(r, -EBADMSG);
    assert_non_null(reason);
    return reason;
}

static void expect_reason(const char *text, const char *want)
{
    const char *reason = reason_of(text);

    if (!reason)
        fail_msg("%.80s was taken; expected \"%s\"", text, want);
    if (!strstr(reason, want))
        fail_msg("%.80s was refused by \"%s\"; expected \"%s\"", text, reason, want);
}

static void expect_taken(const char *text)
{
    const char *reason = reason_of(text);

    if (reason)
        fail_msg("%.80s was refused by \"%s\"", text, reason);
}

static size_t encode_request(const struct proto_request *request, uint8_t *bytes, size_t size)
{
    int n = codec_encode_request(request, bytes, size);

    if (n < 0)
        fail_msg("%s does not encode: %d", proto_verb_name(request->verb), n);
    return (size_t)n;
}

static size_t encode_reply(const struct proto_reply *reply, uint8_t *bytes, size_t size)
{
    int n = codec_encode_reply(reply, bytes, size);

    if (n < 0)
        fail_msg("a reply to verb %d does not encode: %d", reply->verb, n);
    return (size_t)n;
}

static void test_requests_round_trip(void **state)
{
    static uint8_t bytes[SPACE], again[SPACE];
    bool seen[VERB_COUNT] = {false};

    (void)state;
    for (size_t k = 0; k < COUNT(sample_requests); k++) {
        const struct proto_request *sample = &sample_requests[k];
        size_t n = encode_request(sample, bytes, sizeof bytes);
        struct proto_request request;
        const char *reason;
        uint64_t id = 0;
        bool has_id;

        if (codec_decode_request(codec, bytes, n, &request, &has_id, &id, &reason) < 0)
            fail_msg("%s is refused: %s", proto_verb_name(sample->verb), reason);
        assert_true(has_id);
        assert_true(id == sample->id);
        assert_true(request.id == sample->id);
        assert_int_equal(request.verb, sample->verb);
        assert_int_equal(encode_request(&request, again, sizeof again), n);
        assert_memory_equal(again, bytes, n);
        for (size_t size = 0; size < n; size++)
            assert_int_equal(codec_encode_request(sample, again, size), -EMSGSIZE);
        seen[sample->verb] = true;
    }
    for (unsigned verb = 0; verb < VERB_COUNT; verb++)
        assert_true(seen[verb]);
}

static void test_infer_fields(void **state)
{
    static uint8_t bytes[SPACE];
    const struct proto_infer *want = &sample_requests[3].infer;
    size_t n = encode_request(&sample_requests[3], bytes, sizeof bytes);
    struct proto_request request;
    const char *reason;
    uint64_t id;
    bool has_id;

    (void)state;
    assert_int_equal(codec_decode_request(codec, bytes, n, &request, &has_id, &id, &reason), 0);
    assert_int_equal(request.infer.model.n, want->model.n);
    assert_memory_equal(request.infer.model.s, want->model.s, want->model.n);
    assert_int_equal(request.infer.input.dtype, PROTO_BFLOAT16);
    assert_int_equal(request.infer.input.rank, 8);
    assert_memory_equal(request.infer.input.shape, want->input.shape, sizeof want->input.shape);
    assert_true(request.infer.input.is_inline);
    assert_int_equal(request.infer.input.n_bytes, 256);
    assert_in_range((uintptr_t)request.infer.input.bytes, (uintptr_t)bytes, (uintptr_t)bytes + n);
    assert_true(request.infer.has_output);
    assert_true(request.infer.output.buffer == UINT32_MAX);
    assert_true(request.infer.output.offset == UINT64_MAX);
    assert_true(request.infer.has_deadline && request.infer.deadline_us == UINT64_MAX);
    assert_int_equal(request.infer.priority, 3);
    assert_true(request.infer.train && request.infer.seed == UINT64_MAX);
    assert_true(request.infer.offset == 4);
    assert_int_equal(request.infer.result, RESULT_COMPACT);

    n = encode_request(&sample_requests[2], bytes, sizeof bytes);
    assert_int_equal(codec_decode_request(codec, bytes, n, &request, &has_id, &id, &reason), 0);
    assert_false(request.infer.has_output || request.infer.has_deadline || request.infer.train);
    assert_int_equal(request.infer.priority, PROTO_PRIORITY_DEFAULT);
    assert_int_equal(request.infer.input.offset, 4096);
    assert_int_equal(request.infer.result, RESULT_FULL);
}

static void test_replies_round_trip(void **state)
{
    static uint8_t bytes[SPACE], again[SPACE];
    bool seen[VERB_COUNT] = {false};

    (void)state;
    for (size_t k = 0; k < COUNT(sample_replies); k++) {
        const struct proto_reply *sample = &sample_replies[k];
        size_t n = encode_reply(sample, bytes, sizeof bytes);
        struct proto_reply reply;
        const char *reason;

        if (codec_decode_reply(codec, bytes, n, &reply, &reason) < 0)
            fail_msg("reply %zu is refused: %s", k, reason);
        assert_int_equal(reply.has_id, sample->has_id);
        assert_true(reply.id == sample->id);
        assert_int_equal(reply.verb, sample->verb);
        assert_int_equal(reply.error, sample->error);
        assert_int_equal(encode_reply(&reply, again, sizeof again), n);
        assert_memory_equal(again, bytes, n);
        for (size_t size = 0; size < n; size++)
            assert_int_equal(codec_encode_reply(sample, again, size), -EMSGSIZE);
        if (reply.error == ERR_NONE)
            seen[reply.verb] = true;
        if (reply.verb == VERB_INFER && reply.infer.has_constant) {
            assert_true(reply.infer.constant == sample->infer.constant);
            assert_int_equal(reply.infer.n_full, sample->infer.n_full);
        }
    }
    for (unsigned verb = 0; verb < VERB_COUNT; verb++)
        assert_true(seen[verb]);
}

/* P-02, P-06: every sound message, cut at every byte, or with a byte too many. */
static void test_cut_and_padded(void **state)
{
    static uint8_t bytes[SPACE];
    struct proto_request request;
    struct proto_reply reply;
    const char *reason;
    uint64_t id;
    bool has_id;

    (void)state;
    for (size_t k = 0; k < COUNT(sample_requests); k++) {
        size_t n = encode_request(&sample_requests[k], bytes, sizeof bytes);

        bytes[n] = 0xc0;
        for (size_t cut = 0; cut <= n + 1; cut++)
            assert_int_equal(decode_request(bytes, cut, &request, &reason, &has_id, &id),
                             cut == n ? 0 : -EBADMSG);
    }
    for (size_t k = 0; k < COUNT(sample_replies); k++) {
        size_t n = encode_reply(&sample_replies[k], bytes, sizeof bytes);

        bytes[n] = 0xc0;
        for (size_t cut = 0; cut <= n + 1; cut++) {
            uint8_t *exact = malloc(cut + 1);

            assert_non_null(exact);
            memcpy(exact + 1, bytes, cut);
            assert_int_equal(codec_decode_reply(codec, exact + 1, cut, &reply, &reason),
                             cut == n ? 0 : -EBADMSG);
            free(exact);
        }
    }
}

static uint64_t random_state;

static uint32_t random_u32(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 32);
}

/* What still decodes after a few bytes were changed encodes to a message that says the same. */
static void test_mutated(void **state)
{
    static uint8_t bytes[SPACE], first[SPACE], second[SPACE];
    const uint64_t seed = 20240901;
    unsigned n_taken = 0;

    (void)state;
    random_state = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (unsigned round = 0; round < 40000; round++) {
        size_t n =
            encode_request(&sample_requests[round % COUNT(sample_requests)], bytes, sizeof bytes);
        struct proto_request request;
        const char *reason;
        uint64_t id;
        bool has_id;

        for (unsigned k = random_u32() % 4; k < 4; k++)
            bytes[random_u32() % n] = (uint8_t)random_u32();
        if (decode_request(bytes, n, &request, &reason, &has_id, &id) < 0) {
            assert_non_null(reason);
            continue;
        }
        n_taken++;
        assert_int_equal(codec_decode_request(codec, bytes, n, &request, &has_id, &id, &reason), 0);
        n = encode_request(&request, first, sizeof first);
        assert_int_equal(codec_decode_request(codec, first, n, &request, &has_id, &id, &reason), 0);
        assert_int_equal(encode_request(&request, second, sizeof second), n);
        assert_memory_equal(first, second, n);
    }
    assert_in_range(n_taken, 100, 39900);
}

/* P-01: counts that a header claims and the message does not hold. */
static void test_claims(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
    } rows[] = {
#define ROW(text) {text, sizeof text - 1}
        ROW("\xdd\xff\x00\x00\x00"),
        ROW("\xc6\xff\xff\xff\xff"),
        ROW("\xc9\xff\xff\xff\xff\x01"),
        ROW("\xdf\xff\xff\xff\xff"),
        ROW("\xdf\x80\x00\x00\x00\xc0"),
        ROW("\xdb\xff\xff\xff\xff"),
        ROW("\xdc\xff\xff"),
        ROW("\xd8\x01"),
        ROW("\xd4"),
        ROW("\xd4\x01"),
        ROW("\xd5\x01\x02"),
        ROW("\xd6\x01\x02\x03\x04"),
        ROW("\xd7\x01\x02"),
        ROW("\xc7\x01\x05"),
        ROW("\xcb\x00"),
        ROW("\xc1"),
        ROW("\x81\xc1\xc1"),
        ROW("\xde\x00\x01\xa2id"),
#undef ROW
    };
    size_t before = heap_bytes();

    (void)state;
    for (size_t k = 0; k < COUNT(rows); k++) {
        struct proto_request request;
        const char *reason;
        uint64_t id;
        bool has_id;
        int r = decode_request((const uint8_t *)rows[k].bytes, rows[k].n, &request, &reason,
                               &has_id, &id);

        if (r != -EBADMSG || has_id)
            fail_msg("row %zu gives %d", k, r);
    }
    if (HEAP_IS_KNOWN)
        assert_in_range(heap_bytes() - before + 1024, 0, 64 * 1024);
}

/* P-03: on a thread whose stack a recursion would overrun. */
static void *check_nests(void *failed)
{
    static const uint8_t heads[][2] = {{0x91, 1}, {0x81, 2}, {0xdc, 3}, {0xde, 3}};
    static const size_t depths[] = {8, 9, 33, 1000, 1000000};
    uint8_t *bytes = malloc(4000004);
    const char *reason;

    if (!bytes)
        return failed;
    for (size_t k = 0; k < COUNT(heads); k++) {
        for (size_t d = 0; d < COUNT(depths); d++) {
            size_t n = 0;
            int r;

            for (size_t level = 0; level < depths[d]; level++) {
                bytes[n++] = heads[k][0];
                if (heads[k][1] == 3) {
                    bytes[n++] = 0;
                    bytes[n++] = 1;
                }
                if (heads[k][0] == 0x81 || heads[k][0] == 0xde)
                    bytes[n++] = 0xc0; /* the key */
            }
            bytes[n++] = 0xd4; /* an ext in the middle of it all */
            bytes[n++] = 1;
            bytes[n++] = 2;
            r = codec_check(bytes, n, &reason);
            if (r != (depths[d] > PROTO_DEPTH_MAX ? -EBADMSG : 0))
                *(bool *)failed = true;
        }
    }
    free(bytes);
    return NULL;
}

static void test_depth(void **state)
{
    bool failed = false;
    pthread_attr_t attr;
    pthread_t thread;

    (void)state;
    assert_int_equal(pthread_attr_init(&attr), 0);
    assert_int_equal(pthread_attr_setstacksize(&attr, 256 * 1024), 0);
    assert_int_equal(pthread_create(&thread, &attr, check_nests, &failed), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_attr_destroy(&attr);
    assert_false(failed);
    expect_reason("{\"id\": 1, \"verb\": \"ping\", \"x\": [[[[[[[[1]]]]]]]]}", "8 deep");
    expect_taken("{\"id\": 1, \"verb\": \"ping\", \"x\": [[[[[[[1]]]]]]]}");
}

/* A message of the most elements allowed: what decoding takes is bounded, and given back. */
static void test_elements(void **state)
{
    static uint8_t bytes[SPACE];
    struct pack p = {bytes, 0, sizeof bytes};
    struct proto_request request;
    size_t before = heap_bytes(), n;
    const char *reason;
    uint64_t id;
    bool has_id;

    (void)state;
    n = pack("{\"id\": 1, \"verb\": \"ping\", \"x\": [1]}", bytes, sizeof bytes);
    for (unsigned extra = 0; extra < 2; extra++) {
        unsigned n_items = PROTO_ELEMENTS_MAX - 7 + extra;

        p.n = n - 4;
        pack_code(&p, 0xdc, n_items, 2);
        memset(bytes + p.n, 1, n_items);
        p.n += n_items;
        assert_int_equal(codec_decode_request(codec, bytes, p.n, &request, &has_id, &id, &reason),
                         extra ? -EBADMSG : 0);
    }
    if (HEAP_IS_KNOWN)
        assert_in_range(heap_bytes() - before + 1024, 0, 64 * 1024);
    assert_string_equal(reason, "more than 4096 elements");
}

static void test_datagram_size(void **state)
{
    static uint8_t bytes[SPACE];
    struct proto_request request;
    const char *reason;
    uint64_t id;
    bool has_id;

    (void)state;
    for (unsigned extra = 0; extra < 2; extra++) {
        struct pack p = {bytes, 0, sizeof bytes};
        size_t n = PROTO_DATAGRAM_MAX + extra;

        pack_value(&p, "#83# \"id\" 1");
        p.n = 1;
        pack_value(&p, "\"id\"");
        pack_value(&p, "1");
        pack_value(&p, "\"verb\"");
        pack_value(&p, "\"ping\"");
        pack_value(&p, "\"x\"");
        pack_code(&p, 0xc6, n - p.n - 5, 4);
        memset(bytes + p.n, 0, n - p.n);
        assert_int_equal(decode_request(bytes, n, &request, &reason, &has_id, &id),
                         extra ? -EBADMSG : 0);
    }
    assert_int_equal(decode_request(bytes, 0, &request, &reason, &has_id, &id), -EBADMSG);
}

/* Every key of every request: left out, twice, of a wrong type. */
static void test_keys(void **state)
{
    static const char tensor[] = "{\"dtype\": \"float32\", \"shape\": [1], \"buffer\": 1}";
    static const struct {
        const char *verb, *key, *value;
        bool is_required;
    } rows[] = {
        {"hello", "version", "1", true},
        {"hello", "name", "\"x\"", true},
        {"infer", "model", "\"m\"", true},
        {"infer", "input", tensor, true},
        {"infer", "output", tensor, false},
        {"infer", "deadline_us", "1", false},
        {"infer", "priority", "1", false},
        {"infer", "train", "true", false},
        {"infer", "seed", "1", false},
        {"infer", "offset", "4", false},
        {"infer", "result", "\"full\"", false},
        {"cancel", "target", "1", true},
        {"buffer.create", "size", "1", true},
        {"buffer.create", "kind", "\"host\"", false},
        {"buffer.register", "size", "1", true},
        {"buffer.release", "buffer", "1", true},
        {"model.list", "after", "\"m\"", false},
        {"model.describe", "model", "\"m\"", true},
        {"model.load", "model", "\"m\"", true},
        {"model.unload", "model", "\"m\"", true},
        {"model.reload", "model", "\"m\"", false},
        {"stats", "model", "\"m\"", false},
        {"log", "level", "\"info\"", true},
    };

    (void)state;
    for (size_t k = 0; k < COUNT(rows); k++) {
        char base[512] = "", text[2048], want[64];

        for (size_t j = 0; j < COUNT(rows); j++) {
            size_t n = strlen(base);

            if (j != k && rows[j].is_required && strcmp(rows[j].verb, rows[k].verb) == 0)
                snprintf(base + n, sizeof base - n, ", \"%s\": %s", rows[j].key, rows[j].value);
        }
#define MESSAGE(format, ...)                                                                      \
    (snprintf(text, sizeof text, "{\"id\": 1, \"verb\": \"%s\"%s" format "}", rows[k].verb, base, \
              ##__VA_ARGS__),                                                                     \
     text)
        expect_taken(MESSAGE(", \"%s\": %s", rows[k].key, rows[k].value));
        expect_taken(
            MESSAGE(", \"%s\": %s, \"unknown\": {\"a\": 1, \"a\": 2}", rows[k].key, rows[k].value));
        snprintf(want, sizeof want, "\"%s\" is missing", rows[k].key);
        if (rows[k].is_required) {
            expect_reason(MESSAGE(""), want);
            expect_reason(MESSAGE(", \"%s\": null", rows[k].key), want);
        } else {
            expect_taken(MESSAGE(""));
            expect_taken(MESSAGE(", \"%s\": null", rows[k].key));
        }
        snprintf(want, sizeof want, "\"%s\" comes twice", rows[k].key);
        expect_reason(MESSAGE(", \"%s\": %s, \"%s\": %s", rows[k].key, rows[k].value, rows[k].key,
                              rows[k].value),
                      want);
        snprintf(want, sizeof want, "\"%s\" must be", rows[k].key);
        expect_reason(MESSAGE(", \"%s\": [1]", rows[k].key), want);
        expect_reason(MESSAGE(", \"%s\": 1.5", rows[k].key), want);
        expect_reason(MESSAGE(", \"%s\": -1", rows[k].key), want);
        expect_reason(MESSAGE(", \"%s\": <00>", rows[k].key), want);
        if (*rows[k].value != '"')
            expect_reason(MESSAGE(", \"%s\": \"1\"", rows[k].key), want);
    }
#undef MESSAGE
}

static void test_message_shape(void **state)
{
    char text[4096] = "{\"id\": 1, \"verb\": \"ping\"";

    (void)state;
    expect_reason("[1]", "not a map");
    expect_reason("7", "not a map");
    expect_reason("null", "not a map");
    expect_reason("{}", "\"id\" is missing");
    expect_reason("{\"verb\": \"ping\"}", "\"id\" is missing");
    expect_reason("{\"id\": 1}", "\"verb\" is missing");
    expect_reason("{\"id\": \"1\", \"verb\": \"ping\"}", "\"id\" must be");
    expect_reason("{\"id\": 1, \"verb\": 1}", "\"verb\" must be");
    expect_reason("{\"id\": 1, \"verb\": \"pong\"}", "unknown verb");
    expect_reason("{\"id\": 1, \"verb\": \"\"}", "unknown verb");
    expect_reason("{\"id\": 1, \"verb\": \"pin\"}", "unknown verb");
    expect_reason("{\"id\": 1, \"verb\": \"ping\", 1: 2}", "a key is not a string");
    expect_reason("{\"id\": 1, \"verb\": \"ping\", \"x\": 1, \"y\": 1, \"x\": 2}",
                  "an unknown key comes twice");
    expect_reason("{\"\": 1, \"id\": 1, \"verb\": \"ping\", \"\": 2}",
                  "an unknown key comes twice");
    for (unsigned k = 0; k < 63; k++) {
        size_t n = strlen(text);

        snprintf(text + n, sizeof text - n, ", \"k%u\": %u}", k, k);
        if (k < 62)
            expect_taken(text);
        else
            expect_reason(text, "more than 64 keys");
        text[strlen(text) - 1] = 0;
    }
}

static void expect_id(const char *text, bool want_has, uint64_t want)
{
    static uint8_t bytes[SPACE];
    struct proto_request request;
    const char *reason;
    uint64_t id = 0;
    bool has_id;

    if (decode_request(bytes, pack(text, bytes, sizeof bytes), &request, &reason, &has_id, &id) !=
        -EBADMSG)
        fail_msg("%s was taken", text);
    if (has_id != want_has || id != want)
        fail_msg("%s: id %d %llu, expected %d %llu", text, has_id, (unsigned long long)id, want_has,
                 (unsigned long long)want);
}

/* The answer to a wrong message carries its id wherever one can be read. */
static void test_id_is_recovered(void **state)
{
    (void)state;
    expect_id("{\"id\": 5}", true, 5);
    expect_id("{\"verb\": \"pong\", \"id\": 18446744073709551615}", true, UINT64_MAX);
    expect_id("{1: 2, \"id\": 6, \"verb\": \"ping\"}", true, 6);
    expect_id("{\"verb\": \"ping\", \"verb\": \"ping\", \"id\": 7}", true, 7);
    expect_id("{\"id\": -1, \"verb\": \"ping\"}", false, 0);
    expect_id("{\"id\": \"7\", \"verb\": \"ping\"}", false, 0);
    expect_id("{\"id\": 1, \"id\": 1, \"verb\": \"ping\"}", false, 0);
    expect_id("[\"id\", 1]", false, 0);
    expect_id("{\"verb\": \"ping\"}", false, 0);
}

/* P-08: each integer at its edges. */
static void test_integers(void **state)
{
    static const struct {
        const char *format;
        uint64_t max;
    } rows[] = {
        {"{\"id\": %s, \"verb\": \"ping\"}", UINT64_MAX},
        {"{\"id\": 1, \"verb\": \"hello\", \"version\": %s, \"name\": \"x\"}", UINT32_MAX},
        {"{\"id\": 1, \"verb\": \"cancel\", \"target\": %s}", UINT64_MAX},
        {"{\"id\": 1, \"verb\": \"buffer.create\", \"size\": %s}", UINT64_MAX},
        {"{\"id\": 1, \"verb\": \"buffer.register\", \"size\": %s}", UINT64_MAX},
        {"{\"id\": 1, \"verb\": \"buffer.release\", \"buffer\": %s}", UINT32_MAX},
#define INFER(more)                                                              \
    "{\"id\": 1, \"verb\": \"infer\", \"model\": \"m\", \"input\": {\"dtype\": " \
    "\"float32\", \"shape\": [2], \"buffer\": 1}, " more "}"
        {INFER("\"deadline_us\": %s"), UINT64_MAX},
        {INFER("\"priority\": %s"), PROTO_PRIORITY_MAX},
        {INFER("\"seed\": %s"), UINT64_MAX},
        {INFER("\"offset\": %s"), UINT64_MAX},
#undef INFER
#define INPUT_OF(tensor)                                                         \
    "{\"id\": 1, \"verb\": \"infer\", \"model\": \"m\", \"input\": {\"dtype\": " \
    "\"float32\", " tensor "}}"
        {INPUT_OF("\"shape\": [2, %s], \"buffer\": 1"), INT64_MAX},
        {INPUT_OF("\"shape\": [2], \"buffer\": %s"), UINT32_MAX},
        {INPUT_OF("\"shape\": [2], \"buffer\": 1, \"offset\": %s"), UINT64_MAX},
#undef INPUT_OF
    };
    static const struct {
        const char *text;
        bool is_negative;
        uint64_t v;
    } values[] = {
        {"0", false, 0},
        {"3", false, 3},
        {"4", false, 4},
        {"2147483648", false, UINT64_C(1) << 31},
        {"4294967295", false, UINT32_MAX},
        {"4294967296", false, UINT64_C(1) << 32},
        {"9223372036854775807", false, INT64_MAX},
        {"9223372036854775808", false, UINT64_C(1) << 63},
        {"18446744073709551615", false, UINT64_MAX},
        {"-1", true, 0},
        {"-2147483648", true, 0},
        {"-9223372036854775808", true, 0},
        /* The same number in every width, signed and unsigned. */
        {"#cc02#", false, 2},
        {"#cd0002#", false, 2},
        {"#ce00000002#", false, 2},
        {"#cf0000000000000002#", false, 2},
        {"#d002#", false, 2},
        {"#d10002#", false, 2},
        {"#d200000002#", false, 2},
        {"#d30000000000000002#", false, 2},
        {"#d0ff#", true, 0},
        {"#d1ffff#", true, 0},
        {"#d2ffffffff#", true, 0},
        {"#ff#", true, 0},
    };

    (void)state;
    for (size_t k = 0; k < COUNT(rows); k++) {
        for (size_t j = 0; j < COUNT(values); j++) {
            char text[512];

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
            snprintf(text, sizeof text, rows[k].format, values[j].text);
#pragma GCC diagnostic pop
            if (!values[j].is_negative && values[j].v <= rows[k].max)
                expect_taken(text);
            else
                expect_reason(text, "must be");
        }
    }
}

/* P-10 */
static void test_names(void **state)
{
    static const char *const wrong[] = {
        "\"\"",          /* empty */
        "#a3 61 00 62#", /* NUL */
        "#a1 0a#",
        "#a1 7f#",
        "#a4 1b 5b 32 4a#", /* terminal escape */
        "#a2 c2 9b#",       /* C1: CSI */
        "#a1 80#",
        "#a1 ff#",
        "#a2 c0 80#",
        "#a2 c3 28#",
        "#a3 e0 80 80#",
        "#a3 ed a0 80#",
        "#a4 f0 80 80 80#",
        "#a4 f4 90 80 80#",
        "#a2 e2 82#",
        "#a4 f8 88 80 80#",
        "<61>",
        "1",
    };
    static const char *const right[] = {"\"a\"",      "\"a b\"", "#a2 c3 a9#", "#a4 f0 9f 98 80#",
                                        "#a2 c2 a0#", "\"../x\""};
    char text[512], name[PROTO_NAME_MAX + 2];

    (void)state;
    for (size_t k = 0; k < COUNT(wrong); k++) {
        snprintf(text, sizeof text, "{\"id\": 1, \"verb\": \"model.load\", \"model\": %s}",
                 wrong[k]);
        expect_reason(text, "\"model\" must be");
        snprintf(text, sizeof text,
                 "{\"id\": 1, \"verb\": \"hello\", \"version\": 1, \"name\": %s}", wrong[k]);
        expect_reason(text, "\"name\" must be");
    }
    for (size_t k = 0; k < COUNT(right); k++) {
        snprintf(text, sizeof text, "{\"id\": 1, \"verb\": \"model.load\", \"model\": %s}",
                 right[k]);
        expect_taken(text);
    }
    memset(name, 'a', sizeof name);
    name[PROTO_NAME_MAX + 1] = 0;
    snprintf(text, sizeof text, "{\"id\": 1, \"verb\": \"log\", \"level\": \"%s\"}", name);
    expect_reason(text, "\"level\" must be");
    name[PROTO_NAME_MAX] = 0;
    snprintf(text, sizeof text, "{\"id\": 1, \"verb\": \"log\", \"level\": \"%s\"}", name);
    expect_taken(text);
    expect_taken("{\"id\": 1, \"verb\": \"stats\", \"model\": \"\"}");
    expect_reason("{\"id\": 1, \"verb\": \"stats\", \"model\": #a100#}", "\"model\" must be");
}

static void test_tensors(void **state)
{
    static const struct {
        const char *tensor, *want;
    } rows[] = {
        {"{\"shape\": [1], \"buffer\": 1}", "\"dtype\" is missing"},
        {"{\"dtype\": \"float32\", \"buffer\": 1}", "\"shape\" is missing"},
        {"{\"dtype\": \"float64\", \"shape\": [1], \"buffer\": 1}", "\"dtype\" must be"},
        {"{\"dtype\": 1, \"shape\": [1], \"buffer\": 1}", "\"dtype\" must be"},
        {"{\"dtype\": \"float32\", \"shape\": 1, \"buffer\": 1}", "\"shape\" must be"},
        {"{\"dtype\": \"float32\", \"shape\": [1.0], \"buffer\": 1}", "\"shape\" must be"},
        {"{\"dtype\": \"float32\", \"shape\": [-1], \"buffer\": 1}", "\"shape\" must be"},
        {"{\"dtype\": \"float32\", \"shape\": [1,1,1,1,1,1,1,1,1], \"buffer\": 1}",
         "\"shape\" must be"},
        {"{\"dtype\": \"float32\", \"shape\": [1]}", "neither"},
        {"{\"dtype\": \"float32\", \"shape\": [1], \"buffer\": 1, \"bytes\": <00>}", "both"},
        {"{\"dtype\": \"float32\", \"shape\": [1], \"bytes\": \"0000\"}", "\"bytes\" must be"},
        {"{\"dtype\": \"float32\", \"shape\": [1], \"shape\": [1], \"buffer\": 1}",
         "\"shape\" comes twice"},
        {"{\"dtype\": \"float32\", \"shape\": [1], \"buffer\": 1, 7: 1}", "a key is not a string"},
        {"{\"dtype\": \"float32\", \"shape\": [1,1,1,1,1,1,1,1], \"buffer\": 1}", NULL},
        {"{\"dtype\": \"float32\", \"shape\": [], \"bytes\": <00000000>}", NULL},
        {"{\"dtype\": \"bfloat16\", \"shape\": [0], \"bytes\": <>, \"strides\": [1]}", NULL},
    };
    char text[512];

    (void)state;
    for (size_t k = 0; k < COUNT(rows); k++) {
        snprintf(text, sizeof text,
                 "{\"id\": 1, \"verb\": \"infer\", \"model\": \"m\", \"input\": %s}",
                 rows[k].tensor);
        if (rows[k].want)
            expect_reason(text, rows[k].want);
        else
            expect_taken(text);
    }
    expect_reason("{\"id\": 1, \"verb\": \"infer\", \"model\": \"m\", \"input\": {\"dtype\": "
                  "\"float32\", \"shape\": [1], \"buffer\": 1}, \"output\": {\"dtype\": "
                  "\"float32\", \"shape\": [1], \"bytes\": <00>}}",
                  "\"output\" must lie in a buffer");
}

static void test_inline_limit(void **state)
{
    static uint8_t bytes[SPACE];
    static uint8_t data[PROTO_INLINE_MAX + 1];
    struct proto_request request = {.id = 1,
                                    .verb = VERB_INFER,
                                    .infer = {S("m"),
                                              {.dtype = PROTO_UINT8,
                                               .rank = 1,
                                               .shape = {PROTO_INLINE_MAX},
                                               .is_inline = true,
                                               .bytes = data},
                                              .priority = 1}};
    struct proto_request got;
    const char *reason;
    uint64_t id;
    bool has_id;

    (void)state;
    for (unsigned extra = 0; extra < 2; extra++) {
        size_t n;

        request.infer.input.n_bytes = PROTO_INLINE_MAX + extra;
        n = encode_request(&request, bytes, sizeof bytes);
        assert_int_equal(decode_request(bytes, n, &got, &reason, &has_id, &id),
                         extra ? -EBADMSG : 0);
    }
    assert_string_equal(reason, "\"bytes\" must be at most 32768 bytes of bin");
}

/* P-12 */
static void test_tensor_size(void **state)
{
    static const struct {
        enum proto_dtype dtype;
        unsigned rank;
        int64_t shape[PROTO_RANK_MAX];
        int want;
        uint64_t bytes;
    } rows[] = {
        {PROTO_FLOAT32, 0, {0}, 0, 4},
        {PROTO_FLOAT32, 2, {1024, 8192}, 0, 1024 * 8192 * 4},
        {PROTO_BFLOAT16, 1, {3}, 0, 6},
        {PROTO_UINT8, 1, {INT64_MAX}, 0, INT64_MAX},
        {PROTO_FLOAT16, 1, {INT64_MAX}, -EOVERFLOW, 0},
        {PROTO_FLOAT32, 2, {INT64_C(1) << 32, INT64_C(1) << 32}, -EOVERFLOW, 0},
        {PROTO_FLOAT32, 3, {INT64_C(1) << 31, INT64_C(1) << 31, 1}, -EOVERFLOW, 0},
        {PROTO_FLOAT32, 2, {(INT64_C(1) << 62) + 1, 4}, -EOVERFLOW, 0},
        {PROTO_FLOAT32, 3, {INT64_MAX, INT64_MAX, 0}, 0, 0},
        {PROTO_FLOAT32, 1, {-1}, -EINVAL, 0},
        {PROTO_FLOAT32, 3, {0, INT64_MIN, 1}, -EINVAL, 0},
        {(enum proto_dtype)0, 1, {1}, -EINVAL, 0},
        {(enum proto_dtype)5, 1, {1}, -EINVAL, 0},
        {PROTO_FLOAT32, 65, {1}, -EINVAL, 0},
    };

    (void)state;
    for (size_t k = 0; k < COUNT(rows); k++) {
        uint64_t bytes = 77;
        int r = proto_tensor_size(rows[k].dtype, rows[k].rank, rows[k].shape, &bytes);

        if (r != rows[k].want || bytes != (r == 0 ? rows[k].bytes : 77))
            fail_msg("row %zu: %d and %llu bytes, expected %d and %llu", k, r,
                     (unsigned long long)bytes, rows[k].want, (unsigned long long)rows[k].bytes);
    }
}

static void expect_reply(const char *text, const char *want)
{
    static uint8_t bytes[SPACE];
    struct proto_reply reply;
    const char *reason = NULL;
    int r = codec_decode_reply(codec, bytes, pack(text, bytes, sizeof bytes), &reply, &reason);

    if (want ? r == 0 || !strstr(reason, want) : r != 0)
        fail_msg("%s gives %d, \"%s\"; expected \"%s\"", text, r, reason ? reason : "",
                 want ? want : "");
}

#define CONSTANT_REPLY(value)                                                             \
    "{\"id\": 1, \"verb\": \"infer\", \"result\": {\"output\": {\"dtype\": \"float32\", " \
    "\"shape\": [1], \"buffer\": 1}, \"offset\": 0, \"queue_us\": 0, \"run_us\": 0, "     \
    "\"batch_rows\": 1, \"late\": false, \"constant\": " value ", \"full\": 0}}"

static void test_wrong_replies(void **state)
{
    (void)state;
    expect_reply(CONSTANT_REPLY("#ca3f000000#"), NULL);
    expect_reply(CONSTANT_REPLY("#cb3fe0000000000000#"), NULL);
    expect_reply(CONSTANT_REPLY("1"), "\"constant\" must be");
    expect_reply(CONSTANT_REPLY("\"0.5\""), "\"constant\" must be");
    expect_reply("{\"id\": 1, \"verb\": \"ping\", \"result\": {}}", NULL);
    expect_reply("{\"id\": 1, \"verb\": \"ping\"}", "\"result\" is missing");
    expect_reply("{\"id\": 1, \"verb\": \"ping\", \"result\": []}", "\"result\" must be");
    expect_reply("{\"id\": 1, \"verb\": \"ping\", \"result\": {}, \"error\": {\"code\": 1, "
                 "\"name\": \"X\", \"text\": \"\"}}",
                 "both");
    expect_reply("{\"id\": null, \"verb\": \"ping\", \"result\": {}}", "\"id\" is missing");
    expect_reply("{\"id\": 1, \"verb\": null, \"result\": {}}", "\"verb\" is missing");
    expect_reply("{\"id\": 1, \"verb\": \"pong\", \"result\": {}}", "unknown verb");
    expect_reply("{\"id\": 1, \"verb\": \"buffer.create\", \"result\": {\"size\": 1}}",
                 "\"buffer\" is missing");
    expect_reply("{\"id\": 1, \"verb\": \"infer\", \"result\": {}}", "\"output\" is missing");
    expect_reply("{\"id\": 1, \"verb\": null, \"error\": {\"code\": 1, \"name\": \"X\"}}",
                 "\"text\" is missing");
    expect_reply("{\"id\": 1, \"verb\": null, \"error\": {\"code\": 0, \"name\": \"X\", \"text\": "
                 "\"\"}}",
                 "\"code\" must be");
    expect_reply("{\"id\": 1, \"verb\": null, \"error\": {\"code\": 1, \"name\": \"X\", \"text\": "
                 "#a11b#}}",
                 "\"text\" must be");
    expect_reply("{\"id\": 1, \"verb\": \"ping\", \"error\": {\"code\": 4294967295, \"name\": "
                 "\"LATER\", \"text\": \"\"}}",
                 NULL);
}

static void test_error_texts(void **state)
{
    static const char dirty[] = "a\x1b[2J\xff\n\xc3\xa9\0z";
    static char long_text[1000];
    struct proto_reply reply = {.has_id = true, .id = 1, .verb = VERB_PING, .error = ERR_QUOTA};
    uint8_t bytes[1024];
    const char *reason;
    size_t n;

    (void)state;
    reply.text = (struct proto_str){dirty, sizeof dirty - 1};
    n = encode_reply(&reply, bytes, sizeof bytes);
    assert_int_equal(codec_decode_reply(codec, bytes, n, &reply, &reason), 0);
    assert_int_equal(reply.text.n, sizeof dirty - 1);
    assert_memory_equal(reply.text.s, "a?[2J??\xc3\xa9?z", reply.text.n);

    for (size_t k = 0; k < sizeof long_text; k += 2)
        memcpy(long_text + k, "\xc3\xa9", 2);
    reply.text = (struct proto_str){long_text + 1, sizeof long_text - 1};
    n = encode_reply(&reply, bytes, sizeof bytes);
    assert_int_equal(codec_decode_reply(codec, bytes, n, &reply, &reason), 0);
    assert_int_equal(reply.text.n, PROTO_TEXT_MAX - 1); /* '?' and whole characters */
}

/* The encoder cuts texts; another server may not. */
static void test_long_error_text(void **state)
{
    char text[2000], filler[PROTO_TEXT_MAX + 2];

    (void)state;
    for (unsigned n = PROTO_TEXT_MAX; n <= PROTO_TEXT_MAX + 1; n++) {
        memset(filler, 'x', sizeof filler);
        filler[n] = 0;
        snprintf(text, sizeof text,
                 "{\"id\": 1, \"verb\": \"ping\", \"error\": {\"code\": 1, \"name\": \"X\", "
                 "\"text\": \"%s\"}}",
                 filler);
        expect_reply(text, n == PROTO_TEXT_MAX ? NULL : "\"text\" must be");
    }
}

static void test_unsound_records(void **state)
{
    uint8_t bytes[256];
    struct proto_request request = sample_requests[2];
    struct proto_reply reply = {.has_id = true, .verb = VERB_PING};

    (void)state;
    request.infer.input.rank = 9;
    assert_int_equal(codec_encode_request(&request, bytes, sizeof bytes), -EINVAL);
    request = (struct proto_request){.verb = VERB_COUNT};
    assert_int_equal(codec_encode_request(&request, bytes, sizeof bytes), -EINVAL);
    reply.error = (enum proto_error)99;
    assert_int_equal(codec_encode_reply(&reply, bytes, sizeof bytes), -EINVAL);
    /* A document that the other side's check would refuse. */
    reply.error = ERR_NONE;
    reply.document.bytes = (const uint8_t *)"\x91\x91\x91\x91\x91\x91\x91\x91\x90";
    reply.document.n_bytes = 9;
    assert_int_equal(codec_encode_reply(&reply, bytes, sizeof bytes), -EMSGSIZE);
    reply.document.bytes = (const uint8_t *)"\x92\x01";
    reply.document.n_bytes = 2;
    assert_int_equal(codec_encode_reply(&reply, bytes, sizeof bytes), -EMSGSIZE);
}

static void test_doc(void **state)
{
    uint8_t bytes[64];
    struct doc doc;

    (void)state;
    doc_init(&doc, bytes, sizeof bytes);
    doc_map(&doc, 2);
    doc_key(&doc, "a");
    doc_list(&doc, 3);
    doc_int(&doc, -5);
    doc_nil(&doc);
    doc_map(&doc, 0);
    doc_key(&doc, "b");
    doc_bool(&doc, true);
    assert_int_equal(doc_finish(&doc), 10);
    assert_memory_equal(bytes, "\x82\xa1\x61\x93\xfb\xc0\x80\xa1\x62\xc3", 10);
}

static void test_doc_counts(void **state)
{
    uint8_t bytes[64];
    struct doc doc;

    (void)state;
    doc_init(&doc, bytes, sizeof bytes);
    assert_int_equal(doc_finish(&doc), -EINVAL);
    doc_init(&doc, bytes, sizeof bytes);
    doc_map(&doc, 1);
    doc_key(&doc, "a");
    assert_int_equal(doc_finish(&doc), -EINVAL);
    /* more than any message may hold, and again after that */
    doc_init(&doc, bytes, sizeof bytes);
    doc_map(&doc, PROTO_ELEMENTS_MAX + 1);
    doc_map(&doc, PROTO_ELEMENTS_MAX + 1);
    assert_int_equal(doc_finish(&doc), -EMSGSIZE);
    doc_init(&doc, bytes, sizeof bytes);
    doc_list(&doc, PROTO_ELEMENTS_MAX + 1);
    doc_list(&doc, PROTO_ELEMENTS_MAX + 1);
    assert_int_equal(doc_finish(&doc), -EMSGSIZE);
    doc_init(&doc, bytes, sizeof bytes);
    doc_list(&doc, 1);
    doc_uint(&doc, 1);
    doc_uint(&doc, 2);
    assert_int_equal(doc_finish(&doc), -EINVAL);
    doc_init(&doc, bytes, sizeof bytes);
    for (unsigned k = 0; k < PROTO_DEPTH_MAX + 1; k++)
        doc_list(&doc, 1);
    assert_int_equal(doc_finish(&doc), -EMSGSIZE);
    for (size_t size = 0; size < 9; size++) {
        doc_init(&doc, bytes, size);
        doc_double(&doc, 1);
        doc_double(&doc, 2);
        assert_int_equal(doc_finish(&doc), -EMSGSIZE);
        assert_in_range(doc.used, 0, size);
    }
}

static void expect_json(const char *text, const char *want)
{
    uint8_t bytes[512];
    char *json = NULL;
    int r = codec_json(bytes, pack(text, bytes, sizeof bytes), &json);

    if (!want) {
        assert_int_equal(r, -EBADMSG);
        assert_null(json);
        return;
    }
    assert_int_equal(r, 0);
    assert_string_equal(json, want);
    free(json);
}

static void test_json(void **state)
{
    uint8_t bytes[16];
    char *json;

    (void)state;
    expect_json("{\"a\": [1, -2, {}, [], {\"b\": null}], \"c\": true, \"d\": false}",
                "{\"a\":[1,-2,{},[],{\"b\":null}],\"c\":true,\"d\":false}");
    expect_json("18446744073709551615", "18446744073709551615");
    expect_json("-9223372036854775808", "-9223372036854775808");
    expect_json("[0.1, 1.0, -0.0, 1e300, 1.5e-7, 0.30000000000000004]",
                "[0.1,1.0,-0.0,1e+300,1.5e-07,0.30000000000000004]");
    expect_json("[#ca3f000000#, #cb7ff8000000000000#, #cb7ff0000000000000#, #cbfff0000000000000#]",
                "[0.5,\"NaN\",\"Infinity\",\"-Infinity\"]");
    expect_json("[#a8 22 5c 0a 00 7f 80 c3 a9#]",
                "[\"\\\"\\\\\\u000a\\u0000\\u007f\\ufffd\xc3\xa9\"]");
    expect_json("[<00ff10>]", "[\"00ff10\"]");
    expect_json("{1: 2}", NULL);
    expect_json("[#d40102#]", NULL);
    expect_json("[[[[[[[[[1]]]]]]]]]", NULL);
    bytes[0] = 0x92;
    assert_int_equal(codec_json(bytes, 1, &json), -EBADMSG);
}

/* Whoever did not check before is refused all the same. */
static void test_json_unchecked(void **state)
{
    uint8_t bytes[64];
    size_t n = pack("{\"a\": [1, 2.5, {\"b\": <00>}]}", bytes, sizeof bytes);
    char *json;

    (void)state;
    for (size_t cut = 0; cut < n; cut++)
        assert_int_equal(json_text(bytes, cut, &json), -EBADMSG);
    assert_int_equal(json_text(bytes, n, &json), 0);
    assert_string_equal(json, "{\"a\":[1,2.5,{\"b\":\"00\"}]}");
    free(json);
    for (size_t depth = PROTO_DEPTH_MAX; depth <= PROTO_DEPTH_MAX + 1; depth++) {
        memset(bytes, 0x91, depth);
        bytes[depth] = 0xc0;
        if (json_text(bytes, depth + 1, &json) == 0)
            free(json);
        else
            assert_int_equal(depth, PROTO_DEPTH_MAX + 1);
    }
}

static void test_find(void **state)
{
    uint8_t bytes[256];
    size_t n = pack("{\"a\": 1, \"limits\": {\"x\": [5], \"unread\": 256}, "
                    "\"models\": [{\"name\": \"p\"}, {\"name\": \"q\"}]}",
                    bytes, sizeof bytes);
    const uint8_t *found;
    size_t n_found;

    (void)state;
    assert_int_equal(scan_find(bytes, n, "limits.unread", &found, &n_found), 0);
    assert_int_equal(n_found, 9);
    assert_memory_equal(found, "\xcf\0\0\0\0\0\0\1\0", 9);
    assert_int_equal(scan_find(bytes, n, "models.1.name", &found, &n_found), 0);
    assert_memory_equal(found + n_found - 1, "q", 1);
    assert_int_equal(scan_find(bytes, n, "limits.x.0", &found, &n_found), 0);
    assert_int_equal(n_found, 1);
    assert_int_equal(scan_find(bytes, n, "models.2.name", &found, &n_found), -ENOENT);
    assert_int_equal(scan_find(bytes, n, "models.-1", &found, &n_found), -ENOENT);
    assert_int_equal(scan_find(bytes, n, "models.x", &found, &n_found), -ENOENT);
    assert_int_equal(scan_find(bytes, n, "a.b", &found, &n_found), -ENOENT);
    assert_int_equal(scan_find(bytes, n, "nothing", &found, &n_found), -ENOENT);
    for (size_t cut = 0; cut < n; cut++)
        assert_true(scan_find(bytes, cut, "models.1.name", &found, &n_found) < 0);
    assert_int_equal(scan_find(bytes, n, "", &found, &n_found), 0);
    assert_int_equal(n_found, n);
}

static void test_lists(void **state)
{
    (void)state;
    assert_string_equal(proto_verb_name(VERB_MODEL_LIST), "model.list");
    assert_null(proto_verb_name(VERB_COUNT));
    assert_null(proto_verb_name((enum verb) - 1));
    assert_int_equal(proto_verb_right(VERB_DRAIN), RIGHT_ADMIN);
    assert_int_equal(proto_verb_right(VERB_PING), RIGHT_ANY);
    assert_int_equal(proto_verb_right(VERB_COUNT), RIGHT_ADMIN);
    assert_string_equal(proto_error_name(ERR_GPU_LOST), "GPU_LOST");
    assert_null(proto_error_name(ERR_NONE));
    assert_null(proto_error_name((enum proto_error)16));
    assert_non_null(proto_error_text(ERR_BAD_MESSAGE));
    assert_null(proto_error_text((enum proto_error) - 1));
    assert_int_equal(proto_dtype_parse("bfloat16", 8), PROTO_BFLOAT16);
    assert_int_equal(proto_dtype_parse("bfloat16", 7), 0);
    assert_int_equal(proto_dtype_parse("", 0), 0);
    assert_int_equal(proto_dtype_size(PROTO_UINT8), 1);
    assert_null(proto_dtype_name((enum proto_dtype)0));
    assert_null(codec_free(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests_round_trip),
        cmocka_unit_test(test_infer_fields),
        cmocka_unit_test(test_replies_round_trip),
        cmocka_unit_test(test_cut_and_padded),
        cmocka_unit_test(test_mutated),
        cmocka_unit_test(test_claims),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_datagram_size),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_message_shape),
        cmocka_unit_test(test_id_is_recovered),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_inline_limit),
        cmocka_unit_test(test_tensor_size),
        cmocka_unit_test(test_wrong_replies),
        cmocka_unit_test(test_error_texts),
        cmocka_unit_test(test_unsound_records),
        cmocka_unit_test(test_doc),
        cmocka_unit_test(test_doc_counts),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_json_unchecked),
        cmocka_unit_test(test_long_error_text),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_lists),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
