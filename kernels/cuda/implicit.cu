/*
 * implicit.cu - convolution of any shape over tensor cores, as a product that is never laid out
 *
 * Outputs of a tile of places are the rows of a product, output channels its columns, input
 * channels times places of the window its depth. A block copies the inputs under its tile to shared
 * memory, some channels at a time, and reads the product's left operand from there: the same words
 * at another offset for every place of the window. Weights lie in memory as the instruction wants
 * them.
 *
 * float32: three products of TF32 parts, high high + high low + low high, each step of 8 channels
 * from zero and then added in float32, because the tensor core's own addition truncates. A high
 * part is cut off, not rounded, so that no finite number becomes infinite. An infinity leaves NaN
 * behind, which is the same to the group_norm that must follow (implicit_fits). 16 bits: one
 * product.
 *
 * A sum's order is: channels by eights (sixteens), places of the window. It depends on nothing
 * else.
 */
#include <cuda_pipeline.h>
#include <float.h>

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/implicit.h"

#define THREADS    256
#define WORDS      8 /* of depth, a step: float32, or pairs of 16 bits */
#define SHARED_MAX (96 << 10)
#define SHARED     (48 << 10) /* more channels at a time only up to here */
#define TAPS_MAX   1024
#define EXACT_FROM 48 /* products to a sum */

template <typename T> struct kind;
template <> struct kind<float> {
    typedef uint4 fragment; /* high, high, low, low */
    static constexpr int CHANNELS = WORDS;
};
template <> struct kind<__half> {
    typedef uint2 fragment;
    static constexpr int CHANNELS = 2 * WORDS;
};
template <> struct kind<__nv_bfloat16> {
    typedef uint2 fragment;
    static constexpr int CHANNELS = 2 * WORDS;
};

static __device__ __forceinline__ void product_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* What is cut off of a number, rounded to what TF32 holds: the lowest 13 bits are not looked at. */
static __device__ __forceinline__ uint32_t high_of(uint32_t v)
{
    return v & 0xffffe000u;
}

static __device__ __forceinline__ uint32_t low_of(uint32_t v)
{
    return __float_as_uint(__uint_as_float(v) - __uint_as_float(high_of(v))) + 0x1000u;
}

template <int NF>
static __device__ __forceinline__ void multiply(float (&sum)[NF][4], const uint32_t (&a)[4],
                                                const uint4 (&b)[NF], float)
{
    uint32_t high[4], low[4];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        high[i] = high_of(a[i]);
        low[i] = low_of(a[i]);
    }
    float part[NF][4] = {};

    /* None waits for the one before. */
#pragma unroll
    for (int f = 0; f < NF; f++)
        product_tf32(part[f], low, b[f].x, b[f].y);
#pragma unroll
    for (int f = 0; f < NF; f++)
        product_tf32(part[f], high, b[f].z, b[f].w);
#pragma unroll
    for (int f = 0; f < NF; f++)
        product_tf32(part[f], high, b[f].x, b[f].y);
#pragma unroll
    for (int f = 0; f < NF; f++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[f][i] += part[f][i];
}

template <int NF>
static __device__ __forceinline__ void multiply(float (&sum)[NF][4], const uint32_t (&a)[4],
                                                const uint2 (&b)[NF], __half)
{
#pragma unroll
    for (int f = 0; f < NF; f++)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[f][0]), "+f"(sum[f][1]), "+f"(sum[f][2]), "+f"(sum[f][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[f].x), "r"(b[f].y));
}

template <int NF>
static __device__ __forceinline__ void multiply(float (&sum)[NF][4], const uint32_t (&a)[4],
                                                const uint2 (&b)[NF], __nv_bfloat16)
{
#pragma unroll
    for (int f = 0; f < NF; f++)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[f][0]), "+f"(sum[f][1]), "+f"(sum[f][2]), "+f"(sum[f][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[f].x), "r"(b[f].y));
}

/* Where a block works. */
struct spot {
    int64_t row;
    int d, h, w; /* the tile's first output */
};

