/*
 * guard.h - a plan with a proof: what the guard lets pass, and the full path for the rest
 */
#pragma once

#include "kernels/cuda/block.h"

/* Enqueues the guard and the fill. The slot's flag gets the value when the guard has ended. */
int guard_begin(struct slot *slot, uint32_t value, struct report *report);
/* When it has, while the fill may run. 1: more was enqueued; 0: nothing follows the fill; or
 * negative. */
int guard_end(struct slot *slot, struct report *report);
