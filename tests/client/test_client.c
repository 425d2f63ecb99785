/*
 * test_client.c - the library against a server that keeps to the protocol, be it slow, silent or
 * gone
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "../proto/open_fds.h"
#include "connected.h"

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- names and connecting ---- */

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(fused_version(), FUSED_VERSION);
    assert_string_equal(fused_code_name(0), "OK");
    assert_string_equal(fused_code_name(FUSED_BAD_TENSOR), "BAD_TENSOR");
    assert_string_equal(fused_code_name(-EPIPE), "EPIPE");
    assert_string_equal(fused_code_name(12345), "UNKNOWN");
    assert_string_equal(fused_code_name(-12345), "UNKNOWN");
    assert_string_equal(fused_code_name(INT32_MIN), "UNKNOWN");
    assert_int_equal(fused_dtype_size(FUSED_BFLOAT16), 2);
    assert_int_equal(fused_dtype_size((enum fused_dtype)0), 0);
    assert_int_equal(fused_dtype_size((enum fused_dtype) - 1), 0);
    assert_string_equal(fused_error_text(NULL), "");
    fused_close(NULL);
    fused_buffer_free(NULL);
    assert_int_equal(fused_ping(NULL), -EINVAL);
    assert_int_equal(fused_fd(NULL), -EINVAL);
    fused_set_timeout(NULL, 1);
    fused_set_reconnect(NULL, 1);
    assert_int_equal(fused_reconnects(NULL), 0);
    assert_int_equal(fused_in_flight(NULL), 0);
    assert_null(fused_buffer_data(NULL));
    assert_int_equal(fused_buffer_size(NULL), 0);
    assert_true(fused_buffer_device(NULL) == 0);
}

static void test_connect_errors(void **state)
{
    struct fused *f = (struct fused *)1;
    char long_path[300];
    unsigned before = open_fds();

    (void)state;
    memset(long_path, 'a', sizeof long_path - 1);
    long_path[sizeof long_path - 1] = 0;
    assert_int_equal(fused_connect("/nonexistent/socket", "test", &f), -ENOENT);
    assert_string_equal(fused_error_text(NULL), "/nonexistent/socket: No such file or directory");
    assert_int_equal(fused_connect(long_path, "test", &f), -ENAMETOOLONG);
    assert_non_null(strstr(fused_error_text(NULL), "aaa: File name too long"));
    assert_int_equal(fused_connect("/nonexistent/socket", NULL, &f), -EINVAL);
    assert_non_null(strstr(fused_error_text(NULL), "the client's name"));
    assert_int_equal(fused_connect("/nonexistent/socket", "", &f), -EINVAL);
    assert_int_equal(fused_connect("/nonexistent/socket", "a\nb", &f), -EINVAL);
    assert_int_equal(fused_connect("/nonexistent/socket", long_path, &f), -EINVAL);
    assert_int_equal(setenv("FUSED_SOCKET", "/nonexistent/other", 1), 0);
    assert_int_equal(fused_connect(NULL, "test", &f), -ENOENT);
    unsetenv("FUSED_SOCKET");
    assert_ptr_equal(f, (struct fused *)1);
    assert_int_equal(open_fds(), before);
}

static void script_refuse_hello(struct server *s)
{
    CHECK(server_read(s));
    server_error(s, ERR_UNSUPPORTED, "versions 2 to 3 are spoken here");
}

static void script_close_at_once(struct server *s)
{
    (void)s;
}

/* As a server does that is full: it says why before it has read anything. */
static void script_turn_away(struct server *s)
{
    static const struct proto_reply reply = {
        .verb = VERB_COUNT, .error = ERR_QUOTA, .text = {"a limit of your uid is reached", 30}};

    server_write(s, &reply, -1);
}

static void script_garbage_hello(struct server *s)
{
    CHECK(server_read(s));
    CHECK(wire_send(s->socket, "\xc1", 1, -1) == 0);
}

static void script_silent(struct server *s)
{
    while (server_read(s))
        ;
}

/* Another thread's failures are its own. */
static void *connect_nowhere(void *data)
{
    struct fused *f;
    int r = fused_connect("/nonexistent/thread", "test", &f);

    (void)data;
    return r == -ENOENT && strstr(fused_error_text(NULL), "/nonexistent/thread: ") ? NULL : &server;
}

