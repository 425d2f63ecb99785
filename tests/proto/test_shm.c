/*
 * test_shm.c - regions that cannot change their size, and foreign descriptors of every kind
 */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "open_fds.h"
#include "proto/base.h"
#include "proto/shm.h"

static int memfd(size_t size, unsigned flags)
{
    int fd = memfd_create("test", MFD_CLOEXEC | flags);

    assert_true(fd >= 0);
    if (size > 0)
        assert_int_equal(fallocate(fd, 0, 0, (off_t)size), 0);
    return fd;
}

static void test_create(void **state)
{
    static const size_t sizes[] = {1, 4095, 4096, 4097, 1 << 20};
    unsigned before = open_fds();

    (void)state;
    for (size_t k = 0; k < ARRAY_SIZE(sizes); k++) {
        struct shm shm = SHM_INIT;
        struct stat st;

        assert_int_equal(shm_create(sizes[k], &shm), 0);
        assert_int_equal(shm.size, sizes[k]);
        assert_int_equal(fcntl(shm.fd, F_GETFD), FD_CLOEXEC);
        assert_int_equal(fstat(shm.fd, &st), 0);
        assert_int_equal(st.st_size, sizes[k]);
        assert_true((size_t)st.st_blocks * 512 >= sizes[k]);
        for (size_t j = 0; j < sizes[k]; j++)
            assert_int_equal(((uint8_t *)shm.data)[j], 0);
        memset(shm.data, 1, sizes[k]);
        shm_deinit(&shm);
        assert_int_equal(shm.fd, -1);
        assert_null(shm.data);
        shm_deinit(&shm);
    }
    assert_int_equal(open_fds(), before);
}

/* Discarded pages are gone for whoever kept the region, and zeros, not signals, are read there. */
static void test_discard(void **state)
{
    enum { SIZE = 100001 };
    struct shm mine = SHM_INIT, theirs = SHM_INIT;
    struct stat st;

    (void)state;
    assert_int_equal(shm_create(SIZE, &mine), 0);
    assert_int_equal(shm_open_sealed(dup(mine.fd), SIZE, &theirs), 0);
    memset(theirs.data, 7, SIZE);
    shm_discard(&mine);
    shm_deinit(&mine);
    assert_int_equal(fstat(theirs.fd, &st), 0);
    assert_int_equal(st.st_blocks, 0);
    assert_int_equal(st.st_size, SIZE);
    for (size_t i = 0; i < SIZE; i++)
        assert_int_equal(((uint8_t *)theirs.data)[i], 0);
    shm_discard(&mine); /* nothing there is fine */
    shm_deinit(&theirs);
}

