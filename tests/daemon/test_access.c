/*
 * test_access.c - who administrates, and what that covers
 */
#include "unit.h"

#include <sys/socket.h>
#include <unistd.h>

#include "daemon/access.h"

#define NO_GROUP ((gid_t)-1)

static void knows_administrators(void **state)
{
    static const gid_t groups[] = {10, 20, 30};

    (void)state;
    assert_true(access_is_admin(0, 500, 65534, NO_GROUP, 0, NULL, 0));
    assert_true(access_is_admin(500, 500, 65534, NO_GROUP, 500, NULL, 0));
    assert_false(access_is_admin(501, 500, 65534, NO_GROUP, 501, NULL, 0));
    assert_true(access_is_admin(501, 500, 65534, 20, 501, groups, 3));
    assert_true(access_is_admin(501, 500, 65534, 501, 501, NULL, 0));
    assert_false(access_is_admin(501, 500, 65534, 40, 501, groups, 3));
    /* without a group, a gid of all ones is nobody's */
    assert_false(access_is_admin(501, 500, 65534, NO_GROUP, NO_GROUP, groups, 3));
    /* anybody at all may show as the overflow uid */
    assert_false(access_is_admin(65534, 65534, 65534, 20, 20, groups, 3));
    assert_false(access_is_admin(65534, 500, 65534, 20, 20, groups, 3));
}

static void asks_the_kernel(void **state)
{
    struct peer peer;
    int fds[2];

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds), 0);
    assert_int_equal(access_peer(fds[0], 0, &peer), 0);
    assert_int_equal(peer.uid, getuid());
    assert_int_equal(peer.gid, getgid());
    assert_int_equal(peer.pid, getpid());
    assert_true(peer.admin);
    close(fds[0]);
    close(fds[1]);
    assert_true(access_peer(-1, 0, &peer) < 0);
}

/* P-17: one gate, by the table; a verb without a row does not compile. */
static void guards_admin_verbs(void **state)
{
    static const enum verb admin_verbs[] = {VERB_MODEL_LOAD, VERB_MODEL_UNLOAD, VERB_MODEL_RELOAD,
                                            VERB_DRAIN, VERB_LOG};
    const struct peer plain = {.uid = 1}, admin = {.admin = true};
    unsigned n_admin = 0;

    (void)state;
    for (int verb = 0; verb < VERB_COUNT; verb++) {
        assert_true(access_allowed(&admin, (enum verb)verb));
        n_admin += !access_allowed(&plain, (enum verb)verb);
    }
    for (size_t i = 0; i < ARRAY_SIZE(admin_verbs); i++)
        assert_false(access_allowed(&plain, admin_verbs[i]));
    assert_int_equal(n_admin, ARRAY_SIZE(admin_verbs));
}

static void finds_groups(void **state)
{
    gid_t gid = 12345;

    (void)state;
    assert_int_equal(access_group("root", &gid), 0);
    assert_int_equal(gid, 0);
    gid = 12345;
    assert_int_equal(access_group("no-such-group-here", &gid), -ENOENT);
    assert_int_equal(gid, 12345);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_administrators),
        cmocka_unit_test(asks_the_kernel),
        cmocka_unit_test(guards_admin_verbs),
        cmocka_unit_test(finds_groups),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
