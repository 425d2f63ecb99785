/*
 * conv_norm.cu - weights and work space of the fused convolution and norm
 *
 * Weights are scaled by a power of two for each output channel, split in fp16 halves and laid out
 * as the instruction wants its left operand: 16 bytes for each lane, step of K and line of the
 * window. Which pair of inputs stands at which place of K is decided here, once for both sides:
 * lane t of the four that share a column takes pairs whose address is t modulo 4, so that their
 * loads meet no bank twice.
 */
#include <errno.h>
#include <stdlib.h>

#include "kernels/cuda/conv_norm.h"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/product.h"
#include "kernels/cuda/window.h"
#include "kernels/size.h"

#define THREADS   128
#define TOP       14  /* exponent of a channel's largest scaled weight */
#define MOST      126 /* that weights are scaled by: twice that can be undone in two steps */
#define ALIGNMENT 256

/* What stands at a place of K: one or two inputs of a line of the window. channel < 0: none. */
struct word {
    int8_t channel[2], depth[2], column;
};

struct words {
    struct word at[WINDOW_SLOTS_MAX];
};

struct conv_norm {
    struct conv_norm_shape shape;
    struct window_run run; /* without what differs between runs */
    void *resident;
};

static int64_t outs_padded(const struct conv_norm_shape *shape)
{
    return (shape->conv.out_channels + WINDOW_OUTS - 1) / WINDOW_OUTS * WINDOW_OUTS;
}

static int halves_of(const struct conv_norm_shape *shape)
{
    return WINDOW_HALVES(shape->dtype);
}

static int64_t tiles_along(const struct conv_norm_shape *shape, int i)
{
    static const int sizes[3] = {WINDOW_TILE_D, WINDOW_TILE_H, WINDOW_TILE_W};

    return (shape->conv.out[i] + sizes[i] - 1) / sizes[i];
}

/* Tiles of a row, of every 16 outputs. */
static uint64_t items_of(const struct conv_norm_shape *shape)
{
    return (uint64_t)(outs_padded(shape) / WINDOW_OUTS * tiles_along(shape, 0) *
                      tiles_along(shape, 1) * tiles_along(shape, 2));
}

static int64_t per_group(const struct conv_norm_shape *shape)
{
    return shape->conv.out_channels / shape->groups;
}

/* Groups of channels that share 16 among them, or have whole ones. */
static bool groups_fit(const struct conv_norm_shape *shape)
{
    int64_t n = per_group(shape);

    return WINDOW_OUTS % n == 0 || n % WINDOW_OUTS == 0;
}

static int together_of(const struct conv_norm_shape *shape)
{
    int64_t n = per_group(shape);

    return (int)(n < WINDOW_OUTS ? n : WINDOW_OUTS);
}

extern "C" bool conv_norm_fits(const struct conv_norm_shape *shape)
{
    const struct conv_shape *conv = &shape->conv;
    int64_t in = conv->in_channels, out = outs_padded(shape);

    for (int i = 0; i < 3; i++) {
        if (conv->kernel[i] != WINDOW || conv->stride[i] != 1 || conv->padding[i] >= WINDOW)
            return false;
        /* Within a sample the kernels count in int. */
        if (conv->in[i] > INT32_MAX / in || conv->out[i] > INT32_MAX / 2 / out)
            return false;
        in *= conv->in[i];
        out *= conv->out[i];
    }
    return conv->in_channels == WINDOW_CHANNELS && groups_fit(shape) &&
           outs_padded(shape) / WINDOW_OUTS <= UINT16_MAX && /* blocks along z */
           size_times((uint64_t)conv->rows, items_of(shape)) <= INT32_MAX && product_runs_here();
}

/* The first three in one allocation, the next three in another. */
struct sizes {
    uint64_t weights, exponents, per_channel, moments, ends, again, counters;
};

static struct sizes sizes_of(const struct conv_norm_shape *shape)
{
    uint64_t padded = (uint64_t)outs_padded(shape), rows = (uint64_t)shape->conv.rows;
    uint64_t items = size_times(rows, items_of(shape));
    uint64_t moments = WINDOW_OUTS / (uint64_t)together_of(shape) * sizeof(struct window_moments);
    int weights = WINDOW_WEIGHTS((int)shape->conv.in_channels, halves_of(shape));

