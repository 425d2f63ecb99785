/*
 * plan.h - a pipeline made ready for the CPU: steps, weights, work space
 *
 * A chain is cut at its linears into phases. A linear takes a block of rows at once, because the
 * weights cost more to fetch than the rows. All else takes a row from step to step while it is in
 * the cache.
 *
 *     phase 0              x -> steps ->            in (of the next phase's linear)
 *     phase 1, 2, ...      in -> linear -> out -> steps -> in, ...
 *     the last             ... -> steps -> y, or, before an add that moves the batch, -> sums
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "kernels/backend.h"
#include "kernels/pipeline.h"
#include "outer.h"
#include "pass.h"

/* A stage opens one step at most, and closes a convolution with another. */
#define PLAN_STEPS_MAX (2 * MODEL_STAGES_MAX + 1)

struct conv3d;
struct linear;
struct onednn;

/* Takes a row to a row: a convolution, or a pass. */
struct step {
    struct conv3d *conv; /* NULL: a pass */
    struct pass pass;
    int64_t result; /* floats of the row that it leaves, padding included */
};

struct phase {
    struct linear *linear;         /* NULL in phase 0 */
    int64_t products;              /* rows of the linear per row of the batch */
    int64_t in_floats, out_floats; /* of a row, into and out of the linear */
    float *in, *out;               /* [block_rows, ...] and room for a block of the linear */
    int first_step, n_steps;       /* the last one is a pass */
    int64_t row_floats;            /* of a row as the steps find it */
};

/* What one worker needs for the row that it has in hand. */
struct slot {
    float *row;        /* the row as float32 when it does not come so */
    float *buffers[2]; /* between steps, in turn */
    float *tile;       /* PASS_TILE_SPACE */
    struct scratch scratch;
};

/* A row of the block in work. */
struct row_ref {
    struct job *job;
    uint32_t row;  /* of the job */
    uint8_t state; /* with a proof: enum row_state */
    uint32_t full; /* compact constant: which full sample it is */
};

enum row_state { ROW_CONSTANT, ROW_NAN, ROW_FULL }; /* as in a compact result */

struct plan_dropout {
    double p;
    int64_t elements; /* of a row */
};

struct plan {
    enum dtype dtype;
    bool masks;                        /* a training request is masked */
    int64_t in_elements, out_elements; /* of a row of x, of y */

    int n_phases, n_steps;
    struct phase phases[MODEL_STAGES_MAX + 1];
    struct step steps[PLAN_STEPS_MAX];
    int n_ops, n_dropouts;
    struct pointwise ops[MODEL_STAGES_MAX];
    struct plan_dropout dropouts[MODEL_STAGES_MAX];

    bool moves, compact_sums; /* an add moves the batch; it is the last stage */
    bool constant, nonfinite_spreads;
    float value, bound;
    uint32_t block_rows;
    struct outer outer;
    float *sums;                 /* [block_rows, outer.row] */
    void *pattern, *nan_pattern; /* a tile of the constant, and of NaN, in the model's dtype */

    struct row_ref *refs; /* [block_rows] */
    struct slot *slots;
    unsigned n_slots; /* one a worker */

    unsigned n_costs; /* as measured when it was loaded */
    struct backend_cost costs[BACKEND_COSTS_MAX];
    uint64_t resident_bytes, arena_bytes;
    void *arena; /* all of the work space above */
    size_t arena_size;
    char text[1024];
};

/* With oneDNN kept to one thread by the caller. */
int plan_new(const struct onednn *onednn, unsigned workers, const struct pipeline *pipeline,
             uint32_t max_rows, struct plan **ret, struct report *report);
struct plan *plan_free(struct plan *plan);
/* Passes over memory per block of rows. */
unsigned plan_passes(const struct plan *plan);
