/*
 * The proven constant on the GPU: what the guard lets pass, marks as NaN or sends the full path
 * gives the bits of the same model without its proof. Every kind of number that is not finite at
 * every kind of place, magnitudes on both sides of the bound, weights that forbid a proof, every
 * dtype, masks of real size. TESTS chooses by name; those called small_ are for the sanitizers.
 */
#include "tests/gpu/models.h"

#include <jansson.h>

#include "kernels/reference.h"
#include "tests/kernels/sha256.h"

#define MODEL                                                                            \
    "name = \"b\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\"; prove = %s;"       \
    "input = { shape = [%s]; };"                                                         \
    "stages = (%s { op = \"group_norm\"; groups = %d; weight = \"g\"; bias = \"h\"; }, " \
    "{ op = \"minimum\"; value = %s; }, { op = \"clamp\"; min = %s; max = 1.0; } %s);"
#define CONV(more) \
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 16; kernel = 3; " more "},"
#define LINEAR(out) "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = " out "; },"
#define MASK        ", { op = \"dropout\"; p = 0.2; }"

static struct fixture fixture;

/* A weight that is not as models_fill() makes it. */
static struct {
    const char *name;
    int64_t first, n;
    float value;
} planted;

static float fill(const char *name, int64_t i)
{
    if (planted.name && strcmp(name, planted.name) == 0 && i >= planted.first &&
        i < planted.first + planted.n)
        return planted.value;
    return models_fill(name, i);
}

/* The model with its proof, and without. */
struct pair {
    struct pipeline *pipeline[2];
    struct plan *plan[2];
    size_t in, out; /* elements of a row */
    bool spreads;
    float bound;
};

static struct pair pair_new(const char *dtype, const char *shape, const char *first, int groups,
                            const char *value, const char *end, uint32_t max_rows)
{
    struct report report;
    struct pair pair;
    char text[1024];

    models_fan_in = 81;
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof(text), MODEL, dtype, i == 0 ? "true" : "false", shape, first, groups,
                 value, value, end);
        if (fixture_build(&fixture, text, fill, &pair.pipeline[i], &report) < 0)
            fail_msg("%s", report.text);
        pair.plan[i] = device_load(device_get(), pair.pipeline[i], max_rows);
    }
    assert_false(pair.pipeline[1]->proof.constant);
    pair.in = (size_t)shape_elements(&pair.pipeline[0]->in);
    pair.out = (size_t)shape_elements(&pair.pipeline[0]->out);
    pair.spreads = pair.pipeline[0]->proof.nonfinite_spreads;
    pair.bound = pair.pipeline[0]->proof.bound;
    return pair;
}

static void pair_free(struct pair *pair)
{
    for (int i = 0; i < 2; i++) {
        device_get()->ops->unload(device_get()->backend, pair->plan[i]);
        pipeline_free(pair->pipeline[i]);
    }
}

/* Both plans over the same rows, in jobs of the given sizes; rows of y as float32 from the first.
 * `shift` moves them off whole 16 bytes. */
static void compare(const struct pair *pair, const float *x, float *y, const uint32_t *sizes,
                    unsigned n_jobs, bool train, int kind, size_t shift)
{
    enum dtype dtype = pair->pipeline[0]->dtype;
    size_t esize = dtype_size(dtype), rows = 0, row = 0, x_size[8];
    float *want;
    void *raw_x, *raw_y[2];
    struct job jobs[8];

    assert_true(n_jobs <= 8);
    for (unsigned i = 0; i < n_jobs; i++)
        rows += sizes[i];
    raw_x = array(rows * pair->in, esize);
    want = array(rows * pair->out, sizeof(*want));
    tensor_from_float(dtype, x, raw_x, rows * pair->in);
    for (int p = 0; p < 2; p++) {
        raw_y[p] = array(rows * pair->out, esize);
        memset(raw_y[p], 0xee, rows * pair->out * esize);
        row = 0;
        for (unsigned i = 0; i < n_jobs; row += sizes[i++]) {
            jobs[i] = (struct job){.x = (char *)raw_x + row * pair->in * esize,
                                   .y = (char *)raw_y[p] + row * pair->out * esize,
                                   .y_size = sizes[i] * pair->out * esize,
                                   .rows = sizes[i],
                                   .train = train,
                                   .seed = 42 + i,
                                   .offset = 4 * 77 * i};
            x_size[i] = sizes[i] * pair->in * esize;
        }
        device_run_in(device_get(), pair->plan[p], jobs, n_jobs, x_size, kind, shift);
        for (unsigned i = 0; i < n_jobs; i++)
            assert_int_equal(jobs[i].result, 0);
        tensor_to_float(dtype, raw_y[p], p == 0 ? y : want, rows * pair->out);
    }
    for (size_t i = 0; i < rows * pair->out; i++)
        if (memcmp(&y[i], &want[i], sizeof(*y)) != 0 && !(isnan(y[i]) && isnan(want[i])))
            fail_msg("row %zu, element %zu of %zu: %.9g by the proof, %.9g without", i / pair->out,
                     i % pair->out, pair->out, (double)y[i], (double)want[i]);
    free(raw_x);
    free(raw_y[0]);
    free(raw_y[1]);
    free(want);
}

