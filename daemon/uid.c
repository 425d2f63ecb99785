/*
 * uid.c - charges
 *
 * A record lives as long as anything refers to it: a connection, or a buffer that outlives its
 * connection because a running request still uses it. Sums are compared by subtraction, so that no
 * choice of sizes wraps. Giving back more than was taken is a bug of ours and asserted.
 *
 * How often a uid was refused lately outlives its record, or a flood would start anew with each
 * connection. Only the last few that went are kept: a uid has one place among them, so that none
 * pushes the others out.
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

/* The place of a uid that went, or NULL. */
static struct uid_refusals *find_gone(struct uids *uids, uid_t number)
{
    for (unsigned i = 0; i < uids->n_gone && i < UIDS_GONE_MAX; i++) {
        if (uids->gone[i].uid == number)
            return &uids->gone[i].refusals;
    }
    return NULL;
}

static void keep_refusals(const struct uid *uid)
{
    struct uids *uids = uid->uids;
    struct uid_refusals *place = find_gone(uids, uid->uid);
    unsigned i = uids->n_gone % UIDS_GONE_MAX;

    if (!place && uid->refusals.n == 0)
        return;
    if (!place) {
        uids->gone[i].uid = uid->uid;
        place = &uids->gone[i].refusals;
        uids->n_gone++;
    }
    *place = uid->refusals;
}

struct uid *uid_get(struct uids *uids, uid_t number)
{
    const struct uid_refusals *refusals;
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
    refusals = find_gone(uids, number);
    if (refusals)
        uid->refusals = *refusals;
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
    keep_refusals(uid);
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

/* Do several uids share the loop? */
static bool is_shared(const struct uid *uid, uint64_t now_ms)
{
    struct uids *uids = uid->uids;

    if (uids->last_read != uid->uid) {
        uids->last_read = uid->uid;
        uids->shared_until_ms = now_ms + UID_SHARED_MS;
    }
    return now_ms < uids->shared_until_ms;
}

/* Reads are numbered. Of n connections that take part each has another number, so the k-th lowest
 * is k - n below the last number given, or lower still. */
bool uid_may_read(struct uid *uid, uint64_t turn, uint64_t now_ms, uint64_t *read)
{
    if (uid->turn != turn) {
        uid->turn = turn;
        uid->n_datagrams = 0;
        uid->n_readable_before = uid->n_readable;
        uid->n_readable = 0;
        uid->n_reads_before = uid->n_reads;
    }
    uid->n_readable++;
    if (is_shared(uid, now_ms) &&
        *read + uid->n_readable_before > uid->n_reads_before + UID_CONNECTIONS_A_TURN)
        return false;
    *read = ++uid->n_reads;
    return true;
}

bool uid_may_read_more(struct uid *uid)
{
    return ++uid->n_datagrams < UID_DATAGRAMS_A_TURN;
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
