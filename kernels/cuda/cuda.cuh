/*
 * cuda.cuh - device-side helpers shared by the kernels
 *
 * Minimum and maximum propagate NaN, as PyTorch's do and C's do not, and take -0 for less than +0.
 * Reductions over lanes run in one fixed tree, so that a result never depends on the batch. Values
 * of 16 bits are widened exactly and rounded once.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernels/cuda/launch.h"

#define WARP 32

static __device__ __forceinline__ float min_nan(float a, float b)
{
    float c;

    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

static __device__ __forceinline__ float max_nan(float a, float b)
{
    float c;

    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

static __device__ __forceinline__ float warp_min(float v)
{
    for (int lane = WARP / 2; lane > 0; lane /= 2)
        v = min_nan(v, __shfl_xor_sync(~0u, v, lane));
    return v;
}

static __device__ __forceinline__ double warp_sum(double v)
{
    for (int lane = WARP / 2; lane > 0; lane /= 2)
        v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

/* Over a block of WARPS warps, in their order; every thread gets it. */
template <int WARPS> static __device__ double block_sum(double v, double *shared)
{
    v = warp_sum(v);
    __syncthreads(); /* shared may still be read from the sum before */
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < WARPS; i++)
        v += shared[i];
    return v;
}

static __device__ __forceinline__ uint32_t warp_max(uint32_t v)
{
    for (int lane = WARP / 2; lane > 0; lane /= 2)
        v = max(v, __shfl_xor_sync(~0u, v, lane));
    return v;
}

/* 2^e for e within float32's normal range. */
static __device__ __forceinline__ float power(int e)
{
    return __int_as_float((e + 127) << 23);
}

/* v 2^-e. In two steps, because e may be twice what one float can hold; both go the same way. */
static __device__ __forceinline__ float unscale(float v, int e)
{
    int half = -e / 2;

    return v * power(half) * power(-e - half);
}

static __device__ __forceinline__ float widened(float v)
{
    return v;
}

static __device__ __forceinline__ float widened(__half v)
{
    return __half2float(v);
}

static __device__ __forceinline__ float widened(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

static __device__ __forceinline__ void round_to(float v, float *to)
{
    *to = v;
}

static __device__ __forceinline__ void round_to(float v, __half *to)
{
    *to = __float2half_rn(v);
}

static __device__ __forceinline__ void round_to(float v, __nv_bfloat16 *to)
{
    *to = __float2bfloat16_rn(v);
}

/*
 * Keys order as the numbers do, NaN first, so that a minimum is one of integers, whose order of
 * arrival does not matter.
 */
#define INFINITE 0x7f800000u
#define UNSIGNED 0x7fffffffu

static __device__ __forceinline__ uint32_t key_of(float v)
{
    uint32_t bits = __float_as_uint(v);

    if ((bits & UNSIGNED) > INFINITE)
        return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float of_key(uint32_t key)
{
    if (key == 0)
        return __uint_as_float(0x7fc00000);
    return __uint_as_float(key >> 31 ? key & UNSIGNED : ~key);
}

/* 64-bit division costs a hundred instructions; nearly always 32 bits hold both. */
static __device__ __forceinline__ int64_t quotient(int64_t a, int64_t b)
{
    if ((uint64_t)(a | b) >> 32)
        return a / b;
    return (int64_t)((uint32_t)a / (uint32_t)b);
}

/* Runs `what` with the C type of a dtype. */
#define WITH_DTYPE(dtype, type, what)           \
    do {                                        \
        if ((dtype) == DTYPE_FLOAT16) {         \
            typedef __half type;                \
            what;                               \
        } else if ((dtype) == DTYPE_BFLOAT16) { \
            typedef __nv_bfloat16 type;         \
            what;                               \
        } else {                                \
            typedef float type;                 \
            what;                               \
        }                                       \
    } while (0)
