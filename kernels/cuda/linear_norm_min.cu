/*
 * linear_norm_min.cu - which of the products runs for how many rows, and where their memory is
 *
 * A run is cut into tiles of one size, by the kernel that is fastest for so many rows; results do
 * not depend on the cut (product.cuh). What a cut costs is what limits all of these kernels: the
 * bytes that move into and out of shared memory for a unit of K, times the waves of blocks.
 */
#include <cuda.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <cudaTypedefs.h>

#include "kernels/cuda/linear_norm_min.h"
#include "kernels/cuda/product.h"
#include "kernels/size.h"

#define PIECE_ROWS 131072    /* of one launch: rows_cuda() counts fours of them in grid.y */
#define WAVE_COST  SLAB_SIZE /* a wave begins and ends with nothing to multiply */

struct linear_norm_min {
    struct linear_norm_min_shape shape;
    enum product_kind kind;
    struct product_run run; /* what is the same in every run */
    uint8_t *memory;        /* weights, then four arrays of [out] floats */
    int clusters;           /* of two blocks, that run at a time */
    int blocks;             /* alone */
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    char text[320];
};

enum way { NARROW, FEW, WIDE };

/* How many rows one launch takes, and how. */
struct cut {
    enum way way;
    int tile;     /* product_run.tile */
    int64_t rows; /* with what fills the last tile */
    int64_t cost;
};

static enum product_kind kind_of(const struct linear_norm_min_shape *shape)
{
    if (shape->kind == GEMM_EXACT)
        return PRODUCT_EXACT;
    if (shape->kind == GEMM_SINGLE)
        return PRODUCT_SINGLE;
    return shape->dtype == DTYPE_BFLOAT16 ? PRODUCT_BFLOAT16 : PRODUCT_FLOAT16;
}

static int64_t rounded(int64_t rows, int64_t to)
{
    return (rows + to - 1) / to * to;
}

/*
 * What a unit costs a block, in bytes of shared memory's time: it is written once and read by each
 * product (a warpgroup's reads 64 channels and its rows, 32 bytes each), 128 bytes a clock; but a
 * multiprocessor takes in no more than some 40 bytes a clock.
 */
static int64_t cost_of(enum product_kind kind, enum way way, int tile)
{
    const int64_t products = (kind == PRODUCT_EXACT ? 3 : 2) * PLANE / 16;
    const int64_t halves = way == NARROW ? 1 : 2, slabs = way == WIDE ? 2 : 1;
    const int64_t read = slabs * halves * products * (SLAB + tile) * 32;
    const int64_t taken_in = slabs * SLAB_SIZE + halves * tile * PLANE * 4;

    return read + taken_in > taken_in * 16 / 5 ? read + taken_in : taken_in * 16 / 5;
}

/* Takes a cut if it costs less than the one before. Its rows must fit the work space. */
static void consider(const struct linear_norm_min *fused, enum way way, int tile, int64_t rows,
                     struct cut *best)
{
    const int64_t slabs = fused->run.slabs, height = way == NARROW ? tile : 2 * tile;
    const int64_t tiles = (rows + height - 1) / height;
    const int64_t blocks = tiles * (way == WIDE ? slabs / 2 : slabs);
    const int64_t at_once = way == NARROW && tile <= 64 ? fused->blocks : 2 * fused->clusters;
    const int64_t waves = (blocks + at_once - 1) / at_once;
    const int64_t cost = waves * (cost_of(fused->kind, way, tile) + WAVE_COST);

    if (tiles * height > rounded(fused->shape.rows, 2 * HALF_MAX) ||
        (best->cost > 0 && cost >= best->cost))
        return;
    *best = (struct cut){way, tile, tiles * height, cost};
}

/* The cheapest cut of so many rows. */
static struct cut cut_of(const struct linear_norm_min *fused, int64_t rows)
{
    const int step = WIDE_STEP(fused->kind);
    const int64_t least = (rows + 2 * HALF_MAX - 1) / (2 * HALF_MAX);
    struct cut best = {};

    for (int i = 0; narrow_product_tile(i); i++)
        consider(fused, NARROW, narrow_product_tile(i), rows, &best);
    for (int64_t tiles = least; tiles <= least + 4; tiles++) {
        int half = (int)rounded((rows + 2 * tiles - 1) / (2 * tiles), step);

        half = half < HALF_MIN ? (int)rounded(HALF_MIN, step) : half;
        consider(fused, FEW, half, rows, &best);
        consider(fused, WIDE, half, rows, &best);
    }
    return best;
}

struct sizes {
    int units;
    uint64_t weights, rows, scales, keys;
};

static struct sizes sizes_of(const struct linear_norm_min_shape *shape)
{
    uint64_t in = (uint64_t)shape->in, rows = (uint64_t)rounded(shape->rows, 2 * HALF_MAX);
    enum product_kind kind = kind_of(shape);
    uint64_t number = kind == PRODUCT_EXACT ? 4 : 2;
    struct sizes s;

