/*
 * fused.h - client library of the fused inference daemon
 *
 * A connection talks to one daemon over a Unix socket. Tensors lie in buffers: shared memory that
 * the client and the daemon (and its GPU) both see, so that nothing is copied or serialised on the
 * way. Small tensors may travel inside the message instead.
 *
 *     struct fused *f;
 *     struct fused_buffer *in, *out;
 *     struct fused_infer call = FUSED_INFER_INIT;
 *     struct fused_result result;
 *
 *     fused_connect(NULL, "example", &f);
 *     fused_buffer_create(f, 1024 * 8192 * 4, &in);
 *     ... fill fused_buffer_data(in) ...
 *     call.model = "gemm-groupnorm-min-bias";
 *     call.input = fused_tensor_in(in, 0, FUSED_FLOAT32, 2, (int64_t[]){1024, 8192});
 *     call.output = fused_tensor_in(out, 0, FUSED_FLOAT32, 4, (int64_t[]){1, 8192, 1024, 1});
 *     if (fused_run(f, &call, &result) != 0)
 *         fprintf(stderr, "%s\n", fused_error_text(f));
 *
 * Return codes. 0 is success. A positive code is an answer of the server (enum fused_code, whose
 * numbers and names are those of PROTOCOL.md); a negative one is a negative errno of this side:
 * -EINVAL a wrong argument, -ENOTCONN or -EPIPE the server is gone, -ETIMEDOUT, -ENOMEM, -EPROTO
 * the server broke the protocol. fused_error_text() has the reason of the last failure on that
 * connection. Without a connection (NULL), or without a place for what it returns where none is
 * optional, a call answers -EINVAL; those that return no code do nothing, or answer 0 or NULL.
 *
 * Threads. Different connections are independent. One connection, its buffers and its results may
 * be used by one thread at a time; the library makes no threads, installs no signal handlers and
 * never writes to a terminal. After fork() a connection belongs to the parent: in the child every
 * call on it answers -EPERM, except fused_close(), which frees without a word to the server.
 */
#ifndef FUSED_H
#define FUSED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

#define FUSED_RANK_MAX   8
#define FUSED_INLINE_MAX 32768 /* bytes of a tensor that travels in a message */

struct fused;        /* a connection */
struct fused_buffer; /* a region of shared memory, known to both sides */

enum fused_code {
    FUSED_OK = 0,
    FUSED_BAD_MESSAGE = 1,
    FUSED_UNSUPPORTED = 2,
    FUSED_NOT_FOUND = 3,
    FUSED_DENIED = 4,
    FUSED_BAD_TENSOR = 5,
    FUSED_BAD_BUFFER = 6,
    FUSED_BAD_MODEL = 7,
    FUSED_QUOTA = 8,
    FUSED_BUSY = 9,
    FUSED_NO_MEMORY = 10,
    FUSED_DEADLINE = 11,
    FUSED_CANCELLED = 12,
    FUSED_SHUTTING_DOWN = 13,
    FUSED_GPU_LOST = 14,
    FUSED_INTERNAL = 15
};

enum fused_dtype { FUSED_FLOAT32 = 1, FUSED_FLOAT16 = 2, FUSED_BFLOAT16 = 3, FUSED_UINT8 = 4 };

/* Library version, "1.0.0". */
const char *fused_version(void);

/* Name of a code, "BAD_TENSOR"; of a negative errno its errno name's text. Never NULL, static. */
const char *fused_code_name(int code);

/* Bytes of one element; 0 for an unknown dtype. */
size_t fused_dtype_size(enum fused_dtype dtype);

/*
 * Connects and says hello. `socket` NULL: $FUSED_SOCKET, else the default path. `name` is shown in
 * the server's status to its administrator. Blocks until the server answers, at most 5 s. On
 * failure *ret is untouched, and fused_error_text(NULL) has the reason.
 */
int fused_connect(const char *socket, const char *name, struct fused **ret);

/*
 * Closes. Requests without an answer are cancelled by the server; their results are lost. Buffers
 * of this connection become invalid in the server; what is in them can still be read (a copy is
 * made of those that the server had made: free them first where that is not wanted). Their memory
 * is unmapped by fused_buffer_free(), which must still be called. NULL is fine.
 */
void fused_close(struct fused *f);

/*
 * Reason of the last failure on this connection; "" when there was none. Valid until the next call.
 * NULL: of this thread's last fused_connect() that failed: the server's reason, or the path and
 * what is wrong there; valid until the thread's next one.
 */
const char *fused_error_text(const struct fused *f);

/* Limit for every blocking call on this connection, in milliseconds; -1 (the default) waits for
 * ever. A call over its limit answers -ETIMEDOUT, and the connection goes on. */
void fused_set_timeout(struct fused *f, int timeout_ms);

