/*
 * operands.cu - weights and rows as the products read them
 *
 * A power of two brings numbers into fp16's range and, exact kinds, what fp16 leaves over goes into
 * a second plane: two halves hold 22 bits of a number near the largest. Weights are scaled per
 * channel and prepared once; those that a group_norm follows are centred first, in double: the mean
 * over a group's channels is what the norm would take away. Rows are scaled per unit of K (exact)
 * or as a whole (single), and prepared in every run.
 *
 * NaN and infinity need no care: the low half of an infinity is NaN, so a row or channel with
 * either is NaN throughout, as its group would be after the norm.
 */
#include "kernels/cuda/product.cuh"

#define THREADS     256
#define CHUNK       8    /* of K: 16 bytes */
#define WHOLE       1024 /* threads where a block has whole rows */
#define SINGLE_MANY 64   /* rows from which a block has four of them, there */

/* The power of two that brings numbers up to `top` into [2^14, 2^15), or as near as can be. */
static __device__ int exponent_of(uint32_t top)
{
    if (top == 0 || top >= INFINITE)
        return 0;
    return min(14 - ((int)max(top >> 23, 1u) - 127), 126);
}

static __device__ __forceinline__ uint16_t bits_of(__half v)
{
    return __half_as_ushort(v);
}

static __device__ __forceinline__ uint16_t bits_of(__nv_bfloat16 v)
{
    return __bfloat16_as_ushort(v);
}

/* Eight numbers of a row, or zeros. */
struct chunk {
    float4 a, b;
};

static __device__ __forceinline__ struct chunk load_chunk(const float *x, bool inside)
{
    const float4 zero = make_float4(0, 0, 0, 0);

    return {inside ? *(const float4 *)x : zero, inside ? *(const float4 *)(x + 4) : zero};
}

static __device__ __forceinline__ uint32_t top_of(float4 v)
{
    uint32_t x = __float_as_uint(v.x) & UNSIGNED, y = __float_as_uint(v.y) & UNSIGNED;
    uint32_t z = __float_as_uint(v.z) & UNSIGNED, w = __float_as_uint(v.w) & UNSIGNED;

    return max(max(x, y), max(z, w));
}

/* Two scaled numbers: their high halves, and what those leave over. */
static __device__ __forceinline__ uint32_t high_low(float a, float b, uint32_t *low)
{
    __half2 high = __floats2half2_rn(a, b);
    __half2 rest = __floats2half2_rn(a - __low2float(high), b - __high2float(high));

    *low = *(uint32_t *)&rest;
    return *(uint32_t *)&high;
}

static __device__ __forceinline__ uint4 split_chunk(const struct chunk &v, float scale, uint4 *low)
{
    uint4 high;

    high.x = high_low(v.a.x * scale, v.a.y * scale, &low->x);
    high.y = high_low(v.a.z * scale, v.a.w * scale, &low->y);
    high.z = high_low(v.b.x * scale, v.b.y * scale, &low->z);
    high.w = high_low(v.b.z * scale, v.b.w * scale, &low->w);
    return high;
}

/* Where a chunk of a row lies: tile, unit, plane, chunk of K, row. */
template <int KIND>
static __device__ __forceinline__ uint8_t *place(const struct product_run &run, uint32_t row,
                                                 int64_t k)
{
    constexpr int unit = PRODUCT_UNIT(KIND);
    const uint32_t tile = (uint32_t)run.tile, in_tile = row % tile;

    return run.rows + ((int64_t)(row / tile) * run.units + k / unit) * (tile * PLANE * 4) +
           k % unit / PLANE * (tile * PLANE * 2) + (k % PLANE / CHUNK * tile + in_tile) * 16;
}

/* Where the scale of a row's unit lies; rows have `units` of them. */
static __device__ __forceinline__ float *scale_of(const struct product_run &run, uint32_t row,
                                                  int64_t units, int64_t unit)
{
    const uint32_t tile = (uint32_t)run.tile;

    return run.scales + (row / tile * units + unit) * SCALES(tile) + scale_place(row % tile);
}

