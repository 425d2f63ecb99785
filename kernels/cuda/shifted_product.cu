/*
 * shifted_product.cu - convolution of 16-bit numbers with stride 1, by wgmma
 *
 * A first kernel lays a sample out with its padding, eight channels of a place side by side. From
 * an output's place to the inputs of its window it is then the same way for every output, and 64
 * places in a row are a left operand as they lie: for each place of the window at another address.
 * Places that are no outputs, because a line's window reaches over its end, are multiplied too and
 * not written.
 *
 * A block takes a tile of places and up to 128 output channels. Inputs come in units: 16 channels,
 * one depth of the window. Weights come in lines of the window. A warpgroup copies, two multiply,
 * each for half of the tile, one or two operands of 64 places; blocks go on from tile to tile, so
 * that copies run ahead while results are written.
 *
 * A sum's order is: channels by sixteens, places of the window. It depends on nothing else.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/product.h"
#include "kernels/cuda/shifted.h"
#include "kernels/size.h"

#define WARPGROUP   128
#define WARPS       4   /* of a warpgroup */
#define OPERAND     64  /* places */
#define STEP        16  /* channels */
#define PLACE       16  /* bytes: half a step */
#define OUTS_MAX    128 /* of a block */
#define LAY_THREADS 256
#define SHARED_MAX  (224 << 10)
#define LAID        (INT64_C(32) << 20)  /* bytes at a time, which stay in the L2 */
#define LAID_MAX    (INT64_C(256) << 20) /* of one sample */

/* Places of a tile: two warpgroups with `tall` operands each. */
#define TILE(tall) (2 * OPERAND * (tall))

/* Barriers stand first in shared memory. */
#define BARRIERS (2 * (SHIFTED_LEFTS_MAX + SHIFTED_RIGHTS_MAX) * 8)
#define LEFTS_AT ((BARRIERS + 127) / 128 * 128)

struct ring {
    uint32_t full_left, empty_left, full_right, empty_right, lefts, rights;
    uint32_t left, right; /* bytes of a unit of inputs, of a line of weights */
};

static __device__ __forceinline__ struct ring ring_at(const struct shifted_ring &sizes,
                                                      uint32_t shared, uint32_t line)
{
    const uint32_t left = (uint32_t)sizes.places * 2 * PLACE;

    return {shared,
            shared + SHIFTED_LEFTS_MAX * 8,
            shared + 2 * SHIFTED_LEFTS_MAX * 8,
            shared + (2 * SHIFTED_LEFTS_MAX + SHIFTED_RIGHTS_MAX) * 8,
            shared + LEFTS_AT,
            shared + LEFTS_AT + sizes.lefts * left,
            left,
            line};
}

/* Where a warpgroup stands in the rings. */
struct position {
    int left, right;
    uint32_t left_parity, right_parity;
};

static __device__ __forceinline__ void next_left(const struct shifted_ring &sizes,
                                                 struct position &at)
{
    if (++at.left == sizes.lefts) {
        at.left = 0;
        at.left_parity ^= 1;
    }
}

static __device__ __forceinline__ void next_right(const struct shifted_ring &sizes,
                                                  struct position &at)
{
    if (++at.right == sizes.rights) {
        at.right = 0;
        at.right_parity ^= 1;
    }
}

/* What a block works on. */
struct item {
    int64_t row;
    int first, set; /* the tile's first place; output channels */
};

static __device__ __forceinline__ struct item item_of(const struct shifted &p, int tile, int i)
{
    const int tiles = (p.last + tile - 1) / tile, rest = i / p.sets, row = rest / tiles;

    return {row, (rest - row * tiles) * tile, i - rest * p.sets};
}

