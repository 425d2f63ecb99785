/*
 * steps.h - from a pipeline's stages to a plan's steps: shapes alone, nothing is allocated or read
 */
#pragma once

#include "kernels/cuda/plan.h"

struct builder {
    struct plan *plan; /* its dtype, proof, rows_max and in_elements are set */
    const struct pipeline *pipeline;
    int stage; /* next */
    enum buffer at;
    bool wide; /* what lies there is float32 */
    int64_t elements;
    uint64_t loading; /* bytes: the largest weight as float32 */
    struct gemm_shape gemms[MODEL_STAGES_MAX];
    struct linear_norm_min_shape fused[MODEL_STAGES_MAX];
    struct conv_shape convs[MODEL_STAGES_MAX];
    struct conv_norm_shape normed[MODEL_STAGES_MAX];
    int stage_of[2 * MODEL_STAGES_MAX + 4]; /* where a step's weights come from */
    int norm_of[2 * MODEL_STAGES_MAX + 4];  /* and those of its group_norm; -1: none */
    int summand_of[TAILS_MAX][SUMMANDS_MAX];
};

void steps_build(struct builder *b);
