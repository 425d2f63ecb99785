/*
 * batch.h - which waiting requests run together: pure logic, time passed in
 *
 * One queue a model. What is fair is decided over all queues: a uid's share follows it from model
 * to model.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "cost.h"
#include "proto/proto.h"

#define BATCH_PRIORITIES (PROTO_PRIORITY_MAX + 1)

/* Why a batch took no more. */
enum batch_reason {
    BATCH_FULL,     /* max_rows, or the next request does not fit */
    BATCH_IDLE,     /* nothing else waits, and the device does not wait either */
    BATCH_DELAY,    /* max_delay_us is over */
    BATCH_DEADLINE, /* a deadline does not allow to wait that long */
    BATCH_COST,     /* more rows would make it dearer than two, or none of them cheaper */
    BATCH_REASONS
};

struct batch_flow;
struct batch_lane;

/* Whose turn it is among uids. Embedded in a uid, zeroed. */
struct batch_party {
    uint64_t turn[BATCH_PRIORITIES]; /* rows served; the lowest is next */
    unsigned n_flows[BATCH_PRIORITIES];
    LIST_HEAD(, batch_flow) flows;
};

/* Embedded in a connection, zeroed. */
struct batch_source {
    LIST_HEAD(, batch_lane) lanes;
};

/* What all queues of a scheduler share, zeroed: the turn that is served. A uid that comes back
 * starts here, so that nobody saves up. */
struct batch_order {
    uint64_t turn[BATCH_PRIORITIES];
};

/* Embedded in a request. The first six are the caller's. */
struct batch_item {
    struct batch_party *party;
    struct batch_source *source;
    uint64_t latest_us;  /* when its batch must be formed at the latest; UINT64_MAX: no matter */
    uint32_t rows;       /* that wait */
    uint8_t priority;    /* 0 ... PROTO_PRIORITY_MAX, higher first */
    uint32_t cut_rows;   /* at most max_rows: it runs so many at a time, with others' in between;
                            0: only whole */
    uint32_t taken_rows; /* of it, by batch_form() */
    bool queued;
    uint64_t arrival_us;
    struct batch_lane *lane;
    TAILQ_ENTRY(batch_item) link; /* in its lane */
    TAILQ_ENTRY(batch_item) age;  /* in its queue */
};

/* Flows by turn, the lowest at the root. */
struct batch_heap {
    struct batch_flow **flows;
    size_t n, room;
};

struct batch_queue {
    struct batch_order *order;
    struct batch_heap heaps[BATCH_PRIORITIES];
    TAILQ_HEAD(, batch_item) items; /* by arrival */
    uint64_t rows;                  /* waiting */
    unsigned n;                     /* waiting requests */
    uint32_t queue_rows, max_rows;
    uint32_t max_delay_us;
    const struct cost *cost; /* NULL: not known */
    uint32_t enough_rows;    /* no need to wait for more */
    uint64_t latest_us;      /* the earliest of the items' */
    bool is_latest_stale;
    uint64_t n_flows; /* that there ever were */
};

void batch_init(struct batch_queue *queue, struct batch_order *order, uint32_t max_rows,
                uint32_t max_delay_us, uint32_t queue_rows);
/* Sizes follow the costs from here on; the queue refers to them. */
void batch_set_cost(struct batch_queue *queue, const struct cost *cost);
/* Nothing waits. Accepts a queue of zeros. */
void batch_deinit(struct batch_queue *queue);

/* Whether an item may come in where so many rows wait: those of the queue, or of all that share its
 * limit. A party that has nothing in a full queue gets one item of at most a batch's rows in all
 * the same, or whoever fills it would shut the others out. */
bool batch_admits(const struct batch_queue *queue, const struct batch_item *item, uint64_t rows);
/* 0, -EBUSY when the item may not come in, or -ENOMEM: nothing is queued then. */
int batch_push(struct batch_queue *queue, struct batch_item *item, uint64_t now_us);
/* Takes out one that waits. */
void batch_remove(struct batch_queue *queue, struct batch_item *item);

/* What runs next, or NULL. */
struct batch_item *batch_head(struct batch_queue *queue);
/* Does `a` run before `b`, where both are heads of queues? */
bool batch_before(const struct batch_item *a, const struct batch_item *b);

/* From when on a batch may be formed: 0 when it is large enough, UINT64_MAX when nothing waits. */
uint64_t batch_ready_us(struct batch_queue *queue);

/*
 * Takes out the next batch: requests in order while their rows fit in max_rows and what is left is
 * not cheaper to run on its own, at least one and at most n_max; of one that was cut the rest stays
 * queued. Returns how many; *ret_reason (if there are any) says why no more.
 */
unsigned batch_form(struct batch_queue *queue, struct batch_item **items, unsigned n_max,
                    uint64_t now_us, enum batch_reason *ret_reason);
