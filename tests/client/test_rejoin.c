/*
 * test_rejoin.c - the library comes back to a server that went away: against scripts that end at
 * every point, each request has exactly one right answer
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "../proto/open_fds.h"
#include "client/fused.h"
#include "server.h"

#define LIMIT_MS 5000

#define N_LATE 100

static struct server server;
static unsigned before_fds;
static atomic_bool is_free;
static atomic_int tick_ms, ahead_ms;

/* In place of the C library's: each look at the clock takes tick_ms. */
int clock_gettime(clockid_t clock, struct timespec *t)
{
    int ahead = atomic_fetch_add(&ahead_ms, atomic_load(&tick_ms));
    int r = (int)syscall(SYS_clock_gettime, clock, t);

    t->tv_sec += ahead / 1000;
    t->tv_nsec += ahead % 1000 * 1000000L;
    if (t->tv_nsec >= 1000000000) {
        t->tv_sec++;
        t->tv_nsec -= 1000000000;
    }
    return r;
}

static struct fused *start(void (*script)(struct server *), int limit_ms)
{
    struct fused *f = NULL;
    int r;

    before_fds = open_fds();
    server_start(&server, script);
    r = fused_connect(server.path, "test", &f);
    if (r != 0)
        fail_msg("connect: %s", fused_code_name(r));
    fused_set_reconnect(f, limit_ms);
    return f;
}

static void stop(struct fused *f, unsigned n_reconnects)
{
    assert_int_equal(fused_reconnects(f), n_reconnects);
    fused_close(f);
    server_stop(&server);
    assert_int_equal(open_fds(), before_fds);
}

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Waits for the client's next connection. Its buffers are to be registered again, under other
 * numbers. */
static void server_again(struct server *s)
{
    for (unsigned k = 0; k < s->n_buffers; k++)
        shm_deinit(&s->buffers[k]);
    s->n_buffers = 0;
    close_fd(s->socket);
    s->socket = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(s->socket >= 0);
}

static struct fused_infer small_call(void *data)
{
    struct fused_infer call = FUSED_INFER_INIT;

    call.model = "m";
    call.input = fused_tensor_at(data, FUSED_UINT8, 2, (int64_t[]){1, 4});
    return call;
}

static void read_verb(struct server *s, enum verb verb)
{
    CHECK(server_read(s));
    CHECK(s->request.verb == verb);
}

/* ---- repeating ---- */

/* Four requests and no answer; then three of the buffers' registrations, and the four again. */
static void script_twice(struct server *s)
{
    uint64_t ids = 0, again = 0;

    server_hello(s);
    for (unsigned k = 0; k < 3; k++) {
        read_verb(s, VERB_BUFFER_REGISTER);
        server_answer(s);
    }
    for (unsigned k = 0; k < 4; k++) {
        read_verb(s, VERB_INFER);
        ids += s->request.id;
    }
    server_again(s);
    server_hello(s);
    s->n_buffers = 1; /* so that no buffer keeps its number */
    for (unsigned k = 0; k < 3; k++) {
        read_verb(s, VERB_BUFFER_REGISTER);
        server_answer(s);
    }
    for (unsigned k = 0; k < 4; k++) {
        read_verb(s, VERB_INFER);
        again += s->request.id;
        CHECK(s->request.infer.model.n == 1 && s->request.infer.seed == 5);
        CHECK(s->request.infer.has_deadline && s->request.infer.deadline_us <= 60000000);
        server_infer(s);
    }
    CHECK(ids == again);
    read_verb(s, VERB_PING);
    server_answer(s);
    CHECK(!server_read(s));
}

