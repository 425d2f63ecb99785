/*
 * fused.c - the public calls of the client library
 *
 * What a caller hands in is checked here, before anything is sent: names, shapes, whether a tensor
 * fits its buffer. How requests and answers travel is link.c's.
 */
#include "fused.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/timerfd.h>

#include "device.h"
#include "link.h"
#include "proto/scan.h"
#include "proto/wire.h"

#define HELLO_TIMEOUT_MS 5000
#define ANSWER_BYTES     1024u /* an answer to infer without its inline bytes is shorter */

#define X(number, NAME, text) _Static_assert((int)FUSED_##NAME == (int)ERR_##NAME, "codes differ");
PROTO_ERRORS(X)
#undef X
_Static_assert(FUSED_RANK_MAX == PROTO_RANK_MAX, "ranks differ");
_Static_assert(FUSED_INLINE_MAX == PROTO_INLINE_MAX, "inline limits differ");

/* ---- connection ---- */

/* Why this thread's last connect failed: there is no connection to keep it. */
static _Thread_local char connect_text[PROTO_TEXT_MAX + 400];

static int transact_in_time(struct fused *f, struct proto_request *request, int fd)
{
    return link_transact(f, request, fd, link_deadline(f->timeout_ms));
}

/* Of a call that fills *ret in. */
static int enter_for(struct fused *f, const void *ret)
{
    int r = link_enter(f);

    return r == 0 && !ret ? link_fail(f, -EINVAL, "no place for what the call returns") : r;
}

const char *fused_version(void)
{
    return FUSED_VERSION;
}

const char *fused_code_name(int code)
{
    const char *name = NULL;

    if (code == 0)
        name = "OK";
    else if (code > 0)
        name = proto_error_name((enum proto_error)code);
    else if (code > -4096) /* the kernel's errnos end there */
        name = strerrorname_np(-code);
    return name ? name : "UNKNOWN";
}

size_t fused_dtype_size(enum fused_dtype dtype)
{
    return proto_dtype_size((enum proto_dtype)dtype);
}

static int say_hello(struct fused *f, int64_t deadline)
{
    struct proto_request request = {
        .verb = VERB_HELLO, .hello = {PROTO_VERSION_MAX, {f->name, (uint32_t)strlen(f->name)}}};
    int r;

    r = link_transact(f, &request, -1, deadline);
    if (r == -EPROTO && f->reply.error && !f->reply.has_id)
        return (int)f->reply.error; /* not let in: said without waiting for a message */
    return r != 0 ? r : link_take_hello(f);
}

/* The server's reason as it is; ours, `text` or the errno's own, behind the path. Returns r. */
static int connect_fail(const char *path, int r, const char *text)
{
    if (r > 0)
        snprintf(connect_text, sizeof connect_text, "%s", text);
    else
        snprintf(connect_text, sizeof connect_text, "%.255s: %s", path,
                 text[0] ? text : strerrordesc_np(-r));
    return r;
}

int fused_connect(const char *socket, const char *name, struct fused **ret)
{
    int64_t deadline = link_deadline(HELLO_TIMEOUT_MS);
    struct fused *f;
    int r, flags;

    if (!socket)
        socket = secure_getenv("FUSED_SOCKET");
    if (!socket)
        socket = PROTO_SOCKET_DEFAULT;
    if (!name || !ret || !proto_name_valid(name, strlen(name)))
        return connect_fail(socket, -EINVAL, "the client's name is no name of 1 to 64 bytes");
    f = calloc(1, sizeof *f);
    if (!f)
        return connect_fail(socket, -ENOMEM, "");
    f->pid = getpid();
    f->timeout_ms = f->socket = f->reply_fd = f->loop_fd = f->timer_fd = -1;
    calls_init(&f->calls);
    f->wake_ms = LINK_FOREVER;
    f->unread_max = PROTO_UNREAD_MAX;
    snprintf(f->path, sizeof f->path, "%s", socket);
    snprintf(f->name, sizeof f->name, "%s", name);
    f->codec = codec_new();
    r = f->codec ? 0 : -ENOMEM;
    if (r == 0)
        r = f->socket = wire_connect(socket);
    if (r >= 0) {
        flags = fcntl(f->socket, F_GETFL);
        r = flags < 0 || fcntl(f->socket, F_SETFL, flags | O_NONBLOCK) < 0 ? -errno : 0;
    }
    if (r == 0)
        r = say_hello(f, deadline);
    if (r != 0) {
        connect_fail(socket, r, f->text);
        fused_close(f);
        return r;
    }
    *ret = f;
    return 0;
}

