/*
 * window.cu - convolution of three channels with a 3x3x3 window on tensor cores
 *
 * A sample is cut in tiles of 2 x 8 x 64 outputs. The inputs under a tile are scaled by a power of
 * two and split in fp16 halves as they come into shared memory; mma multiplies 16 output channels
 * (the left operand, in registers all along) with 8 neighbours. Three products of the halves give
 * float32's accuracy: what is lost is 2^-22 of the tile's largest |x| times the weights. 16-bit
 * inputs and weights are exact in one product.
 *
 * A warp has 32 columns of one depth and walks down the lines of the input. K of one instruction
 * lies in one line of the window, so a fragment that was read once serves the three outputs above
 * it, whose sums are under way in registers. A word of shared memory is a pair of channels at one
 * place; a channel without a partner is paired with itself one plane further. Pairs are dealt to
 * the four lanes of an instruction's K by their address modulo 4, which the odd distances between
 * planes and arrays make possible, and neighbours of an instruction are four columns apart:
 * together a load touches every bank once, and a thread ends up with eight neighbouring outputs.
 *
 * Two passes over the input. The first keeps the moments of the sums: a warp's from a pivot, merged
 * in double in one order per tile, and by a sample's last block over its tiles. The second forms
 * the same sums again and normalises them: cheaper than writing them out and reading them back.
 * Pairs of warps bring two lines at a time in order through shared memory and write whole runs.
 * Tiles, scales and orders depend on the shape of a sample alone, so its bits do not depend on the
 * batch.
 *
 * Blocks stay. One warpgroup fetches tiles and merges moments, one multiplies; two buffers between
 * them. Tiles are dealt by a counter, because the last block of a sample takes longer.
 */
#include "kernels/cuda/window_end.cuh"

/* The first pass: moments */

/* HOT: sums may be beyond float32 when their scale is undone. */
template <bool HOT_SUMS> struct parts_end {
    int columns; /* of this thread: up to 8 that are outputs */
    int lines;   /* of the tile */
    float pivot[2], sum[2], squares[2];
    uint32_t top[2];

    /* No branches: the next line's products then fill the gaps. */
    __device__ __forceinline__ void line(int out, const float (&v)[BLOCKS][4])
    {
        const int valid = out < lines ? columns : 0;

        if (out == 0) {
            pivot[0] = __shfl_sync(~0u, v[0][0], threadIdx.x & 28);
            pivot[1] = __shfl_sync(~0u, v[0][2], threadIdx.x & 28);
        }
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    const float d = 4 * k + b < valid ? v[b][2 * c + k] - pivot[c] : 0.0f;

                    sum[c] += d;
                    squares[c] = __fmaf_rn(d, d, squares[c]);
                    if (HOT_SUMS && 4 * k + b < valid)
                        top[c] = max(top[c], __float_as_uint(v[b][2 * c + k]) & 0x7fffffffu);
                }
    }

    /* Over the four lanes that share channels, in one order. */
    __device__ __forceinline__ void store(const int exponent[2], const float bias[2],
                                          struct window_part *parts, int64_t items)
    {
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                sum[c] += __shfl_xor_sync(~0u, sum[c], step);
                squares[c] += __shfl_xor_sync(~0u, squares[c], step);
            }
            if (HOT_SUMS) {
#pragma unroll
                for (int step = 1; step < 4; step *= 2)
                    top[c] = max(top[c], __shfl_xor_sync(~0u, top[c], step));
                /* An output that float32 does not hold is infinite there, and its group NaN. */
                if (isinf(unscale(__uint_as_float(top[c]), exponent[c]) + fabsf(bias[c])))
                    sum[c] = __int_as_float(0x7fc00000);
            }
            if (threadIdx.x % 4 == 0)
                parts[(threadIdx.x % WARP / 4 + 8 * c) * items] = {pivot[c], sum[c], squares[c],
                                                                   exponent[c]};
        }
    }
};

