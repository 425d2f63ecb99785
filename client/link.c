/*
 * link.c - one connection of the client library: its socket, its requests in flight
 *
 * Every request has a row in the table of calls until its answer was taken; the row's index is the
 * low half of the request's id, so that an answer finds it at once and a foreign id finds nothing.
 * Answers come in any order: whoever waits takes in whatever arrives, results of inferences go to
 * the done queue, and the answer waited for ends the wait. Nobody waits for a dropped call (a
 * release, or a call that timed out); its answer is thrown away when it comes.
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
#include <sys/eventfd.h>
#include <time.h>

#include "proto/wire.h"

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

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int64_t link_deadline(int timeout_ms)
{
    return timeout_ms < 0 ? LINK_FOREVER : now_ms() + timeout_ms;
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

/* ---- the table of calls ---- */

static bool calls_grow(struct fused *f)
{
    uint32_t n = f->n_calls ? 2 * f->n_calls : 16;
    struct call *calls;

    if (n > LINK_CALLS_MAX)
        return false;
    calls = realloc(f->calls, n * sizeof *calls);
    if (!calls)
        return false;
    for (uint32_t k = f->n_calls; k < n; k++)
        calls[k] = (struct call){.next = k + 1 < n ? k + 1 : LINK_NONE};
    f->first_free = f->n_calls;
    f->calls = calls;
    f->n_calls = n;
    return true;
}

static void call_free(struct fused *f, uint32_t index)
{
    free(f->calls[index].bytes);
    f->calls[index] = (struct call){.next = f->first_free};
    f->first_free = index;
}

uint32_t link_find(const struct fused *f, uint64_t id)
{
    uint32_t index = (uint32_t)(id % LINK_CALLS_MAX);

    return index < f->n_calls && f->calls[index].state != CALL_FREE && f->calls[index].id == id
               ? index
               : LINK_NONE;
}

void link_signal(struct fused *f)
{
    eventfd_t v;

    if (f->event_fd < 0)
        return;
    if (f->first_done != LINK_NONE)
        eventfd_write(f->event_fd, 1);
    else
        eventfd_read(f->event_fd, &v);
}

static void done_push(struct fused *f, uint32_t index)
{
    struct call *call = &f->calls[index];

    call->state = CALL_DONE;
    call->next = LINK_NONE;
    call->previous = f->last_done;
    if (f->last_done != LINK_NONE)
        f->calls[f->last_done].next = index;
    else
        f->first_done = index;
    f->last_done = index;
    if (f->first_done == index)
        link_signal(f);
}

void link_take(struct fused *f, uint32_t index, struct fused_result *ret)
{
    struct call *call = &f->calls[index];

    if (call->previous != LINK_NONE)
        f->calls[call->previous].next = call->next;
    else
        f->first_done = call->next;
    if (call->next != LINK_NONE)
        f->calls[call->next].previous = call->previous;
    else
        f->last_done = call->previous;
    if (f->first_done == LINK_NONE)
        link_signal(f);
    f->kept = take_ptr(call->bytes);
    f->n_inferences--;
    *ret = call->result;
    if (ret->code != 0)
        link_fail(f, 0, "%s", ret->text);
    call_free(f, index);
}

int link_break(struct fused *f, int error, const char *text)
{
    if (f->broken)
        return f->broken;
    f->broken = error;
    link_fail(f, error, "%s", text);
    for (uint32_t k = 0; k < f->n_calls; k++) {
        struct call *call = &f->calls[k];

        if (call->state == CALL_DROPPED || call->state == CALL_ORPHAN ||
            (call->state == CALL_SENT && call->verb != VERB_INFER)) {
            call_free(f, k);
        } else if (call->state == CALL_SENT) {
            call->result.code = error;
            call->result.output = (struct fused_tensor){0};
            copy_text(call->result.text, sizeof call->result.text,
                      (struct proto_str){f->text, (uint32_t)strlen(f->text)});
            done_push(f, k);
        }
    }
    f->n_unanswered = f->unanswered_bytes = f->n_orphans = 0;
    return error;
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
    struct call *call = &f->calls[index];
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
    done_push(f, index);
    return NULL;
}

/* The reply in f->reply, with the descriptor that came along, to its call. NULL, or what the server
 * did wrong. */
static const char *dispatch(struct fused *f, int *fd)
{
    const struct proto_reply *reply = &f->reply;
    bool brings_fd = reply->verb == VERB_BUFFER_CREATE && !reply->error;
    uint32_t index = reply->has_id ? link_find(f, reply->id) : LINK_NONE;
    struct call *call;

    if (index == LINK_NONE)
        return "an answer to a request that was not made";
    call = &f->calls[index];
    if (call->state != CALL_SENT && call->state != CALL_DROPPED)
        return "two answers to one request";
    if (reply->verb != call->verb && !(reply->error && reply->verb == VERB_COUNT))
        return "an answer to another verb";
    if (brings_fd != (*fd >= 0))
        return brings_fd ? "a buffer without a descriptor" : "a descriptor that belongs to nothing";
    f->n_unanswered--;
    f->unanswered_bytes -= call->answer_bytes;
    if (call->verb == VERB_INFER)
        return finish_inference(f, index);
    if (call->state == CALL_DROPPED && brings_fd) {
        call->state = CALL_ORPHAN;
        call->buffer = reply->buffer.buffer;
        f->n_orphans++;
        return NULL;
    }
    if (call->state == CALL_SENT) {
        f->answered_id = reply->id;
        f->reply_fd = take_fd(fd);
    }
    call_free(f, index);
    return NULL;
}

