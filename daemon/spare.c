/*
 * spare.c - buffers ahead of time
 *
 * Clients come in kinds: the next one asks for what the last one did. So when a region was given
 * away, one more of its size is made, and whoever asks for that size has it at once instead of
 * after the pages were allocated, zeroed and pinned. What was ever sent to a client is never given
 * to another; spares were sent to nobody.
 *
 * They are charged to nobody, so they are few: one of a size, limit_bytes all together, the oldest
 * goes first, and one that nobody asked for in KEEP_US goes too. Only one is made at a time, on a
 * helper thread, and one that cannot be made is no error, unless the device was lost over it.
 */
#include "spare.h"

#include <errno.h>
#include <stdlib.h>

#include "proto/base.h"

#define KEEP_US 10000000

struct spare {
    struct work work;
    struct spares *owner;
    TAILQ_ENTRY(spare) link;
    size_t size;
    uint64_t until_us;
    struct shm shm;
    struct memory *memory; /* pinned; NULL where the backend pins nothing */
    int result;
    struct report report; /* of pinning */
};

void spares_init(struct spares *spares, struct works *works, const struct device *device,
                 void (*lost)(void *context, const char *why), void *context)
{
    *spares = (struct spares){.works = works, .device = device, .lost = lost, .context = context};
    TAILQ_INIT(&spares->list);
}

static void run_free(struct work *work)
{
    struct spare *spare = (struct spare *)work;
    const struct device *device = spare->owner->device;

    if (spare->memory)
        device->ops->unpin(device->backends[0], spare->memory, true);
    shm_deinit(&spare->shm);
}

static void done_free(struct work *work)
{
    free(work);
}

/* It is in no list. */
static void drop(struct spare *spare)
{
    struct works *works = spare->owner->works;

    work_queue(works, &works->own, &spare->work, run_free, done_free);
}

static void unlist(struct spare *spare)
{
    TAILQ_REMOVE(&spare->owner->list, spare, link);
    spare->owner->bytes -= spare->size;
}

static void run_make(struct work *work)
{
    struct spare *spare = (struct spare *)work;
    const struct device *device = spare->owner->device;

    spare->result = shm_create(spare->size, &spare->shm);
    if (spare->result == 0 && device->ops->pin)
        spare->result = device->ops->pin(device->backends[0], spare->shm.data, spare->size, true,
                                         &spare->memory, &spare->report);
}

static void done_make(struct work *work)
{
    struct spare *spare = (struct spare *)work;
    struct spares *spares = spare->owner;

    spares->making = NULL;
    if (spare->result == -ENOTRECOVERABLE)
        spares->lost(spares->context, spare->report.text);
    /* The limit may be another by now. */
    if (spare->result < 0 || spares->bytes + spare->size > spares->limit_bytes) {
        drop(spare);
        return;
    }
    TAILQ_INSERT_TAIL(&spares->list, spare, link);
    spares->bytes += spare->size;
}

static struct spare *find(const struct spares *spares, size_t size)
{
    struct spare *spare;

    TAILQ_FOREACH(spare, &spares->list, link)
    {
        if (spare->size == size)
            return spare;
    }
    return NULL;
}

bool spares_take(struct spares *spares, size_t size, struct shm *ret_shm,
                 struct memory **ret_memory)
{
    struct spare *spare = find(spares, size);

    if (!spare)
        return false;
    unlist(spare);
    *ret_shm = spare->shm;
    *ret_memory = spare->memory;
    free(spare);
    return true;
}

void spares_want(struct spares *spares, size_t size, uint64_t now_us)
{
    struct spare *spare = find(spares, size);

    if (spare)
        spare->until_us = now_us + KEEP_US;
    if (spare || spares->making || size > spares->limit_bytes)
        return;
    spare = calloc(1, sizeof(*spare));
    if (!spare)
        return;
    *spare = (struct spare){
        .owner = spares, .size = size, .until_us = now_us + KEEP_US, .shm = SHM_INIT};
    while (spares->bytes > spares->limit_bytes - size) {
        struct spare *oldest = TAILQ_FIRST(&spares->list);

        unlist(oldest);
        drop(oldest);
    }
    spares->making = spare;
    work_queue(spares->works, &spares->works->own, &spare->work, run_make, done_make);
}

void spares_trim(struct spares *spares, uint64_t now_us, bool all)
{
    struct spare *spare, *next;

    for (spare = TAILQ_FIRST(&spares->list); spare; spare = next) {
        next = TAILQ_NEXT(spare, link);
        if (!all && now_us < spare->until_us && spares->bytes <= spares->limit_bytes)
            continue;
        unlist(spare);
        drop(spare);
    }
}
