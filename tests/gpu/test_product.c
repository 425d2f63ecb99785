/*
 * The product in registers (linear + group_norm over 16 channels + amin): the same bits for a row
 * in every batch size, which each take tiles of another height, and its error as a bound.
 *
 * Everything lies in device memory, so that a batch is one run of the kernels.
 */
#include "tests/gpu/models.h"

#define K      512
#define C      8192
#define GROUPS (C / 16)
#define ROWS   4096

static struct fixture fixture;

/* gamma negative and zero too. */
static float fill(const char *name, int64_t i)
{
    models_fan_in = K;
    if (name[0] == 'g')
        return i % 7 == 3 ? 0 : models_fill("t", i);
    return models_fill(name, i);
}

struct setting {
    const char *dtype, *precision;
};

/* Without the add no graph is captured. */
static struct pipeline *build(const struct setting *setting, int groups, bool sums)
{
    struct pipeline *pipeline;
    struct report report;
    char text[1024], *add;

    snprintf(text, sizeof(text), MODEL_A, setting->dtype, setting->precision, K, C, groups, C);
    add = strstr(text, ",{ op = \"add\"");
    assert_non_null(add);
    if (!sums)
        memcpy(add, ");", sizeof(");"));
    if (fixture_build(&fixture, text, fill, &pipeline, &report) < 0)
        fail_msg("%s", report.text);
    return pipeline;
}

/* A plan, rows of input and their results, all on the device. */
struct bench {
    struct pipeline *pipeline;
    struct plan *plan;
    struct region x, y;
    size_t size; /* of a number */
    bool sums;   /* it ends with the add */
};

static struct bench bench_of(const struct setting *setting, int groups, bool sums, uint32_t rows,
                             size_t y_size)
{
    struct bench bench = {.pipeline = build(setting, groups, sums), .sums = sums};

    bench.size = dtype_size(bench.pipeline->dtype);
    bench.plan = device_load(device_get(), bench.pipeline, rows);
    bench.x = region_new(device_get(), (size_t)rows * K * bench.size, true);
    bench.y = region_new(device_get(), y_size, true);
    return bench;
}

static struct bench bench_new(const struct setting *setting, int groups, uint32_t rows,
                              size_t y_size)
{
    return bench_of(setting, groups, true, rows, y_size);
}

static void bench_free(struct bench *bench)
{
    region_free(device_get(), &bench->x);
    region_free(device_get(), &bench->y);
    device_get()->ops->unload(device_get()->backend, bench->plan);
    pipeline_free(bench->pipeline);
}

static void bench_fill(struct bench *bench, const float *x, size_t rows)
{
    char *words = array(rows * K, bench->size);

    tensor_from_float(bench->pipeline->dtype, x, words, rows * K);
    region_copy(&bench->x, bench->x.at, words, rows * K * bench->size);
    free(words);
}

/* Rows from `first` on, as one batch: their minima, or with `whole` all of the result. */
static void bench_run(struct bench *bench, uint32_t first, uint32_t rows, bool whole, void *y)
{
    size_t size = rows * (whole ? C : 1) * bench->size;
    struct job job = {.x = bench->x.at + (size_t)first * K * bench->size,
                      .x_memory = bench->x.memory,
                      .y = bench->y.at,
                      .y_memory = bench->y.memory,
                      .y_size = size,
                      .rows = rows,
                      .compact = bench->sums && !whole};

    device_run(device_get(), bench->plan, &job, 1);
    assert_int_equal(job.result, 0);
    region_copy(&bench->y, y, bench->y.at, size);
}

