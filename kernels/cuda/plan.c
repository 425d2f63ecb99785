/*
 * plan.c - a pipeline made ready: sizes, resident weights, words
 *
 * Sizes are known from the steps before anything is allocated, so that a model that does not fit is
 * refused while the running one stays. Weights then go through pinned staging to the device, where
 * each product or convolution takes what it needs; the float32 original is freed again.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/graph.h"
#include "kernels/cuda/steps.h"
#include "kernels/size.h"

#define STAGING   ((size_t)16 << 20)
#define MARGIN    ((uint64_t)128 << 20) /* device memory that is left to the driver and libraries */
#define ALIGNMENT 256

/* Words for describe */

__attribute__((format(printf, 2, 3))) static void say(struct plan *plan, const char *format, ...)
{
    size_t used = strlen(plan->text);
    va_list args;

    va_start(args, format);
    vsnprintf(plan->text + used, sizeof(plan->text) - used, format, args);
    va_end(args);
}

/* Sizes */

static uint64_t aligned(uint64_t size)
{
    return size_round(size, ALIGNMENT);
}

static void raise(uint64_t *most, uint64_t size)
{
    size = aligned(size);
    *most = size > *most ? size : *most;
}

static uint64_t bytes(int64_t n, int64_t elements, uint64_t size)
{
    return size_times(size_times((uint64_t)n, (uint64_t)elements), size);
}

static uint64_t measure_step(struct builder *b, int i, int64_t rows)
{
    struct plan *plan = b->plan;
    struct arena_size *size = &plan->size;
    const struct step *step = &plan->steps[i];
    int stage = b->stage_of[i];
    uint64_t resident, work;
    struct conv_norm_sizes normed;
    struct gemm_size gemm;

    if (i < plan->n_steps - 1 && step->kind != STEP_STATS)
        raise(&size->buffers[step->to], bytes(rows, step->to_elements, sizeof(float)));
    switch (step->kind) {
    case STEP_LINEAR:
    case STEP_NORM_MIN:
        gemm_size(&b->gemms[stage], &gemm);
        raise(&size->operand, gemm.operand);
        raise(&size->exponents, gemm.exponents);
        raise(&size->sums, gemm.sums);
        raise(&size->gemm_workspace, gemm.workspace);
        raise(&b->loading, bytes(b->gemms[stage].in, b->gemms[stage].out, sizeof(float)));
        return gemm.resident;
    case STEP_LINEAR_NORM_MIN:
        linear_norm_min_size(&b->fused[stage], &resident, &work);
        raise(&size->fused, work);
        raise(&b->loading, bytes(b->gemms[stage].in, b->gemms[stage].out, sizeof(float)));
        return resident;
    case STEP_CONV3D:
        raise(&size->workspace, conv_work(&b->convs[stage]));
        raise(&b->loading, bytes(b->pipeline->stages[stage].weight.elements, 1, sizeof(float)));
        return conv_resident(&b->convs[stage]);
    case STEP_CONV_NORM:
        normed = conv_norm_size(&b->normed[stage]);
        raise(&size->fused, normed.work);
        raise(&size->counters, normed.counters);
        raise(&b->loading, bytes(b->pipeline->stages[stage].weight.elements, 1, sizeof(float)));
        return normed.resident;
    case STEP_STATS:
        raise(&size->stats, bytes(rows, step->groups, sizeof(float2)));
        raise(&size->partial,
              bytes(rows, stats_partials(1, step->groups, step->group_size), sizeof(double2)));
        return 0;
    default:
        return 0;
    }
}

static void sum_up(struct arena_size *size)
{
    const uint64_t parts[] = {size->result,    size->stats,     size->partial,        size->operand,
                              size->exponents, size->sums,      size->gemm_workspace, size->fused,
                              size->counters,  size->workspace, size->guard};

    size->all = 0;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
        size->all = size_plus(size->all, parts[i]);
    for (int i = 0; i < BUFFERS; i++)
        size->all = size_plus(size->all, size->buffers[i]);
}

