/*
 * block.c - from jobs to a block: parts, segments, tables, and where bytes go
 *
 * x: large parts come by the copy engine, small ones by one kernel for all of them, rows in
 * pageable memory through the slot's staging. A single job's rows in device memory are read where
 * they lie. y: kernels write device memory and small results in pinned pages directly; large ones
 * go through the arena and the copy engine; those in pageable memory go through staging and are
 * copied by the CPU at the end.
 *
 * A block ends where its staging is full, because a copy of pageable memory may block until the
 * device gets to it. Only a row that is larger than all of the staging is copied so; the daemon has
 * none (what is in no buffer is inline, at most 32 KiB).
 *
 * Tables (pieces, segments, tiles, counters) are packed in pinned memory and uploaded in one copy
 * before the kernels that read them. Those of a block in one of the plan's ranges begin with what
 * its graph finds out when it runs, where all the others lie among it, and a kernel fetches them.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/block.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/memory.h"
#include "kernels/dropout.h"

#define VECTOR 16
/* Of y: up to here kernels write the client's pages. Other values are for measuring: BENCH.md. */
#ifndef DIRECT_MAX
#define DIRECT_MAX ((uint64_t)512 << 10)
#endif

/* Tables */

static uint64_t rounded(uint64_t size)
{
    return (size + VECTOR - 1) / VECTOR * VECTOR;
}

static void *reserve(struct slot *slot, uint64_t size)
{
    void *at = slot->host + slot->tables.used;

    slot->tables.used += rounded(size);
    return at;
}

static void *device_of(const struct slot *slot, const void *host)
{
    return slot->at_device + ((const char *)host - slot->host);
}

void block_begin_tables(struct slot *slot, int segments_max)
{
    slot->tables = (struct tables){.used = 0};
    if (slot->range)
        slot->tables.recorded = reserve(slot, sizeof(struct recorded));
    slot->tables.segments = reserve(slot, (uint64_t)segments_max * sizeof(struct segment));
    slot->tables.pieces = reserve(slot, (uint64_t)segments_max * sizeof(struct piece));
}

static int32_t tiles_of(const struct tail *tail, int32_t tile, const struct segment *segment)
{
    if (segment->compact)
        return (int32_t)((segment->rows + tile - 1) / tile);
    return (int32_t)tail_tiles(tail, tile, segment->rows);
}

/* First tiles of a tail's segments, and their number at the end; a graph has blocks for as many as
 * one request of all rows in its range has. */
static void add_tiles(struct slot *slot, const struct tail_step *step)
{
    struct block *block = &slot->block;
    const struct range *range = step->list == LIST_COMPACT ? NULL : slot->range;
    int first = step->list == LIST_COMPACT ? block->n_results : 0;
    int n = step->list == LIST_COMPACT   ? block->n_compact
            : step->list == LIST_RESULTS ? block->n_results
                                         : block->n_results + block->n_compact;
    int32_t *tiles = reserve(slot, (uint64_t)(n + 1) * sizeof(*tiles)), tile;
    int64_t rows = 0;

    tiles[0] = 0;
    for (int i = 0; i < n; i++)
        rows += slot->tables.segments[first + i].rows;
    rows = range ? range->rows : rows;
    tile = tail_tile(&step->tail, rows);
    for (int i = 0; i < n; i++)
        tiles[i + 1] = tiles[i] + tiles_of(&step->tail, tile, &slot->tables.segments[first + i]);
    block->tile[step->table] = tile;
    slot->tables.tiles[step->table] = tiles;
    block->n_tiles[step->table] = range ? (int32_t)tail_tiles(&step->tail, tile, rows) : tiles[n];
}

/* Where each of the job's masks begins: a dropout's counter follows from those before it. */
static void add_counters(struct slot *slot, int segment, const struct job *job, int pitch)
{
    uint64_t offset = job->offset;

    for (int m = 0; m < slot->plan->n_masks; m++) {
        const struct mask *mask = &slot->plan->masks_drawn[m];

        slot->tables.counters[m * pitch + segment] = offset / 4;
        offset += dropout_advance(mask->p, job->rows * mask->elements, DROPOUT_SMS,
                                  DROPOUT_THREADS_PER_SM);
    }
}

