/*
 * Every golden case on the CPU backend: what PyTorch computed, within what float32 allows. Each is
 * run as one request, and with 1, 2 and 4 workers, which must agree to the bit.
 */
#include "chain.h"

#include "tests/kernels/golden.h"

/* |result - y| <= 1e-4 + 1e-4 |y|, widened by PyTorch's own error; where its variance overflows y
 * is the truth. 16 bits: at most twice PyTorch's error against y64. */
static void compare(const char *name, const struct golden *golden, const float *y)
{
    bool overflows = strcmp(name, "a_magnitudes") == 0 || strcmp(name, "b_nonfinite") == 0;
    bool narrow = golden->pipeline->dtype != DTYPE_FLOAT32;
    double error = 0, theirs = 0;

    for (int64_t i = 0; i < golden->n; i++) {
        double want = golden->y[i], have = y[i], tolerance = 1e-4 + 1e-4 * fabs(want);

        if (isnan(want) || isnan(have)) {
            if (!isnan(want) || !isnan(have))
                fail_msg("%s: y[%" PRId64 "] is %.9g, not %.9g", name, i, have, want);
            continue;
        }
        if (narrow) {
            error = fmax(error, fabs(have - golden->y64[i]));
            theirs = fmax(theirs, fabs(want - golden->y64[i]));
            continue;
        }
        if (golden->y64 && !overflows)
            tolerance = fmax(tolerance, fabs(want - golden->y64[i]));
        if (have != want && (golden->pipeline->n_stages == 1 || !(fabs(have - want) <= tolerance)))
            fail_msg("%s: y[%" PRId64 "] is %.9g, not %.9g", name, i, have, want);
    }
    if (error > 2 * theirs)
        fail_msg("%s: error %g, PyTorch's %g", name, error, theirs);
}

static void run(const struct golden *golden, unsigned workers, void *y)
{
    const struct pipeline *pipeline = golden->pipeline;
    size_t n = (size_t)golden->rows * (size_t)shape_elements(&pipeline->in);
    void *x = chain_alloc(n * dtype_size(pipeline->dtype));
    struct chain chain;
    struct job job;

    tensor_from_float(pipeline->dtype, golden->x, x, n);
    chain_open(pipeline, workers, 256, &chain);
    job = chain_job(pipeline, x, y, (uint32_t)golden->rows);
    job.train = golden->train;
    job.seed = golden->seed;
    job.offset = golden->offset;
    chain_run(&chain, job);
    chain_close(&chain);
    free(x);
}

static void test_golden(void **state)
{
    static char names[GOLDEN_MAX][GOLDEN_NAME];
    int n = golden_names(names);

    (void)state;
    assert_int_equal(n, 55);
    for (int i = 0; i < n; i++) {
        struct golden golden;
        size_t size;
        void *y, *again;
        float *floats;

        golden_open(names[i], &golden);
        size = (size_t)golden.n * dtype_size(golden.pipeline->dtype);
        y = chain_alloc(size);
        again = chain_alloc(size);
        floats = chain_alloc((size_t)golden.n * sizeof(*floats));
        run(&golden, 1, y);
        tensor_to_float(golden.pipeline->dtype, y, floats, (size_t)golden.n);
        compare(names[i], &golden, floats);
        for (unsigned workers = 2; workers <= 4; workers += 2) {
            run(&golden, workers, again);
            if (memcmp(y, again, size) != 0)
                fail_msg("%s: other bits with %u workers than with 1", names[i], workers);
        }
        free(y);
        free(again);
        free(floats);
        golden_close(&golden);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
