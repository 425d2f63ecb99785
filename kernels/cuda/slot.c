/*
 * slot.c - one batch in flight, from the jobs' memory through the plan and back
 *
 * A batch is worked off in blocks of at most rows_max rows. Rows of one job within a block are a
 * part (for the host) and a segment (for the kernels). A block goes through phases, each a run of
 * work on the stream that ends with the flag; slot_poll() sees the flag and begins the next:
 *
 *   COMPUTE   upload, every step, download                       plans without a proof
 *   GUARD     upload, maxima of the rows, fill                    plans with one; then
 *   FULL      the full path for rows that the guard stopped, download
 *   (nothing left: the block has ended; the next block, or the batch's end)
 *
 * Where bytes go. x: large pieces by the copy engine, small ones by one kernel for all of them,
 * rows in pageable memory through the slot's staging (or, when that is full, by a pageable copy,
 * which blocks). A single job's rows in device memory are read where they lie. y: kernels write
 * device memory and small results in pinned pages directly; large ones go through the arena and the
 * copy engine; small ones in pageable memory go through staging and are copied by the CPU at the
 * end.
 *
 * Tables (pieces, segments, tiles, counters) are packed in pinned memory and uploaded in one copy
 * before the kernels that read them. Nothing is allocated here after slot_new().
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/memory.h"
#include "kernels/cuda/slot.h"
#include "kernels/dropout.h"

#define STAGING    ((uint64_t)1 << 20)   /* each way */
#define PIECE_MAX  ((uint64_t)64 << 10)  /* of x: up to here a kernel copies */
#define DIRECT_MAX ((uint64_t)256 << 10) /* of y: up to here kernels write the client's pages */
#define QUERY_NS   1000000
#define VECTOR     16
#define TABLES_BYTES                                                  \
    (SEGMENTS_MAX * (sizeof(struct piece) + sizeof(struct segment)) + \
     TAILS_MAX * (SEGMENTS_MAX + 1) * sizeof(int32_t) +               \
     MODEL_STAGES_MAX * SEGMENTS_MAX * sizeof(uint64_t) + 4 * 256)

enum phase { PHASE_IDLE, PHASE_COMPUTE, PHASE_GUARD, PHASE_FULL, PHASE_DONE };

/* How a part of a result that kernels wrote elsewhere comes to its place. */
enum way { WAY_DIRECT, WAY_ENGINE, WAY_CPU };

/* A run of equal pieces, `width` bytes each, `pitch` apart at the destination. */
struct copy {
    enum way way;
    const char *from;
    char *to;
    uint64_t width, height, pitch;
};

/* Rows of one job in this block. */
struct part {
    struct job *job;
    int64_t job_row, row, rows;
    char *y; /* where kernels find the part's result, when it is one piece */
    struct copy copy;
};

/* Packed tables in the making: offsets within table memory. */
struct tables {
    uint64_t used;
    struct piece *pieces;
    int n_pieces;
    uint64_t piece_max;
    struct segment *segments;
    int32_t *tiles[TAILS_MAX];
    uint64_t *counters;
};

struct slot {
    int device;
    unsigned index;
    cudaStream_t stream;
    uint32_t *flag; /* pinned */
    uint32_t sequence;
    char *host, *at_device; /* tables: pinned, and their copy */
    char *in, *out;         /* staging, pinned */
    uint64_t in_used, out_used;

    struct plan *plan;
    struct batch *batch;
    enum phase phase;
    bool warming; /* the guard stops every row */
    int64_t asked_ns;
    unsigned job; /* where the next block begins */
    int64_t job_row;
    struct block block;
    int n_parts;
    struct part parts[2 * SEGMENTS_MAX]; /* one a segment, and one a full row of a compact result */
    struct part *order[SEGMENTS_MAX];    /* the part that each segment belongs to */
    struct tables tables;
};

