/*
 * models.h - the two pipelines at real and at small size, with weights made for them; and a model's
 * rows against the plain stages
 */
#pragma once

#include "tests/gpu/device.h"

#include "kernels/reference.h"

#define MODEL_A                                                                            \
    "name = \"a\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\"; precision = \"%s\";" \
    "input = { shape = [%d]; };"                                                           \
    "stages = ({ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = %d; },"              \
    "{ op = \"group_norm\"; groups = %d; weight = \"g\"; bias = \"h\"; },"                 \
    "{ op = \"amin\"; dim = 1; keepdim = true; },"                                         \
    "{ op = \"add\"; tensor = \"t\"; shape = [1, %d, 1, 1]; });"

/* Channels 3 to 16, window 3: [3, d, h, w]. */
#define MODEL_B                                                                           \
    "name = \"b\"; weights = \"" FIXTURE_WEIGHTS "\"; prove = %s;"                        \
    "input = { shape = [3, %d, %d, %d]; };"                                               \
    "stages = ({ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 16; kernel = 3; }," \
    "{ op = \"group_norm\"; groups = 8; weight = \"g\"; bias = \"h\"; },"                 \
    "{ op = \"minimum\"; value = %s; }, { op = \"clamp\"; min = 0.0; max = 1.0; },"       \
    "{ op = \"dropout\"; p = 0.2; });"

static int models_fan_in; /* of the weight "w": what its bound follows from */

/* PyTorch's initial distributions: w and b uniform, gamma near 1. */
static inline float models_fill(const char *name, int64_t i)
{
    uint64_t state = (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u + (uint64_t)name[0];
    float u;

    state ^= state >> 29;
    state *= 0xBF58476D1CE4E5B9u;
    state ^= state >> 32;
    u = (float)(int32_t)(uint32_t)state * 0x1p-31f;
    if (name[0] == 'w' || name[0] == 'b')
        return u / sqrtf((float)models_fan_in);
    return name[0] == 'g' ? 1 + u * 0.25f : u;
}

static inline struct pipeline *models_build(const struct fixture *fixture, const char *text,
                                            int fan_in)
{
    struct pipeline *pipeline;
    struct report report;

    models_fan_in = fan_in;
    if (fixture_build(fixture, text, models_fill, &pipeline, &report) < 0)
        fail_msg("%s", report.text);
    return pipeline;
}

static inline struct pipeline *models_a(const struct fixture *fixture, const char *dtype,
                                        const char *precision, int in, int out, int groups)
{
    char text[1024];

    snprintf(text, sizeof(text), MODEL_A, dtype, precision, in, out, groups, out);
    return models_build(fixture, text, in);
}

/* minimum 0.0 makes it constant, 0.5 does not. */
static inline struct pipeline *models_b(const struct fixture *fixture, bool prove, int d, int h,
                                        int w, const char *minimum)
{
    char text[1024];

    snprintf(text, sizeof(text), MODEL_B, prove ? "true" : "false", d, h, w, minimum);
    return models_build(fixture, text, 81);
}

/* In [low, low + 1). */
static inline void models_input(float *x, size_t n, uint64_t seed, float low)
{
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;

    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(state >> 40) * 0x1p-24f + low;
    }
}

/* Rows of x, in the pipeline's dtype. */
static inline void models_run_in(struct plan *plan, const struct pipeline *pipeline, const void *x,
                                 void *y, uint32_t rows, bool train)
{
    size_t esize = dtype_size(pipeline->dtype);
    size_t x_size = rows * (size_t)shape_elements(&pipeline->in) * esize;
    struct job job = {.x = x,
                      .y = y,
                      .y_size = rows * (uint64_t)shape_elements(&pipeline->out) * esize,
                      .rows = rows,
                      .train = train,
                      .seed = 7,
                      .offset = 12};

    device_run_in(device_get(), plan, &job, 1, &x_size, 2, 0);
    assert_int_equal(job.result, 0);
}

/* The same through a plan of at most 64 rows. */
static inline void models_run(const struct pipeline *pipeline, const void *x, void *y,
                              uint32_t rows, bool train)
{
    struct plan *plan = device_load(device_get(), pipeline, 64);

    models_run_in(plan, pipeline, x, y, rows, train);
    device_get()->ops->unload(device_get()->backend, plan);
}

/* The same bits, or NaN in both. */
static inline void models_same(const char *what, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof(*a)) != 0 && !(isnan(a[i]) && isnan(b[i])))
            fail_msg("%s: element %zu is %.9g, and %.9g before", what, i, (double)b[i],
                     (double)a[i]);
}

/* These rows against float64; where that is NaN, y has to be. */
static inline void models_check(const struct pipeline *pipeline, float *x, uint32_t rows,
                                const char *what, double tolerance)
{
    size_t in = rows * (size_t)shape_elements(&pipeline->in);
    size_t out = rows * (size_t)shape_elements(&pipeline->out);
    size_t esize = dtype_size(pipeline->dtype);
    float *y = array(out, sizeof(*y));
    double *want = array(out, sizeof(*want)), error = 0;
    char *x_own = array(in, esize), *y_own = array(out, esize);
    struct reference_run how = {.rows = rows};
    struct report report;

    tensor_from_float(pipeline->dtype, x, x_own, in);
    tensor_to_float(pipeline->dtype, x_own, x, in);
    models_run(pipeline, x_own, y_own, rows, false);
    tensor_to_float(pipeline->dtype, y_own, y, out);
    if (reference_run(pipeline, pipeline->n_stages, &how, x, want, true, &report) < 0)
        fail_msg("%s", report.text);
    for (size_t i = 0; i < out; i++) {
        if (isnan(want[i]) ? !isnan(y[i]) : !(fabs((double)y[i] - want[i]) <= tolerance))
            fail_msg("%s: y[%zu] is %.9g, not %.9g", what, i, (double)y[i], want[i]);
        if (!isnan(want[i]))
            error = fmax(error, fabs((double)y[i] - want[i]));
    }
    printf("%s: largest error %.3g\n", what, error);
    free(y);
    free(want);
    free(x_own);
    free(y_own);
}
