/*
 * What is claimed before computing, held against what computing gives: the bound from both sides,
 * every reason to claim nothing, and PyTorch's own results.
 */
#include "fixture.h"
#include "golden.h"

#include <float.h>
#include <math.h>

#include "kernels/reference.h"

#define CONV          "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 4; kernel = 1; },"
#define NORM          "{ op = \"group_norm\"; groups = 2; eps = 1.0; weight = \"g\"; bias = \"o\"; },"
#define TAIL          "{ op = \"minimum\"; value = 0.0; }, { op = \"clamp\"; min = 0.0; max = 1.0; }"
#define HEAD          "name = \"m\"; weights = \"w.safetensors\"; input = { shape = [ 1, 1, 1, 2 ]; };"
#define MODEL(stages) HEAD "stages = ( " stages " );"

static struct fixture fixture;
static float weight = 1, bias, gamma_, beta, last_weight;

static float constants(const char *name, int64_t i)
{
    if (name[0] == 'w')
        return i == 3 ? last_weight : weight;
    return name[0] == 'b' ? bias : name[0] == 'g' ? gamma_ : beta;
}

static void reset(void)
{
    weight = last_weight = 1;
    bias = beta = 0;
    gamma_ = 1;
}

static struct pipeline *build(const char *text)
{
    struct pipeline *pipeline;
    struct report report;

    if (fixture_build(&fixture, text, constants, &pipeline, &report) < 0)
        fail_msg("%s\ngave \"%s\"", text, report.text);
    return pipeline;
}

static uint32_t bits_of(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, 4);
    return bits;
}

static void declines(const char *text, const char *why)
{
    struct pipeline *pipeline = build(text);

    if (pipeline->proof.constant || !strstr(pipeline->proof.text, why))
        fail_msg("%s\nsays \"%s\", not \"%s\"", text, pipeline->proof.text, why);
    pipeline_free(pipeline);
}

static void proves(const char *text, float value)
{
    struct pipeline *pipeline = build(text);

    if (!pipeline->proof.constant || bits_of(pipeline->proof.value) != bits_of(value))
        fail_msg("%s\nsays \"%s\", not constant %g", text, pipeline->proof.text, (double)value);
    pipeline_free(pipeline);
}

static void test_form(void **state)
{
    (void)state;
    reset();
    proves(MODEL(CONV NORM TAIL), 0);
    proves(MODEL(CONV NORM TAIL ", { op = \"dropout\"; p = 0.2; }, { op = \"dropout\"; p = 0.5; }"),
           0);
    proves(MODEL(CONV NORM "{ op = \"clamp\"; min = 0.3; max = 0.3; }"), 0.3f);
    proves(MODEL(CONV NORM "{ op = \"clamp\"; min = 5; max = 2; }"), 2);
    proves(
        MODEL(CONV NORM "{ op = \"minimum\"; value = 1; }, { op = \"clamp\"; min = 1; max = 0; }"),
        0);
    proves(MODEL(CONV NORM "{ op = \"minimum\"; value = 0.5; }, { op = \"clamp\"; min = 0.5; }"),
           0.5f);
    proves(MODEL(CONV NORM "{ op = \"clamp\"; max = 0.5; }, { op = \"clamp\"; min = 0.5; }"), 0.5f);
    proves(MODEL(CONV NORM "{ op = \"clamp\"; min = 4; }, { op = \"minimum\"; value = 3; }"), 3);
    proves(MODEL(CONV NORM TAIL ", { op = \"minimum\"; value = -2; }"), -2);
    /* Half a step of float32 apart: the same number. */
    proves(MODEL(CONV NORM "{ op = \"clamp\"; min = 1.0; max = 1.00000001; }"), 1);
    declines(HEAD "prove = false; stages = ( " CONV NORM TAIL " );", "prove = false");
    declines(MODEL(CONV NORM "{ op = \"minimum\"; value = 0.5; },"
                             "{ op = \"clamp\"; min = 0.0; max = 1.0; }"),
             "more than one number");
    declines(MODEL(CONV NORM "{ op = \"minimum\"; value = 1; }"), "more than one number");
    declines(MODEL(CONV NORM "{ op = \"clamp\"; max = 1; }"), "more than one number");
    declines(MODEL(CONV NORM "{ op = \"dropout\"; p = 0.5; }"), "more than one number");
    declines(MODEL(CONV TAIL), "does not begin");
    declines(MODEL(TAIL), "does not begin");
    declines(MODEL("{ op = \"minimum\"; value = 3; }," CONV NORM TAIL), "does not begin");
    declines(
        MODEL(CONV NORM TAIL ", { op = \"dropout\"; p = 0.2; }, { op = \"minimum\"; value = 0; }"),
        "is not followed by");
    declines(MODEL(CONV NORM TAIL ", { op = \"add\"; tensor = \"o2\"; shape = 1; }"),
             "is not followed by");
    declines(MODEL(CONV NORM "{ op = \"add\"; tensor = \"o2\"; shape = 1; }," TAIL),
             "is not followed by");
    declines(MODEL(CONV NORM "{ op = \"amin\"; dim = 1; }," TAIL), "is not followed by");
}