    return {
        size_round(padded / WINDOW_OUTS * (uint64_t)weights * sizeof(uint4), ALIGNMENT),
        size_round((padded + 1) * sizeof(int), ALIGNMENT),
        size_round(padded * sizeof(float), ALIGNMENT),
        size_round(size_times(items, moments), ALIGNMENT),
        size_round(size_times(rows, sizeof(struct window_end)), ALIGNMENT),
        size_round(size_times(items, sizeof(int32_t)), ALIGNMENT),
        size_times(size_plus(rows, 2), sizeof(uint32_t)),
    };
}

extern "C" struct conv_norm_sizes conv_norm_size(const struct conv_norm_shape *shape)
{
    const struct sizes sizes = sizes_of(shape);

    return {
        sizes.weights + sizes.exponents + 3 * sizes.per_channel,
        size_plus(size_plus(sizes.moments, sizes.ends), sizes.again),
        sizes.counters,
    };
}

/* Places of K */

static struct word none(void)
{
    return {{-1, -1}, {0, 0}, 0};
}

/* Deals a word to the lane that its address asks for, in its first free step. */
static void deal(struct words *words, uint16_t *offsets, int filled[4], struct word word)
{
    int address = word.channel[0] / 2 * WINDOW_ARRAY + word.depth[0] * WINDOW_PLANE + word.column;
    int slot = filled[address % 4]++ * 4 + address % 4;

    words->at[slot] = word;
    offsets[slot] = (uint16_t)address;
}

static struct words words_of(int channels, uint16_t *offsets)
{
    struct words words;
    int filled[4] = {0};

    for (int i = 0; i < WINDOW_SLOTS_MAX; i++)
        words.at[i] = none();
    for (int c = 0; c < channels; c += 2)
        for (int depth = 0; depth < WINDOW; depth += c + 1 < channels ? 1 : 2)
            for (int column = 0; column < WINDOW; column++) {
                struct word word = {
                    {(int8_t)c, (int8_t)c}, {(int8_t)depth, (int8_t)depth}, (int8_t)column};

                if (c + 1 < channels)
                    word.channel[1]++;
                else if (++word.depth[1] == WINDOW)
                    word.channel[1] = -1;
                deal(&words, offsets, filled, word);
            }
    /* Empty places have weight 0, and read what the window reads anyway. */
    for (int t = 0; t < 4; t++)
        for (int i = filled[t]; i < WINDOW_SLOTS_MAX / 4; i++)
            offsets[i * 4 + t] = offsets[t];
    return words;
}

/* Weights */

static __global__ void __launch_bounds__(WARP)
    scale_kernel(const float *weight, int64_t per_out, int outs, int *exponents)
{
    int out = (int)blockIdx.x;
    uint32_t top = 0;

    for (int64_t i = threadIdx.x; i < per_out && out < outs; i += WARP) {
        uint32_t bits = __float_as_uint(weight[out * per_out + i]) & 0x7fffffffu;

        if (bits < 0x7f800000u)
            top = max(top, bits);
    }
    top = warp_max(top);
    if (threadIdx.x == 0)
        exponents[out] = top == 0 ? 0 : min(MOST, TOP - ilogbf(__uint_as_float(top)));
}

static __global__ void lowest_kernel(int *exponents, int n)
{
    int lowest = exponents[0];

    for (int i = 1; i < n; i++)
        lowest = min(lowest, exponents[i]);
    exponents[n] = lowest;
}

/* A block a tile of channels, line of the window and step. */
static __global__ void __launch_bounds__(WARP)
    weights_kernel(const float *weight, int channels, int outs, const int *exponents,
                   const __grid_constant__ struct words words, int steps, int halves, uint4 *to)
{
    const int step = blockIdx.x, line = blockIdx.y, tile = blockIdx.z, lane = threadIdx.x;
    uint32_t high[4], low[4];

    for (int r = 0; r < 4; r++) {
        const int out = tile * WINDOW_OUTS + lane / 4 + r % 2 * 8;
        const struct word &word = words.at[(2 * step + r / 2) * 4 + lane % 4];
        __half h[2], l[2];

        for (int k = 0; k < 2; k++) {
            float w = 0;

            if (word.channel[k] >= 0 && out < outs)
                w = unscale(
                    weight[(((out * channels + word.channel[k]) * WINDOW + word.depth[k]) * WINDOW +
                            line) *
                               WINDOW +
                           word.column],
                    -exponents[out]);
            h[k] = __float2half_rn(w);
            l[k] = __float2half_rn(w - __half2float(h[k]));
        }
        high[r] = (uint32_t)__half_as_ushort(h[0]) | (uint32_t)__half_as_ushort(h[1]) << 16;
        low[r] = (uint32_t)__half_as_ushort(l[0]) | (uint32_t)__half_as_ushort(l[1]) << 16;
    }
    to += ((tile * WINDOW + line) * steps + step) * halves * WARP + lane;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    if (halves == 2)
        to[WARP] = make_uint4(low[0], low[1], low[2], low[3]);
}

