/*
 * Chains of stages: PyTorch's shape rules, what is refused and how it is said, parameters, the
 * shapes of random weights.
 */
#include "fixture.h"

#include <math.h>

#include "kernels/dropout.h"

#define MODEL(shape, stages)                                                \
    "name = \"m\"; weights = \"w.safetensors\"; input = { shape = [ " shape \
    " ]; };\nstages = (\n" stages "\n);"

#define A_STAGES(out, groups, bias)                                                                \
    "{ op = \"linear\"; weight = \"gemm.weight\"; bias = \"gemm.bias\"; out = " out "; },\n"       \
    "{ op = \"group_norm\"; groups = " groups "; weight = \"gn.weight\"; bias = \"gn.bias\"; },\n" \
    "{ op = \"amin\"; dim = 1; keepdim = true; },\n"                                               \
    "{ op = \"add\"; tensor = \"bias\"; shape = [ " bias " ]; }"

#define B_STAGES                                                                                \
    "{ op = \"conv3d\"; weight = \"conv.weight\"; bias = \"conv.bias\"; out = 16; kernel = 3; " \
    "},\n"                                                                                      \
    "{ op = \"group_norm\"; groups = 8; weight = \"norm.weight\"; bias = \"norm.bias\"; },\n"   \
    "{ op = \"minimum\"; value = 0.0; },\n"                                                     \
    "{ op = \"clamp\"; min = 0.0; max = 1.0; },\n"                                              \
    "{ op = \"dropout\"; p = 0.2; }"

static struct fixture fixture;

static float fill(const char *name, int64_t i)
{
    return (float)((i * 37 + name[0]) % 101) / 64 - 0.75f;
}

static struct pipeline *build(const char *text)
{
    struct pipeline *pipeline = NULL;
    struct report report;

    if (fixture_build(&fixture, text, fill, &pipeline, &report) < 0)
        fail_msg("%s\ngave \"%s\"", text, report.text);
    return pipeline;
}

static void check_shape(const char *text, const char *want)
{
    struct pipeline *pipeline = build(text);
    char have[160];

    shape_print(&pipeline->out, have, sizeof(have));
    if (strcmp(have, want) != 0)
        fail_msg("%s\ngives %s, not %s", text, have, want);
    pipeline_free(pipeline);
}

