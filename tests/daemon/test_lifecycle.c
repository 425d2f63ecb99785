/*
 * test_lifecycle.c - start, readiness, drain, lost device, and whose the socket is
 */
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/un.h>

#include "daemon.h"

static struct client c;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

static void one_model(struct daemon *daemon)
{
    daemon_prepare(daemon);
    add_model(daemon, MODEL_A);
}

/* Starts it, waits for its end; the exit code. */
static int run(struct daemon *daemon, const char *script)
{
    daemon_spawn(daemon, script);
    return daemon_join(daemon, 10);
}

/* ---- the socket ---- */

static int unix_socket(const char *path, int type, bool listening)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, type, 0);

    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    if (listening)
        assert_int_equal(listen(fd, 1), 0);
    return fd;
}

/* L-04: only a stale socket is replaced. */
static void takes_nobodys_place(void **state)
{
    struct daemon d;
    struct stat st;
    char path[120], text[20] = "";
    FILE *file;
    int fd;

    (void)state;
    one_model(&d);
    write_file(d.socket, "precious");
    assert_int_equal(run(&d, NULL), 78);
    file = fopen(d.socket, "re");
    assert_non_null(file);
    assert_non_null(fgets(text, sizeof(text), file));
    fclose(file);
    assert_string_equal(text, "precious");
    unlink(d.socket);

    snprintf(path, sizeof(path), "%s/target", d.dir);
    assert_int_equal(symlink(path, d.socket), 0);
    assert_int_equal(run(&d, NULL), 78);
    assert_int_equal(lstat(d.socket, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(access(path, F_OK), -1);
    unlink(d.socket);

    fd = unix_socket(d.socket, SOCK_SEQPACKET, true);
    assert_int_equal(run(&d, NULL), 75);
    close(fd); /* now it is stale */
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    assert_int_equal(stat(d.socket, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0660);
    daemon_stop(&d);

    one_model(&d);
    fd = unix_socket(d.socket, SOCK_STREAM, true);
    assert_int_equal(run(&d, NULL), 75);
    close(fd);
    daemon_remove(&d);
}

static void lets_only_one_run(void **state)
{
    struct daemon d, second;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    second = d;
    assert_int_equal(run(&second, NULL), 75);
    assert_healthy(&d);
    /* not even when the path is gone */
    unlink(d.socket);
    assert_int_equal(run(&second, NULL), 75);
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 5), 0);
    /* after kill -9 the lock is free and the socket stale */
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    kill(d.pid, SIGKILL);
    assert_int_equal(daemon_join(&d, 5), 1000 + SIGKILL);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    daemon_stop(&d);
}

/* Starts on another path than the daemon's own. */
static void spawn_on(struct daemon *daemon, const char *path)
{
    daemon->pid = fork();
    assert_true(daemon->pid >= 0);
    if (daemon->pid == 0) {
        int log = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

        dup2(log, 2);
        execl(built("fused"), "fused", "--config", daemon->config, "--socket", path, "--models",
              daemon->models, "--backend", "cpu", (char *)NULL);
        _exit(127);
    }
}

/* The longest path that works, and one byte more. */
static void refuses_long_paths(void **state)
{
    char path[120], longer[120];
    struct daemon d;
    size_t n;

    (void)state;
    one_model(&d);
    n = (size_t)snprintf(path, sizeof(path), "%s/", d.dir);
    memset(path + n, 'x', 107 - n);
    path[107] = '\0';
    memcpy(longer, path, 107);
    memcpy(longer + 107, "x", 2);
    spawn_on(&d, longer);
    assert_int_equal(daemon_join(&d, 5), 78);
    spawn_on(&d, path);
    for (int i = 0; i < 1000 && access(path, F_OK) != 0; i++)
        sleep_ms(5);
    assert_int_equal(access(path, F_OK), 0);
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 5), 0);
    daemon_remove(&d);
}

