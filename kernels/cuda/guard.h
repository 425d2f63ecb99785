/*
 * guard.h - a plan with a proof: what the guard lets pass, and the full path for the rest
 */
#pragma once

#include "kernels/cuda/block.h"

/* Enqueues the guard and the fill. */
int guard_begin(struct slot *slot, struct report *report);
/* When that has ended. 1: more was enqueued; 0: the block has ended; or negative. */
int guard_end(struct slot *slot, struct report *report);
