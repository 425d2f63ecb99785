/*
 * A row's result has the same bits alone and in any batch, at any place, in any number of requests,
 * with 1, 2 and 4 workers, in blocks of any size; and with the proof or without. All of it once
 * more in a child whose oneDNN is kept to AVX2, where other code computes.
 */
#include "chain.h"

#include <sys/wait.h>

#define ROWS 157

static const char *const models[] = {
    /* A, with sizes that leave rests of slices, vectors and blocks. */
    "input = { shape = [300]; }; stages = ("
    "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = 408; },"
    "{ op = \"group_norm\"; groups = 17; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"amin\"; dim = 1; keepdim = true; },"
    "{ op = \"add\"; tensor = \"t\"; shape = [1, 30, 1, 1]; });",
    /* One narrow linear, then a wide one. */
    "dtype = \"bfloat16\"; input = { shape = [5, 40]; }; stages = ("
    "{ op = \"linear\"; weight = \"w\"; out = 3; }, { op = \"clamp\"; min = -0.5; },"
    "{ op = \"linear\"; weight = \"v\"; bias = \"b\"; out = 257; });",
    /* B, one group of all channels, a result that is not constant. */
    "input = { shape = [3, 5, 9, 8]; }; stages = ("
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 18; kernel = 3; },"
    "{ op = \"group_norm\"; groups = 1; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"minimum\"; value = 0.5; }, { op = \"clamp\"; min = 0.0; max = 1.0; });",
    /* Many input channels, and a row that is taken apart when it is alone. */
    "input = { shape = [33, 6, 20, 30]; }; stages = ("
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 20; kernel = 2; padding = 1; },"
    "{ op = \"group_norm\"; groups = 5; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"minimum\"; value = 0.5; }, { op = \"group_norm\"; groups = 2; },"
    "{ op = \"amin\"; dim = 3; }, { op = \"add\"; tensor = \"t\"; shape = [7, 31]; });",
};

/* Rows in the batch dimension of a result: [outer, rows, inner]. */
struct order {
    size_t outer, inner; /* inner in bytes */
};

static struct order order_of(const struct pipeline *pipeline)
{
    struct order order = {.outer = 1, .inner = dtype_size(pipeline->dtype)};

    for (int i = 0; i < pipeline->out.rank; i++)
        *(i < pipeline->out.batch ? &order.outer : &order.inner) *= (size_t)pipeline->out.dims[i];
    return order;
}

/* Equal bits, or both NaN. */
static bool same(const struct pipeline *pipeline, const char *a, const char *b, size_t size)
{
    size_t unit = dtype_size(pipeline->dtype);

    for (size_t i = 0; i < size; i += unit) {
        float x, y;

        tensor_to_float(pipeline->dtype, a + i, &x, 1);
        tensor_to_float(pipeline->dtype, b + i, &y, 1);
        if (memcmp(a + i, b + i, unit) != 0 && !(isnan(x) && isnan(y)))
            return false;
    }
    return true;
}

static void build(const struct fixture *fixture, const char *body, struct pipeline **ret)
{
    struct report report;
    char text[2048];

    snprintf(text, sizeof(text), "name = \"m\"; weights = \"" FIXTURE_WEIGHTS "\"; %s", body);
    if (fixture_build(fixture, text, chain_weight, ret, &report) < 0)
        fail_msg("%s", report.text);
}

