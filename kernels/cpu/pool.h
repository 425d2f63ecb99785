/*
 * pool.h - the threads that compute
 *
 * The thread that calls pool_run() is worker 0; the others are the pool's own. One thread may call
 * pool_run() at a time.
 */
#pragma once

#include <stddef.h>

#include "kernels/report.h"

#define POOL_WORKERS_MAX 256

struct pool;

/* `init` runs once in every thread of the pool's own. workers: at least 1. -ENOMEM, -EAGAIN. */
int pool_new(unsigned workers, void (*init)(void), struct pool **ret, struct report *report);
struct pool *pool_free(struct pool *pool);
unsigned pool_workers(const struct pool *pool);

/* Calls fn(context, worker, item) for every item in [0, n_items), each once, by any worker, and
 * returns when all have returned. n_items is below 2^32 - 1. */
typedef void (*pool_fn)(void *context, unsigned worker, size_t item);
void pool_run(struct pool *pool, size_t n_items, pool_fn fn, void *context);
