/*
 * tail.cu - the element by element end of a pipeline, in one pass over the data
 *
 * A tail reads a value (as it is, normalised, added to a tensor, or the constant of a proof), runs
 * it through minimum, clamp and dropout, and writes it: as float32 for the next step, or rounded
 * into each request's result. Requests of a block are dealt to tiles of TAIL_TILE elements, a
 * thread takes four neighbours at a time. Neighbours may lie in different rows or channels; the
 * cursor moves over such a border, so that nothing depends on sizes being multiples of four, and
 * 16-byte accesses are used where the addresses allow.
 *
 * Two numberings meet here. e counts a segment's own elements, [outer, rows, inner]. The request's
 * result, and the element that the mask knows, is [outer, rows of the request, inner]: the same
 * order when the batch comes first or the segment is the whole request.
 */
#include "kernels/cuda/dropout.cuh"

#define THREADS 256
#define WIDTH   4

static __device__ int find_segment(const int32_t *tiles, int n, int32_t tile)
{
    int low = 0, high = n - 1;

    while (low < high) {
        int middle = (low + high + 1) / 2;

        if (tiles[middle] <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Element e in a tensor where the segment's rows are rows [first, first + rows) of `all`. */
static __device__ __forceinline__ int64_t placed(const struct tail &tail, const struct segment &seg,
                                                 int64_t e, int64_t first, int64_t all)
{
    if (tail.outer == 1 || (first == 0 && all == seg.rows))
        return first * tail.elements + e;
    int64_t i = e % tail.inner, row = e / tail.inner;

    return (row / seg.rows * all + first + row % seg.rows) * tail.inner + i;
}

static __device__ __forceinline__ bool together(const struct tail &tail, const struct segment &seg,
                                                int64_t first, int64_t all)
{
    return tail.outer == 1 || (first == 0 && all == seg.rows);
}

static __device__ __forceinline__ void load(const float *from, int64_t at, int n, float v[WIDTH])
{
    if (n == WIDTH && at % WIDTH == 0) {
        float4 four = *(const float4 *)(from + at);

        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            v[k] = k < n ? from[at + k] : 0;
    }
}

static __device__ __forceinline__ void normalise(const struct tail &tail, const struct segment &seg,
                                                 int64_t e, int n, float v[WIDTH])
{
    int64_t row = quotient(e, tail.elements), within = e - row * tail.elements;
    int64_t channel = quotient(within, tail.norm.spatial);
    int64_t at = within - channel * tail.norm.spatial;
    int64_t per_group = tail.norm.channels / tail.norm.groups;
    float mean = 0, scale = 0, shift = 0;

#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (k >= n)
            break;
        if (k == 0 || at == tail.norm.spatial) {
            if (k > 0) {
                at = 0;
                channel++;
            }
            if (channel == tail.norm.channels) {
                channel = 0;
                row++;
            }
            float2 stats =
                tail.norm.stats[(seg.row + row) * tail.norm.groups + quotient(channel, per_group)];

            mean = stats.x;
            scale = stats.y * (tail.norm.gamma ? tail.norm.gamma[channel] : 1.0f);
            shift = tail.norm.beta ? tail.norm.beta[channel] : 0.0f;
        }
        v[k] = __fmaf_rn(v[k] - mean, scale, shift);
        at++;
    }
}

static __device__ __forceinline__ void add(const struct tail &tail, const struct segment &seg,
                                           int64_t e, int n, float v[WIDTH])
{
    int64_t rest = quotient(e, tail.inner), i = e - rest * tail.inner;
    int64_t outer = quotient(rest, seg.rows), row = rest - outer * seg.rows;

#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (k >= n)
            break;
        int64_t from = (seg.row + row) * tail.from_elements;
        int64_t with = outer * tail.add.outer_stride, left = i;

        for (int d = tail.add.rank - 1; d >= 0; d--) {
            int64_t next = quotient(left, tail.add.dims[d]), index = left - next * tail.add.dims[d];

            from += index * tail.add.from_stride[d];
            with += index * tail.add.stride[d];
            left = next;
        }
        v[k] = tail.from[from] + tail.add.tensor[with];
        if (++i == tail.inner) {
            i = 0;
            if (++row == seg.rows) {
                row = 0;
                outer++;
            }
        }
    }
}

/* Which of the four are written: rows that the guard stops come by the full path. */
static __device__ __forceinline__ unsigned
constant(const struct tail &tail, const struct segment &seg, int64_t e, int n, float v[WIDTH])
{
    int64_t row = quotient(e, tail.elements), at = e - row * tail.elements;
    unsigned write = 0;

#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (k >= n)
            break;
        uint32_t top = tail.constant.tops[seg.row + row];

        v[k] = tail.constant.value;
        if (top < tail.constant.bound) {
            write |= 1u << k;
        } else if (top >= 0x7f800000u && tail.constant.nonfinite_spreads) {
            v[k] = __int_as_float(0x7fc00000);
            write |= 1u << k;
        }
        if (++at == tail.elements) {
            at = 0;
            row++;
        }
    }
    return write;
}

