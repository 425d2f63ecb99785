/*
 * engine.c - batches in, results out
 *
 * Threads and locks. The loop thread owns the table of slots and every request; it takes a free
 * slot, fills the batch and submits it. From then until it comes back through the done list the
 * batch belongs to the engine thread, and, between start() and the end that poll() reports, to the
 * backend. `lock` guards the two lists and `stop`, nothing else, and is held for a few
 * instructions; no other lock is taken under it. The backend is called without it.
 *
 * The engine thread alone calls start() and poll(). While work is in flight it polls: at first
 * without a pause, because a wake-up costs more than small batches take, later with short naps, so
 * that a long batch does not burn a core. Idle, it looks for `spin_us`, then sleeps on the
 * condition. With fewer cores than the threads that a request passes through (client, loop, each
 * engine, and the one that sends the answers of larger batches) it would look while those it waits
 * for cannot run: then it yields, and sleeps at once. Batches that end together wake the loop once.
 * After -ENOTRECOVERABLE the thread ends without another call to the backend: the loop answers
 * everybody and ends the process.
 */
#include "engine.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "bell.h"
#include "clock.h"

#define SPIN_IN_FLIGHT_US 5000
#define NAP_NS            50000
#define OTHER_CORES       3

TAILQ_HEAD(batches, engine_batch);

struct engine {
    const struct backend_ops *ops;
    struct backend *backend;
    unsigned n_slots, spin_us;
    bool is_crowded; /* too few cores to spin on one */

    /* the loop thread's */
    unsigned n_in_flight;
    uint64_t ended_us; /* the last time that a batch did */
    struct bell bell;  /* a batch has ended */
    void (*done)(void *context);
    void *context;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct batches inbox, outbox; /* under lock */
    bool stop, asleep;            /* under lock */
    atomic_uint n_inbox;          /* a hint for the spinning thread */

    struct engine_batch slots[];
};

bool engine_has_few_cores(unsigned n_engines)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0 &&
           (unsigned)CPU_COUNT(&set) < OTHER_CORES + n_engines;
}