/* Every batch size up to 520 and some to ROWS, of rows in order and shuffled. */
static void check_bits(const struct setting *setting)
{
    struct bench bench = bench_new(setting, GROUPS, ROWS, ROWS * sizeof(float));
    float *x = array((size_t)ROWS * K, sizeof(*x)), *y = array((size_t)ROWS * K, sizeof(*y));
    char *want = array(ROWS, bench.size), *mixed = array(ROWS, bench.size);
    char *got = array(ROWS, bench.size);
    unsigned n = 0;

    models_input(x, (size_t)ROWS * K, 3, -0.5f);
    bench_fill(&bench, x, ROWS);
    bench_run(&bench, 0, ROWS, false, want);
    for (int shuffled = 0; shuffled < 2; shuffled++) {
        for (uint32_t i = 0; i < ROWS; i++) {
            uint32_t from = shuffled ? i * 1237 % ROWS : i;

            memcpy(y + (size_t)i * K, x + (size_t)from * K, K * sizeof(*x));
            memcpy(mixed + i * bench.size, want + from * bench.size, bench.size);
        }
        bench_fill(&bench, y, ROWS);
        for (uint32_t rows = 1; rows <= ROWS; rows += rows < 520 ? 1 : 149, n++) {
            uint32_t first = rows * 31 % (ROWS - rows + 1);

            bench_run(&bench, first, rows, false, got);
            for (uint32_t i = 0; i < rows; i++)
                if (memcmp(got + i * bench.size, mixed + (first + i) * bench.size, bench.size) != 0)
                    fail_msg("%s %s, %s: row %u of a batch of %u is not as in one of %u",
                             setting->dtype, setting->precision, shuffled ? "shuffled" : "in order",
                             i, rows, ROWS);
        }
    }
    printf("%s %s: the same bits in %u batches\n", setting->dtype, setting->precision, n);
    bench_free(&bench);
    free(x);
    free(y);
    free(want);
    free(mixed);
    free(got);
}

static void test_every_batch_size(void **state)
{
    static const struct setting settings[] = {
        {"float32", "fp32"}, {"float32", "tf32"}, {"float16", "fp32"}, {"bfloat16", "fp32"}};

    (void)state;
    for (size_t i = 0; i < sizeof(settings) / sizeof(*settings); i++)
        check_bits(&settings[i]);
}

/*
 * More rows than one launch takes: the last of them, which are a piece of their own, are as in a
 * batch of their own. So many that its tiles end well behind them.
 */
static void test_pieces(void **state)
{
    enum { LAST = 225, ALL = 131072 + LAST };
    static const struct setting settings[] = {{"float16", "fp32"}, {"float32", "tf32"}};
    float *x = array((size_t)ALL * K, sizeof(*x));

    (void)state;
    models_input(x, (size_t)ALL * K, 6, -0.5f);
    for (size_t s = 0; s < sizeof(settings) / sizeof(*settings); s++) {
        struct bench bench = bench_new(&settings[s], GROUPS, ALL, ALL * sizeof(float));
        char *got = array(ALL, bench.size), *want = array(LAST, bench.size);

        bench_fill(&bench, x, ALL);
        bench_run(&bench, ALL - LAST, LAST, false, want);
        bench_run(&bench, 0, ALL, false, got);
        for (size_t i = 0; i < LAST; i++)
            if (memcmp(got + (ALL - LAST + i) * bench.size, want + i * bench.size, bench.size) != 0)
                fail_msg("%s %s: row %zu of the last %d is not as in a batch of them",
                         settings[s].dtype, settings[s].precision, i, LAST);
        bench_free(&bench);
        free(got);
        free(want);
    }
    free(x);
}

/* The outer sum is the minima plus the tensor, in one float32 addition. */
static void test_whole_result(void **state)
{
    static const uint32_t sizes[] = {1, 2, 63, 100, 130, 257, 513};
    static const struct setting setting = {"float32", "fp32"};
    struct bench bench = bench_new(&setting, GROUPS, ROWS, (size_t)513 * C * sizeof(float));
    float *x = array((size_t)ROWS * K, sizeof(*x)), *m = array(ROWS, sizeof(*m));
    float *y = array((size_t)513 * C, sizeof(*y));

    (void)state;
    models_input(x, (size_t)ROWS * K, 4, -0.5f);
    x[5] = NAN;
    bench_fill(&bench, x, ROWS);
    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        uint32_t rows = sizes[s];

        bench_run(&bench, 0, rows, false, m);
        bench_run(&bench, 0, rows, true, y);
        assert_true(isnan(m[0]));
        for (int64_t c = 0; c < C; c++)
            for (uint32_t i = 0; i < rows; i++) {
                float want = m[i] + fill("t", c), is = y[c * rows + i];

                if (is != want && !(isnan(is) && isnan(want)))
                    fail_msg("channel %" PRId64 " of row %u of %u is %.9g, not %.9g", c, i, rows,
                             (double)is, (double)want);
            }
    }
    bench_free(&bench);
    free(x);
    free(m);
    free(y);
}

/* What rows give, as a batch of ALIKE rows: minima, and all of the result. */
#define ALIKE 250

struct results {
    char *minima, *whole;
};

