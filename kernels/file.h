/*
 * file.h - opening and reading files that come from outside
 *
 * Names in messages are without their directory. All functions may block on the disk, never on
 * another process.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "report.h"

/* The part of a path behind its last '/'. */
const char *file_base(const char *path);

/*
 * Opens for reading, close-on-exec. With dirfd >= 0 the name is resolved beneath that directory: no
 * absolute path, no "..", no symlink out of it; with AT_FDCWD any path. Only a regular file.
 * -ENOENT, -EINVAL (a name or a kind of file that is refused), -EIO.
 */
int file_open(int dirfd, const char *path, int *ret_fd, uint64_t *ret_size, struct report *report);

/* Reads exactly n bytes at offset. -EIO names the file and the offset. */
int file_read(int fd, const char *path, uint64_t offset, void *to, size_t n, struct report *report);
