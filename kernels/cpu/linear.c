/*
 * linear.c - y = x W^T + b for any number of rows, each row's bits the same wherever it stands
 *
 * The outputs are cut into fixed slices of SLICE columns, and rows into blocks of a few fixed
 * sizes; oneDNN only ever multiplies one block by one slice, on one thread. The cut does not depend
 * on the number of rows or workers. What remains is the block: a library may add up a row in
 * another order when it is the 9th of 16 rather than the 1st of 4. Whether it does is not
 * documented and differs between instruction sets (AVX2 does unless blocks are multiples of 12), so
 * linear_load() tries: a size is kept only if a row gives the same bits at every place of it, and
 * the same as in the sizes kept before. Blocks of one row, which cannot fail, are the last resort.
 *
 * A slice of weights is a few megabytes and stays in the cache while all rows pass. Small blocks
 * exist for small batches, where reading the weights from memory is what takes time.
 *
 * Widths are padded to whole vectors, because narrow ones take other code paths: a last slice that
 * is not a multiple of VECTOR wide goes through a scratch.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "onednn.h"
#include "pages.h"

#define SLICE     128
#define VECTOR    16
#define ITEM_ROWS (INT64_C(2) * LINEAR_ROWS_MAX)
#define N_SIZES   5

static const int64_t sizes[N_SIZES] = {LINEAR_ROWS_MAX, 24, 12, 4, 1};

/* Slices of one width. */
struct slices {
    int64_t width, used; /* columns computed, and of those the model's */
    int64_t ld;          /* of what is written: N, or the width when it goes through the scratch */
    dnnl_memory_desc_t bias_desc;
    struct primitive blocks[N_SIZES]; /* without a primitive: not kept */
    size_t weights_size;              /* bytes of one slice */
};

struct worker {
    dnnl_memory_t src[2][N_SIZES], dst[2][N_SIZES], scratchpad[2][N_SIZES];
    float *scratch; /* [LINEAR_ROWS_MAX, width] of a last slice */
};

struct linear {
    const struct onednn *onednn;
    const struct stage *stage; /* valid until linear_load() returns */
    int64_t k, n, n_full;      /* inputs, outputs, slices of SLICE columns */
    size_t n_slices;
    struct slices slices[2]; /* full, last; a width of 0: there are none */
    char *weights;
    float *bias; /* padded; NULL: none */
    size_t weights_size, pad_size, pad_stride;
    char *pads; /* of each worker: scratchpad, then scratch */
    size_t scratchpad_size;
    dnnl_memory_t *weight_memory, *bias_memory; /* of each slice */
    unsigned n_workers;
    struct worker *workers;
};

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static bool is_last(const struct linear *linear, size_t slice)
{
    return (int64_t)slice >= linear->n_full;
}

static char *slice_weights(const struct linear *linear, size_t slice)
{
    return linear->weights + slice * linear->slices[0].weights_size;
}

/* A block's primitive. The largest chooses the layout of the weights, the others take it. */
static int new_block(struct linear *linear, struct slices *slices, int size, struct report *report)
{
    dnnl_dims_t src_dims = {sizes[size], linear->k}, weight_dims = {linear->k, slices->width};
    dnnl_dims_t dst_dims = {sizes[size], slices->width}, bias_dims = {1, slices->width};
    dnnl_dims_t dst_strides = {slices->ld, 1};
    dnnl_memory_desc_t src, weights, dst;
    dnnl_matmul_desc_t desc;
    dnnl_status_t status;

    weights = slices->blocks[0].weights;
    status = dnnl_memory_desc_init_by_tag(&src, 2, src_dims, dnnl_f32, dnnl_ab);
    if (status == dnnl_success && size == 0)
        status =
            dnnl_memory_desc_init_by_tag(&weights, 2, weight_dims, dnnl_f32, dnnl_format_tag_any);
    if (status == dnnl_success)
        status = dnnl_memory_desc_init_by_strides(&dst, 2, dst_dims, dnnl_f32, dst_strides);
    if (status == dnnl_success)
        status = dnnl_memory_desc_init_by_tag(&slices->bias_desc, 2, bias_dims, dnnl_f32, dnnl_ab);
    if (status == dnnl_success)
        status = dnnl_matmul_desc_init(
            &desc, &src, &weights, linear->stage->bias.tensor ? &slices->bias_desc : NULL, &dst);
    if (status != dnnl_success)
        return onednn_result(status, "matmul", report);
    return primitive_new(linear->onednn, &desc, &slices->blocks[size], report);
}

