/*
 * conv3d.h - one sample's convolution, in the layout that oneDNN is fast in
 *
 * Made in two steps like linear.h. The result's channels lie in blocks of conv3d_block() (1, 8 or
 * 16) interleaved channels: [blocks, D H W, block], the last block padded. The next pass brings
 * them into order.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/pipeline.h"
#include "kernels/report.h"

struct onednn;
struct conv3d;

/* `slots`: samples that may be computed at a time. */
int conv3d_new(const struct onednn *onednn, const struct stage *stage, unsigned slots,
               struct conv3d **ret, struct report *report);
struct conv3d *conv3d_free(struct conv3d *conv);
uint64_t conv3d_resident_bytes(const struct conv3d *conv);
uint64_t conv3d_arena_bytes(const struct conv3d *conv);
size_t conv3d_block(const struct conv3d *conv);
/* Floats that a result takes. */
int64_t conv3d_result(const struct conv3d *conv);
int conv3d_load(struct conv3d *conv, const struct pipeline *pipeline, struct report *report);
void conv3d_print(const struct conv3d *conv, char *text, size_t size);

/* x [C, D, H, W] to y. A slot's y is best always the same. */
int conv3d_run(struct conv3d *conv, unsigned worker, unsigned slot, const float *x, float *y);
