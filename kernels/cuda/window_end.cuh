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

/* One run of a slot, by a warp. */
template <typename TO>
static __device__ __forceinline__ void send_run(const struct window_end &to, const float *from,
                                                uint32_t e, int length, float mean, float scale,
                                                float shift)
{
    const int skip = e % WIDTH, end = skip + length;

#pragma unroll 1
    for (int i = threadIdx.x % WARP * WIDTH; i < end; i += WARP * WIDTH) {
        const float4 four = *(const float4 *)(from + i);
        float v[WIDTH] = {four.x, four.y, four.z, four.w};

#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            v[k] = __fmaf_rn(v[k] - mean, scale, shift);
        limit(to.low, to.high, v);
        store_row<TO>(to.to, (uintptr_t)to.to % (WIDTH * sizeof(TO)) == 0, e - skip + i,
                      i ? 0 : skip, min(WIDTH, end - i), v);
    }
}

/* A warp's share of a slot where limits alone are left to do: every DRAINS-th run. */
template <typename TO>
static __device__ __forceinline__ void
send_runs(const struct window_run &run, const struct slot &slot, const float *values, int warp)
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
            send_run<TO>(slot.end, values + runs.place(depth, c, line), runs.element(c, line),
                         length, slot.mean[c], slot.scale[c], slot.shift[c]);
    }
}

/* Where the mask's words of a row's n-th four come from. Rounded down, the inverse gives the
 * quotient or one less. */
static __device__ __forceinline__ struct stream end_stream(const struct window_end &end, uint32_t n)
{
    const uint32_t all = end.thread + n, turns = __umulhi(all, end.inverse);
    const uint32_t rest = all - turns * end.threads;
    const bool over = rest >= end.threads;

    return {end.turn + turns + over, rest - (over ? end.threads : 0), end.threads};
}

/* Two fours of a channel and depth, which are most often all that there are, and what they need. */
template <typename TO> struct fours {
    float4 v[2];
    float mean, scale, shift;
    TO *to;

    __device__ __forceinline__ void load(const struct window_run &run, const struct slot &slot,
                                         const float *values, int i)
    {
        const int c = i % WINDOW_OUTS, depth = i / WINDOW_OUTS, lane = threadIdx.x % WARP;
        const struct runs runs = runs_of(run, slot.tile, slot.set, depth);
        const float4 *from = (const float4 *)(values + runs.place(depth, c, 0)) + lane;

        mean = slot.mean[c];
        scale = slot.scale[c];
        shift = slot.shift[c];
        to = (TO *)slot.end.to + runs.element(c, 0) + lane * WIDTH;
        /* Behind the end of the run too, where nothing is sent from: what only some lanes load
         * takes registers all along. */
#pragma unroll
        for (int k = 0; k < 2; k++)
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

        a.load(run, slot, values, i);
        b.load(run, slot, values, i + DRAINS);
        a.send(low, high, n);
        b.send(low, high, n);
    }
}

/*
 * How a slot is cut where points are left to do. A share is a four for each lane, of one run: all
 * of the run, or the first or second half of it. Shares count halves first, then the 16 channels,
 * then lines that are runs, then depths.
 */
struct cut {
    int lines, length; /* runs of a channel at a depth; outputs of a run */
    int channels;      /* of 16 */
    int twice;         /* 1: a run has more fours than a warp has lanes; else 0 */

    __device__ __forceinline__ int shares(const struct tile &tile) const
    {
        return tile.size[0] * lines * WINDOW_OUTS << twice;
    }
};

static __device__ __forceinline__ struct cut cut_of(const struct window_run &run,
                                                    const struct slot &slot)
{
    const struct tile &tile = slot.tile;
    const bool lone = run.tiles[2] > 1;
    const int length = lone ? tile.size[2] : tile.size[1] * tile.size[2];

    /* Two shares do for every run: the longest, four lines of 64, begins with a four. */
    return {lone ? tile.size[1] : 1, length, min(WINDOW_OUTS, run.outs - slot.set * WINDOW_OUTS),
            length + WIDTH - 1 > WARP * WIDTH};
}

