/*
 * safetensors.c - strict reader and writer of .safetensors files
 *
 * A file is believed only when its parts agree: the header fits, each tensor's shape and dtype give
 * exactly the bytes between its offsets, and the tensors cover the data from its first byte to the
 * last, none twice. That costs one read of the header, whatever size the file claims. jansson
 * refuses names that come twice, zero bytes and text that is not UTF-8.
 *
 * The parsed header can take 78 times the bytes of its text, hence the small limit; only names,
 * shapes and __metadata__ are kept.
 *
 * A reader must never meet half a file: what is written goes to a new name in the same directory,
 * which takes the real one's place only when all of it is on disk.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "file.h"
#include "safetensors.h"

#define PREFIX 8 /* bytes of the header's length */

struct safetensors {
    int fd;
    char name[128]; /* for messages: without directory, cut */
    json_t *metadata;
    size_t n;
    struct st_tensor *tensors; /* in the order of the data */
    char (*names)[SAFETENSORS_NAME_MAX + 1];
};

/* The format's dtypes of whole bytes. */
static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    {"F64", 8},     {"F32", 4},     {"F16", 2},         {"BF16", 2},        {"I64", 8},
    {"I32", 4},     {"I16", 2},     {"I8", 1},          {"U64", 8},         {"U32", 4},
    {"U16", 2},     {"U8", 1},      {"BOOL", 1},        {"C64", 8},         {"F8_E4M3", 1},
    {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
};

static int set_dtype(struct st_tensor *tensor, const char *name)
{
    for (size_t i = 0; name && i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            tensor->dtype = dtypes[i].name;
            tensor->element_bytes = dtypes[i].bytes;
            return 0;
        }
    return -EINVAL;
}

/* Elements and bytes from shape and dtype; false when they do not fit. */
static bool set_size(struct st_tensor *tensor)
{
    int64_t elements = 1, size;

    for (int i = 0; i < tensor->rank; i++)
        if (__builtin_mul_overflow(elements, tensor->dims[i], &elements))
            return false;
    if (__builtin_mul_overflow(elements, (int64_t)tensor->element_bytes, &size))
        return false;
    tensor->elements = elements;
    tensor->size = (uint64_t)size;
    return true;
}

/* Control characters would end up in messages and terminals; C1 ones are c2 80 to c2 9f. */
static bool printable(const char *text)
{
    for (const unsigned char *s = (const unsigned char *)text; *s; s++)
        if (*s < 0x20 || *s == 0x7f || (s[0] == 0xc2 && s[1] < 0xa0))
            return false;
    return true;
}

static int read_shape(const json_t *shape, struct st_tensor *tensor)
{
    size_t rank = json_array_size(shape);

    if (!json_is_array(shape) || rank > TENSOR_RANK_MAX)
        return -EINVAL;
    tensor->rank = (int)rank;
    for (size_t i = 0; i < rank; i++) {
        const json_t *dim = json_array_get(shape, i);

        if (json_typeof(dim) != JSON_INTEGER || json_integer_value(dim) < 0)
            return -EINVAL;
        tensor->dims[i] = json_integer_value(dim);
    }
    return 0;
}

/* One entry of the header. Offsets are still those of the data. */
static int read_tensor(const char *file, const char *name, const json_t *entry,
                       struct st_tensor *tensor, struct report *report)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    const char *why = NULL;

    if (name[0] == 0 || strlen(name) > SAFETENSORS_NAME_MAX || !printable(name))
        why = "its name is empty, too long or not printable";
    else if (json_object_size(entry) != 3)
        why = "it needs dtype, shape, data_offsets and nothing else";
    else if (set_dtype(tensor, json_string_value(json_object_get(entry, "dtype"))) < 0)
        why = "its dtype is unknown, or not of whole bytes";
    else if (read_shape(json_object_get(entry, "shape"), tensor) < 0)
        why = "its shape must be up to 8 integers, none negative";
    else if (json_array_size(offsets) != 2 || json_typeof(begin) != JSON_INTEGER ||
             json_typeof(end) != JSON_INTEGER || json_integer_value(begin) < 0 ||
             json_integer_value(end) < json_integer_value(begin))
        why = "its data_offsets must be two integers, the first not above the second";
    else if (!set_size(tensor))
        why = "its shape is too large";
    else if ((uint64_t)json_integer_value(end) - (uint64_t)json_integer_value(begin) !=
             tensor->size)
        why = "its data_offsets do not match its shape and dtype";
    if (why)
        return report_set(report, -EINVAL, "%s: tensor '%.64s': %s", file, name, why);
    tensor->offset = (uint64_t)json_integer_value(begin);
    return 0;
}

