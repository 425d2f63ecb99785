/*
 * test_batch.c - order, fairness, bounds and readiness of the queues
 *
 * The last test drives queues with a clock and a device of its own through random steps, and holds
 * every batch against the rules, looked up the slow way in a table of everything that waits.
 */
#include "unit.h"

#include "daemon/batch.h"

static struct batch_item items[2000];
static struct batch_order order;
static struct batch_party party[8];
static struct batch_source source[8][4];

/* All state of uids and connections as new. */
static void init(struct batch_queue *queue, uint32_t max_rows, uint32_t max_delay_us,
                 uint32_t queue_rows)
{
    memset(&order, 0, sizeof(order));
    memset(party, 0, sizeof(party));
    memset(source, 0, sizeof(source));
    batch_init(queue, &order, max_rows, max_delay_us, queue_rows);
}

static struct batch_item *item_of(unsigned i, unsigned uid, unsigned conn, uint32_t rows,
                                  uint8_t priority)
{
    items[i] = (struct batch_item){.party = &party[uid],
                                   .source = &source[uid][conn],
                                   .rows = rows,
                                   .priority = priority,
                                   .latest_us = UINT64_MAX};
    return &items[i];
}

static struct batch_item *item(unsigned i, uint32_t rows, uint8_t priority)
{
    return item_of(i, 0, 0, rows, priority);
}

static void clear(struct batch_queue *queue)
{
    struct batch_item *head;

    while ((head = batch_head(queue)))
        batch_remove(queue, head);
    assert_int_equal(queue->rows, 0);
    batch_deinit(queue);
}

/* Forms one batch and compares the items' numbers. */
static void assert_forms(struct batch_queue *queue, unsigned n, const unsigned *numbers)
{
    struct batch_item *formed[16];
    enum batch_reason reason;

    assert_int_equal(batch_form(queue, formed, 16, 0, &reason), n);
    for (unsigned i = 0; i < n; i++) {
        if (formed[i] != &items[numbers[i]])
            fail_msg("place %u has item %td, expected %u", i, formed[i] - items, numbers[i]);
    }
}
#define FORMS(queue, ...)                                                     \
    assert_forms(queue, sizeof((unsigned[]){__VA_ARGS__}) / sizeof(unsigned), \
                 (const unsigned[]){__VA_ARGS__})

static void bounds_rows(void **state)
{
    struct batch_queue queue;

    (void)state;
    init(&queue, 8, 0, 10);
    assert_int_equal(batch_push(&queue, item(0, 6, 1), 1), 0);
    assert_int_equal(batch_push(&queue, item(1, 5, 1), 2), -EBUSY);
    assert_false(items[1].queued);
    assert_int_equal(batch_push(&queue, item(2, 4, 1), 3), 0);
    assert_int_equal(batch_push(&queue, item(3, 1, 3), 4), -EBUSY);
    assert_int_equal(batch_push(&queue, item(4, UINT32_MAX, 3), 4), -EBUSY);
    assert_int_equal(queue.rows, 10);
    /* Whoever has nothing in it gets one batch's rows in, and no more. */
    assert_int_equal(batch_push(&queue, item_of(5, 1, 0, 9, 1), 4), -EBUSY);
    assert_int_equal(batch_push(&queue, item_of(5, 1, 0, 8, 1), 4), 0);
    assert_int_equal(batch_push(&queue, item_of(6, 1, 1, 1, 3), 4), -EBUSY);
    assert_int_equal(batch_push(&queue, item_of(7, 2, 0, 1, 0), 4), 0);
    assert_int_equal(queue.rows, 19);
    batch_remove(&queue, &items[5]);
    batch_remove(&queue, &items[7]);
    batch_remove(&queue, &items[0]);
    assert_int_equal(queue.rows, 4);
    assert_int_equal(queue.n, 1);
    assert_int_equal(batch_push(&queue, item(3, 6, 3), 5), 0);
    clear(&queue);
}

