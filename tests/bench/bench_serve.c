/*
 * bench_serve.c - what serving adds, against the bare means that it is made of
 *
 * Each figure stands beside its yardstick of the same run: measured in turns, with the client
 * pinned to one core and the other side to another, or both to one; the median of the rounds'
 * ratios counts. With the argument "others", only what other clients do to one.
 *
 *     call       a library call of a tiny model   a bare SEQPACKET ping-pong; and one that a
 *                                                 second thread answers, as an engine does
 *     busy       a refused request                a ping
 *     deadline   lateness of DEADLINE answers     lateness of a thread with a timerfd
 *     polite     p99 while another uid floods     p99 of the same client alone
 *     pages      p99 while another client has     p99 of the same client alone
 *                buffers of 440 MiB made
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>

#include "tests/client/served.h"

#define MODEL       "a_3x64x64_g64" /* [N, 64] -> [1, 64, N, 1] */
#define K           64
#define ROUNDS      5
#define CALLS       2000
#define DEADLINES   200
#define POLITE      1000
#define FLOOD_CONNS 4
#define FLOOD_DEPTH 200
#define MESSAGE     200 /* bytes of a ping-pong */
#define BUFFER      ((size_t)440 << 20)

static char models[64];
static float x[K], y[K];

/* ---- small things ---- */

static void die(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_until(int64_t at_ns)
{
    struct timespec at = {.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
        ;
}

static int compare(const void *a, const void *b)
{
    double d = *(const double *)a - *(const double *)b;

    return (d > 0) - (d < 0);
}

/* Sorts. */
static double quantile(double *values, size_t n, double q)
{
    size_t i = (size_t)(q * (double)n);

    qsort(values, n, sizeof(values[0]), compare);
    return values[i < n ? i : n - 1];
}

static void pin(int core)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof(set), &set) != 0)
        die("sched_setaffinity");
}

/* Lines up a line of the table: figures in microseconds. */
static void print(const char *what, double value, double yardstick, double ratio, double goal)
{
    printf("%-34s %9.1f us %9.1f us %8.2f   %s %.1f\n", what, value, yardstick, ratio,
           ratio <= goal ? "within" : "ABOVE", goal);
}

/* ---- the other sides ---- */

/* Writes the model's file with other batching. */
static void make_models(const char *batching)
{
    char path[300], line[400];
    FILE *from, *to;

    snprintf(models, sizeof(models), "/tmp/fused-bench-XXXXXX");
    if (!mkdtemp(models))
        die("mkdtemp");
    snprintf(path, sizeof(path), "cp tests/golden/%s.safetensors %s", MODEL, models);
    if (system(path) != 0)
        die(path);
    from = fopen("tests/golden/" MODEL ".conf", "re");
    snprintf(path, sizeof(path), "%s/%s.conf", models, MODEL);
    to = fopen(path, "we");
    if (!from || !to)
        die(path);
    while (fgets(line, sizeof(line), from)) {
        if (strncmp(line, "batching", 8) != 0)
            fputs(line, to);
    }
    fprintf(to, "%s\n", batching);
    fclose(from);
    fclose(to);
}

static void serve(struct served *served, int core, const char *script, const char *batching)
{
    char backend[300] = "cpu";

    make_models(batching);
    if (script) {
        setenv("FUSED_FAKE_SCRIPT", script, 1);
        snprintf(backend, sizeof(backend), "%s%s/fake-backend.so",
                 served_build()[0] == '/' ? "" : "./", served_build());
    }
    if (core >= 0)
        pin(core);
    if (served_start_on(served, models, backend) != 0)
        die("the daemon did not start");
}

/* Requests may hang in it: it is not asked. */
static void end_served(struct served *served)
{
    char command[300];

    kill(served->pid, SIGKILL);
    waitpid(served->pid, NULL, 0);
    snprintf(command, sizeof(command), "rm -rf '%s' '%s'", served->dir, models);
    if (system(command) != 0)
        die(command);
}

static struct fused *connect_or_die(const struct served *served)
{
    struct fused *f;

    if (fused_connect(served->socket, "bench", &f) != 0)
        die("fused_connect");
    return f;
}

static struct {
    sem_t work;
    int done; /* eventfd */
} hop;

static void *hop_answer(void *none)
{
    while (sem_wait(&hop.work) == 0 && eventfd_write(hop.done, 1) == 0)
        ;
    return none;
}

/* Each message goes to another thread and comes back before it is answered: what serving costs a
 * process at least whose loop does not compute. */
