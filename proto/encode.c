/*
 * encode.c - messages into msgpack
 *
 * The layout of each message: which keys, in which order, and which of them are left out because
 * they say what their absence says. A count that is announced and not kept shows at doc_finish().
 */
#include <errno.h>
#include <string.h>

#include "base.h"
#include "codec.h"
#include "json.h"

static void put_uint(struct doc *doc, const char *key, uint64_t v)
{
    doc_key(doc, key);
    doc_uint(doc, v);
}

static void put_bool(struct doc *doc, const char *key, bool v)
{
    doc_key(doc, key);
    doc_bool(doc, v);
}

static void put_str(struct doc *doc, const char *key, struct proto_str s)
{
    doc_key(doc, key);
    doc_str_n(doc, s.n ? s.s : "", s.n);
}

static void put_word(struct doc *doc, const char *key, const char *word)
{
    doc_key(doc, key);
    doc_str(doc, word);
}

static bool tensor_is_sound(const struct proto_tensor *tensor)
{
    return proto_dtype_name(tensor->dtype) && tensor->rank <= PROTO_RANK_MAX;
}

static void put_tensor(struct doc *doc, const char *key, const struct proto_tensor *tensor)
{
    doc_key(doc, key);
    doc_map(doc, tensor->is_inline ? 3 : tensor->offset ? 4 : 3);
    put_word(doc, "dtype", proto_dtype_name(tensor->dtype));
    doc_key(doc, "shape");
    doc_list(doc, tensor->rank);
    for (unsigned k = 0; k < tensor->rank; k++)
        doc_uint(doc, (uint64_t)tensor->shape[k]);
    if (tensor->is_inline) {
        doc_key(doc, "bytes");
        doc_bin(doc, tensor->n_bytes ? tensor->bytes : (const uint8_t *)"", tensor->n_bytes);
        return;
    }
    put_uint(doc, "buffer", tensor->buffer);
    if (tensor->offset)
        put_uint(doc, "offset", tensor->offset);
}

static void put_infer(struct doc *doc, const struct proto_infer *infer)
{
    put_str(doc, "model", infer->model);
    put_tensor(doc, "input", &infer->input);
    if (infer->has_output)
        put_tensor(doc, "output", &infer->output);
    if (infer->has_deadline)
        put_uint(doc, "deadline_us", infer->deadline_us);
    if (infer->priority != PROTO_PRIORITY_DEFAULT)
        put_uint(doc, "priority", infer->priority);
    if (infer->train)
        put_bool(doc, "train", true);
    if (infer->seed)
        put_uint(doc, "seed", infer->seed);
    if (infer->offset)
        put_uint(doc, "offset", infer->offset);
    if (infer->result == RESULT_COMPACT)
        put_word(doc, "result", "compact");
}

/* Keys of a request beside id and verb. */
static uint32_t count_keys(const struct proto_request *request)
{
    const struct proto_infer *infer = &request->infer;

    switch (request->verb) {
    case VERB_HELLO:
        return 2;
    case VERB_INFER:
        return 2 + infer->has_output + infer->has_deadline +
               (infer->priority != PROTO_PRIORITY_DEFAULT) + infer->train + (infer->seed != 0) +
               (infer->offset != 0) + (infer->result == RESULT_COMPACT);
    case VERB_BUFFER_CREATE:
        return 1 + (request->buffer_create.kind == BUFFER_CUDA) +
               (request->buffer_create.device != 0);
    case VERB_BUFFER_REGISTER:
        return 1 + (request->buffer_register.kind == BUFFER_CUDA) +
               (request->buffer_register.device != 0);
    case VERB_MODEL_LIST:
        return request->model_list.after.n ? 1 : 0;
    case VERB_MODEL_RELOAD:
    case VERB_STATS:
        return request->model.name.n ? 1 : 0;
    case VERB_PING:
    case VERB_STATUS:
    case VERB_DRAIN:
        return 0;
    default:
        return 1;
    }
}

static void put_request(struct doc *doc, const struct proto_request *request)
{
    switch (request->verb) {
    case VERB_HELLO:
        put_uint(doc, "version", request->hello.version);
        put_str(doc, "name", request->hello.name);
        break;
    case VERB_INFER:
        put_infer(doc, &request->infer);
        break;
    case VERB_CANCEL:
        put_uint(doc, "target", request->cancel.target);
        break;
    case VERB_BUFFER_CREATE:
        put_uint(doc, "size", request->buffer_create.size_bytes);
        if (request->buffer_create.kind == BUFFER_CUDA)
            put_word(doc, "kind", "cuda");
        if (request->buffer_create.device != 0)
            put_uint(doc, "device", request->buffer_create.device);
        break;
    case VERB_BUFFER_REGISTER:
        put_uint(doc, "size", request->buffer_register.size_bytes);
        if (request->buffer_register.kind == BUFFER_CUDA)
            put_word(doc, "kind", "cuda");
        if (request->buffer_register.device != 0)
            put_uint(doc, "device", request->buffer_register.device);
        break;
    case VERB_BUFFER_RELEASE:
        put_uint(doc, "buffer", request->buffer_release.buffer);
        break;
    case VERB_MODEL_LIST:
        if (request->model_list.after.n)
            put_str(doc, "after", request->model_list.after);
        break;
    case VERB_MODEL_DESCRIBE:
    case VERB_MODEL_LOAD:
    case VERB_MODEL_UNLOAD:
    case VERB_MODEL_RELOAD:
    case VERB_STATS:
        if (request->model.name.n)
            put_str(doc, "model", request->model.name);
        break;
    case VERB_LOG:
        put_str(doc, "level", request->log.level);
        break;
    default:
        break;
    }
}

