/*
 * buffer.h - memory shared with one client
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "device.h"
#include "kernels/backend.h"
#include "proto/proto.h"
#include "proto/shm.h"
#include "spare.h"
#include "uid.h"
#include "work.h"

/* A range of a buffer that a request in flight reads or writes. */
struct buffer_use {
    LIST_ENTRY(buffer_use) link;
    struct buffer *buffer; /* referenced; NULL: no use */
    uint64_t begin, end;
    bool write;
};

struct buffer {
    struct work work; /* making and freeing, on a helper thread */
    struct buffers *owner;
    struct uid *uid;
    unsigned refs;
    uint32_t handle; /* 0: not in a table */
    enum buffer_kind kind;
    unsigned device; /* where device memory lies */
    size_t size;
    uint64_t charged_bytes; /* to the uid: device memory comes in whole granules */
    uint64_t reserve_bytes; /* that the device must have left */
    struct shm shm;         /* of a host buffer */
    pid_t pid;              /* whose it is */
    bool gently;            /* others compute while it is made, or freed */
    struct memory *memory;  /* pinned pages, NULL when the backend pins nothing; device memory */
    LIST_HEAD(, buffer_use) uses;

    bool created; /* its pages were made here, and are charged to us */
    bool discard; /* while it is freed: give the pages back, too */

    /* While it is made: */
    int fd; /* to adopt; once made, to send with the answer; -1: none */
    int result;
    const char *reason; /* fixed text, or NULL */
    struct report report;
    void (*made)(struct buffer *buffer, void *context);
    void *context;
};

/* The last time that a process had something computed. */
struct computed {
    pid_t pid;
    uint64_t at_us;
};

/* What all buffers of a server share. */
struct buffers {
    struct works *works;
    const struct device *device;
    struct spares spares;
    bool device_memory; /* the backend has BUFFER_CUDA */
    uint64_t device_reserve_bytes;
    struct computed computed[2]; /* by the last process, and by the last other one */
    bool keep; /* the daemon ends: clients keep what they have, for the next one */
};

/* That process has something computed. Until a second later buffers of others are pinned, and given
 * up, gently: its own may be in its way. */
void buffers_note(struct buffers *buffers, pid_t pid, uint64_t now_us);

/*
 * Makes a buffer on a helper thread: fresh memory, or the client's (fd >= 0, consumed whatever
 * happens). `device`: which one's memory, below their number. Charged to the uid at once. `made` is
 * called on the loop thread, before this returns if there was a spare, with the buffer, whose
 * `result` is 0 or negative; the callee then owns a reference, and `fd` until it closes it. 0,
 * -EDQUOT, -EBUSY, -ENOMEM, or -EOPNOTSUPP for device memory that the backend has not: nothing was
 * begun.
 */
int buffer_make(struct buffers *buffers, struct uid *uid, pid_t pid, enum buffer_kind kind,
                unsigned device, uint64_t size, int fd,
                void (*made)(struct buffer *buffer, void *context), void *context);

/* The address of a byte as the backend takes it: of the host, or of the device. */
void *buffer_at(const struct buffer *buffer, uint64_t offset);

struct buffer *buffer_ref(struct buffer *buffer);
/* The last one unmaps on a helper thread and gives the charges back then. */
struct buffer *buffer_unref(struct buffer *buffer);

/*
 * Notes that a request uses [offset, offset + size). -ERANGE when that is not within the buffer,
 * -EBUSY when it overlaps a range in flight and one of the two writes.
 */
int buffer_use(struct buffer *buffer, uint64_t offset, uint64_t size, bool write,
               struct buffer_use *ret);
void buffer_unuse(struct buffer_use *use);

/* The buffers of one connection, by handle. Handles are never given twice on a connection. */
struct buffer_table {
    struct buffer **buffers; /* ascending handles */
    unsigned n, room;
    uint32_t last;
};

/* Takes over the caller's reference on success. 0, -ENOMEM or -ENOSPC. */
int buffer_table_add(struct buffer_table *table, struct buffer *buffer);
/* NULL when there is none of that handle. */
struct buffer *buffer_table_find(const struct buffer_table *table, uint32_t handle);
/* Drops the table's reference. 0 or -ENOENT. */
int buffer_table_remove(struct buffer_table *table, uint32_t handle);
void buffer_table_deinit(struct buffer_table *table);