int slot_new(int device, unsigned index, struct slot **ret, struct report *report)
{
    struct slot *slot = calloc(1, sizeof(*slot));
    int r;

    if (!slot)
        return report_set(report, -ENOMEM, "out of memory");
    slot->device = device;
    slot->index = index;
    r = CUDA(report, cudaStreamCreateWithFlags(&slot->stream, cudaStreamNonBlocking));
    if (r == 0)
        r = CUDA(report, cudaHostAlloc((void **)&slot->flag, sizeof(*slot->flag),
                                       cudaHostAllocMapped | cudaHostAllocPortable));
    if (r == 0)
        r = CUDA(report, cudaMallocHost((void **)&slot->host, TABLES_BYTES));
    if (r == 0)
        r = CUDA(report, cudaMallocHost((void **)&slot->in, STAGING));
    if (r == 0)
        r = CUDA(report, cudaMallocHost((void **)&slot->out, STAGING));
    if (r == 0)
        r = CUDA(report, cudaMalloc((void **)&slot->at_device, TABLES_BYTES));
    if (r < 0) {
        slot_free(slot);
        return r;
    }
    *slot->flag = 0;
    *ret = slot;
    return 0;
}

struct slot *slot_free(struct slot *slot)
{
    if (!slot)
        return NULL;
    cudaFree(slot->at_device);
    cudaFreeHost(slot->out);
    cudaFreeHost(slot->in);
    cudaFreeHost(slot->host);
    cudaFreeHost(slot->flag);
    if (slot->stream)
        cudaStreamDestroy(slot->stream);
    free(slot);
    return NULL;
}

static struct arena *arena_of(struct slot *slot)
{
    return &slot->plan->arenas[slot->index];
}

/* Tables */

static void *reserve(struct slot *slot, uint64_t size)
{
    void *at = slot->host + slot->tables.used;

    slot->tables.used += (size + 15) / 16 * 16;
    return at;
}

static void *device_of(const struct slot *slot, const void *host)
{
    return slot->at_device + ((const char *)host - slot->host);
}

static void begin_tables(struct slot *slot, int segments_max)
{
    slot->tables = (struct tables){.used = 0};
    slot->tables.segments = reserve(slot, (uint64_t)segments_max * sizeof(struct segment));
    slot->tables.pieces = reserve(slot, (uint64_t)segments_max * sizeof(struct piece));
}

