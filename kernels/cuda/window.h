/*
 * window.h - the kernels behind conv_norm.h, and what they take
 *
 * conv_norm.cu prepares the weights, window.cu multiplies. Sizes of the layout are here
 * because both must agree.
 */
#pragma once

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

#define WINDOW         3 /* elements of a kernel, in each dimension */
#define WINDOW_OUTS    16
#define WINDOW_TILE_D  2 /* outputs of a block */
#define WINDOW_TILE_H  4
#define WINDOW_TILE_W  64
#define WINDOW_WARPS   8                            /* that share a tile */
#define WINDOW_PLANES  (WINDOW_TILE_D + WINDOW - 1) /* inputs under them */
#define WINDOW_LINES   (WINDOW_TILE_H + WINDOW - 1)
#define WINDOW_COLUMNS (WINDOW_TILE_W + WINDOW - 1)
/* Pairs between planes, and between arrays: see window.cu for why not multiples of 4. */
#define WINDOW_PLANE (WINDOW_LINES * WINDOW_COLUMNS + 1)
#define WINDOW_ARRAY (WINDOW_PLANES * WINDOW_PLANE + 3)

#define WINDOW_CHANNELS 3
/* Pairs of channels, and the one without a partner. */
#define WINDOW_ARRAYS(channels) (((channels) + 1) / 2)
#define WINDOW_WORDS(channels) \
    ((channels) / 2 * WINDOW * WINDOW + (channels) % 2 * ((WINDOW + 1) / 2) * WINDOW)
/* Steps of 16 of K for one line of the window. */
#define WINDOW_STEPS(channels) ((WINDOW_WORDS(channels) + 7) / 8)
#define WINDOW_SLOTS(channels) (8 * WINDOW_STEPS(channels))
#define WINDOW_SLOTS_MAX       WINDOW_SLOTS(WINDOW_CHANNELS)
#define WINDOW_HALVES(dtype)   ((dtype) == DTYPE_FLOAT32 ? 2 : 1)
#define WARP_LANES             32
/* Of 16 bytes. */
#define WINDOW_WEIGHTS(c, halves) (WINDOW * WINDOW_STEPS(c) * (halves)*WARP_LANES)

/* Of n outputs: their mean, and the squares of their distances from it. */
struct window_moments {
    float mean, squares, n, unused;
};

/* Where a row goes, and what happens to it on the way. */
struct window_end {
    void *to;
    uint64_t seed, turn; /* of the mask, and where it begins */
    uint32_t thread, threads;
    uint32_t inverse; /* of threads, times 2^32 */
    int32_t s;        /* which of the tail's segments */
    float low, high;
    uint32_t plain; /* no mask: low and high are all its limits, if nothing adds */
};

/* A tail's summand, as runs of results go over it. */
enum window_summand_kind {
    SUMMAND_ONE,   /* a number for a run */
    SUMMAND_FOURS, /* its numbers lie as results do, in whole fours */
    SUMMAND_ANY
};

struct window_summand {
    const float *tensor;
    uint32_t channel, depth, line, column; /* how far it goes with each: 0 where it broadcasts */
    uint32_t turn;                         /* line, less what a line's columns went */
    enum window_summand_kind kind;
};

struct window_run {
    enum dtype dtype; /* of x */
    const void *x;
    int64_t rows, in_elements;
    int channels, outs;
    int in[3], out[3], padding[3];
    bool padded;             /* anywhere */
    int tiles[3], tiles_all; /* of a row */
    const uint4 *weights;    /* [tiles of 16 outputs][WINDOW_WEIGHTS] */
    const int *exponents;    /* [outputs, padded to 16], of scaled weights; then the lowest */
    const float *bias, *gamma, *beta;
    uint16_t offsets[WINDOW_SLOTS_MAX]; /* pairs from a window's first, by slot */
    /* Channels whose moments a tile makes one: a group's, or 16 of it. Powers of two. */
    int together, together_log;
    int sets_per_group; /* of 16 outputs, if groups have more */
    int tile_sets;      /* of 16 outputs */
    int blocks;         /* at a time */
    int64_t spatial;
    float group_size, eps;
    struct window_moments *moments; /* [rows, tile sets, tiles, 16 / together] */
    struct window_end *ends;        /* [rows] */
    int32_t *again; /* [rows, tile sets, tiles]: a block's chain of what it does again */
    /* Zeros before a run and after it: items dealt, warps that have ended, and of each row tiles
     * whose moments are there. */
    uint32_t *dealt, *ended, *arrived;
    uint32_t per_width; /* 2^16 by the width of a run's lines, rounded up: line_of() */
    struct window_summand summands[SUMMANDS_MAX];
};

/* Before the first launch; tells how many blocks run at a time. */
int window_ready(enum dtype dtype, int *ret_blocks, struct report *report);
int window_cuda(cudaStream_t stream, const struct window_run *run, const struct tail *tail,
                struct report *report);

#ifdef __cplusplus
}
#endif
