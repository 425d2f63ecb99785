/*
 * test_restart.c - the daemon is killed and restarted under load, and nothing is lost
 *
 * Clients that come back (fused_set_reconnect()) keep requests in flight all the time: from buffers
 * that the daemon made, from memfds of their own, and inline. Meanwhile the daemon is ended in
 * every way and started again. Each request must have one answer, the bits that the row gave alone,
 * and the pointers into the buffers stay.
 *
 * PR_SET_PDEATHSIG goes by the thread that forks, so the daemon is started by the main thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "client/fused.h"
#include "tests/client/served.h"

#define MODEL   "a_5x37x96_g12" /* [N, 37] -> [1, 96, N, 1] */
#define K       37
#define C       96
#define ROWS    4
#define CLIENTS 3
#define DEPTH   6
#define KILLS   20
#define SEED    20260802

static struct served served;
static char models[64];
static float x[CLIENTS * DEPTH][ROWS][K], y[CLIENTS * DEPTH][C][ROWS];

static void fill(void)
{
    unsigned seed = SEED;

    print_message("seed %u\n", seed);
    for (int i = 0; i < CLIENTS * DEPTH; i++)
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < K; k++)
                x[i][r][k] = (float)rand_r(&seed) / (float)RAND_MAX - 0.5f;
}

static int setup(void **state)
{
    char command[512];
    struct fused *f;

    (void)state;
    fill();
    snprintf(models, sizeof(models), "/tmp/fused-models-XXXXXX");
    if (mkdtemp(models) == NULL)
        return -1;
    snprintf(command, sizeof(command), "cp tests/golden/" MODEL ".* '%s'", models);
    if (system(command) != 0 || served_start(&served, models) != 0 ||
        fused_connect(served.socket, "test", &f) != 0)
        return -1;
    for (int i = 0; i < CLIENTS * DEPTH; i++) {
        struct fused_infer call = FUSED_INFER_INIT;

        call.model = MODEL;
        call.input = fused_tensor_at(x[i], FUSED_FLOAT32, 2, (int64_t[]){ROWS, K});
        call.output = fused_tensor_at(y[i], FUSED_FLOAT32, 4, (int64_t[]){1, C, ROWS, 1});
        if (fused_run(f, &call, NULL) != 0)
            return -1;
    }
    fused_close(f);
    return 0;
}

static int teardown(void **state)
{
    char command[128];

    (void)state;
    snprintf(command, sizeof(command), "rm -rf '%s'", models);
    return served_stop(&served) != 0 || system(command) != 0;
}

struct client {
    pthread_t thread;
    int number;
    struct fused *f;
    struct fused_buffer *in, *out; /* DEPTH places each; client 2 sends inline */
    uint64_t n_sent, n_done, n_repeats;
    char wrong[400];
};

static atomic_bool finished, failed;
static atomic_ullong n_answers[CLIENTS];

/* A region of the kind that the client's number says. */
static int make(struct client *c, size_t size, struct fused_buffer **ret)
{
    int fd, r;

    if (c->number == 0)
        return fused_buffer_create(c->f, size, ret);
    fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    r = fd < 0 || fallocate(fd, 0, 0, (off_t)size) < 0 ? -errno : 0;
    if (r == 0)
        r = fused_buffer_register(c->f, fd, size, ret);
    if (fd >= 0)
        close(fd);
    return r;
}

static int send_place(struct client *c, uintptr_t place)
{
    struct fused_infer call = FUSED_INFER_INIT;
    uintptr_t i = (uintptr_t)c->number * DEPTH + place;
    const int64_t in[] = {ROWS, K}, out[] = {1, C, ROWS, 1};

    call.model = MODEL;
    call.user = (void *)place;
    call.input = fused_tensor_at(x[i], FUSED_FLOAT32, 2, in);
    if (c->in != NULL) {
        call.input = fused_tensor_in(c->in, place * sizeof(x[0]), FUSED_FLOAT32, 2, in);
        call.output = fused_tensor_in(c->out, place * sizeof(y[0]), FUSED_FLOAT32, 4, out);
        memset((char *)fused_buffer_data(c->out) + place * sizeof(y[0]), 0xa5, sizeof(y[0]));
    }
    c->n_sent++;
    return fused_submit(c->f, &call, NULL);
}