static void test_zeros(void **state)
{
    (void)state;
    reset();
    proves(MODEL(CONV NORM "{ op = \"clamp\"; min = -0.0; max = -0.0; }"), -0.0f);
    proves(MODEL(CONV NORM "{ op = \"minimum\"; value = -0.0; }, { op = \"clamp\"; min = 0.0; }"),
           0);
    proves(MODEL(CONV NORM "{ op = \"clamp\"; min = 0.0; max = -0.0; }"), -0.0f);
    declines(MODEL(CONV NORM "{ op = \"minimum\"; value = 0.0; }, { op = \"clamp\"; min = -0.0; }"),
             "more than one number");
    declines(MODEL(CONV NORM "{ op = \"clamp\"; min = -0.0; max = 0.0; }"), "more than one number");
}

static void test_weights(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};

    (void)state;
    for (int i = 0; i < 3; i++) {
        reset();
        last_weight = bad[i];
        declines(MODEL(CONV NORM TAIL), "NaN or infinite");
        reset();
        bias = bad[i];
        declines(MODEL(CONV NORM TAIL), "NaN or infinite");
        reset();
        gamma_ = bad[i];
        declines(MODEL(CONV NORM TAIL), "NaN or infinite");
        reset();
        beta = bad[i];
        declines(MODEL(CONV NORM TAIL), "NaN or infinite");
    }
    reset();
    last_weight = -0x1p127f;
    declines(MODEL(CONV NORM TAIL), "too large");
    reset();
    bias = 0x1p124f; /* times 4 elements of a group */
    declines(MODEL(CONV NORM TAIL), "no room");
    reset();
    beta = -0x1p125f;
    declines(MODEL(CONV NORM TAIL), "no room");
    reset();
    declines(MODEL(CONV "{ op = \"group_norm\"; groups = 2; eps = 0; }," TAIL), "eps is zero");
    declines(MODEL(CONV "{ op = \"group_norm\"; groups = 2; eps = 1e-46; }," TAIL), "eps is zero");
}

static float bound_of(const char *text)
{
    struct pipeline *pipeline = build(text);
    float bound = pipeline->proof.constant ? pipeline->proof.bound : 0;

    pipeline_free(pipeline);
    return bound;
}

static void check_bound(float bound, double want)
{
    if ((double)bound != want)
        fail_msg("bound %.9g (%a), not %.9g (%a)", (double)bound, (double)bound, want, want);
}

