/*
 * size.h - sums and products of sizes that stop at UINT64_MAX instead of wrapping
 *
 * A model may ask for more than 64 bits can count. Such a size must still compare as larger than
 * any memory.
 */
#pragma once

#include <stdint.h>

static inline uint64_t size_plus(uint64_t a, uint64_t b)
{
    uint64_t sum;

    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static inline uint64_t size_times(uint64_t a, uint64_t b)
{
    uint64_t product;

    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* Up to a multiple of `to`; when there is none above, the largest. */
static inline uint64_t size_round(uint64_t n, uint64_t to)
{
    return size_plus(n, to - 1) / to * to;
}
