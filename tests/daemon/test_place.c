/*
 * test_place.c - several engines: which takes what, when, and that nothing is lost between them
 *
 * The last test plays random schedules with a clock and engines of its own, as the scheduler does
 * with real ones: requests of several uids for several models, some bound to an engine, cancelled
 * now and then; batches that take as long as they like. SEED and STEPS change them.
 */
#include "unit.h"

#include "daemon/place.h"

#define N_ENGINES  4
#define N_MODELS   3
#define N_UIDS     6
#define N_CONNS    2
#define N_ITEMS    400
#define MAX_ROWS   16
#define QUEUE_ROWS 200
#define LEAD_US    100
#define STEPS      1000000 /* of each of the worlds below */

/* ---- by hand ---- */

static struct batch_order order;
static struct batch_party parties[N_UIDS];
static struct batch_source sources[N_UIDS][N_CONNS];
static struct places places;
static struct place_queue one, two;
static struct batch_item items[8];

static void init_queue(struct place_queue *queue, uint32_t engines, uint32_t max_delay_us)
{
    *queue = (struct place_queue){.engines = engines, .row_bytes = 4};
    batch_init(&queue->batch, &order, MAX_ROWS, max_delay_us, QUEUE_ROWS);
}

static void begin(unsigned n_engines, unsigned n_slots)
{
    memset(&order, 0, sizeof(order));
    memset(parties, 0, sizeof(parties));
    memset(sources, 0, sizeof(sources));
    places_init(&places);
    places.n = n_engines;
    for (unsigned e = 0; e < n_engines; e++)
        places.engines[e].n_slots = n_slots;
}

static void add(struct place_queue *queue, unsigned i, uint32_t rows, uint64_t now_us)
{
    items[i] = (struct batch_item){.party = &parties[i % N_UIDS],
                                   .source = &sources[0][0],
                                   .rows = rows,
                                   .latest_us = UINT64_MAX};
    assert_int_equal(batch_push(&queue->batch, &items[i], now_us), 0);
    places_note(&places, queue);
}

/* Forms what is chosen; the engine, or -1. */
static int take(struct place_queue *wanted, uint64_t now_us, uint64_t run_us, uint64_t *next_us)
{
    struct batch_item *formed[8];
    struct place_queue *queue;
    enum batch_reason reason;
    unsigned engine;

    *next_us = UINT64_MAX;
    queue = places_choose(&places, now_us, &engine, next_us);
    if (!queue)
        return -1;
    assert_ptr_equal(queue, wanted);
    assert_true(batch_form(&queue->batch, formed, 8, now_us, &reason) > 0);
    places_note(&places, queue);
    place_submit(&places.engines[engine], now_us, run_us);
    return (int)engine;
}

static void takes_the_least_loaded(void **state)
{
    uint64_t next_us;

    (void)state;
    begin(3, 2);
    init_queue(&one, 7, 0);
    for (unsigned i = 0; i < 4; i++)
        add(&one, i, MAX_ROWS, 0);
    /* Idle ones first, the fewest batches first among them. */
    assert_int_equal(take(&one, 0, 100, &next_us), 0);
    assert_int_equal(take(&one, 0, 50, &next_us), 1);
    assert_int_equal(take(&one, 0, 300, &next_us), 2);
    /* Then the one that is free first. */
    assert_int_equal(take(&one, 0, 100, &next_us), 1);
    add(&one, 4, MAX_ROWS, 10);
    assert_int_equal(take(&one, 10, 100, &next_us), 0);
    add(&one, 5, MAX_ROWS, 20);
    add(&one, 6, MAX_ROWS, 20);
    assert_int_equal(take(&one, 20, 100, &next_us), 2);
    /* No slot is free; what ends makes room there. */
    assert_int_equal(take(&one, 20, 100, &next_us), -1);
    assert_true(next_us == UINT64_MAX);
    assert_int_equal(place_end(&places.engines[1], MAX_ROWS, 0, 60), 60);
    assert_int_equal(take(&one, 60, 100, &next_us), 1);
    /* The second waited for the first: what it took by itself counts. */
    assert_int_equal(place_end(&places.engines[1], MAX_ROWS, 0, 100), 40);
    assert_int_equal(places.engines[1].rows, 2 * MAX_ROWS);
    assert_false(one.is_active);
    batch_deinit(&one.batch);
}