/* One thread. */
template <int N, int TALL>
static __device__ __forceinline__ void load_all(const struct shifted &p, uint32_t shared, int items)
{
    const struct shifted_ring &sizes = p.rings[TALL - 1];
    const uint32_t line = (uint32_t)p.shape.kernel[2] * N * 2 * PLACE;
    const struct ring ring = ring_at(sizes, shared, line);
    const int64_t chunk = (int64_t)p.places * PLACE; /* from eight channels to the next */
    struct position at = {0, 0, 1, 1};

    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const struct item item = item_of(p, TILE(TALL), i);
        const uint8_t *x = p.laid + item.row * p.steps * 2 * chunk + (int64_t)item.first * PLACE;
        const uint8_t *weights =
            p.weights + (int64_t)item.set * p.steps * p.shape.kernel[0] * p.shape.kernel[1] * line;

        for (int step = 0; step < p.steps; step++)
            for (int d = 0; d < p.shape.kernel[0]; d++) {
                const uint8_t *from =
                    x + step * 2 * chunk + (int64_t)d * p.padded[1] * p.padded[2] * PLACE;
                const uint32_t to = ring.lefts + at.left * ring.left;
                const uint32_t full = ring.full_left + 8 * at.left;

                barrier_wait(ring.empty_left + 8 * at.left, at.left_parity);
                barrier_expect(full, ring.left);
                previous_wait(); /* the kernel before lays inputs out */
                bulk_copy(to, from, ring.left / 2, full);
                bulk_copy(to + ring.left / 2, from + chunk, ring.left / 2, full);
                next_left(sizes, at);
                for (int h = 0; h < p.shape.kernel[1]; h++, weights += line) {
                    const uint32_t full = ring.full_right + 8 * at.right;

                    barrier_wait(ring.empty_right + 8 * at.right, at.right_parity);
                    barrier_expect(full, line);
                    bulk_copy(ring.rights + at.right * line, weights, line, full);
                    next_right(sizes, at);
                }
            }
    }
}

/* W is known when compiling, so that descriptors are uniform. */
template <bool BFLOAT, int N, int TALL, int W>
static __device__ __forceinline__ void sums_of(const struct shifted &p, uint32_t shared,
                                               struct position &at, float (&sum)[TALL][N / 2])
{
    const struct shifted_ring &sizes = p.rings[TALL - 1];
    const struct ring ring = ring_at(sizes, shared, (uint32_t)p.shape.kernel[2] * N * 2 * PLACE);
    const uint64_t lefts = operand(ring.lefts, ring.left / 2) + W * TALL * OPERAND;
    const uint64_t rights = operand(ring.rights, N * PLACE);
    const bool tells = threadIdx.x % WARP == 0;
    int left_before = -1, right_before = -1;

#pragma unroll 1
    for (int unit = 0; unit < p.steps * p.shape.kernel[0]; unit++) {
        barrier_wait(ring.full_left + 8 * at.left, at.left_parity);
#pragma unroll 1
        for (int h = 0; h < p.shape.kernel[1]; h++) {
            uint64_t left = lefts + at.left * (ring.left >> 4) + h * p.padded[2];
            uint64_t right = rights + at.right * (ring.right >> 4);

            barrier_wait(ring.full_right + 8 * at.right, at.right_parity);
            product_begin();
#pragma unroll 1
            for (int w = 0; w < p.shape.kernel[2]; w++) {
#pragma unroll
                for (int t = 0; t < TALL; t++)
                    product<N, BFLOAT>(sum[t], left + t * OPERAND, right, 1);
                left++;
                right += N * 2;
            }
            product_commit();
            product_wait<1>();
            if (tells && right_before >= 0)
                barrier_arrive(ring.empty_right + 8 * right_before);
            if (tells && h == 0 && left_before >= 0)
                barrier_arrive(ring.empty_left + 8 * left_before);
            right_before = at.right;
            next_right(sizes, at);
        }
        left_before = at.left;
        next_left(sizes, at);
    }
    product_wait<0>();
#pragma unroll
    for (int t = 0; t < TALL; t++)
        product_result(sum[t]);
    if (tells) {
        barrier_arrive(ring.empty_right + 8 * right_before);
        barrier_arrive(ring.empty_left + 8 * left_before);
    }
}

