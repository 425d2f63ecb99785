/*
 * conv.cu - convolution: which way it goes, and cuDNN, which only this file includes
 *
 * cuDNN picks algorithms by batch size, which would change a sample's bits. So it only ever sees
 * blocks of the same number of samples, padded, and one algorithm that was pinned when the model
 * was loaded: implicit GEMM with float32 multiply-adds, no TF32, one sum per output. The bias is
 * added by a kernel of ours. A cuDNN handle serves one thread; each convolution has its own.
 */
#include <cudnn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/implicit.h"
#include "kernels/cuda/shifted.h"

#define THREADS         256
#define BLOCK_OUTS      (INT64_C(1) << 21) /* outputs that keep a device busy */
#define BLOCK_MAX       64                 /* samples */
#define RANK            5
#define DIRECT_CHANNELS 5
#define WORKSPACE_MAX   (UINT64_C(256) << 20)

enum way { WAY_DIRECT, WAY_SHIFTED, WAY_IMPLICIT, WAY_CUDNN };

struct conv {
    struct conv_shape shape;
    enum way way;
    struct implicit implicit;
    struct shifted shifted;
    void *weights;
    float *bias;   /* padded to whole tiles of direct.cu; NULL: none */
    int64_t block; /* samples of one call of cuDNN */
    cudnnHandle_t handle;
    cudnnTensorDescriptor_t x, y;
    cudnnFilterDescriptor_t filter;
    cudnnConvolutionDescriptor_t window;
    cudnnConvolutionFwdAlgo_t algo;
    size_t workspace;
    char text[160];
};

static int cudnn_check(cudnnStatus_t status, const char *call, int line, struct report *report)
{
    int r;

    switch (status) {
    case CUDNN_STATUS_SUCCESS:
        return 0;
    case CUDNN_STATUS_ALLOC_FAILED:
        r = -ENOMEM;
        break;
    case CUDNN_STATUS_NOT_INITIALIZED:
        r = -ENODEV;
        break;
    case CUDNN_STATUS_EXECUTION_FAILED:
    case CUDNN_STATUS_INTERNAL_ERROR:
        r = -ENOTRECOVERABLE;
        break;
    default:
        r = -EINVAL;
    }
    return report_set(report, r, "cuDNN: %s (conv.cu:%d: %.120s)", cudnnGetErrorString(status),
                      line, call);
}
#define CUDNN(report, call) cudnn_check((call), #call, __LINE__, (report))

static int64_t product(const int64_t dims[3])
{
    return dims[0] * dims[1] * dims[2];
}

/* With few channels, float32 units are not behind tensor cores whose steps are half empty. */
static enum way way_of(const struct conv_shape *shape)
{
    bool few = shape->in_channels <= DIRECT_CHANNELS && direct_fits(shape);

    if (!few && shifted_fits(shape))
        return WAY_SHIFTED;
    if (!few && implicit_fits(shape))
        return WAY_IMPLICIT;
    return shape->dtype == DTYPE_FLOAT32 && direct_fits(shape) ? WAY_DIRECT : WAY_CUDNN;
}

extern "C" bool conv_native(const struct conv_shape *shape)
{
    enum way way = way_of(shape);

    return shape->dtype != DTYPE_FLOAT32 && (way == WAY_SHIFTED || way == WAY_IMPLICIT);
}

extern "C" bool conv_pads(const struct conv_shape *shape)
{
    return way_of(shape) == WAY_CUDNN;
}

static int64_t block_of(const struct conv_shape *shape)
{
    int64_t outs = shape->out_channels * product(shape->out);
    int64_t n = (BLOCK_OUTS + outs - 1) / outs;

    n = n < BLOCK_MAX ? n : BLOCK_MAX;
    return n < shape->rows ? n : shape->rows;
}

extern "C" int64_t conv_rows(const struct conv_shape *shape, int64_t rows)
{
    int64_t block = conv_pads(shape) ? block_of(shape) : 1;

    return (rows + block - 1) / block * block;
}

static uint64_t weights_of(const struct conv_shape *shape)
{
    switch (way_of(shape)) {
    case WAY_DIRECT:
        return (uint64_t)direct_weights(shape) * sizeof(float);
    case WAY_SHIFTED:
        return shifted_weights(shape);
    case WAY_IMPLICIT:
        return implicit_weights(shape);
    default:
        return (uint64_t)(shape->out_channels * shape->in_channels * product(shape->kernel)) *
               sizeof(float);
    }
}

static int64_t bias_of(const struct conv_shape *shape)
{
    return (shape->out_channels + 15) / 16 * 16;
}

extern "C" uint64_t conv_resident(const struct conv_shape *shape)
{
    return weights_of(shape) + (uint64_t)bias_of(shape) * sizeof(float);
}

extern "C" uint64_t conv_work(const struct conv_shape *shape)
{
    return way_of(shape) == WAY_SHIFTED ? shifted_workspace(shape) : 0;
}

/* cuDNN */

