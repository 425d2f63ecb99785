/*
 * fault_daemon.c - every allocation and system call of the daemon fails once
 *
 * A daemon runs in a child whose loop thread, or all of whose other threads, are armed: the n-th
 * call fails. Whatever that hits, the daemon either refuses to start with one of its exit codes, or
 * every later request gets an answer or a closed connection, a clean client is then served as ever,
 * and SIGTERM ends it with 0 and without a descriptor more than when nothing had failed.
 */
#include <sys/mman.h>

#include "daemon.h"
#include "daemon/log.h"
#include "daemon/server.h"
#include "tests/fault.h"

static struct daemon d;
static struct client c;
static bool is_open;
static float x[A_ROWS * A_IN];
static struct {
    unsigned n_calls; /* that it made */
    int n_left;       /* descriptors that were open at its end and not at its start */
} * shared;           /* with the child */

/* `others`: its helper and engine threads instead of its loop. */
static void spawn_armed(unsigned n, bool others)
{
    d.pid = fork();
    assert_true(d.pid >= 0);
    if (d.pid == 0) {
        struct server_options options = {
            .config = d.config, .socket = d.socket, .models = d.models, .backend = "cpu"};
        int log = open(d.log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), code, n_before;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(log, STDERR_FILENO);
        log_init(LOG_LEVEL_INFO);
        n_before = (int)fault_open_fds();
        if (others)
            fault_arm_others(n);
        else
            fault_arm(n);
        code = server_run(&options);
        shared->n_calls = others ? fault_disarm_others() : fault_disarm();
        shared->n_left = (int)fault_open_fds() - n_before;
        _exit(code);
    }
}

/* False: it ended, with a code that it documents. */
static bool wait_ready(unsigned n)
{
    for (int i = 0; i < 4000; i++) {
        int fd = wire_connect(d.socket), status;

        if (fd >= 0) {
            close(fd);
            return true;
        }
        if (waitpid(d.pid, &status, WNOHANG) == d.pid) {
            if (!WIFEXITED(status) || (WEXITSTATUS(status) != 69 && WEXITSTATUS(status) != 78)) {
                print_log(&d);
                fail_msg("call %u: the daemon ended with %x", n, status);
            }
            return false;
        }
        sleep_ms(2);
    }
    print_log(&d);
    fail_msg("call %u: the daemon neither serves nor ends", n);
    return false;
}

/* One request: any answer will do, or the end of the connection. True: a right one. */
static bool try_call(struct proto_request *request, int fd)
{
    struct proto_reply reply;
    int n;

    if (!is_open) {
        struct proto_request hello = {
            .id = 1, .verb = VERB_HELLO, .hello = {.version = PROTO_VERSION_MAX, .name = str("t")}};

        client_open(&c, &d);
        n = codec_encode_request(&hello, c.tx, sizeof(c.tx));
        is_open = wire_send(c.fd, c.tx, (size_t)n, -1) == 0 && client_recv(&c, &reply, NULL) &&
                  reply.error == ERR_NONE;
        if (!is_open) {
            client_close(&c);
            return false;
        }
    }
    request->id = 2;
    n = codec_encode_request(request, c.tx, sizeof(c.tx));
    assert_true(n > 0);
    if (wire_send(c.fd, c.tx, (size_t)n, fd) != 0 || !client_recv(&c, &reply, NULL)) {
        client_close(&c);
        is_open = false;
        return false;
    }
    return reply.error == ERR_NONE;
}

/* The one failure is behind us, or hits the first attempt: the second must do. A buffer that was
 * made ahead may be there until the next tick. */
static void assert_served(unsigned n)
{
    struct proto_request infer = infer_a(x);

    if (!try_call(&infer, -1) && !try_call(&infer, -1)) {
        print_log(&d);
        fail_msg("call %u: a clean client is not served", n);
    }
    client_close(&c);
    is_open = false;
    assert_fds(&d, 1);
}

static void converse(void)
{
    struct proto_request infer = infer_a(x);
    struct proto_request create = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 65536};
    struct proto_request adopt = {.verb = VERB_BUFFER_REGISTER, .buffer_register.size_bytes = 4096};
    struct proto_request release = {.verb = VERB_BUFFER_RELEASE, .buffer_release.buffer = 1};
    struct proto_request status = {.verb = VERB_STATUS}, stats = {.verb = VERB_STATS},
                         list = {.verb = VERB_MODEL_LIST}, reload = {.verb = VERB_MODEL_RELOAD},
                         unload = {.verb = VERB_MODEL_UNLOAD, .model.name = str(MODEL_B)},
                         load = {.verb = VERB_MODEL_LOAD, .model.name = str(MODEL_B)};
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(fallocate(fd, 0, 0, 4096), 0);
    infer.infer.has_deadline = true;
    infer.infer.deadline_us = 5000000;
    try_call(&infer, -1);
    try_call(&create, -1);
    try_call(&adopt, fd);
    try_call(&release, -1);
    try_call(&status, -1);
    try_call(&stats, -1);
    try_call(&list, -1);
    try_call(&unload, -1);
    try_call(&load, -1);
    try_call(&reload, -1);
    close(fd);
    if (is_open)
        client_close(&c);
    is_open = false;
}

/* A daemon's life. False: it ended at its start. */
static bool live(unsigned n, bool others)
{
    shared->n_calls = 0;
    spawn_armed(n, others);
    if (!wait_ready(n))
        return false;
    sleep_ms(5);
    d.n_fds = count_fds(d.pid);
    converse();
    assert_served(n);
    kill(d.pid, SIGTERM);
    if (daemon_join(&d, 10) != 0) {
        print_log(&d);
        fail_msg("call %u: it did not end with 0", n);
    }
    return true;
}

static void survives(bool others)
{
    unsigned n_started = 0;
    int n_left;

    golden_read(MODEL_A, "x", x, sizeof(x));
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    add_model(&d, MODEL_B);
    assert_true(live(0, others)); /* nothing fails */
    n_left = shared->n_left;
    for (unsigned n = 1; n < 2000; n++) {
        if (!live(n, others))
            continue;
        if (shared->n_left > n_left) {
            print_log(&d);
            fail_msg("call %u: it left %d descriptors open, %d when nothing had failed", n,
                     shared->n_left, n_left);
        }
        if (shared->n_calls < n) {
            print_message("%u calls, %u of them after the start\n", n - 1, n_started);
            munmap(shared, 4096);
            daemon_remove(&d);
            return;
        }
        n_started++;
    }
    fail_msg("there is no end to the calls");
}

static void survives_every_failure_of_the_loop(void **state)
{
    (void)state;
    survives(false);
}

static void survives_every_failure_of_helpers(void **state)
{
    (void)state;
    survives(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(survives_every_failure_of_the_loop),
        cmocka_unit_test(survives_every_failure_of_helpers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
