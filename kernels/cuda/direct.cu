/*
 * direct.cu - convolution with few input channels, straight from shared memory
 *
 * With 3 channels and a 3x3x3 window an output costs 81 multiplications: too few for a library's
 * matrix product, which pads and re-reads, and enough to be bound by arithmetic, not by memory. A
 * block takes TILE_H x TILE_W outputs of one depth and one sample, for 16 output channels; the
 * inputs under them and the weights lie in shared memory. A thread holds 16 channels x 8 columns of
 * sums in registers: 384 multiply-adds for every 16 vectors of 16 bytes that it reads.
 *
 * Its columns are 4 t to 4 t + 3 and 32 + 4 t to 32 + 4 t + 3, so that the threads of a quarter
 * warp read 128 bytes in a row. Every output adds channel by channel, then depth, height, width of
 * the window: an order that depends on nothing else.
 */
#include <cuda_pipeline.h>

#include "kernels/cuda/conv.h"
#include "kernels/cuda/cuda.cuh"

#define THREADS      128
#define OUTS         16
#define TILE_H       16
#define TILE_W       64
#define COLUMNS      8 /* of a thread */
#define PITCH        68
#define KERNEL_W_MAX 5 /* PITCH - TILE_W + 1 */
#define SHARED_MAX   (96 << 10)

struct direct {
    struct conv_shape shape;
    const float *weights, *bias, *x;
    float *y;
    bool vectors;    /* lines may be read 16 bytes at a time */
    int32_t window;  /* kernel elements */
    int32_t patch_h; /* input rows under a tile */
    int32_t lines;   /* in_channels kernel[0] patch_h */
    int32_t tiles_h, tiles_w;
};

/* A line of inputs under the tile, and where it goes; NULL: outside the sample, zeros. */
struct line {
    const float *from;
    float *to;
};

static __device__ __forceinline__ struct line line_of(const struct direct &p, const float *sample,
                                                      int i, int d, int h, float *patch)
{
    int plane = i / p.patch_h, kernel_d = (int)p.shape.kernel[0], channel = plane / kernel_d;
    int depth = d + plane - channel * kernel_d, height = h + i - plane * p.patch_h;
    int in_d = (int)p.shape.in[0], in_h = (int)p.shape.in[1];
    struct line line = {NULL, patch + i * PITCH};

    if (depth >= 0 && depth < in_d && height >= 0 && height < in_h)
        line.from = sample + (int64_t)((channel * in_d + depth) * in_h + height) * p.shape.in[2];
    return line;
}

/* Inputs under the tile: half a warp takes a line, 16 bytes a thread, where lines begin at whole
 * 16 bytes; otherwise a warp takes one, number by number. */
static __device__ void read_patch(const struct direct &p, const float *sample, int d, int h, int w,
                                  float *patch)
{
    int in_w = (int)p.shape.in[2], lane = (int)threadIdx.x;

    if (p.vectors) {
        int column = lane % (WARP / 2) * 4;

        for (int i = lane / (WARP / 2); i < p.lines; i += THREADS / (WARP / 2)) {
            struct line line = line_of(p, sample, i, d, h, patch);

            for (int at = column; at < PITCH; at += TILE_W) {
                bool there = line.from && w + at < in_w;

                __pipeline_memcpy_async(line.to + at, there ? line.from + w + at : sample,
                                        4 * sizeof(float), there ? 0 : 4 * sizeof(float));
            }
        }
        return;
    }
    for (int i = lane / WARP; i < p.lines; i += THREADS / WARP) {
        struct line line = line_of(p, sample, i, d, h, patch);

        for (int at = lane % WARP; at < PITCH; at += WARP) {
            bool there = line.from && w + at >= 0 && w + at < in_w;

            __pipeline_memcpy_async(line.to + at, there ? line.from + w + at : sample,
                                    sizeof(float), there ? 0 : sizeof(float));
        }
    }
}

