/*
 * work.h - slow things, done on a helper thread while the loop turns
 *
 * run() is called on a helper thread and touches nothing but its own work; done() is called on the
 * loop thread afterwards, and owns the record again.
 */
#pragma once

#include <uv.h>

struct works {
    uv_loop_t *loop;
    unsigned n; /* queued or running */
};

struct work {
    uv_work_t uv;
    struct works *works;
    void (*run)(struct work *work);
    void (*done)(struct work *work);
};

/* Never fails: the record is the caller's, and the pool's queue is a list. */
void work_queue(struct works *works, struct work *work, void (*run)(struct work *work),
                void (*done)(struct work *work));