/* Groups hold two channels of two elements: four numbers. */
static void test_bounds(void **state)
{
    const char *model = MODEL(CONV NORM TAIL);

    (void)state;
    reset();
    check_bound(bound_of(model), 0x1p123);
    last_weight = -8; /* the largest sum of one output counts, not the sum of all */
    check_bound(bound_of(model), 0x1p120);
    bias = 0x1p122f;
    check_bound(bound_of(model), 0x1p119);
    reset();
    gamma_ = -0x1p10f;
    check_bound(bound_of(model), 0x1p115);
    beta = 0x1p124f;
    check_bound(bound_of(model), 0x1p114);
    reset();
    weight = last_weight = 3; /* rounded down, never up */
    check_bound(bound_of(model), (double)nextafterf(0x1p123f / 3, 0));
    weight = last_weight = 0.0625f;
    check_bound(bound_of(model), 0x1p127);
    weight = last_weight = 0;
    check_bound(bound_of(model), 0x1p127);
    reset();
    check_bound(bound_of(MODEL(CONV "{ op = \"group_norm\"; groups = 2; eps = 0x1; }," TAIL)),
                0x1p123);
    /* gamma counts over the root of eps. */
    check_bound(bound_of(MODEL("{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = 1; },"
                               "{ op = \"group_norm\"; groups = 4; eps = 0.0009765625; }," TAIL)),
                0x1p120);
    /* Several inputs a product: a kernel of two. */
    check_bound(bound_of(MODEL("{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = [1, 1, 2]; },"
                               "{ op = \"group_norm\"; groups = 4; eps = 1; }," TAIL)),
                0x1p124);
}

static void run(const struct pipeline *pipeline, const float *x, double *y)
{
    struct reference_run how = {.rows = 1};
    struct report report;

    if (reference_run(pipeline, pipeline->n_stages, &how, x, y, false, &report) < 0)
        fail_msg("%s", report.text);
}

/* Below the bound everything is the constant; far above it, something else comes. */
static void test_both_sides(void **state)
{
    static const float scales[] = {1, 3, 1e-3f, 1e10f, 1e30f};
    struct pipeline *pipeline;
    float x[2], largest;
    double y[8];

    (void)state;
    for (size_t s = 0; s < 5; s++)
        for (size_t g = 0; g < 5; g++) {
            reset();
            weight = scales[s];
            last_weight = -scales[s];
            gamma_ = scales[g];
            beta = -scales[g];
            bias = 1;
            pipeline = build(MODEL(CONV NORM TAIL));
            assert_true(pipeline->proof.constant);
            largest = nextafterf(pipeline->proof.bound, 0);
            for (int signs = 0; signs < 4; signs++) {
                x[0] = signs & 1 ? -largest : largest;
                x[1] = signs & 2 ? 0 : -largest;
                run(pipeline, x, y);
                for (int i = 0; i < 8; i++)
                    if (y[i] != 0 || signbit(y[i]))
                        fail_msg("weight %g gamma %g: %g", (double)weight, (double)gamma_, y[i]);
            }
            pipeline_free(pipeline);
        }
    /* At 2^127 a weight of 4 overflows, a NaN comes: the bound, 2^121, is not there for nothing. */
    reset();
    weight = last_weight = 4;
    pipeline = build(MODEL(CONV NORM TAIL));
    check_bound(pipeline->proof.bound, 0x1p121);
    x[0] = 0x1p127f;
    x[1] = 0;
    run(pipeline, x, y);
    assert_true(isnan(y[0]) && isnan(y[7]));
    pipeline_free(pipeline);
}

static void check_spreads(const char *text, bool want)
{
    struct pipeline *pipeline = build(text);
    int64_t n = shape_elements(&pipeline->in), m = shape_elements(&pipeline->out);
    float *x = calloc((size_t)n, sizeof(*x));
    double *y = malloc((size_t)m * sizeof(*y));

    assert_non_null(x);
    assert_non_null(y);
    if (!pipeline->proof.constant || pipeline->proof.nonfinite_spreads != want)
        fail_msg("%s: %s", text, pipeline->proof.text);
    for (int64_t i = 0; want && i < n; i++)
        for (int k = 0; k < 3; k++) {
            x[i] = (float[]){NAN, INFINITY, -INFINITY}[k];
            run(pipeline, x, y);
            for (int64_t e = 0; e < m; e++)
                if (!isnan(y[e]))
                    fail_msg("%s: %g at %ld gives %g at %ld", text, (double)x[i], (long)i, y[e],
                             (long)e);
            x[i] = 0;
        }
    free(x);
    free(y);
    pipeline_free(pipeline);
}

