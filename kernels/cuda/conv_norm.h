/*
 * conv_norm.h - conv3d, group_norm and what is pointwise behind them, fused
 *
 * For 3x3x3 windows over three channels: the convolution goes over tensor cores once (window.cu)
 * and is never written. Other shapes take conv.h, norm.cu and tail.cu.
 */
#pragma once

#include "kernels/cuda/conv.h"

#ifdef __cplusplus
extern "C" {
#endif

struct conv_norm_shape {
    struct conv_shape conv;
    enum dtype dtype; /* of x, and of the weights' values */
    int64_t groups;
    float eps;
};

bool conv_norm_fits(const struct conv_norm_shape *shape);

/* Device bytes: of the prepared weights, of the work space of one run, and of its counters, which
 * are zeros before a run and after it. Runs that follow one another share counters, of whatever
 * shape they are; nothing else does. */
struct conv_norm_sizes {
    uint64_t resident, work, counters;
};
struct conv_norm_sizes conv_norm_size(const struct conv_norm_shape *shape);

struct conv_norm;

#define CONV_NORM_LAUNCHES 1u

/*
 * Takes weights [out, in, kernel], and bias, gamma, beta [out] (NULL: 0, 1, 0), as float32 in
 * device memory. Nothing of them is needed afterwards. Waits for the stream.
 */
int conv_norm_new(const struct conv_norm_shape *shape, const float *weight, const float *bias,
                  const float *gamma, const float *beta, cudaStream_t stream,
                  struct conv_norm **ret, struct report *report);
struct conv_norm *conv_norm_free(struct conv_norm *fused);
const char *conv_norm_text(const struct conv_norm *fused);

/* x [rows, in] to where the tail says; its segments are those of the rows, in order. */
int conv_norm_run(const struct conv_norm *fused, cudaStream_t stream, void *work,
                  uint32_t *counters, const void *x, int64_t rows, const struct tail *tail,
                  struct report *report);

#ifdef __cplusplus
}
#endif
