/*
 * stage.c - the table of stages: what each accepts, what it makes of a shape, which tensors it has
 *
 * A stage is a row with up to three functions: parse (its keys in a model file), shape (PyTorch's
 * rule for its output) and tensors (the parameters that it expects). Rows never mix: no rule may
 * reduce over the batch dimension or bring a size along it, and once an add has moved the batch
 * dimension only pointwise stages follow. Dimensions are at least 1 and their product stays within
 * TENSOR_ELEMENTS_MAX, so that sums and products of two of them cannot overflow.
 */
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "stage.h"

#define SHAPE_TEXT_MAX 160
#define WINDOW_MAX     (1 << 20) /* of strides, paddings */

/* What a stage brings itself: linear its outputs, conv3d outputs and kernel, add a shape. */
struct size {
    int n;
    int64_t dims[TENSOR_RANK_MAX];
};

struct stage_kind {
    const char *name;
    void (*parse)(struct conf_group *group, struct stage_spec *spec);
    /* From stage->in and the stage's own size to stage->out and the stage's record. */
    int (*shape)(const struct stage_spec *spec, const struct size *size, struct stage *stage,
                 struct report *report);
    /* The shapes of its parameters; names are filled in by the caller. */
    void (*tensors)(const struct stage *stage, const struct size *size, struct weight_shape *weight,
                    struct weight_shape *bias);
    /* The stage's own size: how a model file says it (NULL: it has none), and which dimensions it
     * is of a weight of that rank (0: the whole shape). */
    const char *size_key;
    int weight_rank, n_size;
    int8_t size_at[4];
    bool pointwise; /* may follow an add that moved the batch dimension */
};

/* Keys */

static bool need(struct conf_group *group, const char *key)
{
    if (conf_has(group, key))
        return true;
    conf_missing(group, key);
    return false;
}

static void parse_name(struct conf_group *group, const char *key, char to[MODEL_TENSOR_NAME_MAX])
{
    const char *name = conf_string(group, key, NULL);

    if (!name)
        return;
    if (name[0] == 0 || strlen(name) >= MODEL_TENSOR_NAME_MAX)
        conf_error(group, key, "a tensor's name has 1 to %d bytes", MODEL_TENSOR_NAME_MAX - 1);
    else
        snprintf(to, MODEL_TENSOR_NAME_MAX, "%s", name);
}

/* A number that float32 can hold: PyTorch refuses scalars that overflow the tensor's dtype. */
static double parse_number(struct conf_group *group, const char *key, double otherwise)
{
    double value = conf_float(group, key, otherwise);

    if (isfinite((float)value))
        return value;
    conf_error(group, key, "is too large for float32");
    return otherwise;
}

/* One integer for all three dimensions, or three. */
static void parse_triple(struct conf_group *group, const char *key, int64_t min, int64_t max,
                         int64_t to[3])
{
    int n = conf_ints(group, key, min, max, to, 3);

    if (n == 1)
        to[1] = to[2] = to[0];
    else if (n >= 0 && n != 3)
        conf_error(group, key, "needs 1 or 3 integers");
}

static void parse_linear(struct conf_group *group, struct stage_spec *spec)
{
    need(group, "weight");
    parse_name(group, "weight", spec->weight);
    parse_name(group, "bias", spec->bias);
    spec->size[0] = conf_int(group, "out", 1, TENSOR_ELEMENTS_MAX, 0);
    spec->n_size = conf_has(group, "out");
}

static void parse_conv3d(struct conf_group *group, struct stage_spec *spec)
{
    need(group, "weight");
    parse_name(group, "weight", spec->weight);
    parse_name(group, "bias", spec->bias);
    for (int i = 0; i < 3; i++)
        spec->stride[i] = 1;
    parse_triple(group, "stride", 1, WINDOW_MAX, spec->stride);
    parse_triple(group, "padding", 0, WINDOW_MAX, spec->padding);
    spec->size[0] = conf_int(group, "out", 1, TENSOR_ELEMENTS_MAX, 0);
    parse_triple(group, "kernel", 1, TENSOR_ELEMENTS_MAX, spec->size + 1);
    if (conf_has(group, "out") || conf_has(group, "kernel")) {
        if (need(group, "out") && need(group, "kernel"))
            spec->n_size = 4;
    }
}