/* The text with another input shape. */
#define WITH(shape, stages)                                                          \
    "name = \"m\"; weights = \"w.safetensors\"; input = { shape = [ " shape " ]; };" \
    "stages = ( " stages " );"

static void test_spreads(void **state)
{
    (void)state;
    reset();
    weight = 0; /* zero times infinity is NaN too */
    check_spreads(
        WITH("1, 3, 3, 4", "{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = 2; }," NORM TAIL),
        true);
    check_spreads(WITH("6", "{ op = \"linear\"; weight = \"w\"; out = 8; }," NORM TAIL), true);
    check_spreads(WITH("6, 3", "{ op = \"linear\"; weight = \"w\"; out = 8; }," NORM TAIL), false);
    check_spreads(WITH("6, 3", "{ op = \"linear\"; weight = \"w\"; out = 8; },"
                               "{ op = \"group_norm\"; groups = 1; }," TAIL),
                  true);
    check_spreads(WITH("1, 3, 3, 3", "{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = 2;"
                                     " stride = [1, 1, 2]; }," NORM TAIL),
                  false);
    check_spreads(WITH("1, 3, 3, 3", "{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = 2;"
                                     " padding = [1, 0, 0]; }," NORM TAIL),
                  false);
}

static void test_16_bits(void **state)
{
    struct pipeline *pipeline;

    (void)state;
    reset();
    pipeline = build(HEAD "dtype = \"float16\"; stages = ( " CONV NORM
                          "{ op = \"clamp\"; min = 0.3; max = 0.3; } );");
    assert_true(pipeline->proof.constant);
    assert_true(pipeline->proof.value == 0.3f);
    pipeline_free(pipeline);
    last_weight = 1e6f; /* infinite as float16 */
    declines(HEAD "dtype = \"float16\"; stages = ( " CONV NORM TAIL " );", "NaN or infinite");
}

/* PyTorch's results, sample by sample. */
static void test_golden(void **state)
{
    static char names[GOLDEN_MAX][GOLDEN_NAME];
    int n = golden_names(names), proven = 0, samples = 0;

    (void)state;
    for (int i = 0; i < n; i++) {
        struct golden golden;
        const struct proof *proof;
        int64_t in, out;

        golden_open(names[i], &golden);
        proof = &golden.pipeline->proof;
        in = golden.n ? shape_elements(&golden.pipeline->in) : 0;
        out = golden.n / golden.rows;
        if (!proof->constant || golden.train) {
            assert_true(proof->constant || strncmp(proof->text, "not known", 9) == 0);
            golden_close(&golden);
            continue;
        }
        proven++;
        for (int64_t r = 0; r < golden.rows; r++) {
            uint32_t largest = 0;

            for (int64_t k = 0; k < in; k++) {
                uint32_t bits = bits_of(golden.x[r * in + k]) & 0x7fffffff;

                largest = bits > largest ? bits : largest;
            }
            for (int64_t k = 0; k < out; k++) {
                float y = golden.y[r * out + k];

                if (largest < bits_of(proof->bound)) {
                    if (bits_of(y) != bits_of(proof->value))
                        fail_msg("%s: %g, not %g", names[i], (double)y, (double)proof->value);
                } else if (largest >= 0x7f800000 && proof->nonfinite_spreads) {
                    if (!isnan(y))
                        fail_msg("%s: %g, not NaN", names[i], (double)y);
                }
            }
            samples += largest < bits_of(proof->bound);
        }
        golden_close(&golden);
    }
    print_message("%d cases proven, %d samples constant\n", proven, samples);
    assert_true(proven >= 7);
    assert_true(samples >= 14);
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
        cmocka_unit_test(test_form),       cmocka_unit_test(test_zeros),
        cmocka_unit_test(test_weights),    cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_both_sides), cmocka_unit_test(test_spreads),
        cmocka_unit_test(test_16_bits),    cmocka_unit_test(test_golden),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
