/*
 * daemon.h - a real daemon in a folder of its own, and clients that speak the wire by hand
 *
 * $B/fused is started on copies of golden models. Everything fails the test at once with a message;
 * nothing here returns an error.
 */
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "kernels/safetensors.h"
#include "proto/base.h"
#include "proto/codec.h"
#include "proto/proto.h"
#include "proto/shm.h"
#include "proto/wire.h"

/* Not inlined: the stack frames of tests stay small. */
#define HELPER static __attribute__((unused, noinline))

#define MODEL_A       "a_8x64x128_g8"               /* [8, 64] -> [1, 128, 8, 1] */
#define MODEL_B       "b_n2_c3-16_k3_min0.0_max1.0" /* constant */
#define MODEL_FULL    "b_full_n2_c3-16_k3"          /* not constant */
#define MODEL_DROPOUT "dropout_n1027_s7_o400"

#define A_ROWS      8
#define A_IN        64
#define A_OUT       128
#define A_IN_BYTES  (A_ROWS * A_IN * 4)
#define A_OUT_BYTES (A_ROWS * A_OUT * 4)

struct daemon {
    pid_t pid;
    char dir[64], socket[96], models[96], log[96], config[96];
    unsigned n_fds; /* open when idle */
};

struct client {
    int fd;
    struct codec *codec;
    uint8_t rx[PROTO_DATAGRAM_MAX], tx[PROTO_DATAGRAM_MAX + 1];
    uint64_t last_id;
};

/* ---- small things ---- */

HELPER double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

HELPER void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

HELPER void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "we");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

HELPER void copy_file(const char *from, const char *to)
{
    char bytes[2048];
    FILE *in = fopen(from, "re"), *out = fopen(to, "we");
    size_t n;

    if (!in)
        fail_msg("%s: %s", from, strerror(errno));
    assert_non_null(out);
    while ((n = fread(bytes, 1, sizeof(bytes), in)) > 0)
        assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

HELPER void add_model(const struct daemon *daemon, const char *name)
{
    char from[300], to[300];

    snprintf(from, sizeof(from), "tests/golden/%s.safetensors", name);
    snprintf(to, sizeof(to), "%s/%s.safetensors", daemon->models, name);
    copy_file(from, to);
    snprintf(from, sizeof(from), "tests/golden/%s.conf", name);
    snprintf(to, sizeof(to), "%s/%s.conf", daemon->models, name);
    copy_file(from, to);
}

HELPER int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

HELPER void remove_tree(const char *path)
{
    nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

HELPER const char *built(const char *name)
{
    static char path[4][300];
    static unsigned i;
    const char *b = getenv("B");

    i = (i + 1) % 4;
    snprintf(path[i], sizeof(path[i]), "%s/%s", b ? b : "build", name);
    return path[i];
}

/* ---- the daemon ---- */

HELPER unsigned count_fds(pid_t pid)
{
    char path[64];
    unsigned n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    dir = opendir(path);
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n > 2 ? n - 2 : 0;
}

HELPER void print_fds(pid_t pid)
{
    char path[64], name[320], target[200];
    struct dirent *entry;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    dir = opendir(path);
    while (dir && (entry = readdir(dir))) {
        ssize_t n;

        snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        n = readlink(name, target, sizeof(target) - 1);
        target[n > 0 ? n : 0] = '\0';
        print_message("    %s %s\n", entry->d_name, target);
    }
    if (dir)
        closedir(dir);
}

HELPER void daemon_prepare(struct daemon *daemon)
{
    *daemon = (struct daemon){0};
    snprintf(daemon->dir, sizeof(daemon->dir), "/tmp/fused-test-XXXXXX");
    assert_non_null(mkdtemp(daemon->dir));
    snprintf(daemon->socket, sizeof(daemon->socket), "%s/s", daemon->dir);
    snprintf(daemon->models, sizeof(daemon->models), "%s/models", daemon->dir);
    snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
    snprintf(daemon->config, sizeof(daemon->config), "%s/fused.conf", daemon->dir);
    assert_int_equal(mkdir(daemon->models, 0700), 0);
    write_file(daemon->config, "");
}

/* Starts without waiting. `script` NULL: the CPU backend, else the scripted one. */
HELPER void daemon_spawn(struct daemon *daemon, const char *script)
{
    const char *backend = script ? built("fake-backend.so") : "cpu", *fused = built("fused");
    char path[400];

    snprintf(path, sizeof(path), "%s%s", script && backend[0] != '/' ? "./" : "", backend);
    daemon->pid = fork();
    assert_true(daemon->pid >= 0);
    if (daemon->pid == 0) {
        int fd = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fd, STDERR_FILENO);
        dup2(fd, STDOUT_FILENO);
        unsetenv("FUSED_SOCKET");
        setenv("FUSED_FAKE_SCRIPT", script ? script : "", 1);
        execl(fused, fused, "--config", daemon->config, "--socket", daemon->socket, "--models",
              daemon->models, "--backend", path, (char *)NULL);
        _exit(127);
    }
}

HELPER void print_log(const struct daemon *daemon)
{
    FILE *file = fopen(daemon->log, "re");
    char line[1200];

    while (file && fgets(line, sizeof(line), file))
        print_message("    %s", line);
    if (file)
        fclose(file);
}

HELPER bool log_has(const struct daemon *daemon, const char *text)
{
    FILE *file = fopen(daemon->log, "re");
    bool found = false;
    char line[2400];

    while (file && !found && fgets(line, sizeof(line), file))
        found = strstr(line, text);
    if (file)
        fclose(file);
    return found;
}

HELPER void daemon_wait_ready(struct daemon *daemon)
{
    for (int i = 0; i < 2000; i++) {
        int fd = wire_connect(daemon->socket), status;

        if (fd >= 0) {
            close(fd);
            sleep_ms(20);
            daemon->n_fds = count_fds(daemon->pid);
            return;
        }
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) {
            print_log(daemon);
            fail_msg("the daemon ended with %x", status);
        }
        sleep_ms(5);
    }
    print_log(daemon);
    fail_msg("the daemon does not listen");
}