/* A place of a sample of [3, d, h, w]: in each dimension the first, a middle or the last. */
static size_t place_of(int i, size_t d, size_t h, size_t w)
{
    const size_t n[3] = {d, h, w};
    size_t at = (size_t)(i / 27);

    for (int k = 0; k < 3; k++, i /= 3)
        at = at * n[k] + (i % 3 == 0 ? 0 : i % 3 == 1 ? n[k] / 2 : n[k] - 1);
    return at;
}

/* Every kind at every place class of every channel, a row each, sound rows between them. */
static void check_places(const char *dtype, const char *conv, bool spreads, int step)
{
    static const float kinds[] = {NAN, -NAN, INFINITY, -INFINITY, 3e38f, -3e38f};
    enum { PLACES = 81, N_KINDS = 6, D = 5, H = 9, W = 12 };
    struct pair pair = pair_new(dtype, "3, 5, 9, 12", conv, 4, "0.0", MASK, 100);
    const uint32_t rows = (uint32_t)((PLACES * N_KINDS + step - 1) / step) + 20;
    float *x = array(rows * pair.in, 4), *y = array(rows * pair.out, 4);
    uint32_t row = 0, sizes[2], nan_rows = 0;

    assert_true(pair.pipeline[0]->proof.constant);
    assert_int_equal(pair.spreads, spreads);
    models_input(x, rows * pair.in, 3, -0.5f);
    for (int i = 0; i < PLACES * N_KINDS; i += step, row++)
        x[row * pair.in + place_of(i % PLACES, D, H, W)] = kinds[i / PLACES];
    sizes[0] = 7;
    sizes[1] = rows - 7;
    for (int train = 0; train < 2; train++) {
        compare(&pair, x, y, sizes, 2, train, 2 - train, 0);
        for (uint32_t r = 0; r < rows; r++) {
            bool spoilt = r < row && !isfinite(kinds[r * step / PLACES]), all = true;

            if (strcmp(dtype, "float16") == 0) /* 3e38 is infinite there */
                spoilt = r < row;
            for (size_t e = 0; e < pair.out; e++)
                all &= isnan(y[r * pair.out + e]);
            if (spreads && all != spoilt)
                fail_msg("row %u is %sNaN throughout", r, all ? "" : "not ");
            nan_rows += all;
        }
    }
    print_message("%s: %u rows, %u times NaN throughout\n", dtype, rows, nan_rows);
    pair_free(&pair);
    free(x);
    free(y);
}

static void test_places(void **state)
{
    (void)state;
    check_places("float32", CONV(""), true, 1);
    check_places("float16", CONV(""), true, 1);
    check_places("bfloat16", CONV(""), true, 1);
    check_places("float32", CONV("padding = 1;"), false, 1);
    check_places("float32", CONV("stride = 2;"), false, 1);
}

static void small_places(void **state)
{
    (void)state;
    check_places("float32", CONV(""), true, 17);
    check_places("bfloat16", CONV(""), true, 31);
}

/* Magnitudes next to the bound, from both sides, of both signs: a compact result says which way
 * each sample went. */