static void takes_priority_then_arrival(void **state)
{
    struct batch_item *formed[8];
    enum batch_reason reason;
    struct batch_queue queue;

    (void)state;
    init(&queue, 100, 0, 1000);
    assert_int_equal(batch_push(&queue, item(0, 1, 0), 1), 0);
    assert_int_equal(batch_push(&queue, item(1, 1, 1), 2), 0);
    assert_int_equal(batch_push(&queue, item(2, 1, 3), 3), 0);
    assert_int_equal(batch_push(&queue, item(3, 1, 1), 4), 0);
    assert_ptr_equal(batch_head(&queue), &items[2]);
    assert_int_equal(batch_form(&queue, formed, 8, 0, &reason), 4);
    assert_ptr_equal(formed[0], &items[2]);
    assert_ptr_equal(formed[1], &items[1]);
    assert_ptr_equal(formed[2], &items[3]);
    assert_ptr_equal(formed[3], &items[0]);
    assert_int_equal(queue.n, 0);
    assert_int_equal(queue.rows, 0);
    assert_null(batch_head(&queue));
    assert_int_equal(batch_form(&queue, formed, 8, 0, &reason), 0);
    assert_true(batch_before(&items[2], &items[0]));
    assert_true(batch_before(&items[1], &items[3]));
    assert_false(batch_before(&items[3], &items[1]));
    clear(&queue);
}

static void fills_up_to_max_rows(void **state)
{
    struct batch_item *formed[8];
    enum batch_reason reason;
    struct batch_queue queue;

    (void)state;
    init(&queue, 10, 0, 1000);
    assert_int_equal(batch_push(&queue, item(0, 4, 1), 1), 0);
    assert_int_equal(batch_push(&queue, item(1, 4, 1), 2), 0);
    assert_int_equal(batch_push(&queue, item(2, 4, 1), 3), 0);
    assert_int_equal(batch_push(&queue, item(3, 1, 1), 4), 0);  /* would fit, but is not next */
    assert_int_equal(batch_push(&queue, item(4, 50, 1), 5), 0); /* more than a batch: alone */
    assert_int_equal(batch_push(&queue, item(5, 1, 1), 6), 0);
    assert_int_equal(batch_form(&queue, formed, 8, 0, &reason), 2);
    assert_ptr_equal(formed[1], &items[1]);
    assert_int_equal(batch_form(&queue, formed, 8, 0, &reason), 2);
    assert_ptr_equal(formed[0], &items[2]);
    assert_ptr_equal(formed[1], &items[3]);
    assert_int_equal(batch_form(&queue, formed, 8, 0, &reason), 1);
    assert_ptr_equal(formed[0], &items[4]);
    assert_int_equal(batch_form(&queue, formed, 8, 0, &reason), 1);
    assert_int_equal(queue.rows, 0);
    clear(&queue);
}

static void cuts_large_requests(void **state)
{
    struct batch_queue queue;

    (void)state;
    init(&queue, 10, 0, 1000);
    item(0, 25, 1)->cut_rows = 10;
    assert_int_equal(batch_push(&queue, &items[0], 1), 0);
    assert_int_equal(batch_push(&queue, item_of(1, 1, 0, 4, 1), 2), 0);
    assert_int_equal(batch_push(&queue, item_of(2, 0, 1, 4, 1), 3), 0);
    FORMS(&queue, 0);
    assert_int_equal(items[0].taken_rows, 10);
    assert_int_equal(queue.rows, 23);
    FORMS(&queue, 1, 2); /* the other uid, then the uid's other connection */
    FORMS(&queue, 0);
    assert_int_equal(items[0].taken_rows, 10);
    assert_true(items[0].queued);
    FORMS(&queue, 0);
    assert_int_equal(items[0].taken_rows, 5);
    assert_false(items[0].queued);
    assert_int_equal(queue.rows, 0);
    clear(&queue);
}

static void keeps_to_the_callers_room(void **state)
{
    struct batch_item *formed[3];
    enum batch_reason reason;
    struct batch_queue queue;

    (void)state;
    init(&queue, 100, 0, 1000);
    for (unsigned i = 0; i < 5; i++)
        assert_int_equal(batch_push(&queue, item(i, 1, 1), i), 0);
    assert_int_equal(batch_form(&queue, formed, 3, 0, &reason), 3);
    assert_int_equal(batch_form(&queue, formed, 3, 0, &reason), 2);
    clear(&queue);
}

