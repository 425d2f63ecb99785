/*
 * work.c - libuv's thread pool, counted
 *
 * The count says at the end whether anybody still works with what is about to be freed.
 */
#include "work.h"

#include <assert.h>

static void on_run(uv_work_t *uv)
{
    struct work *work = uv->data;

    work->run(work);
}

static void on_done(uv_work_t *uv, int status)
{
    struct work *work = uv->data;

    /* Nothing is ever cancelled here. */
    assert(status == 0);
    work->works->n--;
    work->done(work);
}

void work_queue(struct works *works, struct work *work, void (*run)(struct work *work),
                void (*done)(struct work *work))
{
    int r;

    work->works = works;
    work->run = run;
    work->done = done;
    work->uv.data = work;
    works->n++;
    r = uv_queue_work(works->loop, &work->uv, on_run, on_done);
    assert(r == 0);
    (void)r;
}
