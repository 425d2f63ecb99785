/*
 * conv.h - three-dimensional convolution, to float32
 *
 * Four ways: direct.cu for few channels and stride 1; on tensor cores shifted_product.cu for 16
 * bits and stride 1, implicit.cu for most others; cuDNN for the rest. All give a sample the same
 * bits in any batch.
 */
#pragma once

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

struct conv_shape {
    int64_t in_channels, out_channels;
    int64_t in[3], out[3], kernel[3], stride[3], padding[3];
    int64_t rows;     /* at most, in one run */
    enum dtype dtype; /* of x; and then weights are numbers of that type */
    bool normed;      /* group_norm takes the result: NaN may stand for an infinity */
};

struct conv;

/* Whether 16-bit x is taken as it is; else x is float32, whatever the model's type. */
bool conv_native(const struct conv_shape *shape);
/* Whether samples beyond the last are read. */
bool conv_pads(const struct conv_shape *shape);
/* Bytes of the weights as they are kept. */
uint64_t conv_resident(const struct conv_shape *shape);
/* Bytes of work space that are known beforehand. */
uint64_t conv_work(const struct conv_shape *shape);
/* Samples that x and y must have room for: rows, padded to whole blocks. */
int64_t conv_rows(const struct conv_shape *shape, int64_t rows);
/* Takes weights [out, in, kernel] and bias (or NULL) from device memory, both float32. */
int conv_new(const struct conv_shape *shape, const float *weight, const float *bias,
             cudaStream_t stream, struct conv **ret, struct report *report);
struct conv *conv_free(struct conv *conv);
/* Bytes of it that only cuDNN knows. */
uint64_t conv_workspace(const struct conv *conv);
const char *conv_text(const struct conv *conv);
unsigned conv_launches(const struct conv *conv, int64_t rows);
int conv_run(const struct conv *conv, cudaStream_t stream, void *workspace, const void *x,
             int64_t rows, float *y, struct report *report);

/* direct.cu. Weights are repacked to [tiles of 16 outputs, in, kernel, 16]. */
bool direct_fits(const struct conv_shape *shape);
int64_t direct_weights(const struct conv_shape *shape); /* floats */
int direct_repack(const struct conv_shape *shape, cudaStream_t stream, const float *from, float *to,
                  struct report *report);
int direct_prepare(const struct conv_shape *shape, struct report *report);
int direct_cuda(const struct conv_shape *shape, cudaStream_t stream, const float *weights,
                const float *bias, const float *x, int64_t rows, float *y, struct report *report);

#ifdef __cplusplus
}
#endif
