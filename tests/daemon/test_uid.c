/*
 * test_uid.c - charges are taken whole or not at all, never wrap, and are all given back
 */
#include "unit.h"

#include "daemon/uid.h"

static void refuses_over_the_limits(void **state)
{
    struct uids uids;
    struct uid *a, *b;

    (void)state;
    uids_init(&uids);
    uids.uid_limit[CHARGE_BUFFER_BYTES] = 100;
    uids.total_limit[CHARGE_BUFFER_BYTES] = 150;
    a = uid_get(&uids, 1000);
    b = uid_get(&uids, 1001);
    assert_int_equal(uid_take(a, CHARGE_BUFFER_BYTES, 101), -EDQUOT);
    assert_int_equal(uid_take(a, CHARGE_BUFFER_BYTES, 100), 0);
    assert_int_equal(uid_take(a, CHARGE_BUFFER_BYTES, 1), -EDQUOT);
    assert_string_equal(uid_reason(a, -EDQUOT), "a limit of your uid is reached: uid_buffer_bytes "
                                                "is 100, 100 in use, 1 more asked for");
    assert_null(uid_reason(a, -EBUSY));
    assert_int_equal(uid_take(a, CHARGE_BUFFER_BYTES, 0), 0);
    assert_int_equal(uid_take(a, CHARGE_BUFFER_BYTES, UINT64_MAX), -EDQUOT);
    assert_int_equal(uid_take(b, CHARGE_BUFFER_BYTES, 51), -EBUSY);
    assert_int_equal(uid_take(b, CHARGE_BUFFER_BYTES, 50), 0);
    assert_int_equal(uids.total[CHARGE_BUFFER_BYTES], 150);
    assert_int_equal(uid_take(b, CHARGE_REQUESTS, UINT64_MAX), 0);
    assert_int_equal(uid_take(b, CHARGE_REQUESTS, 1), -EDQUOT);
    uid_give(b, CHARGE_REQUESTS, UINT64_MAX);
    uid_give(a, CHARGE_BUFFER_BYTES, 100);
    uid_give(b, CHARGE_BUFFER_BYTES, 50);
    assert_int_equal(uids.total[CHARGE_BUFFER_BYTES], 0);
    uid_unref(a);
    uid_unref(b);
    assert_int_equal(uids.n, 0);
}

/* A reload may lower a limit below what is in use. */
static void lives_with_a_lowered_limit(void **state)
{
    struct uids uids;
    struct uid *a;

    (void)state;
    uids_init(&uids);
    a = uid_get(&uids, 5);
    assert_int_equal(uid_take(a, CHARGE_BUFFERS, 10), 0);
    uids.uid_limit[CHARGE_BUFFERS] = 5;
    uids.total_limit[CHARGE_BUFFERS] = 5;
    assert_int_equal(uid_take(a, CHARGE_BUFFERS, 1), -EDQUOT);
    uid_give(a, CHARGE_BUFFERS, 6);
    assert_int_equal(uid_take(a, CHARGE_BUFFERS, 1), 0);
    uid_give(a, CHARGE_BUFFERS, 5);
    uid_unref(a);
}

static void keeps_one_record_a_uid(void **state)
{
    struct uids uids;
    struct uid *a, *b;

    (void)state;
    uids_init(&uids);
    a = uid_get(&uids, 7);
    b = uid_get(&uids, 7);
    assert_ptr_equal(a, b);
    uid_ref(a);
    assert_int_equal(uids.n, 1);
    uid_unref(a);
    uid_unref(a);
    assert_int_equal(uids.n, 1);
    assert_null(uid_unref(a));
    assert_int_equal(uids.n, 0);
    assert_null(uid_unref(NULL));
}

/* Who goes and comes again has been refused all the same; so many others take no place of it. */
static void remembers_refusals(void **state)
{
    struct uids uids;
    struct uid *uid;

    (void)state;
    uids_init(&uids);
    for (unsigned round = 0; round < 3; round++) {
        for (uid_t number = 100; number < 100 + UIDS_GONE_MAX; number++) {
            uid = uid_get(&uids, number);
            assert_non_null(uid);
            assert_int_equal(uid->refusals.n, round == 0 ? 0 : round * 1000 + number);
            assert_int_equal(uid->refusals.since_us, round == 0 ? 0 : 5000 + number);
            uid->refusals = (struct uid_refusals){5000 + number, (round + 1) * 1000 + number};
            uid_unref(uid);
        }
    }
    for (uid_t number = 1; number < 50; number++)
        uid_unref(uid_get(&uids, number)); /* never refused: not kept */
    uid = uid_get(&uids, 100);
    assert_int_equal(uid->refusals.n, 3100);
    uid_unref(uid);
    uid = uid_get(&uids, 99);
    uid->refusals.n = 1;
    uid_unref(uid);
    uid = uid_get(&uids, 100); /* the one that had been there longest */
    assert_int_equal(uid->refusals.n, 0);
    uid_unref(uid);
    assert_int_equal(uids.n, 0);
}

/* Connections of one uid that are readable in every turn, or in some, beside another uid's: few are
 * read in a turn, and none waits much longer than its share. Alone it has the loop to itself. */
static void reads_connections_in_turn(void **state)
{
    enum { CONNS = 250, TURNS = 2000 };
    static uint64_t reads[CONNS], since[CONNS];
    uint64_t theirs = 0, longest = 0;
    struct uids uids;
    struct uid *a, *b;
    unsigned n_asked, n_read;

    (void)state;
    uids_init(&uids);
    a = uid_get(&uids, 1000);
    b = uid_get(&uids, 1001);
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        bool every = turn < TURNS / 2;

        assert_true(turn % 50 != 0 || uid_may_read(b, turn, turn, &theirs));
        n_asked = n_read = 0;
        for (int i = 0; i < CONNS; i++) {
            if (every || rand() % 3 == 0) {
                n_asked++;
                if (uid_may_read(a, turn, turn, &reads[i])) {
                    n_read++;
                    since[i] = turn;
                    assert_int_equal(reads[i], a->n_reads);
                }
            }
            if (turn - since[i] > longest)
                longest = turn - since[i];
        }
        /* At first all are new; then as many as have a turn, or those that joined in. */
        if (every && turn > 51)
            assert_int_equal(n_read, UID_CONNECTIONS_A_TURN);
        else if (turn > TURNS / 2 + 1)
            assert_in_range(n_read, 0, UID_CONNECTIONS_A_TURN + CONNS / 2);
    }
    print_message("the longest wait was %llu turns of %u connections\n",
                  (unsigned long long)longest, CONNS);
    assert_in_range(longest, CONNS / UID_CONNECTIONS_A_TURN, 5 * CONNS / UID_CONNECTIONS_A_TURN);
    for (int turn = 1; turn < 5; turn++) {
        n_read = 0;
        for (int i = 0; i < CONNS; i++)
            n_read += uid_may_read(a, (uint64_t)(TURNS + turn), TURNS + UID_SHARED_MS, &reads[i]);
        assert_int_equal(n_read, CONNS);
    }
    for (int i = 1; i < UID_DATAGRAMS_A_TURN; i++)
        assert_true(uid_may_read_more(a));
    assert_false(uid_may_read_more(a));
    uid_unref(a);
    uid_unref(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_over_the_limits),   cmocka_unit_test(lives_with_a_lowered_limit),
        cmocka_unit_test(keeps_one_record_a_uid),    cmocka_unit_test(remembers_refusals),
        cmocka_unit_test(reads_connections_in_turn),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