static void test_shapes(void **state)
{
    static const struct {
        const char *text, *out;
    } cases[] = {
        {MODEL("5", "{ op = \"linear\"; weight = \"w\"; out = 7; }"), "[N, 7]"},
        {MODEL("3, 5", "{ op = \"linear\"; weight = \"w\"; out = 7; }"), "[N, 3, 7]"},
        {MODEL("2, 5, 6, 7", "{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = 3; }"),
         "[N, 4, 3, 4, 5]"},
        {MODEL("2, 5, 6, 7", "{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = [1, 2, 3];"
                             " stride = [2, 3, 4]; padding = [0, 1, 2]; }"),
         "[N, 4, 3, 3, 3]"},
        {MODEL("2, 3, 3, 3", "{ op = \"conv3d\"; weight = \"w\"; out = 4; kernel = 3; }"),
         "[N, 4, 1, 1, 1]"},
        {MODEL("6, 4", "{ op = \"group_norm\"; groups = 3; }"), "[N, 6, 4]"},
        {MODEL("6, 4", "{ op = \"amin\"; dim = 1; }"), "[N, 4]"},
        {MODEL("6, 4", "{ op = \"amin\"; dim = 2; keepdim = true; }"), "[N, 6, 1]"},
        {MODEL("6, 4", "{ op = \"amin\"; dim = -2; }"), "[N, 4]"},
        {MODEL("6", "{ op = \"amin\"; dim = -1; }"), "[N]"},
        {MODEL("6", "{ op = \"clamp\"; min = 0; }, { op = \"minimum\"; value = 1; },"
                    "{ op = \"dropout\"; p = 0; }"),
         "[N, 6]"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = 6; }"), "[N, 6]"},
        {MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = 6; }"), "[N, 6]"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = 1; }"), "[N, 6]"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = [1, 6]; }"), "[N, 6]"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = [3, 1, 6]; }"), "[3, N, 6]"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = [1, 1, 1]; }"), "[1, N, 6]"},
        {MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = [1, 8, 1, 1]; }"), "[1, 8, N, 1]"},
        {MODEL("2, 1", "{ op = \"add\"; tensor = \"t\"; shape = [2, 3]; }"), "[N, 2, 3]"},
        {MODEL("6", "{ op = \"amin\"; dim = 1; }, { op = \"add\"; tensor = \"t\"; shape = 1; }"),
         "[N]"},
        {MODEL("6", "{ op = \"amin\"; dim = 1; },"
                    "{ op = \"add\"; tensor = \"t\"; shape = [4, 1]; }"),
         "[4, N]"},
        {MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = [1, 8, 1, 1]; },"
                    "{ op = \"minimum\"; value = 1; }, { op = \"clamp\"; max = 1; },"
                    "{ op = \"dropout\"; p = 0.1; }"),
         "[1, 8, N, 1]"},
        {MODEL("1, 1, 1, 1, 1, 1, 1", "{ op = \"minimum\"; value = 1; }"),
         "[N, 1, 1, 1, 1, 1, 1, 1]"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_shape(cases[i].text, cases[i].out);
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {MODEL("5", "{ op = \"amin\"; dim = 1; }, { op = \"linear\"; weight = \"w\"; out = 7; }"),
         "m.conf:3: linear: needs an input [N, ..., K], not [N]"},
        {MODEL("5", "{ op = \"conv3d\"; weight = \"w\"; out = 7; kernel = 1; }"),
         "m.conf:3: conv3d: needs an input [N, C, D, H, W], not [N, 5]"},
        {MODEL("1, 4, 4, 2", "{ op = \"minimum\"; value = 1; },\n"
                             "{ op = \"conv3d\"; weight = \"w\"; out = 7; kernel = 3; }"),
         "m.conf:4: conv3d: kernel [3, 3, 3] is larger than the padded input [N, 1, 4, 4, 2]"},
        {MODEL("6", "{ op = \"group_norm\"; groups = 4; }"),
         "m.conf:3: group_norm: 4 groups do not divide the 6 channels of [N, 6]"},
        {MODEL("6", "{ op = \"amin\"; dim = 1; }, { op = \"group_norm\"; groups = 1; }"),
         "m.conf:3: group_norm: needs an input [N, C, ...], not [N]"},
        {MODEL("6", "{ op = \"amin\"; dim = 0; }"),
         "m.conf:3: amin: dimension 0 of [N, 6] is the batch: rows never mix"},
        {MODEL("6", "{ op = \"amin\"; dim = -2; }"),
         "m.conf:3: amin: dimension -2 of [N, 6] is the batch: rows never mix"},
        {MODEL("6", "{ op = \"amin\"; dim = 2; }"), "m.conf:3: amin: [N, 6] has no dimension 2"},
        {MODEL("6", "{ op = \"amin\"; dim = -3; }"), "m.conf:3: amin: [N, 6] has no dimension -3"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = 5; }"),
         "m.conf:3: add: tensor 't' [5] does not broadcast with [N, 6]"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = [3, 6]; }"),
         "m.conf:3: add: tensor 't' [3, 6] has size 3 along the batch of [N, 6]: rows never mix"},
        {MODEL("6", "{ op = \"add\"; tensor = \"t\"; shape = [4, 3, 6]; }"),
         "m.conf:3: add: tensor 't' [4, 3, 6] has size 3 along the batch of [N, 6]: rows never "
         "mix"},
        {MODEL("6", "{ op = \"amin\"; dim = 1; }, { op = \"add\"; tensor = \"t\"; shape = 4; }"),
         "m.conf:3: add: tensor 't' [4] has size 4 along the batch of [N]: rows never mix"},
        {MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = [8, 1, 1]; },\n"
                    "{ op = \"add\"; tensor = \"u\"; shape = 1; }"),
         "m.conf:4: add: an add has moved the batch of [8, N, 1]: only pointwise stages may "
         "follow"},
        {MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = [8, 1, 1]; },\n"
                    "{ op = \"amin\"; dim = 2; }"),
         "m.conf:4: amin: an add has moved the batch of [8, N, 1]: only pointwise stages may "
         "follow"},
        {MODEL("1", "{ op = \"add\"; tensor = \"t\"; shape = [8, 1, 1]; },\n"
                    "{ op = \"linear\"; weight = \"w\"; out = 2; }"),
         "m.conf:4: linear: an add has moved the batch of [8, N, 1]: only pointwise stages may "
         "follow"},
        {MODEL("1048576", "{ op = \"linear\"; weight = \"w\"; out = 1048577; }"),
         "m.conf:3: linear: tensor 'w' has too many elements"},
        {MODEL("1048576, 1", "{ op = \"linear\"; weight = \"w\"; out = 1048577; }"),
         "m.conf:3: linear: its result [N, 1048576, 1048577] has too many elements"},
        {MODEL("1, 4, 4, 4", "{ op = \"conv3d\"; weight = \"w\"; out = 1; kernel = 1;"
                             " padding = 1048576; }"),
         "m.conf:3: conv3d: its result [N, 1, 2097156, 2097156, 2097156] has too many elements"},
        {MODEL("1048576, 1", "{ op = \"add\"; tensor = \"t\"; shape = 1048577; }"),
         "m.conf:3: add: its result [N, 1048576, 1048577] has too many elements"},
        {MODEL("4", "{ op = \"linear\"; weight = \"w\"; }"),
         "m.conf:3: linear: without its weights it needs out"},
        {MODEL("4", "{ op = \"linear\"; weight = \"w\"; out = 4; },\n"
                    "{ op = \"linear\"; weight = \"w\"; out = 5; }"),
         "m.conf:4: linear: tensor 'w' has two shapes"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct report report = {"none"};
        struct pipeline *pipeline;
        int r = fixture_build(&fixture, cases[i].text, fill, &pipeline, &report);

        if (r != -EINVAL || strcmp(report.text, cases[i].error) != 0)
            fail_msg("%s\ngave %d \"%s\", not \"%s\"", cases[i].text, r, report.text,
                     cases[i].error);
    }
}