static void test_repeats(void **state)
{
    struct fused *f = start(script_twice, LIMIT_MS);
    uint8_t data[4] = {1, 2, 3, 4}, to[4] = {0};
    struct fused_buffer *b[3];
    struct fused_result result;

    (void)state;
    for (unsigned k = 0; k < 3; k++) {
        assert_int_equal(fused_buffer_create(f, 4096, &b[k]), 0);
        memset(fused_buffer_data(b[k]), (int)(10 * k), 4096);
    }
    for (uintptr_t k = 0; k < 4; k++) {
        struct fused_infer call = small_call(data);

        if (k > 0)
            call.input = fused_tensor_in(b[0], 64 * k, FUSED_UINT8, 2, (int64_t[]){1, 4});
        if (k > 1)
            call.output = fused_tensor_in(b[k - 1], 128, FUSED_UINT8, 2, (int64_t[]){1, 4});
        else if (k > 0)
            call.output = fused_tensor_at(to, FUSED_UINT8, 2, (int64_t[]){1, 4});
        call.seed = 5;
        call.deadline_us = 60000000;
        call.user = (void *)k;
        assert_int_equal(fused_submit(f, &call, NULL), 0);
    }
    for (unsigned n = 0; n < 4; n++) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        assert_int_equal(result.code, 0);
        assert_int_equal(result.repeats, 1);
        if (result.user == NULL)
            assert_memory_equal(result.output.data, "\2\3\4\5", 4);
    }
    assert_memory_equal(to, "\1\1\1\1", 4);
    for (unsigned k = 1; k < 3; k++)
        assert_memory_equal((uint8_t *)fused_buffer_data(b[k]) + 128, "\1\1\1\1", 4);
    assert_int_equal(fused_ping(f), 0);
    for (unsigned k = 0; k < 3; k++)
        assert_int_equal(fused_buffer_size(b[k]), 4096);
    fused_close(f);
    server_stop(&server);
    for (unsigned k = 0; k < 3; k++)
        fused_buffer_free(b[k]);
    assert_int_equal(open_fds(), before_fds);
}

/* The server says that it ends: what it still finishes counts, the rest is for the next one. */
static enum proto_error last_words;

static void script_last_words(struct server *s)
{
    struct proto_request first;

    server_hello(s);
    read_verb(s, VERB_INFER);
    first = s->request;
    first.infer.input.bytes = (const uint8_t *)"abc";
    read_verb(s, VERB_INFER);
    server_error(s, last_words, "the end");
    read_verb(s, VERB_PING); /* the third inference does not come here */
    server_answer(s);
    s->request = first;
    server_infer(s);
    server_again(s);
    server_hello(s);
    for (unsigned k = 0; k < 2; k++) {
        read_verb(s, VERB_INFER);
        server_infer(s);
    }
    CHECK(!server_read(s));
}

static void test_last_words(void **state)
{
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        uint8_t data[4] = {1, 2, 3, 4};
        struct fused_infer call = small_call(data);
        struct fused_result result;
        struct fused *f;
        uint64_t ids[3];

        last_words = k == 0 ? ERR_SHUTTING_DOWN : ERR_GPU_LOST;
        f = start(script_last_words, LIMIT_MS);
        assert_int_equal(fused_submit(f, &call, &ids[0]), 0);
        assert_int_equal(fused_submit(f, &call, &ids[1]), 0);
        assert_int_equal(fused_wait(f, ids[1], 50, &result), -EAGAIN);
        assert_int_equal(fused_submit(f, &call, &ids[2]), 0);
        assert_int_equal(fused_in_flight(f), 3);
        assert_int_equal(fused_ping(f), 0);
        for (unsigned n = 0; n < 3; n++) {
            assert_int_equal(fused_wait(f, ids[n], -1, &result), 0);
            assert_int_equal(result.code, 0);
            assert_memory_equal(result.output.data, n ? "\2\3\4\5" : "bcd\1", 4);
            assert_int_equal(result.repeats, n == 1);
        }
        stop(f, 1);
    }
}

/* It may be the request that servers end of. */
static void script_poison(struct server *s)
{
    for (unsigned k = 0; k < 4; k++) {
        if (k > 0)
            server_again(s);
        server_hello(s);
        read_verb(s, VERB_INFER);
    }
    server_again(s);
    server_friendly(s);
}

static void test_bound(void **state)
{
    struct fused *f = start(script_poison, LIMIT_MS);
    uint8_t data[4] = {1, 2, 3, 4};
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    assert_int_equal(fused_run(f, &call, &result), -EPIPE);
    assert_int_equal(result.repeats, 3);
    assert_string_equal(result.text, "the server went away before it answered");
    assert_int_equal(fused_run(f, &call, &result), 0);
    stop(f, 4);
}

