/*
 * window.cu - convolution of three channels with a 3x3x3 window on tensor cores, normalised on chip
 *
 * A sample is cut in tiles of 2 x 4 x 64 outputs. The inputs under a tile are scaled by a power of
 * two and split in fp16 halves as they come into shared memory; mma multiplies 16 output channels
 * (the left operand, in registers all along) with 8 neighbours. Three products of the halves give
 * float32's accuracy: what is lost is 2^-22 of the tile's largest |x| times the weights. 16-bit
 * inputs and weights are exact in one product.
 *
 * A warp has half of the pairs of columns of half a line at one depth, and walks down the lines of
 * the input. K of one instruction lies in one line of the window, so a fragment that was read once
 * serves the three outputs above it, whose sums are under way in registers. A word of shared memory
 * is a pair of channels at one place; a channel without a partner is paired with itself one plane
 * further. Pairs are dealt to the four lanes of an instruction's K by their address modulo 4, which
 * the odd distances between planes and arrays make possible, and neighbours of an instruction are
 * four columns apart: together a load touches every bank once.
 *
 * A result can be normalised only when all tiles of its sample have been summed. So a block leaves
 * a tile's sums in one of its slots in shared memory, publishes their moments and goes on with the
 * next; when a sample's moments are all there, each block that holds tiles of it merges them and
 * sends its tiles away. Nothing is computed twice and sums never go to memory, as long as a block
 * has slots enough.
 *
 * That blocks wait for one another is safe whichever of them run, and whatever runs beside them.
 * Tiles are dealt by a counter in the order of samples, so only running blocks have tiles. A block
 * keeps at most SLOTS tiles of one sample: where a tile waits for a slot, an earlier sample's tile
 * is in it. So the first unfinished sample's tiles wait for nothing, and its last moments come.
 * What a block cannot keep gives its moments and is computed again in the end, when no moments of
 * this block are missing anywhere.
 *
 * Tiles, scales and orders depend on the shape of a sample alone, so its bits do not depend on the
 * batch, nor on which block computed what, nor how often.
 *
 * A block is eight warps that multiply, four that fetch, one that publishes moments, one that
 * deals, two that wait for moments and merge them, and four that send.
 */
#include "kernels/cuda/window_end.cuh"

struct shared {
    uint64_t described[JOBS];
    uint64_t placed[JOBS];    /* where a row goes is known, if the job begins one */
    uint64_t over[JOBS];      /* nobody needs the job any more */
    uint64_t full[BUFFERS];   /* fetched */
    uint64_t summed[BUFFERS]; /* multiplied, as the one that publishes learns */
    uint64_t empty[BUFFERS];  /* and its moments are taken */
    uint64_t filled[SLOTS];   /* of results, as those that wait for moments learn */
    uint64_t known[SLOTS];    /* their moments, as those that send learn */
    uint64_t sent[SLOTS];
    struct job jobs[JOBS];
    struct slot slots[SLOTS];
    struct distances distances[BUFFERS][WINDOW_WARPS][WINDOW_OUTS];
    struct agreed agreed;
    uint16_t offsets[WINDOW_SLOTS_MAX];
};

/*
 * Every thread arrives for what it has read and written itself, and what it has learnt at another
 * barrier before. One for its warp, behind __syncwarp(), would be as right, but the race checker
 * does not follow that.
 */
static __device__ __forceinline__ void arrive(uint64_t *barrier)
{
    barrier_arrive(shared_address(barrier));
}

