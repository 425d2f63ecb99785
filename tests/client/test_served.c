/*
 * test_served.c - the library against a real daemon: many at once, every answer against its own
 * input
 *
 * What a row gives is known beforehand: each row of a pool runs alone once. After that any request
 * of any rows, from any client, in whatever batch, must give the same bits. Random choices come
 * from a seed that is printed.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "client/fused.h"
#include "tests/client/served.h"

#define MODEL    "a_5x37x96_g12" /* [N, 37] -> [1, 96, N, 1] */
#define K        37
#define C        96
#define POOL     16 /* rows whose results are known */
#define ROWS_MAX 9  /* of one request */
#define CLIENTS  20
#define REQUESTS 40 /* of one client */
#define SEED     20260801

static struct served served;
static float pool[POOL][K], known[POOL][C];

static struct fused *connect_or_fail(void)
{
    struct fused *f;
    int r = fused_connect(served.socket, "test", &f);

    if (r != 0)
        fail_msg("fused_connect: %s", fused_code_name(r));
    return f;
}

/* One row after the other, each in a request of its own, inline. */
static int learn(struct fused *f)
{
    for (int i = 0; i < POOL; i++) {
        struct fused_infer call = FUSED_INFER_INIT;

        call.model = MODEL;
        call.input = fused_tensor_at(pool[i], FUSED_FLOAT32, 2, (int64_t[]){1, K});
        call.output = fused_tensor_at(known[i], FUSED_FLOAT32, 4, (int64_t[]){1, C, 1, 1});
        if (fused_run(f, &call, NULL) != 0) {
            print_error("%s\n", fused_error_text(f));
            return -1;
        }
    }
    return 0;
}

static int setup(void **state)
{
    unsigned seed = SEED;
    struct fused *f;
    int r;

    (void)state;
    print_message("seed %u\n", seed);
    for (int i = 0; i < POOL; i++)
        for (int k = 0; k < K; k++)
            pool[i][k] = (float)rand_r(&seed) / (float)RAND_MAX - 0.5f;
    if (served_start(&served, "tests/golden") != 0 || fused_connect(served.socket, "test", &f) != 0)
        return -1;
    r = learn(f);
    fused_close(f);
    return r;
}

static int teardown(void **state)
{
    (void)state;
    return served_stop(&served);
}

/* A request of some rows of the pool, in a place of its own in two buffers. */
struct ask {
    struct fused_infer call;
    int rows, which[ROWS_MAX];
    const float *y;
};

static void ask_make(struct ask *ask, unsigned *seed, struct fused_buffer *x,
                     struct fused_buffer *y, int place)
{
    size_t x_offset = (size_t)place * ROWS_MAX * K * sizeof(float);
    size_t y_offset = (size_t)place * ROWS_MAX * C * sizeof(float);
    float *to = (float *)((char *)fused_buffer_data(x) + x_offset);

    ask->rows = 1 + rand_r(seed) % ROWS_MAX;
    for (int i = 0; i < ask->rows; i++) {
        ask->which[i] = rand_r(seed) % POOL;
        memcpy(to + (size_t)i * K, pool[ask->which[i]], sizeof(pool[0]));
    }
    ask->y = (const float *)((char *)fused_buffer_data(y) + y_offset);
    ask->call = (struct fused_infer)FUSED_INFER_INIT;
    ask->call.model = MODEL;
    ask->call.user = ask;
    ask->call.priority = rand_r(seed) % 3;
    ask->call.input = fused_tensor_in(x, x_offset, FUSED_FLOAT32, 2, (int64_t[]){ask->rows, K});
    ask->call.output =
        fused_tensor_in(y, y_offset, FUSED_FLOAT32, 4, (int64_t[]){1, C, ask->rows, 1});
}

/* How many numbers of the answer are not those of its own rows. */
static int ask_wrong(const struct ask *ask)
{
    int wrong = 0;

    for (int c = 0; c < C; c++)
        for (int i = 0; i < ask->rows; i++)
            wrong += memcmp(&ask->y[c * ask->rows + i], &known[ask->which[i]][c], 4) != 0;
    return wrong;
}

