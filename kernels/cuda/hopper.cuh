/*
 * hopper.cuh - the instructions of sm_90a that have no intrinsic
 *
 * Barriers in shared memory, bulk copies into it (to one block or to all of a cluster), and the
 * warpgroup product m64nNk16, in the order in which a product uses them. PTX ISA 8.0 and later,
 * sections "mbarrier", "cp.async.bulk" and "wgmma". Addresses are shared-memory addresses of the
 * block unless said otherwise.
 *
 * Two facts that cost a third of the speed when missed: an arrive or a wait that names the cluster
 * scope (.release.cluster, .acquire.cluster) compiles to a fence of the whole device, and the
 * default semantics suffice here; a descriptor that the compiler cannot prove uniform goes through
 * R2UR between every two products.
 */
#pragma once

#include <cuda.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t rank;

    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::
                     : "memory");
}

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

/* Makes barrier_init() known to the copy engine and to the cluster. */
static __device__ __forceinline__ void barrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* The same barrier in block `rank` of the cluster. */
static __device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank)
{
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "AGAIN_%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN_%=;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Some warps of a block wait for each other. */
template <int WHICH> static __device__ __forceinline__ void group_sync(int threads)
{
    asm volatile("bar.sync %0, %1;" ::"n"(WHICH), "r"(threads) : "memory");
}

/* Copies from device memory; the barrier counts the bytes as they land. Multiples of 16. */
static __device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes,
                                                 uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Into every block of the cluster that `mask` names, at the same place, with its own barrier. */
static __device__ __forceinline__ void bulk_copy_to(uint32_t to, const void *from, uint32_t bytes,
                                                    uint32_t barrier, uint16_t mask)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
                 : "memory");
}

/*
 * A box of a one-dimensional tensor map. For what threads read themselves: the race checker knows
 * that such a copy's barrier orders it, and takes bulk_copy()'s for a race.
 */
static __device__ __forceinline__ void box_copy(uint32_t to, const CUtensorMap *map, uint32_t first,
                                                uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::"r"(to),
                 "l"(map), "r"(first), "r"(barrier)
                 : "memory");
}

/* The kernel before this one in the stream: wait for what it wrote; let the one after start. */
static __device__ __forceinline__ void previous_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

static __device__ __forceinline__ void next_launch(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/*
 * Operand in shared memory without swizzle: core matrices of 8 rows by 16 bytes, 128 bytes each;
 * `step` bytes from one to the next along K, 128 from one to the next along rows.
 */
static __device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t step)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(step >> 4) << 16 |
           (uint64_t)(128 >> 4) << 32;
}

static __device__ __forceinline__ void product_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void product_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most PENDING groups of products are under way. */
template <int PENDING> static __device__ __forceinline__ void product_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from touching sums before product_wait(). */
template <int N> static __device__ __forceinline__ void product_result(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

#define SUMS_4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i)  SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)

#define NAMES_4  "%0, %1, %2, %3"
#define NAMES_8  NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
             ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define PRODUCT(n, type, count, a, b, add)                                       \
    asm volatile("{\n.reg .pred add;\n"                                          \
                 "setp.ne.b32 add, %" #add ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
                 " {" NAMES_##count "}, %" #a ", %" #b ", add, 1, 1, 0, 0;\n}"   \
                 : SUMS_##count(0)                                               \
                 : "l"(left), "l"(right), "r"(accumulate))

/*
 * d += left (64 x 16) times right (N x 16, transposed), float32 sums; without `accumulate` d is
 * replaced. Thread t of the warpgroup has, in d[4 j + 2 r + c], row 16 (t / 32) + t % 32 / 4 + 8 r
 * and column 8 j + 2 (t % 4) + c.
 */
template <int N, bool BFLOAT>
static __device__ __forceinline__ void product(float (&d)[N / 2], uint64_t left, uint64_t right,
                                               int accumulate)
{
    if constexpr (N == 8 && BFLOAT)
        PRODUCT(8, "bf16", 4, 4, 5, 6);
    else if constexpr (N == 8)
        PRODUCT(8, "f16", 4, 4, 5, 6);
    else if constexpr (N == 16 && BFLOAT)
        PRODUCT(16, "bf16", 8, 8, 9, 10);
    else if constexpr (N == 16)
        PRODUCT(16, "f16", 8, 8, 9, 10);
    else if constexpr (N == 32 && BFLOAT)
        PRODUCT(32, "bf16", 16, 16, 17, 18);
    else if constexpr (N == 32)
        PRODUCT(32, "f16", 16, 16, 17, 18);
    else if constexpr (N == 64 && BFLOAT)
        PRODUCT(64, "bf16", 32, 32, 33, 34);
    else if constexpr (N == 64)
        PRODUCT(64, "f16", 32, 32, 33, 34);
    else if constexpr (BFLOAT)
        PRODUCT(128, "bf16", 64, 64, 65, 66);
    else
        PRODUCT(128, "f16", 64, 64, 65, 66);
}
