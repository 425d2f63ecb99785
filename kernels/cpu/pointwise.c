/*
 * pointwise.c - stages that take one element to one element, run together on a tile in the cache
 *
 * Each is a loop of its own over the tile. Merging them would save loads and stores of the first
 * level cache only, and make one loop out of every combination.
 */
#include "pointwise.h"
#include "loops.h"

void pointwise_run(const struct pointwise *ops, int n_ops, const struct place *place, int64_t first,
                   int64_t n, float *x)
{
    for (int i = 0; i < n_ops; i++) {
        const struct pointwise *op = &ops[i];

        switch (op->op) {
        case OP_ADD:
            broadcast_add(&op->map, op->tensor, first, n, x);
            break;
        case OP_DROPOUT:
            if (place->dropouts)
                dropout_apply(&place->dropouts[op->dropout], place->first + first, n, x);
            break;
        default:
            if (op->has_min)
                loops_maximum(x, (size_t)n, op->min);
            if (op->has_max)
                loops_minimum(x, (size_t)n, op->max);
        }
    }
}
