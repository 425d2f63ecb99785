/*
 * uid.c - charges
 *
 * A record lives as long as anything refers to it: a connection, or a buffer that outlives its
 * connection because a running request still uses it. Sums are compared by subtraction, so that no
 * choice of sizes wraps. Giving back more than was taken is a bug of ours and asserted.
 */
#include "uid.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

void uids_init(struct uids *uids)
{
    *uids = (struct uids){0};
    TAILQ_INIT(&uids->list);
    for (int i = 0; i < CHARGE_COUNT; i++) {
        uids->uid_limit[i] = UINT64_MAX;
        uids->total_limit[i] = UINT64_MAX;
    }
}

struct uid *uid_get(struct uids *uids, uid_t number)
{
    struct uid *uid;

    TAILQ_FOREACH(uid, &uids->list, link)
    {
        if (uid->uid == number)
            return uid_ref(uid);
    }
    uid = calloc(1, sizeof(*uid));
    if (!uid)
        return NULL;
    uid->uids = uids;
    uid->uid = number;
    uid->refs = 1;
    TAILQ_INSERT_TAIL(&uids->list, uid, link);
    uids->n++;
    return uid;
}

struct uid *uid_ref(struct uid *uid)
{
    uid->refs++;
    return uid;
}

struct uid *uid_unref(struct uid *uid)
{
    if (!uid)
        return NULL;
    assert(uid->refs > 0);
    if (--uid->refs > 0)
        return NULL;
    for (int i = 0; i < CHARGE_COUNT; i++)
        assert(uid->used[i] == 0);
    assert(uid->works.n_waiting + uid->works.n_running == 0);
    TAILQ_REMOVE(&uid->uids->list, uid, link);
    uid->uids->n--;
    free(uid);
    return NULL;
}

static void note_over(const struct uid *uid, enum charge charge, uint64_t n)
{
    /* As the configuration calls them. */
    static const char *const names[] = {
        [CHARGE_CONNECTIONS] = "uid_connections",
        [CHARGE_BUFFERS] = "uid_buffers",
        [CHARGE_BUFFER_BYTES] = "uid_buffer_bytes",
        [CHARGE_REQUESTS] = "uid_requests",
    };
    struct uids *uids = uid->uids;

    snprintf(uids->over, sizeof(uids->over),
             "a limit of your uid is reached: %s is %" PRIu64 ", %" PRIu64 " in use, %" PRIu64
             " more asked for",
             names[charge], uids->uid_limit[charge], uid->used[charge], n);
}

int uid_take(struct uid *uid, enum charge charge, uint64_t n)
{
    struct uids *uids = uid->uids;

    /* A limit may have been lowered below what is in use. */
    if (uid->used[charge] > uids->uid_limit[charge] ||
        n > uids->uid_limit[charge] - uid->used[charge]) {
        note_over(uid, charge, n);
        return -EDQUOT;
    }
    if (uids->total[charge] > uids->total_limit[charge] ||
        n > uids->total_limit[charge] - uids->total[charge])
        return -EBUSY;
    uid->used[charge] += n;
    uids->total[charge] += n;
    return 0;
}

const char *uid_reason(const struct uid *uid, int r)
{
    return r == -EDQUOT ? uid->uids->over : NULL;
}

void uid_give(struct uid *uid, enum charge charge, uint64_t n)
{
    assert(uid->used[charge] >= n);
    assert(uid->uids->total[charge] >= n);
    uid->used[charge] -= n;
    uid->uids->total[charge] -= n;
}
