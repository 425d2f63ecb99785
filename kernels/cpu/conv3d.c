/*
 * conv3d.c - one sample's convolution, in the layout that oneDNN is fast in
 *
 * oneDNN has fast code for some layouts only, and falls back to a matrix product with a copy of
 * every window, or to a plain loop, for others (for 3 channels to 16, 7.5 ms against 66). So the
 * layouts are tried in order of preference, the plain one last:
 *
 *     few input channels     plain input, blocked output: what it has for first layers
 *     many                   blocked input (the sample is rearranged first), blocked output
 *     anything else          plain input and output
 *
 * One primitive is made, for one sample and one thread, and used for every sample of every batch:
 * a sample's bits cannot depend on the others.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conv3d.h"
#include "onednn.h"
#include "pages.h"

struct slot {
    dnnl_memory_t plain, src, dst, scratchpad; /* plain: the sample as it comes */
    const float *y;                            /* that dst stands at */
};

struct conv3d {
    const struct onednn *onednn;
    const struct stage *stage; /* valid until conv3d_load() returns */
    struct primitive primitive;
    dnnl_primitive_t reorder; /* plain to the primitive's source; NULL: it is plain */
    dnnl_memory_desc_t plain, bias_desc;
    size_t block;
    size_t weights_size, src_size, scratchpad_size, pad_size; /* pad: of all slots */
    void *weights;
    float *bias; /* NULL: none */
    char *pads;
    dnnl_memory_t weight_memory, bias_memory;
    unsigned n_slots;
    struct slot *slots;
};

struct layout {
    dnnl_format_tag_t src, dst;
};

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Interleaved channels of a result that is otherwise dense, in this order; 0: another layout. */
static size_t dense_block(const dnnl_memory_desc_t *desc)
{
    const dnnl_blocking_desc_t *blocking = &desc->format_desc.blocking;
    int64_t block = blocking->inner_nblks == 1 ? blocking->inner_blks[0] : 1;
    int64_t stride = block;

    if (desc->format_kind != dnnl_blocked || blocking->inner_nblks > 1 ||
        (blocking->inner_nblks == 1 && blocking->inner_idxs[0] != 1) ||
        (block != 1 && block != 8 && block != 16))
        return 0;
    for (int i = 4; i > 0; i--) {
        if (blocking->strides[i] != stride && desc->padded_dims[i] != (i == 1 ? block : 1))
            return 0;
        stride *= desc->padded_dims[i];
    }
    return (size_t)block;
}

static bool slow(const struct primitive *primitive)
{
    return strstr(primitive->name, "gemm") || strstr(primitive->name, "ref");
}

static int try_layout(struct conv3d *conv, const struct layout *layout, struct primitive *ret)
{
    const struct stage *stage = conv->stage;
    const int64_t *in = stage->in.dims, *out = stage->out.dims, *kernel = stage->conv3d.kernel;
    dnnl_dims_t src_dims = {1, in[1], in[2], in[3], in[4]};
    dnnl_dims_t weight_dims = {out[1], in[1], kernel[0], kernel[1], kernel[2]};
    dnnl_dims_t dst_dims = {1, out[1], out[2], out[3], out[4]};
    dnnl_dims_t stride = {0}, padding = {0};
    dnnl_memory_desc_t src, weights, dst;
    dnnl_convolution_desc_t *desc; /* several KiB */
    dnnl_status_t status;
    int r;

    memcpy(stride, stage->conv3d.stride, sizeof(stage->conv3d.stride));
    memcpy(padding, stage->conv3d.padding, sizeof(stage->conv3d.padding));
    desc = calloc(1, sizeof(*desc));
    if (!desc)
        return -ENOMEM;
    status = dnnl_memory_desc_init_by_tag(&src, 5, src_dims, dnnl_f32, layout->src);
    if (status == dnnl_success)
        status =
            dnnl_memory_desc_init_by_tag(&weights, 5, weight_dims, dnnl_f32, dnnl_format_tag_any);
    if (status == dnnl_success)
        status = dnnl_memory_desc_init_by_tag(&dst, 5, dst_dims, dnnl_f32, layout->dst);
    if (status == dnnl_success)
        status = dnnl_convolution_forward_desc_init(
            desc, dnnl_forward_inference, dnnl_convolution_direct, &src, &weights,
            stage->bias.tensor ? &conv->bias_desc : NULL, &dst, stride, padding, padding);
    r = status == dnnl_success ? primitive_new(conv->onednn, desc, ret, NULL)
                               : onednn_result(status, "convolution", NULL);
    free(desc);
    return r;
}

