/*
 * measure.c - times of batches, for whoever decides how large they are
 *
 * 1, 2, 4 rows and so on, up to what one batch may have, or as far as the time and memory that a
 * load may take for it allow: what follows, follows from the last two. The first run of each size
 * also touches the plan's memory, so that no client's request does; the faster of the two counts.
 */
#include "measure.h"

#include <stdlib.h>
#include <time.h>

#include "run.h"

#define MEASURE_US 20000
#define BYTES_MAX  ((uint64_t)16 << 20)

static uint64_t now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* 0: it failed. */
static uint64_t measure(struct plan *plan, struct pool *pool, uint32_t rows, void *x, void *y)
{
    uint64_t best = UINT64_MAX;

    for (int i = 0; i < 2; i++) {
        struct job job = {.x = x,
                          .y = y,
                          .y_size = (uint64_t)plan->out_elements * dtype_size(plan->dtype) * rows,
                          .rows = rows};
        struct batch batch = {.plan = plan, .jobs = &job, .n_jobs = 1, .rows = rows};
        uint64_t begin_us = now_us(), us;

        if (run_batch(plan, pool, &batch) < 0 || job.result < 0)
            return 0;
        us = now_us() - begin_us;
        best = us < best ? us : best;
    }
    return best > 0 ? best : 1;
}

unsigned measure_plan(struct plan *plan, struct pool *pool, uint32_t max_rows,
                      struct backend_cost costs[BACKEND_COSTS_MAX])
{
    uint64_t row_in = (uint64_t)plan->in_elements * dtype_size(plan->dtype);
    uint64_t row_out = (uint64_t)plan->out_elements * dtype_size(plan->dtype);
    uint64_t most = BYTES_MAX / (row_in + row_out), end_us = now_us() + MEASURE_US, us = 0;
    void *x, *y;
    unsigned n = 0;

    most = most < max_rows ? most : max_rows;
    x = calloc(most, row_in);
    y = calloc(most, row_out);
    for (uint64_t rows = 1; x && y && rows <= most && n < BACKEND_COSTS_MAX; rows *= 2) {
        if (now_us() + 4 * us > end_us) /* twice, each twice as long as the last */
            break;
        us = measure(plan, pool, (uint32_t)rows, x, y);
        if (us == 0)
            break;
        costs[n++] = (struct backend_cost){(uint32_t)rows, (uint32_t)us};
    }
    free(x);
    free(y);
    return n;
}