/* Weights of one model under another: the file decides, and is held against the model. */
static void test_weights_differ(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {MODEL("5", "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; }"), NULL},
        {MODEL("5", "{ op = \"linear\"; weight = \"w\"; out = 3; }"), NULL},
        {MODEL("3", "{ op = \"group_norm\"; groups = 3; weight = \"b\"; bias = \"b\"; }"), NULL},
        {MODEL("3", "{ op = \"add\"; tensor = \"b\"; }"), NULL},
        {MODEL("5", "{ op = \"linear\"; weight = \"none\"; }"),
         "m.conf:3: linear: tensor 'none' is not in w.safetensors"},
        {MODEL("5", "{ op = \"linear\"; weight = \"w\"; bias = \"none\"; }"),
         "m.conf:3: linear: tensor 'none' is not in w.safetensors"},
        {MODEL("5", "{ op = \"linear\"; weight = \"w\"; out = 4; }"),
         "m.conf:3: linear: tensor 'w' [3, 5] is not what out says"},
        {MODEL("4", "{ op = \"linear\"; weight = \"w\"; }"),
         "m.conf:3: linear: tensor 'w' is [3, 5], but the input [N, 4] needs [3, 4]"},
        {MODEL("5", "{ op = \"linear\"; weight = \"b\"; }"),
         "m.conf:3: linear: tensor 'b' [3] needs 2 dimensions"},
        {MODEL("5", "{ op = \"linear\"; weight = \"w\"; bias = \"w\"; }"),
         "m.conf:3: linear: tensor 'w' is [3, 5], but the input [N, 5] needs [3]"},
        {MODEL("1, 5, 5, 5", "{ op = \"conv3d\"; weight = \"w\"; }"),
         "m.conf:3: conv3d: tensor 'w' [3, 5] needs 5 dimensions"},
        {MODEL("4", "{ op = \"group_norm\"; groups = 2; weight = \"b\"; }"),
         "m.conf:3: group_norm: tensor 'b' is [3], but the input [N, 4] needs [4]"},
        {MODEL("5", "{ op = \"add\"; tensor = \"b\"; }"),
         "m.conf:3: add: tensor 'b' [3] does not broadcast with [N, 5]"},
        {MODEL("3", "{ op = \"add\"; tensor = \"b\"; shape = [1, 3]; }"),
         "m.conf:3: add: tensor 'b' [3] is not what shape says"},
        {MODEL("4, 5", "{ op = \"linear\"; weight = \"w\"; }") "dtype = \"float16\";",
         "m.conf:3: linear: tensor 'w' is F32, not the model's F16"},
    };
    static struct model model;

    (void)state;
    pipeline_free(build(MODEL("5", "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = 3; }")));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct report report = {"none"};
        struct pipeline *pipeline = NULL;
        struct safetensors *weights;

        assert_int_equal(safetensors_open(fixture.dir, FIXTURE_WEIGHTS, &weights, &report), 0);
        if (fixture_parse(cases[i].text, &model, &report) < 0)
            fail_msg("%s", report.text);
        if (pipeline_build(&model, weights, &pipeline, &report) < 0)
            safetensors_free(weights);
        pipeline_free(pipeline);
        if (strcmp(cases[i].error ? cases[i].error : "none", report.text) != 0)
            fail_msg("%s\ngave \"%s\", not \"%s\"", cases[i].text, report.text, cases[i].error);
    }
    /* A model without weights that needs some. */
    {
        struct report report;
        struct pipeline *pipeline;

        assert_int_equal(fixture_parse(cases[0].text, &model, &report), 0);
        assert_int_equal(pipeline_build(&model, NULL, &pipeline, &report), -EINVAL);
        assert_string_equal(report.text,
                            "m.conf:3: linear: tensor 'w': the model names no weights");
    }
}

