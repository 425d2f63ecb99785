/*
 * pipeline.c - a model's stages, checked against its weights: shapes, parameters, proof
 *
 * The stages are walked once, in order, each with the shape that the one before left and the
 * tensors that the weights file holds under the stage's names. The first that does not fit ends it:
 * what comes later would only repeat the same mistake in other words. Tensors of the file that no
 * stage names are ignored.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dropout.h"
#include "file.h"
#include "pipeline.h"
#include "proof.h"
#include "stage.h"

#define CHUNK 65536

static const char *file_dtype(enum dtype dtype)
{
    return dtype == DTYPE_FLOAT32 ? "F32" : dtype == DTYPE_FLOAT16 ? "F16" : "BF16";
}

/* NULL, and why, when it is not there or of another dtype than the model's. */
static const struct st_tensor *find_tensor(const struct model *model,
                                           const struct safetensors *weights, const char *name,
                                           struct report *report)
{
    const struct st_tensor *tensor;

    if (!weights) {
        report_set(report, 0, "tensor '%s': the model names no weights", name);
        return NULL;
    }
    tensor = safetensors_find(weights, name);
    if (!tensor) {
        report_set(report, 0, "tensor '%s' is not in %s", name, file_base(model->weights));
        return NULL;
    }
    if (strcmp(tensor->dtype, file_dtype(model->dtype)) != 0) {
        report_set(report, 0, "tensor '%s' is %s, not the model's %s", name, tensor->dtype,
                   file_dtype(model->dtype));
        return NULL;
    }
    return tensor;
}

/* Finds the tensor and holds it against the shape that the stage expects. */
static int take_param(const struct model *model, const struct safetensors *weights,
                      const struct weight_shape *want, const struct stage *stage, struct param *ret,
                      struct report *report)
{
    struct shape have_shape = {.batch = -1}, want_shape = {.batch = -1};
    char have_text[160], want_text[160], in_text[160];
    const struct st_tensor *tensor;

    if (want->name[0] == 0)
        return 0;
    tensor = find_tensor(model, weights, want->name, report);
    if (!tensor)
        return -EINVAL;
    if (tensor->rank != want->rank ||
        memcmp(tensor->dims, want->dims, (size_t)want->rank * sizeof(want->dims[0])) != 0) {
        have_shape.rank = (int8_t)tensor->rank;
        want_shape.rank = (int8_t)want->rank;
        memcpy(have_shape.dims, tensor->dims, sizeof(tensor->dims));
        memcpy(want_shape.dims, want->dims, sizeof(want->dims));
        return report_set(report, -EINVAL, "tensor '%s' is %s, but the input %s needs %s",
                          want->name, shape_print(&have_shape, have_text, sizeof(have_text)),
                          shape_print(&stage->in, in_text, sizeof(in_text)),
                          shape_print(&want_shape, want_text, sizeof(want_text)));
    }
    ret->tensor = tensor;
    ret->elements = tensor->elements;
    return 0;
}

static int add_stage(const struct model *model, const struct safetensors *weights,
                     const struct stage_spec *spec, const struct shape *in, struct stage *ret,
                     struct report *report)
{
    const char *name = stage_weight_name(spec);
    const struct st_tensor *tensor = NULL;
    struct weight_shape weight, bias;
    int r = 0;

    if (name[0]) {
        tensor = find_tensor(model, weights, name, report);
        r = tensor ? 0 : -EINVAL;
    }
    if (r == 0)
        r = stage_build(spec, in, tensor, ret, &weight, &bias, report);
    if (r == 0)
        r = take_param(model, weights, &weight, ret, &ret->weight, report);
    if (r == 0)
        r = take_param(model, weights, &bias, ret, &ret->bias, report);
    if (r < 0)
        report_prefix(report, r, "%s:%d: %s: ", model->file, spec->line, stage_op_name(spec->op));
    return r;
}

int pipeline_build(const struct model *model, struct safetensors *weights, struct pipeline **ret,
                   struct report *report)
{
    struct pipeline *pipeline;
    const struct stage *last;
    int r;

