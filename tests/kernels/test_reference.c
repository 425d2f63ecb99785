/*
 * The reference against what PyTorch computed: every golden case, float32 chains with the overflows
 * of float32 against y, wide ones against y64.
 */
#include "golden.h"

#include <math.h>

#include "kernels/reference.h"

static void run(const struct golden *golden, bool wide, double *y)
{
    struct reference_run how = {.rows = golden->rows,
                                .train = golden->train,
                                .seed = golden->seed,
                                .offset = golden->offset};
    struct report report;

    if (reference_run(golden->pipeline, golden->pipeline->n_stages, &how, golden->x, y, wide,
                      &report) < 0)
        fail_msg("%s", report.text);
}

/* semantics: |result - y| <= 1e-4 + 1e-4 |y|, widened by PyTorch's own error; y is the truth where
 * its variance overflowed. 16 bits: at most twice PyTorch's error against y64. */
static void against_y(const char *name, const struct golden *golden, const double *y)
{
    bool overflows = strcmp(name, "a_magnitudes") == 0 || strcmp(name, "b_nonfinite") == 0;
    bool narrow = golden->pipeline->dtype != DTYPE_FLOAT32;
    double error = 0, theirs = 0;

    for (int64_t i = 0; i < golden->n; i++) {
        double want = golden->y[i], tolerance = 1e-4 + 1e-4 * fabs(want);

        if (isnan(want) || isnan(y[i])) {
            if (!isnan(want) || !isnan(y[i]))
                fail_msg("%s: y[%ld] is %.9g, not %.9g", name, (long)i, y[i], want);
            continue;
        }
        if (narrow) {
            error = fmax(error, fabs(y[i] - golden->y64[i]));
            theirs = fmax(theirs, fabs(want - golden->y64[i]));
            continue;
        }
        if (golden->y64 && !overflows)
            tolerance = fmax(tolerance, fabs(want - golden->y64[i]));
        if ((want == 0 && y[i] == 0 && !signbit(want) != !signbit(y[i])) ||
            (y[i] != want && !(fabs(y[i] - want) <= tolerance)))
            fail_msg("%s: y[%ld] is %.9g, not %.9g", name, (long)i, y[i], want);
    }
    if (error > 2 * theirs)
        fail_msg("%s: error %g, PyTorch's %g", name, error, theirs);
}

static void against_y64(const char *name, const struct golden *golden, const double *y)
{
    for (int64_t i = 0; i < golden->n; i++) {
        double want = golden->y64[i];

        if (isnan(want) != isnan(y[i]) ||
            (!isnan(want) && y[i] != want && !(fabs(y[i] - want) <= 2e-7 + 1e-7 * fabs(want))))
            fail_msg("%s: wide y[%ld] is %.17g, not %.17g", name, (long)i, y[i], want);
    }
}

static void test_golden(void **state)
{
    static char names[GOLDEN_MAX][GOLDEN_NAME];
    int n = golden_names(names);

    (void)state;
    assert_int_equal(n, 55);
    for (int i = 0; i < n; i++) {
        struct golden golden;
        double *y;

        golden_open(names[i], &golden);
        y = malloc((size_t)golden.n * sizeof(*y));
        assert_non_null(y);
        run(&golden, false, y);
        against_y(names[i], &golden, y);
        if (golden.y64) {
            run(&golden, true, y);
            against_y64(names[i], &golden, y);
        }
        if (golden.train)
            assert_int_equal(golden.offset + pipeline_offset_advance(golden.pipeline, golden.rows),
                             golden.offset_after);
        free(y);
        golden_close(&golden);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_golden)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
