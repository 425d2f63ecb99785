/*
 * fault.c - the wrapped calls behind fault.h
 *
 * Every wrapper counts, then fails or passes on. The state belongs to the thread that armed, so
 * that the other side of a socket, run by a thread of the same test, goes on working; or, with
 * fault_arm_others(), to all threads but that one, who then share one count.
 */
#include "fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

struct msgpack_zone;

static _Thread_local struct {
    bool armed, exempt;
    unsigned n, count;
    int error; /* 0: the call's own */
} fault;

static struct {
    atomic_bool armed;
    unsigned n;
    atomic_uint count;
} others;

void fault_arm(unsigned n)
{
    fault_arm_with(n, 0);
}

void fault_arm_with(unsigned n, int error)
{
    fault.error = error;
    fault.n = n;
    fault.count = 0;
    fault.armed = true;
}

void fault_arm_others(unsigned n)
{
    fault.exempt = true;
    others.n = n;
    atomic_store(&others.count, 0);
    atomic_store(&others.armed, true);
}

unsigned fault_disarm_others(void)
{
    atomic_store(&others.armed, false);
    fault.exempt = false;
    return atomic_load(&others.count);
}

unsigned fault_count(void)
{
    return fault.count;
}

unsigned fault_disarm(void)
{
    fault.armed = false;
    return fault.count;
}

