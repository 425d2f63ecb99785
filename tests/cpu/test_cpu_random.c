/*
 * Random chains of stages, sizes and dtypes on the CPU backend against the plain stages: every
 * combination of neighbours comes up, which no list of cases would cover. The seed is fixed and
 * printed with a failure, as is the chain.
 */
#include "chain.h"

#include "kernels/reference.h"

#define CHAINS       250
#define ELEMENTS_MAX 6000

/* A chain in the making: text of a model, and the shape of a row. */
struct draft {
    char text[4096];
    size_t n;
    int64_t dims[TENSOR_RANK_MAX]; /* dims[0]: the batch */
    int rank, n_tensors, n_norms;
    bool moved;
    uint64_t *state;
};

static void put(struct draft *draft, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct draft *draft, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    draft->n +=
        (size_t)vsnprintf(draft->text + draft->n, sizeof(draft->text) - draft->n, format, ap);
    va_end(ap);
    assert_true(draft->n < sizeof(draft->text));
}

static int64_t below(struct draft *draft, int64_t n)
{
    return chain_below(draft->state, n);
}

static bool chance(struct draft *draft, int percent)
{
    return below(draft, 100) < percent;
}

static int64_t elements(const struct draft *draft)
{
    int64_t n = 1;

    for (int i = 1; i < draft->rank; i++)
        n *= draft->dims[i];
    return n;
}

static bool add_linear(struct draft *draft)
{
    int64_t last = draft->dims[draft->rank - 1];
    int64_t out = chance(draft, 25) ? 100 + below(draft, 200) : 1 + below(draft, 40);

    if (draft->rank < 2 || elements(draft) / last * out > ELEMENTS_MAX)
        return false;
    put(draft, "{ op = \"linear\"; weight = \"w%d\"; out = %" PRId64 ";", draft->n_tensors, out);
    if (chance(draft, 70))
        put(draft, " bias = \"b%d\";", draft->n_tensors);
    draft->n_tensors++;
    draft->dims[draft->rank - 1] = out;
    return true;
}

static bool add_conv3d(struct draft *draft)
{
    int64_t kernel[3], stride[3], padding[3], size[3], out = 1 + below(draft, 20);

    if (draft->rank != 5)
        return false;
    for (int i = 0; i < 3; i++) {
        padding[i] = below(draft, 2);
        stride[i] = 1 + chance(draft, 20);
        kernel[i] = 1 + below(draft, 3);
        if (kernel[i] > draft->dims[2 + i] + 2 * padding[i])
            kernel[i] = 1;
        size[i] = (draft->dims[2 + i] + 2 * padding[i] - kernel[i]) / stride[i] + 1;
    }
    if (out * size[0] * size[1] * size[2] > ELEMENTS_MAX)
        return false;
    put(draft, "{ op = \"conv3d\"; weight = \"w%d\"; out = %" PRId64, draft->n_tensors, out);
    put(draft, "; kernel = [%" PRId64 ", %" PRId64 ", %" PRId64 "]", kernel[0], kernel[1],
        kernel[2]);
    put(draft, "; stride = [%" PRId64 ", %" PRId64 ", %" PRId64 "]", stride[0], stride[1],
        stride[2]);
    put(draft, "; padding = [%" PRId64 ", %" PRId64 ", %" PRId64 "];", padding[0], padding[1],
        padding[2]);
    if (chance(draft, 70))
        put(draft, " bias = \"b%d\";", draft->n_tensors);
    draft->n_tensors++;
    draft->dims[1] = out;
    memcpy(draft->dims + 2, size, sizeof(size));
    return true;
}

static bool add_group_norm(struct draft *draft)
{
    static const char *const eps[] = {"1e-5", "1e-3", "0.1"};
    int64_t groups;

    /* Each may multiply what float32 lost before by 1 / sqrt(eps). */
    if (draft->rank < 2 || draft->n_norms == 2)
        return false;
    do {
        groups = chance(draft, 30) ? draft->dims[1] : 1 + below(draft, draft->dims[1]);
    } while (draft->dims[1] % groups);
    put(draft, "{ op = \"group_norm\"; groups = %" PRId64 "; eps = %s;", groups,
        eps[draft->n_norms + below(draft, 3 - draft->n_norms)]);
    draft->n_norms++;
    if (chance(draft, 80))
        put(draft, " weight = \"g%d\";", draft->n_tensors);
    if (chance(draft, 80))
        put(draft, " bias = \"h%d\";", draft->n_tensors);
    draft->n_tensors++;
    return true;
}