/* Some rows in some order, cut into requests of random sizes; each against the row alone. */
static void check_split(const struct chain *chain, const char *x, const char *alone, uint32_t rows,
                        bool shuffle, int64_t request_max, uint64_t *state)
{
    const struct pipeline *pipeline = chain->pipeline;
    size_t in = chain_in_bytes(pipeline), out = chain_out_bytes(pipeline);
    struct order order = order_of(pipeline);
    char *from = chain_alloc(rows * in), *to = chain_alloc(rows * out);
    uint32_t place[ROWS], done = 0;
    struct job *jobs = chain_alloc(ROWS * sizeof(*jobs));
    unsigned n_jobs = 0;

    for (uint32_t i = 0; i < rows; i++)
        place[i] = i;
    for (uint32_t i = rows - 1; shuffle && i > 0; i--) {
        uint32_t other = (uint32_t)chain_below(state, i + 1), row = place[i];

        place[i] = place[other];
        place[other] = row;
    }
    for (uint32_t i = 0; i < rows; i++)
        memcpy(from + i * in, x + place[i] * in, in);
    while (done < rows) {
        uint32_t n = 1 + (uint32_t)chain_below(state, request_max);

        n = n < rows - done ? n : rows - done;
        jobs[n_jobs++] = chain_job(pipeline, from + done * in, to + done * out, n);
        done += n;
    }
    chain_batch(chain, jobs, n_jobs);
    done = 0;
    for (unsigned j = 0; j < n_jobs; j++) {
        assert_int_equal(jobs[j].result, 0);
        for (uint32_t r = 0; r < jobs[j].rows; r++)
            for (size_t o = 0; o < order.outer; o++)
                if (!same(pipeline, (char *)jobs[j].y + (o * jobs[j].rows + r) * order.inner,
                          alone + place[done + r] * out + o * order.inner, order.inner))
                    fail_msg("row %u, %u of a request of %u in a batch of %u, differs from alone",
                             place[done + r], r, jobs[j].rows, rows);
        done += jobs[j].rows;
    }
    free(jobs);
    free(from);
    free(to);
}

static void check_model(const struct fixture *fixture, const char *body, uint64_t *state)
{
    static const uint32_t max_rows[] = {256, 7, 100};
    struct pipeline *pipeline;
    char *x, *alone;
    uint32_t rows;

    build(fixture, body, &pipeline);
    rows = chain_in_bytes(pipeline) > 100000 ? 7 : ROWS;
    x = chain_input(pipeline, rows, state);
    alone = chain_alloc(rows * chain_out_bytes(pipeline));
    for (int w = 0; w < 3; w++) {
        struct chain chain;

        chain_open(pipeline, 1u << w, max_rows[w], &chain);
        for (uint32_t r = 0; w == 0 && r < rows; r++)
            chain_run(&chain, chain_job(pipeline, x + r * chain_in_bytes(pipeline),
                                        alone + r * chain_out_bytes(pipeline), 1));
        check_split(&chain, x, alone, rows, false, 1, state);
        check_split(&chain, x, alone, rows, false, rows, state);
        check_split(&chain, x, alone, rows, true, 30, state);
        check_split(&chain, x, alone, rows < 13 ? rows : 13, false, rows, state);
        check_split(&chain, x, alone, rows < 3 ? rows : 3, true, rows, state);
        chain_close(&chain);
    }
    free(x);
    free(alone);
    pipeline_free(pipeline);
}

static void test_batches(void **unused)
{
    struct fixture fixture;
    uint64_t state = 7;

    (void)unused;
    fixture_make(&fixture);
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++)
        check_model(&fixture, models[i], &state);
    fixture_remove(&fixture);
}

/* Any number of rows of any width: blocks and slices of every size. */
static void test_products(void **unused)
{
    static const int sizes[][2] = {{1, 1}, {2, 16}, {17, 15}, {64, 128}, {100, 129}, {511, 250}};
    struct fixture fixture;
    uint64_t state = 8;

    (void)unused;
    fixture_make(&fixture);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        char body[256];

        snprintf(body, sizeof(body),
                 "input = { shape = [%d]; }; stages = ({ op = \"linear\"; weight = \"w\"; "
                 "bias = \"b\"; out = %d; });",
                 sizes[i][0], sizes[i][1]);
        check_model(&fixture, body, &state);
    }
    fixture_remove(&fixture);
}

/* Proof */

