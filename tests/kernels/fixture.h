/*
 * fixture.h - models from text, with weights made for them, in a directory of their own
 */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/model.h"
#include "kernels/pipeline.h"

#define FIXTURE_WEIGHTS "w.safetensors"

/* A directory beneath /tmp; fixture_remove() takes the weights with it. */
struct fixture {
    char path[32], weights[64];
    int dir;
};

static inline void fixture_make(struct fixture *fixture)
{
    snprintf(fixture->path, sizeof(fixture->path), "/tmp/fused-test-XXXXXX");
    assert_non_null(mkdtemp(fixture->path));
    snprintf(fixture->weights, sizeof(fixture->weights), "%s/%s", fixture->path, FIXTURE_WEIGHTS);
    fixture->dir = open(fixture->path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    assert_true(fixture->dir >= 0);
}

static inline void fixture_remove(struct fixture *fixture)
{
    unlinkat(fixture->dir, FIXTURE_WEIGHTS, 0);
    close(fixture->dir);
    assert_int_equal(rmdir(fixture->path), 0);
}

static inline int fixture_parse(const char *text, struct model *ret, struct report *report)
{
    struct conf *conf;
    int r = conf_parse("m.conf", text, strlen(text), &conf, report);

    if (r < 0)
        return r;
    r = model_parse_conf(conf, "m.conf", ret, report);
    conf_free(conf);
    return r;
}

/* The value of element i of a tensor. */
typedef float (*fixture_fill)(const char *name, int64_t i);

static inline void fixture_tensor(struct st_tensor *to, const struct weight_shape *shape,
                                  enum dtype dtype)
{
    *to = (struct st_tensor){.name = shape->name,
                             .dtype = dtype == DTYPE_FLOAT32   ? "F32"
                                      : dtype == DTYPE_FLOAT16 ? "F16"
                                                               : "BF16",
                             .element_bytes = dtype_size(dtype),
                             .rank = shape->rank,
                             .elements = 1};
    for (int i = 0; i < shape->rank; i++) {
        to->dims[i] = shape->dims[i];
        to->elements *= shape->dims[i];
    }
    to->size = (uint64_t)to->elements * to->element_bytes;
}

static inline void fixture_write(const struct fixture *fixture, const struct weight_shape *shapes,
                                 int n, enum dtype dtype, fixture_fill fill)
{
    static struct st_tensor tensors[64];
    struct st_writer *writer;
    struct report report;

    assert_true(n <= 64);
    for (int i = 0; i < n; i++)
        fixture_tensor(&tensors[i], &shapes[i], dtype);
    if (st_writer_new(fixture->weights, tensors, (size_t)n, &writer, &report) < 0)
        fail_msg("%s", report.text);
    for (int i = 0; i < n; i++) {
        float *values = malloc((size_t)tensors[i].elements * sizeof(*values));
        void *raw = malloc(tensors[i].size);

        assert_non_null(values);
        assert_non_null(raw);
        for (int64_t k = 0; k < tensors[i].elements; k++)
            values[k] = fill(tensors[i].name, k);
        tensor_from_float(dtype, values, raw, (size_t)tensors[i].elements);
        if (st_writer_write(writer, raw, tensors[i].size, &report) < 0)
            fail_msg("%s", report.text);
        free(values);
        free(raw);
    }
    if (st_writer_finish(writer, &report) < 0)
        fail_msg("%s", report.text);
    st_writer_free(writer);
}

/* Parses, writes weights of the sizes that the text gives, builds. */
static inline int fixture_build(const struct fixture *fixture, const char *text, fixture_fill fill,
                                struct pipeline **ret, struct report *report)
{
    struct safetensors *weights = NULL;
    static struct weight_shape shapes[64];
    static struct model model;
    int n, r;

    r = fixture_parse(text, &model, report);
    if (r < 0)
        return r;
    n = pipeline_weight_shapes(&model, shapes, 64, report);
    if (n < 0)
        return n;
    if (n > 0) {
        fixture_write(fixture, shapes, n, model.dtype, fill);
        r = safetensors_open(fixture->dir, FIXTURE_WEIGHTS, &weights, report);
        if (r < 0)
            return r;
    }
    r = pipeline_build(&model, weights, ret, report);
    if (r < 0)
        safetensors_free(weights);
    return r;
}
