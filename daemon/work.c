/*
 * work.c - libuv's thread pool, shared fairly and counted
 *
 * The pool takes what comes first, so whoever queued a hundred large buffers would have it for
 * seconds. Works wait here instead, each party's in a row of its own; as many are given to the pool
 * as it has threads, the parties in turn, and of one party never so many that none is left to the
 * others.
 *
 * The count says at the end whether anybody still works with what is about to be freed.
 */
#include "work.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static void on_run(uv_work_t *uv)
{
    struct work *work = uv->data;

    work->run(work);
}

static void give_out(struct works *works);

static void on_done(uv_work_t *uv, int status)
{
    struct work *work = uv->data;
    struct works *works = work->works;

    /* Nothing is ever cancelled here. */
    assert(status == 0);
    works->n--;
    works->n_running--;
    work->party->n_running--;
    if (work->party->n_waiting > 0 && !work->party->is_linked) {
        TAILQ_INSERT_TAIL(&works->ring, work->party, link);
        work->party->is_linked = true;
    }
    give_out(works);
    work->done(work);
}

static void start(struct works *works, struct work_party *party)
{
    struct work *work = STAILQ_FIRST(&party->waiting);
    int r;

    STAILQ_REMOVE_HEAD(&party->waiting, link);
    party->n_waiting--;
    party->n_running++;
    works->n_running++;
    r = uv_queue_work(works->loop, &work->uv, on_run, on_done);
    assert(r == 0);
    (void)r;
}

static void give_out(struct works *works)
{
    struct work_party *party;

    while (works->n_running < WORKS_AT_ONCE && (party = TAILQ_FIRST(&works->ring))) {
        TAILQ_REMOVE(&works->ring, party, link);
        start(works, party);
        party->is_linked = party->n_waiting > 0 && party->n_running < WORKS_A_PARTY;
        if (party->is_linked)
            TAILQ_INSERT_TAIL(&works->ring, party, link);
    }
}

/* libuv reads it when it first needs a thread. */
int works_prepare(void)
{
    char threads[16];

    snprintf(threads, sizeof(threads), "%d", WORKS_AT_ONCE);
    return setenv("UV_THREADPOOL_SIZE", threads, 1) < 0 ? -errno : 0;
}

void works_init(struct works *works, uv_loop_t *loop)
{
    *works = (struct works){.loop = loop};
    TAILQ_INIT(&works->ring);
}

void work_queue(struct works *works, struct work_party *party, struct work *work,
                void (*run)(struct work *work), void (*done)(struct work *work))
{
    work->works = works;
    work->party = party;
    work->run = run;
    work->done = done;
    work->uv.data = work;
    works->n++;
    if (party->n_waiting++ == 0)
        STAILQ_INIT(&party->waiting);
    STAILQ_INSERT_TAIL(&party->waiting, work, link);
    if (!party->is_linked && party->n_running < WORKS_A_PARTY) {
        TAILQ_INSERT_TAIL(&works->ring, party, link);
        party->is_linked = true;
    }
    give_out(works);
}
