/*
 * engine.h - the thread that runs batches on a backend
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include <uv.h>

#include "batch.h"
#include "kernels/backend.h"

#define ENGINE_JOBS_MAX 1024 /* requests of one batch */

/* A batch on its way. The loop thread fills batch, jobs and owners between take and submit, and
 * reads everything after engine_done(). */
struct engine_batch {
    TAILQ_ENTRY(engine_batch) link;
    struct batch batch;
    struct job jobs[ENGINE_JOBS_MAX];
    void *owners[ENGINE_JOBS_MAX]; /* the request of each job */
    void *version;                 /* whose plan it is */
    enum batch_reason reason;      /* why it took no more */
    unsigned slot;
    bool busy;
    int result;        /* 0, or why the whole batch failed */
    struct report why; /* the same in words, where the backend has them */
    uint64_t submitted_us;
    uint64_t started_us; /* 0: not yet; the loop looks at it while it runs */
    uint64_t ended_us;
};

struct engine;

/* Has this process fewer cores than threads that a request passes through: client, loop, engines,
 * and the one that sends (post.h)? Then nobody looks for work without sleeping: those it waits for
 * could not run.
 */
bool engine_has_few_cores(unsigned n_engines);

/* Starts the thread, one of `n_engines`. `done` is called on the loop thread when at least one
 * batch has ended. */
int engine_new(uv_loop_t *loop, const struct backend_ops *ops, struct backend *backend,
               unsigned slots, unsigned n_engines, unsigned spin_us, void (*done)(void *context),
               void *context, struct engine **ret);
/* Ends the thread; nothing is in flight. The engine is freed from the loop. NULL is fine. */
struct engine *engine_free(struct engine *engine);

/* The loop thread's side. A batch of a free slot, or NULL when all are busy. */
struct engine_batch *engine_take(struct engine *engine);
void engine_submit(struct engine *engine, struct engine_batch *batch);
/* The next batch that has ended, or NULL. It stays the loop's until engine_release(). Where there
 * are more, `done` is called again in the next turn of the loop. */
struct engine_batch *engine_done(struct engine *engine);
void engine_release(struct engine *engine, struct engine_batch *batch);
/* Batches submitted and not released; the i-th of them for looking at, NULL when that slot is free.
 */
unsigned engine_in_flight(const struct engine *engine);
struct engine_batch *engine_slot(struct engine *engine, unsigned i);
/* When the oldest of them was started: one that waits behind another has no age, but one that could
 * have been started has. UINT64_MAX when there is none. */
uint64_t engine_oldest_us(const struct engine *engine);
