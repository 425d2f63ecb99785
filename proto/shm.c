/*
 * shm.c - sealed memory files
 *
 * The peer may be hostile. A file that it could shrink raises SIGBUS in whoever maps it, so the
 * size is sealed before the mapping is used; a file of another kind (on disk, FUSE, huge pages,
 * a device) can block or kill whoever touches it, so only tmpfs files that know seals are taken;
 * holes would be filled at the reader's cost, so every page must be there. Contents are never
 * safe: PUNCH_HOLE zeroes pages of a sealed file at any time, without a signal.
 */
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "base.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int map(int fd, size_t size, void **ret)
{
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (data == MAP_FAILED)
        return -errno;
    *ret = data;
    return 0;
}

int shm_create(size_t size, struct shm *ret)
{
    _cleanup_close_ int fd = -1;
    void *data = NULL;
    int r;

    if (size == 0)
        return -EINVAL;
    /* tmpfs would take page after page until the kernel kills somebody. */
    if (size / (size_t)sysconf(_SC_PAGESIZE) >= (size_t)sysconf(_SC_PHYS_PAGES))
        return -ENOMEM;
    fd = memfd_create("fused", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    do {
        r = fallocate(fd, 0, 0, (off_t)size);
    } while (r < 0 && errno == EINTR);
    if (r < 0)
        return errno == ENOSPC || errno == EFBIG ? -ENOMEM : -errno;
    if (fcntl(fd, F_ADD_SEALS, SEALS) < 0)
        return -errno;
    r = map(fd, size, &data);
    if (r < 0)
        return r;
    *ret = (struct shm){take_fd(&fd), data, size};
    return 0;
}

static int refuse(const char *reason, const char **ret_reason)
{
    *ret_reason = reason;
    return -EINVAL;
}

/* What does not change while the file is open. */
static int check_kind(int fd, const char **ret_reason)
{
    struct statfs fs;
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -errno;
    if (flags & O_PATH)
        return refuse("the descriptor is a path only", ret_reason);
    if (fcntl(fd, F_GET_SEALS) < 0)
        return errno == EINVAL ? refuse("the descriptor is not a memory file", ret_reason) : -errno;
    if ((flags & O_ACCMODE) != O_RDWR)
        return refuse("the memory file is not open for reading and writing", ret_reason);
    if (fstatfs(fd, &fs) < 0)
        return -errno;
    if (fs.f_type == HUGETLBFS_MAGIC)
        return refuse("memory files of huge pages are not taken", ret_reason);
    if (fs.f_type != TMPFS_MAGIC)
        return refuse("the descriptor is not a memory file", ret_reason);
    return 0;
}

static int check_size(int fd, size_t size, const char **ret_reason)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return refuse("the descriptor is not a memory file", ret_reason);
    if (size == 0)
        return refuse("the size is 0", ret_reason);
    if (size > INT64_MAX || (uint64_t)st.st_size != size)
        return refuse("the memory file has another size", ret_reason);
    if ((uint64_t)st.st_blocks * 512 < size)
        return refuse("the memory file has pages that are not allocated", ret_reason);
    return 0;
}

static int seal(int fd, const char **ret_reason)
{
    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0)
        return -errno;
    if (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
        return refuse("the memory file is sealed against writing", ret_reason);
    if ((seals & SEALS) == SEALS)
        return 0;
    if (seals & F_SEAL_SEAL)
        return refuse("the memory file cannot be sealed against resizing", ret_reason);
    if (fcntl(fd, F_ADD_SEALS, SEALS) < 0)
        return errno == EPERM
                   ? refuse("the memory file cannot be sealed against resizing", ret_reason)
                   : -errno;
    return 0;
}

int shm_adopt(int fd, size_t size, struct shm *ret, const char **ret_reason)
{
    _cleanup_close_ int own = -1;
    void *data = NULL;
    int r;

    *ret_reason = "the memory file could not be taken over";
    r = check_kind(fd, ret_reason);
    if (r < 0)
        return r;
    r = check_size(fd, size, ret_reason);
    if (r < 0)
        return r;
    r = seal(fd, ret_reason);
    if (r < 0)
        return r;
    /* Again, now that nobody can resize it any more. */
    r = check_size(fd, size, ret_reason);
    if (r < 0)
        return r;
    own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return -errno;
    r = map(own, size, &data);
    if (r < 0)
        return r;
    *ret = (struct shm){take_fd(&own), data, size};
    return 0;
}

int shm_open_sealed(int fd, size_t size, struct shm *ret)
{
    const char *reason;
    void *data = NULL;
    int r, seals;

    r = check_kind(fd, &reason);
    if (r < 0)
        return r;
    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return -errno;
    if ((seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        return -EINVAL;
    r = check_size(fd, size, &reason);
    if (r < 0)
        return r;
    r = map(fd, size, &data);
    if (r < 0)
        return r;
    *ret = (struct shm){fd, data, size};
    return 0;
}

void shm_discard(struct shm *shm)
{
    if (shm->data)
        madvise(shm->data, shm->size, MADV_REMOVE);
}

void shm_deinit(struct shm *shm)
{
    if (shm->data)
        munmap(shm->data, shm->size);
    close_fd(shm->fd);
    *shm = SHM_INIT;
}