    s.units = (int)(in / PRODUCT_UNIT(kind));
    s.weights = size_times(size_times((uint64_t)shape->out, in), number);
    s.rows = size_times(size_times(rows, in), number);
    /* Half tiles of 8 rows too many for pairs of column blocks have room for them. */
    s.scales = size_times(rows, (kind == PRODUCT_EXACT ? (uint64_t)s.units : 1) * sizeof(float));
    s.scales = size_times(s.scales, 2);
    s.scales = size_round(s.scales, 256);
    /* A last piece's tiles may end further behind its rows than the whole's would. */
    s.keys = size_round(size_times(size_plus(rows, 2 * HALF_MAX), sizeof(uint32_t)), 256);
    return s;
}

extern "C" void linear_norm_min_size(const struct linear_norm_min_shape *shape,
                                     uint64_t *ret_resident, uint64_t *ret_work)
{
    struct sizes s = sizes_of(shape);

    *ret_resident = size_plus(s.weights, 4 * (uint64_t)shape->out * sizeof(float));
    *ret_work = size_plus(size_plus(s.rows, s.scales), size_plus(s.keys, 256));
}

extern "C" bool linear_norm_min_fits(const struct linear_norm_min_shape *shape)
{
    if (shape->in % (2 * PRODUCT_UNIT(kind_of(shape))) || shape->out % (4 * SLAB) ||
        shape->groups * GROUP != shape->out)
        return false;
    if ((shape->kind == GEMM_NATIVE) != (shape->dtype != DTYPE_FLOAT32))
        return false;
    return product_runs_here();
}

/*
 * The largest channel's scale goes into the rows' scales and the others become relative to it, so
 * that adding a unit up takes one multiplication a number, and still no sum overflows unless the
 * product with the largest weights may.
 */
static int relate_channels(struct linear_norm_min *fused, cudaStream_t stream,
                           struct report *report)
{
    size_t n = (size_t)fused->shape.out, size = n * sizeof(float);
    float *scales = (float *)malloc(size), common = 0;
    int r;

    if (!scales)
        return report_set(report, -ENOMEM, "no memory for a plan");
    r = CUDA(report, cudaMemcpyAsync(scales, fused->run.channel_scales, size,
                                     cudaMemcpyDeviceToHost, stream));
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(stream));
    for (size_t i = 0; i < n && r == 0; i++)
        common = scales[i] > common ? scales[i] : common;
    fused->run.common_scale = common > 0 ? common : 1;
    for (size_t i = 0; i < n && r == 0; i++)
        scales[i] /= fused->run.common_scale;
    if (r == 0)
        r = CUDA(report, cudaMemcpyAsync(fused->run.channel_scales, scales, size,
                                         cudaMemcpyHostToDevice, stream));
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(stream));
    free(scales);
    return r;
}

/* The driver's function that makes tensor maps, without linking the driver. */
static int find_encode(struct linear_norm_min *fused, struct report *report)
{
    cudaDriverEntryPointQueryResult result;
    void *function = NULL;
    int r = CUDA(report, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                          12000, cudaEnableDefault, &result));

    if (r == 0 && !function)
        r = report_set(report, -ENODEV, "the driver makes no tensor maps");
    fused->encode = (PFN_cuTensorMapEncodeTiled_v12000)function;
    return r;
}