static void says_when_it_is_ready(void **state)
{
    struct batch_queue queue;

    (void)state;
    init(&queue, 4, 100, 1000);
    assert_true(batch_ready_us(&queue) == UINT64_MAX);
    assert_int_equal(batch_push(&queue, item(0, 1, 1), 1000), 0);
    assert_int_equal(batch_ready_us(&queue), 1100);
    assert_int_equal(batch_push(&queue, item(1, 1, 3), 1050), 0); /* the oldest decides */
    assert_int_equal(batch_ready_us(&queue), 1100);
    batch_remove(&queue, &items[0]);
    assert_int_equal(batch_ready_us(&queue), 1150);
    assert_int_equal(batch_push(&queue, item(2, 3, 1), 1060), 0); /* full */
    assert_int_equal(batch_ready_us(&queue), 0);
    clear(&queue);
}

static void does_not_wait_past_a_deadline(void **state)
{
    struct batch_queue queue;

    (void)state;
    init(&queue, 8, 1000, 1000);
    item(0, 1, 1)->latest_us = 5000;
    item(1, 1, 1)->latest_us = 1700;
    item(2, 1, 1)->latest_us = 100; /* long past */
    assert_int_equal(batch_push(&queue, &items[0], 1000), 0);
    assert_int_equal(batch_ready_us(&queue), 2000);
    assert_int_equal(batch_push(&queue, &items[1], 1100), 0);
    assert_int_equal(batch_ready_us(&queue), 1700);
    assert_int_equal(batch_push(&queue, &items[2], 1200), 0);
    assert_int_equal(batch_ready_us(&queue), 100);
    batch_remove(&queue, &items[2]);
    assert_int_equal(batch_ready_us(&queue), 1700);
    batch_remove(&queue, &items[1]);
    assert_int_equal(batch_ready_us(&queue), 2000);
    clear(&queue);
}

static void says_why_it_closed(void **state)
{
    struct batch_item *formed[8];
    struct batch_queue queue;
    enum batch_reason reason;

    (void)state;
    init(&queue, 4, 0, 1000);
    assert_int_equal(batch_push(&queue, item(0, 3, 1), 10), 0);
    assert_int_equal(batch_form(&queue, formed, 8, 10, &reason), 1);
    assert_int_equal(reason, BATCH_IDLE);
    assert_int_equal(batch_push(&queue, item(0, 4, 1), 10), 0);
    assert_int_equal(batch_form(&queue, formed, 8, 10, &reason), 1);
    assert_int_equal(reason, BATCH_FULL);
    assert_int_equal(batch_push(&queue, item(0, 3, 1), 10), 0);
    assert_int_equal(batch_push(&queue, item(1, 2, 1), 10), 0);
    assert_int_equal(batch_form(&queue, formed, 8, 10, &reason), 1);
    assert_int_equal(reason, BATCH_FULL); /* the next does not fit */
    clear(&queue);

    init(&queue, 4, 100, 1000);
    item(0, 3, 1)->latest_us = 40;
    assert_int_equal(batch_push(&queue, &items[0], 10), 0);
    assert_int_equal(batch_form(&queue, formed, 8, 40, &reason), 1);
    assert_int_equal(reason, BATCH_DEADLINE);
    assert_int_equal(batch_push(&queue, item(0, 3, 1), 10), 0);
    assert_int_equal(batch_form(&queue, formed, 8, 110, &reason), 1);
    assert_int_equal(reason, BATCH_DELAY);
    clear(&queue);
}

static void serves_uids_by_rows(void **state)
{
    struct batch_queue queue;

    (void)state;
    init(&queue, 4, 0, 1000);
    /* Uid 0 floods; uid 1 has small ones, uid 2 one large. */
    for (unsigned i = 0; i < 6; i++)
        assert_int_equal(batch_push(&queue, item_of(i, 0, 0, 2, 1), i), 0);
    for (unsigned i = 6; i < 10; i++)
        assert_int_equal(batch_push(&queue, item_of(i, 1, 0, 1, 1), i), 0);
    assert_int_equal(batch_push(&queue, item_of(10, 2, 0, 3, 1), 10), 0);
    /* rows so far: 0 0 0 | 2 1 0 -> 2 is next and does not fit | 2 1 3 | 2 2 3 | 4 2 3 | ... */
    FORMS(&queue, 0, 6);
    FORMS(&queue, 10, 7);
    FORMS(&queue, 1, 8, 9);
    FORMS(&queue, 2, 3);
    FORMS(&queue, 4, 5);
    clear(&queue);
}