static int read_metadata(struct safetensors *file, json_t *metadata, struct report *report)
{
    if (json_typeof(metadata) != JSON_OBJECT)
        return report_set(report, -EINVAL, "%s: __metadata__ must be an object", file->name);
    for (void *at = json_object_iter(metadata); at; at = json_object_iter_next(metadata, at))
        if (json_typeof(json_object_iter_value(at)) != JSON_STRING)
            return report_set(report, -EINVAL, "%s: __metadata__: '%.64s' must be a string",
                              file->name, json_object_iter_key(at));
    file->metadata = json_copy(metadata); /* short of memory, jansson leaves keys out */
    if (json_object_size(file->metadata) != json_object_size(metadata))
        return report_set(report, -ENOMEM, "%s: out of memory", file->name);
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;

    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->size < y->size ? -1 : x->size > y->size;
}

/* The tensors follow each other from the data's first byte to its last. */
static int check_cover(struct safetensors *file, uint64_t data, uint64_t size,
                       struct report *report)
{
    uint64_t at = 0;

    if (file->n > 0)
        qsort(file->tensors, file->n, sizeof(file->tensors[0]), by_offset);
    for (size_t i = 0; i < file->n; i++) {
        struct st_tensor *tensor = &file->tensors[i];

        if (tensor->offset != at)
            return report_set(report, -EINVAL, "%s: tensor '%.64s': %s the data before it",
                              file->name, tensor->name,
                              tensor->offset < at ? "it overlaps" : "there is a hole in");
        if (tensor->size > size - data - at)
            return report_set(report, -EINVAL, "%s: tensor '%.64s': it ends behind the file",
                              file->name, tensor->name);
        at += tensor->size;
        tensor->offset += data;
    }
    if (at != size - data)
        return report_set(report, -EINVAL, "%s: %" PRIu64 " bytes follow the last tensor",
                          file->name, size - data - at);
    return 0;
}

static int read_entries(struct safetensors *file, json_t *root, struct report *report)
{
    size_t n = json_object_size(root) - (json_object_get(root, "__metadata__") != NULL);
    int r;

    if (n > SAFETENSORS_TENSORS_MAX)
        return report_set(report, -EINVAL, "%s: more than %d tensors", file->name,
                          SAFETENSORS_TENSORS_MAX);
    file->tensors = calloc(n + 1, sizeof(*file->tensors));
    file->names = calloc(n + 1, sizeof(*file->names));
    if (!file->tensors || !file->names)
        return report_set(report, -ENOMEM, "%s: out of memory", file->name);
    for (void *at = json_object_iter(root); at; at = json_object_iter_next(root, at)) {
        const char *key = json_object_iter_key(at);
        json_t *value = json_object_iter_value(at);

        if (strcmp(key, "__metadata__") == 0) {
            r = read_metadata(file, value, report);
        } else {
            r = read_tensor(file->name, key, value, &file->tensors[file->n], report);
            if (r == 0) {
                snprintf(file->names[file->n], sizeof(file->names[0]), "%s", key);
                file->tensors[file->n].name = file->names[file->n];
                file->n++;
            }
        }
        if (r < 0)
            return r;
    }
    return 0;
}

static int read_header(struct safetensors *file, uint64_t size, struct report *report)
{
    uint64_t length;
    json_error_t error;
    json_t *root = NULL;
    char *text = NULL;
    int r;

    if (size < PREFIX)
        return report_set(report, -EINVAL, "%s: %" PRIu64 " bytes are no safetensors file",
                          file->name, size);
    r = file_read(file->fd, file->name, 0, &length, PREFIX, report);
    if (r < 0)
        return r;
    if (length > SAFETENSORS_HEADER_MAX || length > size - PREFIX || length < 2)
        return report_set(report, -EINVAL,
                          "%s: a header of %" PRIu64 " bytes is not possible: the file has %" PRIu64
                          ", the limit is %u",
                          file->name, length, size, SAFETENSORS_HEADER_MAX);
    text = malloc(length);
    if (!text)
        return report_set(report, -ENOMEM, "%s: out of memory", file->name);
    r = file_read(file->fd, file->name, PREFIX, text, length, report);
    if (r < 0)
        goto out;
    if (text[0] != '{') {
        r = report_set(report, -EINVAL, "%s: the header does not begin with '{'", file->name);
        goto out;
    }
    root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        /* jansson says nothing when it has no memory. */
        r = error.text[0] ? report_set(report, -EINVAL, "%s: header: %s", file->name, error.text)
                          : report_set(report, -ENOMEM, "%s: out of memory", file->name);
        goto out;
    }
    r = read_entries(file, root, report);
    if (r == 0)
        r = check_cover(file, PREFIX + length, size, report);

