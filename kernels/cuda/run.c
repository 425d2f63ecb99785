/*
 * run.c - a plan's work space, and its steps, enqueued on a stream for one block of rows
 *
 * Work space is taken once, when a model is loaded, for every slot. Running allocates nothing and
 * waits for nothing. Steps hold what is the same for every block; rows, segments and the slot's own
 * arrays are filled in on the way.
 */
#include "kernels/cuda/plan.h"

static void *take(char **at, uint64_t size)
{
    char *taken = *at;

    *at += size;
    return size ? taken : NULL;
}

static int new_arena(const struct plan *plan, struct arena *arena, struct report *report)
{
    const struct arena_size *size = &plan->size;
    char *at;
    int r = CUDA(report, cudaMalloc((void **)&arena->memory, size->all));

    if (r < 0)
        return r;
    at = arena->memory;
    for (int i = 0; i < BUFFERS; i++)
        arena->buffers[i] = take(&at, size->buffers[i]);
    arena->result = take(&at, size->result);
    arena->stats = take(&at, size->stats);
    arena->partial = take(&at, size->partial);
    arena->gemm.operand = take(&at, size->operand);
    arena->gemm.exponents = take(&at, size->exponents);
    arena->gemm.sums = take(&at, size->sums);
    arena->gemm.workspace = take(&at, size->gemm_workspace);
    arena->fused = take(&at, size->fused);
    arena->counters = take(&at, size->counters);
    arena->workspace = take(&at, size->workspace);
    arena->guard = take(&at, size->guard);
    /* Padding is computed on and never read: it must only be numbers of ours. Counters begin at 0.
     */
    r = CUDA(report, cudaMemset(arena->memory, 0, size->all));
    if (r == 0 && size->guard)
        r = CUDA(report, cudaMallocHost((void **)&arena->tops_host,
                                        plan->rows_max * sizeof(*arena->tops_host)));
    if (r == 0 && size->guard)
        r = CUDA(report, cudaMallocHost((void **)&arena->states, plan->rows_max + 16));
    return r;
}

int plan_arenas(struct plan *plan, struct report *report)
{
    int r = 0;

    for (int i = 0; i < SLOTS && r == 0; i++)
        r = new_arena(plan, &plan->arenas[i], report);
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(0));
    return r;
}

/* What differs between blocks. */
static struct tail tail_of(const struct arena *arena, const struct block *block,
                           const struct tail_step *step)
{
    struct tail tail = step->tail;

    tail.norm.stats = arena->stats;
    tail.segments = block->segments + (step->list == LIST_COMPACT ? block->n_results : 0);
    tail.n_segments = step->list == LIST_COMPACT   ? block->n_compact
                      : step->list == LIST_RESULTS ? block->n_results
                                                   : block->n_results + block->n_compact;
    tail.tiles = block->tiles[step->table];
    tail.tile = block->tile[step->table];
    tail.counters = block->counters;
    tail.counter_pitch = block->counter_pitch;
    if (block->recorded)
        tail.table = &block->recorded->table;
    return tail;
}

static int run_tail(const struct arena *arena, cudaStream_t stream, const struct block *block,
                    const struct tail_step *step, const float *from, bool keys, float *to,
                    struct report *report)
{
    struct tail tail = tail_of(arena, block, step);

    tail.from = from;
    tail.keys = keys;
    tail.to = to;
    return tail_cuda(stream, &tail, block->n_tiles[step->table], report);
}

/* The end of the pipeline that this library is for reads minima as they are found. */
static bool keys_suffice(const struct plan *plan, const struct block *block, int i)
{
    const struct step *step = &plan->steps[i];

    return step->kind == STEP_LINEAR_NORM_MIN && i == plan->n_steps - 2 && block->n_compact == 0 &&
           step[1].kind == STEP_TAIL && outer_fits(&step[1].tail->tail);
}

static int run_linear(const struct plan *plan, const struct arena *arena, cudaStream_t stream,
                      const struct step *step, int64_t rows, const void *from, float *to,
                      struct report *report)
{
    enum dtype dtype = step->from == BUFFER_X ? plan->dtype : DTYPE_FLOAT32;
    int64_t products = rows * step->gemm_rows;
    int r;