static __device__ void begin(const struct window_run &run, struct shared &shared)
{
    if (threadIdx.x < WINDOW_SLOTS_MAX)
        shared.offsets[threadIdx.x] = run.offsets[threadIdx.x];
    if (threadIdx.x == 0) {
        for (int j = 0; j < JOBS; j++) {
            barrier_init(shared_address(&shared.described[j]), 1);
            barrier_init(shared_address(&shared.placed[j]), 1);
            barrier_init(shared_address(&shared.over[j]), WARP);
        }
        for (int b = 0; b < BUFFERS; b++) {
            barrier_init(shared_address(&shared.full[b]), FETCHERS);
            barrier_init(shared_address(&shared.summed[b]), MULTIPLIERS);
            barrier_init(shared_address(&shared.empty[b]), WARP);
        }
        for (int s = 0; s < SLOTS; s++) {
            barrier_init(shared_address(&shared.filled[s]), WARP);
            barrier_init(shared_address(&shared.known[s]), WARP);
            barrier_init(shared_address(&shared.sent[s]), DRAINS * WARP);
        }
    }
    __syncthreads();
}

/* Deal */

/* Of the thread that takes items: row, set, tile. */
struct dealer {
    uint32_t items;
    int32_t chain; /* what is to be done again, last in first; < 0: nothing */
    int row;       /* of the item before */
    int of_row, slot, round;
};

/* An item whose moments are wanted, or one to be done again, or < 0: no more. */
static __device__ __forceinline__ int32_t deal(const struct window_run &run, struct dealer &dealer,
                                               bool *ret_again)
{
    int32_t item = dealer.chain;

    *ret_again = true;
    if (dealer.items > 0) {
        const uint32_t next = atomicAdd(run.dealt, 1);

        if (next < dealer.items) {
            *ret_again = false;
            return (int32_t)next;
        }
        dealer.items = 0;
    }
    if (item >= 0)
        dealer.chain = run.again[item];
    return item;
}

/* Whether the block keeps the results of one more tile of this row. */
static __device__ __forceinline__ bool keeps(const struct window_run &run, struct dealer &dealer,
                                             int row, int32_t item)
{
    dealer.of_row = row == dealer.row ? dealer.of_row + 1 : 1;
    dealer.row = row;
    if (dealer.of_row <= SLOTS)
        return true;
    run.again[item] = dealer.chain;
    dealer.chain = item;
    return false;
}

/* A thread. It deals few ahead: what has been dealt shall soon give its moments, for which other
 * blocks may wait. */
static __device__ __forceinline__ void deal_all(const struct window_run &run,
                                                const struct tail &tail, struct shared &shared)
{
    const int per_row = run.tile_sets * run.tiles_all;
    struct dealer dealer = {(uint32_t)(run.rows * per_row), -1, -1, 0, 0, 0};

#pragma unroll 1
    for (int turn = 0;; turn++) {
        const int j = turn % JOBS;
        struct job job;

        if (turn >= JOBS)
            barrier_wait(shared_address(&shared.over[j]), turn / JOBS % 2 ^ 1);

        const int32_t item = deal(run, dealer, &job.again);

        job.tile.row = -1;
        if (item >= 0) {
            const int row = item / per_row, rest = item - row * per_row;

            job.set = run.tile_sets > 1 ? rest / run.tiles_all : 0;
            job.tile = tile_of(run, row, rest - job.set * run.tiles_all);
        }
        job.slot = -1;
        if (job.again || keeps(run, dealer, job.tile.row, item)) {
            job.slot = dealer.slot;
            job.round = dealer.round;
            dealer.slot = dealer.slot == SLOTS - 1 ? 0 : dealer.slot + 1;
            dealer.round += dealer.slot == 0;
        }
        shared.jobs[j] = job;
        arrive(&shared.described[j]);
        if (item < 0)
            return;
        /* The block that has a row's first tile also finds out where the row goes. */
        if (!job.again && job.set == 0 && job.tile.index == 0)
            row_end(run, tail, job.tile.row);
        arrive(&shared.placed[j]);
    }
}

/* Fetch */

/* A tile's inputs are asked for before there is room for them. */
template <typename T, int C>
static __device__ __forceinline__ void fetch_all(const struct window_run &run,
                                                 struct shared &shared, uint32_t *pairs)
{
    constexpr int HALVES = sizeof(T) == 4 ? 2 : 1;
    const int lowest = run.exponents[run.tile_sets * WINDOW_OUTS];
    struct share<C> share;