/* The server takes its pages back when the connection ends: whoever still has the buffer keeps what
 * is in it as memory of its own, at the same address. Without memory for that it reads as zeros. */
static void keep_contents(const struct fused_buffer *buffer)
{
    size_t size = buffer->shm.size;
    void *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (copy == MAP_FAILED)
        return;
    memcpy(copy, buffer->shm.data, size);
    if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, buffer->shm.data) == MAP_FAILED)
        munmap(copy, size);
}

void fused_close(struct fused *f)
{
    if (!f)
        return;
    for (const struct fused_buffer *b = f->buffers; b && f->pid == getpid(); b = b->next) {
        if (b->created)
            keep_contents(b);
    }
    close_fd(f->socket);
    close_fd(f->loop_fd);
    close_fd(f->timer_fd);
    for (struct fused_buffer *b = f->buffers; b; b = b->next)
        b->f = NULL;
    calls_deinit(&f->calls);
    free(f->kept);
    free(f->hello);
    codec_free(f->codec);
    free(f);
}

const char *fused_error_text(const struct fused *f)
{
    return f ? f->text : connect_text;
}

void fused_set_timeout(struct fused *f, int timeout_ms)
{
    if (f)
        f->timeout_ms = timeout_ms < 0 ? -1 : timeout_ms;
}

void fused_set_reconnect(struct fused *f, int limit_ms)
{
    if (!f)
        return;
    f->reconnect_ms = limit_ms < 0 ? -1 : limit_ms;
    if (limit_ms == 0 && f->wake_ms != LINK_FOREVER && f->pid == getpid())
        link_break(f, -EPIPE, "the server went away, and is not to be waited for");
}

unsigned fused_reconnects(const struct fused *f)
{
    return f ? f->n_reconnects : 0;
}

int fused_fd(const struct fused *connection)
{
    struct fused *f = (struct fused *)connection; /* what is made here is no visible state */
    struct epoll_event event = {.events = EPOLLIN};
    _cleanup_close_ int loop_fd = -1, timer_fd = -1;

    if (!f)
        return -EINVAL;
    if (f->pid != getpid())
        return -EPERM;
    if (f->loop_fd >= 0)
        return f->loop_fd;
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    loop_fd = epoll_create1(EPOLL_CLOEXEC);
    if (timer_fd < 0 || loop_fd < 0 || epoll_ctl(loop_fd, EPOLL_CTL_ADD, timer_fd, &event) < 0 ||
        (f->socket >= 0 && epoll_ctl(loop_fd, EPOLL_CTL_ADD, f->socket, &event) < 0))
        return link_fail_errno(f, -errno);
    f->timer_fd = take_fd(&timer_fd);
    f->loop_fd = take_fd(&loop_fd);
    link_signal(f);
    return f->loop_fd;
}

unsigned fused_in_flight(const struct fused *f)
{
    return f && f->pid == getpid() ? f->calls.n_inferences : 0;
}

/* ---- buffers ---- */

/* Makes the record of the buffer in f->reply. The region is consumed, also on failure. */
static int buffer_new(struct fused *f, struct shm *shm, struct fused_buffer **ret)
{
    struct fused_buffer *b = calloc(1, sizeof *b);

    if (f->reconnect_ms == 0)
        shm->fd = close_fd(shm->fd); /* the mapping is enough */
    if (!b) {
        shm_deinit(shm);
        link_release(f, f->reply.buffer.buffer);
        return link_fail_errno(f, -ENOMEM);
    }
    b->f = f;
    b->handle = f->reply.buffer.buffer;
    b->shm = *shm;
    b->next = f->buffers;
    b->link = &f->buffers;
    if (b->next)
        b->next->link = &b->next;
    f->buffers = b;
    *ret = b;
    return 0;
}

