/*
 * 16-bit convolutions of stride 1, which go by wgmma: against the plain stages in float64 for
 * shapes of every kind, and the same bits whatever the batch.
 */
#include "tests/gpu/models.h"

static struct fixture fixture;

struct shape_case {
    const char *dtype;
    int channels, in[3], outs, kernel[3], padding[3];
    uint32_t rows;
};

static struct pipeline *build(const struct shape_case *c)
{
    char text[1024];

    snprintf(text, sizeof(text),
             "name = \"s\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\";"
             "input = { shape = [%d, %d, %d, %d]; }; stages = ({ op = \"conv3d\"; weight = \"w\";"
             "bias = \"b\"; out = %d; kernel = [%d, %d, %d]; padding = [%d, %d, %d]; },"
             "{ op = \"clamp\"; min = -64.0; max = 64.0; });",
             c->dtype, c->channels, c->in[0], c->in[1], c->in[2], c->outs, c->kernel[0],
             c->kernel[1], c->kernel[2], c->padding[0], c->padding[1], c->padding[2]);
    return models_build(&fixture, text, c->channels * c->kernel[0] * c->kernel[1] * c->kernel[2]);
}

/* Not by another way, which would give the same. */
static void goes_by_wgmma(const struct plan *plan)
{
    struct plan_info info;

    device_get()->ops->plan_info(plan, &info);
    assert_non_null(strstr(info.text, "laid out for wgmma"));
}

static void check_shape(const struct shape_case *c)
{
    struct pipeline *pipeline = build(c);
    size_t in = c->rows * (size_t)shape_elements(&pipeline->in);
    struct plan *plan = device_load(device_get(), pipeline, 1);
    float *x = array(in, sizeof(*x));
    char what[96];

    goes_by_wgmma(plan);
    device_get()->ops->unload(device_get()->backend, plan);

    snprintf(what, sizeof(what), "%s %d [%d %d %d] to %d by [%d %d %d]", c->dtype, c->channels,
             c->in[0], c->in[1], c->in[2], c->outs, c->kernel[0], c->kernel[1], c->kernel[2]);
    models_input(x, in, 5, -0.5f);
    models_check(pipeline, x, c->rows, what, strcmp(c->dtype, "float16") == 0 ? 1e-3 : 4e-3);
    pipeline_free(pipeline);
    free(x);
}

/* Channels that fill no step; outputs for every width of the instruction, and for two and three
 * sets; windows of one place, of lines, in one dimension; padding larger than what it pads; lines
 * so wide that fewer units are in shared memory, in low tiles and in high ones; windows of more
 * lines than are. */