int block_upload_tables(struct slot *slot, struct report *report)
{
    struct block *block = &slot->block;

    for (int i = 0; i < slot->plan->n_tails; i++)
        block->tiles[i] = device_of(slot, slot->tables.tiles[i]);
    block->segments = device_of(slot, slot->tables.segments);
    block->counters = device_of(slot, slot->tables.counters);
    return CUDA(report, cudaMemcpyAsync(slot->at_device, slot->host, slot->tables.used,
                                        cudaMemcpyHostToDevice, slot->stream));
}

void block_end_tables(struct slot *slot, int n)
{
    slot->tables.counters =
        reserve(slot, (uint64_t)(slot->plan->n_masks * n + 1) * sizeof(uint64_t));
    slot->block.counter_pitch = n;
    for (int i = 0; i < n && slot->plan->n_masks; i++)
        add_counters(slot, i, slot->order[i]->job, n);
    for (int i = 0; i < slot->plan->n_tails; i++)
        add_tiles(slot, &slot->plan->tails[i]);
}

/* Results: where kernels write them */

/* `to` is where it belongs, `arena` where it may lie meanwhile; returns where kernels write it. */
char *block_place(struct slot *slot, struct part *part, char *to, uint64_t size, char *arena)
{
    const struct memory *memory = part->job->y_memory;

    part->copy = (struct copy){WAY_DIRECT, NULL, to, size, 1, size};
    if (memory && (memory->on_device || size <= DIRECT_MAX))
        return memory_at(memory, to);
    part->copy.way = WAY_ENGINE;
    if (!memory && size <= BLOCK_STAGING - slot->out_used) {
        arena = slot->out + slot->out_used;
        slot->out_used += rounded(size);
        part->copy.way = WAY_CPU;
    }
    part->copy.from = arena;
    return arena;
}

/* Whether the last tail writes its minima alone. */
static bool compact_in_tail(const struct plan *plan, const struct job *job)
{
    return job->compact && plan->compact_elements && !plan->compact;
}

static void place_part(struct slot *slot, struct part *part, struct segment *segment)
{
    const struct plan *plan = slot->plan;
    struct job *job = part->job;
    uint64_t esize = dtype_size(plan->dtype);
    bool compact = job->compact && plan->compact_elements;
    uint64_t row_bytes = esize * (uint64_t)plan_elements(plan, job->compact);
    uint64_t size = row_bytes * (uint64_t)part->rows;
    char *arena = (char *)block_arena(slot)->result +
                  (uint64_t)plan->out_elements * esize * (uint64_t)part->row;
    uint64_t run = (uint64_t)plan->out_inner * esize;

    segment->out_row = 0;
    segment->out_rows = part->rows;
    if (compact || plan->out_outer == 1 || part->rows == job->rows) {
        part->y = block_place(slot, part, (char *)job->y + row_bytes * (uint64_t)part->job_row,
                              size, arena);
        segment->y = part->y;
        return;
    }
    /* Part of a job whose batch is not first: `outer` runs, a whole job's rows apart. */
    segment->y = block_place(slot, part, job->y, size, arena);
    if (part->copy.way == WAY_DIRECT) {
        segment->out_row = part->job_row;
        segment->out_rows = job->rows;
        return;
    }
    part->copy.to = (char *)job->y + run * (uint64_t)part->job_row;
    part->copy.width = run * (uint64_t)part->rows;
    part->copy.height = (uint64_t)plan->out_outer;
    part->copy.pitch = run * job->rows;
}

static void fill_segment(struct segment *segment, const struct plan *plan, const struct part *part)
{
    segment->row = part->row;
    segment->rows = part->rows;
    segment->job_row = part->job_row;
    segment->job_rows = part->job->rows;
    segment->seed = part->job->seed;
    segment->train = part->job->train;
    segment->compact = compact_in_tail(plan, part->job);
}

bool block_downloads(const struct slot *slot)
{
    for (int i = 0; i < slot->n_parts; i++)
        if (slot->parts[i].copy.way == WAY_ENGINE)
            return true;
    return false;
}

