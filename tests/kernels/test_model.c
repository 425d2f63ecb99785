/*
 * Model files: every key, its default, its type and its range.
 */
#include "fixture.h"

#define HEAD        "name = \"m\"; input = { shape = [ 4 ]; };\n"
#define STAGE(text) HEAD "stages = ( { " text " } );"

static struct model model;

static void accept(const char *text)
{
    struct report report;

    if (fixture_parse(text, &model, &report) < 0)
        fail_msg("%s\ngave \"%s\"", text, report.text);
}

static void test_defaults(void **state)
{
    (void)state;
    accept(HEAD "stages = ( { op = \"dropout\"; p = 0.5; } );");
    assert_string_equal(model.file, "m.conf");
    assert_string_equal(model.name, "m");
    assert_string_equal(model.weights, "");
    assert_int_equal(model.dtype, DTYPE_FLOAT32);
    assert_int_equal(model.precision, PRECISION_FP32);
    assert_true(model.prove);
    assert_int_equal(model.input.rank, 2);
    assert_int_equal(model.input.batch, 0);
    assert_int_equal(model.input.dims[0], 1);
    assert_int_equal(model.input.dims[1], 4);
    assert_int_equal(model.max_rows, 1024);
    assert_int_equal(model.max_delay_us, 0);
    assert_int_equal(model.queue_rows, 65536);
    accept(STAGE("op = \"group_norm\"; groups = 2;"));
    assert_true(model.stages[0].eps == 1e-5);
    accept(STAGE("op = \"conv3d\"; weight = \"w\";"));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(model.stages[0].stride[i], 1);
        assert_int_equal(model.stages[0].padding[i], 0);
    }
    assert_int_equal(model.stages[0].n_size, 0);
    accept(STAGE("op = \"amin\"; dim = 1;"));
    assert_false(model.stages[0].keepdim);
}

