/*
 * tail.cu - the element by element end of a pipeline, in one pass over the data
 *
 * A tail reads a value (as it is, normalised, or spread by an add), runs it through minimum, clamp,
 * dropout and adds, and writes it: as float32 for the next step, or rounded into each request's
 * result. Requests of a block are dealt to tiles, a block of threads each; a thread takes four
 * neighbours at a time. Neighbours may lie in different rows or channels; the cursor moves over
 * such a border, so that nothing depends on sizes being multiples of four, and 16-byte accesses are
 * used where the addresses allow.
 *
 * row_kernel is the same for long rows that stay together: no tile crosses a row, so that whatever
 * belongs to the row is found once per tile, and dropout's thread and turn move by addition.
 *
 * Two numberings meet here. e counts a segment's own elements, [outer, rows, inner]. The request's
 * result, and the element that the mask knows, is [outer, rows of the request, inner]: the same
 * order when the batch comes first or the segment is the whole request.
 */
#include "kernels/cuda/tail.cuh"

#define THREADS      256
#define TILE_MIN     1024 /* elements: one turn of a block */
#define TILE_MAX     16384
#define TILES_WANTED 1024

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

/* s: which of the tail's segments. */
static __device__ __forceinline__ void mask_row(const struct tail &tail, const struct point &point,
                                                uint64_t seed, int s, const struct stream &stream,
                                                float v[WIDTH])
{
    uint64_t counter = __ldg(&tail.counters[point.counter * tail.counter_pitch + s]);

    if (point.zero) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            v[k] = __fmul_rn(v[k], 0.0f);
        return;
    }
    mask_four(point, seed, counter + stream.turn, stream.thread, v);
}

/* A tensor's numbers to the four elements at e of a row; behind its end, those of its beginning. */
static __device__ __forceinline__ void add_row(const struct summand &summand, uint32_t e,
                                               float v[WIDTH])
{
    const int last = summand.rank - 1;
    uint32_t left = 0, at = 0; /* in the innermost dimension; in the tensor */

#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (left == 0) {
            uint32_t index = e + k;

            at = 0;
#pragma unroll 1
            for (int d = last; d > 0; d--) {
                const uint32_t next = index / summand.dims[d];

                index -= next * summand.dims[d];
                at += index * summand.stride[d];
                left = d == last ? summand.dims[d] - index : left;
                index = next;
            }
            while (index >= summand.dims[0]) /* behind the end */
                index -= summand.dims[0];
            at += index * summand.stride[0];
            left = last == 0 ? summand.dims[0] - index : left;
        }
        v[k] += __ldg(&summand.tensor[at]);
        at += summand.stride[last];
        left--;
    }
}