static void keeps_to_where_it_may_run(void **state)
{
    uint64_t next_us;

    (void)state;
    begin(3, 1);
    init_queue(&one, 2, 0);
    init_queue(&two, 5, 0);
    add(&one, 0, MAX_ROWS, 0);
    add(&one, 1, MAX_ROWS, 0);
    add(&two, 2, MAX_ROWS, 1);
    add(&two, 3, MAX_ROWS, 1);
    assert_int_equal(take(&one, 1, 100, &next_us), 1);
    /* The other waits for that engine, and nobody else for it. */
    assert_int_equal(take(&two, 1, 100, &next_us), 0);
    assert_int_equal(take(&two, 1, 100, &next_us), 2);
    assert_int_equal(take(&one, 1, 100, &next_us), -1);
    place_end(&places.engines[0], MAX_ROWS, 1, 50);
    assert_int_equal(take(&one, 50, 100, &next_us), -1);
    place_end(&places.engines[1], MAX_ROWS, 1, 60);
    assert_int_equal(take(&one, 60, 100, &next_us), 1);
    batch_deinit(&one.batch);
    batch_deinit(&two.batch);
}

/* Few rows wait for an engine that runs, not at one that is idle. */
static void does_not_queue_small_batches(void **state)
{
    uint64_t next_us;

    (void)state;
    begin(2, 2);
    init_queue(&one, 3, 0);
    init_queue(&two, 1, 0);
    add(&two, 0, 1, 1000);
    assert_int_equal(take(&two, 1000, 500, &next_us), 0);
    add(&two, 1, 1, 1000);
    assert_int_equal(take(&two, 1000, 500, &next_us), -1);
    assert_int_equal(next_us, 1500 - LEAD_US);
    add(&one, 2, 1, 1000);
    assert_int_equal(take(&one, 1000, 500, &next_us), 1);
    assert_int_equal(take(&two, 1400, 500, &next_us), 0);
    /* A wrong guess: it should be free by now, and is not. */
    add(&two, 3, 1, 3000);
    assert_int_equal(take(&two, 3000, 500, &next_us), -1);
    assert_true(next_us == UINT64_MAX);
    place_end(&places.engines[0], 1, 1000, 3100);
    assert_int_equal(take(&two, 3100, 500, &next_us), 0);
    batch_deinit(&one.batch);
    batch_deinit(&two.batch);
}

/* ---- random schedules ---- */

struct entry {
    struct batch_item item;
    unsigned model, queue;
    uint32_t total, got;
    unsigned n_parts; /* in flight */
    bool alive;
};

struct flight {
    struct batch_item *items[MAX_ROWS];
    unsigned n, engine;
    uint64_t rows, started_us, ends_us; /* ends_us 0: the slot is free */
};

static struct world {
    struct place_queue queues[N_MODELS][1 + N_ENGINES];
    struct entry entries[N_ITEMS];
    struct flight flights[N_ENGINES][BACKEND_SLOTS_MAX];
    uint64_t now_us, n_pushed, n_ended, n_cancelled, n_batches, n_parts, n_cost;
    uint64_t n_run[N_ENGINES];
    uint64_t next_us;
    unsigned seed;
} w;

static unsigned dice(unsigned n)
{
    return (unsigned)rand_r(&w.seed) % n;
}

static void push(void)
{
    struct entry *entry = &w.entries[dice(N_ITEMS)];
    struct place_queue *queue;
    int r;

    if (entry->alive)
        return;
    entry->model = dice(N_MODELS);
    /* The last model is on every second engine only. */
    entry->queue = dice(3) ? 0 : 1 + dice(places.n);
    queue = &w.queues[entry->model][entry->queue];
    if (queue->engines == 0)
        return;
    entry->got = 0;
    entry->n_parts = 0;
    entry->total = dice(3) ? 1 + dice(4) : 1 + dice(3 * MAX_ROWS);
    entry->item = (struct batch_item){
        .party = &parties[dice(N_UIDS) * dice(2)],
        .source = &sources[0][0],
        .rows = entry->total,
        .priority = (uint8_t)dice(BATCH_PRIORITIES),
        .cut_rows = dice(2) ? MAX_ROWS >> dice(2) : 0,
        .latest_us = dice(4) ? UINT64_MAX : w.now_us + dice(400),
    };
    entry->item.source = &sources[entry->item.party - parties][dice(N_CONNS)];
    r = batch_push(&queue->batch, &entry->item, w.now_us);
    if (r < 0)
        return;
    places_note(&places, queue);
    entry->alive = true;
    w.n_pushed++;
}