/*
 * Coming back by itself. 0 (the default): when the server goes away, every request in flight gets a
 * result that says -EPIPE, and the connection is at its end. Otherwise, for at most limit_ms from
 * then on (-1: for ever), the library connects again, registers the memory of every buffer again,
 * so that your pointers stay valid, and sends what has no answer again. That goes for inferences,
 * which only write their result, and for calls that only ask or make a buffer; what changes the
 * server (fused_load() ... fused_log_level()) answers -EPIPE instead: it may have been done. So
 * that it can be repeated, a request must find its input unchanged and its result unread until its
 * answer, as is the rule anyway.
 *
 * A request that the server refuses because it ends (FUSED_SHUTTING_DOWN, FUSED_GPU_LOST) waits for
 * the next server, too. Each request still gets exactly one result: that of the server that ran it;
 * FUSED_DEADLINE when its deadline passes meanwhile; FUSED_CANCELLED when you asked for that;
 * -EPIPE when the time is over, or when a fourth server ended while it had it. After limit_ms
 * without a server the connection is at its end. Calls wait meanwhile no longer than
 * fused_set_timeout() and their own time-out say; what fused_submit() takes goes out later.
 *
 * Set it right after fused_connect(): buffers are then memory that this side makes, at a descriptor
 * each, and those made before (and all that are no host memory) cannot be registered again.
 * Requests that use those, or one that the new server refuses, get FUSED_NOT_FOUND. In an event
 * loop fused_fd() also becomes readable when there is something to do, and fused_next(f, 0, ...)
 * does it.
 */
void fused_set_reconnect(struct fused *f, int limit_ms);

/* How often it came back. fused_hello() has what the newest server said. */
unsigned fused_reconnects(const struct fused *f);

/* ---- buffers ---- */

/*
 * Makes a buffer of `size` bytes, zeroed. The server makes, pins and charges it to your uid;
 * FUSED_QUOTA when that is over a limit. Blocks: on a GPU for seconds (440 MiB: eight to ten)
 * while other processes compute, which pinning must not hold up; so make buffers early, and keep
 * them.
 */
int fused_buffer_create(struct fused *f, size_t size, struct fused_buffer **ret);

/*
 * Makes a buffer of a memfd that you have (sealed or sealable against shrinking and growing, all
 * pages allocated). The fd stays yours and may be closed after. Blocks, as above.
 */
int fused_buffer_register(struct fused *f, int memfd, size_t size, struct fused_buffer **ret);

/*
 * Makes a buffer of `size` bytes, zeroed, in the memory of the server's GPU, and maps it into this
 * process: tensors in it cross no bus. Opens libcuda.so.1 the first time, and keeps the GPU's
 * primary context while the buffer lives. The server rounds up to 2 MiB and charges that.
 * FUSED_UNSUPPORTED: the server has no GPU; -ENODEV: this process has no libcuda, or does not see
 * that GPU; -EINVAL: CUDA refuses. Blocks.
 */
int fused_buffer_create_device(struct fused *f, size_t size, struct fused_buffer **ret);

/* The same on one of several GPUs: `device` counts the server's from 0, in the order of its hello.
 * Requests on such memory run there, if the model is on that GPU; else they get FUSED_BAD_BUFFER.
 */
int fused_buffer_create_on(struct fused *f, unsigned device, size_t size,
                           struct fused_buffer **ret);

/* Its address on the GPU (a CUdeviceptr), in every context of this process on that GPU, until
 * fused_buffer_free(); 0 for a buffer of host pages. What the server writes is there once the
 * answer has come; what you write must be there (synchronise your stream) before you send. */
uint64_t fused_buffer_device(const struct fused_buffer *buffer);

/* The mapping: readable and writable, page-aligned, valid until fused_buffer_free(). NULL for a
 * device buffer. */
void *fused_buffer_data(const struct fused_buffer *buffer);
size_t fused_buffer_size(const struct fused_buffer *buffer);

/*
 * Gives the buffer back and unmaps it. Requests in flight that use it still end properly: the
 * server holds the region until then (one that waits for the next server gets FUSED_NOT_FOUND).
 * Does not wait: what cannot be sent at once goes out with later calls. NULL is fine.
 */
void fused_buffer_free(struct fused_buffer *buffer);

/* ---- inference ---- */

/*
 * A C-contiguous tensor: in a buffer, `offset` bytes from its start, or, with buffer == NULL, at
 * `data` in your memory (then its bytes travel in the message: at most FUSED_INLINE_MAX). dtype 0
 * means "no tensor".
 */
struct fused_tensor {
    enum fused_dtype dtype;
    int rank;
    int64_t shape[FUSED_RANK_MAX];
    struct fused_buffer *buffer;
    size_t offset;
    void *data;
};

struct fused_tensor fused_tensor_in(struct fused_buffer *buffer, size_t offset,
                                    enum fused_dtype dtype, int rank, const int64_t *shape);
struct fused_tensor fused_tensor_at(void *data, enum fused_dtype dtype, int rank,
                                    const int64_t *shape);

