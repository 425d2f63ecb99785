/*
 * test_cost.c - what measured times say about the size of a batch
 */
#include "unit.h"

#include "daemon/cost.h"

static struct cost cost;

static void measured(unsigned n, const struct backend_cost *points)
{
    cost_init(&cost, points, n);
}

static void draws_lines(void **state)
{
    static const struct backend_cost points[] = {{4, 100}, {8, 140}, {16, 300}};

    (void)state;
    measured(3, points);
    assert_int_equal(cost_us(&cost, 1), 100);
    assert_int_equal(cost_us(&cost, 4), 100);
    assert_int_equal(cost_us(&cost, 6), 120);
    assert_int_equal(cost_us(&cost, 8), 140);
    assert_int_equal(cost_us(&cost, 12), 220);
    assert_int_equal(cost_us(&cost, 16), 300);
    assert_int_equal(cost_us(&cost, 24), 460);
    measured(1, points);
    assert_int_equal(cost_us(&cost, 2), 100);
    assert_int_equal(cost_us(&cost, 8), 200);
}

static void evens_out_what_cannot_be(void **state)
{
    static const struct backend_cost points[] = {{0, 5}, {4, 100}, {4, 90},
                                                 {2, 3}, {8, 80},  {9, 200}};

    (void)state;
    measured(6, points);
    assert_int_equal(cost.n, 3);
    assert_int_equal(cost.points[0].rows, 4);
    assert_int_equal(cost.points[1].rows, 8);
    assert_int_equal(cost.points[1].us, 100);
    assert_int_equal(cost.points[2].us, 200);
}

static void decides_nothing_unmeasured(void **state)
{
    (void)state;
    measured(0, NULL);
    assert_false(cost_splits(&cost, 64, 1));
    assert_int_equal(cost_limit(&cost, 65), 65);
    assert_int_equal(cost_enough(&cost, 1024), 1024);
}

/* Blocks of 64: a few rows more than whole blocks wait for the next batch. */
static void stops_at_a_block(void **state)
{
    static const struct backend_cost points[] = {{1, 60},    {16, 100},  {64, 200},
                                                 {65, 400},  {128, 400}, {129, 600},
                                                 {192, 600}, {193, 800}, {256, 800}};

    (void)state;
    measured(9, points);
    assert_int_equal(cost_limit(&cost, 64), 64);
    assert_int_equal(cost_limit(&cost, 65), 64);
    assert_int_equal(cost_limit(&cost, 80), 64); /* 200 + 100 instead of 400 */
    assert_int_equal(cost_limit(&cost, 127), 127);
    assert_int_equal(cost_limit(&cost, 128), 128);
    assert_int_equal(cost_limit(&cost, 130), 128);
    assert_int_equal(cost_limit(&cost, 200), 192);
    assert_int_equal(cost_limit(&cost, 256), 256);
    assert_true(cost_splits(&cost, 64, 1));
    assert_true(cost_splits(&cost, 1, 64));
    assert_true(cost_splits(&cost, 32, 33));
    assert_false(cost_splits(&cost, 60, 64)); /* 392 is not clearly less than 400 */
    assert_false(cost_splits(&cost, 64, 0));
    assert_false(cost_splits(&cost, 0, 64));
    assert_int_equal(cost_enough(&cost, 256), 64); /* 3.125 us a row, as 256 */
}

/* What is read once a batch makes every row cheaper, and no part of it worth running alone. */
static void takes_all_where_more_is_cheaper(void **state)
{
    static const struct backend_cost points[] = {{1, 100}, {64, 101}, {256, 110}, {1024, 380}};

    (void)state;
    measured(4, points);
    for (uint64_t rows = 1; rows <= 1024; rows++)
        assert_int_equal(cost_limit(&cost, rows), rows);
    assert_int_equal(cost_enough(&cost, 1024), 1024); /* 0.37 us, and 0.43 at 256 */
    measured(3, points);
    assert_int_equal(cost_enough(&cost, 256), 256);
}

/* By any table: what is proposed is clearly cheaper, and there is nothing to gain from ties. */
static void never_proposes_what_is_dearer(void **state)
{
    unsigned seed = 20261101;

    (void)state;
    for (unsigned round = 0; round < 2000; round++) {
        struct backend_cost points[BACKEND_COSTS_MAX];
        unsigned n = 1 + (unsigned)rand_r(&seed) % BACKEND_COSTS_MAX;
        uint32_t rows = 0, us = 0;

        for (unsigned i = 0; i < n; i++) {
            rows += 1 + (uint32_t)rand_r(&seed) % 40;
            us += (uint32_t)rand_r(&seed) % 500;
            points[i] = (struct backend_cost){rows, us};
        }
        measured(n, points);
        for (unsigned i = 0; i < 50; i++) {
            uint64_t all = 1 + (uint64_t)rand_r(&seed) % 700, first = cost_limit(&cost, all);

            assert_in_range(first, 1, all);
            if (first < all)
                assert_true(cost_us(&cost, first) + cost_us(&cost, all - first) <
                            cost_us(&cost, all));
            assert_true(cost_us(&cost, all) <= cost_us(&cost, all + 1));
            assert_in_range(cost_enough(&cost, (uint32_t)all), 1, all);
        }
    }
}