/* L-08: what is left after any death: the lock file, and after kill -9 the stale socket. */
static void leaves_nothing_behind(void **state)
{
    struct daemon d;
    struct dirent *entry;
    DIR *dir;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 5), 0);
    dir = opendir(d.dir);
    while ((entry = readdir(dir))) {
        static const char *const known[] = {".", "..", "models", "log", "fused.conf", "s.lock"};
        bool found = false;

        for (size_t i = 0; i < ARRAY_SIZE(known); i++)
            found = found || strcmp(entry->d_name, known[i]) == 0;
        if (!found)
            fail_msg("%s is left", entry->d_name);
    }
    closedir(dir);
    daemon_remove(&d);
}

/* ---- readiness ---- */

static int manager_socket(const struct daemon *daemon)
{
    char path[120];
    int fd;

    snprintf(path, sizeof(path), "%s/notify", daemon->dir);
    fd = unix_socket(path, SOCK_DGRAM, false);
    setenv("NOTIFY_SOCKET", path, 1);
    return fd;
}

/* The next notification that begins so; others are skipped. */
static void expect(int manager, const char *words)
{
    char text[800];

    for (;;) {
        struct pollfd p = {.fd = manager, .events = POLLIN};
        ssize_t n;

        if (poll(&p, 1, 8000) != 1)
            fail_msg("\"%s\" was not heard", words);
        n = recv(manager, text, sizeof(text) - 1, 0);
        assert_true(n > 0);
        text[n] = '\0';
        if (strncmp(text, words, strlen(words)) == 0)
            return;
        if (strncmp(text, "READY=1", 7) == 0)
            fail_msg("READY before \"%s\"", words);
    }
}

/* L-09 */
static void is_ready_when_it_serves(void **state)
{
    struct daemon d;
    int manager;

    (void)state;
    one_model(&d);
    manager = manager_socket(&d);
    setenv("WATCHDOG_USEC", "600000", 1);
    daemon_spawn(&d, "load_ms=600");
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    expect(manager, "STATUS=Loading");
    assert_true(wire_connect(d.socket) < 0);
    expect(manager, "WATCHDOG=1");
    expect(manager, "READY=1");
    d.n_fds = count_fds(d.pid);
    assert_healthy(&d);
    kill(d.pid, SIGHUP);
    expect(manager, "RELOADING=1");
    expect(manager, "READY=1");
    kill(d.pid, SIGTERM);
    expect(manager, "STOPPING=1");
    assert_int_equal(daemon_join(&d, 5), 0);
    close(manager);
    daemon_remove(&d);
}

static void says_nothing_when_killed_while_starting(void **state)
{
    struct daemon d;
    int manager;
    char text[200];
    ssize_t n;

    (void)state;
    one_model(&d);
    manager = manager_socket(&d);
    daemon_spawn(&d, "load_ms=7000");
    unsetenv("NOTIFY_SOCKET");
    expect(manager, "STATUS=Loading");
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 4), 0);
    while ((n = recv(manager, text, sizeof(text) - 1, MSG_DONTWAIT)) > 0) {
        text[n] = '\0';
        assert_null(strstr(text, "READY=1"));
    }
    close(manager);
    daemon_remove(&d);
}

/* Socket activation: connects wait in the backlog from before the start to after the end. */
static void takes_a_socket_over(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon d;
    int fd;

    (void)state;
    one_model(&d);
    fd = unix_socket(d.socket, SOCK_SEQPACKET, true);
    client_open(&c, &d);
    d.pid = fork();
    if (d.pid == 0) {
        char pid[20];
        int log = open(d.log, O_WRONLY | O_CREAT, 0600);

        dup2(log, 2);
        if (fd != 3)
            dup2(fd, 3);
        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", "1", 1);
        execl(built("fused"), "fused", "--config", d.config, "--models", d.models, "--backend",
              "cpu", (char *)NULL);
        _exit(127);
    }
    client_hello(&c);
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    client_close(&c);
    kill(d.pid, SIGTERM);
    assert_int_equal(daemon_join(&d, 5), 0);
    assert_int_equal(access(d.socket, F_OK), 0); /* not ours to remove */
    client_open(&c, &d);                         /* not refused */
    client_close(&c);
    close(fd);
    daemon_remove(&d);
}

