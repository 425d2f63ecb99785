/*
 * models.h - the two pipelines at real and at small size, with weights made for them
 */
#pragma once

#include "tests/gpu/device.h"

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
