/*
 * steps.c - from a pipeline's stages to a plan's steps
 *
 * Stages are taken in order and fused where a fused step exists:
 *   linear + group_norm + amin over all channels     one kernel where linear_norm_min has the
 *                                                    shape, else products, then one (norm_min)
 *   conv3d + group_norm + points                     where conv_norm has the shape
 *   group_norm + points                              statistics, then one kernel (a tail)
 *   an add that changes the shape + points           one tail
 *   points                                           one tail
 * and the last step always has a tail, because only tails write results. Points are minimum, clamp,
 * dropout, and an add that leaves the shape as it is. Values go back and forth between two arrays.
 */
#include <math.h>
#include <string.h>

#include "kernels/cuda/steps.h"
#include "kernels/dropout.h"

static const struct stage *next(const struct builder *b, int ahead)
{
    int i = b->stage + ahead;

    return i < b->pipeline->n_stages ? &b->pipeline->stages[i] : NULL;
}

static struct step *add_step(struct builder *b, enum step_kind kind, int64_t to_elements)
{
    struct plan *plan = b->plan;
    struct step *step = &plan->steps[plan->n_steps];

    step->kind = kind;
    step->from = b->at;
    step->to = b->at == BUFFER_A ? BUFFER_B : BUFFER_A;
    step->from_elements = b->elements;
    step->to_elements = to_elements;
    b->stage_of[plan->n_steps] = b->stage;
    b->norm_of[plan->n_steps] = -1;
    plan->n_steps++;
    if (kind != STEP_STATS) {
        b->at = step->to;
        b->elements = to_elements;
        b->wide = true;
    }
    return step;
}

static bool norm_follows_linear(const struct stage *linear, const struct stage *norm)
{
    return norm && norm->op == OP_GROUP_NORM && linear->linear.rows == 1 &&
           norm->group_norm.spatial == 1 &&
           norm->group_norm.channels == linear->linear.out_features;
}

static void add_linear(struct builder *b)
{
    const struct stage *stage = next(b, 0), *norm = next(b, 1), *amin = next(b, 2);
    const struct pipeline *pipeline = b->pipeline;
    struct gemm_shape *gemm = &b->gemms[b->stage];
    bool normed = norm_follows_linear(stage, norm);
    bool fused = normed && amin && amin->op == OP_AMIN && amin->amin.outer == 1 &&
                 amin->amin.inner == 1 &&
                 norm_min_fits(norm->group_norm.channels, norm->group_norm.groups);
    struct step *step;

    *gemm = (struct gemm_shape){
        .kind = !b->wide && pipeline->dtype != DTYPE_FLOAT32 ? GEMM_NATIVE
                : pipeline->dtype == DTYPE_FLOAT32 && pipeline->precision == PRECISION_TF32
                    ? GEMM_SINGLE
                    : GEMM_EXACT,
        .dtype = pipeline->dtype,
        .in = stage->linear.in_features,
        .out = stage->linear.out_features,
        .rows = stage->linear.rows * b->plan->rows_max,
    };
    if (normed && pipeline->dtype == DTYPE_FLOAT32)
        gemm->centre = norm->group_norm.channels / norm->group_norm.groups;
    if (fused)
        b->fused[b->stage] = (struct linear_norm_min_shape){
            .kind = gemm->kind,
            .dtype = pipeline->dtype,
            .in = gemm->in,
            .out = gemm->out,
            .groups = norm->group_norm.groups,
            .rows = gemm->rows,
            .eps = (float)norm->group_norm.eps,
        };
    step = add_step(b,
                    !fused                                      ? STEP_LINEAR
                    : linear_norm_min_fits(&b->fused[b->stage]) ? STEP_LINEAR_NORM_MIN
                                                                : STEP_NORM_MIN,
                    fused ? 1 : stage->linear.rows * stage->linear.out_features);
    step->gemm_rows = stage->linear.rows;
    if (fused) {
        step->groups = norm->group_norm.groups;
        step->channels = norm->group_norm.channels;
        step->eps = (float)norm->group_norm.eps;
        b->norm_of[b->plan->n_steps - 1] = b->stage + 1;
    }
    b->stage += fused ? 3 : 1;
}

static struct conv_shape conv_shape(const struct stage *stage, int64_t rows)
{
    struct conv_shape conv = {
        .in_channels = stage->conv3d.in_channels,
        .out_channels = stage->conv3d.out_channels,
        .rows = rows,
    };

