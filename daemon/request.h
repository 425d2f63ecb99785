/*
 * request.h - one request that is answered later, and its one final answer
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "batch.h"
#include "buffer.h"
#include "deadline.h"
#include "kernels/backend.h"
#include "proto/proto.h"
#include "registry.h"

struct conn;

enum request_state {
    REQUEST_WORKING, /* a helper thread has it */
    REQUEST_QUEUED,  /* waits in its version's queue, all of it */
    REQUEST_RUNNING, /* in batches that were submitted; a rest of it may still wait */
};

struct request {
    LIST_ENTRY(request) link; /* of its connection's table */
    struct conn *conn;        /* NULL when the client is gone: nobody waits for the answer */
    struct uid *uid;
    uint64_t id;
    enum verb verb;
    enum request_state state;
    bool cancelled;

    /* infer */
    struct batch_item item;
    struct deadline deadline; /* at_us UINT64_MAX: none */
    struct version *version;  /* referenced */
    struct buffer_use in, out;
    bool is_bound; /* to a device, whose memory it reads or writes: */
    unsigned device;
    struct job job;
    struct proto_tensor output; /* as it is answered */
    unsigned n_parts;           /* of it, in batches */
    uint32_t alone_rows; /* of a part, while no other request is there; 0: as item.cut_rows */
    uint64_t started_us, ended_us;
    uint32_t batch_rows; /* of the largest */

    size_t n_arena;
    uint8_t arena[] __attribute__((aligned(64))); /* inline input, then inline output */
};

/* The requests of one connection that have no answer yet, by id. */
#define REQUEST_TABLE 64
struct request_table {
    LIST_HEAD(request_list, request) lists[REQUEST_TABLE];
    unsigned n;
};

void request_table_init(struct request_table *table);
struct request *request_table_find(const struct request_table *table, uint64_t id);

/* Makes a request with n_arena bytes and charges it. 0, -EEXIST when the id is in flight, -EDQUOT,
 * -EBUSY, -ENOMEM. */
int request_new(struct conn *conn, uint64_t id, enum verb verb, size_t n_arena,
                struct request **ret);
/* Frees a request and everything it holds, without an answer. It is in no queue and no batch. */
void request_free(struct request *request);

/* The one final answer; each frees the request, and sends nothing when the client is gone. */
void request_fail(struct request *request, enum proto_error error, const char *text);
void request_answer_infer(struct request *request);
void request_answer_document(struct request *request, const uint8_t *bytes, size_t n);
/* fd (-1: none) stays the caller's. False when the answer could not be sent with its fd. */
bool request_answer_buffer(struct request *request, uint32_t handle, uint64_t size, int fd);

/* Tells the client that the request ended so, and keeps the record: a device that does not answer
 * may still write to what it holds. */
void request_tell(struct request *request, enum proto_error error);

/* The client is gone: from here on nobody is answered. */
void request_orphan(struct request *request);

/* What a negative errno of a backend, a helper or a limit is called on the wire. The only such map.
 */
enum proto_error request_error(enum verb verb, int r);