/* First tiles of a tail's segments, and their number at the end. */
static void add_tiles(struct slot *slot, const struct tail_step *step)
{
    struct block *block = &slot->block;
    int first = step->list == LIST_COMPACT ? block->n_results : 0;
    int n = step->list == LIST_COMPACT   ? block->n_compact
            : step->list == LIST_RESULTS ? block->n_results
                                         : block->n_results + block->n_compact;
    int32_t *tiles = reserve(slot, (uint64_t)(n + 1) * sizeof(*tiles)), tile;
    int64_t rows = 0;

    tiles[0] = 0;
    for (int i = 0; i < n; i++)
        rows += slot->tables.segments[first + i].rows;
    tile = tail_tile(&step->tail, rows);
    for (int i = 0; i < n; i++)
        tiles[i + 1] = tiles[i] + (int32_t)tail_tiles(&step->tail, tile,
                                                      slot->tables.segments[first + i].rows);
    block->tile[step->table] = tile;
    slot->tables.tiles[step->table] = tiles;
    block->n_tiles[step->table] = tiles[n];
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

static int upload_tables(struct slot *slot, struct report *report)
{
    struct block *block = &slot->block;

    for (int i = 0; i < slot->plan->n_tails; i++)
        block->tiles[i] = device_of(slot, slot->tables.tiles[i]);
    block->segments = device_of(slot, slot->tables.segments);
    block->counters = device_of(slot, slot->tables.counters);
    return CUDA(report, cudaMemcpyAsync(slot->at_device, slot->host, slot->tables.used,
                                        cudaMemcpyHostToDevice, slot->stream));
}

static void end_tables(struct slot *slot, int n)
{
    slot->tables.counters =
        reserve(slot, (uint64_t)(slot->plan->n_masks * n + 1) * sizeof(uint64_t));
    slot->block.counter_pitch = n;
    for (int i = 0; i < n; i++)
        add_counters(slot, i, slot->order[i]->job, n);
    for (int i = 0; i < slot->plan->n_tails; i++)
        add_tiles(slot, &slot->plan->tails[i]);
}

/* Results: where kernels write them */

static uint64_t result_bytes(const struct plan *plan, const struct job *job)
{
    int64_t elements = job->compact && plan->compact ? plan->compact_elements : plan->out_elements;

    return (uint64_t)(job->rows * elements) * dtype_size(plan->dtype);
}

/* `to` is where it belongs, `arena` where it may lie meanwhile; returns where kernels write it. */
static char *place(struct slot *slot, struct part *part, char *to, uint64_t size, char *arena)
{
    const struct memory *memory = part->job->y_memory;

    part->copy = (struct copy){WAY_DIRECT, NULL, to, size, 1, size};
    if (memory && (memory->on_device || size <= DIRECT_MAX))
        return memory_at(memory, to);
    part->copy.way = WAY_ENGINE;
    if (!memory && size <= STAGING - slot->out_used) {
        arena = slot->out + slot->out_used;
        slot->out_used += (size + VECTOR - 1) / VECTOR * VECTOR;
        part->copy.way = WAY_CPU;
    }
    part->copy.from = arena;
    return arena;
}

static void place_part(struct slot *slot, struct part *part, struct segment *segment)
{
    const struct plan *plan = slot->plan;
    struct job *job = part->job;
    uint64_t esize = dtype_size(plan->dtype);
    bool compact = job->compact && plan->compact;
    uint64_t row_bytes = esize * (uint64_t)(compact ? plan->compact_elements : plan->out_elements);
    uint64_t size = row_bytes * (uint64_t)part->rows;
    char *arena =
        (char *)arena_of(slot)->result + (uint64_t)plan->out_elements * esize * (uint64_t)part->row;
    uint64_t run = (uint64_t)plan->out_inner * esize;

    segment->out_row = 0;
    segment->out_rows = part->rows;
    if (compact || plan->out_outer == 1 || part->rows == job->rows) {
        part->y =
            place(slot, part, (char *)job->y + row_bytes * (uint64_t)part->job_row, size, arena);
        segment->y = part->y;
        return;
    }
    /* Part of a job whose batch is not first: `outer` runs, a whole job's rows apart. */
    segment->y = place(slot, part, job->y, size, arena);
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

static void fill_segment(struct segment *segment, const struct part *part)
{
    segment->row = part->row;
    segment->rows = part->rows;
    segment->job_row = part->job_row;
    segment->job_rows = part->job->rows;
    segment->seed = part->job->seed;
    segment->train = part->job->train;
    segment->unused = 0;
}

/* Brings what kernels wrote elsewhere to its place. */
static int download(struct slot *slot, bool *ret_any, struct report *report)
{
    bool any = false;
    int r = 0;

    for (int i = 0; i < slot->n_parts && r == 0; i++) {
        const struct copy *copy = &slot->parts[i].copy;

        if (copy->way != WAY_ENGINE)
            continue;
        any = true;
        if (copy->height == 1)
            r = CUDA(report, cudaMemcpyAsync(copy->to, copy->from, copy->width,
                                             cudaMemcpyDeviceToHost, slot->stream));
        else
            r = CUDA(report,
                     cudaMemcpy2DAsync(copy->to, copy->pitch, copy->from, copy->width, copy->width,
                                       copy->height, cudaMemcpyDeviceToHost, slot->stream));
    }
    *ret_any = any;
    return r;
}

static void copy_out(const struct slot *slot)
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

    if (!job->x_memory && size <= STAGING - slot->in_used) {
        memcpy(slot->in + slot->in_used, from, size);
        from = slot->in + slot->in_used;
        slot->in_used += (size + VECTOR - 1) / VECTOR * VECTOR;
        if (size > PIECE_MAX)
            return CUDA(report,
                        cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, slot->stream));
    } else if (!job->x_memory) {
        return CUDA(report, cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, slot->stream));
    } else if (size > PIECE_MAX) {
        return CUDA(report, cudaMemcpyAsync(to, memory_at(job->x_memory, from), size,
                                            cudaMemcpyDefault, slot->stream));
    } else {
        from = memory_at(job->x_memory, from);
    }
    tables->pieces[tables->n_pieces++] = (struct piece){from, to, size};
    tables->piece_max = size > tables->piece_max ? size : tables->piece_max;
    return 0;
}

