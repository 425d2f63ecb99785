/*
 * constant.cu - the guard of a proven constant: the largest |x| of every row
 *
 * The bits of a float32 without its sign, taken as an integer, grow with the magnitude, and NaN
 * lies above infinity, above everything: one integer maximum answers both "below the bound?" and
 * "finite?". A maximum does not depend on the order, so blocks meet in an atomic. Values of 16 bits
 * are widened first. The fill itself is a tail (tail.cu).
 */
#include "kernels/cuda/cuda.cuh"

#define THREADS 256
#define SLAB    8192

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    tops_kernel(const T *x, int64_t elements, int64_t slabs, uint32_t *tops)
{
    constexpr int WIDTH = 16 / sizeof(T);
    int64_t row = blockIdx.x / slabs, first = blockIdx.x % slabs * SLAB;
    int n = (int)(elements - first < SLAB ? elements - first : SLAB);
    const T *from = x + row * elements + first;
    uint32_t top = 0;

    if ((uintptr_t)from % 16 == 0) {
#pragma unroll 4
        for (int e = threadIdx.x * WIDTH; e + WIDTH <= n; e += THREADS * WIDTH) {
            uint4 bits = *(const uint4 *)(from + e);
            const T *v = (const T *)&bits;

#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                top = max(top, __float_as_uint(widened(v[k])) & 0x7fffffffu);
        }
        from += n / WIDTH * WIDTH;
        n %= WIDTH;
    }
    for (int e = threadIdx.x; e < n; e += THREADS)
        top = max(top, __float_as_uint(widened(from[e])) & 0x7fffffffu);
    top = warp_max(top);
    if (threadIdx.x % WARP == 0)
        atomicMax(&tops[row], top);
}

extern "C" int tops_cuda(cudaStream_t stream, enum dtype dtype, const void *x, int64_t rows,
                         int64_t elements, uint32_t *tops, struct report *report)
{
    int64_t slabs = (elements + SLAB - 1) / SLAB;
    int r = CUDA(report, cudaMemsetAsync(tops, 0, (size_t)rows * sizeof(*tops), stream));

    if (r < 0)
        return r;
    WITH_DTYPE(dtype, T,
               (tops_kernel<T><<<(unsigned)(rows * slabs), THREADS, 0, stream>>>(
                   (const T *)x, elements, slabs, tops)));
    return CUDA_LAUNCHED(report);
}
