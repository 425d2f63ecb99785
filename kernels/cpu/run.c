/*
 * run.c - runs a batch through a plan
 *
 * The rows of all requests stand in one line and are taken in blocks of at most block_rows. Within
 * a block:
 *
 *     guard    with a proof: constant and NaN samples are written at once, the others stay
 *     phases   the linear over the whole block, then row by row through the steps
 *     outer    with an add that moves the batch: the lines of the result
 *
 * Rows go to workers one by one. Where a row is large and there are fewer rows than workers, as
 * with a single sample of a convolution, its steps are taken apart instead, item by item. Which of
 * the two happens changes who computes, never what.
 *
 * x may lie in memory that a client can write at any time: nothing read from it is trusted to be
 * the same when read again, and states that later work relies on are kept here, not in y.
 */
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "conv3d.h"
#include "linear.h"
#include "loops.h"
#include "run.h"

#define LARGE_ROW  65536      /* floats from which a row is worth taking apart */
#define ITEM       16384      /* floats of an item of several small rows */
#define STREAM_MIN (8u << 20) /* bytes of results from which caches are not worth filling */

struct run {
    struct plan *plan;
    struct pool *pool;
    bool stream;
    uint32_t n; /* rows of the block: plan->refs */
    atomic_int error;

    const struct phase *phase; /* in work */
    uint32_t rows_per_item;
    struct outer_rows outer_rows;

    /* A row that is taken apart. */
    const struct pass *pass;
    enum pass_round round;
    struct pass_row pass_row;
};

static void note_error(struct run *run, int r)
{
    int none = 0;

    if (r < 0)
        atomic_compare_exchange_strong(&run->error, &none, r);
}

/* The dropouts of a request, each with its own offset; NULL when it is not masked. */
static const struct dropout *job_dropouts(const struct plan *plan, const struct job *job,
                                          struct dropout to[MODEL_STAGES_MAX])
{
    uint64_t offset = job->offset;

