/*
 * reference.h - every stage in plain C: the oracle of every backend
 *
 * One loop nest per stage, no blocking, no fusion, sums in double; nothing here is ever made
 * faster.
 */
#pragma once

#include "pipeline.h"

/* Runs stages [0, n_stages) on `rows` rows. x and y are float32. With `wide`, values between stages
 * stay double. */
struct reference_run {
    int64_t rows;
    bool train;
    uint64_t seed, offset;
};
int reference_stage(const struct pipeline *pipeline, int i, const struct reference_run *run,
                    uint64_t *offset, const double *x, double *y, bool wide, struct report *report);
int reference_run(const struct pipeline *pipeline, int n_stages, const struct reference_run *run,
                  const float *x, double *y, bool wide, struct report *report);