static __device__ __forceinline__ void begin_minima(const struct product_run &run, uint32_t row)
{
    run.keys[row] = ~0u;
    if (row == 0)
        *run.arrived = 0;
}

/* Lets the product start, which waits for this kernel by itself, and waits for what is before. */
static __device__ __forceinline__ void between(void)
{
    next_launch();
    previous_wait();
}

/* The rows as they were launched, or as a captured run finds them. After between(). */
template <typename T>
static __device__ __forceinline__ int64_t rows_of(const struct product_run &run, const T *&x)
{
    if (!run.input)
        return run.n;
    x = (const T *)run.input->x;
    return run.input->rows;
}

/* Exact: eight rows by 256 of K a block; a warp has 8 rows by 4 chunks, two warps a unit. */
static __global__ void __launch_bounds__(THREADS)
    exact_rows_kernel(const float *x, int64_t in, const struct product_run run)
{
    __shared__ uint32_t tops[THREADS / WARP][8];
    const int r = threadIdx.x % 8, warp = threadIdx.x / WARP;
    const uint32_t row = blockIdx.y * 8 + r;
    const int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x / 8 * CHUNK;
    struct chunk v;
    uint32_t top;
    uint4 high, low;
    int64_t n;

    between();
    n = rows_of(run, x);
    v = load_chunk(x + row * in + k, row < n && k < in);
    top = max(top_of(v.a), top_of(v.b));
    top = max(top, __shfl_xor_sync(~0u, top, 8));
    top = max(top, __shfl_xor_sync(~0u, top, 16));
    if (threadIdx.x % WARP < 8)
        tops[warp][r] = top;
    __syncthreads();
    top = max(tops[warp & ~1][r], tops[warp | 1][r]);
    if (blockIdx.x == 0 && threadIdx.x < 8)
        begin_minima(run, row);
    if (k >= in)
        return;
    high = split_chunk(v, power(exponent_of(top)), &low);

    uint8_t *to = place<PRODUCT_EXACT>(run, row, k);

    *(uint4 *)to = high;
    *(uint4 *)(to + run.tile * PLANE * 2) = low;
    if (k % PLANE == 0)
        *scale_of(run, row, run.units, k / PLANE) = power(-exponent_of(top)) * run.common_scale;
}

/* Single: a block has whole rows, which it reads twice: one, or four that it writes together. */
template <int ROWS>
static __global__ void __launch_bounds__(WHOLE)
    single_rows_kernel(const float *x, int64_t in, const struct product_run run)
{
    constexpr int stride = WHOLE / ROWS * CHUNK;
    __shared__ uint32_t tops[ROWS];
    const int r = threadIdx.x % ROWS;
    const uint32_t row = blockIdx.y * ROWS + r;
    uint32_t top = 0;

    between();

    const bool inside = row < rows_of(run, x);

    if (threadIdx.x < ROWS) {
        begin_minima(run, row);
        tops[r] = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int64_t k = threadIdx.x / ROWS * CHUNK; k < in; k += stride) {
        const struct chunk v = load_chunk(x + row * in + k, inside);

        top = max(top, max(top_of(v.a), top_of(v.b)));
    }
#pragma unroll
    for (int lane = WARP / 2; lane >= ROWS; lane /= 2)
        top = max(top, __shfl_xor_sync(~0u, top, lane));
    if (threadIdx.x % WARP < ROWS)
        atomicMax(&tops[r], top);
    __syncthreads();
    top = tops[r];

    const float scale = power(exponent_of(top));

#pragma unroll 2
    for (int64_t k = threadIdx.x / ROWS * CHUNK; k < in; k += stride) {
        uint4 low;

        *(uint4 *)place<PRODUCT_SINGLE>(run, row, k) =
            split_chunk(load_chunk(x + row * in + k, inside), scale, &low);
    }
    if (threadIdx.x < ROWS)
        *scale_of(run, row, 1, 0) = power(-exponent_of(top)) * run.common_scale;
}

