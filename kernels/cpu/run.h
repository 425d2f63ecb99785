/*
 * run.h - runs a batch through a plan
 */
#pragma once

#include "kernels/backend.h"
#include "plan.h"
#include "pool.h"

/* 0 with every job's result filled, or negative errno when the batch failed as a whole. Allocates
 * nothing. One batch of a plan at a time. */
int run_batch(struct plan *plan, struct pool *pool, struct batch *batch);