/* Returns the bytes that stay resident. */
static uint64_t measure(struct builder *b)
{
    struct plan *plan = b->plan;
    uint64_t resident = 0, esize = dtype_size(plan->dtype);
    int64_t rows = plan->rows_max;

    plan->x_in_place = true;
    for (int i = 0; i < plan->n_steps; i++) {
        int64_t padded = rows;

        if (plan->steps[i].kind == STEP_CONV3D)
            padded = conv_rows(&b->convs[b->stage_of[i]], plan->rows_max);
        if (plan->steps[i].kind == STEP_CONV3D && plan->steps[i].from == BUFFER_X &&
            conv_pads(&b->convs[b->stage_of[i]]))
            plan->x_in_place = false;
        rows = padded > rows ? padded : rows;
    }
    raise(&plan->size.buffers[BUFFER_X], bytes(rows, plan->in_elements, esize));
    raise(&plan->size.result, bytes(plan->rows_max, plan->out_elements, esize));
    if (plan->proof.constant)
        raise(&plan->size.guard, constant_work(plan->rows_max));
    for (int i = 0; i < plan->n_steps; i++)
        resident = size_plus(resident, measure_step(b, i, rows));
    for (int i = 0; i < b->pipeline->n_stages; i++)
        if (b->pipeline->stages[i].op == OP_GROUP_NORM || b->pipeline->stages[i].op == OP_ADD)
            resident = size_plus(resident, bytes(b->pipeline->stages[i].weight.elements +
                                                     b->pipeline->stages[i].bias.elements,
                                                 1, sizeof(float)));
    sum_up(&plan->size);
    return resident;
}

static int check_memory(const struct builder *b, uint64_t resident, struct report *report)
{
    uint64_t slots = size_times(SLOTS, b->plan->size.all);
    uint64_t need =
        size_plus(size_plus(resident, b->loading), size_plus(slots, MARGIN + graph_bytes(b->plan)));
    size_t free_bytes, total;
    int r = CUDA(report, cudaMemGetInfo(&free_bytes, &total));

    if (r == 0 && need > free_bytes)
        r = report_set(report, -ENOMEM,
                       "needs %llu MiB of device memory (weights %llu, %d slots of %llu), of which "
                       "%llu MiB are free",
                       (unsigned long long)(need >> 20), (unsigned long long)(resident >> 20),
                       SLOTS, (unsigned long long)(b->plan->size.all >> 20),
                       (unsigned long long)free_bytes >> 20);
    return r;
}

/* Weights */

struct loader {
    const struct pipeline *pipeline;
    cudaStream_t stream;
    float *staging; /* pinned, STAGING bytes */
};

static int load_param(const struct loader *loader, const struct param *param, float *to,
                      struct report *report)
{
    int64_t step = STAGING / sizeof(float);
    int r = 0;

    for (int64_t done = 0; done < param->elements && r == 0; done += step) {
        int64_t n = param->elements - done < step ? param->elements - done : step;

        r = pipeline_param(loader->pipeline, param, done, n, loader->staging, report);
        if (r == 0)
            r = CUDA(report, cudaMemcpyAsync(to + done, loader->staging, (size_t)n * sizeof(float),
                                             cudaMemcpyHostToDevice, loader->stream));
        if (r == 0)
            r = CUDA(report, cudaStreamSynchronize(loader->stream));
    }
    return r;
}

/* A copy on the device; NULL when the stage has no such parameter. */
static int new_param(const struct loader *loader, const struct param *param, float **ret,
                     struct report *report)
{
    float *to;
    int r;

    if (!param->tensor) {
        *ret = NULL;
        return 0;
    }
    r = CUDA(report, cudaMalloc((void **)&to, (size_t)param->elements * sizeof(float)));
    if (r < 0)
        return r;
    r = load_param(loader, param, to, report);
    if (r < 0) {
        cudaFree(to);
        return r;
    }
    *ret = to;
    return 0;
}

static int keep_param(struct plan *plan, const struct loader *loader, const struct param *param,
                      const float **ret, struct report *report)
{
    float *to = NULL;
    int r = new_param(loader, param, &to, report);

    if (r < 0)
        return r;
    if (to)
        plan->params[plan->n_params++] = to;
    *ret = to;
    return 0;
}

static int load_product(const struct builder *b, const struct loader *loader,
                        struct gemm_library *library, int i, struct report *report)
{
    struct step *step = &b->plan->steps[i];
    const struct stage *stage = &b->pipeline->stages[b->stage_of[i]];
    float *weight = NULL, *bias = NULL;
    int r;

    r = new_param(loader, &stage->weight, &weight, report);
    if (r == 0)
        r = new_param(loader, &stage->bias, &bias, report);
    if (r == 0 && step->kind == STEP_CONV3D)
        r = conv_new(&b->convs[b->stage_of[i]], weight, bias, loader->stream, &step->conv, report);
    else if (r == 0)
        r = gemm_new(library, &b->gemms[b->stage_of[i]], weight, bias, loader->stream, &step->gemm,
                     report);
    cudaFree(bias);
    cudaFree(weight);
    return r;
}

