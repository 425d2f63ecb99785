/*
 * plan.h - a pipeline made ready on the device: steps, weights, work space
 */
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/conv_norm.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_norm_min.h"

#define SLOTS        4
#define SEGMENTS_MAX 1024 /* requests, or parts of them, in a block */
#define TAILS_MAX    (MODEL_STAGES_MAX + 3)
#define RANGES_MAX   64

/* Arrays that a step reads and writes; each slot has its own. */
enum buffer { BUFFER_X, BUFFER_A, BUFFER_B, BUFFERS };

enum step_kind {
    STEP_WIDEN,  /* 16-bit input to float32 */
    STEP_LINEAR, /* products, bias */
    STEP_CONV3D,
    STEP_CONV_NORM,       /* conv3d, group_norm and a tail */
    STEP_STATS,           /* of a group_norm: a tail normalises */
    STEP_NORM_MIN,        /* linear, group_norm, amin over all channels: products, then a kernel */
    STEP_LINEAR_NORM_MIN, /* the same in one kernel */
    STEP_AMIN,
    STEP_TAIL
};

/* Which of a block's segments a tail works on. */
enum list { LIST_ALL, LIST_RESULTS, LIST_COMPACT };

struct tail_step {
    struct tail tail; /* without the pointers that differ between slots */
    enum list list;
    int table; /* of tiles */
};

struct step {
    enum step_kind kind;
    enum buffer from, to;
    int64_t from_elements, to_elements; /* of a row */
    struct gemm *gemm;                  /* LINEAR, NORM_MIN */
    struct linear_norm_min *fused;      /* LINEAR_NORM_MIN */
    int64_t gemm_rows;                  /* products per row */
    struct conv *conv;
    struct conv_norm *normed;             /* CONV_NORM */
    int64_t groups, channels, group_size; /* STATS, NORM_MIN */
    float eps;
    const float *gamma, *beta;
    struct amin amin;
    struct tail_step *tail;
};

/* A dropout that draws: where its counter starts follows from those before it. */
struct mask {
    double p;
    int64_t elements; /* of a row */
};

/* Blocks of `from` to `rows` rows are launched alike. */
struct range {
    int64_t from, rows;
};

/* What a graph's kernels find out when they run: at the beginning of a block's tables. */
struct recorded {
    struct linear_norm_min_input input;
    struct tail_table table;
    struct piece_table pieces;
    uint32_t size;     /* of all tables */
    uint32_t sequence; /* the flag's value */
};

/* A slot's work space for this plan. */
struct arena {
    char *memory; /* one allocation, in this order: */
    void *buffers[BUFFERS], *result;
    float2 *stats;
    double2 *partial;
    struct gemm_work gemm;
    void *fused;                           /* of linear_norm_min, conv_norm */
    uint32_t *counters;                    /* of conv_norm alone */
    void *workspace;                       /* of convolutions */
    uint32_t *guard;                       /* of constant.cu: zeros between its runs */
    uint32_t *tops_host;                   /* pinned */
    uint8_t *states;                       /* pinned: what a compact result begins with */
    cudaGraphExec_t graphs[RANGES_MAX][2]; /* of graph.c: of each range, the second gathers rows */
};

struct arena_size {
    uint64_t buffers[BUFFERS], result, stats, partial, operand, exponents, sums, gemm_workspace,
        fused, counters, workspace, guard, all;
};

struct plan {
    enum dtype dtype;
    uint32_t rows_max;                 /* of a block */
    int64_t in_elements, out_elements; /* of a row */
    int64_t out_outer, out_inner;      /* the result is [outer, rows, inner] */
    int64_t compact_elements;          /* outer sum: of the last add's input; else 0 */
    struct proof proof;
    bool masks;
    bool x_in_place; /* rows may be read from the client's own device memory */

    int n_steps;
    struct step steps[2 * MODEL_STAGES_MAX + 4];
    int n_tails;
    struct tail_step tails[TAILS_MAX];
    struct tail_step *compact; /* NULL: no such results, or the last tail writes them, too */
    struct tail_step *fill;    /* NULL: none */
    int n_masks;
    struct mask masks_drawn[MODEL_STAGES_MAX];

    int n_ranges; /* 0: this plan is never captured */
    struct range ranges[RANGES_MAX];
    int n_params;
    float *params[4 * MODEL_STAGES_MAX];
    uint64_t resident_bytes;
    struct arena_size size;
    struct arena arenas[SLOTS];
    unsigned launches;
    unsigned n_costs; /* as measured when it was loaded */
    struct backend_cost costs[BACKEND_COSTS_MAX];
    char text[1024];
};

/* A block as the device sees it. */
struct block {
    int64_t rows;
    const void *x;
    const struct segment *segments; /* of LIST_RESULTS first, then of LIST_COMPACT */
    int n_results, n_compact;
    const int32_t *tiles[TAILS_MAX];
    int32_t n_tiles[TAILS_MAX], tile[TAILS_MAX];
    const uint64_t *counters;
    int64_t counter_pitch;
    const struct recorded *recorded; /* of a block that is captured, on the device; else NULL */
    bool gathers;                    /* it has a kernel that gathers rows */
};

/* Elements of a row's result. */
static inline int64_t plan_elements(const struct plan *plan, bool compact)
{
    return compact && plan->compact_elements ? plan->compact_elements : plan->out_elements;
}

/* Takes the weights it needs from the pipeline. No work space yet. */
int plan_new(struct gemm_library *library, const struct pipeline *pipeline, uint32_t max_rows,
             struct plan **ret, struct report *report);
int plan_arenas(struct plan *plan, struct report *report);
struct plan *plan_free(struct plan *plan);

/* Every stage, from block->x to the segments' y. */
int plan_run(const struct plan *plan, const struct arena *arena, cudaStream_t stream,
             const struct block *block, struct report *report);
/* What the proof knows: the guard over all rows, and the fill of those that it lets pass. Of the
 * guard its flag, value and tables are given; rows' maxima are in arena->tops_host when the flag is
 * up. */
int plan_guard(const struct plan *plan, const struct arena *arena, cudaStream_t stream,
               const struct block *block, struct guard *guard, struct report *report);