int codec_encode_request(const struct proto_request *request, uint8_t *bytes, size_t size)
{
    const struct proto_infer *infer = &request->infer;
    struct doc doc;

    if (!proto_verb_name(request->verb))
        return -EINVAL;
    if (request->verb == VERB_INFER && (!tensor_is_sound(&infer->input) ||
                                        (infer->has_output && !tensor_is_sound(&infer->output))))
        return -EINVAL;
    doc_init(&doc, bytes, size);
    doc_map(&doc, 2 + count_keys(request));
    put_uint(&doc, "id", request->id);
    put_word(&doc, "verb", proto_verb_name(request->verb));
    put_request(&doc, request);
    return doc_finish(&doc);
}

static void put_infer_reply(struct doc *doc, const struct proto_infer_reply *infer)
{
    doc_map(doc, infer->has_constant ? 8 : 6);
    put_tensor(doc, "output", &infer->output);
    put_uint(doc, "offset", infer->offset);
    put_uint(doc, "queue_us", infer->queue_us);
    put_uint(doc, "run_us", infer->run_us);
    put_uint(doc, "batch_rows", infer->batch_rows);
    put_bool(doc, "late", infer->late);
    if (infer->has_constant) {
        doc_key(doc, "constant");
        doc_double(doc, infer->constant);
        put_uint(doc, "full", infer->n_full);
    }
}

static void put_error(struct doc *doc, const struct proto_reply *reply)
{
    char text[PROTO_TEXT_MAX];
    uint32_t n = 0;

    for (size_t at = 0, length; at < reply->text.n; at += length ? length : 1) {
        length = proto_text_length(reply->text.s + at, reply->text.n - at);
        if (n + (length ? length : 1) > sizeof text)
            break;
        if (length)
            memcpy(text + n, reply->text.s + at, length);
        else
            text[n] = '?';
        n += length ? (uint32_t)length : 1;
    }
    doc_map(doc, 3);
    put_uint(doc, "code", reply->error);
    put_word(doc, "name", proto_error_name(reply->error));
    put_str(doc, "text", (struct proto_str){text, n});
}

int codec_encode_reply(const struct proto_reply *reply, uint8_t *bytes, size_t size)
{
    const char *verb = proto_verb_name(reply->verb), *reason;
    bool is_error = reply->error != ERR_NONE;
    struct doc doc;
    int r;

    if (is_error ? !proto_error_name(reply->error) : !verb || !reply->has_id)
        return -EINVAL;
    if (!is_error && reply->verb == VERB_INFER && !tensor_is_sound(&reply->infer.output))
        return -EINVAL;
    doc_init(&doc, bytes, size);
    doc_map(&doc, 3);
    doc_key(&doc, "id");
    if (reply->has_id)
        doc_uint(&doc, reply->id);
    else
        doc_nil(&doc);
    doc_key(&doc, "verb");
    if (verb)
        doc_str(&doc, verb);
    else
        doc_nil(&doc);
    doc_key(&doc, is_error ? "error" : "result");
    if (is_error) {
        put_error(&doc, reply);
    } else if (reply->verb == VERB_INFER) {
        put_infer_reply(&doc, &reply->infer);
    } else if (reply->verb == VERB_BUFFER_CREATE || reply->verb == VERB_BUFFER_REGISTER) {
        doc_map(&doc, 2);
        put_uint(&doc, "buffer", reply->buffer.buffer);
        put_uint(&doc, "size", reply->buffer.size_bytes);
    } else {
        doc_raw(&doc, reply->document.bytes, reply->document.n_bytes);
    }
    r = doc_finish(&doc);
    /* A document came ready-made: what the client's check would refuse is not sent. */
    if (r >= 0 && codec_check(bytes, (size_t)r, &reason) < 0)
        r = -EMSGSIZE;
    return r;
}

int codec_json(const uint8_t *bytes, size_t n, char **ret_json)
{
    const char *reason;

    return codec_check(bytes, n, &reason) < 0 ? -EBADMSG : json_text(bytes, n, ret_json);
}