__attribute__((unused)) static __device__ __forceinline__ int
outputs_of_warp(const struct tile &tile, int warp)
{
    return warp / 2 < tile.size[0]
               ? max(0, min(HALF_W, tile.size[2] - warp % 2 * HALF_W)) * tile.size[1]
               : 0;
}

static __device__ __forceinline__ int find_row(const struct segment *segments, int n, int64_t row)
{
    int low = 0, high = n - 1;

    while (low < high) {
        const int middle = (low + high + 1) / 2;

        if (segments[middle].row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

__attribute__((unused)) static __device__ void row_end(const struct window_run &run,
                                                       const struct tail &tail, int64_t row)
{
    const int s = find_row(tail.segments, tail.n_segments, row);
    const struct segment &seg = tail.segments[s];
    const int64_t at = row - seg.row;
    const int size = tail.to || tail.dtype == DTYPE_FLOAT32 ? 4 : 2;
    struct window_end end = {NULL, seg.seed, 0, 0, 0, s, -INFINITY, INFINITY, true};

    end.to = tail.to ? (char *)(tail.to + row * tail.elements)
                     : (char *)seg.y + (seg.out_row + at) * tail.elements * size;
    for (int p = 0; p < tail.n_points; p++) {
        const struct point &point = tail.points[p];

        /* Limits in a row are one: minimum and maximum distribute over each other. */
        if (point.dropout) {
            end.plain &= !seg.train;
        } else {
            end.low = max_nan(end.low, point.low);
            end.high = min_nan(max_nan(end.high, point.low), point.high);
        }
    }
    if (!end.plain) {
        const struct stream stream = stream_at(tail, seg, at, 0);

        end.turn = stream.turn;
        end.thread = stream.thread;
        end.threads = stream.threads;
    }
    run.ends[row] = end;
}

/*
 * A block a group: its moments from those of the sample's warps and channels; the first of a sample
 * looks up where the sample goes. Doubles are here alone: they share a pipe with the products, and
 * would wait for them.
 */
static __global__ void __launch_bounds__(THREADS)
    groups_kernel(const __grid_constant__ struct window_run run,
                  const __grid_constant__ struct tail tail)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int per_group = run.outs / run.groups, first = blockIdx.x % run.groups * per_group;
    const int items = run.tiles_all * WARPS;
    const int64_t row = blockIdx.x / run.groups;
    const int padded = (run.outs + WINDOW_OUTS - 1) / WINDOW_OUTS * WINDOW_OUTS;
    const struct window_part *parts = run.parts + (row * padded + first) * items;
    __shared__ double shared[WARPS];
    double sum = 0, squares = 0;

    next_launch();
    if (first == 0 && threadIdx.x == 0)
        row_end(run, tail, row);
    previous_wait();
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const int n = outputs_of_warp(tile_of(run, i / WARPS), i % WARPS);

        for (int c = 0; c < per_group && n > 0; c++) {
            const struct window_part part = parts[(int64_t)c * items + i];

            sum += ((double)part.pivot * n + (double)part.sum) * power_of_two(-part.exponent) +
                   (double)run.bias[first + c] * n;
        }
    }
    const double mean = block_sum<WARPS>(sum, shared) / (double)run.group_size;

    for (int i = threadIdx.x; i < items; i += THREADS) {
        const int n = outputs_of_warp(tile_of(run, i / WARPS), i % WARPS);

        for (int c = 0; c < per_group && n > 0; c++) {
            const struct window_part part = parts[(int64_t)c * items + i];
            const double scale = power_of_two(-part.exponent);
            const double d = (double)part.pivot * scale + (double)run.bias[first + c] - mean;

            squares +=
                (double)part.squares * scale * scale + d * (2 * scale * (double)part.sum + d * n);
        }
    }
    squares = block_sum<WARPS>(squares, shared);
    if (squares < 0) /* by rounding; NaN stays */
        squares = 0;
    for (int c = first + threadIdx.x; c < first + per_group; c += THREADS) {
        /* Overflows where float32's does: the root's inverse is then 0. */
        const float variance = (float)squares / (float)run.group_size;
        const float rstd = 1.0f / sqrtf(variance + run.eps);

        /* Then without a mean, whose scaling might overflow, and 0 times that is NaN. */
        run.stats[row * padded + c] = make_float2(
            rstd == 0 ? 0.0f : (float)(mean - (double)run.bias[c]), rstd * run.gamma[c]);
    }
#endif
}

/* The warpgroup that fetches: tiles in the order of a counter, each into the next buffer. */
template <typename T, int C, bool STATS>
static __device__ __forceinline__ void fetch(const struct window_run &run, struct shared &shared,
                                             uint32_t *pairs)
{
    constexpr int HALVES = sizeof(T) == 4 ? 2 : 1;
    const int64_t tiles = run.rows * run.tiles_all;
    uint32_t *dealt = run.dealt + ((STATS ? 0 : gridDim.y) + blockIdx.y) * 2;
    int64_t next = blockIdx.x;
    int turn = 0;

    for (;; turn++) {
        const int b = turn % BUFFERS;

        if (turn >= BUFFERS)
            barrier_wait(shared_address(&shared.empty[b]), turn / BUFFERS % 2 ^ 1);
        if (threadIdx.x == 0)
            shared.next = next;
        group_sync<3>(THREADS);

        const int64_t i = shared.next;

        if (i >= tiles)
            break;
        if (threadIdx.x == 0)
            next = gridDim.x + (int64_t)atomicAdd(dealt, 1);

        struct tile tile = tile_of(run, i);

        /* Of the row's end a word each. The first tile comes before the moments are known. */
        const uint32_t *words = (const uint32_t *)&run.ends[tile.row] + threadIdx.x;
        const bool mine = !STATS && threadIdx.x < sizeof(struct window_end) / 4;
        uint32_t word = 0;

        if (turn > 0 && mine)
            word = __ldcg(words);
        take_tile<T, C, HALVES>(run, tile, pairs + b * buffer_size<C, HALVES>, &shared.top);
        if (!STATS && turn == 0)
            previous_wait();
        if (turn == 0 && mine)
            word = __ldcg(words);
        if (mine)
            ((uint32_t *)&shared.ends[b])[threadIdx.x] = word;
        if (threadIdx.x == 0)
            shared.tiles[b] = tile;
        barrier_arrive(shared_address(&shared.full[b]));
    }
    if (threadIdx.x == 0) {
        shared.tiles[turn % BUFFERS].row = -1;
        if (atomicAdd(dealt + 1, 1) == gridDim.x - 1)
            dealt[0] = dealt[1] = 0;
    }
    barrier_arrive(shared_address(&shared.full[turn % BUFFERS]));
}

__attribute__((unused)) static __device__ __forceinline__ void begin(struct shared &shared)
{
    if (threadIdx.x == 0) {
        for (int b = 0; b < BUFFERS; b++) {
            barrier_init(shared_address(&shared.full[b]), THREADS);
            barrier_init(shared_address(&shared.empty[b]), THREADS);
        }
    }
    __syncthreads();
}

template <typename T, int C>
static __global__ void __launch_bounds__(2 * THREADS, PER_SM)
    stats_kernel(const __grid_constant__ struct window_run run)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int HALVES = sizeof(T) == 4 ? 2 : 1;
    extern __shared__ __align__(16) uint32_t pairs[];
    __shared__ struct shared shared;

    begin(shared);
    next_launch();
    if (threadIdx.x < THREADS) {
        registers_to_fetch();
        fetch<T, C, true>(run, shared, pairs);
    } else {
        registers_to_multiply();
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % WARPS;
        const int channel = blockIdx.y * WINDOW_OUTS + lane / 4;
        const int exponents[2] = {run.exponents[channel], run.exponents[channel + 8]};
        const int64_t items = run.tiles_all * WARPS;
        const float bias[2] = {run.bias[channel], run.bias[channel + 8]};
        struct operands<C, HALVES> operands;

        operands.take(run);
        for (int turn = 0;; turn++) {
            const int b = turn % BUFFERS;

            barrier_wait(shared_address(&shared.full[b]), turn / BUFFERS % 2);

            const struct tile &tile = shared.tiles[b];

            if (tile.row < 0)
                break;
            const struct place place = place_of(tile);

            if (place.columns) {
                const int columns = max(0, min(8, place.columns - lane % 4 * 8));
                const uint32_t *from = pairs + b * buffer_size<C, HALVES> +
                                       place.depth * WINDOW_PLANE + place.half * HALF_W;

                const int exponent[2] = {tile.exponent + exponents[0],
                                         tile.exponent + exponents[1]};
                struct window_part *parts =
                    run.parts + (tile.row * gridDim.y + blockIdx.y) * WINDOW_OUTS * items +
                    tile.index * WARPS + warp;

                if (__any_sync(~0u, min(exponent[0], exponent[1]) < HOT)) {
                    struct parts_end<true> end = {
                        columns, tile.size[1]
                    };

                    walk<C, HALVES>(operands, from, end);
                    end.store(exponent, bias, parts, items);
                } else {
                    struct parts_end<false> end = {
                        columns, tile.size[1]
                    };

                    walk<C, HALVES>(operands, from, end);
                    end.store(exponent, bias, parts, items);
                }
            }
            barrier_arrive(shared_address(&shared.empty[b]));
        }
    }
#endif
}