    for (int i = 0; i < 3; i++) {
        conv.in[i] = stage->in.dims[2 + i];
        conv.out[i] = stage->out.dims[2 + i];
        conv.kernel[i] = stage->conv3d.kernel[i];
        conv.stride[i] = stage->conv3d.stride[i];
        conv.padding[i] = stage->conv3d.padding[i];
    }
    return conv;
}

/* Stages that compute in float32 from 16-bit input want it widened. */
static void add_widen(struct builder *b, bool wanted)
{
    if (!b->wide && wanted)
        add_step(b, STEP_WIDEN, b->elements);
}

static void add_conv3d(struct builder *b)
{
    const struct stage *stage = next(b, 0), *norm = next(b, 1);
    struct conv_shape *shape = &b->convs[b->stage];

    *shape = conv_shape(stage, b->plan->rows_max);
    shape->dtype = b->wide ? DTYPE_FLOAT32 : b->plan->dtype;
    shape->normed = norm && norm->op == OP_GROUP_NORM;

    add_widen(b, !conv_native(shape));
    if (b->wide)
        shape->dtype = DTYPE_FLOAT32;
    add_step(b, STEP_CONV3D, shape_elements(&stage->out));
    b->stage++;
}

static void add_amin(struct builder *b)
{
    const struct stage *stage = next(b, 0);
    struct step *step = add_step(b, STEP_AMIN, shape_elements(&stage->out));

    step->amin.outer = stage->amin.outer;
    step->amin.n = stage->amin.n;
    step->amin.inner = stage->amin.inner;
    b->stage++;
}

static bool same_shape(const struct shape *a, const struct shape *b)
{
    for (int d = 0; d < a->rank && a->rank == b->rank; d++)
        if (a->dims[d] != b->dims[d])
            return false;
    return a->rank == b->rank && a->batch == b->batch;
}

/* Whether a stage can be a point. Kernels count a row's elements in 32 bits then. */
static bool is_point(const struct stage *stage)
{
    return stage &&
           (stage->op == OP_MINIMUM || stage->op == OP_CLAMP || stage->op == OP_DROPOUT ||
            (stage->op == OP_ADD && stage->out.batch == 0 && same_shape(&stage->in, &stage->out) &&
             shape_elements(&stage->out) <= INT32_MAX / 2));
}

static int64_t count(const struct shape *shape, int from, int to)
{
    int64_t all = 1;

    for (int i = from; i < to; i++)
        all *= shape->dims[i];
    return all;
}

/* How to walk over [inner] in x and in the tensor; neighbouring dimensions that both walk the same
 * way become one. */
static void add_strides(struct tail *tail, const struct stage *stage)
{
    int batch = stage->out.batch, rank = 0;
    int64_t from_stride = 1, stride = 1;

    tail->add.outer_stride = count(&stage->add.tensor, batch + 1, stage->out.rank);
    for (int d = stage->out.rank - 1; d > batch; d--) {
        int64_t n = stage->out.dims[d];
        int64_t in = d - batch < stage->in.rank ? stage->in.dims[d - batch] : 1;
        int64_t with = stage->add.tensor.dims[d];
        int64_t from_step = in == 1 ? 0 : from_stride, step = with == 1 ? 0 : stride;

        from_stride *= in;
        stride *= with;
        if (n == 1)
            continue;
        if (rank > 0 && from_step == tail->add.from_stride[rank - 1] * tail->add.dims[rank - 1] &&
            step == tail->add.stride[rank - 1] * tail->add.dims[rank - 1]) {
            tail->add.dims[rank - 1] *= n;
            continue;
        }
        tail->add.dims[rank] = n;
        tail->add.from_stride[rank] = from_step;
        tail->add.stride[rank] = step;
        rank++;
    }
    /* Found from the innermost; the kernel wants the outermost first. */
    for (int i = 0; i < rank / 2; i++) {
        int j = rank - 1 - i;
        int64_t dim = tail->add.dims[i], from = tail->add.from_stride[i];
        int64_t with = tail->add.stride[i];

        tail->add.dims[i] = tail->add.dims[j];
        tail->add.from_stride[i] = tail->add.from_stride[j];
        tail->add.stride[i] = tail->add.stride[j];
        tail->add.dims[j] = dim;
        tail->add.from_stride[j] = from;
        tail->add.stride[j] = with;
    }
    tail->add.rank = rank;
}

/* The same where the shape stays: a row is walked over from end to end. */
static void add_summand(struct summand *to, const struct stage *stage)
{
    struct tail walk = {.add = {.dims = {1}}};

    add_strides(&walk, stage);
    to->rank = walk.add.rank > 0 ? walk.add.rank : 1;
    for (int d = 0; d < to->rank; d++) {
        to->dims[d] = (uint32_t)walk.add.dims[d];
        to->stride[d] = (uint32_t)walk.add.stride[d];
    }
}

