/*
 * infer.c - everything that can be wrong with an infer message
 *
 * A request enters a queue only when nothing about it can fail any more but the device: model,
 * dtype, shapes, sizes and ranges are checked here, against the version that it will run on. Sizes
 * come from a client and are only combined through checked operations. Inline input is copied,
 * since the datagram's space is reused; bytes in buffers are never touched by this thread.
 */
#include "infer.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "server.h"

#define RUN_BYTES 512 /* of an outer sum, that come down in one piece at the link's rate */

/* What is being checked: the first refusal is kept. */
struct check {
    const struct proto_infer *infer;
    const struct pipeline *pipeline;
    int64_t rows;
    uint64_t in_bytes, out_bytes; /* out_bytes: what the result needs, or the room for it */
    struct proto_tensor output;   /* as it will be answered */
    enum proto_error error;
    char text[PROTO_TEXT_MAX + 1];
};

static bool refuse(struct check *check, enum proto_error error, const char *format, ...)
    _printf_(3, 4);

static bool refuse(struct check *check, enum proto_error error, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(check->text, sizeof(check->text), format, args);
    va_end(args);
    check->error = error;
    return false;
}

static const char *print_dims(const struct proto_tensor *tensor, char *text, size_t size)
{
    struct shape shape = {.rank = (int8_t)tensor->rank, .batch = -1};

    memcpy(shape.dims, tensor->shape, sizeof(shape.dims));
    return shape_print(&shape, text, size);
}

static bool same_dims(const struct proto_tensor *tensor, const struct shape *shape)
{
    return tensor->rank == (unsigned)shape->rank &&
           memcmp(tensor->shape, shape->dims, tensor->rank * sizeof(shape->dims[0])) == 0;
}

static bool check_input(struct check *check, const struct version *version)
{
    const struct proto_tensor *input = &check->infer->input;
    const struct shape *row = &check->pipeline->in;
    char given[200], wanted[200];
    struct shape shape;

    if ((int)input->dtype != (int)check->pipeline->dtype)
        return refuse(check, ERR_BAD_TENSOR, "input: dtype is %s, the model takes %s",
                      proto_dtype_name(input->dtype), dtype_name(check->pipeline->dtype));
    check->rows = input->rank > 0 ? input->shape[0] : 0;
    if (check->rows >= 1 && check->rows <= version->model.queue_rows)
        shape = shape_rows(row, check->rows);
    else
        shape = *row;
    if (!same_dims(input, &shape)) {
        if (input->rank == (unsigned)row->rank && check->rows < 1)
            return refuse(check, ERR_BAD_TENSOR, "input: there are no rows");
        if (input->rank == (unsigned)row->rank && check->rows > version->model.queue_rows)
            return refuse(check, ERR_BAD_TENSOR, "input: more than %u rows",
                          version->model.queue_rows);
        return refuse(check, ERR_BAD_TENSOR, "input: shape is %s, the model takes %s",
                      print_dims(input, given, sizeof(given)),
                      shape_print(row, wanted, sizeof(wanted)));
    }
    if (proto_tensor_size(input->dtype, input->rank, input->shape, &check->in_bytes) < 0)
        return refuse(check, ERR_BAD_TENSOR, "input: too large");
    if (input->is_inline && input->n_bytes != check->in_bytes)
        return refuse(check, ERR_BAD_TENSOR, "input: %u bytes came, the shape needs %llu",
                      input->n_bytes, (unsigned long long)check->in_bytes);
    return true;
}

/* The shape of a full result, or of the factor of an outer sum. */
static bool check_output_shape(struct check *check, const struct shape *row)
{
    const struct proto_tensor *output = &check->infer->output;
    struct shape shape = shape_rows(row, check->rows);
    char given[200], wanted[200];

    check->output.dtype = (enum proto_dtype)check->pipeline->dtype;
    check->output.rank = (uint8_t)shape.rank;
    memcpy(check->output.shape, shape.dims, sizeof(shape.dims));
    if (proto_tensor_size(check->output.dtype, check->output.rank, check->output.shape,
                          &check->out_bytes) < 0)
        return refuse(check, ERR_BAD_TENSOR, "output: too large");
    if (!check->infer->has_output) {
        if (check->out_bytes > PROTO_INLINE_MAX)
            return refuse(check, ERR_BAD_TENSOR,
                          "output: missing, and the result of %llu bytes is too large to be inline",
                          (unsigned long long)check->out_bytes);
        return true;
    }
    if ((int)output->dtype != (int)check->pipeline->dtype)
        return refuse(check, ERR_BAD_TENSOR, "output: dtype is %s, the result is %s",
                      proto_dtype_name(output->dtype), dtype_name(check->pipeline->dtype));
    shape.batch = -1;
    if (!same_dims(output, &shape))
        return refuse(check, ERR_BAD_TENSOR, "output: shape is %s, the result is %s",
                      print_dims(output, given, sizeof(given)),
                      shape_print(&shape, wanted, sizeof(wanted)));
    return true;
}

/* A compact constant result: states, then as many samples as its room takes. It cannot be cut, so
 * it must be what one batch takes. */