/* Tensors that a file can hold and a model cannot use. */
static void test_empty_tensors(void **state)
{
    static const struct st_tensor tensors[] = {
        {.name = "w", .dtype = "F32", .element_bytes = 4, .rank = 2, .dims = {0, 5}},
        {.name = "s", .dtype = "F32", .element_bytes = 4, .rank = 0, .elements = 1, .size = 4},
    };
    static struct model model;
    struct safetensors *weights;
    struct pipeline *pipeline;
    struct st_writer *writer;
    struct report report;
    float one = 1;

    (void)state;
    assert_int_equal(st_writer_new(fixture.weights, tensors, 2, &writer, &report), 0);
    assert_int_equal(st_writer_write(writer, &one, 4, &report), 0);
    assert_int_equal(st_writer_finish(writer, &report), 0);
    st_writer_free(writer);
    assert_int_equal(safetensors_open(fixture.dir, FIXTURE_WEIGHTS, &weights, &report), 0);
    assert_int_equal(
        fixture_parse(MODEL("5", "{ op = \"linear\"; weight = \"w\"; }"), &model, &report), 0);
    assert_int_equal(pipeline_build(&model, weights, &pipeline, &report), -EINVAL);
    assert_string_equal(report.text, "m.conf:3: linear: tensor 'w' [0, 5] is empty");
    /* A scalar adds to everything. */
    assert_int_equal(
        fixture_parse(MODEL("5", "{ op = \"add\"; tensor = \"s\"; }"), &model, &report), 0);
    assert_int_equal(pipeline_build(&model, weights, &pipeline, &report), 0);
    assert_int_equal(shape_elements(&pipeline->out), 5);
    assert_int_equal(shape_elements(&pipeline->stages[0].add.tensor), 1);
    pipeline_free(pipeline);
}

/* The two pipelines at their real sizes: shapes from the model file alone. */
static void test_real_sizes(void **state)
{
    static struct weight_shape shapes[8];
    static struct model model;
    struct report report;

    (void)state;
    assert_int_equal(
        fixture_parse(MODEL("8192", A_STAGES("8192", "512", "1, 8192, 1, 1")), &model, &report), 0);
    assert_int_equal(pipeline_weight_shapes(&model, shapes, 8, &report), 5);
    assert_string_equal(shapes[0].name, "gemm.weight");
    assert_int_equal(shapes[0].rank, 2);
    assert_int_equal(shapes[0].dims[1], 8192);
    assert_true(shapes[0].bound == 1 / sqrt(8192) && !shapes[0].normal);
    assert_string_equal(shapes[1].name, "gemm.bias");
    assert_true(shapes[1].bound == 1 / sqrt(8192) && shapes[1].rank == 1);
    assert_string_equal(shapes[2].name, "gn.weight");
    assert_true(shapes[2].bound == 0 && shapes[2].value == 1);
    assert_string_equal(shapes[3].name, "gn.bias");
    assert_true(shapes[3].bound == 0 && shapes[3].value == 0);
    assert_string_equal(shapes[4].name, "bias");
    assert_true(shapes[4].normal && shapes[4].rank == 4 && shapes[4].dims[1] == 8192);

    assert_int_equal(fixture_parse(MODEL("3, 16, 64, 64", B_STAGES), &model, &report), 0);
    assert_int_equal(pipeline_weight_shapes(&model, shapes, 8, &report), 4);
    assert_int_equal(shapes[0].rank, 5);
    assert_int_equal(shapes[0].dims[0] * 1000 + shapes[0].dims[1], 16003);
    assert_true(shapes[0].bound == 1 / sqrt(81));
    assert_int_equal(pipeline_weight_shapes(&model, shapes, 3, &report), -EINVAL);
}

