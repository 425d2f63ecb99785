/*
 * wide_product.cu - linear, group_norm and amin for many rows: bound by the tensor cores
 *
 * A producer warp and two warpgroups. Clusters of two blocks have the same rows, so each loads half
 * of them for both. Either a block has 128 channels x 256 rows: each warpgroup has 64 channels and
 * takes the two halves of the rows in turn, because 128 sums and 64 of the unit under way are what
 * registers hold. While one warpgroup adds a unit up, the other's products run. Or, where that
 * would leave half of the device idle, 64 channels x 256 rows: each warpgroup has half of the rows.
 *
 * The ring of rows counts halves of a tile, the ring of weights whole units, so that shared memory
 * holds a unit and a half beyond the one in use: with less, the copies' latency shows.
 */
#include "kernels/cuda/product.cuh"

#define WARPGROUP 128
#define WARPS     4                  /* of a warpgroup */
#define HALF_SIZE (HALF * PLANE * 4) /* bytes of a half's unit */

enum { LEFTS = 3, RIGHTS = 4 }; /* units in shared memory */

template <bool FEW> struct wide {
    static constexpr int halves = FEW ? 1 : 2;
    static constexpr int slabs = FEW ? 1 : 2; /* of a block */
    static constexpr int left = slabs * SLAB_SIZE;
    /* From the start of shared memory: */
    static constexpr int rights = LEFTS * left;
    static constexpr int scales = rights + RIGHTS * HALF_SIZE;
    static constexpr int barriers = scales + RIGHTS * HALF * 4;
    static constexpr int keys = barriers + 2 * (LEFTS + RIGHTS) * 8;
    static constexpr int last = keys + (FEW ? 2 : 1) * HALF * 4;
    static constexpr int size = last + 16;
};

/* Barriers of the rings: full, empty. */
struct ring {
    uint32_t full_left, empty_left, full_right, empty_right;
};

__attribute__((unused)) static __device__ __forceinline__ struct ring ring_at(uint32_t at)
{
    return {at, at + LEFTS * 8, at + 2 * LEFTS * 8, at + (2 * LEFTS + RIGHTS) * 8};
}

template <int KIND, bool FEW>
static __device__ void wide_load(const struct product_run &run, const CUtensorMap *scales,
                                 uint32_t shared)
{
    typedef struct wide<FEW> wide;
    const struct ring ring = ring_at(shared + wide::barriers);
    const uint32_t rank = cluster_rank();
    uint32_t left = 0, left_parity = 1, right = 0, right_parity = 1;
    bool waited = false;

    for (int tile = blockIdx.x / 2; tile < run.tiles_m * run.tiles_n; tile += gridDim.x / 2) {
        int m = tile / run.tiles_n, n = tile % run.tiles_n;
        const uint8_t *weights = run.weights + (int64_t)(m * 2 + rank) * wide::slabs * SLAB_SIZE;
        int64_t half = (int64_t)n * 2 * run.units;

        for (int u = 0; u < run.units; u++) {
            barrier_wait(ring.empty_left + 8 * left, left_parity);
            barrier_expect(ring.full_left + 8 * left, wide::left);
            bulk_copy(shared + left * wide::left, weights + (int64_t)u * run.slabs * SLAB_SIZE,
                      wide::left, ring.full_left + 8 * left);
            if (++left == LEFTS) {
                left = 0;
                left_parity ^= 1;
            }
            if (!waited) { /* the rows are written by the kernel before */
                previous_wait();
                waited = true;
            }
            for (int h = 0; h < 2; h++) {
                uint32_t full = ring.full_right + 8 * right;
                int64_t at = half + (int64_t)h * run.units + u;

                barrier_wait(ring.empty_right + 8 * right, right_parity);
                barrier_expect(full, HALF_SIZE + (KIND == PRODUCT_EXACT ? HALF * 4 : 0));
                bulk_copy_to(shared + wide::rights + right * HALF_SIZE + rank * (HALF_SIZE / 2),
                             run.rows + at * HALF_SIZE + rank * (HALF_SIZE / 2), HALF_SIZE / 2,
                             full, 3);
                if (KIND == PRODUCT_EXACT)
                    box_copy(shared + wide::scales + right * HALF * 4, scales,
                             (uint32_t)(at * HALF), full);
                if (++right == RIGHTS) {
                    right = 0;
                    right_parity ^= 1;
                }
            }
        }
    }
}

/* Where a warpgroup stands in the rings; a unit takes one on the left and two on the right. */
struct position {
    uint32_t left, left_parity, right, right_parity;
};

__attribute__((unused)) static __device__ __forceinline__ void next_unit(struct position &at)
{
    if (++at.left == LEFTS) {
        at.left = 0;
        at.left_parity ^= 1;
    }
    at.right ^= 2;
    at.right_parity ^= at.right == 0;
}