static void cancel(void)
{
    struct entry *entry = &w.entries[dice(N_ITEMS)];
    struct place_queue *queue = &w.queues[entry->model][entry->queue];

    if (!entry->alive || !entry->item.queued)
        return;
    batch_remove(&queue->batch, &entry->item);
    places_note(&places, queue);
    entry->total = entry->got; /* what runs of it ends it */
    if (entry->n_parts == 0) {
        entry->alive = false;
        w.n_cancelled++;
    }
}

static struct entry *entry_of(struct batch_item *item)
{
    return (struct entry *)((char *)item - offsetof(struct entry, item));
}

static void end_flights(void)
{
    for (unsigned e = 0; e < places.n; e++) {
        for (unsigned s = 0; s < places.engines[e].n_slots; s++) {
            struct flight *flight = &w.flights[e][s];

            if (flight->ends_us == 0 || flight->ends_us > w.now_us)
                continue;
            for (unsigned i = 0; i < flight->n; i++) {
                struct entry *entry = entry_of(flight->items[i]);

                assert_true(entry->alive);
                assert_true(entry->n_parts > 0);
                if (--entry->n_parts == 0 && !entry->item.queued) {
                    assert_int_equal(entry->got, entry->total);
                    entry->alive = false;
                    w.n_ended++;
                }
            }
            place_end(&places.engines[e], flight->rows, flight->started_us, flight->ends_us);
            flight->ends_us = 0;
        }
    }
}

/* Could one be formed now, by the rules, for an engine that has nothing to do? */
static bool is_ready(struct place_queue *queue)
{
    if (queue->batch.n == 0 || batch_ready_us(&queue->batch) > w.now_us)
        return false;
    for (unsigned e = 0; e < places.n; e++) {
        if (queue->engines >> e & 1 && places.engines[e].n_in_flight == 0)
            return true;
    }
    return false;
}

static void check_choice(struct place_queue *chosen, unsigned engine)
{
    assert_true(chosen->engines >> engine & 1);
    assert_true(places.engines[engine].n_in_flight < places.engines[engine].n_slots);
    for (unsigned e = 0; e < places.n; e++) {
        if (chosen->engines >> e & 1 && places.engines[e].n_in_flight == 0)
            assert_int_equal(places.engines[engine].n_in_flight, 0);
    }
    for (unsigned m = 0; m < N_MODELS; m++) {
        for (unsigned q = 0; q <= places.n; q++) {
            struct place_queue *other = &w.queues[m][q];

            if (other != chosen && is_ready(other))
                assert_false(batch_before(batch_head(&other->batch), batch_head(&chosen->batch)));
        }
    }
}

static void fly(struct place_queue *queue, unsigned engine)
{
    struct flight *flight = w.flights[engine];
    enum batch_reason reason = BATCH_REASONS;

    while (flight->ends_us != 0)
        flight++;
    assert_true(flight < &w.flights[engine][places.engines[engine].n_slots]);
    *flight = (struct flight){.engine = engine, .started_us = w.now_us};
    flight->n = batch_form(&queue->batch, flight->items, MAX_ROWS, w.now_us, &reason);
    assert_true(flight->n > 0);
    places_note(&places, queue);
    for (unsigned i = 0; i < flight->n; i++) {
        struct entry *entry = entry_of(flight->items[i]);

        assert_true(entry->alive);
        assert_ptr_equal(&w.queues[entry->model][entry->queue], queue);
        if (entry->queue > 0)
            assert_int_equal(entry->queue, 1 + engine);
        entry->got += entry->item.taken_rows;
        entry->n_parts++;
        assert_int_equal(entry->got + entry->item.rows, entry->total);
        flight->rows += entry->item.taken_rows;
        w.n_parts += entry->item.taken_rows < entry->total;
    }
    assert_true(flight->rows <= MAX_ROWS || flight->n == 1);
    if (reason == BATCH_COST && queue->batch.n > 0)
        assert_true(cost_splits(queue->batch.cost, flight->rows,
                                queue->batch.rows + flight->rows < MAX_ROWS
                                    ? queue->batch.rows
                                    : MAX_ROWS - flight->rows));
    w.n_cost += reason == BATCH_COST;
    flight->ends_us = w.now_us + 1 + dice(300);
    w.n_batches++;
    w.n_run[engine]++;
    place_submit(&places.engines[engine], w.now_us, dice(2) ? 150 : dice(1000));
}