/* The outputs among a thread's places, in all of its channels. */
template <int N, int TALL>
static __device__ __forceinline__ void write_sums(const struct shifted &p, const struct item &item,
                                                  int first, const float (&sum)[TALL][N / 2])
{
    const int plane = p.padded[1] * p.padded[2];
    const int64_t spatial = (int64_t)p.shape.out[0] * p.shape.out[1] * p.shape.out[2];
    const int channel = item.set * N + threadIdx.x % 4 * 2;
    float *y = p.y + (item.row * p.shape.out_channels + channel) * spatial;

#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = first + t * OPERAND + 8 * r, d = at / plane;
            const int h = (at - d * plane) / p.padded[2], w = at - d * plane - h * p.padded[2];

            if (at >= p.last || h >= p.shape.out[1] || w >= p.shape.out[2])
                continue;
            float *to = y + ((int64_t)d * p.shape.out[1] + h) * p.shape.out[2] + w;
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (channel + 8 * j + c < p.shape.out_channels)
                        to[(8 * j + c) * spatial] =
                            sum[t][4 * j + 2 * r + c] +
                            (p.bias ? __ldg(&p.bias[channel + 8 * j + c]) : 0.0f);
        }
}

template <bool BFLOAT, int N, int TALL, int W>
static __device__ __forceinline__ void multiply_all(const struct shifted &p, uint32_t shared,
                                                    int items)
{
    const int t = threadIdx.x % WARPGROUP;
    const int mine = W * TALL * OPERAND + t / WARP * 16 + t % WARP / 4; /* of the tile's places */
    struct position at = {0, 0, 0, 0};

    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const struct item item = item_of(p, TILE(TALL), i);
        float sum[TALL][N / 2] = {};

        sums_of<BFLOAT, N, TALL, W>(p, shared, at, sum);
        write_sums<N, TALL>(p, item, item.first + mine, sum);
    }
}

template <bool BFLOAT, int N, int TALL>
static __global__ void __launch_bounds__(3 * WARPGROUP, 1)
    shifted_kernel(const __grid_constant__ struct shifted p, int items)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) uint8_t memory[];
    const uint32_t shared = shared_address(memory);

    if (threadIdx.x == 0) {
        const struct ring ring = ring_at(p.rings[TALL - 1], shared, 0);

        for (int i = 0; i < SHIFTED_LEFTS_MAX; i++) {
            barrier_init(ring.full_left + 8 * i, 1);
            barrier_init(ring.empty_left + 8 * i, 2 * WARPS);
        }
        for (int i = 0; i < SHIFTED_RIGHTS_MAX; i++) {
            barrier_init(ring.full_right + 8 * i, 1);
            barrier_init(ring.empty_right + 8 * i, 2 * WARPS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        fewer_registers();
        if (threadIdx.x == 0)
            load_all<N, TALL>(p, shared, items);
    } else {
        more_registers();
        if (threadIdx.x < 2 * WARPGROUP)
            multiply_all<BFLOAT, N, TALL, 0>(p, shared, items);
        else
            multiply_all<BFLOAT, N, TALL, 1>(p, shared, items);
    }
#else
    __trap();
#endif
}

/* Eight channels of a place: zeros in the padding, of channels that are not there, and behind. */
static __global__ void __launch_bounds__(LAY_THREADS)
    lay_kernel(const __grid_constant__ struct shifted p, const unsigned short *x, uint4 *to)
{
    const int place = (int)(blockIdx.x * LAY_THREADS + threadIdx.x);
    const int first = (int)blockIdx.y * 8, channels = p.shape.in_channels;
    const int plane = p.padded[1] * p.padded[2];
    const int line = place / p.padded[2], depth = place / plane;
    const int d = depth - p.shape.padding[0];
    const int h = line - depth * p.padded[1] - p.shape.padding[1];
    const int w = place - line * p.padded[2] - p.shape.padding[2];
    const int64_t next = (int64_t)p.shape.in[0] * p.shape.in[1] * p.shape.in[2];
    const int64_t row = blockIdx.z;
    const bool inside =
        d >= 0 && d < p.shape.in[0] && h >= 0 && h < p.shape.in[1] && w >= 0 && w < p.shape.in[2];
    uint32_t words[4];

    next_launch();
    if (place >= p.places)
        return;
    x += (row * channels + first) * next + ((int64_t)d * p.shape.in[1] + h) * p.shape.in[2] + w;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t low = inside && first + 2 * k < channels ? __ldg(x + 2 * k * next) : 0;
        const uint32_t high =
            inside && first + 2 * k + 1 < channels ? __ldg(x + (2 * k + 1) * next) : 0;

        words[k] = low | high << 16;
    }
    to[(row * gridDim.y + blockIdx.y) * p.places + place] = {words[0], words[1], words[2],
                                                             words[3]};
}