/* W is known when compiling, so that descriptors are uniform. */
template <bool FEW, int W>
static __device__ __forceinline__ void exact_sums(const struct product_run &run, uint32_t shared,
                                                  const uint8_t *memory, struct position &at,
                                                  float (&sum)[2][HALF / 2])
{
    typedef struct wide<FEW> wide;
    const struct ring ring = ring_at(shared + wide::barriers);
    const float *scales = (const float *)(memory + wide::scales);
    const uint64_t lefts = operand(shared + (FEW ? 0 : W * SLAB_SIZE), SLAB * 16);
    const uint64_t rights = operand(shared + wide::rights, HALF * 16);

    for (int u = 0; u < run.units; u++) {
        barrier_wait(ring.full_left + 8 * at.left, at.left_parity);
#pragma unroll
        for (int h = 0; h < wide::halves; h++) {
            const uint32_t right = at.right + (FEW ? W : h);
            float d[HALF / 2];

            barrier_wait(ring.full_right + 8 * right, at.right_parity);
            unit_products<PRODUCT_EXACT, HALF, HALF>(d, lefts + at.left * (wide::left >> 4),
                                                     rights + right * (HALF_SIZE >> 4), true);
            product_wait<0>();
            product_result(d);
            promote<HALF>(d, scales + right * HALF, sum[h]);
            release<2>(ring.empty_right + 8 * right);
        }
        if (threadIdx.x % WARP == 0)
            barrier_arrive(ring.empty_left + 8 * at.left);
        next_unit(at);
    }
}

/*
 * Sums that stay where they are: the next half's products are under way when the ones before are
 * waited for and their stage is given back.
 */
template <int KIND, bool FEW, int W>
static __device__ __forceinline__ void plain_sums(const struct product_run &run, uint32_t shared,
                                                  struct position &at, float (&sum)[2][HALF / 2])
{
    typedef struct wide<FEW> wide;
    const struct ring ring = ring_at(shared + wide::barriers);
    const uint64_t lefts = operand(shared + (FEW ? 0 : W * SLAB_SIZE), SLAB * 16);
    const uint64_t rights = operand(shared + wide::rights, HALF * 16);
    uint32_t left_before = LEFTS, right_before = RIGHTS;

    for (int u = 0; u < run.units; u++) {
        barrier_wait(ring.full_left + 8 * at.left, at.left_parity);
#pragma unroll
        for (int h = 0; h < wide::halves; h++) {
            const uint32_t right = at.right + (FEW ? W : h);

            barrier_wait(ring.full_right + 8 * right, at.right_parity);
            unit_products<KIND, HALF, HALF>(sum[h], lefts + at.left * (wide::left >> 4),
                                            rights + right * (HALF_SIZE >> 4), false);
            product_wait<1>();
            if (right_before < RIGHTS)
                release<2>(ring.empty_right + 8 * right_before);
            if (h == 0 && left_before < LEFTS && threadIdx.x % WARP == 0)
                barrier_arrive(ring.empty_left + 8 * left_before);
            right_before = right;
        }
        left_before = at.left;
        next_unit(at);
    }
    product_wait<0>();
    product_result(sum[0]);
    if (!FEW)
        product_result(sum[1]);
    release<2>(ring.empty_right + 8 * right_before);
    if (threadIdx.x % WARP == 0)
        barrier_arrive(ring.empty_left + 8 * left_before);
}

template <int KIND, bool FEW, int W>
static __device__ __forceinline__ void wide_sums(const struct product_run &run, uint32_t shared,
                                                 const uint8_t *memory, struct position &at,
                                                 float (&sum)[2][HALF / 2])
{
    if (KIND == PRODUCT_EXACT)
        exact_sums<FEW, W>(run, shared, memory, at, sum);
    else
        plain_sums<KIND, FEW, W>(run, shared, at, sum);
}

/* Those who share keys. Barriers by constant number: a variable one would claim all sixteen. */
template <bool FEW> static __device__ __forceinline__ void wide_sync(int w)
{
    if (!FEW)
        group_sync<3>(2 * WARPGROUP);
    else if (w == 0)
        group_sync<1>(WARPGROUP);
    else
        group_sync<2>(WARPGROUP);
}

/* A warpgroup's sums of tile [m, n] to minima. Inlined late: nothing here is kept during the sums.
 */
template <int KIND, bool FEW>
static __device__ __forceinline__ void wide_minima(const struct product_run &run, uint8_t *memory,
                                                   int m, int n, float (&sum)[2][HALF / 2])
{
    typedef struct wide<FEW> wide;
    const int w = threadIdx.x / WARPGROUP - 1, t = threadIdx.x % WARPGROUP;
    const int slab = (m * 2 + cluster_rank()) * wide::slabs + (FEW ? 0 : w);
    const struct channels channels =
        channels_of(run, slab * SLAB + t / WARP * GROUP + t % WARP / 4);
    const bool mine = FEW || w == 0; /* this warpgroup takes the keys to memory */
    uint32_t *keys = (uint32_t *)(memory + wide::keys) + (FEW ? w * HALF : 0);

#pragma unroll
    for (int h = 0; h < wide::halves; h++) {
        const int64_t row = (int64_t)n * WIDE_ROWS + (FEW ? w : h) * HALF;

        unscale_sums<KIND, HALF>(run.scales + row, sum[h]);
        if (mine)
            keys[t] = ~0u;
        wide_sync<FEW>(w);
        norm_min<KIND, HALF>(sum[h], channels, run.eps, keys);
        wide_sync<FEW>(w);
        if (mine && row + t < run.n)
            atomicMin(run.keys + row + t, keys[t]);
    }
}

