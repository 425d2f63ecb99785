/*
 * constant.cu - a proven constant: the guard's look at the input and the fill, in one kernel
 *
 * The bits of a float without its sign, taken as an integer, grow with the magnitude, and NaN lies
 * above infinity, above everything: one integer maximum answers both "below the bound?" and
 * "finite?". A maximum does not depend on the order, so blocks meet in an atomic.
 *
 * As many blocks as fit take numbered tasks in turn: slabs of the input first, tiles of the result
 * behind them. A tile waits until all of its row has been seen. It can: whoever holds a lower
 * number runs already, and waits for nobody. So the last slabs overlap with the first tiles, and
 * nothing is launched or told to the host in between. Which block has which number does not matter
 * to any bit.
 *
 * A block is eight warps that work, and one that deals: it takes numbers, waits for rows, and works
 * out where the next task lies while the others are at the one before. Under full load an answer
 * from memory takes as long as a tile.
 *
 * A row that is the constant, or NaN throughout, is written here; one that the guard stops is left
 * to the full path. The block that reports the last slab tells the host all maxima and raises its
 * flag, so that the full path is enqueued while others write; the block that leaves last leaves the
 * work space as it was: zeros.
 *
 * Under a mask the constant is one of two numbers, so that nothing but Philox and the writing is
 * left. No tile crosses a row.
 */
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tail.cuh"

#define THREADS 256                    /* that work */
#define BLOCKS  4                      /* of a multiprocessor */
#define LOADS   8                      /* of 16 bytes, by a thread, at once */
#define SLAB    (THREADS * LOADS * 16) /* bytes of a row */

/* Words of the work space; behind them the maxima of the rows, and how many slabs of each were
 * seen. */
enum word { WORD_TAKEN, WORD_SEEN, WORD_LEFT, WORD_ROWS };

struct constant {
    struct guard guard;
    uint32_t slabs; /* of a row */
    uint32_t scans; /* of all rows */
    uint32_t tasks;
    bool carried; /* tables come with the launch, not by the tail's addresses */
    struct segment segments[CONSTANT_SEGMENTS];
    int32_t tiles[CONSTANT_SEGMENTS + 1];
    uint64_t counters[CONSTANT_COUNTERS];
};

enum work { WORK_LOOK, WORK_FILL, WORK_MASK, WORK_EACH, WORK_NOTHING, WORK_END };

/* A task: n elements. */
struct desk {
    enum work work;
    uint32_t row; /* of the guard's */
    uint32_t n;
    const void *from;
    void *to;
    float value;
    uint64_t seed, counter; /* of a mask: where the tile begins */
    uint32_t thread, threads;
    int s; /* any masks: the segment, the elements of its request, the first of the tile's */
    int64_t size, first;
};

static __device__ __forceinline__ uint32_t *tops_of(const struct constant &c)
{
    return c.guard.work + WORD_ROWS;
}

static __device__ __forceinline__ uint32_t *seen_of(const struct constant &c)
{
    return c.guard.work + WORD_ROWS + c.guard.rows;
}

static __device__ __forceinline__ uint32_t acquire(const uint32_t *from)
{
    uint32_t v;

    asm volatile("ld.global.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

static __device__ __forceinline__ uint64_t counter_of(const struct constant &c,
                                                      const struct tail &tail,
                                                      const struct point &point, int s)
{
    int64_t at = point.counter * tail.counter_pitch + s;

    return c.carried ? c.counters[at] : tail.counters[at];
}

/* Magnitudes of 16 bits are compared in pairs, as they are, and widened at the end. */
template <typename T> static __device__ __forceinline__ uint32_t larger(uint32_t top, uint32_t bits)
{
    if (sizeof(T) == 4)
        return max(top, bits & 0x7fffffffu);
    return __vmaxu2(top, bits & 0x7fff7fffu);
}

static __device__ __forceinline__ uint32_t magnitude(uint32_t top, float)
{
    return top;
}

static __device__ __forceinline__ uint32_t magnitude(uint32_t top, __half)
{
    const unsigned short larger = (unsigned short)max(top >> 16, top & 0xffff);

    return __float_as_uint(__half2float(__ushort_as_half(larger)));
}

static __device__ __forceinline__ uint32_t magnitude(uint32_t top, __nv_bfloat16)
{
    return max(top >> 16, top & 0xffff) << 16;
}

static __device__ __forceinline__ uint32_t bits_of(float v)
{
    return __float_as_uint(v);
}

static __device__ __forceinline__ uint32_t bits_of(__half v)
{
    return __half_as_ushort(v);
}

static __device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 v)
{
    return __bfloat16_as_ushort(v);
}

/* The largest magnitude among n elements, of those that this thread reads. */
template <typename T> static __device__ uint32_t look(const T *from, uint32_t n)
{
    constexpr uint32_t PER = 16 / sizeof(T);
    uint32_t head = (uint32_t)(-(uintptr_t)from % 16 / sizeof(T)), vectors, top = 0;
    const uint4 *at;

    head = head < n ? head : n;
    vectors = (n - head) / PER;
    at = (const uint4 *)(from + head);
    if (threadIdx.x < head)
        top = larger<T>(top, bits_of(from[threadIdx.x]));
    for (uint32_t e = head + vectors * PER + threadIdx.x; e < n; e += THREADS)
        top = larger<T>(top, bits_of(from[e]));
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        uint32_t v = i * THREADS + threadIdx.x;
        uint4 bits = v < vectors ? __ldcs(at + v) : make_uint4(0, 0, 0, 0);

        top = larger<T>(larger<T>(top, bits.x), bits.y);
        top = larger<T>(larger<T>(top, bits.z), bits.w);
    }
    return warp_max(magnitude(top, T(0.0f)));
}

