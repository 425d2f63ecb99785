/*
 * test_memory.c - clients that lie about memory, change it at the worst moment, or keep it
 */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "hostile.h"

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW, ROW_IN = A_IN * 4, ROW_OUT = A_OUT * 4 };

static struct daemon d;
static struct baseline before;
static struct client c, other;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    daemon_start(&d, "pins=1;delay_ms=2", "uid_buffer_bytes = 4000000; uid_connections = 200;");
    judge_first(&d, &before);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

static int memfd(size_t size, unsigned flags)
{
    int fd = memfd_create(SECRET, MFD_CLOEXEC | flags);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    assert_int_equal(fallocate(fd, 0, 0, (off_t)size), 0);
    return fd;
}

static int use(struct client *client, int fd, uint64_t size, uint32_t *ret_handle)
{
    struct proto_request request = {.verb = VERB_BUFFER_REGISTER,
                                    .buffer_register.size_bytes = size};
    struct proto_reply reply;

    client_call(client, &request, fd, &reply, NULL);
    *ret_handle = reply.error == ERR_NONE ? reply.buffer.buffer : 0;
    if (reply.error != ERR_NONE)
        assert_text_is_clean(&reply);
    return (int)reply.error;
}

static void release(struct client *client, uint32_t handle)
{
    struct proto_request request = {.verb = VERB_BUFFER_RELEASE, .buffer_release.buffer = handle};
    struct proto_reply reply;

    client_call(client, &request, -1, &reply, NULL);
    assert_ok(&reply);
}

static struct proto_request infer_in(uint32_t buffer, int64_t rows, uint64_t in, uint64_t out)
{
    struct proto_request request = infer_a(NULL);

    request.infer.input.is_inline = false;
    request.infer.input.shape[0] = rows;
    request.infer.input.buffer = buffer;
    request.infer.input.offset = in;
    request.infer.has_output = true;
    request.infer.output = (struct proto_tensor){.dtype = PROTO_FLOAT32,
                                                 .rank = 4,
                                                 .shape = {1, A_OUT, rows, 1},
                                                 .buffer = buffer,
                                                 .offset = out};
    return request;
}

/* ---- S-02: two uids, the same names and handles ---- */

static uint32_t others_handle;

static int reaches_for_others(void)
{
    struct proto_request request = {.verb = VERB_BUFFER_RELEASE};
    struct proto_reply reply;
    char *text = NULL;
    struct shm shm;
    uint32_t mine;

    client_start(&other, &d);
    request.buffer_release.buffer = others_handle;
    client_call(&other, &request, -1, &reply, NULL);
    if (reply.error != ERR_NOT_FOUND)
        return 1;
    mine = client_buffer(&other, 4096, &shm);
    if (mine != others_handle)
        return 2; /* equal on purpose: each connection counts from 1 */
    for (int i = 0; i < 4096; i++) {
        if (((uint8_t *)shm.data)[i] != 0)
            return 3;
    }
    request = (struct proto_request){.verb = VERB_STATUS};
    client_call(&other, &request, -1, &reply, NULL);
    if (reply.error != ERR_NONE ||
        codec_json(reply.document.bytes, reply.document.n_bytes, &text) != 0)
        return 4;
    if (!strstr(text,
                "\"you\":{\"uid\":1234,\"connections\":1,\"buffers\":1,\"buffer_bytes\":4096,"))
        return 5;
    if (strstr(text, "\"uids\"") || strstr(text, SECRET))
        return 6;
    release(&other, mine);
    client_close(&other);
    return 0;
}

static void keeps_uids_apart(void **state)
{
    bool tried;
    struct shm shm;

    (void)state;
    let_others_in(&d);
    client_start(&c, &d);
    others_handle = client_buffer(&c, 4096, &shm);
    memset(shm.data, 'S', 4096);
    tried = as_uid(1234, reaches_for_others);
    for (int i = 0; i < 4096; i++)
        assert_int_equal(((uint8_t *)shm.data)[i], 'S');
    release(&c, others_handle);
    shm_deinit(&shm);
    client_close(&c);
    judge(&d, &before);
    if (!tried)
        skip();
}

