/*
 * rejoin.c - coming back to a server that went away
 *
 * When a server ends, what has no answer yet is held: each request keeps the datagram that it was
 * sent as. A new connection says hello, registers the memory of every buffer again, then sends what
 * is held. Ids stay; handles of buffers are those of the new server, and a deadline has become
 * shorter. Repeating is sound because a request only writes its result, from an input that the
 * caller leaves alone until the answer; what changes the server is never repeated.
 *
 * Nothing here waits. Each step does what its time has come for and says through f->wake_ms when
 * the next is due, so that waiting calls and event loops drive it alike. f->tx is not used: a
 * caller's request may be on its way out of it.
 *
 * A server that ends in good order refuses requests (SHUTTING_DOWN) while it finishes others, and
 * one that lost its device refuses all (GPU_LOST): those requests are held, too, but the connection
 * is used until the server closes it. Only then is it sure that it writes to no buffer any more.
 */
#include "rejoin.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "proto/wire.h"

#define PAUSE_MIN_MS 5
#define PAUSE_MAX_MS 250

static int64_t limit_from(const struct fused *f, int64_t now)
{
    return f->reconnect_ms < 0 ? LINK_FOREVER : now + f->reconnect_ms;
}

/* ---- losing ---- */

static void lose_call(struct fused *f, uint32_t index)
{
    struct call *call = &f->calls.rows[index];

    switch (call->state) {
    case CALL_SENT:
        if (call->is_cancelled)
            link_finish(f, index, FUSED_CANCELLED, "the request was cancelled");
        else if (!call->datagram || ++call->n_losses > REJOIN_LOSSES_MAX)
            link_finish(f, index, -EPIPE, "the server went away before it answered");
        else
            calls_hold(&f->calls, index);
        break;
    case CALL_DROPPED:
        calls_drop(&f->calls, index);
        break;
    default:
        break;
    }
}

void rejoin_drop(struct fused *f)
{
    f->socket = close_fd(f->socket);
    f->state = LINK_DOWN;
    f->joining = NULL;
    for (struct fused_buffer *b = f->buffers; b; b = b->next) {
        b->handle = 0;
        b->is_joined = false;
    }
    for (uint32_t k = 0; k < f->calls.n; k++)
        if (f->calls.rows[k].state == CALL_JOIN || f->calls.rows[k].state == CALL_ORPHAN)
            calls_drop(&f->calls, k);
    f->retry_ms = link_now_ms() + f->pause_ms;
    f->pause_ms = 2 * f->pause_ms < PAUSE_MAX_MS ? 2 * f->pause_ms : PAUSE_MAX_MS;
    link_wake_at(f, 0);
}

void rejoin_begin(struct fused *f)
{
    f->is_leaving = false;
    f->n_losses++;
    f->pause_ms = PAUSE_MIN_MS;
    f->until_ms = limit_from(f, link_now_ms());
    for (uint32_t k = 0; k < f->calls.n; k++)
        lose_call(f, k);
    rejoin_drop(f);
}

bool rejoin_hold(struct fused *f, uint32_t index)
{
    struct call *call = &f->calls.rows[index];
    enum proto_error error = f->reply.error;

    if (!call->datagram || call->is_cancelled || call->state != CALL_SENT ||
        (error != ERR_SHUTTING_DOWN && error != ERR_GPU_LOST))
        return false;
    if (error == ERR_GPU_LOST && ++call->n_losses > REJOIN_LOSSES_MAX)
        return false;
    if (!f->is_leaving)
        f->until_ms = limit_from(f, link_now_ms());
    f->is_leaving = true;
    call->result.code = (int)error;
    calls_hold(&f->calls, index);
    link_wake_at(f, 0);
    return true;
}

/* The time is over: for a server that ends and does not, or for one that does not come. */
static int give_up(struct fused *f)
{
    if (f->state != LINK_UP)
        return link_break(f, -EPIPE, "the server went away, and did not come back in time");
    f->is_leaving = false;
    for (uint32_t k = 0; k < f->calls.n; k++)
        if (f->calls.rows[k].state == CALL_HELD)
            link_finish(f, k,
                        f->calls.rows[k].result.code ? f->calls.rows[k].result.code
                                                     : FUSED_SHUTTING_DOWN,
                        "the server says that it ends, and goes on");
    link_wake_at(f, LINK_FOREVER);
    return 1;
}

/* ---- connecting ---- */

static int join_send(struct fused *f, struct proto_request *request, int fd)
{
    uint8_t bytes[256];
    uint32_t index;
    int r;

    r = link_new_call(f, &(struct call){.verb = request->verb}, &index);
    if (r < 0)
        return r;
    request->id = f->calls.rows[index].id;
    r = codec_encode_request(request, bytes, sizeof bytes);
    if (r > 0)
        r = wire_send(f->socket, bytes, (size_t)r, fd);
    if (r < 0)
        calls_drop(&f->calls, index);
    else
        calls_join(&f->calls, index);
    return r;
}

static void try_connect(struct fused *f)
{
    struct proto_request hello = {
        .verb = VERB_HELLO, .hello = {PROTO_VERSION_MAX, {f->name, (uint32_t)strlen(f->name)}}};
    struct epoll_event event = {.events = EPOLLIN};
    int fd = wire_connect_now(f->path);

    if (fd < 0) {
        rejoin_drop(f);
        return;
    }
    f->socket = fd;
    f->state = LINK_JOINING;
    if ((f->loop_fd >= 0 && epoll_ctl(f->loop_fd, EPOLL_CTL_ADD, fd, &event) < 0) ||
        join_send(f, &hello, -1) < 0)
        rejoin_drop(f);
}

