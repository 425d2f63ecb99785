/*
 * link.h - one connection of the client library: its socket, its requests in flight
 *
 * What fused.c builds the public calls on. `struct fused` is the connection.
 */
#pragma once

#include <sys/types.h>

#include "fused.h"
#include "proto/base.h"
#include "proto/codec.h"
#include "proto/shm.h"

#define LINK_CALLS_MAX 65536u
#define LINK_NONE      UINT32_MAX
#define LINK_FOREVER   INT64_MAX

/* SENT: somebody waits. DROPPED: nobody does. ORPHAN: a buffer that came for nobody, and goes back
 * with the next request. DONE: an inference whose result was not taken yet. */
enum call_state { CALL_FREE, CALL_NEW, CALL_SENT, CALL_DROPPED, CALL_ORPHAN, CALL_DONE };

struct call {
    uint64_t id;
    enum call_state state;
    enum verb verb;
    uint32_t answer_bytes;   /* that its answer may have */
    uint32_t previous, next; /* in the done queue, or next in the free list */
    /* Of an inference: */
    bool is_compact, in_buffer;
    uint32_t buffer;            /* handle, when in_buffer, and of an orphan */
    uint64_t room_bytes;        /* of the output that was declared, if one was */
    void *bytes;                /* inline result that the caller gave no place for; owned */
    struct fused_result result; /* id and user from the start; output as asked, then as answered */
};

struct fused {
    int socket;
    pid_t pid;
    int timeout_ms;
    int broken; /* 0, or why nothing is sent any more */
    struct codec *codec;

    struct call *calls;
    uint32_t n_calls, first_free, first_done, last_done;
    uint32_t n_unanswered; /* SENT and DROPPED */
    uint32_t unanswered_bytes;
    uint32_t n_inferences; /* SENT and DONE */
    uint32_t n_orphans;
    uint32_t unread_max;
    uint64_t n_ids;

    struct fused_buffer *buffers;
    void *kept;     /* inline result handed out last, valid until the next call */
    uint8_t *hello; /* the server's answer to hello, n_hello bytes */
    uint32_t n_hello;
    int loop_fd, event_fd; /* for event loops: made when asked for, else -1 */

    uint64_t answered_id; /* of the last answer that is no inference; reply and reply_fd hold it */
    struct proto_reply reply;
    int reply_fd;
    char text[PROTO_TEXT_MAX + 112];
    uint8_t tx[PROTO_DATAGRAM_MAX], rx[PROTO_DATAGRAM_MAX];
};

struct fused_buffer {
    struct fused *f; /* NULL once the connection is closed */
    struct fused_buffer *next, **link;
    uint32_t handle;
    bool created;              /* host pages that the server made, and takes back at the end */
    struct shm shm;            /* of a device buffer only its size */
    struct device_map *device; /* NULL: host pages */
};

/* Sets the connection's error text and returns r. */
_printf_(3, 4) int link_fail(struct fused *f, int r, const char *format, ...);
int link_fail_errno(struct fused *f, int r);

/* Every public call begins here. 0, -EINVAL without a connection, -EPERM after fork(). */
int link_enter(struct fused *f);

/* An instant for the functions below; a negative timeout is none. */
int64_t link_deadline(int timeout_ms);

/* The row of a request in flight, or LINK_NONE. */
uint32_t link_find(const struct fused *f, uint64_t id);

/* Hands the result of a row in state CALL_DONE over and frees the row. */
void link_take(struct fused *f, uint32_t index, struct fused_result *ret);

/* The server is gone or cannot be trusted: every call ends with that error. Returns it. */
int link_break(struct fused *f, int error, const char *text);

/* Takes in one answer if one is there. 1, 0, or why the connection is broken. */
int link_receive(struct fused *f);

/* Waits for one answer and takes it in. 0, -ETIMEDOUT, or why the connection is broken. */
int link_wait(struct fused *f, int64_t deadline);

/*
 * Sends a request as a new call that is like `like` (its verb comes from the request, its id is
 * new), once there is room for its answer. On success the call has like->state. 0 or -errno.
 */
int link_post(struct fused *f, struct proto_request *request, int fd, int64_t deadline,
              const struct call *like, uint32_t *ret_index);

/* Sends and waits for the answer, which is then in f->reply. 0, the server's code, or -errno. */
int link_transact(struct fused *f, struct proto_request *request, int fd, int64_t deadline);

/* Gives a buffer back without waiting for the answer. */
void link_release(struct fused *f, uint32_t handle, int64_t deadline);

/* Writes the number that tells an event loop whether there is a result. */
void link_signal(struct fused *f);
