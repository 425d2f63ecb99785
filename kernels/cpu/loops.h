/*
 * loops.h - the loops over elements that decide how fast everything beside oneDNN is
 *
 * Each is compiled for AVX-512, AVX2 and the base instruction set, and gives the same bits in all
 * of them: sums have a fixed number of lanes and a fixed tree, and products are never contracted.
 * Arrays may lie at any address that suits a float. Minimum and maximum order -0 below +0 and keep
 * NaN.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LOOPS_BLOCK_MAX 16 /* channels side by side in a blocked layout */

void loops_fill(float *x, size_t n, float value);
/* The largest |x|, as bits without the sign: NaN is above infinity is above every number. */
uint32_t loops_bits_max(const float *x, size_t n);

void loops_minimum(float *x, size_t n, float value);
void loops_maximum(float *x, size_t n, float value);
void loops_add(float *x, size_t n, const float *tensor);
void loops_add_scalar(float *x, size_t n, float value);

/* Least element, and elementwise least of two arrays. */
float loops_amin(const float *x, size_t n);
void loops_amin_rows(float *least, const float *x, size_t n);

/* Sums of x - shift and of its square. */
struct loops_sums {
    double sum, square;
};
void loops_sums(const float *x, size_t n, float shift, struct loops_sums *ret);
/* The same for `block` (8 or 16) interleaved channels, each with its shift, over n places. */
void loops_sums_blocked(const float *x, size_t n, size_t block, const float *shift,
                        struct loops_sums *ret);

/* (x - mean) * scale + beta */
void loops_affine(const float *x, float *y, size_t n, float mean, float scale, float beta);
/* (x - mean) * (rstd * gamma) + beta */
void loops_affine_rows(const float *x, float *y, size_t n, float mean, float rstd,
                       const float *gamma, const float *beta);

/* n places of `block` interleaved channels become `block` rows of n, ld apart. */
void loops_unblock(const float *x, size_t n, size_t block, float *y, size_t ld);

/* Writes past the caches; for results that nobody here reads again. Others may read them once the
 * writing thread has called loops_stream_end(). */
void loops_stream(const float *x, float *y, size_t n);
void loops_stream_end(void);
