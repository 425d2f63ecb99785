/*
 * backend.h - what a device offers the daemon
 *
 * A backend is a table of functions. The CPU's is linked in; others are shared objects with one
 * symbol, fused_backend(). Threads: open, close: the main thread. load, unload, pin, unpin and
 * memory_*: any thread, several at once. start and poll: the one engine thread of this backend.
 * info, health, plan_info: any thread. Nothing here logs, exits or knows a client.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pipeline.h"
#include "report.h"

#define BACKEND_ABI         3
#define BACKEND_SYMBOL      "fused_backend"
#define BACKEND_SLOTS_MAX   8
#define BACKEND_COSTS_MAX   16
#define BACKEND_DEVICES_MAX MODEL_DEVICES_MAX /* that one daemon opens */

struct backend; /* one opened device */
struct plan;    /* a pipeline made ready on it */
struct memory;  /* client pages known to the device: pinned host pages, or device memory */

struct backend_options {
    unsigned workers;   /* CPU threads that compute; 0: one per allowed core */
    int device;         /* CUDA device index */
    const char *script; /* fake backend: its script; NULL elsewhere */
};

struct backend_info {
    char name[16];      /* "cpu", "cuda" */
    char device[128];   /* for people: "AMD EPYC, 2 workers, AVX-512", "NVIDIA H200" */
    char uuid[48];      /* empty when there is none */
    unsigned slots;     /* batches that may be started before one has ended */
    bool device_memory; /* memory_create and memory_import work */
    bool parts;         /* jobs may be parts of a request */
    uint64_t memory_total_bytes, memory_free_bytes; /* device memory; 0 on the CPU */
    uint64_t link_bytes_per_s; /* between host and device, one way; 0: none, or not known */
    int temperature_c, power_w, clock_mhz; /* -1: not known */
    char driver[32], runtime[32];          /* versions; empty when there are none */
};

/* What the device's driver says of faults: its memory's, and those that it gives a number (Xid). */
struct backend_health {
    bool watched;                           /* else nothing of this is known */
    int64_t ecc_corrected, ecc_uncorrected; /* since the driver was loaded; -1: not counted */
    uint64_t n_xids;     /* since open(), whatever process on the device they are about */
    unsigned last_xid;   /* 0: none */
    char lost[64];       /* why the device must not be used any more; empty: it may be */
    const char *lost_by; /* the numbers that make it so, for people; static */
};

/* What a batch of so many rows takes. */
struct backend_cost {
    uint32_t rows, us;
};

struct plan_info {
    uint64_t resident_bytes; /* weights as the plan keeps them */
    uint64_t arena_bytes;    /* work space for max_rows, all slots together */
    unsigned launches;       /* kernels, or passes over memory, per batch; 0: not known */
    /* Measured when it was loaded, for sizes of the backend's choice, ascending: where a block is
     * padded, its last row and the next one. 0: not measured. */
    unsigned n_costs;
    struct backend_cost costs[BACKEND_COSTS_MAX];
    char text[1024]; /* the plan in words, lines separated by '\n' */
};

/* One request's rows in a batch. The backend fills the lower half. */
struct job {
    const void
        *x;  /* [rows, ...] of the model's dtype, C-contiguous: host address, or device address */
    void *y; /* its result, in the request's own shape; host or device address */
    uint64_t y_size; /* bytes that y may take: exactly the result's, or the room for a compact
                        constant result */
    struct memory *x_memory, *y_memory; /* where x and y lie; NULL: plain host memory */
    uint32_t rows; /* at least 1; may exceed the plan's max_rows: a backend works in blocks */
    /* Only part_rows of them from first_row on; 0: all. x, y and rows stay the whole request's.
     * Only where the backend says `parts`; of compact results only outer sums. */
    uint32_t first_row, part_rows;
    bool train, compact;
    uint64_t seed, offset;

    int result; /* 0, or negative errno for this job alone (-EINVAL, -ENOSPC: compact result larger
                   than y_size) */
    uint32_t n_full; /* compact constant result: samples that came back in full */
};

/* A batch in a slot. Owned by the daemon, untouched by it from start() until poll() says that it
 * ended. */
struct batch {
    struct plan *plan;
    struct job *jobs;
    unsigned n_jobs;
    uint64_t rows;         /* sum of the jobs', of parts only theirs */
    struct report *report; /* where a start or poll that is negative may say why; NULL: nowhere */
};

struct backend_ops {
    unsigned abi; /* BACKEND_ABI */
    const char *name;

    /* -ENODEV: no usable device, with the reason. */
    int (*open)(const struct backend_options *options, struct backend **ret, struct report *report);
    void (*close)(struct backend *backend);
    void (*info)(struct backend *backend, struct backend_info *ret);
    /* Optional (NULL). Never waits for the device. */
    void (*health)(struct backend *backend, struct backend_health *ret);

    /*
     * Checks memory first, takes what it needs from the pipeline's weights, warms up every batch
     * size that it distinguishes. After it returns the plan no longer needs the weights file, only
     * the pipeline. -ENOMEM, -EINVAL.
     */
    int (*load)(struct backend *backend, const struct pipeline *pipeline, uint32_t max_rows,
                struct plan **ret, struct report *report);
    void (*plan_info)(const struct plan *plan, struct plan_info *ret);
    void (*unload)(struct backend *backend, struct plan *plan);

    /*
     * Begins a batch in a free slot; may compute before it returns. 0, or negative errno when the
     * whole batch failed and nothing is in flight. -ENOTRECOVERABLE: the device is lost, here and
     * in poll.
     */
    int (*start)(struct backend *backend, unsigned slot, struct batch *batch);
    /* 1: the batch in that slot has ended and its jobs are filled; 0: not yet; negative: as start.
     * Never blocks. */
    int (*poll)(struct backend *backend, unsigned slot);

    /* Optional (NULL): pins host pages for DMA, by every device of this table: where several are
     * open, their jobs all take the memory that one of them pinned. `gently`: it may take seconds
     * rather than get in the way of batches. */
    int (*pin)(struct backend *backend, void *data, size_t size, bool gently, struct memory **ret,
               struct report *report);
    void (*unpin)(struct backend *backend, struct memory *memory, bool gently);

    /* Optional (NULL): device memory that travels as an fd; job.x and job.y are then
     * memory_address() plus an offset. -ENOMEM also when less than reserve_bytes of the device
     * would be left, however many ask at once. */
    int (*memory_create)(struct backend *backend, size_t size, uint64_t reserve_bytes,
                         struct memory **ret, int *ret_fd, struct report *report);
    int (*memory_import)(struct backend *backend, int fd, size_t size, struct memory **ret,
                         struct report *report);
    uint64_t (*memory_address)(const struct memory *memory);
    void (*memory_free)(struct backend *backend, struct memory *memory);
};

/*
 * A compact result. Outer sum (A): the last add's input, in its own shape, of the model's dtype.
 * Constant (B): one byte per sample (0 constant, 1 NaN throughout, 2 full), zero bytes up to the
 * next multiple of 16, then the full samples in order. BACKEND_COMPACT_ROOM is where the samples
 * start.
 */
#define BACKEND_COMPACT_ROOM(rows) (((uint64_t)(rows) + 15) / 16 * 16)

const struct backend_ops *backend_cpu(void);

/* What a shared object exports under BACKEND_SYMBOL. */
typedef const struct backend_ops *(*backend_symbol)(void);