static void lets_nobody_save_up(void **state)
{
    struct batch_queue queue;
    unsigned n = 0;

    (void)state;
    init(&queue, 1, 0, 1000);
    /* Uid 0 alone for long: that is no debt, and uid 1's idleness no credit. */
    for (unsigned i = 0; i < 100; i++) {
        assert_int_equal(batch_push(&queue, item_of(0, 0, 0, 1, 1), i), 0);
        FORMS(&queue, 0);
    }
    for (unsigned i = 0; i < 10; i++) {
        assert_int_equal(batch_push(&queue, item_of(2 * i, 0, 0, 1, 1), 200), 0);
        assert_int_equal(batch_push(&queue, item_of(2 * i + 1, 1, 0, 1, 1), 200), 0);
    }
    for (unsigned i = 0; i < 10; i++) {
        struct batch_item *formed;
        enum batch_reason reason;

        assert_int_equal(batch_form(&queue, &formed, 1, 300, &reason), 1);
        n += formed->party == &party[1];
    }
    assert_in_range(n, 5, 6);
    clear(&queue);
}

static void remembers_shares_across_models(void **state)
{
    struct batch_queue a, b;

    (void)state;
    init(&a, 4, 0, 1000);
    batch_init(&b, &order, 4, 0, 1000);
    assert_int_equal(batch_push(&a, item_of(0, 0, 0, 3, 1), 1), 0);
    assert_int_equal(batch_push(&b, item_of(1, 0, 0, 1, 1), 2), 0);
    assert_int_equal(batch_push(&b, item_of(2, 1, 0, 1, 1), 3), 0);
    assert_int_equal(batch_push(&b, item_of(3, 1, 0, 1, 1), 4), 0);
    assert_true(batch_before(batch_head(&a), batch_head(&b)));
    FORMS(&a, 0);
    /* Uid 0 had three rows of the other model, so uid 1 goes first although it came later. */
    assert_ptr_equal(batch_head(&b), &items[2]);
    FORMS(&b, 2, 3, 1);
    clear(&a);
    clear(&b);
}

static void takes_connections_in_turn(void **state)
{
    struct batch_queue queue;

    (void)state;
    init(&queue, 8, 0, 1000);
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(batch_push(&queue, item_of(i, 0, 0, 1, 1), i), 0);
    assert_int_equal(batch_push(&queue, item_of(4, 0, 1, 1, 1), 4), 0);
    assert_int_equal(batch_push(&queue, item_of(5, 0, 2, 1, 1), 5), 0);
    assert_int_equal(batch_push(&queue, item_of(6, 0, 1, 1, 1), 6), 0);
    assert_int_equal(batch_push(&queue, item_of(7, 0, 3, 1, 2), 7), 0);
    batch_remove(&queue, &items[5]);
    FORMS(&queue, 7, 0, 4, 1, 6, 2, 3);
    clear(&queue);
}

/* ---- random schedules ---- */

#define N_UIDS     8
#define N_CONNS    3
#define N_QUEUES   2
#define ROWS_MAX   60 /* of a request; a batch has 16 */
#define BATCH_ROWS 16
#define QUEUE_ROWS 300
#define N_ITEMS    (N_QUEUES * QUEUE_ROWS)
#define N_SLOTS    2
#define STEPS      1000000

struct entry {
    struct batch_item item;
    unsigned queue, uid, conn;
    uint64_t serial, since; /* of its push: its number, and the picks before */
    uint32_t total, got;    /* rows */
};

static struct world {
    struct batch_queue queues[N_QUEUES];
    struct entry entries[N_ITEMS];
    uint64_t rows[N_QUEUES];
    uint64_t now_us, serial, n_pushed, n_formed, n_removed, n_refused, n_batches;
    uint64_t closed[BATCH_REASONS];
    uint64_t busy_until_us[N_SLOTS];                                 /* the device; 0: free */
    uint64_t last_turn[N_UIDS][N_CONNS][BATCH_PRIORITIES][N_QUEUES]; /* serial of its last pick */
    uint64_t picks;
    unsigned n_queues, seed;
} w;

