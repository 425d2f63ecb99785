/*
 * stats.c - counters and histograms
 *
 * A histogram has values 0 to 7 on their own and then four buckets for each power of two, so that
 * any latency is kept to a quarter of its size in 1.3 KiB, without a unit or range to configure.
 * Values past the last bucket count there; `max` is exact.
 */
#include "stats.h"

static unsigned bucket_of(uint64_t value)
{
    unsigned msb, i;

    if (value < 8)
        return (unsigned)value;
    msb = 63 - (unsigned)__builtin_clzll(value);
    i = 8 + (msb - 3) * 4 + (unsigned)((value >> (msb - 2)) & 3);
    return i < STATS_BUCKETS ? i : STATS_BUCKETS - 1;
}

uint64_t histogram_bound(unsigned i)
{
    unsigned msb;

    if (i < 8)
        return i;
    msb = 3 + (i - 8) / 4;
    return (UINT64_C(1) << msb) + ((UINT64_C(1) << (msb - 2)) * ((i - 8) % 4 + 1)) - 1;
}

void histogram_add(struct histogram *histogram, uint64_t value)
{
    histogram->count++;
    histogram->sum += value;
    if (value > histogram->max)
        histogram->max = value;
    histogram->buckets[bucket_of(value)]++;
}

uint64_t histogram_percentile(const struct histogram *histogram, unsigned percent)
{
    uint64_t seen = 0, wanted = histogram->count / 100 * percent +
                                (histogram->count % 100 * percent + 99) / 100;

    if (histogram->count == 0)
        return 0;
    for (unsigned i = 0; i < STATS_BUCKETS; i++) {
        seen += histogram->buckets[i];
        if (seen >= wanted && seen > 0) {
            uint64_t bound = histogram_bound(i);

            return i + 1 < STATS_BUCKETS && bound < histogram->max ? bound : histogram->max;
        }
    }
    return histogram->max;
}

void stats_batch(struct stats *stats, uint64_t rows, enum batch_reason reason)
{
    stats->batches++;
    stats->closed[reason]++;
    if (rows > stats->batch_rows_max)
        stats->batch_rows_max = rows;
}

void stats_answer(struct stats *stats, enum proto_error error, uint64_t rows, uint64_t queue_us,
                  uint64_t run_us)
{
    stats->requests++;
    if (error != ERR_NONE) {
        stats->errors[(unsigned)error < STATS_ERRORS ? (unsigned)error : ERR_INTERNAL]++;
        return;
    }
    stats->rows += rows;
    histogram_add(&stats->queue_us, queue_us);
    histogram_add(&stats->run_us, run_us);
}