/* Rows of an odd width begin at any 4 bytes, others at whole 8. */
static __device__ __forceinline__ void write_sums(const struct direct &p,
                                                  const float (&sum)[OUTS][COLUMNS], int64_t row,
                                                  int d, int h, int w)
{
    int outs = (int)p.shape.out_channels, out_w = (int)p.shape.out[2];
    int64_t plane = p.shape.out[0] * p.shape.out[1] * out_w;
    float *to = p.y + (row * outs + blockIdx.y * OUTS) * plane +
                ((int64_t)d * p.shape.out[1] + h) * out_w + w;

#pragma unroll
    for (int o = 0; o < OUTS; o++, to += plane) {
        if ((int)blockIdx.y * OUTS + o >= outs)
            break;
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 2) {
            int at = k / 4 * 32 + k % 4;

            if (out_w % 2 == 0 && w + at < out_w) {
                *(float2 *)(to + at) = make_float2(sum[o][k], sum[o][k + 1]);
            } else {
                if (w + at < out_w)
                    to[at] = sum[o][k];
                if (w + at + 1 < out_w)
                    to[at + 1] = sum[o][k + 1];
            }
        }
    }
}

/* Every plane and line of the window, whose columns are unrolled. */
template <int KERNEL_W>
static __device__ __forceinline__ void multiply(const struct direct &p, const float4 *weight,
                                                const float *patch, float (&sum)[OUTS][COLUMNS])
{
    int kernel_h = (int)p.shape.kernel[1], planes = (int)(p.shape.in_channels * p.shape.kernel[0]);

    for (int plane = 0; plane < planes; plane++) {
        const float *in = patch + plane * p.patch_h * PITCH;

#pragma unroll 1
        for (int kh = 0; kh < kernel_h; kh++, in += PITCH) {
            float v[2][8];

#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int k = 0; k < (KERNEL_W > 1 ? 8 : 4); k += 4)
                    *(float4 *)&v[half][k] = *(const float4 *)(in + half * 32 + k);
#pragma unroll
            for (int kw = 0; kw < KERNEL_W; kw++)
#pragma unroll
                for (int o = 0; o < OUTS; o += 4) {
                    float4 four = *weight++;

#pragma unroll
                    for (int k = 0; k < COLUMNS; k++) {
                        float x = v[k / 4][k % 4 + kw];

                        sum[o][k] = __fmaf_rn(four.x, x, sum[o][k]);
                        sum[o + 1][k] = __fmaf_rn(four.y, x, sum[o + 1][k]);
                        sum[o + 2][k] = __fmaf_rn(four.z, x, sum[o + 2][k]);
                        sum[o + 3][k] = __fmaf_rn(four.w, x, sum[o + 3][k]);
                    }
                }
        }
    }
}

template <int KERNEL_W>
static __global__ void __launch_bounds__(THREADS, 3)
    direct_kernel(const __grid_constant__ struct direct p)
{
    extern __shared__ __align__(16) float shared[];
    float *weights = shared, *patch = shared + p.window * (int)p.shape.in_channels * OUTS;
    int tile = (int)(blockIdx.x % (unsigned)(p.tiles_h * p.tiles_w));
    int slice = (int)(blockIdx.x / (unsigned)(p.tiles_h * p.tiles_w));
    int d = slice % (int)p.shape.out[0];
    int64_t row = slice / (int)p.shape.out[0];
    int h = tile / p.tiles_w * TILE_H, w = tile % p.tiles_w * TILE_W;
    int n_weights = p.window * (int)p.shape.in_channels * OUTS;
    int column = (int)threadIdx.x % COLUMNS * 4, line = (int)threadIdx.x / COLUMNS;
    float sum[OUTS][COLUMNS];

    read_patch(p, p.x + row * p.shape.in_channels * p.shape.in[0] * p.shape.in[1] * p.shape.in[2],
               d - (int)p.shape.padding[0], h - (int)p.shape.padding[1],
               w - (int)p.shape.padding[2], patch);
    for (int i = (int)threadIdx.x * 4; i < n_weights; i += THREADS * 4)
        __pipeline_memcpy_async(weights + i, p.weights + (int64_t)blockIdx.y * n_weights + i, 16);
    __pipeline_commit();
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
        float bias = p.bias ? p.bias[blockIdx.y * OUTS + o] : 0.0f;

#pragma unroll
        for (int k = 0; k < COLUMNS; k++)
            sum[o][k] = bias;
    }
    __pipeline_wait_prior(0);
    __syncthreads();

    multiply<KERNEL_W>(p, (const float4 *)weights, patch + line * PITCH + column, sum);
    if (h + line < p.shape.out[1])
        write_sums(p, sum, row, d, h + line, w + column);
}

