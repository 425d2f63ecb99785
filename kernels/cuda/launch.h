/*
 * launch.h - what the kernels take, and their launchers
 *
 * A block is up to max_rows rows of one batch that run together. Between steps values are float32,
 * one array of [rows, elements per row]; once an add has moved the batch dimension each request's
 * part of it lies in that request's own order. Pointers are device addresses unless said otherwise;
 * every launcher only enqueues on the stream and returns what launching said.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/check.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "kernels/model.h"
#include "kernels/tensor.h"

/* Rows of one request within a block. Read by kernels. */
struct segment {
    int64_t row, rows;         /* of the block */
    int64_t job_row, job_rows; /* the first of them in the request, and its rows: the mask's n */
    int64_t out_row, out_rows; /* where they go in y, and how many rows y has */
    void *y;
    uint64_t seed;
    uint32_t train;
    uint32_t compact; /* of an outer sum (outer.cu) only the minima */
};

/* move.cu. One copy of many that a single kernel makes. */
struct piece {
    const void *from;
    void *to;
    uint64_t size;
};
int pieces_cuda(cudaStream_t stream, const struct piece *pieces, int n, uint64_t size_max,
                struct report *report);

/* The same for a graph, which finds out when it runs: at most `most` of them. */
struct piece_table {
    const struct piece *pieces;
    int n;
};
int pieces_from_cuda(cudaStream_t stream, const struct piece_table *table, int most,
                     uint64_t size_max, struct report *report);

/* Copies as many bytes as it finds out, a multiple of 16, from pinned host memory, where at least
 * TABLES_AHEAD bytes are. */
#define TABLES_AHEAD 4096
int tables_cuda(cudaStream_t stream, const void *from, const uint32_t *size, void *to,
                struct report *report);

/* n numbers of `dtype` to float32. */
int widen_cuda(cudaStream_t stream, enum dtype dtype, const void *from, float *to, int64_t n,
               struct report *report);

/* tail.cu: everything that works element by element, ending in memory or in the result. */
enum tail_source { TAIL_DIRECT, TAIL_NORM, TAIL_ADD, TAIL_CONSTANT };

enum point_kind {
    POINT_LIMIT, /* max(x, low), then min(., high); minimum has no low */
    POINT_MASK,  /* a dropout */
    POINT_ADD    /* of a tensor that leaves the shape as it is */
};

struct point {
    enum point_kind kind;
    int summand; /* which of the tail's */
    int counter; /* which of the block's rows of counters */
    bool zero;   /* p == 1 */
    float low, high;
    uint32_t keep_below; /* a word below it keeps */
    float scale;
};

/* A tensor that is the same for every row: a row's dimensions, and how far it goes with each. */
#define SUMMANDS_MAX 4
struct summand {
    const float *tensor;
    int rank; /* at least 1 */
    uint32_t dims[TENSOR_RANK_MAX], stride[TENSOR_RANK_MAX];
};

/* Where a captured tail finds its segments when it runs. */
struct tail_table {
    const struct segment *segments;
    const int32_t *tiles;
    int n_segments;
};

struct tail {
    enum tail_source source;
    const float *from;
    int64_t elements;      /* of a row of the result */
    int64_t from_elements; /* of a row of `from` */
    int64_t outer, inner;  /* a request's result is [outer, rows, inner] */

    struct {                       /* (x - mean) rstd gamma + beta */
        const float2 *stats;       /* [rows, groups]: mean, rstd */
        const float *gamma, *beta; /* NULL: 1 and 0 */
        int64_t groups, channels, spatial;
    } norm;
    struct { /* x + tensor, by broadcasting */
        const float *tensor;
        int64_t outer_stride; /* of the tensor, per step of `outer` */
        int rank;             /* of inner */
        int64_t dims[TENSOR_RANK_MAX], from_stride[TENSOR_RANK_MAX], stride[TENSOR_RANK_MAX];
    } add;
    struct {            /* one number for every row that the guard lets pass */
        uint32_t bound; /* of |x|, as a float's bits */
        float value;
        bool nonfinite_spreads;
    } constant;

    int n_points, n_summands;
    struct point points[MODEL_STAGES_MAX];
    struct summand summands[SUMMANDS_MAX];