static void check_bound(int places)
{
    struct pair pair = pair_new("float32", "3, 5, 9, 12", CONV(""), 4, "0.0", "", 64);
    float around[5], *x, *y;
    uint32_t rows = (uint32_t)places * 10, sizes[1] = {rows}, n_full = 0;
    size_t room = BACKEND_COMPACT_ROOM(rows), x_size = rows * pair.in * 4;
    uint8_t *compact = array(1, room + rows * pair.out * 4);
    struct job job = {
        .y = compact, .y_size = room + rows * pair.out * 4, .rows = rows, .compact = true};

    assert_true(pair.pipeline[0]->proof.constant);
    around[2] = pair.bound;
    around[1] = nextafterf(pair.bound, 0);
    around[0] = nextafterf(around[1], 0);
    around[3] = nextafterf(pair.bound, INFINITY);
    around[4] = nextafterf(around[3], INFINITY);
    x = array(rows * pair.in, 4);
    y = array(rows * pair.out, 4);
    models_input(x, rows * pair.in, 3, -0.5f);
    for (uint32_t row = 0; row < rows; row++)
        x[row * pair.in + place_of((int)row / 10 * (81 / places), 5, 9, 12)] =
            row % 2 ? -around[row % 10 / 2] : around[row % 10 / 2];
    compare(&pair, x, y, sizes, 1, false, 1, 0);
    job.x = x;
    device_run_in(device_get(), pair.plan[0], &job, 1, &x_size, 0, 0);
    assert_int_equal(job.result, 0);
    for (uint32_t row = 0; row < rows; row++) {
        int want = row % 10 / 2 < 2 ? 0 : 2;

        if (compact[row] != want)
            fail_msg("|x| = %a beside the bound %a: state %d, not %d", (double)around[row % 10 / 2],
                     (double)pair.bound, compact[row], want);
        if (want == 2 &&
            memcmp(compact + room + n_full++ * pair.out * 4, y + row * pair.out, pair.out * 4) != 0)
            fail_msg("the full result of row %u is another", row);
    }
    assert_int_equal(job.n_full, n_full);
    pair_free(&pair);
    free(x);
    free(y);
    free(compact);
}

static void test_bound(void **state)
{
    (void)state;
    check_bound(27);
}

static void small_bound(void **state)
{
    (void)state;
    check_bound(1);
}

/* Zero weights change nothing: zero times infinity is NaN. */
static void test_zero_weights(void **state)
{
    static const float kinds[] = {NAN, INFINITY, -INFINITY, 1};
    struct pair pair;
    float *x, *y;
    const uint32_t rows = 12, sizes[1] = {rows};

    (void)state;
    planted.name = "w";
    planted.n = INT64_MAX / 2;
    planted.value = 0;
    pair = pair_new("float32", "3, 5, 9, 12", CONV(""), 4, "0.25", MASK, 64);
    planted.name = NULL;
    assert_true(pair.pipeline[0]->proof.constant);
    if (pair.bound != 0x1p127f)
        fail_msg("the bound is %a", (double)pair.bound);
    x = array(rows * pair.in, 4);
    y = array(rows * pair.out, 4);
    for (uint32_t row = 0; row < rows; row++)
        x[row * pair.in + row * 131] = kinds[row % 4];
    compare(&pair, x, y, sizes, 1, true, 1, 0);
    for (size_t e = 0; e < rows * pair.out; e++)
        assert_int_equal(isnan(y[e]) != 0, e / pair.out % 4 != 3);
    pair_free(&pair);
    free(x);
    free(y);
}