/* The least N that holds as many output channels in as few sets as can be. */
static int outs_of(const struct conv_shape *shape)
{
    static const int sizes[] = {16, 32, 48, 64, 96, OUTS_MAX};
    int64_t sets = (shape->out_channels + OUTS_MAX - 1) / OUTS_MAX;
    int i = 0;

    while (sizes[i] * sets < shape->out_channels)
        i++;
    return sizes[i];
}

static int64_t sets_of(const struct conv_shape *shape)
{
    return (shape->out_channels + outs_of(shape) - 1) / outs_of(shape);
}

static int64_t steps_of(const struct conv_shape *shape)
{
    return (shape->in_channels + STEP - 1) / STEP;
}

/* False: too large for shared memory. */
static bool ring_of(const struct conv_shape *shape, int tall, struct shifted_ring *ret)
{
    int64_t width = shape->in[2] + 2 * shape->padding[2];
    int64_t places = TILE(tall) + (shape->kernel[1] - 1) * width + shape->kernel[2] - 1;
    int64_t left = places * 2 * PLACE, right = shape->kernel[2] * outs_of(shape) * 2 * PLACE;
    int64_t lefts = SHIFTED_LEFTS_MAX, rights;

    while (lefts > 2 && (SHARED_MAX - LEFTS_AT - lefts * left) / right < 2 * shape->kernel[1])
        lefts--;
    rights = (SHARED_MAX - LEFTS_AT - lefts * left) / right;
    rights = rights < SHIFTED_RIGHTS_MAX ? rights : SHIFTED_RIGHTS_MAX;
    if (rights < 3)
        return false;
    *ret = {(int)places, (int)lefts, (int)rights, (int)(LEFTS_AT + lefts * left + rights * right)};
    return true;
}

/* Places of a sample that is laid out, and the one behind its last output. */
static int64_t places_of(const struct conv_shape *shape, int64_t *ret_last)
{
    int64_t plane, padded[3], most = 0;

    for (int i = 0; i < 3; i++)
        padded[i] = shape->in[i] + 2 * shape->padding[i];
    plane = padded[1] * padded[2];
    *ret_last = (shape->out[0] - 1) * plane + (shape->out[1] - 1) * padded[2] + shape->out[2];
    for (int tall = 1; tall <= 2; tall++) {
        int64_t tiles = (*ret_last + TILE(tall) - 1) / TILE(tall);
        int64_t end = tiles * TILE(tall) + (shape->kernel[0] - 1) * plane +
                      (shape->kernel[1] - 1) * padded[2] + shape->kernel[2] - 1;

        most = end > most ? end : most;
    }
    return most > padded[0] * plane ? most : padded[0] * plane;
}

static int64_t laid_of(const struct conv_shape *shape)
{
    int64_t last;

    return steps_of(shape) * 2 * places_of(shape, &last) * PLACE;
}

/* Samples that are laid out at a time. */
static int64_t rows_of(const struct conv_shape *shape)
{
    int64_t rows = laid_of(shape) < LAID ? LAID / laid_of(shape) : 1;

    rows = rows < shape->rows ? rows : shape->rows;
    return rows < UINT16_MAX ? rows : UINT16_MAX; /* blocks along z */
}

/* Where lines are short, too many places would be multiplied for nothing. */
extern "C" bool shifted_fits(const struct conv_shape *shape)
{
    struct shifted_ring ring;
    int64_t last;

    if (shape->dtype == DTYPE_FLOAT32 || !product_runs_here() ||
        shape->in_channels > INT32_MAX / 4 / PLACE || shape->out_channels > INT32_MAX / OUTS_MAX)
        return false;
    for (int i = 0; i < 3; i++)
        if (shape->stride[i] != 1 || shape->in[i] + 2 * shape->padding[i] > 1024 ||
            shape->kernel[i] > 64)
            return false;
    return places_of(shape, &last) <= LAID_MAX / PLACE && laid_of(shape) <= LAID_MAX &&
           steps_of(shape) * 2 <= UINT16_MAX && /* blocks along y */
           last <= 2 * shape->out[0] * shape->out[1] * shape->out[2] && ring_of(shape, 1, &ring) &&
           rows_of(shape) * ((last + TILE(1) - 1) / TILE(1)) * sets_of(shape) <= INT32_MAX;
}