static int new_slices(struct linear *linear, struct slices *slices, int64_t used,
                      struct report *report)
{
    int r = 0;

    slices->used = used;
    slices->width = (int64_t)round_up((size_t)used, VECTOR);
    slices->ld = slices->width == used ? linear->n : slices->width;
    for (int i = 0; i < N_SIZES && r == 0; i++) {
        r = new_block(linear, slices, i, report);
        if (r == 0) {
            size_t size = dnnl_memory_desc_get_size(&slices->blocks[i].scratchpad);

            linear->scratchpad_size =
                size > linear->scratchpad_size ? size : linear->scratchpad_size;
        }
    }
    if (r == 0)
        slices->weights_size = round_up(dnnl_memory_desc_get_size(&slices->blocks[0].weights), 64);
    return r;
}

int linear_new(const struct onednn *onednn, const struct stage *stage, unsigned workers,
               struct linear **ret, struct report *report)
{
    int64_t rest = stage->linear.out_features % SLICE;
    struct linear *linear;
    size_t scratch_size;
    int r = 0;

    linear = calloc(1, sizeof(*linear));
    if (!linear)
        return report_set(report, -ENOMEM, "out of memory");
    linear->onednn = onednn;
    linear->stage = stage;
    linear->k = stage->linear.in_features;
    linear->n = stage->linear.out_features;
    linear->n_full = linear->n / SLICE;
    linear->n_slices = (size_t)linear->n_full + (rest != 0);
    linear->n_workers = workers;
    if (linear->n_full)
        r = new_slices(linear, &linear->slices[0], SLICE, report);
    if (r == 0 && rest)
        r = new_slices(linear, &linear->slices[1], rest, report);
    if (r < 0) {
        linear_free(linear);
        return r;
    }
    linear->weights_size =
        (size_t)linear->n_full * linear->slices[0].weights_size + linear->slices[1].weights_size;
    scratch_size = LINEAR_ROWS_MAX * (size_t)linear->slices[1].width * sizeof(float);
    linear->pad_stride = round_up(linear->scratchpad_size, 64) + scratch_size;
    linear->pad_size = linear->pad_stride * workers;
    *ret = linear;
    return 0;
}

static void free_memory(dnnl_memory_t memory)
{
    if (memory)
        dnnl_memory_destroy(memory);
}

static void free_blocks(struct linear *linear)
{
    for (unsigned w = 0; linear->workers && w < linear->n_workers; w++)
        for (int i = 0; i < 2 * N_SIZES; i++) {
            free_memory(linear->workers[w].src[i / N_SIZES][i % N_SIZES]);
            free_memory(linear->workers[w].dst[i / N_SIZES][i % N_SIZES]);
            free_memory(linear->workers[w].scratchpad[i / N_SIZES][i % N_SIZES]);
        }
    for (int i = 0; i < 2 * N_SIZES; i++)
        primitive_free(&linear->slices[i / N_SIZES].blocks[i % N_SIZES]);
}

struct linear *linear_free(struct linear *linear)
{
    if (!linear)
        return NULL;
    free_blocks(linear);
    for (size_t i = 0; i < linear->n_slices; i++) {
        if (linear->weight_memory)
            free_memory(linear->weight_memory[i]);
        if (linear->bias_memory)
            free_memory(linear->bias_memory[i]);
    }
    free(linear->weight_memory);
    free(linear->bias_memory);
    free(linear->workers);
    free(linear->bias);
    pages_free(linear->weights, linear->weights_size);
    pages_free(linear->pads, linear->pad_size);
    free(linear);
    return NULL;
}