static __device__ __forceinline__ struct spot spot_of(const struct implicit &p)
{
    const int all = p.tiles[0] * p.tiles[1] * p.tiles[2];
    const int row = (int)(blockIdx.x / (unsigned)all), tile = (int)blockIdx.x - row * all;
    const int plane = tile / p.tiles[2], d = plane / p.tiles[1];

    return {row, d * p.tile[0], (plane - d * p.tiles[1]) * p.tile[1],
            (tile - plane * p.tiles[2]) * p.tile[2]};
}

/* A thread's place in every plane of the patch: where it comes from in the sample's first plane,
 * and whether it lies in the sample. */
struct column {
    int64_t from;
    bool inside;
};

static __device__ __forceinline__ struct column column_of(const struct implicit &p,
                                                          const struct spot &spot, int at)
{
    const int ph = at / p.patch[2], pw = at - ph * p.patch[2];
    const int h = spot.h * p.shape.stride[1] - p.shape.padding[1] + ph;
    const int w = spot.w * p.shape.stride[2] - p.shape.padding[2] + pw;

    return {(int64_t)h * p.shape.in[2] + w,
            h >= 0 && h < p.shape.in[1] && w >= 0 && w < p.shape.in[2]};
}

/* Of a channel that is not there nothing is read, wherever its address points. */
static __device__ __forceinline__ void read_words(const struct implicit &p, const struct spot &spot,
                                                  const float *sample, int first, int words,
                                                  uint32_t *patch)
{
    const int columns = p.patch[1] * p.patch[2], in_plane = p.shape.in[1] * p.shape.in[2];
    const int begin = spot.d * p.shape.stride[0] - p.shape.padding[0];
    const int64_t next = (int64_t)p.shape.in[0] * in_plane;

    for (int at = (int)threadIdx.x; at < columns; at += THREADS) {
        const struct column column = column_of(p, spot, at);

        for (int pd = 0; pd < p.patch[0]; pd++) {
            const bool inside = column.inside && begin + pd >= 0 && begin + pd < p.shape.in[0];
            const int channels = inside ? p.shape.in_channels - first : 0;
            const float *from =
                inside ? sample + first * next + (int64_t)(begin + pd) * in_plane + column.from
                       : sample;
            uint32_t *to = patch + pd * columns + at;

            for (int word = 0; word < words; word += WORDS) {
#pragma unroll
                for (int k = 0; k < WORDS; k++) {
                    __pipeline_memcpy_async(to, from, 4, word + k < channels ? 0 : 4);
                    from += next;
                    to += p.pitch;
                }
            }
        }
    }
}

/* Two channels make a word. */
template <typename T>
static __device__ __forceinline__ void read_words(const struct implicit &p, const struct spot &spot,
                                                  const T *sample_, int first, int words,
                                                  uint32_t *patch)
{
    const unsigned short *sample = (const unsigned short *)sample_;
    const int columns = p.patch[1] * p.patch[2], in_plane = p.shape.in[1] * p.shape.in[2];
    const int begin = spot.d * p.shape.stride[0] - p.shape.padding[0];
    const int64_t next = (int64_t)p.shape.in[0] * in_plane;

    for (int at = (int)threadIdx.x; at < columns; at += THREADS) {
        const struct column column = column_of(p, spot, at);

        for (int pd = 0; pd < p.patch[0]; pd++) {
            const bool inside = column.inside && begin + pd >= 0 && begin + pd < p.shape.in[0];
            const unsigned short *from =
                sample + (int64_t)(begin + pd) * in_plane + column.from + 2 * (int64_t)first * next;
            uint32_t *to = patch + pd * columns + at;

            for (int word = 0; word < words; word += WORDS) {
                unsigned short half[2 * WORDS];

#pragma unroll
                for (int k = 0; k < 2 * WORDS; k++)
                    half[k] = inside && 2 * (first + word) + k < p.shape.in_channels
                                  ? __ldg(from + k * next)
                                  : (unsigned short)0;
#pragma unroll
                for (int k = 0; k < WORDS; k++)
                    to[k * p.pitch] = half[2 * k] | (uint32_t)half[2 * k + 1] << 16;
                from += 2 * WORDS * next;
                to += WORDS * p.pitch;
            }
        }
    }
}