static int choose_layout(struct conv3d *conv, struct report *report)
{
    static const struct layout layouts[] = {{dnnl_ncdhw, dnnl_format_tag_any},
                                            {dnnl_format_tag_any, dnnl_nCdhw16c},
                                            {dnnl_format_tag_any, dnnl_nCdhw8c},
                                            {dnnl_ncdhw, dnnl_ncdhw}};
    const int n_layouts = sizeof(layouts) / sizeof(layouts[0]);
    int r = -EINVAL;

    for (int i = 0; i < n_layouts; i++) {
        r = try_layout(conv, &layouts[i], &conv->primitive);
        if (r == -ENOMEM)
            break;
        if (r < 0)
            continue;
        conv->block = dense_block(&conv->primitive.dst);
        if (conv->block && (i == n_layouts - 1 || !slow(&conv->primitive)))
            return 0;
        primitive_free(&conv->primitive);
        r = -EINVAL;
    }
    return report_set(report, r == -ENOMEM ? r : -EINVAL, "oneDNN has no such convolution");
}

static int new_reorder(struct conv3d *conv, struct report *report)
{
    dnnl_primitive_desc_t desc = NULL;
    dnnl_status_t status;

    if (dnnl_memory_desc_equal(&conv->plain, &conv->primitive.src))
        return 0;
    conv->src_size = dnnl_memory_desc_get_size(&conv->primitive.src);
    status = dnnl_reorder_primitive_desc_create(&desc, &conv->plain, conv->onednn->engine,
                                                &conv->primitive.src, conv->onednn->engine, NULL);
    if (status == dnnl_success)
        status = dnnl_primitive_create(&conv->reorder, desc);
    if (desc)
        dnnl_primitive_desc_destroy(desc);
    return onednn_result(status, "reorder", report);
}

int conv3d_new(const struct onednn *onednn, const struct stage *stage, unsigned slots,
               struct conv3d **ret, struct report *report)
{
    const int64_t *in = stage->in.dims;
    dnnl_dims_t src_dims = {1, in[1], in[2], in[3], in[4]}, bias_dims = {stage->out.dims[1]};
    struct conv3d *conv;
    dnnl_status_t status;
    int r;

    conv = calloc(1, sizeof(*conv));
    if (!conv)
        return report_set(report, -ENOMEM, "out of memory");
    conv->onednn = onednn;
    conv->stage = stage;
    conv->n_slots = slots;
    status = dnnl_memory_desc_init_by_tag(&conv->plain, 5, src_dims, dnnl_f32, dnnl_ncdhw);
    if (status == dnnl_success)
        status = dnnl_memory_desc_init_by_tag(&conv->bias_desc, 1, bias_dims, dnnl_f32, dnnl_a);
    r = onednn_result(status, "layout", report);
    if (r == 0)
        r = choose_layout(conv, report);
    if (r == 0)
        r = new_reorder(conv, report);
    if (r < 0) {
        conv3d_free(conv);
        return r;
    }
    conv->weights_size = dnnl_memory_desc_get_size(&conv->primitive.weights);
    conv->scratchpad_size = round_up(dnnl_memory_desc_get_size(&conv->primitive.scratchpad), 64);
    conv->src_size = round_up(conv->src_size, 64);
    conv->pad_size = (conv->scratchpad_size + conv->src_size) * slots;
    *ret = conv;
    return 0;
}

static void free_memory(dnnl_memory_t memory)
{
    if (memory)
        dnnl_memory_destroy(memory);
}

struct conv3d *conv3d_free(struct conv3d *conv)
{
    if (!conv)
        return NULL;
    for (unsigned i = 0; conv->slots && i < conv->n_slots; i++) {
        free_memory(conv->slots[i].plain);
        free_memory(conv->slots[i].src);
        free_memory(conv->slots[i].dst);
        free_memory(conv->slots[i].scratchpad);
    }
    free_memory(conv->weight_memory);
    free_memory(conv->bias_memory);
    primitive_free(&conv->primitive);
    if (conv->reorder)
        dnnl_primitive_destroy(conv->reorder);
    pages_free(conv->weights, conv->weights_size);
    pages_free(conv->pads, conv->pad_size);
    free(conv->bias);
    free(conv->slots);
    free(conv);
    return NULL;
}

uint64_t conv3d_resident_bytes(const struct conv3d *conv)
{
    return conv->weights_size + (uint64_t)conv->bias_desc.dims[0] * sizeof(float);
}

uint64_t conv3d_arena_bytes(const struct conv3d *conv)
{
    return conv->pad_size;
}

size_t conv3d_block(const struct conv3d *conv)
{
    return conv->block;
}

int64_t conv3d_result(const struct conv3d *conv)
{
    return (int64_t)(dnnl_memory_desc_get_size(&conv->primitive.dst) / sizeof(float));
}

void conv3d_print(const struct conv3d *conv, char *text, size_t size)
{
    snprintf(text, size,
             "conv3d %" PRId64 " -> %" PRId64 ": oneDNN convolution (%s), a sample at a time, %s, "
             "result in blocks of %zu channels",
             conv->plain.dims[1], conv->bias_desc.dims[0], conv->primitive.name,
             conv->reorder ? "input rearranged" : "input as it comes", conv->block);
}