    bool keys; /* `from` is linear_norm_min's keys, and it lets this kernel start while it runs */
    float *to; /* [rows, elements]; NULL: each segment's y, in `dtype` */
    enum dtype dtype;
    bool by_row;  /* tail_by_row() */
    int32_t tile; /* elements: tail_tile() */
    const struct segment *segments;
    const int32_t *tiles; /* [n_segments + 1]: first tile of each */
    int n_segments;
    const struct tail_table *table; /* NULL, or instead of these three: outer.cu alone knows it */
    const uint64_t *counters;       /* [dropouts, counter_pitch]: offset / 4 */
    int64_t counter_pitch;
};

/* A tail whose rows are long and stay together: no tile crosses a row then. */
bool tail_by_row(const struct tail *tail);
/* Elements of a tile when that many rows are worked on, and the tiles of a segment of n rows. */
int32_t tail_tile(const struct tail *tail, int64_t rows);
int64_t tail_tiles(const struct tail *tail, int32_t tile, int64_t n);
/* `tiles` is tail->tiles[n_segments], which the host knows too. */
int tail_cuda(cudaStream_t stream, const struct tail *tail, int32_t tiles, struct report *report);

/* outer.cu: the same where a row is one number, an add spreads it, and nothing follows. */
bool outer_fits(const struct tail *tail);
int outer_cuda(cudaStream_t stream, const struct tail *tail, int32_t tiles, struct report *report);

/* constant.cu: the guard's look at the input, and behind it the fill of the rows that it lets pass.
 * The tail's constant and dropouts say with what. */
#define CONSTANT_TILE     32768 /* bytes of a tile, at most */
#define CONSTANT_SEGMENTS 4     /* that a launch can carry, and their counters */
#define CONSTANT_COUNTERS 8
struct guard {
    const void *x; /* [rows, elements], in the tail's dtype */
    int64_t rows, elements;
    uint32_t *work; /* constant_work() bytes, which are zeros before a run and after it */
    /* In pinned host memory: [rows] the largest |x|, as a float's bits; and what gets the value
     * when they are there, long before the end. */
    uint32_t *tops, *flag, value;
    /* The tail's tables in host memory, where they are so small that the launch carries them; NULL:
     * they are at the tail's addresses. */
    const struct segment *segments;
    const int32_t *tiles;
    const uint64_t *counters;
    int64_t n_counters;
};
uint64_t constant_work(int64_t rows);
int constant_cuda(cudaStream_t stream, const struct guard *guard, const struct tail *tail,
                  int32_t tiles, struct report *report);

/* norm.cu */
struct stats {
    const float *from;
    int64_t rows, groups;
    int64_t size;     /* elements of a group, which lie together */
    double2 *partial; /* stats_partials() of them, when there are any */
    float2 *to;       /* [rows, groups] */
    float eps;
};
int64_t stats_partials(int64_t rows, int64_t groups, int64_t size);
int stats_cuda(cudaStream_t stream, const struct stats *stats, struct report *report);

/* Sums of products as gemm.h leaves them: value = sums 2^-(exponent of the row + of the column). */
struct sums {
    const float *sums; /* [rows, pitch] */
    int64_t pitch;
    const int8_t *row_exponents, *column_exponents; /* NULL: 0 */
    const float *bias;                              /* NULL: 0 */
};

/* Product's end, group_norm and amin over all channels in one pass. */
struct norm_min {
    struct sums sums;
    int64_t rows, channels, groups;
    const float *gamma, *beta; /* NULL: 1 and 0 */
    float eps;
    float *to; /* [rows] */
};
bool norm_min_fits(int64_t channels, int64_t groups);
int norm_min_cuda(cudaStream_t stream, const struct norm_min *norm_min, struct report *report);

struct amin {
    const float *from;
    int64_t rows, outer, n, inner;
    float *to;
};
int amin_cuda(cudaStream_t stream, const struct amin *amin, struct report *report);

/* Tells the host that everything before it in the stream has ended. */
int flag_cuda(cudaStream_t stream, uint32_t *flag, uint32_t value, struct report *report);
/* The same with a value that lies in device memory by then. */
int flag_from_cuda(cudaStream_t stream, uint32_t *flag, const uint32_t *value,
                   struct report *report);

#ifdef __cplusplus
}
#endif
