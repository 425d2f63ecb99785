/*
 * wide_product.cu - linear, group_norm and amin for many rows: bound by the tensor cores
 *
 * A producer warp and two warpgroups. Clusters of two blocks have the same rows, so each loads half
 * of them for both. Either a block has 128 channels: each warpgroup has 64 of them and takes the
 * two halves of the tile's rows in turn, because up to 128 sums and 64 of the unit under way are
 * what registers hold. While one warpgroup adds a unit up, the other's products run. Or, where that
 * would leave half of the device idle, 64 channels: each warpgroup has half of the rows. A half has
 * H rows: a batch is cut into tiles of one height, chosen so that little is computed for nothing.
 *
 * The ring of rows counts halves of a tile, the ring of weights whole units, so that shared memory
 * holds a unit and a half beyond the one in use: with less, the copies' latency shows.
 */
#include "kernels/cuda/product.cuh"

#define WARPGROUP 128
#define WARPS     4 /* of a warpgroup */

enum { LEFTS = 3, RIGHTS = 4 }; /* units in shared memory */

template <bool FEW, int H> struct wide {
    static constexpr int halves = FEW ? 1 : 2;
    static constexpr int slabs = FEW ? 1 : 2; /* of a block */
    static constexpr int left = slabs * SLAB_SIZE;
    static constexpr bool ahead = FEW || H <= 120;                  /* registers hold scales */
    static constexpr int right = H * PLANE * 4;                     /* bytes of a half's unit */
    static constexpr int scale = (SCALES(H) * 4 + 127) / 128 * 128; /* and of its scales */
    /* From the start of shared memory: */
    static constexpr int rights = LEFTS * left;
    static constexpr int scales = rights + RIGHTS * right;
    static constexpr int barriers = scales + RIGHTS * scale;
    static constexpr int keys = barriers + 2 * (LEFTS + RIGHTS) * 8;
    static constexpr int last = keys + (FEW ? 2 : 1) * H * 4;
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

/* Has few registers: addresses move on, nothing is computed anew. */
template <int KIND, bool FEW, int H>
static __device__ void wide_load(const struct product_run &run, const CUtensorMap *map,
                                 uint32_t shared)
{
    typedef struct wide<FEW, H> wide;
    constexpr uint32_t scales = KIND == PRODUCT_EXACT ? SCALES(H) * 4 : 0, part = wide::right / 2;
    const uint32_t apart =
        (uint32_t)run.units * wide::right; /* from a half's unit to the other's */
    const uint32_t stride = (uint32_t)run.slabs * SLAB_SIZE;
    uint32_t left = 0, left_parity = 1, right = 0, right_parity = 1;

    for (uint32_t tile = blockIdx.x / 2; tile < run.tiles_m * run.tiles_n; tile += gridDim.x / 2) {
        const uint32_t m = tile / run.tiles_n, n = tile % run.tiles_n;
        const uint8_t *weights = run.weights + (int64_t)(m * 2 + cluster_rank()) * wide::left;
        const uint8_t *rows = run.rows + (int64_t)n * 2 * apart + cluster_rank() * part;
        uint32_t scale = n * 2 * run.units * SCALES(H);

#pragma unroll 1
        for (int u = run.units; u > 0; u--) {
            const struct ring ring = ring_at(shared + wide::barriers);

            barrier_wait(ring.empty_left + 8 * left, left_parity);
            barrier_expect(ring.full_left + 8 * left, wide::left);
            bulk_copy(shared + left * wide::left, weights, wide::left, ring.full_left + 8 * left);
            weights += stride;
            if (++left == LEFTS) {
                left = 0;
                left_parity ^= 1;
            }
            previous_wait(); /* the rows are written by the kernel before */
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t full = ring.full_right + 8 * (right + h);

                barrier_wait(ring.empty_right + 8 * (right + h), right_parity);
                barrier_expect(full, wide::right + scales);
                bulk_copy_to(shared + wide::rights + (right + h) * wide::right +
                                 cluster_rank() * part,
                             rows + h * apart, part, full, 3);
                if (scales)
                    box_copy(shared + wide::scales + (right + h) * wide::scale, map,
                             scale + h * run.units * SCALES(H), full);
            }
            rows += wide::right;
            scale += SCALES(H);
            right ^= 2;
            right_parity ^= right == 0;
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
template <bool FEW, int H, int W>
static __device__ __forceinline__ void exact_sums(const struct product_run &run, uint32_t shared,
                                                  const uint8_t *memory, struct position &at,
                                                  float (&sum)[2][H / 2])
{
    typedef struct wide<FEW, H> wide;
    const struct ring ring = ring_at(shared + wide::barriers);
    const float *scales = (const float *)(memory + wide::scales);
    const uint64_t lefts = operand(shared + (FEW ? 0 : W * SLAB_SIZE), SLAB * 16);
    const uint64_t rights = operand(shared + wide::rights, H * 16);

    for (int u = 0; u < run.units; u++) {
        barrier_wait(ring.full_left + 8 * at.left, at.left_parity);
#pragma unroll
        for (int h = 0; h < wide::halves; h++) {
            const uint32_t right = at.right + (FEW ? W : h);
            float d[H / 2];

            barrier_wait(ring.full_right + 8 * right, at.right_parity);
            unit_products<PRODUCT_EXACT, H, H>(d, lefts + at.left * (wide::left >> 4),
                                               rights + right * (wide::right >> 4), true);

            const uint32_t none =
                add_products<H, wide::ahead>(d, scales + right * (wide::scale / 4), sum[h]);

            release<2>(ring.empty_right + 8 * right + none);
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
template <int KIND, bool FEW, int H, int W>
static __device__ __forceinline__ void plain_sums(const struct product_run &run, uint32_t shared,
                                                  struct position &at, float (&sum)[2][H / 2])
{
    typedef struct wide<FEW, H> wide;
    const struct ring ring = ring_at(shared + wide::barriers);
    const uint64_t lefts = operand(shared + (FEW ? 0 : W * SLAB_SIZE), SLAB * 16);
    const uint64_t rights = operand(shared + wide::rights, H * 16);
    uint32_t left_before = LEFTS, right_before = RIGHTS;

    for (int u = 0; u < run.units; u++) {
        barrier_wait(ring.full_left + 8 * at.left, at.left_parity);
#pragma unroll
        for (int h = 0; h < wide::halves; h++) {
            const uint32_t right = at.right + (FEW ? W : h);

            barrier_wait(ring.full_right + 8 * right, at.right_parity);
            unit_products<KIND, H, H>(sum[h], lefts + at.left * (wide::left >> 4),
                                      rights + right * (wide::right >> 4), false);
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

template <int KIND, bool FEW, int H, int W>
static __device__ __forceinline__ void wide_sums(const struct product_run &run, uint32_t shared,
                                                 const uint8_t *memory, struct position &at,
                                                 float (&sum)[2][H / 2])
{
    if (KIND == PRODUCT_EXACT)
        exact_sums<FEW, H, W>(run, shared, memory, at, sum);
    else
        plain_sums<KIND, FEW, H, W>(run, shared, at, sum);
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
template <int KIND, bool FEW, int H>
static __device__ __forceinline__ void wide_minima(const struct product_run &run, uint8_t *memory,
                                                   int m, int n, float (&sum)[2][H / 2])
{
    typedef struct wide<FEW, H> wide;
    const int w = threadIdx.x / WARPGROUP - 1, t = threadIdx.x % WARPGROUP;
    const int slab = (m * 2 + cluster_rank()) * wide::slabs + (FEW ? 0 : w);
    const struct channels channels =
        channels_of(run, slab * SLAB + t / WARP * GROUP + t % WARP / 4);
    const bool mine = (FEW || w == 0) && t < H; /* takes a key to memory */
    uint32_t *keys = (uint32_t *)(memory + wide::keys) + (FEW ? w * H : 0);

#pragma unroll
    for (int h = 0; h < wide::halves; h++) {
        const int64_t half = (int64_t)n * 2 + (FEW ? w : h), row = half * H;

        unscale_sums<KIND, H>(run.scales + half * SCALES(H), sum[h]);
        if (mine)
            keys[t] = ~0u;
        wide_sync<FEW>(w);
        norm_min<KIND, H>(sum[h], channels, run.eps, keys);
        wide_sync<FEW>(w);
        if (mine && row + t < run.n)
            atomicMin(run.keys + row + t, keys[t]);
    }
}

template <int KIND, bool FEW, int H>
static __device__ __forceinline__ void wide_consume(const struct product_run &run, uint8_t *memory)
{
    const uint32_t shared = shared_address(memory);
    struct position at = {0, 0, 0, 0};

    for (int tile = blockIdx.x / 2; tile < run.tiles_m * run.tiles_n; tile += gridDim.x / 2) {
        float sum[2][H / 2] = {};

        if (threadIdx.x < 2 * WARPGROUP)
            wide_sums<KIND, FEW, H, 0>(run, shared, memory, at, sum);
        else
            wide_sums<KIND, FEW, H, 1>(run, shared, memory, at, sum);
        wide_minima<KIND, FEW, H>(run, memory, tile / run.tiles_n, tile % run.tiles_n, sum);
    }
    finish<2 * WARPGROUP>(run, (uint32_t *)(memory + wide<FEW, H>::last));
}

template <int KIND, bool FEW, int H>
static __global__ void __launch_bounds__(3 * WARPGROUP, 1)
    wide_kernel(const __grid_constant__ struct product_run run,
                const __grid_constant__ CUtensorMap scales)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef struct wide<FEW, H> wide;
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
    next_launch();
    cluster_sync();
    if (threadIdx.x < WARPGROUP) {
        fewer_registers();
        if (threadIdx.x == 0)
            wide_load<KIND, FEW, H>(run, &scales, shared);
    } else {
        more_registers();
        wide_consume<KIND, FEW, H>(run, memory);
    }
    cluster_sync(); /* the other block may still arrive here, or copy to here */
#else
    __trap();
#endif
}

/* Launching */

struct wide_choice {
    const void *kernel;
    int size;
};

template <int KIND, bool FEW, int H> static struct wide_choice wide_of(int half)
{
    constexpr int step = WIDE_STEP(KIND), least = HALF_MAX - (HALF_MAX - HALF_MIN) / step * step;

    if constexpr (H > least)
        if (half < H)
            return wide_of<KIND, FEW, H - step>(half);
    return {(const void *)(void (*)(struct product_run, CUtensorMap))wide_kernel<KIND, FEW, H>,
            wide<FEW, H>::size};
}

/* The kernel for halves of that many rows, a multiple of WIDE_STEP. */
static struct wide_choice wide_choice(enum product_kind kind, bool few, int half)
{
    switch (kind) {
    case PRODUCT_EXACT:
        return few ? wide_of<PRODUCT_EXACT, true, HALF_MAX>(half)
                   : wide_of<PRODUCT_EXACT, false, HALF_MAX>(half);
    case PRODUCT_SINGLE:
        return few ? wide_of<PRODUCT_SINGLE, true, HALF_MAX>(half)
                   : wide_of<PRODUCT_SINGLE, false, HALF_MAX>(half);
    case PRODUCT_FLOAT16:
        return few ? wide_of<PRODUCT_FLOAT16, true, HALF_MAX>(half)
                   : wide_of<PRODUCT_FLOAT16, false, HALF_MAX>(half);
    default:
        return few ? wide_of<PRODUCT_BFLOAT16, true, HALF_MAX>(half)
                   : wide_of<PRODUCT_BFLOAT16, false, HALF_MAX>(half);
    }
}

extern "C" bool product_runs_here(void)
{
    struct cudaFuncAttributes attributes;
    int device, major;

    if (cudaGetDevice(&device) ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) || major != 9 ||
        cudaFuncGetAttributes(&attributes, wide_choice(PRODUCT_EXACT, false, HALF_MAX).kernel)) {
        cudaGetLastError();
        return false;
    }
    return attributes.binaryVersion == 90;
}

extern "C" int wide_product_ready(enum product_kind kind, int *ret_clusters, struct report *report)
{
    const struct wide_choice largest = wide_choice(kind, false, HALF_MAX);
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};
    int r = 0;

    for (int half = HALF_MAX; half >= HALF_MIN && r == 0; half -= WIDE_STEP(kind))
        for (int few = 0; few < 2 && r == 0; few++) {
            struct wide_choice c = wide_choice(kind, few, half);

            r = CUDA(report, cudaFuncSetAttribute(
                                 c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, c.size));
        }
    if (r < 0)
        return r;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(2);
    config.blockDim = dim3(3 * WARPGROUP);
    config.dynamicSmemBytes = (size_t)largest.size;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return CUDA(report, cudaOccupancyMaxActiveClusters(ret_clusters, largest.kernel, &config));
}

extern "C" int wide_product_cuda(cudaStream_t stream, enum product_kind kind, bool few,
                                 int clusters, struct product_run *run, const CUtensorMap *scales,
                                 struct report *report)
{
    const struct wide_choice c = wide_choice(kind, few, run->tile);

    run->tiles_m = run->slabs / (few ? 2 : 4);
    run->tiles_n = (int)((run->n + 2 * run->tile - 1) / (2 * run->tile));
    if (clusters > run->tiles_m * run->tiles_n)
        clusters = run->tiles_m * run->tiles_n;
    void *arguments[] = {run, (void *)scales};

    return launch_early(c.kernel, dim3((unsigned)clusters * 2), 2, 3 * WARPGROUP, c.size, stream,
                        arguments, report);
}
