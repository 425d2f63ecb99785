/*
 * outer.c - an add that moves the batch dimension: y[o, r, i] = x[r] + tensor, over (o, i)
 *
 * Written in the order of the result, so that whole lines of memory are filled: for A, [1, C, N,
 * 1], rows are the fast axis, and each o is one run of rows to which one number is added. A request
 * of one row has no axis of rows: its result is one run over (o, i).
 */
#include "outer.h"
#include "loops.h"
#include "pass.h"

#define ITEM 65536 /* elements of an item, more or less */

/* With a single row in the request, everything is behind the rows. */
static int64_t lines(const struct outer *outer, const struct outer_rows *rows)
{
    return rows->total == 1 ? 1 : outer->outer;
}

static int64_t lines_of_item(const struct outer *outer, const struct outer_rows *rows)
{
    int64_t line = rows->n * outer->inner;

    return line >= ITEM ? 1 : ITEM / line;
}

size_t outer_items(const struct outer *outer, const struct outer_rows *rows)
{
    int64_t per_item = lines_of_item(outer, rows);

    return (size_t)((lines(outer, rows) + per_item - 1) / per_item);
}

/* Elements [at, at + n) of the result. `place` counts from the start of the request. */
static void put(const struct outer *outer, const struct outer_rows *rows, int64_t at, int64_t n,
                float *x)
{
    const struct place place = {.dropouts = rows->dropouts};

    pointwise_run(outer->ops, outer->n_ops, &place, at, n, x);
    tensor_from_float(rows->dtype, x, (char *)rows->y + (size_t)at * dtype_size(rows->dtype),
                      (size_t)n);
}

/* Rows side by side: a run of them gets the same element of the tensor. */
static void line_of_rows(const struct outer *outer, const struct outer_rows *rows, int64_t o,
                         float *tile)
{
    const float *x = rows->x + broadcast_at(&outer->x_map, o);
    float value = outer->tensor[broadcast_at(&outer->tensor_map, o)];

    for (int64_t r = 0; r < rows->n; r += PASS_TILE) {
        int64_t n = rows->n - r < PASS_TILE ? rows->n - r : PASS_TILE;

        for (int64_t i = 0; i < n; i++)
            tile[i] = x[(r + i) * outer->row];
        loops_add_scalar(tile, (size_t)n, value);
        put(outer, rows, o * rows->total + rows->first + r, n, tile);
    }
}

/* One row: elements [first, first + inner) of [outer, inner]. */
static void run_of_row(const struct outer *outer, const struct outer_rows *rows, int64_t r,
                       int64_t first, int64_t inner, int64_t at, float *tile)
{
    for (int64_t i = 0; i < inner; i += PASS_TILE) {
        int64_t n = inner - i < PASS_TILE ? inner - i : PASS_TILE;

        broadcast_load(&outer->x_map, rows->x + r * outer->row, first + i, n, tile);
        broadcast_add(&outer->tensor_map, outer->tensor, first + i, n, tile);
        put(outer, rows, at + i, n, tile);
    }
}

void outer_run(const struct outer *outer, size_t item, const struct outer_rows *rows, float *tile)
{
    int64_t per_item = lines_of_item(outer, rows), first = (int64_t)item * per_item;
    int64_t end = first + per_item;

    if (rows->total == 1) {
        run_of_row(outer, rows, 0, 0, outer->outer * outer->inner, 0, tile);
        return;
    }
    end = end < outer->outer ? end : outer->outer;
    for (int64_t o = first; o < end; o++) {
        if (outer->inner == 1) {
            line_of_rows(outer, rows, o, tile);
            continue;
        }
        for (int64_t r = 0; r < rows->n; r++)
            run_of_row(outer, rows, r, o * outer->inner, outer->inner,
                       (o * rows->total + rows->first + r) * outer->inner, tile);
    }
}
