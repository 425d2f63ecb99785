/*
 * base.h - the few idioms that proto/, daemon/ and client/ share
 *
 * Cleanup attributes free a local when its scope ends; ownership leaves a scope by take_ptr() or
 * take_fd(). Sizes that come from outside are only ever combined through the checked operations.
 */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

#define _cleanup_(f)    __attribute__((cleanup(f)))
#define _cleanup_free_  _cleanup_(free_p)
#define _cleanup_close_ _cleanup_(close_p)
#define _printf_(f, a)  __attribute__((format(printf, f, a)))

/* Hands a pointer on: the local becomes NULL and its cleanup does nothing. */
#define take_ptr(p)                 \
    ({                              \
        __typeof__(p) _taken = (p); \
        (p) = NULL;                 \
        _taken;                     \
    })

static inline int take_fd(int *fd)
{
    int taken = *fd;

    *fd = -1;
    return taken;
}

static inline void free_p(void *p)
{
    free(*(void **)p);
}

/* Closes and keeps errno, so that a failure path can close before it returns -errno. */
static inline int close_fd(int fd)
{
    if (fd >= 0) {
        int saved = errno;

        close(fd);
        errno = saved;
    }
    return -1;
}

static inline void close_p(int *fd)
{
    *fd = close_fd(*fd);
}

/* False when the sum or product does not fit; *ret is untouched then. */
static inline bool add_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t sum;

    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *ret = sum;
    return true;
}

static inline bool mul_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t product;

    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *ret = product;
    return true;
}
