/*
 * chain.h - chains of stages on the CPU backend, for tests
 */
#pragma once

#include "tests/kernels/fixture.h"

#include <inttypes.h>
#include <math.h>

#include "kernels/backend.h"

/* A backend with some number of workers, and one plan on it. */
struct chain {
    struct backend *backend;
    struct plan *plan;
    const struct pipeline *pipeline;
};

static inline void chain_open(const struct pipeline *pipeline, unsigned workers, uint32_t max_rows,
                              struct chain *ret)
{
    struct backend_options options = {.workers = workers};
    const struct backend_ops *cpu = backend_cpu();
    struct chain chain = {.pipeline = pipeline};
    struct report report;

    if (cpu->open(&options, &chain.backend, &report) < 0 ||
        cpu->load(chain.backend, pipeline, max_rows, &chain.plan, &report) < 0)
        fail_msg("%s", report.text);
    *ret = chain;
}

static inline void chain_close(struct chain *chain)
{
    backend_cpu()->unload(chain->backend, chain->plan);
    backend_cpu()->close(chain->backend);
}

static inline size_t chain_in_bytes(const struct pipeline *pipeline)
{
    return (size_t)shape_elements(&pipeline->in) * dtype_size(pipeline->dtype);
}

static inline size_t chain_out_bytes(const struct pipeline *pipeline)
{
    return (size_t)shape_elements(&pipeline->out) * dtype_size(pipeline->dtype);
}

/* A job over plain memory, evaluation. */
static inline struct job chain_job(const struct pipeline *pipeline, const void *x, void *y,
                                   uint32_t rows)
{
    return (struct job){.x = x, .y = y, .rows = rows, .y_size = rows * chain_out_bytes(pipeline)};
}

/* Runs jobs as one batch; each job's result is left in it. */
static inline void chain_batch(const struct chain *chain, struct job *jobs, unsigned n)
{
    struct batch batch = {.plan = chain->plan, .jobs = jobs, .n_jobs = n};

    for (unsigned i = 0; i < n; i++)
        batch.rows += jobs[i].rows;
    assert_int_equal(backend_cpu()->poll(chain->backend, 0), 0);
    assert_int_equal(backend_cpu()->start(chain->backend, 0, &batch), 0);
    assert_int_equal(backend_cpu()->poll(chain->backend, 0), 1);
}

static inline void chain_run(const struct chain *chain, struct job job)
{
    chain_batch(chain, &job, 1);
    assert_int_equal(job.result, 0);
}

static inline void *chain_alloc(size_t size)
{
    void *p = malloc(size ? size : 1);

    assert_non_null(p);
    return p;
}

/* Numbers from a fixed sequence. */
static inline uint32_t chain_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* In [0, n). */
static inline int64_t chain_below(uint64_t *state, int64_t n)
{
    return (int64_t)(chain_random(state) % (uint64_t)n);
}

/* In [-1, 1). */
static inline float chain_uniform(uint64_t *state)
{
    return (float)(int32_t)(chain_random(state) << 1) * 0x1p-31f;
}

/* Rows of the model's dtype. */
static inline void *chain_input(const struct pipeline *pipeline, uint32_t rows, uint64_t *state)
{
    size_t n = rows * (size_t)shape_elements(&pipeline->in);
    float *values = chain_alloc(n * sizeof(*values));
    void *x = chain_alloc(n * dtype_size(pipeline->dtype));

    for (size_t i = 0; i < n; i++)
        values[i] = chain_uniform(state);
    tensor_from_float(pipeline->dtype, values, x, n);
    free(values);
    return x;
}

/* Weights without a pattern: scaled so that sums of products stay near 1. */
static inline float chain_weight(const char *name, int64_t i)
{
    uint64_t state = (uint64_t)i * 0x9E3779B97F4A7C15u;

    for (const char *c = name; *c; c++)
        state = (state ^ (uint8_t)*c) * 1099511628211u;
    chain_random(&state);
    return chain_uniform(&state) * 0.5f + (strchr(name, 'g') ? 1.0f : 0.0f);
}
