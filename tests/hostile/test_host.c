/*
 * test_host.c - a host that behaves oddly: clocks that jump, disks that are full, signals, an
 * environment without anything in it
 */
#include <sys/mman.h>

#include "hostile.h"

static struct client c;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

/* A daemon of one model in a child that is made odd first. */
static void spawn(struct daemon *d, bool has_config, void (*make_odd)(const struct daemon *d))
{
    char fused[PATH_MAX];

    assert_non_null(realpath(built("fused"), fused));
    d->pid = fork();
    assert_true(d->pid >= 0);
    if (d->pid == 0) {
        const char *option = has_config ? "--config" : "--models";
        int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(log, STDERR_FILENO);
        unsetenv("FUSED_SOCKET");
        make_odd(d);
        execl(fused, "fused", "--socket", d->socket, "--models", d->models, "--backend", "cpu",
              option, has_config ? d->config : d->models, (char *)NULL);
        _exit(127);
    }
}

/* Serves as ever, and ends as asked. */
static void assert_good_life(struct daemon *d)
{
    assert_healthy(d);
    kill(d->pid, SIGTERM);
    assert_int_equal(daemon_join(d, 10), 0);
    daemon_remove(d);
}

/* L-15. Every time limit is as long as it says, whatever the wall clock does. */
static void keeps_time_while_clocks_jump(void **state)
{
    struct proto_request infer = infer_a(x);
    static struct client silent;
    struct proto_reply reply;
    struct daemon d;
    double begin;
    char path[400];

    (void)state;
    if (SANITIZED) {
        print_message("the sanitizers want to be preloaded first\n");
        skip();
    }
    snprintf(path, sizeof(path), "%s%s", built("")[0] == '/' ? "" : "./", built("clock.so"));
    setenv("LD_PRELOAD", path, 1);
    daemon_start(&d, "delay_ms=300;slots=1", "hello_timeout_ms = 400; drain_timeout_ms = 500;");
    unsetenv("LD_PRELOAD");
    client_start(&c, &d);

    begin = now_s();
    client_open(&silent, &d);
    assert_true(client_is_closed(&silent));
    client_close(&silent);
    assert_true(now_s() - begin > 0.35 && now_s() - begin < (SANITIZED ? 4 : 2));

    /* One runs; the next has a deadline that comes first. */
    infer.id = 0;
    client_send(&c, &infer, -1);
    sleep_ms(20); /* or they run together */
    infer.id = 0;
    infer.infer.has_deadline = true;
    infer.infer.deadline_us = 100000;
    begin = now_s();
    client_send(&c, &infer, -1);
    assert_true(client_recv(&c, &reply, NULL));
    assert_error(&reply, ERR_DEADLINE);
    assert_true(now_s() - begin > 0.08 && now_s() - begin < 0.27);
    assert_true(client_recv(&c, &reply, NULL));
    assert_ok(&reply);
    assert_true(reply.infer.run_us > 250000 && reply.infer.run_us < 3000000);

    /* More than the drain may take: what is left is told so, in time. */
    infer.infer.has_deadline = false;
    for (int i = 0; i < 10; i++) {
        infer.id = 0;
        client_send(&c, &infer, -1);
    }
    begin = now_s();
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 10), 0);
    assert_true(now_s() - begin > 0.2 && now_s() - begin < (SANITIZED ? 5 : 2.5));
    client_close(&c);
    daemon_remove(&d);
}

static void log_to_nowhere(const struct daemon *d)
{
    (void)d;
    dup2(open("/dev/full", O_WRONLY), STDERR_FILENO);
}

/* L-13. What cannot be logged is no reason to stop. */
static void serves_when_the_log_is_full(void **state)
{
    struct daemon d;

    (void)state;
    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    write_file(d.config, "log_level = \"debug\";");
    spawn(&d, true, log_to_nowhere);
    daemon_wait_ready(&d);
    d.n_fds = count_fds(d.pid);
    for (int i = 0; i < 50; i++) {
        client_open(&c, &d);
        client_send_raw(&c, "\xc1", 1, -1);
        client_close(&c);
    }
    assert_good_life(&d);
}

static void nothing(const struct daemon *d)
{
    (void)d;
}

/* L-14. A reload without a configuration file; and signals that nobody has a use for end it, as
 * they end every program, with nothing in the way of the next. */
static void takes_signals(void **state)
{
    const int reloads[] = {SIGHUP, SIGHUP, SIGCONT, SIGWINCH, SIGCHLD, SIGPIPE, SIGURG};
    const int ends[] = {SIGUSR1, SIGUSR2, SIGQUIT, SIGALRM, SIGRTMIN, SIGRTMAX};
    struct daemon d;

    (void)state;
    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    spawn(&d, false, nothing);
    daemon_wait_ready(&d);
    d.n_fds = count_fds(d.pid);
    for (size_t i = 0; i < ARRAY_SIZE(reloads); i++) {
        kill(d.pid, reloads[i]);
        sleep_ms(20);
        assert_healthy(&d);
    }
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 10), 0);

    for (size_t i = 0; i < ARRAY_SIZE(ends); i++) {
        daemon_spawn(&d, NULL);
        daemon_wait_ready(&d);
        kill(d.pid, ends[i]);
        assert_int_equal(daemon_join(&d, 10), 1000 + ends[i]);
    }
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    d.n_fds = count_fds(d.pid);
    assert_good_life(&d);
}

