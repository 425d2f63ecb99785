/*
 * test_bell.c - a thread wakes the loop: no ring is lost, and rings in a row may be heard as one
 */
#include "unit.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "daemon/bell.h"

#define RINGS 100000

static uv_loop_t loop;
static struct bell bell;
static atomic_uint rung; /* written before each ring */
static unsigned n_heard, last;
static bool closed;

static void on_closed(void *context)
{
    assert_ptr_equal(context, &loop);
    closed = true;
}

/* The last ring is heard with what was written before it, or this never ends. */
static void on_bell(void *context)
{
    assert_ptr_equal(context, &loop);
    n_heard++;
    last = atomic_load_explicit(&rung, memory_order_relaxed);
    if (last == RINGS)
        uv_stop(&loop);
}

static void *ring(void *pause)
{
    for (unsigned i = 1; i <= RINGS; i++) {
        atomic_store_explicit(&rung, i, memory_order_relaxed);
        bell_ring(&bell);
        if (pause && i % 7 == 0)
            sched_yield();
    }
    return NULL;
}

static void begin(void)
{
    n_heard = last = 0;
    closed = false;
    atomic_store(&rung, 0);
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(bell_init(&bell, &loop, on_bell, &loop), 0);
}

static void hear_all(void)
{
    assert_int_not_equal(uv_run(&loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(last, RINGS);
}

/* Nobody rings any more. */
static void end(void)
{
    bell_close(&bell, on_closed);
    assert_int_equal(uv_run(&loop, UV_RUN_DEFAULT), 0);
    assert_true(closed);
    assert_int_equal(uv_loop_close(&loop), 0);
}

static void hears_a_thread(void **state)
{
    (void)state;
    for (int pause = 0; pause < 2; pause++) {
        pthread_t thread;

        begin();
        assert_int_equal(pthread_create(&thread, NULL, ring, pause ? &loop : NULL), 0);
        hear_all();
        pthread_join(thread, NULL);
        end();
        assert_in_range(n_heard, 1, RINGS);
    }
}

/* Also by the loop's own thread, while the loop does not run. */
static void hears_many_as_one(void **state)
{
    (void)state;
    begin();
    ring(NULL);
    hear_all();
    end();
    assert_int_equal(n_heard, 1);
}

/* Nothing is left of one that has no descriptor. */
static void needs_a_descriptor(void **state)
{
    struct rlimit old, none;

    (void)state;
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = old;
    none.rlim_cur = 0;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    assert_int_equal(bell_init(&bell, &loop, on_bell, &loop), -EMFILE);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(uv_loop_close(&loop), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hears_a_thread),
        cmocka_unit_test(hears_many_as_one),
        cmocka_unit_test(needs_a_descriptor),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
