/*
 * uid.h - what each uid holds, against its limits and the limits of all
 *
 * Everything that a client holds is charged before it is given and given back with it. A client is
 * its uid, however many connections it opens.
 */
#pragma once

#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "batch.h"
#include "work.h"

#define UIDS_GONE_MAX 16

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
    uint64_t turn;            /* of the loop that n_datagrams were read in */
    unsigned n_datagrams;
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
};

void uids_init(struct uids *uids);

/* The record of a uid, with a reference that uid_unref() gives back; NULL when out of memory. */
struct uid *uid_get(struct uids *uids, uid_t uid);
struct uid *uid_ref(struct uid *uid);
struct uid *uid_unref(struct uid *uid);

/* 0, -EDQUOT when a limit of the uid would be passed, -EBUSY when a limit of all would be. */
int uid_take(struct uid *uid, enum charge charge, uint64_t n);
/* What the client is told of a refusal just now; NULL where `r` says it all. */
const char *uid_reason(const struct uid *uid, int r);
void uid_give(struct uid *uid, enum charge charge, uint64_t n);