extern "C" uint64_t shifted_weights(const struct conv_shape *shape)
{
    return (uint64_t)(sets_of(shape) * steps_of(shape) * shape->kernel[0] * shape->kernel[1] *
                      shape->kernel[2] * outs_of(shape) * 2 * PLACE);
}

/* Launching */

typedef void (*shifted_function)(const struct shifted, int);

template <bool BFLOAT, int TALL> static shifted_function kernel_for(int outs)
{
    switch (outs) {
    case 16:
        return shifted_kernel<BFLOAT, 16, TALL>;
    case 32:
        return shifted_kernel<BFLOAT, 32, TALL>;
    case 48:
        return shifted_kernel<BFLOAT, 48, TALL>;
    case 64:
        return shifted_kernel<BFLOAT, 64, TALL>;
    case 96:
        return shifted_kernel<BFLOAT, 96, TALL>;
    default:
        return shifted_kernel<BFLOAT, OUTS_MAX, TALL>;
    }
}

static const void *kernel_of(const struct conv_shape *shape, int tall)
{
    const int outs = outs_of(shape);

    if (shape->dtype == DTYPE_BFLOAT16)
        return (const void *)(tall == 1 ? kernel_for<true, 1>(outs) : kernel_for<true, 2>(outs));
    return (const void *)(tall == 1 ? kernel_for<false, 1>(outs) : kernel_for<false, 2>(outs));
}

extern "C" int shifted_prepare(const struct conv_shape *shape, struct shifted *ret,
                               struct report *report)
{
    struct shifted p = {};
    int64_t last;
    int device, r = 0;

    p.shape.in_channels = (int)shape->in_channels;
    p.shape.out_channels = (int)shape->out_channels;
    for (int i = 0; i < 3; i++) {
        p.shape.in[i] = (int)shape->in[i];
        p.shape.out[i] = (int)shape->out[i];
        p.shape.kernel[i] = (int)shape->kernel[i];
        p.shape.padding[i] = (int)shape->padding[i];
        p.padded[i] = (int)(shape->in[i] + 2 * shape->padding[i]);
    }
    p.places = (int)places_of(shape, &last);
    p.last = (int)last;
    p.steps = (int)steps_of(shape);
    p.sets = (int)sets_of(shape);
    p.rows = rows_of(shape);
    /* What is allowed is a kernel's, not this shape's. */
    for (int tall = 1; tall <= 2 && r == 0; tall++)
        if (ring_of(shape, tall, &p.rings[tall - 1]))
            r = CUDA(report,
                     cudaFuncSetAttribute(kernel_of(shape, tall),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX));
    if (r == 0)
        r = CUDA(report, cudaGetDevice(&device));
    if (r == 0)
        r = CUDA(report,
                 cudaDeviceGetAttribute(&p.processors, cudaDevAttrMultiProcessorCount, device));
    *ret = p;
    return r;
}

extern "C" uint64_t shifted_workspace(const struct conv_shape *shape)
{
    return (uint64_t)(rows_of(shape) * laid_of(shape));
}

extern "C" unsigned shifted_launches(const struct shifted *shifted, int64_t rows)
{
    return 2 * (unsigned)((rows + shifted->rows - 1) / shifted->rows);
}

