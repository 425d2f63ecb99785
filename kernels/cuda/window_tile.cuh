/*
 * window_tile.cuh - a tile of window.cu: its inputs on their way into shared memory, its products
 *
 * The threads that fetch write pairs of halves, the threads that multiply read them; window.cu says
 * why they lie where they lie.
 */
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tail.cuh"
#include "kernels/cuda/window.h"

/* Of a block. */
#define FETCHERS    128
#define SENDERS     256 /* one of their warps deals, three handle moments */
#define NORMERS     2
#define MULTIPLIERS (WINDOW_WARPS * WARP)
#define THREADS     (FETCHERS + SENDERS + MULTIPLIERS)
/* The first thread of each. The lower a warp's number, the sooner it issues: those that multiply
 * are what the others wait for. */
#define MULTIPLIERS_AT 0
#define FETCHERS_AT    MULTIPLIERS
#define SENDERS_AT     (MULTIPLIERS + FETCHERS)
#define DRAINS         (SENDERS / WARP - 2 - NORMERS)

#define BUFFERS    2
#define JOBS       3 /* dealt, and their moments not yet published */
#define SLOTS      5 /* tiles of results that a block holds */
#define HALF_W     32
#define BLOCKS     2  /* of 8 columns that a warp has */
#define LINE_PITCH 68 /* floats of a line that is a run of its own */
/* Of a channel at a depth, whose lines are runs or make one. With the latter, stores of two floats
 * meet a bank twice. */
#define LINES_PITCH (WINDOW_TILE_H * LINE_PITCH)
#define RUN_PITCH   260
#define SLOT        (WINDOW_TILE_D * WINDOW_OUTS * LINES_PITCH)

#define TOP       14        /* exponent of a tile's largest scaled input */
#define PLAIN     7         /* the scale that most tiles take */
#define PLAIN_LOW (127 - 7) /* exponents of the largest input for which it does */
#define PLAIN_END (127 + 8)
#define HOT       -80 /* exponents from which sums surely fit float32 when unscaled */

/* The inputs under a tile: arrays of pairs of halves, the low ones behind all high ones. */
template <int C> struct layout {
    static constexpr int pairs = WINDOW_ARRAYS(C) * WINDOW_ARRAY;
};

/* Words of a buffer. */
template <int C, int HALVES> constexpr int buffer_size = (layout<C>::pairs * HALVES + 3) / 4 * 4;

struct tile {
    int row;
    int index;          /* of the row's tiles */
    int at[3], size[3]; /* outputs */
    int exponent;       /* inputs were scaled by 2^exponent */

    __device__ __forceinline__ int outputs(void) const
    {
        return size[0] * size[1] * size[2];
    }
};

static __device__ __forceinline__ struct tile tile_of(const struct window_run &run, int row,
                                                      int index)
{
    struct tile tile;
    int rest = index;

    tile.row = row;
    tile.index = index;
    tile.at[2] = 0;
    if (run.tiles[2] > 1) {
        tile.at[2] = rest % run.tiles[2] * WINDOW_TILE_W;
        rest /= run.tiles[2];
    }
    tile.at[0] = rest / run.tiles[1];
    tile.at[1] = (rest - tile.at[0] * run.tiles[1]) * WINDOW_TILE_H;
    tile.at[0] *= WINDOW_TILE_D;
    tile.size[0] = min(WINDOW_TILE_D, run.out[0] - tile.at[0]);
    tile.size[1] = min(WINDOW_TILE_H, run.out[1] - tile.at[1]);
    tile.size[2] = min(WINDOW_TILE_W, run.out[2] - tile.at[2]);
    tile.exponent = 0;
    return tile;
}

/* What a block does in a turn. */
struct job {
    struct tile tile; /* row < 0: no more */
    int set;          /* of 16 outputs */
    int slot, round;  /* of the results, and of the slots; slot < 0: moments alone are wanted */
    bool again;       /* moments are known */
    bool hot;         /* sums may be beyond float32 when their scale is undone */
};

/* Inputs */

/* Halves of two numbers, the first in the low bits. */
static __device__ __forceinline__ uint32_t pair_of(float a, float b)
{
    const __half2 both = __floats2half2_rn(a, b);

    return *(const uint32_t *)&both;
}

static __device__ __forceinline__ float2 numbers_of(uint32_t pair)
{
    return __half22float2(*(const __half2 *)&pair);
}

static __device__ __forceinline__ int fetcher(void)
{
    return (int)threadIdx.x - FETCHERS_AT;
}

/* What a thread fetches of a line: one column of every channel and plane. */
template <int C> struct column {
    float v[C][WINDOW_PLANES];
};