static mode_t mask;

static void set_mask(const struct daemon *d)
{
    (void)d;
    umask(mask);
}

static void lose_everything(const struct daemon *d)
{
    char gone[300];

    snprintf(gone, sizeof(gone), "%s/gone", d->dir);
    umask(mask);
    clearenv();
    if (mkdir(gone, 0700) != 0 || chmod(gone, 0700) != 0 || chdir(gone) != 0 || rmdir(gone) != 0)
        _exit(126);
}

/* C-06. No variables, no home, a working directory that is gone, whatever umask. */
static void needs_nothing_around_it(void **state)
{
    static const mode_t masks[] = {0, 0777};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(masks); i++) {
        struct stat st;
        struct daemon d;

        daemon_prepare(&d);
        add_model(&d, MODEL_A);
        mask = masks[i];
        spawn(&d, true, lose_everything);
        daemon_wait_ready(&d);
        d.n_fds = count_fds(d.pid);
        assert_int_equal(stat(d.socket, &st), 0);
        assert_int_equal(st.st_mode & 0777, 0660);
        assert_good_life(&d);
    }
}

static void allow_one_thread(const struct daemon *d)
{
    const struct rlimit one = {1, 1};

    (void)d;
    if (setresgid(4321, 4321, 4321) != 0 || setresuid(4321, 4321, 4321) != 0 ||
        setrlimit(RLIMIT_NPROC, &one) != 0)
        _exit(126);
}

/* C-06. A user who may have no further thread. */
static void says_that_it_may_have_no_threads(void **state)
{
    struct daemon d;
    int code;

    (void)state;
    if (getuid() != 0 || SANITIZED) {
        print_message("no user to be limited without root; sanitizers make threads at the end\n");
        skip();
    }
    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    assert_int_equal(chmod(d.dir, 0777), 0);
    assert_int_equal(chmod(d.models, 0755), 0);
    spawn(&d, true, allow_one_thread);
    code = daemon_join(&d, 10);
    if (code != 69 && code != 78)
        print_log(&d);
    assert_true(code == 69 || code == 78);
    assert_true(count_lines(d.log, NULL) > 0);
    daemon_remove(&d);
}

/* L-03. Somebody outside of the group tries all the time; the socket appears with its modes. */
static void lets_nobody_in_early(void **state)
{
    unsigned *n_in = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct daemon d;
    pid_t child;

    (void)state;
    if (getuid() != 0) {
        print_message("not root: there is no other user\n");
        skip();
    }
    assert_true(n_in != MAP_FAILED);
    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    assert_int_equal(chmod(d.dir, 0755), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        umask(0);
        if (setresgid(4321, 4321, 4321) != 0 || setresuid(4321, 4321, 4321) != 0)
            _exit(126);
        for (;;) {
            int fd = wire_connect(d.socket);

            n_in[1] += fd == -EACCES;
            n_in[0] += fd >= 0;
            close_fd(fd);
        }
    }
    for (int i = 0; i < 10; i++) {
        mask = 0;
        spawn(&d, true, set_mask);
        daemon_wait_ready(&d);
        sleep_ms(20);
        kill(d.pid, SIGKILL);
        assert_int_equal(daemon_join(&d, 10), 1000 + SIGKILL);
        unlink(d.socket);
    }
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(n_in[0], 0);
    assert_true(n_in[1] > 10); /* it did try */
    munmap(n_in, 4096);
    daemon_remove(&d);
}

/* C-03 */
static void warns_of_what_everybody_may_write(void **state)
{
    struct daemon d;

    (void)state;
    for (int open_to_all = 0; open_to_all <= 1; open_to_all++) {
        daemon_prepare(&d);
        add_model(&d, MODEL_A);
        if (open_to_all) {
            assert_int_equal(chmod(d.models, 0777), 0);
            assert_int_equal(chmod(d.config, 0666), 0);
        }
        daemon_spawn(&d, NULL);
        daemon_wait_ready(&d);
        d.n_fds = count_fds(d.pid);
        assert_int_equal(log_has(&d, "everybody may write to the configuration"), open_to_all);
        assert_int_equal(log_has(&d, "everybody may write to the models_dir"), open_to_all);
        assert_good_life(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_time_while_clocks_jump),
        cmocka_unit_test(serves_when_the_log_is_full),
        cmocka_unit_test(takes_signals),
        cmocka_unit_test(needs_nothing_around_it),
        cmocka_unit_test(says_that_it_may_have_no_threads),
        cmocka_unit_test(lets_nobody_in_early),
        cmocka_unit_test(warns_of_what_everybody_may_write),
    };

    return cmocka_run_group_tests(tests, start, NULL);
}
