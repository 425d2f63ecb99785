/*
 * batch.c - a model's waiting requests
 *
 * One first-in-first-out list a priority, bounded by rows over all of them, so that a full queue is
 * an answer and never memory. A batch takes requests strictly in order: one that does not fit any
 * more ends the batch instead of being overtaken, so nothing starves behind smaller ones. A request
 * of more rows than a batch runs alone; the backend works through it in blocks. Pushing, removing
 * and looking at the head take constant time.
 */
#include "batch.h"

#include <assert.h>
#include <errno.h>

void batch_init(struct batch_queue *queue, uint32_t max_rows, uint32_t max_delay_us,
                uint32_t queue_rows)
{
    *queue = (struct batch_queue){
        .queue_rows = queue_rows, .max_rows = max_rows, .max_delay_us = max_delay_us};
    for (unsigned i = 0; i <= PROTO_PRIORITY_MAX; i++)
        TAILQ_INIT(&queue->lists[i]);
}

int batch_push(struct batch_queue *queue, struct batch_item *item, uint64_t now_us)
{
    assert(!item->queued);
    assert(item->rows > 0);
    assert(item->priority <= PROTO_PRIORITY_MAX);
    if (queue->rows + item->rows > queue->queue_rows)
        return -EBUSY;
    item->arrival_us = now_us;
    item->queued = true;
    TAILQ_INSERT_TAIL(&queue->lists[item->priority], item, link);
    queue->rows += item->rows;
    queue->n++;
    return 0;
}

void batch_remove(struct batch_queue *queue, struct batch_item *item)
{
    assert(item->queued);
    assert(queue->n > 0);
    TAILQ_REMOVE(&queue->lists[item->priority], item, link);
    item->queued = false;
    queue->rows -= item->rows;
    queue->n--;
}

struct batch_item *batch_head(const struct batch_queue *queue)
{
    for (unsigned i = PROTO_PRIORITY_MAX + 1; i-- > 0;) {
        struct batch_item *item = TAILQ_FIRST(&queue->lists[i]);

        if (item)
            return item;
    }
    return NULL;
}

bool batch_before(const struct batch_item *a, const struct batch_item *b)
{
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return a->arrival_us < b->arrival_us;
}

uint64_t batch_ready_us(const struct batch_queue *queue)
{
    uint64_t oldest_us = UINT64_MAX;

    if (queue->n == 0)
        return UINT64_MAX;
    if (queue->rows >= queue->max_rows)
        return 0;
    for (unsigned i = 0; i <= PROTO_PRIORITY_MAX; i++) {
        struct batch_item *item = TAILQ_FIRST(&queue->lists[i]);

        if (item && item->arrival_us < oldest_us)
            oldest_us = item->arrival_us;
    }
    return oldest_us + queue->max_delay_us;
}

unsigned batch_form(struct batch_queue *queue, struct batch_item **items, unsigned n_max)
{
    struct batch_item *item;
    uint64_t rows = 0;
    unsigned n = 0;

    while (n < n_max && (item = batch_head(queue))) {
        if (n > 0 && rows + item->rows > queue->max_rows)
            break;
        batch_remove(queue, item);
        rows += item->rows;
        items[n++] = item;
    }
    return n;
}
