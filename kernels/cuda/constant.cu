/*
 * constant.cu - a proven constant: the guard's look at the input and the fill, in one kernel
 *
 * The bits of a float without its sign, taken as an integer, grow with the magnitude, and NaN lies
 * above infinity, above everything: one integer maximum answers both "below the bound?" and
 * "finite?". A maximum does not depend on the order, so blocks meet in an atomic.
 *
 * Blocks take numbered tasks in turn: slabs of the input first, tiles of the result behind them. A
 * tile waits until all of its row has been seen. It can: whoever holds a lower number runs already,
 * and waits for nobody. So the last slabs overlap with the first tiles, and nothing is launched or
 * told to the host in between. Which block has which number does not matter to any bit.
 *
 * A row that is the constant, or NaN throughout, is written here; one that the guard stops is left
 * to the full path. The block that comes last to know its row tells the host all maxima, and leaves
 * the work space as it was: zeros.
 *
 * Under a mask the constant is one of two numbers, so that nothing but Philox and the writing is
 * left. No tile crosses a row.
 */
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tail.cuh"

#define THREADS 256
#define BLOCKS  5                      /* of a multiprocessor: 48 registers a thread */
#define LOADS   8                      /* of 16 bytes, by a thread, at once */
#define SLAB    (THREADS * LOADS * 16) /* bytes of a row */

/* Words of the work space. */
enum word { WORD_TAKEN, WORD_KNOWN, WORD_ROWS };

struct constant {
    struct guard guard;
    uint32_t slabs; /* of a row */
    uint32_t scans; /* of all rows */
    uint32_t tasks;
};

static __device__ __forceinline__ uint32_t *tops_of(const struct constant &c)
{
    return c.guard.work + WORD_ROWS;
}

/* How many slabs of each row have been seen. */
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

/* One more that knows what it needs. True for the last of all. */
static __device__ __forceinline__ bool arrive(const struct constant &c)
{
    __threadfence();
    return atomicAdd(c.guard.work + WORD_KNOWN, 1) == c.tasks - 1;
}

/* By all threads of the block that arrived last. */
static __device__ void finish(const struct constant &c)
{
    __threadfence();
    for (uint32_t row = threadIdx.x; row < (uint32_t)c.guard.rows; row += THREADS) {
        c.guard.tops[row] = __ldcg(tops_of(c) + row);
        tops_of(c)[row] = 0;
        seen_of(c)[row] = 0;
    }
    if (threadIdx.x == 0)
        c.guard.work[WORD_TAKEN] = c.guard.work[WORD_KNOWN] = 0;
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

template <typename T> static __device__ void scan(const struct constant &c, uint32_t task)
{
    constexpr uint32_t PER = SLAB / sizeof(T);
    const uint32_t row = task / c.slabs, slab = task - row * c.slabs;
    const int64_t left = c.guard.elements - (int64_t)slab * PER;
    const T *from = (const T *)c.guard.x + row * c.guard.elements + (int64_t)slab * PER;
    __shared__ bool last;
    uint32_t top = look(from, (uint32_t)(left < PER ? left : PER));

    if (threadIdx.x % WARP == 0)
        atomicMax(tops_of(c) + row, top);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(seen_of(c) + row, 1);
        last = arrive(c);
    }
    __syncthreads();
    if (last)
        finish(c);
}

/* Where a tile is, of which row. */
struct place {
    const struct segment &seg;
    int s;
    int64_t row; /* of the segment */
    void *to;    /* the tile's first element */
    int64_t e;   /* its place in the row */
    uint32_t n;
    float value;
};

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
static __device__ void fill_masked(const struct tail &tail, const struct point &point,
                                   const struct place &place)
{
    constexpr uint32_t PER = 16 / sizeof(T), FOURS = PER / 4;
    const uint64_t seed = place.seg.seed;
    const uint64_t counter = tail.counters[point.counter * tail.counter_pitch + place.s];
    struct stream stream = stream_at(tail, place.seg, place.row, (uint32_t)place.e);
    const uint32_t step = THREADS * FOURS / stream.threads;
    const uint32_t step_rest = THREADS * FOURS - step * stream.threads;
    T kept, dropped;

    stream = stream_further(stream, threadIdx.x * FOURS);
    round_to(dropout_masked(place.value, true, point.scale), &kept);
    round_to(dropout_masked(place.value, false, point.scale), &dropped);
#pragma unroll 2
    for (uint32_t v = threadIdx.x; v < place.n / PER; v += THREADS) {
        __align__(16) T all[PER];

#pragma unroll
        for (uint32_t f = 0; f < FOURS; f++) {
            uint4 words = dropout_words(seed, counter + stream.turn, stream.thread + f);

#pragma unroll
            for (int k = 0; k < 4; k++)
                all[4 * f + k] = dropout_word(words, k) < point.keep_below ? kept : dropped;
        }
        __stcs((uint4 *)place.to + v, *(const uint4 *)all);
        stream.turn += step;
        stream.thread += step_rest;
        if (stream.thread >= stream.threads) {
            stream.thread -= stream.threads;
            stream.turn++;
        }
    }
}