static void test_b(void **state)
{
    struct pipeline *pipeline = build(MODEL("3, 16, 64, 64", B_STAGES));
    const struct stage *s = pipeline->stages;
    char text[160];

    (void)state;
    assert_string_equal(shape_print(&pipeline->out, text, sizeof(text)), "[N, 16, 14, 62, 62]");
    assert_int_equal(128 * shape_elements(&pipeline->out), 110215168);
    assert_int_equal(s[0].conv3d.in_channels, 3);
    assert_int_equal(s[0].conv3d.out_channels, 16);
    assert_int_equal(s[0].conv3d.kernel[2], 3);
    assert_int_equal(s[0].weight.elements, 16 * 81);
    assert_int_equal(s[0].bias.elements, 16);
    assert_int_equal(s[1].group_norm.groups, 8);
    assert_int_equal(s[1].group_norm.channels, 16);
    assert_int_equal(s[1].group_norm.spatial, 14 * 62 * 62);
    assert_true(s[3].clamp.has_min && s[3].clamp.max == 1);
    assert_true(pipeline_masks(pipeline));
    assert_false(pipeline->outer_sum);
    assert_int_equal(pipeline_offset_advance(pipeline, 128), 408);
    assert_true(pipeline->proof.constant);
    pipeline_drop_weights(pipeline);
    assert_null(pipeline->weights);
    assert_null(s[0].weight.tensor);
    assert_int_equal(s[0].weight.elements, 16 * 81);
    pipeline_free(pipeline);
}

static void test_a(void **state)
{
    struct pipeline *pipeline = build(MODEL("64", A_STAGES("96", "6", "1, 96, 1, 1")));
    const struct stage *s = pipeline->stages;
    struct report report;
    float values[96];

    (void)state;
    assert_int_equal(s[0].linear.in_features, 64);
    assert_int_equal(s[0].linear.out_features, 96);
    assert_int_equal(s[0].linear.rows, 1);
    assert_int_equal(s[1].group_norm.spatial, 1);
    assert_int_equal(s[2].amin.outer * 1000 + s[2].amin.n * 10 + s[2].amin.inner, 1961);
    assert_true(s[3].add.moves_batch && s[3].out.batch == 2);
    assert_true(pipeline->outer_sum);
    assert_int_equal(s[3].add.tensor.rank, 4);
    assert_int_equal(s[3].add.tensor.dims[1], 96);
    assert_false(pipeline_masks(pipeline));
    assert_int_equal(pipeline_offset_advance(pipeline, 5), 0);
    assert_int_equal(pipeline_param(pipeline, &s[0].weight, 100, 96, values, &report), 0);
    for (int i = 0; i < 96; i++)
        assert_true(values[i] == fill("gemm.weight", 100 + i));
    assert_int_equal(pipeline_param(pipeline, &s[0].weight, 64 * 96 - 1, 2, values, &report),
                     -EINVAL);
    pipeline_free(pipeline);
    pipeline = build(MODEL("64", A_STAGES("96", "6", "96")));
    assert_false(pipeline->outer_sum);
    assert_false(pipeline->stages[3].add.moves_batch);
    pipeline_free(pipeline);
}

/* Parameters of 16 bits arrive as float32, also in pieces. */
static void test_halves(void **state)
{
    static float values[300 * 250];
    struct pipeline *pipeline = build(
        MODEL("250", "{ op = \"linear\"; weight = \"w\"; out = 300; }") "dtype=\"bfloat16\";");
    struct report report;

    (void)state;
    assert_int_equal(
        pipeline_param(pipeline, &pipeline->stages[0].weight, 0, 300 * 250, values, &report), 0);
    for (int i = 0; i < 300 * 250; i++)
        assert_true(values[i] == bfloat16_to_float(bfloat16_from_float(fill("w", i))));
    pipeline_free(pipeline);
}

static void test_offsets(void **state)
{
    struct pipeline *pipeline =
        build(MODEL("1000", "{ op = \"dropout\"; p = 0.2; }, { op = \"dropout\"; p = 0; },"
                            "{ op = \"dropout\"; p = 1; }, { op = \"dropout\"; p = 0.5; }"));

    (void)state;
    assert_int_equal(pipeline_offset_advance(pipeline, 1), 8);
    assert_int_equal(pipeline_offset_advance(pipeline, 1081), 8);
    assert_int_equal(pipeline_offset_advance(pipeline, 1082), 16);
    pipeline_free(pipeline);
    pipeline = build(MODEL("1000", "{ op = \"dropout\"; p = 0; }"));
    assert_false(pipeline_masks(pipeline));
    pipeline_free(pipeline);
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
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_weights_differ),
        cmocka_unit_test(test_empty_tensors),
        cmocka_unit_test(test_real_sizes),
        cmocka_unit_test(test_b),
        cmocka_unit_test(test_a),
        cmocka_unit_test(test_halves),
        cmocka_unit_test(test_offsets),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
