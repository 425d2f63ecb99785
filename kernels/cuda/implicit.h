/*
 * implicit.h - convolution of any shape over tensor cores, for conv.cu
 *
 * float32 where a group_norm follows, and 16-bit input. Sums are float32. A sample's bits are the
 * same in any batch.
 */
#pragma once

#include "kernels/cuda/conv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A shape made ready. Read by kernels, which also get the addresses. */
struct implicit {
    struct {
        int in_channels, out_channels, in[3], out[3], kernel[3], stride[3], padding[3];
    } shape;
    int tile[3], tiles[3]; /* outputs of a block, and how many blocks a sample takes */
    int patch[3], pitch;   /* inputs under a tile, and words between planes of them */
    int taps;              /* places of the window */
    int groups, at_once;   /* of channels: all, and those in shared memory together */
    const void *x, *weights;
    const float *bias; /* NULL: 0 */
    float *y;
};

bool implicit_fits(const struct conv_shape *shape);
uint64_t implicit_weights(const struct conv_shape *shape); /* bytes */
int implicit_prepare(const struct conv_shape *shape, struct implicit *ret, struct report *report);
int implicit_repack(const struct implicit *implicit, const struct conv_shape *shape,
                    cudaStream_t stream, const float *from, void *to, struct report *report);
int implicit_cuda(const struct implicit *implicit, const struct conv_shape *shape,
                  cudaStream_t stream, const void *weights, const float *bias, const void *x,
                  int64_t rows, float *y, struct report *report);

#ifdef __cplusplus
}
#endif