/* n elements of one number. */
template <typename T> static __device__ void fill(T *to, uint32_t n, float value)
{
    constexpr uint32_t PER = 16 / sizeof(T);
    __align__(16) T all[PER];
    uint32_t head = (uint32_t)(-(uintptr_t)to % 16 / sizeof(T)), vectors;
    uint4 *at;

#pragma unroll
    for (uint32_t k = 0; k < PER; k++)
        round_to(value, &all[k]);
    head = head < n ? head : n;
    vectors = (n - head) / PER;
    at = (uint4 *)(to + head);
    if (threadIdx.x < head)
        to[threadIdx.x] = all[0];
    for (uint32_t e = head + vectors * PER + threadIdx.x; e < n; e += THREADS)
        to[e] = all[0];
#pragma unroll 4
    for (uint32_t v = threadIdx.x; v < vectors; v += THREADS)
        __stcs(at + v, *(const uint4 *)all);
}

/* Whole vectors of 16 bytes under one mask: FOURS calls of Philox each, all of the same turn. */
template <typename T>
static __device__ void fill_masked(const struct point &point, const struct desk &desk)
{
    constexpr uint32_t PER = 16 / sizeof(T), FOURS = PER / 4;
    const uint64_t seed = desk.seed;
    const uint32_t threads = desk.threads;
    uint64_t counter = desk.counter;
    uint32_t thread = desk.thread + threadIdx.x * FOURS;
    T kept, dropped;

    round_to(dropout_masked(desk.value, true, point.scale), &kept);
    round_to(dropout_masked(desk.value, false, point.scale), &dropped);
#pragma unroll(2 / FOURS)
    for (uint32_t v = threadIdx.x; v < desk.n / PER; v += THREADS) {
        __align__(16) T all[PER];

        const bool over = thread >= threads;

        thread -= over ? threads : 0;
        counter += over;
#pragma unroll
        for (uint32_t f = 0; f < FOURS; f++) {
            uint4 words = dropout_words(seed, counter, thread + f);

#pragma unroll
            for (int k = 0; k < 4; k++)
                all[4 * f + k] = dropout_word(words, k) < point.keep_below ? kept : dropped;
        }
        __stcs((uint4 *)desk.to + v, *(const uint4 *)all);
        thread += THREADS * FOURS;
    }
}

/* Any masks, any sizes, element by element. */
template <typename T>
static __device__ __noinline__ void fill_each(const struct constant &c, const struct tail &tail,
                                              const struct desk &desk)
{
    for (uint32_t i = threadIdx.x; i < desk.n; i += THREADS) {
        float v = desk.value;

        for (int p = 0; p < tail.n_points; p++) {
            const struct point &point = tail.points[p];
            uint64_t counter = counter_of(c, tail, point, desk.s);

            if (point.zero)
                v = __fmul_rn(v, 0.0f);
            else
                v = dropout_masked(v,
                                   dropout_one(desk.seed, counter, desk.size, desk.first + i) <
                                       point.keep_below,
                                   point.scale);
        }
        round_to(v, (T *)desk.to + i);
    }
}

