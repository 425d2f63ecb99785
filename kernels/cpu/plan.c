/*
 * plan.c - a pipeline made ready for the CPU: steps, weights, work space
 *
 * plan_new() goes over the stages once and makes steps of them, so that all sizes are known. Only
 * then is memory looked for, first on paper (pages.h), then taken: one work space for everything
 * that is written, and the weights where each product keeps them. Nothing is allocated later.
 *
 * A stage joins the open pass when it can. It opens a new one when it needs a row that is complete
 * (group_norm), follows one that changed the shape (amin), or has a larger shape itself (an add
 * that repeats its input). A convolution is always followed by a pass, which brings its blocked
 * result into order.
 *
 * Blocks of rows are as large as BLOCK_FLOATS allows: large enough to read the weights a few times
 * per batch only, small enough to share the cache with them.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conv3d.h"
#include "linear.h"
#include "pages.h"
#include "plan.h"

#define BLOCK_FLOATS   (25 << 18) /* 25 MiB of rows between products */
#define BLOCK_ROWS_MAX 1024
#define BLOCK_ROWS_OF  96 /* a multiple of it where there is a linear */

struct builder {
    struct plan *plan;
    const struct onednn *onednn;
    const struct pipeline *pipeline;
    unsigned workers;
    struct report *report;
    struct phase *phase;
    struct step *open; /* the pass that stages may join */
    size_t block;      /* of the convolution that no pass has read yet; 0: none */
    /* Stages with parameters: of a step, of an operation, of the outer sum; NULL: none. */
    const struct stage *norms[PLAN_STEPS_MAX], *adds[MODEL_STAGES_MAX], *outer;
};

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Steps */

static struct step *add_step(struct builder *builder)
{
    struct plan *plan = builder->plan;

    builder->phase->n_steps++;
    return &plan->steps[plan->n_steps++];
}

static void close_pass(struct builder *builder)
{
    if (builder->open)
        builder->open->result = pass_result(&builder->open->pass);

    builder->open = NULL;
}

/* Over a row of that shape. */
static struct pass *open_pass(struct builder *builder, const struct shape *shape)
{
    struct pass *pass;

    close_pass(builder);
    builder->open = add_step(builder);
    pass = &builder->open->pass;
    pass->elements = shape_elements(shape);
    pass->ops = &builder->plan->ops[builder->plan->n_ops];
    pass->block = 1;
    if (builder->block) {
        pass->block = builder->block;
        pass->channels = shape->dims[1];
        pass->spatial = pass->elements / pass->channels;
        builder->block = 0;
    }
    return pass;
}

/* Leaves a plain row to whatever comes next. */
static void flush(struct builder *builder, const struct shape *shape)
{
    if (builder->block)
        open_pass(builder, shape);
    close_pass(builder);
}

static int build_linear(struct builder *builder, const struct stage *stage)
{
    struct plan *plan = builder->plan;
    int r;

    flush(builder, &stage->in);
    builder->phase = &plan->phases[plan->n_phases++];
    *builder->phase = (struct phase){.products = stage->linear.rows,
                                     .in_floats = shape_elements(&stage->in),
                                     .out_floats = shape_elements(&stage->out),
                                     .first_step = plan->n_steps,
                                     .row_floats = shape_elements(&stage->out)};
    r = linear_new(builder->onednn, stage, builder->workers, &builder->phase->linear,
                   builder->report);
    if (r < 0)
        return r;
    plan->resident_bytes += linear_resident_bytes(builder->phase->linear);
    plan->arena_bytes += linear_arena_bytes(builder->phase->linear);
    return 0;
}

static int build_conv3d(struct builder *builder, const struct stage *stage)
{
    struct plan *plan = builder->plan;
    struct step *step;
    int r;

    flush(builder, &stage->in);
    step = add_step(builder);
    r = conv3d_new(builder->onednn, stage, builder->workers, &step->conv, builder->report);
    if (r < 0)
        return r;
    step->result = conv3d_result(step->conv);
    builder->block = conv3d_block(step->conv);
    plan->resident_bytes += conv3d_resident_bytes(step->conv);
    plan->arena_bytes += conv3d_arena_bytes(step->conv);
    return 0;
}

