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
#define WINDOW_TILE_H  8
#define WINDOW_TILE_W  64
#define WINDOW_WARPS   4                            /* that share a tile */
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
#define WINDOW_WEIGHTS(c, halves)                                   \
    (WINDOW * WINDOW_STEPS(c) * (halves)*WARP_LANES) /* of 16 bytes \
                                                      */
#define WARP_LANES 32

/* Of a channel's outputs in a warp's part of a tile, scaled by 2^exponent: sums of their distances
 * from a pivot. */
struct window_part {
    float pivot, sum, squares;
    int exponent;
};

/* Where a row goes, and what happens to it on the way. */
struct window_end {
    void *to;
    uint64_t seed, turn; /* of the mask, and where it begins */
    uint32_t thread, threads;
    int32_t s; /* which of the tail's segments */
    float low, high;
    uint32_t plain; /* no mask: limits alone, which are one */
};

struct window_run {
    enum dtype dtype; /* of x */
    const void *x;
    int64_t rows, in_elements;
    int channels, outs;
    int in[3], out[3], padding[3];
    int tiles[3], tiles_all; /* of a row */
    const uint4 *weights;    /* [tiles of 16 outputs][WINDOW_WEIGHTS] */
    const int *exponents;    /* [outputs, padded to 16]: of the scaled weights */
    const float *bias, *gamma, *beta;
    uint16_t offsets[WINDOW_SLOTS_MAX]; /* pairs from a window's first, by slot */
    int groups;
    int blocks; /* at a time */
    int64_t group_size;
    float eps;
    struct window_part *parts; /* [rows, outputs padded, tiles, WINDOW_WARPS] */
    struct window_end *ends;   /* [rows] */
    float2 *stats;             /* [rows, outputs padded]: mean less bias, rstd gamma */
    uint32_t *dealt;           /* [passes, tiles of outputs, 2]: tiles, blocks that saw the end */
};

/* Before the first launch; tells how many blocks run at a time. */
int window_ready(enum dtype dtype, int *ret_blocks, struct report *report);
/* Convolves for the moments of every group, and again for the result. */
int window_cuda(cudaStream_t stream, const struct window_run *run, const struct tail *tail,
                struct report *report);

#ifdef __cplusplus
}
#endif