/* ---- configuration and options ---- */

/* C-01 */
static void refuses_bad_configuration(void **state)
{
    struct daemon d;

    (void)state;
    one_model(&d);
    write_file(d.config, "log_level = 1;");
    assert_int_equal(run(&d, NULL), 78);
    assert_true(log_has(&d, "fused.conf:1"));
    unlink(d.config);
    assert_int_equal(run(&d, NULL), 78);
    assert_int_equal(mkdir(d.config, 0700), 0);
    assert_int_equal(run(&d, NULL), 78);
    rmdir(d.config);
    write_file(d.config, "admin_group = \"no-such-group\";");
    assert_int_equal(run(&d, NULL), 78);
    write_file(d.config, "socket_group = \"no-such-group\";");
    assert_int_equal(run(&d, NULL), 78);
    write_file(d.config, "");
    {
        char path[200];

        snprintf(path, sizeof(path), "%s/bad.conf", d.models);
        write_file(path, "name = \"bad\";\n\nstages = 7;\n");
    }
    assert_int_equal(run(&d, NULL), 78);
    assert_true(log_has(&d, "bad.conf:"));
    remove_tree(d.models);
    assert_int_equal(run(&d, NULL), 78);
    assert_int_equal(access(d.socket, F_OK), -1);
    daemon_remove(&d);
}

static int run_with(struct daemon *daemon, const char *const *arguments)
{
    daemon->pid = fork();
    if (daemon->pid == 0) {
        int log = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

        dup2(log, 1);
        dup2(log, 2);
        execv(built("fused"), (char *const *)arguments);
        _exit(127);
    }
    return daemon_join(daemon, 10);
}

static void knows_its_options(void **state)
{
    struct daemon d;

    (void)state;
    one_model(&d);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--help", NULL}), 0);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--version", NULL}), 0);
    assert_true(log_has(&d, "fused 1"));
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--nonsense", NULL}), 64);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "argument", NULL}), 64);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--backend", "gpu", NULL}), 64);
    assert_int_equal(
        run_with(&d, (const char *[]){"fused", "--backend", "/nonexistent.so", "--config", d.config,
                                      "--socket", d.socket, "--models", d.models, NULL}),
        69);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config,
                                                   "--models", d.models, NULL}),
                     0);
    assert_true(log_has(&d, MODEL_A ".conf: ok"));
    {
        char path[200];

        snprintf(path, sizeof(path), "%s/%s.safetensors", d.models, MODEL_A);
        assert_int_equal(truncate(path, 1000), 0);
    }
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config,
                                                   "--models", d.models, NULL}),
                     78);
    daemon_remove(&d);
}

