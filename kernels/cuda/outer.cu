/*
 * outer.cu - the outer sum y[o, n] = m[n] + t[o], the end of the pipeline that this library is for
 *
 * A tail (tail.cu) for one shape: a row is one number, an add moves the batch to the fastest place,
 * and nothing follows. What is left is one addition per number written, so all that counts is to
 * find n and o with few instructions: one 32-bit division for four neighbours. A compact result is
 * m alone, as if o were one.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/hopper.cuh"

#define THREADS 256
#define WIDTH   4

static __device__ __forceinline__ float minimum_of(const float *from, bool keys)
{
    const float v = *from; /* not by __ldg(): it was written while this kernel ran */

    return keys ? of_key(__float_as_uint(v)) : v;
}

/* Which of n segments, at most 1024, the tile is in: by two loads of a warp, one behind the other.
 * Behind a large product no block starts early enough to hide ten of them. */
static __device__ __forceinline__ int segment_of(const int32_t *tiles, int n, int32_t tile)
{
    const int lane = threadIdx.x % WARP, step = (n + WARP - 1) / WARP;
    int at = lane * step, group;

    group = WARP - 1 - __clz(__ballot_sync(~0u, at < n && tiles[at] <= tile));
    at = group * step + lane;
    return group * step + WARP - 1 -
           __clz(__ballot_sync(~0u, lane < step && at < n && tiles[at] <= tile));
}

/* Of a segment what is needed for every number: in registers, for y might be the segment itself. */
template <typename T> struct place {
    T *y;
    const float *from;
    uint32_t rows, out_row, out_rows; /* a request has no more */
    bool compact, whole;              /* all of a request's rows */

    __device__ __forceinline__ place(const struct tail &tail, const struct segment &seg)
        : y((T *)seg.y), from(tail.from + seg.row), rows((uint32_t)seg.rows),
          out_row((uint32_t)seg.out_row), out_rows((uint32_t)seg.out_rows), compact(seg.compact),
          whole(seg.out_row == 0 && seg.out_rows == seg.rows)
    {
    }

    __device__ __forceinline__ void store(int64_t e, int64_t o, uint32_t row, int n,
                                          const float v[WIDTH]) const
    {
        __align__(16) T four[WIDTH];

#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            round_to(v[k], &four[k]);
        if (whole && n == WIDTH && (uintptr_t)(y + e) % sizeof(four) == 0) {
            if (sizeof(T) == 4)
                __stcs((uint4 *)(y + e), *(const uint4 *)four);
            else
                __stcs((uint2 *)(y + e), *(const uint2 *)four);
            return;
        }
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            if (k < n)
                y[o * out_rows + out_row + row] = four[k];
            if (++row == rows) {
                row = 0;
                o++;
            }
        }
    }
};

template <typename T>
static __device__ __forceinline__ void write_tile(const struct tail &tail, const place<T> &to,
                                                  int32_t tile)
{
    const uint32_t rows = to.rows;
    int64_t first = (int64_t)tile * tail.tile;
    int64_t elements = to.compact ? rows : rows * tail.elements;
    int64_t o_first = quotient(first, rows);
    uint32_t row_first = (uint32_t)(first - o_first * rows);
    uint32_t size = (uint32_t)(elements - first < tail.tile ? elements - first : tail.tile);

    previous_wait();
#pragma unroll 2
    for (uint32_t at = threadIdx.x * WIDTH; at < size; at += THREADS * WIDTH) {
        uint32_t over = (row_first + at) / rows, row = row_first + at - over * rows;
        int64_t o = o_first + over;
        int n = size - at < WIDTH ? (int)(size - at) : WIDTH;
        float v[WIDTH], with = __ldg(&tail.add.tensor[o]);
        uint32_t next = row;
        int64_t next_o = o;

#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            v[k] = k < n ? minimum_of(to.from + next, tail.keys) : 0;
            if (!to.compact) /* -0 plus 0 is another number */
                v[k] += with;
            if (++next == rows) {
                next = 0;
                if (++next_o < tail.outer)
                    with = __ldg(&tail.add.tensor[next_o]);
            }
        }
        to.store(first + at, o, row, n, v);
    }
}

/* A block a tile; of a graph, whose blocks are as many as one request of all rows has, sometimes
 * several. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    outer_kernel(const __grid_constant__ struct tail tail)
{
    int32_t tile = (int32_t)blockIdx.x, end;

#pragma unroll 1
    do {
        struct tail_table table = {tail.segments, tail.tiles, tail.n_segments};

        if (tail.table)
            table = *tail.table;
        end = table.tiles[table.n_segments];

        const int s = segment_of(table.tiles, table.n_segments, tile);

        if (tile < end)
            write_tile(tail, place<T>(tail, table.segments[s]), tile - table.tiles[s]);
    } while ((tile += (int32_t)gridDim.x) < end);
}

extern "C" bool outer_fits(const struct tail *tail)
{
    return tail->source == TAIL_ADD && tail->inner == 1 && tail->from_elements == 1 &&
           tail->add.outer_stride == 1 && tail->n_points == 0 && !tail->to;
}

extern "C" int outer_cuda(cudaStream_t stream, const struct tail *tail, int32_t tiles,
                          struct report *report)
{
    void *arguments[] = {(void *)tail};

    if (tail->keys) {
        int r;

        WITH_DTYPE(tail->dtype, T,
                   r = launch_early((const void *)outer_kernel<T>, dim3((unsigned)tiles), 1,
                                    THREADS, 0, stream, arguments, report));
        return r;
    }
    WITH_DTYPE(tail->dtype, T, (outer_kernel<T><<<(unsigned)tiles, THREADS, 0, stream>>>(*tail)));
    return CUDA_LAUNCHED(report);
}
