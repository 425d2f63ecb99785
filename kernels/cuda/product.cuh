/*
 * product.cuh - what wide_product.cu and narrow_product.cu share
 *
 * Weights are wgmma's left operand (64 channels a warpgroup), rows its right one. The tensor core
 * truncates its sums. PRODUCT_EXACT therefore moves them to float32 registers after every UNIT of
 * K and starts again from zero: this is what makes the result more exact than float32 units, and
 * since the scale of each row's unit is undone in the same step, rows need no maximum over all of
 * K. The other kinds have 11 bits or fewer anyway and add up where they are.
 *
 * Same bits in every batch: for every number of rows the order is k16 steps in a unit (high high,
 * high low, low high), units in K, one tree over the 16 channels of a group (which are one warp's
 * 16 rows: two registers by eight lanes). Only the width of the instruction differs between the
 * kernels, and a result does not depend on that (measured, and kept as a test).
 *
 * A unit is 128 bytes of K for each plane: exact operands have a high and a low plane of 64 of K,
 * the others two planes of 64 each, 128 of K. Minima meet in integer keys that order as the
 * numbers do, NaN first; their order of arrival does not matter.
 */
#pragma once

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/product.h"

/*
 * The products of one unit with T rows of a tile, added to d, or in its place when `fresh`.
 * Descriptors count in 16 bytes.
 */
template <int KIND, int T, int TILE>
static __device__ __forceinline__ void unit_products(float (&d)[T / 2], uint64_t left,
                                                     uint64_t right, bool fresh)
{
    constexpr bool bfloat = KIND == PRODUCT_BFLOAT16;
    constexpr int left_step = SLAB * 2, right_step = TILE * 2;   /* 16 of K */
    constexpr int left_plane = SLAB * 8, right_plane = TILE * 8; /* 64 of K */

    product_begin();
#pragma unroll
    for (int j = 0; j < PLANE / 16; j++) {
        uint64_t a = left + j * left_step, b = right + j * right_step;

        product<T, bfloat>(d, a, b, !fresh || j > 0);
        if (KIND == PRODUCT_EXACT) {
            product<T, bfloat>(d, a, b + right_plane, 1);
            product<T, bfloat>(d, a + left_plane, b, 1);
        }
    }
    if constexpr (KIND != PRODUCT_EXACT) {
#pragma unroll
        for (int j = 0; j < PLANE / 16; j++)
            product<T, bfloat>(d, left + left_plane + j * left_step,
                               right + right_plane + j * right_step, 1);
    }
    product_commit();
}

/*
 * Rows' scales as a thread reads them: the four rows of a pair of column blocks side by side.
 * scale_place() says where a row's scale lies in its tile.
 */
static __device__ __forceinline__ int scale_place(int row)
{
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

/*
 * A thread's scales of the 16 rows from 4 i on, or of the last 8. Volatile, so that loads stay in
 * order: see add_products().
 */
template <int T>
static __device__ __forceinline__ void load_scales(uint32_t scales, int i, float (&s)[T / 4])
{
    const uint32_t from = scales + 16 * i;

    if (i + 4 <= T / 4)
        asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(s[i]), "=f"(s[i + 1]), "=f"(s[i + 2]), "=f"(s[i + 3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(s[i]), "=f"(s[i + 1])
                     : "r"(from)
                     : "memory");
}

/*
 * Waits for the products of d and adds them, the rows' scales undone. With AHEAD, scales are
 * fetched before, if there are registers for them. Returns 0, but only once the last of them has
 * come, and a warp's loads come in order: a stage must not be given back while one is under way,
 * and nothing else would stop the compiler from moving that up. (It did, and one batch in ten had a
 * wrong row.)
 */
template <int T, bool AHEAD>
static __device__ __forceinline__ uint32_t add_products(float (&d)[T / 2], const float *scales,
                                                        float (&sum)[T / 2])
{
    constexpr int last = (T / 4 - 1) / 4 * 4;
    const uint32_t mine = shared_address(scales) + threadIdx.x % 4 * 16;
    float s[T / 4];

#pragma unroll
    for (int i = 0; i < T / 4 && AHEAD; i += 4)
        load_scales<T>(mine, i, s);
    product_wait<0>();
    product_result(d);
#pragma unroll
    for (int i = 0; i < T / 4; i += 4) {
        if (!AHEAD)
            load_scales<T>(mine, i, s);
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 8 && j < T / 2; j++)
            sum[j] = __fmaf_rn(d[j], s[j / 4 * 2 + j % 2], sum[j]);
    }
    return __float_as_uint(s[last]) >> 31; /* scales are positive */
}

/* The same at the end of K, where rows have one scale each. */
template <int KIND, int T>
static __device__ __forceinline__ void unscale_sums(const float *scales, float (&sum)[T / 2])
{
    if constexpr (KIND == PRODUCT_SINGLE)
#pragma unroll
        for (int i = 0; i < T / 2; i++)
            sum[i] *= scales[i / 8 * 16 + threadIdx.x % 4 * 4 + i / 4 % 2 * 2 + i % 2];
}

/* A warp has used a stage: its lanes tell every block of the cluster. */
template <int BLOCKS> static __device__ __forceinline__ void release(uint32_t barrier)
{
    __syncwarp();
    if (threadIdx.x % WARP < BLOCKS)
        barrier_arrive_at(barrier, threadIdx.x % WARP);
}

/* What a thread needs of its two channels. */
struct channels {
    float scale0, scale1, bias0, bias1, gamma0, gamma1, beta0, beta1;
};

static __device__ __forceinline__ struct channels channels_of(const struct product_run &run,
                                                              int channel)
{
    return {run.channel_scales[channel], run.channel_scales[channel + 8],
            run.bias[channel],           run.bias[channel + 8],
            run.gamma[channel],          run.gamma[channel + 8],
            run.beta[channel],           run.beta[channel + 8]};
}

struct add {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return a + b;
    }
};

