/*
 * conn.c - datagrams in, replies out
 *
 * A readable connection is read a few datagrams at a time, and only one once its uid has read a few
 * in this turn of the loop; where others are there too, some of a uid's connections are read in a
 * turn, and others in the next. So a flood does not hold up the others. Refusing costs time too,
 * on both sides: a uid that was refused often in a short while is not read for the rest of it, so
 * that whoever floods sleeps in its own socket instead of taking the cores. Whatever arrives is
 * either dispatched or refused; a received descriptor belongs to the datagram that it came with and
 * is closed with it, unless the verb took it.
 *
 * Replies are sent at once if the socket takes them. Those it does not take wait here, bounded in
 * number and bytes; the client that does not read is closed, nobody else waits. Descriptors in
 * sockets that nobody reads are the scarcest: the kernel limits them for this process as a whole.
 * SIOCOUTQ says whether everything sent so far was read, and only then is their count reset: until
 * then one more reply with a descriptor waits, and with two the client is closed.
 *
 * The many answers of one batch are sent by another thread (post.c). They may arrive after replies
 * that were made later, which the protocol allows.
 *
 * A connection ends in conn_close() and nowhere else, from any depth of a call: the record stays
 * until the loop has closed its handle, and `closing` tells callers to stop.
 */
#include "conn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

#include "clock.h"
#include "proto/codec.h"
#include "proto/wire.h"
#include "server.h"
#include "verb.h"

#define REFUSALS_A_WINDOW  128
#define REFUSALS_WINDOW_MS UINT64_C(10)

struct conn_reply_entry {
    TAILQ_ENTRY(conn_reply_entry) link;
    int fd; /* owned */
    size_t n;
    uint8_t bytes[];
};

/* Frees it when nothing refers to it any more. */
static void end(struct conn *conn)
{
    if (!conn->is_closed || conn->n_posted > 0)
        return;
    close_fd(conn->fd);
    uid_unref(conn->uid);
    free(conn);
}

static void on_closed(uv_handle_t *handle)
{
    struct conn *conn = handle->data;

    conn->is_closed = true;
    end(conn);
}

static void drop_replies(struct conn *conn)
{
    struct conn_reply_entry *entry;

    while ((entry = TAILQ_FIRST(&conn->out))) {
        TAILQ_REMOVE(&conn->out, entry, link);
        close_fd(entry->fd);
        free(entry);
    }
    conn->n_out = conn->n_fds_out = 0;
    conn->out_bytes = 0;
}

void conn_close(struct conn *conn)
{
    if (conn->closing)
        return;
    conn->closing = true;
    TAILQ_REMOVE(&conn->server->conns, conn, link);
    if (conn->is_paused)
        TAILQ_REMOVE(&conn->server->paused, conn, pause);
    for (unsigned i = 0; i < REQUEST_TABLE; i++) {
        struct request *request;

        while ((request = LIST_FIRST(&conn->requests.lists[i]))) {
            if (request->verb == VERB_INFER)
                scheduler_abandon(&conn->server->scheduler, request);
            else
                request_orphan(request);
        }
    }
    buffer_table_deinit(&conn->buffers);
    drop_replies(conn);
    uid_give(conn->uid, CHARGE_CONNECTIONS, 1);
    uv_close((uv_handle_t *)&conn->poll, on_closed);
    if (conn->n_posted == 0)
        conn->fd = close_fd(conn->fd);
    log_debug("client.gone", "uid %u: connection closed", conn->peer.uid);
}

/* ---- out ---- */

/* Whether few enough are unread, as far as the kernel tells. */
static bool may_send_fd(struct conn *conn)
{
    int unread = 0;

    if (conn->n_fds_unread > 0 && ioctl(conn->fd, SIOCOUTQ, &unread) == 0 && unread == 0)
        conn->n_fds_unread = 0;
    return conn->n_fds_unread < CONN_REPLIES_FDS_MAX;
}

static void close_unread(struct conn *conn)
{
    log_client(LOG_LEVEL_WARNING, "client.unread",
               "uid %u, pid %d: does not read its replies, closed", conn->peer.uid,
               (int)conn->peer.pid);
    conn_close(conn);
}

static void on_event(uv_poll_t *poll, int status, int events);

static void watch_for(struct conn *conn, int events)
{
    if (events)
        uv_poll_start(&conn->poll, events, on_event);
    else
        uv_poll_stop(&conn->poll);
}

