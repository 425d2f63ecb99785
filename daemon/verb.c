/*
 * verb.c - one function a verb
 *
 * Verbs that need a helper thread (buffers, models, the device's own figures) make a request record
 * first, so that they are charged, have an id in flight, and can lose their client while they are
 * worked on; what was made for a client that is gone is dropped again.
 */
#include "verb.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "document.h"
#include "infer.h"
#include "proto/codec.h"
#include "server.h"

/* ---- answers ---- */

static struct doc begin(struct server *server)
{
    struct doc doc;

    doc_init(&doc, server->document, sizeof(server->document));
    return doc;
}

static void answer(struct conn *conn, const struct proto_request *message, struct doc *doc)
{
    int n = doc_finish(doc);
    struct proto_reply reply = {.has_id = true, .id = message->id, .verb = message->verb};

    if (n < 0) {
        conn_refuse(conn, message, ERR_INTERNAL, "the answer does not fit into a message");
        return;
    }
    reply.document.bytes = doc->bytes;
    reply.document.n_bytes = (uint32_t)n;
    conn_reply(conn, &reply, -1);
}

static void answer_request(struct request *request, struct doc *doc)
{
    int n = doc_finish(doc);

    if (n < 0)
        request_fail(request, ERR_INTERNAL, "the answer does not fit into a message");
    else
        request_answer_document(request, doc->bytes, (size_t)n);
}

static void refuse_errno(struct conn *conn, const struct proto_request *message, int r)
{
    conn_refuse(conn, message, request_error(message->verb, r), uid_reason(conn->uid, r));
}

/* A record for a verb that is answered later, or NULL when it was refused. */
static struct request *later(struct conn *conn, const struct proto_request *message)
{
    struct request *request;
    int r;

    r = request_new(conn, message->id, message->verb, 0, &request);
    if (r == 0)
        return request;
    refuse_errno(conn, message, r);
    return NULL;
}

static bool is_draining(struct conn *conn, const struct proto_request *message)
{
    if (conn->server->state == SERVER_READY)
        return false;
    conn_refuse(conn, message, ERR_SHUTTING_DOWN, NULL);
    return true;
}

/* ---- the connection itself ---- */

static void hello(struct conn *conn, const struct proto_request *message)
{
    struct doc doc = begin(conn->server);
    char text[100];

    if (message->hello.version < PROTO_VERSION_MIN || message->hello.version > PROTO_VERSION_MAX) {
        snprintf(text, sizeof(text), "this server speaks versions %d to %d", PROTO_VERSION_MIN,
                 PROTO_VERSION_MAX);
        conn_refuse(conn, message, ERR_UNSUPPORTED, text);
        return;
    }
    conn->hello = true;
    snprintf(conn->name, sizeof(conn->name), "%.*s", (int)message->hello.name.n,
             message->hello.name.s);
    log_debug("client.hello", "uid %u, pid %d is \"%s\"", conn->peer.uid, (int)conn->peer.pid,
              conn->name);
    document_hello(&doc, conn);
    answer(conn, message, &doc);
}

static void ping(struct conn *conn, const struct proto_request *message)
{
    struct doc doc = begin(conn->server);

    document_empty(&doc);
    answer(conn, message, &doc);
}

static void cancel(struct conn *conn, const struct proto_request *message)
{
    struct request *request = request_table_find(&conn->requests, message->cancel.target);
    bool is_infer = request && request->verb == VERB_INFER;
    struct doc doc;

    if (is_infer)
        scheduler_cancel(&conn->server->scheduler, request);
    doc = begin(conn->server);
    doc_map(&doc, 1);
    doc_key(&doc, "cancelled");
    doc_bool(&doc, is_infer);
    answer(conn, message, &doc);
}

/* ---- buffers ---- */

static void on_buffer_made(struct buffer *buffer, void *context)
{
    struct request *request = context;
    struct server *server =
        (struct server *)((char *)buffer->owner - offsetof(struct server, buffers));
    struct conn *conn = request->conn;
    int r = buffer->result;

    server->n_client_works--;
    server_progress(server);
    if (r == -ENOTRECOVERABLE)
        server_lost(server, buffer->report.text);
    if (!conn || r < 0) {
        const char *text = buffer->reason           ? buffer->reason
                           : buffer->report.text[0] ? buffer->report.text
                                                    : NULL;

        request_fail(request, request_error(request->verb, r < 0 ? r : -ECANCELED), text);
        buffer_unref(buffer);
        return;
    }
    r = buffer_table_add(&conn->buffers, buffer);
    if (r < 0) {
        request_fail(request, request_error(request->verb, r), NULL);
        buffer_unref(buffer);
        return;
    }
    /* Sending may find the client gone, which drops its buffers. */
    buffer_ref(buffer);
    if (request_answer_buffer(request, buffer->handle, buffer->size, buffer->fd)) {
        /* The memory is mapped, and the client has its own descriptor. */
        buffer->fd = close_fd(buffer->fd);
        if (buffer->created)
            spares_want(&server->buffers.spares, buffer->size, clock_us());
    } else {
        request_fail(request, ERR_BUSY, "too many descriptors are on their way");
        buffer_table_remove(&conn->buffers, buffer->handle);
    }
    buffer_unref(buffer);
}