static bool check_output_constant(struct check *check, uint32_t max_rows)
{
    const struct proto_tensor *output = &check->infer->output;
    uint64_t states = BACKEND_COMPACT_ROOM(check->rows), sample, most;

    if (check->rows > max_rows)
        return refuse(check, ERR_BAD_TENSOR,
                      "input: more than %u rows (max_rows) for a compact constant result",
                      max_rows);
    if (!check->infer->has_output) {
        if (states > PROTO_INLINE_MAX)
            return refuse(check, ERR_BAD_TENSOR,
                          "output: missing, and the states of %lld rows are too large to be inline",
                          (long long)check->rows);
        sample =
            (uint64_t)shape_elements(&check->pipeline->out) * dtype_size(check->pipeline->dtype);
        if (!mul_u64(sample, (uint64_t)check->rows, &most) || !add_u64(most, states, &most) ||
            most > PROTO_INLINE_MAX)
            most = PROTO_INLINE_MAX;
        check->out_bytes = most;
    } else {
        if (output->dtype != PROTO_UINT8 || output->rank != 1)
            return refuse(check, ERR_BAD_TENSOR,
                          "output: a compact result is uint8 of one dimension");
        if (output->shape[0] < 0 || (uint64_t)output->shape[0] < states)
            return refuse(check, ERR_BAD_TENSOR, "output: %lld bytes, at least %llu are needed",
                          (long long)output->shape[0], (unsigned long long)states);
        check->out_bytes = (uint64_t)output->shape[0];
    }
    check->output.dtype = PROTO_UINT8;
    check->output.rank = 1;
    check->output.shape[0] = (int64_t)check->out_bytes;
    return true;
}

static bool check_output(struct check *check, const struct version *version)
{
    const struct pipeline *pipeline = check->pipeline;
    const struct proto_infer *infer = check->infer;

    if (infer->has_output && infer->output.is_inline)
        return refuse(check, ERR_BAD_TENSOR, "output: must lie in a buffer");
    if (infer->result == RESULT_FULL)
        return check_output_shape(check, &pipeline->out);
    if (infer->train && pipeline_masks(pipeline))
        return refuse(check, ERR_UNSUPPORTED, "a masked result has no compact form");
    if (pipeline->outer_sum)
        return check_output_shape(check, &pipeline->stages[pipeline->n_stages - 1].in);
    if (pipeline->proof.constant)
        return check_output_constant(check, version->model.max_rows);
    return refuse(check, ERR_UNSUPPORTED, "this model's result has no compact form");
}

static bool check_place(struct check *check, const char *what, const struct proto_tensor *tensor,
                        size_t align)
{
    if (tensor->offset % align != 0)
        return refuse(check, ERR_BAD_TENSOR, "%s: the offset is not a multiple of %zu", what,
                      align);
    return true;
}

static bool check_all(struct check *check, const struct conn *conn, const struct version *version)
{
    const struct proto_infer *infer = check->infer;
    size_t align = dtype_size(check->pipeline->dtype);

    if (infer->priority == PROTO_PRIORITY_MAX && !conn->peer.admin)
        return refuse(check, ERR_DENIED, "priority %u is for administrators", PROTO_PRIORITY_MAX);
    if (infer->offset % 4 != 0)
        return refuse(check, ERR_BAD_MESSAGE, "offset: is not a multiple of 4");
    return check_input(check, version) && check_output(check, version) &&
           (infer->input.is_inline || check_place(check, "input", &infer->input, align)) &&
           (!infer->has_output || check_place(check, "output", &infer->output, align));
}

/* Takes a range of a buffer for the request. */
static bool take_range(struct check *check, struct conn *conn, const char *what,
                       const struct proto_tensor *tensor, uint64_t size, bool write,
                       struct buffer_use *use)
{
    struct buffer *buffer = buffer_table_find(&conn->buffers, tensor->buffer);
    int r;

    if (!buffer)
        return refuse(check, ERR_NOT_FOUND, "%s: there is no such buffer", what);
    r = buffer_use(buffer, tensor->offset, size, write, use);
    if (r == -ERANGE)
        return refuse(check, ERR_BAD_BUFFER, "%s: %llu bytes at offset %llu end past the buffer",
                      what, (unsigned long long)size, (unsigned long long)tensor->offset);
    if (r == -EBUSY)
        return refuse(check, ERR_BAD_BUFFER,
                      "%s: the range overlaps one that a request in flight uses", what);
    return true;
}

/* Device memory is read and written on its device alone. */
static bool bind_to_device(struct check *check, const char *what, const struct buffer *buffer,
                           struct request *request)
{
    if (buffer->kind != BUFFER_CUDA)
        return true;
    if (!request->version->plans[buffer->device])
        return refuse(check, ERR_BAD_BUFFER, "%s: the model is not on the device of this buffer",
                      what);
    if (request->is_bound && request->device != buffer->device)
        return refuse(check, ERR_BAD_BUFFER, "input and output lie on different devices");
    request->is_bound = true;
    request->device = buffer->device;
    return true;
}