/* A server's reason stands alone, ours behind the path. */
static void expect_connect(void (*script)(struct server *), int want, const char *text)
{
    char path[sizeof server.path], wanted[256];
    pthread_t thread;
    void *wrong;

    struct fused *f = NULL;
    int64_t start_ms = now_ms();
    int r;

    server_start(&server, script);
    r = fused_connect(server.path, "test", &f);
    assert_int_equal(r, want);
    assert_null(f);
    assert_in_range(now_ms() - start_ms, 0, 7000);
    snprintf(path, sizeof path, "%s", server.path);
    server_stop(&server);
    snprintf(wanted, sizeof wanted, "%s%s%s", want < 0 ? path : "", want < 0 ? ": " : "", text);
    assert_int_equal(pthread_create(&thread, NULL, connect_nowhere, NULL), 0);
    assert_int_equal(pthread_join(thread, &wrong), 0);
    assert_null(wrong);
    assert_string_equal(fused_error_text(NULL), wanted);
}

static void test_hello(void **state)
{
    unsigned before = open_fds();
    struct fused *f;
    char *json;

    (void)state;
    expect_connect(script_refuse_hello, FUSED_UNSUPPORTED, "versions 2 to 3 are spoken here");
    expect_connect(script_close_at_once, -EPIPE, "the server closed the connection");
    expect_connect(script_turn_away, FUSED_QUOTA, "a limit of your uid is reached");
    expect_connect(
        script_garbage_hello, -EPROTO,
        "the server broke the protocol: the message is cut short or holds the unused code 0xc1");
    expect_connect(script_silent, -ETIMEDOUT, "no answer in time");
    server_start(&server, server_friendly);
    assert_int_equal(setenv("FUSED_SOCKET", server.path, 1), 0);
    assert_int_equal(fused_connect(NULL, "test", &f), 0);
    unsetenv("FUSED_SOCKET");
    assert_string_equal(fused_error_text(f), "");
    assert_int_equal(fused_hello(f, &json), 0);
    assert_string_equal(json, "{\"server\":\"fused test\",\"limits\":{\"unread_replies\":256}}");
    free(json);
    assert_int_equal(fused_hello(f, NULL), 0);
    stop(f);
    assert_int_equal(open_fds(), before);
}

/* ---- documents ---- */

static void write_page(struct doc *doc, const char *first, const char *second, bool more)
{
    doc_map(doc, 2);
    doc_key(doc, "models");
    doc_list(doc, second ? 2 : first ? 1 : 0);
    if (first) {
        doc_map(doc, 1);
        doc_key(doc, "name");
        doc_str(doc, first);
    }
    if (second) {
        doc_map(doc, 1);
        doc_key(doc, "name");
        doc_str(doc, second);
    }
    doc_key(doc, "more");
    doc_bool(doc, more);
}

static void write_page_1(struct doc *doc)
{
    write_page(doc, "a", "b", true);
}

static void write_page_2(struct doc *doc)
{
    write_page(doc, "c", NULL, false);
}

static void write_page_none(struct doc *doc)
{
    write_page(doc, NULL, NULL, false);
}

static void write_page_bad(struct doc *doc)
{
    write_page(doc, NULL, NULL, true);
}

static void script_documents(struct server *s)
{
    static const struct {
        enum verb verb;
        const char *name;
    } rows[] = {
        {VERB_PING, NULL},        {VERB_STATUS, NULL},        {VERB_STATS, ""},
        {VERB_STATS, "m"},        {VERB_MODEL_DESCRIBE, "m"}, {VERB_MODEL_LOAD, "m"},
        {VERB_MODEL_UNLOAD, "m"}, {VERB_MODEL_RELOAD, ""},    {VERB_MODEL_RELOAD, "m"},
        {VERB_DRAIN, NULL},       {VERB_LOG, "debug"},
    };

    server_hello(s);
    for (size_t k = 0; k < ARRAY_SIZE(rows); k++) {
        CHECK(server_read(s));
        CHECK(s->request.verb == rows[k].verb);
        if (rows[k].name) {
            const struct proto_str *name =
                s->request.verb == VERB_LOG ? &s->request.log.level : &s->request.model.name;

            CHECK(name->n == strlen(rows[k].name));
            CHECK(name->n == 0 || memcmp(name->s, rows[k].name, name->n) == 0);
        }
        server_document(s, NULL);
    }
    CHECK(server_read(s) && s->request.verb == VERB_MODEL_LIST);
    CHECK(s->request.model_list.after.n == 0);
    server_document(s, write_page_1);
    CHECK(server_read(s) && s->request.model_list.after.n == 1);
    CHECK(*s->request.model_list.after.s == 'b');
    server_document(s, write_page_2);
    CHECK(server_read(s));
    server_document(s, write_page_none);
    CHECK(server_read(s));
    server_document(s, write_page_bad);
    CHECK(server_read(s));
    server_error(s, ERR_DENIED, "you may not do that");
    CHECK(!server_read(s));
}