static void parse_group_norm(struct conf_group *group, struct stage_spec *spec)
{
    need(group, "groups");
    spec->groups = conf_int(group, "groups", 1, TENSOR_ELEMENTS_MAX, 1);
    spec->eps = parse_number(group, "eps", 1e-5);
    if (spec->eps < 0)
        conf_error(group, "eps", "must not be negative");
    parse_name(group, "weight", spec->weight);
    parse_name(group, "bias", spec->bias);
}

static void parse_amin(struct conf_group *group, struct stage_spec *spec)
{
    need(group, "dim");
    spec->dim = conf_int(group, "dim", -TENSOR_RANK_MAX, TENSOR_RANK_MAX - 1, 1);
    spec->keepdim = conf_bool(group, "keepdim", false);
}

static void parse_minimum(struct conf_group *group, struct stage_spec *spec)
{
    need(group, "value");
    spec->value = parse_number(group, "value", 0);
}

static void parse_clamp(struct conf_group *group, struct stage_spec *spec)
{
    spec->has_min = conf_has(group, "min");
    spec->has_max = conf_has(group, "max");
    if (!spec->has_min && !spec->has_max)
        conf_error(group, "min", "is missing, and max too: clamp needs one of them");
    spec->min = parse_number(group, "min", 0);
    spec->max = parse_number(group, "max", 0);
}

static void parse_add(struct conf_group *group, struct stage_spec *spec)
{
    int n;

    need(group, "tensor");
    parse_name(group, "tensor", spec->tensor);
    n = conf_ints(group, "shape", 1, TENSOR_ELEMENTS_MAX, spec->size, TENSOR_RANK_MAX);
    spec->n_size = n > 0 ? n : 0;
    if (n == 0)
        conf_error(group, "shape", "must not be empty");
}

static void parse_dropout(struct conf_group *group, struct stage_spec *spec)
{
    need(group, "p");
    spec->p = conf_float(group, "p", 0);
    if (spec->p < 0 || spec->p > 1)
        conf_error(group, "p", "must be from 0 to 1");
}

/* Shapes */

static bool product(const int64_t *dims, int n, int64_t *ret)
{
    int64_t all = 1;

    for (int i = 0; i < n; i++)
        if (__builtin_mul_overflow(all, dims[i], &all) || all > TENSOR_ELEMENTS_MAX)
            return false;
    *ret = all;
    return true;
}

/* Of dimensions of a shape that was checked. */
static int64_t count(const struct shape *shape, int from, int to)
{
    int64_t all = 1;

    for (int i = from; i < to; i++)
        all *= shape->dims[i];
    return all;
}

static struct shape plain_shape(const int64_t *dims, int rank)
{
    struct shape shape = {.rank = (int8_t)rank, .batch = -1};

    memcpy(shape.dims, dims, (size_t)rank * sizeof(dims[0]));
    return shape;
}

static int shape_linear(const struct stage_spec *spec, const struct size *size, struct stage *stage,
                        struct report *report)
{
    char text[SHAPE_TEXT_MAX];
    int last = stage->in.rank - 1;

    (void)spec;
    if (last < 1)
        return report_set(report, -EINVAL, "needs an input [N, ..., K], not %s",
                          shape_print(&stage->in, text, sizeof(text)));
    stage->linear.in_features = stage->in.dims[last];
    stage->linear.out_features = size->dims[0];
    stage->linear.rows = count(&stage->in, 1, last);
    stage->out.dims[last] = size->dims[0];
    return 0;
}

static int shape_conv3d(const struct stage_spec *spec, const struct size *size, struct stage *stage,
                        struct report *report)
{
    char text[SHAPE_TEXT_MAX];

    if (stage->in.rank != 5)
        return report_set(report, -EINVAL, "needs an input [N, C, D, H, W], not %s",
                          shape_print(&stage->in, text, sizeof(text)));
    stage->conv3d.in_channels = stage->in.dims[1];
    stage->conv3d.out_channels = size->dims[0];
    stage->out.dims[1] = size->dims[0];
    for (int i = 0; i < 3; i++) {
        int64_t padded = stage->in.dims[2 + i] + 2 * spec->padding[i];

        stage->conv3d.kernel[i] = size->dims[1 + i];
        stage->conv3d.stride[i] = spec->stride[i];
        stage->conv3d.padding[i] = spec->padding[i];
        if (padded < size->dims[1 + i])
            return report_set(report, -EINVAL,
                              "kernel [%" PRId64 ", %" PRId64 ", %" PRId64
                              "] is larger than the padded input %s",
                              size->dims[1], size->dims[2], size->dims[3],
                              shape_print(&stage->in, text, sizeof(text)));
        stage->out.dims[2 + i] = (padded - size->dims[1 + i]) / spec->stride[i] + 1;
    }
    return 0;
}