static void pause_briefly(const struct engine *engine)
{
    if (engine->is_crowded)
        sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void finish(struct engine *engine, struct engine_batch *batch, int result)
{
    batch->result = result;
    batch->ended_us = clock_us();
    pthread_mutex_lock(&engine->lock);
    TAILQ_INSERT_TAIL(&engine->outbox, batch, link);
    pthread_mutex_unlock(&engine->lock);
    bell_ring(&engine->bell);
}

/* Moves what waits in the inbox into `taken`. With `sleep`, waits for something. False: stop. */
static bool receive(struct engine *engine, struct batches *taken, bool sleep)
{
    bool stop;

    pthread_mutex_lock(&engine->lock);
    while (sleep && !engine->stop && TAILQ_EMPTY(&engine->inbox)) {
        engine->asleep = true;
        pthread_cond_wait(&engine->work, &engine->lock);
    }
    engine->asleep = false;
    TAILQ_CONCAT(taken, &engine->inbox, link);
    atomic_store_explicit(&engine->n_inbox, 0, memory_order_relaxed);
    stop = engine->stop;
    pthread_mutex_unlock(&engine->lock);
    return !stop;
}

/* Starts what was taken. False: the device is lost. */
static bool start_all(struct engine *engine, struct batches *taken, struct batches *running)
{
    struct engine_batch *batch;

    while ((batch = TAILQ_FIRST(taken))) {
        int r;

        TAILQ_REMOVE(taken, batch, link);
        __atomic_store_n(&batch->started_us, clock_us(), __ATOMIC_RELAXED);
        r = engine->ops->start(engine->backend, batch->slot, &batch->batch);
        if (r < 0)
            finish(engine, batch, r);
        else
            TAILQ_INSERT_TAIL(running, batch, link);
        if (r == -ENOTRECOVERABLE)
            return false;
    }
    return true;
}

/* False: the device is lost. *progress says whether a batch has ended. */
static bool poll_all(struct engine *engine, struct batches *running, bool *progress)
{
    struct engine_batch *batch, *next;

    for (batch = TAILQ_FIRST(running); batch; batch = next) {
        int r = engine->ops->poll(engine->backend, batch->slot);

        next = TAILQ_NEXT(batch, link);
        if (r == 0)
            continue;
        TAILQ_REMOVE(running, batch, link);
        finish(engine, batch, r < 0 ? r : 0);
        *progress = true;
        if (r == -ENOTRECOVERABLE)
            return false;
    }
    return true;
}

static void *engine_main(void *argument)
{
    struct engine *engine = argument;
    struct batches taken = TAILQ_HEAD_INITIALIZER(taken);
    struct batches running = TAILQ_HEAD_INITIALIZER(running);
    uint64_t since_us = clock_us(); /* the last time that anything happened */

    pthread_setname_np(pthread_self(), "engine");
    for (;;) {
        bool idle = TAILQ_EMPTY(&running);
        bool progress = false;

        if (atomic_load_explicit(&engine->n_inbox, memory_order_relaxed) > 0) {
            progress = true;
            if (!receive(engine, &taken, false))
                return NULL;
        } else if (idle && clock_us() - since_us >= engine->spin_us) {
            if (!receive(engine, &taken, true))
                return NULL;
            progress = true;
        }
        if (!start_all(engine, &taken, &running) || !poll_all(engine, &running, &progress))
            return NULL;
        if (progress)
            since_us = clock_us();
        else if (!idle && clock_us() - since_us >= SPIN_IN_FLIGHT_US)
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        else
            pause_briefly(engine);
    }
}

static void on_bell(void *context)
{
    struct engine *engine = context;

    engine->done(engine->context);
}

static void on_closed(void *context)
{
    struct engine *engine = context;

    pthread_mutex_destroy(&engine->lock);
    pthread_cond_destroy(&engine->work);
    free(engine);
}

int engine_new(uv_loop_t *loop, const struct backend_ops *ops, struct backend *backend,
               unsigned slots, unsigned n_engines, unsigned spin_us, void (*done)(void *context),
               void *context, struct engine **ret)
{
    struct engine *engine;
    sigset_t all, old;
    int r;

    assert(slots > 0);
    assert(slots <= BACKEND_SLOTS_MAX);
    engine = calloc(1, sizeof(*engine) + slots * sizeof(engine->slots[0]));
    if (!engine)
        return -ENOMEM;
    engine->ops = ops;
    engine->backend = backend;
    engine->n_slots = slots;
    engine->is_crowded = engine_has_few_cores(n_engines);
    engine->spin_us = engine->is_crowded ? 0 : spin_us;
    engine->done = done;
    engine->context = context;
    TAILQ_INIT(&engine->inbox);
    TAILQ_INIT(&engine->outbox);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->work, NULL);
    for (unsigned i = 0; i < slots; i++)
        engine->slots[i].slot = i;
    r = bell_init(&engine->bell, loop, on_bell, engine);
    if (r < 0) {
        free(engine);
        return r;
    }
    /* Signals are the loop's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    r = -pthread_create(&engine->thread, NULL, engine_main, engine);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r < 0) {
        bell_close(&engine->bell, on_closed);
        return r;
    }
    *ret = engine;
    return 0;
}

struct engine *engine_free(struct engine *engine)
{
    if (!engine)
        return NULL;
    assert(engine->n_in_flight == 0);
    pthread_mutex_lock(&engine->lock);
    engine->stop = true;
    atomic_store_explicit(&engine->n_inbox, 1, memory_order_relaxed);
    pthread_cond_signal(&engine->work);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->thread, NULL);
    bell_close(&engine->bell, on_closed);
    return NULL;
}

struct engine_batch *engine_take(struct engine *engine)
{
    for (unsigned i = 0; i < engine->n_slots; i++) {
        if (!engine->slots[i].busy)
            return &engine->slots[i];
    }
    return NULL;
}

void engine_submit(struct engine *engine, struct engine_batch *batch)
{
    bool asleep;

    assert(!batch->busy);
    batch->busy = true;
    batch->submitted_us = clock_us();
    batch->started_us = 0;
    engine->n_in_flight++;
    pthread_mutex_lock(&engine->lock);
    TAILQ_INSERT_TAIL(&engine->inbox, batch, link);
    atomic_fetch_add_explicit(&engine->n_inbox, 1, memory_order_relaxed);
    asleep = engine->asleep;
    pthread_mutex_unlock(&engine->lock);
    /* Without the lock, or the thread would wake up only to wait for it. */
    if (asleep)
        pthread_cond_signal(&engine->work);
}

struct engine_batch *engine_done(struct engine *engine)
{
    struct engine_batch *batch;
    bool more;

    pthread_mutex_lock(&engine->lock);
    batch = TAILQ_FIRST(&engine->outbox);
    if (batch)
        TAILQ_REMOVE(&engine->outbox, batch, link);
    more = !TAILQ_EMPTY(&engine->outbox);
    pthread_mutex_unlock(&engine->lock);
    if (batch)
        engine->ended_us = batch->ended_us;
    if (more)
        bell_ring(&engine->bell);
    return batch;
}

void engine_release(struct engine *engine, struct engine_batch *batch)
{
    assert(batch->busy);
    assert(engine->n_in_flight > 0);
    batch->busy = false;
    engine->n_in_flight--;
}

unsigned engine_in_flight(const struct engine *engine)
{
    return engine->n_in_flight;
}

struct engine_batch *engine_slot(struct engine *engine, unsigned i)
{
    return i < engine->n_slots && engine->slots[i].busy ? &engine->slots[i] : NULL;
}

uint64_t engine_oldest_us(const struct engine *engine)
{
    uint64_t running_us = UINT64_MAX, waiting_us = UINT64_MAX;

    for (unsigned i = 0; i < engine->n_slots; i++) {
        const struct engine_batch *batch = &engine->slots[i];
        uint64_t at_us;

        if (!batch->busy)
            continue;
        at_us = __atomic_load_n(&batch->started_us, __ATOMIC_RELAXED);
        if (at_us > 0 && at_us < running_us)
            running_us = at_us;
        if (at_us > 0)
            continue;
        at_us = batch->submitted_us > engine->ended_us ? batch->submitted_us : engine->ended_us;
        if (at_us < waiting_us)
            waiting_us = at_us;
    }
    /* Behind one that runs it may wait; with none, the thread itself stands still. */
    return running_us < UINT64_MAX ? running_us : waiting_us;
}
