/*
 * window_end.cuh - what becomes of a tile's sums in window.cu's second pass
 *
 * They are normalised, put in order in shared memory and written as runs of neighbours, by one of
 * two ways: any tail to any place, or limits alone to places at multiples of 16 bytes. Both give
 * the same bits.
 */
#pragma once

#include "kernels/cuda/window_tile.cuh"

static __device__ __forceinline__ void
finish_four(const struct tail &tail, const struct window_end &to, uint32_t e, float v[WIDTH])
{
    for (int p = 0; p < tail.n_points; p++) {
        const struct point &point = tail.points[p];

        if (!point.dropout)
            limit(point.low, point.high, v);
        else if (!to.plain)
            mask_row(tail, point, to.seed, to.s,
                     stream_further({to.turn, to.thread, to.threads}, e / WIDTH), v);
    }
}

/* The two warps of a depth. */
static __device__ __forceinline__ void pair_sync(int depth)
{
    asm volatile("bar.sync %0, 64;" ::"r"(1 + depth) : "memory");
}

template <typename TO> struct lines_end {
    const struct window_run &run;
    const struct tail &tail;
    const struct tile &tile;
    const struct place &place;
    const struct window_end &to;
    float *runs;     /* the pair's */
    int columns;     /* of this thread */
    bool lone;       /* lines do not follow one another in the result: each is a run */
    uint32_t begin;  /* of the tile's lines, in the first channel of this block */
    uint32_t volume; /* outputs of a channel */
    float mean[2], scale[2], shift[2];

    __device__ __forceinline__ void take_moments(const int (&exponents)[2], const float (&beta)[2])
    {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int at = blockIdx.y * WINDOW_OUTS + threadIdx.x % WARP / 4 + 8 * c;
            const int exponent = tile.exponent + exponents[c];
            const float2 stats = __ldcg(&run.stats[tile.row * gridDim.y * WINDOW_OUTS + at]);

            mean[c] = unscale(stats.x, -exponent);
            scale[c] = unscale(stats.y, exponent);
            shift[c] = beta[c];
        }
    }

    __device__ __forceinline__ void line(int out, const float (&v)[BLOCKS][4])
    {
        if (out < tile.size[1])
            keep(out, v);
        if (out % 2 == 1 && out - 1 < tile.size[1]) {
            pair_sync(place.depth);
            for (int i = 0; i < (lone ? min(2, tile.size[1] - out + 1) : 1); i++)
                write(runs + i * LINE_PITCH, out - 1 + i,
                      lone ? tile.size[2] : min(2, tile.size[1] - out + 1) * tile.size[2]);
            pair_sync(place.depth);
        }
    }

    /* A normalised line to its place in shared memory. */
    __device__ __forceinline__ void keep(int out, const float (&v)[BLOCKS][4]) const
    {
        const int width = tile.size[2], lane = threadIdx.x % WARP;
        const int first = lone ? out : out / 2 * 2; /* of the run */

#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = lane / 4 + 8 * c;
            const int skip = (begin + channel * volume + first * run.out[2]) % WIDTH;
            float *at = runs + channel * RUN_PITCH + skip + place.half * HALF_W + lane % 4 * 8 +
                        out % 2 * (lone ? LINE_PITCH : width);

#pragma unroll
            for (int k = 0; k < 2; k++) {
                float y[BLOCKS];

#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
                    y[b] = __fmaf_rn(v[b][2 * c + k] - mean[c], scale[c], shift[c]);
                if ((skip | width) % 2 == 0 && 4 * k + 4 <= columns) {
                    *(float2 *)(at + 4 * k) = make_float2(y[0], y[1]);
                    *(float2 *)(at + 4 * k + 2) = make_float2(y[2], y[3]);
                } else {
#pragma unroll
                    for (int b = 0; b < BLOCKS; b++)
                        if (4 * k + b < columns)
                            at[4 * k + b] = y[b];
                }
            }
        }
    }

    /* A run of `length` elements of every channel; the pair's warps take turns. */
    __device__ __forceinline__ void write(const float *from, int line, int length) const
    {
        const int channels = min(WINDOW_OUTS, run.outs - (int)blockIdx.y * WINDOW_OUTS);

        if (to.plain) {
#pragma unroll 4
            for (int c = place.half; c < channels; c += 2)
                write_channel<true>(from + c * RUN_PITCH, begin + c * volume + line * run.out[2],
                                    length);
        } else {
#pragma unroll 1
            for (int c = place.half; c < channels; c += 2)
                write_channel<false>(from + c * RUN_PITCH, begin + c * volume + line * run.out[2],
                                     length);
        }
    }

    template <bool UNMASKED>
    __device__ __forceinline__ void write_channel(const float *from, uint32_t e, int length) const
    {
        const int skip = e % WIDTH;

        for (int i = threadIdx.x % WARP * WIDTH; i < skip + length; i += WARP * WIDTH) {
            const float4 four = *(const float4 *)(from + i);
            float v[WIDTH] = {four.x, four.y, four.z, four.w};

            if (UNMASKED)
                limit(to.low, to.high, v);
            else
                finish_four(tail, to, e - skip + i, v);
            store_row<TO>(to.to, (uintptr_t)to.to % (WIDTH * sizeof(TO)) == 0, e - skip + i,
                          i ? 0 : skip, min(WIDTH, skip + length - i), v);
        }
    }
};