/* ---- S-03: contents and size that change ---- */

static atomic_bool stop_changing;
static atomic_int changed_fd;

static void *change(void *data)
{
    (void)data;
    while (!atomic_load(&stop_changing)) {
        int fd = atomic_load(&changed_fd);

        if (fd < 0)
            continue;
        if (ftruncate(fd, 0) == 0 && ftruncate(fd, 8192) != 0)
            break;
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192);
        fallocate(fd, 0, 0, 8192);
    }
    return NULL;
}

static void survives_files_that_change(void **state)
{
    unsigned n_taken = 0, total = times_long(200);
    pthread_t thread;

    (void)state;
    atomic_store(&stop_changing, false);
    atomic_store(&changed_fd, -1);
    assert_int_equal(pthread_create(&thread, NULL, change, NULL), 0);
    client_start(&c, &d);
    for (unsigned i = 0; i < total; i++) {
        int fd = memfd(8192, MFD_ALLOW_SEALING);
        struct proto_reply reply;
        uint32_t handle;

        atomic_store(&changed_fd, fd);
        if (use(&c, fd, 8192, &handle) == ERR_NONE) {
            struct proto_request request = infer_in(handle, 1, 0, 4096);

            n_taken++;
            client_call(&c, &request, -1, &reply, NULL); /* of whatever was there */
            release(&c, handle);
        }
        atomic_store(&changed_fd, -1);
        close(fd);
    }
    atomic_store(&stop_changing, true);
    pthread_join(thread, NULL);
    client_close(&c);
    print_message("%u of %u files were taken while they changed\n", n_taken, total);
    judge(&d, &before);
}

/* ---- S-05: the exact bounds, canaries on both sides ---- */

static void keeps_to_the_bounds(void **state)
{
    enum { PAGE = 4096, SIZE = 3 * PAGE };
    static const struct {
        uint64_t in, out;
        enum proto_error error;
    } rows[] = {
        {0, SIZE - ROW_OUT, ERR_NONE},
        {SIZE - ROW_IN, 0, ERR_NONE},
        {SIZE - ROW_IN + 4, 0, ERR_BAD_BUFFER},
        {0, SIZE - ROW_OUT + 4, ERR_BAD_BUFFER},
        {SIZE, 0, ERR_BAD_BUFFER},
        {0, SIZE, ERR_BAD_BUFFER},
        {UINT64_MAX - 3, 0, ERR_BAD_BUFFER},
        {0, UINT64_MAX - ROW_OUT + 1, ERR_BAD_BUFFER},
        {UINT64_MAX - ROW_IN + 1, PAGE, ERR_BAD_BUFFER},
        {1, PAGE, ERR_BAD_TENSOR},
        {0, PAGE + 2, ERR_BAD_TENSOR},
        {PAGE, PAGE, ERR_BAD_BUFFER},
        {PAGE, PAGE + ROW_IN, ERR_NONE},
        {PAGE, PAGE - ROW_OUT, ERR_NONE},
        {PAGE, PAGE - ROW_OUT + 4, ERR_BAD_BUFFER},
    };
    struct proto_reply reply;
    uint32_t handle;
    struct shm shm;

    (void)state;
    client_start(&c, &d);
    handle = client_buffer(&c, SIZE, &shm);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct proto_request request = infer_in(handle, 1, rows[i].in, rows[i].out);
        uint8_t *bytes = shm.data;

        memset(bytes, 0xee, SIZE);
        client_call(&c, &request, -1, &reply, NULL);
        if (reply.error != rows[i].error)
            fail_msg("row %zu: error %d, expected %d", i, (int)reply.error, (int)rows[i].error);
        for (uint64_t k = 0; k < SIZE; k++) {
            bool written =
                rows[i].error == ERR_NONE && k >= rows[i].out && k < rows[i].out + ROW_OUT;

            if (!written && bytes[k] != 0xee)
                fail_msg("row %zu: byte %llu is %u", i, (unsigned long long)k, bytes[k]);
        }
    }
    shm_deinit(&shm);
    client_close(&c);
    judge(&d, &before);
}