static void build_group_norm(struct builder *builder, const struct stage *stage)
{
    struct plan *plan = builder->plan;
    struct pass *pass = open_pass(builder, &stage->in);

    pass->norm = true;
    pass->channels = stage->group_norm.channels;
    pass->spatial = stage->group_norm.spatial;
    pass->groups = stage->group_norm.groups;
    pass->eps = stage->group_norm.eps;
    builder->norms[plan->n_steps - 1] = stage;
    plan->resident_bytes += 2 * (uint64_t)pass->channels * sizeof(float);
}

static void build_amin(struct builder *builder, const struct stage *stage)
{
    struct pass *pass = builder->open ? &builder->open->pass : open_pass(builder, &stage->in);

    pass->amin = true;
    pass->outer = stage->amin.outer;
    pass->n = stage->amin.n;
    pass->inner = stage->amin.inner;
    close_pass(builder);
}

static struct pointwise *add_op(struct builder *builder, const struct stage *stage)
{
    struct plan *plan = builder->plan;
    struct pointwise *op = &plan->ops[plan->n_ops];

    builder->adds[plan->n_ops++] = stage->op == OP_ADD ? stage : NULL;
    op->op = stage->op;
    return op;
}

static void build_outer(struct builder *builder, const struct stage *stage)
{
    struct plan *plan = builder->plan;
    struct shape in = stage->out;
    int shift = stage->out.rank - stage->in.rank;

    flush(builder, &stage->in);
    for (int i = 0; i < in.rank; i++)
        in.dims[i] = i < shift ? 1 : stage->in.dims[i - shift];
    plan->moves = true;
    plan->outer = (struct outer){
        .outer = 1, .inner = 1, .row = shape_elements(&stage->in), .ops = &plan->ops[plan->n_ops]};
    for (int i = 0; i < stage->out.rank; i++)
        *(i < stage->out.batch ? &plan->outer.outer : &plan->outer.inner) *= stage->out.dims[i];
    broadcast_init(&plan->outer.x_map, &stage->out, in.dims);
    broadcast_init(&plan->outer.tensor_map, &stage->out, stage->add.tensor.dims);
    builder->outer = stage;
    plan->resident_bytes += (uint64_t)stage->weight.elements * sizeof(float);
}

static void build_pointwise(struct builder *builder, const struct stage *stage)
{
    bool grows = shape_elements(&stage->in) != shape_elements(&stage->out);
    struct plan *plan = builder->plan;
    struct pointwise *op;

    if (grows) {
        flush(builder, &stage->in);
        open_pass(builder, &stage->out)->grows = true;
        broadcast_init(&builder->open->pass.map, &stage->out, stage->in.dims);
    }
    if (!plan->moves) {
        if (!builder->open)
            open_pass(builder, &stage->in);
        builder->open->pass.n_ops++;
    } else {
        plan->outer.n_ops++;
    }
    op = add_op(builder, stage);
    switch (stage->op) {
    case OP_MINIMUM:
        op->has_max = true;
        op->max = (float)stage->minimum.value;
        break;
    case OP_CLAMP:
        op->has_min = stage->clamp.has_min;
        op->has_max = stage->clamp.has_max;
        op->min = (float)stage->clamp.min;
        op->max = (float)stage->clamp.max;
        break;
    case OP_ADD:
        broadcast_init(&op->map, &stage->out, stage->add.tensor.dims);
        plan->resident_bytes += (uint64_t)stage->weight.elements * sizeof(float);
        break;
    default:
        op->dropout = plan->n_dropouts;
        plan->dropouts[plan->n_dropouts++] =
            (struct plan_dropout){stage->dropout.p, shape_elements(&stage->out)};
    }
}

static int build_stage(struct builder *builder, const struct stage *stage)
{
    switch (stage->op) {
    case OP_LINEAR:
        return build_linear(builder, stage);
    case OP_CONV3D:
        return build_conv3d(builder, stage);
    case OP_GROUP_NORM:
        build_group_norm(builder, stage);
        return 0;
    case OP_AMIN:
        build_amin(builder, stage);
        return 0;
    case OP_ADD:
        if (stage->add.moves_batch) {
            build_outer(builder, stage);
            return 0;
        }
        break;
    default:
        break;
    }
    build_pointwise(builder, stage);
    return 0;
}

