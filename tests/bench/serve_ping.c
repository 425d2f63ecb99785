/*
 * serve_ping.c - what a call of the library costs beside a bare ping-pong, and what memory of the
 * daemon does
 *
 *     serve_ping SOCKET MODEL K DAEMON-PID CPU-HERE CPU-THERE [JSON]
 *
 * The yardstick is a thread-free echo over SOCK_SEQPACKET of 64 bytes: a child on the daemon's CPU,
 * poll() and recv() on this side as in any client that may not wait for ever. Runs of the
 * yardstick, of fused_ping() and of fused_run() with one inline row of K float32 alternate, so that
 * what happens to the machine happens to all; each figure is the median of the runs' medians, and
 * each ratio the median of the ratios of neighbours. A second yardstick is answered half a
 * millisecond late: what is beyond that is the price of waking a client that has slept so long,
 * which every answer to a large batch pays. At the end 100,000 requests, and the daemon's resident
 * memory before and after.
 *
 * The daemon must be pinned to CPU-THERE by whoever starts it (serve.sh).
 */
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/fused.h"

#define RUNS    11
#define CALLS   3000
#define LATE    300 /* calls */
#define LATE_US 500
#define SOAK    100000
#define WARM    20000 /* before the first look at memory */
#define PING    64
#define K_MAX   8192
#define TIMEOUT 10000

enum kind { BARE, BARE_LATE, LIBRARY_PING, LIBRARY_RUN, KINDS };

static const char *const names[] = {"bare SEQPACKET ping-pong", "the same, beyond 500 us",
                                    "fused_ping()", "fused_run(), one row"};

struct bench {
    int socket; /* of the yardstick */
    struct fused *f;
    struct fused_infer call;
    float x[K_MAX];
    double medians[KINDS][RUNS], ratios[KINDS][RUNS];
};

static int fail(const char *what)
{
    perror(what);
    return 1;
}

static bool pin(int cpu)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof(set), &set) == 0;
}