static void expect_json(int r, char **json, const char *want)
{
    assert_int_equal(r, 0);
    assert_string_equal(*json, want);
    free(take_ptr(*json));
}

static void test_documents(void **state)
{
    struct fused *f = start(script_documents);
    char *json = NULL;

    (void)state;
    assert_int_equal(fused_ping(f), 0);
    expect_json(fused_status(f, &json), &json, "{}");
    expect_json(fused_stats(f, NULL, &json), &json, "{}");
    expect_json(fused_stats(f, "m", &json), &json, "{}");
    expect_json(fused_describe(f, "m", &json), &json, "{}");
    expect_json(fused_load(f, "m", &json), &json, "{}");
    assert_int_equal(fused_unload(f, "m", NULL), 0);
    assert_int_equal(fused_reload(f, NULL, NULL), 0);
    assert_int_equal(fused_reload(f, "m", NULL), 0);
    expect_json(fused_drain(f, &json), &json, "{}");
    expect_json(fused_log_level(f, "debug", &json), &json, "{}");
    expect_json(fused_models(f, &json), &json,
                "[{\"name\":\"a\"},{\"name\":\"b\"}, {\"name\":\"c\"}]");
    expect_json(fused_models(f, &json), &json, "[]");
    assert_int_equal(fused_models(f, &json), -EPROTO);
    expect_text(f, "list of models");
    assert_int_equal(fused_load(f, "m", &json), FUSED_DENIED);
    assert_string_equal(fused_error_text(f), "you may not do that");
    /* Names that are none are not sent. */
    assert_int_equal(fused_load(f, NULL, &json), -EINVAL);
    assert_int_equal(fused_describe(f, "", &json), -EINVAL);
    assert_int_equal(fused_unload(f, "a\x1b", &json), -EINVAL);
    assert_int_equal(fused_log_level(f, NULL, &json), -EINVAL);
    assert_null(json);
    stop(f);
}

/* ---- buffers and inference ---- */

