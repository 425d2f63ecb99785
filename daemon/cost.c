/*
 * cost.c - batch sizes from measured times
 *
 * A device pads: 65 rows may take as long as 128, and it is cheaper then to run 64 now and the one
 * with whoever comes next. Elsewhere a row costs the same from some size on, and waiting for a
 * larger batch only delays. Which it is, the backend measured when it loaded the plan.
 *
 * Measured times are noisy, so a decision takes a clear difference.
 */
#include "cost.h"

#define CLEARLY(us) ((us) - (us) / 16) /* what is below saves enough to be believed */
#define MUCH        10                 /* percent that a row may cost above the best */

void cost_init(struct cost *cost, const struct backend_cost *points, unsigned n)
{
    cost->n = 0;
    for (unsigned i = 0; i < n && i < BACKEND_COSTS_MAX; i++) {
        const struct backend_cost *last = cost->n > 0 ? &cost->points[cost->n - 1] : NULL;

        if (points[i].rows == 0 || (last && points[i].rows <= last->rows))
            continue;
        cost->points[cost->n] = points[i];
        if (last && points[i].us < last->us)
            cost->points[cost->n].us = last->us;
        cost->n++;
    }
}

uint64_t cost_us(const struct cost *cost, uint64_t rows)
{
    const struct backend_cost *a, *b;
    unsigned i = 0;

    while (i < cost->n - 1 && cost->points[i].rows < rows)
        i++;
    b = &cost->points[i];
    if (rows <= b->rows && i == 0)
        return b->us;
    if (i == 0)
        return b->us * rows / b->rows;
    a = &cost->points[i - 1];
    return a->us + (b->us - a->us) * (rows - a->rows) / (b->rows - a->rows);
}

bool cost_splits(const struct cost *cost, uint64_t rows, uint64_t more)
{
    uint64_t together_us;

    if (cost->n == 0 || rows == 0 || more == 0)
        return false;
    together_us = cost_us(cost, rows + more);
    return cost_us(cost, rows) + cost_us(cost, more) < CLEARLY(together_us);
}

uint64_t cost_limit(const struct cost *cost, uint64_t rows)
{
    uint64_t best = rows, best_us = UINT64_MAX;

    for (unsigned i = cost->n; i-- > 0;) {
        uint64_t first = cost->points[i].rows, us;

        if (first >= rows || !cost_splits(cost, first, rows - first))
            continue;
        us = cost_us(cost, first) + cost_us(cost, rows - first);
        if (us < best_us) {
            best_us = us;
            best = first;
        }
    }
    return best;
}

uint32_t cost_enough(const struct cost *cost, uint32_t max_rows)
{
    double best = 0;

    if (cost->n == 0)
        return max_rows;
    best = (double)cost_us(cost, max_rows) / max_rows;
    for (unsigned i = 0; i < cost->n; i++) {
        double each = (double)cost->points[i].us / cost->points[i].rows;

        if (cost->points[i].rows < max_rows && each < best)
            best = each;
    }
    for (unsigned i = 0; i < cost->n && cost->points[i].rows < max_rows; i++) {
        if ((double)cost->points[i].us / cost->points[i].rows <= best * (100 + MUCH) / 100)
            return cost->points[i].rows;
    }
    return max_rows;
}