static void script_asked(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_STATUS);
    server_again(s);
    server_hello(s);
    read_verb(s, VERB_STATUS);
    server_answer(s);
    read_verb(s, VERB_DRAIN);
    server_again(s);
    server_friendly(s);
}

/* What only asks is asked again, what changes the server is not. */
static void test_verbs(void **state)
{
    struct fused *f = start(script_asked, LIMIT_MS);

    (void)state;
    assert_int_equal(fused_status(f, NULL), 0);
    assert_int_equal(fused_drain(f, NULL), -EPIPE);
    assert_int_equal(fused_ping(f), 0);
    stop(f, 2);
}

/* ---- time ---- */

static void script_gone(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_INFER);
    CHECK(unlink(s->path) == 0);
}

static void test_limit(void **state)
{
    struct fused *f = start(script_gone, 300);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    int64_t start_ms = now_ms();
    uint64_t id;

    (void)state;
    call.deadline_us = 100000;
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    call.deadline_us = 0;
    while (fused_next(f, 10, &result) == -EAGAIN && now_ms() - start_ms < 50)
        ;
    /* Taken meanwhile, also a cancel and a time-out. */
    assert_int_equal(fused_submit(f, &call, &id), 0);
    assert_int_equal(fused_cancel(f, id), 0);
    assert_int_equal(fused_wait(f, id, 0, &result), 0);
    assert_int_equal(result.code, FUSED_CANCELLED);
    fused_set_timeout(f, 20);
    assert_int_equal(fused_run(f, &call, &result), -ETIMEDOUT);
    assert_int_equal(fused_wait(f, result.id, 0, &result), 0);
    assert_int_equal(result.code, FUSED_CANCELLED);
    assert_int_equal(fused_ping(f), -ETIMEDOUT);
    fused_set_timeout(f, -1);
    assert_int_equal(fused_submit(f, &call, &id), 0);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_int_equal(result.code, FUSED_DEADLINE);
    assert_in_range(now_ms() - start_ms, 95, 250);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_true(result.id == id);
    assert_int_equal(result.code, -EPIPE);
    assert_in_range(now_ms() - start_ms, 290, 2000);
    assert_int_equal(fused_ping(f), -EPIPE);
    assert_int_equal(fused_next(f, -1, &result), -EPIPE);
    stop(f, 0);
}

static void test_switched_off(void **state)
{
    struct fused *f = start(script_gone, -1);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    assert_int_equal(fused_next(f, 100, &result), -EAGAIN);
    fused_set_reconnect(f, 0);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_int_equal(result.code, -EPIPE);
    assert_int_equal(fused_submit(f, &call, NULL), -EPIPE);
    stop(f, 0);
}

/* Refuses for longer than the limit, and goes on. */
static void script_undecided(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_INFER);
    server_error(s, ERR_SHUTTING_DOWN, "the end");
    read_verb(s, VERB_PING);
    server_answer(s);
    read_verb(s, VERB_INFER);
    server_infer(s);
    CHECK(!server_read(s));
}

static void test_undecided(void **state)
{
    struct fused *f = start(script_undecided, 100);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    assert_int_equal(fused_run(f, &call, &result), FUSED_SHUTTING_DOWN);
    assert_int_equal(fused_ping(f), 0);
    assert_int_equal(fused_run(f, &call, &result), 0);
    stop(f, 0);
}

/* ---- not let in ---- */

static void script_unwilling(struct server *s)
{
    static const struct proto_reply full = {
        .verb = VERB_COUNT, .error = ERR_QUOTA, .text = {"a limit of your uid is reached", 30}};
    struct proto_reply nameless = full;

    nameless.has_id = true;

    server_hello(s);
    read_verb(s, VERB_INFER);
    server_again(s); /* closed at once */
    server_again(s);
    server_write(s, &full, -1);
    server_again(s);
    CHECK(server_read(s));
    server_error(s, ERR_SHUTTING_DOWN, "the end");
    server_again(s);
    CHECK(server_read(s));
    nameless.id = s->request.id;
    server_write(s, &nameless, -1);
    server_again(s);
    server_hello(s);
    read_verb(s, VERB_INFER);
    server_infer(s);
    CHECK(!server_read(s));
}

