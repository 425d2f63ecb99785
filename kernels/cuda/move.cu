/*
 * move.cu - small things that a stream does between the steps
 *
 * pieces: the rows of many small requests, gathered by one kernel straight from pinned client pages
 * or device memory; one copy each would cost more in launches than in bytes. tables: what a graph's
 * kernels find out when they run, as much of it as there is. flag: the last kernel
 * of a batch, which tells the host through a word in pinned memory. widen: 16-bit input of a stage
 * that computes in float32.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/hopper.cuh"

#define THREADS 256
#define AT_ONCE 256 /* pieces: a graph has room for many more than most blocks have */

static __device__ __forceinline__ void copy_vector(const struct piece &piece, uint64_t at)
{
    if (at >= piece.size)
        return;
    if (((uintptr_t)piece.from | (uintptr_t)piece.to) % 16 == 0 && at + 16 <= piece.size) {
        *(uint4 *)((char *)piece.to + at) = *(const uint4 *)((const char *)piece.from + at);
        return;
    }
    for (uint64_t end = at + 16 < piece.size ? at + 16 : piece.size; at < end; at++)
        ((char *)piece.to)[at] = ((const char *)piece.from)[at];
}

static __device__ __forceinline__ void copy_pieces(const struct piece *pieces, int n)
{
    next_launch(); /* while rows come from the host, a product can begin to fetch its weights */
    for (int i = (int)blockIdx.y; i < n; i += AT_ONCE)
        copy_vector({pieces[i].from, pieces[i].to, pieces[i].size},
                    ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * 16);
}

static __global__ void __launch_bounds__(THREADS) pieces_kernel(const struct piece *pieces, int n)
{
    copy_pieces(pieces, n);
}

static __global__ void __launch_bounds__(THREADS)
    pieces_from_kernel(const struct piece_table *table)
{
    copy_pieces(table->pieces, table->n);
}

static dim3 blocks_of(int n, uint64_t size_max)
{
    const uint64_t each = THREADS * 16;

    return dim3((unsigned)((size_max + each - 1) / each), (unsigned)(n < AT_ONCE ? n : AT_ONCE));
}

extern "C" int pieces_cuda(cudaStream_t stream, const struct piece *pieces, int n,
                           uint64_t size_max, struct report *report)
{
    pieces_kernel<<<blocks_of(n, size_max), THREADS, 0, stream>>>(pieces, n);
    return CUDA_LAUNCHED(report);
}

extern "C" int pieces_from_cuda(cudaStream_t stream, const struct piece_table *table, int most,
                                uint64_t size_max, struct report *report)
{
    pieces_from_kernel<<<blocks_of(most, size_max), THREADS, 0, stream>>>(table);
    return CUDA_LAUNCHED(report);
}

/* The first block does not wait for the size. That is not volatile: all threads' reads of it, which
 * go over the bus, would be as many, and took 64 us. */
static __global__ void __launch_bounds__(THREADS)
    tables_kernel(const uint4 *from, const uint32_t *size, uint4 *to)
{
    uint32_t at = blockIdx.x * THREADS + threadIdx.x, end;
    uint4 v = make_uint4(0, 0, 0, 0);

    static_assert(TABLES_AHEAD == THREADS * sizeof(v), "a block's");
    if (blockIdx.x == 0)
        v = from[at];
    end = *size / sizeof(v);
    if (blockIdx.x == 0 && at < end)
        to[at] = v;
    if (blockIdx.x == 0)
        at += gridDim.x * THREADS;
#pragma unroll 4
    for (; at < end; at += gridDim.x * THREADS)
        to[at] = from[at];
}

extern "C" int tables_cuda(cudaStream_t stream, const void *from, const uint32_t *size, void *to,
                           struct report *report)
{
    tables_kernel<<<8, THREADS, 0, stream>>>((const uint4 *)from, size, (uint4 *)to);
    return CUDA_LAUNCHED(report);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) widen_kernel(const T *from, float *to, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < n)
        to[i] = widened(from[i]);
}

extern "C" int widen_cuda(cudaStream_t stream, enum dtype dtype, const void *from, float *to,
                          int64_t n, struct report *report)
{
    unsigned blocks = (unsigned)((n + THREADS - 1) / THREADS);

    WITH_DTYPE(dtype, T, (widen_kernel<T><<<blocks, THREADS, 0, stream>>>((const T *)from, to, n)));
    return CUDA_LAUNCHED(report);
}

/* It is there before the kernel in front has ended, where that one allows it. */
static __global__ void flag_kernel(uint32_t *flag, uint32_t value)
{
    previous_wait();
    __threadfence_system();
    *(volatile uint32_t *)flag = value;
}

extern "C" int flag_cuda(cudaStream_t stream, uint32_t *flag, uint32_t value, struct report *report)
{
    void *arguments[] = {&flag, &value};
    struct cudaFuncAttributes attributes;
    int r = CUDA(report, cudaFuncGetAttributes(&attributes, (const void *)flag_kernel));

    /* What the code was written for counts: for an older device previous_wait() is nothing. */
    if (r == 0 && attributes.ptxVersion >= 90)
        return launch_early((const void *)flag_kernel, dim3(1), 1, 1, 0, stream, arguments, report);
    if (r == 0) {
        flag_kernel<<<1, 1, 0, stream>>>(flag, value);
        r = CUDA_LAUNCHED(report);
    }
    return r;
}

static __global__ void flag_from_kernel(uint32_t *flag, const uint32_t *value)
{
    __threadfence_system();
    *(volatile uint32_t *)flag = *value;
}

extern "C" int flag_from_cuda(cudaStream_t stream, uint32_t *flag, const uint32_t *value,
                              struct report *report)
{
    flag_from_kernel<<<1, 1, 0, stream>>>(flag, value);
    return CUDA_LAUNCHED(report);
}
