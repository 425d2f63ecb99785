/*
 * linear_norm_min.h - linear, group_norm over 16 channels, minimum over all channels, fused
 *
 * On compute capability 9.0 one kernel prepares the rows (operands.cu) and one multiplies them with
 * resident weights and reduces the product in registers (narrow_product.cu for few rows,
 * wide_product.cu): the matrix of rows x channels never goes to memory. A run of many rows is cut
 * in pieces, each its own two kernels. Other shapes and devices take gemm.h and norm.cu.
 */
#pragma once

#include "kernels/cuda/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

struct linear_norm_min_shape {
    enum gemm_kind kind;
    enum dtype dtype; /* of x, and of GEMM_NATIVE's weights */
    int64_t in, out, groups;
    int64_t rows; /* at most, in one run */
    float eps;
};

/* True when this device and shape have the kernel. */
bool linear_norm_min_fits(const struct linear_norm_min_shape *shape);

/* Device bytes: of the prepared weights, and of the work space of one run (aligned to 256). */
void linear_norm_min_size(const struct linear_norm_min_shape *shape, uint64_t *ret_resident,
                          uint64_t *ret_work);

/* What a captured run reads when it is launched: x and its rows by then, in device memory. */
struct linear_norm_min_input {
    const void *x;
    int64_t rows;
};

struct linear_norm_min;

/*
 * Takes weights [out, in], and bias, gamma, beta [out] (NULL: 0, 1, 0), as float32 in device
 * memory. Nothing of them is needed afterwards. Waits for the stream.
 */
int linear_norm_min_new(const struct linear_norm_min_shape *shape, const float *weight,
                        const float *bias, const float *gamma, const float *beta,
                        cudaStream_t stream, struct linear_norm_min **ret, struct report *report);
struct linear_norm_min *linear_norm_min_free(struct linear_norm_min *fused);

/* What runs, in words; kernels of a run of that many rows. */
const char *linear_norm_min_text(const struct linear_norm_min *fused);
unsigned linear_norm_min_launches(const struct linear_norm_min *fused, int64_t rows);
/* Of the runs that are launched as one of that many rows is, the largest; 0: it takes several. */
int64_t linear_norm_min_filled(const struct linear_norm_min *fused, int64_t rows);

/*
 * x [rows, in] to the minima of the rows, float32. Only enqueues. With `to` NULL they stay in the
 * work space as keys (cuda.cuh) until its next use, and a kernel may be launched that starts early
 * (launch_early() in hopper.cuh). With `input` x and rows are what lies there when the kernels run,
 * at most as many rows as here. Not `early`: this starts when what is in front of it has ended, and
 * so nothing behind starts before; a kernel there may read what was written in front of this before
 * it waits.
 */
int linear_norm_min_run(const struct linear_norm_min *fused, cudaStream_t stream, void *work,
                        const void *x, const struct linear_norm_min_input *input, int64_t rows,
                        float *to, bool early, struct report *report);

const uint32_t *linear_norm_min_keys(const struct linear_norm_min *fused, const void *work);

#ifdef __cplusplus
}
#endif
