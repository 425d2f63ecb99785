/*
 * test_limits.c - starting under limits of every kind: it serves, or ends with a line that says why
 */
#include "hostile.h"

static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

/* True: it serves, and ends well. False: it ended by itself, with an exit code and a line. */
static bool lives_with(int resource, rlim_t limit)
{
    struct rlimit before, tight = {limit, limit};
    struct daemon d;
    bool lived = false;

    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    assert_int_equal(getrlimit((__rlimit_resource_t)resource, &before), 0);
    tight.rlim_max = before.rlim_max < limit ? before.rlim_max : limit;
    tight.rlim_cur = tight.rlim_max;
    d.pid = fork();
    assert_true(d.pid >= 0);
    if (d.pid == 0) {
        int log = open(d.log, O_WRONLY | O_CREAT | O_APPEND, 0600);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(log, 1);
        dup2(log, 2);
        setrlimit((__rlimit_resource_t)resource, &tight);
        execl(built("fused"), "fused", "--config", d.config, "--socket", d.socket, "--models",
              d.models, "--backend", "cpu", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 2000; i++) {
        int fd = wire_connect(d.socket), status;

        if (fd >= 0) {
            close(fd);
            sleep_ms(20);
            d.n_fds = count_fds(d.pid);
            assert_healthy(&d);
            kill(d.pid, SIGTERM);
            assert_int_equal(daemon_join(&d, 10), 0);
            lived = true;
            break;
        }
        if (waitpid(d.pid, &status, WNOHANG) == d.pid) {
            if (!WIFEXITED(status) || count_lines(d.log, NULL) == 0) {
                print_log(&d);
                fail_msg("resource %d at %llu: ended with %x", resource, (unsigned long long)limit,
                         status);
            }
            break;
        }
        sleep_ms(5);
    }
    daemon_remove(&d);
    return lived;
}

/* C-06 */
static void lives_or_says_why(void **state)
{
    static const struct {
        int resource;
        rlim_t limit;
        int lives; /* -1: either */
    } rows[] = {
        {RLIMIT_NOFILE, 8, 0},         {RLIMIT_NOFILE, 20, 0},           {RLIMIT_NOFILE, 31, 0},
        {RLIMIT_NOFILE, 32, 1},        {RLIMIT_NOFILE, 40, 1},           {RLIMIT_AS, 32 << 20, -1},
        {RLIMIT_AS, 256 << 20, -1},    {RLIMIT_AS, (rlim_t)1 << 30, -1}, {RLIMIT_MEMLOCK, 0, 1},
        {RLIMIT_CORE, 0, 1},           {RLIMIT_SIGPENDING, 0, 1},        {RLIMIT_MSGQUEUE, 0, 1},
        {RLIMIT_STACK, 256 << 10, -1},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        bool lived;

        if (SANITIZED && rows[i].resource == RLIMIT_AS)
            continue; /* the sanitizers map terabytes */
        lived = lives_with(rows[i].resource, rows[i].limit);
        if (rows[i].lives >= 0 && lived != (rows[i].lives == 1))
            fail_msg("resource %d at %llu: %s", rows[i].resource, (unsigned long long)rows[i].limit,
                     lived ? "served" : "ended");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lives_or_says_why)};

    return cmocka_run_group_tests(tests, start, NULL);
}
