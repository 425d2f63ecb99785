/*
 * tensorfile.c - one tensor from or to a file: .npy, or .safetensors with a tensor's name
 *
 * Files are read, never mapped: one that is cut while we read is an error, not a signal. Only
 * regular files are read and replaced, so that a name that happens to be a pipe or a device
 * neither blocks nor is renamed over. A .npy file must end where its data end.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/npy.h"
#include "client/tensorfile.h"
#include "kernels/tensor.h"
#include "proto/base.h"
#include "proto/proto.h"

#define PATH_SIZE       2048       /* of a file's name; longer ones are refused */
#define PIECE_SIZE      (4u << 20) /* bytes between two words of progress */
#define SAFETENSORS_END ".safetensors"

static const struct {
    const char *name;
    enum fused_dtype dtype;
} types[] = {
    {"F32", FUSED_FLOAT32}, {"F16", FUSED_FLOAT16}, {"BF16", FUSED_BFLOAT16}, {"U8", FUSED_UINT8}};

/* A place taken apart. */
struct place {
    char path[PATH_SIZE];
    const char *tensor; /* within the place, or the default */
    bool npy;
};

static bool ends_with(const char *s, size_t n, const char *end)
{
    size_t m = strlen(end);

    return n > m && memcmp(s + n - m, end, m) == 0;
}

int tensorfile_report(struct report *report, int r, const char *place)
{
    const char *slash = strrchr(place, '/'), *base = slash != NULL ? slash + 1 : place;
    const char *end = strstr(report->text, ": ");
    size_t n = end != NULL ? (size_t)(end - report->text) : 0;

    if (n > 0 && strncmp(report->text, base, n) == 0 && (base[n] == 0 || base[n] == '#'))
        memmove(report->text, end + 2, strlen(end + 2) + 1);
    return report_prefix(report, r, "%s: ", place);
}

/* A '#' separates only behind ".safetensors": it may stand anywhere else in a file's name. */
static int place_split(const char *text, const char *name, struct place *ret, struct report *report)
{
    const char *mark = strstr(text, SAFETENSORS_END "#");
    size_t n = strlen(text);

    ret->tensor = name;
    ret->npy = ends_with(text, n, ".npy");
    if (!ret->npy && mark != NULL) {
        n = (size_t)(mark - text) + strlen(SAFETENSORS_END);
        ret->tensor = text + n + 1;
        if (ret->tensor[0] == 0)
            return report_set(report, -EINVAL, "%s: no name of a tensor after '#'", text);
        if (strlen(ret->tensor) > SAFETENSORS_NAME_MAX)
            return report_set(report, -EINVAL, "%s: the tensor's name is too long", text);
    }
    if (!ret->npy && !ends_with(text, n, SAFETENSORS_END))
        return report_set(report, -EINVAL,
                          "%s: the name must end in .npy or .safetensors (with #TENSOR, if any)",
                          text);
    if (n >= sizeof(ret->path))
        return report_set(report, -ENAMETOOLONG, "%.100s...: the name is too long", text);
    memcpy(ret->path, text, n);
    ret->path[n] = 0;
    return 0;
}

static int open_npy(const char *path, struct tensorfile *file, struct report *report)
{
    _cleanup_close_ int fd = -1;
    uint8_t header[NPY_HEADER_MAX];
    struct stat st;
    struct npy npy;
    uint64_t wanted;
    ssize_t n;
    int r;

    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &st) < 0) {
        r = -errno;
        return report_set(report, r, "%s", strerror(-r));
    }
    if (!S_ISREG(st.st_mode))
        return report_set(report, -EINVAL, "not a regular file");
    n = pread(fd, header, sizeof(header), 0);
    if (n < 0) {
        r = -errno;
        return report_set(report, r, "%s", strerror(-r));
    }
    r = npy_parse(header, (size_t)n, &npy, report);
    if (r < 0)
        return r;
    wanted = npy.data_offset + npy.size;
    if ((uint64_t)st.st_size != wanted)
        return report_set(report, -EINVAL, "the file has %llu bytes, its header means %llu",
                          (unsigned long long)st.st_size, (unsigned long long)wanted);
    file->dtype = npy.dtype;
    file->rank = npy.rank;
    memcpy(file->dims, npy.dims, sizeof(npy.dims));
    file->size = npy.size;
    file->data_offset = npy.data_offset;
    file->fd = take_fd(&fd);
    return 0;
}

static int open_safetensors(const struct place *place, struct tensorfile *file,
                            struct report *report)
{
    struct safetensors *safetensors;
    const struct st_tensor *tensor;
    int r;

