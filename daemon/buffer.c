/*
 * buffer.c - regions, their charges, and who uses which part of them
 *
 * Making a region allocates, pins and maps its pages, and freeing one unmaps them: gigabytes take
 * far longer than the loop may stop, so both run on helper threads. A region that a client has seen
 * is never given to anybody else. It lives until its last reference is gone: the handle's, and one
 * for each request in flight; the charges are given back when the pages are.
 *
 * A client may keep its descriptor, and with it pages that nobody is charged for any more. So pages
 * that were made here are taken out of the region when it is freed: it reads as zeros then, and
 * what is touched again is the toucher's own memory. Only when the daemon ends are they left.
 * Device memory cannot be taken back so, nor can anybody say who still has it: it is given only
 * while the device keeps a reserve, so that whoever hoards it takes none from models.
 *
 * Two requests in flight may read the same range, but nothing orders a write against another
 * access, so an overlap with a write is refused.
 */
#include "buffer.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "proto/base.h"

#define DEVICE_GRANULE (UINT64_C(2) << 20) /* of CUDA's virtual memory */

void buffers_note(struct buffers *buffers, pid_t pid, uint64_t now_us)
{
    struct computed *computed = buffers->computed;

    if (computed[0].pid != pid)
        computed[1] = computed[0];
    computed[0] = (struct computed){pid, now_us};
}

/* pid 0 is anybody out of sight. */
static bool others_compute(const struct buffers *buffers, pid_t pid)
{
    const struct computed *other = &buffers->computed[0];

    if (pid != 0 && other->pid == pid)
        other++;
    return other->at_us > 0 && clock_us() - other->at_us < 1000000;
}

static void free_now(struct buffer *buffer)
{
    uid_give(buffer->uid, CHARGE_BUFFER_BYTES, buffer->charged_bytes);
    uid_give(buffer->uid, CHARGE_BUFFERS, 1);
    uid_unref(buffer->uid);
    free(buffer);
}

/* Host pages: afterwards they are mapped, and the descriptor is needed by a client only. */
static int make_host(struct buffer *buffer)
{
    const struct device *device = buffer->owner->device;
    bool is_foreign = buffer->fd >= 0;
    int r;

    if (is_foreign)
        r = shm_adopt(buffer->fd, buffer->size, &buffer->shm, &buffer->reason);
    else
        r = shm_create(buffer->size, &buffer->shm);
    buffer->fd = close_fd(buffer->fd);
    /* Pinned by one, for all of them. */
    if (r == 0 && device->ops->pin)
        r = device->ops->pin(device->backends[0], buffer->shm.data, buffer->size, buffer->gently,
                             &buffer->memory, &buffer->report);
    if (!is_foreign)
        buffer->fd = take_fd(&buffer->shm.fd);
    else
        buffer->shm.fd = close_fd(buffer->shm.fd);
    return r;
}

static int make_device(struct buffer *buffer)
{
    const struct backend_ops *ops = buffer->owner->device->ops;
    struct backend *backend = buffer->owner->device->backends[buffer->device];
    int r;

    if (buffer->fd < 0)
        return ops->memory_create(backend, buffer->size, buffer->reserve_bytes, &buffer->memory,
                                  &buffer->fd, &buffer->report);
    r = ops->memory_import(backend, buffer->fd, buffer->size, &buffer->memory, &buffer->report);
    buffer->fd = close_fd(buffer->fd);
    return r;
}

static void run_make(struct work *work)
{
    struct buffer *buffer = (struct buffer *)work;

    buffer->result = buffer->kind == BUFFER_CUDA ? make_device(buffer) : make_host(buffer);
}

static void done_make(struct work *work)
{
    struct buffer *buffer = (struct buffer *)work;

    buffer->made(buffer, buffer->context);
}

int buffer_make(struct buffers *buffers, struct uid *uid, pid_t pid, enum buffer_kind kind,
                unsigned device, uint64_t size, int fd,
                void (*made)(struct buffer *buffer, void *context), void *context)
{
    uint64_t charged_bytes = size;
    struct buffer *buffer;
    int r;

    if (kind == BUFFER_CUDA) {
        r = -EOPNOTSUPP;
        if (!buffers->device_memory)
            goto close;
        charged_bytes = (size + DEVICE_GRANULE - 1) / DEVICE_GRANULE * DEVICE_GRANULE;
    }
    r = uid_take(uid, CHARGE_BUFFERS, 1);
    if (r < 0)
        goto close;
    r = uid_take(uid, CHARGE_BUFFER_BYTES, charged_bytes);
    if (r < 0)
        goto give_buffer;
    buffer = calloc(1, sizeof(*buffer));
    if (!buffer) {
        r = -ENOMEM;
        goto give_bytes;
    }
    buffer->owner = buffers;
    buffer->uid = uid_ref(uid);
    buffer->refs = 1;
    buffer->shm = SHM_INIT;
    buffer->kind = kind;
    buffer->device = device;
    buffer->size = size;
    buffer->pid = pid;
    buffer->gently = others_compute(buffers, pid);
    buffer->charged_bytes = charged_bytes;
    buffer->reserve_bytes = buffers->device_reserve_bytes;
    buffer->created = fd < 0 && kind == BUFFER_HOST;
    buffer->fd = fd;
    buffer->made = made;
    buffer->context = context;
    LIST_INIT(&buffer->uses);
    if (buffer->created && spares_take(&buffers->spares, size, &buffer->shm, &buffer->memory)) {
        buffer->fd = take_fd(&buffer->shm.fd);
        made(buffer, context);
        return 0;
    }
    work_queue(buffers->works, &uid->works, &buffer->work, run_make, done_make);
    return 0;

give_bytes:
    uid_give(uid, CHARGE_BUFFER_BYTES, charged_bytes);
give_buffer:
    uid_give(uid, CHARGE_BUFFERS, 1);
close:
    close_fd(fd);
    return r;
}