/* 16-bit rows only change places. */
static __global__ void __launch_bounds__(THREADS)
    plain_rows_kernel(const uint16_t *x, int64_t in, const struct product_run run)
{
    const uint32_t row = blockIdx.y * 8 + threadIdx.x % 8;
    const int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x / 8 * CHUNK;
    int64_t n;

    between();
    n = rows_of(run, x);
    if (blockIdx.x == 0 && threadIdx.x < 8)
        begin_minima(run, row);
    if (k < in)
        *(uint4 *)place<PRODUCT_FLOAT16>(run, row, k) =
            row < n ? *(const uint4 *)(x + row * in + k) : make_uint4(0, 0, 0, 0);
}

extern "C" int rows_cuda(cudaStream_t stream, enum product_kind kind, int64_t rows, const void *x,
                         int64_t in, const struct product_run *run, bool early,
                         struct report *report)
{
    void *arguments[] = {(void *)&x, (void *)&in, (void *)run};
    const unsigned threads = kind == PRODUCT_SINGLE ? WHOLE : THREADS;
    const void *kernel = (const void *)plain_rows_kernel;
    dim3 blocks((unsigned)((in + THREADS - 1) / THREADS), (unsigned)(rows / 8));

    if (kind == PRODUCT_EXACT) {
        kernel = (const void *)exact_rows_kernel;
    } else if (kind == PRODUCT_SINGLE) {
        const bool many = rows > SINGLE_MANY;

        kernel = many ? (const void *)single_rows_kernel<4> : (const void *)single_rows_kernel<1>;
        blocks = dim3(1, (unsigned)(many ? rows / 4 : rows));
    }
    if (early)
        return launch_early(kernel, blocks, 1, threads, 0, stream, arguments, report);
    return CUDA(report, cudaLaunchKernel(kernel, blocks, dim3(threads), arguments, 0, stream));
}

/* A group's channels at column k, less their mean; the mean is taken in double. */
template <bool CENTRE>
static __device__ __forceinline__ void centred(const float *weight, int64_t in, int64_t k,
                                               double (&v)[GROUP])
{
    double mean = 0;

#pragma unroll
    for (int c = 0; c < GROUP; c++) {
        v[c] = (double)weight[c * in + k];
        mean += v[c];
    }
    if (CENTRE)
#pragma unroll
        for (int c = 0; c < GROUP; c++)
            v[c] -= mean / GROUP;
}

