/*
 * calls.h - the client library's requests in flight
 *
 * A table of rows. A row's index is the low half of its request's id, so that an answer finds it at
 * once and a foreign id finds nothing. Inferences that have ended wait in a queue, in the order of
 * their ends.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "fused.h"
#include "proto/proto.h"

#define CALLS_MAX  65536u
#define CALLS_NONE UINT32_MAX

/* SENT: somebody waits. HELD: somebody waits, and it is sent when the server is back. DROPPED:
 * nobody waits. JOIN: a request of rejoin.c. ORPHAN: a buffer that is nobody's, and goes back as
 * soon as the server takes requests. DONE: an inference whose result was not taken yet. */
enum call_state {
    CALL_FREE,
    CALL_NEW,
    CALL_SENT,
    CALL_HELD,
    CALL_DROPPED,
    CALL_JOIN,
    CALL_ORPHAN,
    CALL_DONE
};

struct call {
    uint64_t id;
    enum call_state state;
    enum verb verb;
    uint32_t answer_bytes;   /* that its answer may have */
    uint32_t previous, next; /* in the done queue, or next in the free list */
    uint8_t *datagram;       /* to be sent again, n_datagram bytes, with fd; NULL: not to be */
    uint32_t n_datagram;
    int fd;            /* borrowed from the call that waits, or -1 */
    unsigned n_losses; /* servers that ended while they had it */
    /* Of an inference: */
    bool is_compact, in_buffer, is_cancelled;
    int64_t deadline_ms; /* when has_deadline was asked for, else never */
    struct fused_buffer *input;
    uint32_t buffer;            /* handle, when in_buffer, and of an orphan */
    uint64_t room_bytes;        /* of the output that was declared, if one was */
    void *bytes;                /* inline result that the caller gave no place for; owned */
    struct fused_result result; /* id and user from the start; output as asked, then as answered */
};

struct calls {
    struct call *rows;
    uint32_t n, first_free, first_done, last_done;
    uint32_t n_unanswered; /* SENT, HELD and DROPPED */
    uint32_t unanswered_bytes;
    uint32_t n_inferences; /* SENT, HELD and DONE */
    uint32_t n_orphans, n_held;
    uint64_t n_ids;
};

void calls_init(struct calls *calls);
void calls_deinit(struct calls *calls);

/* Takes a free row for a call that is like `like`, with a new id, in state CALL_NEW. -ENOBUFS: the
 * table is full; -ENOMEM. */
int calls_add(struct calls *calls, const struct call *like, uint32_t *ret_index);
/* The row of a request in flight, or CALLS_NONE. */
uint32_t calls_find(const struct calls *calls, uint64_t id);
/* Frees a row, and the room for its answer if one was to come. */
void calls_drop(struct calls *calls, uint32_t index);

/* It is on its way: CALL_SENT or CALL_DROPPED. */
void calls_sent(struct calls *calls, uint32_t index, enum call_state state);
/* Keeps a request until it can be sent; it then is CALL_SENT again by calls_resent(). */
void calls_hold(struct calls *calls, uint32_t index);
void calls_resent(struct calls *calls, uint32_t index);
/* Nobody waits for it any more: what was sent is CALL_DROPPED, what was held is gone. */
void calls_forget(struct calls *calls, uint32_t index);
/* A request of rejoin.c is on its way. The server is new and owes nothing else, so it takes no room
 * from the others. */
void calls_join(struct calls *calls, uint32_t index);
/* The row gives a buffer back that is nobody's. Its request then has the id that calls_new_id()
 * returns, and calls_returned() says that it is on its way. */
void calls_orphan(struct calls *calls, uint32_t index, uint32_t handle);
uint64_t calls_new_id(struct calls *calls, uint32_t index);
void calls_returned(struct calls *calls, uint32_t index);

/* An inference has ended: into the queue. */
void calls_done(struct calls *calls, uint32_t index);
/* Hands the result of a row in state CALL_DONE over, with the bytes that it owns, and frees the
 * row. */
void calls_take(struct calls *calls, uint32_t index, struct fused_result *ret, void **ret_bytes);
