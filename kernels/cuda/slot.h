/*
 * slot.h - a batch in flight: its stream, its pinned memory, where it stands
 */
#pragma once

#include "kernels/cuda/plan.h"

struct slot;

/* `index` is the slot's number: which of a plan's arenas it uses. */
int slot_new(int device, unsigned index, struct slot **ret, struct report *report);
struct slot *slot_free(struct slot *slot);

/* As backend.h says of start and poll. */
int slot_start(struct slot *slot, struct plan *plan, struct batch *batch, struct report *report);
int slot_poll(struct slot *slot, struct report *report);

/* Runs batches of 1 and rows_max rows of zeros on this slot, every path, so that all kernels are
 * loaded. Waits. */
int slot_warm(struct slot *slot, struct plan *plan, struct report *report);