static int shape_group_norm(const struct stage_spec *spec, const struct size *size,
                            struct stage *stage, struct report *report)
{
    char text[SHAPE_TEXT_MAX];

    (void)size;
    if (stage->in.rank < 2)
        return report_set(report, -EINVAL, "needs an input [N, C, ...], not %s",
                          shape_print(&stage->in, text, sizeof(text)));
    if (stage->in.dims[1] % spec->groups)
        return report_set(
            report, -EINVAL, "%" PRId64 " groups do not divide the %" PRId64 " channels of %s",
            spec->groups, stage->in.dims[1], shape_print(&stage->in, text, sizeof(text)));
    stage->group_norm.groups = spec->groups;
    stage->group_norm.channels = stage->in.dims[1];
    stage->group_norm.spatial = count(&stage->in, 2, stage->in.rank);
    stage->group_norm.eps = spec->eps;
    return 0;
}

static int shape_amin(const struct stage_spec *spec, const struct size *size, struct stage *stage,
                      struct report *report)
{
    char text[SHAPE_TEXT_MAX];
    int rank = (int)stage->in.rank;
    int dim = (int)(spec->dim < 0 ? spec->dim + rank : spec->dim);

    (void)size;
    if (dim < 0 || dim >= rank)
        return report_set(report, -EINVAL, "%s has no dimension %" PRId64,
                          shape_print(&stage->in, text, sizeof(text)), spec->dim);
    if (dim == 0)
        return report_set(report, -EINVAL,
                          "dimension %" PRId64 " of %s is the batch: rows never mix", spec->dim,
                          shape_print(&stage->in, text, sizeof(text)));
    stage->amin.outer = count(&stage->in, 1, dim);
    stage->amin.n = stage->in.dims[dim];
    stage->amin.inner = count(&stage->in, dim + 1, rank);
    if (spec->keepdim) {
        stage->out.dims[dim] = 1;
    } else {
        stage->out.rank--;
        memmove(stage->out.dims + dim, stage->in.dims + dim + 1,
                (size_t)(rank - dim - 1) * sizeof(stage->in.dims[0]));
        stage->out.dims[rank - 1] = 0;
    }
    return 0;
}

static int shape_minimum(const struct stage_spec *spec, const struct size *size,
                         struct stage *stage, struct report *report)
{
    (void)size, (void)report;
    stage->minimum.value = spec->value;
    return 0;
}

static int shape_clamp(const struct stage_spec *spec, const struct size *size, struct stage *stage,
                       struct report *report)
{
    (void)size, (void)report;
    stage->clamp.has_min = spec->has_min;
    stage->clamp.has_max = spec->has_max;
    stage->clamp.min = spec->min;
    stage->clamp.max = spec->max;
    return 0;
}

/* Shapes are aligned at their ends; a tensor of higher rank pushes the batch to the right. */
static int shape_add(const struct stage_spec *spec, const struct size *size, struct stage *stage,
                     struct report *report)
{
    struct shape given = plain_shape(size->dims, size->n), *out = &stage->out;
    struct shape *tensor = &stage->add.tensor;
    char in_text[SHAPE_TEXT_MAX], tensor_text[SHAPE_TEXT_MAX];
    int rank = size->n > stage->in.rank ? size->n : stage->in.rank;
    int in_shift = rank - stage->in.rank, tensor_shift = rank - size->n;

    shape_print(&stage->in, in_text, sizeof(in_text));
    shape_print(&given, tensor_text, sizeof(tensor_text));
    *out = *tensor = (struct shape){.rank = (int8_t)rank, .batch = -1};
    out->batch = (int8_t)in_shift;
    for (int i = 0; i < rank; i++) {
        int64_t a = i < in_shift ? 1 : stage->in.dims[i - in_shift];
        int64_t b = i < tensor_shift ? 1 : size->dims[i - tensor_shift];

        if (i == in_shift && b != 1)
            return report_set(report, -EINVAL,
                              "tensor '%s' %s has size %" PRId64
                              " along the batch of %s: rows never mix",
                              spec->tensor, tensor_text, b, in_text);
        if (a != b && a != 1 && b != 1)
            return report_set(report, -EINVAL, "tensor '%s' %s does not broadcast with %s",
                              spec->tensor, tensor_text, in_text);
        tensor->dims[i] = b;
        out->dims[i] = a > b ? a : b;
    }
    stage->add.moves_batch = out->batch != 0;
    return 0;
}

