/*
 * slot.c - one batch in flight: its phases, and how their ends are seen
 *
 * A batch is worked off in blocks of at most rows_max rows (block.c). A block goes through phases,
 * each a run of work on the stream that ends with the flag; slot_poll() sees the flag and begins
 * the next:
 *
 *   COMPUTE   upload, every step, download                       plans without a proof
 *   GUARD     upload, maxima of the rows                         plans with one; then, at once
 *   FULL      fill, the full path for rows that the guard stopped, download
 *   (nothing left: the block has ended; the next block, or the batch's end)
 *
 * The fill is enqueued with the guard, which raises the flag by itself; a second flag follows it.
 *
 * A COMPUTE phase that is like others (graph.c) is one launch, flag and all; where a download
 * follows, that graph's flag says nothing new.
 *
 * Nothing is allocated here after slot_new().
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cuda/graph.h"
#include "kernels/cuda/guard.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/slot.h"

#define QUERY_NS 1000000

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
        r = CUDA(report, cudaMallocHost((void **)&slot->host, BLOCK_TABLES));
    if (r == 0)
        r = CUDA(report, cudaMallocHost((void **)&slot->in, BLOCK_STAGING));
    if (r == 0)
        r = CUDA(report, cudaMallocHost((void **)&slot->out, BLOCK_STAGING));
    if (r == 0)
        r = CUDA(report, cudaMalloc((void **)&slot->at_device, BLOCK_TABLES));
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

static int end_phase(struct slot *slot, enum phase phase, struct report *report)
{
    slot->phase = phase;
    return flag_cuda(slot->stream, slot->flag, ++slot->sequence, report);
}

static int end_compute(struct slot *slot, struct report *report)
{
    int r = block_download(slot, report);

    return r < 0 ? r : end_phase(slot, PHASE_COMPUTE, report);
}

/* The whole phase at once, but for the copy engine's part. */
static int launch_phase(struct slot *slot, struct report *report)
{
    int r;

    slot->phase = PHASE_COMPUTE;
    if (!block_downloads(slot)) {
        slot->tables.recorded->sequence = ++slot->sequence;
        return graph_launch(slot, report);
    }
    slot->tables.recorded->sequence = slot->sequence;
    r = graph_launch(slot, report);
    return r < 0 ? r : end_compute(slot, report);
}

/* 1: a block is in flight; 0: no rows are left; or negative. */
static int begin_block(struct slot *slot, struct report *report)
{
    int r;

    if (!block_next(slot))
        return 0;
    r = block_upload_rows(slot, report);
    if (r == 0 && slot->range) {
        r = launch_phase(slot, report);
        return r < 0 ? r : 1;
    }
    if (r == 0 && !block_travels(slot))
        r = block_upload_tables(slot, report);
    if (r == 0)
        r = block_gather(slot, report);
    if (r < 0)
        return r;
    if (slot->plan->fill) {
        r = guard_begin(slot, ++slot->sequence, report);
        if (r == 0)
            r = end_phase(slot, PHASE_GUARD, report);
        return r < 0 ? r : 1;
    }
    r = plan_run(slot->plan, block_arena(slot), slot->stream, &slot->block, report);
    if (r == 0)
        r = end_compute(slot, report);
    return r < 0 ? r : 1;
}

static uint64_t result_bytes(const struct plan *plan, const struct job *job)
{
    return (uint64_t)(job->rows * plan_elements(plan, job->compact)) * dtype_size(plan->dtype);
}

static int check_job(const struct plan *plan, const struct job *job)
{
    if (!job->compact)
        return job->y_size < result_bytes(plan, job) ? -ENOSPC : 0;
    if (plan->compact_elements)
        return job->y_size < result_bytes(plan, job) ? -ENOSPC : 0;
    if (!plan->fill || (job->train && plan->masks))
        return -EINVAL;
    return job->y_size < BACKEND_COMPACT_ROOM(job->rows) ? -ENOSPC : 0;
}

/* What was enqueued must not outlive the batch; a lost device is asked nothing more. */
static void give_up(struct slot *slot, int r)
{
    if (r != -ENOTRECOVERABLE)
        cudaStreamSynchronize(slot->stream);
    slot->phase = PHASE_IDLE;
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
    if (r < 0)
        give_up(slot, r);
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
    uint32_t left = slot->sequence - __atomic_load_n(slot->flag, __ATOMIC_ACQUIRE);

    return left == 0 || (slot->phase == PHASE_GUARD && left == 1);
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
    cuda_check(error, "cudaStreamQuery(slot->stream)", __FILE__, __LINE__, report);
    return -ENOTRECOVERABLE;
}

int slot_poll(struct slot *slot, struct report *report)
{
    int more, r = 0;

    if (slot->phase == PHASE_IDLE)
        return 0;
    if (slot->phase == PHASE_DONE) {
        slot->phase = PHASE_IDLE;
        return 1;
    }
    if (!flag_is_up(slot))
        return ask_stream(slot, report);
    slot->asked_ns = 0;
    if (slot->phase == PHASE_GUARD) {
        more = guard_end(slot, report);
        r = more > 0 ? end_phase(slot, PHASE_FULL, report) : more;
        slot->phase = PHASE_FULL;
        if (r == 0 && !flag_is_up(slot))
            return 0;
    }
    if (r == 0) {
        block_copy_out(slot);
        r = begin_block(slot, report);
    }
    if (r > 0)
        return 0;
    if (r < 0)
        give_up(slot, r);
    slot->phase = PHASE_IDLE;
    return r < 0 ? r : 1;
}

int slot_warm(struct slot *slot, struct plan *plan, struct report *report)
{
    struct arena *other = &plan->arenas[(slot->index + 1) % SLOTS];
    struct memory memory = {.on_device = true};
    uint32_t rows[] = {1, plan->rows_max};
    int r;

    *(struct piece *)slot->host = (struct piece){slot->in, slot->out, sizeof(float4)};
    r = pieces_cuda(slot->stream, (struct piece *)slot->host, 1, sizeof(float4), report);
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(slot->stream)); /* tables come to lie there */
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

        if (i >= 2 && !plan->compact_elements)
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