static void watch(struct conn *conn)
{
    watch_for(conn, (conn->is_paused ? 0 : UV_READABLE) | (conn->n_out > 0 ? UV_WRITABLE : 0));
}

/* The socket has room, so asking it would spin: the tick tries again, and whatever arrives. */
static void hold_up(struct conn *conn)
{
    conn->is_held_up = true;
    watch_for(conn, conn->is_paused ? 0 : UV_READABLE);
}

static void enqueue(struct conn *conn, const uint8_t *bytes, size_t n, int fd)
{
    struct conn_reply_entry *entry;

    if (conn->n_out >= CONN_REPLIES_MAX || conn->out_bytes + n > CONN_REPLIES_BYTES) {
        close_unread(conn);
        return;
    }
    entry = malloc(sizeof(*entry) + n);
    if (!entry) {
        conn_close(conn);
        return;
    }
    entry->fd = -1;
    if (fd >= 0) {
        entry->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (entry->fd < 0) {
            free(entry);
            conn_close(conn);
            return;
        }
        conn->n_fds_out++;
    }
    entry->n = n;
    memcpy(entry->bytes, bytes, n);
    TAILQ_INSERT_TAIL(&conn->out, entry, link);
    conn->out_bytes += n;
    if (conn->n_out++ == 0)
        watch(conn);
}

/* Encodes into the server's space; a reply that does not fit is a bug of ours, said as such. */
static int encode(struct server *server, const struct proto_reply *reply)
{
    static const char text[] = "the answer does not fit into a message";
    struct proto_reply fallback = *reply;
    int n = codec_encode_reply(reply, server->tx, sizeof(server->tx));

    if (n >= 0)
        return n;
    fallback.error = ERR_INTERNAL;
    fallback.text = (struct proto_str){text, sizeof(text) - 1};
    return codec_encode_reply(&fallback, server->tx, sizeof(server->tx));
}

static bool post(struct conn *conn, size_t n)
{
    struct server *server = conn->server;

    if (!server->scheduler.is_posting || conn->n_out > 0 ||
        !post_put(server->scheduler.post, conn->fd, conn, server->tx, n))
        return false;
    conn->n_posted++;
    return true;
}

void conn_sent(void *context, int result, const uint8_t *bytes, size_t n)
{
    struct conn *conn = context;

    conn->n_posted--;
    if (conn->closing)
        end(conn);
    else if (result == -EAGAIN)
        enqueue(conn, bytes, n, -1);
    else if (result < 0)
        conn_close(conn);
    else
        server_progress(conn->server);
}

bool conn_reply(struct conn *conn, const struct proto_reply *reply, int fd)
{
    struct server *server = conn->server;
    int n, r;

    if (conn->closing)
        return true;
    n = encode(server, reply);
    if (n < 0) {
        conn_close(conn);
        return true;
    }
    if (fd < 0 && post(conn, (size_t)n))
        return true;
    if (fd >= 0) {
        bool may_send = may_send_fd(conn);

        if (conn->n_fds_unread + conn->n_fds_out > CONN_REPLIES_FDS_MAX) {
            close_unread(conn);
            return true;
        }
        if (!may_send) {
            enqueue(conn, server->tx, (size_t)n, fd);
            if (!conn->closing && conn->n_out == 1)
                hold_up(conn);
            return true;
        }
    }
    r = conn->n_out > 0 ? -EAGAIN : wire_send(conn->fd, server->tx, (size_t)n, fd);
    if (r == -ETOOMANYREFS && fd >= 0)
        return false;
    if (r == -EAGAIN)
        enqueue(conn, server->tx, (size_t)n, fd);
    else if (r < 0)
        conn_close(conn);
    else if (fd >= 0)
        conn->n_fds_unread++;
    return true;
}

void conn_flush(struct conn *conn)
{
    struct conn_reply_entry *entry;

    conn->is_held_up = false;
    while ((entry = TAILQ_FIRST(&conn->out))) {
        int r = entry->fd >= 0 && !may_send_fd(conn)
                    ? -ETOOMANYREFS
                    : wire_send(conn->fd, entry->bytes, entry->n, entry->fd);

        if (r == -EAGAIN) {
            watch(conn);
            return;
        }
        if (r == -ETOOMANYREFS) {
            hold_up(conn);
            return;
        }
        if (r < 0) {
            conn_close(conn);
            return;
        }
        TAILQ_REMOVE(&conn->out, entry, link);
        conn->n_out--;
        conn->n_fds_out -= entry->fd >= 0;
        conn->n_fds_unread += entry->fd >= 0;
        conn->out_bytes -= entry->n;
        close_fd(entry->fd);
        free(entry);
    }
    watch(conn);
    server_progress(conn->server);
}