    if (fetcher() == 0)
        shared.agreed.large[0] = 0;
    group_sync<1>(FETCHERS);
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const int b = turn % BUFFERS;
        struct job &job = shared.jobs[turn % JOBS];

        barrier_wait(shared_address(&shared.described[turn % JOBS]), turn / JOBS % 2);

        const bool last = job.tile.row < 0;

        if (!last)
            share.template load<T>(run, job.tile);
        if (turn >= BUFFERS)
            barrier_wait(shared_address(&shared.empty[b]), turn / BUFFERS % 2 ^ 1);
        if (!last) {
            const int exponent = store_tile<T, C, HALVES>(run, job.tile, share, turn, shared.agreed,
                                                          pairs + b * buffer_size<C, HALVES>);

            if (fetcher() == 0) {
                job.tile.exponent = exponent;
                job.hot = exponent + lowest < HOT;
            }
        }
        arrive(&shared.full[b]);
        if (last)
            return;
    }
}

/* Multiply */

template <int C, int HALVES>
static __device__ __forceinline__ void multiply_all(const struct window_run &run,
                                                    struct shared &shared, const uint32_t *pairs,
                                                    const float *values)
{
    const int lane = threadIdx.x % WARP;
    const int warp = ((int)threadIdx.x - MULTIPLIERS_AT) / WARP;
    const bool even = run.out[2] % 2 == 0 && run.tiles[2] == 1;
    struct operands<C, HALVES> operands;

    operands.take(run, 0);
#pragma unroll 1
    for (int turn = 0, set = 0;; turn++) {
        const int b = turn % BUFFERS;

        barrier_wait(shared_address(&shared.full[b]), turn / BUFFERS % 2);

        const struct job job = shared.jobs[turn % JOBS];

        if (job.tile.row < 0) {
            arrive(&shared.summed[b]);
            return;
        }
        if (run.tile_sets > 1 && set != job.set) {
            set = job.set;
            operands.take(run, set);
        }

        const struct place place = place_of(job.tile, warp);

        if (place.columns > 0) {
            const int left = place.columns - lane % 4 * 8, column = place.first + lane % 4 * 8;
            const struct runs runs = runs_of(run, job.tile, job.set, place.depth);
            const uint32_t from =
                shared_address(pairs + b * buffer_size<C, HALVES> + place.depth * WINDOW_PLANE +
                               place.first + lane / 4 * 4);
            const uint16_t *offsets = shared.offsets + lane % 4;
            const float *slot = values + max(job.slot, 0) * SLOT;

            if (job.slot >= 0 && job.round > 0)
                barrier_wait(shared_address(&shared.sent[job.slot]), job.round % 2 ^ 1);
            if (even && !job.hot) {
                struct even_end end = {{left, job.tile.size[1]}};

                end.kept = job.slot >= 0;
                end.begin(runs, place.depth, column, slot);
                walk<C, HALVES>(operands, from, offsets, end);
                end.distances.store(run, job, shared.distances[b][warp]);
            } else {
                struct any_end end = {{left, job.tile.size[1]},
                                      runs,
                                      place.depth,
                                      column,
                                      job.slot >= 0 ? (float *)slot : NULL};

                walk<C, HALVES>(operands, from, offsets, end);
                end.distances.store(run, job, shared.distances[b][warp]);
            }
        }
        arrive(&shared.summed[b]);
    }
}

/* Moments */

/* A tile's moments are there. */
static __device__ __forceinline__ void publish(const struct window_run &run, int row)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(&run.arrived[row]) : "memory");
}

static __device__ __forceinline__ void wait_published(const struct window_run &run, int row)
{
    const uint32_t all = run.tile_sets * run.tiles_all;

    while (*(const volatile uint32_t *)&run.arrived[row] != all)
        ;
    __threadfence();
}

