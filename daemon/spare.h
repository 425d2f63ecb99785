/*
 * spare.h - regions that are made and pinned before anybody asks for them
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "device.h"
#include "proto/shm.h"
#include "work.h"

struct spares {
    struct works *works;
    const struct device *device;
    TAILQ_HEAD(, spare) list; /* those that are ready, the oldest first */
    struct spare *making;     /* at most one; NULL: none */
    uint64_t bytes;           /* of those that are ready */
    uint64_t limit_bytes;
    void (*lost)(void *context, const char *why); /* the device is */
    void *context;
};

void spares_init(struct spares *spares, struct works *works, const struct device *device,
                 void (*lost)(void *context, const char *why), void *context);

/* Takes a region of exactly that size: mapped, zeroed, with its descriptor, and pinned where the
 * backend pins. False when there is none. */
bool spares_take(struct spares *spares, size_t size, struct shm *ret_shm,
                 struct memory **ret_memory);
/* One of that size was given to a client: makes one for the next that asks, if there is room. */
void spares_want(struct spares *spares, size_t size, uint64_t now_us);
/* Frees those that nobody asked for in time; all of them where `all`. */
void spares_trim(struct spares *spares, uint64_t now_us, bool all);