/* The second pass: normalised, to the end of the pipeline */

template <typename T, int C, typename TO>
static __global__ void __launch_bounds__(2 * THREADS, PER_SM)
    tail_kernel(const __grid_constant__ struct window_run run,
                const __grid_constant__ struct tail tail)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int HALVES = sizeof(T) == 4 ? 2 : 1;
    extern __shared__ __align__(16) uint32_t pairs[];
    __shared__ struct shared shared;

    begin(shared);
    if (threadIdx.x < THREADS) {
        registers_to_fetch();
        fetch<T, C, false>(run, shared, pairs);
    } else {
        registers_to_multiply();
        float *runs = (float *)(pairs + BUFFERS * buffer_size<C, HALVES>);
        const int lane = threadIdx.x % WARP;
        const uint32_t volume = (uint32_t)run.out[0] * run.out[1] * run.out[2];
        const int channel = blockIdx.y * WINDOW_OUTS + lane / 4;
        const int exponents[2] = {run.exponents[channel], run.exponents[channel + 8]};
        const float shift[2] = {run.beta[channel], run.beta[channel + 8]};
        struct operands<C, HALVES> operands;

        const bool whole = run.tiles[2] == 1 && run.out[1] % 2 == 0 && run.out[2] % 2 == 0;

        operands.take(run);
        previous_wait();
        for (int turn = 0;; turn++) {
            const int b = turn % BUFFERS;

            barrier_wait(shared_address(&shared.full[b]), turn / BUFFERS % 2);

            const struct tile tile = shared.tiles[b];

            if (tile.row < 0)
                break;
            const struct place place = place_of(tile);

            if (place.depth < tile.size[0]) {
                const struct window_end &to = shared.ends[b];
                struct lines_end<TO> end = {
                    run, tail, tile, place, to, runs + place.depth *RUN,
                        max(0, min(8, place.columns - lane % 4 * 8)), run.tiles[2] > 1
                };

                end.volume = volume;
                end.begin = blockIdx.y * WINDOW_OUTS * volume +
                            ((tile.at[0] + place.depth) * run.out[1] + tile.at[1]) * run.out[2] +
                            tile.at[2];
                end.take_moments(exponents, shift);

                const uint32_t *from = pairs + b * buffer_size<C, HALVES> +
                                       place.depth * WINDOW_PLANE + place.half * HALF_W;

                if (sizeof(TO) == 4 && whole && to.plain && (uintptr_t)to.to % 16 == 0) {
                    struct pairs_end fast = pairs_of(end);

                    walk<C, HALVES>(operands, from, fast);
                } else {
                    walk<C, HALVES>(operands, from, end);
                }
                pair_sync(place.depth);
            }
            barrier_arrive(shared_address(&shared.empty[b]));
        }
    }