uint64_t linear_resident_bytes(const struct linear *linear)
{
    return linear->weights_size + linear->n_slices * SLICE * sizeof(float);
}

uint64_t linear_arena_bytes(const struct linear *linear)
{
    return linear->pad_size;
}

void linear_print(const struct linear *linear, char *text, size_t size)
{
    const struct slices *slices = &linear->slices[linear->n_full == 0];
    char rows[64] = "";
    size_t n = 0;

    for (int i = 0; i < N_SIZES; i++)
        if (slices->blocks[i].primitive)
            n +=
                (size_t)snprintf(rows + n, sizeof(rows) - n, "%s%" PRId64, n ? ", " : "", sizes[i]);
    snprintf(text, size,
             "linear %" PRId64 " -> %" PRId64 ": oneDNN matmul (%s), %zu slice%s of %" PRId64
             " columns by blocks of %s rows",
             linear->k, linear->n, slices->blocks[0].name, linear->n_slices,
             linear->n_slices == 1 ? "" : "s", slices->width, rows);
}

/* One call: a block of rows by a slice. `memory` is the worker's for that width and size. */
static int multiply(const struct linear *linear, dnnl_stream_t stream,
                    const struct primitive *block, dnnl_memory_t src, dnnl_memory_t weights,
                    dnnl_memory_t bias, dnnl_memory_t dst, dnnl_memory_t scratchpad)
{
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, src},
                              {DNNL_ARG_WEIGHTS, weights},
                              {DNNL_ARG_DST, dst},
                              {DNNL_ARG_SCRATCHPAD, scratchpad},
                              {DNNL_ARG_BIAS, bias}};

    return onednn_result(
        dnnl_primitive_execute(block->primitive, stream, linear->bias ? 5 : 4, args), "matmul",
        NULL);
}

/* Numbers without a pattern, for the trial. */
static void fill_any(float *x, size_t n, uint32_t state)
{
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        x[i] = (float)(int32_t)state * 0x1p-31f;
    }
}

static bool all_rows_are(const float *y, int64_t rows, int64_t ld, const float *row, int64_t width)
{
    for (int64_t i = 0; i < rows; i++)
        if (memcmp(y + i * ld, row, (size_t)width * sizeof(*y)) != 0)
            return false;
    return true;
}

/* Drops the sizes whose bits depend on the place in the block, or differ from larger sizes'. */
static int try_sizes(struct linear *linear, int which, dnnl_stream_t stream, float *x, float *y,
                     dnnl_memory_t weights, dnnl_memory_t bias)
{
    struct slices *slices = &linear->slices[which];
    float row[SLICE];
    bool known = false;

    for (int i = 0; i < N_SIZES; i++) {
        struct worker *worker = &linear->workers[0];
        bool single = sizes[i] == 1, fits;
        int r;

        dnnl_memory_set_data_handle(worker->src[which][i], x);
        dnnl_memory_set_data_handle(worker->dst[which][i], y);
        r = multiply(linear, stream, &slices->blocks[i], worker->src[which][i], weights, bias,
                     worker->dst[which][i], worker->scratchpad[which][i]);
        if (r < 0)
            return r;
        if (!known)
            memcpy(row, y, (size_t)slices->width * sizeof(*row));
        fits = all_rows_are(y, sizes[i], slices->ld, row, slices->width) && !(single && known);
        if (fits)
            known = true;
        else
            primitive_free(&slices->blocks[i]);
    }
    return 0;
}