int link_receive(struct fused *f)
{
    char text[PROTO_TEXT_MAX];
    _cleanup_close_ int fd = -1;
    const char *reason, *wrong;
    int n;

    if (f->broken)
        return f->broken;
    n = wire_recv(f->socket, f->rx, sizeof f->rx, &fd);
    if (n == -EAGAIN)
        return 0;
    if (n == 0)
        return link_break(f, -EPIPE, "the server closed the connection");
    if (n == -EMSGSIZE || n == -EPROTO)
        return link_break(f, -EPROTO, "the server sent a datagram that is too large");
    if (n < 0)
        return link_break(f, n, strerrordesc_np(-n));
    n = codec_decode_reply(f->codec, f->rx, (size_t)n, &f->reply, &reason);
    if (n == -ENOMEM)
        return link_break(f, n, strerrordesc_np(-n));
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

/* Waits until the socket is ready for one of the events. 0, -ETIMEDOUT or another errno. */
static int wait_ready(struct fused *f, short events, int64_t deadline)
{
    struct pollfd poller = {.fd = f->socket, .events = events};

    for (;;) {
        int64_t left = deadline == LINK_FOREVER ? -1 : deadline - now_ms();
        int r;

        if (deadline != LINK_FOREVER && left < 0)
            left = 0;
        r = poll(&poller, 1, left > INT32_MAX ? INT32_MAX : (int)left);
        if (r > 0)
            return 0;
        if (r < 0 && errno != EINTR)
            return link_fail_errno(f, -errno);
        if (r == 0 && left <= INT32_MAX)
            return link_fail(f, -ETIMEDOUT, "no answer in time");
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

/* A full socket may mean that the server waits for us to read. */
static int send_out(struct fused *f, size_t n, int fd, int64_t deadline)
{
    int r;

    for (;;) {
        r = wire_send(f->socket, f->tx, n, fd);
        if (r == 0)
            return 0;
        if (r == -EPIPE) {
            while (link_receive(f) > 0)
                ;
            return link_break(f, -EPIPE, "the server closed the connection");
        }
        if (r != -EAGAIN)
            return link_fail_errno(f, r);
        r = wait_ready(f, POLLIN | POLLOUT, deadline);
        while (r == 0 && (r = link_receive(f)) > 0)
            r = 0;
        if (r < 0)
            return r;
    }
}

/* The server closes a connection for which more answers wait than these limits. */
static bool has_room(const struct fused *f, const struct call *like)
{
    return f->n_unanswered < f->unread_max &&
           (f->n_unanswered == 0 ||
            f->unanswered_bytes + like->answer_bytes <= PROTO_UNREAD_BYTES_MAX);
}

static int post(struct fused *f, struct proto_request *request, int fd, int64_t deadline,
                const struct call *like, uint32_t *ret_index)
{
    uint32_t index;
    int n, r;

    while (!f->broken && !has_room(f, like)) {
        r = link_wait(f, deadline);
        if (r < 0)
            return r;
    }
    if (f->broken)
        return link_fail(f, f->broken, "the connection is closed");
    if (f->first_free == LINK_NONE && !calls_grow(f))
        return link_fail(f, f->n_calls < LINK_CALLS_MAX ? -ENOMEM : -ENOBUFS,
                         "too many requests in flight");
    index = f->first_free;
    f->first_free = f->calls[index].next;
    f->calls[index] = *like;
    f->calls[index].state = CALL_NEW;
    f->calls[index].verb = request->verb;
    f->calls[index].id = request->id = ++f->n_ids * LINK_CALLS_MAX + index;
    f->calls[index].result.id = request->id;
    n = codec_encode_request(request, f->tx, sizeof f->tx);
    r = n < 0 ? link_fail_errno(f, n) : send_out(f, (size_t)n, fd, deadline);
    if (r < 0) {
        call_free(f, index);
        return r;
    }
    f->calls[index].state = like->state;
    f->n_unanswered++;
    f->unanswered_bytes += like->answer_bytes;
    *ret_index = index;
    return 0;
}

void link_release(struct fused *f, uint32_t handle, int64_t deadline)
{
    struct proto_request request = {.verb = VERB_BUFFER_RELEASE, .buffer_release = {handle}};
    uint32_t index;

    post(f, &request, -1, deadline, &(struct call){.state = CALL_DROPPED}, &index);
}

int link_post(struct fused *f, struct proto_request *request, int fd, int64_t deadline,
              const struct call *like, uint32_t *ret_index)
{
    for (uint32_t k = 0; k < f->n_calls && f->n_orphans > 0; k++) {
        uint32_t handle = f->calls[k].buffer;

        if (f->calls[k].state != CALL_ORPHAN)
            continue;
        call_free(f, k);
        f->n_orphans--;
        link_release(f, handle, deadline);
    }
    return post(f, request, fd, deadline, like, ret_index);
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
        r = link_wait(f, deadline);
        if (r < 0) {
            if (!f->broken)
                f->calls[index].state = CALL_DROPPED;
            return r;
        }
    }
    return f->reply.error ? fail_reply(f) : 0;
}
