/*
 * proto.h - the wire contract: limits, verbs, errors and messages as C records
 *
 * PROTOCOL.md says the same for people who write a client in another language. Strings and byte
 * ranges inside a decoded message point into the datagram that it was decoded from, and live as
 * long as that.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROTO_VERSION_MIN 1
#define PROTO_VERSION_MAX 1

#define PROTO_DATAGRAM_MAX     65536u /* bytes of one message */
#define PROTO_FDS_MAX          1u     /* fds that one message carries */
#define PROTO_DEPTH_MAX        8u     /* nesting of maps and arrays */
#define PROTO_ELEMENTS_MAX     4096u /* maps, arrays, keys and values of one message, all together */
#define PROTO_KEYS_MAX         64u /* keys of a map that is read: the message, a tensor, an error */
#define PROTO_INLINE_MAX       32768u /* bytes of an inline tensor */
#define PROTO_RANK_MAX         8u
#define PROTO_NAME_MAX         64u  /* bytes of a model or client name, without the NUL */
#define PROTO_TEXT_MAX         400u /* bytes of an error text, without the NUL */
#define PROTO_LIST_MAX         256u /* models of one page of model.list */
#define PROTO_BAD_MESSAGES_MAX 16u  /* undecodable datagrams after which a connection is closed */
#define PROTO_UNREAD_MAX       256u /* answers that wait for a client which does not read them */
#define PROTO_UNREAD_FDS_MAX   4u   /* ... that were sent with a descriptor; one more waits */
#define PROTO_UNREAD_BYTES_MAX (1u << 20) /* ... and their bytes, all together */
#define PROTO_PRIORITY_MAX     3u
#define PROTO_PRIORITY_DEFAULT 1u
#define PROTO_SOCKET_DEFAULT   "/run/fused/fused.sock"

/* X(NAME, "name", right). A verb cannot be added without saying who may use it: the right is part
 * of its row. */
#define PROTO_VERBS(X)                               \
    X(HELLO, "hello", RIGHT_ANY)                     \
    X(PING, "ping", RIGHT_ANY)                       \
    X(INFER, "infer", RIGHT_ANY)                     \
    X(CANCEL, "cancel", RIGHT_ANY)                   \
    X(BUFFER_CREATE, "buffer.create", RIGHT_ANY)     \
    X(BUFFER_REGISTER, "buffer.register", RIGHT_ANY) \
    X(BUFFER_RELEASE, "buffer.release", RIGHT_ANY)   \
    X(MODEL_LIST, "model.list", RIGHT_ANY)           \
    X(MODEL_DESCRIBE, "model.describe", RIGHT_ANY)   \
    X(MODEL_LOAD, "model.load", RIGHT_ADMIN)         \
    X(MODEL_UNLOAD, "model.unload", RIGHT_ADMIN)     \
    X(MODEL_RELOAD, "model.reload", RIGHT_ADMIN)     \
    X(STATUS, "status", RIGHT_ANY)                   \
    X(STATS, "stats", RIGHT_ANY)                     \
    X(DRAIN, "drain", RIGHT_ADMIN)                   \
    X(LOG, "log", RIGHT_ADMIN)

enum right { RIGHT_ANY, RIGHT_ADMIN };

enum verb {
#define X(NAME, name, right) VERB_##NAME,
    PROTO_VERBS(X)
#undef X
        VERB_COUNT
};

/* X(number, NAME, text). Numbers are part of the contract and are never given twice. */
#define PROTO_ERRORS(X)                                                 \
    X(1, BAD_MESSAGE, "the datagram is not a message of this protocol") \
    X(2, UNSUPPORTED, "this server does not offer that")                \
    X(3, NOT_FOUND, "there is no such thing")                           \
    X(4, DENIED, "you may not do that")                                 \
    X(5, BAD_TENSOR, "the tensor does not fit the model")               \
    X(6, BAD_BUFFER, "the buffer cannot be used")                       \
    X(7, BAD_MODEL, "the model cannot be loaded")                       \
    X(8, QUOTA, "a limit of your uid is reached")                       \
    X(9, BUSY, "a limit that all clients share is reached")             \
    X(10, NO_MEMORY, "out of memory")                                   \
    X(11, DEADLINE, "the deadline passed before the request ran")       \
    X(12, CANCELLED, "the request was cancelled")                       \
    X(13, SHUTTING_DOWN, "the server is shutting down")                 \
    X(14, GPU_LOST, "the device failed and the server restarts")        \
    X(15, INTERNAL, "the server failed")

enum proto_error {
    ERR_NONE = 0,
#define X(number, NAME, text) ERR_##NAME = (number),
    PROTO_ERRORS(X)
#undef X
};

/* UINT8 is no model dtype: it is what a compact result of a constant model is made of. */
#define PROTO_DTYPES(X)           \
    X(1, FLOAT32, "float32", 4)   \
    X(2, FLOAT16, "float16", 2)   \
    X(3, BFLOAT16, "bfloat16", 2) \
    X(4, UINT8, "uint8", 1)

