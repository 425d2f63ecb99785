/*
 * What comes back: the guard's results against those of the full path, compact results of both
 * pipelines, a variance beyond float32, masks that PyTorch drew, and A's error at real size.
 */
#include "tests/gpu/models.h"

#include <jansson.h>

#include "tests/kernels/sha256.h"

static struct fixture fixture;

/* The guard: what the proof gives is what the full path gives, for every kind of sample. */
static void test_guard(void **state)
{
    struct pipeline *full = models_b(&fixture, false, 5, 9, 12, "0.0");
    struct pipeline *proven = models_b(&fixture, true, 5, 9, 12, "0.0");
    struct plan *full_plan = device_load(device_get(), full, 64);
    struct plan *plan = device_load(device_get(), proven, 64);
    size_t in = (size_t)shape_elements(&full->in), out = (size_t)shape_elements(&full->out);
    const uint32_t rows = 90;
    size_t x_size = rows * in * 4;
    float *x = array(rows * in, 4), *want = array(rows * out, 4), *y = array(rows * out, 4);

    (void)state;
    assert_true(proven->proof.constant && !full->proof.constant);
    models_input(x, rows * in, 5, -0.5f);
    for (uint32_t row = 0; row < rows; row += 7) {
        float *sample = x + row * in + row % 50;

        *sample = (const float[]){NAN, INFINITY, -INFINITY, 3e38f, -1e38f, 1e37f}[row / 7 % 6];
    }
    for (int train = 0; train < 2; train++)
        for (int kind = 0; kind < 3; kind++) {
            struct job job = {.x = x,
                              .y = want,
                              .y_size = rows * out * 4,
                              .rows = rows,
                              .train = train,
                              .seed = 42,
                              .offset = 4 * 77};

            device_run_in(device_get(), full_plan, &job, 1, &x_size, kind, 0);
            assert_int_equal(job.result, 0);
            job.y = y;
            memset(y, 0xff, rows * out * 4);
            device_run_in(device_get(), plan, &job, 1, &x_size, kind, 0);
            assert_int_equal(job.result, 0);
            models_same("the proof's result", want, y, rows * out);
        }
    device_get()->ops->unload(device_get()->backend, full_plan);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(full);
    pipeline_free(proven);
    free(x);
    free(want);
    free(y);
}

/* Compact results of B: states, then full samples in order, two in a block; too little room fails
 * that job alone. */
static void check_compact(int d, int h, int w)
{
    struct pipeline *pipeline = models_b(&fixture, true, d, h, w, "0.0");
    struct plan *plan = device_load(device_get(), pipeline, 16);
    size_t in = (size_t)shape_elements(&pipeline->in), out = (size_t)shape_elements(&pipeline->out);
    const uint32_t rows = 37;
    size_t x_size[3] = {rows * in * 4, in * 4, rows * in * 4}, room = BACKEND_COMPACT_ROOM(rows);
    float *x = array(rows * in, 4), *whole = array(rows * out, 4);
    uint8_t *y = array(1, room + rows * out * 4), *small = array(1, room + out * 4 - 1);

    models_input(x, rows * in, 5, -0.5f);
    for (uint32_t row = 3; row < rows; row += 4)
        x[row * in + row] = row % 8 == 3 ? 1e38f : NAN;
    for (int kind = 0; kind < 3; kind++) {
        struct job jobs[3] = {
            {.x = x, .y = y, .y_size = room + rows * out * 4, .rows = rows, .compact = true},
            {.x = x, .y = whole, .y_size = out * 4, .rows = 1},
            {.x = x, .y = small, .y_size = room + out * 4 - 1, .rows = rows, .compact = true},
        };
        uint32_t n_full = 0;

        memset(y, 0xee, room + rows * out * 4);
        device_run_in(device_get(), plan, jobs, 3, x_size, kind, 0);
        assert_int_equal(jobs[0].result, 0);
        assert_int_equal(jobs[1].result, 0);
        assert_int_equal(jobs[2].result, -ENOSPC);
        jobs[1] = (struct job){.x = x, .y = whole, .y_size = rows * out * 4, .rows = rows};
        device_run_in(device_get(), plan, &jobs[1], 1, x_size, kind, 0);
        for (uint32_t row = 0; row < rows; row++) {
            int want = row % 4 != 3 ? 0 : row % 8 == 3 ? 2 : 1;

            if (y[row] != want)
                fail_msg("state of row %u is %d, not %d", row, y[row], want);
            if (want == 2)
                models_same("a full sample", whole + row * out,
                            (float *)(y + room) + n_full++ * out, out);
        }
        for (size_t i = rows; i < room; i++)
            assert_int_equal(y[i], 0);
        assert_int_equal(jobs[0].n_full, n_full);
    }
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(whole);
    free(y);
    free(small);
}

