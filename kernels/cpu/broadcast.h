/*
 * broadcast.h - reads a tensor as if it had a larger shape
 */
#pragma once

#include <stdint.h>

#include "kernels/tensor.h"

/* Outermost first; sizes multiply to the larger shape's elements; a stride is 0 where the tensor
 * repeats. Dimensions that can be walked as one are one. */
struct broadcast {
    int rank;
    int64_t size[TENSOR_RANK_MAX], stride[TENSOR_RANK_MAX];
};

/* `dims`: the tensor's, aligned to `shape`: as many, each 1 or the shape's. */
void broadcast_init(struct broadcast *broadcast, const struct shape *shape, const int64_t *dims);
/* Where the larger shape's element i lies in the tensor. */
int64_t broadcast_at(const struct broadcast *broadcast, int64_t i);
/* Elements [first, first + n) of the larger shape: to = tensor, x += tensor. */
void broadcast_load(const struct broadcast *broadcast, const float *tensor, int64_t first,
                    int64_t n, float *to);
void broadcast_add(const struct broadcast *broadcast, const float *tensor, int64_t first, int64_t n,
                   float *x);