    pipeline = calloc(1, sizeof(*pipeline));
    if (!pipeline)
        return report_set(report, -ENOMEM, "%s: out of memory", model->file);
    pipeline->dtype = model->dtype;
    pipeline->precision = model->precision;
    pipeline->in = pipeline->out = model->input;
    for (int i = 0; i < model->n_stages; i++) {
        r = add_stage(model, weights, &model->stages[i], &pipeline->out, &pipeline->stages[i],
                      report);
        if (r < 0)
            goto fail;
        pipeline->out = pipeline->stages[i].out;
        pipeline->n_stages++;
    }
    last = &pipeline->stages[pipeline->n_stages - 1];
    pipeline->outer_sum = last->op == OP_ADD && last->add.moves_batch;
    pipeline->weights = weights;
    r = proof_make(pipeline, model->prove, report);
    if (r < 0)
        goto fail;
    *ret = pipeline;
    return 0;

fail:
    pipeline->weights = NULL; /* still the caller's */
    pipeline_free(pipeline);
    return r;
}

struct pipeline *pipeline_free(struct pipeline *pipeline)
{
    if (pipeline) {
        safetensors_free(pipeline->weights);
        free(pipeline);
    }
    return NULL;
}

void pipeline_drop_weights(struct pipeline *pipeline)
{
    for (int i = 0; i < pipeline->n_stages; i++)
        pipeline->stages[i].weight.tensor = pipeline->stages[i].bias.tensor = NULL;
    pipeline->weights = safetensors_free(pipeline->weights);
}

/* Adds a tensor, or finds that it is there already, as when two stages share one. */
static int list_tensor(struct weight_shape *to, int n, int n_max, const struct weight_shape *tensor,
                       struct report *report)
{
    for (int i = 0; i < n; i++) {
        if (strcmp(to[i].name, tensor->name) != 0)
            continue;
        if (to[i].rank == tensor->rank &&
            memcmp(to[i].dims, tensor->dims, sizeof(tensor->dims)) == 0)
            return n;
        return report_set(report, -EINVAL, "tensor '%s' has two shapes", tensor->name);
    }
    if (n == n_max)
        return report_set(report, -EINVAL, "more than %d tensors", n_max);
    to[n] = *tensor;
    return n + 1;
}

int pipeline_weight_shapes(const struct model *model, struct weight_shape *to, int n_max,
                           struct report *report)
{
    struct shape in = model->input;
    int n = 0, r;

    for (int i = 0; i < model->n_stages; i++) {
        const struct stage_spec *spec = &model->stages[i];
        struct weight_shape tensors[2];
        struct stage stage;

        r = stage_build(spec, &in, NULL, &stage, &tensors[0], &tensors[1], report);
        for (int k = 0; r >= 0 && k < 2; k++)
            if (tensors[k].name[0])
                r = n = list_tensor(to, n, n_max, &tensors[k], report);
        if (r < 0)
            return report_prefix(report, r, "%s:%d: %s: ", model->file, spec->line,
                                 stage_op_name(spec->op));
        in = stage.out;
    }
    return n;
}

int pipeline_param(const struct pipeline *pipeline, const struct param *param, int64_t first,
                   int64_t count, float *to, struct report *report)
{
    uint16_t *halves;
    int r = 0;

    if (pipeline->dtype == DTYPE_FLOAT32)
        return safetensors_read(pipeline->weights, param->tensor, first, count, to, report);
    halves = malloc(CHUNK * sizeof(*halves));
    if (!halves)
        return report_set(report, -ENOMEM, "out of memory");
    for (int64_t done = 0; done < count && r == 0; done += CHUNK) {
        int64_t n = count - done < CHUNK ? count - done : CHUNK;

        r = safetensors_read(pipeline->weights, param->tensor, first + done, n, halves, report);
        if (r == 0)
            tensor_to_float(pipeline->dtype, halves, to + done, (size_t)n);
    }
    free(halves);
    return r;
}

uint64_t pipeline_offset_advance(const struct pipeline *pipeline, int64_t rows)
{
    uint64_t offset = 0;

    for (int i = 0; i < pipeline->n_stages; i++) {
        const struct stage *stage = &pipeline->stages[i];

        if (stage->op == OP_DROPOUT)
            offset += dropout_advance(stage->dropout.p, rows * shape_elements(&stage->out),
                                      DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
    }
    return offset;
}

bool pipeline_masks(const struct pipeline *pipeline)
{
    for (int i = 0; i < pipeline->n_stages; i++)
        if (pipeline->stages[i].op == OP_DROPOUT && pipeline->stages[i].dropout.p > 0)
            return true;
    return false;
}
