/*
 * codec.c - messages out of msgpack, and documents into it
 *
 * The only file that includes msgpack-c. Its unpacker allocates what a header claims and nests as
 * deep as a message asks, so codec_check() walks the raw bytes first; what passes costs at most 24
 * bytes of zone for each of PROTO_ELEMENTS_MAX items. The zone is cleared after each message: a
 * decoded record holds numbers, and strings that point into the datagram. encode.c writes messages
 * with the doc_*() functions of this file.
 *
 * Decoding reads straight down: the first wrong key sets the reason, later takes give zeros, and
 * the reason is looked at once, at the end. Reasons are fixed strings made from the table of keys,
 * so that nothing of what a peer sent comes back in an error text.
 */
#include "codec.h"

#include <errno.h>
#include <msgpack.h>
#include <string.h>

#include "base.h"
#include "keys.h"
#include "scan.h"

#define ZONE_CHUNK 4096

struct codec {
    msgpack_zone zone;
};

struct codec *codec_new(void)
{
    struct codec *codec = calloc(1, sizeof *codec);

    if (codec && !msgpack_zone_init(&codec->zone, ZONE_CHUNK)) {
        free(codec);
        return NULL;
    }
    return codec;
}

struct codec *codec_free(struct codec *codec)
{
    if (codec)
        msgpack_zone_destroy(&codec->zone);
    free(codec);
    return NULL;
}

static int refuse(const char *reason, const char **ret_reason)
{
    *ret_reason = reason;
    return -EBADMSG;
}

int codec_check(const uint8_t *bytes, size_t n, const char **ret_reason)
{
    return scan_check(bytes, n, ret_reason);
}

/* ---- keys ---- */

enum key {
#define X(KEY, key, want) KEY_##KEY,
    KEYS(X)
#undef X
        KEY_COUNT
};

static const struct key_row {
    const char *key;
    uint32_t n;
    const char *missing, *twice, *wrong;
} keys[] = {
#define X(KEY, key, want)                                                                    \
    [KEY_##KEY] = {key, sizeof key - 1, "\"" key "\" is missing", "\"" key "\" comes twice", \
                   "\"" key "\" must be " want},
    KEYS(X)
#undef X
};

/* ---- decoding ---- */

/* The values of one map by key, NULL where there is none; reason is set by the first failure. */
struct reader {
    const msgpack_object *values[KEY_COUNT];
    const char *reason;
};

static bool same_str(const msgpack_object *a, const char *s, uint32_t n)
{
    /* An empty string of msgpack-c has no pointer. */
    return a->via.str.size == n && (n == 0 || memcmp(a->via.str.ptr, s, n) == 0);
}

static void reader_fail(struct reader *reader, const char *reason)
{
    if (!reader->reason)
        reader->reason = reason;
}

/* Sorts the pairs of a map by key. Unknown keys are passed over, but none may come twice. */
static void reader_init(struct reader *reader, const msgpack_object *map)
{
    const msgpack_object_kv *pairs = map->via.map.ptr;

    *reader = (struct reader){0};
    if (map->type != MSGPACK_OBJECT_MAP)
        return reader_fail(reader, "not a map");
    if (map->via.map.size > PROTO_KEYS_MAX)
        return reader_fail(reader, "more than 64 keys in a map");
    for (uint32_t k = 0; k < map->via.map.size; k++) {
        const msgpack_object *key = &pairs[k].key;
        unsigned known = 0;

        if (key->type != MSGPACK_OBJECT_STR)
            return reader_fail(reader, "a key is not a string");
        while (known < KEY_COUNT && !same_str(key, keys[known].key, keys[known].n))
            known++;
        if (known == KEY_COUNT) {
            for (uint32_t j = 0; j < k; j++)
                if (same_str(&pairs[j].key, key->via.str.ptr, key->via.str.size))
                    return reader_fail(reader, "an unknown key comes twice");
        } else if (reader->values[known]) {
            return reader_fail(reader, keys[known].twice);
        } else {
            reader->values[known] = &pairs[k].val;
        }
    }
}

/* True when the key is there; nil stands for a key that is left out. */
static bool has(const struct reader *reader, enum key key)
{
    return !reader->reason && reader->values[key] &&
           reader->values[key]->type != MSGPACK_OBJECT_NIL;
}

