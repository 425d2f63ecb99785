/*
 * window_end.cuh - a tile's sums on their way out of window.cu: into shared memory, and from there,
 * normalised and through the tail, to where the sample goes
 *
 * A channel of a tile is a run of neighbours in the result if the tile is as wide as the sample;
 * else each of its lines is one. Runs lie in shared memory as they will in memory, modulo 16 bytes.
 */
#pragma once

#include "kernels/cuda/window_moments.cuh"

/* Results that wait for their sample's moments. */
struct slot {
    struct tile tile; /* row < 0: no more */
    int set;
    float mean[WINDOW_OUTS], scale[WINDOW_OUTS], shift[WINDOW_OUTS];
    struct window_end end;
};

/* Where a tile's runs begin in the result. */
struct runs {
    uint32_t begin, volume, width; /* of the first channel; of a channel; of a line */
    bool lone;                     /* each line is one */

    __device__ __forceinline__ uint32_t element(int channel, int line) const
    {
        return begin + channel * volume + line * width;
    }

    /* In the slot. */
    __device__ __forceinline__ int place(int depth, int channel, int line) const
    {
        return (depth * WINDOW_OUTS + channel) * (lone ? LINES_PITCH : RUN_PITCH) +
               line * (lone ? LINE_PITCH : (int)width);
    }
};

static __device__ __forceinline__ struct runs runs_of(const struct window_run &run,
                                                      const struct tile &tile, int set, int depth)
{
    const uint32_t width = (uint32_t)run.out[2], volume = (uint32_t)run.spatial;
    const uint32_t line = (tile.at[0] + depth) * run.out[1] + tile.at[1];

    return {set * WINDOW_OUTS * volume + line * width + tile.at[2], volume, width,
            run.tiles[2] > 1};
}

/* Moments and results at once, whatever the shape; sums that float32 may not hold are watched. */
struct any_end {
    struct distances_end<true> distances;
    struct runs runs;
    int depth, column; /* of this thread's first output */
    float *slot;       /* NULL: moments alone */

    __device__ __forceinline__ void line(int out, const float (&v)[BLOCKS][4])
    {
        const int left = slot && out < distances.lines ? distances.columns : 0;

        distances.line(out, v);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = threadIdx.x % WARP / 4 + 8 * c;
            float *to = slot + runs.place(depth, channel, out) + column +
                        runs.element(channel, runs.lone ? out : 0) % WIDTH;

#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
                    if (4 * k + b < left)
                        to[4 * k + b] = v[b][2 * c + k];
        }
    }
};

/* The same where lines are of even length and follow one another, so that outputs go in twos. */
struct even_end {
    struct distances_end<false> distances;
    uint32_t to[2]; /* of each channel, in shared memory */
    uint32_t width; /* bytes */
    bool kept;

    __device__ __forceinline__ void begin(const struct runs &runs, int depth, int column,
                                          const float *slot)
    {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = threadIdx.x % WARP / 4 + 8 * c;

            to[c] = kept_address(
                shared_address(slot) +
                (runs.place(depth, channel, 0) + column + runs.element(channel, 0) % WIDTH) * 4);
        }
        width = runs.width * 4;
    }

    __device__ __forceinline__ void line(int out, const float (&v)[BLOCKS][4])
    {
        const int left = kept && out < distances.lines ? distances.columns : 0;

        distances.line(out, v);
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (4 * k < left)
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to[c] + 16 * k),
                                 "f"(v[0][2 * c + k]), "f"(v[1][2 * c + k])
                                 : "memory");
            to[c] += width;
        }
    }
};

template <bool ADDS>
static __device__ __forceinline__ void
finish_four(const struct tail &tail, const struct window_end &to, uint32_t e, float v[WIDTH])
{
    for (int p = 0; p < tail.n_points; p++) {
        const struct point &point = tail.points[p];

        if (point.kind == POINT_LIMIT)
            limit(point.low, point.high, v);
        else if (ADDS && point.kind == POINT_ADD)
            add_row(tail.summands[point.summand], e, v);
        else if (!to.plain)
            mask_row(tail, point, to.seed, to.s,
                     stream_further({to.turn, to.thread, to.threads}, e / WIDTH), v);
    }
}

/* What is left to do with values: nothing but one limit; or points, masks among them; or adds. */
enum finish { FINISH_LIMIT, FINISH_MASKS, FINISH_ADDS };

/* One run of a slot, by a warp. */
template <typename TO, enum finish FINISH>
static __device__ __forceinline__ void
send_run(const struct tail &tail, const struct window_end &to, const float *from, uint32_t e,
         int length, float mean, float scale, float shift)
{
    const int skip = e % WIDTH, end = skip + length;

#pragma unroll 1
    for (int i = threadIdx.x % WARP * WIDTH; i < end; i += WARP * WIDTH) {
        const float4 four = *(const float4 *)(from + i);
        float v[WIDTH] = {four.x, four.y, four.z, four.w};

#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            v[k] = __fmaf_rn(v[k] - mean, scale, shift);
        if (FINISH == FINISH_LIMIT)
            limit(to.low, to.high, v);
        else
            finish_four<FINISH == FINISH_ADDS>(tail, to, e - skip + i, v);
        store_row<TO>(to.to, (uintptr_t)to.to % (WIDTH * sizeof(TO)) == 0, e - skip + i,
                      i ? 0 : skip, min(WIDTH, end - i), v);
    }
}