static int tensor_of(cudnnTensorDescriptor_t *ret, int64_t n, int64_t channels,
                     const int64_t dims[3], struct report *report)
{
    int size[RANK] = {(int)n, (int)channels, (int)dims[0], (int)dims[1], (int)dims[2]};
    int stride[RANK] = {0, 0, 0, 0, 1};
    int r = CUDNN(report, cudnnCreateTensorDescriptor(ret));

    for (int i = RANK - 2; i >= 0; i--)
        stride[i] = stride[i + 1] * size[i + 1];
    if (r == 0)
        r = CUDNN(report, cudnnSetTensorNdDescriptor(*ret, CUDNN_DATA_FLOAT, RANK, size, stride));
    return r;
}

/* cuDNN counts in int. */
static bool within_int(const struct conv_shape *shape, int64_t n)
{
    return n * shape->in_channels * product(shape->in) <= INT32_MAX &&
           n * shape->out_channels * product(shape->out) <= INT32_MAX &&
           shape->out_channels * shape->in_channels * product(shape->kernel) <= INT32_MAX;
}

static int pin_algorithm(struct conv *conv, struct report *report)
{
    static const cudnnConvolutionFwdAlgo_t wanted[] = {
        CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM};
    int r = -EINVAL;

    for (int i = 0; i < 2; i++) {
        conv->algo = wanted[i];
        r = CUDNN(report, cudnnGetConvolutionForwardWorkspaceSize(
                              conv->handle, conv->x, conv->filter, conv->window, conv->y,
                              conv->algo, &conv->workspace));
        if (r == 0 && conv->workspace <= WORKSPACE_MAX)
            return 0;
    }
    return r < 0 ? r : report_set(report, -ENOMEM, "cuDNN wants too much work space");
}