static void test_unwilling(void **state)
{
    struct fused *f = start(script_unwilling, LIMIT_MS);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    assert_int_equal(fused_run(f, &call, &result), 0);
    assert_int_equal(result.repeats, 1);
    stop(f, 1);
}

static void script_nonsense(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_INFER);
    server_again(s);
    CHECK(server_read(s));
    CHECK(wire_send(s->socket, "\xc1", 1, -1) == 0);
    while (server_read(s))
        ;
}

static void test_nonsense(void **state)
{
    struct fused *f = start(script_nonsense, LIMIT_MS);
    uint8_t data[4] = {0};
    struct fused_infer call = small_call(data);

    (void)state;
    assert_int_equal(fused_run(f, &call, NULL), -EPROTO);
    assert_int_equal(fused_ping(f), -EPROTO);
    stop(f, 0);
}

/* ---- buffers that do not come along ---- */

/* One is refused, one was freed before, one is freed while it is registered; each is known by its
 * size. */
static void script_buffers(struct server *s)
{
    server_hello(s);
    for (unsigned k = 0; k < 4; k++) {
        CHECK(server_read(s));
        server_answer(s);
    }
    read_verb(s, VERB_INFER);
    read_verb(s, VERB_INFER);
    read_verb(s, VERB_BUFFER_RELEASE);
    server_answer(s);
    read_verb(s, VERB_INFER);
    server_again(s);
    server_hello(s);
    for (unsigned k = 0; k < 3; k++) {
        read_verb(s, VERB_BUFFER_REGISTER);
        if (s->request.buffer_register.size_bytes == 8192)
            server_error(s, ERR_QUOTA, "a limit of your uid is reached");
        else
            server_answer(s);
    }
    for (unsigned k = 0; k < 3; k++) {
        read_verb(s, VERB_INFER);
        if (s->request.infer.output.buffer == 0)
            server_error(s, ERR_NOT_FOUND, "there is no such buffer");
        else
            server_infer(s);
    }
    while (server_read(s))
        server_answer(s);
}

static void test_lost_buffers(void **state)
{
    struct fused *f = start(script_buffers, LIMIT_MS);
    uint8_t data[4] = {1, 2, 3, 4};
    struct fused_infer call = small_call(data);
    struct fused_buffer *b[4];
    struct fused_result result;
    uint64_t ids[3];

    (void)state;
    for (unsigned k = 0; k < 4; k++)
        assert_int_equal(fused_buffer_create(f, 4096 * (k + 1), &b[k]), 0);
    for (unsigned k = 0; k < 3; k++) {
        call.output = fused_tensor_in(b[k], 0, FUSED_UINT8, 2, (int64_t[]){1, 4});
        if (k == 2)
            fused_buffer_free(b[3]);
        assert_int_equal(fused_submit(f, &call, &ids[k]), 0);
    }
    assert_int_equal(fused_wait(f, ids[0], -1, &result), 0);
    assert_int_equal(result.code, 0);
    assert_memory_equal(fused_buffer_data(b[0]), "\2\3\4\5", 4);
    assert_int_equal(fused_wait(f, ids[1], -1, &result), 0);
    assert_int_equal(result.code, FUSED_NOT_FOUND);
    assert_int_equal(fused_wait(f, ids[2], -1, &result), 0);
    assert_int_equal(result.code, 0);
    for (unsigned k = 0; k < 3; k++)
        fused_buffer_free(b[k]);
    assert_int_equal(fused_ping(f), 0);
    stop(f, 1);
    assert_int_equal(server.n_released, 1 + 2); /* the refused one is not there to be released */
}

static bool ends_twice;

