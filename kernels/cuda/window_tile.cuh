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

#define THREADS    128 /* of a warpgroup: those that fetch come first, then those that multiply */
#define WARPS      WINDOW_WARPS
#define PER_SM     2
#define BUFFERS    2
#define HALF_W     32
#define BLOCKS     4                         /* of 8 columns that a warp has */
#define LINE_PITCH 72                        /* floats of a line that is a run of its own */
#define RUN_PITCH  140                       /* of a channel on its way out: two lines */
#define RUN        (WINDOW_OUTS * RUN_PITCH) /* of a pair of warps */
#define RUNS       (WINDOW_TILE_D * RUN)
#define TOP        14        /* exponent of a tile's largest scaled input */
#define PLAIN      7         /* the scale that most tiles take */
#define PLAIN_LOW  (127 - 7) /* exponents of the largest input for which it does */
#define PLAIN_END  (127 + 8)
#define HOT        -80 /* exponents from which sums surely fit float32 when unscaled */

/* The inputs under a tile: arrays of pairs of halves, the low ones behind all high ones. */
template <int C> struct layout {
    static constexpr int pairs = WINDOW_ARRAYS(C) * WINDOW_ARRAY;
};

/* Words of a buffer. */
template <int C, int HALVES> constexpr int buffer_size = (layout<C>::pairs * HALVES + 3) / 4 * 4;

struct tile {
    int64_t row;
    int index;          /* of the row's tiles */
    int at[3], size[3]; /* outputs */
    int exponent;       /* inputs were scaled by 2^exponent */

    __device__ __forceinline__ int outputs(void) const
    {
        return size[0] * size[1] * size[2];
    }
};

static __device__ __forceinline__ struct tile tile_of(const struct window_run &run, int64_t i)
{
    struct tile tile;
    int rest;

    tile.row = quotient(i, run.tiles_all);
    tile.index = rest = (int)(i - tile.row * run.tiles_all);
    tile.at[2] = rest % run.tiles[2] * WINDOW_TILE_W;
    rest /= run.tiles[2];
    tile.at[1] = rest % run.tiles[1] * WINDOW_TILE_H;
    tile.at[0] = rest / run.tiles[1] * WINDOW_TILE_D;
    tile.size[0] = min(WINDOW_TILE_D, run.out[0] - tile.at[0]);
    tile.size[1] = min(WINDOW_TILE_H, run.out[1] - tile.at[1]);
    tile.size[2] = min(WINDOW_TILE_W, run.out[2] - tile.at[2]);
    tile.exponent = 0;
    return tile;
}

/* What a block shares beside its buffers. */
struct shared {
    uint64_t full[BUFFERS], empty[BUFFERS];
    struct tile tiles[BUFFERS];      /* row < 0: no more */
    struct window_end ends[BUFFERS]; /* second pass */
    int64_t next;
    uint32_t top;
};

/* 2^e as a double, which holds any sum of exponents here. */
static __device__ __forceinline__ double power_of_two(int e)
{
    return __hiloint2double((e + 1023) << 20, 0);
}

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

/* One column of the tile's inputs: every channel and plane of a line. */
template <typename T, int C>
static __device__ __forceinline__ void load_column(const struct window_run &run, const T *from,
                                                   const struct tile &tile, int line, int column,
                                                   float (&v)[C][WINDOW_PLANES])
{
    const int d = tile.at[0] - run.padding[0], h = tile.at[1] - run.padding[1] + line;
    const int w = tile.at[2] - run.padding[2] + column;
    const bool inside = (unsigned)h < (unsigned)run.in[1] && (unsigned)w < (unsigned)run.in[2];
    const int area = run.in[1] * run.in[2], channel = run.in[0] * area;
    const uint32_t at = inside ? h * run.in[2] + w : 0;

#pragma unroll
    for (int p = 0; p < WINDOW_PLANES; p++) {
        const bool there = (unsigned)(d + p) < (unsigned)run.in[0]; /* of all threads */

#pragma unroll
        for (int c = 0; c < C; c++) {
            const T *plane = from + c * channel + (there ? d + p : 0) * area;

            v[c][p] = inside && there ? widened(__ldg(plane + at)) : 0.0f;
        }
    }
}