/* Output m of the tile; false where the tile reaches over the end. */
static __device__ __forceinline__ bool place_of(const struct implicit &p, int m, int *ret_d,
                                                int *ret_h, int *ret_w)
{
    const int plane = m / p.tile[2], d = plane / p.tile[1];

    *ret_d = d;
    *ret_h = plane - d * p.tile[1];
    *ret_w = m - plane * p.tile[2];
    return d < p.tile[0];
}

template <int MF, int NF>
static __device__ __forceinline__ void write_sums(const struct implicit &p, const struct spot &spot,
                                                  const float (&sum)[MF][NF][4], int m, int channel)
{
    const int64_t plane = (int64_t)p.shape.out[0] * p.shape.out[1] * p.shape.out[2];
    float *y = p.y + spot.row * p.shape.out_channels * plane;

#pragma unroll
    for (int i = 0; i < MF; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int d, h, w;
            const bool there = place_of(p, m + 16 * i + 8 * half, &d, &h, &w);

            d += spot.d, h += spot.h, w += spot.w;
            if (!there || d >= p.shape.out[0] || h >= p.shape.out[1] || w >= p.shape.out[2])
                continue;
            float *to = y + ((int64_t)d * p.shape.out[1] + h) * p.shape.out[2] + w;
#pragma unroll
            for (int f = 0; f < NF; f++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const int c = channel + 8 * f + k;

                    if (c < p.shape.out_channels)
                        to[c * plane] =
                            sum[i][f][2 * half + k] + (p.bias ? __ldg(&p.bias[c]) : 0.0f);
                }
        }
}

template <typename T, int MF, int WN, int NF>
static __global__ void __launch_bounds__(THREADS, 2)
    implicit_kernel(const __grid_constant__ struct implicit p)
{
    typedef typename kind<T>::fragment fragment;
    constexpr int STEP = WN * NF * WARP; /* fragments of a step */
    extern __shared__ uint32_t shared[];
    uint32_t *const offsets = shared, *const patch = shared + (p.taps + 31) / 32 * 32;
    const struct spot spot = spot_of(p);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int m = warp / WN * MF * 16 + lane / 4, n = warp % WN * NF;
    const T *sample = (const T *)p.x + spot.row * p.shape.in_channels * p.shape.in[0] *
                                           p.shape.in[1] * p.shape.in[2];
    const fragment *weights = (const fragment *)p.weights +
                              (int64_t)blockIdx.y * p.groups * p.taps * STEP + n * WARP + lane;
    const fragment *const last = weights + (int64_t)(p.groups * p.taps - 1) * STEP;
    const uint32_t *at[MF][2];
    float sum[MF][NF][4] = {};
    fragment b[NF], next[NF];

    for (int tap = (int)threadIdx.x; tap < p.taps; tap += THREADS) {
        const int line = tap / p.shape.kernel[2], kd = line / p.shape.kernel[1];

        offsets[tap] = (uint32_t)((kd * p.patch[1] + line - kd * p.shape.kernel[1]) * p.patch[2] +
                                  tap - line * p.shape.kernel[2]);
    }
#pragma unroll
    for (int i = 0; i < 2 * MF; i++) {
        int d, h, w;
        const bool there = place_of(p, m + 8 * i, &d, &h, &w);

        at[i / 2][i % 2] =
            patch + lane % 4 * p.pitch +
            (there ? (d * p.shape.stride[0] * p.patch[1] + h * p.shape.stride[1]) * p.patch[2] +
                         w * p.shape.stride[2]
                   : 0);
    }
#pragma unroll
    for (int f = 0; f < NF; f++)
        next[f] = __ldg(weights + f * WARP);
    for (int first = 0; first < p.groups; first += p.at_once) {
        const int groups = p.groups - first < p.at_once ? p.groups - first : p.at_once;

        __syncthreads();
        read_words(p, spot, sample, first * WORDS, groups * WORDS, patch);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        for (int group = 0; group < groups; group++)
            for (int tap = 0; tap < p.taps; tap++) {
                const uint32_t offset = (uint32_t)(group * WORDS * p.pitch) + offsets[tap];

                weights = weights < last ? weights + STEP : last;
#pragma unroll
                for (int f = 0; f < NF; f++) {
                    b[f] = next[f];
                    next[f] = __ldg(weights + f * WARP);
                }
#pragma unroll
                for (int i = 0; i < MF; i++) {
                    const uint32_t a[4] = {at[i][0][offset], at[i][1][offset],
                                           at[i][0][offset + 4 * p.pitch],
                                           at[i][1][offset + 4 * p.pitch]};

                    multiply(sum[i], a, b, T(0.0f));
                }
            }
    }
    write_sums(p, spot, sum, m, ((int)blockIdx.y * WN * NF + n) * 8 + lane % 4 * 2);
}