static __global__ void __launch_bounds__(THREADS)
    channels_kernel(const float *from, float otherwise, int n, int padded, float *to)
{
    int i = (int)(blockIdx.x * THREADS + threadIdx.x);

    if (i < padded)
        to[i] = i < n && from ? from[i] : otherwise;
}

static int take_channels(cudaStream_t stream, const float *from, float otherwise, int n,
                         int64_t padded, float *to, struct report *report)
{
    channels_kernel<<<(unsigned)((padded + THREADS - 1) / THREADS), THREADS, 0, stream>>>(
        from, otherwise, n, (int)padded, to);
    return CUDA_LAUNCHED(report);
}

static int take_weights(struct conv_norm *fused, const float *weight, const float *bias,
                        const float *gamma, const float *beta, cudaStream_t stream,
                        struct report *report)
{
    const struct conv_shape *conv = &fused->shape.conv;
    struct window_run *run = &fused->run;
    const struct sizes sizes = sizes_of(&fused->shape);
    const int64_t padded = outs_padded(&fused->shape);
    const int channels = run->channels, outs = run->outs, halves = halves_of(&fused->shape);
    const struct words words = words_of(channels, run->offsets);
    const dim3 grid((unsigned)WINDOW_STEPS(channels), WINDOW, (unsigned)(padded / WINDOW_OUTS));
    char *at = (char *)fused->resident;
    float *per_channel[3];
    int r;

    run->weights = (const uint4 *)at;
    run->exponents = (const int *)(at + sizes.weights);
    for (int i = 0; i < 3; i++)
        per_channel[i] =
            (float *)(at + sizes.weights + sizes.exponents + (uint64_t)i * sizes.per_channel);
    run->bias = per_channel[0];
    run->gamma = per_channel[1];
    run->beta = per_channel[2];
    scale_kernel<<<(unsigned)padded, WARP, 0, stream>>>(weight, conv->in_channels * 27, outs,
                                                        (int *)(at + sizes.weights));
    r = CUDA_LAUNCHED(report);
    if (r < 0)
        return r;
    lowest_kernel<<<1, 1, 0, stream>>>((int *)(at + sizes.weights), (int)padded);
    r = CUDA_LAUNCHED(report);
    if (r < 0)
        return r;
    weights_kernel<<<grid, WARP, 0, stream>>>(weight, channels, outs, run->exponents, words,
                                              WINDOW_STEPS(channels), halves, (uint4 *)at);
    r = CUDA_LAUNCHED(report);
    if (r == 0)
        r = take_channels(stream, bias, 0, outs, padded, per_channel[0], report);
    if (r == 0)
        r = take_channels(stream, gamma, 1, outs, padded, per_channel[1], report);
    if (r == 0)
        r = take_channels(stream, beta, 0, outs, padded, per_channel[2], report);
    return r;
}