/* A running daemon with the four models; `config` NULL: all defaults. */
HELPER void daemon_start(struct daemon *daemon, const char *script, const char *config)
{
    daemon_prepare(daemon);
    add_model(daemon, MODEL_A);
    add_model(daemon, MODEL_B);
    add_model(daemon, MODEL_FULL);
    add_model(daemon, MODEL_DROPOUT);
    if (config)
        write_file(daemon->config, config);
    daemon_spawn(daemon, script);
    daemon_wait_ready(daemon);
}

/* Waits for the end; the exit code, or 1000 + signal. */
HELPER int daemon_join(struct daemon *daemon, double seconds)
{
    double until = now_s() + seconds;
    int status;

    while (now_s() < until) {
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) {
            daemon->pid = 0;
            return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
        }
        sleep_ms(5);
    }
    print_log(daemon);
    kill(daemon->pid, SIGKILL);
    waitpid(daemon->pid, &status, 0);
    fail_msg("the daemon did not end within %g s", seconds);
    return -1;
}

HELPER void daemon_remove(struct daemon *daemon)
{
    remove_tree(daemon->dir);
}

/* SIGTERM, exit code 0, nothing left at the path. */
HELPER void daemon_stop(struct daemon *daemon)
{
    int code;

    kill(daemon->pid, SIGTERM);
    code = daemon_join(daemon, 10);
    if (code != 0)
        print_log(daemon);
    assert_int_equal(code, 0);
    assert_int_equal(access(daemon->socket, F_OK), -1);
    daemon_remove(daemon);
}

/* ---- clients ---- */

HELPER void client_open(struct client *client, const struct daemon *daemon)
{
    client->fd = wire_connect(daemon->socket);
    if (client->fd < 0)
        fail_msg("connect: %s", strerror(-client->fd));
    client->codec = codec_new();
    client->last_id = 0;
    assert_non_null(client->codec);
}

HELPER void client_close(struct client *client)
{
    close(client->fd);
    client->codec = codec_free(client->codec);
}

HELPER void client_send_raw(struct client *client, const void *bytes, size_t n, int fd)
{
    int r = wire_send(client->fd, bytes, n, fd);

    if (r != 0)
        fail_msg("send: %s", strerror(-r));
}

/* Sends with a fresh id if it has none; returns the id. */
HELPER uint64_t client_send(struct client *client, struct proto_request *request, int fd)
{
    int n;

    if (request->id == 0)
        request->id = ++client->last_id;
    n = codec_encode_request(request, client->tx, sizeof(client->tx));
    if (n < 0)
        fail_msg("encode: %s", strerror(-n));
    client_send_raw(client, client->tx, (size_t)n, fd);
    return request->id;
}

