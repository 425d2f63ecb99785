/*
 * pass.h - what follows a product, fused: group norm, pointwise stages, amin, in one go over a row
 *
 * A pass reads a row, plain or as a convolution left it, and writes a row. Its work comes in
 * rounds, and a round in items that may run in parallel; a round ends before the next begins.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "broadcast.h"
#include "kernels/tensor.h"
#include "loops.h"
#include "pointwise.h"

#define PASS_TILE      4096 /* elements of a tile: a third of a first level cache */
#define PASS_TILE_ROWS 1024 /* of a tile of interleaved channels: places, so many for each */
#define PASS_TILE_LD   (PASS_TILE_ROWS + 16) /* apart, because of 4 KiB they would collide */
#define PASS_TILE_SPACE \
    (INT64_C(1) * LOOPS_BLOCK_MAX * PASS_TILE_LD) /* floats that a worker brings */

enum pass_round {
    ROUND_SUMS,    /* statistics of a blocked row */
    ROUND_MOMENTS, /* the same, per group */
    ROUND_APPLY,
    ROUND_STORE, /* of an amin's result */
    ROUND_COUNT
};

struct pass {
    int64_t elements;          /* of a row, as the operations see it */
    int64_t channels, spatial; /* a blocked or normalised row is [channels, spatial] */
    size_t block;              /* interleaved channels of what is read; 1: plain */
    bool grows;                /* what is read is smaller and repeats, as `map` says */
    struct broadcast map;

    bool norm;
    int64_t groups;
    double eps;
    float *gamma, *beta; /* of each channel */

    const struct pointwise *ops;
    int n_ops;

    bool amin; /* a row is [outer, n, inner]; n is reduced */
    int64_t outer, n, inner;
};

/* Work space of one row in progress; sizes of the arrays by pass_scratch(). */
struct scratch {
    struct loops_sums *sums; /* [chunks, channels] */
    float *mean, *rstd;      /* of each group */
    float *least;            /* amin's result */
};

struct scratch_sizes {
    int64_t sums, groups, least;
};

/* One row's way through a pass. */
struct pass_row {
    const float *x;
    void *y; /* the row's result, of this dtype */
    enum dtype dtype;
    bool stream; /* nobody here reads y again */
    struct place place;
    struct scratch *scratch;
};

/* Elements of a row's result. */
int64_t pass_result(const struct pass *pass);
struct scratch_sizes pass_scratch(const struct pass *pass);
/* 0: the pass has no such round. */
size_t pass_items(const struct pass *pass, enum pass_round round);
/* Items of this round must run one after the other. */
bool pass_serial(const struct pass *pass, enum pass_round round);
/* `tile`: PASS_TILE_SPACE floats of the calling worker's. */
void pass_run(const struct pass *pass, enum pass_round round, size_t item,
              const struct pass_row *row, float *tile);
/* All of it. */
void pass_run_all(const struct pass *pass, const struct pass_row *row, float *tile);
