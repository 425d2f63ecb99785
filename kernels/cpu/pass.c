/*
 * pass.c - what follows a product, fused: group norm, pointwise stages, amin, in one go over a row
 *
 * A row is worked on in tiles that stay in a near cache: brought into order, normalised, taken
 * through the pointwise stages, then written or reduced. Memory is read once more than that
 * only for statistics. Where these come from depends on the layout:
 *
 *     plain     a group is one run of numbers; its statistics are taken just before its tiles
 *     blocked   channels are interleaved, so all are summed first, in chunks of fixed size
 *
 * Every sum has a fixed order that depends on the plan alone (loops.h), and chunks are added up in
 * order, so the bits of a row do not depend on who computed which item.
 *
 * Moments: M2, the sum of squared deviations, is formed in double and then looked at in float32,
 * because PyTorch forms it there: where it overflows, the variance is infinite and its inverse root
 * zero, and the group gives beta. Then the mean is of no account, and leaving it out keeps
 * x - mean from overflowing to infinity times zero. A group with a NaN or an infinity is NaN.
 */
#include <math.h>
#include <string.h>

#include "pass.h"

#define ITEM   16384 /* elements of an item of a plain row, more or less */
#define PLACES 2048  /* spatial places of an item of a blocked row */

static int64_t least_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t quotient_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t group_size(const struct pass *pass)
{
    return pass->channels / pass->groups * pass->spatial;
}

static int64_t blocks(const struct pass *pass)
{
    return quotient_up(pass->channels, (int64_t)pass->block);
}

static int64_t chunks(const struct pass *pass)
{
    return quotient_up(pass->spatial, PLACES);
}

/* Groups of an item of a plain row, and of a tile. */
static int64_t groups_at_once(const struct pass *pass, int64_t elements)
{
    int64_t n = elements / group_size(pass);

    return n > 0 ? n : 1;
}

int64_t pass_result(const struct pass *pass)
{
    return pass->amin ? pass->outer * pass->inner : pass->elements;
}

struct scratch_sizes pass_scratch(const struct pass *pass)
{
    struct scratch_sizes sizes = {.least = pass->amin ? pass_result(pass) : 0};

    if (pass->norm && pass->block > 1) {
        sizes.sums = chunks(pass) * blocks(pass) * (int64_t)pass->block;
        sizes.groups = pass->groups;
    }
    return sizes;
}

size_t pass_items(const struct pass *pass, enum pass_round round)
{
    bool blocked = pass->block > 1;

    switch (round) {
    case ROUND_SUMS:
        return pass->norm && blocked ? (size_t)(blocks(pass) * chunks(pass)) : 0;
    case ROUND_MOMENTS:
        return pass->norm && blocked;
    case ROUND_APPLY:
        if (blocked)
            return (size_t)(blocks(pass) * chunks(pass));
        if (pass->norm)
            return (size_t)quotient_up(pass->groups, groups_at_once(pass, ITEM));
        return (size_t)quotient_up(pass->elements, ITEM);
    default:
        return pass->amin;
    }
}

bool pass_serial(const struct pass *pass, enum pass_round round)
{
    return pass->amin && round == ROUND_APPLY;
}

static void moments(const struct loops_sums *sums, float shift, int64_t n, double eps,
                    float *ret_mean, float *ret_rstd)
{
    double m2 = sums->square - sums->sum * sums->sum / (double)n;

    m2 = m2 < 0 ? 0 : m2;
    if (!isfinite(sums->square)) {
        *ret_mean = *ret_rstd = NAN;
    } else if (isinf((float)m2)) {
        *ret_mean = *ret_rstd = 0;
    } else {
        *ret_mean = (float)((double)shift + sums->sum / (double)n);
        *ret_rstd = (float)(1 / sqrt(m2 / (double)n + eps));
    }
}

