/*
 * cost.c - batch sizes from measured times
 *
 * A device pads: 65 rows may take as long as 128, and it is cheaper then to run 64 now and the one
 * with whoever comes next. Elsewhere a row costs the same from some size on, and waiting for a
 * larger batch only delays. Which it is, the backend measured when it loaded the plan.
 *
 * Measured times are noisy, so a decision takes a clear difference.
 *
 * A request alone on a device waits for three things one after the other: its way up, its run, its
 * way down. In parts they overlap, but small parts run less efficiently, and each takes a while to
 * start. Where others wait, they overlap with those, and whole requests move the most.
 */
#include "cost.h"

#define CLEARLY(us) ((us) - (us) / 16) /* what is below saves enough to be believed */
#define MUCH        10                 /* percent that a row may cost above the best */

#define BYTES_PER_S UINT64_C(50000000000) /* of a link that nobody measured */
#define WORTH_US    20                    /* on the link: what is shorter is not cut */
#define COPY_US     5                     /* until a copy begins */
#define START_US    25                    /* of the engine thread, for each part */
#define PARTS_MAX   64

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

static uint64_t move_us(const struct cost_move *move, uint64_t row_bytes, uint64_t rows)
{
    uint64_t bytes_per_s = move->bytes_per_s > 0 ? move->bytes_per_s : BYTES_PER_S;

    return (uint64_t)((double)row_bytes * (double)rows * 1e6 / (double)bytes_per_s);
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* When the last of equal parts is down: the slowest of the three ways sets the pace. */
static uint64_t finish_us(const struct cost *cost, const struct cost_move *move, uint32_t rows,
                          uint32_t part)
{
    uint64_t n = ((uint64_t)rows + part - 1) / part;
    uint64_t up_us = COPY_US + move_us(move, move->in_bytes, part);
    uint64_t down_us = COPY_US + move_us(move, move->out_bytes, part);
    uint64_t run_us = cost->n > 0 ? cost_us(cost, part) : 0;
    uint64_t pace_us = larger(larger(up_us, down_us), larger(run_us, START_US));

    return up_us + run_us + down_us + (n - 1) * pace_us;
}

uint32_t cost_part(const struct cost *cost, const struct cost_move *move, uint32_t rows,
                   uint32_t step)
{
    uint64_t best_us = finish_us(cost, move, rows, rows);
    uint32_t best = rows;

    if (larger(move_us(move, move->in_bytes, rows), move_us(move, move->out_bytes, rows)) <
        WORTH_US)
        return rows;
    for (uint32_t n = 2; n <= PARTS_MAX; n++) {
        uint64_t part = ((uint64_t)rows + n - 1) / n, us;

        part = (part + step - 1) / step * step;
        if (part >= best) /* no other than the last one */
            continue;
        us = finish_us(cost, move, rows, (uint32_t)part);
        if (us >= best_us)
            continue;
        best_us = us;
        best = (uint32_t)part;
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
