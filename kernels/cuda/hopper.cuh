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

#include "kernels/cuda/check.h"

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

/* Of 384 threads, 128 give registers to the other 256. Each warpgroup as a whole. */
static __device__ __forceinline__ void fewer_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}

static __device__ __forceinline__ void more_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
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

/* What the L2 does with what is copied: nobody will ask for it again, or as always. */
static __device__ __forceinline__ uint64_t copy_policy(bool once)
{
    uint64_t policy;

    if (once)
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ void bulk_copy_as(uint64_t policy, uint32_t to, const void *from,
                                                    uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
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

/*
 * The kernel before this one in the stream: wait for its end and for what it wrote; let the one
 * after start, when all blocks have come here. Nothing on devices that start kernels in turn.
 */
static __device__ __forceinline__ void previous_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void next_launch(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/*
 * Launches a kernel that may start before the one in front of it has ended, and so must call
 * previous_wait() before it touches what others write. Blocks in clusters of that many. The
 * cluster's size is given here and not in the kernel, because a build for devices that have no
 * clusters must compile.
 */
static inline int launch_early(const void *kernel, dim3 blocks, unsigned cluster, unsigned threads,
                               int shared, cudaStream_t stream, void **arguments,
                               struct report *report)
{
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return CUDA(report, cudaLaunchKernelExC(&config, kernel, arguments));
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

/* Operands of a product: N / 2 sums, as constraints and as names; each list is the last and four.
 */
#define SUMS_4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i)  SUMS_4(i), SUMS_4(i + 4)
#define SUMS_12(i) SUMS_8(i), SUMS_4(i + 8)
#define SUMS_16(i) SUMS_12(i), SUMS_4(i + 12)
#define SUMS_20(i) SUMS_16(i), SUMS_4(i + 16)
#define SUMS_24(i) SUMS_20(i), SUMS_4(i + 20)
#define SUMS_28(i) SUMS_24(i), SUMS_4(i + 24)
#define SUMS_32(i) SUMS_28(i), SUMS_4(i + 28)
#define SUMS_36(i) SUMS_32(i), SUMS_4(i + 32)
#define SUMS_40(i) SUMS_36(i), SUMS_4(i + 36)
#define SUMS_44(i) SUMS_40(i), SUMS_4(i + 40)
#define SUMS_48(i) SUMS_44(i), SUMS_4(i + 44)
#define SUMS_52(i) SUMS_48(i), SUMS_4(i + 48)
#define SUMS_56(i) SUMS_52(i), SUMS_4(i + 52)
#define SUMS_60(i) SUMS_56(i), SUMS_4(i + 56)
#define SUMS_64(i) SUMS_60(i), SUMS_4(i + 60)
#define SUMS_68(i) SUMS_64(i), SUMS_4(i + 64)
#define SUMS_72(i) SUMS_68(i), SUMS_4(i + 68)
#define SUMS_76(i) SUMS_72(i), SUMS_4(i + 72)
#define SUMS_80(i) SUMS_76(i), SUMS_4(i + 76)
#define SUMS_84(i) SUMS_80(i), SUMS_4(i + 80)
#define SUMS_88(i) SUMS_84(i), SUMS_4(i + 84)
#define SUMS_92(i) SUMS_88(i), SUMS_4(i + 88)
#define SUMS_96(i) SUMS_92(i), SUMS_4(i + 92)

#define NAMES_4  "%0, %1, %2, %3"
#define NAMES_8  NAMES_4 ", %4, %5, %6, %7"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_16 NAMES_12 ", %12, %13, %14, %15"
#define NAMES_20 NAMES_16 ", %16, %17, %18, %19"
#define NAMES_24 NAMES_20 ", %20, %21, %22, %23"
#define NAMES_28 NAMES_24 ", %24, %25, %26, %27"
#define NAMES_32 NAMES_28 ", %28, %29, %30, %31"
#define NAMES_36 NAMES_32 ", %32, %33, %34, %35"
#define NAMES_40 NAMES_36 ", %36, %37, %38, %39"
#define NAMES_44 NAMES_40 ", %40, %41, %42, %43"
#define NAMES_48 NAMES_44 ", %44, %45, %46, %47"
#define NAMES_52 NAMES_48 ", %48, %49, %50, %51"
#define NAMES_56 NAMES_52 ", %52, %53, %54, %55"
#define NAMES_60 NAMES_56 ", %56, %57, %58, %59"
#define NAMES_64 NAMES_60 ", %60, %61, %62, %63"
#define NAMES_68 NAMES_64 ", %64, %65, %66, %67"
#define NAMES_72 NAMES_68 ", %68, %69, %70, %71"
#define NAMES_76 NAMES_72 ", %72, %73, %74, %75"
#define NAMES_80 NAMES_76 ", %76, %77, %78, %79"
#define NAMES_84 NAMES_80 ", %80, %81, %82, %83"
#define NAMES_88 NAMES_84 ", %84, %85, %86, %87"
#define NAMES_92 NAMES_88 ", %88, %89, %90, %91"
#define NAMES_96 NAMES_92 ", %92, %93, %94, %95"

#define PRODUCT(n, type, count, a, b, add)                                       \
    asm volatile("{\n.reg .pred add;\n"                                          \
                 "setp.ne.b32 add, %" #add ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
                 " {" NAMES_##count "}, %" #a ", %" #b ", add, 1, 1, 0, 0;\n}"   \
                 : SUMS_##count(0)                                               \
                 : "l"(left), "l"(right), "r"(accumulate))

#define PRODUCT_OF(n, count, a, b, add)       \
    if constexpr (N == n && BFLOAT)           \
        PRODUCT(n, "bf16", count, a, b, add); \
    else if constexpr (N == n)                \
    PRODUCT(n, "f16", count, a, b, add)

/*
 * d += left (64 x 16) times right (N x 16, transposed), float32 sums; without `accumulate` d is
 * replaced. Thread t of the warpgroup has, in d[4 j + 2 r + c], row 16 (t / 32) + t % 32 / 4 + 8 r
 * and column 8 j + 2 (t % 4) + c.
 */
template <int N, bool BFLOAT>
static __device__ __forceinline__ void product(float (&d)[N / 2], uint64_t left, uint64_t right,
                                               int accumulate)
{
    static_assert(N == 8 || N == 16 || N == 32 || N == 48 || (N >= 64 && N <= 192 && N % 8 == 0),
                  "N");
    PRODUCT_OF(8, 4, 4, 5, 6);
    PRODUCT_OF(16, 8, 8, 9, 10);
    PRODUCT_OF(32, 16, 16, 17, 18);
    PRODUCT_OF(48, 24, 24, 25, 26);
    PRODUCT_OF(64, 32, 32, 33, 34);
    PRODUCT_OF(72, 36, 36, 37, 38);
    PRODUCT_OF(80, 40, 40, 41, 42);
    PRODUCT_OF(88, 44, 44, 45, 46);
    PRODUCT_OF(96, 48, 48, 49, 50);
    PRODUCT_OF(104, 52, 52, 53, 54);
    PRODUCT_OF(112, 56, 56, 57, 58);
    PRODUCT_OF(120, 60, 60, 61, 62);
    PRODUCT_OF(128, 64, 64, 65, 66);
    PRODUCT_OF(136, 68, 68, 69, 70);
    PRODUCT_OF(144, 72, 72, 73, 74);
    PRODUCT_OF(152, 76, 76, 77, 78);
    PRODUCT_OF(160, 80, 80, 81, 82);
    PRODUCT_OF(168, 84, 84, 85, 86);
    PRODUCT_OF(176, 88, 88, 89, 90);
    PRODUCT_OF(184, 92, 92, 93, 94);
    PRODUCT_OF(192, 96, 96, 97, 98);
}