enum proto_dtype {
#define X(number, NAME, name, size) PROTO_##NAME = (number),
    PROTO_DTYPES(X)
#undef X
};

enum buffer_kind { BUFFER_HOST = 0, BUFFER_CUDA = 1 };
enum result_kind { RESULT_FULL = 0, RESULT_COMPACT = 1 };

struct proto_str {
    const char *
        s; /* not NUL-terminated; never holds a NUL or a control character once decoded as a name */
    uint32_t n;
};

/* A tensor lies in a buffer, or its bytes travel in the message (inline). */
struct proto_tensor {
    enum proto_dtype dtype;
    uint8_t rank;
    int64_t shape[PROTO_RANK_MAX];
    bool is_inline;
    uint32_t buffer;      /* handle, when not inline */
    uint64_t offset;      /* bytes from the start of the buffer, when not inline */
    const uint8_t *bytes; /* when inline */
    uint32_t n_bytes;     /* when inline */
};

struct proto_infer {
    struct proto_str model;
    struct proto_tensor input;
    bool has_output; /* false: the result comes back inline, if it fits */
    struct proto_tensor output;
    bool has_deadline;
    uint64_t deadline_us; /* from the server's receipt */
    uint8_t priority;     /* 0 ... PROTO_PRIORITY_MAX */
    bool train;
    uint64_t seed, offset;
    enum result_kind result;
};

/* What a client sends. */
struct proto_request {
    uint64_t id;
    enum verb verb;
    union {
        struct {
            uint32_t version;
            struct proto_str name;
        } hello;
        struct proto_infer infer;
        struct {
            uint64_t target; /* id of the request to cancel */
        } cancel;
        struct {
            uint64_t size_bytes;
            enum buffer_kind kind;
            uint32_t device; /* with BUFFER_CUDA: its place in hello's list */
        } buffer_create;
        struct {
            uint64_t size_bytes; /* the fd comes with the datagram */
            enum buffer_kind kind;
            uint32_t device;
        } buffer_register;
        struct {
            uint32_t buffer;
        } buffer_release;
        struct {
            struct proto_str after; /* empty: from the start */
        } model_list;
        struct {
            struct proto_str name; /* describe, load, unload; empty for "all" with reload, "the
                                      daemon" with stats */
        } model;
        struct {
            struct proto_str level;
        } log;
    };
};

struct proto_infer_reply {
    struct proto_tensor output; /* where the result is: the request's output, or inline */
    uint64_t offset;            /* dropout offset after this request */
    uint64_t queue_us, run_us;  /* time spent waiting and running */
    uint32_t batch_rows;        /* rows of the batch that it ran in */
    bool late;                  /* the deadline passed while it ran */
    bool has_constant;          /* compact result of a constant model: */
    double constant;            /* ... the constant */
    uint32_t n_full;            /* ... and how many samples came back in full */
};

/*
 * What the server sends. Verbs whose answer is a document (hello, ping, model.*, status, stats,
 * drain, log) carry one msgpack map under "result"; it is kept as raw bytes here, and codec_json()
 * prints it.
 */
struct proto_reply {
    bool has_id; /* false: answer to a datagram whose id could not be read */
    uint64_t id;
    enum verb verb;         /* the reply says which verb it answers */
    enum proto_error error; /* ERR_NONE: success, and the fields below hold */
    struct proto_str text;  /* with an error: the reason */
    union {
        struct proto_infer_reply infer;
        struct {
            uint32_t buffer;
            uint64_t size_bytes; /* the fd, if any, comes with the datagram */
        } buffer;
        struct {
            const uint8_t *bytes;
            uint32_t n_bytes;
        } document;
    };
};

/* Names and texts of the lists above; NULL for a number that is not in them. */
const char *proto_verb_name(enum verb verb);
enum right proto_verb_right(enum verb verb);
const char *proto_error_name(enum proto_error error);
const char *proto_error_text(enum proto_error error);
const char *proto_dtype_name(enum proto_dtype dtype);
size_t proto_dtype_size(enum proto_dtype dtype);
/* The dtype of that name, or 0. */
enum proto_dtype proto_dtype_parse(const char *name, size_t n);

/* Bytes of a tensor of that dtype and shape. -EOVERFLOW when they do not fit in 63 bits, -EINVAL
 * for a negative size. */
int proto_tensor_size(enum proto_dtype dtype, unsigned rank, const int64_t *shape,
                      uint64_t *ret_bytes);

/* Bytes of the UTF-8 character at s, of which n bytes are there; 0 when there is no valid one. */
size_t proto_utf8_length(const char *s, size_t n);
/* The same, but 0 for a control character too: what may stand in a name or text. */
size_t proto_text_length(const char *s, size_t n);
/* 1 ... PROTO_NAME_MAX bytes of such characters. */
bool proto_name_valid(const char *s, size_t n);