/*
 * The line of a run's element, by the inverse of the width. That is (2^16 + d) / width with
 * 0 < d <= width: the quotient becomes too large by at d / 2^16 / width, which is less than
 * 1 / width, and so never reaches the next line.
 */
static __device__ __forceinline__ uint32_t line_of(const struct window_run &run, uint32_t at)
{
    static_assert(WINDOW_TILE_H * WINDOW_TILE_W * WINDOW_TILE_W <= 1 << 16, "at d < 2^16");
    return at * run.per_width >> 16;
}

#define FOURS 4 /* that a lane has at a time: as many as registers hold */

/* A lane's fours of FOURS shares, which are of the same lines, and the same half, of channels that
 * are `step` apart. */
struct four_runs {
    float v[FOURS][WIDTH];
    uint32_t begin, apart; /* of the first run in the result; from one run to the next */
    int from;              /* of the fours, from the last multiple of four before their runs */
    int channel, step;
    int depth, line; /* in the tile */

    __device__ __forceinline__ int skip(int j) const
    {
        return (begin + j * apart) % WIDTH;
    }

    /* In the result: a multiple of four. */
    __device__ __forceinline__ uint32_t element(int j) const
    {
        return begin + j * apart - skip(j) + from;
    }

    /* What follows from these is found again: there are no registers to keep it for all points. */
    __device__ __forceinline__ void forget(void)
    {
        asm volatile("" : "+r"(begin), "+r"(apart), "+r"(from), "+r"(channel)::"memory");
    }

    /* Of share i and every DRAINS-th behind it, normalised. What lies beside a run, or in a channel
     * that is none, is taken too, but not sent. */
    __device__ __forceinline__ void take(const struct window_run &run, const struct slot &slot,
                                         const struct cut &cut, const float *values, int i)
    {
        static_assert(WINDOW_TILE_D == 2, "depth");
        const int rest = (i >> cut.twice) / WINDOW_OUTS;

        channel = (i >> cut.twice) % WINDOW_OUTS;
        step = DRAINS >> cut.twice;
        depth = rest >= cut.lines;
        line = depth ? rest - cut.lines : rest;
        from = ((i & cut.twice) * WARP + threadIdx.x % WARP) * WIDTH;

        const struct runs runs = runs_of(run, slot.tile, slot.set, depth);

        begin = runs.element(channel, line);
        apart = step * runs.volume;

        const int in = runs.lone ? min(from, LINE_PITCH - WIDTH) : from; /* the slot */

#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const int c = channel + j * step;
            const float mean = slot.mean[c], scale = slot.scale[c], shift = slot.shift[c];
            const float4 sums = *(const float4 *)(values + runs.place(depth, c, line) + in);

            v[j][0] = __fmaf_rn(sums.x - mean, scale, shift);
            v[j][1] = __fmaf_rn(sums.y - mean, scale, shift);
            v[j][2] = __fmaf_rn(sums.z - mean, scale, shift);
            v[j][3] = __fmaf_rn(sums.w - mean, scale, shift);
        }
    }

    /* A summand's numbers: all are asked for before any is waited for. */
    __device__ __forceinline__ void add(const struct window_run &run, const struct slot &slot,
                                        const struct cut &cut, const struct window_summand &summand)
    {
        const struct tile &tile = slot.tile;
        const uint32_t first = slot.set * WINDOW_OUTS * summand.channel +
                               (tile.at[0] + depth) * summand.depth +
                               (tile.at[1] + line) * summand.line + tile.at[2] * summand.column;
        const float *of[FOURS]; /* what goes with the first of each run */
        float with[FOURS][WIDTH];

#pragma unroll
        for (int j = 0; j < FOURS; j++) /* behind the last channel, the last's */
            of[j] = summand.tensor +
                    (uint32_t)(first + min(channel + j * step, cut.channels - 1) * summand.channel);
        if (summand.kind == SUMMAND_ONE) {
#pragma unroll
            for (int j = 0; j < FOURS; j++)
                with[j][0] = __ldg(of[j]);
#pragma unroll
            for (int j = 0; j < FOURS; j++)
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    v[j][k] += with[j][0];
            return;
        }
#pragma unroll
        for (int j = 0; j < FOURS; j++)
            if (summand.kind == SUMMAND_FOURS) {
                const float4 four = __ldg((const float4 *)(of[j] + min(from, cut.length - WIDTH)));

                with[j][0] = four.x, with[j][1] = four.y, with[j][2] = four.z, with[j][3] = four.w;
            } else {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    const uint32_t at = max(0, min(from - skip(j) + k, cut.length - 1));

                    with[j][k] = __ldg(
                        of[j] + (uint32_t)(at * summand.column + line_of(run, at) * summand.turn));
                }
            }