static void hop_echo(int fd)
{
    struct pollfd fds[2] = {{.fd = fd, .events = POLLIN}, {.events = POLLIN}};
    char message[MESSAGE];
    pthread_t thread;
    eventfd_t n;

    fds[1].fd = hop.done = eventfd(0, EFD_CLOEXEC);
    if (hop.done < 0 || sem_init(&hop.work, 0, 0) != 0 ||
        pthread_create(&thread, NULL, hop_answer, NULL) != 0)
        _exit(1);
    while (poll(fds, 2, -1) > 0) {
        if (fds[1].revents && (eventfd_read(hop.done, &n) != 0 ||
                               send(fd, message, sizeof(message), MSG_NOSIGNAL) < 0))
            _exit(0);
        if (fds[0].revents &&
            (recv(fd, message, sizeof(message), 0) <= 0 || sem_post(&hop.work) != 0))
            _exit(0);
    }
    _exit(1);
}

/* A child on `core` that sends back what it gets. */
static pid_t echo(int core, bool hops, int *ret_fd)
{
    char message[MESSAGE];
    int fds[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0)
        die("socketpair");
    pid = fork();
    if (pid == 0) {
        ssize_t n;

        pin(core);
        close(fds[0]);
        if (hops)
            hop_echo(fds[1]);
        while ((n = recv(fds[1], message, sizeof(message), 0)) > 0) {
            if (send(fds[1], message, (size_t)n, 0) != n)
                break;
        }
        _exit(0);
    }
    close(fds[1]);
    *ret_fd = fds[0];
    return pid;
}

/* ---- call ---- */

static struct fused_infer tiny_call(void)
{
    struct fused_infer call = FUSED_INFER_INIT;

    call.model = MODEL;
    call.input = fused_tensor_at(x, FUSED_FLOAT32, 2, (int64_t[]){1, K});
    call.output = fused_tensor_at(y, FUSED_FLOAT32, 4, (int64_t[]){1, K, 1, 1});
    return call;
}

static double time_call(struct fused *f, const struct fused_infer *call, int wanted)
{
    int64_t begin = now_ns();
    int r = fused_run(f, call, NULL);

    if (r != wanted) {
        printf("%s: %s\n", fused_code_name(r), fused_error_text(f));
        exit(1);
    }
    return (double)(now_ns() - begin) / 1e3;
}

static double time_pingpong(int fd)
{
    char message[MESSAGE] = {0};
    int64_t begin = now_ns();

    if (send(fd, message, sizeof(message), 0) < 0 || recv(fd, message, sizeof(message), 0) <= 0)
        die("ping-pong");
    return (double)(now_ns() - begin) / 1e3;
}

/* Ours and another one's in turns: the median of the rounds, and of their ratios. */
static double in_turns(struct fused *f, int fd, double *ret_ours, double *ret_bare)
{
    static double ours[CALLS], bare[CALLS];
    double ratios[ROUNDS], ours_p50[ROUNDS], bare_p50[ROUNDS];
    struct fused_infer call = tiny_call();

    for (int k = 0; k < ROUNDS; k++) {
        for (int i = 0; i < CALLS; i++) {
            ours[i] = time_call(f, &call, 0);
            bare[i] = time_pingpong(fd);
        }
        ours_p50[k] = quantile(ours, CALLS, 0.5);
        bare_p50[k] = quantile(bare, CALLS, 0.5);
        ratios[k] = ours_p50[k] / bare_p50[k];
    }
    *ret_ours = quantile(ours_p50, ROUNDS, 0.5);
    *ret_bare = quantile(bare_p50, ROUNDS, 0.5);
    return quantile(ratios, ROUNDS, 0.5);
}

static void bench_call(const char *what, int core, double goal)
{
    struct fused_infer call = tiny_call();
    double ours, bare, ratio;
    struct served served;
    struct fused *f;
    pid_t pid;
    int fd;

    serve(&served, core, NULL, "batching = { max_rows = 64; };");
    pid = echo(core, false, &fd);
    pin(0);
    f = connect_or_die(&served);
    for (int i = 0; i < CALLS; i++)
        time_call(f, &call, 0);
    ratio = in_turns(f, fd, &ours, &bare);
    print(what, ours, bare, ratio, goal);
    close(fd);
    waitpid(pid, NULL, 0);
    pid = echo(core, true, &fd);
    ratio = in_turns(f, fd, &ours, &bare);
    printf("%-34s %9.1f us %9.1f us %8.2f   that a second thread answers\n", "  against one", ours,
           bare, ratio);
    close(fd);
    waitpid(pid, NULL, 0);
    fused_close(f);
    end_served(&served);
}