/* Submits all, takes all in whatever order they come. Errors as text, for threads cannot assert. */
static const char *run_client(struct fused *f, unsigned seed)
{
    static _Thread_local char text[400];
    struct ask *asks = calloc(REQUESTS, sizeof(*asks));
    struct fused_buffer *x = NULL, *y = NULL;
    struct fused_result result;
    uint64_t id;

    text[0] = 0;
    if (asks == NULL || fused_buffer_create(f, REQUESTS * ROWS_MAX * K * sizeof(float), &x) != 0 ||
        fused_buffer_create(f, REQUESTS * ROWS_MAX * C * sizeof(float), &y) != 0) {
        snprintf(text, sizeof(text), "buffers: %s", fused_error_text(f));
        goto out;
    }
    for (int i = 0; i < REQUESTS && text[0] == 0; i++) {
        ask_make(&asks[i], &seed, x, y, i);
        if (fused_submit(f, &asks[i].call, &id) != 0)
            snprintf(text, sizeof(text), "submit: %s", fused_error_text(f));
    }
    for (int i = 0; i < REQUESTS && text[0] == 0; i++) {
        const struct ask *ask;

        if (fused_next(f, 20000, &result) != 0) {
            snprintf(text, sizeof(text), "next: %s", fused_error_text(f));
            break;
        }
        ask = result.user;
        if (result.code != 0)
            snprintf(text, sizeof(text), "%s: %s", fused_code_name(result.code), result.text);
        else if (ask_wrong(ask) != 0)
            snprintf(text, sizeof(text), "%d of %d numbers are wrong, in a batch of %u rows",
                     ask_wrong(ask), ask->rows * C, result.batch_rows);
    }
    if (text[0] == 0 && fused_in_flight(f) != 0)
        snprintf(text, sizeof(text), "%u still in flight", fused_in_flight(f));
out:
    fused_buffer_free(x);
    fused_buffer_free(y);
    free(asks);
    return text[0] != 0 ? text : NULL;
}

static void test_one(void **state)
{
    struct fused *f = connect_or_fail();
    const char *wrong = run_client(f, SEED);

    (void)state;
    if (wrong != NULL)
        fail_msg("%s", wrong);
    fused_close(f);
}

struct client {
    pthread_t thread;
    unsigned seed;
    char wrong[400];
};

static void *client_main(void *argument)
{
    struct client *client = argument;
    struct fused *f;
    int r = fused_connect(served.socket, "one of twenty", &f);
    const char *wrong;

    if (r != 0) {
        snprintf(client->wrong, sizeof(client->wrong), "connect: %s", fused_code_name(r));
        return NULL;
    }
    wrong = run_client(f, client->seed);
    if (wrong != NULL)
        snprintf(client->wrong, sizeof(client->wrong), "%s", wrong);
    fused_close(f);
    return NULL;
}

static void test_twenty(void **state)
{
    static struct client clients[CLIENTS];

    (void)state;
    for (int i = 0; i < CLIENTS; i++) {
        clients[i].seed = SEED + (unsigned)i;
        assert_int_equal(pthread_create(&clients[i].thread, NULL, client_main, &clients[i]), 0);
    }
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(clients[i].thread, NULL);
    for (int i = 0; i < CLIENTS; i++)
        if (clients[i].wrong[0] != 0)
            fail_msg("client %d: %s", i, clients[i].wrong);
}