/* Tiles of output channels, and how many places go with them. */
struct way {
    int outs, wn, nf;
};
static const struct way ways[] = {{16, 1, 2}, {32, 1, 4}, {48, 2, 3}, {64, 2, 4}};

static const struct way *way_of(const struct conv_shape *shape)
{
    const struct way *best = NULL;
    int64_t least = INT64_MAX;

    for (const struct way *way = ways; way < ways + sizeof(ways) / sizeof(ways[0]); way++) {
        int64_t padded = (shape->out_channels + way->outs - 1) / way->outs * way->outs;

        if (padded <= least) {
            least = padded;
            best = way;
        }
    }
    return best;
}

static int channels_of(const struct conv_shape *shape)
{
    return shape->dtype == DTYPE_FLOAT32 ? WORDS : 2 * WORDS;
}

static int places_of(const struct conv_shape *shape, const struct way *way)
{
    return THREADS / WARP / way->wn * 16 * (shape->dtype == DTYPE_FLOAT32 ? 2 : 4);
}

static int64_t groups_of(const struct conv_shape *shape)
{
    return (shape->in_channels + channels_of(shape) - 1) / channels_of(shape);
}

static int64_t taps_of(const struct conv_shape *shape)
{
    return shape->kernel[0] * shape->kernel[1] * shape->kernel[2];
}

static int64_t fragments_of(const struct conv_shape *shape)
{
    const struct way *way = way_of(shape);

    return (shape->out_channels + way->outs - 1) / way->outs * groups_of(shape) * taps_of(shape) *
           way->wn * way->nf * WARP;
}

/* Words of a plane of the patch: planes begin 8 banks apart. */
static int64_t pitch_of(const int64_t patch[3])
{
    return (patch[0] * patch[1] * patch[2] + 23) / 32 * 32 + 8;
}

/* Clocks of a block for eight words: products, then copying; both estimated. */
static double cost_of(const struct conv_shape *shape, const struct way *way, const int64_t tile[3],
                      int64_t *ret_pitch)
{
    int64_t patch[3], tiles = 1;
    double products = (double)places_of(shape, way) * way->outs * (double)taps_of(shape) * 8;

    for (int i = 0; i < 3; i++) {
        patch[i] = (tile[i] - 1) * shape->stride[i] + shape->kernel[i];
        tiles *= (shape->out[i] + tile[i] - 1) / tile[i];
    }
    *ret_pitch = pitch_of(patch);
    return (double)tiles * (products * (shape->dtype == DTYPE_FLOAT32 ? 3.0 / 500 : 2.0 / 1000) +
                            (double)(patch[0] * (patch[1] * patch[2] + THREADS / 2)) / 2);
}

