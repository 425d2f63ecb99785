/*
 * The reference against what PyTorch computed: every golden case, float32 chains with the overflows
 * of float32 against y, wide ones against y64. What no golden case has (strides, padding, higher
 * ranks, broadcasting) is held against sums written another way round.
 */
#include "fixture.h"
#include "golden.h"

#include <math.h>

#include "kernels/reference.h"

static void run(const struct golden *golden, bool wide, double *to)
{
    struct reference_run how = {.rows = golden->rows,
                                .train = golden->train,
                                .seed = golden->seed,
                                .offset = golden->offset};
    struct report report;

    if (reference_run(golden->pipeline, golden->pipeline->n_stages, &how, golden->x, to, wide,
                      &report) < 0)
        fail_msg("%s", report.text);
}

/* semantics: |result - y| <= 1e-4 + 1e-4 |y|, widened by PyTorch's own error; y is the truth where
 * its variance overflowed. 16 bits: at most twice PyTorch's error against y64. */
static void against_y(const char *name, const struct golden *golden, const double *have)
{
    bool overflows = strcmp(name, "a_magnitudes") == 0 || strcmp(name, "b_nonfinite") == 0;
    bool narrow = golden->pipeline->dtype != DTYPE_FLOAT32;
    double error = 0, theirs = 0;

    for (int64_t i = 0; i < golden->n; i++) {
        double right = golden->y[i], tolerance = 1e-4 + 1e-4 * fabs(right);

        if (isnan(right) || isnan(have[i])) {
            if (!isnan(right) || !isnan(have[i]))
                fail_msg("%s: y[%ld] is %.9g, not %.9g", name, (long)i, have[i], right);
            continue;
        }
        if (narrow) {
            error = fmax(error, fabs(have[i] - golden->y64[i]));
            theirs = fmax(theirs, fabs(right - golden->y64[i]));
            continue;
        }
        if (golden->y64 && !overflows)
            tolerance = fmax(tolerance, fabs(right - golden->y64[i]));
        if ((right == 0 && have[i] == 0 && !signbit(right) != !signbit(have[i])) ||
            (have[i] != right && !(fabs(have[i] - right) <= tolerance)))
            fail_msg("%s: y[%ld] is %.9g, not %.9g", name, (long)i, have[i], right);
    }
    if (error > 2 * theirs)
        fail_msg("%s: error %g, PyTorch's %g", name, error, theirs);
}

static void against_y64(const char *name, const struct golden *golden, const double *have)
{
    for (int64_t i = 0; i < golden->n; i++) {
        double right = golden->y64[i];

        if (isnan(right) != isnan(have[i]) ||
            (!isnan(right) && have[i] != right &&
             !(fabs(have[i] - right) <= 2e-7 + 1e-7 * fabs(right))))
            fail_msg("%s: wide y[%ld] is %.17g, not %.17g", name, (long)i, have[i], right);
    }
}

static void test_golden(void **state)
{
    static char names[GOLDEN_MAX][GOLDEN_NAME];
    int n = golden_names(names);

    (void)state;
    assert_int_equal(n, 55);
    for (int i = 0; i < n; i++) {
        struct golden golden;
        double *to;

        golden_open(names[i], &golden);
        to = malloc((size_t)golden.n * sizeof(*to));
        assert_non_null(to);
        run(&golden, false, to);
        against_y(names[i], &golden, to);
        if (golden.y64) {
            run(&golden, true, to);
            against_y64(names[i], &golden, to);
        }
        if (golden.train)
            assert_int_equal(golden.offset + pipeline_offset_advance(golden.pipeline, golden.rows),
                             golden.offset_after);
        free(to);
        golden_close(&golden);
    }
}

#define MODEL(shape, stages)                                                         \
    "name = \"m\"; weights = \"w.safetensors\"; input = { shape = [ " shape " ]; };" \
    "stages = ( " stages " );"
#define ROWS 3

static struct fixture fixture;
static double x[20000], y[20000], want[20000];

static float fill(const char *name, int64_t i)
{
    return (float)((i * 37 + name[0]) % 101) / 64 - 0.75f;
}

/* One stage on ROWS rows of made-up input; its parameters are left for the caller to compute. */
static struct pipeline *stage_alone(const char *text, bool wide)
{
    struct reference_run how = {.rows = ROWS};
    struct pipeline *pipeline;
    struct report report;
    uint64_t offset = 0;
    int64_t n;

