/*
 * Every allocation, mapping and read of making a backend and a plan fails in turn: an error that
 * says so, or a plan all the same where what failed was only advice; nothing left behind (the
 * address sanitizer watches), no descriptor open, and the backend as good as before.
 */
#include "chain.h"

#include "tests/fault.h"

#define ROUNDS 2000

static const char *const models[] = {
    "{ shape = [70]; }; stages = ({ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = 140; },"
    "{ op = \"group_norm\"; groups = 7; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"amin\"; dim = 1; keepdim = true; },"
    "{ op = \"add\"; tensor = \"t\"; shape = [1, 30, 1, 1]; });",
    "{ shape = [20, 5, 9, 8]; }; dtype = \"float16\"; stages = ("
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 18; kernel = 3; },"
    "{ op = \"group_norm\"; groups = 9; },"
    "{ op = \"add\"; tensor = \"t\"; shape = [18, 1, 1, 6]; },"
    "{ op = \"dropout\"; p = 0.2; });",
};

static void fail_open(void)
{
    struct backend_options options = {.workers = 2};
    unsigned fds = fault_open_fds();
    bool last = false;

    for (unsigned n = 1; !last; n++) {
        struct backend *backend = NULL;
        struct report report = {""};
        int r;

        assert_true(n < ROUNDS);
        fault_arm(n);
        r = backend_cpu()->open(&options, &backend, &report);
        last = fault_disarm() < n;
        if (r == 0) {
            backend_cpu()->close(backend);
        } else if (last || (r != -ENOMEM && r != -EAGAIN) || report.text[0] == 0 || backend) {
            fail_msg("fault %u: %d \"%s\"", n, r, report.text);
        }
        assert_int_equal(fault_open_fds(), fds);
    }
}

static void fail_load(const struct pipeline *pipeline)
{
    struct backend_options options = {.workers = 2};
    unsigned fds = fault_open_fds(), n;
    struct backend *backend;
    struct report report;
    bool last = false;

    assert_int_equal(backend_cpu()->open(&options, &backend, &report), 0);
    for (n = 1; !last; n++) {
        struct plan *plan = NULL;
        int r;

        assert_true(n < ROUNDS);
        report.text[0] = 0;
        fault_arm(n);
        r = backend_cpu()->load(backend, pipeline, 128, &plan, &report);
        last = fault_disarm() < n;
        if (r == 0) {
            backend_cpu()->unload(backend, plan);
        } else if (last || (r != -ENOMEM && r != -EIO) || report.text[0] == 0 || plan) {
            fail_msg("fault %u: %d \"%s\"", n, r, report.text);
        }
        assert_int_equal(fault_open_fds(), fds);
    }
    assert_true(n > 10);
    backend_cpu()->close(backend);
}

static void test_faults(void **unused)
{
    struct fixture fixture;

    (void)unused;
    fixture_make(&fixture);
    fail_open();
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        struct pipeline *pipeline;
        struct report report;
        char text[1024];

        snprintf(text, sizeof(text), "name = \"m\"; weights = \"" FIXTURE_WEIGHTS "\"; input = %s",
                 models[i]);
        if (fixture_build(&fixture, text, chain_weight, &pipeline, &report) < 0)
            fail_msg("%s", report.text);
        fail_load(pipeline);
        pipeline_free(pipeline);
    }
    fixture_remove(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_faults)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
