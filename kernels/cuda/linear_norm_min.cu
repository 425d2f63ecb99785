/*
 * linear_norm_min.cu - which of the products runs for how many rows, and where their memory is
 *
 * A run of many rows is cut into pieces, each with the kernel that is fastest for it; results do
 * not depend on the cut (product.cuh).
 */
#include <cuda.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <cudaTypedefs.h>

#include "kernels/cuda/linear_norm_min.h"
#include "kernels/cuda/product.h"
#include "kernels/size.h"

#define PIECE_ROWS 262144 /* of one launch: rows_kernel counts rows / 8 in grid.y */

struct linear_norm_min {
    struct linear_norm_min_shape shape;
    enum product_kind kind;
    struct product_run run; /* what is the same in every run */
    uint8_t *memory;        /* weights, then four arrays of [out] floats */
    int clusters;           /* of wide_product, that run at a time */
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    char text[240];
};

/* Rows that one launch takes, and how. */
struct cut {
    bool wide, few;
    int tile; /* narrow */
    int64_t rows;
};

/*
 * A wave of wide tiles has 512 rows; what is left over is cheapest in tiles of 64 channels, and
 * below 128 rows the weights' way through memory decides.
 */
static struct cut next_cut(int64_t rows)
{
    struct cut piece = {};

    if (rows >= 2 * WIDE_ROWS) {
        piece.wide = true;
        piece.rows = rows < PIECE_ROWS ? rows / (2 * WIDE_ROWS) * (2 * WIDE_ROWS) : PIECE_ROWS;
    } else if (rows > NARROW_MAX) {
        piece.wide = piece.few = true;
        piece.rows = rows > WIDE_ROWS + NARROW_MAX || rows < WIDE_ROWS ? rows : WIDE_ROWS;
    } else {
        piece.rows = rows;
        for (piece.tile = 8; piece.tile < rows; piece.tile *= 2)
            ;
    }
    return piece;
}

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

struct sizes {
    int units;
    uint64_t weights, rows, scales, keys;
};

static struct sizes sizes_of(const struct linear_norm_min_shape *shape)
{
    uint64_t in = (uint64_t)shape->in, rows = (uint64_t)rounded(shape->rows, WIDE_ROWS);
    enum product_kind kind = kind_of(shape);
    uint64_t number = kind == PRODUCT_EXACT ? 4 : 2;
    struct sizes s;

    s.units = (int)(in / PRODUCT_UNIT(kind));
    s.weights = size_times(size_times((uint64_t)shape->out, in), number);
    s.rows = size_times(size_times(rows, in), number);
    s.scales = size_times(rows, (kind == PRODUCT_EXACT ? (uint64_t)s.units : 1) * sizeof(float));
    s.scales = size_round(s.scales, 256);
    s.keys = size_round(size_times(rows, sizeof(uint32_t)), 256);
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
                      uint64_t size, int tile, CUtensorMap *ret, struct report *report)
{
    cuuint64_t n = size / sizeof(float), strides = 0;
    cuuint32_t box = SCALES(tile), step = 1;

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

    snprintf(fused->text, sizeof(fused->text),
             "in registers (wgmma): %s; tiles of 64 x 8 to 128 up to "
             "128 rows, 64 x 256 up to 511, then 128 x 256",
             words[fused->kind]);
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
    int r;

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
        r = wide_product_ready(fused->kind, &fused->clusters, report);
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
    unsigned n = 0;

    (void)fused;
    for (; rows > 0; n += 2)
        rows -= next_cut(rows).rows;
    return n;
}

extern "C" int linear_norm_min_run(const struct linear_norm_min *fused, cudaStream_t stream,
                                   void *work, const void *x, int64_t rows, float *to,
                                   struct report *report)
{
    const int64_t row_size = fused->shape.in * (int64_t)dtype_size(fused->shape.dtype);
    struct sizes s = sizes_of(&fused->shape);
    struct product_run run = fused->run;
    int r = 0;

    run.rows = (uint8_t *)work;
    run.scales = (float *)(run.rows + s.rows);
    run.keys = (uint32_t *)(run.rows + s.rows + s.scales);
    run.arrived = (uint32_t *)(run.rows + s.rows + s.scales + s.keys);
    for (struct cut piece; rows > 0 && r == 0; rows -= piece.rows) {
        piece = next_cut(rows);
        run.n = piece.rows;
        run.to = to;

        CUtensorMap scales = {};
        int tile = piece.wide ? HALF : piece.tile;

        r = map_scales(fused, &run, s.scales, tile, &scales, report);
        if (r == 0)
            r = rows_cuda(stream, fused->kind, tile,
                          rounded(piece.rows, piece.wide ? WIDE_ROWS : piece.tile), x,
                          fused->shape.in, &run, report);
        if (r == 0 && piece.wide)
            r = wide_product_cuda(stream, fused->kind, piece.few, fused->clusters, &run, &scales,
                                  report);
        else if (r == 0)
            r = narrow_product_cuda(stream, fused->kind, piece.tile, &run, &scales, report);
        x = (const char *)x + piece.rows * row_size;
        to += piece.rows;
    }
    return r;
}