/* A weight that is NaN or infinite: no proof, and NaN where the plain stages have it. */
static void test_spoilt_weights(void **state)
{
    static const char *const names[] = {"w", "b", "g", "h"};
    static const float kinds[] = {NAN, INFINITY, -INFINITY};
    const uint32_t rows = 2, sizes[1] = {rows};

    (void)state;
    for (int i = 0; i < 12; i++) {
        struct reference_run how = {.rows = rows};
        struct report report;
        struct pair pair;
        float *x, *y;
        double *want;

        planted.name = names[i / 3];
        planted.first = 5;
        planted.n = 1;
        planted.value = kinds[i % 3];
        pair = pair_new("float32", "3, 5, 9, 12", CONV(""), 4, "0.0", "", 64);
        planted.name = NULL;
        assert_false(pair.pipeline[0]->proof.constant);
        assert_non_null(strstr(pair.pipeline[0]->proof.text, "NaN or infinite"));
        x = array(rows * pair.in, 4);
        y = array(rows * pair.out, 4);
        want = array(rows * pair.out, sizeof(*want));
        models_input(x, rows * pair.in, 3, -0.5f);
        compare(&pair, x, y, sizes, 1, false, 1, 0);
        if (reference_run(pair.pipeline[0], pair.pipeline[0]->n_stages, &how, x, want, false,
                          &report) < 0)
            fail_msg("%s", report.text);
        for (size_t e = 0; e < rows * pair.out; e++)
            if (isnan(y[e]) != isnan(want[e]) || (!isnan(want[e]) && (double)y[e] != want[e]))
                fail_msg("%s %g: element %zu is %g, not %g", names[i / 3], (double)kinds[i % 3], e,
                         (double)y[e], want[e]);
        pair_free(&pair);
        free(x);
        free(y);
        free(want);
    }
}

/* Rows of whole vectors, of whole fours only, and of neither, several masks, p = 1, many jobs, y
 * that begins anywhere. */
static void check_fill(const char *dtype, const char *shape, const char *first, int groups,
                       const char *end, uint32_t max_rows)
{
    static const uint32_t sizes[] = {5, 1, 33, 2};
    struct pair pair = pair_new(dtype, shape, first, groups, "0.3", end, max_rows);
    const uint32_t rows = 41;
    float *x = array(rows * pair.in, 4), *y = array(rows * pair.out, 4);
    size_t esize = dtype_size(pair.pipeline[0]->dtype);

    assert_true(pair.pipeline[0]->proof.constant);
    models_input(x, rows * pair.in, 3, -0.5f);
    x[3 * pair.in] = NAN;
    x[7 * pair.in + 1] = 1e38f;
    x[29 * pair.in + 2] = -INFINITY;
    for (int train = 0; train < 2; train++)
        for (int kind = 0; kind < 3; kind++)
            compare(&pair, x, y, sizes, 4, train, kind, kind == 0 ? 0 : (size_t)kind * esize);
    pair_free(&pair);
    free(x);
    free(y);
}

static void check_fills(const char *dtype)
{
    check_fill(dtype, "3, 5, 9, 12", CONV(""), 4, MASK, 64);  /* 3360 numbers: whole vectors */
    check_fill(dtype, "3, 6, 12, 40", CONV(""), 4, MASK, 16); /* 24320: several tiles */
    /* Rows of 92 KB lie where they are: no piece is gathered, and tables come with the launch. */
    check_fill(dtype, "3, 8, 24, 40", CONV(""), 4, MASK MASK, 64);
    check_fill(dtype, "30", LINEAR("20"), 4, MASK, 1000);
    check_fill(dtype, "30", LINEAR("20"), 4, MASK MASK, 1000);
    check_fill(dtype, "30", LINEAR("20"), 4, ", { op = \"dropout\"; p = 1.0; }", 1000);
    check_fill(dtype, "30", LINEAR("22"), 2, MASK, 1000);
    check_fill(dtype, "7, 5", LINEAR("3"), 7, MASK, 64); /* 21, and NaN stays in its channel */
}

static void test_fill(void **state)
{
    (void)state;
    check_fills("float32");
    check_fills("float16");
    check_fills("bfloat16");
}

static void small_fill(void **state)
{
    (void)state;
    check_fill("bfloat16", "3, 5, 9, 12", CONV(""), 4, MASK, 64);
    check_fill("float32", "30", LINEAR("20"), 4, MASK MASK, 1000);
}