/* The cheapest tile; false when none fits. */
static bool choose_tile(const struct conv_shape *shape, int64_t best[3])
{
    const struct way *way = way_of(shape);
    int64_t places = places_of(shape, way), pitch, tile[3];
    double least = DBL_MAX, cost;

    for (tile[0] = 1; tile[0] <= places && tile[0] <= shape->out[0]; tile[0]++)
        for (tile[1] = 1; tile[0] * tile[1] <= places && tile[1] <= shape->out[1]; tile[1]++)
            for (tile[2] = 1; tile[0] * tile[1] * tile[2] <= places && tile[2] <= shape->out[2];
                 tile[2]++) {
                cost = cost_of(shape, way, tile, &pitch);
                if (pitch * WORDS * 4 + TAPS_MAX * 4 > SHARED_MAX || !(cost < least))
                    continue;
                least = cost;
                for (int i = 0; i < 3; i++)
                    best[i] = tile[i];
            }
    return least < DBL_MAX;
}

extern "C" bool implicit_fits(const struct conv_shape *shape)
{
    int64_t tile[3], tiles = shape->rows;

    /* What three products leave out is below float32's own errors only where many are added up. */
    if (shape->dtype == DTYPE_FLOAT32 &&
        (!shape->normed || shape->in_channels * taps_of(shape) < EXACT_FROM))
        return false;
    for (int i = 0; i < 3; i++)
        if (shape->in[i] + 2 * shape->padding[i] > INT32_MAX / 8 || shape->stride[i] > 64 ||
            shape->kernel[i] > 64)
            return false;
    if (shape->in[1] * shape->in[2] > INT32_MAX / 8 || taps_of(shape) > TAPS_MAX ||
        shape->in_channels > INT32_MAX / 2 / TAPS_MAX || shape->out_channels > 65535 ||
        !choose_tile(shape, tile))
        return false;
    for (int i = 0; i < 3; i++)
        tiles *= (shape->out[i] + tile[i] - 1) / tile[i];
    return tiles <= INT32_MAX;
}

extern "C" uint64_t implicit_weights(const struct conv_shape *shape)
{
    return (uint64_t)fragments_of(shape) *
           (shape->dtype == DTYPE_FLOAT32 ? sizeof(uint4) : sizeof(uint2));
}

/* High parts of weights are rounded where that stays finite: half of what is left out then. */
static __device__ __forceinline__ void split(float w, uint32_t *ret_high, uint32_t *ret_low)
{
    uint32_t bits = __float_as_uint(w);
    uint32_t high = high_of(fabsf(w) < 0x1p127f ? bits + 0x1000u : bits);

    *ret_high = high;
    *ret_low = isfinite(w) ? __float_as_uint(w - __uint_as_float(high)) + 0x1000u : 0;
}

static __device__ __forceinline__ uint32_t pair_of(float low, float high, __half)
{
    return __half_as_ushort(__float2half_rn(low)) |
           (uint32_t)__half_as_ushort(__float2half_rn(high)) << 16;
}

static __device__ __forceinline__ uint32_t pair_of(float low, float high, __nv_bfloat16)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
}

static __device__ __forceinline__ void pack(const float *w, uint4 *to, float)
{
    split(w[0], &to->x, &to->z);
    split(w[1], &to->y, &to->w);
}

template <typename T> static __device__ __forceinline__ void pack(const float *w, uint2 *to, T)
{
    to->x = pair_of(w[0], w[1], T(0.0f));
    to->y = pair_of(w[2], w[3], T(0.0f));
}

/* Fragment i: [tiles of outputs][groups of channels][places][outputs by eights][lanes]. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    fragments_kernel(const __grid_constant__ struct implicit p, const float *from,
                     typename kind<T>::fragment *to, int eights, int64_t n)
{
    constexpr int PER = kind<T>::CHANNELS / WORDS; /* channels of a word */
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int lane = (int)(i % WARP), eight = (int)(i / WARP % eights);
    const int tap = (int)(i / WARP / eights % p.taps);
    const int64_t rest = i / WARP / eights / p.taps;
    const int64_t out = (rest / p.groups * eights + eight) * 8 + lane / 4;
    const int64_t channel = rest % p.groups * kind<T>::CHANNELS + lane % 4 * PER;
    float w[2 * PER];

    if (i >= n)
        return;
    for (int k = 0; k < 2 * PER; k++) {
        const int64_t c = channel + k / PER * 4 * PER + k % PER;

        w[k] = out < p.shape.out_channels && c < p.shape.in_channels
                   ? from[(out * p.shape.in_channels + c) * p.taps + tap]
                   : 0;
    }
    pack(w, to + i, T(0.0f));
}