static void test_shapes(void **state)
{
    static const struct shape_case cases[] = {
        {"float16", 16, {3, 9, 14}, 16, {3, 3, 3}, {1, 1, 1}, 3},
        {"float16", 6, {2, 7, 33}, 30, {1, 1, 1}, {0, 0, 0}, 3},
        {"bfloat16", 33, {4, 6, 21}, 48, {2, 3, 5}, {0, 1, 2}, 2},
        {"bfloat16", 64, {3, 10, 12}, 64, {3, 3, 3}, {1, 1, 1}, 2},
        {"float16", 20, {5, 5, 40}, 96, {3, 1, 1}, {1, 0, 0}, 2},
        {"float16", 17, {3, 8, 300}, 100, {1, 3, 3}, {0, 1, 1}, 1},
        {"bfloat16", 16, {2, 6, 10}, 200, {1, 3, 3}, {0, 0, 0}, 2},
        {"float16", 8, {9, 9, 20}, 300, {3, 1, 3}, {1, 0, 1}, 1},
        {"float16", 12, {8, 14, 40}, 20, {5, 5, 5}, {2, 2, 2}, 1},
        {"bfloat16", 7, {1, 1, 70}, 9, {1, 1, 9}, {0, 0, 4}, 5},
        {"float16", 6, {1, 1, 70}, 1, {3, 1, 9}, {2, 0, 4}, 2},
        {"float16", 9, {4, 1, 1}, 12, {5, 1, 1}, {2, 0, 0}, 3},
        {"bfloat16", 16, {1, 4, 1022}, 16, {1, 3, 3}, {0, 1, 1}, 1},
        {"float16", 16, {1, 4, 1022}, 16, {1, 3, 3}, {0, 1, 1}, 23},
        {"float16", 8, {1, 20, 64}, 100, {1, 9, 9}, {0, 4, 4}, 1},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_shape(&cases[i]);
}

/* Two models by the same kernel: what one needs of it holds when the other, which needs less, has
 * been loaded. */
static void test_two_models(void **state)
{
    static const struct shape_case large = {"float16", 32, {4, 9, 28}, 64, {3, 3, 3}, {1, 1, 1}, 4};
    static const struct shape_case small = {"float16", 16, {2, 5, 9}, 64, {1, 1, 1}, {0, 0, 0}, 4};
    struct pipeline *pipelines[2] = {build(&large), build(&small)};
    struct plan *plans[2];
    size_t in = 4 * (size_t)shape_elements(&pipelines[0]->in);
    size_t out = 4 * (size_t)shape_elements(&pipelines[0]->out);
    uint16_t *x = array(in, 2), *y = array(out, 2), *want = array(out, 2);
    float *v = array(in, sizeof(*v));

    (void)state;
    models_input(v, in, 4, -0.5f);
    tensor_from_float(pipelines[0]->dtype, v, x, in);
    for (int i = 0; i < 2; i++) {
        plans[i] = device_load(device_get(), pipelines[i], 64);
        goes_by_wgmma(plans[i]);
        models_run_in(plans[0], pipelines[0], x, i ? y : want, 4, false);
    }
    assert_memory_equal(y, want, out * 2);
    for (int i = 0; i < 2; i++) {
        device_get()->ops->unload(device_get()->backend, plans[i]);
        pipeline_free(pipelines[i]);
    }
    free(x);
    free(y);
    free(want);
    free(v);
}

/* NaN and infinities reach the outputs whose windows have them, and no others. */
static void test_spoilt(void **state)
{
    static const struct shape_case c = {"float16", 18, {3, 9, 14}, 24, {3, 3, 3}, {1, 1, 1}, 3};
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct pipeline *pipeline = build(&c);
    size_t in = (size_t)shape_elements(&pipeline->in);
    float *x = array(c.rows * in, sizeof(*x));

    (void)state;
    models_input(x, c.rows * in, 6, -0.5f);
    for (uint32_t row = 0; row < c.rows; row++)
        x[row * in + row * 2551 % in] = bad[row];
    models_check(pipeline, x, c.rows, "spoilt", 1e-3);
    pipeline_free(pipeline);
    free(x);
}

/* Rows alone, in low tiles, and among so many that tiles are high. */
static void test_batches(void **state)
{
    static const struct shape_case c = {"float16", 16, {6, 20, 30}, 16, {3, 3, 3}, {1, 1, 1}, 23};
    struct pipeline *pipeline = build(&c);
    size_t in = (size_t)shape_elements(&pipeline->in);
    size_t out = (size_t)shape_elements(&pipeline->out);
    float *x = array(c.rows * in, sizeof(*x));
    uint16_t *own = array(c.rows * in, 2), *want = array(c.rows * out, 2), *y = array(out, 2);

    (void)state;
    models_input(x, c.rows * in, 9, -0.5f);
    models_check(pipeline, x, c.rows, "many rows", 1e-3);
    tensor_from_float(pipeline->dtype, x, own, c.rows * in);
    models_run(pipeline, own, want, c.rows, false);
    for (uint32_t row = 0; row < c.rows; row++) {
        models_run(pipeline, own + row * in, y, 1, false);
        assert_memory_equal(y, want + row * out, out * 2);
    }
    pipeline_free(pipeline);
    free(x);
    free(own);
    free(want);
    free(y);
}

/* More than is laid out at a time. */
static void test_pieces(void **state)
{
    static const struct shape_case c = {"bfloat16", 16, {64, 64, 64}, 3, {1, 1, 1}, {0, 0, 0}, 9};

    (void)state;
    check_shape(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),     cmocka_unit_test(test_spoilt),
        cmocka_unit_test(test_batches),    cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_two_models),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
