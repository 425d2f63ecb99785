/*
 * pointwise.h - stages that take one element to one element, run together on a tile in the cache
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "broadcast.h"
#include "kernels/dropout.h"
#include "kernels/model.h"

struct pointwise {
    enum stage_op op; /* minimum, clamp, add, dropout */
    bool has_min, has_max;
    float min, max;       /* minimum: max alone */
    float *tensor;        /* add */
    struct broadcast map; /* of the tensor over a row */
    int dropout;          /* which one of the chain's */
};

/* What an element's place in its request decides. */
struct place {
    const struct dropout *dropouts; /* of the chain; NULL: evaluation */
    int64_t first;                  /* index of the row's first element in the request's tensor */
};

/* Elements [first, first + n) of a row, which lie in x. */
void pointwise_run(const struct pointwise *ops, int n_ops, const struct place *place, int64_t first,
                   int64_t n, float *x);