/* Any masks, any sizes, element by element. */
template <typename T>
static __device__ void fill_each(const struct tail &tail, const struct place &place)
{
    const int64_t size = place.seg.job_rows * tail.elements;
    const int64_t first = (place.seg.job_row + place.row) * tail.elements + place.e;

    for (uint32_t i = threadIdx.x; i < place.n; i += THREADS) {
        float v = place.value;

        for (int p = 0; p < tail.n_points; p++) {
            const struct point &point = tail.points[p];
            uint64_t counter = tail.counters[point.counter * tail.counter_pitch + place.s];

            if (point.zero)
                v = __fmul_rn(v, 0.0f);
            else
                v = dropout_masked(
                    v, dropout_one(place.seg.seed, counter, size, first + i) < point.keep_below,
                    point.scale);
        }
        round_to(v, (T *)place.to + i);
    }
}

/* Whole vectors, that lie so in memory and in the mask. */
template <typename T>
static __device__ __forceinline__ bool in_vectors(const struct tail &tail,
                                                  const struct place &place)
{
    constexpr int64_t PER = 16 / sizeof(T);
    const int64_t first = (place.seg.job_row + place.row) * tail.elements + place.e;

    return (uintptr_t)place.to % 16 == 0 && tail.elements % 4 == 0 && first % PER == 0 &&
           place.n % PER == 0 && tail.elements <= UINT32_MAX;
}

template <typename T>
static __device__ void write_tile(const struct tail &tail, const struct place &place)
{
    if (!place.seg.train || tail.n_points == 0 || isnan(place.value))
        fill((T *)place.to, place.n, place.value); /* NaN is NaN under any mask */
    else if (tail.n_points == 1 && !tail.points[0].zero && in_vectors<T>(tail, place))
        fill_masked<T>(tail, tail.points[0], place);
    else
        fill_each<T>(tail, place);
}

/* Waits until all of the row has been seen, and tells the others of the block its maximum. */
static __device__ uint32_t row_top(const struct constant &c, int64_t row)
{
    __shared__ uint32_t top;
    __shared__ bool last;

    if (threadIdx.x == 0) {
        while (acquire(seen_of(c) + row) < c.slabs)
            __nanosleep(100);
        top = __ldcg(tops_of(c) + row);
        last = arrive(c);
    }
    __syncthreads();
    if (last)
        finish(c);
    return top;
}

template <typename T>
static __device__ void tile_of(const struct constant &c, const struct tail &tail, uint32_t tile)
{
    const int s = find_segment(tail.tiles, tail.n_segments, (int32_t)tile);
    const struct segment seg = tail.segments[s];
    const uint32_t tiles = (uint32_t)((tail.elements + tail.tile - 1) / tail.tile);
    const uint32_t at = tile - (uint32_t)tail.tiles[s], row = at / tiles;
    const int64_t e = (int64_t)(at - row * tiles) * tail.tile, left = tail.elements - e;
    const uint32_t top = row_top(c, seg.row + row);
    struct place place = {seg, s, row, NULL, e, 0, 0};

    if (top < tail.constant.bound)
        place.value = tail.constant.value;
    else if (top >= INFINITE && tail.constant.nonfinite_spreads)
        place.value = __uint_as_float(0x7fc00000);
    else
        return;
    place.to = (T *)seg.y + (seg.out_row + row) * tail.elements + e;
    place.n = (uint32_t)(left < tail.tile ? left : tail.tile);
    write_tile<T>(tail, place);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    constant_kernel(const __grid_constant__ struct constant c,
                    const __grid_constant__ struct tail tail)
{
    __shared__ uint32_t taken;

    next_launch();
    if (threadIdx.x == 0)
        taken = atomicAdd(c.guard.work + WORD_TAKEN, 1);
    __syncthreads();
    if (taken < c.scans)
        scan<T>(c, taken);
    else
        tile_of<T>(c, tail, taken - c.scans);
}

extern "C" uint64_t constant_work(int64_t rows)
{
    return (WORD_ROWS + 2 * (uint64_t)rows) * sizeof(uint32_t);
}

extern "C" int constant_cuda(cudaStream_t stream, const struct guard *guard,
                             const struct tail *tail, int32_t tiles, struct report *report)
{
    const int64_t bytes = guard->elements * (int64_t)dtype_size(tail->dtype);
    struct constant c = {*guard, (uint32_t)((bytes + SLAB - 1) / SLAB), 0, 0};

    c.scans = (uint32_t)guard->rows * c.slabs;
    c.tasks = c.scans + (uint32_t)tiles;
    WITH_DTYPE(tail->dtype, T, (constant_kernel<T><<<c.tasks, THREADS, 0, stream>>>(c, *tail)));
    return CUDA_LAUNCHED(report);
}
