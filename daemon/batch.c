/*
 * batch.c - a model's waiting requests, and whose turn it is
 *
 * Order: priority; then among uids whoever was given the fewest rows so far (start-time fair
 * queueing); then among the connections of that uid one after the other; then first come. A uid
 * that had nothing waiting starts at the turn that is served now: it gets its share from then on,
 * not what it left to others before. What it owes it still owes, as long as the daemon has a record
 * of it: a debt ends with the uid's last connection and request.
 *
 * A queue has, for each priority, a heap of flows (one a uid), each with a ring of lanes (one a
 * connection), each a list of requests. Flows and lanes exist only while something waits in them. A
 * uid's turn also moves when another model's queue serves it, so the keys of a heap may be too low,
 * never too high: the root is looked at again before it is believed. Pushing and taking cost the
 * logarithm of the number of uids.
 *
 * A queue is bounded by rows, so that a full one is an answer and never memory. A batch takes
 * requests strictly in order: one that does not fit any more ends the batch instead of being
 * overtaken, so nothing starves behind smaller ones. A request of more rows than a batch is cut: it
 * gives a batch's rows each time that it is its turn. Where it may not be cut it runs alone; the
 * backend works through it in blocks. Where the costs are known, a batch ends where the rest is
 * cheaper on its own, and waits for no more than makes its rows cheaper (cost.c).
 */
#include "batch.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* What one uid has waiting in one queue at one priority. */
struct batch_flow {
    LIST_ENTRY(batch_flow) link; /* of its party */
    struct batch_queue *queue;
    struct batch_party *party;
    unsigned priority;
    uint64_t key, number; /* the party's turn when last looked at; the older of two equals first */
    size_t place;         /* in the heap */
    TAILQ_HEAD(, batch_lane) lanes; /* the next first */
};

/* What one connection has waiting there. */
struct batch_lane {
    LIST_ENTRY(batch_lane) link; /* of its source */
    TAILQ_ENTRY(batch_lane) ring;
    struct batch_flow *flow;
    TAILQ_HEAD(, batch_item) items;
};

/* ---- the heap ---- */

static bool flow_before(const struct batch_flow *a, const struct batch_flow *b)
{
    return a->key != b->key ? a->key < b->key : a->number < b->number;
}

static void put(struct batch_heap *heap, size_t place, struct batch_flow *flow)
{
    heap->flows[place] = flow;
    flow->place = place;
}