extern "C" int implicit_repack(const struct implicit *implicit, const struct conv_shape *shape,
                               cudaStream_t stream, const float *from, void *to,
                               struct report *report)
{
    const struct way *way = way_of(shape);
    int64_t n = fragments_of(shape);

    WITH_DTYPE(
        shape->dtype, T,
        (fragments_kernel<T><<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, stream>>>(
            *implicit, from, (typename kind<T>::fragment *)to, way->wn * way->nf, n)));
    return CUDA_LAUNCHED(report);
}

typedef void (*implicit_launch)(const struct implicit);

template <typename T, int MF> static implicit_launch kernel_of(const struct way *way)
{
    switch (way->outs) {
    case 16:
        return implicit_kernel<T, MF, 1, 2>;
    case 32:
        return implicit_kernel<T, MF, 1, 4>;
    case 48:
        return implicit_kernel<T, MF, 2, 3>;
    default:
        return implicit_kernel<T, MF, 2, 4>;
    }
}

static implicit_launch kernel_of(const struct conv_shape *shape)
{
    const struct way *way = way_of(shape);

    return shape->dtype == DTYPE_FLOAT32   ? kernel_of<float, 2>(way)
           : shape->dtype == DTYPE_FLOAT16 ? kernel_of<__half, 4>(way)
                                           : kernel_of<__nv_bfloat16, 4>(way);
}

extern "C" int implicit_prepare(const struct conv_shape *shape, struct implicit *ret,
                                struct report *report)
{
    struct implicit p = {};
    int64_t tile[3] = {1, 1, 1}, patch[3];

    choose_tile(shape, tile);
    p.shape.in_channels = (int)shape->in_channels;
    p.shape.out_channels = (int)shape->out_channels;
    for (int i = 0; i < 3; i++) {
        p.shape.in[i] = (int)shape->in[i];
        p.shape.out[i] = (int)shape->out[i];
        p.shape.kernel[i] = (int)shape->kernel[i];
        p.shape.stride[i] = (int)shape->stride[i];
        p.shape.padding[i] = (int)shape->padding[i];
        patch[i] = (tile[i] - 1) * shape->stride[i] + shape->kernel[i];
        p.tile[i] = (int)tile[i];
        p.patch[i] = (int)patch[i];
        p.tiles[i] = (int)((shape->out[i] + tile[i] - 1) / tile[i]);
    }
    p.pitch = (int)pitch_of(patch);
    p.taps = (int)taps_of(shape);
    p.groups = (int)groups_of(shape);
    p.at_once = SHARED / (p.pitch * WORDS * 4);
    p.at_once = p.at_once < 1 ? 1 : p.at_once > p.groups ? p.groups : p.at_once;
    *ret = p;
    return CUDA(report,
                cudaFuncSetAttribute((const void *)kernel_of(shape),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX));
}

extern "C" int implicit_cuda(const struct implicit *implicit, const struct conv_shape *shape,
                             cudaStream_t stream, const void *weights, const float *bias,
                             const void *x, int64_t rows, float *y, struct report *report)
{
    const struct way *way = way_of(shape);
    struct implicit p = *implicit;
    size_t shared = ((size_t)(p.taps + 31) / 32 * 32 + (size_t)(p.at_once * WORDS * p.pitch)) * 4;
    dim3 grid((unsigned)(rows * p.tiles[0] * p.tiles[1] * p.tiles[2]),
              (unsigned)((shape->out_channels + way->outs - 1) / way->outs));

    p.x = x;
    p.weights = weights;
    p.bias = bias;
    p.y = y;
    kernel_of(shape)<<<grid, THREADS, shared, stream>>>(p);
    return CUDA_LAUNCHED(report);
}
