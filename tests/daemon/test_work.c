/*
 * test_work.c - helper threads are shared between parties, whoever came first
 */
#include <stdatomic.h>
#include <time.h>

#include "unit.h"

#include "daemon/work.h"

struct task {
    struct work work;
    struct work_party *party;
    long ms;
    unsigned ended; /* its place among all that have ended, from 1 */
};

static struct works works;
static uv_loop_t loop;
static unsigned n_ended;
static atomic_uint n_now, n_most; /* of the large party, at once */
static struct work_party large, small, third;

static void run(struct work *work)
{
    const struct task *task = (struct task *)work;

    if (task->party == &large) {
        unsigned n = atomic_fetch_add(&n_now, 1) + 1, most = atomic_load(&n_most);

        while (n > most && !atomic_compare_exchange_weak(&n_most, &most, n))
            ;
    }
    nanosleep(&(struct timespec){.tv_nsec = task->ms * 1000000}, NULL);
    if (task->party == &large)
        atomic_fetch_sub(&n_now, 1);
}

static void done(struct work *work)
{
    ((struct task *)work)->ended = ++n_ended;
}

static void queue(struct task *task, struct work_party *party, long ms)
{
    *task = (struct task){.party = party, .ms = ms};
    work_queue(&works, party, &task->work, run, done);
}

static void serves_parties_in_turn(void **state)
{
    static struct task many[40], few[3], one;

    (void)state;
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(works_prepare(), 0);
    works_init(&works, &loop);
    for (int i = 0; i < 40; i++)
        queue(&many[i], &large, 10);
    for (int i = 0; i < 3; i++)
        queue(&few[i], &small, 10);
    queue(&one, &third, 10);
    assert_int_equal(works.n, 44);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(works.n, 0);
    assert_int_equal(works.n_running, 0);
    assert_int_equal(n_ended, 44);
    assert_int_equal(atomic_load(&n_most), WORKS_A_PARTY);
    /* The others had threads at once, beside two of the many; the third of few waited for one. */
    assert_in_range(few[0].ended, 1, 5);
    assert_in_range(few[2].ended, 3, 8);
    assert_in_range(one.ended, 1, 5);
    for (int i = 0; i < 40; i++)
        assert_true(many[i].ended > 0);
    assert_int_equal(large.n_waiting + large.n_running, 0);
    assert_false(large.is_linked);
    assert_int_equal(uv_loop_close(&loop), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(serves_parties_in_turn),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
