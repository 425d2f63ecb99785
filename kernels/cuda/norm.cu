/*
 * norm.cu - group statistics, group_norm with amin in one pass, amin alone
 *
 * Statistics are two-pass: the mean first, then the sum of squared distances from it, so that
 * nothing cancels when a mean dwarfs its spread. Sums run in double, in which no sum of float32
 * overflows; the variance is rounded to float32 before it is used and overflows where PyTorch's
 * does. Such a group has rstd 0 and gives beta.
 *
 * Which thread adds which element, and the trees of the reductions, depend on a group's size alone:
 * small groups take a warp, large ones are cut in slabs of SLAB elements, a block each, whose
 * (mean, squares) are merged in one fixed order. So a row's bits never depend on its batch.
 */
#include "kernels/cuda/cuda.cuh"

#define THREADS       256
#define WARPS         (THREADS / WARP)
#define SLAB          4096
#define PER_THREAD    (SLAB / THREADS)
#define WARP_SIZE_MAX 1024 /* elements of a group that one warp takes */
#define ROWS          4    /* of norm_min at a time: parameters are read once for all */

static __device__ __forceinline__ float2 moments(double mean, double squares, int64_t size,
                                                 float eps)
{
    float variance = (float)squares / (float)size;
    float rstd = 1.0f / sqrtf(variance + eps);

    /* Without a mean that might take a difference to infinity, and 0 times it to NaN. */
    return make_float2(rstd == 0 ? 0.0f : (float)mean, rstd);
}

static __global__ void __launch_bounds__(THREADS) stats_warp_kernel(const struct stats stats)
{
    int64_t group = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    const float *from = stats.from + group * stats.size;
    int lane = threadIdx.x % WARP;
    double sum = 0, squares = 0;

    if (group >= stats.rows * stats.groups)
        return;
    for (int64_t e = lane; e < stats.size; e += WARP)
        sum += (double)from[e];
    float mean = (float)(warp_sum(sum) / (double)stats.size);
    for (int64_t e = lane; e < stats.size; e += WARP) {
        float d = from[e] - mean;

        squares += (double)(d * d);
    }
    squares = warp_sum(squares);
    if (lane == 0)
        stats.to[group] = moments(mean, squares, stats.size, stats.eps);
}

static __global__ void __launch_bounds__(THREADS) stats_slab_kernel(const struct stats stats)
{
    int64_t slabs = (stats.size + SLAB - 1) / SLAB;
    int64_t group = blockIdx.x / slabs, slab = blockIdx.x % slabs;
    int64_t first = group * stats.size + slab * SLAB;
    int n = (int)(stats.size - slab * SLAB < SLAB ? stats.size - slab * SLAB : SLAB);
    bool aligned = stats.size % 4 == 0;
    __shared__ double shared[WARPS];
    float v[PER_THREAD];
    double sum = 0, squares = 0;

#pragma unroll
    for (int i = 0; i < PER_THREAD; i += 4) {
        int e = i * THREADS + (int)threadIdx.x * 4;

        if (aligned && e + 4 <= n) {
            float4 four = *(const float4 *)(stats.from + first + e);

            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++)
                v[i + k] = e + k < n ? stats.from[first + e + k] : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        sum += (double)v[i];
    double mean = block_sum<WARPS>(sum, shared) / n;
    float middle = (float)mean;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        float d = v[i] - middle;

        if (i / 4 * 4 * THREADS + (int)threadIdx.x * 4 + i % 4 < n)
            squares += (double)(d * d);
    }
    squares = block_sum<WARPS>(squares, shared);
    if (threadIdx.x == 0)
        stats.partial[blockIdx.x] = make_double2(middle, squares);
}

/* The mean of a slab is the rounded one that its squares were taken from, so no term is lost:
 * squares of the whole = squares of the slabs + n (mean of the slab - mean)^2, exactly so when the
 * slab's own sum is n times its mean; rounding it costs n times the square of half a last bit. */