static int new_memory(const struct conv3d *conv, const dnnl_memory_desc_t *desc, void *data,
                      dnnl_memory_t *ret, struct report *report)
{
    return onednn_result(dnnl_memory_create(ret, desc, conv->onednn->engine, data), "memory",
                         report);
}

static int new_memories(struct conv3d *conv, struct report *report)
{
    int r;

    r = new_memory(conv, &conv->primitive.weights, conv->weights, &conv->weight_memory, report);
    if (r == 0 && conv->bias)
        r = new_memory(conv, &conv->bias_desc, conv->bias, &conv->bias_memory, report);
    for (unsigned i = 0; i < conv->n_slots && r == 0; i++) {
        struct slot *slot = &conv->slots[i];
        char *pad = conv->pads + i * (conv->scratchpad_size + conv->src_size);

        r = new_memory(conv, &conv->primitive.scratchpad, pad, &slot->scratchpad, report);
        if (r == 0)
            r = new_memory(conv, &conv->primitive.src,
                           conv->reorder ? pad + conv->scratchpad_size : NULL, &slot->src, report);
        if (r == 0 && conv->reorder)
            r = new_memory(conv, &conv->plain, NULL, &slot->plain, report);
        if (r == 0)
            r = new_memory(conv, &conv->primitive.dst, NULL, &slot->dst, report);
    }
    return r;
}

static int read_weights(struct conv3d *conv, const struct pipeline *pipeline, struct report *report)
{
    const struct param *weight = &conv->stage->weight, *bias = &conv->stage->bias;
    const int64_t *kernel = conv->stage->conv3d.kernel;
    dnnl_dims_t dims = {conv->stage->conv3d.out_channels, conv->stage->conv3d.in_channels,
                        kernel[0], kernel[1], kernel[2]};
    size_t size = (size_t)weight->elements * sizeof(float);
    dnnl_memory_desc_t desc;
    float *plain;
    int r;

    plain = pages_alloc(size);
    if (!plain)
        return report_set(report, -ENOMEM, "out of memory");
    r = pipeline_param(pipeline, weight, 0, weight->elements, plain, report);
    if (r == 0)
        r = onednn_result(dnnl_memory_desc_init_by_tag(&desc, 5, dims, dnnl_f32, dnnl_oidhw),
                          "weights", report);
    if (r == 0)
        r = onednn_reorder(conv->onednn, &desc, plain, &conv->primitive.weights, conv->weights,
                           report);
    if (r == 0 && conv->bias)
        r = pipeline_param(pipeline, bias, 0, bias->elements, conv->bias, report);
    pages_free(plain, size);
    return r;
}

int conv3d_load(struct conv3d *conv, const struct pipeline *pipeline, struct report *report)
{
    int r;

    conv->weights = pages_alloc(conv->weights_size);
    conv->pads = pages_alloc(conv->pad_size);
    conv->slots = calloc(conv->n_slots, sizeof(struct slot));
    if (conv->stage->bias.tensor)
        conv->bias = calloc((size_t)conv->bias_desc.dims[0], sizeof(float));
    if (!conv->weights || !conv->pads || !conv->slots || (conv->stage->bias.tensor && !conv->bias))
        return report_set(report, -ENOMEM, "out of memory");
    r = new_memories(conv, report);
    if (r == 0)
        r = read_weights(conv, pipeline, report);
    conv->stage = NULL;
    return r;
}

int conv3d_run(struct conv3d *conv, unsigned worker, unsigned s, const float *x, float *y)
{
    dnnl_stream_t stream = conv->onednn->streams[worker];
    struct slot *slot = &conv->slots[s];
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, slot->src},
                              {DNNL_ARG_WEIGHTS, conv->weight_memory},
                              {DNNL_ARG_DST, slot->dst},
                              {DNNL_ARG_SCRATCHPAD, slot->scratchpad},
                              {DNNL_ARG_BIAS, conv->bias_memory}};
    dnnl_status_t status = dnnl_success;

    /* Setting it clears the padding of the last block. */
    if (slot->y != y)
        status = dnnl_memory_set_data_handle(slot->dst, y);
    slot->y = y;
    if (conv->reorder) {
        dnnl_exec_arg_t move[] = {{DNNL_ARG_FROM, slot->plain}, {DNNL_ARG_TO, slot->src}};

        if (status == dnnl_success)
            status = dnnl_memory_set_data_handle(slot->plain, (float *)x);
        if (status == dnnl_success)
            status = dnnl_primitive_execute(conv->reorder, stream, 2, move);
    } else if (status == dnnl_success) {
        status = dnnl_memory_set_data_handle(slot->src, (float *)x);
    }
    if (status == dnnl_success)
        status =
            dnnl_primitive_execute(conv->primitive.primitive, stream, conv->bias ? 5 : 4, args);
    return onednn_result(status, "convolution", NULL);
}
