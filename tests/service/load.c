/*
 * load.c - traffic for the tests of the service, and what became of it
 *
 *     load SOCKET MODEL FEATURES burst N          N requests at once on one connection
 *     load SOCKET MODEL FEATURES loop MS CLIENTS  one after the other, that long or until SIGTERM,
 *                                                 each client again on a new connection when its
 *                                                 connection ends
 *
 * Prints "sent" when a burst is on its way, and at the end one line of NAME=N: connects that
 * worked, were refused (nobody listened) or failed otherwise, and requests by their one final
 * answer; "unanswered" are those, hello among them, whose connection ended first, "unsent" those
 * that it did not take any more. A client always sends the same row, so every answer must have the
 * bits of its first one; the others are "wrong". "gap_ms" is the longest time that one client went
 * without a result.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/fused.h"

#define CLIENTS_MAX  64
#define FEATURES_MAX 4096
#define TIMEOUT_MS   20000

struct client {
    pthread_t thread;
    int number;
    float row[FEATURES_MAX], first[FEATURES_MAX], result[FEATURES_MAX];
    int has_first;
    double last_ms, gap_ms;
    unsigned long connects, refused, failed, ok, shutting_down, gpu_lost, other, unanswered, unsent,
        wrong;
};

static const char *socket_path, *model;
static int64_t features;
static double until_ms;
static volatile sig_atomic_t is_enough;
static struct client clients[CLIENTS_MAX];

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void on_enough(int number)
{
    (void)number;
    is_enough = 1;
}

static int goes_on(void)
{
    return !is_enough && now_ms() < until_ms;
}

static void prepare(struct client *client, int number)
{
    client->number = number;
    client->last_ms = now_ms();
    for (int64_t i = 0; i < features; i++)
        client->row[i] = (float)((i * 37 + number * 11) % 101) / 50.0f - 1.0f;
}

static struct fused_infer call_of(struct client *client)
{
    struct fused_infer call = FUSED_INFER_INIT;
    const int64_t shape[] = {1, features};

    call.model = model;
    call.input = fused_tensor_at(client->row, FUSED_FLOAT32, 2, shape);
    return call;
}

static void count(struct client *client, int code, const struct fused_result *result)
{
    double now = now_ms();
    size_t size = (size_t)features * sizeof(float);

    switch (code) {
    case FUSED_OK:
        client->ok++;
        if (now - client->last_ms > client->gap_ms)
            client->gap_ms = now - client->last_ms;
        client->last_ms = now;
        if (!client->has_first)
            memcpy(client->first, result->output.data, size);
        else if (memcmp(client->first, result->output.data, size) != 0)
            client->wrong++;
        client->has_first = 1;
        return;
    case FUSED_SHUTTING_DOWN:
        client->shutting_down++;
        return;
    case FUSED_GPU_LOST:
        client->gpu_lost++;
        return;
    default:
        if (code < 0)
            client->unanswered++;
        else
            client->other++;
    }
}

static struct fused *connect_once(struct client *client)
{
    struct fused *f = NULL;
    int r = fused_connect(socket_path, "load", &f);

    if (r == 0) {
        client->connects++;
        fused_set_timeout(f, TIMEOUT_MS);
    } else if (r == -ECONNREFUSED || r == -ENOENT) {
        client->refused++;
    } else if (r == -EPIPE) {
        client->unanswered++; /* its hello: whoever took the connection has ended */
    } else {
        client->failed++;
    }
    return r == 0 ? f : NULL;
}

static void *loop(void *argument)
{
    struct client *client = argument;

    while (goes_on()) {
        struct fused *f = connect_once(client);
        int code = 0;

        if (!f)
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        while (f && code == 0 && goes_on()) {
            struct fused_infer call = call_of(client);
            struct fused_result result;

            code = fused_submit(f, &call, NULL);
            if (code != 0) {
                client->unsent++;
                break;
            }
            code = fused_next(f, TIMEOUT_MS, &result);
            code = code == 0 ? result.code : code;
            count(client, code, &result);
        }
        fused_close(f);
    }
    return NULL;
}

static void burst(struct client *client, int n)
{
    struct fused *f = connect_once(client);
    struct fused_infer call = call_of(client);
    int r = 0, sent = 0;

    while (f && sent < n && (r = fused_submit(f, &call, NULL)) == 0)
        sent++;
    puts("sent");
    fflush(stdout);
    for (int i = 0; i < sent; i++) {
        struct fused_result result;

        r = fused_next(f, TIMEOUT_MS, &result);
        count(client, r == 0 ? result.code : r, &result);
    }
    fused_close(f);
}

static int usage(void)
{
    fputs("usage: load SOCKET MODEL FEATURES burst N | loop MS CLIENTS\n", stderr);
    return 64;
}

int main(int argc, char **argv)
{
    struct client sum = {0};
    int n = 1;

    if (argc < 6)
        return usage();
    socket_path = argv[1];
    model = argv[2];
    features = strtol(argv[3], NULL, 10);
    if (features < 1 || features > FEATURES_MAX)
        return usage();
    if (strcmp(argv[4], "burst") == 0) {
        prepare(&clients[0], 0);
        burst(&clients[0], (int)strtol(argv[5], NULL, 10));
    } else if (strcmp(argv[4], "loop") == 0 && argc == 7) {
        n = (int)strtol(argv[6], NULL, 10);
        if (n < 1 || n > CLIENTS_MAX)
            return usage();
        until_ms = now_ms() + (double)strtol(argv[5], NULL, 10);
        sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_enough, .sa_flags = SA_RESTART},
                  NULL);
        for (int i = 0; i < n; i++) {
            prepare(&clients[i], i);
            if (pthread_create(&clients[i].thread, NULL, loop, &clients[i]) != 0)
                return 74;
        }
        for (int i = 0; i < n; i++)
            pthread_join(clients[i].thread, NULL);
    } else {
        return usage();
    }
    for (int i = 0; i < n; i++) {
        const struct client *c = &clients[i];

        sum.connects += c->connects;
        sum.refused += c->refused;
        sum.failed += c->failed;
        sum.ok += c->ok;
        sum.shutting_down += c->shutting_down;
        sum.gpu_lost += c->gpu_lost;
        sum.other += c->other;
        sum.unanswered += c->unanswered;
        sum.unsent += c->unsent;
        sum.wrong += c->wrong;
        if (c->gap_ms > sum.gap_ms)
            sum.gap_ms = c->gap_ms;
    }
    printf("connects=%lu refused=%lu failed=%lu ok=%lu shutting_down=%lu gpu_lost=%lu other=%lu "
           "unanswered=%lu unsent=%lu wrong=%lu gap_ms=%.0f\n",
           sum.connects, sum.refused, sum.failed, sum.ok, sum.shutting_down, sum.gpu_lost,
           sum.other, sum.unanswered, sum.unsent, sum.wrong, sum.gap_ms);
    return 0;
}