    if (fixture_build(&fixture, text, fill, &pipeline, &report) < 0)
        fail_msg("%s\ngave \"%s\"", text, report.text);
    n = ROWS * shape_elements(&pipeline->in);
    assert_true(n <= 20000 && ROWS * shape_elements(&pipeline->out) <= 20000);
    for (int64_t i = 0; i < n; i++)
        x[i] = fill("x", i * 3);
    if (reference_stage(pipeline, 0, &how, &offset, x, y, wide, &report) < 0)
        fail_msg("%s", report.text);
    return pipeline;
}

static void check_stage(struct pipeline *pipeline)
{
    int64_t n = ROWS * shape_elements(&pipeline->out);

    for (int64_t i = 0; i < n; i++)
        if (!(fabs(y[i] - want[i]) <= 1e-12))
            fail_msg("y[%ld] is %.17g, not %.17g", (long)i, y[i], want[i]);
    pipeline_free(pipeline);
}

/* Every input is dealt to the outputs whose windows hold it. */
static void test_conv3d(void **state)
{
    struct pipeline *pipeline = stage_alone(
        MODEL("2, 4, 5, 6", "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 3;"
                            " kernel = [2, 3, 1]; stride = [1, 2, 3]; padding = [1, 0, 2]; }"),
        true);
    const int64_t *out = pipeline->stages[0].out.dims;
    int64_t d[5] = {ROWS, out[1], out[2], out[3], out[4]};

    (void)state;
    assert_int_equal(d[2] * 100 + d[3] * 10 + d[4], 524);
    for (int64_t i = 0; i < d[0] * d[1] * d[2] * d[3] * d[4]; i++)
        want[i] = fill("b", i / (d[2] * d[3] * d[4]) % 3);
    for (int64_t i = 0; i < ROWS * 2 * 4 * 5 * 6; i++)
        for (int64_t f = 0; f < 3 * 2 * 3; f++) { /* filter, then its depth and height */
            int64_t n = i / 240, c = i / 120 % 2, k = f / 6, kd = f / 3 % 2, kh = f % 3;
            int64_t od = i / 30 % 4 + 1 - kd, oh = i / 6 % 5 - kh, ow = i % 6 + 2;

            if (od < 0 || od >= d[2] || oh < 0 || oh % 2 || oh / 2 >= d[3] || ow % 3 ||
                ow / 3 >= d[4])
                continue;
            want[(((n * 3 + k) * d[2] + od) * d[3] + oh / 2) * d[4] + ow / 3] +=
                x[i] * fill("w", ((k * 2 + c) * 2 + kd) * 3 + kh);
        }
    check_stage(pipeline);
}

static void test_linear(void **state)
{
    struct pipeline *pipeline = stage_alone(
        MODEL("4, 5", "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = 7; }"), true);

    (void)state;
    for (int64_t i = 0; i < ROWS * 4 * 7; i++)
        want[i] = fill("b", i % 7);
    for (int64_t i = 0; i < ROWS * 4 * 5; i++)
        for (int64_t n = 0; n < 7; n++)
            want[i / 5 * 7 + n] += x[i] * fill("w", n * 5 + i % 5);
    check_stage(pipeline);
}

static void test_amin(void **state)
{
    struct pipeline *pipeline = stage_alone(MODEL("3, 4, 5", "{ op = \"amin\"; dim = 2; }"), true);

    (void)state;
    for (int64_t i = 0; i < ROWS * 3 * 5; i++)
        want[i] = INFINITY;
    for (int64_t i = 0; i < ROWS * 3 * 4 * 5; i++) {
        int64_t to = i / 20 * 5 + i % 5;

        want[to] = x[i] < want[to] ? x[i] : want[to];
    }
    check_stage(pipeline);
}

static void test_add(void **state)
{
    struct pipeline *pipeline;

    (void)state;
    pipeline =
        stage_alone(MODEL("2, 1", "{ op = \"add\"; tensor = \"t\"; shape = [2, 3]; }"), true);
    for (int64_t i = 0; i < ROWS * 6; i++)
        want[i] = x[i / 3] + fill("t", i % 6);
    check_stage(pipeline);
    /* [N, 2] and [4, 1, 2]: [4, N, 2]. */
    pipeline =
        stage_alone(MODEL("2", "{ op = \"add\"; tensor = \"t\"; shape = [4, 1, 2]; }"), true);
    for (int64_t i = 0; i < 4 * ROWS * 2; i++)
        want[i] = x[i % (ROWS * 2)] + fill("t", i / (ROWS * 2) * 2 + i % 2);
    check_stage(pipeline);
    /* [N, 1] and [1, 5, 1, 1]: [1, 5, N, 1], n fastest. */
    pipeline =
        stage_alone(MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = [1, 5, 1, 1]; }"), true);
    for (int64_t i = 0; i < 5 * ROWS; i++)
        want[i] = x[i % ROWS] + fill("t", i / ROWS);
    check_stage(pipeline);
}

