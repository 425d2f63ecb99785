/*
 * server.h - a server of one connection, played by a thread that follows a test's script
 *
 * The script is a function over the accepted socket. What it finds wrong ends the test program, for
 * an assertion of cmocka may not leave another thread.
 */
#pragma once

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base.h"
#include "proto/codec.h"
#include "proto/shm.h"
#include "proto/wire.h"

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "server, line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
            abort();                                                                          \
        }                                                                                     \
    } while (0)

struct server {
    char dir[64], path[96];
    int listener, socket;
    pthread_t thread;
    void (*script)(struct server *server);
    struct codec *codec;
    uint8_t rx[PROTO_DATAGRAM_MAX], tx[PROTO_DATAGRAM_MAX];
    struct proto_request request; /* read last */
    int fd;                       /* that came with it, or -1 */
    struct shm buffers[4];        /* by handle, from 1 */
    uint32_t n_buffers;
    unsigned n_released;
};

static inline void *server_run(void *data)
{
    struct server *s = data;

    s->socket = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(s->socket >= 0);
    s->script(s);
    s->socket = close_fd(s->socket);
    return NULL;
}

static inline void server_start(struct server *s, void (*script)(struct server *))
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    *s = (struct server){.script = script, .fd = -1};
    snprintf(s->dir, sizeof s->dir, "/tmp/fused-test-client-XXXXXX");
    CHECK(mkdtemp(s->dir));
    snprintf(s->path, sizeof s->path, "%s/s", s->dir);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", s->path);
    s->codec = codec_new();
    CHECK(s->codec);
    s->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(s->listener >= 0);
    CHECK(bind(s->listener, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(listen(s->listener, 4) == 0);
    CHECK(pthread_create(&s->thread, NULL, server_run, s) == 0);
}

/* Waits for the end of the script. */
static inline void server_stop(struct server *s)
{
    CHECK(pthread_join(s->thread, NULL) == 0);
    close(s->listener);
    for (unsigned k = 0; k < ARRAY_SIZE(s->buffers); k++)
        if (k < s->n_buffers)
            shm_deinit(&s->buffers[k]);
    codec_free(s->codec);
    unlink(s->path);
    rmdir(s->dir);
}

/* Reads the next request into s->request; false when the client has closed. */
static inline bool server_read(struct server *s)
{
    const char *reason = "";
    uint64_t id;
    bool has_id;
    int n;

    s->fd = close_fd(s->fd);
    n = wire_recv(s->socket, s->rx, sizeof s->rx, &s->fd);
    CHECK(n >= 0);
    if (n == 0)
        return false;
    if (codec_decode_request(s->codec, s->rx, (size_t)n, &s->request, &has_id, &id, &reason) < 0) {
        fprintf(stderr, "server: %s\n", reason);
        abort();
    }
    return true;
}

/* True when nothing arrives for that long. */
static inline bool server_is_quiet(struct server *s, int ms)
{
    struct pollfd p = {.fd = s->socket, .events = POLLIN};

    return poll(&p, 1, ms) == 0;
}

static inline void server_write(struct server *s, const struct proto_reply *reply, int fd)
{
    int n = codec_encode_reply(reply, s->tx, sizeof s->tx);

    CHECK(n > 0);
    n = wire_send(s->socket, s->tx, (size_t)n, fd);
    CHECK(n == 0 || n == -EPIPE);
}

/* A document written by `write`, as the answer to s->request. */
static inline void server_document(struct server *s, void (*write)(struct doc *doc))
{
    struct proto_reply reply = {.has_id = true, .id = s->request.id, .verb = s->request.verb};
    uint8_t bytes[1024];
    struct doc doc;
    int n;

    doc_init(&doc, bytes, sizeof bytes);
    if (write)
        write(&doc);
    else
        doc_map(&doc, 0);
    n = doc_finish(&doc);
    CHECK(n > 0);
    reply.document.bytes = bytes;
    reply.document.n_bytes = (uint32_t)n;
    server_write(s, &reply, -1);
}

static inline void server_error(struct server *s, enum proto_error error, const char *text)
{
    struct proto_reply reply = {.has_id = true,
                                .id = s->request.id,
                                .verb = s->request.verb,
                                .error = error,
                                .text = {text, (uint32_t)strlen(text)}};

    server_write(s, &reply, -1);
}

static inline void server_limits(struct doc *doc)
{
    doc_map(doc, 2);
    doc_key(doc, "server");
    doc_str(doc, "fused test");
    doc_key(doc, "limits");
    doc_map(doc, 1);
    doc_key(doc, "unread_replies");
    doc_uint(doc, 256);
}

static inline void server_hello(struct server *s)
{
    CHECK(server_read(s));
    CHECK(s->request.verb == VERB_HELLO);
    CHECK(s->request.hello.version == 1);
    server_document(s, server_limits);
}

/* The tensor's bytes: in a buffer, or in the message. */
static inline const uint8_t *server_bytes(struct server *s, const struct proto_tensor *t)
{
    if (t->is_inline)
        return t->bytes;
    CHECK(t->buffer >= 1 && t->buffer <= s->n_buffers);
    return (uint8_t *)s->buffers[t->buffer - 1].data + t->offset;
}

static inline void server_yes(struct doc *doc)
{
    doc_map(doc, 1);
    doc_key(doc, "cancelled");
    doc_bool(doc, true);
}

static inline void server_no(struct doc *doc)
{
    doc_map(doc, 1);
    doc_key(doc, "cancelled");
    doc_bool(doc, false);
}

/* Answers an inference: the result is the input, each byte plus one. */
static inline void server_infer(struct server *s)
{
    const struct proto_infer *infer = &s->request.infer;
    struct proto_reply reply = {.has_id = true, .id = s->request.id, .verb = VERB_INFER};
    const uint8_t *x = server_bytes(s, &infer->input);
    static uint8_t y[PROTO_INLINE_MAX];
    uint64_t n;

    CHECK(proto_tensor_size(infer->input.dtype, infer->input.rank, infer->input.shape, &n) == 0);
    reply.infer.output = infer->has_output ? infer->output : infer->input;
    if (infer->has_output) {
        uint8_t *to = (uint8_t *)server_bytes(s, &infer->output);

        for (uint64_t k = 0; k < n; k++)
            to[k] = (uint8_t)(x[k] + 1);
    } else {
        CHECK(n <= sizeof y);
        for (uint64_t k = 0; k < n; k++)
            y[k] = (uint8_t)(x[k] + 1);
        reply.infer.output.is_inline = true;
        reply.infer.output.bytes = y;
        reply.infer.output.n_bytes = (uint32_t)n;
    }
    reply.infer.offset = infer->offset + 4;
    reply.infer.queue_us = 11;
    reply.infer.run_us = 12;
    reply.infer.batch_rows = 13;
    reply.infer.late = infer->has_deadline;
    server_write(s, &reply, -1);
}

static inline void server_buffer(struct server *s)
{
    struct proto_reply reply = {.has_id = true, .id = s->request.id, .verb = s->request.verb};
    bool is_create = s->request.verb == VERB_BUFFER_CREATE;
    uint64_t size =
        is_create ? s->request.buffer_create.size_bytes : s->request.buffer_register.size_bytes;
    struct shm *shm = &s->buffers[s->n_buffers];
    const char *reason = "";

    CHECK(s->n_buffers < ARRAY_SIZE(s->buffers));
    if (is_create)
        CHECK(shm_create(size, shm) == 0);
    else
        CHECK(shm_adopt(s->fd, size, shm, &reason) == 0);
    reply.buffer.buffer = ++s->n_buffers;
    reply.buffer.size_bytes = size;
    server_write(s, &reply, is_create ? shm->fd : -1);
}

/* Answers s->request as a friendly server does. */
static inline void server_answer(struct server *s)
{
    switch (s->request.verb) {
    case VERB_INFER:
        server_infer(s);
        break;
    case VERB_BUFFER_CREATE:
    case VERB_BUFFER_REGISTER:
        server_buffer(s);
        break;
    case VERB_BUFFER_RELEASE:
        s->n_released++;
        server_document(s, NULL);
        break;
    default:
        server_document(s, NULL);
    }
}

/* A script: friendly to the end. */
static inline void server_friendly(struct server *s)
{
    server_hello(s);
    while (server_read(s))
        server_answer(s);
}