template <typename T>
static __device__ __forceinline__ void work_on(const struct constant &c, const struct tail &tail,
                                               const struct desk &desk)
{
    uint32_t top;

    switch (desk.work) {
    case WORK_LOOK:
        top = look((const T *)desk.from, desk.n);
        if (threadIdx.x % WARP == 0)
            atomicMax(tops_of(c) + desk.row, top);
        break;
    case WORK_FILL:
        fill((T *)desk.to, desk.n, desk.value);
        break;
    case WORK_MASK:
        fill_masked<T>(tail.points[0], desk);
        break;
    case WORK_EACH:
        fill_each<T>(c, tail, desk);
        break;
    default:
        break;
    }
}

template <typename T>
static __device__ void deal_slab(const struct constant &c, uint32_t task, struct desk &desk)
{
    constexpr uint32_t PER = SLAB / sizeof(T);
    const uint32_t row = task / c.slabs, slab = task - row * c.slabs;
    const int64_t left = c.guard.elements - (int64_t)slab * PER;

    desk.work = WORK_LOOK;
    desk.row = row;
    desk.from = (const T *)c.guard.x + row * c.guard.elements + (int64_t)slab * PER;
    desk.n = (uint32_t)(left < PER ? left : PER);
}

/* Under which masks, and where in them; whole vectors that lie so in memory and in the one mask. */
template <typename T>
static __device__ void deal_mask(const struct constant &c, const struct tail &tail,
                                 const struct segment &seg, int64_t row, int64_t e,
                                 struct desk &desk)
{
    constexpr int64_t PER = 16 / sizeof(T);

    desk.work = WORK_EACH;
    desk.size = seg.job_rows * tail.elements;
    desk.first = (seg.job_row + row) * tail.elements + e;
    desk.seed = seg.seed;
    if (tail.n_points != 1 || tail.points[0].zero || tail.elements % 4 != 0 ||
        (uintptr_t)desk.to % 16 != 0 || desk.first % PER != 0 || desk.n % PER != 0)
        return;
    const int64_t threads = dropout_threads(desk.size), group = desk.first / 4;
    const int64_t turn = quotient(group, threads);

    if (threads < THREADS * PER / 4) /* at most one turn further with every vector */
        return;
    desk.work = WORK_MASK;
    desk.counter = counter_of(c, tail, tail.points[0], desk.s) + (uint64_t)turn;
    desk.thread = (uint32_t)(group - turn * threads);
    desk.threads = (uint32_t)threads;
}

/* Waits until all of the row has been seen. */
template <typename T>
static __device__ void deal_tile(const struct constant &c, const struct tail &tail, uint32_t tile,
                                 struct desk &desk)
{
    const int32_t *first = c.carried ? c.tiles : tail.tiles;
    const int s = find_segment(first, tail.n_segments, (int32_t)tile);
    const struct segment &seg = c.carried ? c.segments[s] : tail.segments[s];
    const uint32_t tiles = (uint32_t)((tail.elements + tail.tile - 1) / tail.tile);
    const uint32_t at = tile - (uint32_t)first[s], row = at / tiles;
    const int64_t e = (int64_t)(at - row * tiles) * tail.tile, left = tail.elements - e;
    const uint32_t *seen = seen_of(c) + seg.row + row;
    uint32_t top;

    while (acquire(seen) < c.slabs)
        __nanosleep(50);
    top = __ldcg(tops_of(c) + seg.row + row);
    desk.s = s;
    desk.to = (T *)seg.y + (seg.out_row + row) * tail.elements + e;
    desk.n = (uint32_t)(left < tail.tile ? left : tail.tile);
    desk.work = WORK_FILL;
    desk.value = tail.constant.value;
    if (top < tail.constant.bound) {
        if (seg.train && tail.n_points > 0)
            deal_mask<T>(c, tail, seg, row, e, desk);
    } else if (top >= INFINITE && tail.constant.nonfinite_spreads) {
        desk.value = __uint_as_float(0x7fc00000); /* under any mask */
    } else {
        desk.work = WORK_NOTHING;
    }
}

/* One more slab of the row has been seen; by the warp that deals. */
static __device__ void report(const struct constant &c, uint32_t row)
{
    uint32_t seen = 0;

    if (threadIdx.x == THREADS) {
        __threadfence();
        atomicAdd(seen_of(c) + row, 1);
        __threadfence(); /* nothing of this may follow what leave() counts */
        seen = atomicAdd(c.guard.work + WORD_SEEN, 1);
    }
    if (__shfl_sync(~0u, seen, 0) != c.scans - 1)
        return;
    __threadfence();
    for (uint32_t i = threadIdx.x - THREADS; i < (uint32_t)c.guard.rows; i += WARP)
        c.guard.tops[i] = __ldcg(tops_of(c) + i);
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x == THREADS)
        *(volatile uint32_t *)c.guard.flag = c.guard.value;
}