/* The value of a required key if it has that type, else NULL and a reason. */
static const msgpack_object *take(struct reader *reader, enum key key, msgpack_object_type type)
{
    if (reader->reason)
        return NULL;
    if (!has(reader, key))
        reader_fail(reader, keys[key].missing);
    else if (reader->values[key]->type != type)
        reader_fail(reader, keys[key].wrong);
    return reader->reason ? NULL : reader->values[key];
}

static uint64_t take_uint(struct reader *reader, enum key key, uint64_t max)
{
    const msgpack_object *o = take(reader, key, MSGPACK_OBJECT_POSITIVE_INTEGER);

    if (o && o->via.u64 > max)
        reader_fail(reader, keys[key].wrong);
    return o && o->via.u64 <= max ? o->via.u64 : 0;
}

static uint64_t take_uint_or(struct reader *reader, enum key key, uint64_t max, uint64_t fallback)
{
    return has(reader, key) ? take_uint(reader, key, max) : fallback;
}

static bool take_bool(struct reader *reader, enum key key)
{
    const msgpack_object *o = take(reader, key, MSGPACK_OBJECT_BOOLEAN);

    return o && o->via.boolean;
}

static bool take_bool_or(struct reader *reader, enum key key, bool fallback)
{
    return has(reader, key) ? take_bool(reader, key) : fallback;
}

/* Of a key that is there. */
static double take_double(struct reader *reader, enum key key)
{
    const msgpack_object *o = reader->values[key];

    if (o->type == MSGPACK_OBJECT_FLOAT32)
        return o->via.f64;
    o = take(reader, key, MSGPACK_OBJECT_FLOAT64);
    return o ? o->via.f64 : 0;
}

static struct proto_str take_str(struct reader *reader, enum key key)
{
    const msgpack_object *o = take(reader, key, MSGPACK_OBJECT_STR);

    return o && o->via.str.size > 0 ? (struct proto_str){o->via.str.ptr, o->via.str.size}
                                    : (struct proto_str){"", 0};
}

static struct proto_str take_name(struct reader *reader, enum key key)
{
    struct proto_str s = take_str(reader, key);

    if (!reader->reason && !proto_name_valid(s.s, s.n))
        reader_fail(reader, keys[key].wrong);
    return reader->reason ? (struct proto_str){"", 0} : s;
}

/* Absent and empty are the same. */
static struct proto_str take_name_or_none(struct reader *reader, enum key key)
{
    if (!has(reader, key))
        return (struct proto_str){"", 0};
    if (reader->values[key]->type == MSGPACK_OBJECT_STR && reader->values[key]->via.str.size == 0)
        return (struct proto_str){"", 0};
    return take_name(reader, key);
}

static bool str_is(struct proto_str s, const char *word)
{
    return s.n == strlen(word) && memcmp(s.s, word, s.n) == 0;
}

/* One of two words, as 0 or 1; 0 when the key is left out. */
static int take_word_or_0(struct reader *reader, enum key key, const char *zero, const char *one)
{
    struct proto_str s;

    if (!has(reader, key))
        return 0;
    s = take_str(reader, key);
    if (reader->reason || str_is(s, zero))
        return 0;
    if (!str_is(s, one))
        reader_fail(reader, keys[key].wrong);
    return 1;
}

static void take_shape(struct reader *reader, struct proto_tensor *tensor)
{
    const msgpack_object *o = take(reader, KEY_SHAPE, MSGPACK_OBJECT_ARRAY);

    if (!o)
        return;
    if (o->via.array.size > PROTO_RANK_MAX)
        return reader_fail(reader, keys[KEY_SHAPE].wrong);
    tensor->rank = (uint8_t)o->via.array.size;
    for (unsigned k = 0; k < tensor->rank; k++) {
        const msgpack_object *d = &o->via.array.ptr[k];

        if (d->type != MSGPACK_OBJECT_POSITIVE_INTEGER || d->via.u64 > INT64_MAX)
            return reader_fail(reader, keys[KEY_SHAPE].wrong);
        tensor->shape[k] = (int64_t)d->via.u64;
    }
}