/* A variance beyond float32 gives beta, also where a difference from the mean is beyond it too. */
static void test_overflow(void **state)
{
    static const char text[] =
        "name = \"n\"; weights = \"" FIXTURE_WEIGHTS "\"; input = { shape = [32]; };"
        "stages = ({ op = \"group_norm\"; groups = 2; weight = \"g\"; bias = \"h\"; });";
    struct pipeline *pipeline = models_build(&fixture, text, 1);
    struct plan *plan = device_load(device_get(), pipeline, 4);
    float x[32], y[32];
    struct job job = {.x = x, .y = y, .y_size = sizeof(y), .rows = 1};

    (void)state;
    models_input(x, 32, 1, -0.5f);
    for (int i = 0; i < 16; i++)
        x[i] = i == 5 ? -3e38f : 3e38f;
    device_run(device_get(), plan, &job, 1);
    assert_int_equal(job.result, 0);
    for (int i = 0; i < 32; i++)
        if (i < 16 ? y[i] != models_fill("h", i) : !isfinite(y[i]))
            fail_msg("y[%d] is %.9g, beta %.9g", i, (double)y[i], (double)models_fill("h", i));
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
}

/* Samples that kernels write themselves, and those above 512 KiB that the copy engine brings. */
static void test_compact_b(void **state)
{
    (void)state;
    check_compact(5, 9, 12);
    check_compact(20, 26, 26);
}

/* Compact and full results of A in one batch. */
static void test_compact_a(void **state)
{
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", 96, 128, 8);
    struct plan *plan = device_load(device_get(), pipeline, 64);
    const uint32_t rows = 21;
    size_t x_size[3] = {rows * 96 * 4, rows * 96 * 4, 5 * 96 * 4};
    float *x = array(rows * 96, 4), *m = array(rows, 4), *y = array(rows * 128, 4);
    float *few = array(5, 4), tensor[128];
    struct report report;

    (void)state;
    models_input(x, rows * 96, 5, -0.5f);
    if (pipeline_param(pipeline, &pipeline->stages[3].weight, 0, 128, tensor, &report) < 0)
        fail_msg("%s", report.text);
    for (int kind = 0; kind < 3; kind++) {
        struct job jobs[3] = {
            {.x = x, .y = m, .y_size = rows * 4, .rows = rows, .compact = true},
            {.x = x, .y = y, .y_size = rows * 128 * 4, .rows = rows},
            {.x = x, .y = few, .y_size = 5 * 4, .rows = 5, .compact = true},
        };

        device_run_in(device_get(), plan, jobs, 3, x_size, kind, 0);
        for (int i = 0; i < 3; i++)
            assert_int_equal(jobs[i].result, 0);
        models_same("the first rows", m, few, 5);
        for (uint32_t c = 0; c < 128; c++)
            for (uint32_t row = 0; row < rows; row++)
                if (y[c * rows + row] != m[row] + tensor[c])
                    fail_msg("y[%u, %u] is %.9g, not %.9g", c, row, (double)y[c * rows + row],
                             (double)(m[row] + tensor[c]));
    }
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(m);
    free(y);
    free(few);
}