static __global__ void __launch_bounds__(THREADS) stats_merge_kernel(const struct stats stats)
{
    int64_t slabs = (stats.size + SLAB - 1) / SLAB;
    int64_t group = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    const double2 *partial = stats.partial + group * slabs;
    int lane = threadIdx.x % WARP;
    double sum = 0, squares = 0;

    if (group >= stats.rows * stats.groups)
        return;
    for (int64_t i = lane; i < slabs; i += WARP)
        sum += partial[i].x * (double)(i < slabs - 1 ? SLAB : stats.size - i * SLAB);
    double mean = warp_sum(sum) / (double)stats.size;
    for (int64_t i = lane; i < slabs; i += WARP) {
        double d = partial[i].x - mean;

        squares += partial[i].y + d * d * (double)(i < slabs - 1 ? SLAB : stats.size - i * SLAB);
    }
    squares = warp_sum(squares);
    if (lane == 0)
        stats.to[group] = moments(mean, squares, stats.size, stats.eps);
}

extern "C" int64_t stats_partials(int64_t rows, int64_t groups, int64_t size)
{
    return size <= WARP_SIZE_MAX ? 0 : rows * groups * ((size + SLAB - 1) / SLAB);
}

extern "C" int stats_cuda(cudaStream_t stream, const struct stats *stats, struct report *report)
{
    int64_t groups = stats->rows * stats->groups;
    unsigned warps = (unsigned)((groups + WARPS - 1) / WARPS);
    int64_t slabs = stats_partials(stats->rows, stats->groups, stats->size);

    if (slabs == 0) {
        stats_warp_kernel<<<warps, THREADS, 0, stream>>>(*stats);
    } else {
        stats_slab_kernel<<<(unsigned)slabs, THREADS, 0, stream>>>(*stats);
        stats_merge_kernel<<<warps, THREADS, 0, stream>>>(*stats);
    }
    return CUDA_LAUNCHED(report);
}

/* The least of four channels, from their differences from the mean; these may be infinite when rstd
 * is 0, and then do not count. */
static __device__ __forceinline__ float least_normed(float4 v, float rstd, float4 gamma,
                                                     float4 beta)
{
    if (rstd == 0)
        v = make_float4(0, 0, 0, 0);
    float a =
        min_nan(__fmaf_rn(v.x, rstd * gamma.x, beta.x), __fmaf_rn(v.y, rstd * gamma.y, beta.y));
    float b =
        min_nan(__fmaf_rn(v.z, rstd * gamma.z, beta.z), __fmaf_rn(v.w, rstd * gamma.w, beta.w));

    return min_nan(a, b);
}