static int set_up_cudnn(struct conv *conv, struct report *report)
{
    const struct conv_shape *shape = &conv->shape;
    int filter[RANK] = {(int)shape->out_channels, (int)shape->in_channels, (int)shape->kernel[0],
                        (int)shape->kernel[1], (int)shape->kernel[2]};
    int padding[3], stride[3], dilation[3] = {1, 1, 1};
    int r;

    for (int i = 0; i < 3; i++) {
        padding[i] = (int)shape->padding[i];
        stride[i] = (int)shape->stride[i];
    }
    conv->block = block_of(shape);
    if (!within_int(shape, conv->block))
        return report_set(report, -EINVAL, "a convolution of this size does not fit cuDNN");
    r = CUDNN(report, cudnnCreate(&conv->handle));
    if (r == 0)
        r = tensor_of(&conv->x, conv->block, shape->in_channels, shape->in, report);
    if (r == 0)
        r = tensor_of(&conv->y, conv->block, shape->out_channels, shape->out, report);
    if (r == 0)
        r = CUDNN(report, cudnnCreateFilterDescriptor(&conv->filter));
    if (r == 0)
        r = CUDNN(report, cudnnSetFilterNdDescriptor(conv->filter, CUDNN_DATA_FLOAT,
                                                     CUDNN_TENSOR_NCHW, RANK, filter));
    if (r == 0)
        r = CUDNN(report, cudnnCreateConvolutionDescriptor(&conv->window));
    if (r == 0)
        r = CUDNN(report,
                  cudnnSetConvolutionNdDescriptor(conv->window, 3, padding, stride, dilation,
                                                  CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
    if (r == 0)
        r = CUDNN(report, cudnnSetConvolutionMathType(conv->window, CUDNN_FMA_MATH));
    if (r == 0)
        r = pin_algorithm(conv, report);
    return r;
}

static int take_weights(struct conv *conv, const float *weight, const float *bias,
                        cudaStream_t stream, struct report *report)
{
    const struct conv_shape *shape = &conv->shape;
    size_t size = weights_of(shape);
    int r;

    r = CUDA(report, cudaMalloc(&conv->weights, size));
    if (r == 0 && conv->way == WAY_DIRECT)
        r = direct_repack(shape, stream, weight, (float *)conv->weights, report);
    else if (r == 0 && conv->way == WAY_SHIFTED)
        r = shifted_repack(&conv->shifted, shape, stream, weight, conv->weights, report);
    else if (r == 0 && conv->way == WAY_IMPLICIT)
        r = implicit_repack(&conv->implicit, shape, stream, weight, conv->weights, report);
    else if (r == 0)
        r = CUDA(report,
                 cudaMemcpyAsync(conv->weights, weight, size, cudaMemcpyDeviceToDevice, stream));
    if (r < 0 || !bias)
        return r;
    size = (size_t)bias_of(shape) * sizeof(float);
    r = CUDA(report, cudaMalloc((void **)&conv->bias, size));
    if (r == 0)
        r = CUDA(report, cudaMemsetAsync(conv->bias, 0, size, stream));
    if (r == 0)
        r = CUDA(report,
                 cudaMemcpyAsync(conv->bias, bias, (size_t)shape->out_channels * sizeof(float),
                                 cudaMemcpyDeviceToDevice, stream));
    return r;
}

extern "C" int conv_new(const struct conv_shape *shape, const float *weight, const float *bias,
                        cudaStream_t stream, struct conv **ret, struct report *report)
{
    struct conv *conv = (struct conv *)calloc(1, sizeof(*conv));
    int r;

    if (!conv)
        return report_set(report, -ENOMEM, "out of memory");
    conv->shape = *shape;
    conv->way = way_of(shape);
    r = conv->way == WAY_DIRECT     ? direct_prepare(shape, report)
        : conv->way == WAY_SHIFTED  ? shifted_prepare(shape, &conv->shifted, report)
        : conv->way == WAY_IMPLICIT ? implicit_prepare(shape, &conv->implicit, report)
                                    : set_up_cudnn(conv, report);
    if (r == 0)
        r = take_weights(conv, weight, bias, stream, report);
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(stream));
    if (r < 0) {
        conv_free(conv);
        return r;
    }
    if (conv->way == WAY_DIRECT)
        snprintf(conv->text, sizeof(conv->text), "from shared memory, float32 multiply-adds");
    else if (conv->way == WAY_SHIFTED)
        snprintf(conv->text, sizeof(conv->text),
                 "tensor cores, one product, laid out for wgmma, %lld samples at a time",
                 (long long)conv->shifted.rows);
    else if (conv->way == WAY_IMPLICIT)
        snprintf(conv->text, sizeof(conv->text), "tensor cores, %s, tiles of %d x %d x %d",
                 shape->dtype == DTYPE_FLOAT32 ? "three products of TF32 parts" : "one product",
                 conv->implicit.tile[0], conv->implicit.tile[1], conv->implicit.tile[2]);
    else
        snprintf(conv->text, sizeof(conv->text),
                 "cuDNN algorithm %d, float32 multiply-adds, blocks of %lld samples",
                 (int)conv->algo, (long long)conv->block);
    *ret = conv;
    return 0;
}

extern "C" struct conv *conv_free(struct conv *conv)
{
    if (!conv)
        return NULL;
    if (conv->window)
        cudnnDestroyConvolutionDescriptor(conv->window);
    if (conv->filter)
        cudnnDestroyFilterDescriptor(conv->filter);
    if (conv->y)
        cudnnDestroyTensorDescriptor(conv->y);
    if (conv->x)
        cudnnDestroyTensorDescriptor(conv->x);
    if (conv->handle)
        cudnnDestroy(conv->handle);
    cudaFree(conv->bias);
    cudaFree(conv->weights);
    free(conv);
    return NULL;
}

extern "C" uint64_t conv_workspace(const struct conv *conv)
{
    return conv->workspace;
}

extern "C" const char *conv_text(const struct conv *conv)
{
    return conv->text;
}

extern "C" unsigned conv_launches(const struct conv *conv, int64_t rows)
{
    unsigned blocks;

    if (conv->way == WAY_SHIFTED)
        return shifted_launches(&conv->shifted, rows);
    if (conv->way != WAY_CUDNN)
        return 1;
    blocks = (unsigned)(conv_rows(&conv->shape, rows) / conv->block);
    return blocks + (conv->bias != NULL);
}

static __global__ void __launch_bounds__(THREADS)
    bias_kernel(float *y, const float *bias, int64_t channels, int64_t spatial, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < n)
        y[i] += bias[quotient(i, spatial) % channels];
}

extern "C" int conv_run(const struct conv *conv, cudaStream_t stream, void *workspace,
                        const void *x, int64_t rows, float *y, struct report *report)
{
    const struct conv_shape *shape = &conv->shape;
    int64_t in = shape->in_channels * product(shape->in);
    int64_t out = shape->out_channels * product(shape->out), n = rows * out;
    float one = 1, zero = 0;
    int r;

    if (conv->way == WAY_DIRECT)
        return direct_cuda(shape, stream, (const float *)conv->weights, conv->bias,
                           (const float *)x, rows, y, report);
    if (conv->way == WAY_SHIFTED)
        return shifted_cuda(&conv->shifted, shape, stream, workspace, conv->weights, conv->bias, x,
                            rows, y, report);
    if (conv->way == WAY_IMPLICIT)
        return implicit_cuda(&conv->implicit, shape, stream, conv->weights, conv->bias, x, rows, y,
                             report);
    r = CUDNN(report, cudnnSetStream(conv->handle, stream));
    for (int64_t row = 0; r == 0 && row < rows; row += conv->block)
        r = CUDNN(report, cudnnConvolutionForward(
                              conv->handle, &one, conv->x, (const float *)x + row * in,
                              conv->filter, conv->weights, conv->window, conv->algo, workspace,
                              conv->workspace, &zero, conv->y, y + row * out));
    if (r < 0 || !conv->bias)
        return r;
    bias_kernel<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, stream>>>(
        y, conv->bias, shape->out_channels, product(shape->out), n);
    return CUDA_LAUNCHED(report);
}