/* The mask of n = 110,215,168 as PyTorch drew it, under a constant that is not zero. */
static void check_mask(const json_t *mask)
{
    const uint32_t rows = 128;
    struct fixture *f = &fixture;
    struct region region;
    struct pipeline *pipeline;
    struct plan *plan;
    struct job job;
    struct sha256 sha;
    char text[1024], hex[65];
    size_t in, n;
    double p = json_number_value(json_object_get(mask, "p"));
    float kept = 0.5f * (float)(1.0 / (double)(float)(1.0 - p)), *x, *y;
    uint8_t *keep;

    snprintf(text, sizeof(text),
             "name = \"b\"; weights = \"" FIXTURE_WEIGHTS
             "\"; input = { shape = [3, 16, 64, 64]; };"
             "stages = ({ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 16; kernel = 3; },"
             "{ op = \"group_norm\"; groups = 8; weight = \"g\"; bias = \"h\"; },"
             "{ op = \"minimum\"; value = 0.5; }, { op = \"clamp\"; min = 0.5; max = 1.0; },"
             "{ op = \"dropout\"; p = %.17g; });",
             p);
    pipeline = models_build(f, text, 81);
    assert_true(pipeline->proof.constant);
    plan = device_load(device_get(), pipeline, rows);
    in = rows * (size_t)shape_elements(&pipeline->in);
    n = rows * (size_t)shape_elements(&pipeline->out);
    assert_int_equal(n, json_integer_value(json_object_get(mask, "n")));
    region = region_new(device_get(), (in + n) * 4, false);
    x = (float *)region.at;
    y = x + in;
    keep = (uint8_t *)x;
    models_input(x, in, 3, 0);
    job = (struct job){.x = x,
                       .y = y,
                       .y_size = n * 4,
                       .x_memory = region.memory,
                       .y_memory = region.memory,
                       .rows = rows,
                       .train = true};
    job.seed = (uint64_t)json_integer_value(json_object_get(mask, "seed"));
    job.offset = (uint64_t)json_integer_value(json_object_get(mask, "offset"));
    device_run(device_get(), plan, &job, 1);
    assert_int_equal(job.result, 0);
    for (size_t i = 0; i < n; i++) { /* keep[] ends where y begins, and follows it */
        float v = y[i];

        if (v != 0 && v != kept)
            fail_msg("element %zu is %.9g, kept ones %.9g", i, (double)v, (double)kept);
        keep[i] = v != 0;
    }
    sha256_init(&sha);
    sha256_add(&sha, keep, n);
    sha256_end(&sha, hex);
    if (strcmp(hex, json_string_value(json_object_get(mask, "sha256"))) != 0)
        fail_msg("the mask of %zu elements, p %g, seed %" PRIu64 " is another", n, p, job.seed);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    region_free(device_get(), &region);
}

static void test_masks(void **state)
{
    json_t *root = json_load_file("tests/golden/dropout_masks.json", 0, NULL), *mask;
    int checked = 0;
    size_t i;

    (void)state;
    assert_non_null(root);
    json_array_foreach(json_object_get(root, "masks"), i, mask)
    {
        if (json_integer_value(json_object_get(mask, "n")) != 110215168 || checked == 3)
            continue;
        check_mask(mask);
        checked++;
    }
    assert_int_equal(checked, 3);
    json_decref(root);
}

/* What describe shows: the proof, the bound, and the way. */
static void test_words(void **state)
{
    struct pair pair = pair_new("float32", "3, 5, 9, 12", CONV(""), 4, "0.0", "", 64);
    struct plan_info info[2];
    char bound[32];

    (void)state;
    snprintf(bound, sizeof(bound), "|x| < %g ", (double)pair.bound);
    for (int i = 0; i < 2; i++)
        device_get()->ops->plan_info(pair.plan[i], &info[i]);
    if (!strstr(pair.pipeline[0]->proof.text, bound) ||
        !strstr(pair.pipeline[0]->proof.text, "constant"))
        fail_msg("%s does not say %s", pair.pipeline[0]->proof.text, bound);
    assert_non_null(strstr(pair.pipeline[1]->proof.text, "prove = false"));
    if (!strstr(info[0].text, "guard") || strstr(info[1].text, "guard"))
        fail_msg("%s\n%s", info[0].text, info[1].text);
    pair_free(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),       cmocka_unit_test(test_bound),
        cmocka_unit_test(test_zero_weights), cmocka_unit_test(test_spoilt_weights),
        cmocka_unit_test(test_fill),         cmocka_unit_test(test_masks),
        cmocka_unit_test(test_words),        cmocka_unit_test(small_places),
        cmocka_unit_test(small_bound),       cmocka_unit_test(small_fill),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
