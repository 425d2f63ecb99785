/*
 * The worker pool: every item once, whatever the number of items and workers, run after run without
 * a pause and after one; and a model that is loaded while batches run.
 */
#include "chain.h"

#include <pthread.h>
#include <stdatomic.h>

#include "kernels/cpu/pool.h"

#define ITEMS_MAX 1000

static atomic_uint n_inits;

static void init(void)
{
    atomic_fetch_add(&n_inits, 1);
}

struct count {
    unsigned n_workers;
    atomic_uint times[ITEMS_MAX];
};

static void count_item(void *context, unsigned worker, size_t item)
{
    struct count *count = context;

    assert_true(worker < count->n_workers);
    assert_true(item < ITEMS_MAX);
    atomic_fetch_add(&count->times[item], 1);
}

static void check_run(struct pool *pool, struct count *count, size_t n_items)
{
    for (size_t i = 0; i < ITEMS_MAX; i++)
        atomic_store(&count->times[i], 0);
    pool_run(pool, n_items, count_item, count);
    for (size_t i = 0; i < ITEMS_MAX; i++)
        if (atomic_load(&count->times[i]) != (i < n_items))
            fail_msg("item %zu of %zu ran %u times", i, n_items, atomic_load(&count->times[i]));
}

static void test_items(void **unused)
{
    static struct count count;
    uint64_t state = 3;

    (void)unused;
    for (unsigned workers = 1; workers <= 5; workers++) {
        struct report report;
        struct pool *pool;

        atomic_store(&n_inits, 0);
        assert_int_equal(pool_new(workers, init, &pool, &report), 0);
        assert_int_equal(pool_workers(pool), workers);
        count.n_workers = workers;
        for (int i = 0; i < 300; i++) {
            check_run(pool, &count, (size_t)chain_below(&state, i % 2 ? 10 : ITEMS_MAX));
            if (i % 100 == 99)
                usleep(2000); /* long enough for the workers to fall asleep */
        }
        pool_free(pool);
        assert_int_equal(atomic_load(&n_inits), workers - 1);
    }
}

static void test_limits(void **unused)
{
    struct report report;
    struct pool *pool = NULL;

    (void)unused;
    assert_int_equal(pool_new(0, init, &pool, &report), -EINVAL);
    assert_int_equal(pool_new(POOL_WORKERS_MAX + 1, init, &pool, &report), -EINVAL);
    assert_null(pool);
    assert_null(pool_free(NULL));
}

#define MODEL                                                                              \
    "name = \"m\"; weights = \"" FIXTURE_WEIGHTS "\"; input = { shape = [3, 4, 9, 9]; }; " \
    "stages = ({ op = \"conv3d\"; weight = \"w\"; out = 6; kernel = 2; },"                 \
    "{ op = \"linear\"; weight = \"v\"; out = 20; }, { op = \"amin\"; dim = 1; });"

struct loader {
    const struct chain *chain;
    atomic_bool stop;
    unsigned n_loads;
};

static void *load_and_unload(void *context)
{
    struct loader *loader = context;

    do {
        struct report report;
        struct plan *plan;

        assert_int_equal(backend_cpu()->load(loader->chain->backend, loader->chain->pipeline, 16,
                                             &plan, &report),
                         0);
        backend_cpu()->unload(loader->chain->backend, plan);
        loader->n_loads++;
    } while (!atomic_load(&loader->stop));
    return NULL;
}

static void test_load_beside(void **unused)
{
    struct pipeline *pipeline;
    struct fixture fixture;
    struct report report;
    struct chain chain;
    struct loader loader = {.chain = &chain};
    uint64_t state = 4;
    pthread_t thread;
    char *x, *y, *first;
    size_t size;

    (void)unused;
    fixture_make(&fixture);
    if (fixture_build(&fixture, MODEL, chain_weight, &pipeline, &report) < 0)
        fail_msg("%s", report.text);
    chain_open(pipeline, 2, 16, &chain);
    size = 20 * chain_out_bytes(pipeline);
    x = chain_input(pipeline, 20, &state);
    y = chain_alloc(size);
    first = chain_alloc(size);
    chain_run(&chain, chain_job(pipeline, x, first, 20));
    assert_int_equal(pthread_create(&thread, NULL, load_and_unload, &loader), 0);
    for (int i = 0; i < 50; i++) {
        chain_run(&chain, chain_job(pipeline, x, y, 20));
        assert_memory_equal(y, first, size);
    }
    atomic_store(&loader.stop, true);
    pthread_join(thread, NULL);
    assert_true(loader.n_loads > 0);
    chain_close(&chain);
    pipeline_free(pipeline);
    fixture_remove(&fixture);
    free(x);
    free(y);
    free(first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_items), cmocka_unit_test(test_limits),
                                       cmocka_unit_test(test_load_beside)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