/* A warp's share of a slot: every DRAINS-th run. */
template <typename TO, enum finish FINISH>
static __device__ __forceinline__ void send_runs(const struct window_run &run,
                                                 const struct tail &tail, const struct slot &slot,
                                                 const float *values, int warp)
{
    const struct tile &tile = slot.tile;
    const int channels = min(WINDOW_OUTS, run.outs - slot.set * WINDOW_OUTS);
    const bool lone = run.tiles[2] > 1;
    const int lines = lone ? tile.size[1] : 1, all = tile.size[0] * lines;
    const int length = lone ? tile.size[2] : tile.size[1] * tile.size[2];

#pragma unroll 1
    for (int i = 0; i < all; i++) {
        const int depth = i / lines, line = i - depth * lines;
        const struct runs runs = runs_of(run, tile, slot.set, depth);

#pragma unroll 1
        for (int c = (warp + i) % DRAINS; c < channels; c += DRAINS)
            send_run<TO, FINISH>(tail, slot.end, values + runs.place(depth, c, line),
                                 runs.element(c, line), length, slot.mean[c], slot.scale[c],
                                 slot.shift[c]);
    }
}

/* Two fours of a channel and depth, which are most often all that there are, and what they need. */
template <typename TO> struct fours {
    float4 v[2];
    float mean, scale, shift;
    TO *to;

    __device__ __forceinline__ void load(const struct window_run &run, const struct slot &slot,
                                         const float *values, int i, int n)
    {
        const int c = i % WINDOW_OUTS, depth = i / WINDOW_OUTS, lane = threadIdx.x % WARP;
        const struct runs runs = runs_of(run, slot.tile, slot.set, depth);
        const float4 *from = (const float4 *)(values + runs.place(depth, c, 0)) + lane;

        mean = slot.mean[c];
        scale = slot.scale[c];
        shift = slot.shift[c];
        to = (TO *)slot.end.to + runs.element(c, 0) + lane * WIDTH;
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (lane + k * WARP < n)
                v[k] = from[k * WARP];
    }

    __device__ __forceinline__ void send(float low, float high, int n) const
    {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float four[WIDTH] = {v[k].x, v[k].y, v[k].z, v[k].w};

#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                four[j] = __fmaf_rn(four[j] - mean, scale, shift);
            limit(low, high, four);
            if ((int)threadIdx.x % WARP + k * WARP < n)
                store_row<TO>(to, true, k * WARP * WIDTH, 0, WIDTH, four);
        }
    }
};

/*
 * The same where runs are in fours that each go in one store, of all 16 channels, and limits alone
 * are left to do.
 */
template <typename TO>
static __device__ __forceinline__ void
send_fours(const struct window_run &run, const struct slot &slot, const float *values, int warp)
{
    static_assert(WINDOW_TILE_D * WINDOW_OUTS % (2 * DRAINS) == 0, "in twos");
    const int n = slot.tile.size[1] * slot.tile.size[2] / WIDTH;
    const int all = slot.tile.size[0] * WINDOW_OUTS;
    const float low = slot.end.low, high = slot.end.high;

#pragma unroll 1
    for (int i = warp; i < all; i += 2 * DRAINS) {
        struct fours<TO> a, b;

        a.load(run, slot, values, i, n);
        b.load(run, slot, values, i + DRAINS, n);
        a.send(low, high, n);
        b.send(low, high, n);
    }
}

/* Where a row goes, looked up once for all its tiles. */
static __device__ void row_end(const struct window_run &run, const struct tail &tail, int64_t row)
{
    int low = 0, high = tail.n_segments - 1;

    while (low < high) {
        const int middle = (low + high + 1) / 2;

        if (tail.segments[middle].row <= row)
            low = middle;
        else
            high = middle - 1;
    }

    const struct segment &seg = tail.segments[low];
    const int64_t at = row - seg.row;
    const int size = tail.to || tail.dtype == DTYPE_FLOAT32 ? 4 : 2;
    struct window_end end = {NULL, seg.seed, 0, 0, 0, low, -INFINITY, INFINITY, true};

    end.to = tail.to ? (char *)(tail.to + row * tail.elements)
                     : (char *)seg.y + (seg.out_row + at) * tail.elements * size;
    for (int p = 0; p < tail.n_points; p++) {
        const struct point &point = tail.points[p];

        /* Limits in a row are one: minimum and maximum distribute over each other. */
        if (point.kind == POINT_MASK) {
            end.plain &= !seg.train;
        } else if (point.kind == POINT_LIMIT) {
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