/* Masks that PyTorch drew: every size, and two of the largest. */
static void check_mask(const json_t *mask)
{
    int64_t n = json_integer_value(json_object_get(mask, "n"));
    double p = json_number_value(json_object_get(mask, "p"));
    struct region region = region_new(device_get(), (size_t)n * 8, false);
    float *x = (float *)region.at, *y = x + n;
    uint8_t *keep = (uint8_t *)x;
    struct pipeline *pipeline;
    struct plan *plan;
    struct sha256 sha;
    char text[300], hex[65];
    struct job job = {.x = x,
                      .y = y,
                      .y_size = (uint64_t)n * 4,
                      .x_memory = region.memory,
                      .y_memory = region.memory,
                      .rows = 1,
                      .train = true};

    job.seed = (uint64_t)json_integer_value(json_object_get(mask, "seed"));
    job.offset = (uint64_t)json_integer_value(json_object_get(mask, "offset"));
    snprintf(text, sizeof(text),
             "name = \"d\"; input = { shape = [%" PRId64
             "]; }; stages = ({ op = \"dropout\"; p = %.17g; });",
             n, p);
    pipeline = models_build(&fixture, text, 1);
    plan = device_load(device_get(), pipeline, 1);
    for (int64_t i = 0; i < n; i++)
        x[i] = 1;
    device_run(device_get(), plan, &job, 1);
    assert_int_equal(job.result, 0);
    for (int64_t i = 0; i < n; i++)
        keep[i] = y[i] != 0;
    sha256_init(&sha);
    sha256_add(&sha, keep, (size_t)n);
    sha256_end(&sha, hex);
    if (strcmp(hex, json_string_value(json_object_get(mask, "sha256"))) != 0)
        fail_msg("the mask of %" PRId64 " elements, p %g, seed %" PRIu64 " is another", n, p,
                 job.seed);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    region_free(device_get(), &region);
}

static void test_masks(void **state)
{
    json_t *root = json_load_file("tests/golden/dropout_masks.json", 0, NULL), *mask;
    int large = 0, checked = 0;
    size_t i;

    (void)state;
    assert_non_null(root);
    json_array_foreach(json_object_get(root, "masks"), i, mask)
    {
        if (json_integer_value(json_object_get(mask, "n")) > 10000000 && large++ >= 2)
            continue;
        check_mask(mask);
        checked++;
    }
    assert_true(checked >= 32);
    json_decref(root);
}

/* A at real size against float64: row minima of some rows of a batch of 1024. */
static void check_accuracy(const char *precision, double most)
{
    enum { K = 8192, C = 8192, GROUPS = 512, ROWS = 1024, CHECKED = 8 };
    struct pipeline *pipeline = models_a(&fixture, "float32", precision, K, C, GROUPS);
    struct plan *plan = device_load(device_get(), pipeline, ROWS);
    float *x = array((size_t)ROWS * K, 4), *m = array(ROWS, 4), *w = array(K, 4);
    size_t x_size = (size_t)ROWS * K * 4;
    struct job job = {.x = x, .y = m, .y_size = ROWS * 4, .rows = ROWS, .compact = true};
    double(*v)[C] = array(CHECKED, sizeof(*v)), error = 0;
    struct report report;

    models_input(x, (size_t)ROWS * K, 11, 0);
    device_run_in(device_get(), plan, &job, 1, &x_size, 1, 0);
    assert_int_equal(job.result, 0);
    for (int c = 0; c < C; c++) {
        if (pipeline_param(pipeline, &pipeline->stages[0].weight, (int64_t)c * K, K, w, &report) <
            0)
            fail_msg("%s", report.text);
        for (int i = 0; i < CHECKED; i++) {
            const float *row = x + (size_t)i * (ROWS / CHECKED) * K;
            double sum = 0;

            for (int k = 0; k < K; k++)
                sum += (double)row[k] * (double)w[k];
            v[i][c] = sum + (double)models_fill("b", c);
        }
    }
    for (int i = 0; i < CHECKED; i++) {
        double lowest = INFINITY;

        for (int g = 0; g < GROUPS; g++) {
            double mean = 0, squares = 0, rstd;

            for (int c = g * 16; c < g * 16 + 16; c++)
                mean += v[i][c] / 16;
            for (int c = g * 16; c < g * 16 + 16; c++)
                squares += (v[i][c] - mean) * (v[i][c] - mean);
            rstd = 1 / sqrt(squares / 16 + 1e-5);
            for (int c = g * 16; c < g * 16 + 16; c++)
                lowest = fmin(lowest, (v[i][c] - mean) * rstd * (double)models_fill("g", c) +
                                          (double)models_fill("h", c));
        }
        error = fmax(error, fabs(lowest - (double)m[i * (ROWS / CHECKED)]));
    }
    printf("%s: largest error of %d row minima against float64: %.3g\n", precision, CHECKED, error);
    assert_true(error <= most);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(m);
    free(w);
    free(v);
}

static void test_accuracy(void **state)
{
    (void)state;
    check_accuracy("fp32", 5.4e-6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_guard),     cmocka_unit_test(test_compact_b),
        cmocka_unit_test(test_compact_a), cmocka_unit_test(test_masks),
        cmocka_unit_test(test_accuracy),  cmocka_unit_test(test_overflow),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