/* The next slot has results, or says that no more come. */
static __device__ __forceinline__ void fill_slot(struct shared &shared, const struct job &job)
{
    if (threadIdx.x % WARP == 0) {
        shared.slots[job.slot].tile = job.tile;
        shared.slots[job.slot].set = job.set;
    }
    arrive(&shared.filled[job.slot]);
}

/* The warp that publishes, turn by turn. */
static __device__ __forceinline__ void publish_all(const struct window_run &run,
                                                   struct shared &shared)
{
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const int b = turn % BUFFERS;

        barrier_wait(shared_address(&shared.summed[b]), turn / BUFFERS % 2);

        struct job job = shared.jobs[turn % JOBS];

        if (job.tile.row < 0) {
            for (int i = 0; i < NORMERS; i++) {
                if (job.round > 0) /* else those that multiply have waited */
                    barrier_wait(shared_address(&shared.sent[job.slot]), job.round % 2 ^ 1);
                fill_slot(shared, job);
                job.slot = job.slot == SLOTS - 1 ? 0 : job.slot + 1;
                job.round += job.slot == 0;
            }
            return;
        }
        if (job.slot >= 0)
            fill_slot(shared, job);
        if (!job.again)
            tile_moments(run, job, shared.distances[b]);
        arrive(&shared.empty[b]);
        barrier_wait(shared_address(&shared.placed[turn % JOBS]), turn / JOBS % 2);
        arrive(&shared.over[turn % JOBS]);
        if (!job.again)
            publish(run, job.tile.row);
    }
}

/* A warp that waits for samples' moments, and finds out how results are normalised: every
 * NORMERS-th slot that is filled. */
static __device__ __forceinline__ void norm_all(const struct window_run &run, struct shared &shared,
                                                int warp)
{
    const int lane = threadIdx.x % WARP;

#pragma unroll 1
    for (int s = warp, round = 0;; s += NORMERS) {
        if (s >= SLOTS) {
            s -= SLOTS;
            round++;
        }

        struct slot &slot = shared.slots[s];

        barrier_wait(shared_address(&shared.filled[s]), round % 2);

        const int row = slot.tile.row;

        if (row < 0) {
            arrive(&shared.known[s]);
            return;
        }

        const int channel = slot.set * WINDOW_OUTS + lane % WINDOW_OUTS;
        const int exponent = slot.tile.exponent + __ldg(&run.exponents[channel]);

        wait_published(run, row);

        const uint32_t word =
            lane < (int)sizeof(slot.end) / 4 ? __ldcg((const uint32_t *)&run.ends[row] + lane) : 0;
        const float3 norm = norm_of(run, sample_moments(run, row, slot.set), channel, exponent);

        if (lane < (int)sizeof(slot.end) / 4)
            ((uint32_t *)&slot.end)[lane] = word;
        if (lane < WINDOW_OUTS) {
            slot.mean[lane] = norm.x;
            slot.scale[lane] = norm.y;
            slot.shift[lane] = norm.z;
        }
        arrive(&shared.known[s]);
    }
}

/* The last warp to end leaves zeros. */
static __device__ __forceinline__ void end_run(const struct window_run &run)
{
    const int lane = threadIdx.x % WARP;
    uint32_t before = 0;

    if (lane == 0)
        before = atomicAdd(run.ended, 1);
    if (__shfl_sync(~0u, before, 0) != NORMERS * gridDim.x - 1)
        return;
    for (int64_t row = lane; row < run.rows; row += WARP)
        run.arrived[row] = 0;
    if (lane == 0)
        *run.dealt = *run.ended = 0;
}

/* Send */