/* ---- busy ---- */

static void bench_busy(int core)
{
    static double busy[CALLS], ping[CALLS];
    double ratios[ROUNDS], busy_p50[ROUNDS], ping_p50[ROUNDS];
    struct fused_infer call = tiny_call();
    struct served served;
    struct fused *f;

    /* One runs for ever, one waits: the queue is full. */
    serve(&served, core, "hang_from=1", "batching = { max_rows = 1; queue_rows = 1; };");
    pin(0);
    f = connect_or_die(&served);
    if (fused_submit(f, &call, NULL) != 0)
        die("fused_submit");
    usleep(100000);
    if (fused_submit(f, &call, NULL) != 0)
        die("fused_submit");
    for (int k = 0; k < ROUNDS; k++) {
        for (int i = 0; i < CALLS; i++) {
            int64_t begin;

            busy[i] = time_call(f, &call, FUSED_BUSY);
            begin = now_ns();
            if (fused_ping(f) != 0)
                die("fused_ping");
            ping[i] = (double)(now_ns() - begin) / 1e3;
        }
        busy_p50[k] = quantile(busy, CALLS, 0.5);
        ping_p50[k] = quantile(ping, CALLS, 0.5);
        ratios[k] = busy_p50[k] / ping_p50[k];
    }
    print("busy: refused, against a ping", quantile(busy_p50, ROUNDS, 0.5),
          quantile(ping_p50, ROUNDS, 0.5), quantile(ratios, ROUNDS, 0.5), 2);
    fused_close(f);
    end_served(&served);
}

/* ---- deadline ---- */

/* Microseconds from now, spread over 1.6 s in an order of its own. */
static uint64_t deadline_us(int i)
{
    return 200000 + (uint64_t)(i * 7919 % DEADLINES) * 8000;
}

/* The wake-ups of a thread that does nothing else. */
static void time_timerfd(double *late_us)
{
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    int64_t begin = now_ns();

    for (int i = 0; i < DEADLINES; i++) {
        int64_t at = begin + 200000000 + (int64_t)i * 8000000;
        struct itimerspec spec = {
            .it_value = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000}};
        uint64_t n;

        if (timerfd_settime(fd, TFD_TIMER_ABSTIME, &spec, NULL) != 0 ||
            read(fd, &n, sizeof(n)) != sizeof(n))
            die("timerfd");
        late_us[i] = (double)(now_ns() - at) / 1e3;
    }
    close(fd);
}

/* The device is busy for 2 s with a request that came before. */
static void time_deadlines(struct fused *f, double *late_us)
{
    static struct {
        uint64_t id;
        int64_t due_ns;
    } sent[DEADLINES];
    struct fused_infer call = tiny_call();
    struct fused_result result;
    uint64_t running;
    int n = 0;

    if (fused_submit(f, &call, &running) != 0)
        die("fused_submit");
    usleep(20000);
    for (int i = 0; i < DEADLINES; i++) {
        call.deadline_us = deadline_us(i);
        /* The daemon counts from its receipt: at the earliest when it was sent, and before the ping
         * is answered. */
        if (fused_submit(f, &call, &sent[i].id) != 0)
            die("fused_submit");
        sent[i].due_ns = now_ns() + (int64_t)call.deadline_us * 1000;
        if (fused_ping(f) != 0)
            die("fused_ping");
    }
    while (n < DEADLINES) {
        if (fused_next(f, 5000, &result) != 0)
            die("fused_next");
        if (result.code != FUSED_DEADLINE)
            continue;
        for (int i = 0; i < DEADLINES; i++) {
            if (sent[i].id == result.id)
                late_us[n] = (double)(now_ns() - sent[i].due_ns) / 1e3;
        }
        n++;
    }
    while (fused_next(f, 3000, &result) == 0)
        ;
}

static void bench_deadline(int core)
{
    static double ours[ROUNDS * DEADLINES], bare[ROUNDS * DEADLINES];
    struct served served;
    struct fused *f;
    double a, b;

    serve(&served, core, "delay_ms=2000", "batching = { max_rows = 1; };");
    pin(0);
    f = connect_or_die(&served);
    for (int k = 0; k < ROUNDS; k++) {
        time_deadlines(f, ours + k * DEADLINES);
        pin(core);
        time_timerfd(bare + k * DEADLINES);
        pin(0);
    }
    a = quantile(ours, ROUNDS * DEADLINES, 0.5);
    b = quantile(bare, ROUNDS * DEADLINES, 0.5);
    print("deadline: lateness p50, timerfd's", a, b, a / b, 2);
    a = quantile(ours, ROUNDS * DEADLINES, 0.999);
    b = quantile(bare, ROUNDS * DEADLINES, 0.999);
    print("deadline: lateness p99.9", a, b, a / b, 2);
    fused_close(f);
    end_served(&served);
}