/* Is there a datagram, or the end, within that time? */
HELPER bool client_readable(struct client *client, int timeout_ms)
{
    struct pollfd p = {.fd = client->fd, .events = POLLIN};

    return poll(&p, 1, timeout_ms) == 1;
}

/* The next reply; lives until the next receive. False: the server closed. */
HELPER bool client_recv(struct client *client, struct proto_reply *reply, int *ret_fd)
{
    const char *reason = "";
    int fd = -1, n, r;

    if (!client_readable(client, 10000))
        fail_msg("no reply within 10 s");
    n = wire_recv(client->fd, client->rx, sizeof(client->rx), &fd);
    if (n == 0 || n == -ECONNRESET)
        return false;
    if (n < 0)
        fail_msg("receive: %s", strerror(-n));
    r = codec_decode_reply(client->codec, client->rx, (size_t)n, reply, &reason);
    if (r != 0)
        fail_msg("the reply is wrong: %s", reason);
    if (ret_fd)
        *ret_fd = fd;
    else if (fd >= 0)
        close(fd);
    return true;
}

HELPER bool client_is_closed(struct client *client)
{
    char byte;

    return client_readable(client, 2000) && recv(client->fd, &byte, 1, MSG_DONTWAIT) <= 0 &&
           errno != EAGAIN;
}

/* Sends and receives its one answer. */
HELPER void client_call(struct client *client, struct proto_request *request, int fd,
                        struct proto_reply *reply, int *ret_fd)
{
    uint64_t id = client_send(client, request, fd);

    if (!client_recv(client, reply, ret_fd))
        fail_msg("%s: the server closed", proto_verb_name(request->verb));
    assert_true(reply->has_id);
    assert_int_equal(reply->id, id);
}

#define assert_ok(reply)                                                                 \
    do {                                                                                 \
        if ((reply)->error != ERR_NONE)                                                  \
            fail_msg("%s: %.*s", proto_error_name((reply)->error), (int)(reply)->text.n, \
                     (reply)->text.s);                                                   \
    } while (0)

#define assert_error(reply, code)                                                     \
    do {                                                                              \
        if ((reply)->error != (code))                                                 \
            fail_msg("got %s (%.*s), expected %s",                                    \
                     (reply)->error ? proto_error_name((reply)->error) : "an answer", \
                     (reply)->error ? (int)(reply)->text.n : 0,                       \
                     (reply)->error ? (reply)->text.s : "", proto_error_name(code));  \
        assert_text_is_clean(reply);                                                  \
    } while (0)

/* A refusal with these words in its reason. */
HELPER void assert_refused(const struct proto_reply *reply, enum proto_error code,
                           const char *words)
{
    if (reply->error != code || !memmem(reply->text.s, reply->text.n, words, strlen(words)))
        fail_msg("got %s (%.*s), expected %s with \"%s\"",
                 reply->error ? proto_error_name(reply->error) : "an answer",
                 reply->error ? (int)reply->text.n : 0, reply->error ? reply->text.s : "",
                 proto_error_name(code), words);
}

/* Does a number of at least that many digits follow the word somewhere? */
HELPER bool has_number(const char *text, const char *word, size_t n)
{
    for (const char *p = text; (p = strstr(p, word)); p++) {
        if (strspn(p + strlen(word), "0123456789abcdef") >= n)
            return true;
    }
    return false;
}

/* No error text carries a directory, an address or a control character. */
HELPER void assert_text_is_clean(const struct proto_reply *reply)
{
    char text[PROTO_TEXT_MAX + 1];

    assert_in_range(reply->text.n, 1, PROTO_TEXT_MAX);
    memcpy(text, reply->text.s, reply->text.n);
    text[reply->text.n] = '\0';
    if (strstr(text, "/tmp") || strstr(text, "/proc") || has_number(text, "0x", 6) ||
        has_number(text, "uid ", 1) || has_number(text, "fd ", 1))
        fail_msg("error text \"%s\"", text);
    for (const char *p = text; *p; p++)
        assert_true((unsigned char)*p >= 0x20);
}

HELPER struct proto_str str(const char *s)
{
    return (struct proto_str){s, (uint32_t)strlen(s)};
}