static void take_tensor(struct reader *outer, enum key key, struct proto_tensor *ret)
{
    const msgpack_object *map = take(outer, key, MSGPACK_OBJECT_MAP);
    struct proto_tensor tensor = {0};
    struct reader reader;
    struct proto_str dtype;

    if (!map)
        return;
    reader_init(&reader, map);
    dtype = take_str(&reader, KEY_DTYPE);
    if (!reader.reason) {
        tensor.dtype = proto_dtype_parse(dtype.s, dtype.n);
        if (!tensor.dtype)
            reader_fail(&reader, keys[KEY_DTYPE].wrong);
    }
    take_shape(&reader, &tensor);
    tensor.is_inline = has(&reader, KEY_BYTES);
    if (tensor.is_inline) {
        const msgpack_object *o = take(&reader, KEY_BYTES, MSGPACK_OBJECT_BIN);

        if (has(&reader, KEY_BUFFER))
            reader_fail(&reader, "a tensor has both \"buffer\" and \"bytes\"");
        if (o && o->via.bin.size > PROTO_INLINE_MAX)
            reader_fail(&reader, keys[KEY_BYTES].wrong);
        if (o) {
            tensor.bytes = (const uint8_t *)(o->via.bin.size > 0 ? o->via.bin.ptr : "");
            tensor.n_bytes = o->via.bin.size;
        }
    } else {
        if (!has(&reader, KEY_BUFFER))
            reader_fail(&reader, "a tensor has neither \"buffer\" nor \"bytes\"");
        tensor.buffer = (uint32_t)take_uint(&reader, KEY_BUFFER, UINT32_MAX);
        tensor.offset = take_uint_or(&reader, KEY_OFFSET, UINT64_MAX, 0);
    }
    if (reader.reason)
        reader_fail(outer, reader.reason);
    else
        *ret = tensor;
}

static void take_infer(struct reader *reader, struct proto_infer *infer)
{
    infer->model = take_name(reader, KEY_MODEL);
    take_tensor(reader, KEY_INPUT, &infer->input);
    infer->has_output = has(reader, KEY_OUTPUT);
    if (infer->has_output) {
        take_tensor(reader, KEY_OUTPUT, &infer->output);
        if (infer->output.is_inline)
            reader_fail(reader, "\"output\" must lie in a buffer; leave it out for an inline one");
    }
    infer->has_deadline = has(reader, KEY_DEADLINE_US);
    infer->deadline_us = take_uint_or(reader, KEY_DEADLINE_US, UINT64_MAX, 0);
    infer->priority =
        (uint8_t)take_uint_or(reader, KEY_PRIORITY, PROTO_PRIORITY_MAX, PROTO_PRIORITY_DEFAULT);
    infer->train = take_bool_or(reader, KEY_TRAIN, false);
    infer->seed = take_uint_or(reader, KEY_SEED, UINT64_MAX, 0);
    infer->offset = take_uint_or(reader, KEY_OFFSET, UINT64_MAX, 0);
    infer->result = (enum result_kind)take_word_or_0(reader, KEY_RESULT, "full", "compact");
}

/* VERB_COUNT for a word that is no verb. */
static enum verb parse_verb(struct proto_str s)
{
    unsigned verb = 0;

    while (verb < VERB_COUNT && !str_is(s, proto_verb_name((enum verb)verb)))
        verb++;
    return (enum verb)verb;
}

