/*
 * product.h - the kernels behind linear_norm_min.h, and what they take
 *
 * operands.cu lays operands out, wide_product.cu and narrow_product.cu multiply them. Sizes of the
 * layout are here because all three must agree.
 */
#pragma once

#include <cuda.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_norm_min.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GROUP     16                 /* channels of a group_norm's group */
#define SLAB      64                 /* channels of a warpgroup */
#define PLANE     64                 /* of K */
#define SLAB_SIZE (SLAB * PLANE * 4) /* bytes of a slab's unit: two planes */

enum product_kind {
    PRODUCT_EXACT,   /* three products of scaled fp16 halves */
    PRODUCT_SINGLE,  /* one product of scaled fp16 */
    PRODUCT_FLOAT16, /* one product of what is there */
    PRODUCT_BFLOAT16
};

/* A tile's scales: pairs of column blocks, because a thread reads those of two together. */
#define SCALES(tile) (((tile) + 15) / 16 * 16)

/* Rows of half a wide tile: from, to, in steps of. */
#define HALF_MIN        72
#define HALF_MAX        128
#define WIDE_STEP(kind) ((kind) == PRODUCT_EXACT ? 8 : 16)

/* Of K, in one unit. */
#define PRODUCT_UNIT(kind) ((kind) == PRODUCT_EXACT ? PLANE : 2 * PLANE)

struct product_run {
    uint8_t *weights; /* [units][slabs][SLAB_SIZE]: by K first, because all blocks walk
                         K at one pace and so read one contiguous range */
    uint8_t *rows;    /* [tiles][units][2 planes][8][tile rows][8] of 16 bits */
    float *scales;    /* exact: [tiles][units][SCALES]; single: [tiles][SCALES], in the order of
                         scale_place() */
    int tile;         /* rows of a tile in both */
    float
        common_scale; /* of all channels, and part of `scales`; channel_scales are relative to it */
    float *channel_scales, *bias, *gamma, *beta; /* [channels] */
    uint32_t *keys;                              /* [rows]: minima so far */
    uint32_t *arrived;                           /* blocks that have ended */
    float *to;                                   /* [n] */
    int64_t n;                                   /* rows, or at most so many with: */
    const struct linear_norm_min_input *input;   /* NULL: x and rows are as launched */
    int units, slabs;
    int tiles_m, tiles_n; /* wide: of a cluster */
    float eps;
};

/* x [n, in] to `rows` rows (a multiple of the tile, which is one of 8), zeros past n; starts the
 * minima. `early` as in linear_norm_min.h. */
int rows_cuda(cudaStream_t stream, enum product_kind kind, int64_t rows, const void *x, int64_t in,
              const struct product_run *run, bool early, struct report *report);
/* weight [slabs * SLAB, in], bias, gamma and beta (or NULL), all float32, to their places. */
int weights_cuda(cudaStream_t stream, enum product_kind kind, const float *weight, int64_t in,
                 const float *bias, const float *gamma, const float *beta,
                 const struct product_run *run, struct report *report);

/* True when the library holds these kernels' machine code for the current device. */
bool product_runs_here(void);
/* Once per process and device, before the first launch. */
int wide_product_ready(enum product_kind kind, int *ret_clusters, struct report *report);
int narrow_product_ready(enum product_kind kind, struct report *report);

/* Tiles of narrow_product, in order; 0 past the last. */
int narrow_product_tile(int i);

/* `scales`: run->scales in boxes of a tile's (exact). Tiles of 128 channels, or with `few` of 64,
 * by two halves of run->tile rows. At most `clusters` run at a time. */
int wide_product_cuda(cudaStream_t stream, enum product_kind kind, bool few, int clusters,
                      struct product_run *run, const CUtensorMap *scales, struct report *report);
/* Tiles of 64 channels x run->tile rows. */
int narrow_product_cuda(cudaStream_t stream, enum product_kind kind, const struct product_run *run,
                        const CUtensorMap *scales, struct report *report);

#ifdef __cplusplus
}
#endif