static __device__ __forceinline__ void mask(const struct tail &tail, const struct point &point,
                                            const struct segment &seg, int s, int64_t e, int n,
                                            float v[WIDTH])
{
    int64_t size = seg.job_rows * tail.elements;
    uint64_t counter = tail.counters[point.counter * tail.counter_pitch + s];
    int64_t first = placed(tail, seg, e, seg.job_row, seg.job_rows);

    if (!seg.train)
        return;
    if (point.zero) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            v[k] = __fmul_rn(v[k], 0.0f);
    } else if (size % 4 == 0 && first % 4 == 0 && together(tail, seg, seg.job_row, seg.job_rows)) {
        uint4 words = dropout_four(seg.seed, counter, size, first);

#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            v[k] = dropout_masked(v[k], dropout_word(words, k) < point.keep_below, point.scale);
    } else {
        for (int k = 0; k < n; k++) {
            int64_t at = placed(tail, seg, e + k, seg.job_row, seg.job_rows);
            uint32_t word = dropout_one(seg.seed, counter, size, at);

#pragma unroll
            for (int j = 0; j < WIDTH; j++) /* no run-time index: v stays in registers */
                if (j == k)
                    v[j] = dropout_masked(v[j], word < point.keep_below, point.scale);
        }
    }
}

template <typename T>
static __device__ __forceinline__ void store(T *to, int64_t at, unsigned write,
                                             const float v[WIDTH])
{
    __align__(16) T four[WIDTH];

#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        round_to(v[k], &four[k]);
    if (write == (1u << WIDTH) - 1 && (uintptr_t)(to + at) % (WIDTH * sizeof(T)) == 0) {
        if (sizeof(T) == 4)
            *(uint4 *)(to + at) = *(const uint4 *)four;
        else
            *(uint2 *)(to + at) = *(const uint2 *)four;
        return;
    }
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        if (write & (1u << k))
            to[at + k] = four[k];
}

template <typename T>
static __device__ __forceinline__ void deliver(const struct tail &tail, const struct segment &seg,
                                               int64_t e, unsigned write, const float v[WIDTH])
{
    T *y = (T *)seg.y;

    if (together(tail, seg, seg.out_row, seg.out_rows)) {
        store(y, seg.out_row * tail.elements + e, write, v);
        return;
    }
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        if (write & (1u << k))
            round_to(v[k], &y[placed(tail, seg, e + k, seg.out_row, seg.out_rows)]);
}

template <enum tail_source SOURCE, bool MASK>
static __global__ void __launch_bounds__(THREADS)
    tail_kernel(const __grid_constant__ struct tail tail)
{
    int s = find_segment(tail.tiles, tail.n_segments, (int32_t)blockIdx.x);
    const struct segment seg = tail.segments[s];
    int64_t elements = seg.rows * tail.elements;
    int64_t e = (int64_t)((int32_t)blockIdx.x - tail.tiles[s]) * TAIL_TILE + threadIdx.x * WIDTH;

#pragma unroll 2
    for (int turn = 0; turn < TAIL_TILE / (THREADS * WIDTH); turn++, e += THREADS * WIDTH) {
        if (e >= elements)
            return;
        int n = elements - e < WIDTH ? (int)(elements - e) : WIDTH;
        unsigned write = (1u << n) - 1;
        float v[WIDTH] = {0, 0, 0, 0};

        if (SOURCE == TAIL_DIRECT || SOURCE == TAIL_NORM)
            load(tail.from, seg.row * tail.elements + e, n, v);
        if (SOURCE == TAIL_NORM)
            normalise(tail, seg, e, n, v);
        if (SOURCE == TAIL_ADD)
            add(tail, seg, e, n, v);
        if (SOURCE == TAIL_CONSTANT)
            write = constant(tail, seg, e, n, v);
        for (int p = 0; p < tail.n_points; p++) {
            const struct point &point = tail.points[p];

            if (MASK && point.dropout) {
                mask(tail, point, seg, s, e, n, v);
            } else if (!point.dropout) {
#pragma unroll
                for (int k = 0; k < WIDTH; k++)
                    v[k] = min_nan(max_nan(v[k], point.low), point.high);
            }
        }
        if (tail.to)
            store(tail.to, seg.row * tail.elements + e, write, v);
        else if (tail.dtype == DTYPE_FLOAT32)
            deliver<float>(tail, seg, e, write, v);
        else if (tail.dtype == DTYPE_FLOAT16)
            deliver<__half>(tail, seg, e, write, v);
        else
            deliver<__nv_bfloat16>(tail, seg, e, write, v);
    }
}

template <enum tail_source SOURCE>
static void launch(cudaStream_t stream, const struct tail *tail, unsigned tiles)
{
    bool mask = false;

    for (int p = 0; p < tail->n_points; p++)
        mask |= tail->points[p].dropout;
    if (mask)
        tail_kernel<SOURCE, true><<<tiles, THREADS, 0, stream>>>(*tail);
    else
        tail_kernel<SOURCE, false><<<tiles, THREADS, 0, stream>>>(*tail);
}

extern "C" int tail_cuda(cudaStream_t stream, const struct tail *tail, int32_t tiles,
                         struct report *report)
{
    if (tiles == 0)
        return 0;
    switch (tail->source) {
    case TAIL_DIRECT:
        launch<TAIL_DIRECT>(stream, tail, (unsigned)tiles);
        break;
    case TAIL_NORM:
        launch<TAIL_NORM>(stream, tail, (unsigned)tiles);
        break;
    case TAIL_ADD:
        launch<TAIL_ADD>(stream, tail, (unsigned)tiles);
        break;
    case TAIL_CONSTANT:
        launch<TAIL_CONSTANT>(stream, tail, (unsigned)tiles);
        break;
    }
    return CUDA_LAUNCHED(report);
}