static int choose_sizes(struct linear *linear, struct report *report)
{
    size_t x_size = LINEAR_ROWS_MAX * (size_t)linear->k * sizeof(float), y_size;
    dnnl_stream_t stream = NULL;
    float *x, *y;
    int r;

    y_size = LINEAR_ROWS_MAX * (size_t)(linear->n + SLICE) * sizeof(float);
    x = pages_alloc(x_size);
    y = pages_alloc(y_size);
    if (!x || !y) {
        pages_free(x, x_size);
        pages_free(y, y_size);
        return report_set(report, -ENOMEM, "out of memory");
    }
    r = onednn_result(
        dnnl_stream_create(&stream, linear->onednn->engine, dnnl_stream_default_flags), "stream",
        report);
    if (r == 0) {
        fill_any(x, (size_t)linear->k, 1);
        for (int64_t i = 1; i < LINEAR_ROWS_MAX; i++)
            memcpy(x + i * linear->k, x, (size_t)linear->k * sizeof(*x));
    }
    for (int which = 0; which < 2 && r == 0; which++) {
        size_t slice = which ? linear->n_slices - 1 : 0;

        if (linear->slices[which].width == 0)
            continue;
        /* Not the model's numbers, which may all be zero. */
        fill_any((float *)slice_weights(linear, slice),
                 linear->slices[which].weights_size / sizeof(float), 2);
        r = try_sizes(linear, which, stream, x, y, linear->weight_memory[slice],
                      linear->bias ? linear->bias_memory[slice] : NULL);
        memset(slice_weights(linear, slice), 0, linear->slices[which].weights_size);
        if (r < 0)
            r = report_set(report, r == -ENOMEM ? r : -EINVAL, "a trial of oneDNN's matmul failed");
    }
    if (stream)
        dnnl_stream_destroy(stream);
    pages_free(x, x_size);
    pages_free(y, y_size);
    return r;
}

static int new_memory(const struct linear *linear, const dnnl_memory_desc_t *desc, void *data,
                      dnnl_memory_t *ret, struct report *report)
{
    return onednn_result(dnnl_memory_create(ret, desc, linear->onednn->engine, data), "memory",
                         report);
}

static int new_memories(struct linear *linear, struct report *report)
{
    int r = 0;

    for (size_t i = 0; i < linear->n_slices && r == 0; i++) {
        const struct slices *slices = &linear->slices[is_last(linear, i)];

        r = new_memory(linear, &slices->blocks[0].weights, slice_weights(linear, i),
                       &linear->weight_memory[i], report);
        if (r == 0 && linear->bias)
            r = new_memory(linear, &slices->bias_desc, linear->bias + i * SLICE,
                           &linear->bias_memory[i], report);
    }
    for (unsigned w = 0; w < linear->n_workers && r == 0; w++) {
        struct worker *worker = &linear->workers[w];
        char *pad = linear->pads + w * linear->pad_stride;

        worker->scratch = (float *)(pad + round_up(linear->scratchpad_size, 64));
        for (int i = 0; i < 2 * N_SIZES && r == 0; i++) {
            const struct primitive *block = &linear->slices[i / N_SIZES].blocks[i % N_SIZES];

            if (!block->primitive)
                continue;
            r = new_memory(linear, &block->src, NULL, &worker->src[i / N_SIZES][i % N_SIZES],
                           report);
            if (r == 0)
                r = new_memory(linear, &block->dst, NULL, &worker->dst[i / N_SIZES][i % N_SIZES],
                               report);
            if (r == 0)
                r = new_memory(linear, &block->scratchpad, pad,
                               &worker->scratchpad[i / N_SIZES][i % N_SIZES], report);
        }
    }
    return r;
}

/* Reads slice by slice: beside the plan's own copy there is never more than one. */
static int read_weights(struct linear *linear, const struct pipeline *pipeline,
                        struct report *report)
{
    const struct stage *stage = linear->stage;
    size_t size;
    float *rows;
    int r = 0;