/* By the warp that deals, when no task is left. */
static __device__ void leave(const struct constant &c)
{
    uint32_t left = 0;

    if (threadIdx.x == THREADS) {
        __threadfence(); /* the numbers that this block has taken are counted before */
        left = atomicAdd(c.guard.work + WORD_LEFT, 1);
    }
    if (__shfl_sync(~0u, left, 0) != gridDim.x - 1)
        return;
    __threadfence();
    for (uint32_t i = threadIdx.x - THREADS; i < WORD_ROWS + 2 * (uint32_t)c.guard.rows; i += WARP)
        c.guard.work[i] = 0;
}

/* Number `task` to the desk. While the block's own last slab is being looked at, nobody may wait:
 * nothing is dealt then, and false returned. */
template <typename T>
static __device__ bool deal(const struct constant &c, const struct tail &tail, uint32_t task,
                            bool looking, struct desk &desk)
{
    bool dealt = true;

    if (threadIdx.x != THREADS)
        return true;
    if (task < c.scans) {
        deal_slab<T>(c, task, desk);
    } else if (looking) {
        desk.work = WORK_NOTHING;
        dealt = false;
    } else if (task < c.tasks) {
        deal_tile<T>(c, tail, task - c.scans, desk);
    } else {
        desk.work = WORK_END;
    }
    return dealt;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS + WARP, BLOCKS)
    constant_kernel(const __grid_constant__ struct constant c,
                    const __grid_constant__ struct tail tail)
{
    const bool dealer = threadIdx.x >= THREADS;
    __shared__ struct desk desks[2];
    uint32_t next = 0, seen_row = 0;
    bool looked = false;

    next_launch();
    if (threadIdx.x == THREADS)
        next = atomicAdd(c.guard.work + WORD_TAKEN, 1);
    if (dealer)
        deal<T>(c, tail, next, false, desks[0]);
    if (threadIdx.x == THREADS)
        next = atomicAdd(c.guard.work + WORD_TAKEN, 1);
    __syncthreads();
    for (int i = 0; desks[i].work != WORK_END; i ^= 1) {
        const struct desk &desk = desks[i];
        const bool looking = desk.work == WORK_LOOK;

        if (dealer) {
            if (looked)
                report(c, seen_row);
            if (deal<T>(c, tail, next, looking, desks[i ^ 1]) && threadIdx.x == THREADS)
                next = atomicAdd(c.guard.work + WORD_TAKEN, 1);
            seen_row = desk.row;
        } else {
            work_on<T>(c, tail, desk);
        }
        looked = looking;
        __syncthreads();
    }
    if (dealer)
        leave(c);
}

extern "C" uint64_t constant_work(int64_t rows)
{
    return (WORD_ROWS + 2 * (uint64_t)rows) * sizeof(uint32_t);
}

/* Tables of few segments come with the launch. */
static void carry(struct constant *c, const struct guard *guard, const struct tail *tail)
{
    c->carried = true;
    for (int i = 0; i < tail->n_segments; i++)
        c->segments[i] = guard->segments[i];
    for (int i = 0; i <= tail->n_segments; i++)
        c->tiles[i] = guard->tiles[i];
    for (int64_t i = 0; i < guard->n_counters; i++)
        c->counters[i] = guard->counters[i];
}

extern "C" int constant_cuda(cudaStream_t stream, const struct guard *guard,
                             const struct tail *tail, int32_t tiles, struct report *report)
{
    const int64_t bytes = guard->elements * (int64_t)dtype_size(tail->dtype);
    struct constant c = {};
    int device, blocks;
    int r = CUDA(report, cudaGetDevice(&device));

    if (r == 0)
        r = CUDA(report, cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device));
    if (r < 0)
        return r;
    c.guard = *guard;
    c.slabs = (uint32_t)((bytes + SLAB - 1) / SLAB);
    c.scans = (uint32_t)guard->rows * c.slabs;
    c.tasks = c.scans + (uint32_t)tiles;
    if (guard->segments)
        carry(&c, guard, tail);
    blocks *= BLOCKS;
    blocks = c.tasks < (uint32_t)blocks ? (int)c.tasks : blocks;
    WITH_DTYPE(tail->dtype, T,
               (constant_kernel<T><<<(unsigned)blocks, THREADS + WARP, 0, stream>>>(c, *tail)));
    return CUDA_LAUNCHED(report);
}