static void take_request(struct reader *reader, struct proto_request *request)
{
    request->id = take_uint(reader, KEY_ID, UINT64_MAX);
    request->verb = parse_verb(take_str(reader, KEY_VERB));
    switch (request->verb) {
    case VERB_HELLO:
        request->hello.version = (uint32_t)take_uint(reader, KEY_VERSION, UINT32_MAX);
        request->hello.name = take_name(reader, KEY_NAME);
        break;
    case VERB_INFER:
        take_infer(reader, &request->infer);
        break;
    case VERB_CANCEL:
        request->cancel.target = take_uint(reader, KEY_TARGET, UINT64_MAX);
        break;
    case VERB_BUFFER_CREATE:
        request->buffer_create.size_bytes = take_uint(reader, KEY_SIZE, UINT64_MAX);
        request->buffer_create.kind =
            (enum buffer_kind)take_word_or_0(reader, KEY_KIND, "host", "cuda");
        request->buffer_create.device = (uint32_t)take_uint_or(reader, KEY_DEVICE, UINT32_MAX, 0);
        break;
    case VERB_BUFFER_REGISTER:
        request->buffer_register.size_bytes = take_uint(reader, KEY_SIZE, UINT64_MAX);
        request->buffer_register.kind =
            (enum buffer_kind)take_word_or_0(reader, KEY_KIND, "host", "cuda");
        request->buffer_register.device = (uint32_t)take_uint_or(reader, KEY_DEVICE, UINT32_MAX, 0);
        break;
    case VERB_BUFFER_RELEASE:
        request->buffer_release.buffer = (uint32_t)take_uint(reader, KEY_BUFFER, UINT32_MAX);
        break;
    case VERB_MODEL_LIST:
        request->model_list.after = take_name_or_none(reader, KEY_AFTER);
        break;
    case VERB_MODEL_DESCRIBE:
    case VERB_MODEL_LOAD:
    case VERB_MODEL_UNLOAD:
        request->model.name = take_name(reader, KEY_MODEL);
        break;
    case VERB_MODEL_RELOAD:
    case VERB_STATS:
        request->model.name = take_name_or_none(reader, KEY_MODEL);
        break;
    case VERB_LOG:
        request->log.level = take_name(reader, KEY_LEVEL);
        break;
    case VERB_PING:
    case VERB_STATUS:
    case VERB_DRAIN:
        break;
    case VERB_COUNT:
    default:
        reader_fail(reader, "unknown verb");
        break;
    }
}

/* Checks, then unpacks into the zone, which the caller clears. */
static int unpack(struct codec *codec, const uint8_t *bytes, size_t n, msgpack_object *ret,
                  const char **ret_reason)
{
    size_t pos = 0;
    int r;

    if (n > PROTO_DATAGRAM_MAX)
        return refuse("more than 65536 bytes", ret_reason);
    r = codec_check(bytes, n, ret_reason);
    if (r < 0)
        return r;
    /* What passed the check is whole msgpack: only memory can be lacking. */
    if (msgpack_unpack((const char *)bytes, n, &pos, &codec->zone, ret) != MSGPACK_UNPACK_SUCCESS) {
        *ret_reason = "out of memory";
        return -ENOMEM;
    }
    return 0;
}

/* The id of whatever map it is, for the answer to a message that is wrong elsewhere. Two ids are
 * none. */
static bool find_id(const msgpack_object *map, uint64_t *ret_id)
{
    unsigned n_ids = 0;
    uint64_t id = 0;

    if (map->type != MSGPACK_OBJECT_MAP)
        return false;
    for (uint32_t k = 0; k < map->via.map.size; k++) {
        const msgpack_object_kv *pair = &map->via.map.ptr[k];

        if (pair->key.type != MSGPACK_OBJECT_STR ||
            !same_str(&pair->key, keys[KEY_ID].key, keys[KEY_ID].n))
            continue;
        if (pair->val.type != MSGPACK_OBJECT_POSITIVE_INTEGER)
            return false;
        id = pair->val.via.u64;
        n_ids++;
    }
    if (n_ids == 1)
        *ret_id = id;
    return n_ids == 1;
}

int codec_decode_request(struct codec *codec, const uint8_t *bytes, size_t n,
                         struct proto_request *ret, bool *ret_has_id, uint64_t *ret_id,
                         const char **ret_reason)
{
    struct proto_request request = {0};
    struct reader reader;
    msgpack_object map;
    int r;

    *ret_has_id = false;
    r = unpack(codec, bytes, n, &map, ret_reason);
    if (r == 0) {
        *ret_has_id = find_id(&map, ret_id);
        reader_init(&reader, &map);
        take_request(&reader, &request);
        if (reader.reason)
            r = refuse(reader.reason, ret_reason);
        else
            *ret = request;
    }
    msgpack_zone_clear(&codec->zone);
    return r;
}

static void take_infer_reply(struct reader *reader, struct proto_infer_reply *infer)
{
    take_tensor(reader, KEY_OUTPUT, &infer->output);
    infer->offset = take_uint(reader, KEY_OFFSET, UINT64_MAX);
    infer->queue_us = take_uint(reader, KEY_QUEUE_US, UINT64_MAX);
    infer->run_us = take_uint(reader, KEY_RUN_US, UINT64_MAX);
    infer->batch_rows = (uint32_t)take_uint(reader, KEY_BATCH_ROWS, UINT32_MAX);
    infer->late = take_bool(reader, KEY_LATE);
    infer->has_constant = has(reader, KEY_CONSTANT);
    if (infer->has_constant) {
        infer->constant = take_double(reader, KEY_CONSTANT);
        infer->n_full = (uint32_t)take_uint(reader, KEY_FULL, UINT32_MAX);
    }
}