#define PROVEN                                                                               \
    "input = { shape = [2, 5, 7, 6]; }; prove = %s; dtype = \"%s\"; stages = ("              \
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 6; kernel = 2; padding = %d; }," \
    "{ op = \"group_norm\"; groups = 3; weight = \"g\"; bias = \"h\"; },"                    \
    "{ op = \"minimum\"; value = %s; }, { op = \"clamp\"; min = %s; max = 1.0; },"           \
    "{ op = \"dropout\"; p = 0.3; }, { op = \"dropout\"; p = 0.2; });"
#define SAMPLES 9

/* Samples of every kind: small, zero, with a huge number, with a NaN, with an infinity; the last
 * one huge throughout, so that its sums overflow. */
static void *kinds_of_samples(const struct pipeline *pipeline, uint64_t *state)
{
    static const float special[SAMPLES] = {0, 0, NAN, INFINITY, 3e38f, -INFINITY, 1e30f, 0, 0};
    size_t n = (size_t)shape_elements(&pipeline->in), unit = dtype_size(pipeline->dtype);
    char *x = chain_input(pipeline, SAMPLES, state);

    memset(x + 7 * n * unit, 0, n * unit);
    for (size_t s = 0; s < SAMPLES; s++)
        if (special[s] != 0)
            tensor_from_float(pipeline->dtype, &special[s],
                              x + (s * n + (size_t)chain_below(state, (int64_t)n)) * unit, 1);
    for (size_t i = 8 * n; i < 9 * n; i++) {
        float huge = copysignf(1.6e38f, chain_uniform(state));

        tensor_from_float(pipeline->dtype, &huge, x + i * unit, 1);
    }
    return x;
}

/* A compact result says what the full one says. */
static void check_compact(const struct chain *chain, const void *x, const char *full)
{
    const struct pipeline *pipeline = chain->pipeline;
    size_t out = chain_out_bytes(pipeline), size = BACKEND_COMPACT_ROOM(SAMPLES) + SAMPLES * out;
    char *y = chain_alloc(size), *constant = chain_alloc(out);
    struct job job = chain_job(pipeline, x, y, SAMPLES);
    uint32_t n_full = 0;

    memset(y, 0xee, size);
    job.compact = true;
    job.y_size = size;
    chain_batch(chain, &job, 1);
    assert_int_equal(job.result, 0);
    for (size_t i = 0; i < out; i += dtype_size(pipeline->dtype))
        tensor_from_float(pipeline->dtype, &pipeline->proof.value, constant + i, 1);
    for (size_t s = 0; s < SAMPLES; s++) {
        const char *sample = y + BACKEND_COMPACT_ROOM(SAMPLES) + n_full * out;
        float first;

        tensor_to_float(pipeline->dtype, full + s * out, &first, 1);
        assert_in_range(y[s], 0, 2);
        if (y[s] == 0)
            assert_true(same(pipeline, constant, full + s * out, out));
        else if (y[s] == 1)
            assert_true(isnan(first));
        else
            assert_true(same(pipeline, sample, full + s * out, out));
        n_full += y[s] == 2;
    }
    for (size_t i = SAMPLES; i < BACKEND_COMPACT_ROOM(SAMPLES); i++)
        assert_int_equal(y[i], 0);
    assert_int_equal(job.n_full, n_full);
    assert_true(n_full > 0);

    /* Exactly enough room is enough, a byte less is not; nobody else's job fails with it. */
    for (int less = 0; less < 2; less++) {
        struct job jobs[2] = {job, chain_job(pipeline, x, chain_alloc(SAMPLES * out), SAMPLES)};

        jobs[0].y_size = BACKEND_COMPACT_ROOM(SAMPLES) + n_full * out - (size_t)less;
        chain_batch(chain, jobs, 2);
        assert_int_equal(jobs[0].result, less ? -ENOSPC : 0);
        assert_int_equal(jobs[1].result, 0);
        assert_true(same(pipeline, jobs[1].y, full, SAMPLES * out));
        free(jobs[1].y);
    }
    job.train = true;
    chain_batch(chain, &job, 1);
    assert_int_equal(job.result, -EINVAL);
    free(y);
    free(constant);
}

static void check_proof(const struct fixture *fixture, const char *dtype, int padding,
                        const char *low, const char *high, uint64_t *state)
{
    char body[2][1024];
    struct pipeline *pipelines[2];
    struct chain chains[2];
    char *y[2], *x;
    size_t size;

    for (int i = 0; i < 2; i++) {
        snprintf(body[i], sizeof(body[i]), PROVEN, i ? "true" : "false", dtype, padding, low, high);
        build(fixture, body[i], &pipelines[i]);
        assert_int_equal(pipelines[i]->proof.constant, i);
        chain_open(pipelines[i], 2, 4, &chains[i]);
        y[i] = chain_alloc(SAMPLES * chain_out_bytes(pipelines[i]));
    }
    size = SAMPLES * chain_out_bytes(pipelines[0]);
    x = kinds_of_samples(pipelines[0], state);
    for (int train = 1; train >= 0; train--) {
        for (int i = 0; i < 2; i++) {
            struct job job = chain_job(pipelines[i], x, y[i], SAMPLES);

            job.train = train;
            job.seed = 99;
            job.offset = 12;
            chain_run(&chains[i], job);
        }
        if (!same(pipelines[0], y[0], y[1], size))
            fail_msg("%s, padding %d, train %d: the proof changes the result", dtype, padding,
                     train);
    }
    check_compact(&chains[1], x, y[0]);
    for (int i = 0; i < 2; i++) {
        chain_close(&chains[i]);
        pipeline_free(pipelines[i]);
        free(y[i]);
    }
    free(x);
}

static void test_proof(void **unused)
{
    struct fixture fixture;
    uint64_t state = 9;

    (void)unused;
    fixture_make(&fixture);
    check_proof(&fixture, "float32", 0, "0.0", "0.0", &state);
    check_proof(&fixture, "float32", 1, "0.25", "0.5", &state);
    check_proof(&fixture, "float32", 1, "-0.0", "0.0", &state);
    check_proof(&fixture, "bfloat16", 0, "0.1", "0.3", &state);
    fixture_remove(&fixture);
}

/* Compact results of an outer sum, and requests that are wrong. */
static void test_outer(void **unused)
{
    struct pipeline *pipeline;
    struct fixture fixture;
    uint64_t state = 10;
    struct chain chain;
    float sums[5], y[5 * 30];
    struct job jobs[2];
    void *x;

    (void)unused;
    fixture_make(&fixture);
    build(&fixture, models[0], &pipeline);
    chain_open(pipeline, 2, 64, &chain);
    x = chain_input(pipeline, 5, &state);
    jobs[0] = chain_job(pipeline, x, y, 5);
    jobs[1] = chain_job(pipeline, x, sums, 5);
    jobs[1].compact = true;
    jobs[1].y_size = sizeof(sums);
    chain_batch(&chain, jobs, 2);
    assert_int_equal(jobs[0].result, 0);
    assert_int_equal(jobs[1].result, 0);
    for (int c = 0; c < 30; c++)
        for (int r = 0; r < 5; r++) {
            float want = sums[r] + chain_weight("t", c);

            if (memcmp(&y[c * 5 + r], &want, 4) != 0)
                fail_msg("y[%d, %d] is %.9g, not %.9g", c, r, (double)y[c * 5 + r], (double)want);
        }
    jobs[0].y_size--;
    jobs[1].y_size--;
    chain_batch(&chain, jobs, 2);
    assert_int_equal(jobs[0].result, -EINVAL);
    assert_int_equal(jobs[1].result, -ENOSPC);
    chain_close(&chain);
    pipeline_free(pipeline);
    fixture_remove(&fixture);
    free(x);
}

/* Addresses that suit no float. */
static void test_unaligned(void **unused)
{
    struct pipeline *pipeline;
    struct fixture fixture;
    uint64_t state = 11;
    struct chain chain;
    char *x, *y, *odd;
    size_t in, out;

    (void)unused;
    fixture_make(&fixture);
    build(&fixture, models[2], &pipeline);
    in = 3 * chain_in_bytes(pipeline);
    out = 3 * chain_out_bytes(pipeline);
    x = chain_input(pipeline, 3, &state);
    y = chain_alloc(out);
    odd = chain_alloc(in + out + 8);
    memcpy(odd + 1, x, in);
    chain_open(pipeline, 2, 64, &chain);
    chain_run(&chain, chain_job(pipeline, x, y, 3));
    chain_run(&chain, chain_job(pipeline, odd + 1, odd + in + 3, 3));
    assert_memory_equal(y, odd + in + 3, out);
    chain_close(&chain);
    pipeline_free(pipeline);
    fixture_remove(&fixture);
    free(x);
    free(y);
    free(odd);
}

#define ISA "ONEDNN_MAX_CPU_ISA"

static void test_under_avx2(void **unused)
{
    int status;
    pid_t pid;

    (void)unused;
    if (getenv(ISA))
        return; /* this is that child */
    fflush(stdout);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        setenv(ISA, "AVX2", 1);
        execl("/proc/self/exe", "test_cpu_bits", NULL);
        _exit(127);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batches),   cmocka_unit_test(test_products),
        cmocka_unit_test(test_proof),     cmocka_unit_test(test_outer),
        cmocka_unit_test(test_unaligned), cmocka_unit_test(test_under_avx2),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