/* Brings what kernels wrote elsewhere to its place. */
int block_download(struct slot *slot, struct report *report)
{
    int r = 0;

    for (int i = 0; i < slot->n_parts && r == 0; i++) {
        const struct copy *copy = &slot->parts[i].copy;

        if (copy->way != WAY_ENGINE)
            continue;
        r = memory_download_runs(slot->parts[i].job->y_memory, copy->to, copy->pitch, copy->from,
                                 copy->width, copy->height, slot->stream, report);
    }
    return r;
}

void block_copy_out(const struct slot *slot)
{
    for (int i = 0; i < slot->n_parts; i++) {
        const struct copy *copy = &slot->parts[i].copy;

        if (copy->way == WAY_CPU)
            for (uint64_t k = 0; k < copy->height; k++)
                memcpy(copy->to + k * copy->pitch, copy->from + k * copy->width, copy->width);
    }
}

/* Input */

static bool readable_in_place(const struct slot *slot)
{
    const struct part *part = &slot->parts[0];

    return slot->n_parts == 1 && slot->plan->x_in_place && part->job->x_memory &&
           part->job->x_memory->on_device && (uintptr_t)part->job->x % VECTOR == 0 &&
           (uint64_t)part->job_row * (uint64_t)slot->plan->in_elements *
                   dtype_size(slot->plan->dtype) % VECTOR ==
               0;
}

static int upload_part(struct slot *slot, const struct part *part, char *to, uint64_t row_bytes,
                       struct report *report)
{
    const struct job *job = part->job;
    const char *from = (const char *)job->x + row_bytes * (uint64_t)part->job_row;
    uint64_t size = row_bytes * (uint64_t)part->rows;
    struct tables *tables = &slot->tables;

    if (!job->x_memory && size <= BLOCK_STAGING - slot->in_used) {
        memcpy(slot->in + slot->in_used, from, size);
        from = slot->in + slot->in_used;
        slot->in_used += rounded(size);
        if (size > BLOCK_PIECE_MAX)
            return CUDA(report,
                        cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, slot->stream));
    } else if (!job->x_memory) {
        return memory_upload(NULL, to, from, size, slot->stream, report);
    } else if (size > BLOCK_PIECE_MAX) {
        return memory_upload(job->x_memory, to, from, size, slot->stream, report);
    } else {
        from = memory_at(job->x_memory, from);
    }
    tables->pieces[tables->n_pieces++] = (struct piece){from, to, size};
    tables->piece_max = size > tables->piece_max ? size : tables->piece_max;
    return 0;
}

/* There is one tail then, and all results are its own. */
static void fill_recorded(struct slot *slot)
{
    const struct tables *tables = &slot->tables;

    *tables->recorded = (struct recorded){
        .input = {slot->block.x, slot->block.rows},
        .table = {device_of(slot, tables->segments), device_of(slot, tables->tiles[0]),
                  slot->block.n_results},
        .pieces = {device_of(slot, tables->pieces), tables->n_pieces},
        .size = (uint32_t)tables->used,
    };
}

int block_upload_rows(struct slot *slot, struct report *report)
{
    uint64_t row_bytes = (uint64_t)slot->plan->in_elements * dtype_size(slot->plan->dtype);
    char *to = block_arena(slot)->buffers[BUFFER_X];
    int r = 0;

    slot->in_used = 0;
    slot->block.x = to;
    if (readable_in_place(slot))
        slot->block.x =
            (const char *)slot->parts[0].job->x + row_bytes * (uint64_t)slot->parts[0].job_row;
    else
        for (int i = 0; i < slot->n_parts && r == 0; i++)
            r = upload_part(slot, &slot->parts[i], to + row_bytes * (uint64_t)slot->parts[i].row,
                            row_bytes, report);
    if (slot->range)
        fill_recorded(slot);
    return r;
}

bool block_travels(const struct slot *slot)
{
    int n = slot->block.n_results + slot->block.n_compact;

    return slot->plan->fill && slot->tables.n_pieces == 0 && n <= CONSTANT_SEGMENTS &&
           slot->plan->n_masks * n <= CONSTANT_COUNTERS;
}

int block_gather(struct slot *slot, struct report *report)
{
    if (slot->tables.n_pieces == 0)
        return 0;
    return pieces_cuda(slot->stream, device_of(slot, slot->tables.pieces), slot->tables.n_pieces,
                       slot->tables.piece_max, report);
}

/* Blocks */

