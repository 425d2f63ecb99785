/*
 * guard.c - which rows a proof covers, and the way of those that it does not
 *
 * The device finds the largest |x| of each row and fills in the constant, or NaN, where the proof
 * says so (constant.cu). The host reads the same maxima, as soon as they are known: rows that the
 * guard stopped are moved together and run through every step, as segments of their own. A compact
 * result gets a byte per row here, and behind them the rows that came in full, in order.
 */
#include <errno.h>
#include <string.h>

#include "kernels/cuda/guard.h"
#include "kernels/cuda/memory.h"

int guard_begin(struct slot *slot, uint32_t value, struct report *report)
{
    const struct plan *plan = slot->plan;
    struct guard guard = {.flag = slot->flag, .value = value};

    if (block_travels(slot)) {
        guard.segments = slot->tables.segments;
        guard.tiles = slot->tables.tiles[plan->fill->table];
        guard.counters = slot->tables.counters;
        guard.n_counters = plan->n_masks * slot->block.counter_pitch;
    }
    return plan_guard(plan, block_arena(slot), slot->stream, &slot->block, &guard, report);
}

enum state { STATE_CONSTANT, STATE_NAN, STATE_FULL };

static enum state state_of(const struct slot *slot, int64_t row)
{
    const struct tail *fill = &slot->plan->fill->tail;
    uint32_t top = block_arena(slot)->tops_host[row];

    if (slot->warming)
        return STATE_FULL;
    if (top < fill->constant.bound)
        return STATE_CONSTANT;
    return top >= 0x7f800000u && fill->constant.nonfinite_spreads ? STATE_NAN : STATE_FULL;
}

/* What a compact result begins with: a byte per row, zeros up to a multiple of 16. */
static int write_states(struct slot *slot, const struct part *part, struct report *report)
{
    struct job *job = part->job;
    uint8_t *states = block_arena(slot)->states + part->row;
    uint64_t pad = BACKEND_COMPACT_ROOM(job->rows) - job->rows;
    char *to = (char *)job->y + part->job_row;
    bool last = part->job_row + part->rows == (int64_t)job->rows;
    int r;

    for (int64_t i = 0; i < part->rows; i++)
        states[i] = (uint8_t)state_of(slot, part->row + i);
    if (!job->y_memory || !job->y_memory->on_device) {
        memcpy(to, states, (size_t)part->rows);
        if (last)
            memset(to + part->rows, 0, pad);
        return 0;
    }
    r = CUDA(report,
             cudaMemcpyAsync(to, states, (size_t)part->rows, cudaMemcpyHostToDevice, slot->stream));
    if (r == 0 && last)
        r = CUDA(report, cudaMemsetAsync(to + part->rows, 0, pad, slot->stream));
    return r;
}

/* Sample k of a part of a compact result comes in full: behind the states and the full rows before
 * it. */
static bool place_compact_row(struct slot *slot, struct part *row, const struct part *part,
                              int64_t k, uint64_t row_bytes)
{
    struct job *job = part->job;
    uint64_t at = BACKEND_COMPACT_ROOM(job->rows) + job->n_full * row_bytes;

    if (job->result != 0)
        return false;
    if (at > job->y_size || row_bytes > job->y_size - at) {
        job->result = -ENOSPC;
        return false;
    }
    job->n_full++;
    *row = (struct part){.job = job};
    row->y = block_place(slot, row, (char *)job->y + at, row_bytes,
                         (char *)block_arena(slot)->result + row_bytes * (uint64_t)(part->row + k));
    return true;
}

/* The first of the rows that need the full path, when these lie side by side where x is, and can be
 * read there; else -1. */
static int64_t side_by_side(const struct slot *slot)
{
    uint64_t bytes = (uint64_t)slot->plan->in_elements * dtype_size(slot->plan->dtype);
    int64_t first = -1, end = -1;

    for (int i = 0; i < slot->n_parts; i++)
        if (slot->parts[i].job->compact) /* some may find no room */
            return -1;
    for (int64_t row = 0; row < slot->block.rows; row++) {
        if (state_of(slot, row) != STATE_FULL)
            continue;
        if (end >= 0 && end != row)
            return -1;
        first = first < 0 ? row : first;
        end = row + 1;
    }
    return first == 0 || (slot->plan->x_in_place && bytes % 16 == 0) ? first : -1;
}

/* Moves the rows that need the full path to the front of the arena's x, where they are not together
 * already, and makes a segment of each. The rows of a part that follow one another share one. */
static int gather_full(struct slot *slot, int *ret_n, struct report *report)
{
    const struct plan *plan = slot->plan;
    uint64_t esize = dtype_size(plan->dtype);
    uint64_t in_bytes = (uint64_t)plan->in_elements * esize;
    uint64_t out_bytes = (uint64_t)plan->out_elements * esize;
    char *x = block_arena(slot)->buffers[BUFFER_X];
    const char *from = slot->block.x;
    struct segment *segments = slot->tables.segments;
    int n_parts = slot->n_parts, n = 0, r = 0;
    int64_t in_place = side_by_side(slot), rows = 0;

    for (int i = 0; i < n_parts; i++) {
        struct part *part = &slot->parts[i];
        bool compact = part->job->compact;

        for (int64_t k = 0; k < part->rows && r == 0; k++) {
            int64_t row = part->row + k;

            if (state_of(slot, row) != STATE_FULL)
                continue;
            if (compact &&
                !place_compact_row(slot, &slot->parts[slot->n_parts], part, k, out_bytes))
                continue;
            if (in_place < 0 && (from != x || rows != row))
                r = CUDA(report, cudaMemcpyAsync(x + (uint64_t)rows * in_bytes,
                                                 from + (uint64_t)row * in_bytes, in_bytes,
                                                 cudaMemcpyDeviceToDevice, slot->stream));
            if (!compact && n > 0 && slot->order[n - 1] == part &&
                segments[n - 1].job_row + segments[n - 1].rows == part->job_row + k) {
                segments[n - 1].rows++;
                segments[n - 1].out_rows++;
            } else {
                segments[n] = (struct segment){rows, 1,    part->job_row + k, part->job->rows,  0,
                                               1,    NULL, part->job->seed,   part->job->train, 0};
                segments[n].y =
                    compact ? slot->parts[slot->n_parts].y : part->y + (uint64_t)k * out_bytes;
                slot->order[n++] = part;
            }
            if (compact)
                slot->n_parts++;
            rows++;
        }
    }
    slot->block.rows = rows;
    slot->block.x = in_place < 0 ? x : from + (uint64_t)in_place * in_bytes;
    *ret_n = n;
    return r;
}

int guard_end(struct slot *slot, struct report *report)
{
    bool states = false;
    int n = 0, r = 0;

    for (int i = 0; i < slot->n_parts && r == 0; i++)
        if (slot->parts[i].job->compact) {
            states |= slot->parts[i].job->y_memory && slot->parts[i].job->y_memory->on_device;
            r = write_states(slot, &slot->parts[i], report);
        }
    block_begin_tables(slot, (int)slot->block.rows);
    if (r == 0)
        r = gather_full(slot, &n, report);
    if (r < 0)
        return r;
    if (n > 0) {
        slot->block.n_results = n;
        slot->block.n_compact = 0;
        block_end_tables(slot, n);
        r = block_upload_tables(slot, report);
        if (r == 0)
            r = plan_run(slot->plan, block_arena(slot), slot->stream, &slot->block, report);
    }
    if (r == 0)
        r = block_download(slot, report);
    return r < 0 ? r : n > 0 || block_downloads(slot) || states;
}