static void make_buffer(struct conn *conn, const struct proto_request *message,
                        enum buffer_kind kind, uint32_t device, uint64_t size, int fd)
{
    struct server *server = conn->server;
    struct request *request;
    int r;

    if (size == 0 || size > PTRDIFF_MAX) {
        close_fd(fd);
        conn_refuse(conn, message, ERR_BAD_BUFFER, "size: is not within 1 and 2^63 - 1");
        return;
    }
    if (device >= server->device.n) {
        close_fd(fd);
        conn_refuse(conn, message, ERR_BAD_BUFFER, "device: there is no such device");
        return;
    }
    request = later(conn, message);
    if (!request) {
        close_fd(fd);
        return;
    }
    server->n_client_works++;
    r = buffer_make(&server->buffers, conn->uid, conn->peer.pid, kind, device, size, fd,
                    on_buffer_made, request);
    if (r == 0)
        return;
    server->n_client_works--;
    conn_count_refusal(conn);
    request_fail(request, request_error(message->verb, r),
                 r == -EOPNOTSUPP ? "this backend offers no device buffers"
                                  : uid_reason(conn->uid, r));
}

static void buffer_create(struct conn *conn, const struct proto_request *message)
{
    if (is_draining(conn, message))
        return;
    make_buffer(conn, message, message->buffer_create.kind, message->buffer_create.device,
                message->buffer_create.size_bytes, -1);
}

static void buffer_register(struct conn *conn, const struct proto_request *message, int *fd)
{
    if (is_draining(conn, message))
        return;
    if (*fd < 0)
        conn_refuse(conn, message, ERR_BAD_BUFFER, "no descriptor came with the message");
    else
        make_buffer(conn, message, message->buffer_register.kind, message->buffer_register.device,
                    message->buffer_register.size_bytes, take_fd(fd));
}

static void buffer_release(struct conn *conn, const struct proto_request *message)
{
    struct doc doc = begin(conn->server);

    if (buffer_table_remove(&conn->buffers, message->buffer_release.buffer) < 0) {
        conn_refuse(conn, message, ERR_NOT_FOUND, "there is no such buffer");
        return;
    }
    document_empty(&doc);
    answer(conn, message, &doc);
}

/* ---- models ---- */

static struct served *find_model(struct conn *conn, const struct proto_request *message)
{
    struct served *served =
        registry_find(&conn->server->registry, message->model.name.s, message->model.name.n);

    if (!served)
        conn_refuse(conn, message, ERR_NOT_FOUND, "there is no such model");
    return served;
}

static void model_list(struct conn *conn, const struct proto_request *message)
{
    struct doc doc = begin(conn->server);

    document_list(&doc, &conn->server->registry, message->model_list.after.s,
                  message->model_list.after.n);
    answer(conn, message, &doc);
}

static void model_describe(struct conn *conn, const struct proto_request *message)
{
    struct served *served = find_model(conn, message);
    struct doc doc;

    if (!served)
        return;
    doc = begin(conn->server);
    document_describe(&doc, conn->server, served);
    answer(conn, message, &doc);
}

static void on_changed(struct registry_job *job, void *context)
{
    struct request *request = context;
    struct server *server =
        (struct server *)((char *)job->registry - offsetof(struct server, registry));
    struct doc doc;

    server->n_client_works--;
    server_changed(server, job);
    if (job->result < 0) {
        request_fail(request, request_error(request->verb, job->result), job->report.text);
    } else {
        doc = begin(server);
        document_changes(&doc, job);
        answer_request(request, &doc);
    }
    server_progress(server);
}

/* A name that can be a file's: what a model file may call its model. */
static bool is_model_name(const struct proto_str *name)
{
    for (uint32_t i = 0; i < name->n; i++) {
        char c = name->s[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '-' || c == '_' || (c == '.' && i > 0)))
            return false;
    }
    return name->n > 0 && name->n <= MODEL_NAME_MAX;
}

static void change(struct conn *conn, const struct proto_request *message, enum registry_task task)
{
    const struct proto_str *name = &message->model.name;
    struct request *request;
    int r;

    if (is_draining(conn, message))
        return;
    if (task != TASK_SYNC && !is_model_name(name)) {
        conn_refuse(conn, message, ERR_NOT_FOUND, "there is no such model");
        return;
    }
    request = later(conn, message);
    if (!request)
        return;
    r = registry_submit(&conn->server->registry, task, name->s, task == TASK_SYNC ? 0 : name->n,
                        on_changed, request);
    if (r < 0)
        request_fail(request, request_error(message->verb, r), NULL);
    else
        conn->server->n_client_works++;
}