static __global__ void repack_kernel(const float *from, float *to, int64_t outs, int64_t per_out,
                                     int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t out = i / (per_out * OUTS) * OUTS + i % OUTS, at = i / OUTS % per_out;

    if (i < n)
        to[i] = out < outs ? from[out * per_out + at] : 0;
}

static int64_t per_out(const struct conv_shape *shape)
{
    return shape->in_channels * shape->kernel[0] * shape->kernel[1] * shape->kernel[2];
}

static int64_t tiles_out(const struct conv_shape *shape)
{
    return (shape->out_channels + OUTS - 1) / OUTS;
}

static int64_t shared_size(const struct conv_shape *shape)
{
    return (per_out(shape) * OUTS +
            shape->in_channels * shape->kernel[0] * (TILE_H + shape->kernel[1] - 1) * PITCH) *
           (int64_t)sizeof(float);
}

extern "C" bool direct_fits(const struct conv_shape *shape)
{
    for (int i = 0; i < 3; i++)
        if (shape->stride[i] != 1 || shape->kernel[i] > 64)
            return false;
    /* Within a sample, and in the grid, the kernel counts in int. */
    if (shape->in_channels * shape->in[0] * shape->in[1] > INT32_MAX ||
        shape->in[2] > INT32_MAX / 2 ||
        shape->rows * shape->out[0] * ((shape->out[1] + TILE_H - 1) / TILE_H) *
                ((shape->out[2] + TILE_W - 1) / TILE_W) >
            INT32_MAX)
        return false;
    return shape->in_channels <= 64 && shape->kernel[2] <= KERNEL_W_MAX &&
           tiles_out(shape) <= 65535 && shared_size(shape) <= SHARED_MAX;
}

extern "C" int64_t direct_weights(const struct conv_shape *shape)
{
    return tiles_out(shape) * OUTS * per_out(shape);
}

extern "C" int direct_repack(const struct conv_shape *shape, cudaStream_t stream, const float *from,
                             float *to, struct report *report)
{
    int64_t n = direct_weights(shape);

    repack_kernel<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, stream>>>(
        from, to, shape->out_channels, per_out(shape), n);
    return CUDA_LAUNCHED(report);
}

typedef void (*direct_launch)(const struct direct);

static direct_launch kernel_of(const struct conv_shape *shape)
{
    static const direct_launch kernels[KERNEL_W_MAX] = {
        direct_kernel<1>, direct_kernel<2>, direct_kernel<3>, direct_kernel<4>, direct_kernel<5>};

    return kernels[shape->kernel[2] - 1];
}

/* More than 48 KiB of shared memory must be asked for, once per device. */
extern "C" int direct_prepare(const struct conv_shape *shape, struct report *report)
{
    return CUDA(report,
                cudaFuncSetAttribute((const void *)kernel_of(shape),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX));
}

extern "C" int direct_cuda(const struct conv_shape *shape, cudaStream_t stream,
                           const float *weights, const float *bias, const float *x, int64_t rows,
                           float *y, struct report *report)
{
    struct direct p = {*shape, weights, bias, x, y, false, 0, 0, 0, 0, 0};

    p.vectors = shape->in[2] % 4 == 0 && shape->padding[2] == 0 && (uintptr_t)x % 16 == 0;
    p.window = (int32_t)(shape->kernel[0] * shape->kernel[1] * shape->kernel[2]);
    p.patch_h = (int32_t)(TILE_H + shape->kernel[1] - 1);
    p.lines = (int32_t)(shape->in_channels * shape->kernel[0] * p.patch_h);
    p.tiles_h = (int32_t)((shape->out[1] + TILE_H - 1) / TILE_H);
    p.tiles_w = (int32_t)((shape->out[2] + TILE_W - 1) / TILE_W);

    dim3 grid((unsigned)(rows * shape->out[0] * p.tiles_h * p.tiles_w), (unsigned)tiles_out(shape));
    kernel_of(shape)<<<grid, THREADS, (size_t)shared_size(shape), stream>>>(p);
    return CUDA_LAUNCHED(report);
}