/* What --check says, a start would say too, and the other way round. */
static void checks_the_system(void **state)
{
    static const char *const keys[] = {"socket_group", "admin_group"};
    struct daemon d;
    char text[300];

    (void)state;
    one_model(&d);
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        snprintf(text, sizeof(text), "%s = \"no-such-group\";", keys[i]);
        write_file(d.config, text);
        assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config,
                                                       "--models", d.models, NULL}),
                         78);
        snprintf(text, sizeof(text), "%s: there is no group \"no-such-group\"", keys[i]);
        assert_true(log_has(&d, text));
    }
    write_file(d.config, "socket_group = \"root\"; admin_group = \"root\";");
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config,
                                                   "--models", d.models, NULL}),
                     0);
    write_file(d.config, "");
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--config", d.config, "--socket",
                                                   d.socket, "--models", "nodir", NULL}),
                     78);
    assert_true(log_has(&d, "--models: nodir: No such file or directory"));
    snprintf(text, sizeof(text), "models_dir = \"%s/gone\";", d.dir);
    write_file(d.config, text);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config, NULL}),
                     78);
    snprintf(text, sizeof(text), "models_dir: %s/gone: No such file or directory", d.dir);
    assert_true(log_has(&d, text));
    write_file(d.config, "");
    snprintf(text, sizeof(text), "%s/gone/s", d.dir);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--config", d.config, "--socket", text,
                                                   "--models", d.models, NULL}),
                     78);
    assert_true(log_has(&d, "/gone/s: its directory is missing; --socket PATH chooses another"));
    assert_int_equal(
        run_with(&d, (const char *[]){"fused", "--check", "--config", "/nonexistent", NULL}), 78);
    assert_true(log_has(&d, "fused: /nonexistent: No such file or directory"));
    daemon_remove(&d);
}

static void append_to_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "ae");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

/* Of models too, with the same words. */
static void checks_the_devices_of_models(void **state)
{
    static const char no_such_device[] = MODEL_A ".conf: devices: 3 is none of the daemon's";
    struct daemon d;
    char path[200];

    (void)state;
    one_model(&d);
    write_file(d.config, "backend = \"cpu\"; devices = [ 0, 1 ];");
    snprintf(path, sizeof(path), "%s/" MODEL_A ".conf", d.models);
    append_to_file(path, "devices = [ 1 ];\n");
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config,
                                                   "--models", d.models, NULL}),
                     0);
    add_model(&d, MODEL_A);
    append_to_file(path, "devices = [ 3 ];\n");
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--config", d.config, "--socket",
                                                   d.socket, "--models", d.models, NULL}),
                     78);
    assert_true(log_has(&d, no_such_device));
    unlink(d.log);
    assert_int_equal(run_with(&d, (const char *[]){"fused", "--check", "--config", d.config,
                                                   "--models", d.models, NULL}),
                     78);
    assert_true(log_has(&d, no_such_device));
    daemon_remove(&d);
}

/* What is printed to nowhere is not taken for printed. */
static void says_that_it_cannot_print(void **state)
{
    const char *const words[] = {"--version", "--help", "--check"};
    struct daemon d;

    (void)state;
    one_model(&d);
    for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
        d.pid = fork();
        assert_true(d.pid >= 0);
        if (d.pid == 0) {
            int full = open("/dev/full", O_WRONLY);
            int log = open(d.log, O_WRONLY | O_CREAT | O_TRUNC, 0600);

            dup2(full, 1);
            dup2(log, 2);
            execl(built("fused"), "fused", "--config", d.config, "--models", d.models, words[i],
                  (char *)NULL);
            _exit(127);
        }
        assert_int_equal(daemon_join(&d, 10), 74);
        assert_true(log_has(&d, "fused: standard output: No space left on device"));
    }
    daemon_remove(&d);
}

static void says_that_there_is_no_device(void **state)
{
    struct daemon d;

    (void)state;
    one_model(&d);
    assert_int_equal(run(&d, "open_fails=1"), 69);
    assert_true(log_has(&d, "no device"));
    assert_int_equal(access(d.socket, F_OK), -1);
    daemon_remove(&d);
}

/* C-06: without stdin, stdout and stderr no descriptor of ours takes their place. */
static void starts_without_stdio(void **state)
{
    struct daemon d;

    (void)state;
    one_model(&d);
    d.pid = fork();
    assert_true(d.pid >= 0);
    if (d.pid == 0) {
        closefrom(0);
        execl(built("fused"), "fused", "--config", d.config, "--socket", d.socket, "--models",
              d.models, "--backend", "cpu", (char *)NULL);
        _exit(127);
    }
    daemon_wait_ready(&d);
    assert_healthy(&d);
    daemon_stop(&d);
}