/* S-19: whoever has the descriptor cannot resize the region or forbid writing. */
static void test_sealed(void **state)
{
    struct shm shm = SHM_INIT;

    (void)state;
    assert_int_equal(shm_create(8192, &shm), 0);
    assert_int_equal(ftruncate(shm.fd, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(shm.fd, 16384), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(fcntl(shm.fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(fcntl(shm.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
    assert_int_equal(errno, EPERM);
    /* Holes can be made, and read as zeros without a signal. */
    memset(shm.data, 7, 8192);
    assert_int_equal(fallocate(shm.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
    assert_int_equal(((volatile uint8_t *)shm.data)[0], 0);
    assert_int_equal(((volatile uint8_t *)shm.data)[4096], 7);
    shm_deinit(&shm);
}

static void test_create_limits(void **state)
{
    struct rlimit old, small = {1 << 20, 1 << 20};
    struct shm shm = {.fd = 77};

    (void)state;
    assert_int_equal(shm_create(0, &shm), -EINVAL);
    /* More than the machine has is refused before a page of it is taken. */
    assert_int_equal(shm_create(SIZE_MAX, &shm), -ENOMEM);
    assert_int_equal(shm_create((size_t)INT64_MAX + 1, &shm), -ENOMEM);
    assert_int_equal(shm_create((size_t)1 << 46, &shm), -ENOMEM);
    /* No memory is an error here and not a signal later. */
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_int_equal(shm_create(2 << 20, &shm), -ENOMEM);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(shm.fd, 77);
}

static void test_adopt(void **state)
{
    unsigned before = open_fds();
    struct shm shm = SHM_INIT;
    const char *reason;
    uint8_t byte = 0;
    int fd;

    (void)state;
    fd = memfd(10000, MFD_ALLOW_SEALING);
    assert_int_equal(pwrite(fd, "\x05", 1, 9999), 1);
    assert_int_equal(shm_adopt(fd, 10000, &shm, &reason), 0);
    assert_true(shm.fd >= 0 && shm.fd != fd);
    assert_int_equal(fcntl(shm.fd, F_GETFD), FD_CLOEXEC);
    assert_int_equal(((uint8_t *)shm.data)[9999], 5);
    ((uint8_t *)shm.data)[0] = 6;
    assert_int_equal(pread(fd, &byte, 1, 0), 1);
    assert_int_equal(byte, 6);
    /* S-03: the missing seals were added, so the owner cannot pull the pages away. */
    assert_int_equal(ftruncate(fd, 4096), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, 20000), -1);
    /* Nor forbid writing. */
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    close(fd);
    ((volatile uint8_t *)shm.data)[9999] = 1;
    shm_deinit(&shm);
    assert_int_equal(open_fds(), before);
}

static void test_adopt_sealed(void **state)
{
    struct shm shm = SHM_INIT;
    const char *reason;
    int fd = memfd(4096, MFD_ALLOW_SEALING);

    (void)state;
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    assert_int_equal(shm_adopt(fd, 4096, &shm, &reason), 0);
    shm_deinit(&shm);
    close(fd);
}

static void refuse(int fd, size_t size, const char *want)
{
    unsigned before = open_fds();
    struct shm shm = {.fd = 77};
    const char *reason = NULL;
    int r = shm_adopt(fd, size, &shm, &reason);

    if (r != -EINVAL || !reason || !strstr(reason, want))
        fail_msg("%d, \"%s\"; expected \"%s\"", r, reason ? reason : "", want);
    assert_int_equal(shm.fd, 77);
    assert_int_equal(open_fds(), before);
    close_fd(fd);
}

/* S-01 */
static void test_refuses_other_kinds(void **state)
{
    char file[] = "/tmp/fused-test-shm-XXXXXX", link[64];
    int fds[2], fd;

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    close(fds[0]);
    refuse(fds[1], 4096, "not a memory file");
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, &(struct sockaddr){.sa_family = AF_UNIX}, sizeof(sa_family_t)), 0);
    assert_int_equal(listen(fd, 1), 0);
    refuse(fd, 4096, "not a memory file");
    refuse(open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC), 4096, "not a memory file");
    refuse(open("/dev/zero", O_RDWR | O_CLOEXEC), 4096, "not a memory file");
    refuse(open("/proc/self/stat", O_RDONLY | O_CLOEXEC), 4096, "not a memory file");
    refuse(open("/proc/self/exe", O_PATH | O_CLOEXEC), 4096, "path only");
    fd = mkostemp(file, O_CLOEXEC);
    assert_true(fd >= 0);
    unlink(file);
    assert_int_equal(write(fd, (char[4096]){0}, 4096), 4096);
    refuse(fd, 4096, "memory file"); /* /tmp may be a tmpfs: then it cannot be sealed */

    fd = memfd(4096, MFD_ALLOW_SEALING);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    refuse(open(link, O_PATH | O_CLOEXEC), 4096, "path only");
    refuse(open(link, O_RDONLY | O_CLOEXEC), 4096, "not open for reading and writing");
    refuse(open(link, O_WRONLY | O_CLOEXEC), 4096, "not open for reading and writing");
    close(fd);
}

static void test_refuses_bad_descriptor(void **state)
{
    struct shm shm;
    const char *reason;

    (void)state;
    assert_int_equal(shm_adopt(-1, 4096, &shm, &reason), -EBADF);
    assert_int_equal(shm_adopt(9999, 4096, &shm, &reason), -EBADF);
    assert_int_equal(shm_open_sealed(-1, 4096, &shm), -EBADF);
}

/* S-04 */
static void test_refuses_wrong_sizes(void **state)
{
    (void)state;
    refuse(memfd(8192, MFD_ALLOW_SEALING), 8193, "another size");
    refuse(memfd(8192, MFD_ALLOW_SEALING), 8191, "another size");
    refuse(memfd(8192, MFD_ALLOW_SEALING), 12288, "another size");
    refuse(memfd(8192, MFD_ALLOW_SEALING), 4096, "another size");
    refuse(memfd(8192, MFD_ALLOW_SEALING), (size_t)1 << 63, "another size");
    refuse(memfd(8192, MFD_ALLOW_SEALING), SIZE_MAX, "another size");
    refuse(memfd(8192, MFD_ALLOW_SEALING), 0, "size is 0");
    refuse(memfd(0, MFD_ALLOW_SEALING), 0, "size is 0");
}

/* A refused file of the right kind is left as it was. */
static void test_wrong_size_is_not_sealed(void **state)
{
    int fd = memfd(8192, MFD_ALLOW_SEALING);

    (void)state;
    refuse(fcntl(fd, F_DUPFD_CLOEXEC, 0), 8193, "another size");
    assert_int_equal(ftruncate(fd, 4096), 0);
    close(fd);
}

/* S-12 */
static void test_refuses_seals(void **state)
{
    char name[64];
    int fd;

    (void)state;
    refuse(memfd(4096, 0), 4096, "cannot be sealed");
    fd = memfd(4096, MFD_ALLOW_SEALING);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
    refuse(fd, 4096, "sealed against writing");
    fd = memfd(4096, MFD_ALLOW_SEALING);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
    refuse(fd, 4096, "sealed against writing");
    fd = memfd(4096, MFD_ALLOW_SEALING);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL), 0);
    refuse(fd, 4096, "cannot be sealed");
    snprintf(name, sizeof name, "/fused-test-shm-%d", getpid());
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd >= 0) { /* no /dev/shm in some containers */
        shm_unlink(name);
        assert_int_equal(fallocate(fd, 0, 0, 4096), 0);
        refuse(fd, 4096, "cannot be sealed");
    }
    fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd >= 0)
        refuse(fd, 2 << 20, "huge pages");
}