out:
    json_decref(root);
    free(text);
    return r;
}

int safetensors_open(int dirfd, const char *name, struct safetensors **ret, struct report *report)
{
    struct safetensors *file;
    uint64_t size;
    int r;

    file = calloc(1, sizeof(*file));
    if (!file)
        return report_set(report, -ENOMEM, "%s: out of memory", file_base(name));
    snprintf(file->name, sizeof(file->name), "%s", file_base(name));
    file->fd = -1;
    r = file_open(dirfd, name, &file->fd, &size, report);
    if (r == 0)
        r = read_header(file, size, report);
    if (r < 0) {
        safetensors_free(file);
        return r;
    }
    *ret = file;
    return 0;
}

struct safetensors *safetensors_free(struct safetensors *file)
{
    if (file) {
        if (file->fd >= 0)
            close(file->fd);
        json_decref(file->metadata);
        free(file->tensors);
        free(file->names);
        free(file);
    }
    return NULL;
}

size_t safetensors_count(const struct safetensors *file)
{
    return file->n;
}

const struct st_tensor *safetensors_at(const struct safetensors *file, size_t i)
{
    return &file->tensors[i];
}

const struct st_tensor *safetensors_find(const struct safetensors *file, const char *name)
{
    for (size_t i = 0; i < file->n; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

const char *safetensors_metadata(const struct safetensors *file, const char *key)
{
    return json_string_value(json_object_get(file->metadata, key));
}

int safetensors_read(const struct safetensors *file, const struct st_tensor *tensor, int64_t first,
                     int64_t count, void *to, struct report *report)
{
    uint64_t bytes = tensor->element_bytes;

    if (first < 0 || count < 0 || first > tensor->elements || count > tensor->elements - first)
        return report_set(report, -EINVAL, "%s: tensor '%.64s': out of range", file->name,
                          tensor->name);
    return file_read(file->fd, file->name, tensor->offset + (uint64_t)first * bytes, to,
                     (uint64_t)count * bytes, report);
}

struct st_writer {
    int fd;
    char *path, *temporary;
    uint64_t left; /* bytes of data still to come */
};

static int write_all(struct st_writer *writer, const void *data, size_t n, struct report *report)
{
    const char *p = data;

    while (n > 0) {
        ssize_t done;

        errno = ENOSPC; /* of a write that fails by writing nothing */
        done = write(writer->fd, p, n);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return report_set(report, -EIO, "%s: writing: %s", file_base(writer->path),
                              strerrordesc_np(errno));
        p += done;
        n -= (size_t)done;
    }
    return 0;
}

static json_t *describe(const struct st_tensor *tensor, uint64_t offset)
{
    json_int_t begin = (json_int_t)offset, end = begin + (json_int_t)tensor->size;
    json_t *shape = json_array();

    for (int i = 0; i < tensor->rank; i++)
        if (json_array_append_new(shape, json_integer(tensor->dims[i])) < 0) {
            json_decref(shape);
            return NULL;
        }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor->dtype, "shape", shape, "data_offsets",
                     begin, end);
}

/* The header as text; sums the bytes that follow it. */
static int make_header(const struct st_tensor *tensors, size_t n, char **ret_text,
                       uint64_t *ret_size, struct report *report)
{
    json_t *root = json_object();
    uint64_t size = 0;
    char *text;

    for (size_t i = 0; i < n; i++) {
        uint64_t offset = size;
        const char *why = NULL;

        if (json_object_get(root, tensors[i].name))
            why = "comes twice";
        else if (__builtin_add_overflow(size, tensors[i].size, &size) || size > INT64_MAX)
            why = "is too large";
        else if (json_object_set_new(root, tensors[i].name, describe(&tensors[i], offset)) < 0)
            why = "cannot be described: its name, or no memory";
        if (why) {
            json_decref(root);
            return report_set(report, -EINVAL, "tensor '%.64s' %s", tensors[i].name, why);
        }
    }
    text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    if (!text)
        return report_set(report, -ENOMEM, "out of memory");
    if (strlen(text) + 8 > SAFETENSORS_HEADER_MAX) {
        free(text);
        return report_set(report, -EINVAL, "the header is too large");
    }
    *ret_text = text;
    *ret_size = size;
    return 0;
}

static int create(struct st_writer *writer, const char *path, struct report *report)
{
    size_t size = strlen(path) + sizeof(".0123456789abcdef.tmp");
    char *temporary;
    uint64_t random;
    int r;

    if (getrandom(&random, sizeof(random), 0) != sizeof(random))
        return report_set(report, -EIO, "%s: no random numbers", file_base(path));
    writer->path = strdup(path);
    temporary = malloc(size);
    if (!writer->path || !temporary) {
        free(temporary);
        return report_set(report, -ENOMEM, "%s: out of memory", file_base(path));
    }
    snprintf(temporary, size, "%s.%016" PRIx64 ".tmp", path, random);
    writer->fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (writer->fd < 0) {
        r = errno == ENOENT ? -ENOENT : -EIO;
        report_set(report, r, "%s: %s", file_base(path), strerrordesc_np(errno));
        free(temporary);
        return r;
    }
    writer->temporary = temporary; /* from now on there is something to remove */
    return 0;
}

int st_writer_new(const char *path, const struct st_tensor *tensors, size_t n,
                  struct st_writer **ret, struct report *report)
{
    static const char spaces[8] = "        ";
    struct st_writer *writer;
    uint64_t length, padded; /* to a multiple of 8, with spaces */
    char *text = NULL;
    int r;

    writer = calloc(1, sizeof(*writer));
    if (!writer)
        return report_set(report, -ENOMEM, "%s: out of memory", file_base(path));
    writer->fd = -1;
    r = make_header(tensors, n, &text, &writer->left, report);
    if (r < 0)
        goto fail;
    r = create(writer, path, report);
    if (r < 0)
        goto fail;
    length = strlen(text);
    padded = (length + 7) / 8 * 8;
    r = write_all(writer, &padded, sizeof(padded), report);
    if (r == 0)
        r = write_all(writer, text, length, report);
    if (r == 0)
        r = write_all(writer, spaces, padded - length, report);
    if (r < 0)
        goto fail;
    free(text);
    *ret = writer;
    return 0;

fail:
    free(text);
    st_writer_free(writer);
    return r;
}

int st_writer_write(struct st_writer *writer, const void *data, size_t n, struct report *report)
{
    int r;

    if (n > writer->left)
        return report_set(report, -EINVAL, "%s: more data than described", file_base(writer->path));
    r = write_all(writer, data, n, report);
    if (r == 0)
        writer->left -= n;
    return r;
}

/* The directory of the name that the file gets. */
static int open_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *name = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    int fd;

    if (!name)
        return -ENOMEM;
    fd = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(name);
    return fd < 0 ? -errno : fd;
}