/* ---- the end ---- */

/* L-07 */
static void drains(void **state)
{
    enum { N = 10 };
    static struct client late;
    struct proto_request request = infer_a(x), ping = {.verb = VERB_PING},
                         status = {.verb = VERB_STATUS};
    char *json = NULL;
    unsigned n_right = 0, n_refused = 0;
    struct proto_reply reply;
    struct daemon d;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, "delay_ms=150");
    daemon_wait_ready(&d);
    client_start(&c, &d);
    for (int i = 0; i < N; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    sleep_ms(50);
    kill(d.pid, SIGTERM);
    sleep_ms(50);
    client_start(&late, &d);
    client_call(&late, &status, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(codec_json(reply.document.bytes, reply.document.n_bytes, &json), 0);
    assert_non_null(strstr(json, "\"state\":\"draining\""));
    free(json);
    request.id = 0;
    client_call(&late, &request, -1, &reply, NULL);
    assert_error(&reply, ERR_SHUTTING_DOWN);
    request.id = 0;
    client_send(&c, &request, -1);
    client_send(&c, &ping, -1);
    for (int i = 0; i < N + 2; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        if (reply.id == request.id) {
            assert_error(&reply, ERR_SHUTTING_DOWN);
            n_refused++;
        } else if (reply.verb == VERB_INFER) {
            assert_is_a(&reply);
            n_right++;
        } else {
            assert_ok(&reply);
        }
    }
    assert_int_equal(n_right, N);
    assert_int_equal(n_refused, 1);
    assert_true(client_is_closed(&c));
    client_close(&c);
    assert_true(client_is_closed(&late));
    client_close(&late);
    assert_int_equal(daemon_join(&d, 5), 0);
    assert_int_equal(access(d.socket, F_OK), -1);
    daemon_remove(&d);
}

/* Who asks for the status without a pause does not keep it from ending. */
static void drains_while_it_is_watched(void **state)
{
    struct proto_request request = {.verb = VERB_STATUS};
    struct proto_reply reply;
    struct daemon d;
    double begin;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, "info_ms=20");
    daemon_wait_ready(&d);
    client_start(&c, &d);
    for (int i = 0; i < 16; i++)
        client_send(&c, &(struct proto_request){.verb = VERB_STATUS}, -1);
    kill(d.pid, SIGTERM);
    begin = now_s();
    while (now_s() - begin < 4 && client_readable(&c, 4000)) {
        uint8_t bytes[100];
        int n;

        if (!client_recv(&c, &reply, NULL))
            break;
        request.id = reply.id;
        n = codec_encode_request(&request, bytes, sizeof(bytes));
        assert_true(n > 0);
        wire_send(c.fd, bytes, (size_t)n, -1); /* the daemon may be gone */
    }
    assert_true(now_s() - begin < 3);
    assert_int_equal(daemon_join(&d, 5), 0);
    client_close(&c);
    daemon_remove(&d);
}

