/*
 * listener.c - a socket that is never reachable before it is safe, and never takes another's place
 *
 * A lock file beside the socket keeps a second daemon out. Under the lock the path may hold
 * nothing, or a socket that nobody answers on; a live one, or anything else, is left alone. The new
 * socket is bound to a temporary name with mode 0600, gets group and mode, listens, and only then
 * is renamed to its path, without ever replacing what appeared there meanwhile.
 *
 * All names are used relative to the directory's descriptor, through /proc/self/fd for bind() and
 * connect(): sun_path has room for 107 bytes only, and the temporary name is longer than the path.
 */
#include "listener.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "proto/base.h"
#include "service.h"

static int address_in(int dir_fd, const char *name, struct sockaddr_un *ret, socklen_t *ret_size)
{
    int n;

    *ret = (struct sockaddr_un){.sun_family = AF_UNIX};
    n = snprintf(ret->sun_path, sizeof(ret->sun_path), "/proc/self/fd/%d/%s", dir_fd, name);
    if (n < 0 || (size_t)n >= sizeof(ret->sun_path))
        return -ENAMETOOLONG;
    *ret_size = sizeof(*ret);
    return 0;
}

/* 1: somebody answers there, 0: nobody does. */
static int is_live(int dir_fd, const char *name)
{
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address;
    socklen_t size;
    int r;

    if (fd < 0)
        return -errno;
    r = address_in(dir_fd, name, &address, &size);
    if (r < 0)
        return r;
    /* A full backlog, another socket type or missing rights all mean that somebody is there. */
    return connect(fd, (struct sockaddr *)&address, size) == 0 || errno != ECONNREFUSED;
}

/* Is the path free, apart from a stale socket, which is removed? */
static int clear_path(struct listener *listener, const char *path, struct report *report)
{
    struct stat st;
    int r;

    if (fstatat(listener->dir_fd, listener->base, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            return 0;
        return report_set(report, -errno, "socket: %s: %s", path, strerrordesc_np(errno));
    }
    if (!S_ISSOCK(st.st_mode))
        return report_set(report, -EINVAL, "socket: %s holds something that is no socket", path);
    r = is_live(listener->dir_fd, listener->base);
    if (r < 0)
        return report_set(report, r, "socket: %s: %s", path, strerrordesc_np(-r));
    if (r > 0)
        return report_set(report, -EALREADY, "socket: %s: another server answers there", path);
    if (unlinkat(listener->dir_fd, listener->base, 0) != 0)
        return report_set(report, -errno, "socket: %s: a stale one cannot be removed: %s", path,
                          strerrordesc_np(errno));
    return 0;
}

static int lock(struct listener *listener, const char *path, struct report *report)
{
    char name[CONFIG_SOCKET_MAX + 8];

    snprintf(name, sizeof(name), "%s.lock", listener->base);
    listener->lock_fd = openat(listener->dir_fd, name,
                               O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (listener->lock_fd < 0)
        return report_set(report, -EINVAL, "socket: the lock file %s.lock cannot be opened: %s",
                          path, strerrordesc_np(errno));
    if (flock(listener->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    if (errno == EWOULDBLOCK)
        return report_set(report, -EALREADY, "socket: another fused holds the lock file %s.lock",
                          path);
    return report_set(report, -errno, "socket: %s.lock cannot be locked: %s", path,
                      strerrordesc_np(errno));
}

int listener_claim(struct listener *listener, const char *path, struct report *report)
{
    _cleanup_free_ char *dir = NULL;
    const char *slash;
    int r;

    r = service_listen_fd(&listener->fd, report);
    if (r < 0)
        return r;
    if (listener->fd >= 0) {
        /* The manager's sockets block; accept() must not. */
        if (fcntl(listener->fd, F_SETFL, O_NONBLOCK) != 0)
            return report_set(report, -errno, "socket: %s", strerrordesc_np(errno));
        return 0;
    }
    if (strlen(path) > CONFIG_SOCKET_MAX)
        return report_set(report, -EINVAL, "socket: the path is longer than %d bytes",
                          CONFIG_SOCKET_MAX);
    slash = strrchr(path, '/');
    snprintf(listener->base, sizeof(listener->base), "%s", slash ? slash + 1 : path);
    dir = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    if (!dir)
        return report_set(report, -ENOMEM, "out of memory");
    if (listener->base[0] == '\0')
        return report_set(report, -EINVAL, "socket: the path ends in a slash");
    listener->dir_fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (listener->dir_fd < 0)
        return report_set(report, -EINVAL, "socket: %s: %s: %s", path,
                          errno == ENOENT
                              ? "its directory is missing; --socket PATH chooses another"
                              : "its directory",
                          strerrordesc_np(errno));
    r = lock(listener, path, report);
    return r < 0 ? r : clear_path(listener, path, report);
}

static int prepare(struct listener *listener, const char *name, mode_t mode, gid_t group)
{
    struct sockaddr_un address;
    socklen_t size;
    mode_t mask;
    struct stat st;
    int r;

    listener->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0)
        return -errno;
    r = address_in(listener->dir_fd, name, &address, &size);
    if (r < 0)
        return r;
    unlinkat(listener->dir_fd, name, 0);
    mask = umask(0177);
    r = bind(listener->fd, (struct sockaddr *)&address, size) == 0 ? 0 : -errno;
    umask(mask);
    if (r < 0)
        return r;
    if (group != (gid_t)-1 &&
        fchownat(listener->dir_fd, name, (uid_t)-1, group, AT_SYMLINK_NOFOLLOW) != 0)
        return -errno;
    if (fchmodat(listener->dir_fd, name, mode, 0) != 0 || listen(listener->fd, SOMAXCONN) != 0 ||
        fstatat(listener->dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return -errno;
    if (renameat2(listener->dir_fd, name, listener->dir_fd, listener->base, RENAME_NOREPLACE) != 0)
        return -errno;
    listener->dev = st.st_dev;
    listener->ino = st.st_ino;
    return 0;
}

int listener_open(struct listener *listener, mode_t mode, gid_t group, struct report *report)
{
    char name[32];
    int r;

    if (listener->fd >= 0)
        return 0;
    snprintf(name, sizeof(name), ".fused-%d", (int)getpid());
    r = prepare(listener, name, mode, group);
    if (r < 0) {
        unlinkat(listener->dir_fd, name, 0);
        listener->fd = close_fd(listener->fd);
        return report_set(report, r, "socket: %s", strerrordesc_np(-r));
    }
    return 0;
}

void listener_close(struct listener *listener)
{
    struct stat st;

    if (listener->dir_fd >= 0 && listener->ino != 0 &&
        fstatat(listener->dir_fd, listener->base, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        st.st_dev == listener->dev && st.st_ino == listener->ino)
        unlinkat(listener->dir_fd, listener->base, 0);
    listener->ino = 0;
    listener->fd = close_fd(listener->fd);
}

int listener_accept(struct listener *listener)
{
    int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    return fd < 0 ? -errno : fd;
}
