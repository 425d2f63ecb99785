/*
 * test_engine.c - the engine thread on a backend made of a few counters
 */
#include "unit.h"

#include <stdatomic.h>
#include <time.h>

#include "daemon/clock.h"
#include "daemon/engine.h"

struct backend {
    int start_r, poll_r; /* what start and poll say */
    atomic_int hold;     /* polls answer 0 while it is set */
    atomic_int n_started;
    atomic_int n_calls_after_loss;
    atomic_bool lost;
    struct batch *slots[BACKEND_SLOTS_MAX];
};

static int start_batch(struct backend *backend, unsigned slot, struct batch *batch)
{
    if (atomic_load(&backend->lost))
        atomic_fetch_add(&backend->n_calls_after_loss, 1);
    if (backend->start_r == -ENOTRECOVERABLE)
        atomic_store(&backend->lost, true);
    if (backend->start_r < 0)
        return backend->start_r;
    assert_null(backend->slots[slot]);
    backend->slots[slot] = batch;
    for (unsigned i = 0; i < batch->n_jobs; i++)
        batch->jobs[i].result = (int)batch->jobs[i].seed;
    atomic_fetch_add(&backend->n_started, 1);
    return 0;
}

static int poll_batch(struct backend *backend, unsigned slot)
{
    if (atomic_load(&backend->lost))
        atomic_fetch_add(&backend->n_calls_after_loss, 1);
    assert_non_null(backend->slots[slot]);
    if (atomic_load(&backend->hold))
        return 0;
    backend->slots[slot] = NULL;
    if (backend->poll_r == -ENOTRECOVERABLE)
        atomic_store(&backend->lost, true);
    return backend->poll_r < 0 ? backend->poll_r : 1;
}

static const struct backend_ops ops = {
    .abi = BACKEND_ABI, .name = "counters", .start = start_batch, .poll = poll_batch};

static uv_loop_t loop;
static struct engine *engine;
static unsigned n_done, n_wanted;
static int last_result;
static unsigned long next_seed, n_wrong;

static void submit(void)
{
    struct engine_batch *batch = engine_take(engine);

    assert_non_null(batch);
    batch->jobs[0] = (struct job){.seed = ++next_seed};
    batch->owners[0] = (void *)next_seed;
    batch->batch = (struct batch){.jobs = batch->jobs, .n_jobs = 1, .rows = 1};
    engine_submit(engine, batch);
}

static void on_done(void *context)
{
    struct engine_batch *batch;

    while ((batch = engine_done(engine))) {
        n_done++;
        last_result = batch->result;
        if (batch->result == 0 &&
            (unsigned long)batch->jobs[0].result != (unsigned long)batch->owners[0])
            n_wrong++;
        assert_true(batch->ended_us >= batch->started_us);
        engine_release(engine, batch);
    }
    if (n_done >= n_wanted)
        uv_stop(&loop);
    else if (context)
        submit();
}

static void begin(struct backend *backend, unsigned slots, unsigned spin_us, void *context)
{
    n_done = 0;
    n_wrong = 0;
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(engine_new(&loop, &ops, backend, slots, 1, spin_us, on_done, context, &engine),
                     0);
}

static void end(void)
{
    engine = engine_free(engine);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

/* Each batch comes back once, with its own jobs; spinning and sleeping. */
static void returns_every_batch(void **state)
{
    static const unsigned spins[] = {0, 50, 1000000};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(spins); i++) {
        struct backend backend = {0};

        begin(&backend, 1, spins[i], &backend);
        n_wanted = 2000;
        submit();
        assert_null(engine_take(engine));
        assert_int_equal(engine_in_flight(engine), 1);
        uv_run(&loop, UV_RUN_DEFAULT);
        assert_int_equal(n_done, 2000);
        assert_int_equal(n_wrong, 0);
        assert_int_equal(engine_in_flight(engine), 0);
        end();
    }
}

static void fills_every_slot(void **state)
{
    struct backend backend = {.hold = 1};
    uint64_t before_us = clock_us();

    (void)state;
    begin(&backend, 3, 0, NULL);
    n_wanted = 3;
    assert_true(engine_oldest_us(engine) == UINT64_MAX);
    for (int i = 0; i < 3; i++)
        submit();
    assert_null(engine_take(engine));
    assert_non_null(engine_slot(engine, 2));
    assert_null(engine_slot(engine, 3));
    /* long enough that it naps */
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    assert_int_equal(atomic_load(&backend.n_started), 3);
    assert_true(engine_oldest_us(engine) >= before_us);
    assert_true(engine_oldest_us(engine) <= clock_us());
    atomic_store(&backend.hold, 0);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(n_done, 3);
    assert_int_equal(n_wrong, 0);
    end();
}

static void hands_failures_back(void **state)
{
    struct backend backend = {.start_r = -ENOMEM};

    (void)state;
    begin(&backend, 1, 0, NULL);
    n_wanted = 1;
    submit();
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(last_result, -ENOMEM);
    backend.start_r = 0;
    backend.poll_r = -EIO;
    n_done = 0;
    submit();
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(last_result, -EIO);
    backend.poll_r = 0;
    n_done = 0;
    submit();
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(last_result, 0);
    end();
}

/* After a loss the backend is not called again. */
static void leaves_a_lost_device_alone(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct backend backend = {.start_r = i == 0 ? -ENOTRECOVERABLE : 0,
                                  .poll_r = i == 1 ? -ENOTRECOVERABLE : 0};

        begin(&backend, 2, 0, NULL);
        n_wanted = 1;
        submit();
        uv_run(&loop, UV_RUN_DEFAULT);
        assert_int_equal(last_result, -ENOTRECOVERABLE);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        assert_int_equal(atomic_load(&backend.n_calls_after_loss), 0);
        end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(returns_every_batch),
        cmocka_unit_test(fills_every_slot),
        cmocka_unit_test(hands_failures_back),
        cmocka_unit_test(leaves_a_lost_device_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
