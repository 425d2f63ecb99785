/*
 * batch.h - which waiting requests run together: pure logic, time passed in
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "proto/proto.h"

/* Embedded in a request. */
struct batch_item {
    TAILQ_ENTRY(batch_item) link;
    uint64_t arrival_us;
    uint32_t rows;
    uint8_t priority; /* 0 ... PROTO_PRIORITY_MAX, higher first */
    bool queued;
};

TAILQ_HEAD(batch_list, batch_item);

struct batch_queue {
    struct batch_list lists[PROTO_PRIORITY_MAX + 1];
    uint64_t rows; /* waiting */
    unsigned n;    /* waiting requests */
    uint32_t queue_rows, max_rows;
    uint32_t max_delay_us;
};

void batch_init(struct batch_queue *queue, uint32_t max_rows, uint32_t max_delay_us,
                uint32_t queue_rows);

/* item->rows and item->priority are set. 0, or -EBUSY when the rows would not fit: nothing is
 * queued then. */
int batch_push(struct batch_queue *queue, struct batch_item *item, uint64_t now_us);
/* Takes out one that waits. */
void batch_remove(struct batch_queue *queue, struct batch_item *item);

/* What runs next, or NULL. */
struct batch_item *batch_head(const struct batch_queue *queue);
/* Does `a` run before `b`, of whichever queues? */
bool batch_before(const struct batch_item *a, const struct batch_item *b);

/* From when on a batch may be formed: 0 when it is full, UINT64_MAX when nothing waits. */
uint64_t batch_ready_us(const struct batch_queue *queue);

/*
 * Takes out the next batch: requests in order while their rows fit in max_rows, at least one and at
 * most n_max. Returns how many.
 */
unsigned batch_form(struct batch_queue *queue, struct batch_item **items, unsigned n_max);