static void drains_on_request(void **state)
{
    struct proto_request drain = {.verb = VERB_DRAIN};
    struct proto_reply reply;
    struct daemon d;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    client_start(&c, &d);
    client_call(&c, &drain, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(daemon_join(&d, 5), 0);
    client_close(&c);
    daemon_remove(&d);
}

/* One answer each, whatever ends the process; the exit code. */
static void ends_with(const char *script, const char *config, int first, int second,
                      enum proto_error error, int code)
{
    enum { N = 5 };
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon d;
    double begin;

    one_model(&d);
    write_file(d.config, config);
    daemon_spawn(&d, script);
    daemon_wait_ready(&d);
    client_start(&c, &d);
    for (int i = 0; i < N; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
        sleep_ms(10);
    }
    begin = now_s();
    if (first)
        kill(d.pid, first);
    if (second) {
        sleep_ms(100);
        kill(d.pid, second);
    }
    for (int i = 0; i < N; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_error(&reply, error);
    }
    assert_true(client_is_closed(&c));
    client_close(&c);
    assert_int_equal(daemon_join(&d, 5), code);
    assert_true(now_s() - begin < 5);
    assert_int_equal(access(d.socket, F_OK), -1);
    daemon_remove(&d);
}

static void ends_a_drain_in_time(void **state)
{
    (void)state;
    ends_with("hang_from=1", "drain_timeout_ms = 300;", SIGTERM, 0, ERR_SHUTTING_DOWN, 0);
}

static void ends_at_a_second_signal(void **state)
{
    (void)state;
    ends_with("hang_from=1", "", SIGTERM, SIGINT, ERR_SHUTTING_DOWN, 0);
}

/* G-01 */
static void ends_when_the_device_is_lost(void **state)
{
    (void)state;
    ends_with("delay_ms=100;sticky_from=1", "", 0, 0, ERR_GPU_LOST, 70);
    ends_with("slots=3;delay_ms=100;sticky_from=1", "", 0, 0, ERR_GPU_LOST, 70);
}

/* A running request and the one that met the lost device are told alike. */
static void ends_at(const char *script, struct proto_request *last, int fd)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    unsigned n_lost = 0;
    struct daemon d;

    one_model(&d);
    daemon_spawn(&d, script);
    daemon_wait_ready(&d);
    add_model(&d, MODEL_B);
    client_start(&c, &d);
    client_send(&c, &request, -1);
    client_send(&c, last, fd);
    for (int i = 0; i < 2; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_error(&reply, ERR_GPU_LOST);
        n_lost += reply.id == request.id || reply.id == last->id;
    }
    assert_int_equal(n_lost, 2);
    assert_true(client_is_closed(&c));
    client_close(&c);
    assert_int_equal(daemon_join(&d, 5), 70);
    assert_true(log_has(&d, "device.lost"));
    daemon_remove(&d);
}

/* Helper threads learn of it, too. */
static void ends_when_the_device_is_lost_outside_a_batch(void **state)
{
    struct proto_request load = {.verb = VERB_MODEL_LOAD, .model.name = str(MODEL_B)},
                         create = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 4096},
                         import = {.verb = VERB_BUFFER_REGISTER,
                                   .buffer_register = {.kind = BUFFER_CUDA, .size_bytes = 4096}};
    struct daemon d;
    int fd = memfd_create("import", MFD_CLOEXEC);

    (void)state;
    assert_true(fd >= 0);
    ends_at("delay_ms=60000;lost_load=2", &load, -1);
    load.id = 0;
    load.verb = VERB_MODEL_RELOAD;
    load.model.name = str("");
    ends_at("delay_ms=60000;lost_load=2", &load, -1);
    ends_at("delay_ms=60000;pins=1;lost_pin=1", &create, -1);
    create.id = 0;
    create.buffer_create.kind = BUFFER_CUDA;
    ends_at("delay_ms=60000;device_memory=1;lost_memory=1", &create, -1);
    ends_at("delay_ms=60000;device_memory=1;lost_memory=1", &import, fd);
    close(fd);
    one_model(&d);
    assert_int_equal(run(&d, "lost_load=1"), 70);
    daemon_remove(&d);
}

/* G-04 */
static void ends_when_a_batch_does_not(void **state)
{
    (void)state;
    ends_with("hang_from=1", "batch_timeout_ms = 400;", 0, 0, ERR_GPU_LOST, 70);
}