static const char *take_one(struct client *c)
{
    struct fused_result result;
    uintptr_t place;
    const void *got;

    if (fused_next(c->f, -1, &result) != 0)
        return "fused_next() failed";
    c->n_done++;
    c->n_repeats += result.repeats;
    atomic_fetch_add(&n_answers[c->number], 1);
    if (result.code != 0)
        return result.code == -EPIPE ? "EPIPE" : "an error as result";
    place = (uintptr_t)result.user;
    got = c->out != NULL ? (char *)fused_buffer_data(c->out) + place * sizeof(y[0])
                         : result.output.data;
    if (memcmp(got, y[(uintptr_t)c->number * DEPTH + place], sizeof(y[0])) != 0)
        return "other bits";
    if (!atomic_load(&finished) && send_place(c, place) != 0)
        return "fused_submit() failed";
    return NULL;
}

static void *run_client(void *data)
{
    struct client *c = data;
    const char *wrong = NULL;

    if (c->number < 2) {
        if (make(c, DEPTH * sizeof(x[0]), &c->in) != 0 ||
            make(c, DEPTH * sizeof(y[0]), &c->out) != 0)
            wrong = "no buffers";
        else
            memcpy(fused_buffer_data(c->in), x[(size_t)c->number * DEPTH], DEPTH * sizeof(x[0]));
    }
    for (uintptr_t place = 0; place < DEPTH && wrong == NULL; place++)
        if (send_place(c, place) != 0)
            wrong = "fused_submit() failed";
    while (wrong == NULL && fused_in_flight(c->f) > 0)
        wrong = take_one(c);
    if (wrong != NULL) {
        snprintf(c->wrong, sizeof(c->wrong), "%s (%s)", wrong, fused_error_text(c->f));
        atomic_store(&failed, true);
    }
    return NULL;
}

/* Until each client has so many more. */
static void wait_for_answers(unsigned long long n)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    unsigned long long until[CLIENTS];

    for (int c = 0; c < CLIENTS; c++)
        until[c] = atomic_load(&n_answers[c]) + n;
    for (int c = 0; c < CLIENTS; c++)
        for (int i = 0; i < 10000 && !atomic_load(&failed) && atomic_load(&n_answers[c]) < until[c];
             i++)
            nanosleep(&pause, NULL);
}

/* Ends the daemon KILLS times with that signal while all clients have requests in flight. */
static void restart_under_load(int signal)
{
    struct client clients[CLIENTS] = {0};
    uint64_t n_sent = 0, n_done = 0, n_repeats = 0;
    unsigned seed = SEED;

    atomic_store(&finished, false);
    for (int i = 0; i < CLIENTS; i++) {
        clients[i].number = i;
        assert_int_equal(fused_connect(served.socket, "test", &clients[i].f), 0);
        fused_set_reconnect(clients[i].f, 20000);
        assert_int_equal(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]), 0);
    }
    for (int k = 0; k < KILLS && !atomic_load(&failed); k++) {
        wait_for_answers(DEPTH + 1 + (unsigned)rand_r(&seed) % 100);
        kill(served.pid, signal);
        assert_int_equal(waitpid(served.pid, NULL, 0), served.pid);
        assert_int_equal(served_again_on(&served, models, "cpu"), 0);
    }
    wait_for_answers(DEPTH + 1);
    atomic_store(&finished, true);
    for (int i = 0; i < CLIENTS; i++) {
        pthread_join(clients[i].thread, NULL);
        if (clients[i].wrong[0] != 0)
            fail_msg("client %d: %s", i, clients[i].wrong);
        if (fused_reconnects(clients[i].f) < KILLS)
            fail_msg("client %d came back %u times", i, fused_reconnects(clients[i].f));
        n_sent += clients[i].n_sent;
        n_done += clients[i].n_done;
        n_repeats += clients[i].n_repeats;
        fused_buffer_free(clients[i].in);
        fused_buffer_free(clients[i].out);
        fused_close(clients[i].f);
    }
    print_message("%d restarts: %llu requests, %llu of them repeated\n", KILLS,
                  (unsigned long long)n_sent, (unsigned long long)n_repeats);
    assert_true(n_sent == n_done);
    assert_true(signal != SIGKILL || n_repeats > 0);
}

static void test_killed(void **state)
{
    (void)state;
    restart_under_load(SIGKILL);
}

static void test_stopped(void **state)
{
    (void)state;
    restart_under_load(SIGTERM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),
    };

    return cmocka_run_group_tests_name("restarts under load", tests, setup, teardown);
}