/* A memfd of the client's own works as a buffer that the daemon made does. */
static void test_registered(void **state)
{
    const size_t size = 64 << 10;
    struct fused *f = connect_or_fail();
    struct fused_buffer *x, *y;
    unsigned seed = SEED;
    struct ask ask;
    int fd[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        fd[i] = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(fd[i] >= 0);
        assert_int_equal(fallocate(fd[i], 0, 0, (off_t)size), 0);
        assert_int_equal(fcntl(fd[i], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    }
    assert_int_equal(fused_buffer_register(f, fd[0], size, &x), 0);
    assert_int_equal(fused_buffer_register(f, fd[1], size, &y), 0);
    close(fd[0]);
    close(fd[1]);
    ask_make(&ask, &seed, x, y, 0);
    if (fused_run(f, &ask.call, NULL) != 0)
        fail_msg("%s", fused_error_text(f));
    assert_int_equal(ask_wrong(&ask), 0);
    fused_buffer_free(x);
    fused_buffer_free(y);
    fused_close(f);
}

/* Each refusal has its name, a reason, and leaves the connection working. */
static void test_refusals(void **state)
{
    struct fused *f = connect_or_fail();
    struct fused_buffer *x, *y;
    unsigned seed = SEED;
    struct ask ask;

    (void)state;
    assert_int_equal(fused_buffer_create(f, 64 << 10, &x), 0);
    assert_int_equal(fused_buffer_create(f, 64 << 10, &y), 0);
    for (int row = 0; row < 8; row++) {
        static const int expected[] = {FUSED_NOT_FOUND,  FUSED_BAD_TENSOR, FUSED_BAD_TENSOR,
                                       FUSED_BAD_TENSOR, FUSED_BAD_TENSOR, FUSED_BAD_BUFFER,
                                       FUSED_BAD_TENSOR, FUSED_OK};
        int code;

        ask_make(&ask, &seed, x, y, 0);
        switch (row) {
        case 0:
            ask.call.model = "nonesuch";
            break;
        case 1:
            ask.call.input.shape[1] = K - 1;
            break;
        case 2:
            ask.call.input.dtype = FUSED_FLOAT16;
            break;
        case 3:
            ask.call.output.shape[2]++;
            break;
        case 4:
            ask.call.output.rank = 2;
            ask.call.output.shape[0] = ask.rows;
            ask.call.output.shape[1] = C;
            break;
        case 5: /* the result over the input */
            ask.call.output.buffer = x;
            break;
        case 6:
            ask.call.input.rank = 1;
            break;
        default:
            break;
        }
        code = fused_run(f, &ask.call, NULL);
        if (code != expected[row])
            fail_msg("row %d: %s (%s), not %s", row, fused_code_name(code), fused_error_text(f),
                     fused_code_name(expected[row]));
        assert_true(code == 0 || fused_error_text(f)[0] != 0);
    }
    assert_int_equal(ask_wrong(&ask), 0);
    fused_buffer_free(x);
    fused_buffer_free(y);
    fused_close(f);
}

/* In an event loop: answers are waited for on the descriptor only. */
static void test_event_loop(void **state)
{
    struct fused *f = connect_or_fail();
    struct fused_buffer *x, *y;
    struct ask asks[8];
    unsigned seed = SEED;
    int n_left = 8;

    (void)state;
    assert_int_equal(fused_buffer_create(f, 64 << 10, &x), 0);
    assert_int_equal(fused_buffer_create(f, 64 << 10, &y), 0);
    for (int i = 0; i < 8; i++) {
        uint64_t id;

        ask_make(&asks[i], &seed, x, y, i);
        assert_int_equal(fused_submit(f, &asks[i].call, &id), 0);
    }
    while (n_left > 0) {
        struct pollfd wait = {.fd = fused_fd(f), .events = POLLIN};
        struct fused_result result;

        assert_int_equal(poll(&wait, 1, 20000), 1);
        while (fused_next(f, 0, &result) == 0) {
            assert_int_equal(result.code, 0);
            assert_int_equal(ask_wrong(result.user), 0);
            n_left--;
        }
    }
    assert_int_equal(fused_in_flight(f), 0);
    fused_buffer_free(x);
    fused_buffer_free(y);
    fused_close(f);
}

/* The daemon ends with requests of this client in flight: each still has one answer. */
static void test_goes_away(void **state)
{
    struct served other;
    struct fused *f;
    struct fused_buffer *x, *y;
    struct fused_result result;
    struct ask asks[8];
    unsigned seed = SEED;
    int r, n = 0;

    (void)state;
    assert_int_equal(served_start(&other, "tests/golden"), 0);
    assert_int_equal(fused_connect(other.socket, "test", &f), 0);
    assert_int_equal(fused_buffer_create(f, 64 << 10, &x), 0);
    assert_int_equal(fused_buffer_create(f, 64 << 10, &y), 0);
    for (int i = 0; i < 8; i++) {
        uint64_t id;

        ask_make(&asks[i], &seed, x, y, i);
        assert_int_equal(fused_submit(f, &asks[i].call, &id), 0);
    }
    kill(other.pid, SIGKILL);
    while ((r = fused_next(f, 20000, &result)) == 0) {
        assert_true(result.code == 0 || result.code == -EPIPE);
        assert_true(result.code != 0 || ask_wrong(result.user) == 0);
        n++;
    }
    assert_int_equal(n, 8);
    assert_int_equal(r, -EPIPE);
    assert_int_equal(fused_ping(f), -EPIPE);
    fused_buffer_free(x);
    fused_close(f);
    fused_buffer_free(y);
    assert_int_equal(served_stop(&other), -1);
}

/* What is in a buffer outlives its connection, although the daemon takes its pages back. */
static void test_contents_after_close(void **state)
{
    enum { SIZE = 20000 };
    struct fused_buffer *made, *own;
    struct fused *f = connect_or_fail();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    uint8_t *data, *shared;

    (void)state;
    assert_int_equal(fallocate(fd, 0, 0, SIZE), 0);
    assert_int_equal(fused_buffer_create(f, SIZE, &made), 0);
    assert_int_equal(fused_buffer_register(f, fd, SIZE, &own), 0);
    data = fused_buffer_data(made);
    memset(data, 7, SIZE);
    memset(fused_buffer_data(own), 8, SIZE);
    fused_close(f);
    assert_ptr_equal(fused_buffer_data(made), data);
    f = connect_or_fail(); /* by the time of an answer the other connection is gone */
    assert_int_equal(fused_ping(f), 0);
    poll(NULL, 0, 100);
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(data[i], 7);
    shared = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(shared != MAP_FAILED);
    ((uint8_t *)fused_buffer_data(own))[3] = 9; /* still the caller's file */
    assert_int_equal(shared[3], 9);
    munmap(shared, SIZE);
    close(fd);
    fused_buffer_free(made);
    fused_buffer_free(own);
    fused_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one),
        cmocka_unit_test(test_twenty),
        cmocka_unit_test(test_registered),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_event_loop),
        cmocka_unit_test(test_goes_away),
        cmocka_unit_test(test_contents_after_close),
    };

    return cmocka_run_group_tests_name("library against a daemon", tests, setup, teardown);
}
