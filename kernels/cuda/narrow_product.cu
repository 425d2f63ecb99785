/*
 * narrow_product.cu - linear, group_norm and amin for few rows: bound by reading the weights
 *
 * A block has 64 channels and all of K; a producer warp keeps a deep ring of units full, one
 * warpgroup multiplies. Above 64 rows, reading them anew in every block would ask more of the L2
 * than the weights ask of memory, so blocks form clusters of two and each loads half of the rows
 * for both. For 64 rows that is slower, and of clusters of four the device holds too few. Weights
 * that no other block reads are not worth a place in the L2.
 *
 * Above 64 rows a block's time is that of shared memory, 128 bytes a clock, and of what the
 * multiprocessor takes in; one warpgroup is more than two, which would read every weight twice. So
 * what lies between two units' products must be short: everything but the addition itself is done
 * while products run.
 */
#include "kernels/cuda/product.cuh"

#define WARPGROUP 128
#define WARPS     4 /* of a warpgroup */

template <int T> struct narrow {
    static constexpr int cluster = T > 64 ? 2 : 1;
    static constexpr int right_size = T * PLANE * 4;
    static constexpr int right = SLAB_SIZE;
    static constexpr int scales = right + right_size;
    static constexpr int scales_size = SCALES(T) * 4;
    static constexpr int stage = (scales + scales_size + 127) / 128 * 128;
    static constexpr int fit = (220 << 10) / stage;
    static constexpr int stages = fit > 12 ? 12 : fit;
    static constexpr int barriers = stages * stage;
    static constexpr int keys = barriers + 2 * stages * 8;
    static constexpr int last = keys + T * 4;
    static constexpr int size = last + 16;
};

