/*
 * bell.h - how another thread wakes the loop
 */
#pragma once

#include <stdatomic.h>

#include <uv.h>

struct bell {
    uv_poll_t poll;
    int fd;
    atomic_bool rings; /* and the loop has not heard it */
    void (*heard)(void *context), (*closed)(void *context);
    void *context;
};

/* `heard` is called on the loop thread after one or more rings. */
int bell_init(struct bell *bell, uv_loop_t *loop, void (*heard)(void *context), void *context);
/* By any thread. What it wrote before can be seen by `heard`. */
void bell_ring(struct bell *bell);
/* On the loop thread, when nobody rings any more. `closed` is called from the loop; until then the
 * memory stays. */
void bell_close(struct bell *bell, void (*closed)(void *context));