static void take_error(struct reader *outer, struct proto_reply *reply)
{
    const msgpack_object *map = take(outer, KEY_ERROR, MSGPACK_OBJECT_MAP);
    struct reader reader;
    uint64_t code;

    if (!map)
        return;
    reader_init(&reader, map);
    code = take_uint(&reader, KEY_CODE, UINT32_MAX);
    if (!reader.reason && code == 0)
        reader_fail(&reader, keys[KEY_CODE].wrong);
    /* A number that a later server has and this list has not. */
    reply->error = code > INT32_MAX || !proto_error_name((enum proto_error)code)
                       ? ERR_INTERNAL
                       : (enum proto_error)code;
    take_name(&reader, KEY_NAME);
    reply->text = take_str(&reader, KEY_TEXT);
    if (reply->text.n > PROTO_TEXT_MAX)
        reader_fail(&reader, keys[KEY_TEXT].wrong);
    for (size_t at = 0, length; at < reply->text.n && !reader.reason; at += length) {
        length = proto_text_length(reply->text.s + at, reply->text.n - at);
        if (length == 0)
            reader_fail(&reader, keys[KEY_TEXT].wrong);
    }
    if (reader.reason)
        reader_fail(outer, reader.reason);
}

static void take_result(struct reader *outer, const uint8_t *bytes, size_t n,
                        struct proto_reply *reply)
{
    const msgpack_object *map = take(outer, KEY_RESULT, MSGPACK_OBJECT_MAP);
    struct reader reader;
    size_t n_document = 0;

    if (!map)
        return;
    switch (reply->verb) {
    case VERB_INFER:
        reader_init(&reader, map);
        take_infer_reply(&reader, &reply->infer);
        break;
    case VERB_BUFFER_CREATE:
    case VERB_BUFFER_REGISTER:
        reader_init(&reader, map);
        reply->buffer.buffer = (uint32_t)take_uint(&reader, KEY_BUFFER, UINT32_MAX);
        reply->buffer.size_bytes = take_uint(&reader, KEY_SIZE, UINT64_MAX);
        break;
    default: /* kept as raw bytes, and read as far as its user goes; it is there, being `map` */
        reader.reason = NULL;
        (void)scan_find(bytes, n, "result", &reply->document.bytes, &n_document);
        reply->document.n_bytes = (uint32_t)n_document;
    }
    if (reader.reason)
        reader_fail(outer, reader.reason);
}

/* Only an error may answer a verb that the server does not know, and carry no id. */
static void take_reply(struct reader *reader, const uint8_t *bytes, size_t n,
                       struct proto_reply *reply)
{
    bool is_error = has(reader, KEY_ERROR);

    reply->has_id = has(reader, KEY_ID) || !is_error;
    if (reply->has_id)
        reply->id = take_uint(reader, KEY_ID, UINT64_MAX);
    reply->verb = VERB_COUNT;
    if (has(reader, KEY_VERB) || !is_error) {
        reply->verb = parse_verb(take_str(reader, KEY_VERB));
        if (reply->verb == VERB_COUNT)
            reader_fail(reader, "unknown verb");
    }
    if (!is_error)
        take_result(reader, bytes, n, reply);
    else if (has(reader, KEY_RESULT))
        reader_fail(reader, "a reply has both \"error\" and \"result\"");
    else
        take_error(reader, reply);
}

int codec_decode_reply(struct codec *codec, const uint8_t *bytes, size_t n, struct proto_reply *ret,
                       const char **ret_reason)
{
    struct proto_reply reply = {0};
    struct reader reader;
    msgpack_object map;
    int r;

    r = unpack(codec, bytes, n, &map, ret_reason);
    if (r == 0) {
        reader_init(&reader, &map);
        take_reply(&reader, bytes, n, &reply);
        if (reader.reason)
            r = refuse(reader.reason, ret_reason);
        else
            *ret = reply;
    }
    msgpack_zone_clear(&codec->zone);
    return r;
}