static int build_steps(struct builder *builder)
{
    const struct pipeline *pipeline = builder->pipeline;
    struct plan *plan = builder->plan;
    int r = 0;

    plan->n_phases = 1;
    builder->phase = &plan->phases[0];
    builder->phase->row_floats = plan->in_elements;
    for (int i = 0; i < pipeline->n_stages && r == 0; i++) {
        r = build_stage(builder, &pipeline->stages[i]);
        if (r < 0)
            report_prefix(builder->report, r, "stage %d (%s): ", i + 1,
                          stage_op_name(pipeline->stages[i].op));
    }
    if (r == 0)
        flush(builder, &pipeline->out);
    return r;
}

/* Work space */

/* Hands out consecutive pieces of the arena, or, without one, only counts. */
struct layout {
    char *base;
    size_t size;
};

static void *take(struct layout *layout, int64_t n, size_t size)
{
    void *piece = layout->base ? layout->base + layout->size : NULL;

    layout->size += round_up((size_t)n * size, 64);
    return piece;
}

static void choose_block_rows(struct plan *plan, uint32_t max_rows)
{
    int64_t per_row = plan->moves ? plan->outer.row : 0, rows;

    for (int i = 1; i < plan->n_phases; i++)
        per_row += plan->phases[i].in_floats + plan->phases[i].out_floats;
    rows = per_row ? BLOCK_FLOATS / per_row : BLOCK_ROWS_MAX;
    rows = rows > BLOCK_ROWS_MAX ? BLOCK_ROWS_MAX : rows;
    if (plan->n_phases > 1 && rows > BLOCK_ROWS_OF)
        rows -= rows % BLOCK_ROWS_OF;
    rows = rows > max_rows ? max_rows : rows;
    plan->block_rows = rows < 1 ? 1 : (uint32_t)rows;
}

static void lay_out_slot(const struct plan *plan, struct layout *layout, struct slot *slot)
{
    struct scratch_sizes most = {0};
    int64_t results[2] = {0};

    for (int p = 0; p < plan->n_phases; p++)
        for (int s = 0; s < plan->phases[p].n_steps; s++) {
            const struct step *step = &plan->steps[plan->phases[p].first_step + s];
            struct scratch_sizes sizes = {0};

            if (!step->conv)
                sizes = pass_scratch(&step->pass);
            most.sums = sizes.sums > most.sums ? sizes.sums : most.sums;
            most.groups = sizes.groups > most.groups ? sizes.groups : most.groups;
            most.least = sizes.least > most.least ? sizes.least : most.least;
            /* The last one writes elsewhere. */
            if (s < plan->phases[p].n_steps - 1 && step->result > results[s % 2])
                results[s % 2] = step->result;
        }
    slot->row = take(layout, plan->in_elements, sizeof(float));
    slot->buffers[0] = take(layout, results[0], sizeof(float));
    slot->buffers[1] = take(layout, results[1], sizeof(float));
    slot->tile = take(layout, PASS_TILE_SPACE, sizeof(float));
    slot->scratch.sums = take(layout, most.sums, sizeof(struct loops_sums));
    slot->scratch.mean = take(layout, most.groups, sizeof(float));
    slot->scratch.rstd = take(layout, most.groups, sizeof(float));
    slot->scratch.least = take(layout, most.least, sizeof(float));
}

static void lay_out(struct plan *plan, struct layout *layout)
{
    plan->refs = take(layout, plan->block_rows, sizeof(struct row_ref));
    for (int i = 1; i < plan->n_phases; i++) {
        struct phase *phase = &plan->phases[i];
        int64_t rows = plan->block_rows * phase->products + LINEAR_ROWS_MAX;

        phase->in = take(layout, phase->in_floats / phase->products * rows, sizeof(float));
        phase->out = take(layout, phase->out_floats / phase->products * rows, sizeof(float));
    }
    if (plan->moves)
        plan->sums = take(layout, plan->block_rows * plan->outer.row, sizeof(float));
    if (plan->constant) {
        plan->pattern = take(layout, PASS_TILE, sizeof(float));
        plan->nan_pattern = take(layout, PASS_TILE, sizeof(float));
    }
    for (unsigned i = 0; i < plan->n_slots; i++)
        lay_out_slot(plan, layout, &plan->slots[i]);
}