/* Elements [first, first + n) of the row into amin's result. */
static void reduce(const struct pass *pass, float *least, int64_t first, int64_t n, const float *x)
{
    /* A run that ends with the reduced dimension, or with the inner one. */
    int64_t run = pass->inner == 1 ? pass->n : pass->inner;

    while (n > 0) {
        int64_t part = least_of(run - first % run, n);

        if (pass->inner == 1) {
            float lowest = loops_amin(x, (size_t)part);

            loops_amin_rows(&least[first / run], &lowest, 1);
        } else {
            int64_t at = first / (pass->n * pass->inner) * pass->inner + first % run;

            loops_amin_rows(&least[at], x, (size_t)part);
        }
        first += part;
        x += part;
        n -= part;
    }
}

static void store(const struct pass_row *row, int64_t first, int64_t n, const float *x)
{
    if (row->dtype == DTYPE_FLOAT32 && row->stream)
        loops_stream(x, (float *)row->y + first, (size_t)n);
    else
        tensor_from_float(row->dtype, x, (char *)row->y + (size_t)first * dtype_size(row->dtype),
                          (size_t)n);
}

/* What is left to do with a tile: elements [first, first + n) of the row, normalised. */
static void finish(const struct pass *pass, const struct pass_row *row, int64_t first, int64_t n,
                   float *x)
{
    pointwise_run(pass->ops, pass->n_ops, &row->place, first, n, x);
    if (pass->amin)
        reduce(pass, row->scratch->least, first, n, x);
    else
        store(row, first, n, x);
}

/* Elements [first, first + n), all of one group. */
static void normalise(const struct pass *pass, const float *x, float *y, int64_t first, int64_t n,
                      float mean, float rstd)
{
    int64_t c = first / pass->spatial;

    if (pass->spatial == 1) {
        loops_affine_rows(x, y, (size_t)n, mean, rstd, pass->gamma + c, pass->beta + c);
        return;
    }
    for (int64_t done = 0; done < n; c++) {
        int64_t part = least_of((c + 1) * pass->spatial - first - done, n - done);

        loops_affine(x + done, y + done, (size_t)part, mean, rstd * pass->gamma[c], pass->beta[c]);
        done += part;
    }
}

/* Groups [group, end), each with its statistics first. */
static void apply_groups(const struct pass *pass, const struct pass_row *row, int64_t group,
                         int64_t end, float *tile)
{
    int64_t size = group_size(pass), at_once = groups_at_once(pass, PASS_TILE);
    struct loops_sums sums;
    float mean, rstd;

    while (group < end) {
        int64_t next = least_of(group + at_once, end), first = group * size;

        if (size > PASS_TILE) {
            loops_sums(row->x + first, (size_t)size, row->x[first], &sums);
            moments(&sums, row->x[first], size, pass->eps, &mean, &rstd);
            for (int64_t i = first; i < next * size; i += PASS_TILE) {
                int64_t n = least_of(PASS_TILE, next * size - i);

                normalise(pass, row->x + i, tile, i, n, mean, rstd);
                finish(pass, row, i, n, tile);
            }
        } else {
            for (int64_t i = first; i < next * size; i += size) {
                loops_sums(row->x + i, (size_t)size, row->x[i], &sums);
                moments(&sums, row->x[i], size, pass->eps, &mean, &rstd);
                normalise(pass, row->x + i, tile + (i - first), i, size, mean, rstd);
            }
            finish(pass, row, first, (next - group) * size, tile);
        }
        group = next;
    }
}

static void apply_plain(const struct pass *pass, const struct pass_row *row, size_t item,
                        float *tile)
{
    int64_t first = (int64_t)item * ITEM, end = least_of(first + ITEM, pass->elements);

    for (; first < end; first += PASS_TILE) {
        int64_t n = least_of(PASS_TILE, end - first);

        if (pass->grows)
            broadcast_load(&pass->map, row->x, first, n, tile);
        else
            memcpy(tile, row->x + first, (size_t)n * sizeof(*tile));
        finish(pass, row, first, n, tile);
    }
}

/* Where a channel of a blocked row begins. */
static int64_t channel_at(const struct pass *pass, int64_t c)
{
    int64_t block = (int64_t)pass->block;

    return c / block * block * pass->spatial + c % block;
}

/* The first element of a channel's group: near its data, for every channel of it the same. */
static float group_shift(const struct pass *pass, const float *x, int64_t c)
{
    int64_t per_group = pass->channels / pass->groups;

    return x[channel_at(pass, c / per_group * per_group)];
}