/* Adds have kernels of their own: what sends has no registers left for what it may not need. */
template <typename TO, bool ADDS>
static __device__ __forceinline__ void send_all(const struct window_run &run,
                                                const struct tail &tail, struct shared &shared,
                                                const float *values, int warp)
{
    const bool fours =
        run.tiles[2] == 1 && run.outs % WINDOW_OUTS == 0 && run.out[1] * run.out[2] % WIDTH == 0;

#pragma unroll 1
    for (int s = 0, round = 0;; round += s == SLOTS - 1, s = s == SLOTS - 1 ? 0 : s + 1) {
        const struct slot &slot = shared.slots[s];

        barrier_wait(shared_address(&shared.known[s]), round % 2);
        if (slot.tile.row < 0)
            return;
        if (ADDS || !slot.end.plain)
            send_points<TO, ADDS>(run, tail, slot, values + s * SLOT, warp);
        else if (fours && (uintptr_t)slot.end.to % (WIDTH * sizeof(TO)) == 0)
            send_fours<TO>(run, slot, values + s * SLOT, warp);
        else
            send_runs<TO>(run, slot, values + s * SLOT, warp);
        arrive(&shared.sent[s]);
    }
}

template <typename T, int C, typename TO, bool ADDS>
static __global__ void __launch_bounds__(THREADS, 1)
    window_kernel(const __grid_constant__ struct window_run run,
                  const __grid_constant__ struct tail tail)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int HALVES = sizeof(T) == 4 ? 2 : 1;
    extern __shared__ __align__(16) uint32_t pairs[];
    __shared__ struct shared shared;
    const float *values = (float *)(pairs + BUFFERS * buffer_size<C, HALVES>);

    begin(run, shared);
    if (threadIdx.x - MULTIPLIERS_AT < MULTIPLIERS) {
        registers_to_multiply();
        multiply_all<C, HALVES>(run, shared, pairs, values);
    } else if (threadIdx.x - FETCHERS_AT < FETCHERS) {
        registers_to_fetch();
        fetch_all<T, C>(run, shared, pairs);
    } else {
        registers_to_send();

        const int warp = (threadIdx.x - SENDERS_AT) / WARP;

        if (warp == 0) {
            publish_all(run, shared);
        } else if (warp == 1) {
            if (threadIdx.x % WARP == 0)
                deal_all(run, tail, shared);
        } else if (warp < 2 + NORMERS) {
            norm_all(run, shared, warp - 2);
            end_run(run);
        } else {
            send_all<TO, ADDS>(run, tail, shared, values, warp - 2 - NORMERS);
        }
    }
#endif
}

/* Launches */

typedef void (*window_function)(const struct window_run, const struct tail);

struct kernels {
    window_function to_dtype[2], to_float[2]; /* the model's, between stages; the second adds */
    int bytes;
};

template <typename T, int C> static struct kernels kernels_of_type(void)
{
    constexpr int halves = sizeof(T) == 4 ? 2 : 1;

    return {{window_kernel<T, C, T, false>, window_kernel<T, C, T, true>},
            {window_kernel<T, C, float, false>, window_kernel<T, C, float, true>},
            (BUFFERS * buffer_size<C, halves> + SLOTS * SLOT) * 4};
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
    int r = 0;

    for (int adds = 0; adds < 2 && r == 0; adds++) {
        r = allow_shared((const void *)kernels.to_dtype[adds], kernels.bytes, report);
        if (r == 0)
            r = allow_shared((const void *)kernels.to_float[adds], kernels.bytes, report);
    }
    if (r == 0)
        r = CUDA(report, cudaGetDevice(&device));
    if (r == 0)
        r = CUDA(report,
                 cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    if (r == 0)
        *ret_blocks = processors;
    return r;
}

extern "C" int window_cuda(cudaStream_t stream, const struct window_run *run,
                           const struct tail *tail, struct report *report)
{
    const struct kernels kernels = kernels_of(run->dtype);
    const int64_t items = run->rows * run->tile_sets * run->tiles_all;
    const int blocks = (int)(items < run->blocks ? items : run->blocks);
    const window_function *of = tail->to ? kernels.to_float : kernels.to_dtype;

    of[tail->n_summands > 0]<<<blocks, THREADS, (size_t)kernels.bytes, stream>>>(*run, *tail);
    return CUDA_LAUNCHED(report);
}