static void set_pattern(const struct plan *plan, float value, void *to)
{
    loops_fill(plan->slots[0].tile, PASS_TILE, value);
    tensor_from_float(plan->dtype, plan->slots[0].tile, to, PASS_TILE);
}

static int take_arena(struct builder *builder)
{
    struct plan *plan = builder->plan;
    struct layout layout = {.base = NULL};
    uint64_t needed, available;

    lay_out(plan, &layout);
    plan->arena_size = layout.size;
    plan->arena_bytes += layout.size;
    needed = plan->resident_bytes + plan->arena_bytes;
    available = pages_available();
    if (needed > available)
        return report_set(builder->report, -ENOMEM,
                          "needs %" PRIu64 " MiB of memory, %" PRIu64 " MiB are available",
                          (needed >> 20) + 1, available >> 20);
    plan->arena = pages_alloc(plan->arena_size);
    if (!plan->arena)
        return report_set(builder->report, -ENOMEM, "no memory for %zu MiB of work space",
                          (plan->arena_size >> 20) + 1);
    memset(plan->arena, 0, plan->arena_size); /* so that no request waits for its pages */
    layout = (struct layout){.base = plan->arena};
    lay_out(plan, &layout);
    if (plan->constant) {
        set_pattern(plan, plan->value, plan->pattern);
        set_pattern(plan, NAN, plan->nan_pattern);
    }
    return 0;
}

/* Parameters */

/* `value` everywhere when the stage has none. */
static int load_param(struct builder *builder, const struct param *param, int64_t n, float value,
                      float **ret)
{
    float *values;

    values = malloc((size_t)n * sizeof(*values));
    if (!values)
        return report_set(builder->report, -ENOMEM, "out of memory");
    *ret = values;
    if (param->tensor)
        return pipeline_param(builder->pipeline, param, 0, n, values, builder->report);
    loops_fill(values, (size_t)n, value);
    return 0;
}

static int load_weights(struct builder *builder)
{
    struct plan *plan = builder->plan;
    int r = 0;

    for (int i = 1; i < plan->n_phases && r == 0; i++)
        r = linear_load(plan->phases[i].linear, builder->pipeline, builder->report);
    for (int i = 0; i < plan->n_steps && r == 0; i++) {
        const struct stage *norm = builder->norms[i];
        struct step *step = &plan->steps[i];

        if (step->conv)
            r = conv3d_load(step->conv, builder->pipeline, builder->report);
        if (norm)
            r = load_param(builder, &norm->weight, step->pass.channels, 1, &step->pass.gamma);
        if (norm && r == 0)
            r = load_param(builder, &norm->bias, step->pass.channels, 0, &step->pass.beta);
    }
    for (int i = 0; i < plan->n_ops && r == 0; i++) {
        const struct stage *add = builder->adds[i];

        if (add)
            r = load_param(builder, &add->weight, add->weight.elements, 0, &plan->ops[i].tensor);
    }
    if (builder->outer && r == 0)
        r = load_param(builder, &builder->outer->weight, builder->outer->weight.elements, 0,
                       &plan->outer.tensor);
    return r;
}

/* Words */

__attribute__((format(printf, 3, 4))) static void print(struct plan *plan, size_t *n,
                                                        const char *format, ...)
{
    size_t left = sizeof(plan->text) - *n;
    va_list ap;
    int wanted;

    va_start(ap, format);
    wanted = vsnprintf(plan->text + *n, left, format, ap);
    va_end(ap);
    *n += (size_t)wanted < left ? (size_t)wanted : left - 1;
}

