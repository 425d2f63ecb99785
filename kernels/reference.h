/*
 * reference.h - every stage in plain C: the oracle of every backend
 *
 * One loop nest per stage, no blocking, no fusion, sums in double; nothing here is ever made
 * faster.
 */
#pragma once

#include "pipeline.h"

struct reference_run {
    int64_t rows;
    bool train;
    uint64_t seed, offset;
};

/* One stage, from x to y in their own shapes; with `train`, *offset advances as PyTorch's does.
 * Results are rounded to float32 unless `wide`. -EIO, -ENOMEM. */
int reference_stage(const struct pipeline *pipeline, int i, const struct reference_run *run,
                    uint64_t *offset, const double *x, double *y, bool wide, struct report *report);

/* Stages [0, n_stages), from float32 x to y, whose values are float32 unless `wide`. */
int reference_run(const struct pipeline *pipeline, int n_stages, const struct reference_run *run,
                  const float *x, double *y, bool wide, struct report *report);