static int shape_dropout(const struct stage_spec *spec, const struct size *size,
                         struct stage *stage, struct report *report)
{
    (void)size, (void)report;
    stage->dropout.p = spec->p;
    return 0;
}

/* Tensors, with the initial distributions of PyTorch's modules */

static void set_dims(struct weight_shape *to, const int64_t *dims, int rank)
{
    to->rank = rank;
    memcpy(to->dims, dims, (size_t)rank * sizeof(dims[0]));
}

static void tensors_linear(const struct stage *stage, const struct size *size,
                           struct weight_shape *weight, struct weight_shape *bias)
{
    int64_t dims[] = {stage->linear.out_features, stage->linear.in_features};

    (void)size;
    set_dims(weight, dims, 2);
    set_dims(bias, dims, 1);
    weight->bound = bias->bound = 1 / sqrt((double)stage->linear.in_features);
}

static void tensors_conv3d(const struct stage *stage, const struct size *size,
                           struct weight_shape *weight, struct weight_shape *bias)
{
    const int64_t *kernel = stage->conv3d.kernel;
    int64_t dims[] = {stage->conv3d.out_channels, stage->conv3d.in_channels, kernel[0], kernel[1],
                      kernel[2]};
    double fan_in = (double)dims[1] * (double)dims[2] * (double)dims[3] * (double)dims[4];

    (void)size;
    set_dims(weight, dims, 5);
    set_dims(bias, dims, 1);
    weight->bound = bias->bound = 1 / sqrt(fan_in);
}

static void tensors_group_norm(const struct stage *stage, const struct size *size,
                               struct weight_shape *weight, struct weight_shape *bias)
{
    (void)size;
    set_dims(weight, &stage->group_norm.channels, 1);
    set_dims(bias, &stage->group_norm.channels, 1);
    weight->value = 1;
}

static void tensors_add(const struct stage *stage, const struct size *size,
                        struct weight_shape *weight, struct weight_shape *bias)
{
    (void)stage, (void)bias;
    set_dims(weight, size->dims, size->n);
    weight->normal = true;
}

static const struct stage_kind kinds[OP_COUNT] = {
    [OP_LINEAR] = {.name = "linear",
                   .parse = parse_linear,
                   .shape = shape_linear,
                   .tensors = tensors_linear,
                   .weight_rank = 2,
                   .n_size = 1,
                   .size_at = {0},
                   .size_key = "out"},
    [OP_CONV3D] = {.name = "conv3d",
                   .parse = parse_conv3d,
                   .shape = shape_conv3d,
                   .tensors = tensors_conv3d,
                   .weight_rank = 5,
                   .n_size = 4,
                   .size_at = {0, 2, 3, 4},
                   .size_key = "out and kernel"},
    [OP_GROUP_NORM] = {.name = "group_norm",
                       .parse = parse_group_norm,
                       .shape = shape_group_norm,
                       .tensors = tensors_group_norm},
    [OP_AMIN] = {.name = "amin", .parse = parse_amin, .shape = shape_amin},
    [OP_MINIMUM] = {.name = "minimum",
                    .pointwise = true,
                    .parse = parse_minimum,
                    .shape = shape_minimum},
    [OP_CLAMP] = {.name = "clamp", .pointwise = true, .parse = parse_clamp, .shape = shape_clamp},
    [OP_ADD] = {.name = "add",
                .parse = parse_add,
                .shape = shape_add,
                .tensors = tensors_add,
                .size_key = "shape"},
    [OP_DROPOUT] = {.name = "dropout",
                    .pointwise = true,
                    .parse = parse_dropout,
                    .shape = shape_dropout},
};

const char *stage_op_name(enum stage_op op)
{
    return kinds[op].name;
}

int stage_op_parse(const char *name)
{
    for (int op = 0; op < OP_COUNT; op++)
        if (strcmp(name, kinds[op].name) == 0)
            return op;
    return -1;
}