/*
 * Where the planes under a tile lie, and which of its inputs there are. Those that are not are
 * fetched from the nearest that is, which does no harm where nothing is padded: no output needs
 * them.
 */
template <typename T> struct planes {
    const T *from;
    int at[3], in[3];
    uint32_t channel, plane[WINDOW_PLANES]; /* elements to the next, and from the first */
    bool padded;

    __device__ __forceinline__ void find(const struct window_run &run, const struct tile &tile)
    {
        from = (const T *)run.x + (int64_t)tile.row * run.in_elements;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            at[i] = tile.at[i] - run.padding[i];
            in[i] = run.in[i];
        }
        /* Or it is all formed again for every load, or kept from one tile to the next. */
        asm volatile("" : "+l"(from), "+r"(at[0]), "+r"(at[1]), "+r"(at[2]));
        channel = in[0] * in[1] * in[2];
        padded = run.padded;
#pragma unroll
        for (int p = 0; p < WINDOW_PLANES; p++)
            plane[p] = min(max(at[0] + p, 0), in[0] - 1) * in[1] * in[2];
    }

    template <int C>
    __device__ __forceinline__ void load(int line, int place, struct column<C> &column) const
    {
        const int h = at[1] + line, w = at[2] + place;
        const uint32_t first = min(max(h, 0), in[1] - 1) * in[2] + min(max(w, 0), in[2] - 1);

#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int p = 0; p < WINDOW_PLANES; p++)
                column.v[c][p] = widened(__ldg(from + (uint32_t)(c * channel + plane[p] + first)));
        if (padded)
#pragma unroll
            for (int p = 0; p < WINDOW_PLANES; p++)
                if ((unsigned)h >= (unsigned)in[1] || (unsigned)w >= (unsigned)in[2] ||
                    (unsigned)(at[0] + p) >= (unsigned)in[0])
#pragma unroll
                    for (int c = 0; c < C; c++)
                        column.v[c][p] = 0;
    }
};

/* Scales, splits and stores it; the largest |x| so far. */
template <int C, int HALVES>
static __device__ __forceinline__ float store_column(struct column<C> &column, float top,
                                                     float scale, uint32_t *pairs)
{
    constexpr int last = WINDOW_PLANES - 1;

#pragma unroll
    for (int p = 0; p < WINDOW_PLANES; p++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            top = fmaxf(top, fabsf(column.v[c][p]));
            column.v[c][p] *= scale;
        }
#pragma unroll
    for (int a = 0; a < WINDOW_ARRAYS(C); a++)
#pragma unroll
        for (int p = 0; p < WINDOW_PLANES; p++) {
            const int at = a * WINDOW_ARRAY + p * WINDOW_PLANE;
            const float one = column.v[2 * a][p];
            const float other = 2 * a + 1 < C ? column.v[min(2 * a + 1, C - 1)][p]
                                : p < last    ? column.v[2 * a][min(p + 1, last)]
                                              : 0.0f;
            const uint32_t high = pair_of(one, other);

            pairs[at] = high;
            if constexpr (HALVES == 2) {
                const float2 rounded = numbers_of(high);

                pairs[at + layout<C>::pairs] = pair_of(one - rounded.x, other - rounded.y);
            }
        }
    return top;
}

/* A thread's share of a tile's inputs, but for the last columns: some lines are asked for early, as
 * many as registers hold. */
template <int C> struct share {
    static constexpr int STEP = FETCHERS / WINDOW_TILE_W, LINES = WINDOW_LINES / STEP, EARLY = 2;
    static_assert(WINDOW_LINES % STEP == 0 && LINES - EARLY <= EARLY, "lines");
    struct column<C> some[EARLY];

    template <typename T, int FIRST, int N>
    __device__ __forceinline__ void load_lines(const struct planes<T> &planes)
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            planes.load(fetcher() / WINDOW_TILE_W + (FIRST + i) * STEP, fetcher() % WINDOW_TILE_W,
                        some[i]);
    }

    template <int HALVES, int FIRST, int N>
    __device__ __forceinline__ float store_lines(float top, float scale, uint32_t *pairs)
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            top = store_column<C, HALVES>(some[i], top, scale,
                                          pairs + (FIRST + i) * STEP * WINDOW_COLUMNS);
        return top;
    }

    template <typename T>
    __device__ __forceinline__ void load(const struct window_run &run, const struct tile &tile)
    {
        struct planes<T> planes;

        planes.find(run, tile);
        load_lines<T, 0, EARLY>(planes);
    }

    /* And loads what is left. */
    template <typename T, int HALVES>
    __device__ __forceinline__ float store(const struct window_run &run, const struct tile &tile,
                                           float scale, uint32_t *pairs)
    {
        struct planes<T> planes;
        float top;

        pairs += fetcher() / WINDOW_TILE_W * WINDOW_COLUMNS + fetcher() % WINDOW_TILE_W;
        top = store_lines<HALVES, 0, EARLY>(0, scale, pairs);
        planes.find(run, tile);
        load_lines<T, EARLY, LINES - EARLY>(planes);
        return store_lines<HALVES, EARLY, LINES - EARLY>(top, scale, pairs);
    }
};