static unsigned dice(unsigned n)
{
    return (unsigned)rand_r(&w.seed) % n;
}

/* Whether a batch may be formed, from everything that waits. */
static uint64_t slow_ready_us(unsigned q)
{
    const struct batch_queue *queue = &w.queues[q];
    uint64_t oldest_us = UINT64_MAX, latest_us = UINT64_MAX;

    for (unsigned i = 0; i < N_ITEMS; i++) {
        const struct batch_item *one = &w.entries[i].item;

        if (!one->queued || w.entries[i].queue != q)
            continue;
        if (one->arrival_us < oldest_us)
            oldest_us = one->arrival_us;
        if (one->latest_us < latest_us)
            latest_us = one->latest_us;
    }
    if (oldest_us == UINT64_MAX)
        return UINT64_MAX;
    if (w.rows[q] >= BATCH_ROWS)
        return 0;
    oldest_us += queue->max_delay_us;
    return queue->max_delay_us > 0 && latest_us < oldest_us ? latest_us : oldest_us;
}

static bool uid_waits(unsigned queue, unsigned uid)
{
    for (unsigned i = 0; i < N_ITEMS; i++) {
        const struct entry *entry = &w.entries[i];

        if (entry->item.queued && entry->queue == queue && entry->uid == uid)
            return true;
    }
    return false;
}

static void push(void)
{
    unsigned i = dice(N_ITEMS);
    struct entry *entry = &w.entries[i];
    bool is_full;
    int r;

    if (entry->item.queued)
        return;
    entry->queue = dice(w.n_queues);
    entry->uid = dice(N_UIDS) * dice(2); /* uid 0 floods */
    entry->conn = dice(N_CONNS);
    entry->since = w.picks;
    entry->got = 0;
    entry->item = (struct batch_item){
        .party = &party[entry->uid],
        .source = &source[entry->uid][entry->conn],
        .rows = 1 + dice(ROWS_MAX),
        .priority = (uint8_t)dice(BATCH_PRIORITIES),
        .cut_rows = dice(2) ? BATCH_ROWS >> dice(2) : 0,
        .latest_us = dice(4) ? UINT64_MAX : w.now_us + dice(200),
    };
    if (dice(2))
        entry->item.rows = 1;
    entry->total = entry->item.rows;
    is_full = w.rows[entry->queue] + entry->item.rows > QUEUE_ROWS &&
              (entry->item.rows > BATCH_ROWS || uid_waits(entry->queue, entry->uid));
    r = batch_push(&w.queues[entry->queue], &entry->item, w.now_us);
    if (is_full) {
        assert_int_equal(r, -EBUSY);
        assert_false(entry->item.queued);
        w.n_refused++;
        return;
    }
    assert_int_equal(r, 0);
    entry->serial = ++w.serial;
    w.rows[entry->queue] += entry->item.rows;
    w.n_pushed++;
}

/* A client cancels, or its deadline passes. */
static void take_back(void)
{
    struct entry *entry = &w.entries[dice(N_ITEMS)];

    if (!entry->item.queued)
        return;
    assert_int_equal(entry->got + entry->item.rows, entry->total);
    batch_remove(&w.queues[entry->queue], &entry->item);
    w.rows[entry->queue] -= entry->item.rows;
    w.n_removed++;
}

/* A whole connection goes. */
static void hang_up(void)
{
    unsigned uid = dice(N_UIDS), conn = dice(N_CONNS);

    for (unsigned i = 0; i < N_ITEMS; i++) {
        struct entry *entry = &w.entries[i];

        if (!entry->item.queued || entry->uid != uid || entry->conn != conn)
            continue;
        batch_remove(&w.queues[entry->queue], &entry->item);
        w.rows[entry->queue] -= entry->item.rows;
        w.n_removed++;
    }
    assert_true(LIST_EMPTY(&source[uid][conn].lanes));
}

/*
 * The rules, against everything that still waits in that queue. `turn` is the uids' before the
 * pick. Of its priority only its own uid's, of that only its own connection's older ones count.
 */