static bool add_amin(struct draft *draft)
{
    bool keep = chance(draft, 50);
    int dim;

    if (draft->rank < 2)
        return false;
    dim = 1 + (int)below(draft, draft->rank - 1);
    put(draft, "{ op = \"amin\"; dim = %d; keepdim = %s;", dim, keep ? "true" : "false");
    draft->dims[dim] = 1;
    if (!keep) {
        memmove(draft->dims + dim, draft->dims + dim + 1,
                (size_t)(draft->rank - dim - 1) * sizeof(draft->dims[0]));
        draft->rank--;
    }
    return true;
}

static bool add_pointwise(struct draft *draft)
{
    int64_t kind = below(draft, 4);

    if (kind == 0)
        put(draft, "{ op = \"minimum\"; value = %.2f;", below(draft, 9) * 0.25 - 1);
    else if (kind == 1)
        put(draft, "{ op = \"clamp\"; min = %.2f; max = %.2f;", below(draft, 9) * 0.25 - 2,
            below(draft, 9) * 0.25 - 0.5);
    else if (kind == 2)
        put(draft, "{ op = \"clamp\"; %s = %.2f;", chance(draft, 50) ? "min" : "max",
            below(draft, 9) * 0.25 - 1);
    else
        put(draft, "{ op = \"dropout\"; p = %s;",
            (const char *[]){"0", "0.2", "0.5", "0.35", "1"}[below(draft, 5)]);
    return true;
}

/* A tensor that repeats along some dimensions, and along which the row may repeat. */
static bool add_add(struct draft *draft)
{
    int first = (int)below(draft, draft->rank);
    int64_t dims[TENSOR_RANK_MAX], all = 1;

    for (int i = first; i < draft->rank; i++) {
        dims[i] = i == 0 || chance(draft, 35) ? 1 : draft->dims[i];
        if (i > 0 && draft->dims[i] == 1 && chance(draft, 60))
            dims[i] = 1 + below(draft, 6);
        all *= dims[i] > draft->dims[i] ? dims[i] : 1;
    }
    if (elements(draft) * all > ELEMENTS_MAX)
        return false;
    put(draft, "{ op = \"add\"; tensor = \"t%d\"; shape = [", draft->n_tensors++);
    for (int i = first; i < draft->rank; i++) {
        put(draft, "%s%" PRId64, i == first ? "" : ", ", dims[i]);
        draft->dims[i] = dims[i] > draft->dims[i] ? dims[i] : draft->dims[i];
    }
    put(draft, "];");
    return true;
}

/* A tensor of higher rank than the row: the batch moves. */
static void add_outer(struct draft *draft)
{
    int more = 1 + (int)below(draft, 2);

    put(draft, "{ op = \"add\"; tensor = \"t%d\"; shape = [", draft->n_tensors++);
    for (int i = 0; i < more; i++)
        put(draft, "%" PRId64 ", ", 1 + below(draft, i == 0 ? 3 : 20));
    for (int i = 0; i < draft->rank; i++)
        put(draft, "%s%" PRId64, i ? ", " : "",
            i == 0                ? 1
            : draft->dims[i] == 1 ? 1 + below(draft, 3)
            : chance(draft, 50)   ? 1
                                  : draft->dims[i]);
    put(draft, "]; }");
    draft->moved = true;
}

static void make_draft(struct draft *draft, uint64_t *state)
{
    static const char *const dtypes[] = {"float32", "float32", "float16", "bfloat16"};
    bool (*const kinds[])(struct draft *) = {add_linear,    add_conv3d,    add_group_norm,
                                             add_amin,      add_pointwise, add_pointwise,
                                             add_pointwise, add_add,       add_conv3d};
    int n_stages;

    *draft = (struct draft){.state = state, .dims = {1}};
    n_stages = 1 + (int)below(draft, 6);
    draft->rank = (const int[]){2, 2, 3, 5, 5}[below(draft, 5)];
    for (int i = 1; i < draft->rank; i++)
        draft->dims[i] = 1 + below(draft, draft->rank == 2 ? 300 : draft->rank == 3 ? 40 : 9);
    put(draft,
        "name = \"m\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\"; input = { shape = [",
        dtypes[below(draft, 4)]);
    for (int i = 1; i < draft->rank; i++)
        put(draft, "%s%" PRId64, i > 1 ? ", " : "", draft->dims[i]);
    put(draft, "]; };\nstages = (\n");
    for (int i = 0; i < n_stages;) {
        size_t n = draft->n;

        if (!kinds[below(draft, sizeof(kinds) / sizeof(kinds[0]))](draft))
            continue;
        put(draft, " }");
        i++;
        assert_true(draft->n > n);
        if (i < n_stages)
            put(draft, ",\n");
    }
    if (elements(draft) < 200 && chance(draft, 30)) {
        put(draft, ",\n");
        add_outer(draft);
        for (int64_t i = below(draft, 3); i > 0; i--) {
            put(draft, ",\n");
            add_pointwise(draft);
            put(draft, " }");
        }
    }
    put(draft, ");\n");
}