struct buffer *buffer_ref(struct buffer *buffer)
{
    buffer->refs++;
    return buffer;
}

static void run_free(struct work *work)
{
    struct buffer *buffer = (struct buffer *)work;
    const struct device *device = buffer->owner->device;

    close_fd(buffer->fd);
    if (buffer->memory && buffer->kind == BUFFER_CUDA)
        device->ops->memory_free(device->backends[buffer->device], buffer->memory);
    else if (buffer->memory)
        device->ops->unpin(device->backends[0], buffer->memory, buffer->gently);
    if (buffer->discard)
        shm_discard(&buffer->shm);
    shm_deinit(&buffer->shm);
}

static void done_free(struct work *work)
{
    free_now((struct buffer *)work);
}

struct buffer *buffer_unref(struct buffer *buffer)
{
    if (!buffer)
        return NULL;
    assert(buffer->refs > 0);
    if (--buffer->refs > 0)
        return NULL;
    assert(LIST_EMPTY(&buffer->uses));
    buffer->discard = buffer->created && !buffer->owner->keep;
    buffer->gently = others_compute(buffer->owner, buffer->pid);
    work_queue(buffer->owner->works, &buffer->uid->works, &buffer->work, run_free, done_free);
    return NULL;
}

void *buffer_at(const struct buffer *buffer, uint64_t offset)
{
    if (buffer->kind == BUFFER_CUDA)
        /* NOLINTNEXTLINE(performance-no-int-to-ptr): it is the device's */
        return (void *)(uintptr_t)(buffer->owner->device->ops->memory_address(buffer->memory) +
                                   offset);
    return (uint8_t *)buffer->shm.data + offset;
}

int buffer_use(struct buffer *buffer, uint64_t offset, uint64_t size, bool write,
               struct buffer_use *ret)
{
    struct buffer_use *other;
    uint64_t end;

    if (!add_u64(offset, size, &end) || end > buffer->size)
        return -ERANGE;
    LIST_FOREACH(other, &buffer->uses, link)
    {
        if ((write || other->write) && offset < other->end && other->begin < end)
            return -EBUSY;
    }
    *ret = (struct buffer_use){
        .buffer = buffer_ref(buffer), .begin = offset, .end = end, .write = write};
    LIST_INSERT_HEAD(&buffer->uses, ret, link);
    return 0;
}

void buffer_unuse(struct buffer_use *use)
{
    if (!use->buffer)
        return;
    LIST_REMOVE(use, link);
    use->buffer = buffer_unref(use->buffer);
}

/* The place of a handle, or where it would be. */
static unsigned find(const struct buffer_table *table, uint32_t handle)
{
    unsigned low = 0, high = table->n;

    while (low < high) {
        unsigned middle = low + (high - low) / 2;

        if (table->buffers[middle]->handle < handle)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int buffer_table_add(struct buffer_table *table, struct buffer *buffer)
{
    if (table->last == UINT32_MAX)
        return -ENOSPC;
    if (table->n == table->room) {
        unsigned room = table->room ? 2 * table->room : 8;
        struct buffer **buffers = reallocarray(table->buffers, room, sizeof(struct buffer *));

        if (!buffers)
            return -ENOMEM;
        table->buffers = buffers;
        table->room = room;
    }
    buffer->handle = ++table->last;
    table->buffers[table->n++] = buffer;
    return 0;
}

struct buffer *buffer_table_find(const struct buffer_table *table, uint32_t handle)
{
    unsigned place = find(table, handle);

    return place < table->n && table->buffers[place]->handle == handle ? table->buffers[place]
                                                                       : NULL;
}

int buffer_table_remove(struct buffer_table *table, uint32_t handle)
{
    unsigned place = find(table, handle);

    if (place == table->n || table->buffers[place]->handle != handle)
        return -ENOENT;
    buffer_unref(table->buffers[place]);
    table->n--;
    memmove(&table->buffers[place], &table->buffers[place + 1],
            (table->n - place) * sizeof(struct buffer *));
    return 0;
}

void buffer_table_deinit(struct buffer_table *table)
{
    for (unsigned i = 0; i < table->n; i++)
        buffer_unref(table->buffers[i]);
    free(table->buffers);
    *table = (struct buffer_table){0};
}
