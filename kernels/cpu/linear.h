/*
 * linear.h - y = x W^T + b for any number of rows, each row's bits the same wherever it stands
 *
 * Made in two steps, so that the memory is known before it is taken: linear_new() chooses, then
 * linear_load() allocates and reads the weights. linear_run() does one item; items may run in
 * parallel, one at a time per worker.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/pipeline.h"
#include "kernels/report.h"

/* x and y must have room for a multiple of this many rows. */
#define LINEAR_ROWS_MAX 48

struct onednn;
struct linear;

int linear_new(const struct onednn *onednn, const struct stage *stage, unsigned workers,
               struct linear **ret, struct report *report);
struct linear *linear_free(struct linear *linear);
uint64_t linear_resident_bytes(const struct linear *linear);
uint64_t linear_arena_bytes(const struct linear *linear);
int linear_load(struct linear *linear, const struct pipeline *pipeline, struct report *report);
/* Sizes and choices in words, once loaded. */
void linear_print(const struct linear *linear, char *text, size_t size);

/* For `rows` rows of x [rows, K], y [rows, N]. */
size_t linear_items(const struct linear *linear, int64_t rows);
int linear_run(struct linear *linear, unsigned worker, size_t item, int64_t rows, const float *x,
               float *y);