/* L-02: clients that die at any moment, half of them in the middle of something. */
static void survives_dying_clients(void **state)
{
    struct daemon d;

    (void)state;
    daemon_start(&d, NULL, NULL);
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();

        assert_true(child >= 0);
        if (child == 0) {
            static struct client mine;
            struct proto_request request = infer_a(x);
            struct proto_request create = {.verb = VERB_BUFFER_CREATE,
                                           .buffer_create.size_bytes = 100000};

            client_start(&mine, &d);
            for (;;) {
                int n;

                request.id = ++mine.last_id;
                n = codec_encode_request(&request, mine.tx, sizeof(mine.tx));
                wire_send(mine.fd, mine.tx, (size_t)n, -1);
                create.id = ++mine.last_id;
                n = codec_encode_request(&create, mine.tx, sizeof(mine.tx));
                wire_send(mine.fd, mine.tx, (size_t)n, -1);
                if (wire_send(mine.fd, "\x82\xa2id", 4, -1) < 0 || i % 2)
                    pause();
                recv(mine.fd, mine.rx, sizeof(mine.rx), 0);
            }
        }
        sleep_ms(i % 11);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
    }
    assert_healthy(&d);
    daemon_stop(&d);
}

/* L-14 */
static void ignores_sigpipe(void **state)
{
    struct daemon d;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    kill(d.pid, SIGPIPE);
    sleep_ms(20);
    assert_healthy(&d);
    daemon_stop(&d);
}

/* C-06, S-15: without descriptors it waits instead of spinning, and goes on when there are some. */
static void lives_without_descriptors(void **state)
{
    static struct client many[40];
    struct proto_request request = {.verb = VERB_BUFFER_REGISTER,
                                    .buffer_register.size_bytes = 4096};
    struct proto_reply reply;
    struct daemon d;
    char path[200];
    FILE *file;

    (void)state;
    one_model(&d);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    snprintf(path, sizeof(path), "prlimit --pid %d --nofile=32:32", (int)d.pid);
    file = popen(path, "re");
    assert_non_null(file);
    assert_int_equal(pclose(file), 0);
    for (size_t i = 0; i < ARRAY_SIZE(many); i++)
        client_open(&many[i], &d);
    sleep_ms(300);
    /* It has no room for a descriptor, which is not a bad message. */
    client_hello(&many[0]);
    for (unsigned i = 0; i <= PROTO_BAD_MESSAGES_MAX; i++) {
        request.id = 0;
        client_call(&many[0], &request, STDIN_FILENO, &reply, NULL);
        assert_error(&reply, ERR_BUSY);
    }
    for (size_t i = 0; i < ARRAY_SIZE(many); i++)
        client_close(&many[i]);
    assert_healthy(&d);
    assert_true(log_has(&d, "accept.paused"));
    daemon_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_nobodys_place),
        cmocka_unit_test(lets_only_one_run),
        cmocka_unit_test(refuses_long_paths),
        cmocka_unit_test(leaves_nothing_behind),
        cmocka_unit_test(is_ready_when_it_serves),
        cmocka_unit_test(says_nothing_when_killed_while_starting),
        cmocka_unit_test(takes_a_socket_over),
        cmocka_unit_test(refuses_bad_configuration),
        cmocka_unit_test(knows_its_options),
        cmocka_unit_test(checks_the_system),
        cmocka_unit_test(checks_the_devices_of_models),
        cmocka_unit_test(says_that_it_cannot_print),
        cmocka_unit_test(says_that_there_is_no_device),
        cmocka_unit_test(starts_without_stdio),
        cmocka_unit_test(drains),
        cmocka_unit_test(drains_while_it_is_watched),
        cmocka_unit_test(drains_on_request),
        cmocka_unit_test(ends_a_drain_in_time),
        cmocka_unit_test(ends_at_a_second_signal),
        cmocka_unit_test(ends_when_the_device_is_lost),
        cmocka_unit_test(ends_when_the_device_is_lost_outside_a_batch),
        cmocka_unit_test(ends_when_a_batch_does_not),
        cmocka_unit_test(survives_dying_clients),
        cmocka_unit_test(ignores_sigpipe),
        cmocka_unit_test(lives_without_descriptors),
    };

    return cmocka_run_group_tests(tests, start, NULL);
}
