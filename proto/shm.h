/*
 * shm.h - sealed memory files
 *
 * A region is a memfd whose size can never change (SHRINK, GROW and SEAL are set), so that a
 * mapping of it never raises SIGBUS. What lies in it may change at any time: sizes, ids and offsets
 * travel in messages, never in the region.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct shm {
    int fd;      /* owned; -1 when there is none */
    void *data;  /* shared mapping, readable and writable; NULL when not mapped */
    size_t size; /* bytes; a multiple of nothing in particular */
};

#define SHM_INIT ((struct shm){.fd = -1})

/* Makes, allocates (so that ENOMEM comes here and not as a signal later), seals and maps a region,
 * zeroed; more than the machine has is -ENOMEM too. 0 or -errno. */
int shm_create(size_t size, struct shm *ret);

/*
 * Takes over a foreign memfd of exactly `size` bytes if it can never hurt: a memfd on tmpfs (not
 * huge pages), sealed against shrinking and growing (or sealable: then the missing seals are
 * added), not sealed against writing, every page allocated. The descriptor is borrowed and
 * duplicated. 0, -EINVAL with *ret_reason a fixed string, or another negative errno.
 */
int shm_adopt(int fd, size_t size, struct shm *ret, const char **ret_reason);

/* Checks that a received region is as the server promises, and maps it. The fd is consumed on
 * success only. */
int shm_open_sealed(int fd, size_t size, struct shm *ret);

/* Gives the region's pages back to the system, whoever else has it mapped: it reads as zeros from
 * then on, and whatever is touched again is the toucher's memory. */
void shm_discard(struct shm *shm);

/* Unmaps and closes. Accepts a region that was never made. */
void shm_deinit(struct shm *shm);
