/*
 * dropout.cuh - PyTorch's CUDA dropout mask on the device, bit for bit as kernels/dropout.h
 *
 * Philox itself is cuRAND's (curand_Philox4x32_10). What matters is which counter, thread and word
 * decide about an element: see kernels/dropout.c. Four neighbours of a tensor whose size is a
 * multiple of four come from one call; other sizes take one call per element. Keeping is an integer
 * compare: u = float(word) 2^-32 + 2^-33 never falls when the word grows, so the host finds the
 * first word that drops.
 */
#pragma once

#include <curand_globals.h>
#include <curand_philox4x32_x.h>

#include "kernels/cuda/cuda.cuh"
extern "C" {
#include "kernels/dropout.h"
}

#define DROPOUT_BLOCK 256

static __device__ __forceinline__ uint4 dropout_words(uint64_t seed, uint64_t counter,
                                                      uint64_t thread)
{
    return curand_Philox4x32_10(make_uint4((uint32_t)counter, (uint32_t)(counter >> 32),
                                           (uint32_t)thread, (uint32_t)(thread >> 32)),
                                make_uint2((uint32_t)seed, (uint32_t)(seed >> 32)));
}

static __device__ __forceinline__ uint32_t dropout_word(uint4 words, int i)
{
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

static __device__ __forceinline__ int64_t dropout_threads(int64_t n)
{
    int64_t resident = DROPOUT_SMS * (DROPOUT_THREADS_PER_SM / DROPOUT_BLOCK);
    int64_t wanted = (n + DROPOUT_BLOCK - 1) / DROPOUT_BLOCK;

    return DROPOUT_BLOCK * (wanted < resident ? wanted : resident);
}

/* The word that decides about element e of n. */
static __device__ __forceinline__ uint32_t dropout_one(uint64_t seed, uint64_t counter, int64_t n,
                                                       int64_t e)
{
    int64_t threads = dropout_threads(n);

    if (n % 2 == 0) {
        int vector = n % 4 == 0 ? 4 : 2;
        int64_t group = e / vector, turn = quotient(group, threads);

        return dropout_word(
            dropout_words(seed, counter + (uint64_t)turn, (uint64_t)(group - turn * threads)),
            (int)(e % vector));
    } else {
        int64_t turn = quotient(e, 4 * threads), rest = e - turn * 4 * threads;
        int64_t word = quotient(rest, threads);

        return dropout_word(
            dropout_words(seed, counter + (uint64_t)turn, (uint64_t)(rest - word * threads)),
            (int)word);
    }
}

/* The words of elements e to e + 3, where n and e are multiples of 4. */
static __device__ __forceinline__ uint4 dropout_four(uint64_t seed, uint64_t counter, int64_t n,
                                                     int64_t e)
{
    int64_t threads = dropout_threads(n), group = e / 4, turn = quotient(group, threads);

    return dropout_words(seed, counter + (uint64_t)turn, (uint64_t)(group - turn * threads));
}

/* (x times mask) times scale: a dropped NaN or infinity is NaN. */
static __device__ __forceinline__ float dropout_masked(float x, bool keep, float scale)
{
    return __fmul_rn(__fmul_rn(x, keep ? 1.0f : 0.0f), scale);
}