/* The region is consumed, also on failure. */
static int register_shm(struct fused *f, struct shm *shm, struct fused_buffer **ret)
{
    struct proto_request request = {.verb = VERB_BUFFER_REGISTER,
                                    .buffer_register = {shm->size, BUFFER_HOST}};
    int r;

    r = transact_in_time(f, &request, shm->fd);
    if (r == 0 && f->reply.buffer.size_bytes != shm->size)
        r = link_break(f, -EPROTO, "the server broke the protocol: a buffer of another size");
    if (r == 0)
        return buffer_new(f, shm, ret);
    shm_deinit(shm);
    return r;
}

/* Pages that the server made may be taken back when a connection ends: where it is to come back,
 * they are ours. */
static int create_own(struct fused *f, size_t size, struct fused_buffer **ret)
{
    struct shm shm = SHM_INIT;
    int r;

    r = shm_create(size, &shm);
    return r < 0 ? link_fail_errno(f, r) : register_shm(f, &shm, ret);
}

int fused_buffer_create(struct fused *f, size_t size, struct fused_buffer **ret)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                    .buffer_create = {size, BUFFER_HOST}};
    _cleanup_close_ int fd = -1;
    struct shm shm = SHM_INIT;
    int r;

    r = enter_for(f, ret);
    if (r < 0)
        return r;
    if (f->reconnect_ms != 0)
        return create_own(f, size, ret);
    r = transact_in_time(f, &request, -1);
    if (r != 0)
        return r;
    fd = take_fd(&f->reply_fd);
    r = f->reply.buffer.size_bytes == size ? shm_open_sealed(fd, size, &shm) : -EINVAL;
    if (r == -EINVAL)
        return link_break(f, -EPROTO,
                          "the server broke the protocol: a buffer of another size or not sealed");
    if (r < 0) {
        link_release(f, f->reply.buffer.buffer);
        return link_fail_errno(f, r);
    }
    take_fd(&fd);
    r = buffer_new(f, &shm, ret);
    if (r == 0)
        (*ret)->created = true;
    return r;
}

int fused_buffer_register(struct fused *f, int memfd, size_t size, struct fused_buffer **ret)
{
    const char *reason = NULL;
    struct shm shm = SHM_INIT;
    int r;

    r = enter_for(f, ret);
    if (r < 0)
        return r;
    r = shm_adopt(memfd, size, &shm, &reason);
    if (r < 0)
        return r == -EINVAL ? link_fail(f, r, "%s", reason) : link_fail_errno(f, r);
    return register_shm(f, &shm, ret);
}

/* The uuid of one of the server's devices, as hello told it. */
static void device_uuid(const struct fused *f, unsigned device, char *to, size_t size)
{
    char path[40];
    struct scan_item item;
    const uint8_t *found;
    size_t n, pos = 0;

    to[0] = '\0';
    snprintf(path, sizeof path, "devices.%u.uuid", device);
    if (scan_find(f->hello, f->n_hello, path, &found, &n) == 0 &&
        scan_item(found, n, &pos, &item) == 0 && item.type == SCAN_STR)
        snprintf(to, size, "%.*s", (int)item.raw.n, (const char *)item.raw.bytes);
}

int fused_buffer_create_device(struct fused *f, size_t size, struct fused_buffer **ret)
{
    return fused_buffer_create_on(f, 0, size, ret);
}

int fused_buffer_create_on(struct fused *f, unsigned device, size_t size, struct fused_buffer **ret)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                    .buffer_create = {size, BUFFER_CUDA, device}};
    struct shm none = {.fd = -1, .size = size};
    _cleanup_close_ int fd = -1;
    struct device_map *map = NULL;
    const char *reason;
    char uuid[48];
    int r;

    r = enter_for(f, ret);
    if (r < 0)
        return r;
    r = transact_in_time(f, &request, -1);
    if (r != 0)
        return r;
    fd = take_fd(&f->reply_fd);
    if (f->reply.buffer.size_bytes != size || fd < 0)
        return link_break(f, -EPROTO, "the server broke the protocol: not the buffer asked for");
    device_uuid(f, device, uuid, sizeof uuid);
    r = device_map(fd, size, uuid, &map, &reason);
    if (r < 0) {
        link_release(f, f->reply.buffer.buffer);
        return link_fail(f, r, "%s", reason);
    }
    r = buffer_new(f, &none, ret);
    if (r < 0)
        device_unmap(map);
    else
        (*ret)->device = map;
    return r;
}

