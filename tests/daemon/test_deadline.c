/*
 * test_deadline.c - the heap gives deadlines in order, whatever leaves early
 */
#include "unit.h"

#include "daemon/deadline.h"

static void gives_them_in_order(void **state)
{
    static struct deadline all[3000];
    struct deadlines deadlines = {0};
    struct deadline *first;
    unsigned seed = 3, left = 0;
    uint64_t last = 0;

    (void)state;
    print_message("seed %u\n", seed);
    for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
        all[i] = (struct deadline){.at_us = (uint64_t)rand_r(&seed) % 1000};
        assert_int_equal(deadlines_add(&deadlines, &all[i]), 0);
    }
    for (size_t i = 0; i < ARRAY_SIZE(all); i += 3) {
        deadlines_remove(&deadlines, &all[i]);
        assert_int_equal(all[i].place, 0);
        deadlines_remove(&deadlines, &all[i]); /* twice is fine */
        left++;
    }
    while ((first = deadlines_first(&deadlines))) {
        assert_true(first->at_us >= last);
        last = first->at_us;
        deadlines_remove(&deadlines, first);
        left++;
    }
    assert_int_equal(left, ARRAY_SIZE(all));
    deadlines_deinit(&deadlines);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(gives_them_in_order)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