/* The norm's parameters become part of the prepared weights. */
static int load_fused(const struct builder *b, const struct loader *loader, int i,
                      struct report *report)
{
    const struct stage *linear = &b->pipeline->stages[b->stage_of[i]];
    const struct stage *norm = &b->pipeline->stages[b->norm_of[i]];
    const struct param *params[4] = {&linear->weight, &linear->bias, &norm->weight, &norm->bias};
    float *at[4] = {NULL};
    int r = 0;

    for (int p = 0; p < 4 && r == 0; p++)
        r = new_param(loader, params[p], &at[p], report);
    if (r == 0 && b->plan->steps[i].kind == STEP_CONV_NORM)
        r = conv_norm_new(&b->normed[b->stage_of[i]], at[0], at[1], at[2], at[3], loader->stream,
                          &b->plan->steps[i].normed, report);
    else if (r == 0)
        r = linear_norm_min_new(&b->fused[b->stage_of[i]], at[0], at[1], at[2], at[3],
                                loader->stream, &b->plan->steps[i].fused, report);
    for (int p = 0; p < 4; p++)
        cudaFree(at[p]);
    return r;
}

static int load_summands(const struct builder *b, const struct loader *loader,
                         struct tail_step *step, struct report *report)
{
    int r = 0;

    for (int i = 0; i < step->tail.n_summands && r == 0; i++)
        r = keep_param(b->plan, loader, &b->pipeline->stages[b->summand_of[step->table][i]].weight,
                       &step->tail.summands[i].tensor, report);
    return r;
}

static int load_step(struct builder *b, const struct loader *loader, struct gemm_library *library,
                     int i, struct report *report)
{
    struct plan *plan = b->plan;
    struct step *step = &plan->steps[i];
    const struct stage *norm = b->norm_of[i] < 0 ? NULL : &b->pipeline->stages[b->norm_of[i]];
    struct tail *tail;
    int r = 0;

    switch (step->kind) {
    case STEP_LINEAR:
    case STEP_NORM_MIN:
    case STEP_CONV3D:
        r = load_product(b, loader, library, i, report);
        if (r == 0 && norm)
            r = keep_param(plan, loader, &norm->weight, &step->gamma, report);
        if (r == 0 && norm)
            r = keep_param(plan, loader, &norm->bias, &step->beta, report);
        break;
    case STEP_CONV_NORM:
    case STEP_LINEAR_NORM_MIN:
        r = load_fused(b, loader, i, report);
        break;
    case STEP_TAIL:
        tail = &step->tail->tail;
        if (norm)
            r = keep_param(plan, loader, &norm->weight, &tail->norm.gamma, report);
        if (r == 0 && norm)
            r = keep_param(plan, loader, &norm->bias, &tail->norm.beta, report);
        if (tail->source == TAIL_ADD)
            r = keep_param(plan, loader, &b->pipeline->stages[b->stage_of[i]].weight,
                           &tail->add.tensor, report);
        break;
    default:
        break;
    }
    if (r == 0 && step->tail)
        r = load_summands(b, loader, step->tail, report);
    return r;
}

static int load_weights(struct builder *b, struct gemm_library *library, struct report *report)
{
    struct loader loader = {.pipeline = b->pipeline};
    int r;

    r = CUDA(report, cudaStreamCreateWithFlags(&loader.stream, cudaStreamNonBlocking));
    if (r < 0)
        return r;
    r = CUDA(report, cudaMallocHost((void **)&loader.staging, STAGING));
    if (r < 0)
        goto out;
    for (int i = 0; i < b->plan->n_steps && r == 0; i++)
        r = load_step(b, &loader, library, i, report);
    cudaFreeHost(loader.staging);
out:
    cudaStreamDestroy(loader.stream);
    return r;
}

static void describe_graphs(struct plan *plan)
{
    const struct range *last;
    int even = plan->n_ranges; /* ranges that follow one another from 1 on */

    if (even == 0) {
        say(plan, "launched kernel by kernel, not as a CUDA graph\n");
        return;
    }
    last = &plan->ranges[even - 1];
    if (even > 1 && last->from > last[-1].rows + 1)
        even--;
    say(plan, "a CUDA graph for batches of 1 to %lld rows", (long long)plan->ranges[even - 1].rows);
    if (even < plan->n_ranges)
        say(plan, ", %lld to %lld", (long long)last->from, (long long)last->rows);
    say(plan, "\n");
}

