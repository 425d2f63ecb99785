/*
 * tensorfile.h - one tensor from or to a file: .npy, or .safetensors with a tensor's name
 *
 * A place is written FILE.npy, FILE.safetensors, or FILE.safetensors#TENSOR. Errors name the file
 * as it was given.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/fused.h"
#include "kernels/report.h"
#include "kernels/safetensors.h"

struct tensorfile {
    enum fused_dtype dtype;
    int rank;
    int64_t dims[FUSED_RANK_MAX];
    uint64_t size; /* bytes of data */

    const char *place;               /* borrowed */
    int fd;                          /* .npy; -1 otherwise */
    uint64_t data_offset;            /* .npy */
    struct safetensors *safetensors; /* .safetensors; NULL otherwise */
    const struct st_tensor *tensor;  /* .safetensors */
};

/* Told now and then how many bytes are done; a negative errno ends the work and is returned. */
typedef int (*tensorfile_progress)(uint64_t done, uint64_t total);

/*
 * Opens and checks everything but the data. `name` is the tensor's when the place has none; the
 * place must outlive the file. -EINVAL, -ENOENT, -EIO, -ENOMEM or another negative errno.
 */
int tensorfile_open(const char *place, const char *name, struct tensorfile *ret,
                    struct report *report);

/* Reads all `size` bytes. -EIO when the file ends early. */
int tensorfile_read(const struct tensorfile *file, void *to, tensorfile_progress progress,
                    struct report *report);

void tensorfile_close(struct tensorfile *file);

/* Whether the place is written as one. -EINVAL, -ENAMETOOLONG. */
int tensorfile_check_name(const char *place, struct report *report);

/* Whether both places are in one file that exists. */
bool tensorfile_is_same(const char *a, const char *b);

/* Whether a tensor could be written there, as far as that can be known before: the kind of name,
 * the directory, what is there now. */
int tensorfile_check(const char *place, struct report *report);

/* Writes to a temporary name beside it and renames: the file appears whole or not at all. */
int tensorfile_write(const char *place, const char *name, enum fused_dtype dtype, int rank,
                     const int64_t *dims, const void *data, tensorfile_progress progress,
                     struct report *report);

/* Puts the place before why it failed, instead of the file's bare name if that stands there.
 * Returns r. */
int tensorfile_report(struct report *report, int r, const char *place);