template <int KIND, bool FEW>
static __device__ __forceinline__ void wide_consume(const struct product_run &run, uint8_t *memory)
{
    const uint32_t shared = shared_address(memory);
    struct position at = {0, 0, 0, 0};

    for (int tile = blockIdx.x / 2; tile < run.tiles_m * run.tiles_n; tile += gridDim.x / 2) {
        float sum[2][HALF / 2] = {};

        if (threadIdx.x < 2 * WARPGROUP)
            wide_sums<KIND, FEW, 0>(run, shared, memory, at, sum);
        else
            wide_sums<KIND, FEW, 1>(run, shared, memory, at, sum);
        wide_minima<KIND, FEW>(run, memory, tile / run.tiles_n, tile % run.tiles_n, sum);
    }
    finish<2 * WARPGROUP>(run, (uint32_t *)(memory + wide<FEW>::last));
}

template <int KIND, bool FEW>
static __global__ void __launch_bounds__(3 * WARPGROUP, 1)
    wide_kernel(const __grid_constant__ struct product_run run,
                const __grid_constant__ CUtensorMap scales)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef struct wide<FEW> wide;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);

    if (threadIdx.x == 0) {
        const struct ring ring = ring_at(shared + wide::barriers);

        for (int i = 0; i < LEFTS; i++) {
            barrier_init(ring.full_left + 8 * i, 1);
            barrier_init(ring.empty_left + 8 * i, 2 * WARPS);
        }
        for (int i = 0; i < RIGHTS; i++) {
            barrier_init(ring.full_right + 8 * i, 1);
            barrier_init(ring.empty_right + 8 * i, (FEW ? 2 : 4) * WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            wide_load<KIND, FEW>(run, &scales, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wide_consume<KIND, FEW>(run, memory);
    }
    cluster_sync(); /* the other block may still arrive here, or copy to here */
#else
    __trap();
#endif
}

/* Launching */

typedef void (*wide_fn)(struct product_run, CUtensorMap);

static wide_fn wide_of(enum product_kind kind, bool few)
{
    static const wide_fn kernels[4][2] = {
        {wide_kernel<PRODUCT_EXACT, false>, wide_kernel<PRODUCT_EXACT, true>},
        {wide_kernel<PRODUCT_SINGLE, false>, wide_kernel<PRODUCT_SINGLE, true>},
        {wide_kernel<PRODUCT_FLOAT16, false>, wide_kernel<PRODUCT_FLOAT16, true>},
        {wide_kernel<PRODUCT_BFLOAT16, false>, wide_kernel<PRODUCT_BFLOAT16, true>}};

    return kernels[kind][few];
}

static int wide_size(bool few)
{
    return few ? wide<true>::size : wide<false>::size;
}

extern "C" bool product_runs_here(void)
{
    struct cudaFuncAttributes attributes;
    int device, major;

    if (cudaGetDevice(&device) ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) || major != 9 ||
        cudaFuncGetAttributes(&attributes, (const void *)wide_of(PRODUCT_EXACT, false))) {
        cudaGetLastError();
        return false;
    }
    return attributes.binaryVersion == 90;
}

extern "C" int wide_product_ready(enum product_kind kind, int *ret_clusters, struct report *report)
{
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    int r = 0;

    for (int few = 0; few < 2 && r == 0; few++)
        r = CUDA(report,
                 cudaFuncSetAttribute((const void *)wide_of(kind, few),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, wide_size(few)));
    if (r < 0)
        return r;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(2);
    config.blockDim = dim3(3 * WARPGROUP);
    config.dynamicSmemBytes = (size_t)wide_size(false);
    config.attrs = &cluster;
    config.numAttrs = 1;
    return CUDA(report, cudaOccupancyMaxActiveClusters(
                            ret_clusters, (const void *)wide_of(kind, false), &config));
}

extern "C" int wide_product_cuda(cudaStream_t stream, enum product_kind kind, bool few,
                                 int clusters, struct product_run *run, const CUtensorMap *scales,
                                 struct report *report)
{
    run->tiles_m = run->slabs / (few ? 2 : 4);
    run->tiles_n = (int)((run->n + WIDE_ROWS - 1) / WIDE_ROWS);
    if (clusters > run->tiles_m * run->tiles_n)
        clusters = run->tiles_m * run->tiles_n;
    return launch_early((const void *)wide_of(kind, few), (unsigned)clusters * 2, 2, 3 * WARPGROUP,
                        wide_size(few), stream, run, scales, report);
}