static void sift_up(struct batch_heap *heap, struct batch_flow *flow)
{
    size_t place = flow->place;

    while (place > 0 && flow_before(flow, heap->flows[(place - 1) / 2])) {
        put(heap, place, heap->flows[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(heap, place, flow);
}

static void sift_down(struct batch_heap *heap, struct batch_flow *flow)
{
    size_t place = flow->place;

    for (;;) {
        size_t child = 2 * place + 1;

        if (child + 1 < heap->n && flow_before(heap->flows[child + 1], heap->flows[child]))
            child++;
        if (child >= heap->n || !flow_before(heap->flows[child], flow))
            break;
        put(heap, place, heap->flows[child]);
        place = child;
    }
    put(heap, place, flow);
}

static int heap_add(struct batch_heap *heap, struct batch_flow *flow)
{
    if (heap->n == heap->room) {
        size_t room = heap->room ? 2 * heap->room : 8;
        struct batch_flow **flows = reallocarray(heap->flows, room, sizeof(struct batch_flow *));

        if (!flows)
            return -ENOMEM;
        heap->flows = flows;
        heap->room = room;
    }
    flow->place = heap->n++;
    sift_up(heap, flow);
    return 0;
}

static void heap_remove(struct batch_heap *heap, struct batch_flow *flow)
{
    struct batch_flow *last = heap->flows[--heap->n];

    if (last == flow)
        return;
    last->place = flow->place;
    sift_up(heap, last);
    sift_down(heap, last);
}

static struct batch_flow *heap_first(struct batch_heap *heap)
{
    while (heap->n > 0) {
        struct batch_flow *flow = heap->flows[0];
        uint64_t turn = flow->party->turn[flow->priority];

        if (flow->key == turn)
            return flow;
        flow->key = turn;
        sift_down(heap, flow);
    }
    return NULL;
}

/* ---- flows and lanes ---- */

static struct batch_flow *flow_get(struct batch_queue *queue, struct batch_party *party,
                                   unsigned priority)
{
    uint64_t *turn = &party->turn[priority];
    struct batch_flow *flow;

    LIST_FOREACH(flow, &party->flows, link)
    {
        if (flow->queue == queue && flow->priority == priority)
            return flow;
    }
    flow = calloc(1, sizeof(*flow));
    if (!flow)
        return NULL;
    flow->queue = queue;
    flow->party = party;
    flow->priority = priority;
    flow->number = queue->n_flows++;
    TAILQ_INIT(&flow->lanes);
    if (party->n_flows[priority] == 0 && *turn < queue->order->turn[priority])
        *turn = queue->order->turn[priority];
    flow->key = *turn;
    if (heap_add(&queue->heaps[priority], flow) < 0) {
        free(flow);
        return NULL;
    }
    LIST_INSERT_HEAD(&party->flows, flow, link);
    party->n_flows[priority]++;
    return flow;
}

static void flow_drop_if_empty(struct batch_flow *flow)
{
    if (!TAILQ_EMPTY(&flow->lanes))
        return;
    heap_remove(&flow->queue->heaps[flow->priority], flow);
    LIST_REMOVE(flow, link);
    flow->party->n_flows[flow->priority]--;
    free(flow);
}

static struct batch_lane *lane_get(struct batch_flow *flow, struct batch_source *source)
{
    struct batch_lane *lane;

    LIST_FOREACH(lane, &source->lanes, link)
    {
        if (lane->flow == flow)
            return lane;
    }
    lane = calloc(1, sizeof(*lane));
    if (!lane)
        return NULL;
    lane->flow = flow;
    TAILQ_INIT(&lane->items);
    LIST_INSERT_HEAD(&source->lanes, lane, link);
    TAILQ_INSERT_TAIL(&flow->lanes, lane, ring);
    return lane;
}

static void lane_drop_if_empty(struct batch_lane *lane)
{
    struct batch_flow *flow = lane->flow;

    if (!TAILQ_EMPTY(&lane->items))
        return;
    LIST_REMOVE(lane, link);
    TAILQ_REMOVE(&flow->lanes, lane, ring);
    free(lane);
    flow_drop_if_empty(flow);
}

/* ---- the queue ---- */

void batch_init(struct batch_queue *queue, struct batch_order *order, uint32_t max_rows,
                uint32_t max_delay_us, uint32_t queue_rows)
{
    *queue = (struct batch_queue){.order = order,
                                  .queue_rows = queue_rows,
                                  .max_rows = max_rows,
                                  .max_delay_us = max_delay_us,
                                  .enough_rows = max_rows,
                                  .latest_us = UINT64_MAX};
    TAILQ_INIT(&queue->items);
}

void batch_set_cost(struct batch_queue *queue, const struct cost *cost)
{
    queue->cost = cost->n > 0 ? cost : NULL;
    queue->enough_rows = cost_enough(cost, queue->max_rows);
}

void batch_deinit(struct batch_queue *queue)
{
    assert(queue->n == 0);
    for (unsigned i = 0; i < BATCH_PRIORITIES; i++)
        free(queue->heaps[i].flows);
    *queue = (struct batch_queue){0};
}

static bool party_waits(const struct batch_queue *queue, const struct batch_party *party)
{
    const struct batch_flow *flow;

    LIST_FOREACH(flow, &party->flows, link)
    {
        if (flow->queue == queue)
            return true;
    }
    return false;
}

bool batch_admits(const struct batch_queue *queue, const struct batch_item *item, uint64_t rows)
{
    if (rows + item->rows <= queue->queue_rows)
        return true;
    return item->rows <= queue->max_rows && !party_waits(queue, item->party);
}

int batch_push(struct batch_queue *queue, struct batch_item *item, uint64_t now_us)
{
    struct batch_flow *flow;

    assert(!item->queued);
    assert(item->rows > 0);
    assert(item->priority <= PROTO_PRIORITY_MAX);
    if (!batch_admits(queue, item, queue->rows))
        return -EBUSY;
    flow = flow_get(queue, item->party, item->priority);
    if (!flow)
        return -ENOMEM;
    item->lane = lane_get(flow, item->source);
    if (!item->lane) {
        flow_drop_if_empty(flow);
        return -ENOMEM;
    }
    item->arrival_us = now_us;
    item->queued = true;
    TAILQ_INSERT_TAIL(&item->lane->items, item, link);
    TAILQ_INSERT_TAIL(&queue->items, item, age);
    if (item->latest_us < queue->latest_us)
        queue->latest_us = item->latest_us;
    queue->rows += item->rows;
    queue->n++;
    return 0;
}

void batch_remove(struct batch_queue *queue, struct batch_item *item)
{
    struct batch_lane *lane = item->lane;

    assert(item->queued);
    assert(queue->n > 0);
    TAILQ_REMOVE(&lane->items, item, link);
    TAILQ_REMOVE(&queue->items, item, age);
    item->queued = false;
    item->lane = NULL;
    lane_drop_if_empty(lane);
    if (item->latest_us != UINT64_MAX && item->latest_us == queue->latest_us)
        queue->is_latest_stale = true;
    queue->rows -= item->rows;
    queue->n--;
}

struct batch_item *batch_head(struct batch_queue *queue)
{
    for (unsigned i = BATCH_PRIORITIES; i-- > 0;) {
        struct batch_flow *flow = heap_first(&queue->heaps[i]);

        if (flow)
            return TAILQ_FIRST(&TAILQ_FIRST(&flow->lanes)->items);
    }
    return NULL;
}

bool batch_before(const struct batch_item *a, const struct batch_item *b)
{
    uint64_t turn_a = a->party->turn[a->priority], turn_b = b->party->turn[b->priority];

    if (a->priority != b->priority)
        return a->priority > b->priority;
    return turn_a != turn_b ? turn_a < turn_b : a->arrival_us < b->arrival_us;
}

static uint64_t latest(struct batch_queue *queue)
{
    const struct batch_item *item;

    if (queue->is_latest_stale) {
        queue->latest_us = UINT64_MAX;
        TAILQ_FOREACH(item, &queue->items, age)
        {
            if (item->latest_us < queue->latest_us)
                queue->latest_us = item->latest_us;
        }
        queue->is_latest_stale = false;
    }
    return queue->latest_us;
}

static uint64_t delayed_until(const struct batch_queue *queue)
{
    return TAILQ_FIRST(&queue->items)->arrival_us + queue->max_delay_us;
}

uint64_t batch_ready_us(struct batch_queue *queue)
{
    uint64_t at_us;

    if (queue->n == 0)
        return UINT64_MAX;
    if (queue->rows >= queue->enough_rows)
        return 0;
    at_us = delayed_until(queue);
    /* Fewer than max_rows wait, so looking through them stays short. */
    return queue->max_delay_us == 0 || at_us < latest(queue) ? at_us : latest(queue);
}

/* Of what is next, the rows that would run. */
static uint32_t rows_of(const struct batch_item *item)
{
    return item->cut_rows > 0 && item->rows > item->cut_rows ? item->cut_rows : item->rows;
}

/* Takes out what is next, or a part of it, and counts it for its uid. */
static void take(struct batch_queue *queue, struct batch_item *item)
{
    struct batch_lane *lane = item->lane;
    struct batch_flow *flow = lane->flow;
    uint64_t *turn = &item->party->turn[item->priority];
    uint64_t *served = &queue->order->turn[item->priority];

    if (*served < *turn)
        *served = *turn;
    item->taken_rows = rows_of(item);
    item->rows -= item->taken_rows;
    queue->rows -= item->taken_rows;
    *turn += item->taken_rows;
    TAILQ_REMOVE(&flow->lanes, lane, ring);
    TAILQ_INSERT_TAIL(&flow->lanes, lane, ring);
    if (item->rows == 0)
        batch_remove(queue, item);
}

unsigned batch_form(struct batch_queue *queue, struct batch_item **items, unsigned n_max,
                    uint64_t now_us, enum batch_reason *ret_reason)
{
    bool is_due = queue->n > 0 && delayed_until(queue) <= now_us, is_dear = false;
    uint64_t all = queue->rows < queue->max_rows ? queue->rows : queue->max_rows;
    uint64_t limit = queue->cost ? cost_limit(queue->cost, all) : all, rows = 0;
    struct batch_item *item;
    unsigned n = 0;

    while (n < n_max && (item = batch_head(queue))) {
        if (n > 0 && rows + rows_of(item) > queue->max_rows)
            break;
        /* Requests may not add up to what is best: less of them can be worse than all. */
        is_dear = limit < all && rows + rows_of(item) > limit && rows < all &&
                  cost_splits(queue->cost, rows, all - rows);
        if (is_dear)
            break;
        take(queue, item);
        rows += item->taken_rows;
        items[n++] = item;
        if (item->rows > 0) /* a part ends its batch: no batch has two of one request */
            break;
    }
    if (n == 0)
        return 0;
    if (is_dear)
        *ret_reason = BATCH_COST;
    else if (queue->n > 0 || rows >= queue->max_rows)
        *ret_reason = BATCH_FULL;
    else if (queue->max_delay_us > 0 && !is_due && rows >= queue->enough_rows)
        *ret_reason = BATCH_COST;
    else if (queue->max_delay_us == 0)
        *ret_reason = BATCH_IDLE;
    else
        *ret_reason = is_due ? BATCH_DELAY : BATCH_DEADLINE;
    return n;
}