/* The last columns, which outputs of a full tile need. */
template <typename T, int C, int HALVES>
static __device__ __forceinline__ float take_edge(const struct window_run &run,
                                                  const struct tile &tile, float top, float scale,
                                                  uint32_t *pairs)
{
    struct planes<T> planes;
    struct column<C> one;

    if (tile.size[2] <= WINDOW_TILE_W - (WINDOW - 1))
        return top;
    planes.find(run, tile);
#pragma unroll 1
    for (int i = fetcher(); i < WINDOW_LINES * (WINDOW - 1); i += FETCHERS) {
        const int line = i / (WINDOW - 1), edge = WINDOW_TILE_W + i % (WINDOW - 1);

        planes.load(line, edge, one);
        top = store_column<C, HALVES>(one, top, scale, pairs + line * WINDOW_COLUMNS + edge);
    }
    return top;
}

/* Threads begin with 96 registers each. Each warpgroup as a whole. */
static __device__ __forceinline__ void registers_to_fetch(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
}

static __device__ __forceinline__ void registers_to_send(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
}

static __device__ __forceinline__ void registers_to_multiply(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
}

/* The threads that fetch wait for each other, and learn what any of them says. */
static __device__ __forceinline__ bool any_fetcher(bool v)
{
    uint32_t any;

    asm volatile("{\n.reg .pred mine, all;\n"
                 "setp.ne.b32 mine, %1, 0;\n"
                 "bar.red.or.pred all, 1, 128, mine;\n"
                 "selp.b32 %0, 1, 0, all;\n}"
                 : "=r"(any)
                 : "r"((uint32_t)v)
                 : "memory");
    return any;
}

/* What those that fetch agree upon. */
struct agreed {
    uint32_t top;
    uint32_t large[3]; /* for this turn, the next, and the one before, which some may still read */
};

/*
 * From registers into shared memory. Most tiles are of moderate size and take one scale without
 * being looked at first. The others are read again with the scale that they need. NaN and infinity
 * spoil every group anyway. Returns the scale's exponent.
 */
template <typename T, int C, int HALVES>
static __device__ __forceinline__ int store_tile(const struct window_run &run,
                                                 const struct tile &tile, struct share<C> &share,
                                                 int turn, struct agreed &agreed, uint32_t *pairs)
{
    float scale = (float)(1 << PLAIN);
    int exponent = PLAIN;

#pragma unroll 1
    for (;;) { /* twice at most */
        const float most = take_edge<T, C, HALVES>(
            run, tile, share.template store<T, HALVES>(run, tile, scale, pairs), scale, pairs);
        uint32_t top = __float_as_uint(most);

        if (top >> 23 >= PLAIN_END)
            atomicOr(&agreed.large[turn % 3], 1);
        if (fetcher() == 0)
            agreed.large[(turn + 1) % 3] = 0;

        const bool some = any_fetcher(top >> 23 >= PLAIN_LOW);

        if ((some && !agreed.large[turn % 3]) || exponent != PLAIN)
            return exponent;
        if (fetcher() == 0)
            agreed.top = 0;
        group_sync<1>(FETCHERS);
        top = warp_max(top);
        if (threadIdx.x % WARP == 0)
            atomicMax(&agreed.top, top);
        group_sync<1>(FETCHERS);
        top = agreed.top >> 23;
        exponent = top == 255 ? 0 : max(-126, min(126, TOP + 127 - (int)top));
        if (exponent == PLAIN)
            return exponent;
        scale = power(exponent);
        share.template load<T>(run, tile);
    }
}

/* Products */