#endif
}

/* Launches */

typedef void (*stats_function)(const struct window_run);
typedef void (*tail_function)(const struct window_run, const struct tail);

struct kernels {
    stats_function stats;
    tail_function tail, tail_wide; /* to the model's dtype, to float32 */
    int stats_bytes, tail_bytes;
};

template <typename T, int C> static struct kernels kernels_of_type(void)
{
    constexpr int pairs = BUFFERS * buffer_size < C, sizeof(T) == 4 ? 2 : 1 > *4;

    return {stats_kernel<T, C>, tail_kernel<T, C, T>, tail_kernel<T, C, float>, pairs,
            pairs + RUNS * (int)sizeof(float)};
}

static struct kernels kernels_of(enum dtype dtype)
{
    struct kernels kernels;

    WITH_DTYPE(dtype, T, (kernels = kernels_of_type<T, WINDOW_CHANNELS>()));
    return kernels;
}

static int allow_shared(const void *kernel, int bytes, struct report *report)
{
    return CUDA(report,
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

extern "C" int window_ready(enum dtype dtype, int *ret_blocks, struct report *report)
{
    const struct kernels kernels = kernels_of(dtype);
    int device, processors = 0;
    int r = allow_shared((const void *)kernels.stats, kernels.stats_bytes, report);

    if (r == 0)
        r = allow_shared((const void *)kernels.tail, kernels.tail_bytes, report);
    if (r == 0)
        r = allow_shared((const void *)kernels.tail_wide, kernels.tail_bytes, report);
    if (r == 0)
        r = CUDA(report, cudaGetDevice(&device));
    if (r == 0)
        r = CUDA(report,
                 cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    if (r == 0)
        *ret_blocks = PER_SM * processors;
    return r;
}

/* As many blocks as run at a time, if there are tiles for them. */
static dim3 grid_of(const struct window_run *run)
{
    const int64_t tiles = run->rows * run->tiles_all;
    const int along = (run->outs + WINDOW_OUTS - 1) / WINDOW_OUTS;
    const int most = run->blocks > along ? run->blocks / along : 1;

    return dim3((unsigned)(tiles < most ? tiles : most), (unsigned)along);
}

/* Blocks may begin while the kernel before still runs: they wait for it themselves. */
static int launch_early(cudaStream_t stream, const void *kernel, dim3 grid, int threads, int bytes,
                        void **arguments, struct report *report)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};

    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return CUDA(report, cudaLaunchKernelExC(&config, kernel, arguments));
}

extern "C" int window_cuda(cudaStream_t stream, const struct window_run *run,
                           const struct tail *tail, struct report *report)
{
    const struct kernels kernels = kernels_of(run->dtype);
    void *arguments[] = {(void *)run, (void *)tail};
    int r;

    kernels.stats<<<grid_of(run), 2 * THREADS, (size_t)kernels.stats_bytes, stream>>>(*run);
    r = CUDA_LAUNCHED(report);
    if (r == 0)
        r = launch_early(stream, (const void *)groups_kernel,
                         dim3((unsigned)(run->rows * run->groups)), THREADS, 0, arguments, report);
    if (r == 0)
        r = launch_early(stream, (const void *)(tail->to ? kernels.tail_wide : kernels.tail),
                         grid_of(run), 2 * THREADS, kernels.tail_bytes, arguments, report);
    return r;
}
