/*
 * conv3d and group_norm in one step: against the plain stages in float64 for shapes of every kind,
 * NaN and infinities in every class of positions, magnitudes on both sides of the guard's bound,
 * and a proof's result against that of the whole way.
 */
#include "tests/gpu/models.h"

#include <float.h>

#define MODEL                                                                                  \
    "name = \"c\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\"; prove = %s;"             \
    "input = { shape = [3, %d, %d, %d]; }; stages = ({ op = \"conv3d\"; weight = \"w\";"       \
    "bias = \"b\"; out = %d; kernel = 3; padding = %d; }, { op = \"group_norm\"; groups = %d;" \
    "weight = \"g\"; bias = \"h\"; }, %s);"
#define POINTS "{ op = \"minimum\"; value = 0.5; }, { op = \"clamp\"; min = -0.25; max = 1.0; }"
#define WIDE   "{ op = \"clamp\"; min = -64.0; max = 64.0; }"
#define CONSTANT                                                                     \
    "{ op = \"minimum\"; value = 0.5; }, { op = \"clamp\"; min = 0.5; max = 1.0; }," \
    "{ op = \"dropout\"; p = 0.2; }"

static struct fixture fixture;

struct shape_case {
    const char *dtype;
    int in[3], outs, padding, groups;
    double tolerance;
};

static struct pipeline *build(const struct shape_case *c, const char *prove, const char *points)
{
    char text[1024];

    snprintf(text, sizeof(text), MODEL, c->dtype, prove, c->in[0], c->in[1], c->in[2], c->outs,
             c->padding, c->groups, points);
    return models_build(&fixture, text, 81);
}

/* Ends the pipeline. */
static void check(struct pipeline *pipeline, uint32_t rows, const char *what, double tolerance)
{
    size_t in = rows * (size_t)shape_elements(&pipeline->in);
    float *x = array(in, sizeof(*x));

    models_input(x, in, 5, -0.5f);
    models_check(pipeline, x, rows, what, tolerance);
    pipeline_free(pipeline);
    free(x);
}

static void check_shape(const struct shape_case *c)
{
    char what[64];

    snprintf(what, sizeof(what), "%s [%d %d %d] to %d", c->dtype, c->in[0], c->in[1], c->in[2],
             c->outs);
    check(build(c, "false", POINTS), 3, what, c->tolerance);
}

/* One tile and many, whole and cut in every direction, padded, channels and groups that fill no
 * instruction, runs of results at multiples of 16 bytes and not. */