#pragma unroll
        for (int j = 0; j < FOURS; j++)
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                v[j][k] += with[j][k];
    }

    __device__ __forceinline__ void mask(const struct tail &tail, const struct point &point,
                                         const struct window_end &end)
    {
        const uint64_t counter = __ldg(&tail.counters[point.counter * tail.counter_pitch + end.s]);

#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const struct stream stream = end_stream(end, element(j) / WIDTH);

            mask_four(point, end.seed, counter + stream.turn, stream.thread, v[j]);
        }
    }

    template <bool ADDS>
    __device__ __forceinline__ void finish(const struct window_run &run, const struct tail &tail,
                                           const struct slot &slot, const struct cut &cut,
                                           const struct point &point)
    {
        if (ADDS && point.kind == POINT_ADD) {
            add(run, slot, cut, run.summands[point.summand]);
        } else if (point.kind == POINT_LIMIT) {
#pragma unroll
            for (int j = 0; j < FOURS; j++)
                limit(point.low, point.high, v[j]);
        } else if (!slot.end.plain) {
            if (point.zero) {
#pragma unroll
                for (int j = 0; j < FOURS; j++)
#pragma unroll
                    for (int k = 0; k < WIDTH; k++)
                        v[j][k] = __fmul_rn(v[j][k], 0.0f);
            } else {
                mask(tail, point, slot.end);
            }
        }
    }

    template <typename TO>
    __device__ __forceinline__ void send(const struct cut &cut, void *to) const
    {
        const bool aligned = (uintptr_t)to % (WIDTH * sizeof(TO)) == 0;

#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const int at = from - skip(j);

            if (channel + j * step < cut.channels && at < cut.length)
                store_row<TO>(to, aligned, element(j), max(0, -at), min(WIDTH, cut.length - at),
                              v[j]);
        }
    }
};

/* A warp's share of a slot where points are left to do. */
template <typename TO, bool ADDS>
static __device__ __forceinline__ void send_points(const struct window_run &run,
                                                   const struct tail &tail, const struct slot &slot,
                                                   const float *values, int warp)
{
    static_assert(WINDOW_OUTS == FOURS * DRAINS, "no rest, and the same lines");

#pragma unroll 1
    for (int i = warp; i < cut_of(run, slot).shares(slot.tile); i += FOURS * DRAINS) {
        const struct cut cut = cut_of(run, slot); /* again: or it is kept, and spilled */
        struct four_runs fours;

        fours.take(run, slot, cut, values, i);
#pragma unroll 1
        for (int p = 0; p < tail.n_points; p++) {
            fours.forget();
            fours.finish<ADDS>(run, tail, slot, cut, tail.points[p]);
        }
        fours.forget();
        fours.send<TO>(cut, slot.end.to);
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
    struct window_end end = {NULL, seg.seed, 0, 0, 0, 0, low, -INFINITY, INFINITY, true};

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
        end.inverse = ~0u / stream.threads;
    }
    run.ends[row] = end;
}