static void describe_pass(struct plan *plan, size_t *n, const struct pass *pass)
{
    const char *plus = "";

    if (pass->norm) {
        print(plan, n, "%s", stage_op_name(OP_GROUP_NORM));
        plus = " + ";
    }
    for (int i = 0; i < pass->n_ops; i++) {
        print(plan, n, "%s%s", plus, stage_op_name(pass->ops[i].op));
        plus = " + ";
    }
    if (pass->amin)
        print(plan, n, "%s%s", plus, stage_op_name(OP_AMIN));
    else if (!plus[0])
        print(plan, n, "rearrange");
    print(plan, n,
          pass->norm && pass->block > 1 ? ": statistics, then one pass\n" : ": one pass\n");
}

static void describe(struct plan *plan, const struct shape *out)
{
    char text[240];
    size_t n = 0;

    for (int p = 0; p < plan->n_phases; p++) {
        const struct phase *phase = &plan->phases[p];

        if (phase->linear) {
            linear_print(phase->linear, text, sizeof(text));
            print(plan, &n, "%s\n", text);
        }
        for (int i = phase->first_step; i < phase->first_step + phase->n_steps; i++) {
            const struct step *step = &plan->steps[i];

            if (step->conv) {
                conv3d_print(step->conv, text, sizeof(text));
                print(plan, &n, "%s\n", text);
            } else {
                describe_pass(plan, &n, &step->pass);
            }
        }
    }
    if (plan->moves) {
        print(plan, &n, "%s", stage_op_name(OP_ADD));
        for (int i = 0; i < plan->outer.n_ops; i++)
            print(plan, &n, " + %s", stage_op_name(plan->outer.ops[i].op));
        print(plan, &n, ": outer sum, written in lines of %s\n",
              shape_print(out, text, sizeof(text)));
    }
    print(plan, &n, "blocks of %" PRIu32 " rows, %u workers", plan->block_rows, plan->n_slots);
}

static struct plan *new_plan(const struct pipeline *pipeline, unsigned workers)
{
    struct plan *plan;

    plan = calloc(1, sizeof(*plan));
    if (!plan)
        return NULL;
    plan->slots = calloc(workers, sizeof(struct slot));
    if (!plan->slots)
        return plan_free(plan);
    plan->dtype = pipeline->dtype;
    plan->in_elements = shape_elements(&pipeline->in);
    plan->out_elements = shape_elements(&pipeline->out);
    plan->masks = pipeline_masks(pipeline);
    plan->compact_sums = pipeline->outer_sum;
    plan->n_slots = workers;
    plan->constant = pipeline->proof.constant;
    plan->value = pipeline->proof.value;
    plan->bound = pipeline->proof.bound;
    plan->nonfinite_spreads = pipeline->proof.nonfinite_spreads;
    return plan;
}

int plan_new(const struct onednn *onednn, unsigned workers, const struct pipeline *pipeline,
             uint32_t max_rows, struct plan **ret, struct report *report)
{
    struct builder builder = {
        .onednn = onednn, .pipeline = pipeline, .workers = workers, .report = report};
    struct plan *plan;
    int r;

    builder.plan = plan = new_plan(pipeline, workers);
    if (!plan)
        return report_set(report, -ENOMEM, "out of memory");
    r = build_steps(&builder);
    if (r < 0)
        goto fail;
    choose_block_rows(plan, max_rows);
    r = take_arena(&builder);
    if (r < 0)
        goto fail;
    r = load_weights(&builder);
    if (r < 0)
        goto fail;
    describe(plan, &pipeline->out);
    *ret = plan;
    return 0;

fail:
    plan_free(plan);
    return r;
}

struct plan *plan_free(struct plan *plan)
{
    if (!plan)
        return NULL;
    for (int i = 0; i < plan->n_phases; i++)
        linear_free(plan->phases[i].linear);
    for (int i = 0; i < plan->n_steps; i++) {
        conv3d_free(plan->steps[i].conv);
        free(plan->steps[i].pass.gamma);
        free(plan->steps[i].pass.beta);
    }
    for (int i = 0; i < plan->n_ops; i++)
        free(plan->ops[i].tensor);
    free(plan->outer.tensor);
    pages_free(plan->arena, plan->arena_size);
    free(plan->slots);
    free(plan);
    return NULL;
}

unsigned plan_passes(const struct plan *plan)
{
    return (unsigned)(plan->n_phases - 1 + plan->n_steps + plan->moves + plan->constant);
}