/* NaN and infinities here and there. */
static void spoil(const struct pipeline *pipeline, void *x, size_t n, uint64_t *state)
{
    static const float values[] = {NAN, INFINITY, -INFINITY, -0.0f};

    for (int i = 0; i < 2; i++) {
        size_t at = (size_t)chain_below(state, (int64_t)n);

        tensor_from_float(pipeline->dtype, &values[chain_below(state, 4)],
                          (char *)x + at * dtype_size(pipeline->dtype), 1);
    }
}

static void check_job(const struct pipeline *pipeline, const struct draft *draft,
                      const struct job *job)
{
    struct reference_run how = {
        .rows = job->rows, .train = job->train, .seed = job->seed, .offset = job->offset};
    size_t n_in = job->rows * (size_t)shape_elements(&pipeline->in);
    size_t n_out = job->rows * (size_t)shape_elements(&pipeline->out);
    double unit = pipeline->dtype == DTYPE_FLOAT32   ? 0
                  : pipeline->dtype == DTYPE_FLOAT16 ? 0x1p-10
                                                     : 0x1p-7;
    float *x = chain_alloc(n_in * sizeof(*x)), *y = chain_alloc(n_out * sizeof(*y));
    double *want = chain_alloc(n_out * sizeof(*want)), *wide = chain_alloc(n_out * sizeof(*wide));
    struct report report;

    tensor_to_float(pipeline->dtype, job->x, x, n_in);
    tensor_to_float(pipeline->dtype, job->y, y, n_out);
    if (reference_run(pipeline, pipeline->n_stages, &how, x, want, false, &report) < 0 ||
        reference_run(pipeline, pipeline->n_stages, &how, x, wide, true, &report) < 0)
        fail_msg("%s", report.text);
    for (size_t i = 0; i < n_out; i++) {
        double tolerance = 1e-4 + (1e-4 + unit) * fabs(want[i]) + 8 * fabs(want[i] - wide[i]);
        bool half_infinite = pipeline->dtype == DTYPE_FLOAT16 && fabs(want[i]) >= 65504;

        if (isnan(want[i]) != isnan(y[i]) ||
            (!isnan(want[i]) && want[i] != y[i] && !half_infinite &&
             !(fabs(want[i] - y[i]) <= tolerance)))
            fail_msg("y[%zu] of %u rows is %.9g, not %.9g\n%s", i, job->rows, (double)y[i], want[i],
                     draft->text);
    }
    free(x);
    free(y);
    free(want);
    free(wide);
}

static void run_draft(const struct fixture *fixture, const struct draft *draft, uint64_t *state)
{
    struct job jobs[3];
    unsigned n_jobs = 1 + (unsigned)chain_below(state, 3);
    uint32_t max_rows = (const uint32_t[]){1, 4, 256}[chain_below(state, 3)];
    struct pipeline *pipeline;
    struct report report;
    struct chain chain;

    if (fixture_build(fixture, draft->text, chain_weight, &pipeline, &report) < 0)
        fail_msg("%s\n%s", report.text, draft->text);
    chain_open(pipeline, 1 + (unsigned)chain_below(state, 3), max_rows, &chain);
    for (unsigned i = 0; i < n_jobs; i++) {
        uint32_t rows = 1 + (uint32_t)chain_below(state, chain_below(state, 4) ? 5 : 60);
        void *x = chain_input(pipeline, rows, state);

        if (chain_below(state, 4) == 0)
            spoil(pipeline, x, rows * (size_t)shape_elements(&pipeline->in), state);
        jobs[i] = chain_job(pipeline, x, chain_alloc(rows * chain_out_bytes(pipeline)), rows);
        jobs[i].train = chain_below(state, 2);
        jobs[i].seed = chain_random(state);
        jobs[i].offset = 4 * (uint64_t)chain_below(state, 1000);
    }
    chain_batch(&chain, jobs, n_jobs);
    for (unsigned i = 0; i < n_jobs; i++) {
        assert_int_equal(jobs[i].result, 0);
        check_job(pipeline, draft, &jobs[i]);
        free((void *)jobs[i].x);
        free(jobs[i].y);
    }
    chain_close(&chain);
    pipeline_free(pipeline);
}

static void test_random(void **unused)
{
    const char *seed = getenv("SEED"), *chains = getenv("CHAINS");
    int n = chains ? (int)strtol(chains, NULL, 10) : CHAINS;
    uint64_t state = seed ? strtoull(seed, NULL, 10) : 20240607;
    struct fixture fixture;

    (void)unused;
    printf("seed %" PRIu64 ", %d chains\n", state, n);
    assert_true(n > 0);
    fixture_make(&fixture);
    for (int i = 0; i < n; i++) {
        static struct draft draft;

        make_draft(&draft, &state);
        run_draft(&fixture, &draft, &state);
    }
    fixture_remove(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
