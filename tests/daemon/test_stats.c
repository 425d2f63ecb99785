/*
 * test_stats.c - histograms and counters
 */
#include "unit.h"

#include "daemon/stats.h"

static void bounds_every_value(void **state)
{
    static const uint64_t values[] = {0,  1,   7,    8,     9,      10,      15,
                                      16, 100, 1000, 12345, 999999, 1u << 31};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(values); i++) {
        struct histogram h = {0};
        unsigned bucket = 0;

        histogram_add(&h, values[i]);
        while (h.buckets[bucket] == 0)
            bucket++;
        assert_true(histogram_bound(bucket) >= values[i]);
        assert_true(bucket == 0 || histogram_bound(bucket - 1) < values[i]);
        /* no bound is more than a quarter off */
        assert_true(histogram_bound(bucket) - values[i] <= values[i] / 4);
        assert_int_equal(histogram_percentile(&h, 50), values[i]);
        assert_int_equal(h.max, values[i]);
    }
    for (unsigned i = 1; i < STATS_BUCKETS; i++)
        assert_true(histogram_bound(i) > histogram_bound(i - 1));
}

static void keeps_the_largest(void **state)
{
    struct histogram h = {0};

    (void)state;
    assert_int_equal(histogram_percentile(&h, 99), 0);
    histogram_add(&h, UINT64_MAX);
    assert_int_equal(h.buckets[STATS_BUCKETS - 1], 1);
    assert_true(histogram_percentile(&h, 50) == UINT64_MAX);
}

static void finds_percentiles(void **state)
{
    struct histogram h = {0};
    uint64_t p50, p99;

    (void)state;
    for (uint64_t i = 1; i <= 1000; i++)
        histogram_add(&h, i);
    p50 = histogram_percentile(&h, 50);
    p99 = histogram_percentile(&h, 99);
    assert_in_range(p50, 500, 625);
    assert_in_range(p99, 990, 1000);
    assert_int_equal(h.sum, 500500);
    assert_int_equal(h.count, 1000);
}

static void counts_answers(void **state)
{
    struct stats stats = {0};

    (void)state;
    stats_batch(&stats, 12, BATCH_FULL);
    stats_batch(&stats, 5, BATCH_DELAY);
    stats_answer(&stats, ERR_NONE, 12, 10, 20);
    stats_answer(&stats, ERR_DEADLINE, 5, 0, 0);
    stats_answer(&stats, ERR_INTERNAL, 5, 0, 0);
    assert_int_equal(stats.batches, 2);
    assert_int_equal(stats.closed[BATCH_FULL], 1);
    assert_int_equal(stats.closed[BATCH_DELAY], 1);
    assert_int_equal(stats.closed[BATCH_IDLE], 0);
    assert_int_equal(stats.batch_rows_max, 12);
    assert_int_equal(stats.requests, 3);
    assert_int_equal(stats.rows, 12);
    assert_int_equal(stats.errors[ERR_DEADLINE], 1);
    assert_int_equal(stats.errors[ERR_INTERNAL], 1);
    assert_int_equal(stats.queue_us.count, 1);
    assert_int_equal(stats.run_us.sum, 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounds_every_value),
        cmocka_unit_test(keeps_the_largest),
        cmocka_unit_test(finds_percentiles),
        cmocka_unit_test(counts_answers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
