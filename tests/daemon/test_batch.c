/*
 * test_batch.c - order, bounds and readiness of a model's queue
 */
#include "unit.h"

#include "daemon/batch.h"

static struct batch_item items[2000];

static struct batch_item *item(unsigned i, uint32_t rows, uint8_t priority)
{
    items[i] = (struct batch_item){.rows = rows, .priority = priority};
    return &items[i];
}

static void bounds_rows(void **state)
{
    struct batch_queue queue;

    (void)state;
    batch_init(&queue, 8, 0, 10);
    assert_int_equal(batch_push(&queue, item(0, 6, 1), 1), 0);
    assert_int_equal(batch_push(&queue, item(1, 5, 1), 2), -EBUSY);
    assert_false(items[1].queued);
    assert_int_equal(batch_push(&queue, item(2, 4, 1), 3), 0);
    assert_int_equal(batch_push(&queue, item(3, 1, 3), 4), -EBUSY);
    assert_int_equal(batch_push(&queue, item(4, UINT32_MAX, 3), 4), -EBUSY);
    assert_int_equal(queue.rows, 10);
    batch_remove(&queue, &items[0]);
    assert_int_equal(queue.rows, 4);
    assert_int_equal(queue.n, 1);
    assert_int_equal(batch_push(&queue, item(3, 6, 3), 5), 0);
}

static void takes_priority_then_arrival(void **state)
{
    struct batch_item *formed[8];
    struct batch_queue queue;

    (void)state;
    batch_init(&queue, 100, 0, 1000);
    assert_int_equal(batch_push(&queue, item(0, 1, 0), 1), 0);
    assert_int_equal(batch_push(&queue, item(1, 1, 1), 2), 0);
    assert_int_equal(batch_push(&queue, item(2, 1, 3), 3), 0);
    assert_int_equal(batch_push(&queue, item(3, 1, 1), 4), 0);
    assert_ptr_equal(batch_head(&queue), &items[2]);
    assert_int_equal(batch_form(&queue, formed, 8), 4);
    assert_ptr_equal(formed[0], &items[2]);
    assert_ptr_equal(formed[1], &items[1]);
    assert_ptr_equal(formed[2], &items[3]);
    assert_ptr_equal(formed[3], &items[0]);
    assert_int_equal(queue.n, 0);
    assert_int_equal(queue.rows, 0);
    assert_null(batch_head(&queue));
    assert_int_equal(batch_form(&queue, formed, 8), 0);
    assert_true(batch_before(&items[2], &items[0]));
    assert_true(batch_before(&items[1], &items[3]));
    assert_false(batch_before(&items[3], &items[1]));
}

static void fills_up_to_max_rows(void **state)
{
    struct batch_item *formed[8];
    struct batch_queue queue;

    (void)state;
    batch_init(&queue, 10, 0, 1000);
    assert_int_equal(batch_push(&queue, item(0, 4, 1), 1), 0);
    assert_int_equal(batch_push(&queue, item(1, 4, 1), 2), 0);
    assert_int_equal(batch_push(&queue, item(2, 4, 1), 3), 0);
    assert_int_equal(batch_push(&queue, item(3, 1, 1), 4), 0);  /* would fit, but is not next */
    assert_int_equal(batch_push(&queue, item(4, 50, 1), 5), 0); /* more than a batch: alone */
    assert_int_equal(batch_push(&queue, item(5, 1, 1), 6), 0);
    assert_int_equal(batch_form(&queue, formed, 8), 2);
    assert_ptr_equal(formed[1], &items[1]);
    assert_int_equal(batch_form(&queue, formed, 8), 2);
    assert_ptr_equal(formed[0], &items[2]);
    assert_ptr_equal(formed[1], &items[3]);
    assert_int_equal(batch_form(&queue, formed, 8), 1);
    assert_ptr_equal(formed[0], &items[4]);
    assert_int_equal(batch_form(&queue, formed, 8), 1);
    assert_int_equal(queue.rows, 0);
}

static void keeps_to_the_callers_room(void **state)
{
    struct batch_item *formed[3];
    struct batch_queue queue;

    (void)state;
    batch_init(&queue, 100, 0, 1000);
    for (unsigned i = 0; i < 5; i++)
        assert_int_equal(batch_push(&queue, item(i, 1, 1), i), 0);
    assert_int_equal(batch_form(&queue, formed, 3), 3);
    assert_int_equal(batch_form(&queue, formed, 3), 2);
}

static void says_when_it_is_ready(void **state)
{
    struct batch_queue queue;

    (void)state;
    batch_init(&queue, 4, 100, 1000);
    assert_true(batch_ready_us(&queue) == UINT64_MAX);
    assert_int_equal(batch_push(&queue, item(0, 1, 1), 1000), 0);
    assert_int_equal(batch_ready_us(&queue), 1100);
    assert_int_equal(batch_push(&queue, item(1, 1, 3), 1050), 0); /* the oldest decides */
    assert_int_equal(batch_ready_us(&queue), 1100);
    batch_remove(&queue, &items[0]);
    assert_int_equal(batch_ready_us(&queue), 1150);
    assert_int_equal(batch_push(&queue, item(2, 3, 1), 1060), 0); /* full */
    assert_int_equal(batch_ready_us(&queue), 0);
}

/* Nothing is lost, doubled or overtaken within its priority, whatever happens. */
static void keeps_every_item_once(void **state)
{
    static bool waiting[ARRAY_SIZE(items)];
    struct batch_item *formed[16];
    struct batch_queue queue;
    unsigned pushed = 0, ended = 0;
    uint64_t last[PROTO_PRIORITY_MAX + 1] = {0}, now = 1;
    unsigned seed = 7;

    (void)state;
    print_message("seed %u\n", seed);
    batch_init(&queue, 16, 10, 200);
    while (pushed < ARRAY_SIZE(items) || queue.n > 0) {
        unsigned what = (unsigned)rand_r(&seed) % 4, i;

        now++;
        if (what < 2 && pushed < ARRAY_SIZE(items)) {
            item(pushed, 1 + (unsigned)rand_r(&seed) % 20, (uint8_t)(rand_r(&seed) % 4));
            waiting[pushed] = batch_push(&queue, &items[pushed], now) == 0;
            ended += !waiting[pushed];
            pushed++;
        } else if (what == 2 && pushed > 0) {
            i = (unsigned)rand_r(&seed) % pushed;
            if (waiting[i]) {
                batch_remove(&queue, &items[i]);
                waiting[i] = false;
                ended++;
            }
        } else {
            unsigned n = batch_form(&queue, formed, ARRAY_SIZE(formed));
            uint64_t rows = 0;

            for (unsigned k = 0; k < n; k++) {
                i = (unsigned)(formed[k] - items);
                assert_true(waiting[i]);
                waiting[i] = false;
                ended++;
                rows += formed[k]->rows;
                assert_true(formed[k]->arrival_us > last[formed[k]->priority]);
                last[formed[k]->priority] = formed[k]->arrival_us;
            }
            assert_true(rows <= 16 || n == 1);
        }
        assert_true(queue.rows <= 200);
    }
    assert_int_equal(ended, ARRAY_SIZE(items));
    assert_int_equal(queue.rows, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounds_rows),           cmocka_unit_test(takes_priority_then_arrival),
        cmocka_unit_test(fills_up_to_max_rows),  cmocka_unit_test(keeps_to_the_callers_room),
        cmocka_unit_test(says_when_it_is_ready), cmocka_unit_test(keeps_every_item_once),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
