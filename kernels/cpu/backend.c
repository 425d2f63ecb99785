/*
 * backend.c - the table that the daemon sees of the CPU
 *
 * One slot: start() computes in the calling thread, with the pool's help, and has ended when it
 * returns. load() and unload() may run meanwhile in other threads, for other plans: a plan shares
 * nothing with another but the engine of oneDNN, which does not change.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "measure.h"
#include "onednn.h"
#include "plan.h"
#include "pool.h"
#include "run.h"

struct backend {
    struct onednn *onednn;
    struct pool *pool;
    bool ended; /* the batch in the slot, not yet polled */
    struct backend_info info;
};

static void init_worker(void)
{
    onednn_single_thread();
}

static unsigned allowed_cores(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) < 0)
        return 1;
    return (unsigned)CPU_COUNT(&set);
}

/* "AMD EPYC" and the like; "CPU" when the system does not say. */
static void processor_name(char *text, size_t size)
{
    char line[256];
    FILE *file;

    snprintf(text, size, "CPU");
    file = fopen("/proc/cpuinfo", "re");
    if (!file)
        return;
    while (fgets(line, sizeof(line), file)) {
        const char *name = strchr(line, ':');

        if (strncmp(line, "model name", 10) != 0 || !name)
            continue;
        name += 1 + strspn(name + 1, " \t");
        snprintf(text, size, "%.*s", (int)strcspn(name, "\n"), name);
        break;
    }
    fclose(file);
}

static void fill_info(struct backend_info *info, unsigned workers)
{
    char name[80];

    *info = (struct backend_info){.name = "cpu",
                                  .slots = 1,
                                  .parts = true,
                                  .temperature_c = -1,
                                  .power_w = -1,
                                  .clock_mhz = -1};
    processor_name(name, sizeof(name));
    snprintf(info->device, sizeof(info->device), "%s, %u worker%s, %s", name, workers,
             workers == 1 ? "" : "s", onednn_isa());
    onednn_version(info->runtime, sizeof(info->runtime));
}

static void cpu_close(struct backend *backend)
{
    if (!backend)
        return;
    pool_free(backend->pool);
    onednn_free(backend->onednn);
    free(backend);
}

static int cpu_open(const struct backend_options *options, struct backend **ret,
                    struct report *report)
{
    unsigned workers = options->workers ? options->workers : allowed_cores();
    struct backend *backend;
    int r;

    workers = workers > POOL_WORKERS_MAX ? POOL_WORKERS_MAX : workers;
    backend = calloc(1, sizeof(*backend));
    if (!backend)
        return report_set(report, -ENOMEM, "out of memory");
    r = onednn_new(workers, &backend->onednn, report);
    if (r == 0)
        r = pool_new(workers, init_worker, &backend->pool, report);
    if (r < 0) {
        cpu_close(backend);
        return r;
    }
    fill_info(&backend->info, workers);
    *ret = backend;
    return 0;
}

static void cpu_info(struct backend *backend, struct backend_info *ret)
{
    *ret = backend->info;
}

/* With threads of its own: the backend's may be at work for another plan. */
static void measure(struct plan *plan, unsigned workers, uint32_t max_rows)
{
    struct pool *pool;

    if (pool_new(workers, init_worker, &pool, NULL) < 0)
        return;
    plan->n_costs = measure_plan(plan, pool, max_rows, plan->costs);
    pool_free(pool);
}

static int cpu_load(struct backend *backend, const struct pipeline *pipeline, uint32_t max_rows,
                    struct plan **ret, struct report *report)
{
    int threads = onednn_single_thread();
    int r;

    r = plan_new(backend->onednn, pool_workers(backend->pool), pipeline, max_rows, ret, report);
    if (r == 0)
        measure(*ret, pool_workers(backend->pool), max_rows);
    onednn_restore_threads(threads);
    return r;
}

static void cpu_plan_info(const struct plan *plan, struct plan_info *ret)
{
    *ret = (struct plan_info){.resident_bytes = plan->resident_bytes,
                              .arena_bytes = plan->arena_bytes,
                              .launches = plan_passes(plan),
                              .n_costs = plan->n_costs};
    memcpy(ret->costs, plan->costs, sizeof(ret->costs));
    snprintf(ret->text, sizeof(ret->text), "%s", plan->text);
}

static void cpu_unload(struct backend *backend, struct plan *plan)
{
    (void)backend;
    plan_free(plan);
}

static int cpu_start(struct backend *backend, unsigned slot, struct batch *batch)
{
    int threads, r;

    if (slot != 0 || backend->ended)
        return -EINVAL;
    threads = onednn_single_thread();
    r = run_batch(batch->plan, backend->pool, batch);
    onednn_restore_threads(threads);
    backend->ended = r == 0;
    return r;
}

static int cpu_poll(struct backend *backend, unsigned slot)
{
    bool ended = backend->ended;

    if (slot != 0)
        return -EINVAL;
    backend->ended = false;
    return ended;
}

const struct backend_ops *backend_cpu(void)
{
    static const struct backend_ops ops = {.abi = BACKEND_ABI,
                                           .name = "cpu",
                                           .open = cpu_open,
                                           .close = cpu_close,
                                           .info = cpu_info,
                                           .load = cpu_load,
                                           .plan_info = cpu_plan_info,
                                           .unload = cpu_unload,
                                           .start = cpu_start,
                                           .poll = cpu_poll};

    return &ops;
}