static void script_slow_register(struct server *s)
{
    server_hello(s);
    for (unsigned k = 0; k < 2; k++) {
        read_verb(s, VERB_BUFFER_REGISTER);
        server_answer(s);
    }
    read_verb(s, VERB_INFER);
    server_again(s);
    server_hello(s);
    read_verb(s, VERB_BUFFER_REGISTER);
    server_answer(s);
    read_verb(s, VERB_BUFFER_REGISTER);
    usleep(200000); /* meanwhile the client frees both */
    if (ends_twice) {
        server_again(s); /* what it knew of them is nothing to the next one */
        server_hello(s);
    } else {
        server_answer(s);
    }
    CHECK(server_read(s));
    while (s->request.verb == VERB_BUFFER_RELEASE) {
        server_answer(s);
        CHECK(server_read(s));
    }
    CHECK(s->request.verb == VERB_INFER && s->request.infer.output.buffer == 0);
    server_error(s, ERR_NOT_FOUND, "there is no such buffer");
    while (server_read(s))
        server_answer(s);
}

static void test_freed_meanwhile(void **state)
{
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        struct fused *f;
        uint8_t data[4] = {1, 2, 3, 4};
        struct fused_infer call = small_call(data);
        struct fused_buffer *b[2];
        struct fused_result result;

        ends_twice = k == 1;
        f = start(script_slow_register, LIMIT_MS);
        for (unsigned n = 0; n < 2; n++)
            assert_int_equal(fused_buffer_create(f, 4096, &b[n]), 0);
        call.output = fused_tensor_in(b[0], 0, FUSED_UINT8, 2, (int64_t[]){1, 4});
        assert_int_equal(fused_submit(f, &call, NULL), 0);
        assert_int_equal(fused_next(f, 100, &result), -EAGAIN);
        fused_buffer_free(b[0]);
        fused_buffer_free(b[1]);
        assert_int_equal(fused_next(f, -1, &result), 0);
        assert_int_equal(result.code, FUSED_NOT_FOUND);
        assert_int_equal(fused_ping(f), 0);
        stop(f, 1);
        assert_int_equal(server.n_released, k == 0 ? 2 : 0);
    }
}

/* ---- whose answer is waited for ---- */

static void script_slow_hello(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_INFER);
    server_again(s);
    usleep(100000);
    server_hello(s);
    read_verb(s, VERB_INFER);
    read_verb(s, VERB_PING);
    server_answer(s);
    CHECK(!server_read(s));
}

/* What asks has its answer while the inference that was sent again runs on. */
static void test_asks_meanwhile(void **state)
{
    struct fused *f = start(script_slow_hello, LIMIT_MS);
    uint8_t data[4] = {1, 2, 3, 4};
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    assert_int_equal(fused_next(f, 30, &result), -EAGAIN);
    fused_set_timeout(f, 3000);
    assert_int_equal(fused_ping(f), 0);
    assert_int_equal(fused_in_flight(f), 1);
    stop(f, 1);
}

/* Nothing is answered until the client has given its buffer back. */
static void script_full(struct server *s)
{
    uint64_t ids[256];

    server_hello(s);
    read_verb(s, VERB_BUFFER_REGISTER);
    server_answer(s);
    for (unsigned k = 0; k < 256; k++) {
        read_verb(s, VERB_INFER);
        ids[k] = s->request.id;
    }
    CHECK(server_is_quiet(s, 100));
    while (!atomic_load(&is_free))
        usleep(1000);
    for (unsigned k = 0; k < 256; k++) {
        s->request.id = ids[k];
        server_error(s, ERR_BUSY, "not now");
    }
    while (server_read(s))
        server_answer(s);
}

static void test_free_waits_for_nothing(void **state)
{
    uint8_t data[4] = {1, 2, 3, 4};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    struct fused_buffer *b;
    struct fused *f;

    (void)state;
    atomic_store(&is_free, false);
    f = start(script_full, LIMIT_MS);
    assert_int_equal(fused_buffer_create(f, 4096, &b), 0);
    call.output = fused_tensor_at(data, FUSED_UINT8, 2, (int64_t[]){1, 4});
    for (unsigned k = 0; k < 256; k++)
        assert_int_equal(fused_submit(f, &call, NULL), 0);
    fused_set_timeout(f, 3000);
    fused_buffer_free(b);
    atomic_store(&is_free, true);
    for (unsigned k = 0; k < 256; k++) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        assert_int_equal(result.code, FUSED_BUSY);
    }
    assert_int_equal(fused_ping(f), 0);
    stop(f, 0);
    assert_int_equal(server.n_released, 1);
}