/* Scales, splits and stores it; the largest |x| so far. */
template <int C, int HALVES>
static __device__ __forceinline__ float store_column(float (&v)[C][WINDOW_PLANES], float top,
                                                     float scale, uint32_t *pairs)
{
#pragma unroll
    for (int p = 0; p < WINDOW_PLANES; p++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            top = fmaxf(top, fabsf(v[c][p]));
            v[c][p] *= scale;
        }
#pragma unroll
    for (int a = 0; a < WINDOW_ARRAYS(C); a++)
#pragma unroll
        for (int p = 0; p < WINDOW_PLANES; p++) {
            constexpr int last = WINDOW_PLANES - 1;
            const int at = a * WINDOW_ARRAY + p * WINDOW_PLANE;
            const float one = v[2 * a][p];
            const float other = 2 * a + 1 < C ? v[min(2 * a + 1, C - 1)][p]
                                : p < last    ? v[2 * a][min(p + 1, last)]
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

/* All inputs of the tile, scaled; the largest of them as this thread saw it. */
template <typename T, int C, int HALVES>
static __device__ __forceinline__ float read_tile(const struct window_run &run, const T *from,
                                                  const struct tile &tile, float scale,
                                                  uint32_t *pairs)
{
    /* Columns that a thread fetches before it waits for them: as many as registers hold. */
    constexpr int STEP = THREADS / WINDOW_TILE_W, AT_ONCE = HALVES == 2 ? 3 : 2;
    const int column = threadIdx.x % WINDOW_TILE_W, first = threadIdx.x / WINDOW_TILE_W;
    float v[AT_ONCE][C][WINDOW_PLANES], top = 0;

#pragma unroll 1 /* or all columns would be fetched first, into registers not there */
    for (int line = first; line < WINDOW_LINES; line += AT_ONCE * STEP) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (line + i * STEP < WINDOW_LINES)
                load_column<T, C>(run, from, tile, line + i * STEP, column, v[i]);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (line + i * STEP < WINDOW_LINES)
                top = store_column<C, HALVES>(v[i], top, scale,
                                              pairs + (line + i * STEP) * WINDOW_COLUMNS + column);
    }
    if (tile.size[2] > WINDOW_TILE_W - (WINDOW - 1)) /* or no output needs them */
        for (int i = threadIdx.x; i < WINDOW_LINES * (WINDOW - 1); i += THREADS) {
            const int line = i / (WINDOW - 1), edge = WINDOW_TILE_W + i % (WINDOW - 1);

            load_column<T, C>(run, from, tile, line, edge, v[0]);
            top = store_column<C, HALVES>(v[0], top, scale, pairs + line * WINDOW_COLUMNS + edge);
        }
    return top;
}

/* Of 256 threads, half give registers to the other half. Each warpgroup as a whole. */
static __device__ __forceinline__ void registers_to_fetch(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
}

static __device__ __forceinline__ void registers_to_multiply(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
}

/* The threads that fetch wait for each other, and learn what any of them says. */
static __device__ __forceinline__ bool any_fetcher(bool v)
{
    uint32_t any;

    asm volatile("{\n.reg .pred mine, all;\n"
                 "setp.ne.b32 mine, %1, 0;\n"
                 "bar.red.or.pred all, 3, 128, mine;\n"
                 "selp.b32 %0, 1, 0, all;\n}"
                 : "=r"(any)
                 : "r"((uint32_t)v)
                 : "memory");
    return any;
}

/*
 * Most tiles are of moderate size and take one scale without being looked at first. The others are
 * read again with the scale that they need. NaN and infinity spoil every group anyway.
 */
template <typename T, int C, int HALVES>
static __device__ __forceinline__ void take_tile(const struct window_run &run, struct tile &tile,
                                                 uint32_t *pairs, uint32_t *shared_top)
{
    const T *from = (const T *)run.x + tile.row * run.in_elements;
    float scale = (float)(1 << PLAIN);

    asm("" : "+l"(from)); /* or the product is formed again for every load */

    tile.exponent = PLAIN;
    for (;;) { /* twice at most */
        uint32_t top = __float_as_uint(read_tile<T, C, HALVES>(run, from, tile, scale, pairs));
        const bool some = any_fetcher(top >> 23 >= PLAIN_LOW);
        const bool large = any_fetcher(top >> 23 >= PLAIN_END);

        if ((some && !large) || tile.exponent != PLAIN)
            return;
        if (threadIdx.x == 0)
            *shared_top = 0;
        group_sync<3>(THREADS);
        top = warp_max(top);
        if (threadIdx.x % WARP == 0)
            atomicMax(shared_top, top);
        group_sync<3>(THREADS);
        top = *shared_top >> 23;
        tile.exponent = top == 255 ? 0 : max(-126, min(126, TOP + 127 - (int)top));
        if (tile.exponent == PLAIN)
            return;
        scale = power(tile.exponent);
    }
}

/* Products */

/* Volatile keeps the order of products, in which none waits for the one before it. */
static __device__ __forceinline__ void multiply(float (&d)[4], const uint4 &a,
                                                const uint32_t (&b)[2])
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
}