static double now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static pid_t start_echo(int cpu, int *ret_socket)
{
    int sockets[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
        return -1;
    pid = fork();
    if (pid == 0) {
        char bytes[PING];
        ssize_t n;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(sockets[0]);
        if (!pin(cpu))
            _exit(1);
        while ((n = recv(sockets[1], bytes, sizeof(bytes), 0)) > 0) {
            double until = now_us() + bytes[0] * LATE_US;

            while (now_us() < until)
                ;
            if (send(sockets[1], bytes, (size_t)n, 0) != n)
                break;
        }
        _exit(0);
    }
    close(sockets[1]);
    *ret_socket = sockets[0];
    return pid;
}

static bool bare_ping(int fd, bool late)
{
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    char bytes[PING] = {late};

    return send(fd, bytes, sizeof(bytes), 0) == sizeof(bytes) && poll(&poller, 1, TIMEOUT) == 1 &&
           recv(fd, bytes, sizeof(bytes), 0) == sizeof(bytes);
}

static bool call_once(struct bench *bench, enum kind kind)
{
    switch (kind) {
    case BARE:
    case BARE_LATE:
        return bare_ping(bench->socket, kind == BARE_LATE);
    case LIBRARY_PING:
        return fused_ping(bench->f) == 0;
    default:
        return fused_run(bench->f, &bench->call, NULL) == 0;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(const double *values, int n)
{
    static double sorted[CALLS];

    memcpy(sorted, values, (size_t)n * sizeof(*sorted));
    qsort(sorted, (size_t)n, sizeof(*sorted), by_value);
    return sorted[n / 2];
}

/* The median of many calls, or a negative number. */
static double run(struct bench *bench, enum kind kind)
{
    static double took[CALLS];
    const int calls = kind == BARE_LATE ? LATE : CALLS;

    for (int i = 0; i < calls; i++) {
        double start = now_us();

        if (!call_once(bench, kind))
            return -1;
        took[i] = now_us() - start - (kind == BARE_LATE ? LATE_US : 0);
    }
    return median(took, calls);
}

static long resident_kib(pid_t pid)
{
    char path[64], line[256];
    long kib = -1;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "VmRSS: %ld", &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kib;
}

static bool soak(struct bench *bench, int n)
{
    for (int i = 0; i < n; i++)
        if (!call_once(bench, LIBRARY_RUN))
            return false;
    return true;
}

static int measure(struct bench *bench)
{
    for (int i = 0; i < RUNS; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            bench->medians[kind][i] = run(bench, (enum kind)kind);
            if (bench->medians[kind][i] < 0)
                return fail(names[kind]);
            bench->ratios[kind][i] = bench->medians[kind][i] / bench->medians[BARE][i];
        }
    return 0;
}

static int report(struct bench *bench, int here, int there, const long *memory, const char *path)
{
    FILE *json = path != NULL ? fopen(path, "we") : NULL;

    if (path != NULL && json == NULL)
        return fail(path);
    printf("client on CPU %d, server on CPU %d; %d runs of %d calls (%d late), interleaved\n", here,
           there, RUNS, CALLS, LATE);
    for (int kind = 0; kind < KINDS; kind++)
        printf("  %-26s p50 %7.2f us  %5.2f times the bare one\n", names[kind],
               median(bench->medians[kind], RUNS), median(bench->ratios[kind], RUNS));
    printf("  daemon's resident memory over %d requests: %ld KiB, then %ld KiB (%+ld)\n", SOAK,
           memory[0], memory[1], memory[1] - memory[0]);
    if (json == NULL)
        return 0;
    fprintf(json,
            "{\"cpu_client\": %d, \"cpu_server\": %d, \"bare_us\": %.3f, "
            "\"bare_late_us\": %.3f, \"ping_us\": %.3f, \"ping_ratio\": %.3f, \"run_us\": %.3f, "
            "\"run_ratio\": %.3f, \"requests\": %d, "
            "\"resident_kib\": [%ld, %ld]}\n",
            here, there, median(bench->medians[BARE], RUNS),
            median(bench->medians[BARE_LATE], RUNS), median(bench->medians[LIBRARY_PING], RUNS),
            median(bench->ratios[LIBRARY_PING], RUNS), median(bench->medians[LIBRARY_RUN], RUNS),
            median(bench->ratios[LIBRARY_RUN], RUNS), SOAK, memory[0], memory[1]);
    return fclose(json) != 0 ? fail(path) : 0;
}

int main(int argc, char **argv)
{
    static struct bench bench;
    long k, memory[2];
    int here, there, r;
    pid_t echo, daemon;

    if (argc < 7) {
        fprintf(stderr, "usage: serve_ping SOCKET MODEL K DAEMON-PID CPU-HERE CPU-THERE [JSON]\n");
        return 64;
    }
    k = strtol(argv[3], NULL, 10);
    daemon = (pid_t)strtol(argv[4], NULL, 10);
    here = (int)strtol(argv[5], NULL, 10);
    there = (int)strtol(argv[6], NULL, 10);
    if (k < 1 || k > K_MAX)
        return 64;
    echo = start_echo(there, &bench.socket);
    if (echo < 0 || !pin(here))
        return fail("start");
    r = fused_connect(argv[1], "bench", &bench.f);
    if (r != 0) {
        fprintf(stderr, "%s: %s\n", argv[1], fused_code_name(r));
        return 69;
    }
    fused_set_timeout(bench.f, TIMEOUT);
    bench.call = (struct fused_infer)FUSED_INFER_INIT;
    bench.call.model = argv[2];
    bench.call.input = fused_tensor_at(bench.x, FUSED_FLOAT32, 2, (int64_t[]){1, k});
    r = measure(&bench);
    if (r == 0 && soak(&bench, WARM)) {
        memory[0] = resident_kib(daemon);
        if (!soak(&bench, SOAK))
            return fail("soak");
        memory[1] = resident_kib(daemon);
        r = report(&bench, here, there, memory, argc > 7 ? argv[7] : NULL);
    }
    fused_close(bench.f);
    close(bench.socket);
    waitpid(echo, NULL, 0);
    return r;
}