uint64_t fused_buffer_device(const struct fused_buffer *buffer)
{
    return buffer && buffer->device ? device_address(buffer->device) : 0;
}

void *fused_buffer_data(const struct fused_buffer *buffer)
{
    return buffer ? buffer->shm.data : NULL;
}

size_t fused_buffer_size(const struct fused_buffer *buffer)
{
    return buffer ? buffer->shm.size : 0;
}

void fused_buffer_free(struct fused_buffer *buffer)
{
    struct fused *f = buffer ? buffer->f : NULL;

    if (f) {
        *buffer->link = buffer->next;
        if (buffer->next)
            buffer->next->link = buffer->link;
        /* Results that come later must not point at it. */
        for (uint32_t k = 0; k < f->calls.n; k++) {
            if (f->calls.rows[k].result.output.buffer == buffer)
                f->calls.rows[k].result.output.buffer = NULL;
            if (f->calls.rows[k].input == buffer)
                f->calls.rows[k].input = NULL;
        }
        if (f->joining == buffer)
            f->joining = NULL;
        if (link_enter(f) == 0 && !f->broken && buffer->handle != 0)
            link_release(f, buffer->handle);
    }
    if (buffer) {
        device_unmap(buffer->device);
        shm_deinit(&buffer->shm);
    }
    free(buffer);
}

/* ---- inference ---- */

static struct fused_tensor tensor_of(enum fused_dtype dtype, int rank, const int64_t *shape)
{
    struct fused_tensor tensor = {.dtype = dtype, .rank = rank};

    for (int k = 0; k < rank && k < FUSED_RANK_MAX; k++)
        tensor.shape[k] = shape[k];
    return tensor;
}

struct fused_tensor fused_tensor_in(struct fused_buffer *buffer, size_t offset,
                                    enum fused_dtype dtype, int rank, const int64_t *shape)
{
    struct fused_tensor tensor = tensor_of(dtype, rank, shape);

    tensor.buffer = buffer;
    tensor.offset = offset;
    return tensor;
}

struct fused_tensor fused_tensor_at(void *data, enum fused_dtype dtype, int rank,
                                    const int64_t *shape)
{
    struct fused_tensor tensor = tensor_of(dtype, rank, shape);

    tensor.data = data;
    return tensor;
}

/* Checks a tensor of the caller's and writes it as it travels. */
static int convert_tensor(struct fused *f, const char *what, const struct fused_tensor *from,
                          struct proto_tensor *to, uint64_t *ret_bytes)
{
    uint64_t bytes;
    int r;

    if (from->rank < 0 || from->rank > FUSED_RANK_MAX || fused_dtype_size(from->dtype) == 0)
        return link_fail(f, -EINVAL, "%s: unknown dtype, or a rank that is not 0 to 8", what);
    r = proto_tensor_size((enum proto_dtype)from->dtype, (unsigned)from->rank, from->shape, &bytes);
    if (r < 0)
        return link_fail(f, -EINVAL, "%s: a size is negative, or their product is too large", what);
    *to =
        (struct proto_tensor){.dtype = (enum proto_dtype)from->dtype, .rank = (uint8_t)from->rank};
    memcpy(to->shape, from->shape, sizeof to->shape);
    if (from->buffer) {
        if (from->buffer->f != f)
            return link_fail(f, -EINVAL, "%s: the buffer is of another connection", what);
        if (from->offset > from->buffer->shm.size || bytes > from->buffer->shm.size - from->offset)
            return link_fail(f, -EINVAL, "%s: %llu bytes at %zu do not fit the buffer's %zu", what,
                             (unsigned long long)bytes, from->offset, from->buffer->shm.size);
        to->buffer = from->buffer->handle;
        to->offset = from->offset;
    } else {
        if (!from->data)
            return link_fail(f, -EINVAL, "%s: neither a buffer nor data", what);
        if (bytes > FUSED_INLINE_MAX)
            return link_fail(f, -EINVAL, "%s: %llu bytes do not fit a message (%d): use a buffer",
                             what, (unsigned long long)bytes, FUSED_INLINE_MAX);
        to->is_inline = true;
        to->bytes = from->data;
        to->n_bytes = (uint32_t)bytes;
    }
    *ret_bytes = bytes;
    return 0;
}