static void test_buffers(void **state)
{
    unsigned before = open_fds();
    struct fused *f = start(server_friendly);
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_buffer *in, *out;
    struct fused_result result;
    const int64_t shape[] = {10, 100};
    int fd;

    (void)state;
    assert_int_equal(fused_buffer_create(f, 5000, &in), 0);
    assert_int_equal(fused_buffer_size(in), 5000);
    fd = memfd_create("mine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(fallocate(fd, 0, 0, 8192), 0);
    assert_int_equal(fused_buffer_register(f, fd, 8192, &out), 0);
    close(fd);
    for (unsigned k = 0; k < 1000; k++)
        ((uint8_t *)fused_buffer_data(in))[1000 + k] = (uint8_t)k;
    call.model = "m";
    call.input = fused_tensor_in(in, 1000, FUSED_UINT8, 2, shape);
    call.output = fused_tensor_in(out, 4096, FUSED_UINT8, 2, shape);
    call.offset = 8;
    call.user = &call;
    call.deadline_us = 5;
    assert_int_equal(fused_run(f, &call, &result), 0);
    assert_int_equal(result.code, 0);
    assert_ptr_equal(result.user, &call);
    assert_ptr_equal(result.output.buffer, out);
    assert_int_equal(result.output.offset, 4096);
    assert_int_equal(result.output.rank, 2);
    assert_memory_equal(result.output.shape, shape, sizeof shape);
    assert_int_equal(result.offset, 12);
    assert_int_equal(result.queue_us, 11);
    assert_int_equal(result.run_us, 12);
    assert_int_equal(result.batch_rows, 13);
    assert_true(result.late);
    assert_false(result.has_constant);
    for (unsigned k = 0; k < 1000; k++)
        assert_int_equal(((uint8_t *)fused_buffer_data(out))[4096 + k], (uint8_t)(k + 1));
    assert_int_equal(((uint8_t *)fused_buffer_data(out))[4095], 0);
    fused_buffer_free(in);
    /* Closed first: the memory stays until it is freed. */
    fused_close(f);
    server_stop(&server);
    assert_int_equal(server.n_released, 1);
    ((uint8_t *)fused_buffer_data(out))[8191] = 1;
    fused_buffer_free(out);
    assert_int_equal(open_fds(), before);
}

static void test_refused_registration(void **state)
{
    struct fused *f = start(server_friendly);
    struct fused_buffer *b = NULL;
    int fd;

    (void)state;
    fd = memfd_create("mine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, 8192), 0);
    assert_int_equal(fused_buffer_register(f, fd, 8192, &b), -EINVAL);
    expect_text(f, "not allocated");
    assert_int_equal(fused_buffer_register(f, 0x7fff, 8192, &b), -EBADF);
    close(fd);
    assert_null(b);
    stop(f);
}

static void test_inline(void **state)
{
    struct fused *f = start(server_friendly);
    uint8_t in[4] = {1, 2, 3, 255}, out[6] = {9, 9, 9, 9, 9, 9};
    struct fused_infer call = small_call(in);
    struct fused_result result;

    (void)state;
    assert_int_equal(fused_run(f, &call, NULL), 0);
    assert_int_equal(fused_run(f, &call, &result), 0);
    assert_non_null(result.output.data);
    assert_null(result.output.buffer);
    assert_memory_equal(result.output.data, "\x02\x03\x04\x00", 4);
    call.output = fused_tensor_at(out, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
    assert_int_equal(fused_run(f, &call, &result), 0);
    assert_ptr_equal(result.output.data, out);
    assert_memory_equal(out, "\x02\x03\x04\x00\x09\x09", 6);
    /* A place too small, or for another tensor, is not written. */
    memset(out, 9, sizeof out);
    call.output = fused_tensor_at(out, FUSED_FLOAT16, 1, (int64_t[]){1});
    assert_int_equal(fused_run(f, &call, &result), -EINVAL);
    assert_int_equal(result.code, -EINVAL);
    expect_text(f, "4 bytes");
    call.output = fused_tensor_at(out, FUSED_FLOAT32, 1, (int64_t[]){1});
    assert_int_equal(fused_run(f, &call, &result), -EINVAL);
    call.output = fused_tensor_at(out, FUSED_FLOAT16, 2, (int64_t[]){1, 1});
    call.compact = 1;
    assert_int_equal(fused_run(f, &call, &result), -EINVAL);
    assert_memory_equal(out, "\x09\x09\x09\x09\x09\x09", 6);
    /* A compact result may have any shape that fits. */
    call.output = fused_tensor_at(out, FUSED_FLOAT16, 2, (int64_t[]){3, 1});
    assert_int_equal(fused_run(f, &call, &result), 0);
    assert_int_equal(result.output.dtype, FUSED_FLOAT32);
    assert_memory_equal(out, "\x02\x03\x04\x00\x09\x09", 6);
    stop(f);
}

static void test_largest_inline(void **state)
{
    struct fused *f = start(server_friendly);
    static uint8_t in[FUSED_INLINE_MAX + 1];
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_result result;

    (void)state;
    memset(in, 41, sizeof in);
    call.model = "m";
    call.input = fused_tensor_at(in, FUSED_UINT8, 1, (int64_t[]){FUSED_INLINE_MAX});
    assert_int_equal(fused_run(f, &call, &result), 0);
    for (unsigned k = 0; k < FUSED_INLINE_MAX; k++)
        assert_int_equal(((uint8_t *)result.output.data)[k], 42);
    call.input = fused_tensor_at(in, FUSED_UINT8, 1, (int64_t[]){FUSED_INLINE_MAX + 1});
    assert_int_equal(fused_run(f, &call, &result), -EINVAL);
    expect_text(f, "input: 32769 bytes");
    stop(f);
}

static void expect_refused(struct fused *f, const struct fused_infer *call, const char *want)
{
    uint64_t id = 77;

    assert_int_equal(fused_submit(f, call, &id), -EINVAL);
    assert_int_equal(id, 77);
    expect_text(f, want);
}

static void test_wrong_arguments(void **state)
{
    struct fused *f = start(server_friendly), *other;
    uint8_t data[64] = {0};
    struct fused_infer call = small_call(data);
    struct fused_buffer *b;
    struct fused_result result;
    static struct server second;

    (void)state;
    assert_int_equal(fused_buffer_create(f, 100, &b), 0);
    call.model = NULL;
    expect_refused(f, &call, "model");
    call.model = "";
    expect_refused(f, &call, "model");
    call = small_call(data);
    call.priority = 4;
    expect_refused(f, &call, "priority");
    call = small_call(data);
    call.input.dtype = (enum fused_dtype)7;
    expect_refused(f, &call, "input: unknown dtype");
    call = small_call(data);
    call.input.rank = 9;
    expect_refused(f, &call, "rank");
    call.input.rank = -1;
    expect_refused(f, &call, "rank");
    call = small_call(data);
    call.input.shape[0] = -1;
    expect_refused(f, &call, "negative");
    call.input.shape[0] = call.input.shape[1] = INT64_C(1) << 32;
    expect_refused(f, &call, "too large");
    call = small_call(NULL);
    expect_refused(f, &call, "neither");
    call = small_call(data);
    call.output = fused_tensor_in(b, 97, FUSED_FLOAT32, 1, (int64_t[]){1});
    expect_refused(f, &call, "output: 4 bytes at 97 do not fit the buffer's 100");
    call.output = fused_tensor_in(b, SIZE_MAX, FUSED_FLOAT32, 1, (int64_t[]){1});
    expect_refused(f, &call, "do not fit");
    call.output = fused_tensor_in(b, 101, FUSED_FLOAT32, 1, (int64_t[]){0});
    expect_refused(f, &call, "do not fit");
    call.output = fused_tensor_in(b, 96, FUSED_FLOAT32, 1, (int64_t[]){1});
    assert_int_equal(fused_run(f, &call, &result), 0);
    assert_int_equal(fused_in_flight(f), 0);

    server_start(&second, server_friendly);
    assert_int_equal(fused_connect(second.path, "test", &other), 0);
    expect_refused(other, &call, "another connection");
    fused_close(other);
    server_stop(&second);
    fused_buffer_free(b);
    stop(f);
}

/* ---- order ---- */

#define N_ORDER 100

static void script_reverse(struct server *s)
{
    static struct proto_request requests[N_ORDER];

    server_hello(s);
    for (unsigned k = 0; k < N_ORDER; k++) {
        CHECK(server_read(s));
        requests[k] = s->request;
        requests[k].infer.input.bytes = (const uint8_t *)"abc";
    }
    for (unsigned k = N_ORDER; k-- > 0;) {
        s->request = requests[k];
        if (k % 10 == 5)
            server_error(s, ERR_BAD_TENSOR, "five");
        else
            server_infer(s);
    }
    while (server_read(s))
        server_answer(s);
}

static void test_any_order(void **state)
{
    struct fused *f = start(script_reverse);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    uint64_t ids[N_ORDER];
    uint8_t out[4];

    (void)state;
    call.output = fused_tensor_at(out, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
    assert_int_equal(fused_next(f, 0, &result), -ENOENT);
    assert_int_equal(fused_wait(f, 12345, 0, &result), -ENOENT);
    assert_int_equal(fused_next(f, 0, NULL), -EINVAL);
    assert_int_equal(fused_wait(f, 12345, 0, NULL), -EINVAL);
    assert_int_equal(fused_buffer_create(f, 4096, NULL), -EINVAL);
    assert_int_equal(fused_buffer_register(f, -1, 4096, NULL), -EINVAL);
    assert_int_equal(fused_buffer_create_device(f, 4096, NULL), -EINVAL);
    for (uintptr_t k = 0; k < N_ORDER; k++) {
        call.user = (void *)k;
        assert_int_equal(fused_submit(f, &call, &ids[k]), 0);
    }
    assert_int_equal(fused_in_flight(f), N_ORDER);
    /* The first one submitted is answered last; the others are kept meanwhile. */
    assert_int_equal(fused_wait(f, ids[0], -1, &result), 0);
    assert_true(result.id == ids[0]);
    assert_int_equal(fused_in_flight(f), N_ORDER - 1);
    assert_int_equal(fused_wait(f, ids[0], -1, &result), -ENOENT);
    assert_int_equal(fused_ping(f), 0);
    assert_int_equal(fused_wait(f, ids[50], 0, &result), 0);
    assert_ptr_equal(result.user, (void *)50);
    for (uintptr_t k = N_ORDER; k-- > 1;) {
        if (k == 50)
            continue;
        assert_int_equal(fused_next(f, 0, &result), 0);
        assert_true(result.id == ids[k]);
        assert_ptr_equal(result.user, (void *)k);
        assert_int_equal(result.code, k % 10 == 5 ? FUSED_BAD_TENSOR : 0);
        if (result.code)
            assert_string_equal(result.text, "five");
        else
            assert_memory_equal(result.output.data, "bcd\1", 4);
    }
    assert_int_equal(fused_in_flight(f), 0);
    assert_int_equal(fused_next(f, -1, &result), -ENOENT);
    stop(f);
}

#define N_MANY 700

/* Nothing is answered before the client stops sending: it must stop at the limit. */
static void script_hoard(struct server *s)
{
    static struct proto_request requests[256];
    unsigned n = 0, n_all = 0;

    server_hello(s);
    while (n_all < N_MANY) {
        n = 0;
        while (n_all + n < N_MANY && !server_is_quiet(s, 100)) {
            CHECK(server_read(s));
            CHECK(n < 256);
            requests[n] = s->request;
            requests[n++].infer.input.bytes = (const uint8_t *)"abc";
        }
        for (unsigned k = 0; k < n; k++) {
            s->request = requests[k];
            server_infer(s);
        }
        n_all += n;
    }
    CHECK(!server_read(s));
}

static void test_unread_limit(void **state)
{
    struct fused *f = start(script_hoard);
    uint8_t data[4] = {0}, out[4];
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    call.output = fused_tensor_at(out, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
    for (unsigned k = 0; k < N_MANY; k++)
        assert_int_equal(fused_submit(f, &call, NULL), 0);
    assert_int_equal(fused_in_flight(f), N_MANY);
    for (unsigned k = 0; k < N_MANY; k++) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        assert_int_equal(result.code, 0);
    }
    assert_int_equal(fused_next(f, -1, &result), -ENOENT);
    stop(f);
}

/* Answers of the largest size: 31 of them are all that may wait. */
static void script_hoard_bytes(struct server *s)
{
    static uint8_t big[FUSED_INLINE_MAX];
    static struct proto_request requests[40];
    unsigned n_all = 0;

    server_hello(s);
    while (n_all < 70) {
        unsigned n = 0;

        while (n_all + n < 70 && !server_is_quiet(s, 100)) {
            CHECK(server_read(s));
            CHECK(n < 31);
            requests[n] = s->request;
            requests[n++].infer.input.bytes = big;
        }
        for (unsigned k = 0; k < n; k++) {
            s->request = requests[k];
            server_infer(s);
        }
        n_all += n;
    }
    CHECK(!server_read(s));
}

static void test_unread_bytes(void **state)
{
    static uint8_t big[FUSED_INLINE_MAX];
    struct fused *f = start(script_hoard_bytes);
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_result result;

    (void)state;
    call.model = "m";
    call.input = fused_tensor_at(big, FUSED_UINT8, 1, (int64_t[]){FUSED_INLINE_MAX});
    for (unsigned k = 0; k < 70; k++)
        assert_int_equal(fused_submit(f, &call, NULL), 0);
    for (unsigned k = 0; k < 70; k++) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        assert_int_equal(result.code, 0);
    }
    stop(f);
}

/* A loop waits on the descriptor; results that another call took in must show there. */
static void test_event_loop(void **state)
{
    struct fused *f = start(server_friendly);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    struct pollfd p = {.fd = fused_fd(f), .events = POLLIN};

    (void)state;
    assert_true(p.fd >= 0);
    assert_int_equal(fused_fd(f), p.fd);
    assert_int_equal(fcntl(p.fd, F_GETFD), FD_CLOEXEC);
    assert_int_equal(poll(&p, 1, 0), 0);
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    assert_int_equal(poll(&p, 1, 5000), 1);
    assert_int_equal(fused_next(f, 0, &result), 0);
    assert_int_equal(poll(&p, 1, 0), 0);
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    assert_int_equal(fused_ping(f), 0);
    for (unsigned k = 0; k < 2; k++) {
        assert_int_equal(poll(&p, 1, 5000), 1);
        assert_int_equal(fused_next(f, 0, &result), 0);
    }
    assert_int_equal(poll(&p, 1, 0), 0);
    stop(f);
}

/* ---- time-outs and cancel ---- */

static void script_late(struct server *s)
{
    struct proto_request infer, create;

    server_hello(s);
    CHECK(server_read(s) && s->request.verb == VERB_INFER);
    infer = s->request;
    infer.infer.input.bytes = (const uint8_t *)"abc";
    CHECK(server_read(s) && s->request.verb == VERB_CANCEL);
    CHECK(s->request.cancel.target == infer.id);
    server_document(s, NULL);
    CHECK(server_read(s) && s->request.verb == VERB_BUFFER_CREATE);
    create = s->request;
    CHECK(server_read(s) && s->request.verb == VERB_PING);
    CHECK(server_read(s) && s->request.verb == VERB_PING);
    /* What is late comes now; the pings stay without an answer. */
    s->request = infer;
    server_infer(s);
    s->request = create;
    server_buffer(s);
    while (server_read(s))
        server_answer(s);
}

static void test_timeouts(void **state)
{
    struct fused *f = start(script_late);
    uint8_t in[4] = {0}, out[4] = {9, 9, 9, 9};
    struct fused_infer call = small_call(in);
    struct fused_buffer *b = NULL;
    struct fused_result result;
    int64_t before = now_ms();

    (void)state;
    fused_set_timeout(f, 50);
    call.output = fused_tensor_at(out, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
    assert_int_equal(fused_run(f, &call, &result), -ETIMEDOUT);
    assert_in_range(now_ms() - before, 45, 5000);
    assert_true(result.id != 0);
    assert_int_equal(fused_in_flight(f), 1);
    assert_int_equal(fused_next(f, 10, &result), -EAGAIN);
    assert_int_equal(fused_next(f, -1, &result), -ETIMEDOUT);
    assert_int_equal(fused_wait(f, result.id, 0, &result), -EAGAIN);
    assert_int_equal(fused_wait(f, result.id, -1, &result), -ETIMEDOUT);
    assert_int_equal(fused_buffer_create(f, 4096, &b), -ETIMEDOUT);
    assert_null(b);
    assert_int_equal(fused_ping(f), -ETIMEDOUT);
    assert_int_equal(fused_ping(f), -ETIMEDOUT);
    /* The late result is there, and has not been written to memory that may be gone. */
    fused_set_timeout(f, 5000);
    assert_int_equal(fused_wait(f, result.id, -1, &result), 0);
    assert_int_equal(result.code, 0);
    assert_memory_equal(result.output.data, "bcd\1", 4);
    assert_memory_equal(out, "\x09\x09\x09\x09", 4);
    /* The buffer that came for nobody goes back with the next request. */
    assert_int_equal(fused_status(f, NULL), 0);
    stop(f);
    assert_int_equal(server.n_released, 1);
}

static void script_cancel(struct server *s)
{
    struct proto_request infer;

    server_hello(s);
    CHECK(server_read(s) && s->request.verb == VERB_INFER);
    infer = s->request;
    CHECK(server_read(s) && s->request.verb == VERB_CANCEL);
    CHECK(s->request.cancel.target == infer.id);
    server_document(s, server_yes);
    s->request = infer;
    server_error(s, ERR_CANCELLED, "the request was cancelled");
    CHECK(server_read(s) && s->request.verb == VERB_INFER);
    infer = s->request;
    CHECK(server_read(s) && s->request.verb == VERB_CANCEL);
    server_document(s, server_no);
    s->request = infer;
    s->request.infer.input.bytes = (const uint8_t *)"abc";
    server_infer(s);
    CHECK(!server_read(s));
}

static void test_cancel(void **state)
{
    struct fused *f = start(script_cancel);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    uint64_t id;

    (void)state;
    assert_int_equal(fused_cancel(f, 1), FUSED_NOT_FOUND);
    assert_int_equal(fused_submit(f, &call, &id), 0);
    assert_int_equal(fused_cancel(f, id), 0);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_int_equal(result.code, FUSED_CANCELLED);
    assert_int_equal(fused_cancel(f, id), FUSED_NOT_FOUND);
    assert_int_equal(fused_submit(f, &call, &id), 0);
    assert_int_equal(fused_cancel(f, id), FUSED_NOT_FOUND);
    assert_int_equal(fused_wait(f, id, -1, &result), 0);
    assert_int_equal(result.code, 0);
    stop(f);
}

/* ---- the end ---- */

static void script_die(struct server *s)
{
    server_hello(s);
    CHECK(server_read(s));
    server_infer(s);
    CHECK(server_read(s));
    CHECK(server_read(s));
}

static void test_server_dies(void **state)
{
    struct fused *f = start(script_die);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    struct fused_buffer *b;
    uint64_t ids[3];

    (void)state;
    for (unsigned k = 0; k < 3; k++)
        assert_int_equal(fused_submit(f, &call, &ids[k]), 0);
    server_stop(&server);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_true(result.id == ids[0]);
    assert_int_equal(result.code, 0);
    for (unsigned k = 1; k < 3; k++) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        assert_true(result.id == ids[k]);
        assert_int_equal(result.code, -EPIPE);
        assert_string_equal(result.text, "the server closed the connection");
    }
    assert_int_equal(fused_next(f, -1, &result), -EPIPE);
    assert_int_equal(fused_submit(f, &call, NULL), -EPIPE);
    assert_int_equal(fused_run(f, &call, &result), -EPIPE);
    assert_int_equal(fused_ping(f), -EPIPE);
    assert_int_equal(fused_buffer_create(f, 4096, &b), -EPIPE);
    assert_int_equal(fused_in_flight(f), 0);
    fused_close(f);
}

/* A send that fails finds the answers that were there before. */
static void test_send_to_dead(void **state)
{
    struct fused *f = start(script_die);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    struct fused_buffer *b;
    uint64_t id;

    (void)state;
    for (unsigned k = 0; k < 3; k++)
        assert_int_equal(fused_submit(f, &call, k ? NULL : &id), 0);
    server_stop(&server);
    assert_int_equal(fused_buffer_create(f, 4096, &b), -EPIPE);
    assert_int_equal(fused_in_flight(f), 3);
    assert_int_equal(fused_wait(f, id, 0, &result), 0);
    assert_int_equal(result.code, 0);
    assert_int_equal(fused_next(f, 0, &result), 0);
    assert_int_equal(result.code, -EPIPE);
    fused_close(f); /* with one result not taken */
}

static void test_fork(void **state)
{
    struct fused *f = start(server_friendly);
    struct fused_buffer *b;
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    int status;
    pid_t pid;

    (void)state;
    assert_int_equal(fused_buffer_create(f, 4096, &b), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct fused_buffer *another;
        bool good = fused_ping(f) == -EPERM && fused_run(f, &call, &result) == -EPERM &&
                    fused_submit(f, &call, NULL) == -EPERM && fused_next(f, 0, &result) == -EPERM &&
                    fused_fd(f) == -EPERM && fused_buffer_create(f, 4096, &another) == -EPERM &&
                    fused_in_flight(f) == 0 && fused_cancel(f, 1) == -EPERM &&
                    fused_models(f, NULL) == -EPERM;

        fused_buffer_free(b);
        fused_close(f);
        _exit(good ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(fused_run(f, &call, &result), 0);
    ((uint8_t *)fused_buffer_data(b))[0] = 1;
    fused_buffer_free(b);
    stop(f);
    assert_int_equal(server.n_released, 1);
}

/* A buffer freed while a request uses it: the result no longer points at it. */
static void script_hold_one(struct server *s)
{
    struct proto_request infer;

    server_hello(s);
    CHECK(server_read(s));
    server_answer(s);
    CHECK(server_read(s) && s->request.verb == VERB_INFER);
    infer = s->request;
    infer.infer.input.bytes = (const uint8_t *)"abc";
    CHECK(server_read(s) && s->request.verb == VERB_BUFFER_RELEASE);
    server_answer(s);
    s->request = infer;
    server_infer(s);
    CHECK(!server_read(s));
}

static void test_free_in_flight(void **state)
{
    struct fused *f = start(script_hold_one);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    struct fused_buffer *b;

    (void)state;
    assert_int_equal(fused_buffer_create(f, 4096, &b), 0);
    call.output = fused_tensor_in(b, 64, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    fused_buffer_free(b);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_int_equal(result.code, 0);
    assert_null(result.output.buffer);
    stop(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),           cmocka_unit_test(test_connect_errors),
        cmocka_unit_test(test_hello),           cmocka_unit_test(test_documents),
        cmocka_unit_test(test_buffers),         cmocka_unit_test(test_refused_registration),
        cmocka_unit_test(test_inline),          cmocka_unit_test(test_largest_inline),
        cmocka_unit_test(test_wrong_arguments), cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_unread_limit),    cmocka_unit_test(test_unread_bytes),
        cmocka_unit_test(test_event_loop),      cmocka_unit_test(test_timeouts),
        cmocka_unit_test(test_cancel),          cmocka_unit_test(test_server_dies),
        cmocka_unit_test(test_send_to_dead),    cmocka_unit_test(test_fork),
        cmocka_unit_test(test_free_in_flight),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
