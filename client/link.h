/*
 * link.h - one connection of the client library: requests out, answers in
 *
 * What fused.c builds the public calls on. `struct fused` is the connection.
 */
#pragma once

#include <sys/types.h>

#include "calls.h"
#include "fused.h"
#include "proto/base.h"
#include "proto/codec.h"
#include "proto/shm.h"

#define LINK_FOREVER INT64_MAX

/* DOWN: the next try to connect comes at retry_ms. JOINING: connected, hello or buffers first. */
enum link_state { LINK_UP, LINK_DOWN, LINK_JOINING };

struct fused {
    int socket;
    pid_t pid;
    int timeout_ms;
    int broken; /* 0, or why nothing is sent any more */
    char path[108], name[PROTO_NAME_MAX + 1];
    struct codec *codec;

    struct calls calls;
    uint32_t unread_max; /* answers that the server bears unread */

    struct fused_buffer *buffers;
    void *kept;     /* inline result handed out last, valid until the next call */
    uint8_t *hello; /* the server's answer to hello, n_hello bytes */
    uint32_t n_hello;
    int loop_fd, timer_fd; /* for event loops: made when asked for, else -1 */

    /* Coming back: rejoin.c. */
    int reconnect_ms; /* 0: never, -1: without a limit */
    enum link_state state;
    bool is_leaving;                      /* the server refuses inferences, for it ends */
    int64_t wake_ms;                      /* when rejoin_step() is due; LINK_FOREVER: all is well */
    int64_t until_ms, retry_ms, pause_ms; /* of the limit; of the next try; after that */
    unsigned n_losses, n_reconnects;
    struct fused_buffer *joining; /* that is being registered again */

    uint64_t answered_id; /* of the last answer that is no inference; reply and reply_fd hold it */
    struct proto_reply reply;
    int reply_fd;
    char text[PROTO_TEXT_MAX + 112];
    uint8_t tx[PROTO_DATAGRAM_MAX], rx[PROTO_DATAGRAM_MAX];
};

struct fused_buffer {
    struct fused *f; /* NULL once the connection is closed */
    struct fused_buffer *next, **link;
    uint32_t handle;           /* 0: this server does not know it */
    bool created;              /* host pages that the server made, and takes back at the end */
    bool is_joined;            /* registered again, or refused */
    struct shm shm;            /* of a device buffer only its size; the fd only to register again */
    struct device_map *device; /* NULL: host pages */
};

/* Sets the connection's error text and returns r. */
_printf_(3, 4) int link_fail(struct fused *f, int r, const char *format, ...);
int link_fail_errno(struct fused *f, int r);

/* Every public call begins here. 0, -EINVAL without a connection, -EPERM after fork(). */
int link_enter(struct fused *f);

int64_t link_now_ms(void);

/* An instant for the functions below; a negative timeout is none. */
int64_t link_deadline(int timeout_ms);

/* calls_add(), with an error text. */
int link_new_call(struct fused *f, const struct call *like, uint32_t *ret_index);

/* Ends a request without an answer: an inference is done, with that code; of others the row is
 * freed, which is what their waiting call looks for. */
void link_finish(struct fused *f, uint32_t index, int code, const char *text);

/* Hands the result of a row in state CALL_DONE over and frees the row. */
void link_take(struct fused *f, uint32_t index, struct fused_result *ret);

/* The server is gone or cannot be trusted: every call ends with that error. Returns it. */
int link_break(struct fused *f, int error, const char *text);

/* Keeps what the server's answer to hello, in f->reply, says. 0 or -ENOMEM. */
int link_take_hello(struct fused *f);

/* Takes in one answer if one is there. 1 (also for other news), 0, or why the connection is broken.
 */
int link_receive(struct fused *f);

/* Waits for one answer, or other news, and takes it in. 0, -ETIMEDOUT, or why the connection is
 * broken. */
int link_wait(struct fused *f, int64_t deadline);

/*
 * Sends a request as a new call that is like `like` (its verb comes from the request, its id is
 * new), once there is room for its answer. On success the call has like->state, or is held until
 * the server is back. 0 or -errno.
 */
int link_post(struct fused *f, struct proto_request *request, int fd, int64_t deadline,
              const struct call *like, uint32_t *ret_index);

/* Sends and waits for the answer, which is then in f->reply. 0, the server's code, or -errno. */
int link_transact(struct fused *f, struct proto_request *request, int fd, int64_t deadline);

/* Gives a buffer back: now, or while something else is sent or received. Never waits. */
void link_release(struct fused *f, uint32_t handle);

/* Tells an event loop whether there is a result, or when something is due. */
void link_signal(struct fused *f);
void link_wake_at(struct fused *f, int64_t ms);