/* Eight channels of an output: [sets][steps][places of the window][halves of a step][outputs]. */
template <bool BFLOAT>
static __global__ void __launch_bounds__(LAY_THREADS)
    weights_kernel(const __grid_constant__ struct shifted p, const float *from, uint4 *to, int outs,
                   int taps, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * LAY_THREADS + threadIdx.x;
    const int64_t tap = i / outs / 2 % taps, rest = i / outs / 2 / taps;
    const int64_t out = rest / p.steps * outs + i % outs;
    const int64_t first = rest % p.steps * STEP + i / outs % 2 * 8;
    unsigned short half[8];

    if (i >= n)
        return;
    for (int k = 0; k < 8; k++) {
        const bool there = out < p.shape.out_channels && first + k < p.shape.in_channels;
        const float w = there ? from[(out * p.shape.in_channels + first + k) * taps + tap] : 0.0f;

        half[k] = BFLOAT ? __bfloat16_as_ushort(__float2bfloat16_rn(w))
                         : __half_as_ushort(__float2half_rn(w));
    }
    to[i] = {half[0] | (uint32_t)half[1] << 16, half[2] | (uint32_t)half[3] << 16,
             half[4] | (uint32_t)half[5] << 16, half[6] | (uint32_t)half[7] << 16};
}

extern "C" int shifted_repack(const struct shifted *shifted, const struct conv_shape *shape,
                              cudaStream_t stream, const float *from, void *to,
                              struct report *report)
{
    const int64_t n = (int64_t)(shifted_weights(shape) / sizeof(uint4));
    const int taps = shifted->shape.kernel[0] * shifted->shape.kernel[1] * shifted->shape.kernel[2];
    const unsigned blocks = (unsigned)((n + LAY_THREADS - 1) / LAY_THREADS);

    if (shape->dtype == DTYPE_BFLOAT16)
        weights_kernel<true><<<blocks, LAY_THREADS, 0, stream>>>(*shifted, from, (uint4 *)to,
                                                                 outs_of(shape), taps, n);
    else
        weights_kernel<false><<<blocks, LAY_THREADS, 0, stream>>>(*shifted, from, (uint4 *)to,
                                                                  outs_of(shape), taps, n);
    return CUDA_LAUNCHED(report);
}

static int items_of(const struct shifted &p, int tall, int64_t rows)
{
    return (int)(rows * ((p.last + TILE(tall) - 1) / TILE(tall)) * p.sets);
}

/* Low tiles leave fewer blocks without work in the end, but read weights twice as often. */
static int tall_of(const struct shifted &p, int64_t rows)
{
    int64_t turns[2];

    if (p.rings[1].size == 0)
        return 1;
    for (int tall = 1; tall <= 2; tall++)
        turns[tall - 1] = (items_of(p, tall, rows) + p.processors - 1) / p.processors;
    return turns[0] * 6 < turns[1] * 10 ? 1 : 2;
}

static int run_rows(struct shifted *p, const struct conv_shape *shape, cudaStream_t stream,
                    const unsigned short *x, int64_t rows, void *workspace, struct report *report)
{
    const int tall = tall_of(*p, rows);
    int items = items_of(*p, tall, rows), r;
    const dim3 lay((unsigned)((p->places + LAY_THREADS - 1) / LAY_THREADS), (unsigned)p->steps * 2,
                   (unsigned)rows);
    const dim3 blocks((unsigned)(items < p->processors ? items : p->processors));
    void *arguments[] = {p, &items};

    lay_kernel<<<lay, LAY_THREADS, 0, stream>>>(*p, x, (uint4 *)workspace);
    r = CUDA_LAUNCHED(report);
    return r < 0 ? r
                 : launch_early(kernel_of(shape, tall), blocks, 1, 3 * WARPGROUP,
                                p->rings[tall - 1].size, stream, arguments, report);
}

extern "C" int shifted_cuda(const struct shifted *shifted, const struct conv_shape *shape,
                            cudaStream_t stream, void *workspace, const void *weights,
                            const float *bias, const void *x, int64_t rows, float *y,
                            struct report *report)
{
    const int64_t in = shape->in_channels * shape->in[0] * shape->in[1] * shape->in[2];
    const int64_t out = shape->out_channels * shape->out[0] * shape->out[1] * shape->out[2];
    struct shifted p = *shifted;
    int r = 0;

    p.laid = (const uint8_t *)workspace;
    p.weights = (const uint8_t *)weights;
    p.bias = bias;
    for (int64_t row = 0; row < rows && r == 0; row += p.rows) {
        p.y = y + row * out;
        r = run_rows(&p, shape, stream, (const unsigned short *)x + row * in,
                     rows - row < p.rows ? rows - row : p.rows, workspace, report);
    }
    return r;
}