/* ---- polite ---- */

/* Another uid, on as many connections, never without requests in flight. */
static pid_t flood(const struct served *served)
{
    pid_t pid = fork();

    if (pid == 0) {
        struct fused_infer call = tiny_call();
        struct pollfd fds[FLOOD_CONNS];
        struct fused *f[FLOOD_CONNS];
        struct fused_result result;

        if (setresgid(54321, 54321, 54321) != 0 || setresuid(54321, 54321, 54321) != 0)
            die("setresuid");
        for (int i = 0; i < FLOOD_CONNS; i++) {
            f[i] = connect_or_die(served);
            for (int k = 0; k < FLOOD_DEPTH; k++)
                fused_submit(f[i], &call, NULL);
        }
        for (int i = 0; i < FLOOD_CONNS; i++)
            fds[i] = (struct pollfd){.fd = fused_fd(f[i]), .events = POLLIN};
        while (poll(fds, FLOOD_CONNS, 10000) > 0) {
            for (int i = 0; i < FLOOD_CONNS; i++) {
                while (fused_next(f[i], 0, &result) == 0)
                    fused_submit(f[i], &call, NULL);
            }
        }
        _exit(0);
    }
    return pid;
}

static double polite_p99(struct fused *f)
{
    static double took[POLITE];
    struct fused_infer call = tiny_call();
    int64_t at = now_ns();

    for (int i = 0; i < POLITE; i++) {
        at += 1000000;
        sleep_until(at);
        took[i] = time_call(f, &call, 0);
    }
    return quantile(took, POLITE, 0.99);
}

/* The same flood and the same polite one on a bare server: a thread that reads, and one that sends
 * each message back. What the machine's cores alone do to the polite one. */
#define BARE_CONNS (FLOOD_CONNS + 1)

static struct {
    int fds[BARE_CONNS];
    int pipe[2];
} bare;

static void *bare_answer(void *none)
{
    char bytes[MESSAGE] = "";
    uint8_t conns[4096];
    ssize_t n;

    while ((n = read(bare.pipe[0], conns, sizeof(conns))) > 0) {
        for (ssize_t i = 0; i < n; i++)
            send(bare.fds[conns[i]], bytes, sizeof(bytes), MSG_NOSIGNAL);
    }
    return none;
}