static void test_refuses_holes(void **state)
{
    int fd = memfd(0, MFD_ALLOW_SEALING);

    (void)state;
    assert_int_equal(ftruncate(fd, INT64_C(1) << 40), 0);
    refuse(fd, (size_t)1 << 40, "not allocated");
    fd = memfd(3 * 4096, MFD_ALLOW_SEALING);
    assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
    refuse(fd, 3 * 4096, "not allocated");
}

static void test_open_sealed(void **state)
{
    unsigned before = open_fds();
    struct shm mine = SHM_INIT, theirs = SHM_INIT;
    int fd;

    (void)state;
    assert_int_equal(shm_create(5000, &mine), 0);
    fd = fcntl(mine.fd, F_DUPFD_CLOEXEC, 0);
    assert_int_equal(shm_open_sealed(fd, 5001, &theirs), -EINVAL);
    assert_int_equal(shm_open_sealed(fd, 0, &theirs), -EINVAL);
    assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC); /* still ours */
    assert_int_equal(shm_open_sealed(fd, 5000, &theirs), 0);
    assert_int_equal(theirs.fd, fd);
    ((uint8_t *)mine.data)[4999] = 9;
    assert_int_equal(((uint8_t *)theirs.data)[4999], 9);
    shm_deinit(&mine);
    assert_int_equal(((uint8_t *)theirs.data)[4999], 9);
    shm_deinit(&theirs);
    fd = memfd(4096, MFD_ALLOW_SEALING);
    assert_int_equal(shm_open_sealed(fd, 4096, &theirs), -EINVAL);
    close(fd);
    assert_int_equal(open_fds(), before);
}

/* S-10: the same file over and over, among other descriptors that come and go. */
static void test_churn(void **state)
{
    unsigned before = open_fds();
    int fd = memfd(4096, MFD_ALLOW_SEALING);
    struct stat want, got;
    const char *reason;

    (void)state;
    assert_int_equal(fstat(fd, &want), 0);
    for (unsigned k = 0; k < 5000; k++) {
        struct shm shm = SHM_INIT;
        int other = open("/dev/null", O_RDONLY | O_CLOEXEC);

        assert_int_equal(shm_adopt(fd, 4096, &shm, &reason), 0);
        if (k % 2)
            close(other);
        assert_int_equal(fstat(shm.fd, &got), 0);
        assert_true(got.st_ino == want.st_ino);
        shm_deinit(&shm);
        if (k % 2 == 0)
            close(other);
    }
    close(fd);
    assert_int_equal(open_fds(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_discard),
        cmocka_unit_test(test_sealed),
        cmocka_unit_test(test_create_limits),
        cmocka_unit_test(test_adopt),
        cmocka_unit_test(test_adopt_sealed),
        cmocka_unit_test(test_refuses_other_kinds),
        cmocka_unit_test(test_refuses_bad_descriptor),
        cmocka_unit_test(test_refuses_wrong_sizes),
        cmocka_unit_test(test_wrong_size_is_not_sealed),
        cmocka_unit_test(test_refuses_seals),
        cmocka_unit_test(test_refuses_holes),
        cmocka_unit_test(test_open_sealed),
        cmocka_unit_test(test_churn),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
