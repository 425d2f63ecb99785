/*
 * narrow_product.cu - linear, group_norm and amin for few rows: bound by reading the weights
 *
 * A block has 64 channels and all of K; a producer warp keeps a deep ring of units full, one
 * warpgroup (two for 128 rows, 64 each) multiplies. With 128 rows, reading them anew in every block
 * would ask more of the L2 than the weights ask of memory, so blocks form clusters of two and each
 * loads half of the rows for both. Clusters of four, and clusters for 64 rows, are slower: the
 * blocks then wait for each other more than they save.
 */
#include "kernels/cuda/product.cuh"

#define WARPGROUP 128
#define WARPS     4 /* of a warpgroup */

template <int T> struct narrow {
    static constexpr int warpgroups = T > 64 ? 2 : 1; /* each has its share of the rows */
    static constexpr int rows = T / warpgroups;
    static constexpr int threads = warpgroups * WARPGROUP + WARP;
    static constexpr int cluster = T > 64 ? 2 : 1;
    static constexpr int right_size = T * PLANE * 4;
    static constexpr int right = SLAB_SIZE;
    static constexpr int scales = right + right_size;
    static constexpr int scales_size = (T < 16 ? 16 : T) * 4;
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
    uint32_t stage = 0, parity = 1;

    for (int u = 0; u < ahead; u++) { /* weights do not wait for the kernel that prepares rows */
        barrier_expect(full + 8 * u, SLAB_SIZE + narrow::right_size + scales);
        bulk_copy(shared + u * narrow::stage, weights + (int64_t)u * run.slabs * SLAB_SIZE,
                  SLAB_SIZE, full + 8 * u);
    }
    previous_wait();
    for (int u = 0; u < run.units; u++) {
        uint32_t at = shared + stage * narrow::stage;
        const uint8_t *rows = run.rows + (tile + u) * narrow::right_size + rank * part;

        if (u >= ahead) {
            barrier_wait(empty + 8 * stage, parity);
            barrier_expect(full + 8 * stage, SLAB_SIZE + narrow::right_size + scales);
            bulk_copy(at, weights + (int64_t)u * run.slabs * SLAB_SIZE, SLAB_SIZE,
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

template <int T> static __device__ __forceinline__ void narrow_sync(int w)
{
    if (narrow<T>::warpgroups == 1 || w == 0)
        group_sync<1>(WARPGROUP);
    else
        group_sync<2>(WARPGROUP);
}

template <int KIND, int T>
static __device__ __forceinline__ void narrow_sums(const struct product_run &run,
                                                   const uint8_t *memory, int w,
                                                   float (&sum)[narrow<T>::rows / 2])
{
    typedef struct narrow<T> narrow;
    constexpr int N = narrow::rows;
    const uint32_t shared = shared_address(memory);
    const uint32_t full = shared + narrow::barriers, empty = full + 8 * narrow::stages;
    uint32_t stage = 0, parity = 0;

    for (int u = 0; u < run.units; u++) {
        const uint32_t at = shared + stage * narrow::stage;
        const uint64_t left = operand(at, SLAB * 16);
        const uint64_t right = operand(at + narrow::right + w * N * 16, T * 16);

        barrier_wait(full + 8 * stage, parity);
        if constexpr (KIND == PRODUCT_EXACT) {
            float d[N / 2];

            unit_products<KIND, N, T>(d, left, right, true);
            product_wait<0>();
            product_result(d);
            promote<N>(d, (const float *)(memory + stage * narrow::stage + narrow::scales) + w * N,
                       sum);
        } else {
            unit_products<KIND, N, T>(sum, left, right, false);
            product_wait<0>();
            product_result(sum);
        }
        release<narrow::cluster>(empty + 8 * stage);
        if (++stage == narrow::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

template <int KIND, int T>
static __device__ __forceinline__ void narrow_consume(const struct product_run &run,
                                                      uint8_t *memory)
{
    typedef struct narrow<T> narrow;
    constexpr int N = narrow::rows;
    const int t = threadIdx.x % WARPGROUP;
    const int w = narrow::warpgroups == 1 ? 0 : threadIdx.x / WARPGROUP;
    const int first = blockIdx.x % run.slabs * SLAB + t / WARP * GROUP + t % WARP / 4;
    const int64_t row = (int64_t)(blockIdx.x / run.slabs) * T + w * N;
    uint32_t *keys = (uint32_t *)(memory + narrow::keys) + w * N;
    float sum[N / 2] = {};

    if (t < N)
        keys[t] = ~0u;
    narrow_sync<T>(w);
    narrow_sums<KIND, T>(run, memory, w, sum);
    unscale_sums<KIND, N>(run.scales + (T < 16 ? 2 * row : row), sum);
    norm_min<KIND, N>(sum, channels_of(run, first), run.eps, keys);
    narrow_sync<T>(w);
    if (t < N && row + t < run.n)
        atomicMin(run.keys + row + t, keys[t]);
    finish<narrow::warpgroups * WARPGROUP>(run, (uint32_t *)(memory + narrow::last));
}

template <int KIND, int T>
static __global__ void __launch_bounds__(narrow<T>::threads, 1)
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
                         narrow::cluster * narrow::warpgroups * WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (narrow::cluster > 1)
        cluster_sync();
    if (threadIdx.x < narrow::warpgroups * WARPGROUP)
        narrow_consume<KIND, T>(run, memory);
    else if (threadIdx.x % WARP == 0)
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
    int tile, threads, cluster, size;
};

#define TILES 5

template <int KIND, int T> static struct narrow_choice choice(void)
{
    return {(const void *)(void (*)(struct product_run, CUtensorMap))narrow_kernel<KIND, T>, T,
            narrow<T>::threads, narrow<T>::cluster, narrow<T>::size};
}

template <int KIND> static struct narrow_choice choice_of(int i)
{
    switch (i) {
    case 0:
        return choice<KIND, 8>();
    case 1:
        return choice<KIND, 16>();
    case 2:
        return choice<KIND, 32>();
    case 3:
        return choice<KIND, 64>();
    default:
        return choice<KIND, 128>();
    }
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

extern "C" int narrow_product_cuda(cudaStream_t stream, enum product_kind kind, int tile,
                                   const struct product_run *run, const CUtensorMap *scales,
                                   struct report *report)
{
    int64_t tiles = (run->n + tile - 1) / tile;
    int i = 0;

    while (8 << i < tile)
        i++;

    struct narrow_choice c = narrow_of(kind, i);

    return launch_early(c.kernel, (unsigned)(run->slabs * tiles), (unsigned)c.cluster,
                        (unsigned)c.threads, c.size, stream, run, scales, report);
}