static void bare_serve(void)
{
    struct pollfd fds[BARE_CONNS];
    char bytes[MESSAGE];
    pthread_t thread;

    if (pipe2(bare.pipe, O_CLOEXEC) != 0 || pthread_create(&thread, NULL, bare_answer, NULL) != 0)
        _exit(1);
    for (uint8_t i = 0; i < BARE_CONNS; i++)
        fds[i] = (struct pollfd){.fd = bare.fds[i], .events = POLLIN};
    while (poll(fds, BARE_CONNS, -1) > 0) {
        for (uint8_t i = 0; i < BARE_CONNS; i++) {
            for (int k = 0; k < 16 && recv(fds[i].fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0;
                 k++) {
                if (write(bare.pipe[1], &i, 1) != 1)
                    _exit(1);
            }
        }
    }
    _exit(0);
}

static void bare_flood(const int *to)
{
    struct pollfd fds[FLOOD_CONNS];
    char bytes[MESSAGE] = "";

    for (int i = 0; i < FLOOD_CONNS; i++) {
        fds[i] = (struct pollfd){.fd = to[i], .events = POLLIN};
        for (int k = 0; k < FLOOD_DEPTH; k++)
            send(to[i], bytes, sizeof(bytes), 0);
    }
    while (poll(fds, FLOOD_CONNS, 10000) > 0) {
        for (int i = 0; i < FLOOD_CONNS; i++) {
            while (recv(to[i], bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
                send(to[i], bytes, sizeof(bytes), 0);
        }
    }
    _exit(0);
}

static double bare_p99(int fd)
{
    static double took[POLITE];
    int64_t at = now_ns();

    for (int i = 0; i < POLITE; i++) {
        at += 1000000;
        sleep_until(at);
        took[i] = time_pingpong(fd);
    }
    return quantile(took, POLITE, 0.99);
}

/* Ratio of the bare server's flooded p99 to its idle one. */
static double bare_ratio(void)
{
    double idle, flooded;
    int to[BARE_CONNS];
    pid_t server, pid;

    for (int i = 0; i < BARE_CONNS; i++) {
        int pair[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
            die("socketpair");
        bare.fds[i] = pair[0];
        to[i] = pair[1];
    }
    server = fork();
    if (server == 0)
        bare_serve();
    idle = bare_p99(to[FLOOD_CONNS]);
    pid = fork();
    if (pid == 0)
        bare_flood(to);
    usleep(300000);
    flooded = bare_p99(to[FLOOD_CONNS]);
    kill(pid, SIGKILL);
    kill(server, SIGKILL);
    waitpid(pid, NULL, 0);
    waitpid(server, NULL, 0);
    for (int i = 0; i < BARE_CONNS; i++) {
        close(bare.fds[i]);
        close(to[i]);
    }
    return flooded / idle;
}

static void bench_polite(void)
{
    double idle[ROUNDS], flooded[ROUNDS], ratios[ROUNDS], bares[ROUNDS];
    struct served served;
    struct fused *f;
    cpu_set_t all;

    if (geteuid() != 0) {
        printf("polite: needs root, for another uid\n");
        return;
    }
    CPU_ZERO(&all);
    for (int i = 0; i < CPU_SETSIZE; i++)
        CPU_SET(i, &all);
    sched_setaffinity(0, sizeof(all), &all);
    serve(&served, -1, NULL, "batching = { max_rows = 64; };");
    if (chmod(served.dir, 0755) != 0 || chmod(served.socket, 0666) != 0)
        die("chmod");
    f = connect_or_die(&served);
    polite_p99(f);
    for (int k = 0; k < ROUNDS; k++) {
        pid_t pid;

        bares[k] = bare_ratio();
        idle[k] = polite_p99(f);
        pid = flood(&served);
        usleep(300000);
        flooded[k] = polite_p99(f);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        usleep(200000);
        ratios[k] = flooded[k] / idle[k];
    }
    print("polite: p99 under a flood, alone", quantile(flooded, ROUNDS, 0.5),
          quantile(idle, ROUNDS, 0.5), quantile(ratios, ROUNDS, 0.5), 3);
    printf("%-34s %34.2f   the cores' part: what the same flood does to a bare server\n",
           "polite: the same ratio, bare", quantile(bares, ROUNDS, 0.5));
    fused_close(f);
    end_served(&served);
}

/* ---- pages ---- */

/* Has one large buffer made after the other. */
static pid_t make_buffers(const struct served *served)
{
    pid_t pid = fork();

    if (pid == 0) {
        struct fused *f = connect_or_die(served);

        for (;;) {
            struct fused_buffer *buffer = NULL;

            if (fused_buffer_create(f, BUFFER, &buffer) == 0)
                fused_buffer_free(buffer);
            usleep(20000);
        }
    }
    return pid;
}

static void bench_pages(void)
{
    double alone[ROUNDS], beside[ROUNDS], ratios[ROUNDS];
    struct served served;
    struct fused *f;

    serve(&served, -1, NULL, "batching = { max_rows = 64; };");
    f = connect_or_die(&served);
    polite_p99(f);
    for (int k = 0; k < ROUNDS; k++) {
        pid_t pid;

        alone[k] = polite_p99(f);
        pid = make_buffers(&served);
        usleep(100000);
        beside[k] = polite_p99(f);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        usleep(300000);
        ratios[k] = beside[k] / alone[k];
    }
    print("pages: p99 beside 440 MiB, alone", quantile(beside, ROUNDS, 0.5),
          quantile(alone, ROUNDS, 0.5), quantile(ratios, ROUNDS, 0.5), 1.1);
    fused_close(f);
    end_served(&served);
}

int main(int argc, char **argv)
{
    int far = (int)sysconf(_SC_NPROCESSORS_ONLN) > 1 ? 1 : 0;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!freopen("/dev/null", "w", stderr)) /* the daemons' logs */
        return 1;
    printf("%-34s %12s %12s %8s   %s\n", "", "ours", "yardstick", "ratio", "goal");
    if (argc > 1 && strcmp(argv[1], "others") == 0) {
        bench_polite();
        bench_pages();
        return 0;
    }
    bench_call("call: two cores, ping-pong", far, 1.5);
    bench_call("call: one core, ping-pong", 0, 3);
    bench_busy(far);
    bench_deadline(far);
    bench_polite();
    bench_pages();
    return 0;
}
