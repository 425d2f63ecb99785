/*
 * tail.cuh - the end of a row, four neighbours at a time: what tail.cu, constant.cu and window.cu
 * share
 *
 * Rows are a multiple of four elements where a mask draws, so four neighbours at a multiple of four
 * come from one call of Philox.
 */
#pragma once

#include "kernels/cuda/dropout.cuh"

#define WIDTH 4

/* Which of n segments a tile belongs to. */
static __device__ int find_segment(const int32_t *tiles, int n, int32_t tile)
{
    int low = 0, high = n - 1;

    while (low < high) {
        int middle = (low + high + 1) / 2;

        if (tiles[middle] <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Where a mask's four words come from: rows of whole fours lie in tensors of whole fours. */
struct stream {
    uint64_t turn;
    uint32_t thread, threads;
};

static __device__ __forceinline__ struct stream
stream_at(const struct tail &tail, const struct segment &seg, int64_t row, uint32_t e)
{
    int64_t group = ((seg.job_row + row) * tail.elements + e) / 4;
    int64_t threads = dropout_threads(seg.job_rows * tail.elements);
    int64_t turn = quotient(group, threads);

    return {(uint64_t)turn, (uint32_t)(group - turn * threads), (uint32_t)threads};
}

/* Four numbers under a mask's words. */
static __device__ __forceinline__ void mask_four(const struct point &point, uint64_t seed,
                                                 uint64_t turn, uint32_t thread, float v[WIDTH])
{
    const uint4 words = dropout_words(seed, turn, thread);

#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        v[k] = dropout_masked(v[k], dropout_word(words, k) < point.keep_below, point.scale);
}

static __device__ __forceinline__ void limit(float low, float high, float v[WIDTH])
{
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        v[k] = min_nan(max_nan(v[k], low), high);
}

/* Elements first to end - 1 of the four at e; all of them in one access where that is allowed. */
template <typename T>
static __device__ __forceinline__ void store_row(void *row, bool aligned, uint32_t e, int first,
                                                 int end, const float v[WIDTH])
{
    __align__(16) T four[WIDTH];
    T *to = (T *)row + e;

#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        round_to(v[k], &four[k]);
    if (aligned && first == 0 && end == WIDTH) {
        if (sizeof(T) == 4)
            __stcs((uint4 *)to, *(const uint4 *)four);
        else
            __stcs((uint2 *)to, *(const uint2 *)four);
        return;
    }
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        if (k >= first && k < end)
            to[k] = four[k];
}