static void check_pick(const struct entry *pick, uint64_t turn[N_UIDS][BATCH_PRIORITIES])
{
    unsigned priority = pick->item.priority;
    const uint64_t last = w.last_turn[pick->uid][pick->conn][priority][pick->queue];

    for (unsigned i = 0; i < N_ITEMS; i++) {
        const struct entry *other = &w.entries[i];

        if (!other->item.queued || other == pick || other->queue != pick->queue)
            continue;
        if (other->item.priority > priority)
            fail_msg("priority %u before %u", priority, other->item.priority);
        if (other->item.priority < priority)
            continue;
        if (turn[other->uid][priority] < turn[pick->uid][priority])
            fail_msg("uid %u with %llu rows before uid %u with %llu", pick->uid,
                     (unsigned long long)turn[pick->uid][priority], other->uid,
                     (unsigned long long)turn[other->uid][priority]);
        /* Nobody who waits is ever further behind than the largest request. (With several queues
         * a batch that a higher priority began is filled from its own.) */
        if (w.n_queues == 1 && turn[other->uid][priority] > turn[pick->uid][priority] + ROWS_MAX)
            fail_msg("uid %u is %llu rows ahead", other->uid,
                     (unsigned long long)(turn[other->uid][priority] - turn[pick->uid][priority]));
        if (other->uid != pick->uid)
            continue;
        if (other->conn == pick->conn && other->serial < pick->serial)
            fail_msg("connection %u: request %llu before %llu", pick->conn,
                     (unsigned long long)pick->serial, (unsigned long long)other->serial);
        /* It waited since before this connection's last pick, and had no pick since. */
        if (other->conn != pick->conn && other->since < last &&
            w.last_turn[other->uid][other->conn][priority][other->queue] < last && last > 0)
            fail_msg("connection %u twice while %u waited", pick->conn, other->conn);
    }
}

static void form(unsigned q)
{
    uint64_t turn[N_UIDS][BATCH_PRIORITIES];
    struct batch_item *formed[BATCH_ROWS];
    struct entry *picks[BATCH_ROWS];
    unsigned n_max = 1 + dice(BATCH_ROWS), n;
    enum batch_reason reason = BATCH_REASONS;
    bool has_rest[BATCH_ROWS];
    uint64_t rows = 0;

    for (unsigned u = 0; u < N_UIDS; u++)
        memcpy(turn[u], party[u].turn, sizeof(turn[u]));
    n = batch_form(&w.queues[q], formed, n_max, w.now_us, &reason);
    assert_in_range(n, 1, n_max);
    for (unsigned k = 0; k < n; k++) {
        picks[k] = (struct entry *)((char *)formed[k] - offsetof(struct entry, item));
        assert_int_equal(picks[k]->queue, q);
        has_rest[k] = picks[k]->item.queued;
        picks[k]->item.queued = true; /* for the rules: those not yet picked wait */
    }
    for (unsigned k = 0; k < n; k++) {
        struct entry *pick = picks[k];

        check_pick(pick, turn);
        pick->item.queued = has_rest[k];
        pick->got += pick->item.taken_rows;
        assert_int_equal(pick->got + pick->item.rows, pick->total);
        assert_int_equal(pick->item.queued, pick->got < pick->total);
        assert_true(!has_rest[k] || (k == n - 1 && pick->item.taken_rows == pick->item.cut_rows));
        turn[pick->uid][pick->item.priority] += pick->item.taken_rows;
        w.last_turn[pick->uid][pick->conn][pick->item.priority][q] = ++w.picks;
        rows += pick->item.taken_rows;
        w.n_formed += !has_rest[k];
    }
    for (unsigned u = 0; u < N_UIDS; u++)
        assert_memory_equal(turn[u], party[u].turn, sizeof(turn[u]));
    w.rows[q] -= rows;
    assert_true(rows <= BATCH_ROWS || n == 1);
    assert_true(rows <= BATCH_ROWS || picks[0]->item.cut_rows == 0);
    /* Full means that nothing more would have fitted; else nothing more was there. */
    if (reason == BATCH_FULL)
        assert_true(n == n_max || rows >= BATCH_ROWS || has_rest[n - 1] ||
                    rows + batch_head(&w.queues[q])->rows > BATCH_ROWS);
    else
        assert_int_equal(w.rows[q], 0);
    w.closed[reason]++;
    w.n_batches++;
}

