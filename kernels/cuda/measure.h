/*
 * measure.h - times of batches, and of the link, for whoever decides how large batches are
 */
#pragma once

#include "kernels/cuda/slot.h"

/* Runs batches of 1, 2, 4 and so on to rows_max rows of noise in device memory on this slot; fills
 * plan->costs. Waits. */
int measure_plan(struct slot *slot, struct plan *plan, struct report *report);

/* The slower way between pinned host memory and the current device. Waits. */
int measure_link(uint64_t *ret_bytes_per_s, struct report *report);
