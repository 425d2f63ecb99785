/*
 * work.h - slow things, done on a helper thread while the loop turns
 *
 * run() is called on a helper thread and touches nothing but its own work; done() is called on the
 * loop thread afterwards, and owns the record again.
 */
#pragma once

#include <stdbool.h>
#include <sys/queue.h>

#include <uv.h>

#define WORKS_AT_ONCE 8 /* threads of libuv's pool; its own four would often all be pausing */
#define WORKS_A_PARTY 2 /* of them, at most, for one party */

struct work;

/* Whose works take turns with others'. Embedded in a uid, zeroed. */
struct work_party {
    TAILQ_ENTRY(work_party) link; /* in the ring of those that wait and may run */
    STAILQ_HEAD(, work) waiting;
    unsigned n_waiting, n_running;
    bool is_linked;
};

struct works {
    uv_loop_t *loop;
    unsigned n, n_running; /* n: with those that wait */
    TAILQ_HEAD(, work_party) ring;
    struct work_party own, loads; /* the daemon's; of them those that load models */
};

struct work {
    uv_work_t uv;
    struct works *works;
    struct work_party *party;
    void (*run)(struct work *work);
    void (*done)(struct work *work);
    STAILQ_ENTRY(work) link;
};

/* Before there is any other thread: how many libuv's pool will have. 0 or a negative errno. */
int works_prepare(void);
void works_init(struct works *works, uv_loop_t *loop);

/* Never fails: the record is the caller's, and the queues are lists. The party lives until done()
 * is called. */
void work_queue(struct works *works, struct work_party *party, struct work *work,
                void (*run)(struct work *work), void (*done)(struct work *work));