int st_writer_finish(struct st_writer *writer, struct report *report)
{
    int fd = writer->fd, directory, r = 0;

    if (writer->left > 0)
        return report_set(report, -EINVAL, "%s: %" PRIu64 " bytes of data are missing",
                          file_base(writer->path), writer->left);
    directory = open_directory(writer->path); /* first: the rename must not be in vain */
    if (directory < 0)
        return report_set(report, directory == -ENOMEM ? -ENOMEM : -EIO, "%s: its directory: %s",
                          file_base(writer->path), strerrordesc_np(-directory));
    writer->fd = -1;
    if (fsync(fd) < 0)
        r = -errno;
    close(fd); /* has nothing to tell that fsync() did not */
    if (r == 0 && rename(writer->temporary, writer->path) < 0)
        r = -errno;
    if (r == 0) {
        free(writer->temporary);
        writer->temporary = NULL;
        if (fsync(directory) < 0)
            r = -errno;
    }
    close(directory);
    return r < 0 ? report_set(report, -EIO, "%s: %s", file_base(writer->path), strerrordesc_np(-r))
                 : 0;
}

struct st_writer *st_writer_free(struct st_writer *writer)
{
    if (writer) {
        if (writer->fd >= 0)
            close(writer->fd);
        if (writer->temporary)
            unlink(writer->temporary);
        free(writer->temporary);
        free(writer->path);
        free(writer);
    }
    return NULL;
}
