/*
 * measure.c - what a plan's batches take, and the link
 *
 * Batches are measured from start() to the poll() that sees the end, as the engine sees them, with
 * rows in device memory: copies are reckoned by the link's rate. The fastest of a few counts, for
 * batches of other plans may run meanwhile. Rows are noise, because zeros take less power and are
 * computed faster; its words are numbers of every dtype, from 2^-7 to 2.
 */
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cuda/block.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/measure.h"
#include "kernels/cuda/memory.h"

#define NOISE_BYTES ((size_t)1 << 20)
#define TRIES       3
#define LINK_BYTES  ((size_t)16 << 20)

static double now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int fill(char *to, uint64_t size, struct report *report)
{
    uint32_t *noise = malloc(NOISE_BYTES), random = 1;
    int r = noise ? 0 : report_set(report, -ENOMEM, "out of memory");

    for (size_t i = 0; noise && i < NOISE_BYTES / sizeof(*noise); i++) {
        random = random * 1664525u + 1013904223u;
        noise[i] = 0x3c003c00u | (random >> 16 & 0x3ffu) << 16 | (random >> 6 & 0x3ffu);
    }
    for (uint64_t at = 0; at < size && r == 0; at += NOISE_BYTES)
        r = CUDA(report,
                 cudaMemcpy(to + at, noise, size - at < NOISE_BYTES ? size - at : NOISE_BYTES,
                            cudaMemcpyHostToDevice));
    free(noise);
    return r;
}

static int run(struct slot *slot, struct plan *plan, uint32_t rows, double *ret_us,
               struct report *report)
{
    struct arena *other = &plan->arenas[(slot->index + 1) % SLOTS];
    struct memory memory = {.on_device = true};
    struct job job = {
        .x = other->buffers[BUFFER_X],
        .y = other->result,
        .y_size = plan->size.result,
        .x_memory = &memory,
        .y_memory = &memory,
        .rows = rows,
    };
    struct batch batch = {.plan = plan, .jobs = &job, .n_jobs = 1, .rows = rows};
    double began_us = now_us();
    int r = slot_start(slot, plan, &batch, report);

    while (r == 0)
        r = slot_poll(slot, report);
    if (r > 0)
        r = job.result;
    *ret_us = now_us() - began_us;
    return r;
}

int measure_plan(struct slot *slot, struct plan *plan, struct report *report)
{
    struct arena *other = &plan->arenas[(slot->index + 1) % SLOTS];
    int r = fill(other->buffers[BUFFER_X], plan->size.buffers[BUFFER_X], report);

    plan->n_costs = 0;
    for (uint64_t rows = 1; r == 0 && plan->n_costs < BACKEND_COSTS_MAX; rows *= 2) {
        double best_us = 0;

        if (rows > plan->rows_max)
            rows = plan->rows_max;
        for (int i = 0; i < TRIES && r == 0; i++) {
            double us;

            r = run(slot, plan, (uint32_t)rows, &us, report);
            best_us = i == 0 || us < best_us ? us : best_us;
        }
        plan->costs[plan->n_costs++] = (struct backend_cost){(uint32_t)rows, (uint32_t)best_us + 1};
        if (rows == plan->rows_max)
            break;
    }
    return r;
}

int measure_link(uint64_t *ret_bytes_per_s, struct report *report)
{
    double worst_us = 0;
    void *host = NULL, *device = NULL;
    int r = CUDA(report, cudaMallocHost(&host, LINK_BYTES));

    if (r == 0)
        r = CUDA(report, cudaMalloc(&device, LINK_BYTES));
    for (int way = 0; way < 2 && r == 0; way++) {
        double best_us = 0;

        for (int i = 0; i < TRIES && r == 0; i++) {
            double began_us = now_us(), us;

            r = CUDA(report, way == 0
                                 ? cudaMemcpy(device, host, LINK_BYTES, cudaMemcpyHostToDevice)
                                 : cudaMemcpy(host, device, LINK_BYTES, cudaMemcpyDeviceToHost));
            us = now_us() - began_us;
            best_us = i == 0 || us < best_us ? us : best_us;
        }
        worst_us = best_us > worst_us ? best_us : worst_us;
    }
    cudaFree(device);
    cudaFreeHost(host);
    if (r == 0)
        *ret_bytes_per_s = (uint64_t)((double)LINK_BYTES / worst_us * 1e6);
    return r;
}
