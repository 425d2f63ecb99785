/*
 * conn.h - one client connection
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include <uv.h>

#include "access.h"
#include "buffer.h"
#include "proto/proto.h"
#include "request.h"
#include "uid.h"

#define CONN_REPLIES_MAX     PROTO_UNREAD_MAX /* replies that wait because the client does not read */
#define CONN_REPLIES_FDS_MAX PROTO_UNREAD_FDS_MAX   /* replies with fds that it has not read */
#define CONN_REPLIES_BYTES   PROTO_UNREAD_BYTES_MAX /* bytes of replies that wait */

struct server;
struct conn_reply_entry;

struct conn {
    TAILQ_ENTRY(conn) link;
    struct server *server;
    uv_poll_t poll;
    int fd;
    bool closing;
    bool is_closed;    /* ... and so is the handle */
    unsigned n_posted; /* answers that a thread is about to send: the socket stays open for it */

    struct peer peer;
    struct uid *uid;
    char name[PROTO_NAME_MAX + 1];
    bool hello;
    uint64_t accepted_us;
    unsigned n_bad;

    struct request_table requests;
    struct batch_source source; /* what waits of it */
    struct buffer_table buffers;

    TAILQ_HEAD(, conn_reply_entry) out;
    unsigned n_out, n_fds_out, n_fds_unread; /* waiting here; of them with one; sent with one */
    size_t out_bytes;
    bool is_held_up; /* descriptors must be read first: the tick calls conn_flush() */
    bool is_paused;  /* not read until its uid may be refused something again */
    uint64_t read;   /* the number of its last one among its uid's */
    TAILQ_ENTRY(conn) pause;
};

/*
 * Takes over an accepted socket (consumed whatever happens): asks who it is, charges it to its uid.
 * A client over a limit is told so and closed. 0 or a negative errno, for the log only.
 */
int conn_new(struct server *server, int fd);

/* Ends a connection at once: its requests are cancelled, its buffers released. The record is freed
 * from the loop. */
void conn_close(struct conn *conn);

/*
 * Sends a reply, or queues it while the client does not read; a client that lets too many wait is
 * closed. fd (-1: none) is borrowed. False only when a reply with an fd could not be sent because
 * too many fds are on their way; nothing was sent then.
 */
bool conn_reply(struct conn *conn, const struct proto_reply *reply, int fd);

/* What became of an answer that was posted: it is the post's callback. */
void conn_sent(void *conn, int result, const uint8_t *bytes, size_t n);

/* Sends what waits, as far as the socket takes it. May close the connection. */
void conn_flush(struct conn *conn);

/* Reads again from those that were paused, where it is time. */
void conn_resume(struct server *server);

/* Its uid was refused something at once: whoever asks for that again and again is not read for a
 * while. conn_refuse() does it itself. */
void conn_count_refusal(struct conn *conn);

/* An error answer to a request that has no record. `text` NULL: the error's own. */
void conn_refuse(struct conn *conn, const struct proto_request *message, enum proto_error error,
                 const char *text);