    r = safetensors_open(AT_FDCWD, place->path, &safetensors, report);
    if (r < 0)
        return r;
    tensor = safetensors_find(safetensors, place->tensor);
    if (tensor == NULL) {
        r = report_set(report, -ENOENT, "there is no tensor '%s'", place->tensor);
        goto fail;
    }
    for (size_t i = 0; i < ARRAY_SIZE(types); i++)
        if (strcmp(tensor->dtype, types[i].name) == 0)
            file->dtype = types[i].dtype;
    if (file->dtype == 0) {
        r = report_set(report, -EINVAL, "'%s' is %s, which is not supported: F32, F16 and BF16 are",
                       place->tensor, tensor->dtype);
        goto fail;
    }
    file->rank = tensor->rank;
    memcpy(file->dims, tensor->dims, sizeof(tensor->dims));
    file->size = tensor->size;
    file->safetensors = safetensors;
    file->tensor = tensor;
    return 0;
fail:
    safetensors_free(safetensors);
    return r;
}

int tensorfile_open(const char *place, const char *name, struct tensorfile *ret,
                    struct report *report)
{
    struct place parts;
    struct tensorfile file = {.fd = -1, .place = place};
    int r;

    r = place_split(place, name, &parts, report);
    if (r < 0)
        return r;
    r = parts.npy ? open_npy(parts.path, &file, report) : open_safetensors(&parts, &file, report);
    if (r < 0)
        return tensorfile_report(report, r, place);
    *ret = file;
    return 0;
}

static int read_piece(const struct tensorfile *file, uint64_t done, uint8_t *to, size_t n,
                      struct report *report)
{
    if (file->safetensors != NULL) {
        size_t element = file->tensor->element_bytes;

        return safetensors_read(file->safetensors, file->tensor, (int64_t)(done / element),
                                (int64_t)(n / element), to, report);
    }
    while (n > 0) {
        ssize_t got = pread(file->fd, to, n, (off_t)(file->data_offset + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            int r = -errno;

            return report_set(report, r, "cannot be read: %s", strerror(-r));
        }
        if (got == 0)
            return report_set(report, -EIO, "the file ended early");
        to += got;
        done += (uint64_t)got;
        n -= (size_t)got;
    }
    return 0;
}

int tensorfile_read(const struct tensorfile *file, void *to, tensorfile_progress progress,
                    struct report *report)
{
    for (uint64_t done = 0; done < file->size;) {
        uint64_t left = file->size - done;
        size_t n = left < PIECE_SIZE ? (size_t)left : PIECE_SIZE;
        int r = read_piece(file, done, (uint8_t *)to + done, n, report);

        if (r < 0)
            return tensorfile_report(report, r, file->place);
        done += n;
        r = progress == NULL ? 0 : progress(done, file->size);
        if (r < 0)
            return report_set(report, r, "%s: stopped", file->place);
    }
    return 0;
}

void tensorfile_close(struct tensorfile *file)
{
    close_p(&file->fd);
    file->safetensors = safetensors_free(file->safetensors);
}

int tensorfile_check_name(const char *text, struct report *report)
{
    struct place place;

    return place_split(text, "", &place, report);
}

bool tensorfile_is_same(const char *a, const char *b)
{
    struct place x, y;
    struct stat of_x, of_y;
    struct report ignored;

    return place_split(a, "", &x, &ignored) == 0 && place_split(b, "", &y, &ignored) == 0 &&
           stat(x.path, &of_x) == 0 && stat(y.path, &of_y) == 0 && of_x.st_dev == of_y.st_dev &&
           of_x.st_ino == of_y.st_ino;
}

int tensorfile_check(const char *place, struct report *report)
{
    struct place parts;
    struct stat st;
    char *slash;
    int r;

    r = place_split(place, "", &parts, report);
    if (r < 0)
        return r;
    if (stat(parts.path, &st) == 0 && !S_ISREG(st.st_mode))
        return report_set(report, -EINVAL, "%s: exists and is not a regular file", place);
    slash = strrchr(parts.path, '/');
    if (slash != NULL)
        slash[slash == parts.path ? 1 : 0] = 0;
    if (access(slash != NULL ? parts.path : ".", W_OK | X_OK) < 0) {
        r = -errno;
        return report_set(report, r, "%s: its directory cannot be written: %s", place,
                          strerror(-r));
    }
    return 0;
}

static int write_all(int fd, const uint8_t *bytes, size_t n, struct report *report)
{
    while (n > 0) {
        ssize_t done = write(fd, bytes, n);

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0) {
            int r = -errno;

            return report_set(report, r, "cannot be written: %s", strerror(-r));
        }
        bytes += done;
        n -= (size_t)done;
    }
    return 0;
}