/* A group of channels a block: centred, scaled per channel, split, laid out. */
template <int KIND>
static __global__ void __launch_bounds__(THREADS)
    weights_kernel(const float *weight, int64_t in, const struct product_run run)
{
    constexpr bool centre = KIND < PRODUCT_FLOAT16;
    constexpr int unit = PRODUCT_UNIT(KIND);
    __shared__ uint32_t tops[GROUP];
    const float *group = weight + (int64_t)blockIdx.x * GROUP * in;
    double v[GROUP];

    if (threadIdx.x < GROUP)
        tops[threadIdx.x] = 0;
    __syncthreads();
    if (KIND < PRODUCT_FLOAT16)
        for (int64_t k = threadIdx.x; k < in; k += THREADS) {
            centred<centre>(group, in, k, v);
#pragma unroll
            for (int c = 0; c < GROUP; c++) {
                uint32_t bits = __float_as_uint((float)v[c]) & UNSIGNED;

                if (bits < INFINITE)
                    atomicMax(&tops[c], bits);
            }
        }
    __syncthreads();
    for (int64_t k = threadIdx.x; k < in; k += THREADS) {
        centred<centre>(group, in, k, v);
#pragma unroll
        for (int c = 0; c < GROUP; c++) {
            int channel = blockIdx.x * GROUP + c;
            uint8_t *to = run.weights + (k / unit * run.slabs + channel / SLAB) * SLAB_SIZE +
                          (k % PLANE / CHUNK * SLAB + channel % SLAB) * 16 + k % CHUNK * 2;

            if (KIND >= PRODUCT_FLOAT16) {
                *(uint16_t *)(to + k % unit / PLANE * (SLAB_SIZE / 2)) =
                    KIND == PRODUCT_BFLOAT16 ? bits_of(__float2bfloat16_rn((float)v[c]))
                                             : bits_of(__float2half_rn((float)v[c]));
            } else {
                double scaled = v[c] * (double)power(exponent_of(tops[c]));
                __half high = __double2half(scaled);

                if (KIND == PRODUCT_EXACT) {
                    *(uint16_t *)to = bits_of(high);
                    *(uint16_t *)(to + SLAB_SIZE / 2) =
                        bits_of(__double2half(scaled - (double)__half2float(high)));
                } else {
                    *(uint16_t *)(to + k % unit / PLANE * (SLAB_SIZE / 2)) = bits_of(high);
                }
            }
        }
    }
    if (threadIdx.x < GROUP)
        run.channel_scales[blockIdx.x * GROUP + threadIdx.x] =
            KIND >= PRODUCT_FLOAT16 ? 1.0f
            : tops[threadIdx.x]     ? power(-exponent_of(tops[threadIdx.x]))
                                    : 0.0f; /* its sums are zero, or not finite */
}

/* Bias, less its mean over the group when weights are centred; gamma and beta. A group a thread. */
static __global__ void __launch_bounds__(THREADS)
    channels_kernel(const float *bias, const float *gamma, const float *beta, int64_t out,
                    bool centre, const struct product_run run)
{
    int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * GROUP;
    double mean = 0;

    if (first >= out)
        return;
    for (int64_t c = first; c < first + GROUP; c++)
        mean += bias ? (double)bias[c] / GROUP : 0;
    for (int64_t c = first; c < first + GROUP; c++) {
        double b = bias ? (double)bias[c] : 0;

        run.bias[c] = (float)(centre ? b - mean : b);
        run.gamma[c] = gamma ? gamma[c] : 1.0f;
        run.beta[c] = beta ? beta[c] : 0.0f;
    }
}

template <int KIND>
static void launch_weights(cudaStream_t stream, const float *weight, int64_t in,
                           const struct product_run *run)
{
    weights_kernel<KIND>
        <<<(unsigned)(run->slabs * SLAB / GROUP), THREADS, 0, stream>>>(weight, in, *run);
}

extern "C" int weights_cuda(cudaStream_t stream, enum product_kind kind, const float *weight,
                            int64_t in, const float *bias, const float *gamma, const float *beta,
                            const struct product_run *run, struct report *report)
{
    int64_t channels = (int64_t)run->slabs * SLAB;
    unsigned groups = (unsigned)(channels / GROUP);
    int r;

    if (kind == PRODUCT_EXACT)
        launch_weights<PRODUCT_EXACT>(stream, weight, in, run);
    else if (kind == PRODUCT_SINGLE)
        launch_weights<PRODUCT_SINGLE>(stream, weight, in, run);
    else if (kind == PRODUCT_FLOAT16)
        launch_weights<PRODUCT_FLOAT16>(stream, weight, in, run);
    else
        launch_weights<PRODUCT_BFLOAT16>(stream, weight, in, run);
    r = CUDA_LAUNCHED(report);
    if (r < 0)
        return r;
    channels_kernel<<<(groups + THREADS - 1) / THREADS, THREADS, 0, stream>>>(
        bias, gamma, beta, channels, kind < PRODUCT_FLOAT16, *run);
    return CUDA_LAUNCHED(report);
}
