/*
 * golden.h - the cases of tests/golden, and other models for tests, ready to run
 */
#pragma once

#include <dirent.h>
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

#define GOLDEN_DIR  "tests/golden"
#define GOLDEN_MAX  100
#define GOLDEN_NAME 64

struct golden {
    struct pipeline *pipeline;
    const struct safetensors *file; /* the pipeline's weights */
    int64_t rows;
    bool train;
    uint64_t seed, offset, offset_after;
    float *x, *y; /* as float32 */
    double *y64;  /* NULL for dropout */
    int64_t n;    /* elements of y */
};

static inline float *golden_floats(const struct safetensors *file, const char *name,
                                   enum dtype dtype, int64_t *ret_n)
{
    const struct st_tensor *tensor = safetensors_find(file, name);
    struct report report;
    float *to;
    void *raw;

    assert_non_null(tensor);
    raw = malloc(tensor->size);
    to = malloc((size_t)tensor->elements * sizeof(*to));
    assert_non_null(raw);
    assert_non_null(to);
    if (safetensors_read(file, tensor, 0, tensor->elements, raw, &report) < 0)
        fail_msg("%s", report.text);
    tensor_to_float(dtype, raw, to, (size_t)tensor->elements);
    free(raw);
    *ret_n = tensor->elements;
    return to;
}

static inline uint64_t golden_number(const struct safetensors *file, const char *key)
{
    const char *text = safetensors_metadata(file, key);

    return text ? strtoull(text, NULL, 10) : 0;
}

static inline void golden_open(const char *name, struct golden *ret)
{
    struct golden golden = {.rows = 0};
    struct safetensors *file = NULL;
    struct report report;
    static struct model model;
    char *conf;
    int64_t n;
    int dir;

    dir = open(GOLDEN_DIR, O_PATH | O_DIRECTORY | O_CLOEXEC);
    assert_true(dir >= 0);
    assert_true(asprintf(&conf, "%s.conf", name) > 0);
    if (model_parse(dir, conf, &model, &report) < 0 ||
        safetensors_open(dir, model.weights, &file, &report) < 0 ||
        pipeline_build(&model, file, &golden.pipeline, &report) < 0)
        fail_msg("%s", report.text);
    free(conf);
    close(dir);
    golden.file = file;
    golden.rows = safetensors_find(file, "x")->dims[0];
    golden.train = strcmp(safetensors_metadata(file, "train"), "true") == 0;
    golden.seed = golden_number(file, "seed");
    golden.offset = golden_number(file, "offset");
    golden.offset_after = golden_number(file, "offset_after");
    golden.x = golden_floats(file, "x", model.dtype, &n);
    assert_int_equal(n, golden.rows * shape_elements(&golden.pipeline->in));
    golden.y = golden_floats(file, "y", model.dtype, &golden.n);
    assert_int_equal(golden.n, golden.rows * shape_elements(&golden.pipeline->out));
    if (safetensors_find(file, "y64")) {
        golden.y64 = malloc((size_t)golden.n * sizeof(double));
        assert_non_null(golden.y64);
        if (safetensors_read(file, safetensors_find(file, "y64"), 0, golden.n, golden.y64,
                             &report) < 0)
            fail_msg("%s", report.text);
    }
    *ret = golden;
}

static inline void golden_close(struct golden *golden)
{
    free(golden->x);
    free(golden->y);
    free(golden->y64);
    pipeline_free(golden->pipeline);
}

static inline int golden_compare(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Names of all cases, sorted. */
static inline int golden_names(char names[GOLDEN_MAX][GOLDEN_NAME])
{
    DIR *dir = opendir(GOLDEN_DIR);
    struct dirent *entry;
    int n = 0;

    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        size_t length = strlen(entry->d_name);

        if (length < 6 || strcmp(entry->d_name + length - 5, ".conf") != 0)
            continue;
        assert_true(n < GOLDEN_MAX && length - 5 < GOLDEN_NAME);
        memcpy(names[n], entry->d_name, length - 5);
        names[n++][length - 5] = 0;
    }
    closedir(dir);
    qsort(names, (size_t)n, GOLDEN_NAME, golden_compare);
    return n;
}