/*
 * How many rows of a request run at a time: at most max_rows, and while nobody else is there, and
 * its bytes go over a link, parts that overlap. The states and samples of a compact constant follow
 * each other: it stays whole. Parts of an outer sum are made of runs of rows, or the link would be
 * fed single numbers.
 */
static void cut(const struct server *server, const struct check *check,
                const struct version *version, struct request *request)
{
    const struct backend_info *info = &server->infos[0];
    const struct job *job = &request->job;
    const bool outer = check->pipeline->outer_sum;
    const struct cost_move move = {check->in_bytes / job->rows, check->out_bytes / job->rows,
                                   info->link_bytes_per_s};
    const uint32_t esize = (uint32_t)dtype_size(check->pipeline->dtype);
    uint32_t part = job->rows;

    if (!info->parts || (job->compact && !outer))
        return;
    if (info->device_memory && !request->is_bound)
        part = cost_part(&version->cost, &move, job->rows, outer ? RUN_BYTES / esize : 1);
    request->item.cut_rows = version->model.max_rows;
    request->alone_rows = part < version->model.max_rows ? part : version->model.max_rows;
}

static bool fill(struct check *check, struct conn *conn, struct version *version,
                 struct request *request)
{
    const struct proto_infer *infer = check->infer;
    struct job *job = &request->job;
    size_t in_room = infer->input.is_inline ? (infer->input.n_bytes + 63) / 64 * 64 : 0;

    if (infer->input.is_inline) {
        memcpy(request->arena, infer->input.bytes, infer->input.n_bytes);
        job->x = request->arena;
    } else {
        if (!take_range(check, conn, "input", &infer->input, check->in_bytes, false,
                        &request->in) ||
            !bind_to_device(check, "input", request->in.buffer, request))
            return false;
        job->x = buffer_at(request->in.buffer, infer->input.offset);
        job->x_memory = request->in.buffer->memory;
    }
    request->output = check->output;
    if (!infer->has_output) {
        request->output.is_inline = true;
        request->output.n_bytes = (uint32_t)check->out_bytes;
        job->y = request->arena + in_room;
    } else {
        if (!take_range(check, conn, "output", &infer->output, check->out_bytes, true,
                        &request->out) ||
            !bind_to_device(check, "output", request->out.buffer, request))
            return false;
        request->output.buffer = infer->output.buffer;
        request->output.offset = infer->output.offset;
        job->y = buffer_at(request->out.buffer, infer->output.offset);
        job->y_memory = request->out.buffer->memory;
    }
    job->y_size = check->out_bytes;
    job->rows = (uint32_t)check->rows;
    job->train = infer->train;
    job->compact = infer->result == RESULT_COMPACT;
    job->seed = infer->seed;
    job->offset = infer->offset;
    request->item.rows = job->rows;
    cut(conn->server, check, version, request);
    request->item.priority = infer->priority;
    return true;
}

static void submit(struct conn *conn, const struct proto_request *message, struct check *check,
                   struct version *version, uint64_t now_us)
{
    const struct proto_infer *infer = check->infer;
    size_t n_arena = (infer->input.is_inline ? (infer->input.n_bytes + 63) / 64 * 64 : 0) +
                     (infer->has_output ? 0 : check->out_bytes);
    struct request *request;
    int r;

    r = request_new(conn, message->id, VERB_INFER, n_arena, &request);
    if (r < 0) {
        enum proto_error error = request_error(VERB_INFER, r);
        const char *reason = uid_reason(conn->uid, r);

        refuse(check, error, "%s", reason ? reason : proto_error_text(error));
        return;
    }
    request->version = version_ref(version);
    if (infer->has_deadline && !add_u64(now_us, infer->deadline_us, &request->deadline.at_us))
        request->deadline.at_us = UINT64_MAX;
    if (!fill(check, conn, version, request)) {
        request_free(request);
        return;
    }
    r = scheduler_add(&conn->server->scheduler, request);
    if (r < 0) {
        if (r == -EBUSY)
            refuse(check, ERR_BUSY, "the queue of this model is full");
        else
            check->error = request_error(VERB_INFER, r);
        request_free(request);
        return;
    }
    buffers_note(&conn->server->buffers, conn->peer.pid, now_us);
}

void infer_start(struct conn *conn, const struct proto_request *message, uint64_t now_us)
{
    const struct proto_infer *infer = &message->infer;
    struct registry *registry = &conn->server->registry;
    struct served *served = registry_find(registry, infer->model.s, infer->model.n);
    struct check check = {.infer = infer};

    if (!served) {
        refuse(&check, ERR_NOT_FOUND, "there is no such model");
    } else {
        check.pipeline = served->current->pipeline;
        if (check_all(&check, conn, served->current))
            submit(conn, message, &check, served->current, now_us);
    }
    if (check.error == ERR_NONE)
        return;
    if (served)
        stats_answer(&served->stats, check.error, 0, 0, 0);
    stats_answer(&registry->total, check.error, 0, 0, 0);
    conn->server->scheduler.refused++;
    conn_refuse(conn, message, check.error, check.text[0] ? check.text : NULL);
}