/* ---- S-10: registered again and again, and never another's ---- */

static void mixes_up_no_files(void **state)
{
    unsigned total = times_long(600);
    static float wanted[16][A_OUT];
    static bool known[16];

    (void)state;
    client_start(&c, &d);
    for (unsigned i = 0; i < total; i++) {
        int fd = memfd(8192, MFD_ALLOW_SEALING);
        unsigned tag = i * 7 % 16;
        struct proto_request request;
        struct proto_reply reply;
        float *data = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        uint32_t handle;

        assert_true(data != MAP_FAILED);
        for (int k = 0; k < A_IN; k++)
            data[k] = (float)tag + (float)k / 64;
        assert_int_equal(use(&c, fd, 8192, &handle), ERR_NONE);
        close(fd);
        request = infer_in(handle, 1, 0, 4096);
        client_call(&c, &request, -1, &reply, NULL);
        assert_ok(&reply);
        if (!known[tag])
            memcpy(wanted[tag], data + 1024, sizeof(wanted[0]));
        known[tag] = true;
        assert_memory_equal(wanted[tag], data + 1024, sizeof(wanted[0]));
        munmap(data, 8192);
        if (i % 3)
            release(&c, handle);
        if (i % 50 == 49) { /* the descriptors' numbers move */
            client_close(&c);
            client_start(&c, &d);
        }
    }
    client_close(&c);
    judge(&d, &before);
}

/* ---- S-12 ---- */

static void refuses_other_kinds(void **state)
{
    char name[] = "/fused-test-hostile";
    uint32_t handle;
    int fd;

    (void)state;
    client_start(&c, &d);
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd >= 0) {
        shm_unlink(name);
        assert_int_equal(fallocate(fd, 0, 0, 8192), 0);
        assert_int_equal(use(&c, fd, 8192, &handle), ERR_BAD_BUFFER);
        close(fd);
    }
    fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd >= 0) {
        if (ftruncate(fd, 2 << 20) == 0)
            assert_int_equal(use(&c, fd, 2 << 20, &handle), ERR_BAD_BUFFER);
        close(fd);
    }
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(use(&c, fd, 8192, &handle), ERR_BAD_BUFFER);
    close(fd);
    client_close(&c);
    judge(&d, &before);
}

/* ---- S-14: descriptors in what is refused ---- */

static void keeps_no_descriptor(void **state)
{
    unsigned total = times_long(3000);
    static struct raw raw;
    struct proto_reply reply;
    int fd = memfd(4096, 0); /* cannot be sealed */
    uint32_t handle;

    (void)state;
    client_start(&c, &d);
    for (unsigned i = 0; i < total; i++) {
        if (i % 20 == 19) { /* sixteen bad ones would be the end of it */
            client_close(&c);
            client_start(&c, &d);
        }
        if (i % 3 == 0) {
            assert_int_equal(use(&c, fd, 4096, &handle), ERR_BAD_BUFFER);
            continue;
        }
        raw_begin(&raw, i % 3 == 1 ? SECRET : "ping", 0);
        if (i % 3 == 2)
            raw.n--;
        assert_true(client_try(&c, raw.bytes, raw.n, fd, &reply) > 0);
    }
    client_close(&c);
    close(fd);
    judge(&d, &before);
}

/* ---- S-18: nothing of one client reaches another ---- */

static void hands_on_no_bytes(void **state)
{
    static const size_t sizes[] = {1, 100, 4096, 65537, 300000};
    struct shm shm;

    (void)state;
    for (unsigned round = 0; round < times_long(20); round++) {
        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
            client_start(&c, &d);
            client_buffer(&c, sizes[i], &shm);
            for (size_t k = 0; k < sizes[i]; k++) {
                if (((uint8_t *)shm.data)[k] != 0)
                    fail_msg("byte %zu of a fresh buffer is %u", k, ((uint8_t *)shm.data)[k]);
            }
            memset(shm.data, 'S', sizes[i]);
            shm_deinit(&shm);
            client_close(&c);
        }
    }
    judge(&d, &before);
}

