/*
 * uid.h - what each uid holds, against its limits and the limits of all
 *
 * Everything that a client holds is charged before it is given and given back with it. A client is
 * its uid, however many connections it opens.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "batch.h"
#include "work.h"

#define UIDS_GONE_MAX          16
#define UID_DATAGRAMS_A_TURN   16
#define UID_CONNECTIONS_A_TURN 16   /* while others are there */
#define UID_SHARED_MS          1000 /* since the last time that another uid than before was read */

enum charge {
    CHARGE_CONNECTIONS,
    CHARGE_BUFFERS,
    CHARGE_BUFFER_BYTES,
    CHARGE_REQUESTS,
    CHARGE_COUNT
};

/* How often it was refused since then, which whoever connects again brings along. */
struct uid_refusals {
    uint64_t since_us;
    unsigned n;
};

struct uid {
    TAILQ_ENTRY(uid) link;
    struct uids *uids;
    uid_t uid;
    unsigned refs;
    uint64_t used[CHARGE_COUNT];
    struct batch_party party; /* its turn among uids */
    struct work_party works;  /* ... for helper threads */
    uint64_t turn;            /* of the loop, and what was read in it */
    unsigned n_datagrams;
    unsigned n_readable, n_readable_before; /* connections, in this turn and its last one */
    uint64_t n_reads, n_reads_before;       /* of connections: ever, and before this turn */
    struct uid_refusals refusals;
};

struct uids {
    TAILQ_HEAD(, uid) list;
    unsigned n;
    uint64_t uid_limit[CHARGE_COUNT];   /* of one uid */
    uint64_t total_limit[CHARGE_COUNT]; /* of all together */
    uint64_t total[CHARGE_COUNT];
    char over[160]; /* which limit the last -EDQUOT was of */
    struct {
        uid_t uid;
        struct uid_refusals refusals;
    } gone[UIDS_GONE_MAX]; /* that had refusals, the last ones */
    unsigned n_gone;       /* ever */
    uid_t last_read;
    uint64_t shared_until_ms; /* several are read in turn */
};

void uids_init(struct uids *uids);

/* The record of a uid, with a reference that uid_unref() gives back; NULL when out of memory. */
struct uid *uid_get(struct uids *uids, uid_t uid);
struct uid *uid_ref(struct uid *uid);
struct uid *uid_unref(struct uid *uid);

/*
 * A connection of this uid can be read in that turn of the loop. Whether it shall be: where several
 * uids share the loop, each has few connections read in a turn, those that were not read the
 * longest. *read is the connection's own, 0 at first.
 */
bool uid_may_read(struct uid *uid, uint64_t turn, uint64_t now_ms, uint64_t *read);
/* One datagram was read: one more, of the same connection, in the same turn? */
bool uid_may_read_more(struct uid *uid);

/* 0, -EDQUOT when a limit of the uid would be passed, -EBUSY when a limit of all would be. */
int uid_take(struct uid *uid, enum charge charge, uint64_t n);
/* What the client is told of a refusal just now; NULL where `r` says it all. */
const char *uid_reason(const struct uid *uid, int r);
void uid_give(struct uid *uid, enum charge charge, uint64_t n);