void stage_op_list(char *to, size_t size)
{
    size_t n = 0;

    to[0] = 0;
    for (int op = 0; op < OP_COUNT && n < size; op++)
        n += (size_t)snprintf(to + n, size - n, "%s%s", op ? ", " : "", kinds[op].name);
}

void stage_parse(enum stage_op op, struct conf_group *group, struct stage_spec *ret)
{
    *ret = (struct stage_spec){.op = op, .line = conf_line(group)};
    kinds[op].parse(group, ret);
}

const char *stage_weight_name(const struct stage_spec *spec)
{
    return spec->op == OP_ADD ? spec->tensor : spec->weight;
}

static int size_of(const struct stage_spec *spec, const struct st_tensor *tensor, struct size *size,
                   struct report *report)
{
    const struct stage_kind *kind = &kinds[spec->op];
    char text[SHAPE_TEXT_MAX];
    struct shape shape;

    size->n = spec->n_size;
    memcpy(size->dims, spec->size, sizeof(size->dims));
    if (!kind->size_key)
        return 0;
    if (!tensor) {
        if (spec->n_size == 0)
            return report_set(report, -EINVAL, "without its weights it needs %s", kind->size_key);
        return 0;
    }
    shape = plain_shape(tensor->dims, tensor->rank);
    shape_print(&shape, text, sizeof(text));
    if (tensor->elements == 0)
        return report_set(report, -EINVAL, "tensor '%s' %s is empty", tensor->name, text);
    if (kind->weight_rank && tensor->rank != kind->weight_rank)
        return report_set(report, -EINVAL, "tensor '%s' %s needs %d dimensions", tensor->name, text,
                          kind->weight_rank);
    size->n = kind->n_size ? kind->n_size : tensor->rank;
    for (int i = 0; i < size->n; i++)
        size->dims[i] = tensor->dims[kind->n_size ? kind->size_at[i] : i];
    if (spec->n_size && (spec->n_size != size->n ||
                         memcmp(spec->size, size->dims, (size_t)size->n * sizeof(int64_t)) != 0))
        return report_set(report, -EINVAL, "tensor '%s' %s is not what %s says", tensor->name, text,
                          kind->size_key);
    return 0;
}

static int tensors_of(const struct stage_spec *spec, const struct stage *stage,
                      const struct size *size, struct weight_shape *weight,
                      struct weight_shape *bias, struct report *report)
{
    struct weight_shape *both[] = {weight, bias};
    int64_t elements;

    *weight = *bias = (struct weight_shape){.rank = 0};
    if (!kinds[spec->op].tensors)
        return 0;
    kinds[spec->op].tensors(stage, size, weight, bias);
    snprintf(weight->name, sizeof(weight->name), "%s", stage_weight_name(spec));
    snprintf(bias->name, sizeof(bias->name), "%s", spec->bias);
    for (int i = 0; i < 2; i++)
        if (both[i]->name[0] && !product(both[i]->dims, both[i]->rank, &elements))
            return report_set(report, -EINVAL, "tensor '%s' has too many elements", both[i]->name);
    return 0;
}

int stage_build(const struct stage_spec *spec, const struct shape *in,
                const struct st_tensor *tensor, struct stage *ret, struct weight_shape *ret_weight,
                struct weight_shape *ret_bias, struct report *report)
{
    const struct stage_kind *kind = &kinds[spec->op];
    struct stage stage = {.op = spec->op, .line = spec->line, .in = *in, .out = *in};
    struct weight_shape weight, bias;
    char text[SHAPE_TEXT_MAX];
    struct size size;
    int64_t elements;
    int r;

    if (in->batch != 0 && !kind->pointwise)
        return report_set(report, -EINVAL,
                          "an add has moved the batch of %s: only pointwise stages may follow",
                          shape_print(in, text, sizeof(text)));
    r = size_of(spec, tensor, &size, report);
    if (r < 0)
        return r;
    r = kind->shape(spec, &size, &stage, report);
    if (r < 0)
        return r;
    if (!product(stage.out.dims, stage.out.rank, &elements))
        return report_set(report, -EINVAL, "its result %s has too many elements",
                          shape_print(&stage.out, text, sizeof(text)));
    r = tensors_of(spec, &stage, &size, &weight, &bias, report);
    if (r < 0)
        return r;
    *ret = stage;
    *ret_weight = weight;
    *ret_bias = bias;
    return 0;
}
