/*
 * test_wire.c - datagrams arrive whole, and no descriptor is left over whatever is wrong
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cmocka.h>

#include "open_fds.h"
#include "proto/base.h"
#include "proto/wire.h"

static int pair[2] = {-1, -1};

static int set_up(void **state)
{
    (void)state;
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair);
}

static int tear_down(void **state)
{
    (void)state;
    pair[0] = close_fd(pair[0]);
    pair[1] = close_fd(pair[1]);
    return 0;
}

/* A datagram with any number of descriptors, as wire_send() would not send it. */
static void send_raw(const void *bytes, size_t n, const int *fds, size_t n_fds)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {0};
    struct iovec part = {(void *)bytes, n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    if (n_fds > 0) {
        struct cmsghdr *c;

        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    assert_int_equal(sendmsg(pair[0], &message, 0), n);
}

static void test_bytes(void **state)
{
    static uint8_t sent[PROTO_DATAGRAM_MAX + 1], got[PROTO_DATAGRAM_MAX + 1];
    int fd = 99;

    (void)state;
    for (size_t k = 0; k < sizeof sent; k++)
        sent[k] = (uint8_t)(k * 7);
    assert_int_equal(wire_recv(pair[1], got, sizeof got, &fd), -EAGAIN);
    assert_int_equal(fd, 99);
    assert_int_equal(wire_send(pair[0], "abc", 3, -1), 0);
    assert_int_equal(wire_send(pair[0], sent, PROTO_DATAGRAM_MAX, -1), 0);
    assert_int_equal(wire_recv(pair[1], got, sizeof got, &fd), 3);
    assert_memory_equal(got, "abc", 3);
    assert_int_equal(fd, -1);
    assert_int_equal(wire_recv(pair[1], got, PROTO_DATAGRAM_MAX, &fd), PROTO_DATAGRAM_MAX);
    assert_memory_equal(got, sent, PROTO_DATAGRAM_MAX);
    assert_int_equal(wire_send(pair[0], sent, PROTO_DATAGRAM_MAX + 1, -1), -EMSGSIZE);
    assert_int_equal(wire_recv(pair[1], got, sizeof got, &fd), -EAGAIN);
}

/* One byte more than there is room for: dropped whole, and the next one is read as itself. */
static void test_oversize(void **state)
{
    static uint8_t sent[PROTO_DATAGRAM_MAX + 1], got[PROTO_DATAGRAM_MAX];
    unsigned before = open_fds();
    int fd = 99;

    (void)state;
    send_raw(sent, sizeof sent, (int[]){0}, 1);
    send_raw("x", 1, NULL, 0);
    assert_int_equal(wire_recv(pair[1], got, sizeof got, &fd), -EMSGSIZE);
    assert_int_equal(fd, 99);
    assert_int_equal(open_fds(), before);
    assert_int_equal(wire_recv(pair[1], got, sizeof got, &fd), 1);
}

static void test_one_fd(void **state)
{
    unsigned before = open_fds();
    struct stat sent, got;
    char byte;
    int file, fd = -1;

    (void)state;
    file = memfd_create("test", MFD_CLOEXEC);
    assert_true(file >= 0);
    assert_int_equal(wire_send(pair[0], "x", 1, file), 0);
    assert_int_equal(fstat(file, &sent), 0);
    close(file);
    assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 1);
    assert_true(fd >= 0);
    assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
    assert_int_equal(fstat(fd, &got), 0);
    assert_true(got.st_ino == sent.st_ino);
    close(fd);
    assert_int_equal(open_fds(), before);
    assert_int_equal(wire_send(pair[0], "x", 1, 9999), -EBADF);
}

/* S-13, S-14: more descriptors than a message may carry, again and again. */
static void test_many_fds(void **state)
{
    int fds[16] = {0};
    unsigned before = open_fds();

    (void)state;
    for (unsigned round = 0; round < 1000; round++) {
        size_t n = 2 + round % 15;
        char byte;
        int fd = 99;

        send_raw("x", 1, fds, n);
        assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), -EPROTO);
        assert_int_equal(fd, 99);
    }
    assert_int_equal(open_fds(), before);
}

/* No room for a descriptor on this side is not the sender's fault: its message still arrives. */
static void test_no_room(void **state)
{
    struct rlimit old, low;
    unsigned before = open_fds();
    char byte;
    int fd = 99, n;

    (void)state;
    assert_int_equal(wire_send(pair[0], "x", 1, 0), 0);
    assert_int_equal(wire_send(pair[0], "y", 1, 0), 0);
    fd = dup(0);
    assert_true(fd >= 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    low = (struct rlimit){.rlim_cur = (rlim_t)fd, .rlim_max = old.rlim_max};
    close(fd);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    n = wire_recv(pair[1], &byte, 1, &fd);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(n, 1);
    assert_int_equal(byte, 'x');
    assert_int_equal(fd, -EMFILE);
    assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 1);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(open_fds(), before);
}

