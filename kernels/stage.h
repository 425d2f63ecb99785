/*
 * stage.h - the table of stages: what each accepts, what it makes of a shape, which tensors it has
 *
 * Used by model.c and pipeline.c only; a stage is added by one row in stage.c. What a stage
 * computes is written in reference.c and in the backends.
 */
#pragma once

#include "conf.h"
#include "model.h"
#include "pipeline.h"
#include "report.h"
#include "safetensors.h"

/* -1 when there is no such stage. */
int stage_op_parse(const char *name);
/* The names of all, for a message; cut if size does not do. */
void stage_op_list(char *to, size_t size);

/* Reads the keys of one entry of `stages`. Errors stick in the file. */
void stage_parse(enum stage_op op, struct conf_group *group, struct stage_spec *ret);

/* The tensor that becomes the stage's `weight` parameter; empty when it takes none. */
const char *stage_weight_name(const struct stage_spec *spec);

/*
 * Checks a stage against the shape that flows in. Its own size (outputs, kernel, the shape that is
 * added) is that of its weight, `tensor`; without one (NULL) what the model file says. Fills
 * everything but the parameters, whose names and shapes come in ret_weight and ret_bias (an empty
 * name: none). -EINVAL, with the words that follow "file:line: op: ".
 */
int stage_build(const struct stage_spec *spec, const struct shape *in,
                const struct st_tensor *tensor, struct stage *ret, struct weight_shape *ret_weight,
                struct weight_shape *ret_bias, struct report *report);