static bool in_compact_list(const struct slot *slot, const struct job *job)
{
    return job->compact && (slot->plan->compact || slot->plan->fill);
}

/* What is left of the staging, while parts are chosen. */
struct room {
    int64_t rows;
    uint64_t in, out;
};

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Of n rows of the job those that there is room for, which they take. 0: the block ends before
 * them. */
static int64_t take_room(const struct slot *slot, const struct job *job, int64_t n,
                         struct room *room)
{
    const struct plan *plan = slot->plan;
    uint64_t esize = dtype_size(plan->dtype), in = (uint64_t)plan->in_elements * esize;
    uint64_t out = (uint64_t)plan_elements(plan, job->compact) * esize;
    uint64_t fit = least((uint64_t)n, (uint64_t)room->rows);

    if (job->compact && plan->fill)
        out = rounded(out); /* each full row is a piece of its own */
    if (!job->x_memory && in <= BLOCK_STAGING)
        fit = least(fit, room->in / in);
    if (!job->y_memory && out <= BLOCK_STAGING)
        fit = least(fit, room->out / out);
    if (!job->x_memory)
        room->in -= least(rounded(fit * in), room->in);
    if (!job->y_memory)
        room->out -= least(rounded(fit * out), room->out);
    room->rows -= (int64_t)fit;
    return (int64_t)fit;
}

/* The next rows of the batch as parts. False when none are left. */
static bool next_parts(struct slot *slot)
{
    struct room room = {slot->plan->rows_max, BLOCK_STAGING, BLOCK_STAGING};
    struct batch *batch = slot->batch;
    int64_t row = 0;

    slot->n_parts = 0;
    slot->out_used = 0;
    while (room.rows > 0 && slot->n_parts < SEGMENTS_MAX && slot->job < batch->n_jobs) {
        struct job *job = &batch->jobs[slot->job];
        int64_t rows = job->part_rows ? job->part_rows : job->rows, n = 0;

        if (job->result == 0) {
            n = take_room(slot, job, rows - slot->job_row, &room);
            if (n == 0)
                break;
            slot->parts[slot->n_parts++] =
                (struct part){job, job->first_row + slot->job_row, row, n, NULL, {0}};
            slot->job_row += n;
            row += n;
        }
        if (job->result != 0 || slot->job_row == rows) {
            slot->job++;
            slot->job_row = 0;
        }
    }
    slot->block.rows = row;
    return row > 0;
}

/* Those that the last tail writes first; those of a list of their own behind. */
static void make_segments(struct slot *slot)
{
    int n = 0;

    block_begin_tables(slot, slot->n_parts);
    for (int compact = 0; compact < 2; compact++) {
        for (int i = 0; i < slot->n_parts; i++) {
            struct part *part = &slot->parts[i];

            if (in_compact_list(slot, part->job) != compact)
                continue;
            fill_segment(&slot->tables.segments[n], slot->plan, part);
            if (compact && slot->plan->fill) /* only full rows are written, later */
                slot->tables.segments[n].y = NULL;
            else
                place_part(slot, part, &slot->tables.segments[n]);
            slot->order[n++] = part;
        }
        if (compact == 0)
            slot->block.n_results = n;
    }
    slot->block.n_compact = n - slot->block.n_results;
    block_end_tables(slot, n);
}

bool block_next(struct slot *slot)
{
    if (!next_parts(slot))
        return false;
    slot->range = graph_range(slot, slot->block.rows);
    make_segments(slot);
    return true;
}

int block_record(struct slot *slot, const struct slot *of, const struct range *range, bool gathers,
                 struct report *report)
{
    const struct recorded *host = (const struct recorded *)of->host;
    const struct recorded *recorded = (const struct recorded *)of->at_device;
    int r;

    slot->range = range;
    slot->n_parts = 0;
    slot->block.rows = range->rows;
    make_segments(slot);
    slot->block.recorded = recorded;
    slot->block.gathers = gathers;
    r = tables_cuda(slot->stream, host, &host->size, of->at_device, report);
    if (r == 0 && gathers)
        r = pieces_from_cuda(slot->stream, &recorded->pieces,
                             range->rows < SEGMENTS_MAX ? (int)range->rows : SEGMENTS_MAX,
                             BLOCK_PIECE_MAX, report);
    return r;
}
