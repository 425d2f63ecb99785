/*
 * cost.h - what a batch of so many rows takes, and what follows for its size: pure logic
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "kernels/backend.h"

/* Ascending rows, times that never fall. None: nothing was measured, and nothing is decided. */
struct cost {
    unsigned n;
    struct backend_cost points[BACKEND_COSTS_MAX];
};

/* Takes over what was measured when the plan was loaded; what contradicts the rules is evened out.
 */
void cost_init(struct cost *cost, const struct backend_cost *points, unsigned n);

/* Between two points on the line through them, and so beyond the last two. At least one point. */
uint64_t cost_us(const struct cost *cost, uint64_t rows);
/* Is it clearly cheaper to run them as two batches? */
bool cost_splits(const struct cost *cost, uint64_t rows, uint64_t more);
/* Of `rows` that wait, how many to run first: all, or so many that they and the rest as a batch of
 * its own are clearly cheaper. */
uint64_t cost_limit(const struct cost *cost, uint64_t rows);
/* What a row moves between host and device, one way and the other, and how fast; 0: not known. */
struct cost_move {
    uint64_t in_bytes, out_bytes, bytes_per_s;
};

/* Into parts of how many rows to cut a request that has the device for itself, so that one part
 * goes up and one comes down while a third runs: a multiple of `step`, or all of it. */
uint32_t cost_part(const struct cost *cost, const struct cost_move *move, uint32_t rows,
                   uint32_t step);
/* The rows from which on waiting for more, up to max_rows, makes none of them much cheaper. */
uint32_t cost_enough(const struct cost *cost, uint32_t max_rows);