static int upload(struct slot *slot, struct report *report)
{
    uint64_t row_bytes = (uint64_t)slot->plan->in_elements * dtype_size(slot->plan->dtype);
    char *to = arena_of(slot)->buffers[BUFFER_X];
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
    if (r == 0)
        r = upload_tables(slot, report);
    if (r == 0 && slot->tables.n_pieces)
        r = pieces_cuda(slot->stream, device_of(slot, slot->tables.pieces), slot->tables.n_pieces,
                        slot->tables.piece_max, report);
    return r;
}

/* Blocks */

static bool in_compact_list(const struct slot *slot, const struct job *job)
{
    return job->compact && (slot->plan->compact || slot->plan->fill);
}

/* The next rows of the batch as parts. False when none are left. */
static bool next_parts(struct slot *slot)
{
    struct batch *batch = slot->batch;
    int64_t room = slot->plan->rows_max, row = 0;

    slot->n_parts = 0;
    slot->out_used = 0;
    while (room > 0 && slot->n_parts < SEGMENTS_MAX && slot->job < batch->n_jobs) {
        struct job *job = &batch->jobs[slot->job];
        int64_t left = (int64_t)job->rows - slot->job_row, n = left < room ? left : room;

        if (job->result == 0 && n > 0) {
            slot->parts[slot->n_parts++] = (struct part){job, slot->job_row, row, n, NULL, {0}};
            slot->job_row += n;
            row += n;
            room -= n;
        }
        if (job->result != 0 || slot->job_row == (int64_t)job->rows) {
            slot->job++;
            slot->job_row = 0;
        }
    }
    slot->block.rows = row;
    return row > 0;
}

