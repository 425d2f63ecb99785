/*
 * file.c - opening and reading files that come from outside
 *
 * Model and weights files are named by people and, for weights, by other files. A name must not
 * lead out of its directory, and what it leads to must not block the thread that opens it: FIFOs
 * are opened without waiting and refused with every other kind that is not a regular file. The
 * kernel resolves the name beneath the directory, so that no symlink swapped in between can escape;
 * ".." is refused by name even where it would stay inside.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "file.h"

const char *file_base(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

static bool has_dotdot(const char *path)
{
    for (const char *p = path; p; p = strchr(p, '/')) {
        p += *p == '/';
        if (strncmp(p, "..", 2) == 0 && (p[2] == '/' || p[2] == 0))
            return true;
    }
    return false;
}

static int open_beneath(int dirfd, const char *path)
{
    struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };

    return (int)syscall(SYS_openat2, dirfd, path, &how, sizeof(how));
}

int file_open(int dirfd, const char *path, int *ret_fd, uint64_t *ret_size, struct report *report)
{
    const char *name = file_base(path);
    struct stat st;
    int fd, r;

    if (path[0] == 0)
        return report_set(report, -EINVAL, "an empty file name");
    if (dirfd >= 0 && (path[0] == '/' || has_dotdot(path)))
        return report_set(report, -EINVAL, "%.128s: the name must stay inside its directory", name);
    fd = dirfd >= 0 ? open_beneath(dirfd, path)
                    : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        r = errno == ENOENT || errno == ENOTDIR                                           ? -ENOENT
            : errno == ELOOP || errno == EXDEV || errno == ENAMETOOLONG || errno == ENXIO ? -EINVAL
                                                                                          : -EIO;
        return report_set(report, r, "%.128s: %s", name,
                          errno == EXDEV ? "the name must stay inside its directory"
                                         : strerrordesc_np(errno));
    }
    if (fstat(fd, &st) < 0) {
        r = report_set(report, -EIO, "%.128s: %s", name, strerrordesc_np(errno));
        goto fail;
    }
    if (!S_ISREG(st.st_mode)) {
        r = report_set(report, -EINVAL, "%.128s: not a regular file", name);
        goto fail;
    }
    *ret_fd = fd;
    *ret_size = (uint64_t)st.st_size;
    return 0;

fail:
    close(fd);
    return r;
}

int file_read(int fd, const char *path, uint64_t offset, void *to, size_t n, struct report *report)
{
    size_t done = 0;

    while (done < n) {
        ssize_t got = pread(fd, (char *)to + done, n - done, (off_t)(offset + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return report_set(report, -EIO, "%.128s: reading at byte %" PRIu64 ": %s",
                              file_base(path), offset + done,
                              got < 0 ? strerrordesc_np(errno) : "the file ends");
        done += (size_t)got;
    }
    return 0;
}