    size = (size_t)linear->k * SLICE * sizeof(float);
    rows = pages_alloc(size);
    if (!rows)
        return report_set(report, -ENOMEM, "out of memory");
    for (size_t i = 0; i < linear->n_slices && r == 0; i++) {
        const struct slices *slices = &linear->slices[is_last(linear, i)];
        dnnl_dims_t dims = {linear->k, slices->width};
        dnnl_memory_desc_t desc;

        r = pipeline_param(pipeline, &stage->weight, (int64_t)i * SLICE * linear->k,
                           slices->used * linear->k, rows, report);
        memset(rows + slices->used * linear->k, 0,
               (size_t)((slices->width - slices->used) * linear->k) * sizeof(*rows));
        if (r == 0)
            r = onednn_result(dnnl_memory_desc_init_by_tag(&desc, 2, dims, dnnl_f32, dnnl_ba),
                              "weights", report);
        if (r == 0)
            r = onednn_reorder(linear->onednn, &desc, rows, &slices->blocks[0].weights,
                               slice_weights(linear, i), report);
    }
    pages_free(rows, size);
    if (r == 0 && linear->bias)
        r = pipeline_param(pipeline, &stage->bias, 0, linear->n, linear->bias, report);
    return r;
}

int linear_load(struct linear *linear, const struct pipeline *pipeline, struct report *report)
{
    int r;

    linear->weights = pages_alloc(linear->weights_size);
    linear->pads = pages_alloc(linear->pad_size);
    linear->weight_memory = calloc(linear->n_slices, sizeof(dnnl_memory_t));
    linear->bias_memory = calloc(linear->n_slices, sizeof(dnnl_memory_t));
    linear->workers = calloc(linear->n_workers, sizeof(struct worker));
    if (linear->stage->bias.tensor)
        linear->bias = calloc(linear->n_slices * SLICE, sizeof(float));
    if (!linear->weights || !linear->pads || !linear->weight_memory || !linear->bias_memory ||
        !linear->workers || (linear->stage->bias.tensor && !linear->bias))
        return report_set(report, -ENOMEM, "out of memory");
    r = new_memories(linear, report);
    if (r == 0)
        r = choose_sizes(linear, report);
    if (r == 0)
        r = read_weights(linear, pipeline, report);
    linear->stage = NULL;
    return r;
}

size_t linear_items(const struct linear *linear, int64_t rows)
{
    return linear->n_slices * (size_t)((rows + ITEM_ROWS - 1) / ITEM_ROWS);
}

/* The smallest size that holds what is left, or the largest there is. */
static int choose_size(const struct slices *slices, int64_t left)
{
    int chosen = -1;

    for (int i = 0; i < N_SIZES; i++)
        if (slices->blocks[i].primitive && (chosen < 0 || sizes[i] >= left))
            chosen = i;
    return chosen;
}

/* Columns of a last slice from the scratch to their place. */
static void copy_columns(const struct slices *slices, int64_t rows, const float *from, float *to,
                         int64_t ld)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * ld, from + i * slices->ld, (size_t)slices->used * sizeof(*to));
}

int linear_run(struct linear *linear, unsigned w, size_t item, int64_t rows, const float *x,
               float *y)
{
    size_t n_chunks = linear_items(linear, rows) / linear->n_slices;
    size_t slice = item / n_chunks; /* neighbours in time share a slice */
    int64_t row = (int64_t)(item % n_chunks) * ITEM_ROWS;
    int64_t end = row + ITEM_ROWS < rows ? row + ITEM_ROWS : rows;
    int last = is_last(linear, slice);
    const struct slices *slices = &linear->slices[last];
    struct worker *worker = &linear->workers[w];
    bool scratch = slices->ld != linear->n;
    int r;

    while (row < end) {
        int i = choose_size(slices, end - row);
        float *to = y + row * linear->n + (int64_t)slice * SLICE;
        int64_t n = sizes[i] < end - row ? sizes[i] : end - row;

        dnnl_memory_set_data_handle(worker->src[last][i], (float *)x + row * linear->k);
        dnnl_memory_set_data_handle(worker->dst[last][i], scratch ? worker->scratch : to);
        r = multiply(linear, linear->onednn->streams[w], &slices->blocks[i], worker->src[last][i],
                     linear->weight_memory[slice], linear->bias_memory[slice], worker->dst[last][i],
                     worker->scratchpad[last][i]);
        if (r < 0)
            return r;
        if (scratch)
            copy_columns(slices, n, worker->scratch, to, linear->n);
        row += n;
    }
    return 0;
}
