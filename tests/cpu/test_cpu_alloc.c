/*
 * A batch allocates nothing: not through malloc, not by mapping pages. This program's own malloc
 * family and mmap stand before the C library's and count the calls that come from the project's
 * code, which is linked in; what oneDNN does inside is its own. Also: memory that is missing at
 * load is said, not found out by dying.
 */
#include "chain.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS 0 /* the sanitizer's own stand there */
#else
#define COUNTS   1

extern char __executable_start, etext;
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

/* Inlined, a call would seem to come from elsewhere. */
#define NOINLINE __attribute__((noinline))

static atomic_uint n_calls;

static inline __attribute__((always_inline)) void count(const void *from)
{
    if ((const char *)from >= &__executable_start && (const char *)from < &etext)
        atomic_fetch_add(&n_calls, 1);
}

NOINLINE void *malloc(size_t size)
{
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}

NOINLINE void *calloc(size_t n, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_calloc(n, size);
}

NOINLINE void *realloc(void *p, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_realloc(p, size);
}

NOINLINE void *aligned_alloc(size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_memalign(alignment, size);
}

NOINLINE void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    void *(*next)(void *, size_t, int, int, int, off_t);

    count(__builtin_return_address(0));
    *(void **)&next = dlsym(RTLD_NEXT, "mmap");
    return next(address, size, protection, flags, fd, offset);
}
#endif

static const char *const models[] = {
    "{ shape = [70]; }; stages = ({ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = 140; },"
    "{ op = \"group_norm\"; groups = 7; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"amin\"; dim = 1; keepdim = true; },"
    "{ op = \"add\"; tensor = \"t\"; shape = [1, 30, 1, 1]; });",
    "{ shape = [3, 5, 9, 8]; }; prove = false; stages = ("
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 18; kernel = 3; },"
    "{ op = \"group_norm\"; groups = 9; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"minimum\"; value = 0.0; }, { op = \"clamp\"; min = 0.0; max = 1.0; },"
    "{ op = \"dropout\"; p = 0.2; });",
    "{ shape = [3, 5, 9, 8]; }; stages = ("
    "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 18; kernel = 3; },"
    "{ op = \"group_norm\"; groups = 9; weight = \"g\"; bias = \"h\"; },"
    "{ op = \"minimum\"; value = 0.0; }, { op = \"clamp\"; min = 0.0; max = 1.0; },"
    "{ op = \"dropout\"; p = 0.2; });",
};

static void build(const struct fixture *fixture, const char *body, struct pipeline **ret)
{
    struct report report;
    char text[2048];

    snprintf(text, sizeof(text), "name = \"m\"; weights = \"" FIXTURE_WEIGHTS "\"; input = %s",
             body);
    if (fixture_build(fixture, text, chain_weight, ret, &report) < 0)
        fail_msg("%s", report.text);
}

static void check_batches(const struct chain *chain, uint64_t *state)
{
    const struct pipeline *pipeline = chain->pipeline;
    char *x = chain_input(pipeline, 600, state);
    char *y = chain_alloc(600 * chain_out_bytes(pipeline));

    for (uint32_t rows = 1; rows <= 600; rows *= 3) {
        struct job jobs[2] = {chain_job(pipeline, x, y, rows), {0}};
        struct batch batch = {.plan = chain->plan, .jobs = jobs, .n_jobs = 1, .rows = rows};
        int r;

        jobs[0].train = rows & 2;
#if COUNTS
        atomic_store(&n_calls, 0);
#endif
        r = backend_cpu()->start(chain->backend, 0, &batch);
#if COUNTS
        assert_int_equal(atomic_load(&n_calls), 0);
#endif
        assert_int_equal(r, 0);
        assert_int_equal(jobs[0].result, 0);
        assert_int_equal(backend_cpu()->poll(chain->backend, 0), 1);
    }
    free(x);
    free(y);
}

static void test_no_allocation(void **unused)
{
    struct fixture fixture;
    uint64_t state = 5;

    (void)unused;
#if COUNTS
    void *volatile kept;

    /* The counter counts. */
    atomic_store(&n_calls, 0);
    kept = chain_alloc(10);
    free(kept);
    assert_int_equal(atomic_load(&n_calls), 1);
#endif
    fixture_make(&fixture);
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        struct pipeline *pipeline;
        struct chain chain;

        build(&fixture, models[i], &pipeline);
        chain_open(pipeline, 2, 128, &chain);
        check_batches(&chain, &state);
        chain_close(&chain);
        pipeline_free(pipeline);
    }
    fixture_remove(&fixture);
}

/* Work space that no machine has, and more than 64 bits count: refused before anything is taken. */
static void test_too_large(void **unused)
{
    static const char *const inputs[] = {
        "{ shape = [1000000, 1, 1]; }; stages = ("
        "{ op = \"linear\"; weight = \"w\"; out = 1; },"
        "{ op = \"add\"; tensor = \"t\"; shape = [1, 1, 1000, 1000]; },"
        "{ op = \"group_norm\"; groups = 1; });",
        "{ shape = [1048576, 1048576]; }; stages = ("
        "{ op = \"add\"; tensor = \"t\"; shape = [1]; },"
        "{ op = \"add\"; tensor = \"u\"; shape = [1]; },"
        "{ op = \"add\"; tensor = \"v\"; shape = [1]; });"};
    static const uint32_t max_rows[] = {1, 1048576};
    struct backend_options options = {.workers = 1};
    struct pipeline *pipeline;
    struct backend *backend;
    struct fixture fixture;
    struct report report;
    struct plan *plan = NULL;

    (void)unused;
    fixture_make(&fixture);
    assert_int_equal(backend_cpu()->open(&options, &backend, &report), 0);
    for (int i = 0; i < 2; i++) {
        build(&fixture, inputs[i], &pipeline);
        assert_int_equal(backend_cpu()->load(backend, pipeline, max_rows[i], &plan, &report),
                         -ENOMEM);
        assert_null(plan);
        assert_non_null(strstr(report.text, "MiB"));
        pipeline_free(pipeline);
    }
    backend_cpu()->close(backend);
    fixture_remove(&fixture);
}

/* What is said about a backend and a plan. */
static void test_info(void **unused)
{
    struct backend_info info;
    struct pipeline *pipeline;
    struct fixture fixture;
    struct plan_info plan;
    struct chain chain;

    (void)unused;
    fixture_make(&fixture);
    build(&fixture, models[0], &pipeline);
    chain_open(pipeline, 2, 128, &chain);
    backend_cpu()->info(chain.backend, &info);
    assert_string_equal(info.name, "cpu");
    assert_int_equal(info.slots, 1);
    assert_non_null(strstr(info.device, "2 workers"));
    assert_non_null(strstr(info.runtime, "oneDNN"));
    backend_cpu()->plan_info(chain.plan, &plan);
    assert_in_range(plan.resident_bytes, 70 * 140 * 4, 2 * 70 * 140 * 4);
    assert_in_range(plan.arena_bytes, 128 * (70 + 140) * 4, 4u << 20);
    assert_int_equal(plan.launches, 3);
    assert_non_null(strstr(plan.text, "linear 70 -> 140: oneDNN matmul"));
    assert_non_null(strstr(plan.text, "group_norm + amin: one pass"));
    assert_non_null(strstr(plan.text, "add: outer sum, written in lines of [1, 30, N, 1]"));
    chain_close(&chain);
    pipeline_free(pipeline);
    fixture_remove(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_allocation),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_info),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