/* All scales of a run's work space, in boxes of a tile's. */
static int map_scales(const struct linear_norm_min *fused, const struct product_run *run,
                      uint64_t size, CUtensorMap *ret, struct report *report)
{
    cuuint64_t n = size / sizeof(float), strides = 0;
    cuuint32_t box = SCALES((cuuint32_t)run->tile), step = 1;

    if (fused->kind != PRODUCT_EXACT)
        return 0;
    if (fused->encode(ret, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1, run->scales, &n, &strides, &box,
                      &step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        return report_set(report, -EINVAL, "cuTensorMapEncodeTiled: no map of %llu scales",
                          (unsigned long long)n);
    return 0;
}

static void describe(struct linear_norm_min *fused)
{
    static const char *const words[] = {"three fp16 products of split halves, moved to float32 "
                                        "sums every 64 of K",
                                        "one product of scaled fp16", "one fp16 product",
                                        "one bf16 product"};
    int64_t last[WIDE] = {};

    for (int way = NARROW; way < WIDE; way++)
        while (last[way] < fused->shape.rows && cut_of(fused, last[way] + 1).way <= way)
            last[way]++;
    snprintf(
        fused->text, sizeof(fused->text),
        "in registers (wgmma): %s; tiles of 64 channels x 8 to 192 rows up to %lld rows, of 64 "
        "x two halves of %d to %d up to %lld, then of 128 x two halves",
        words[fused->kind], (long long)last[NARROW], HALF_MIN, HALF_MAX, (long long)last[FEW]);
}

extern "C" int linear_norm_min_new(const struct linear_norm_min_shape *shape, const float *weight,
                                   const float *bias, const float *gamma, const float *beta,
                                   cudaStream_t stream, struct linear_norm_min **ret,
                                   struct report *report)
{
    struct linear_norm_min *fused = (struct linear_norm_min *)calloc(1, sizeof(*fused));
    struct sizes s = sizes_of(shape);
    uint64_t resident, work;
    float *arrays;
    int device, r;

    if (!fused)
        return report_set(report, -ENOMEM, "no memory for a plan");
    fused->shape = *shape;
    fused->kind = kind_of(shape);
    linear_norm_min_size(shape, &resident, &work);
    r = CUDA(report, cudaMalloc((void **)&fused->memory, resident));
    if (r < 0)
        goto failed;
    arrays = (float *)(fused->memory + s.weights);
    fused->run.weights = fused->memory;
    fused->run.channel_scales = arrays;
    fused->run.bias = arrays + shape->out;
    fused->run.gamma = arrays + 2 * shape->out;
    fused->run.beta = arrays + 3 * shape->out;
    fused->run.units = s.units;
    fused->run.slabs = (int)(shape->out / SLAB);
    fused->run.eps = shape->eps;
    r = find_encode(fused, report);
    if (r == 0)
        r = CUDA(report, cudaGetDevice(&device));
    if (r == 0)
        r = CUDA(report,
                 cudaDeviceGetAttribute(&fused->blocks, cudaDevAttrMultiProcessorCount, device));
    if (r == 0)
        r = wide_product_ready(fused->kind, &fused->clusters, report);
    if (r == 0 && (fused->clusters < 1 || fused->blocks < 1)) /* cut_of() divides by both */
        r = report_set(report, -ENODEV, "the device runs no cluster of two blocks");
    if (r == 0)
        r = narrow_product_ready(fused->kind, report);
    if (r == 0)
        r = weights_cuda(stream, fused->kind, weight, shape->in, bias, gamma, beta, &fused->run,
                         report);
    if (r == 0)
        r = relate_channels(fused, stream, report);
    if (r < 0)
        goto failed;
    describe(fused);
    *ret = fused;
    return 0;
failed:
    linear_norm_min_free(fused);
    return r;
}

extern "C" struct linear_norm_min *linear_norm_min_free(struct linear_norm_min *fused)
{
    if (fused)
        cudaFree(fused->memory);
    free(fused);
    return NULL;
}

extern "C" const char *linear_norm_min_text(const struct linear_norm_min *fused)
{
    return fused->text;
}

extern "C" unsigned linear_norm_min_launches(const struct linear_norm_min *fused, int64_t rows)
{
    (void)fused;
    return (unsigned)(2 * ((rows + PIECE_ROWS - 1) / PIECE_ROWS));
}

extern "C" int64_t linear_norm_min_filled(const struct linear_norm_min *fused, int64_t rows)
{
    return rows > PIECE_ROWS ? 0 : cut_of(fused, rows).rows;
}

static int run_piece(const struct linear_norm_min *fused, cudaStream_t stream, const void *x,
                     struct product_run *run, uint64_t scales_size, bool early,
                     struct report *report)
{
    const struct cut cut = cut_of(fused, run->n);
    CUtensorMap scales = {};
    int r;

    run->tile = cut.tile;
    r = map_scales(fused, run, scales_size, &scales, report);
    if (r == 0)
        r = rows_cuda(stream, fused->kind, cut.rows, x, fused->shape.in, run, early, report);
    if (r < 0)
        return r;
    if (cut.way == NARROW)
        return narrow_product_cuda(stream, fused->kind, run, &scales, report);
    return wide_product_cuda(stream, fused->kind, cut.way == FEW, fused->clusters, run, &scales,
                             report);
}

extern "C" const uint32_t *linear_norm_min_keys(const struct linear_norm_min *fused,
                                                const void *work)
{
    struct sizes s = sizes_of(&fused->shape);

    return (const uint32_t *)((const uint8_t *)work + s.rows + s.scales);
}

extern "C" int linear_norm_min_run(const struct linear_norm_min *fused, cudaStream_t stream,
                                   void *work, const void *x,
                                   const struct linear_norm_min_input *input, int64_t rows,
                                   float *to, bool early, struct report *report)
{
    const int64_t row_size = fused->shape.in * (int64_t)dtype_size(fused->shape.dtype);
    struct sizes s = sizes_of(&fused->shape);
    struct product_run run = fused->run;
    int r = 0;

    run.input = input;
    run.rows = (uint8_t *)work;
    run.scales = (float *)(run.rows + s.rows);
    run.keys = (uint32_t *)(run.rows + s.rows + s.scales);
    run.arrived = (uint32_t *)(run.rows + s.rows + s.scales + s.keys);
    for (int64_t at = 0; at < rows && r == 0; at += run.n, run.keys += run.n) {
        run.n = rows - at < PIECE_ROWS ? rows - at : PIECE_ROWS;
        run.to = to ? to + at : NULL;
        r = run_piece(fused, stream, (const char *)x + at * row_size, &run, s.scales,
                      early || at > 0, report);
    }
    return r;
}