    r = gemm_run(step->gemm, stream, &arena->gemm, dtype, from, products, report);
    if (r < 0)
        return r;
    if (step->kind == STEP_NORM_MIN) {
        struct norm_min norm_min = {
            .sums = gemm_sums(step->gemm, &arena->gemm),
            .rows = rows,
            .channels = step->channels,
            .groups = step->groups,
            .gamma = step->gamma,
            .beta = step->beta,
            .eps = step->eps,
            .to = to,
        };

        return norm_min_cuda(stream, &norm_min, report);
    }
    return gemm_finish(step->gemm, stream, &arena->gemm, dtype, from, products, to, report);
}

static int run_conv_norm(const struct arena *arena, cudaStream_t stream, const struct block *block,
                         const struct step *step, const void *from, float *to,
                         struct report *report)
{
    struct tail tail = step->tail->tail;

    tail.to = to;
    tail.segments = block->segments;
    tail.n_segments = block->n_results + block->n_compact;
    tail.counters = block->counters;
    tail.counter_pitch = block->counter_pitch;
    return conv_norm_run(step->normed, stream, arena->fused, arena->counters, from, block->rows,
                         &tail, report);
}

static int run_stats(const struct arena *arena, cudaStream_t stream, const struct step *step,
                     int64_t rows, const float *from, struct report *report)
{
    struct stats stats = {
        .from = from,
        .rows = rows,
        .groups = step->groups,
        .size = step->group_size,
        .partial = arena->partial,
        .to = arena->stats,
        .eps = step->eps,
    };

    return stats_cuda(stream, &stats, report);
}

static int run_amin(cudaStream_t stream, const struct step *step, int64_t rows, const float *from,
                    float *to, struct report *report)
{
    struct amin amin = step->amin;

    amin.from = from;
    amin.rows = rows;
    amin.to = to;
    return amin_cuda(stream, &amin, report);
}

int plan_run(const struct plan *plan, const struct arena *arena, cudaStream_t stream,
             const struct block *block, struct report *report)
{
    int r = 0;

    for (int i = 0; i < plan->n_steps && r == 0; i++) {
        const struct step *step = &plan->steps[i];
        const void *from = step->from == BUFFER_X ? block->x : arena->buffers[step->from];
        float *to = arena->buffers[step->to];
        bool last = i == plan->n_steps - 1, keys;

        switch (step->kind) {
        case STEP_WIDEN:
            r = widen_cuda(stream, plan->dtype, from, to, block->rows * step->from_elements,
                           report);
            break;
        case STEP_LINEAR:
        case STEP_NORM_MIN:
            r = run_linear(plan, arena, stream, step, block->rows, from, to, report);
            break;
        case STEP_LINEAR_NORM_MIN:
            r = linear_norm_min_run(step->fused, stream, arena->fused, from,
                                    block->recorded ? &block->recorded->input : NULL, block->rows,
                                    keys_suffice(plan, block, i) ? NULL : to,
                                    /* else what fetched the tables is in front */
                                    !block->recorded || block->gathers, report);
            break;
        case STEP_CONV3D:
            r = conv_run(step->conv, stream, arena->workspace, from, block->rows, to, report);
            break;
        case STEP_CONV_NORM:
            r = run_conv_norm(arena, stream, block, step, from, last ? NULL : to, report);
            break;
        case STEP_STATS:
            r = run_stats(arena, stream, step, block->rows, from, report);
            break;
        case STEP_AMIN:
            r = run_amin(stream, step, block->rows, from, to, report);
            break;
        case STEP_TAIL:
            keys = i > 0 && keys_suffice(plan, block, i - 1);
            if (keys)
                from = linear_norm_min_keys(step[-1].fused, arena->fused);
            r = run_tail(arena, stream, block, step->tail, from, keys, last ? NULL : to, report);
            if (r == 0 && last && plan->compact)
                r = run_tail(arena, stream, block, plan->compact, from, false, NULL, report);
            break;
        }
    }
    return r;
}

int plan_guard(const struct plan *plan, const struct arena *arena, cudaStream_t stream,
               const struct block *block, struct guard *guard, struct report *report)
{
    struct tail tail = tail_of(arena, block, plan->fill);

    guard->x = block->x;
    guard->rows = block->rows;
    guard->elements = plan->in_elements;
    guard->work = arena->guard;
    guard->tops = arena->tops_host;
    return constant_cuda(stream, guard, &tail, block->n_tiles[plan->fill->table], report);
}