/* What a file is written through: a descriptor, or the writer of .safetensors. */
struct sink {
    int fd;
    struct st_writer *writer;
};

static int write_data(struct sink *sink, const uint8_t *data, uint64_t size,
                      tensorfile_progress progress, struct report *report)
{
    for (uint64_t done = 0; done < size;) {
        uint64_t left = size - done;
        size_t n = left < PIECE_SIZE ? (size_t)left : PIECE_SIZE;
        int r = sink->writer != NULL ? st_writer_write(sink->writer, data + done, n, report)
                                     : write_all(sink->fd, data + done, n, report);

        if (r < 0)
            return r;
        done += n;
        r = progress == NULL ? 0 : progress(done, size);
        if (r < 0)
            return report_set(report, r, "stopped");
    }
    return 0;
}

/* mkostemp() gives 0600; a new file gets what the umask leaves, as any other program's would. */
static int make_temporary(char *template, struct report *report)
{
    mode_t mask = umask(0);
    int fd, r;

    umask(mask);
    fd = mkostemp(template, O_CLOEXEC);
    if (fd >= 0 && fchmod(fd, 0666 & ~mask) == 0)
        return fd;
    r = -errno;
    if (fd >= 0) {
        unlink(template);
        close_fd(fd);
    }
    return report_set(report, r, "cannot be made: %s", strerror(-r));
}

static int write_npy(const char *path, enum fused_dtype dtype, int rank, const int64_t *dims,
                     const void *data, uint64_t size, tensorfile_progress progress,
                     struct report *report)
{
    char temporary[PATH_SIZE + 8];
    uint8_t header[NPY_PRINT_MAX];
    struct sink sink = {.fd = -1};
    int n, r;

    n = npy_print(dtype, rank, dims, header);
    if (n < 0)
        return report_set(report, n, "this tensor has no form in .npy");
    snprintf(temporary, sizeof(temporary), "%s.XXXXXX", path);
    sink.fd = make_temporary(temporary, report);
    if (sink.fd < 0)
        return sink.fd;
    r = write_all(sink.fd, header, (size_t)n, report);
    if (r == 0)
        r = write_data(&sink, data, size, progress, report);
    /* Some file systems say only now that the disk is full. */
    if (r == 0 && fsync(sink.fd) < 0)
        r = report_set(report, -errno, "cannot be written: %s", strerror(errno));
    close_p(&sink.fd);
    if (r == 0 && rename(temporary, path) < 0)
        r = report_set(report, -errno, "cannot be put in place: %s", strerror(errno));
    if (r < 0)
        unlink(temporary);
    return r;
}

static int write_safetensors(const struct place *place, enum fused_dtype dtype, int rank,
                             const int64_t *dims, const void *data, uint64_t size,
                             tensorfile_progress progress, struct report *report)
{
    struct st_tensor tensor = {.name = place->tensor, .rank = rank, .size = size};
    struct sink sink = {.fd = -1};
    int r;

    for (size_t i = 0; i < ARRAY_SIZE(types); i++)
        if (types[i].dtype == dtype)
            tensor.dtype = types[i].name;
    tensor.element_bytes = fused_dtype_size(dtype);
    tensor.elements = (int64_t)(size / tensor.element_bytes);
    memcpy(tensor.dims, dims, (size_t)rank * sizeof(*dims));
    r = st_writer_new(place->path, &tensor, 1, &sink.writer, report);
    if (r < 0)
        return r;
    r = write_data(&sink, data, size, progress, report);
    if (r == 0)
        r = st_writer_finish(sink.writer, report);
    st_writer_free(sink.writer);
    return r;
}

int tensorfile_write(const char *place, const char *name, enum fused_dtype dtype, int rank,
                     const int64_t *dims, const void *data, tensorfile_progress progress,
                     struct report *report)
{
    struct place parts;
    uint64_t size;
    int r;

    r = tensorfile_check(place, report);
    if (r == 0)
        r = place_split(place, name, &parts, report);
    if (r != 0)
        return r;
    if (rank < 0 || rank > FUSED_RANK_MAX ||
        proto_tensor_size((enum proto_dtype)dtype, (unsigned)rank, dims, &size) < 0)
        return report_set(report, -EINVAL, "%s: this is no tensor", place);
    r = parts.npy ? write_npy(parts.path, dtype, rank, dims, data, size, progress, report)
                  : write_safetensors(&parts, dtype, rank, dims, data, size, progress, report);
    return r < 0 ? tensorfile_report(report, r, place) : 0;
}
