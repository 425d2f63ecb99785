/*
 * measure.h - what batches of a fresh plan take
 */
#pragma once

#include "kernels/backend.h"
#include "plan.h"
#include "pool.h"

/* Runs batches of zeros, each size twice, for some milliseconds. Nothing else runs the plan or the
 * pool. Returns how many sizes were measured: none where memory is short. */
unsigned measure_plan(struct plan *plan, struct pool *pool, uint32_t max_rows,
                      struct backend_cost costs[BACKEND_COSTS_MAX]);
