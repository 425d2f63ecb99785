/*
 * window_moments.cuh - from a tile's sums to the moments of its sample's groups
 *
 * A lane adds up distances from a pivot, so that nothing is lost where the mean is large. They are
 * merged in one order: a warp's lanes, a tile's warps, the channels of a group if an instruction's
 * 16 have all of them, a sample's tiles, and what is left of a group's channels. Float32 does for
 * that: doubles share a pipe with the products, which would wait for them.
 */
#pragma once

#include "kernels/cuda/window_tile.cuh"

/* A warp's share of a tile, scaled as its sums are. */
struct distances {
    float pivot, sum, squares;
};

/* HOT_SUMS: they may be beyond float32 when their scale is undone. */
template <bool HOT_SUMS> struct distances_end {
    int columns; /* from this thread's first to the end of the warp's */
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
                        top[c] = max(top[c], __float_as_uint(v[b][2 * c + k]) & UNSIGNED);
                }
    }

    __device__ __forceinline__ void store(const struct window_run &run, const struct job &job,
                                          struct distances *to)
    {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = threadIdx.x % WARP / 4 + 8 * c;

#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                sum[c] += __shfl_xor_sync(~0u, sum[c], step);
                squares[c] += __shfl_xor_sync(~0u, squares[c], step);
            }
            if (HOT_SUMS) {
                const int at = job.set * WINDOW_OUTS + channel;

#pragma unroll
                for (int step = 1; step < 4; step *= 2)
                    top[c] = max(top[c], __shfl_xor_sync(~0u, top[c], step));
                /* An output that float32 does not hold is infinite there, and its group NaN. */
                if (isinf(unscale(__uint_as_float(top[c]), job.tile.exponent + run.exponents[at]) +
                          fabsf(run.bias[at])))
                    sum[c] = __int_as_float(0x7fc00000);
            }
            if (threadIdx.x % 4 == 0)
                to[channel] = {pivot[c], sum[c], squares[c]};
        }
    }
};

/* Merges moments of `all` outputs, each given as its distance from one pivot. */
struct merger {
    float all, share, pivot; /* share: of one output */
    float shift, squares;    /* shift: of the mean, from the pivot */

    __device__ __forceinline__ void add(float mean, float more_squares, float more)
    {
        const float d = mean - pivot;

        shift = __fmaf_rn(more * share, d, shift); /* more * d might overflow */
        squares += __fmaf_rn(more * d, d, more_squares);
    }

    /* With lanes that have the same pivot. */
    __device__ __forceinline__ void add_lanes(int from, int to)
    {
        for (int step = from; step < to; step *= 2) {
            shift += __shfl_xor_sync(~0u, shift, step);
            squares += __shfl_xor_sync(~0u, squares, step);
        }
    }

    __device__ __forceinline__ struct window_moments merged(void) const
    {
        const float less = isinf(squares) ? squares : squares - all * shift * shift;

        /* Below zero by rounding; NaN stays. */
        return {pivot + shift, less < 0 ? 0.0f : less, all, 0};
    }
};

/* Of a count; to a bit, which does for what is no exact number either. */
static __device__ __forceinline__ float inverse(float n)
{
    float inverse;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(n));
    return inverse;
}

static __device__ __forceinline__ struct merger merger_of(float all, float pivot)
{
    return {all, inverse(all), pivot, 0, 0};
}

/*
 * By a warp: of the tile's channels, or of groups of them. Others wait for it, so it is short: a
 * lane has a channel at a depth.
 */