/* Results first, compact ones behind. */
static void make_segments(struct slot *slot)
{
    int n = 0;

    begin_tables(slot, slot->n_parts);
    for (int compact = 0; compact < 2; compact++) {
        for (int i = 0; i < slot->n_parts; i++) {
            struct part *part = &slot->parts[i];

            if (in_compact_list(slot, part->job) != compact)
                continue;
            fill_segment(&slot->tables.segments[n], part);
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
    end_tables(slot, n);
}

static int end_phase(struct slot *slot, enum phase phase, struct report *report)
{
    slot->phase = phase;
    return flag_cuda(slot->stream, slot->flag, ++slot->sequence, report);
}

static int begin_guard(struct slot *slot, struct report *report)
{
    const struct plan *plan = slot->plan;
    struct arena *arena = arena_of(slot);
    int r;

    r = tops_cuda(slot->stream, plan->dtype, slot->block.x, slot->block.rows, plan->in_elements,
                  arena->tops, report);
    if (r == 0)
        r = plan_fill(plan, arena, slot->stream, &slot->block, report);
    if (r == 0)
        r = CUDA(report, cudaMemcpyAsync(arena->tops_host, arena->tops,
                                         (size_t)slot->block.rows * sizeof(uint32_t),
                                         cudaMemcpyDeviceToHost, slot->stream));
    if (r == 0)
        r = end_phase(slot, PHASE_GUARD, report);
    return r;
}

/* 1: a block is in flight; 0: no rows are left; or negative. */
static int begin_block(struct slot *slot, struct report *report)
{
    bool any;
    int r;

    if (!next_parts(slot))
        return 0;
    make_segments(slot);
    r = upload(slot, report);
    if (r < 0)
        return r;
    if (slot->plan->fill) {
        r = begin_guard(slot, report);
        return r < 0 ? r : 1;
    }
    r = plan_run(slot->plan, arena_of(slot), slot->stream, &slot->block, report);
    if (r == 0)
        r = download(slot, &any, report);
    if (r == 0)
        r = end_phase(slot, PHASE_COMPUTE, report);
    return r < 0 ? r : 1;
}

/* After the guard */

enum state { STATE_CONSTANT, STATE_NAN, STATE_FULL };

static enum state state_of(const struct slot *slot, int64_t row)
{
    const struct tail *fill = &slot->plan->fill->tail;
    uint32_t top = arena_of((struct slot *)slot)->tops_host[row];

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
    uint8_t *states = arena_of(slot)->states + part->row;
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

/* A row of a compact result that comes in full: behind the states and the full rows before it. */
static bool place_compact_row(struct slot *slot, struct part *row, const struct part *part,
                              uint64_t row_bytes)
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
    row->y = place(slot, row, (char *)job->y + at, row_bytes,
                   (char *)arena_of(slot)->result + row_bytes * (uint64_t)part->row);
    return true;
}

static bool all_full(const struct slot *slot)
{
    for (int i = 0; i < slot->n_parts; i++)
        if (slot->parts[i].job->compact)
            return false;
    for (int64_t row = 0; row < slot->block.rows; row++)
        if (state_of(slot, row) != STATE_FULL)
            return false;
    return true;
}

/* Moves the rows that need the full path to the front of the arena's x, and makes a segment of
 * each. The rows of a part that follow one another share one. */
static int gather_full(struct slot *slot, int *ret_n, struct report *report)
{
    const struct plan *plan = slot->plan;
    uint64_t esize = dtype_size(plan->dtype);
    uint64_t in_bytes = (uint64_t)plan->in_elements * esize;
    uint64_t out_bytes = (uint64_t)plan->out_elements * esize;
    char *x = arena_of(slot)->buffers[BUFFER_X];
    const char *from = slot->block.x;
    struct segment *segments = slot->tables.segments;
    int n_parts = slot->n_parts, n = 0, r = 0;
    bool all = all_full(slot); /* then they lie in order already */
    int64_t rows = 0;

    for (int i = 0; i < n_parts; i++) {
        struct part *part = &slot->parts[i];
        bool compact = part->job->compact;

        for (int64_t k = 0; k < part->rows && r == 0; k++) {
            int64_t row = part->row + k;

            if (state_of(slot, row) != STATE_FULL)
                continue;
            if (compact && !place_compact_row(slot, &slot->parts[slot->n_parts], part, out_bytes))
                continue;
            if (!all && (from != x || rows != row))
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
    if (!all)
        slot->block.x = x;
    *ret_n = n;
    return r;
}

/* 1: work is in flight; 0: the block has ended; or negative. */
static int after_guard(struct slot *slot, struct report *report)
{
    bool any, states = false;
    int n = 0, r = 0;

    for (int i = 0; i < slot->n_parts && r == 0; i++)
        if (slot->parts[i].job->compact) {
            states |= slot->parts[i].job->y_memory && slot->parts[i].job->y_memory->on_device;
            r = write_states(slot, &slot->parts[i], report);
        }
    begin_tables(slot, (int)slot->block.rows);
    if (r == 0)
        r = gather_full(slot, &n, report);
    if (r < 0)
        return r;
    if (n > 0) {
        slot->block.n_results = n;
        slot->block.n_compact = 0;
        end_tables(slot, n);
        r = upload_tables(slot, report);
        if (r == 0)
            r = plan_run(slot->plan, arena_of(slot), slot->stream, &slot->block, report);
    }
    if (r == 0)
        r = download(slot, &any, report);
    if (r == 0 && (n > 0 || any || states)) {
        r = end_phase(slot, PHASE_FULL, report);
        return r < 0 ? r : 1;
    }
    return r;
}

/* Batches */

static int check_job(const struct plan *plan, const struct job *job)
{
    if (!job->compact)
        return job->y_size < result_bytes(plan, job) ? -ENOSPC : 0;
    if (plan->compact)
        return job->y_size < result_bytes(plan, job) ? -ENOSPC : 0;
    if (!plan->fill || (job->train && plan->masks))
        return -EINVAL;
    return job->y_size < BACKEND_COMPACT_ROOM(job->rows) ? -ENOSPC : 0;
}

int slot_start(struct slot *slot, struct plan *plan, struct batch *batch, struct report *report)
{
    int r;

    slot->plan = plan;
    slot->batch = batch;
    slot->job = 0;
    slot->job_row = 0;
    slot->phase = PHASE_IDLE;
    slot->asked_ns = 0;
    for (unsigned i = 0; i < batch->n_jobs; i++) {
        batch->jobs[i].n_full = 0;
        batch->jobs[i].result = check_job(plan, &batch->jobs[i]);
    }
    r = begin_block(slot, report);
    if (r < 0) {
        cudaStreamSynchronize(slot->stream); /* what was enqueued must not outlive the batch */
        slot->phase = PHASE_IDLE;
    }
    if (r == 0)
        slot->phase = PHASE_DONE; /* no job that can run */
    return r < 0 ? r : 0;
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static bool flag_is_up(const struct slot *slot)
{
    return __atomic_load_n(slot->flag, __ATOMIC_ACQUIRE) == slot->sequence;
}

/* A kernel that faulted never raises its flag: asking the stream, now and then, finds out. */
static int ask_stream(struct slot *slot, struct report *report)
{
    int64_t now = now_ns();
    cudaError_t error;

    if (slot->asked_ns == 0)
        slot->asked_ns = now;
    if (now - slot->asked_ns < QUERY_NS)
        return 0;
    slot->asked_ns = now;
    error = cudaStreamQuery(slot->stream);
    if (error == cudaErrorNotReady || error == cudaSuccess)
        return 0;
    CUDA(report, error);
    return -ENOTRECOVERABLE;
}

int slot_poll(struct slot *slot, struct report *report)
{
    int r = 0;

    if (slot->phase == PHASE_IDLE)
        return 0;
    if (slot->phase == PHASE_DONE) {
        slot->phase = PHASE_IDLE;
        return 1;
    }
    if (!flag_is_up(slot))
        return ask_stream(slot, report);
    slot->asked_ns = 0;
    if (slot->phase == PHASE_GUARD)
        r = after_guard(slot, report);
    if (r == 0) {
        copy_out(slot);
        r = begin_block(slot, report);
    }
    if (r > 0)
        return 0;
    if (r < 0 && r != -ENOTRECOVERABLE)
        cudaStreamSynchronize(slot->stream);
    slot->phase = PHASE_IDLE;
    return r < 0 ? r : 1;
}

/* Warming up */

int slot_warm(struct slot *slot, struct plan *plan, struct report *report)
{
    struct arena *other = &plan->arenas[(slot->index + 1) % SLOTS];
    struct memory memory = {.on_device = true};
    uint32_t rows[] = {1, plan->rows_max};
    int r;

    *(struct piece *)slot->host = (struct piece){slot->in, slot->out, VECTOR};
    r = pieces_cuda(slot->stream, (struct piece *)slot->host, 1, VECTOR, report);
    slot->warming = true;
    for (int i = 0; i < 4 && r == 0; i++) {
        struct job job = {
            .x = other->buffers[BUFFER_X],
            .y = other->result,
            .y_size = plan->size.result,
            .x_memory = &memory,
            .y_memory = &memory,
            .rows = rows[i % 2],
            .compact = i >= 2,
        };
        struct batch batch = {.jobs = &job, .n_jobs = 1, .rows = job.rows};

        if (i >= 2 && !plan->compact)
            break;
        r = slot_start(slot, plan, &batch, report);
        while (r == 0) {
            r = slot_poll(slot, report);
            if (r == 0)
                continue;
            r = r < 0 ? r : job.result;
            break;
        }
    }
    slot->warming = false;
    return r;
}