/* -0 lies below +0. */
static float greater(float a, float b)
{
    return a < b || (a == b && signbit(a)) ? b : a;
}

static float lesser(float a, float b)
{
    return b < a || (a == b && signbit(b)) ? b : a;
}

/* Limits that follow one another are one: minimum and maximum distribute over each other. */
static bool join_limits(struct tail *tail, const struct point *point)
{
    struct point *before = tail->n_points > 0 ? &tail->points[tail->n_points - 1] : NULL;

    if (!before || before->kind != POINT_LIMIT || point->kind != POINT_LIMIT)
        return false;
    before->low = greater(before->low, point->low);
    before->high = lesser(greater(before->high, point->low), point->high);
    return true;
}

static void add_point(struct builder *b, struct tail *tail, const struct stage *stage)
{
    struct point *point = &tail->points[tail->n_points];
    struct plan *plan = b->plan;
    struct dropout dropout;

    *point = (struct point){.low = -INFINITY, .high = INFINITY};
    switch (stage->op) {
    case OP_MINIMUM:
        point->high = (float)stage->minimum.value;
        break;
    case OP_CLAMP:
        if (stage->clamp.has_min)
            point->low = (float)stage->clamp.min;
        if (stage->clamp.has_max)
            point->high = (float)stage->clamp.max;
        break;
    case OP_ADD:
        point->kind = POINT_ADD;
        point->summand = tail->n_summands++;
        add_summand(&tail->summands[point->summand], stage);
        break;
    default: /* OP_DROPOUT */
        if (stage->dropout.p == 0)
            return;
        dropout_init(&dropout, stage->dropout.p, 1, 0, 0, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
        point->kind = POINT_MASK;
        point->zero = dropout.zero;
        point->keep_below = dropout_first_dropped(dropout.keep_below);
        point->scale = dropout.scale;
        point->counter = plan->n_masks;
        plan->masks_drawn[plan->n_masks++] =
            (struct mask){stage->dropout.p, shape_elements(&stage->out)};
        break;
    }
    if (!join_limits(tail, point))
        tail->n_points++;
}

/* Everything pointwise that follows joins the tail, while it has room for adds. */
static void add_points(struct builder *b, struct tail_step *step)
{
    struct tail *tail = &step->tail;

    for (const struct stage *stage = next(b, 0); is_point(stage); stage = next(b, 0)) {
        if (stage->op == OP_ADD && tail->n_summands == SUMMANDS_MAX)
            break;
        if (stage->op == OP_ADD)
            b->summand_of[step->table][tail->n_summands] = b->stage;
        add_point(b, tail, stage);
        b->stage++;
    }
}

static struct tail_step *new_tail(struct plan *plan, enum list list, enum tail_source source,
                                  int64_t elements)
{
    struct tail_step *step = &plan->tails[plan->n_tails];

    step->list = list;
    step->table = plan->n_tails++;
    step->tail.source = source;
    step->tail.dtype = plan->dtype;
    step->tail.elements = step->tail.from_elements = step->tail.inner = elements;
    step->tail.outer = 1;
    return step;
}

static struct step *add_tail(struct builder *b, enum tail_source source, int64_t elements)
{
    struct step *step = add_step(b, STEP_TAIL, elements);

    step->tail = new_tail(b->plan, LIST_ALL, source, elements);
    step->tail->tail.from_elements = step->from_elements;
    return step;
}

static void add_group_norm(struct builder *b)
{
    const struct stage *stage = next(b, 0);
    struct step *stats = add_step(b, STEP_STATS, b->elements), *step;
    struct tail *tail;

    stats->groups = stage->group_norm.groups;
    stats->channels = stage->group_norm.channels;
    stats->group_size = stats->channels / stats->groups * stage->group_norm.spatial;
    stats->eps = (float)stage->group_norm.eps;
    step = add_tail(b, TAIL_NORM, b->elements);
    b->norm_of[b->plan->n_steps - 1] = b->stage;
    tail = &step->tail->tail;
    tail->norm.groups = stats->groups;
    tail->norm.channels = stats->channels;
    tail->norm.spatial = stage->group_norm.spatial;
    b->stage++;
    add_points(b, step->tail);
}

/* Masks must be drawn four at a time there. */
static bool tail_is_plain(const struct builder *b)
{
    for (int i = 2; is_point(next(b, i)); i++)
        if (next(b, i)->op == OP_DROPOUT && next(b, i)->dropout.p != 0)
            return false;
    return true;
}

/* conv3d, group_norm and what follows, as one step. False: as steps of their own. */
static bool add_conv_norm(struct builder *b)
{
    const struct stage *stage = next(b, 0), *norm = next(b, 1);
    struct conv_norm_shape *shape = &b->normed[b->stage];
    int64_t elements = shape_elements(&stage->out);
    struct step *step;

    if (!norm || norm->op != OP_GROUP_NORM || (elements % 4 != 0 && !tail_is_plain(b)))
        return false;
    *shape = (struct conv_norm_shape){
        .conv = conv_shape(stage, b->plan->rows_max),
        .dtype = b->wide ? DTYPE_FLOAT32 : b->plan->dtype,
        .groups = norm->group_norm.groups,
        .eps = (float)norm->group_norm.eps,
    };
    /* Values between stages are float32, results what the model says: the kernel knows both. */
    if (shape->dtype != b->plan->dtype || !conv_norm_fits(shape))
        return false;
    step = add_step(b, STEP_CONV_NORM, elements);
    b->norm_of[b->plan->n_steps - 1] = b->stage + 1;
    step->tail = new_tail(b->plan, LIST_ALL, TAIL_DIRECT, elements);
    b->stage += 2;
    add_points(b, step->tail);
    return true;
}

/* One that is no point. */
static void add_add(struct builder *b)
{
    const struct stage *stage = next(b, 0);
    struct step *step = add_tail(b, TAIL_ADD, shape_elements(&stage->out));
    struct tail *tail = &step->tail->tail;

    tail->outer = count(&stage->out, 0, stage->out.batch);
    tail->inner = count(&stage->out, stage->out.batch + 1, stage->out.rank);
    add_strides(tail, stage);
    b->stage++;
    add_points(b, step->tail);
}

static void add_stages(struct builder *b)
{
    const struct stage *stage;

    add_widen(b, next(b, 0) && next(b, 0)->op != OP_LINEAR && next(b, 0)->op != OP_CONV3D);
    for (stage = next(b, 0); stage; stage = next(b, 0)) {
        switch (stage->op) {
        case OP_LINEAR:
            add_linear(b);
            break;
        case OP_CONV3D:
            if (!add_conv_norm(b))
                add_conv3d(b);
            break;
        case OP_GROUP_NORM:
            add_group_norm(b);
            break;
        case OP_AMIN:
            add_amin(b);
            break;
        default: /* pointwise */
            if (is_point(stage))
                add_points(b, add_tail(b, TAIL_DIRECT, b->elements)->tail);
            else
                add_add(b);
            break;
        }
    }
    if (b->plan->n_steps == 0 || !b->plan->steps[b->plan->n_steps - 1].tail)
        add_tail(b, TAIL_DIRECT, b->elements);
}

/* The last step's tail, and what stands in for it: the compact result, the proven constant. */
static void add_ends(struct builder *b)
{
    const struct pipeline *pipeline = b->pipeline;
    struct plan *plan = b->plan;
    struct step *last = &plan->steps[plan->n_steps - 1];
    struct tail *fill;

    last->tail->list = LIST_RESULTS;
    plan->out_elements = last->tail->tail.elements;
    plan->out_outer = last->tail->tail.outer;
    plan->out_inner = last->tail->tail.inner;
    if (pipeline->outer_sum) {
        plan->compact_elements = last->from_elements;
        if (!outer_fits(&last->tail->tail))
            plan->compact = new_tail(plan, LIST_COMPACT, TAIL_DIRECT, last->from_elements);
    }
    if (!plan->proof.constant)
        return;
    plan->fill = new_tail(plan, LIST_RESULTS, TAIL_CONSTANT, plan->out_elements);
    fill = &plan->fill->tail;
    memcpy(&fill->constant.bound, &plan->proof.bound, sizeof(plan->proof.bound));
    fill->constant.value = plan->proof.value;
    fill->constant.nonfinite_spreads = plan->proof.nonfinite_spreads;
    for (int i = 0; i < last->tail->tail.n_points; i++)
        if (last->tail->tail.points[i].kind == POINT_MASK)
            fill->points[fill->n_points++] = last->tail->tail.points[i];
}

void steps_build(struct builder *b)
{
    struct plan *plan = b->plan;

    b->elements = plan->in_elements;
    b->wide = plan->dtype == DTYPE_FLOAT32;
    add_stages(b);
    add_ends(b);
    for (int i = 0; i < plan->n_tails; i++)
        plan->tails[i].tail.by_row = tail_by_row(&plan->tails[i].tail);
}