static void test_all_keys(void **state)
{
    const struct stage_spec *s = model.stages;

    (void)state;
    accept("name = \"All.of-it_1\";\nweights = \"dir/w.safetensors\";\ndtype = \"bfloat16\";\n"
           "precision = \"fp32\"; prove = false; input = { shape = ( 3, 4, 5, 6 ); };\n"
           "stages = (\n"
           "{ op = \"conv3d\"; weight = \"c.w\"; bias = \"c.b\"; stride = 2; padding = (0, 1, 2);\n"
           "  out = 8; kernel = [1, 2, 3]; },\n"
           "{ op = \"group_norm\"; groups = 4; eps = 0; weight = \"g.w\"; bias = \"g.b\"; },\n"
           "{ op = \"linear\"; weight = \"l.w\"; bias = \"l.b\"; out = 7; },\n"
           "{ op = \"amin\"; dim = -1; keepdim = true; },\n"
           "{ op = \"minimum\"; value = -1; },\n"
           "{ op = \"clamp\"; min = 2.5; max = 1e-3; }, { op = \"clamp\"; max = 4; },\n"
           "{ op = \"add\"; tensor = \"t\"; shape = [1, 2, 3]; },\n"
           "{ op = \"dropout\"; p = 1; }\n);\n"
           "batching = { max_rows = 5; max_delay_us = 6; queue_rows = 7; };\n");
    assert_string_equal(model.name, "All.of-it_1");
    assert_string_equal(model.weights, "dir/w.safetensors");
    assert_int_equal(model.dtype, DTYPE_BFLOAT16);
    assert_false(model.prove);
    assert_int_equal(model.input.rank, 5);
    assert_int_equal(model.n_stages, 9);
    assert_int_equal(s[0].op, OP_CONV3D);
    assert_int_equal(s[0].line, 6);
    assert_string_equal(s[0].weight, "c.w");
    assert_string_equal(s[0].bias, "c.b");
    assert_int_equal(s[0].stride[2], 2);
    assert_int_equal(s[0].padding[1], 1);
    assert_int_equal(s[0].n_size, 4);
    assert_int_equal(s[0].size[0], 8);
    assert_int_equal(s[0].size[3], 3);
    assert_int_equal(s[1].line, 8);
    assert_int_equal(s[1].groups, 4);
    assert_true(s[1].eps == 0);
    assert_int_equal(s[2].size[0], 7);
    assert_int_equal(s[3].dim, -1);
    assert_true(s[3].keepdim);
    assert_true(s[4].value == -1);
    assert_true(s[5].has_min && s[5].has_max && s[5].min == 2.5 && s[5].max == 1e-3);
    assert_true(!s[6].has_min && s[6].has_max && s[6].max == 4);
    assert_string_equal(s[7].tensor, "t");
    assert_int_equal(s[7].n_size, 3);
    assert_true(s[8].p == 1);
    assert_int_equal(model.max_rows, 5);
    assert_int_equal(model.max_delay_us, 6);
    assert_int_equal(model.queue_rows, 7);
    accept(HEAD "precision = \"tf32\"; stages = ( { op = \"dropout\"; p = 0; } );");
    assert_int_equal(model.precision, PRECISION_TF32);
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", "m.conf:1: name: is missing"},
        {"name = \"\";", "m.conf:1: name: has 1 to 64 characters"},
        {"name = \".x\";", "m.conf:1: name: may hold letters"},
        {"name = \"a/b\";", "m.conf:1: name: may hold letters"},
        {"name = \"a\\n\";", "m.conf:1: name: may hold letters"},
        {"name = \"m\";", "m.conf:1: input: is missing"},
        {"name = \"m\"; input = 4;", "m.conf:1: input: must be a group"},
        {"name = \"m\"; input = { };", "m.conf:1: shape: is missing"},
        {"name = \"m\"; input = { shape = []; };", "m.conf:1: shape: must not be empty"},
        {"name = \"m\"; input = { shape = [ 0 ]; };", "m.conf:1: shape: 0 is outside"},
        {"name = \"m\"; input = { shape = [ -1 ]; };", "m.conf:1: shape: -1 is outside"},
        {"name = \"m\"; input = { shape = [ 1, 1, 1, 1, 1, 1, 1, 1 ]; };",
         "m.conf:1: shape: has 8 numbers, more than 7"},
        {"name = \"m\"; input = { shape = [ 1048576, 1048577 ]; };",
         "m.conf:1: shape: has too many elements"},
        {"name = \"m\"; input = { shape = [ 1000000000000L, 1000000000000L ]; };",
         "m.conf:1: shape: has too many elements"},
        {HEAD, "m.conf:1: stages: is missing or empty"},
        {HEAD "stages = ();", "m.conf:2: stages: is missing or empty"},
        {HEAD "stages = 5;", "m.conf:2: stages: must be a list"},
        {HEAD "dtype = \"float64\";", "m.conf:2: dtype: 'float64' is none of"},
        {HEAD "dtype = 32;", "m.conf:2: dtype: must be a string"},
        {HEAD "precision = \"tf16\";", "m.conf:2: precision: 'tf16' is none of"},
        {HEAD "dtype = \"float16\"; precision = \"tf32\";", "m.conf:2: precision: tf32 is for"},
        {HEAD "weights = \"\";", "m.conf:2: weights: must not be empty"},
        {HEAD "prove = 0;", "m.conf:2: prove: must be true or false"},
        {STAGE("op = \"dropout\"; p = 0.2;") "batching = { max_rows = 0; };",
         "m.conf:2: max_rows: 0 is outside 1 to 1048576"},
        {STAGE("op = \"dropout\"; p = 0.2;") "batching = { max_delay_us = -1; };",
         "m.conf:2: max_delay_us: -1 is outside"},
        {STAGE("op = \"dropout\"; p = 0.2;") "batching = { rows = 1; };",
         "m.conf:2: rows: unknown key"},
        {STAGE("op = \"dropout\"; p = 0.2;") "\nextra = 1;", "m.conf:3: extra: unknown key"},
        {STAGE("p = 0.2;"), "m.conf:2: op: is missing"},
        {STAGE("op = \"softmax\";"),
         "m.conf:2: op: there is no stage 'softmax'; there are linear, conv3d"},
        {STAGE("op = 3;"), "m.conf:2: op: must be a string"},
        {STAGE("op = \"linear\";"), "m.conf:2: weight: is missing"},
        {STAGE("op = \"linear\"; out = 4; bias = \"b\";"), "m.conf:2: weight: is missing"},
        {STAGE("op = \"linear\"; out = 4; weigth = \"w\";"), "m.conf:2: weigth: unknown key"},
        {STAGE("op = \"dropout\"; q = 0.2;"), "m.conf:2: q: unknown key"},
        {"nam = \"m\"; input = { shape = [ 4 ]; };", "m.conf:1: nam: unknown key"},
        {STAGE("op = \"linear\"; weight = \"\";"), "m.conf:2: weight: a tensor's name"},
        {STAGE("op = \"linear\"; weight = \"w\"; out = 0;"), "m.conf:2: out: 0 is outside"},
        {STAGE("op = \"linear\"; weight = \"w\"; dim = 1;"), "m.conf:2: dim: unknown key"},
        {STAGE("op = \"conv3d\";"), "m.conf:2: weight: is missing"},
        {STAGE("op = \"conv3d\"; weight = \"w\"; out = 4;"), "m.conf:2: kernel: is missing"},
        {STAGE("op = \"conv3d\"; weight = \"w\"; kernel = 4;"), "m.conf:2: out: is missing"},
        {STAGE("op = \"conv3d\"; weight = \"w\"; stride = 0;"), "m.conf:2: stride: 0 is outside"},
        {STAGE("op = \"conv3d\"; weight = \"w\"; stride = [1, 1];"),
         "m.conf:2: stride: needs 1 or 3"},
        {STAGE("op = \"conv3d\"; weight = \"w\"; padding = -1;"),
         "m.conf:2: padding: -1 is outside"},
        {STAGE("op = \"conv3d\"; weight = \"w\"; padding = 1.0;"),
         "m.conf:2: padding: must be a list of integers"},
        {STAGE("op = \"group_norm\";"), "m.conf:2: groups: is missing"},
        {STAGE("op = \"group_norm\"; groups = 0;"), "m.conf:2: groups: 0 is outside"},
        {STAGE("op = \"group_norm\"; groups = 1; eps = -1e-5;"),
         "m.conf:2: eps: must not be negative"},
        {STAGE("op = \"amin\";"), "m.conf:2: dim: is missing"},
        {STAGE("op = \"amin\"; dim = 8;"), "m.conf:2: dim: 8 is outside -8 to 7"},
        {STAGE("op = \"amin\"; dim = 1; keepdim = 1;"), "m.conf:2: keepdim: must be true"},
        {STAGE("op = \"minimum\";"), "m.conf:2: value: is missing"},
        {STAGE("op = \"minimum\"; value = 1e39;"), "m.conf:2: value: is too large for float32"},
        {STAGE("op = \"clamp\";"), "m.conf:2: min: is missing"},
        {STAGE("op = \"clamp\"; max = \"1\";"), "m.conf:2: max: must be a number"},
        {STAGE("op = \"add\";"), "m.conf:2: tensor: is missing"},
        {STAGE("op = \"add\"; tensor = \"t\"; shape = [];"), "m.conf:2: shape: must not be empty"},
        {STAGE("op = \"add\"; tensor = \"t\"; shape = [0];"), "m.conf:2: shape: 0 is outside"},
        {STAGE("op = \"dropout\";"), "m.conf:2: p: is missing"},
        {STAGE("op = \"dropout\"; p = 1.01;"), "m.conf:2: p: must be from 0 to 1"},
        {STAGE("op = \"dropout\"; p = -0.01;"), "m.conf:2: p: must be from 0 to 1"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct report report = {"none"};
        int r = fixture_parse(cases[i].text, &model, &report);

        if (r != -EINVAL || strncmp(report.text, cases[i].error, strlen(cases[i].error)) != 0)
            fail_msg("%s\ngave %d \"%s\", not \"%s\"", cases[i].text, r, report.text,
                     cases[i].error);
    }
}

