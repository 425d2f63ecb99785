/*
 * The rules of the library: no call waits longer than it may, whatever the server does or leaves;
 * no thread, signal handler or output of its own; a connection goes from thread to thread.
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>

#include <cmocka.h>

#include "client/fused.h"
#include "server.h"

#define LIMIT_MS 60
#define SLACK_MS 3000 /* of a busy machine */

static struct server server;

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void write_limits(struct doc *doc)
{
    doc_map(doc, 1);
    doc_key(doc, "limits");
    doc_map(doc, 1);
    doc_key(doc, "unread_replies");
    doc_uint(doc, 256);
}

/* Says hello, then reads and never answers. */
static void script_mute(struct server *s)
{
    CHECK(server_read(s));
    server_document(s, write_limits);
    while (server_read(s))
        ;
}

static int a_memfd(void)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_true(fd >= 0);
    assert_int_equal(fallocate(fd, 0, 0, 4096), 0);
    return fd;
}

/* ---- limits of time ---- */

static struct fused *f;
static struct fused_buffer *buffer;
static struct fused_result result;
static uint8_t data[4];
static char *json;
static int memfd = -1;

static struct fused_infer small_call(void)
{
    struct fused_infer call = FUSED_INFER_INIT;

    call.model = "m";
    call.input = fused_tensor_at(data, FUSED_FLOAT32, 1, (int64_t[]){1});
    return call;
}

static int call_run(void)
{
    struct fused_infer call = small_call();

    return fused_run(f, &call, &result);
}

static int call_next(void)
{
    struct fused_infer call = small_call();
    int r = fused_submit(f, &call, NULL);

    return r == 0 ? fused_next(f, -1, &result) : r;
}

static int call_wait(void)
{
    struct fused_infer call = small_call();
    uint64_t id;
    int r = fused_submit(f, &call, &id);

    return r == 0 ? fused_wait(f, id, -1, &result) : r;
}

#define CALL(name, expression) \
    static int name(void)      \
    {                          \
        return expression;     \
    }

/* Its own limit is no failure of the call: there is nothing yet. */
static int call_next_own(void)
{
    int r = fused_next(f, LIMIT_MS, &result);

    return r == -EAGAIN ? -ETIMEDOUT : r;
}

CALL(call_ping, fused_ping(f))
CALL(call_create, fused_buffer_create(f, 4096, &buffer))
CALL(call_register, fused_buffer_register(f, memfd, 4096, &buffer))
CALL(call_status, fused_status(f, &json))
CALL(call_stats, fused_stats(f, NULL, &json))
CALL(call_models, fused_models(f, &json))
CALL(call_describe, fused_describe(f, "m", &json))
CALL(call_load, fused_load(f, "m", &json))
CALL(call_unload, fused_unload(f, "m", &json))
CALL(call_reload, fused_reload(f, NULL, &json))
CALL(call_drain, fused_drain(f, &json))
CALL(call_log_level, fused_log_level(f, "debug", &json))

static void ends_in_time(const char *name, int (*call)(void))
{
    int64_t begin_ms = now_ms(), took_ms;
    int r = call();

    took_ms = now_ms() - begin_ms;
    if (r != -ETIMEDOUT || took_ms < LIMIT_MS - 1 || took_ms > LIMIT_MS + SLACK_MS)
        fail_msg("%s: %d (%s) after %lld ms", name, r, fused_error_text(f), (long long)took_ms);
}

static void test_every_call_ends(void **state)
{
    static const struct {
        const char *name;
        int (*call)(void);
    } calls[] = {{"ping", call_ping},         {"run", call_run},
                 {"next", call_next},         {"next with a limit of its own", call_next_own},
                 {"wait", call_wait},         {"buffer_create", call_create},
                 {"register", call_register}, {"status", call_status},
                 {"stats", call_stats},       {"models", call_models},
                 {"describe", call_describe}, {"load", call_load},
                 {"unload", call_unload},     {"reload", call_reload},
                 {"drain", call_drain},       {"log_level", call_log_level}};
    int64_t begin_ms;

    (void)state;
    memfd = a_memfd();
    server_start(&server, script_mute);
    assert_int_equal(fused_connect(server.path, "test", &f), 0);
    fused_set_timeout(f, LIMIT_MS);
    for (size_t i = 0; i < ARRAY_SIZE(calls); i++)
        ends_in_time(calls[i].name, calls[i].call);
    begin_ms = now_ms();
    fused_close(f);
    assert_in_range(now_ms() - begin_ms, 0, SLACK_MS);
    server_stop(&server);
    memfd = close_fd(memfd);
}

/* A server that is stopped reads nothing either: what cannot even be sent is held to the limit. */
static void script_stopped(struct server *s)
{
    struct pollfd p = {.fd = s->socket, .events = POLLRDHUP};

    CHECK(server_read(s));
    server_document(s, write_limits);
    CHECK(poll(&p, 1, -1) == 1);
}

