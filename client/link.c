/*
 * link.c - one connection of the client library: requests out, answers in
 *
 * Every request has a row in the table of calls (calls.h) until its answer was taken. Answers come
 * in any order: whoever waits takes in whatever arrives, results of inferences go to the done
 * queue, and the answer waited for ends the wait. Nobody waits for a dropped call (a release, or a
 * call that timed out); its answer is thrown away when it comes.
 *
 * The server closes a connection that leaves too many answers unread, so never more requests, nor
 * bytes of inline results, than that are unanswered: sending waits for an answer first. Each answer
 * is checked against what was asked; a server that breaks the protocol is not spoken to again, and
 * every request in flight ends with a result that says so. Nothing of the caller's is written
 * beyond the size that it declared.
 */
#include "link.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/timerfd.h>
#include <time.h>

#include "proto/scan.h"
#include "proto/wire.h"
#include "rejoin.h"

/* ---- small things ---- */

int link_fail(struct fused *f, int r, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    vsnprintf(f->text, sizeof f->text, format, ap);
    va_end(ap);
    return r;
}

int link_fail_errno(struct fused *f, int r)
{
    return link_fail(f, r, "%s", strerrordesc_np(-r));
}

/* Cut where a character ends. */
static void copy_text(char *to, size_t size, struct proto_str s)
{
    size_t n = 0, length;

    while (n < s.n && (length = proto_utf8_length(s.s + n, s.n - n)) > 0 && n + length < size) {
        memcpy(to + n, s.s + n, length);
        n += length;
    }
    to[n] = 0;
}

static int fail_reply(struct fused *f)
{
    copy_text(f->text, sizeof f->text, f->reply.text);
    return (int)f->reply.error;
}

int64_t link_now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int64_t link_deadline(int timeout_ms)
{
    return timeout_ms < 0 ? LINK_FOREVER : link_now_ms() + timeout_ms;
}

int link_enter(struct fused *f)
{
    if (!f)
        return -EINVAL;
    if (f->pid != getpid())
        return link_fail(f, -EPERM, "the connection belongs to the process that made it");
    free(take_ptr(f->kept));
    return 0;
}

/* ---- requests in flight ---- */

int link_new_call(struct fused *f, const struct call *like, uint32_t *ret_index)
{
    int r = calls_add(&f->calls, like, ret_index);

    return r < 0 ? link_fail(f, r, "too many requests in flight") : 0;
}

/* A time in the past makes the timer readable at once and until it is set again; none at all never.
 */