static void model_reload(struct conn *conn, const struct proto_request *message)
{
    if (message->model.name.n == 0)
        change(conn, message, TASK_SYNC);
    else if (find_model(conn, message))
        change(conn, message, TASK_LOAD);
}

/* ---- the daemon ---- */

/* The device is asked on a helper thread: a driver may take its time. */
struct status_work {
    struct work work;
    struct server *server;
    struct request *request;
    struct backend_info infos[BACKEND_DEVICES_MAX];
};

static void run_status(struct work *work)
{
    struct status_work *status = (struct status_work *)work;

    const struct device *device = &status->server->device;

    for (unsigned i = 0; i < device->n; i++)
        device->ops->info(device->backends[i], &status->infos[i]);
}

static void done_status(struct work *work)
{
    struct status_work *status = (struct status_work *)work;
    struct request *request = status->request;
    struct server *server = status->server;
    struct doc doc = begin(server);

    server->n_client_works--;
    memcpy(server->infos, status->infos, sizeof(server->infos));
    if (request->conn) {
        document_status(&doc, request->conn);
        answer_request(request, &doc);
    } else {
        request_free(request);
    }
    free(status);
    server_progress(server);
}

static void status(struct conn *conn, const struct proto_request *message)
{
    struct server *server = conn->server;
    struct request *request = later(conn, message);
    struct status_work *work;

    if (!request)
        return;
    if (server->state == SERVER_DRAINING) {
        /* Asked again and again, works would keep the drain from ending: what was last known. */
        struct doc doc = begin(server);

        document_status(&doc, conn);
        answer_request(request, &doc);
        return;
    }
    work = calloc(1, sizeof(*work));
    if (!work) {
        request_fail(request, ERR_NO_MEMORY, NULL);
        return;
    }
    work->server = server;
    work->request = request;
    server->n_client_works++;
    work_queue(&server->works, &request->uid->works, &work->work, run_status, done_status);
}

static void stats(struct conn *conn, const struct proto_request *message)
{
    struct served *served = NULL;
    struct doc doc;

    if (message->model.name.n > 0) {
        served = find_model(conn, message);
        if (!served)
            return;
    }
    doc = begin(conn->server);
    document_stats(&doc, served ? served->name : NULL,
                   served ? &served->stats : &conn->server->registry.total);
    answer(conn, message, &doc);
}

static void drain(struct conn *conn, const struct proto_request *message)
{
    struct doc doc = begin(conn->server);

    doc_map(&doc, 1);
    doc_key(&doc, "state");
    doc_str(&doc, "draining");
    answer(conn, message, &doc);
    server_drain(conn->server, "a client asked for it");
}

static void set_log(struct conn *conn, const struct proto_request *message)
{
    struct doc doc = begin(conn->server);
    enum log_level level;

    if (log_level_parse(message->log.level.s, message->log.level.n, &level) < 0) {
        conn_refuse(conn, message, ERR_BAD_MESSAGE,
                    "level: is none of error, warning, info, debug");
        return;
    }
    log_set_level(level);
    log_info("log.level", "log level is %s, set by uid %u", log_level_name(level), conn->peer.uid);
    doc_map(&doc, 1);
    doc_key(&doc, "level");
    doc_str(&doc, log_level_name(level));
    answer(conn, message, &doc);
}

void verb_dispatch(struct conn *conn, const struct proto_request *message, int *fd)
{
    switch (message->verb) {
    case VERB_HELLO:
        hello(conn, message);
        break;
    case VERB_PING:
        ping(conn, message);
        break;
    case VERB_INFER:
        if (!is_draining(conn, message))
            infer_start(conn, message, clock_us());
        break;
    case VERB_CANCEL:
        cancel(conn, message);
        break;
    case VERB_BUFFER_CREATE:
        buffer_create(conn, message);
        break;
    case VERB_BUFFER_REGISTER:
        buffer_register(conn, message, fd);
        break;
    case VERB_BUFFER_RELEASE:
        buffer_release(conn, message);
        break;
    case VERB_MODEL_LIST:
        model_list(conn, message);
        break;
    case VERB_MODEL_DESCRIBE:
        model_describe(conn, message);
        break;
    case VERB_MODEL_LOAD:
        change(conn, message, TASK_LOAD);
        break;
    case VERB_MODEL_UNLOAD:
        change(conn, message, TASK_UNLOAD);
        break;
    case VERB_MODEL_RELOAD:
        model_reload(conn, message);
        break;
    case VERB_STATUS:
        status(conn, message);
        break;
    case VERB_STATS:
        stats(conn, message);
        break;
    case VERB_DRAIN:
        drain(conn, message);
        break;
    case VERB_LOG:
        set_log(conn, message);
        break;
    case VERB_COUNT:
        break;
    }
}