static bool is_right(const struct bench *bench, const struct results *want, const struct job *job,
                     size_t c, int row, int at)
{
    const char *right = want->minima + (size_t)at * bench->size, *is = job->y;

    if (job->compact)
        return memcmp(is + (size_t)row * bench->size, right, bench->size) == 0;
    right = want->whole + (c * ALIKE + (size_t)at) * bench->size;
    return memcmp(is + (c * job->rows + (size_t)row) * bench->size, right, bench->size) == 0;
}

/* Rows from `first` on in so many requests, in one kind of memory; every third is compact. */
static void check_alike(const struct bench *bench, const char *x, const struct results *want,
                        int first, int rows, int n, int kind)
{
    const size_t row_size = K * bench->size;
    struct job *jobs = array((size_t)n, sizeof(*jobs));
    size_t *sizes = array((size_t)n, sizeof(*sizes));
    char *y = array((size_t)rows * C, bench->size), *to = y;

    for (int i = 0, at = first; i < n; i++) {
        int share = rows / n + (i < rows % n);

        jobs[i] = (struct job){.x = x + (size_t)at * row_size,
                               .y = to,
                               .y_size = (size_t)share * (i % 3 == 1 ? 1 : C) * bench->size,
                               .rows = (uint32_t)share,
                               .compact = i % 3 == 1};
        sizes[i] = (size_t)share * row_size;
        at += share;
        to += jobs[i].y_size;
    }
    device_run_in(device_get(), bench->plan, jobs, (unsigned)n, sizes, kind,
                  rows % 2 * 2 * bench->size);
    for (int i = 0, at = first; i < n; at += (int)jobs[i++].rows) {
        assert_int_equal(jobs[i].result, 0);
        for (size_t c = 0; c < (jobs[i].compact ? 1 : C); c++)
            for (int row = 0; row < (int)jobs[i].rows && at + row < ALIKE; row++)
                if (!is_right(bench, want, &jobs[i], c, row, at + row))
                    fail_msg("%d rows from %d in %d requests, memory %d: row %d, channel %zu is "
                             "not as in a batch of %d",
                             rows, first, n, kind, at + row, c, ALIKE);
    }
    free(jobs);
    free(sizes);
    free(y);
}

/* The minima come from a plan that is launched kernel by kernel. */
static struct results results_new(const struct setting *setting, struct bench *bench,
                                  const float *x)
{
    struct results want = {array(ALIKE, bench->size), array((size_t)ALIKE * C, bench->size)};
    struct bench minima = bench_of(setting, GROUPS, false, ALIKE, ALIKE * bench->size);
    struct plan_info info;

    device_get()->ops->plan_info(minima.plan, &info);
    if (!strstr(info.text, "launched kernel by kernel"))
        fail_msg("a graph: %s", info.text);
    bench_fill(&minima, x, ALIKE);
    bench_run(&minima, 0, ALIKE, false, want.minima);
    bench_run(bench, 0, ALIKE, true, want.whole);
    for (size_t i = 0; i < (size_t)ALIKE * C && bench->size == sizeof(float); i++)
        assert_true(((float *)want.whole)[i] ==
                    ((float *)want.minima)[i % ALIKE] + fill("t", (int64_t)(i / ALIKE)));
    bench_free(&minima);
    return want;
}

/* Batches that are launched as a graph, at and between the borders of ranges. */
static void test_graphs(void **state)
{
    enum { MOST = 600 };
    static const struct setting settings[] = {
        {"float32", "fp32"}, {"float32", "tf32"}, {"bfloat16", "fp32"}};
    static const int sizes[] = {1,   2,   7,   8,   9,   16,  17,  33,  64,  65,  81,
                                112, 128, 144, 192, 193, 257, 320, 321, 513, MOST};
    float *x = array((size_t)MOST * K, sizeof(*x));
    struct plan_info info;

    (void)state;
    models_input(x, (size_t)MOST * K, 12, -0.5f);
    for (size_t s = 0; s < sizeof(settings) / sizeof(*settings); s++) {
        struct bench bench = bench_new(&settings[s], GROUPS, MOST, (size_t)ALIKE * C * 4);
        char *words = array((size_t)MOST * K, bench.size);
        struct results want;

        device_get()->ops->plan_info(bench.plan, &info);
        if (!strstr(info.text, "a CUDA graph for batches of 1 to 6"))
            fail_msg("not a graph for every batch: %s", info.text);
        tensor_from_float(bench.pipeline->dtype, x, words, (size_t)MOST * K);
        bench_fill(&bench, x, MOST);
        want = results_new(&settings[s], &bench, x);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
            for (int kind = 0; kind < 3; kind++) {
                int rows = sizes[i], first = rows < ALIKE ? (ALIKE - rows) / (kind + 1) : 0;

                check_alike(&bench, words, &want, first, rows, 1, kind);
                check_alike(&bench, words, &want, first, rows, rows < 5 ? rows : 5, kind);
                if (kind == (int)i % 3)
                    check_alike(&bench, words, &want, first, rows, rows, kind);
            }
        bench_free(&bench);
        free(words);
        free(want.minima);
        free(want.whole);
    }
    free(x);
}

