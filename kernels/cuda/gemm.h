/*
 * gemm.h - products with resident weights: y = x W^T, float32 or better
 *
 * A float32 product is three of fp16 (GEMM_EXACT): weights and rows are scaled by powers of two and
 * split into a high and a low half. gemm_run() leaves sums that still carry those scales (struct
 * sums); whoever reads them undoes the scales and adds the bias: norm_min, or gemm_finish().
 */
#pragma once

#include "kernels/cuda/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum gemm_kind {
    GEMM_EXACT,  /* three products of scaled fp16 halves: float32's accuracy */
    GEMM_SINGLE, /* one product of scaled fp16: 11 bits, as TF32 has */
    GEMM_NATIVE  /* weights and rows are 16 bit as they are */
};

struct gemm_shape {
    enum gemm_kind kind;
    enum dtype dtype; /* of GEMM_NATIVE */
    int64_t in, out;
    int64_t rows;   /* at most, in one run */
    int64_t centre; /* channels per group that a group_norm follows with; 0: none does */
};

/* Device bytes: of the gemm itself, and of the work space that one run needs. */
struct gemm_size {
    uint64_t resident;
    uint64_t operand, exponents, sums, workspace;
};
void gemm_size(const struct gemm_shape *shape, struct gemm_size *ret);

struct gemm_work {
    void *operand, *workspace; /* gemm_size() each, aligned to 256 */
    int8_t *exponents;
    float *sums;
};

struct gemm;
struct gemm_library; /* cuBLASLt's handle: any thread */

int gemm_library_new(struct gemm_library **ret, struct report *report);
struct gemm_library *gemm_library_free(struct gemm_library *library);

/* Takes weights [out, in] and bias [out] (or NULL) from device memory; the weights are changed on
 * the way, and neither is needed afterwards. Waits for the stream. */
int gemm_new(struct gemm_library *library, const struct gemm_shape *shape, float *weight,
             const float *bias, cudaStream_t stream, struct gemm **ret, struct report *report);
struct gemm *gemm_free(struct gemm *gemm);
/* What runs, in words. */
const char *gemm_text(const struct gemm *gemm);
unsigned gemm_launches(const struct gemm *gemm);

int gemm_run(const struct gemm *gemm, cudaStream_t stream, const struct gemm_work *work,
             enum dtype dtype, const void *x, int64_t rows, struct report *report);
struct sums gemm_sums(const struct gemm *gemm, const struct gemm_work *work);
/* Sums to values [rows, out]. Rows and weights that are not finite give PyTorch's NaN or infinity.
 */
int gemm_finish(const struct gemm *gemm, cudaStream_t stream, const struct gemm_work *work,
                enum dtype dtype, const void *x, int64_t rows, float *to, struct report *report);

#ifdef __cplusplus
}
#endif
