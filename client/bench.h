/*
 * bench.h - load on a server, and what came of it
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/fused.h"

#define BENCH_DEVICES_MAX 16

enum bench_place { BENCH_BUFFERS, BENCH_INLINE, BENCH_DEVICE };

#define BENCH_SHAPES_MAX 8

struct bench_shape {
    uint32_t rows;
    struct fused_tensor input, output; /* dtype and shape */
    uint64_t input_bytes, output_bytes;
};

/* What is asked, the same for every client. */
struct bench_load {
    const char *socket, *model;
    struct bench_shape shapes[BENCH_SHAPES_MAX]; /* a client's requests take them in turn */
    unsigned n_shapes;                           /* at least 1 */
    unsigned n_clients, depth; /* depth: requests of one client in flight at most */
    enum bench_place place;
    unsigned devices[BENCH_DEVICES_MAX]; /* with BENCH_DEVICE: the clients take them in turn */
    unsigned n_devices;                  /* at least 1 then */
    double rate; /* requests a second, of all clients together; 0: closed loop */
    bool poisson, verify, reconnect;
    uint64_t warm_ns, run_ns; /* not counted, counted */
};

/* Times in ns (latency) or us, in buckets 1/64 of an octave wide. */
#define HISTOGRAM_BUCKETS (64 + 36 * 64)
struct bench_histogram {
    uint64_t n, max;
    uint64_t buckets[HISTOGRAM_BUCKETS];
};
void histogram_add(struct bench_histogram *histogram, uint64_t value);
/* The value that `part` (0 ... 1) of all are not above, to 1.6 %; 0 when there is none. */
uint64_t histogram_at(const struct bench_histogram *histogram, double part);

#define BENCH_CODES 16

struct bench_result {
    struct bench_histogram latency_ns, queue_us, run_us;
    uint64_t n_ok, n_codes[BENCH_CODES]; /* by enum fused_code; [0]: the connection's end */
    uint64_t n_wrong, n_late, n_unsent, n_repeats, batch_rows;
    uint64_t rows, input_bytes, output_bytes; /* of those with a result */
    double seconds;
    int error;      /* why a client could not go on: a code or -errno */
    char text[256]; /* of that */
};

/*
 * Runs the load: a thread and a connection for each client. `say` is called now and then with the
 * part done and the answers so far; true ends the run early. 0, or a code or -errno, and `text`
 * says what failed. The result is the caller's to free().
 */
int bench_run(const struct bench_load *load, bool (*say)(double part, uint64_t n),
              struct bench_result **ret, char text[256]);
