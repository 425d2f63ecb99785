/*
 * wire.c - one datagram with its file descriptors over a SOCK_SEQPACKET socket
 *
 * The socket keeps messages apart and ties descriptors to theirs. Room for one descriptor more than
 * a message may carry is offered, so that one too many is seen and not cut off. Fewer, and the
 * kernel's word MSG_CTRUNC, mean that this process has no room for another descriptor: not the
 * sender's fault, and its message can still be answered. Whatever is wrong with a datagram, each
 * descriptor that came with it is closed here.
 */
#include "wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include "base.h"

#define CONNECT_WAIT_S 5

int wire_send(int socket, const void *bytes, size_t n, int fd)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)bytes, n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t r;

    if (n > PROTO_DATAGRAM_MAX)
        return -EMSGSIZE;
    if (fd >= 0) {
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    do {
        r = sendmsg(socket, &message, MSG_NOSIGNAL);
    } while (r < 0 && errno == EINTR);
    if (r < 0)
        return errno == ECONNRESET || errno == ENOTCONN ? -EPIPE : -errno;
    return 0;
}

/* Keeps the first descriptor and closes the others. Their number. */
static unsigned take_fds(struct msghdr *message, int *ret_fd)
{
    unsigned n_fds = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        size_t n;

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t k = 0; k < n; k++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + k * sizeof fd, sizeof fd);
            if (n_fds++ == 0)
                *ret_fd = fd;
            else
                close_fd(fd);
        }
    }
    return n_fds;
}

int wire_recv(int socket, void *bytes, size_t size, int *ret_fd)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE((PROTO_FDS_MAX + 1) * sizeof(int))];
    } control;
    struct iovec part = {bytes, size};
    struct msghdr message;
    _cleanup_close_ int fd = -1;
    bool was_reset = false;
    unsigned n_fds;
    ssize_t n;

    for (;;) {
        message = (struct msghdr){.msg_iov = &part,
                                  .msg_iovlen = 1,
                                  .msg_control = control.space,
                                  .msg_controllen = sizeof control.space};
        n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
        if (n >= 0)
            break;
        if (errno == EINTR)
            continue;
        /* A peer that closed with our message unread: said once, before what it had sent. */
        if (errno != ECONNRESET || was_reset)
            return -errno;
        was_reset = true;
    }
    n_fds = take_fds(&message, &fd);
    if (n_fds > PROTO_FDS_MAX)
        return -EPROTO;
    if (message.msg_flags & MSG_TRUNC)
        return -EMSGSIZE;
    if (message.msg_flags & MSG_CTRUNC)
        *ret_fd = -EMFILE;
    else
        *ret_fd = n > 0 ? take_fd(&fd) : -1;
    return (int)n;
}

/* Connects, waiting at most `wait_s` for room in the listener's queue; 0: not at all, and the
 * socket stays non-blocking. */
static int connect_path(const char *path, int wait_s)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval wait = {.tv_sec = wait_s}, none = {0};
    _cleanup_close_ int fd = -1;
    size_t n = strlen(path);
    int r;

    if (n == 0)
        return -ENOENT;
    if (n >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    memcpy(address.sun_path, path, n + 1);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | (wait_s ? 0 : SOCK_NONBLOCK), 0);
    if (fd < 0)
        return -errno;
    if (wait_s && setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) < 0)
        return -errno;
    do {
        r = connect(fd, (struct sockaddr *)&address, sizeof address);
    } while (r < 0 && errno == EINTR);
    if (r < 0)
        return -errno;
    if (wait_s && setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none) < 0)
        return -errno;
    return take_fd(&fd);
}

/* A listener that accepts nobody has a full queue, in which connect() would wait for ever. */
int wire_connect(const char *path)
{
    int r = connect_path(path, CONNECT_WAIT_S);

    return r == -EAGAIN ? -ETIMEDOUT : r;
}

int wire_connect_now(const char *path)
{
    return connect_path(path, 0);
}