/* As the scheduler does: whenever a slot is free, the queue whose head goes first. */
static void run_device(void)
{
    for (unsigned s = 0; s < N_SLOTS; s++) {
        int best = -1;

        if (w.busy_until_us[s] > w.now_us)
            continue;
        for (unsigned q = 0; q < N_QUEUES; q++) {
            if (batch_ready_us(&w.queues[q]) > w.now_us)
                continue;
            if (best < 0 || batch_before(batch_head(&w.queues[q]), batch_head(&w.queues[best])))
                best = (int)q;
        }
        if (best < 0)
            return;
        form((unsigned)best);
        w.busy_until_us[s] = w.now_us + 1 + dice(100);
    }
}

static void play(unsigned seed, unsigned n_queues, uint32_t max_delay_us, unsigned steps)
{
    w = (struct world){.seed = seed, .now_us = 1, .n_queues = n_queues};
    init(&w.queues[0], BATCH_ROWS, max_delay_us, QUEUE_ROWS);
    for (unsigned q = 1; q < N_QUEUES; q++)
        batch_init(&w.queues[q], &order, BATCH_ROWS, 0, QUEUE_ROWS);
    for (unsigned step = 0; step < steps; step++) {
        unsigned what = dice(1000);

        /* Floods and lulls. */
        if (what < (step / 5000 % 2 ? 600 : 50))
            push();
        else if (what < 650)
            take_back();
        else if (what == 650)
            hang_up();
        else
            w.now_us += dice(40);
        run_device();
        for (unsigned q = 0; q < N_QUEUES; q++) {
            assert_true(w.queues[q].rows == w.rows[q]);
            if (step % 64 == 0)
                assert_true(batch_ready_us(&w.queues[q]) == slow_ready_us(q));
        }
    }
    /* Everything leaves in the end. */
    while (w.queues[0].n + w.queues[1].n > 0) {
        w.now_us += 1000;
        run_device();
    }
    assert_int_equal(w.n_pushed, w.n_formed + w.n_removed);
    for (unsigned u = 0; u < N_UIDS; u++)
        assert_true(LIST_EMPTY(&party[u].flows));
    for (unsigned q = 0; q < N_QUEUES; q++)
        batch_deinit(&w.queues[q]);
    print_message(
        "%u queues, delay %u: %llu requests, %llu batches (full %llu, idle %llu, delay %llu, "
        "deadline %llu), %llu refused\n",
        n_queues, max_delay_us, (unsigned long long)w.n_pushed, (unsigned long long)w.n_batches,
        (unsigned long long)w.closed[0], (unsigned long long)w.closed[1],
        (unsigned long long)w.closed[2], (unsigned long long)w.closed[3],
        (unsigned long long)w.n_refused);
    assert_true(w.n_refused > 0);
    assert_true(w.closed[BATCH_FULL] > 0);
}

static void keeps_the_rules_whatever_happens(void **state)
{
    const char *given = getenv("SEED");
    unsigned seed = given ? (unsigned)strtoul(given, NULL, 0) : 20260801;

    (void)state;
    print_message("seed %u\n", seed);
    play(seed, 1, 0, STEPS / 4);
    play(seed + 1, N_QUEUES, 0, STEPS / 4);
    play(seed + 2, 1, 60, STEPS / 4);
    play(seed + 3, N_QUEUES, 60, STEPS / 4);
    assert_true(w.closed[BATCH_DELAY] > 0);
    assert_true(w.closed[BATCH_DEADLINE] > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounds_rows),
        cmocka_unit_test(takes_priority_then_arrival),
        cmocka_unit_test(fills_up_to_max_rows),
        cmocka_unit_test(cuts_large_requests),
        cmocka_unit_test(keeps_to_the_callers_room),
        cmocka_unit_test(says_when_it_is_ready),
        cmocka_unit_test(does_not_wait_past_a_deadline),
        cmocka_unit_test(says_why_it_closed),
        cmocka_unit_test(serves_uids_by_rows),
        cmocka_unit_test(lets_nobody_save_up),
        cmocka_unit_test(remembers_shares_across_models),
        cmocka_unit_test(takes_connections_in_turn),
        cmocka_unit_test(keeps_the_rules_whatever_happens),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