static void test_nobody_reads(void **state)
{
    static uint8_t large[FUSED_INLINE_MAX];
    struct fused_infer call = FUSED_INFER_INIT;
    unsigned n = 0;
    int r;

    (void)state;
    call.model = "m";
    call.input = fused_tensor_at(large, FUSED_FLOAT32, 1, (int64_t[]){sizeof large / 4});
    server_start(&server, script_stopped);
    assert_int_equal(fused_connect(server.path, "test", &f), 0);
    fused_set_timeout(f, LIMIT_MS);
    while (n < 1000 && (r = fused_submit(f, &call, NULL)) == 0)
        n++;
    assert_true(n > 0 && n < 1000);
    assert_int_equal(r, -ETIMEDOUT);
    ends_in_time("ping", call_ping);
    ends_in_time("run", call_run);
    assert_int_equal(fused_in_flight(f), n);
    fused_close(f);
    server_stop(&server);
}

/* Nobody accepts, and the line is full. */
static void test_full_backlog(void **state)
{
    int fds[8], n = 0;
    int64_t begin_ms, took_ms;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char dir[] = "/tmp/fused-test-client-XXXXXX";
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), r;

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(address.sun_path, sizeof address.sun_path, "%s/s", dir);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, 0), 0);
    for (; n < 8; n++) {
        fds[n] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (connect(fds[n], (struct sockaddr *)&address, sizeof address) < 0)
            break;
    }
    assert_true(n < 8);
    begin_ms = now_ms();
    r = fused_connect(address.sun_path, "test", &f);
    took_ms = now_ms() - begin_ms;
    if (r != -ETIMEDOUT || took_ms > 5000 + SLACK_MS)
        fail_msg("%d (%s) after %lld ms", r, fused_error_text(NULL), (long long)took_ms);
    for (int i = 0; i <= n; i++)
        close(fds[i]);
    close(listener);
    unlink(address.sun_path);
    rmdir(dir);
}

/* ---- nothing of its own ---- */

static unsigned count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    unsigned n = 0;

    assert_non_null(tasks);
    while (readdir(tasks))
        n++;
    closedir(tasks);
    return n;
}

static void script_answers(struct server *s)
{
    CHECK(server_read(s));
    server_document(s, write_limits);
    while (server_read(s))
        server_answer(s);
}

static void test_nothing_of_its_own(void **state)
{
    static struct sigaction before[NSIG], after;
    int pipe_fds[2], saved = dup(STDERR_FILENO);
    sigset_t mask_before, mask_after;
    unsigned n_threads;
    char byte;

    (void)state;
    server_start(&server, script_answers);
    for (int i = 1; i < NSIG; i++) {
        memset(&before[i], 0, sizeof before[i]);
        sigaction(i, NULL, &before[i]);
    }
    sigprocmask(SIG_BLOCK, NULL, &mask_before);
    n_threads = count_threads();
    assert_int_equal(pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK), 0);
    dup2(pipe_fds[1], STDERR_FILENO);

    assert_int_equal(fused_connect(server.path, "test", &f), 0);
    assert_int_equal(fused_buffer_create(f, 4096, &buffer), 0);
    assert_int_equal(call_run(), 0);
    assert_int_equal(call_ping(), 0);
    assert_true(fused_connect("/nonexistent/socket", "test", &(struct fused *){NULL}) < 0);
    assert_true(fused_run(f, NULL, NULL) < 0);
    assert_int_equal(count_threads(), n_threads);
    fused_buffer_free(buffer);
    fused_close(f);

    dup2(saved, STDERR_FILENO);
    close(saved);
    assert_int_equal(read(pipe_fds[0], &byte, 1), -1);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    sigprocmask(SIG_BLOCK, NULL, &mask_after);
    for (int i = 1; i < NSIG; i++) {
        memset(&after, 0, sizeof after);
        sigaction(i, NULL, &after);
        assert_true(before[i].sa_handler == after.sa_handler);
        assert_int_equal(sigismember(&mask_before, i), sigismember(&mask_after, i));
    }
    server_stop(&server);
}

/* ---- from thread to thread ---- */

static void *use(void *unused)
{
    int r = call_run();

    if (r == 0)
        r = call_ping();
    if (r == 0 && !buffer)
        r = fused_buffer_create(f, 4096, &buffer);
    if (r == 0)
        memset(fused_buffer_data(buffer), 1, 4096);
    return r == 0 ? unused : &server;
}

static void test_handed_on(void **state)
{
    (void)state;
    server_start(&server, script_answers);
    buffer = NULL;
    assert_int_equal(fused_connect(server.path, "test", &f), 0);
    for (int i = 0; i < 4; i++) {
        pthread_t thread;
        void *wrong;

        assert_int_equal(pthread_create(&thread, NULL, use, NULL), 0);
        assert_int_equal(pthread_join(thread, &wrong), 0);
        assert_null(wrong);
        assert_null(use(NULL));
    }
    fused_buffer_free(buffer);
    fused_close(f);
    server_stop(&server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_call_ends), cmocka_unit_test(test_nobody_reads),
        cmocka_unit_test(test_full_backlog),    cmocka_unit_test(test_nothing_of_its_own),
        cmocka_unit_test(test_handed_on),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