HELPER void client_hello(struct client *client)
{
    struct proto_request hello = {.verb = VERB_HELLO,
                                  .hello = {.version = PROTO_VERSION_MAX, .name = str("test")}};
    struct proto_reply reply;

    client_call(client, &hello, -1, &reply, NULL);
    assert_ok(&reply);
}

HELPER void client_start(struct client *client, const struct daemon *daemon)
{
    client_open(client, daemon);
    client_hello(client);
}

/* A buffer: its handle; mapped into *shm. */
HELPER uint32_t client_buffer(struct client *client, size_t size, struct shm *shm)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = size};
    struct proto_reply reply;
    int fd = -1;

    client_call(client, &request, -1, &reply, &fd);
    assert_ok(&reply);
    assert_int_equal(reply.buffer.size_bytes, size);
    assert_true(fd >= 0);
    *shm = SHM_INIT;
    assert_int_equal(shm_open_sealed(fd, size, shm), 0);
    return reply.buffer.buffer;
}

/* ---- golden data and the request that every test makes ---- */

HELPER void golden_read(const char *name, const char *tensor, void *to, size_t size)
{
    struct safetensors *file = NULL;
    const struct st_tensor *found;
    struct report report = {""};
    char path[300];

    snprintf(path, sizeof(path), "tests/golden/%s.safetensors", name);
    if (safetensors_open(AT_FDCWD, path, &file, &report) != 0)
        fail_msg("%s", report.text);
    found = safetensors_find(file, tensor);
    assert_non_null(found);
    assert_int_equal(found->size, size);
    assert_int_equal(safetensors_read(file, found, 0, found->elements, to, &report), 0);
    safetensors_free(file);
}

HELPER void assert_near(const float *got, const float *wanted, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!(fabsf(got[i] - wanted[i]) <= 1e-4f + 1e-4f * fabsf(wanted[i])))
            fail_msg("element %zu is %.9g, expected %.9g", i, (double)got[i], (double)wanted[i]);
    }
}

/* MODEL_A with inline input and output. `x` holds A_ROWS rows. */
HELPER struct proto_request infer_a(const float *x)
{
    return (struct proto_request){.verb = VERB_INFER,
                                  .infer = {
                                      .model = str(MODEL_A),
                                      .input = {.dtype = PROTO_FLOAT32,
                                                .rank = 2,
                                                .shape = {A_ROWS, A_IN},
                                                .is_inline = true,
                                                .bytes = (const uint8_t *)x,
                                                .n_bytes = A_IN_BYTES},
                                      .priority = PROTO_PRIORITY_DEFAULT,
                                  }};
}

HELPER void assert_is_a(const struct proto_reply *reply)
{
    static float wanted[A_ROWS * A_OUT], got[A_ROWS * A_OUT];

    assert_ok(reply);
    assert_true(reply->infer.output.is_inline);
    assert_int_equal(reply->infer.output.n_bytes, A_OUT_BYTES);
    golden_read(MODEL_A, "y", wanted, sizeof(wanted));
    memcpy(got, reply->infer.output.bytes, sizeof(got));
    assert_near(got, wanted, A_ROWS * A_OUT);
}

/* Within 5 s, that many descriptors more than when idle are open, or fewer. */
HELPER void assert_fds(const struct daemon *daemon, unsigned more)
{
    unsigned n = 0;

    for (int i = 0; i < 500; i++) {
        n = count_fds(daemon->pid);
        if (n <= daemon->n_fds + more)
            return;
        sleep_ms(10);
    }
    print_fds(daemon->pid);
    fail_msg("%u descriptors are open, %u were at the start", n, daemon->n_fds);
}

/* After a hostile act: the same process, a right answer to a clean client, and no descriptor more
 * than at the start. */
HELPER void assert_healthy(struct daemon *daemon)
{
    static float x[A_ROWS * A_IN];
    static struct client client;
    struct proto_request request;
    struct proto_reply reply;
    int status;

    if (waitpid(daemon->pid, &status, WNOHANG) != 0) {
        print_log(daemon);
        fail_msg("the daemon ended with %x", status);
    }
    golden_read(MODEL_A, "x", x, sizeof(x));
    client_start(&client, daemon);
    request = infer_a(x);
    client_call(&client, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    client_close(&client);
    assert_fds(daemon, 0);
}