static __device__ __forceinline__ void tile_moments(const struct window_run &run,
                                                    const struct job &job,
                                                    const struct distances (*of)[WINDOW_OUTS])
{
    constexpr int PER_DEPTH = WINDOW_WARPS / WINDOW_TILE_D;
    const struct tile &tile = job.tile;
    const int lane = threadIdx.x % WARP, c = lane % WINDOW_OUTS, depth = lane / WINDOW_OUTS;
    const int channel = job.set * WINDOW_OUTS + c, together = run.together;
    const int exponent = tile.exponent + __ldg(&run.exponents[channel]);
    const float bias = __ldg(&run.bias[channel]);
    const struct distances first = of[0][c];
    struct merger warps = merger_of(
        (float)tile.outputs(),
        __fmaf_rn(first.sum, inverse((float)place_of(tile, 0).outputs(tile)), first.pivot));

#pragma unroll
    for (int i = 0; i < PER_DEPTH; i++) {
        const struct distances part = of[depth * PER_DEPTH + i][c];
        const float n =
            (float)place_of(tile, i).outputs(tile); /* there are as many at each depth */
        const float shift = part.sum * inverse(n);

        if (n > 0 && depth < tile.size[0])
            warps.add(part.pivot + shift, part.squares - part.sum * shift, n);
    }
    warps.add_lanes(WINDOW_OUTS, WARP);

    struct window_moments moments = warps.merged();

    moments.mean = unscale(moments.mean, exponent) + bias;
    moments.squares = unscale(unscale(moments.squares, exponent), exponent);
    if (together > 1) {
        struct merger channels =
            merger_of(moments.n * (float)together, __shfl_sync(~0u, moments.mean, c & -together));

        channels.add(moments.mean, moments.squares, moments.n);
        channels.add_lanes(1, together);
        moments = channels.merged();
    }
    if (lane < WINDOW_OUTS && (lane & (together - 1)) == 0) {
        const int64_t at =
            ((int64_t)tile.row * run.tile_sets + job.set) * run.tiles_all + tile.index;

        __stcg((float4 *)&run.moments[(at * WINDOW_OUTS + lane) >> run.together_log],
               make_float4(moments.mean, moments.squares, moments.n, 0));
    }
}

/*
 * By a warp, when the moments of all of a sample's tiles are there: of a lane's channel among 16,
 * its group's. Every block does that for every tile: what a block does once would have to be
 * fetched as instructions first, while all others wait.
 */
static __device__ __forceinline__ struct window_moments sample_moments(const struct window_run &run,
                                                                       int row, int set)
{
    constexpr int AT_ONCE = 7; /* as many as registers hold */
    const int lane = threadIdx.x % WARP, columns = WINDOW_OUTS >> run.together_log;
    const int column = lane & (columns - 1); /* whose moments this lane merges */
    const int sets = run.sets_per_group, first = sets > 1 ? set / sets * sets : set;
    const int n = run.tiles_all * columns * sets;
    const float4 *from = (const float4 *)run.moments +
                         ((int64_t)row * run.tile_sets + first) * run.tiles_all * columns;
    struct merger tiles = merger_of(run.group_size, __ldcg(&from[column]).x);

#pragma unroll 1
    for (int again = 0; again < 2; again++) {
#pragma unroll 1
        for (int i = lane; i < n; i += AT_ONCE * WARP) {
            float4 some[AT_ONCE];

#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                some[k] = __ldcg(&from[min(i + k * WARP, n - columns + column)]);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const bool in = i + k * WARP < n;

                tiles.add(some[k].x, in ? some[k].y : 0, in ? some[k].z : 0);
            }
        }
        tiles.add_lanes(columns, WARP);
        /* A first tile far from all others was no good pivot: once more from the mean. */
        if (!__any_sync(~0u, tiles.all * tiles.shift * tiles.shift > 64 * tiles.merged().squares))
            break;
        if (again == 0)
            tiles = merger_of(run.group_size, tiles.pivot + tiles.shift);
    }

    const struct window_moments mine = tiles.merged();
    const int source = lane % WINDOW_OUTS >> run.together_log;

    return {__shfl_sync(~0u, mine.mean, source), __shfl_sync(~0u, mine.squares, source), mine.n, 0};
}

/* What a scaled sum of a channel is normalised with: less x, times y, plus z. */
static __device__ __forceinline__ float3 norm_of(const struct window_run &run,
                                                 const struct window_moments &moments, int channel,
                                                 int exponent)
{
    const float variance = moments.squares / moments.n;
    /* Overflows where PyTorch's does: the root's inverse is then 0. */
    const float rstd = 1.0f / sqrtf(variance + run.eps);
    const float away = moments.mean - run.bias[channel], scale = rstd * run.gamma[channel];
    /* Without a mean then, whose scaling might overflow, and 0 times that is NaN. */
    const float mean = rstd == 0 ? 0.0f : unscale(away, -exponent);
    const float shift = run.beta[channel];

    if (!isfinite(moments.mean))
        return make_float3(0, __int_as_float(0x7fc00000), shift);
    /* Sums so small that they are nothing beside the mean: one number. */
    if (isinf(mean))
        return make_float3(0, 0, __fmaf_rn(-away, scale, shift));
    return make_float3(mean, unscale(scale, exponent), shift);
}