/* ---- documents ---- */

static int doc_put(void *data, const char *bytes, size_t n)
{
    struct doc *doc = data;

    if (!doc->error && n > doc->size - doc->used)
        doc->error = -EMSGSIZE;
    if (doc->error)
        return -1;
    memcpy(doc->bytes + doc->used, bytes, n);
    doc->used += n;
    return 0;
}

/* A packer for the next value, which writes nothing after a failure. */
static msgpack_packer doc_packer(struct doc *doc)
{
    msgpack_packer packer;

    if (!doc->error && doc->depth == 0 && doc->used > 0)
        doc->error = -EINVAL; /* a second value after the whole one */
    msgpack_packer_init(&packer, doc, doc_put);
    return packer;
}

/* Takes the value just written off what its container owes, and closes what is complete. */
static void doc_close(struct doc *doc)
{
    while (!doc->error && doc->depth > 0 && --doc->open[doc->depth - 1] == 0)
        doc->depth--;
}

static void doc_open(struct doc *doc, uint32_t n_items)
{
    if (!doc->error && doc->depth == PROTO_DEPTH_MAX)
        doc->error = -EMSGSIZE;
    if (!doc->error)
        doc->open[doc->depth++] = n_items + 1;
    doc_close(doc);
}

void doc_init(struct doc *doc, uint8_t *bytes, size_t size)
{
    *doc = (struct doc){.bytes = bytes, .size = size};
}

void doc_map(struct doc *doc, uint32_t n_pairs)
{
    msgpack_packer packer = doc_packer(doc);

    if (n_pairs > PROTO_ELEMENTS_MAX && !doc->error)
        doc->error = -EMSGSIZE;
    msgpack_pack_map(&packer, n_pairs);
    doc_open(doc, 2 * n_pairs);
}

void doc_list(struct doc *doc, uint32_t n)
{
    msgpack_packer packer = doc_packer(doc);

    if (n > PROTO_ELEMENTS_MAX && !doc->error)
        doc->error = -EMSGSIZE;
    msgpack_pack_array(&packer, n);
    doc_open(doc, n);
}

void doc_key(struct doc *doc, const char *key)
{
    doc_str(doc, key);
}

void doc_str(struct doc *doc, const char *s)
{
    doc_str_n(doc, s, strlen(s));
}

void doc_str_n(struct doc *doc, const char *s, size_t n)
{
    msgpack_packer packer = doc_packer(doc);

    if (n > doc->size && !doc->error)
        doc->error = -EMSGSIZE;
    msgpack_pack_str(&packer, n);
    msgpack_pack_str_body(&packer, s, n);
    doc_close(doc);
}

void doc_bin(struct doc *doc, const void *bytes, size_t n)
{
    msgpack_packer packer = doc_packer(doc);

    if (n > doc->size && !doc->error)
        doc->error = -EMSGSIZE;
    msgpack_pack_bin(&packer, n);
    msgpack_pack_bin_body(&packer, bytes, n);
    doc_close(doc);
}

void doc_raw(struct doc *doc, const uint8_t *bytes, size_t n)
{
    doc_packer(doc);
    doc_put(doc, (const char *)bytes, n);
    doc_close(doc);
}

#define DOC_SCALAR(name, type, pack)             \
    void name(struct doc *doc, type v)           \
    {                                            \
        msgpack_packer packer = doc_packer(doc); \
                                                 \
        pack(&packer, v);                        \
        doc_close(doc);                          \
    }

DOC_SCALAR(doc_uint, uint64_t, msgpack_pack_uint64)
DOC_SCALAR(doc_int, int64_t, msgpack_pack_int64)
DOC_SCALAR(doc_double, double, msgpack_pack_double)

void doc_bool(struct doc *doc, bool v)
{
    doc_raw(doc, v ? (const uint8_t[]){0xc3} : (const uint8_t[]){0xc2}, 1);
}

void doc_nil(struct doc *doc)
{
    doc_raw(doc, (const uint8_t[]){0xc0}, 1);
}

int doc_finish(struct doc *doc)
{
    if (!doc->error && (doc->depth > 0 || doc->used == 0))
        doc->error = -EINVAL;
    return doc->error ? doc->error : (int)doc->used;
}