/* A group of one number is its beta; float32 overflow of the squares gives beta too, wide not. */
static void test_group_norm(void **state)
{
    const char *alone =
        MODEL("6", "{ op = \"group_norm\"; groups = 6; weight = \"g\"; bias = \"b\"; }");
    const char *pairs =
        MODEL("4", "{ op = \"group_norm\"; groups = 2; weight = \"g\"; bias = \"b\"; }");
    struct reference_run how = {.rows = 1};
    struct pipeline *pipeline = stage_alone(alone, false);
    float in[4] = {-1e20f, 1e20f, 1, 3};
    struct report report;
    double out[4];

    (void)state;
    for (int64_t i = 0; i < ROWS * 6; i++)
        want[i] = fill("b", i % 6);
    check_stage(pipeline);
    pipeline = stage_alone(pairs, true);
    assert_int_equal(reference_run(pipeline, 1, &how, in, out, false, &report), 0);
    assert_true(out[0] == (double)fill("b", 0) && out[1] == (double)fill("b", 1));
    assert_true(fabs(out[3] - ((double)fill("g", 3) / sqrt(1.00001) + (double)fill("b", 3))) <
                1e-6);
    assert_int_equal(reference_run(pipeline, 1, &how, in, out, true, &report), 0);
    assert_true(fabs(out[1] - (double)fill("g", 1) - (double)fill("b", 1)) < 1e-6);
    in[2] = INFINITY;
    assert_int_equal(reference_run(pipeline, 1, &how, in, out, false, &report), 0);
    assert_true(isnan(out[2]) && isnan(out[3]) && !isnan(out[0]));
    pipeline_free(pipeline);
}

static void check_point(const char *stages, float in, float out)
{
    struct reference_run how = {.rows = 1};
    struct pipeline *pipeline;
    struct report report;
    char text[256];
    double have;

    snprintf(text, sizeof(text), MODEL("1", "%s"), stages);
    if (fixture_build(&fixture, text, fill, &pipeline, &report) < 0)
        fail_msg("%s", report.text);
    assert_int_equal(reference_run(pipeline, pipeline->n_stages, &how, &in, &have, false, &report),
                     0);
    pipeline_free(pipeline);
    if (isnan(out) ? !isnan(have) : have != (double)out || !signbit(have) != !signbit(out))
        fail_msg("%s of %g is %g, not %g", stages, (double)in, have, (double)out);
}

static void test_pointwise(void **state)
{
    (void)state;
    check_point("{ op = \"minimum\"; value = 0.5; }", NAN, NAN);
    check_point("{ op = \"minimum\"; value = 0.5; }", INFINITY, 0.5f);
    check_point("{ op = \"minimum\"; value = 0.5; }", -INFINITY, -INFINITY);
    check_point("{ op = \"minimum\"; value = 0.0; }", -0.0f, -0.0f);
    check_point("{ op = \"minimum\"; value = -0.0; }", 0, -0.0f);
    check_point("{ op = \"clamp\"; min = 1; max = -1; }", 5, -1);
    check_point("{ op = \"clamp\"; min = 1; max = -1; }", -5, -1);
    check_point("{ op = \"clamp\"; min = 1; max = -1; }", NAN, NAN);
    check_point("{ op = \"clamp\"; min = 0.0; max = 1; }", -0.0f, 0);
    check_point("{ op = \"clamp\"; min = -2; }", -INFINITY, -2);
    check_point("{ op = \"clamp\"; max = 2; }", -INFINITY, -INFINITY);
    check_point("{ op = \"dropout\"; p = 1; }", 3, 3); /* not training */
    check_point("{ op = \"amin\"; dim = 1; }", NAN, NAN);
}

static int setup(void **state)
{
    (void)state;
    fixture_make(&fixture);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fixture_remove(&fixture);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),    cmocka_unit_test(test_conv3d),
        cmocka_unit_test(test_linear),    cmocka_unit_test(test_amin),
        cmocka_unit_test(test_add),       cmocka_unit_test(test_group_norm),
        cmocka_unit_test(test_pointwise),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