/* Descriptors that nobody received do not stay. */
static void test_unread_fds(void **state)
{
    unsigned before = open_fds();

    (void)state;
    for (unsigned k = 0; k < 4; k++)
        assert_int_equal(wire_send(pair[0], "x", 1, 0), 0);
    pair[0] = close_fd(pair[0]);
    pair[1] = close_fd(pair[1]);
    assert_int_equal(open_fds(), before - 2);
}

/* An empty datagram reads as a close, and what came with it is closed. */
static void test_empty(void **state)
{
    unsigned before = open_fds();
    char byte;
    int fd = 99;

    (void)state;
    send_raw("", 0, (int[]){0}, 1);
    assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 0);
    assert_int_equal(fd, -1);
    assert_int_equal(open_fds(), before);
}

static void test_full_queue(void **state)
{
    static uint8_t bytes[PROTO_DATAGRAM_MAX];
    unsigned n_sent = 0;
    int r, fd;

    (void)state;
    while ((r = wire_send(pair[0], bytes, sizeof bytes, -1)) == 0)
        assert_in_range(++n_sent, 1, 10000);
    assert_int_equal(r, -EAGAIN);
    assert_true(n_sent > 0);
    assert_int_equal(wire_recv(pair[1], bytes, sizeof bytes, &fd), sizeof bytes);
    while (wire_recv(pair[1], bytes, sizeof bytes, &fd) > 0)
        ;
    assert_int_equal(wire_send(pair[0], bytes, sizeof bytes, -1), 0);
}

static void test_closed_peer(void **state)
{
    char byte;
    int fd = 99;

    (void)state;
    pair[0] = close_fd(pair[0]);
    assert_int_equal(wire_send(pair[1], "x", 1, -1), -EPIPE);
    assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 0);
    assert_int_equal(fd, -1);
}

/* A peer that closes while something of ours lies unread: what it had sent is still read. */
static void test_reset_peer(void **state)
{
    char byte = 0;
    int fd;

    (void)state;
    assert_int_equal(wire_send(pair[1], "unread", 6, -1), 0);
    assert_int_equal(wire_send(pair[0], "y", 1, -1), 0);
    pair[0] = close_fd(pair[0]);
    assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 1);
    assert_int_equal(byte, 'y');
    assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 0);
    assert_int_equal(wire_send(pair[1], "x", 1, -1), -EPIPE);
}

static void test_connect(void **state)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    unsigned before = open_fds();
    char dir[] = "/tmp/fused-test-wire-XXXXXX", path[64], long_path[200];
    int listener, fd, client, server;
    char byte;

    (void)state;
    memset(long_path, 'a', sizeof long_path - 1);
    long_path[sizeof long_path - 1] = 0;
    assert_int_equal(wire_connect(long_path), -ENAMETOOLONG);
    long_path[sizeof address.sun_path] = 0;
    assert_int_equal(wire_connect(long_path), -ENAMETOOLONG);
    long_path[sizeof address.sun_path - 1] = 0;
    assert_int_equal(wire_connect(long_path), -ENOENT);
    assert_int_equal(wire_connect(""), -ENOENT);
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/s", dir);
    assert_int_equal(wire_connect(path), -ENOENT);

    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(wire_connect(path), -ECONNREFUSED);
    assert_int_equal(listen(listener, 4), 0);
    client = wire_connect(path);
    assert_true(client >= 0);
    assert_int_equal(fcntl(client, F_GETFD), FD_CLOEXEC);
    assert_false(fcntl(client, F_GETFL) & O_NONBLOCK);
    server = accept(listener, NULL, NULL);
    assert_int_equal(wire_send(client, "z", 1, -1), 0);
    assert_int_equal(wire_recv(server, &byte, 1, &fd), 1);
    close(server);
    close(client);
    close(listener);
    unlink(path);
    rmdir(dir);
    assert_int_equal(open_fds(), before);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_bytes),      TEST(test_oversize), TEST(test_one_fd),     TEST(test_many_fds),
        TEST(test_unread_fds), TEST(test_empty),    TEST(test_full_queue), TEST(test_closed_peer),
        TEST(test_reset_peer), TEST(test_connect),  TEST(test_no_room),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