static void describe(struct plan *plan)
{
    static const char *const names[] = {
        [STEP_WIDEN] = "to float32",
        [STEP_LINEAR] = "linear",
        [STEP_CONV3D] = "conv3d",
        [STEP_CONV_NORM] = "conv3d, group_norm",
        [STEP_STATS] = "group statistics",
        [STEP_NORM_MIN] = "linear, group_norm, amin",
        [STEP_LINEAR_NORM_MIN] = "linear, group_norm, amin",
        [STEP_AMIN] = "amin",
    };
    static const char *const tails[] = {
        [TAIL_DIRECT] = "", [TAIL_NORM] = "group_norm, ", [TAIL_ADD] = "add, "};

    if (plan->fill)
        say(plan, "constant: guard over x, then fill; other samples by the full path:\n");
    for (int i = 0; i < plan->n_steps; i++) {
        const struct step *step = &plan->steps[i];

        if (step->kind == STEP_TAIL)
            say(plan, "%s%d pointwise, to %s\n", tails[step->tail->tail.source],
                step->tail->tail.n_points, i == plan->n_steps - 1 ? "the result" : "memory");
        else
            say(plan, "%s%s%s\n", names[step->kind],
                step->gemm || step->conv || step->normed || step->fused ? ": " : "",
                step->gemm     ? gemm_text(step->gemm)
                : step->conv   ? conv_text(step->conv)
                : step->normed ? conv_norm_text(step->normed)
                : step->fused  ? linear_norm_min_text(step->fused)
                               : "");
        plan->launches += step->gemm     ? gemm_launches(step->gemm) + 1
                          : step->conv   ? conv_launches(step->conv, plan->rows_max)
                          : step->normed ? CONV_NORM_LAUNCHES
                          : step->fused  ? linear_norm_min_launches(step->fused, plan->rows_max)
                          : step->kind == STEP_STATS && plan->size.partial ? 2u
                                                                           : 1u;
    }
    describe_graphs(plan);
    if (plan->fill)
        plan->launches = 1; /* guard and fill */
    plan->launches++;       /* the flag */
}

int plan_new(struct gemm_library *library, const struct pipeline *pipeline, uint32_t max_rows,
             struct plan **ret, struct report *report)
{
    struct builder *b = calloc(1, sizeof(*b));
    struct plan *plan = calloc(1, sizeof(*plan));
    int r = 0;

    if (!b || !plan) {
        r = report_set(report, -ENOMEM, "out of memory");
        goto out;
    }
    *b = (struct builder){.plan = plan, .pipeline = pipeline};
    plan->dtype = pipeline->dtype;
    plan->proof = pipeline->proof;
    plan->masks = pipeline_masks(pipeline);
    /* Rows that the guard stops may be anywhere: one segment each must do. */
    plan->rows_max = plan->proof.constant && max_rows > SEGMENTS_MAX ? SEGMENTS_MAX : max_rows;
    plan->in_elements = shape_elements(&pipeline->in);
    steps_build(b);
    plan->resident_bytes = measure(b);
    r = check_memory(b, plan->resident_bytes, report);
    if (r == 0)
        r = load_weights(b, library, report);
    if (r < 0)
        goto out;
    for (int i = 0; i < plan->n_steps; i++)
        if (plan->steps[i].conv)
            raise(&plan->size.workspace, conv_workspace(plan->steps[i].conv));
    sum_up(&plan->size);
    graph_ranges(plan);
    describe(plan);
    *ret = plan;
    plan = NULL;

out:
    plan_free(plan);
    free(b);
    return r;
}

struct plan *plan_free(struct plan *plan)
{
    if (!plan)
        return NULL;
    for (int i = 0; i < SLOTS; i++) {
        graph_free(&plan->arenas[i]);
        cudaFreeHost(plan->arenas[i].states);
        cudaFreeHost(plan->arenas[i].tops_host);
        cudaFree(plan->arenas[i].memory);
    }
    for (int i = 0; i < plan->n_steps; i++) {
        gemm_free(plan->steps[i].gemm);
        linear_norm_min_free(plan->steps[i].fused);
        conv_free(plan->steps[i].conv);
        conv_norm_free(plan->steps[i].normed);
    }
    for (int i = 0; i < plan->n_params; i++)
        cudaFree(plan->params[i]);
    free(plan);
    return NULL;
}
