/*
 * stats.h - what was answered, how often, how fast
 */
#pragma once

#include <stdint.h>

#include "batch.h"
#include "proto/proto.h"

#define STATS_ERRORS 16 /* highest error number + 1 */

/* Four buckets an octave: a bucket's bounds lie within 25 % of each other. */
#define STATS_BUCKETS 160

struct histogram {
    uint64_t count, sum, max;
    uint64_t buckets[STATS_BUCKETS];
};

struct stats {
    uint64_t requests, rows, batches, batch_rows_max;
    uint64_t closed[BATCH_REASONS]; /* batches, by why they took no more */
    uint64_t errors[STATS_ERRORS];  /* by error number */
    struct histogram queue_us, run_us;
};

void histogram_add(struct histogram *histogram, uint64_t value);
/* The largest value that falls into bucket i. */
uint64_t histogram_bound(unsigned i);
/* A bound that `percent` of all values do not pass; 0 when there are none. */
uint64_t histogram_percentile(const struct histogram *histogram, unsigned percent);

/* A batch has ended. */
void stats_batch(struct stats *stats, uint64_t rows, enum batch_reason reason);
/* A request has its answer. */
void stats_answer(struct stats *stats, enum proto_error error, uint64_t rows, uint64_t queue_us,
                  uint64_t run_us);