unsigned fault_open_fds(void)
{
    unsigned n = 0;
    DIR *dir = opendir("/proc/self/fd");

    if (!dir)
        abort();
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static bool fails(int error)
{
    bool now = fault.armed && ++fault.count == fault.n;

    if (!fault.exempt && atomic_load(&others.armed))
        now = atomic_fetch_add(&others.count, 1) + 1 == others.n;
    if (now)
        errno = fault.error > 0 ? fault.error : error;
    return now;
}

/* WRAP(return type, name, error, value of a failure, parameters, arguments) */
#define WRAP(type, name, error, failure, parameters, arguments) \
    type __real_##name parameters;                              \
    type __wrap_##name parameters;                              \
    type __wrap_##name parameters                               \
    {                                                           \
        if (fails(error))                                       \
            return failure;                                     \
        return __real_##name arguments;                         \
    }

WRAP(void *, malloc, ENOMEM, NULL, (size_t n), (n))
WRAP(void *, calloc, ENOMEM, NULL, (size_t n, size_t size), (n, size))
WRAP(void *, realloc, ENOMEM, NULL, (void *p, size_t n), (p, n))
WRAP(char *, strdup, ENOMEM, NULL, (const char *s), (s))
WRAP(ssize_t, read, EIO, -1, (int fd, void *to, size_t n), (fd, to, n))
WRAP(void *, mmap, ENOMEM, MAP_FAILED,
     (void *address, size_t n, int protection, int flags, int fd, off_t offset),
     (address, n, protection, flags, fd, offset))
WRAP(int, ftruncate, EIO, -1, (int fd, off_t size), (fd, size))
WRAP(int, fallocate, ENOMEM, -1, (int fd, int mode, off_t offset, off_t n), (fd, mode, offset, n))
WRAP(int, memfd_create, EMFILE, -1, (const char *name, unsigned flags), (name, flags))
WRAP(int, socket, EMFILE, -1, (int domain, int type, int protocol), (domain, type, protocol))
WRAP(int, accept4, EMFILE, -1, (int fd, struct sockaddr *address, socklen_t *n, int flags),
     (fd, address, n, flags))
WRAP(ssize_t, sendmsg, EIO, -1, (int fd, const struct msghdr *message, int flags),
     (fd, message, flags))
WRAP(ssize_t, recvmsg, EIO, -1, (int fd, struct msghdr *message, int flags), (fd, message, flags))
WRAP(int, epoll_ctl, ENOMEM, -1, (int epoll, int op, int fd, struct epoll_event *event),
     (epoll, op, fd, event))
WRAP(int, eventfd, EMFILE, -1, (unsigned value, int flags), (value, flags))
WRAP(int, dup, EMFILE, -1, (int fd), (fd))
WRAP(void *, aligned_alloc, ENOMEM, NULL, (size_t align, size_t size), (align, size))
WRAP(void *, reallocarray, ENOMEM, NULL, (void *p, size_t n, size_t size), (p, n, size))
WRAP(int, bind, EADDRINUSE, -1, (int fd, const struct sockaddr *address, socklen_t n),
     (fd, address, n))
WRAP(int, connect, ECONNREFUSED, -1, (int fd, const struct sockaddr *address, socklen_t n),
     (fd, address, n))
WRAP(int, listen, EADDRINUSE, -1, (int fd, int backlog), (fd, backlog))
WRAP(int, rename, EIO, -1, (const char *from, const char *to), (from, to))
WRAP(int, fchmod, EPERM, -1, (int fd, mode_t mode), (fd, mode))
WRAP(int, fchownat, EPERM, -1, (int dir, const char *path, uid_t uid, gid_t gid, int flags),
     (dir, path, uid, gid, flags))
WRAP(int, flock, EIO, -1, (int fd, int op), (fd, op))
WRAP(int, fstat, EIO, -1, (int fd, struct stat *st), (fd, st))
WRAP(int, fstatat, EIO, -1, (int dir, const char *path, struct stat *st, int flags),
     (dir, path, st, flags))
WRAP(int, getsockopt, EIO, -1, (int fd, int level, int name, void *value, socklen_t *n),
     (fd, level, name, value, n))
WRAP(int, setsockopt, EIO, -1, (int fd, int level, int name, const void *value, socklen_t n),
     (fd, level, name, value, n))
WRAP(int, timerfd_create, EMFILE, -1, (int clock, int flags), (clock, flags))
WRAP(int, pthread_create, EAGAIN, EAGAIN,
     (pthread_t * thread, const pthread_attr_t *attr, void *(*run)(void *), void *data),
     (thread, attr, run, data))

ssize_t __real_pread(int fd, void *to, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t offset)
{
    if (!fails(EIO))
        return __real_pread(fd, to, n, offset);
    return fault.error == FAULT_SHORT ? __real_pread(fd, to, (n + 1) / 2, offset) : -1;
}

/* Those of single areas (WRAP_AREA in tests.mk). Elsewhere they are not wrapped, and what they
 * would pass on to is not there. */
#define WRAP_WEAK(type, name, error, failure, parameters, arguments) \
    __attribute__((weak)) type __real_##name parameters;             \
    WRAP(type, name, error, failure, parameters, arguments)

WRAP_WEAK(ssize_t, write, EIO, -1, (int fd, const void *from, size_t n), (fd, from, n))
WRAP_WEAK(int, fsync, EIO, -1, (int fd), (fd))
WRAP_WEAK(ssize_t, getrandom, EIO, -1, (void *to, size_t n, unsigned flags), (to, n, flags))
WRAP_WEAK(char *, strndup, ENOMEM, NULL, (const char *s, size_t n), (s, n))
WRAP_WEAK(FILE *, open_memstream, ENOMEM, NULL, (char **text, size_t *size), (text, size))
WRAP_WEAK(int, ferror, ENOMEM, 1, (FILE * file), (file))
WRAP_WEAK(bool, msgpack_zone_init, ENOMEM, false, (struct msgpack_zone * zone, size_t chunk),
          (zone, chunk))
WRAP_WEAK(int, msgpack_unpack, ENOMEM, -3,
          (const char *bytes, size_t n, size_t *at, struct msgpack_zone *zone, void *ret),
          (bytes, n, at, zone, ret))

/* Has given back when it tells of a failure. */
__attribute__((weak)) int __real_fclose(FILE *file);
int __wrap_fclose(FILE *file);
int __wrap_fclose(FILE *file)
{
    int r = __real_fclose(file);

    return fails(EIO) ? EOF : r;
}

/* The variadic ones: their one optional argument is a mode, a number or a pointer. */
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    mode_t mode;
    va_list ap;

    va_start(ap, flags);
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return fails(EMFILE) ? -1 : __real_open(path, flags, mode);
}

int __real_openat(int dir, const char *path, int flags, ...);
int __wrap_openat(int dir, const char *path, int flags, ...);
int __wrap_openat(int dir, const char *path, int flags, ...)
{
    mode_t mode;
    va_list ap;

    va_start(ap, flags);
    mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return fails(EMFILE) ? -1 : __real_openat(dir, path, flags, mode);
}

int __real_fcntl(int fd, int op, ...);
int __wrap_fcntl(int fd, int op, ...);
int __wrap_fcntl(int fd, int op, ...)
{
    void *argument;
    va_list ap;

    va_start(ap, op);
    argument = va_arg(ap, void *);
    va_end(ap);
    return fails(op == F_DUPFD_CLOEXEC ? EMFILE : EIO) ? -1 : __real_fcntl(fd, op, argument);
}