static void fill_run(struct window_run *run, const struct conv_norm_shape *shape)
{
    const struct conv_shape *conv = &shape->conv;

    run->dtype = shape->dtype;
    run->channels = (int)conv->in_channels;
    run->outs = (int)conv->out_channels;
    run->in_elements = conv->in_channels;
    run->tiles_all = 1;
    run->spatial = 1;
    for (int i = 0; i < 3; i++) {
        run->in[i] = (int)conv->in[i];
        run->out[i] = (int)conv->out[i];
        run->padding[i] = (int)conv->padding[i];
        run->padded |= conv->padding[i] > 0;
        run->tiles[i] = (int)tiles_along(shape, i);
        run->tiles_all *= run->tiles[i];
        run->in_elements *= conv->in[i];
        run->spatial *= conv->out[i];
    }
    run->sets_per_group =
        (int)(per_group(shape) > WINDOW_OUTS ? per_group(shape) / WINDOW_OUTS : 1);
    run->group_size = (float)(per_group(shape) * run->spatial);
    run->together = together_of(shape);
    while (1 << run->together_log < run->together)
        run->together_log++;
    run->tile_sets = (int)(outs_padded(shape) / WINDOW_OUTS);
    run->eps = shape->eps;
    run->per_width =
        (1u << 16) / (uint32_t)(run->out[2] < WINDOW_TILE_W ? run->out[2] : WINDOW_TILE_W) + 1;
}

/* How far from its first number a summand is with a row's element e. */
static uint32_t summand_at(const struct summand *summand, int64_t e)
{
    uint32_t at = 0;

    for (int d = summand->rank - 1; d >= 0; d--) {
        at += (uint32_t)(e % summand->dims[d]) * summand->stride[d];
        e /= summand->dims[d];
    }
    return at;
}

/* A step in one dimension is one of so many elements. What is found for a dimension of one index
 * does not matter: it is only ever multiplied by 0. */
static struct window_summand summand_of(const struct window_run *run, const struct summand *summand)
{
    const uint32_t width = (uint32_t)run->out[2];
    const int64_t plane = (int64_t)run->out[1] * run->out[2];
    struct window_summand of = {summand->tensor,
                                summand_at(summand, run->spatial),
                                summand_at(summand, plane),
                                summand_at(summand, width),
                                summand_at(summand, 1),
                                0,
                                SUMMAND_ANY};

    of.turn = of.line - width * of.column;
    if (of.line == 0 && of.column == 0)
        of.kind = SUMMAND_ONE;
    else if (run->tiles[2] == 1 && plane % 4 == 0 && of.column == 1 && of.turn == 0)
        of.kind = SUMMAND_FOURS; /* planes are whole, so all is at multiples of four */
    return of;
}

extern "C" int conv_norm_new(const struct conv_norm_shape *shape, const float *weight,
                             const float *bias, const float *gamma, const float *beta,
                             cudaStream_t stream, struct conv_norm **ret, struct report *report)
{
    struct conv_norm *fused = (struct conv_norm *)calloc(1, sizeof(*fused));
    int r;

    if (!fused)
        return report_set(report, -ENOMEM, "out of memory");
    fused->shape = *shape;
    fill_run(&fused->run, shape);
    r = window_ready(shape->dtype, &fused->run.blocks, report);
    if (r == 0)
        r = CUDA(report, cudaMalloc(&fused->resident, conv_norm_size(shape).resident));
    if (r == 0)
        r = take_weights(fused, weight, bias, gamma, beta, stream, report);
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(stream));
    if (r < 0) {
        conv_norm_free(fused);
        return r;
    }
    *ret = fused;
    return 0;
}

extern "C" struct conv_norm *conv_norm_free(struct conv_norm *fused)
{
    if (!fused)
        return NULL;
    cudaFree(fused->resident);
    free(fused);
    return NULL;
}

extern "C" const char *conv_norm_text(const struct conv_norm *fused)
{
    return halves_of(&fused->shape) == 2
               ? "tensor cores, three products of fp16 halves; sums wait on chip for the moments"
               : "tensor cores, one product; sums wait on chip for the moments";
}

extern "C" int conv_norm_run(const struct conv_norm *fused, cudaStream_t stream, void *work,
                             uint32_t *counters, const void *x, int64_t rows,
                             const struct tail *tail, struct report *report)
{
    const struct sizes sizes = sizes_of(&fused->shape);
    struct window_run run = fused->run;
    char *at = (char *)work;

    run.x = x;
    run.rows = rows;
    run.moments = (struct window_moments *)at;
    at += sizes.moments;
    run.ends = (struct window_end *)at;
    at += sizes.ends;
    run.again = (int32_t *)at;
    run.dealt = counters;
    run.ended = counters + 1;
    run.arrived = counters + 2;
    for (int i = 0; i < tail->n_summands; i++)
        run.summands[i] = summand_of(&run, &tail->summands[i]);
    return window_cuda(stream, &run, tail, report);
}
