/*
 * pipeline.h - a model's stages, checked against its weights: shapes, parameters, proof
 *
 * The one header, beside backend.h, through which the daemon reaches what is computed. A pipeline
 * is read-only once built; a backend makes a plan of it at load time, and takes from the weights
 * file what the plan needs.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model.h"
#include "report.h"
#include "safetensors.h"
#include "tensor.h"

/* A parameter of a stage: where it lies in the weights file. tensor == NULL: the stage has none. */
struct param {
    const struct st_tensor *tensor;
    int64_t elements;
};

/* One stage with everything known about it. */
struct stage {
    enum stage_op op;
    int line;
    struct shape in, out; /* of one row */
    struct param weight, bias;
    union {
        struct {
            int64_t in_features, out_features;
            int64_t rows; /* products per row: the leading dimensions that are not the batch */
        } linear;
        struct {
            int64_t in_channels, out_channels;
            int64_t kernel[3], stride[3], padding[3];
        } conv3d;
        struct {
            int64_t groups, channels; /* channels per group = channels / groups */
            int64_t spatial;          /* elements per channel */
            double eps;
        } group_norm;
        struct {
            int64_t outer, n, inner; /* a row is [outer, n, inner]; n is reduced */
        } amin;
        struct {
            double value;
        } minimum;
        struct {
            bool has_min, has_max;
            double min, max;
        } clamp;
        struct {
            struct shape
                tensor; /* aligned to `out`: same rank, 1 where it is broadcast; no batch meaning */
            bool moves_batch; /* `out.batch` is not 0 */
        } add;                /* the tensor is `weight` */
        struct {
            double p;
        } dropout;
    };
};

/*
 * What is known before computing (semantics: minimum(x, a) then clamp(a, b) is one number for every
 * x that is not NaN). The proof covers a chain conv3d or linear -> group_norm -> pointwise stages,
 * ending before a first dropout or at the end.
 */
struct proof {
    bool constant;
    float value; /* of every element of a sample whose |x| are all below bound, before dropout and
                    before it is rounded to 16 bits */
    float bound; /* exclusive; compare bits without the sign, so that NaN fails */
    bool nonfinite_spreads; /* a sample with a NaN or Inf is NaN throughout: every input lies in
                               some window */
    int n_stages; /* stages [0, n_stages) are replaced by the constant; what follows is dropout only
                   */
    char text[400]; /* in words, for describe: the proof, or why there is none */
};

struct pipeline {
    enum dtype dtype;
    enum precision precision;
    struct shape in, out;
    int n_stages;
    struct stage stages[MODEL_STAGES_MAX];
    struct proof proof;
    bool outer_sum; /* the last stage is an add that moves the batch: compact returns its input */
    struct safetensors
        *weights; /* owned; open while plans are made; NULL when the model has none, or dropped */
};

/*
 * Checks the stages one after the other by PyTorch's rules. `weights` (NULL when the model names
 * none) is consumed on success. The first stage that does not fit is named with its line and both
 * shapes; a missing tensor, wrong shape or dtype likewise. -EINVAL, -ENOMEM, -EIO.
 */
int pipeline_build(const struct model *model, struct safetensors *weights, struct pipeline **ret,
                   struct report *report);
struct pipeline *pipeline_free(struct pipeline *pipeline);
/* Closes the weights file once every plan is made: parameters have no tensor after that, shapes and
 * proof stay. */
void pipeline_drop_weights(struct pipeline *pipeline);

/* Shapes only, from the sizes that the model file gives (`out`, `kernel`, `shape`): what `fusectl
 * weights` makes random. */
struct weight_shape {
    char name[MODEL_TENSOR_NAME_MAX];
    int rank;
    int64_t dims[TENSOR_RANK_MAX];
    double bound; /* U(-bound, bound): PyTorch's default initial distribution; 0: constant */
    double value; /* of a constant one: gamma 1, beta 0 */
    bool normal;  /* N(0, 1), as an add's tensor made by torch.randn */
};
/* The number of tensors, in the order of the stages; -EINVAL. */
int pipeline_weight_shapes(const struct model *model, struct weight_shape *to, int n_max,
                           struct report *report);

/* Elements [first, first + count) of a parameter as float32. */
int pipeline_param(const struct pipeline *pipeline, const struct param *param, int64_t first,
                   int64_t count, float *to, struct report *report);

/* By how much a training request of that many rows advances the dropout offset. */
uint64_t pipeline_offset_advance(const struct pipeline *pipeline, int64_t rows);
/* True when a training request masks anything (a dropout stage with p > 0). */
bool pipeline_masks(const struct pipeline *pipeline);