/* Set to FUSED_INFER_INIT, then fill in. Strings and arrays are only read during the call. */
struct fused_infer {
    const char *model;
    struct fused_tensor input;
    /*
     * Where the result goes. In a buffer: the server writes it there. At `data`, or no tensor at
     * all: it comes back in the reply (FUSED_INLINE_MAX bytes at most, else FUSED_BAD_TENSOR) and
     * is copied to `data`, or kept in the result.
     */
    struct fused_tensor output;
    uint64_t deadline_us; /* from the server's receipt; 0: none */
    int priority;         /* 0 (first to wait) ... 3 (needs admin); 1 is normal */
    int train; /* dropout masks, drawn from seed and offset as PyTorch's CUDA generator does */
    uint64_t seed, offset;
    int compact; /* only the factors of an outer sum, or what a constant leaves (of max_rows rows at
                    most): see PROTOCOL.md, section 6 */
    void *user;  /* comes back in the result */
};

#define FUSED_INFER_INIT                                                                         \
    {                                                                                            \
        0, {(enum fused_dtype)0, 0, {0}, 0, 0, 0}, {(enum fused_dtype)0, 0, {0}, 0, 0, 0}, 0, 1, \
            0, 0, 0, 0, 0                                                                        \
    }

/* The one final answer of a request. */
struct fused_result {
    uint64_t id;
    void *user;
    int code;       /* 0, an enum fused_code, or the -errno that ended the connection (-EPIPE,
                       -EPROTO) or kept the result from its place (-EINVAL, -ENOMEM) */
    char text[256]; /* the reason when code is not 0 */
    struct fused_tensor
        output; /* dtype, shape and place of the result. Inline without `data`: data points into the
                   connection and is valid until the next call on it */
    uint64_t offset;           /* dropout offset after this request */
    uint64_t queue_us, run_us; /* in the server: waiting, running */
    uint32_t batch_rows;       /* rows of the batch that it ran in */
    uint32_t repeats;          /* how often it was sent again: see fused_set_reconnect() */
    int late;                  /* the deadline passed while it ran */
    int has_constant;          /* compact result of a constant model */
    double constant;
    uint32_t n_full;
};

/*
 * Runs one request and waits for its answer. Returns its code (also in *ret, which may be NULL), or
 * a negative errno. After -ETIMEDOUT (see fused_set_timeout()) the request is asked to be cancelled
 * and stays in flight under ret->id until fused_wait() or fused_next() has taken its answer; until
 * then its buffers are the server's. Memory at `data` is not written any more.
 */
int fused_run(struct fused *f, const struct fused_infer *call, struct fused_result *ret);

/*
 * Sends a request and returns at once; *ret_id is its id. Blocks only while the socket is full, or
 * while the server may owe this connection as many answers as it keeps for a client that does not
 * read: 256, or 1 MiB with their inline results (those without a declared output count as
 * FUSED_INLINE_MAX).
 */
int fused_submit(struct fused *f, const struct fused_infer *call, uint64_t *ret_id);

/*
 * Takes the next answer, of whichever submitted request ends first. timeout_ms 0: only if one is
 * there; -1: wait, as long as fused_set_timeout() says. 0 with *ret filled (look at ret->code),
 * -EAGAIN when there is none in time, -ENOENT when nothing is in flight, -EPIPE or -EPROTO when
 * nothing is and the connection is at its end. When that end comes, every request in flight gets a
 * result that says so.
 */
int fused_next(struct fused *f, int timeout_ms, struct fused_result *ret);

/* Waits for that request only; answers of others are kept for fused_next(). Returns as fused_next()
 * does; -ENOENT for an id not in flight. */
int fused_wait(struct fused *f, uint64_t id, int timeout_ms, struct fused_result *ret);

/*
 * Asks the server to cancel. The request still gets its one final answer: FUSED_CANCELLED, or its
 * result if it was too late. Only after that answer may its buffers be reused. FUSED_NOT_FOUND when
 * it has ended; its answer may still be on its way then, so that fused_next(f, 0, ...) may say
 * -EAGAIN once more.
 */
int fused_cancel(struct fused *f, uint64_t id);

/* For event loops: readable when fused_next(f, 0, ...) may have something, whichever call took it
 * in. Only to be waited on. Owned by the connection. A negative errno when it cannot be made. */
int fused_fd(const struct fused *f);

/* Requests sent and not yet taken by fused_next(), fused_wait() or fused_run(). */
unsigned fused_in_flight(const struct fused *f);

/* ---- asking and administering; each blocks for its answer ---- */

int fused_ping(struct fused *f);

/* Documents (their keys: PROTOCOL.md) as JSON text, to be freed with free(). *ret_json is untouched
 * unless 0 is returned. */
int fused_hello(struct fused *f, char **ret_json); /* limits, backend, devices */
int fused_status(struct fused *f, char **ret_json);
int fused_stats(struct fused *f, const char *model, char **ret_json); /* model NULL: the daemon */
int fused_models(struct fused *f, char **ret_json);                   /* all pages, one array */
int fused_describe(struct fused *f, const char *model, char **ret_json);

/* Admin verbs: uid 0, the daemon's own uid, or a member of admin_group. *ret_json may be NULL. */
int fused_load(struct fused *f, const char *model, char **ret_json);
int fused_unload(struct fused *f, const char *model, char **ret_json);
int fused_reload(struct fused *f, const char *model,
                 char **ret_json); /* model NULL: all that changed */
int fused_drain(struct fused *f, char **ret_json);
int fused_log_level(struct fused *f, const char *level, char **ret_json);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
