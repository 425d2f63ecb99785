/*
 * request.c - the record of a request, from receipt to its answer
 *
 * A request is charged, entered in its connection's table and freed here, in one place each. It has
 * one allocation: the record and, behind it, the bytes of inline tensors. Every path ends in one of
 * the request_answer functions or request_fail(), which send the answer if somebody still waits for
 * it and free the record: a second answer has nothing to come from.
 */
#include "request.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "conn.h"
#include "server.h"

void request_table_init(struct request_table *table)
{
    for (unsigned i = 0; i < REQUEST_TABLE; i++)
        LIST_INIT(&table->lists[i]);
    table->n = 0;
}

struct request *request_table_find(const struct request_table *table, uint64_t id)
{
    struct request *request;

    LIST_FOREACH(request, &table->lists[id % REQUEST_TABLE], link)
    {
        if (request->id == id)
            return request;
    }
    return NULL;
}

int request_new(struct conn *conn, uint64_t id, enum verb verb, size_t n_arena,
                struct request **ret)
{
    size_t size = (sizeof(struct request) + n_arena + 63) / 64 * 64;
    struct request *request;
    int r;

    if (request_table_find(&conn->requests, id))
        return -EEXIST;
    r = uid_take(conn->uid, CHARGE_REQUESTS, 1);
    if (r < 0)
        return r;
    request = aligned_alloc(64, size);
    if (!request) {
        uid_give(conn->uid, CHARGE_REQUESTS, 1);
        return -ENOMEM;
    }
    *request = (struct request){
        .conn = conn,
        .uid = uid_ref(conn->uid),
        .id = id,
        .verb = verb,
        .state = REQUEST_WORKING,
        .deadline.at_us = UINT64_MAX,
        .n_arena = n_arena,
    };
    LIST_INSERT_HEAD(&conn->requests.lists[id % REQUEST_TABLE], request, link);
    conn->requests.n++;
    *ret = request;
    return 0;
}

void request_orphan(struct request *request)
{
    LIST_REMOVE(request, link);
    request->conn->requests.n--;
    request->conn = NULL;
}

void request_free(struct request *request)
{
    assert(!request->item.queued);
    assert(request->deadline.place == 0);
    if (request->conn)
        request_orphan(request);
    buffer_unuse(&request->in);
    buffer_unuse(&request->out);
    version_unref(request->version);
    uid_give(request->uid, CHARGE_REQUESTS, 1);
    uid_unref(request->uid);
    free(request);
}

static void send_and_free(struct request *request, struct proto_reply *reply)
{
    struct conn *conn = request->conn;

    reply->has_id = true;
    reply->id = request->id;
    reply->verb = request->verb;
    /* Before the client can react to the answer, what the request held is free again; the arena
     * stays until the bytes are sent. */
    if (conn)
        request_orphan(request);
    buffer_unuse(&request->in);
    buffer_unuse(&request->out);
    if (conn)
        conn_reply(conn, reply, -1);
    request_free(request);
}

static void count(struct request *request, enum proto_error error, uint64_t queue_us,
                  uint64_t run_us)
{
    if (request->verb != VERB_INFER || !request->version)
        return;
    stats_answer(&request->version->served->stats, error, request->job.rows, queue_us, run_us);
    stats_answer(&request->version->registry->total, error, request->job.rows, queue_us, run_us);
}

void request_fail(struct request *request, enum proto_error error, const char *text)
{
    struct proto_reply reply = {.error = error};

    count(request, error, 0, 0);
    if (!text)
        text = proto_error_text(error);
    reply.text = (struct proto_str){text, (uint32_t)strnlen(text, PROTO_TEXT_MAX)};
    send_and_free(request, &reply);
}

void request_tell(struct request *request, enum proto_error error)
{
    const char *text = proto_error_text(error);
    struct conn *conn = request->conn;
    struct proto_reply reply = {
        .has_id = true,
        .id = request->id,
        .verb = request->verb,
        .error = error,
        .text = {text, (uint32_t)strlen(text)},
    };

    if (!conn)
        return;
    request_orphan(request);
    conn_reply(conn, &reply, -1);
}

void request_answer_infer(struct request *request)
{
    const struct pipeline *pipeline = request->version->pipeline;
    const struct job *job = &request->job;
    struct proto_reply reply = {.infer = {
                                    .output = request->output,
                                    .offset = job->offset,
                                    .queue_us = request->started_us - request->item.arrival_us,
                                    .run_us = request->ended_us - request->started_us,
                                    .batch_rows = request->batch_rows,
                                    .late = request->ended_us > request->deadline.at_us,
                                }};

    if (job->train)
        reply.infer.offset += pipeline_offset_advance(pipeline, job->rows);
    if (job->compact && !pipeline->outer_sum) {
        reply.infer.has_constant = true;
        reply.infer.constant = pipeline->proof.value;
        reply.infer.n_full = job->n_full;
    }
    if (request->output.is_inline) {
        struct proto_tensor *output = &reply.infer.output;

        output->bytes = job->y;
        /* Of a compact constant only the samples that came back in full follow the states. */
        if (reply.infer.has_constant)
            output->shape[0] =
                (int64_t)(BACKEND_COMPACT_ROOM(job->rows) +
                          (uint64_t)job->n_full * (uint64_t)shape_elements(&pipeline->out) *
                              dtype_size(pipeline->dtype));
        if (reply.infer.has_constant)
            output->n_bytes = (uint32_t)output->shape[0];
    }
    count(request, ERR_NONE, reply.infer.queue_us, reply.infer.run_us);
    send_and_free(request, &reply);
}

void request_answer_document(struct request *request, const uint8_t *bytes, size_t n)
{
    struct proto_reply reply = {.document = {bytes, (uint32_t)n}};

    send_and_free(request, &reply);
}

bool request_answer_buffer(struct request *request, uint32_t handle, uint64_t size, int fd)
{
    struct proto_reply reply = {
        .has_id = true,
        .id = request->id,
        .verb = request->verb,
        .buffer = {.buffer = handle, .size_bytes = size},
    };

    if (request->conn && !conn_reply(request->conn, &reply, fd))
        return false;
    request_free(request);
    return true;
}

enum proto_error request_error(enum verb verb, int r)
{
    bool is_buffer = verb == VERB_BUFFER_CREATE || verb == VERB_BUFFER_REGISTER;

    switch (-r) {
    case EINVAL:
        return verb == VERB_INFER ? ERR_BAD_TENSOR : is_buffer ? ERR_BAD_BUFFER : ERR_BAD_MODEL;
    case EIO:
        return verb == VERB_INFER || is_buffer ? ERR_INTERNAL : ERR_BAD_MODEL;
    case EOPNOTSUPP:
        return ERR_UNSUPPORTED;
    case ENOENT:
        return ERR_NOT_FOUND;
    case EEXIST:
        return ERR_BAD_MESSAGE;
    case EDQUOT:
        return ERR_QUOTA;
    case EBUSY:
    case EMFILE:
    case ENFILE:
    case ETOOMANYREFS:
        return ERR_BUSY;
    case ENOMEM:
        return ERR_NO_MEMORY;
    case ENOSPC: /* a compact result with more full samples than its room takes */
        return verb == VERB_INFER ? ERR_BAD_TENSOR : ERR_NO_MEMORY;
    case ETIMEDOUT:
        return ERR_DEADLINE;
    case ECANCELED:
        return ERR_CANCELLED;
    case ESHUTDOWN:
        return ERR_SHUTTING_DOWN;
    case ENOTRECOVERABLE:
        return ERR_GPU_LOST;
    default:
        return ERR_INTERNAL;
    }
}