/* A thread holds four neighbouring channels, LANES neighbours hold a group. */
template <int LANES>
static __global__ void __launch_bounds__(THREADS) norm_min_kernel(const struct norm_min p)
{
    int64_t first = (int64_t)blockIdx.x * ROWS;
    __shared__ float shared[ROWS][WARPS];
    float lowest[ROWS];

#pragma unroll
    for (int r = 0; r < ROWS; r++)
        lowest[r] = __int_as_float(0x7f800000);
    for (int64_t base = 0; base < p.channels; base += THREADS * 4) {
        int64_t c = base + threadIdx.x * 4;
        bool inside = c < p.channels;
        float4 bias = make_float4(0, 0, 0, 0), gamma = make_float4(1, 1, 1, 1), beta = bias;
        char4 exponent = make_char4(0, 0, 0, 0);

        if (inside && p.sums.bias)
            bias = *(const float4 *)(p.sums.bias + c);
        if (inside && p.gamma)
            gamma = *(const float4 *)(p.gamma + c);
        if (inside && p.beta)
            beta = *(const float4 *)(p.beta + c);
        if (inside && p.sums.column_exponents)
            exponent = *(const char4 *)(p.sums.column_exponents + c);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int64_t row = first + r < p.rows ? first + r : p.rows - 1;
            int e = p.sums.row_exponents ? p.sums.row_exponents[row] : 0;
            float4 v = make_float4(0, 0, 0, 0);

            if (inside)
                v = *(const float4 *)(p.sums.sums + row * p.sums.pitch + c);
            v.x = unscale(v.x, e + exponent.x) + bias.x;
            v.y = unscale(v.y, e + exponent.y) + bias.y;
            v.z = unscale(v.z, e + exponent.z) + bias.z;
            v.w = unscale(v.w, e + exponent.w) + bias.w;

            double sum = ((double)v.x + (double)v.y) + ((double)v.z + (double)v.w);
#pragma unroll
            for (int lane = LANES / 2; lane > 0; lane /= 2)
                sum += __shfl_xor_sync(~0u, sum, lane);
            float mean = (float)(sum / (LANES * 4));

            v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean;
            float squares = (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
#pragma unroll
            for (int lane = LANES / 2; lane > 0; lane /= 2)
                squares += __shfl_xor_sync(~0u, squares, lane);
            float rstd = 1.0f / sqrtf(squares / (LANES * 4) + p.eps);

            if (inside)
                lowest[r] = min_nan(lowest[r], least_normed(v, rstd, gamma, beta));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float v = warp_min(lowest[r]);

        if (threadIdx.x % WARP == 0)
            shared[r][threadIdx.x / WARP] = v;
    }
    __syncthreads();
    if (threadIdx.x < ROWS && first + threadIdx.x < p.rows) {
        float v = shared[threadIdx.x][0];

        for (int i = 1; i < WARPS; i++)
            v = min_nan(v, shared[threadIdx.x][i]);
        p.to[first + threadIdx.x] = v;
    }
}

/* Groups of 4, 8, ... 128 channels; others take the general way. */
extern "C" bool norm_min_fits(int64_t channels, int64_t groups)
{
    int64_t n = channels / groups;

    return n >= 4 && n <= 4 * WARP && (n & (n - 1)) == 0;
}

extern "C" int norm_min_cuda(cudaStream_t stream, const struct norm_min *norm_min,
                             struct report *report)
{
    unsigned blocks = (unsigned)((norm_min->rows + ROWS - 1) / ROWS);

    switch (norm_min->channels / norm_min->groups / 4) {
    case 1:
        norm_min_kernel<1><<<blocks, THREADS, 0, stream>>>(*norm_min);
        break;
    case 2:
        norm_min_kernel<2><<<blocks, THREADS, 0, stream>>>(*norm_min);
        break;
    case 4:
        norm_min_kernel<4><<<blocks, THREADS, 0, stream>>>(*norm_min);
        break;
    case 8:
        norm_min_kernel<8><<<blocks, THREADS, 0, stream>>>(*norm_min);
        break;
    case 16:
        norm_min_kernel<16><<<blocks, THREADS, 0, stream>>>(*norm_min);
        break;
    default:
        norm_min_kernel<32><<<blocks, THREADS, 0, stream>>>(*norm_min);
        break;
    }
    return CUDA_LAUNCHED(report);
}

/* A warp per result, or a thread where neighbours lie side by side. */
static __global__ void __launch_bounds__(THREADS) amin_warp_kernel(const struct amin amin)
{
    int64_t result = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    float v = __int_as_float(0x7f800000);

    if (result >= amin.rows * amin.outer * amin.inner)
        return;
    const float *from = amin.from + result / amin.inner * amin.n * amin.inner + result % amin.inner;
    for (int64_t i = threadIdx.x % WARP; i < amin.n; i += WARP)
        v = min_nan(v, from[i * amin.inner]);
    v = warp_min(v);
    if (threadIdx.x % WARP == 0)
        amin.to[result] = v;
}

static __global__ void __launch_bounds__(THREADS) amin_thread_kernel(const struct amin amin)
{
    int64_t result = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float v = __int_as_float(0x7f800000);

    if (result >= amin.rows * amin.outer * amin.inner)
        return;
    const float *from = amin.from + result / amin.inner * amin.n * amin.inner + result % amin.inner;
    for (int64_t i = 0; i < amin.n; i++)
        v = min_nan(v, from[i * amin.inner]);
    amin.to[result] = v;
}

extern "C" int amin_cuda(cudaStream_t stream, const struct amin *amin, struct report *report)
{
    int64_t results = amin->rows * amin->outer * amin->inner;

    if (amin->inner < WARP)
        amin_warp_kernel<<<(unsigned)((results + WARPS - 1) / WARPS), THREADS, 0, stream>>>(*amin);
    else
        amin_thread_kernel<<<(unsigned)((results + THREADS - 1) / THREADS), THREADS, 0, stream>>>(
            *amin);
    return CUDA_LAUNCHED(report);
}