/* Every slot's own graphs, at once: sizes differ, results do not. */
static void test_graphs_at_once(void **state)
{
    enum { SLOTS = 4, ROUNDS = 300, MOST = 64 };
    static const struct setting setting = {"float32", "fp32"};
    struct bench bench = bench_new(&setting, GROUPS, MOST, (size_t)(SLOTS + 1) * MOST * C * 4);
    const struct device *device = device_get();
    float *x = array((size_t)MOST * K, sizeof(*x)), *m = array(MOST, sizeof(*m));
    float *y = array((size_t)MOST * C, sizeof(*y));
    struct job jobs[SLOTS];
    struct batch batches[SLOTS];
    unsigned started = 0, ended = 0;
    bool running[SLOTS] = {false};

    (void)state;
    models_input(x, (size_t)MOST * K, 13, -0.5f);
    bench_fill(&bench, x, MOST);
    bench_run(&bench, 0, MOST, false, m);
    while (ended < ROUNDS)
        for (unsigned s = 0; s < SLOTS; s++) {
            char *at = bench.y.at + (size_t)(s + 1) * MOST * C * 4;

            if (running[s]) {
                int r = device->ops->poll(device->backend, s);
                uint32_t rows = jobs[s].rows;

                assert_true(r >= 0);
                if (r == 0)
                    continue;
                running[s] = false;
                ended++;
                region_copy(&bench.y, y, at, (size_t)rows * C * sizeof(*y));
                for (uint32_t i = 0; i < rows * C; i += 97)
                    if (y[i] != m[i % rows] + fill("t", i / rows))
                        fail_msg("batch %u of %u rows: element %u is %.9g, not %.9g", ended, rows,
                                 i, (double)y[i], (double)(m[i % rows] + fill("t", i / rows)));
            }
            if (started < ROUNDS) {
                jobs[s] = (struct job){.x = bench.x.at,
                                       .x_memory = bench.x.memory,
                                       .y = at,
                                       .y_memory = bench.y.memory,
                                       .rows = 1 + started * 7 % MOST};
                jobs[s].y_size = (uint64_t)jobs[s].rows * C * sizeof(*y);
                batches[s] = (struct batch){
                    .plan = bench.plan, .jobs = &jobs[s], .n_jobs = 1, .rows = jobs[s].rows};
                assert_int_equal(device->ops->start(device->backend, s, &batches[s]), 0);
                running[s] = true;
                started++;
            }
        }
    bench_free(&bench);
    free(x);
    free(m);
    free(y);
}

enum kind { PLAIN, ONE_HUGE, LARGE, SMALL, SUBNORMAL, ZERO, KINDS };

static const char *const kinds[] = {"plain",       "one huge, many tiny", "times 1e18",
                                    "times 1e-20", "subnormal",           "zero"};

static void spoil(float *row, enum kind kind)
{
    for (int k = 0; k < K; k++)
        switch (kind) {
        case ONE_HUGE:
            row[k] *= k == 77 ? 1e6f : 1e-3f;
            break;
        case LARGE:
            row[k] *= 1e18f;
            break;
        case SMALL:
            row[k] *= 1e-20f;
            break;
        case SUBNORMAL:
            row[k] *= 1e-39f;
            break;
        case ZERO:
            row[k] = 0;
            break;
        default:
            break;
        }
}

/*
 * A channel's sum, with its group's mean taken away, and how far that may be from the kernel's: the
 * contract is 2^-22 of the sum over blocks of 64 of the largest |x| times all |w|, and float32's
 * own rounding of what is added.
 */
static double sum_of(const double *w, const float *x, double *ret_bound)
{
    double sum = 0, bound = 0;

    for (int k = 0; k < K; k += 64) {
        double top = 0, weights = 0;

        for (int j = k; j < k + 64; j++) {
            sum += w[j] * (double)x[j];
            top = fmax(top, fabs((double)x[j]));
            weights += fabs(w[j]);
        }
        bound += top * weights;
    }
    *ret_bound = 0x1p-22 * bound + 0x1p-149;
    return sum;
}

