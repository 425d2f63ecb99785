/*
 * model.c - a model file, parsed but not yet checked against its weights
 *
 * Everything that can be said without opening the weights is said here, with the line it is about:
 * unknown keys, wrong types, values out of range, names that could not be what they should be.
 * Whether the stages fit each other is pipeline.c's.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "model.h"
#include "stage.h"

#define MAX_ROWS_MAX     (1 << 20)
#define MAX_DELAY_US_MAX 1000000
#define QUEUE_ROWS_MAX   (1 << 30)

static void parse_name(struct conf_group *root, struct model *model)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    const char *name = conf_string(root, "name", NULL);

    if (!name)
        conf_missing(root, "name");
    else if (name[0] == 0 || strlen(name) > MODEL_NAME_MAX)
        conf_error(root, "name", "has 1 to %d characters", MODEL_NAME_MAX);
    else if (name[0] == '.' || name[strspn(name, allowed)])
        conf_error(root, "name", "may hold letters, digits, '.', '_' and '-' only, no '.' first");
    else
        snprintf(model->name, sizeof(model->name), "%s", name);
}

static void parse_weights(struct conf_group *root, struct model *model)
{
    const char *weights = conf_string(root, "weights", "");

    if (strlen(weights) >= sizeof(model->weights))
        conf_error(root, "weights", "is longer than %zu bytes", sizeof(model->weights) - 1);
    else if (weights[0] == 0 && conf_has(root, "weights"))
        conf_error(root, "weights", "must not be empty");
    else
        snprintf(model->weights, sizeof(model->weights), "%s", weights);
}

static void parse_numbers(struct conf_group *root, struct model *model)
{
    const char *dtype = conf_string(root, "dtype", "float32");
    const char *precision = conf_string(root, "precision", "fp32");

    model->dtype = dtype_parse(dtype);
    if (!model->dtype)
        conf_error(root, "dtype", "'%s' is none of float32, float16, bfloat16", dtype);
    if (strcmp(precision, "tf32") == 0)
        model->precision = PRECISION_TF32;
    else if (strcmp(precision, "fp32") == 0)
        model->precision = PRECISION_FP32;
    else
        conf_error(root, "precision", "'%s' is none of fp32, tf32", precision);
    if (model->precision == PRECISION_TF32 && model->dtype != DTYPE_FLOAT32)
        conf_error(root, "precision", "tf32 is for float32 models");
    model->prove = conf_bool(root, "prove", true);
}

static void parse_input(struct conf_group *root, struct model *model)
{
    struct conf_group *input = conf_group(root, "input");
    int64_t elements = 1;
    int n;

    if (!input) {
        conf_missing(root, "input");
        return;
    }
    n = conf_ints(input, "shape", 1, TENSOR_ELEMENTS_MAX, model->input.dims + 1,
                  TENSOR_RANK_MAX - 1);
    if (n < 1) {
        conf_error(input, "shape", n < 0 ? "is missing" : "must not be empty");
        return;
    }
    model->input.rank = (int8_t)(n + 1);
    model->input.dims[0] = 1;
    for (int i = 1; i <= n; i++)
        if (__builtin_mul_overflow(elements, model->input.dims[i], &elements) ||
            elements > TENSOR_ELEMENTS_MAX) {
            conf_error(input, "shape", "has too many elements");
            return;
        }
}

static void parse_stages(struct conf_group *root, struct model *model)
{
    struct conf_group *group;
    char ops[128];

    for (; (group = conf_group_at(root, "stages", model->n_stages)); model->n_stages++) {
        const char *name = conf_string(group, "op", NULL);
        int op;

        if (!name) {
            conf_error(group, "op", "is missing");
            return;
        }
        op = stage_op_parse(name);
        if (op < 0) {
            stage_op_list(ops, sizeof(ops));
            conf_error(group, "op", "there is no stage '%s'; there are %s", name, ops);
            return;
        }
        if (model->n_stages == MODEL_STAGES_MAX) {
            conf_error(root, "stages", "more than %d", MODEL_STAGES_MAX);
            return;
        }
        stage_parse((enum stage_op)op, group, &model->stages[model->n_stages]);
    }
    if (model->n_stages == 0)
        conf_error(root, "stages", "is missing or empty");
}

static void parse_devices(struct conf_group *root, struct model *model)
{
    int n = conf_indices(root, "devices", MODEL_DEVICE_MAX, model->devices, MODEL_DEVICES_MAX);

    model->n_devices = n > 0 ? n : 0;
}

static void parse_batching(struct conf_group *root, struct model *model)
{
    struct conf_group *batching = conf_group(root, "batching");

    model->max_rows = 1024;
    model->queue_rows = 65536;
    if (!batching)
        return;
    model->max_rows = (uint32_t)conf_int(batching, "max_rows", 1, MAX_ROWS_MAX, 1024);
    model->max_delay_us = (uint32_t)conf_int(batching, "max_delay_us", 0, MAX_DELAY_US_MAX, 0);
    model->queue_rows = (uint32_t)conf_int(batching, "queue_rows", 1, QUEUE_ROWS_MAX, 65536);
}

int model_parse_conf(struct conf *conf, const char *name, struct model *ret, struct report *report)
{
    struct conf_group *root = conf_root(conf);
    struct model *model;
    int r;

    name = file_base(name);
    model = calloc(1, sizeof(*model));
    if (!model)
        return report_set(report, -ENOMEM, "%s: out of memory", name);
    snprintf(model->file, sizeof(model->file), "%s", name);
    parse_name(root, model);
    parse_weights(root, model);
    parse_numbers(root, model);
    parse_input(root, model);
    parse_stages(root, model);
    parse_batching(root, model);
    parse_devices(root, model);
    r = conf_finish(conf, report);
    if (r == 0)
        *ret = *model;
    free(model);
    return r;
}

int model_parse(int dirfd, const char *name, struct model *ret, struct report *report)
{
    struct conf *conf;
    int r;

    r = conf_open(dirfd, name, &conf, report);
    if (r < 0)
        return r;
    r = model_parse_conf(conf, name, ret, report);
    conf_free(conf);
    return r;
}