static int64_t deadline_of(uint64_t us)
{
    return link_now_ms() + (int64_t)(us / 1000 < INT32_MAX ? us / 1000 : INT32_MAX) + 1;
}

static int submit(struct fused *f, const struct fused_infer *call, int64_t deadline,
                  uint32_t *ret_index)
{
    struct proto_request request = {.verb = VERB_INFER};
    struct proto_infer *infer = &request.infer;
    struct call like = {.state = CALL_SENT, .room_bytes = UINT64_MAX, .fd = -1};
    uint64_t bytes;
    int r;

    if (!call || !call->model || !proto_name_valid(call->model, strlen(call->model)))
        return link_fail(f, -EINVAL, "model: no name");
    if (call->priority < 0 || call->priority > (int)PROTO_PRIORITY_MAX)
        return link_fail(f, -EINVAL, "priority: not 0 to 3");
    infer->model = (struct proto_str){call->model, (uint32_t)strlen(call->model)};
    r = convert_tensor(f, "input", &call->input, &infer->input, &bytes);
    if (r < 0)
        return r;
    if (call->output.dtype) {
        r = convert_tensor(f, "output", &call->output, &infer->output, &like.room_bytes);
        if (r < 0)
            return r;
        infer->has_output = like.in_buffer = !infer->output.is_inline;
        like.buffer = infer->output.buffer;
        like.result.output = call->output;
    }
    infer->has_deadline = call->deadline_us != 0;
    infer->deadline_us = call->deadline_us;
    infer->priority = (uint8_t)call->priority;
    infer->train = call->train;
    infer->seed = call->seed;
    infer->offset = call->offset;
    infer->result = call->compact ? RESULT_COMPACT : RESULT_FULL;
    like.is_compact = call->compact;
    like.answer_bytes = ANSWER_BYTES;
    if (!like.in_buffer)
        like.answer_bytes +=
            like.room_bytes > FUSED_INLINE_MAX ? FUSED_INLINE_MAX : (uint32_t)like.room_bytes;
    like.result.user = call->user;
    like.input = call->input.buffer;
    like.deadline_ms = LINK_FOREVER;
    if (call->deadline_us != 0 && f->reconnect_ms != 0)
        like.deadline_ms = deadline_of(call->deadline_us);
    /* Many answers may be waiting; reading them early keeps the server's queue short. */
    while (f->calls.n_unanswered >= f->unread_max / 2 && link_receive(f) > 0)
        ;
    r = link_post(f, &request, -1, deadline, &like, ret_index);
    if (r == 0)
        f->calls.n_inferences++;
    return r;
}

int fused_submit(struct fused *f, const struct fused_infer *call, uint64_t *ret_id)
{
    uint32_t index;
    int r;

    r = link_enter(f);
    if (r < 0)
        return r;
    r = submit(f, call, link_deadline(f->timeout_ms), &index);
    if (r == 0 && ret_id)
        *ret_id = f->calls.rows[index].id;
    return r;
}

/* Waits until that request has ended. 0, -ETIMEDOUT, or another errno with the request still in
 * flight. */
static int wait_done(struct fused *f, uint32_t index, int64_t deadline)
{
    int r = 0;

    while (f->calls.rows[index].state != CALL_DONE && r == 0) {
        r = link_wait(f, deadline);
        if (f->calls.rows[index].state == CALL_DONE)
            r = 0; /* a broken connection ends every request, too */
    }
    return r;
}