/* A buffer that the new server refuses keeps handle 0, which is nobody's: requests that use it are
 * told NOT_FOUND. So is one whose memory cannot be handed over again. */
static void join_next(struct fused *f)
{
    struct proto_request request = {.verb = VERB_BUFFER_REGISTER};
    struct fused_buffer *b = f->buffers;

    while (b && (b->is_joined || b->shm.fd < 0))
        b = b->next;
    f->joining = b;
    if (b) {
        b->is_joined = true;
        request.buffer_register.size_bytes = b->shm.size;
        if (join_send(f, &request, b->shm.fd) < 0)
            rejoin_drop(f);
        return;
    }
    f->state = LINK_UP;
    f->n_reconnects++;
    link_wake_at(f, 0);
}

void rejoin_answer(struct fused *f, uint32_t index)
{
    const struct proto_reply *reply = &f->reply;
    enum verb verb = f->calls.rows[index].verb; /* a refusal need not name it */

    if (verb == VERB_BUFFER_REGISTER && reply->error == 0 && !f->joining) {
        calls_orphan(&f->calls, index, reply->buffer.buffer); /* freed meanwhile */
    } else {
        if (verb == VERB_BUFFER_REGISTER && reply->error == 0)
            f->joining->handle = reply->buffer.buffer;
        calls_drop(&f->calls, index);
    }
    if (verb == VERB_HELLO && (reply->error != 0 || link_take_hello(f) < 0))
        rejoin_drop(f);
    else
        join_next(f);
}

/* ---- sending what was held ---- */

/* The datagram as the new server has to read it. Its deadline is after `now`. */
static int renew(struct fused *f, struct call *call, int64_t now)
{
    struct proto_request request;
    struct proto_infer *infer = &request.infer;
    size_t size = call->n_datagram + 32; /* numbers that became longer */
    const char *reason;
    uint8_t *bytes;
    uint64_t id;
    bool has_id;
    int n;

    n = codec_decode_request(f->codec, call->datagram, call->n_datagram, &request, &has_id, &id,
                             &reason);
    if (n < 0)
        return n;
    if (!infer->input.is_inline)
        infer->input.buffer = call->input ? call->input->handle : 0;
    if (call->in_buffer) {
        call->buffer = call->result.output.buffer ? call->result.output.buffer->handle : 0;
        infer->output.buffer = call->buffer;
    }
    if (infer->has_deadline)
        infer->deadline_us = (uint64_t)(call->deadline_ms - now) * 1000;
    bytes = malloc(size);
    if (!bytes)
        return -ENOMEM;
    n = codec_encode_request(&request, bytes, size);
    if (n < 0) {
        free(bytes);
        return n;
    }
    free(call->datagram);
    call->datagram = bytes;
    call->n_datagram = (uint32_t)n;
    return 0;
}

/* As much as goes out. What fails for want of room or memory is tried again. */
static void send_held(struct fused *f, int64_t now)
{
    for (uint32_t k = 0; k < f->calls.n && f->calls.n_held > 0; k++) {
        struct call *call = &f->calls.rows[k];

        if (call->state != CALL_HELD)
            continue;
        if (call->verb == VERB_INFER && renew(f, call, now) < 0)
            return;
        if (wire_send(f->socket, call->datagram, call->n_datagram, call->fd) < 0)
            return;
        call->result.code = 0;
        calls_resent(&f->calls, k);
    }
}

/* Ends what is held beyond its deadline. True when something was; the next one lowers *wake_ms. */
static bool expire(struct fused *f, int64_t now, int64_t *wake_ms)
{
    bool any = false;

    for (uint32_t k = 0; k < f->calls.n && f->calls.n_held > 0; k++) {
        struct call *call = &f->calls.rows[k];

        if (call->state != CALL_HELD || call->verb != VERB_INFER)
            continue;
        if (call->deadline_ms <= now) {
            link_finish(f, k, FUSED_DEADLINE, "the deadline passed while the server was away");
            any = true;
        } else if (call->deadline_ms < *wake_ms) {
            *wake_ms = call->deadline_ms;
        }
    }
    return any;
}

int rejoin_step(struct fused *f)
{
    int64_t now = link_now_ms(), wake_ms = LINK_FOREVER;
    bool any = expire(f, now, &wake_ms);

    if (f->state == LINK_UP && !f->is_leaving) {
        uint32_t n_before = f->calls.n_held;

        send_held(f, now);
        link_wake_at(f, f->calls.n_held > 0 ? now + PAUSE_MIN_MS : LINK_FOREVER);
        return any || f->calls.n_held < n_before; /* whose turn comes after these waits for it */
    }
    if (now >= f->until_ms)
        return give_up(f);
    if (f->state == LINK_DOWN && now >= f->retry_ms)
        try_connect(f);
    if (f->state == LINK_DOWN && f->retry_ms < wake_ms)
        wake_ms = f->retry_ms;
    link_wake_at(f, f->until_ms < wake_ms ? f->until_ms : wake_ms);
    return any;
}