template <enum tail_source SOURCE, bool MASK>
static __global__ void __launch_bounds__(THREADS)
    tail_kernel(const __grid_constant__ struct tail tail)
{
    int s = find_segment(tail.tiles, tail.n_segments, (int32_t)blockIdx.x);
    const struct segment seg = tail.segments[s];
    int64_t elements = seg.rows * tail.elements;
    int64_t e = (int64_t)((int32_t)blockIdx.x - tail.tiles[s]) * tail.tile + threadIdx.x * WIDTH;

#pragma unroll 2
    for (int turn = 0; turn < tail.tile / (THREADS * WIDTH); turn++, e += THREADS * WIDTH) {
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
        for (int p = 0; p < tail.n_points; p++) {
            const struct point &point = tail.points[p];

            if (point.kind == POINT_LIMIT)
                limit(point.low, point.high, v);
            else if (point.kind == POINT_ADD)
                add_row(tail.summands[point.summand],
                        (uint32_t)(e - quotient(e, tail.elements) * tail.elements), v);
            else if (MASK)
                mask(tail, point, seg, s, e, n, v);
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

/* Where a row's tile is, and what does not change within it. */
struct place {
    const struct segment &seg;
    int s;
    int64_t row;       /* of the segment */
    const float *from; /* the row */
    void *to;          /* the row's result */
    bool aligned;      /* both allow 16 bytes at a time (8 for 16-bit results) */
};

static __device__ __forceinline__ void normalise_row(const struct tail &tail, int64_t row,
                                                     uint32_t e, int n, float v[WIDTH])
{
    uint32_t spatial = (uint32_t)tail.norm.spatial;
    uint32_t per_group = (uint32_t)(tail.norm.channels / tail.norm.groups);
    uint32_t channel = e / spatial, at = e - channel * spatial;
    const float2 *stats = tail.norm.stats + row * tail.norm.groups;
    float mean = 0, scale = 0, shift = 0;

#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (k >= n)
            break;
        if (k == 0 || at == spatial) {
            if (k > 0) {
                at = 0;
                channel++;
            }
            float2 both = __ldg(&stats[channel / per_group]);

            mean = both.x;
            scale = both.y * (tail.norm.gamma ? __ldg(&tail.norm.gamma[channel]) : 1.0f);
            shift = tail.norm.beta ? __ldg(&tail.norm.beta[channel]) : 0.0f;
        }
        v[k] = __fmaf_rn(v[k] - mean, scale, shift);
        at++;
    }
}

/* A turn of the block further: a mask has at least as many threads as a block. */
static __device__ __forceinline__ void stream_advance(struct stream &stream)
{
    stream.thread += THREADS;
    if (stream.thread >= stream.threads) {
        stream.thread -= stream.threads;
        stream.turn++;
    }
}

template <enum tail_source SOURCE, bool MASK, typename T>
static __device__ __forceinline__ void walk_row(const struct tail &tail, const struct place &place,
                                                uint32_t e, uint32_t end)
{
    bool train = MASK && place.seg.train;
    struct stream stream = {0, 0, THREADS};

    if (train)
        stream = stream_at(tail, place.seg, place.row, e);
#pragma unroll 2
    for (; e < end; e += THREADS * WIDTH) {
        int n = end - e < WIDTH ? (int)(end - e) : WIDTH;
        float v[WIDTH];

        if (place.aligned && n == WIDTH) {
            float4 all = __ldcs((const float4 *)(place.from + e));

            v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
        } else {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
                v[k] = k < n ? place.from[e + k] : 0;
        }
        if (SOURCE == TAIL_NORM)
            normalise_row(tail, place.seg.row + place.row, e, n, v);
        for (int p = 0; p < tail.n_points; p++) {
            const struct point &point = tail.points[p];

            if (point.kind == POINT_LIMIT)
                limit(point.low, point.high, v);
            else if (point.kind == POINT_ADD)
                add_row(tail.summands[point.summand], e, v);
            else if (train)
                mask_row(tail, point, place.seg.seed, place.s, stream, v);
        }
        store_row<T>(place.to, place.aligned, e, 0, n, v);
        if (MASK)
            stream_advance(stream);
    }
}

template <enum tail_source SOURCE, bool MASK, typename T>
static __global__ void __launch_bounds__(THREADS)
    row_kernel(const __grid_constant__ struct tail tail)
{
    int s = find_segment(tail.tiles, tail.n_segments, (int32_t)blockIdx.x);
    const struct segment seg = tail.segments[s];
    uint32_t elements = (uint32_t)tail.elements, tile = (uint32_t)tail.tile;
    uint32_t tiles = (elements + tile - 1) / tile;
    uint32_t at = blockIdx.x - (uint32_t)tail.tiles[s], row = at / tiles;
    uint32_t begin = (at - row * tiles) * tile;
    uint32_t end = elements - begin < tile ? elements : begin + tile;
    struct place place = {seg, s, row, NULL, NULL, false};

    place.from = tail.from + (seg.row + row) * tail.elements;
    if (tail.to)
        place.to = tail.to + (seg.row + row) * tail.elements;
    else
        place.to = (T *)seg.y + (seg.out_row + row) * tail.elements;
    place.aligned =
        (uintptr_t)place.to % (WIDTH * sizeof(T)) == 0 && (uintptr_t)place.from % 16 == 0;
    walk_row<SOURCE, MASK, T>(tail, place, begin + threadIdx.x * WIDTH, end);
}

template <enum tail_source SOURCE, bool MASK>
static void launch(cudaStream_t stream, const struct tail *tail, unsigned tiles)
{
    if constexpr (SOURCE != TAIL_ADD) {
        if (tail->by_row) {
            WITH_DTYPE(tail->to ? DTYPE_FLOAT32 : tail->dtype, T,
                       (row_kernel<SOURCE, MASK, T><<<tiles, THREADS, 0, stream>>>(*tail)));
            return;
        }
    }
    tail_kernel<SOURCE, MASK><<<tiles, THREADS, 0, stream>>>(*tail);
}

static bool masks(const struct tail *tail)
{
    for (int p = 0; p < tail->n_points; p++)
        if (tail->points[p].kind == POINT_MASK)
            return true;
    return false;
}

template <enum tail_source SOURCE>
static void launch_source(cudaStream_t stream, const struct tail *tail, unsigned tiles)
{
    if (masks(tail))
        launch<SOURCE, true>(stream, tail, tiles);
    else
        launch<SOURCE, false>(stream, tail, tiles);
}

extern "C" bool tail_by_row(const struct tail *tail)
{
    if (tail->source == TAIL_CONSTANT)
        return true;
    if (tail->source == TAIL_ADD || tail->outer != 1 || tail->elements > INT32_MAX)
        return false;
    return tail->elements >= TILE_MIN && (tail->elements % WIDTH == 0 || !masks(tail));
}

/* Large enough that finding its place costs a tile little, small enough to fill the device. */
extern "C" int32_t tail_tile(const struct tail *tail, int64_t rows)
{
    int64_t elements = rows * tail->elements;
    int32_t most =
        tail->source == TAIL_CONSTANT ? CONSTANT_TILE / (int32_t)dtype_size(tail->dtype) : TILE_MAX;
    int32_t tile = TILE_MIN;

    while (tile < most && elements / (2 * tile) >= TILES_WANTED)
        tile *= 2;
    return tile;
}

extern "C" int64_t tail_tiles(const struct tail *tail, int32_t tile, int64_t n)
{
    if (tail->by_row)
        return n * ((tail->elements + tile - 1) / tile);
    return (n * tail->elements + tile - 1) / tile;
}

extern "C" int tail_cuda(cudaStream_t stream, const struct tail *tail, int32_t tiles,
                         struct report *report)
{
    if (tiles == 0)
        return 0;
    if (outer_fits(tail))
        return outer_cuda(stream, tail, tiles, report);
    switch (tail->source) {
    case TAIL_DIRECT:
        launch_source<TAIL_DIRECT>(stream, tail, (unsigned)tiles);
        break;
    case TAIL_NORM:
        launch_source<TAIL_NORM>(stream, tail, (unsigned)tiles);
        break;
    case TAIL_ADD:
        launch_source<TAIL_ADD>(stream, tail, (unsigned)tiles);
        break;
    case TAIL_CONSTANT: /* constant.cu */
        break;
    }
    return CUDA_LAUNCHED(report);
}