/* ---- pauses ---- */

static bool is_window_over(const struct uid *uid, uint64_t now_us)
{
    return now_us - uid->refusals.since_us >= REFUSALS_WINDOW_MS * 1000;
}

void conn_count_refusal(struct conn *conn)
{
    struct uid *uid = conn->uid;
    uint64_t now_us = clock_us();

    if (is_window_over(uid, now_us))
        uid->refusals = (struct uid_refusals){.since_us = now_us};
    uid->refusals.n++;
}

/* Was its uid refused so much lately that the others come first? A drain waits for nobody. */
static bool must_pause(const struct conn *conn)
{
    return conn->uid->refusals.n >= REFUSALS_A_WINDOW && !is_window_over(conn->uid, clock_us()) &&
           conn->server->state == SERVER_READY;
}

static void on_resume(uv_timer_t *timer)
{
    conn_resume(timer->data);
}

static void pause_reading(struct conn *conn)
{
    struct server *server = conn->server;

    conn->is_paused = true;
    if (TAILQ_EMPTY(&server->paused))
        uv_timer_start(&server->resume, on_resume, REFUSALS_WINDOW_MS, REFUSALS_WINDOW_MS);
    TAILQ_INSERT_TAIL(&server->paused, conn, pause);
    watch(conn);
}

void conn_resume(struct server *server)
{
    struct conn *conn, *next;

    for (conn = TAILQ_FIRST(&server->paused); conn; conn = next) {
        next = TAILQ_NEXT(conn, pause);
        if (must_pause(conn))
            continue;
        TAILQ_REMOVE(&server->paused, conn, pause);
        conn->is_paused = false;
        watch(conn);
    }
    if (TAILQ_EMPTY(&server->paused))
        uv_timer_stop(&server->resume);
}

void conn_refuse(struct conn *conn, const struct proto_request *message, enum proto_error error,
                 const char *text)
{
    struct proto_reply reply = {
        .has_id = true, .id = message->id, .verb = message->verb, .error = error};

    if (!text)
        text = proto_error_text(error);
    reply.text = (struct proto_str){text, (uint32_t)strnlen(text, PROTO_TEXT_MAX)};
    conn_count_refusal(conn);
    conn_reply(conn, &reply, -1);
}

/* ---- in ---- */

/* What could not be decoded, at least not all of it, has an id only as far as it was read. */
static void refuse_undecoded(struct conn *conn, bool has_id, uint64_t id, enum proto_error error,
                             const char *text)
{
    struct proto_reply reply = {
        .has_id = has_id,
        .id = id,
        .verb = VERB_COUNT,
        .error = error,
        .text = {text, (uint32_t)strlen(text)},
    };

    conn_count_refusal(conn);
    conn_reply(conn, &reply, -1);
}

static void refuse_bad(struct conn *conn, bool has_id, uint64_t id, const char *reason)
{
    bool is_unknown = strcmp(reason, "unknown verb") == 0;

    log_client(LOG_LEVEL_INFO, "client.bad_message", "uid %u, pid %d: %s", conn->peer.uid,
               (int)conn->peer.pid, reason);
    refuse_undecoded(conn, has_id, id, is_unknown ? ERR_UNSUPPORTED : ERR_BAD_MESSAGE, reason);
    if (++conn->n_bad >= PROTO_BAD_MESSAGES_MAX)
        conn_close(conn);
}

static void dispatch(struct conn *conn, const struct proto_request *message, int *fd)
{
    static const char hello_first[] = "the first message is hello";
    static const char hello_twice[] = "hello was said before";

    if ((message->verb == VERB_HELLO) == conn->hello) {
        conn_refuse(conn, message, ERR_BAD_MESSAGE, conn->hello ? hello_twice : hello_first);
        if (++conn->n_bad >= PROTO_BAD_MESSAGES_MAX)
            conn_close(conn);
        return;
    }
    if (!access_allowed(&conn->peer, message->verb)) {
        conn_refuse(conn, message, ERR_DENIED, "this verb is for administrators");
        return;
    }
    if (request_table_find(&conn->requests, message->id)) {
        conn_refuse(conn, message, ERR_BAD_MESSAGE, "a request of that id is in flight");
        return;
    }
    verb_dispatch(conn, message, fd);
}