void link_signal(struct fused *f)
{
    struct itimerspec spec = {0};
    int64_t at = f->calls.first_done != CALLS_NONE ? 0 : f->wake_ms;

    if (f->timer_fd < 0)
        return;
    if (at != LINK_FOREVER) {
        spec.it_value.tv_sec = at / 1000;
        spec.it_value.tv_nsec = at % 1000 * 1000000 + 1;
    }
    timerfd_settime(f->timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
}

void link_wake_at(struct fused *f, int64_t ms)
{
    f->wake_ms = ms;
    link_signal(f);
}

static void done(struct fused *f, uint32_t index)
{
    calls_done(&f->calls, index);
    if (f->calls.first_done == index)
        link_signal(f);
}

void link_take(struct fused *f, uint32_t index, struct fused_result *ret)
{
    calls_take(&f->calls, index, ret, &f->kept);
    if (f->calls.first_done == CALLS_NONE)
        link_signal(f);
    if (ret->code != 0)
        link_fail(f, 0, "%s", ret->text);
}

void link_finish(struct fused *f, uint32_t index, int code, const char *text)
{
    struct call *call = &f->calls.rows[index];

    if (call->verb != VERB_INFER) {
        calls_drop(&f->calls, index);
        return;
    }
    call->result.code = code;
    call->result.output = (struct fused_tensor){0};
    copy_text(call->result.text, sizeof call->result.text,
              (struct proto_str){text, (uint32_t)strlen(text)});
    done(f, index);
}

int link_break(struct fused *f, int error, const char *text)
{
    if (f->broken)
        return f->broken;
    f->broken = error;
    link_fail(f, error, "%s", text);
    for (uint32_t k = 0; k < f->calls.n; k++) {
        enum call_state state = f->calls.rows[k].state;

        if (state == CALL_SENT || state == CALL_HELD)
            link_finish(f, k, error, f->text);
        else if (state == CALL_DROPPED || state == CALL_ORPHAN || state == CALL_JOIN)
            calls_drop(&f->calls, k);
    }
    link_wake_at(f, LINK_FOREVER);
    return error;
}

int link_take_hello(struct fused *f)
{
    const uint8_t *limit;
    struct scan_item item;
    size_t n, pos = 0;
    uint8_t *hello;

    hello = malloc(f->reply.document.n_bytes);
    if (!hello)
        return -ENOMEM;
    free(f->hello);
    f->hello = hello;
    f->n_hello = f->reply.document.n_bytes;
    memcpy(hello, f->reply.document.bytes, f->n_hello);
    f->unread_max = PROTO_UNREAD_MAX;
    if (scan_find(hello, f->n_hello, "limits.unread_replies", &limit, &n) == 0 &&
        scan_item(limit, n, &pos, &item) == 0 && item.type == SCAN_UINT && item.u > 0 &&
        item.u < CALLS_MAX)
        f->unread_max = (uint32_t)item.u;
    return 0;
}

/* ---- answers ---- */

static bool same_shape(const struct fused_tensor *a, const struct proto_tensor *b)
{
    if ((int)a->dtype != (int)b->dtype || a->rank != b->rank)
        return false;
    return memcmp(a->shape, b->shape, b->rank * sizeof b->shape[0]) == 0;
}

/* Checks where the result is against where it was to go, and puts inline bytes there. NULL, or what
 * the server did wrong. */
static const char *place_output(struct call *call, const struct proto_tensor *from)
{
    struct fused_result *result = &call->result;
    struct fused_tensor *to = &result->output;
    bool fits;
    uint64_t bytes;

    if (proto_tensor_size(from->dtype, from->rank, from->shape, &bytes) < 0)
        return "a result of an impossible shape";
    fits = bytes <= call->room_bytes && (call->is_compact || same_shape(to, from));
    if (call->in_buffer) {
        if (from->is_inline || from->buffer != call->buffer || from->offset != to->offset || !fits)
            return "a result that is not where it was to go";
    } else {
        if (!from->is_inline || from->n_bytes != bytes)
            return "a result without its bytes";
        if (to->data && !fits) {
            result->code = -EINVAL;
            snprintf(result->text, sizeof result->text,
                     "the result is no such tensor as `output` declares: it has %llu bytes",
                     (unsigned long long)bytes);
            *to = (struct fused_tensor){0};
            return NULL;
        }
        if (!to->data) {
            call->bytes = malloc(bytes ? bytes : 1);
            if (!call->bytes) {
                result->code = -ENOMEM;
                snprintf(result->text, sizeof result->text, "no memory for the result");
                return NULL;
            }
            to->data = call->bytes;
        }
        if (bytes > 0)
            memcpy(to->data, from->bytes, bytes);
    }
    to->dtype = (enum fused_dtype)from->dtype;
    to->rank = from->rank;
    memcpy(to->shape, from->shape, sizeof to->shape);
    return NULL;
}

static const char *finish_inference(struct fused *f, uint32_t index)
{
    const struct proto_infer_reply *infer = &f->reply.infer;
    struct call *call = &f->calls.rows[index];
    struct fused_result *result = &call->result;
    const char *wrong = NULL;

    if (f->reply.error) {
        result->code = (int)f->reply.error;
        copy_text(result->text, sizeof result->text, f->reply.text);
        result->output = (struct fused_tensor){0};
    } else {
        wrong = place_output(call, &infer->output);
        if (wrong)
            return wrong;
        result->offset = infer->offset;
        result->queue_us = infer->queue_us;
        result->run_us = infer->run_us;
        result->batch_rows = infer->batch_rows;
        result->late = infer->late;
        result->has_constant = infer->has_constant;
        result->constant = infer->constant;
        result->n_full = infer->n_full;
    }
    done(f, index);
    return NULL;
}

/* The reply in f->reply, with the descriptor that came along, to its call. NULL, or what the server
 * did wrong. */
static const char *dispatch(struct fused *f, int *fd)
{
    const struct proto_reply *reply = &f->reply;
    bool brings_fd = reply->verb == VERB_BUFFER_CREATE && !reply->error;
    uint32_t index = reply->has_id ? calls_find(&f->calls, reply->id) : CALLS_NONE;
    struct call *call;

    if (index == CALLS_NONE)
        return "an answer to a request that was not made";
    call = &f->calls.rows[index];
    if (call->state != CALL_SENT && call->state != CALL_DROPPED && call->state != CALL_JOIN)
        return "two answers to one request";
    if (reply->verb != call->verb && !(reply->error && reply->verb == VERB_COUNT))
        return "an answer to another verb";
    if (brings_fd != (*fd >= 0))
        return brings_fd ? "a buffer without a descriptor" : "a descriptor that belongs to nothing";
    if (call->state == CALL_JOIN) {
        rejoin_answer(f, index);
        return NULL;
    }
    if (f->reconnect_ms != 0 && rejoin_hold(f, index))
        return NULL;
    if (call->verb == VERB_INFER)
        return finish_inference(f, index);
    if (call->state == CALL_DROPPED && !reply->error &&
        (reply->verb == VERB_BUFFER_CREATE || reply->verb == VERB_BUFFER_REGISTER)) {
        calls_orphan(&f->calls, index, reply->buffer.buffer);
        return NULL;
    }
    if (call->state == CALL_SENT) {
        f->answered_id = reply->id;
        f->reply_fd = take_fd(fd);
    }
    calls_drop(&f->calls, index);
    return NULL;
}

/* The connection ended, which need not be the end. */
static int lose(struct fused *f, int error, const char *text)
{
    if (f->state == LINK_UP && f->reconnect_ms == 0)
        return link_break(f, error, text);
    if (f->state == LINK_JOINING) {
        rejoin_drop(f);
        return 0;
    }
    rejoin_begin(f);
    return link_fail(f, 1, "%s", text);
}

/* The server closes a connection for which more answers wait than these limits. */
static bool has_room(const struct fused *f, const struct call *like)
{
    return f->calls.n_unanswered < f->unread_max &&
           (f->calls.n_unanswered == 0 ||
            f->calls.unanswered_bytes + like->answer_bytes <= PROTO_UNREAD_BYTES_MAX);
}

/* Gives back what is there for nobody, as far as that goes without waiting. Not by way of f->tx: a
 * request may be on its way out of it. */
static void return_orphans(struct fused *f)
{
    for (uint32_t k = 0; k < f->calls.n && f->calls.n_orphans > 0 && f->state == LINK_UP; k++) {
        struct proto_request request = {.verb = VERB_BUFFER_RELEASE};
        struct call *call = &f->calls.rows[k];
        uint8_t bytes[64];
        int n;

        if (call->state != CALL_ORPHAN)
            continue;
        request.id = calls_new_id(&f->calls, k);
        request.buffer_release.buffer = call->buffer;
        n = codec_encode_request(&request, bytes, sizeof bytes);
        if (n < 0 || !has_room(f, call) || wire_send(f->socket, bytes, (size_t)n, -1) < 0)
            return;
        calls_returned(&f->calls, k);
    }
}

int link_receive(struct fused *f)
{
    char text[PROTO_TEXT_MAX];
    _cleanup_close_ int fd = -1;
    const char *reason, *wrong;
    int n;

    if (f->broken)
        return f->broken;
    n = f->wake_ms != LINK_FOREVER ? rejoin_step(f) : 0;
    return_orphans(f);
    if (n != 0 || f->state == LINK_DOWN)
        return n;
    n = wire_recv(f->socket, f->rx, sizeof f->rx, &fd);
    if (n == -EAGAIN)
        return 0;
    if (n == 0 || n == -ECONNRESET)
        return lose(f, -EPIPE, "the server closed the connection");
    if (n == -EMSGSIZE || n == -EPROTO)
        return link_break(f, -EPROTO, "the server sent a datagram that is too large");
    if (n < 0)
        return link_break(f, n, strerrordesc_np(-n));
    if (fd < -1)
        return link_break(f, fd, strerrordesc_np(-fd));
    n = codec_decode_reply(f->codec, f->rx, (size_t)n, &f->reply, &reason);
    if (n == -ENOMEM)
        return link_break(f, n, strerrordesc_np(-n));
    if (n == 0 && !f->reply.has_id && f->state == LINK_JOINING) {
        rejoin_drop(f); /* not let in, for now */
        return 0;
    }
    if (n == 0 && !f->reply.has_id) {
        copy_text(text, sizeof text, f->reply.text);
        return link_break(f, -EPROTO, text);
    }
    wrong = n < 0 ? reason : dispatch(f, &fd);
    if (!wrong)
        return f->broken ? f->broken : 1;
    snprintf(text, sizeof text, "the server broke the protocol: %s", wrong);
    return link_break(f, -EPROTO, text);
}

/* Waits until the socket is ready for one of the events, or a step is due. 0, -ETIMEDOUT or another
 * errno. */
static int wait_ready(struct fused *f, short events, int64_t deadline)
{
    struct pollfd poller = {.fd = f->socket, .events = events};

    for (;;) {
        int64_t until = deadline < f->wake_ms ? deadline : f->wake_ms, now;
        int64_t left = until == LINK_FOREVER ? -1 : until - link_now_ms();
        int r;

        if (until != LINK_FOREVER && left < 0)
            left = 0;
        r = poll(&poller, 1, left > INT32_MAX ? INT32_MAX : (int)left);
        if (r > 0)
            return 0;
        if (r < 0 && errno != EINTR)
            return link_fail_errno(f, -errno);
        if (r < 0)
            continue;
        now = link_now_ms();
        if (deadline <= now)
            return link_fail(f, -ETIMEDOUT, "no answer in time");
        if (f->wake_ms <= now)
            return 0;
    }
}

int link_wait(struct fused *f, int64_t deadline)
{
    int r;

    do {
        r = f->broken ? f->broken : wait_ready(f, POLLIN, deadline);
        if (r == 0)
            r = link_receive(f);
    } while (r == 0);
    return r > 0 ? 0 : r;
}

/* ---- requests ---- */

/* A full socket may mean that the server waits for us to read. -ECONNRESET: the connection that it
 * was for is gone, and another one begins. */
static int send_out(struct fused *f, size_t n, int fd, int64_t deadline)
{
    unsigned n_losses = f->n_losses;
    int r;

    for (;;) {
        r = wire_send(f->socket, f->tx, n, fd);
        if (r == 0)
            return 0;
        if (r == -EPIPE) {
            while (f->n_losses == n_losses && link_receive(f) > 0)
                ;
            /* While the other side is being closed, the end may not be there to be read yet. */
            if (f->n_losses == n_losses && !f->broken)
                lose(f, -EPIPE, "the server closed the connection");
            return f->n_losses == n_losses ? f->broken : -ECONNRESET;
        }
        if (r != -EAGAIN)
            return link_fail_errno(f, r);
        r = wait_ready(f, POLLIN | POLLOUT, deadline);
        while (r == 0 && f->n_losses == n_losses && (r = link_receive(f)) > 0)
            r = 0;
        if (f->n_losses != n_losses)
            return -ECONNRESET;
        if (r < 0)
            return r;
    }
}

/* What may be asked of another server if this one goes away: nothing that changes a server. */
static bool may_repeat(enum verb verb)
{
    switch (verb) {
    case VERB_PING:
    case VERB_INFER:
    case VERB_BUFFER_CREATE:
    case VERB_BUFFER_REGISTER:
    case VERB_MODEL_LIST:
    case VERB_MODEL_DESCRIBE:
    case VERB_STATUS:
    case VERB_STATS:
        return true;
    default:
        return false;
    }
}

/* Waits until there is room for the answer, and, for what is not held, until the server is there.
 */
static int wait_turn(struct fused *f, enum verb verb, int64_t deadline, const struct call *like)
{
    int r;

    while (!f->broken && (!has_room(f, like) ||
                          (verb != VERB_INFER &&
                           (f->state != LINK_UP || (f->calls.n_held > 0 && !f->is_leaving))))) {
        if (like->state == CALL_DROPPED && f->state != LINK_UP)
            return -EPIPE; /* of the old server, which has forgotten it */
        r = link_wait(f, deadline);
        if (r < 0)
            return r;
    }
    return f->broken ? link_fail(f, f->broken, "the connection is closed") : 0;
}

static int post_row(struct fused *f, uint32_t index, size_t n, int fd, int64_t deadline,
                    enum call_state state)
{
    struct call *call = &f->calls.rows[index];
    int r = -ECONNRESET;

    if (f->reconnect_ms != 0 && state == CALL_SENT && may_repeat(call->verb)) {
        call->datagram = malloc(n);
        if (!call->datagram)
            return link_fail_errno(f, -ENOMEM);
        memcpy(call->datagram, f->tx, n);
        call->n_datagram = (uint32_t)n;
        call->fd = fd;
    }
    if (!call->datagram || f->wake_ms == LINK_FOREVER || call->verb != VERB_INFER)
        r = send_out(f, n, fd, deadline);
    call = &f->calls.rows[index];
    if (r == -ECONNRESET && call->datagram) {
        calls_hold(&f->calls, index);
        link_wake_at(f, 0);
        return 0;
    }
    if (r == -ECONNRESET)
        return link_fail(f, -EPIPE, "the server closed the connection");
    if (r == 0)
        calls_sent(&f->calls, index, state);
    return r;
}

int link_post(struct fused *f, struct proto_request *request, int fd, int64_t deadline,
              const struct call *like, uint32_t *ret_index)
{
    uint32_t index = 0;
    int r;

    return_orphans(f);
    r = wait_turn(f, request->verb, deadline, like);
    if (r == 0)
        r = link_new_call(f, like, &index);
    if (r < 0)
        return r;
    f->calls.rows[index].verb = request->verb;
    request->id = f->calls.rows[index].id;
    r = codec_encode_request(request, f->tx, sizeof f->tx);
    if (r < 0)
        link_fail_errno(f, r);
    else
        r = post_row(f, index, (size_t)r, fd, deadline, like->state);
    if (r < 0) {
        calls_drop(&f->calls, index);
        return r;
    }
    *ret_index = index;
    return 0;
}

void link_release(struct fused *f, uint32_t handle)
{
    uint32_t index = CALLS_NONE;

    if (f->broken || link_new_call(f, &(struct call){.fd = -1}, &index) < 0)
        return;
    calls_orphan(&f->calls, index, handle);
    return_orphans(f);
}

/* Nobody waits for that answer any more. */
static void give_up(struct fused *f, uint64_t id)
{
    uint32_t index = calls_find(&f->calls, id);

    if (index != CALLS_NONE)
        calls_forget(&f->calls, index);
}

int link_transact(struct fused *f, struct proto_request *request, int fd, int64_t deadline)
{
    uint32_t index = 0;
    int r;

    r = link_post(f, request, fd, deadline, &(struct call){.state = CALL_SENT}, &index);
    if (r < 0)
        return r;
    f->answered_id = 0;
    while (f->answered_id != request->id) {
        if (!f->broken && calls_find(&f->calls, request->id) == CALLS_NONE)
            return link_fail(f, -EPIPE, "the server went away before it answered");
        r = link_wait(f, deadline);
        if (r < 0) {
            give_up(f, request->id);
            return r;
        }
    }
    return f->reply.error ? fail_reply(f) : 0;
}