    if (!job->train || plan->n_dropouts == 0)
        return NULL;
    for (int i = 0; i < plan->n_dropouts; i++) {
        const struct plan_dropout *dropout = &plan->dropouts[i];
        int64_t n = dropout->elements * job->rows;

        dropout_init(&to[i], dropout->p, n, job->seed, offset, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
        offset += dropout_advance(dropout->p, n, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
    }
    return to;
}

/* A row of x as float32: where it lies if it comes so, else in the slot. */
static const float *job_row(const struct plan *plan, const struct row_ref *ref, struct slot *slot)
{
    size_t size = (size_t)plan->in_elements * dtype_size(plan->dtype);
    const char *x = (const char *)ref->job->x + ref->row * size;

    if (plan->dtype == DTYPE_FLOAT32) {
        if ((uintptr_t)x % sizeof(float) == 0)
            return (const float *)x;
        memcpy(slot->row, x, size);
    } else {
        tensor_to_float(plan->dtype, x, slot->row, (size_t)plan->in_elements);
    }
    return slot->row;
}

static bool returns_sums(const struct plan *plan, const struct job *job)
{
    return job->compact && plan->compact_sums;
}

/* Where sample `index` of a job's result begins. */
static char *job_result(const struct plan *plan, const struct row_ref *ref)
{
    const struct job *job = ref->job;
    uint64_t elements = (uint64_t)(returns_sums(plan, job) ? plan->outer.row : plan->out_elements);
    uint64_t size = elements * dtype_size(plan->dtype);

    if (job->compact && plan->constant)
        return (char *)job->y + BACKEND_COMPACT_ROOM(job->rows) + ref->full * size;
    return (char *)job->y + ref->row * size;
}

/* Where the phase leaves row i of the block. */
static void set_result(const struct run *run, uint32_t i, struct pass_row *row)
{
    const struct plan *plan = run->plan;
    const struct phase *phase = run->phase;
    const struct row_ref *ref = &plan->refs[i];

    row->dtype = DTYPE_FLOAT32;
    row->stream = false;
    if (phase < &plan->phases[plan->n_phases - 1]) {
        row->y = phase[1].in + i * phase[1].in_floats;
    } else if (plan->moves && !returns_sums(plan, ref->job)) {
        row->y = plan->sums + i * plan->outer.row;
    } else {
        row->dtype = plan->dtype;
        row->y = job_result(plan, ref);
        row->stream = run->stream && (uintptr_t)row->y % sizeof(float) == 0;
    }
}

/* Where the phase finds row i of the block. */
static const float *phase_row(const struct run *run, uint32_t i, struct slot *slot)
{
    const struct phase *phase = run->phase;

    if (phase->linear)
        return phase->out + i * phase->out_floats;
    return job_row(run->plan, &run->plan->refs[i], slot);
}

static void set_place(const struct run *run, uint32_t i, const struct pass *pass,
                      const struct dropout *dropouts, struct pass_row *row)
{
    row->place =
        (struct place){.dropouts = dropouts, .first = run->plan->refs[i].row * pass->elements};
}

/* Row i through the steps of the phase, by one worker. */
static void run_row(struct run *run, unsigned worker, uint32_t i)
{
    const struct plan *plan = run->plan;
    const struct phase *phase = run->phase;
    struct slot *slot = &plan->slots[worker];
    struct dropout all[MODEL_STAGES_MAX];
    const struct dropout *dropouts = job_dropouts(plan, plan->refs[i].job, all);
    struct pass_row row = {.x = phase_row(run, i, slot), .scratch = &slot->scratch};

    if (phase->n_steps == 0) {
        set_result(run, i, &row);
        tensor_from_float(row.dtype, row.x, row.y, (size_t)phase->row_floats);
    }
    for (int s = 0; s < phase->n_steps; s++) {
        const struct step *step = &plan->steps[phase->first_step + s];

        row.y = slot->buffers[s % 2];
        row.dtype = DTYPE_FLOAT32;
        if (step->conv) {
            note_error(run, conv3d_run(step->conv, worker, worker, row.x, row.y));
        } else {
            set_place(run, i, &step->pass, dropouts, &row);
            if (s == phase->n_steps - 1)
                set_result(run, i, &row);
            pass_run_all(&step->pass, &row, slot->tile);
        }
        row.x = row.y;
    }
}

static void rows_item(void *context, unsigned worker, size_t item)
{
    struct run *run = context;
    uint32_t first = (uint32_t)item * run->rows_per_item;

    for (uint32_t i = first; i < first + run->rows_per_item && i < run->n; i++)
        run_row(run, worker, i);
}

static void pass_item(void *context, unsigned worker, size_t item)
{
    struct run *run = context;
    float *tile = run->plan->slots[worker].tile;

    if (!pass_serial(run->pass, run->round)) {
        pass_run(run->pass, run->round, item, &run->pass_row, tile);
        return;
    }
    for (size_t i = 0; i < pass_items(run->pass, run->round); i++)
        pass_run(run->pass, run->round, i, &run->pass_row, tile);
}

/* Row i through the steps of the phase, each step by all workers. */
static void split_row(struct run *run, uint32_t i)
{
    const struct plan *plan = run->plan;
    const struct phase *phase = run->phase;
    struct slot *slot = &plan->slots[0];
    struct dropout all[MODEL_STAGES_MAX];
    const struct dropout *dropouts = job_dropouts(plan, plan->refs[i].job, all);
    struct pass_row *row = &run->pass_row;

    *row = (struct pass_row){.x = phase_row(run, i, slot), .scratch = &slot->scratch};
    for (int s = 0; s < phase->n_steps; s++) {
        const struct step *step = &plan->steps[phase->first_step + s];

        row->y = slot->buffers[s % 2];
        row->dtype = DTYPE_FLOAT32;
        run->pass = &step->pass;
        if (step->conv) {
            note_error(run, conv3d_run(step->conv, 0, 0, row->x, row->y));
        } else {
            set_place(run, i, &step->pass, dropouts, row);
            if (s == phase->n_steps - 1)
                set_result(run, i, row);
            for (run->round = 0; run->round < ROUND_COUNT; run->round++) {
                size_t n = pass_items(&step->pass, run->round);

                if (n > 0 && pass_serial(&step->pass, run->round))
                    n = 1;
                pool_run(run->pool, n, pass_item, run);
            }
        }
        row->x = row->y;
    }
}

static void linear_item(void *context, unsigned worker, size_t item)
{
    struct run *run = context;
    const struct phase *phase = run->phase;

    note_error(run, linear_run(phase->linear, worker, item, run->n * phase->products, phase->in,
                               phase->out));
}

/* The largest row that a worker has in hand during a phase. */
static int64_t largest_row(const struct plan *plan, const struct phase *phase)
{
    int64_t largest = phase->row_floats;

    for (int s = 0; s < phase->n_steps; s++) {
        int64_t result = plan->steps[phase->first_step + s].result;

        largest = result > largest ? result : largest;
    }
    return largest;
}

static void run_phase(struct run *run, const struct phase *phase)
{
    int64_t largest = largest_row(run->plan, phase);
    uint32_t n = run->n, whole = n;

    run->phase = phase;
    if (phase->linear)
        pool_run(run->pool, linear_items(phase->linear, n * phase->products), linear_item, run);
    if (largest >= LARGE_ROW && phase->n_steps > 0)
        whole -= n % pool_workers(run->pool);
    run->rows_per_item = largest >= ITEM ? 1 : (uint32_t)(ITEM / largest);
    run->n = whole;
    pool_run(run->pool, (whole + run->rows_per_item - 1) / run->rows_per_item, rows_item, run);
    run->n = n;
    for (uint32_t i = whole; i < n; i++)
        split_row(run, i);
}

static void outer_item(void *context, unsigned worker, size_t item)
{
    struct run *run = context;

    outer_run(&run->plan->outer, item, &run->outer_rows, run->plan->slots[worker].tile);
}

/* The results of a request's rows [i, end) of the block. */
static void write_sums(struct run *run, uint32_t i, uint32_t end)
{
    const struct plan *plan = run->plan;
    const struct row_ref *ref = &plan->refs[i];
    struct dropout all[MODEL_STAGES_MAX];

    run->outer_rows = (struct outer_rows){.x = plan->sums + i * plan->outer.row,
                                          .y = ref->job->y,
                                          .dtype = plan->dtype,
                                          .first = ref->row,
                                          .n = end - i,
                                          .total = ref->job->rows,
                                          .dropouts = job_dropouts(plan, ref->job, all)};
    pool_run(run->pool, outer_items(&plan->outer, &run->outer_rows), outer_item, run);
}

static void run_outer(struct run *run)
{
    const struct row_ref *refs = run->plan->refs;

    for (uint32_t i = 0, end; i < run->n; i = end) {
        for (end = i + 1; end < run->n && refs[end].job == refs[i].job; end++)
            ;
        if (!returns_sums(run->plan, refs[i].job))
            write_sums(run, i, end);
    }
}

/* A constant sample, through the dropouts that follow. */
static void write_masked(const struct plan *plan, const struct row_ref *ref, struct slot *slot,
                         const struct dropout *dropouts)
{
    size_t size = dtype_size(plan->dtype);
    char *y = job_result(plan, ref);

    for (int64_t i = 0; i < plan->out_elements; i += PASS_TILE) {
        int64_t n = plan->out_elements - i < PASS_TILE ? plan->out_elements - i : PASS_TILE;

        loops_fill(slot->tile, (size_t)n, plan->value);
        for (int d = 0; d < plan->n_dropouts; d++)
            dropout_apply(&dropouts[d], ref->row * plan->out_elements + i, n, slot->tile);
        tensor_from_float(plan->dtype, slot->tile, y + (size_t)i * size, (size_t)n);
    }
}

static void write_pattern(const struct run *run, const struct row_ref *ref, const void *pattern)
{
    const struct plan *plan = run->plan;
    size_t size = dtype_size(plan->dtype);
    char *y = job_result(plan, ref);
    bool stream = run->stream && plan->dtype == DTYPE_FLOAT32 && (uintptr_t)y % sizeof(float) == 0;

    for (int64_t i = 0; i < plan->out_elements; i += PASS_TILE) {
        int64_t n = plan->out_elements - i < PASS_TILE ? plan->out_elements - i : PASS_TILE;

        if (stream)
            loops_stream(pattern, (float *)y + i, (size_t)n);
        else
            memcpy(y + (size_t)i * size, pattern, (size_t)n * size);
    }
    if (stream)
        loops_stream_end();
}

/* What is known of a sample before computing; what is, is written unless a byte says it. */
static void guard_item(void *context, unsigned worker, size_t item)
{
    struct run *run = context;
    struct plan *plan = run->plan;
    struct row_ref *ref = &plan->refs[item];
    struct slot *slot = &plan->slots[worker];
    struct dropout all[MODEL_STAGES_MAX];
    const struct dropout *dropouts = job_dropouts(plan, ref->job, all);
    const float *x = job_row(plan, ref, slot);
    uint32_t max = loops_bits_max(x, (size_t)plan->in_elements), bound;

    memcpy(&bound, &plan->bound, sizeof(bound));
    ref->state = ROW_FULL;
    if (max < bound)
        ref->state = ROW_CONSTANT;
    else if (max >= 0x7f800000 && plan->nonfinite_spreads)
        ref->state = ROW_NAN;
    if (ref->job->compact || ref->state == ROW_FULL)
        return;
    if (ref->state == ROW_NAN)
        write_pattern(run, ref, plan->nan_pattern);
    else if (dropouts)
        write_masked(plan, ref, slot, dropouts);
    else
        write_pattern(run, ref, plan->pattern);
}

/* Notes a sample of a compact result. False: there is no room for it. */
static bool note_state(const struct plan *plan, struct row_ref *ref)
{
    struct job *job = ref->job;
    uint64_t size = (uint64_t)plan->out_elements * dtype_size(plan->dtype);
    uint64_t room = job->y_size - BACKEND_COMPACT_ROOM(job->rows);

    ((uint8_t *)job->y)[ref->row] = ref->state;
    if (ref->state != ROW_FULL)
        return true;
    if (job->n_full >= room / size)
        return false;
    ref->full = job->n_full++;
    return true;
}

/* Leaves in the block what takes the full path. */
static void run_guard(struct run *run)
{
    struct row_ref *refs = run->plan->refs;
    uint32_t n = 0;

    pool_run(run->pool, run->n, guard_item, run);
    for (uint32_t i = 0; i < run->n; i++) {
        struct job *job = refs[i].job;

        if (job->result < 0)
            continue;
        if (job->compact && !note_state(run->plan, &refs[i]))
            job->result = -ENOSPC;
        else if (refs[i].state == ROW_FULL)
            refs[n++] = refs[i];
    }
    run->n = n;
}

static int run_block(struct run *run)
{
    const struct plan *plan = run->plan;

    if (plan->constant)
        run_guard(run);
    if (run->n > 0) {
        for (int i = 0; i < plan->n_phases; i++)
            run_phase(run, &plan->phases[i]);
        if (plan->moves)
            run_outer(run);
    }
    run->n = 0;
    return atomic_load(&run->error);
}

/* 0, or why this job alone cannot be done. */
static int check_job(const struct plan *plan, struct job *job)
{
    uint64_t elements = (uint64_t)(returns_sums(plan, job) ? plan->outer.row : plan->out_elements);
    uint64_t size;

    job->n_full = 0;
    if (job->rows == 0 || !job->x || !job->y)
        return -EINVAL;
    if (job->first_row > job->rows || job->part_rows > job->rows - job->first_row)
        return -EINVAL;
    if (job->compact && !plan->compact_sums && job->part_rows > 0)
        return -EINVAL;
    if (__builtin_mul_overflow(elements * dtype_size(plan->dtype), job->rows, &size))
        return -EINVAL;
    if (!job->compact)
        return job->y_size == size ? 0 : -EINVAL;
    if (plan->compact_sums)
        return job->y_size >= size ? 0 : -ENOSPC;
    if (!plan->constant || (job->train && plan->masks))
        return -EINVAL;
    if (job->y_size < BACKEND_COMPACT_ROOM(job->rows))
        return -ENOSPC;
    memset((char *)job->y + job->rows, 0, BACKEND_COMPACT_ROOM(job->rows) - job->rows);
    return 0;
}

int run_batch(struct plan *plan, struct pool *pool, struct batch *batch)
{
    struct run run = {.plan = plan, .pool = pool};
    uint64_t result_bytes = (uint64_t)plan->out_elements * dtype_size(plan->dtype);
    int r;

    run.stream = batch->rows >= STREAM_MIN / result_bytes + 1;
    for (unsigned j = 0; j < batch->n_jobs; j++) {
        struct job *job = &batch->jobs[j];
        uint32_t end = job->part_rows > 0 ? job->first_row + job->part_rows : job->rows;

        job->result = check_job(plan, job);
        for (uint32_t row = job->first_row; row < end && job->result == 0; row++) {
            plan->refs[run.n++] = (struct row_ref){.job = job, .row = row};
            if (run.n == plan->block_rows) {
                r = run_block(&run);
                if (r < 0)
                    return r;
            }
        }
    }
    return run.n > 0 ? run_block(&run) : 0;
}