static void test_shapes(void **state)
{
    static const struct shape_case cases[] = {
        {"float32", {3, 3, 3}, 1, 0, 1, 2e-6},     {"float32", {4, 10, 66}, 16, 0, 8, 4e-6},
        {"float32", {5, 9, 11}, 16, 0, 4, 4e-6},   {"float32", {6, 21, 33}, 24, 1, 6, 4e-6},
        {"float32", {5, 11, 150}, 12, 0, 3, 4e-6}, {"float32", {4, 13, 131}, 40, 2, 5, 4e-6},
        {"float32", {7, 12, 34}, 32, 1, 1, 4e-6},  {"float32", {3, 30, 64}, 17, 1, 17, 4e-6},
        {"float32", {5, 11, 37}, 96, 1, 2, 4e-6},  {"float32", {5, 11, 37}, 24, 1, 2, 4e-6},
        {"float32", {4, 7, 30}, 20, 1, 4, 4e-6},   {"float16", {5, 12, 66}, 16, 0, 8, 1e-3},
        {"float16", {4, 9, 35}, 10, 1, 5, 1e-3},   {"bfloat16", {5, 12, 66}, 16, 0, 8, 8e-3},
        {"bfloat16", {4, 9, 35}, 10, 1, 5, 8e-3},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_shape(&cases[i]);
}

/* A sample with more tiles than all blocks can hold is in part computed twice. */
static void test_large(void **state)
{
    static const struct shape_case c = {"float32", {32, 132, 130}, 4, 0, 2, 0};

    (void)state;
    check(build(&c, "false", POINTS), 2, "a sample of 990 tiles", 4e-6);
}

/* A channel of weights that are next to nothing, and one whose bias is no number. */
static float fill_odd(const char *name, int64_t i)
{
    float v = models_fill(name, i);

    if (strcmp(name, "w") == 0 && i / 81 == 3)
        v *= 1e-36f;
    return strcmp(name, "b") == 0 && i == 15 ? NAN : v;
}

/* Tiles of zeros, and of next to nothing, in samples that are otherwise as usual; and what is wrong
 * with one group, which the others do not feel. */
static void test_odd_tiles(void **state)
{
    static const struct shape_case c = {"float32", {6, 18, 70}, 16, 0, 8, 0};
    static const float times[] = {0, 1e-30f, 1e-42f, 1};
    char text[1024];
    struct pipeline *pipelines[2];
    struct report report;
    enum { ROWS = 8 };

    (void)state;
    pipelines[0] = build(&c, "false", WIDE);
    snprintf(text, sizeof(text), MODEL, c.dtype, "false", c.in[0], c.in[1], c.in[2], c.outs,
             c.padding, c.groups, WIDE);
    if (fixture_build(&fixture, text, fill_odd, &pipelines[1], &report) < 0)
        fail_msg("%s", report.text);
    for (int p = 0; p < 2; p++) {
        size_t in = (size_t)shape_elements(&pipelines[p]->in);
        float *x = array(ROWS * in, sizeof(*x));

        models_input(x, ROWS * in, 5, -0.5f);
        /* The first tile's lines, or a whole row. */
        for (size_t row = 0; row < ROWS; row++)
            for (size_t i = 0; i < in; i++)
                if (row >= 4 || i / 70 % 18 < 6)
                    x[row * in + i] *= times[row % 4];
        models_check(pipelines[p], x, ROWS, p ? "odd weights" : "tiles of zeros", 1e-5);
        pipeline_free(pipelines[p]);
        free(x);
    }
}

/* The first of 990 tiles is far from all others, which are all but equal: moments merged from it as
 * the pivot would be wrong by a thousandth, and the first tile, 30 deviations away, with them. */
static void test_outlier(void **state)
{
    static const struct shape_case c = {"float32", {32, 132, 130}, 4, 0, 2, 0};
    struct pipeline *pipeline = build(&c, "false", WIDE);
    size_t in = (size_t)shape_elements(&pipeline->in);
    float *x = array(in, sizeof(*x));

    (void)state;
    models_input(x, in, 5, -0.5f);
    for (size_t i = 0; i < in; i++)
        x[i] =
            i / (132 * 130) % 32 < 4 && i / 130 % 132 < 6 && i % 130 < 66 ? 0 : 100 + x[i] * 0.01f;
    models_check(pipeline, x, 1, "an outlier", 5e-4);
    pipeline_free(pipeline);
    free(x);
}

/* The same rows give the same bits alone, among others, and again. */
static void test_batches(void **state)
{
    static const struct shape_case c = {"float32", {6, 18, 34}, 16, 1, 8, 0};
    struct pipeline *pipeline = build(&c, "false", POINTS);
    size_t in = (size_t)shape_elements(&pipeline->in), out = (size_t)shape_elements(&pipeline->out);
    enum { ROWS = 61 };
    float *x = array(ROWS * in, 4), *want = array(ROWS * out, 4), *y = array(ROWS * out, 4);

    (void)state;
    models_input(x, ROWS * in, 9, -0.5f);
    models_run(pipeline, x, want, ROWS, false);
    for (int i = 0; i < 20; i++) {
        models_run(pipeline, x, y, ROWS, false);
        assert_memory_equal(y, want, ROWS * out * 4);
    }
    for (uint32_t row = 0; row < ROWS; row++) {
        models_run(pipeline, x + row * in, y, 1, false);
        assert_memory_equal(y, want + row * out, out * 4);
    }
    pipeline_free(pipeline);
    free(x);
    free(want);
    free(y);
}

/* Two of them in one plan share work space: in as many rows the first one's moments lie where the
 * second one's counters would, and it has more tiles than run at a time. */
static void test_two(void **state)
{
    static const char text[] =
        "name = \"c\"; weights = \"" FIXTURE_WEIGHTS "\"; prove = false;"
        "input = { shape = [3, 12, 12, 70]; };"
        "stages = ({ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 3; kernel = 3; },"
        "{ op = \"group_norm\"; groups = 1; weight = \"g\"; bias = \"h\"; },"
        "{ op = \"conv3d\"; weight = \"w2\"; bias = \"b2\"; out = 16; kernel = 3; },"
        "{ op = \"group_norm\"; groups = 8; weight = \"g2\"; bias = \"h2\"; }, " POINTS ");";

    (void)state;
    check(models_build(&fixture, text, 81), 64, "two convolutions", 1e-5);
}

static void same_sample(const char *what, size_t row, const float *a, const float *b, size_t n)
{
    char text[96];

    snprintf(text, sizeof(text), "%s, sample %zu", what, row);
    models_same(text, a, b, n);
}

/* A sample with one number that is none, wherever it lies, is NaN throughout; its neighbours are
 * not touched. */
static void test_positions(void **state)
{
    static const struct shape_case c = {"float32", {5, 20, 70}, 16, 0, 8, 0};
    static const int at[][3] = {{0, 0, 0},  {4, 19, 69}, {0, 19, 0}, {2, 0, 33}, {4, 10, 40},
                                {2, 8, 64}, {1, 9, 63},  {3, 7, 31}, {2, 11, 32}};
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct pipeline *pipeline = build(&c, "false", POINTS);
    size_t in = (size_t)shape_elements(&pipeline->in), out = (size_t)shape_elements(&pipeline->out);
    const uint32_t rows = 2 * 9 * 3;
    float *x = array(rows * in, 4), *y = array(rows * out, 4), *clean = array(rows * out, 4);

    (void)state;
    models_input(x, rows * in, 3, -0.5f);
    models_run(pipeline, x, clean, rows, false);
    for (uint32_t row = 0; row < rows; row += 2) {
        const int *p = at[row / 2 / 3];

        x[row * in + (((row / 2 % 3) * 5 + p[0]) * 20 + p[1]) * 70 + p[2]] = bad[(row / 2) % 3];
    }
    models_run(pipeline, x, y, rows, false);
    for (uint32_t row = 0; row < rows; row++)
        if (row % 2)
            same_sample("beside a spoilt sample", row, clean + row * out, y + row * out, out);
        else
            for (size_t i = 0; i < out; i++)
                if (!isnan(y[row * out + i]))
                    fail_msg("element %zu of spoilt sample %u is %.9g", i, row,
                             (double)y[row * out + i]);
    pipeline_free(pipeline);
    free(x);
    free(y);
    free(clean);
}

/* With the proof and without: samples just below the guard's bound, at it, above, far above, tiny,
 * all zero, and none at all. */
static void test_bound(void **state)
{
    static const struct shape_case c = {"float32", {4, 12, 34}, 16, 0, 8, 0};
    struct pipeline *proven = build(&c, "true", CONSTANT), *whole = build(&c, "false", CONSTANT);
    size_t in = (size_t)shape_elements(&whole->in), out = (size_t)shape_elements(&whole->out);
    float bound = proven->proof.bound;
    const float most[] = {nextafterf(bound, 0),
                          bound,
                          nextafterf(bound, INFINITY),
                          FLT_MAX,
                          FLT_MIN,
                          0x1p-149f,
                          0,
                          NAN};
    enum { ROWS = 16 };
    float *x = array(ROWS * in, 4), *y = array(ROWS * out, 4), *want = array(ROWS * out, 4);

    (void)state;
    assert_true(proven->proof.constant && !whole->proof.constant && isfinite(bound));
    models_input(x, ROWS * in, 3, -0.5f);
    for (uint32_t row = 0; row < ROWS; row++) {
        if (row % 8 >= 4 && row % 8 < 7)
            for (size_t i = 0; i < in; i++)
                x[row * in + i] *= most[row % 8];
        x[row * in + row * 97 % in] = row < 8 ? most[row % 8] : -most[row % 8];
    }
    for (int train = 0; train < 2; train++) {
        models_run(whole, x, want, ROWS, train);
        models_run(proven, x, y, ROWS, train);
        for (uint32_t row = 0; row < ROWS; row++)
            same_sample("with the proof", row, want + row * out, y + row * out, out);
    }
    pipeline_free(proven);
    pipeline_free(whole);
    free(x);
    free(y);
    free(want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),    cmocka_unit_test(test_large),
        cmocka_unit_test(test_batches),   cmocka_unit_test(test_odd_tiles),
        cmocka_unit_test(test_outlier),   cmocka_unit_test(test_two),
        cmocka_unit_test(test_positions), cmocka_unit_test(test_bound),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