/* Between what the minimum of a row must lie, by float64; returns float64's own. */
static double minimum_of(const float *w, const float *x, double *ret_least, double *ret_most)
{
    double lowest = INFINITY, least = INFINITY, most = INFINITY;

    for (int g = 0; g < GROUPS; g++) {
        double v[16], e[16], bias = 0, squares = 0, rstd, error = 0;

        for (int c = 0; c < 16; c++)
            bias += (double)fill("b", g * 16 + c) / 16;
        for (int c = 0; c < 16; c++) {
            double centred[K];

            for (int k = 0; k < K; k++) {
                double mean = 0;

                for (int i = 0; i < 16; i++)
                    mean += (double)w[(size_t)(g * 16 + i) * K + k] / 16;
                centred[k] = (double)w[(size_t)(g * 16 + c) * K + k] - mean;
            }
            v[c] = sum_of(centred, x, &e[c]) + (double)fill("b", g * 16 + c) - bias;
            e[c] += 0x1p-23 * fabs(v[c]);
            error = fmax(error, e[c]);
            squares += v[c] * v[c];
        }
        rstd = 1 / sqrt(squares / 16 + (double)1e-5f);
        for (int c = 0; c < 16; c++) {
            double gamma = (double)fill("g", g * 16 + c), beta = (double)fill("h", g * 16 + c);
            double z = v[c] * rstd, y = z * gamma + beta;
            double bound = fabs(gamma) * rstd * (e[c] + fabs(z) * error) +
                           0x1p-21 * (fabs(z * gamma) + fabs(beta));

            lowest = fmin(lowest, y);
            least = fmin(least, y - bound);
            most = fmin(most, y + bound);
        }
    }
    *ret_least = least;
    *ret_most = most;
    return lowest;
}

static void test_error_is_bounded(void **state)
{
    static const struct setting setting = {"float32", "fp32"};
    static const uint32_t sizes[] = {KINDS, 100, 600}; /* rows: other kernels, the same bits */
    struct bench bench = bench_new(&setting, GROUPS, ROWS, ROWS * sizeof(float));
    float *x = array((size_t)ROWS * K, sizeof(*x)), *w = array((size_t)C * K, sizeof(*w));
    float *m = array(ROWS, sizeof(*m));

    (void)state;
    models_input(x, (size_t)ROWS * K, 9, -0.5f);
    for (int64_t i = 0; i < (int64_t)C * K; i++)
        w[i] = fill("w", i);
    for (enum kind kind = 0; kind < KINDS; kind++)
        spoil(x + (size_t)kind * K, kind);
    bench_fill(&bench, x, ROWS);
    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        bench_run(&bench, 0, sizes[s], false, m);
        for (enum kind kind = 0; kind < KINDS && s == 0; kind++) {
            double least, most, want = minimum_of(w, x + (size_t)kind * K, &least, &most);
            double is = (double)m[kind];

            printf("%s: error %.3g, allowed from %.3g to %.3g\n", kinds[kind], is - want,
                   least - want, most - want);
            if (!(is >= least && is <= most))
                fail_msg("%s: %.9g is not between %.9g and %.9g", kinds[kind], is, least, most);
        }
    }
    bench_free(&bench);
    free(x);
    free(w);
    free(m);
}

/* A group of one channel is its beta, whatever comes. */
static void test_one_channel_a_group(void **state)
{
    static const struct setting setting = {"float32", "fp32"};
    struct bench bench = bench_new(&setting, C, ROWS, ROWS * sizeof(float));
    float *x = array((size_t)ROWS * K, sizeof(*x)), *m = array(ROWS, sizeof(*m)), lowest = INFINITY;

    (void)state;
    models_input(x, (size_t)ROWS * K, 2, -0.5f);
    bench_fill(&bench, x, ROWS);
    bench_run(&bench, 0, 70, false, m);
    for (int64_t c = 0; c < C; c++)
        lowest = fminf(lowest, fill("h", c));
    for (int i = 0; i < 70; i++)
        if (m[i] != lowest)
            fail_msg("row %d is %.9g, not %.9g", i, (double)m[i], (double)lowest);
    bench_free(&bench);
    free(x);
    free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_batch_size),    cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_whole_result),        cmocka_unit_test(test_error_is_bounded),
        cmocka_unit_test(test_one_channel_a_group), cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_graphs_at_once),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