struct least {
    static __device__ __forceinline__ uint32_t of(uint32_t a, uint32_t b)
    {
        return min(a, b);
    }
};

/*
 * Reduces C columns over the eight lanes that hold a group's channels: lane l has the result of
 * column l / 4 % C. One tree for every C: lanes 16 apart, 8, 4. Halving what is kept in each step
 * takes a third of the exchanges that C reductions would.
 */
template <typename OP, int C, typename V>
static __device__ __forceinline__ V reduce_columns(V (&v)[C])
{
    const int lane = threadIdx.x % WARP;

#pragma unroll
    for (int step = WARP / 2, kept = C; step >= 4; step /= 2) {
        if (step / 4 < kept) {
            const bool upper = lane & step;

            kept /= 2;
#pragma unroll
            for (int c = 0; c < kept; c++) {
                V mine = upper ? v[c + kept] : v[c], theirs = upper ? v[c] : v[c + kept];

                v[c] = OP::of(mine, __shfl_xor_sync(~0u, theirs, step));
            }
        } else {
#pragma unroll
            for (int c = 0; c < kept; c++)
                v[c] = OP::of(v[c], __shfl_xor_sync(~0u, v[c], step));
        }
    }
    return v[0];
}

/* What lane l / 4 == c has, for column c. */
static __device__ __forceinline__ float of_column(float v, int c)
{
    return __shfl_sync(~0u, v, threadIdx.x % 4 + 4 * c);
}

/*
 * Bias, norm and minimum over the warp's 16 channels, for C of a thread's columns from FIRST on,
 * into keys[column] in shared memory. Centred weights make the mean of a group zero; those of
 * 16-bit models are as they are.
 */
template <int KIND, int T, int FIRST, int C>
static __device__ __forceinline__ void
norm_min_of(const float (&sum)[T / 2], const struct channels &p, float eps, uint32_t *keys)
{
    const int lane = threadIdx.x % WARP;
    float a[C], b[C], square[C];
    uint32_t key[C];

#pragma unroll
    for (int c = 0; c < C; c++) {
        const int j = FIRST * 2 + c / 2 * 4 + c % 2;

        a[c] = __fmaf_rn(sum[j], p.scale0, p.bias0);
        b[c] = __fmaf_rn(sum[j + 2], p.scale1, p.bias1);
    }
    if constexpr (KIND >= PRODUCT_FLOAT16) {
        float mean[C];

#pragma unroll
        for (int c = 0; c < C; c++)
            mean[c] = a[c] + b[c];

        const float mine = reduce_columns<add>(mean) / GROUP;

#pragma unroll
        for (int c = 0; c < C; c++) {
            a[c] -= of_column(mine, c);
            b[c] -= of_column(mine, c);
        }
    }
#pragma unroll
    for (int c = 0; c < C; c++)
        square[c] = a[c] * a[c] + b[c] * b[c];

    const float rstd = rsqrtf(reduce_columns<add>(square) / GROUP + eps);

#pragma unroll
    for (int c = 0; c < C; c++) {
        const float r = of_column(rstd, c);

        key[c] = min(key_of(__fmaf_rn(a[c], r * p.gamma0, p.beta0)),
                     key_of(__fmaf_rn(b[c], r * p.gamma1, p.beta1)));
    }

    const uint32_t lowest = reduce_columns<least>(key);
    const int column = FIRST + lane / 4 % C;

    if (lane / 4 < C)
        atomicMin(keys + column / 2 * 8 + lane % 4 * 2 + column % 2, lowest);
}

/* All columns: eight at a time, then what is left of them. */
template <int KIND, int T, int FIRST = 0>
static __device__ __forceinline__ void norm_min(const float (&sum)[T / 2], const struct channels &p,
                                                float eps, uint32_t *keys)
{
    constexpr int left = T / 4 - FIRST, C = left >= 8 ? 8 : left >= 4 ? 4 : 2;

    norm_min_of<KIND, T, FIRST, C>(sum, p, eps, keys);
    if constexpr (left > C)
        norm_min<KIND, T, FIRST + C>(sum, p, eps, keys);
}

/*
 * Of all blocks the last to come here turns keys into numbers, where that is wanted. Called by
 * THREADS threads.
 */
template <int THREADS>
static __device__ __forceinline__ void finish(const struct product_run &run, uint32_t *shared)
{
    const int t = threadIdx.x % THREADS;

    if (!run.to)
        return;
    __threadfence();
    group_sync<3>(THREADS);
    if (t == 0)
        *shared = atomicAdd(run.arrived, 1) + 1;
    group_sync<3>(THREADS);
    if (*shared != gridDim.x)
        return;
    __threadfence();
    for (int64_t i = t; i < run.n; i += THREADS)
        run.to[i] = of_key(__ldcg(run.keys + i));
    if (t == 0)
        *run.arrived = 0;
}