/*
 * A line's products for the outputs of one line. The tensor core truncates its sums: only the first
 * line of a window stays there, the others start from zero and are added by float32 units. What is
 * small comes first.
 */
template <int STEPS, int HALVES>
static __device__ __forceinline__ void
multiply_line(float (&sum)[BLOCKS][4], bool first, const uint4 (&left)[STEPS][HALVES],
              const uint32_t (&right)[STEPS][HALVES][BLOCKS][2])
{
    float d[BLOCKS][4] = {};

#pragma unroll
    for (int p = HALVES == 2 ? 0 : 2; p < 3; p++) /* low high, high low, high high */
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                multiply(first || HALVES == 1 ? sum[b] : d[b], left[s][p == 0],
                         right[s][p == 1][b]);
    if (first || HALVES == 1) /* 16-bit products have 11 bits anyway */
        return;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            sum[b][k] += d[b][k];
}

/* What a lane keeps from tile to tile: its weights, and where its pairs lie. */
template <int C, int HALVES> struct operands {
    uint4 left[WINDOW][WINDOW_STEPS(C)][HALVES];
    uint32_t offsets[2 * WINDOW_STEPS(C)];

    __device__ __forceinline__ void take(const struct window_run &run)
    {
        constexpr int STEPS = WINDOW_STEPS(C);
        const int lane = threadIdx.x % WARP;
        const uint4 *from = run.weights + blockIdx.y * WINDOW_WEIGHTS(C, HALVES) + lane;

#pragma unroll
        for (int kh = 0; kh < WINDOW; kh++)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    left[kh][s][half] = __ldg(from + ((kh * STEPS + s) * HALVES + half) * WARP);
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++)
            offsets[i] = run.offsets[i * 4 + lane % 4] + lane / 4 * BLOCKS;
    }
};

/*
 * Walks a warp down the lines of its depth; `end` takes the sums of each output line:
 * sum[j][2 c + k] is channel lane / 4 + 8 c, column 8 (lane % 4) + 4 k + j.
 */
template <int C, int HALVES, typename END>
static __device__ __forceinline__ void walk(const struct operands<C, HALVES> &operands,
                                            const uint32_t *pairs, END &end)
{
    float sum[WINDOW][BLOCKS][4];

#pragma unroll
    for (int line = 0; line < WINDOW_LINES; line++) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                sum[line % WINDOW][b][k] = 0;
        uint32_t right[WINDOW_STEPS(C)][HALVES][BLOCKS][2];

#pragma unroll
        for (int s = 0; s < WINDOW_STEPS(C); s++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        right[s][half][b][i] =
                            pairs[operands.offsets[2 * s + i] + half * layout<C>::pairs +
                                  line * WINDOW_COLUMNS + b];
#pragma unroll
        for (int kh = WINDOW - 1; kh >= 0; kh--)
            if (line >= kh && line - kh < WINDOW_TILE_H)
                multiply_line<WINDOW_STEPS(C), HALVES>(sum[(line - kh + WINDOW) % WINDOW], kh == 0,
                                                       operands.left[kh], right);
        if (line >= WINDOW - 1)
            end.line(line - (WINDOW - 1), sum[(line + 1) % WINDOW]);
    }
}

/* Where a warp's outputs lie. */
struct place {
    int depth, half; /* of the tile */
    int columns;     /* of this half: 0 to 32 */
};

static __device__ __forceinline__ struct place place_of(const struct tile &tile)
{
    const int warp = threadIdx.x / WARP % WARPS;
    struct place place = {warp / 2, warp % 2, 0};

    if (place.depth < tile.size[0])
        place.columns = max(0, min(HALF_W, tile.size[2] - place.half * HALF_W));
    return place;
}