/*
 * The same for float32 without masks, where every pair of lines is whole and lies at a multiple of
 * 16 bytes: no branches but the barriers, so that products fill the gaps.
 */
struct pairs_end {
    const struct tile &tile;
    const struct place &place;
    float low, high; /* limits */
    float *runs;     /* the pair's */
    float *to;       /* the tile's first output of this block's first channel */
    uint32_t volume; /* outputs of a channel */
    int columns;     /* of this thread */
    int channels;    /* of this block */
    float mean[2], scale[2], shift[2];

    __device__ __forceinline__ void line(int out, const float (&v)[BLOCKS][4])
    {
        const int width = tile.size[2], lane = threadIdx.x % WARP;
        float *at =
            runs + lane / 4 * RUN_PITCH + place.half * HALF_W + lane % 4 * 8 + out % 2 * width;

        if (out % 2 == 0 && out > 0)
            pair_sync(place.depth);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float y[8];

#pragma unroll
            for (int i = 0; i < 8; i++)
                y[i] = __fmaf_rn(v[i % 4][2 * c + i / 4] - mean[c], scale[c], shift[c]);
            limit(low, high, y);
            limit(low, high, y + 4);
#pragma unroll
            for (int i = 0; i < 8; i += 2)
                if (i < columns)
                    *(float2 *)(at + 8 * c * RUN_PITCH + i) = make_float2(y[i], y[i + 1]);
        }
        if (out % 2 == 1) {
            pair_sync(place.depth);
            if (out < tile.size[1])
                write(out - 1);
        }
    }

    __device__ __forceinline__ void write(int first) const
    {
        const int lane = threadIdx.x % WARP, width = tile.size[2];
        float *at = to + first * width + lane * WIDTH;

        if (lane * WIDTH >= 2 * width)
            return;
#pragma unroll
        for (int i = 0; i < WINDOW_OUTS / 2; i++) {
            const int c = 2 * i + place.half;

            if (c < channels)
                __stcs((float4 *)(at + c * volume),
                       *(const float4 *)(runs + c * RUN_PITCH + lane * WIDTH));
        }
    }
};

template <typename TO>
static __device__ __forceinline__ struct pairs_end pairs_of(const struct lines_end<TO> &end)
{
    struct pairs_end fast = {
        end.tile,    end.place,   end.to.low,
        end.to.high, end.runs,    (float *)end.to.to + end.begin,
        end.volume,  end.columns, min(WINDOW_OUTS, end.run.outs - (int)blockIdx.y * WINDOW_OUTS)};

#pragma unroll
    for (int c = 0; c < 2; c++) {
        fast.mean[c] = end.mean[c];
        fast.scale[c] = end.scale[c];
        fast.shift[c] = end.shift[c];
    }
    return fast;
}
