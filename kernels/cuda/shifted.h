/*
 * shifted.h - convolution of 16-bit numbers with stride 1 by wgmma, for conv.cu
 *
 * Sums are float32. A sample's bits are the same in any batch.
 */
#pragma once

#include "kernels/cuda/conv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SHIFTED_LEFTS_MAX  4
#define SHIFTED_RIGHTS_MAX 16

/* Units of inputs and lines of weights in shared memory, for one height of tiles. */
struct shifted_ring {
    int places; /* of a unit */
    int lefts, rights, size;
};

/* A shape made ready. Read by kernels, which also get the addresses. */
struct shifted {
    struct {
        int in_channels, out_channels, in[3], out[3], kernel[3], padding[3];
    } shape;
    int padded[3]; /* extents of a sample that is laid out */
    int places;    /* of it, and what the last tile reads beyond */
    int last;      /* behind the last output's place */
    int steps;     /* of 16 input channels */
    int sets;      /* of output channels */
    int processors;
    int64_t rows; /* that are laid out at a time */
    struct shifted_ring rings[2];
    const uint8_t *laid, *weights;
    const float *bias; /* NULL: 0 */
    float *y;
};

bool shifted_fits(const struct conv_shape *shape);
uint64_t shifted_weights(const struct conv_shape *shape);   /* bytes */
uint64_t shifted_workspace(const struct conv_shape *shape); /* bytes, where it fits */
int shifted_prepare(const struct conv_shape *shape, struct shifted *ret, struct report *report);
unsigned shifted_launches(const struct shifted *shifted, int64_t rows);
int shifted_repack(const struct shifted *shifted, const struct conv_shape *shape,
                   cudaStream_t stream, const float *from, void *to, struct report *report);
int shifted_cuda(const struct shifted *shifted, const struct conv_shape *shape, cudaStream_t stream,
                 void *workspace, const void *weights, const float *bias, const void *x,
                 int64_t rows, float *y, struct report *report);

#ifdef __cplusplus
}
#endif
