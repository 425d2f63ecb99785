/*
 * pool.c - the threads that compute
 *
 * Work is a number of items; workers take the next one until none is left. One 64-bit word, the
 * ticket, says how far they are: the run's number in the upper half, the next item in the lower.
 * An item is taken by moving that word on, which fails for whoever still holds the number of an
 * earlier run. Between two runs the lower half is CLOSED, so that nobody can take an item while
 * the description of a run changes.
 *
 * A worker that finds nothing spins for some microseconds, because a batch is several runs in a row
 * and waking a thread of a virtual machine costs more than most of them; then it sleeps. Sleeper
 * and caller cannot miss each other: one counts itself and then looks at the ticket, the other
 * writes the ticket and then looks at the count, all sequentially consistent.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "pool.h"

#define CLOSED UINT32_MAX
#define SPINS  2000

struct pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Atomic size_t n_items;
    _Atomic pool_fn fn;
    void *_Atomic context;

    _Alignas(64) _Atomic size_t n_done;
    atomic_bool stop;
    atomic_uint n_started, n_sleepers;
    pthread_mutex_t lock;
    pthread_cond_t wake;

    void (*init)(void);
    unsigned n_workers, n_threads; /* threads: those that run, worker 1 first */
    pthread_t threads[POOL_WORKERS_MAX];
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Takes and does items until none is left. */
static void work(struct pool *pool, unsigned worker)
{
    uint64_t ticket = atomic_load(&pool->ticket);

    for (;;) {
        uint32_t item = (uint32_t)ticket;
        pool_fn fn;
        void *context;

        if (item == CLOSED || item >= atomic_load(&pool->n_items))
            return;
        fn = atomic_load(&pool->fn);
        context = atomic_load(&pool->context);
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1))
            continue;
        fn(context, worker, item);
        atomic_fetch_add(&pool->n_done, 1);
        ticket = atomic_load(&pool->ticket);
    }
}

static bool idle(struct pool *pool, uint64_t run)
{
    return atomic_load(&pool->ticket) >> 32 == run && !atomic_load(&pool->stop);
}

static void *thread_main(void *context)
{
    struct pool *pool = context;
    unsigned worker = 1 + atomic_fetch_add(&pool->n_started, 1);
    uint64_t run = 0;

    pool->init();
    for (;;) {
        for (int i = 0; i < SPINS && idle(pool, run); i++)
            pause_briefly();
        if (idle(pool, run)) {
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->n_sleepers, 1);
            while (idle(pool, run))
                pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->n_sleepers, 1);
            pthread_mutex_unlock(&pool->lock);
        }
        if (atomic_load(&pool->stop))
            return NULL;
        run = atomic_load(&pool->ticket) >> 32;
        work(pool, worker);
    }
}

static void wake_all(struct pool *pool)
{
    if (atomic_load(&pool->n_sleepers) == 0)
        return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

int pool_new(unsigned workers, void (*init)(void), struct pool **ret, struct report *report)
{
    struct pool *pool;
    sigset_t all, before;
    int r = 0;

    if (workers < 1 || workers > POOL_WORKERS_MAX)
        return report_set(report, -EINVAL, "%u workers: 1 to %d are possible", workers,
                          POOL_WORKERS_MAX);
    pool = aligned_alloc(_Alignof(struct pool), sizeof(*pool));
    if (!pool)
        return report_set(report, -ENOMEM, "out of memory");
    *pool = (struct pool){.n_workers = workers, .init = init, .ticket = CLOSED};
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);

    /* Signals are for the threads that expect them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (unsigned i = 1; i < workers && r == 0; i++) {
        char name[16];

        r = -pthread_create(&pool->threads[pool->n_threads], NULL, thread_main, pool);
        if (r < 0)
            break;
        snprintf(name, sizeof(name), "cpu-%u", i);
        pthread_setname_np(pool->threads[pool->n_threads++], name);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r < 0) {
        pool_free(pool);
        return report_set(report, r, "cannot start %u worker threads", workers - 1);
    }
    *ret = pool;
    return 0;
}

struct pool *pool_free(struct pool *pool)
{
    if (!pool)
        return NULL;
    atomic_store(&pool->stop, true);
    wake_all(pool);
    for (unsigned i = 0; i < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
    return NULL;
}

unsigned pool_workers(const struct pool *pool)
{
    return pool->n_workers;
}

void pool_run(struct pool *pool, size_t n_items, pool_fn fn, void *context)
{
    uint64_t run;

    if (pool->n_workers == 1 || n_items <= 1) {
        for (size_t i = 0; i < n_items; i++)
            fn(context, 0, i);
        return;
    }
    run = ((atomic_load(&pool->ticket) >> 32) + 1) & UINT32_MAX;
    atomic_store(&pool->n_done, 0);
    atomic_store(&pool->n_items, n_items);
    atomic_store(&pool->fn, fn);
    atomic_store(&pool->context, context);
    atomic_store(&pool->ticket, run << 32);
    wake_all(pool);
    work(pool, 0);
    for (int i = 0; atomic_load(&pool->n_done) < n_items; i++) {
        if (i < SPINS)
            pause_briefly();
        else
            sched_yield(); /* more workers than cores: let them */
    }
    atomic_store(&pool->ticket, run << 32 | CLOSED);
}