static void run(void)
{
    struct place_queue *queue;
    unsigned engine;

    w.next_us = UINT64_MAX;
    while ((queue = places_choose(&places, w.now_us, &engine, &w.next_us))) {
        check_choice(queue, engine);
        fly(queue, engine);
    }
    assert_true(w.next_us > w.now_us);
    /* Work-conserving: nothing that may run is left beside an engine that has nothing to do, and
     * what may run later there is looked at again in time. */
    for (unsigned m = 0; m < N_MODELS; m++) {
        for (unsigned q = 0; q <= places.n; q++) {
            struct place_queue *other = &w.queues[m][q];

            assert_int_equal(other->is_active, other->batch.n > 0);
            if (other->batch.n == 0)
                continue;
            assert_false(is_ready(other));
            for (unsigned e = 0; e < places.n; e++) {
                if (other->engines >> e & 1 && places.engines[e].n_in_flight == 0)
                    assert_true(w.next_us <= batch_ready_us(&other->batch));
            }
        }
    }
}

/* The next instant at which something happens by itself. */
static uint64_t next_event_us(void)
{
    uint64_t next_us = w.next_us;

    for (unsigned e = 0; e < places.n; e++) {
        for (unsigned s = 0; s < places.engines[e].n_slots; s++) {
            uint64_t ends_us = w.flights[e][s].ends_us;

            if (ends_us > 0 && ends_us < next_us)
                next_us = ends_us;
        }
    }
    return next_us;
}

static void play(unsigned seed, unsigned n_engines, unsigned n_slots, unsigned steps)
{
    static const struct backend_cost points[] = {{1, 70},  {4, 75},   {5, 100}, {8, 100},
                                                 {9, 190}, {16, 200}, {17, 300}};
    static struct cost cost;

    begin(n_engines, n_slots);
    cost_init(&cost, points, sizeof(points) / sizeof(points[0]));
    w = (struct world){.seed = seed, .now_us = 1};
    for (unsigned m = 0; m < N_MODELS; m++) {
        uint32_t all = (UINT32_C(1) << n_engines) - 1, engines = m == 2 ? all & 5 : all;

        for (unsigned q = 0; q <= n_engines; q++) {
            init_queue(&w.queues[m][q], q == 0 ? engines : engines & UINT32_C(1) << (q - 1),
                       m == 1 ? 120 : 0);
            if (m == 0)
                batch_set_cost(&w.queues[m][q].batch, &cost);
        }
    }
    for (unsigned step = 0; step < steps; step++) {
        unsigned what = dice(100);

        if (what < (step / 4000 % 2 ? 70 : 15))
            push();
        else if (what < 74)
            cancel();
        else
            w.now_us += dice(60);
        end_flights();
        run();
    }
    /* Left alone, everything ends. */
    for (unsigned i = 0; next_event_us() != UINT64_MAX; i++) {
        assert_true(i < 100000);
        w.now_us = next_event_us() > w.now_us ? next_event_us() : w.now_us + 1;
        end_flights();
        run();
    }
    assert_int_equal(w.n_pushed, w.n_ended + w.n_cancelled);
    for (unsigned e = 0; e < n_engines; e++) {
        assert_int_equal(places.engines[e].n_in_flight, 0);
        assert_true(w.n_run[e] > w.n_batches / n_engines / 3);
    }
    assert_true(w.n_parts > 0);
    assert_true(w.n_cost > 0);
    for (unsigned m = 0; m < N_MODELS; m++) {
        for (unsigned q = 0; q <= n_engines; q++)
            batch_deinit(&w.queues[m][q].batch);
    }
    print_message(
        "%u engines of %u slots: %llu requests, %llu batches, %llu of them ended by cost\n",
        n_engines, n_slots, (unsigned long long)w.n_pushed, (unsigned long long)w.n_batches,
        (unsigned long long)w.n_cost);
}

static void keeps_the_rules_whatever_happens(void **state)
{
    const char *given = getenv("SEED"), *long_run = getenv("STEPS");
    unsigned seed = given ? (unsigned)strtoul(given, NULL, 0) : 20261129;
    unsigned steps = long_run ? (unsigned)strtoul(long_run, NULL, 0) : STEPS;

    (void)state;
    print_message("seed %u\n", seed);
    play(seed, 1, 1, steps);
    play(seed + 1, 1, 3, steps);
    play(seed + 2, 2, 2, steps);
    play(seed + 3, 4, 1, steps);
    play(seed + 4, 4, 3, steps);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_the_least_loaded),
        cmocka_unit_test(keeps_to_where_it_may_run),
        cmocka_unit_test(does_not_queue_small_batches),
        cmocka_unit_test(keeps_the_rules_whatever_happens),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