/* False: nothing more to read now. */
static bool receive(struct conn *conn)
{
    struct server *server = conn->server;
    struct proto_request message;
    _cleanup_close_ int fd = -1;
    const char *reason = "";
    bool has_id = false;
    uint64_t id = 0;
    int n, r;

    n = wire_recv(conn->fd, server->rx, sizeof(server->rx), &fd);
    if (n == -EAGAIN)
        return false;
    if (n == -EMSGSIZE || n == -EPROTO) {
        refuse_bad(conn, false, 0,
                   n == -EMSGSIZE ? "the datagram is too long" : "too many descriptors");
        return !conn->closing;
    }
    if (n <= 0) {
        conn_close(conn);
        return false;
    }
    r = codec_decode_request(server->codec, server->rx, (size_t)n, &message, &has_id, &id, &reason);
    if (r == -EBADMSG) {
        refuse_bad(conn, has_id, id, reason);
    } else if (r < 0) {
        refuse_undecoded(conn, has_id, id, ERR_NO_MEMORY, proto_error_text(ERR_NO_MEMORY));
    } else if (fd == -EMFILE) {
        conn_refuse(conn, &message, ERR_BUSY, "the daemon has no room for another descriptor");
    } else {
        dispatch(conn, &message, &fd);
    }
    return !conn->closing;
}

static void on_event(uv_poll_t *poll, int status, int events)
{
    struct conn *conn = poll->data;
    struct server *server = conn->server;

    if (status < 0) {
        conn_close(conn);
        return;
    }
    if (events & UV_WRITABLE || conn->is_held_up)
        conn_flush(conn);
    if (conn->closing || !(events & UV_READABLE))
        return;
    if (must_pause(conn)) {
        pause_reading(conn);
        return;
    }
    if (!uid_may_read(conn->uid, server->scheduler.n_turns, uv_now(&server->loop), &conn->read) &&
        server->state == SERVER_READY)
        return; /* it is still readable, and asked again */
    do {
        if (!receive(conn))
            return;
    } while (!conn->closing && uid_may_read_more(conn->uid));
}

/* ---- arrival ---- */

/* Says why to a client that is not let in: one datagram, if the socket takes it. */
static void turn_away(struct server *server, int fd, enum proto_error error, const char *text)
{
    struct proto_reply reply = {.verb = VERB_COUNT, .error = error};
    int n;

    if (!text)
        text = proto_error_text(error);
    reply.text = (struct proto_str){text, (uint32_t)strlen(text)};
    n = codec_encode_reply(&reply, server->tx, sizeof(server->tx));
    if (n > 0)
        wire_send(fd, server->tx, (size_t)n, -1);
}

int conn_new(struct server *server, int socket)
{
    _cleanup_close_ int fd = socket;
    struct uid *uid;
    struct peer peer;
    struct conn *conn;
    int r;

    r = access_peer(fd, server->admin_gid, &peer);
    if (r < 0)
        return r;
    uid = uid_get(&server->uids, peer.uid);
    if (!uid)
        return -ENOMEM;
    r = uid_take(uid, CHARGE_CONNECTIONS, 1);
    if (r < 0) {
        turn_away(server, fd, request_error(VERB_HELLO, r), uid_reason(uid, r));
        uid_unref(uid);
        return r;
    }
    conn = calloc(1, sizeof(*conn));
    if (!conn) {
        r = -ENOMEM;
        goto give;
    }
    r = uv_poll_init(&server->loop, &conn->poll, fd);
    if (r < 0) {
        free(conn);
        goto give;
    }
    conn->server = server;
    conn->poll.data = conn;
    conn->fd = take_fd(&fd);
    conn->peer = peer;
    conn->uid = uid;
    conn->accepted_us = clock_us();
    request_table_init(&conn->requests);
    TAILQ_INIT(&conn->out);
    TAILQ_INSERT_TAIL(&server->conns, conn, link);
    watch(conn);
    log_debug("client.new", "uid %u, pid %d connected", peer.uid, (int)peer.pid);
    return 0;

give:
    uid_give(uid, CHARGE_CONNECTIONS, 1);
    uid_unref(uid);
    return r;
}
