/*
 * outer.h - an add that moves the batch dimension: y[o, r, i] = x[r] + tensor, over (o, i)
 *
 * The request's result has its own order, [outer, rows, inner], in which a row is not one run. What
 * may follow is pointwise, and is done on the way.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "broadcast.h"
#include "kernels/tensor.h"
#include "pointwise.h"

struct outer {
    int64_t outer, inner;   /* of the result, before and behind the rows */
    int64_t row;            /* elements of a row of x */
    struct broadcast x_map; /* of a row of x, and of the tensor, over [outer, inner] */
    struct broadcast tensor_map;
    float *tensor;
    const struct pointwise *ops;
    int n_ops;
};

/* Consecutive rows of one request. */
struct outer_rows {
    const float *x;          /* [n, row] */
    void *y;                 /* the request's result, from its start */
    enum dtype dtype;        /* of y */
    int64_t first, n, total; /* which rows, how many, of how many that the request has */
    const struct dropout *dropouts;
};

size_t outer_items(const struct outer *outer, const struct outer_rows *rows);
/* `tile`: PASS_TILE_SPACE floats of the calling worker's. */
void outer_run(const struct outer *outer, size_t item, const struct outer_rows *rows, float *tile);