/* Long names, many stages; nothing is written on failure. */
static void test_limits(void **state)
{
    static char text[8192];
    char name[300];
    struct report report;
    int n;

    (void)state;
    memset(name, 'a', sizeof(name));
    snprintf(text, sizeof(text), "name = \"%.65s\";", name);
    assert_int_equal(fixture_parse(text, &model, &report), -EINVAL);
    assert_non_null(strstr(report.text, "name: has 1 to 64"));
    snprintf(text, sizeof(text), HEAD "weights = \"%.256s\";", name);
    assert_int_equal(fixture_parse(text, &model, &report), -EINVAL);
    assert_non_null(strstr(report.text, "weights: is longer than 255 bytes"));
    snprintf(text, sizeof(text), STAGE("op = \"linear\"; weight = \"%.128s\";"), name);
    assert_int_equal(fixture_parse(text, &model, &report), -EINVAL);
    assert_non_null(strstr(report.text, "1 to 127 bytes"));
    snprintf(text, sizeof(text), STAGE("op = \"linear\"; weight = \"%.127s\";"), name);
    accept(text);
    for (int stages = 32; stages <= 33; stages++) {
        n = snprintf(text, sizeof(text), HEAD "stages = ( { op = \"dropout\"; p = 0; }");
        for (int i = 1; i < stages; i++)
            n += snprintf(text + n, sizeof(text) - (size_t)n, ", { op = \"dropout\"; p = 0; }");
        snprintf(text + n, sizeof(text) - (size_t)n, ");");
        memset(&model, 7, sizeof(model));
        assert_int_equal(fixture_parse(text, &model, &report), stages == 32 ? 0 : -EINVAL);
    }
    assert_non_null(strstr(report.text, "stages: more than 32"));
    for (size_t i = 0; i < sizeof(model); i++)
        assert_int_equal(((char *)&model)[i], 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_all_keys),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