int fused_run(struct fused *f, const struct fused_infer *call, struct fused_result *ret)
{
    struct proto_request cancel = {.verb = VERB_CANCEL};
    struct fused_result result;
    uint32_t index = 0, ignored;
    int64_t deadline;
    int r;

    r = link_enter(f);
    if (r < 0)
        return r;
    deadline = link_deadline(f->timeout_ms);
    r = submit(f, call, deadline, &index);
    if (r < 0)
        return r;
    r = wait_done(f, index, deadline);
    if (r < 0) {
        /* Stays in flight; the caller's own memory is not written any more. */
        f->calls.rows[index].result.output.data = NULL;
        result = f->calls.rows[index].result;
        result.code = r;
        cancel.cancel.target = result.id;
        f->calls.rows[index].is_cancelled = true;
        if (f->calls.rows[index].state == CALL_HELD)
            link_finish(f, index, FUSED_CANCELLED, "the request was cancelled");
        else
            link_post(f, &cancel, -1, link_deadline(0), &(struct call){.state = CALL_DROPPED},
                      &ignored);
        link_fail(f, r, "no answer in time; the request was asked to be cancelled");
    } else {
        link_take(f, index, &result);
    }
    if (ret)
        *ret = result;
    return result.code;
}

int fused_next(struct fused *f, int timeout_ms, struct fused_result *ret)
{
    int64_t deadline;
    int r;

    r = enter_for(f, ret);
    if (r < 0)
        return r;
    deadline = link_deadline(timeout_ms < 0 ? f->timeout_ms : timeout_ms);
    while (f->calls.first_done == CALLS_NONE) {
        if (f->calls.n_inferences == 0 || timeout_ms == 0) {
            r = link_receive(f);
            if (f->calls.first_done != CALLS_NONE)
                break;
            if (r < 0 && f->calls.n_inferences == 0)
                return r;
            if (r == 0)
                return f->calls.n_inferences == 0 ? -ENOENT : -EAGAIN;
            continue;
        }
        r = link_wait(f, deadline);
        if (r == -ETIMEDOUT && timeout_ms > 0)
            return -EAGAIN;
        if (r < 0 && f->calls.first_done == CALLS_NONE)
            return r;
    }
    link_take(f, f->calls.first_done, ret);
    return 0;
}

int fused_wait(struct fused *f, uint64_t id, int timeout_ms, struct fused_result *ret)
{
    uint32_t index;
    int r;

    r = enter_for(f, ret);
    if (r < 0)
        return r;
    index = calls_find(&f->calls, id);
    if (index == CALLS_NONE || f->calls.rows[index].verb != VERB_INFER)
        return link_fail(f, -ENOENT, "no such request is in flight");
    r = wait_done(f, index, link_deadline(timeout_ms < 0 ? f->timeout_ms : timeout_ms));
    if (r < 0)
        return r == -ETIMEDOUT && timeout_ms >= 0 ? -EAGAIN : r;
    link_take(f, index, ret);
    return 0;
}

int fused_cancel(struct fused *f, uint64_t id)
{
    struct proto_request request = {.verb = VERB_CANCEL, .cancel = {id}};
    const char *gone = "no such request is waiting for its answer";
    const uint8_t *found;
    uint32_t index;
    size_t n;
    int r;

    r = link_enter(f);
    if (r < 0)
        return r;
    index = calls_find(&f->calls, id);
    if (index == CALLS_NONE || f->calls.rows[index].verb != VERB_INFER ||
        f->calls.rows[index].state == CALL_DONE)
        return link_fail(f, FUSED_NOT_FOUND, "%s", gone);
    f->calls.rows[index].is_cancelled = true;
    if (f->calls.rows[index].state == CALL_HELD) {
        link_finish(f, index, FUSED_CANCELLED, "the request was cancelled");
        return 0;
    }
    r = transact_in_time(f, &request, -1);
    index = calls_find(&f->calls, id);
    if (r == -EPIPE && index != CALLS_NONE && f->calls.rows[index].result.code == FUSED_CANCELLED)
        return 0; /* its server is gone, and no other gets it */
    if (r != 0)
        return r;
    if (scan_find(f->reply.document.bytes, f->reply.document.n_bytes, "cancelled", &found, &n) < 0)
        return link_fail(f, -EPROTO, "the server's answer to cancel is none");
    return *found == 0xc3 ? 0 : link_fail(f, FUSED_NOT_FOUND, "%s", gone); /* true */
}