/* 32 KiB a row each way over 50 GB/s, and a run that is cheap for its rows from 256 on. */
static void cuts_so_that_parts_overlap(void **state)
{
    static const struct backend_cost points[] = {{1, 80},    {64, 86},   {128, 115},
                                                 {256, 186}, {512, 300}, {1024, 600}};
    static const struct backend_cost dear[] = {{1, 500}, {1024, 600}};
    const struct cost_move both = {32768, 32768, 50000000000}, none = {0, 0, 50000000000};
    const struct cost_move down = {768 << 10, 3360 << 10, 0}, up = {32768, 4, 50000000000};

    (void)state;
    measured(6, points);
    assert_int_equal(cost_part(&cost, &both, 1024, 64), 256);
    assert_int_equal(cost_part(&cost, &both, 16, 1), 16); /* not worth it */
    assert_int_equal(cost_part(&cost, &none, 1 << 20, 1), 1 << 20);
    assert_in_range(cost_part(&cost, &up, 1024, 64), 256, 512);
    measured(2, dear);
    assert_int_equal(cost_part(&cost, &both, 512, 64), 512);
    measured(0, NULL);
    assert_in_range(cost_part(&cost, &down, 128, 1), 2, 8);
}

/* When the last part is down: parts follow each other up the link, through the run and down, each
 * way takes one at a time, and the engine thread 25 us for each. A copy takes 5 us to begin. */
static uint64_t pipeline_us(const struct cost_move *move, uint32_t rows, uint32_t part)
{
    uint64_t up_us = 0, run_us = 0, down_us = 0;

    for (uint32_t first = 0, i = 0; first < rows; first += part, i++) {
        uint32_t n = part < rows - first ? part : rows - first;
        double us_per_byte = 1e6 / (double)move->bytes_per_s;

        if (up_us < i * 25)
            up_us = i * 25;
        up_us += 5 + (uint64_t)((double)(move->in_bytes * n) * us_per_byte);
        if (run_us < up_us)
            run_us = up_us;
        run_us += cost_us(&cost, n);
        if (down_us < run_us)
            down_us = run_us;
        down_us += 5 + (uint64_t)((double)(move->out_bytes * n) * us_per_byte);
    }
    return down_us;
}

/* By any table: a multiple of the step, or all; and never later than the whole at once. */
static void never_cuts_to_lose(void **state)
{
    unsigned seed = 20261129, n_cut = 0;

    (void)state;
    for (unsigned round = 0; round < 5000; round++) {
        struct cost_move move = {(uint64_t)rand_r(&seed) % (1 << 20),
                                 (uint64_t)rand_r(&seed) % (1 << 22),
                                 1 + (uint64_t)rand_r(&seed) * 50};
        uint32_t rows = 1 + (uint32_t)rand_r(&seed) % 5000, step = 1u << rand_r(&seed) % 8, part;
        struct backend_cost points[2] = {{1, (uint32_t)rand_r(&seed) % 1000}, {64, 0}};

        points[1].us = points[0].us + (uint32_t)rand_r(&seed) % 1000;
        measured(2, points);
        part = cost_part(&cost, &move, rows, step);
        assert_in_range(part, 1, rows);
        assert_true(part == rows || part % step == 0);
        assert_true((rows + part - 1) / part <= 64);
        n_cut += part < rows;
        if (part < rows && pipeline_us(&move, rows, part) >= pipeline_us(&move, rows, rows))
            fail_msg("%u rows: in parts of %u %llu us, at once %llu us", rows, part,
                     (unsigned long long)pipeline_us(&move, rows, part),
                     (unsigned long long)pipeline_us(&move, rows, rows));
    }
    assert_true(n_cut > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_lines),
        cmocka_unit_test(evens_out_what_cannot_be),
        cmocka_unit_test(decides_nothing_unmeasured),
        cmocka_unit_test(stops_at_a_block),
        cmocka_unit_test(takes_all_where_more_is_cheaper),
        cmocka_unit_test(never_proposes_what_is_dearer),
        cmocka_unit_test(cuts_so_that_parts_overlap),
        cmocka_unit_test(never_cuts_to_lose),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