/* ---- deadlines ---- */

/* Each is sent again with what is left of its deadline, never with more. */
static void script_late(struct server *s)
{
    server_hello(s);
    for (unsigned k = 0; k < N_LATE; k++)
        read_verb(s, VERB_INFER);
    atomic_store(&tick_ms, 50);
    server_again(s);
    server_hello(s);
    while (server_read(s)) {
        CHECK(s->request.infer.has_deadline && s->request.infer.deadline_us > 0);
        CHECK(s->request.infer.deadline_us <= 3000000 + 1000);
        server_infer(s);
    }
}

static void test_deadline_stays(void **state)
{
    struct fused *f = start(script_late, -1);
    uint8_t data[4] = {1, 2, 3, 4}, to[4];
    struct fused_infer call = small_call(data);
    struct fused_result result;

    (void)state;
    call.deadline_us = 3000000;
    call.output = fused_tensor_at(to, FUSED_UINT8, 2, (int64_t[]){1, 4});
    for (unsigned k = 0; k < N_LATE; k++)
        assert_int_equal(fused_submit(f, &call, NULL), 0);
    for (unsigned k = 0; k < N_LATE; k++) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        if (result.code != FUSED_DEADLINE)
            assert_int_equal(result.code, 0);
    }
    atomic_store(&tick_ms, 0);
    stop(f, 1);
}

/* ---- event loops, fork ---- */

static void script_loop(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_INFER);
    for (unsigned k = 0; k < 3; k++) {
        server_again(s);
        server_hello(s);
        read_verb(s, VERB_INFER);
    }
    server_infer(s);
    server_again(s); /* nothing is in flight: it comes by itself */
    server_hello(s);
    CHECK(!server_read(s));
}

static void test_event_loop(void **state)
{
    struct fused *f = start(script_loop, LIMIT_MS);
    uint8_t data[4] = {1, 2, 3, 4};
    struct fused_infer call = small_call(data);
    struct pollfd p = {.fd = fused_fd(f), .events = POLLIN};
    struct fused_result result;
    unsigned n_turns = 0, n_results = 0;

    (void)state;
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    while (fused_reconnects(f) < 4) {
        assert_int_equal(poll(&p, 1, 3000), 1);
        assert_true(++n_turns < 200);
        if (fused_next(f, 0, &result) == 0) {
            assert_int_equal(result.code, 0);
            assert_int_equal(result.repeats, 3);
            n_results++;
        }
    }
    assert_int_equal(n_results, 1);
    assert_int_equal(fused_next(f, 0, &result), -ENOENT);
    assert_int_equal(poll(&p, 1, 0), 0);
    stop(f, 4);
}

static void script_fork(struct server *s)
{
    server_hello(s);
    read_verb(s, VERB_INFER);
    server_again(s);
    server_friendly(s);
}

/* The child of a client that comes back has nothing to do with it. */
static void test_fork(void **state)
{
    struct fused *f = start(script_fork, LIMIT_MS);
    uint8_t data[4] = {1, 2, 3, 4};
    struct fused_infer call = small_call(data);
    struct fused_result result;
    int status;
    pid_t pid;

    (void)state;
    assert_int_equal(fused_submit(f, &call, NULL), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        bool good;

        fused_set_reconnect(f, 0);
        good = fused_next(f, 1000, &result) == -EPERM && fused_ping(f) == -EPERM &&
               fused_run(f, &call, &result) == -EPERM && fused_in_flight(f) == 0 &&
               fused_reconnects(f) == 0;
        fused_close(f);
        _exit(good ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(fused_next(f, -1, &result), 0);
    assert_int_equal(result.code, 0);
    stop(f, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_last_words),
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_verbs),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_switched_off),
        cmocka_unit_test(test_undecided),
        cmocka_unit_test(test_unwilling),
        cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_lost_buffers),
        cmocka_unit_test(test_freed_meanwhile),
        cmocka_unit_test(test_asks_meanwhile),
        cmocka_unit_test(test_free_waits_for_nothing),
        cmocka_unit_test(test_deadline_stays),
        cmocka_unit_test(test_event_loop),
        cmocka_unit_test(test_fork),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
