/*
 * graph.h - blocks that are launched alike, as CUDA graphs
 */
#pragma once

#include "kernels/cuda/block.h"

/* Device bytes that its graphs may take, at most. */
uint64_t graph_bytes(const struct plan *plan);

/* The plan's ranges, once its steps are ready; none where launches depend on more than rows. */
void graph_ranges(struct plan *plan);
/* The range of a block with so many rows; NULL where there is no graph. */
const struct range *graph_range(const struct slot *slot, int64_t rows);

/*
 * Captures every range for the slot `of`, which may be at work, on the stream and in the tables of
 * another, which is idle and can start no more batches of this plan. Waits.
 */
int graph_capture(struct slot *slot, const struct slot *of, struct plan *plan,
                  struct report *report);
void graph_free(struct arena *arena);

/* The whole of slot->block, which is in a range and whose tables are full, flag and all. */
int graph_launch(struct slot *slot, struct report *report);
