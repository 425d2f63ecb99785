/*
 * safetensors.h - strict reader and writer of .safetensors files
 *
 * The format: 8 bytes header length (little endian), a JSON object, then the data; see the format's
 * own description, https://huggingface.co/docs/safetensors. Tensors must cover the data without
 * hole or overlap. Files are read, never mapped, so that one that changes later cannot hurt.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "report.h"
#include "tensor.h"

#define SAFETENSORS_HEADER_MAX  (4u << 20)
#define SAFETENSORS_NAME_MAX    256
#define SAFETENSORS_TENSORS_MAX 4096

struct safetensors;

struct st_tensor {
    const char *name; /* valid UTF-8 without control characters */
    const char
        *dtype; /* as the file says: "F32", "F16", "BF16", "F64", ... one of the format's list */
    size_t element_bytes;
    int rank;
    int64_t dims[TENSOR_RANK_MAX];
    int64_t elements;
    uint64_t offset, size; /* bytes, from the start of the file */
};

/*
 * Opens and checks `name`. With dirfd >= 0 the name is resolved beneath that directory (no absolute
 * path, no "..", no symlink out of it); with AT_FDCWD it is any path. Only a regular file is
 * opened, and no other kind can block. Errors: -ENOENT, -EINVAL (the header is wrong: which tensor
 * and why), -EIO, -ENOMEM.
 */
int safetensors_open(int dirfd, const char *name, struct safetensors **ret, struct report *report);
struct safetensors *safetensors_free(struct safetensors *file);

size_t safetensors_count(const struct safetensors *file);
const struct st_tensor *safetensors_at(const struct safetensors *file, size_t i);
/* NULL when there is none of that name. */
const struct st_tensor *safetensors_find(const struct safetensors *file, const char *name);
/* Value of a string in __metadata__, or NULL. */
const char *safetensors_metadata(const struct safetensors *file, const char *key);

/* Reads elements [first, first + count) as they lie in the file. -EIO names the file and the
 * offset. */
int safetensors_read(const struct safetensors *file, const struct st_tensor *tensor, int64_t first,
                     int64_t count, void *to, struct report *report);

/* Writing: describe every tensor, then write their data in the same order, in pieces of any size,
 * then finish. */
struct st_writer;
int st_writer_new(const char *path, const struct st_tensor *tensors, size_t n,
                  struct st_writer **ret, struct report *report);
int st_writer_write(struct st_writer *writer, const void *data, size_t n, struct report *report);
/* fsync and rename into place, for good; without it the file never appears. */
int st_writer_finish(struct st_writer *writer, struct report *report);
struct st_writer *st_writer_free(struct st_writer *writer);