template <int KIND, int T>
static __device__ void narrow_load(const struct product_run &run, const CUtensorMap *map,
                                   uint32_t shared)
{
    typedef struct narrow<T> narrow;
    constexpr uint32_t scales = KIND == PRODUCT_EXACT ? narrow::scales_size : 0;
    constexpr uint32_t part = narrow::right_size / narrow::cluster;
    const uint32_t full = shared + narrow::barriers, empty = full + 8 * narrow::stages;
    const uint32_t rank = narrow::cluster > 1 ? cluster_rank() : 0;
    const uint8_t *weights = run.weights + (int64_t)(blockIdx.x % run.slabs) * SLAB_SIZE;
    const int64_t tile = (int64_t)(blockIdx.x / run.slabs) * run.units;
    const int ahead = min(run.units, narrow::stages);
    const uint64_t once = copy_policy(gridDim.x == (unsigned)run.slabs);
    uint32_t stage = 0, parity = 1;

    for (int u = 0; u < ahead; u++) { /* weights do not wait for the kernel that prepares rows */
        barrier_expect(full + 8 * u, SLAB_SIZE + narrow::right_size + scales);
        bulk_copy_as(once, shared + u * narrow::stage, weights + (int64_t)u * run.slabs * SLAB_SIZE,
                     SLAB_SIZE, full + 8 * u);
    }
    previous_wait();
    for (int u = 0; u < run.units; u++) {
        uint32_t at = shared + stage * narrow::stage;
        const uint8_t *rows = run.rows + (tile + u) * narrow::right_size + rank * part;

        if (u >= ahead) {
            barrier_wait(empty + 8 * stage, parity);
            barrier_expect(full + 8 * stage, SLAB_SIZE + narrow::right_size + scales);
            bulk_copy_as(once, at, weights + (int64_t)u * run.slabs * SLAB_SIZE, SLAB_SIZE,
                         full + 8 * stage);
        }
        if (narrow::cluster > 1)
            bulk_copy_to(at + narrow::right + rank * part, rows, part, full + 8 * stage,
                         (1 << narrow::cluster) - 1);
        else
            bulk_copy(at + narrow::right, rows, part, full + 8 * stage);
        if (scales)
            box_copy(at + narrow::scales, map, (uint32_t)((tile + u) * (narrow::scales_size / 4)),
                     full + 8 * stage);
        if (++stage == narrow::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

/* A unit's stage has been used. */
template <int T> static __device__ __forceinline__ void narrow_release(uint32_t shared, int stage)
{
    typedef struct narrow<T> narrow;

    release<narrow::cluster>(shared + narrow::barriers + 8 * (narrow::stages + stage));
}

template <int KIND, int T>
static __device__ __forceinline__ void narrow_start(uint32_t shared, int stage, float (&d)[T / 2])
{
    typedef struct narrow<T> narrow;
    const uint32_t at = shared + stage * narrow::stage;

    unit_products<KIND, T, T>(d, operand(at, SLAB * 16), operand(at + narrow::right, T * 16),
                              KIND == PRODUCT_EXACT);
}

template <int T>
static __device__ __forceinline__ void narrow_wait(uint32_t shared, int stage, uint32_t parity)
{
    barrier_wait(shared + narrow<T>::barriers + 8 * stage, parity);
}

template <int T> static __device__ __forceinline__ void next_stage(int &stage, uint32_t &parity)
{
    if (++stage == narrow<T>::stages) {
        stage = 0;
        parity ^= 1;
    }
}

template <int T>
static __device__ __forceinline__ void exact_units(const uint8_t *memory, int units,
                                                   float (&sum)[T / 2])
{
    const uint32_t shared = shared_address(memory);
    uint32_t parity = 0;
    int stage = 0, before = -1;

    narrow_wait<T>(shared, stage, parity);
    for (int u = 1;; u++) {
        const float *scales =
            (const float *)(memory + stage * narrow<T>::stage + narrow<T>::scales);
        float d[T / 2];

        narrow_start<PRODUCT_EXACT, T>(shared, stage, d);
        if (before >= 0)
            narrow_release<T>(shared, before);
        before = stage;
        next_stage<T>(stage, parity);
        if (u < units)
            narrow_wait<T>(shared, stage, parity);
        /* More rows leave no registers for their scales. */
        before += (int)add_products<T, (T <= 160)>(d, scales, sum);
        if (u == units)
            break;
    }
    narrow_release<T>(shared, before);
}

/* Sums that stay where they are. */
template <int KIND, int T>
static __device__ __forceinline__ void plain_units(const uint8_t *memory, int units,
                                                   float (&sum)[T / 2])
{
    const uint32_t shared = shared_address(memory);
    uint32_t parity = 0;
    int stage = 0, before = 0;

    narrow_wait<T>(shared, stage, parity);
    narrow_start<KIND, T>(shared, stage, sum);
    for (int u = 1; u < units; u++) {
        next_stage<T>(stage, parity);
        narrow_wait<T>(shared, stage, parity);
        narrow_start<KIND, T>(shared, stage, sum);
        product_wait<1>();
        narrow_release<T>(shared, before);
        before = stage;
    }
    product_wait<0>();
    product_result(sum);
    narrow_release<T>(shared, before);
}

template <int KIND, int T>
static __device__ __forceinline__ void narrow_consume(const struct product_run &run,
                                                      uint8_t *memory)
{
    typedef struct narrow<T> narrow;
    const int t = threadIdx.x;
    const int channel = blockIdx.x % run.slabs * SLAB + t / WARP * GROUP + t % WARP / 4;
    const int64_t tile = blockIdx.x / run.slabs, row = tile * T;
    uint32_t *keys = (uint32_t *)(memory + narrow::keys);
    constexpr bool early = T <= 128; /* more rows leave no registers */
    struct channels channels;
    float sum[T / 2] = {};

    if (early)
        channels = channels_of(run, channel);
    for (int i = t; i < T; i += WARPGROUP)
        keys[i] = ~0u;
    group_sync<1>(WARPGROUP);
    if constexpr (KIND == PRODUCT_EXACT)
        exact_units<T>(memory, run.units, sum);
    else
        plain_units<KIND, T>(memory, run.units, sum);
    unscale_sums<KIND, T>(run.scales + tile * SCALES(T), sum);
    if (!early)
        channels = channels_of(run, channel);
    norm_min<KIND, T>(sum, channels, run.eps, keys);
    group_sync<1>(WARPGROUP);
    for (int i = t; i < T; i += WARPGROUP)
        if (row + i < run.n)
            atomicMin(run.keys + row + i, keys[i]);
    finish<WARPGROUP>(run, (uint32_t *)(memory + narrow::last));
}

template <int KIND, int T>
static __global__ void __launch_bounds__(WARPGROUP + WARP, 1)
    narrow_kernel(const __grid_constant__ struct product_run run,
                  const __grid_constant__ CUtensorMap scales)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef struct narrow<T> narrow;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);

    if (threadIdx.x == 0) {
        for (int i = 0; i < narrow::stages; i++) {
            barrier_init(shared + narrow::barriers + 8 * i, 1);
            barrier_init(shared + narrow::barriers + 8 * (narrow::stages + i),
                         narrow::cluster * WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    next_launch();
    if (narrow::cluster > 1)
        cluster_sync();
    if (threadIdx.x < WARPGROUP)
        narrow_consume<KIND, T>(run, memory);
    else if (threadIdx.x == WARPGROUP)
        narrow_load<KIND, T>(run, &scales, shared);
    if (narrow::cluster > 1)
        cluster_sync(); /* the other blocks may still arrive here, or copy to here */
#else
    __trap();
#endif
}

/* Launching */

struct narrow_choice {
    const void *kernel;
    int tile, cluster, size;
};

template <int KIND, int T> static constexpr struct narrow_choice choice(void)
{
    return {(const void *)(void (*)(struct product_run, CUtensorMap))narrow_kernel<KIND, T>, T,
            narrow<T>::cluster, narrow<T>::size};
}

#define TILES 12

template <int KIND> static struct narrow_choice choice_of(int i)
{
    static const struct narrow_choice choices[TILES] = {
        choice<KIND, 8>(),   choice<KIND, 16>(),  choice<KIND, 32>(),  choice<KIND, 64>(),
        choice<KIND, 80>(),  choice<KIND, 96>(),  choice<KIND, 112>(), choice<KIND, 128>(),
        choice<KIND, 144>(), choice<KIND, 160>(), choice<KIND, 176>(), choice<KIND, 192>()};

    return choices[i];
}

static struct narrow_choice narrow_of(enum product_kind kind, int i)
{
    switch (kind) {
    case PRODUCT_EXACT:
        return choice_of<PRODUCT_EXACT>(i);
    case PRODUCT_SINGLE:
        return choice_of<PRODUCT_SINGLE>(i);
    case PRODUCT_FLOAT16:
        return choice_of<PRODUCT_FLOAT16>(i);
    default:
        return choice_of<PRODUCT_BFLOAT16>(i);
    }
}

extern "C" int narrow_product_tile(int i)
{
    return i < TILES ? narrow_of(PRODUCT_EXACT, i).tile : 0;
}

extern "C" int narrow_product_ready(enum product_kind kind, struct report *report)
{
    int r = 0;

    for (int i = 0; i < TILES && r == 0; i++) {
        struct narrow_choice c = narrow_of(kind, i);

        r = CUDA(report, cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              c.size));
    }
    return r;
}

extern "C" int narrow_product_cuda(cudaStream_t stream, enum product_kind kind,
                                   const struct product_run *run, const CUtensorMap *scales,
                                   struct report *report)
{
    int64_t tiles = (run->n + run->tile - 1) / run->tile;
    int i = 0;

    while (narrow_product_tile(i) != run->tile)
        i++;

    struct narrow_choice c = narrow_of(kind, i);

    void *arguments[] = {(void *)run, (void *)scales};

    return launch_early(c.kernel, dim3((unsigned)(run->slabs * tiles)), (unsigned)c.cluster,
                        WARPGROUP + WARP, c.size, stream, arguments, report);
}