/* d += or = a b. Volatile keeps the order of products, in which none waits for the one before. */
static __device__ __forceinline__ void multiply(float (&d)[4], const uint4 &a,
                                                const uint32_t (&b)[2], bool accumulate)
{
    if (accumulate)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%10, %10, %10, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

/* An address that the compiler takes as it is, instead of forming it again for every access; what
 * is read from it is not read earlier. */
static __device__ __forceinline__ uint32_t kept_address(uint32_t address)
{
    asm volatile("" : "+r"(address)::"memory");
    return address;
}

/* What a lane keeps from tile to tile: its weights. */
template <int C, int HALVES> struct operands {
    uint4 left[WINDOW][WINDOW_STEPS(C)][HALVES];

    __device__ __forceinline__ void take(const struct window_run &run, int set)
    {
        constexpr int STEPS = WINDOW_STEPS(C);
        const uint4 *from = run.weights + set * WINDOW_WEIGHTS(C, HALVES) + threadIdx.x % WARP;

#pragma unroll
        for (int kh = 0; kh < WINDOW; kh++)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    left[kh][s][half] = __ldg(from + ((kh * STEPS + s) * HALVES + half) * WARP);
    }
};

static __device__ __forceinline__ uint32_t load_pair(uint32_t address)
{
    uint32_t pair;

    asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
    return pair;
}

/*
 * A line of inputs is multiplied with every line of the window that has an output for it in the
 * tile. The tensor core truncates its sums: only what the window's first line gives stays there,
 * the others begin at zero and are added by float32 units. What is small comes first.
 */
template <int C, int HALVES>
static __device__ __forceinline__ void
multiply_line(int line, float (&sum)[WINDOW][BLOCKS][4], const struct operands<C, HALVES> &operands,
              const uint32_t (&right)[WINDOW_STEPS(C)][HALVES][BLOCKS][2])
{
    constexpr int STEPS = WINDOW_STEPS(C), FIRST = HALVES == 2 ? 0 : 2;
    float d[WINDOW][BLOCKS][4];

#pragma unroll
    for (int p = FIRST; p < 3; p++) /* low high, high low, high high */
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int kh = WINDOW - 1; kh >= 0; kh--)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    if (line < kh || line - kh >= WINDOW_TILE_H)
                        continue;
                    const int out = (line - kh + WINDOW) % WINDOW;
                    const bool begins = p == FIRST && s == 0;

                    if (kh == 0)
                        multiply(sum[out][b], operands.left[kh][s][p == 0], right[s][p == 1][b],
                                 !begins);
                    else if (HALVES == 1) /* 16-bit products have 11 bits anyway */
                        multiply(sum[out][b], operands.left[kh][s][0], right[s][0][b], true);
                    else
                        multiply(d[kh][b], operands.left[kh][s][p == 0], right[s][p == 1][b],
                                 !begins);
                }
    if constexpr (HALVES == 2)
#pragma unroll
        for (int kh = WINDOW - 1; kh > 0; kh--)
#pragma unroll
            for (int i = 0; i < BLOCKS * 4; i++)
                if (line >= kh && line - kh < WINDOW_TILE_H)
                    sum[(line - kh + WINDOW) % WINDOW][i / 4][i % 4] += d[kh][i / 4][i % 4];
}

/*
 * Walks a warp down the lines of its depth, from an address in shared memory; offsets are those of
 * the lane's pairs, every fourth. `end` takes the sums of each output line: sum[j][2 c + k] is
 * channel lane / 4 + 8 c, column 8 (lane % 4) + 4 k + j of the warp's.
 */
template <int C, int HALVES, typename END>
static __device__ __forceinline__ void walk(const struct operands<C, HALVES> &operands,
                                            uint32_t from, const uint16_t *offsets, END &end)
{
    constexpr int STEPS = WINDOW_STEPS(C);
    float sum[WINDOW][BLOCKS][4];
    uint32_t at[2 * STEPS];

#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
        at[i] = kept_address(from + offsets[4 * i] * 4u);
#pragma unroll
    for (int line = 0; line < WINDOW_LINES; line++) {
        uint32_t right[STEPS][HALVES][BLOCKS][2];

#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        right[s][half][b][i] =
                            load_pair(at[2 * s + i] +
                                      (half * layout<C>::pairs + line * WINDOW_COLUMNS + b) * 4);
        multiply_line<C, HALVES>(line, sum, operands, right);
        if (line >= WINDOW - 1)
            end.line(line - (WINDOW - 1), sum[(line + 1) % WINDOW]);
    }
}

/* A warp has every other pair of columns of half a line, at one depth. */
struct place {
    int depth, first; /* of the tile: first column */
    int columns;      /* from there to the end of the half, 0 to 32 */

    /* A pair is in if its first column is. */
    __device__ __forceinline__ int outputs(const struct tile &tile) const
    {
        return (columns / 4 * 2 + min(columns % 4, 2)) * tile.size[1];
    }
};

static __device__ __forceinline__ struct place place_of(const struct tile &tile, int warp)
{
    const int half = warp / 2 % 2, first = half * HALF_W + warp % 2 * 2;
    struct place place = {warp / 4, first, 0};

    if (place.depth < tile.size[0])
        place.columns = max(0, min(half * HALF_W + HALF_W, tile.size[2]) - first);
    return place;
}
