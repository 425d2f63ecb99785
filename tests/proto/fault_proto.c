/*
 * fault_proto.c - each allocation and system call of proto/ fails once: an error, and nothing left
 * open or allocated
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cmocka.h>

#include "proto/base.h"
#include "proto/codec.h"
#include "proto/json.h"
#include "proto/shm.h"
#include "proto/wire.h"
#include "tests/fault.h"

/* Runs an operation with its n-th call failing, for every n. It returns what the code under test
 * returned, and gives everything back. */
static void every_failure(int (*operation)(void), unsigned n_min)
{
    unsigned n = 1;

    for (;; n++) {
        unsigned before = fault_open_fds();
        int r;

        fault_arm(n);
        r = operation();
        if (fault_disarm() < n) {
            assert_int_equal(r, 0);
            break;
        }
        if (r >= 0)
            fail_msg("failure %u went unseen", n);
        if (r != -ENOMEM && r != -EMFILE && r != -EIO)
            fail_msg("failure %u gave %d", n, r);
        assert_int_equal(fault_open_fds(), before);
    }
    assert_in_range(n, n_min + 1, 100);
}

static int create(void)
{
    struct shm shm = SHM_INIT;
    int r = shm_create(8192, &shm);

    if (r < 0)
        assert_int_equal(shm.fd, -1);
    shm_deinit(&shm);
    return r;
}

static int theirs = -1;

/* S-16 */
static int adopt(void)
{
    struct shm shm = SHM_INIT;
    const char *reason;
    int r = shm_adopt(theirs, 4096, &shm, &reason);

    if (r < 0)
        assert_int_equal(shm.fd, -1);
    shm_deinit(&shm);
    return r;
}

static int open_sealed(void)
{
    struct shm shm = SHM_INIT;
    int r = shm_open_sealed(theirs, 4096, &shm);

    if (r == 0)
        assert_int_equal(munmap(shm.data, shm.size), 0);
    return r;
}

static int new_codec(void)
{
    struct codec *codec = codec_new();

    if (!codec)
        return -ENOMEM;
    codec_free(codec);
    return 0;
}

static int decode(void)
{
    static const uint8_t ping[] = "\x82\xa2id\x01\xa4verb\xa4ping";
    struct proto_request request;
    struct codec *codec;
    const char *reason = NULL;
    bool has_id;
    uint64_t id;
    int r;

    codec = codec_new();
    if (!codec)
        return -ENOMEM;
    r = codec_decode_request(codec, ping, sizeof ping - 1, &request, &has_id, &id, &reason);
    if (r < 0)
        assert_string_equal(reason, "out of memory");
    codec_free(codec);
    return r;
}

static int print_json(void)
{
    static const uint8_t map[] = "\x81\xa1k\xcb\x3f\xe0\0\0\0\0\0\0";
    char *json = NULL;
    int r = json_text(map, sizeof map - 1, &json);

    assert_true((r == 0) == (json != NULL));
    free(json);
    return r;
}

static int pair[2];

static int send_and_receive(void)
{
    char byte;
    int fd = -1, r;

    r = wire_send(pair[0], "x", 1, 0);
    if (r < 0)
        return r;
    r = wire_recv(pair[1], &byte, 1, &fd);
    if (r < 0) {
        /* The datagram is still there, with its descriptor. */
        fault_disarm();
        assert_int_equal(wire_recv(pair[1], &byte, 1, &fd), 1);
        close_fd(fd);
        return r;
    }
    close_fd(fd);
    return 0;
}

static void test_shm(void **state)
{
    (void)state;
    every_failure(create, 4);
    theirs = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(fallocate(theirs, 0, 0, 4096), 0);
    every_failure(adopt, 5);
    every_failure(open_sealed, 3);
    theirs = close_fd(theirs);
}

static void test_codec(void **state)
{
    (void)state;
    every_failure(new_codec, 2);
    every_failure(decode, 3);
    every_failure(print_json, 3);
}

static void test_wire(void **state)
{
    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    for (unsigned n = 1; n <= 2; n++) {
        unsigned before = fault_open_fds();

        fault_arm(n);
        assert_int_equal(send_and_receive(), -EIO);
        fault_disarm();
        assert_int_equal(fault_open_fds(), before);
    }
    fault_arm(3);
    assert_int_equal(send_and_receive(), 0);
    assert_int_equal(fault_disarm(), 2);
    close(pair[0]);
    close(pair[1]);
    fault_arm(1);
    assert_int_equal(wire_connect("/nonexistent/socket"), -EMFILE);
    fault_disarm();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shm),
        cmocka_unit_test(test_codec),
        cmocka_unit_test(test_wire),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