/* Results after a run that failed hold only the next run's own. */
static void hands_on_no_failed_run(void **state)
{
    struct proto_reply reply;
    struct daemon faulty;
    unsigned n_failed = 0;

    (void)state;
    daemon_start(&faulty, "fail_batch=3:5", NULL);
    client_start(&c, &faulty);
    for (int i = 0; i < 6; i++) {
        struct proto_request request = infer_a(x);

        client_call(&c, &request, -1, &reply, NULL);
        n_failed += reply.error == ERR_INTERNAL;
        if (reply.error == ERR_NONE)
            assert_is_a(&reply);
    }
    assert_int_equal(n_failed, 1);
    client_close(&c);
    assert_healthy(&faulty);
    daemon_stop(&faulty);
}

/* ---- S-20: the same place twice at once ---- */

static void writes_no_place_twice(void **state)
{
    struct proto_request request;
    struct proto_reply reply;
    unsigned n_ok = 0, n_refused = 0;
    uint32_t handle;
    struct shm shm;

    (void)state;
    client_start(&c, &d);
    handle = client_buffer(&c, 65536, &shm);
    for (int i = 0; i < 10; i++) {
        request = infer_in(handle, 1, 0, 8192); /* all read there, all write there */
        client_send(&c, &request, -1);
        request = infer_in(handle, 1, 8192, 16384 + (uint64_t)i * 1024); /* reads what is written */
        client_send(&c, &request, -1);
    }
    for (int i = 0; i < 20; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        n_ok += reply.error == ERR_NONE;
        n_refused += reply.error == ERR_BAD_BUFFER;
    }
    assert_true(n_ok >= 1 && n_refused >= 1);
    assert_int_equal(n_ok + n_refused, 20);
    shm_deinit(&shm);
    client_close(&c);
    judge(&d, &before);
}

/* ---- what is given back is not kept ---- */

static blkcnt_t blocks(int fd)
{
    struct stat st;

    assert_int_equal(fstat(fd, &st), 0);
    return st.st_blocks;
}

/*
 * The charge ends with the handle, but a client may keep the descriptor: it must not keep the
 * pages with it, or it could fill the machine's memory on the daemon's account.
 */
static void keeps_nobody_memory(void **state)
{
    enum { N = 12, SIZE = 1000000 };
    struct proto_request request;
    struct proto_reply reply;
    int fds[N];

    (void)state;
    client_start(&c, &d);
    for (int i = 0; i < N; i++) {
        request =
            (struct proto_request){.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = SIZE};
        fds[i] = -1;
        client_call(&c, &request, -1, &reply, &fds[i]);
        assert_ok(&reply);
        assert_true(blocks(fds[i]) * 512 >= SIZE);
        if (i < N / 2) {
            release(&c, reply.buffer.buffer);
        } else {
            client_close(&c);
            client_start(&c, &d);
        }
    }
    client_close(&c);
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < 500 && blocks(fds[i]) > 0; k++)
            sleep_ms(10);
        assert_int_equal(blocks(fds[i]), 0);
        close(fds[i]);
    }
    judge(&d, &before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keeps_uids_apart),      cmocka_unit_test(survives_files_that_change),
        cmocka_unit_test(keeps_to_the_bounds),   cmocka_unit_test(mixes_up_no_files),
        cmocka_unit_test(refuses_other_kinds),   cmocka_unit_test(keeps_no_descriptor),
        cmocka_unit_test(hands_on_no_bytes),     cmocka_unit_test(hands_on_no_failed_run),
        cmocka_unit_test(writes_no_place_twice), cmocka_unit_test(keeps_nobody_memory),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