static void sum_blocked(const struct pass *pass, const struct pass_row *row, int64_t block,
                        int64_t chunk)
{
    int64_t first = chunk * PLACES, n = least_of(PLACES, pass->spatial - first);
    int64_t width = (int64_t)pass->block, c = block * width;
    float shifts[LOOPS_BLOCK_MAX] = {0};

    for (int64_t i = 0; i < width && c + i < pass->channels; i++)
        shifts[i] = group_shift(pass, row->x, c + i);
    loops_sums_blocked(row->x + (block * pass->spatial + first) * width, (size_t)n, pass->block,
                       shifts, row->scratch->sums + chunk * blocks(pass) * width + c);
}

static void moments_blocked(const struct pass *pass, const struct pass_row *row)
{
    int64_t per_group = pass->channels / pass->groups;
    int64_t stride = blocks(pass) * (int64_t)pass->block;

    for (int64_t g = 0; g < pass->groups; g++) {
        struct loops_sums sums = {0};

        for (int64_t chunk = 0; chunk < chunks(pass); chunk++)
            for (int64_t c = g * per_group; c < (g + 1) * per_group; c++) {
                sums.sum += row->scratch->sums[chunk * stride + c].sum;
                sums.square += row->scratch->sums[chunk * stride + c].square;
            }
        moments(&sums, group_shift(pass, row->x, g * per_group), group_size(pass), pass->eps,
                &row->scratch->mean[g], &row->scratch->rstd[g]);
    }
}

static void apply_blocked(const struct pass *pass, const struct pass_row *row, int64_t block,
                          int64_t chunk, float *tile)
{
    int64_t per_group = pass->norm ? pass->channels / pass->groups : 1;
    int64_t width = (int64_t)pass->block;
    int64_t first = chunk * PLACES, end = least_of(first + PLACES, pass->spatial);

    for (; first < end; first += PASS_TILE_ROWS) {
        int64_t n = least_of(PASS_TILE_ROWS, end - first);

        loops_unblock(row->x + (block * pass->spatial + first) * width, (size_t)n, pass->block,
                      tile, PASS_TILE_LD);
        for (int64_t i = 0; i < width; i++) {
            int64_t c = block * width + i, g = c / per_group;
            float *x = tile + i * PASS_TILE_LD;

            if (c == pass->channels)
                break;
            if (pass->norm)
                loops_affine(x, x, (size_t)n, row->scratch->mean[g],
                             row->scratch->rstd[g] * pass->gamma[c], pass->beta[c]);
            finish(pass, row, c * pass->spatial + first, n, x);
        }
    }
}

void pass_run(const struct pass *pass, enum pass_round round, size_t item,
              const struct pass_row *row, float *tile)
{
    switch (round) {
    case ROUND_SUMS:
        sum_blocked(pass, row, (int64_t)item / chunks(pass), (int64_t)item % chunks(pass));
        break;
    case ROUND_MOMENTS:
        moments_blocked(pass, row);
        break;
    case ROUND_APPLY:
        if (pass->amin && item == 0)
            loops_fill(row->scratch->least, (size_t)pass_result(pass), INFINITY);
        if (pass->block > 1) {
            apply_blocked(pass, row, (int64_t)item / chunks(pass), (int64_t)item % chunks(pass),
                          tile);
        } else if (pass->norm) {
            int64_t n = groups_at_once(pass, ITEM);

            apply_groups(pass, row, (int64_t)item * n,
                         least_of(((int64_t)item + 1) * n, pass->groups), tile);
        } else {
            apply_plain(pass, row, item, tile);
        }
        if (row->stream)
            loops_stream_end();
        break;
    default:
        store(row, 0, pass_result(pass), row->scratch->least);
    }
}

void pass_run_all(const struct pass *pass, const struct pass_row *row, float *tile)
{
    for (enum pass_round round = 0; round < ROUND_COUNT; round++) {
        size_t n_items = pass_items(pass, round);

        for (size_t item = 0; item < n_items; item++)
            pass_run(pass, round, item, row, tile);
    }
}
