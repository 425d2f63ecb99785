/*
 * graph.c - blocks that are launched alike, captured when a model is loaded, one launch each
 *
 * Kernel by kernel a small batch costs the engine's thread four times as long as its graph, and
 * starts later (BENCH.md). For linear, group_norm, amin and an outer sum everything that is
 * launched depends on the range of the rows alone: x, the number of rows, requests, their places
 * and the flag's count are read from the slot's tables, which a graph fetches first. So there is
 * one graph for each slot and range, and one more that gathers rows by a kernel. They are made at
 * load and never updated; nothing is captured, and no memory taken, while serving.
 *
 * Ranges are those of the product's tiles from one row on, and the last one that of a full block.
 * There are RANGES_MAX of them at most, which is all there are for 8192 channels up to some 4,000
 * rows; a block in none is enqueued kernel by kernel, as is every block of other plans. What the
 * copy engine takes, either way, goes before the graph and after it.
 */
#include "kernels/cuda/graph.h"

#define GRAPH_BYTES ((uint64_t)128 << 10) /* BENCH.md: 200 take 20 MiB */

static bool launched_alike(const struct plan *plan)
{
    return plan->n_steps == 2 && plan->steps[0].kind == STEP_LINEAR_NORM_MIN &&
           outer_fits(&plan->steps[1].tail->tail) && plan->n_tails == 1;
}

uint64_t graph_bytes(const struct plan *plan)
{
    return launched_alike(plan) ? (uint64_t)RANGES_MAX * 2 * SLOTS * GRAPH_BYTES : 0;
}

/* From these rows on; returns the first behind the range. */
static int64_t add_range(struct plan *plan, int64_t from)
{
    int64_t rows = linear_norm_min_filled(plan->steps[0].fused, from);

    if (rows == 0)
        return (int64_t)plan->rows_max + 1;
    plan->ranges[plan->n_ranges++] = (struct range){from, rows};
    return rows + 1;
}

void graph_ranges(struct plan *plan)
{
    const struct linear_norm_min *fused = plan->steps[0].fused;
    int64_t from = 1, last = plan->rows_max;

    if (!launched_alike(plan))
        return;
    while (from <= plan->rows_max && plan->n_ranges < RANGES_MAX - 1)
        from = add_range(plan, from);
    if (from > plan->rows_max)
        return;
    while (last > from &&
           linear_norm_min_filled(fused, last - 1) == linear_norm_min_filled(fused, plan->rows_max))
        last--;
    add_range(plan, last);
}

const struct range *graph_range(const struct slot *slot, int64_t rows)
{
    for (int i = 0; i < slot->plan->n_ranges; i++) {
        const struct range *range = &slot->plan->ranges[i];

        if (rows >= range->from && rows <= range->rows)
            return block_arena(slot)->graphs[i][1] ? range : NULL;
    }
    return NULL;
}

static int record(struct slot *slot, const struct slot *of, const struct range *range, bool gathers,
                  struct report *report)
{
    struct plan *plan = slot->plan;
    int r = block_record(slot, of, range, gathers, report);

    if (r == 0)
        r = plan_run(plan, &plan->arenas[of->index], slot->stream, &slot->block, report);
    if (r == 0)
        r = flag_from_cuda(slot->stream, of->flag, &slot->block.recorded->sequence, report);
    return r;
}

static int capture(struct slot *slot, const struct slot *of, const struct range *range,
                   bool gathers, cudaGraphExec_t *ret, struct report *report)
{
    cudaGraph_t graph = NULL;
    int r, ended;

    /* Other threads may allocate meanwhile: only this one must not. */
    r = CUDA(report, cudaStreamBeginCapture(slot->stream, cudaStreamCaptureModeThreadLocal));
    if (r < 0)
        return r;
    r = record(slot, of, range, gathers, report);
    /* What went wrong first is the reason; the call's own error is cleared all the same. */
    ended = CUDA(r == 0 ? report : NULL, cudaStreamEndCapture(slot->stream, &graph));
    if (r == 0)
        r = ended;
    if (r == 0)
        r = CUDA(report, cudaGraphInstantiate(ret, graph, 0));
    if (r == 0)
        r = CUDA(report, cudaGraphUpload(*ret, slot->stream));
    if (graph)
        cudaGraphDestroy(graph);
    return r;
}

int graph_capture(struct slot *slot, const struct slot *of, struct plan *plan,
                  struct report *report)
{
    struct arena *arena = &plan->arenas[of->index];
    int r = 0;

    slot->plan = plan;
    for (int i = 0; i < plan->n_ranges && r == 0; i++)
        for (int gathers = 0; gathers < 2 && r == 0; gathers++)
            r = capture(slot, of, &plan->ranges[i], gathers, &arena->graphs[i][gathers], report);
    slot->block.recorded = NULL;
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(slot->stream)); /* they have been uploaded */
    return r < 0 ? report_prefix(report, r, "a CUDA graph: ") : 0;
}

void graph_free(struct arena *arena)
{
    for (int i = 0; i < RANGES_MAX; i++)
        for (int gathers = 0; gathers < 2; gathers++)
            if (arena->graphs[i][gathers])
                cudaGraphExecDestroy(arena->graphs[i][gathers]);
}

int graph_launch(struct slot *slot, struct report *report)
{
    const struct arena *arena = block_arena(slot);
    bool gathers = slot->tables.n_pieces > 0;

    return CUDA(report, cudaGraphLaunch(arena->graphs[slot->range - slot->plan->ranges][gathers],
                                        slot->stream));
}
