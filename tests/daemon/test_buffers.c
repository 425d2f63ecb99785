/*
 * test_buffers.c - shared memory: what may be registered, what is charged, who may use what
 */
#include <sys/mman.h>
#include <sys/un.h>

#include "daemon.h"

static struct daemon d;
static struct client c;

static int start(void **state)
{
    (void)state;
    daemon_start(&d, "pins=1", "uid_buffer_bytes = 1000000;");
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

static int memfd(size_t size, unsigned flags, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | flags);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)size), 0);
    if (size > 0 && size < 1u << 30)
        assert_int_equal(fallocate(fd, 0, 0, (off_t)size), 0);
    if (seals)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void use(struct proto_reply *reply, int fd, uint64_t size)
{
    struct proto_request request = {.verb = VERB_BUFFER_REGISTER,
                                    .buffer_register.size_bytes = size};

    client_call(&c, &request, fd, reply, NULL);
}

static void release(uint32_t handle, enum proto_error wanted)
{
    struct proto_request request = {.verb = VERB_BUFFER_RELEASE, .buffer_release.buffer = handle};
    struct proto_reply reply;

    client_call(&c, &request, -1, &reply, NULL);
    if (wanted == ERR_NONE)
        assert_ok(&reply);
    else
        assert_error(&reply, wanted);
}

/* S-18, S-19 */
static void makes_sealed_zeroed_regions(void **state)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 5000};
    struct proto_reply reply;
    struct shm shm = SHM_INIT;
    int fd = -1;

    (void)state;
    client_start(&c, &d);
    client_call(&c, &request, -1, &reply, &fd);
    assert_ok(&reply);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(fd, 10000), -1);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(shm_open_sealed(fd, 5000, &shm), 0);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(((uint8_t *)shm.data)[i], 0);
    shm_deinit(&shm);
    release(reply.buffer.buffer, ERR_NONE);
    release(reply.buffer.buffer, ERR_NOT_FOUND);
    client_close(&c);
    assert_healthy(&d);
}

/* An old mapping never shows what came to somebody else later. S-18 */
static void never_gives_a_region_twice(void **state)
{
    enum { SIZE = 65536, N = 8 };
    static struct client other;
    struct shm old[N], later;

    (void)state;
    client_start(&c, &d);
    client_start(&other, &d);
    for (int i = 0; i < N; i++) {
        uint32_t handle = client_buffer(&c, SIZE, &old[i]);

        memset(old[i].data, 0x11, SIZE);
        release(handle, ERR_NONE);
    }
    sleep_ms(50);
    for (int i = 0; i < N; i++) {
        client_buffer(&other, SIZE, &later);
        for (int k = 0; k < SIZE; k++)
            assert_int_equal(((uint8_t *)later.data)[k], 0);
        memset(later.data, 0x22, SIZE);
        shm_deinit(&later);
    }
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < SIZE; k++)
            assert_int_not_equal(((uint8_t *)old[i].data)[k], 0x22);
        shm_deinit(&old[i]);
    }
    client_close(&other);
    client_close(&c);
    assert_healthy(&d);
}

static void refuses_sizes(void **state)
{
    static const struct {
        uint64_t size;
        enum proto_error error;
    } rows[] = {
        {0, ERR_BAD_BUFFER},    {1000001, ERR_QUOTA},         {UINT64_C(1) << 40, ERR_QUOTA},
        {INT64_MAX, ERR_QUOTA}, {UINT64_MAX, ERR_BAD_BUFFER}, {UINT64_C(1) << 63, ERR_BAD_BUFFER}};
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                        .buffer_create.size_bytes = rows[i].size};

        client_call(&c, &request, -1, &reply, NULL);
        /* the codec may refuse what no size can be */
        if (reply.error != ERR_BAD_MESSAGE)
            assert_error(&reply, rows[i].error);
    }
    client_close(&c);
    assert_healthy(&d);
}

static void offers_no_device_buffers(void **state)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                    .buffer_create = {.size_bytes = 4096, .kind = BUFFER_CUDA}};
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    client_call(&c, &request, -1, &reply, NULL);
    assert_error(&reply, ERR_UNSUPPORTED);
    client_close(&c);
}

#define MIB (UINT64_C(1) << 20)

/* Made by the daemon or the client: charged in whole granules, wrong descriptors are refused, and
 * computed in while their handle and connection are already gone. G-07 */
static void gives_and_takes_device_memory(void **state)
{
    static float x[A_ROWS * A_IN], wanted[A_ROWS * A_OUT];
    struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                    .buffer_create = {.size_bytes = 5000, .kind = BUFFER_CUDA}};
    struct proto_tensor place = {
        .dtype = PROTO_FLOAT32, .rank = 2, .shape = {A_ROWS, A_IN}, .offset = 4096};
    struct proto_reply reply;
    struct daemon gpu;
    float *theirs, *ours;
    int fd = -1;

    (void)state;
    daemon_start(&gpu, "device_memory=1;pins=1;delay_ms=200", "uid_buffer_bytes = 6291456;");
    client_start(&c, &gpu);
    client_call(&c, &request, -1, &reply, &fd);
    assert_ok(&reply);
    assert_int_equal(reply.buffer.size_bytes, 5000);
    theirs = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(theirs, MAP_FAILED);
    close(fd);
    place.buffer = reply.buffer.buffer;

    fd = memfd(4 * MIB, 0, 0);
    ours = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(ours, MAP_FAILED);
    golden_read(MODEL_A, "x", x, sizeof(x));
    golden_read(MODEL_A, "y", wanted, sizeof(wanted));
    memcpy(ours + 1024, x, sizeof(x));
    request = (struct proto_request){.verb = VERB_BUFFER_REGISTER,
                                     .buffer_register = {2 * MIB + 1, BUFFER_CUDA}};
    client_call(&c, &request, fd, &reply, NULL);
    assert_ok(&reply);

    /* 2 + 4 of 6 MiB are taken. */
    request.id = 0;
    request.buffer_register.size_bytes = 1;
    client_call(&c, &request, fd, &reply, NULL);
    assert_error(&reply, ERR_QUOTA);

    request = infer_a(x);
    request.infer.input = place;
    request.infer.input.buffer = place.buffer + 1;
    request.infer.has_output = true;
    request.infer.output = (struct proto_tensor){
        .dtype = PROTO_FLOAT32, .rank = 4, .shape = {1, A_OUT, A_ROWS, 1}, .buffer = place.buffer};
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_near(theirs, wanted, A_ROWS * A_OUT);

    /* Gone while it is used. */
    memset(theirs, 0, sizeof(wanted));
    request.id = 0;
    client_send(&c, &request, -1);
    sleep_ms(50);
    client_close(&c);
    sleep_ms(400);
    assert_near(theirs, wanted, A_ROWS * A_OUT);

    /* No memory of the device, or of another size. */
    client_start(&c, &gpu);
    for (int i = 0; i < 3; i++) {
        request = (struct proto_request){.verb = VERB_BUFFER_REGISTER,
                                         .buffer_register = {i == 1 ? 5 * MIB : 4096, BUFFER_CUDA}};
        /* What went before is charged until it is freed, which takes a moment. */
        for (int wait = 0; wait < 500; wait++) {
            request.id = 0;
            client_call(&c, &request, i == 0 ? STDOUT_FILENO : i == 1 ? fd : -1, &reply, NULL);
            if (reply.error != ERR_QUOTA)
                break;
            sleep_ms(10);
        }
        assert_error(&reply, ERR_BAD_BUFFER);
    }
    client_close(&c);
    close(fd);
    munmap(ours, 4 * MIB);
    munmap(theirs, 2 * MIB);
    assert_healthy(&gpu);
    daemon_stop(&gpu);
}

/* What a device keeps for models, whoever hoards its memory. */
static void leaves_the_device_its_reserve(void **state)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                    .buffer_create = {20 * MIB, BUFFER_CUDA, 0}};
    struct proto_reply reply;
    struct daemon gpu;
    int n_given = 0;

    (void)state;
    daemon_start(&gpu, "device_memory=1;memory_mib=100", "device_reserve_bytes = 41943040;");
    client_start(&c, &gpu);
    for (int i = 0; i < 5; i++) {
        request.id = 0;
        client_call(&c, &request, -1, &reply, NULL);
        if (i < 3)
            assert_ok(&reply);
        else
            assert_error(&reply, ERR_NO_MEMORY);
    }
    client_close(&c);
    assert_healthy(&gpu);
    daemon_stop(&gpu);
    /* Many that ask at once: more would fit beside each other than together. */
    daemon_start(&gpu, "device_memory=1;memory_mib=100", "device_reserve_bytes = 41943040;");
    client_start(&c, &gpu);
    for (int i = 0; i < 12; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    for (int i = 0; i < 12; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        n_given += reply.error == ERR_NONE;
        if (reply.error != ERR_NONE)
            assert_error(&reply, ERR_NO_MEMORY);
    }
    assert_int_equal(n_given, 3);
    client_close(&c);
    assert_healthy(&gpu);
    daemon_stop(&gpu);
}

/* S-01, S-03, S-04, S-08, S-12 */
static void registers_only_what_cannot_hurt(void **state)
{
    enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW, SIZE = 8192 };
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct proto_reply reply;
    char path[200];
    int pipes[2], fds[12], n = 0, good;

    (void)state;
    client_start(&c, &d);
    good = memfd(SIZE, MFD_ALLOW_SEALING, SEALS);
    use(&reply, good, SIZE);
    assert_ok(&reply);
    assert_int_equal(reply.buffer.size_bytes, SIZE);
    release(reply.buffer.buffer, ERR_NONE);

    assert_int_equal(pipe(pipes), 0);
    fds[n++] = pipes[0];
    fds[n++] = pipes[1];
    fds[n++] = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fds[n - 1], (struct sockaddr *)&address, sizeof(sa_family_t)), 0);
    assert_int_equal(listen(fds[n - 1], 1), 0);
    fds[n++] = open("/tmp", O_RDONLY | O_DIRECTORY);
    fds[n++] = open("/dev/zero", O_RDWR);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", good);
    fds[n++] = open(path, O_RDONLY);
    fds[n++] = open(path, O_PATH);
    snprintf(path, sizeof(path), "%s/plain", d.dir);
    fds[n++] = open(path, O_RDWR | O_CREAT, 0600);
    assert_int_equal(ftruncate(fds[n - 1], SIZE), 0);
    fds[n++] = memfd(SIZE, 0, 0);                                         /* cannot be sealed */
    fds[n++] = memfd(SIZE, MFD_ALLOW_SEALING, SEALS | F_SEAL_WRITE);      /* cannot be written */
    fds[n++] = memfd(SIZE, MFD_ALLOW_SEALING, F_SEAL_SEAL | F_SEAL_GROW); /* may still shrink */
    for (int i = 0; i < n; i++) {
        assert_true(fds[i] >= 0);
        use(&reply, fds[i], SIZE);
        if (reply.error != ERR_BAD_BUFFER)
            print_message("row %d:\n", i);
        assert_error(&reply, ERR_BAD_BUFFER);
        close(fds[i]);
    }
    /* lies about the size */
    for (int i = 0; i < 4; i++) {
        static const uint64_t lies[] = {SIZE + 1, SIZE - 1, SIZE + 4096, 1};

        use(&reply, good, lies[i]);
        assert_error(&reply, ERR_BAD_BUFFER);
    }
    use(&reply, good, UINT64_C(1) << 62);
    assert_error(&reply, ERR_QUOTA);
    use(&reply, -1, SIZE);
    assert_error(&reply, ERR_BAD_BUFFER);
    close(good);
    /* 1 TiB without a page */
    good = memfd(UINT64_C(1) << 40, MFD_ALLOW_SEALING, SEALS);
    use(&reply, good, UINT64_C(1) << 40);
    assert_error(&reply, ERR_QUOTA);
    use(&reply, good, 500000);
    assert_error(&reply, ERR_BAD_BUFFER);
    close(good);
    client_close(&c);
    assert_healthy(&d);
}

/* P-09: another connection's handle is as unknown as any. */
static void keeps_handles_to_their_connection(void **state)
{
    static struct client other;
    struct proto_reply reply;
    struct shm shm;
    uint32_t handle;

    (void)state;
    client_start(&c, &d);
    client_start(&other, &d);
    for (int i = 0; i < 3; i++) {
        handle = client_buffer(&other, 4096, &shm);
        shm_deinit(&shm);
    }
    release(handle, ERR_NOT_FOUND);
    release(0, ERR_NOT_FOUND);
    release(UINT32_MAX, ERR_NOT_FOUND);
    (void)reply;
    client_close(&c);
    client_close(&other);
    assert_healthy(&d);
}

/* S-10, S-14: handles are not given twice, descriptors and charges come back. */
static void gives_everything_back(void **state)
{
    int good = memfd(4096, MFD_ALLOW_SEALING, F_SEAL_SHRINK | F_SEAL_GROW);
    struct proto_reply reply;
    uint32_t last = 0;

    (void)state;
    client_start(&c, &d);
    for (int i = 0; i < 1500; i++) {
        use(&reply, good, i % 3 == 2 ? 4097 : 4096);
        if (i % 3 == 2) {
            assert_error(&reply, ERR_BAD_BUFFER);
            continue;
        }
        assert_ok(&reply);
        assert_true(reply.buffer.buffer > last);
        last = reply.buffer.buffer;
        if (i % 3 == 1)
            release(last, ERR_NONE);
        if (i % 200 == 199) {
            client_close(&c);
            client_start(&c, &d);
            last = 0;
        }
    }
    close(good);
    client_close(&c);
    assert_healthy(&d);
}

/* Descriptors that lie unread in a socket are limited for all of us: four, then the client goes. */
static void bounds_unread_descriptors(void **state)
{
    struct proto_reply reply;
    unsigned n = 0;

    (void)state;
    client_start(&c, &d);
    for (int i = 0; i < 12; i++) {
        struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                        .buffer_create.size_bytes = 4096};

        request.id = 100 + (uint64_t)i;
        if (wire_send(c.fd, c.tx, (size_t)codec_encode_request(&request, c.tx, sizeof(c.tx)), -1) <
            0)
            break;
    }
    sleep_ms(300);
    while (client_recv(&c, &reply, NULL))
        n++;
    assert_int_equal(n, 4);
    client_close(&c);
    assert_healthy(&d);
}

/* But whoever receives each descriptor before asking for the next may leave other answers unread.
 */
static void waits_for_unread_answers(void **state)
{
    struct proto_request create = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 4096};
    struct proto_request ping = {.verb = VERB_PING};

    (void)state;
    client_start(&c, &d);
    for (int i = 0; i < 12; i++) {
        struct proto_reply reply;
        int fd = -1;

        create.id = ping.id = 0;
        client_send(&c, &create, -1);
        client_send(&c, &ping, -1);
        sleep_ms(20); /* both answers are there before one is read */
        while (fd < 0) {
            assert_true(client_recv(&c, &reply, &fd));
            assert_int_equal(reply.error, ERR_NONE);
        }
        close(fd);
    }
    client_close(&c);
    assert_healthy(&d);
}

static void survives_clients_that_go_at_once(void **state)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 400000};

    (void)state;
    for (int i = 0; i < 50; i++) {
        client_start(&c, &d);
        request.id = 0;
        client_send(&c, &request, -1);
        client_close(&c);
    }
    assert_healthy(&d);
}

static void reports_what_cannot_be_pinned(void **state)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 100001};
    struct proto_reply reply;
    struct daemon tight;

    (void)state;
    daemon_start(&tight, "oom_pin_over=100000", NULL);
    client_start(&c, &tight);
    client_call(&c, &request, -1, &reply, NULL);
    assert_error(&reply, ERR_NO_MEMORY);
    request.id = 0;
    request.buffer_create.size_bytes = 100000;
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    client_close(&c);
    assert_healthy(&tight);
    daemon_stop(&tight);
}

/* Has one thing computed, here or in a process of its own. */
static void compute(const struct daemon *daemon, bool elsewhere)
{
    static float x[A_ROWS * A_IN];
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    static struct client own;
    pid_t child = elsewhere ? fork() : 0;
    int status;

    assert_true(child >= 0);
    if (child == 0) {
        client_start(&own, daemon);
        client_call(&own, &request, -1, &reply, NULL);
        assert_ok(&reply);
        client_close(&own);
        if (elsewhere)
            _exit(0);
        return;
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* The script's backend takes 1 s where it is gentle: once another process computes, not for one's
 * own computing. */
static void pins_gently_beside_others(void **state)
{
    static const struct {
        bool own, other, gently;
    } cases[] = {{false, false, false},
                 {true, false, false},
                 {true, true, true},
                 {false, true, true},
                 {true, false, false}};
    struct daemon own;

    (void)state;
    daemon_start(&own, "pins=1;gentle_ms=1000", "spare_buffer_bytes = 0;");
    client_start(&c, &own);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct shm shm;
        double began;

        sleep_ms(1100); /* nobody computed lately */
        if (cases[i].other)
            compute(&own, true);
        if (cases[i].own)
            compute(&own, false);
        began = now_s();
        client_buffer(&c, 4096, &shm);
        if ((now_s() - began > 0.9) != cases[i].gently)
            fail_msg("case %zu took %.0f ms", i, (now_s() - began) * 1e3);
        shm_deinit(&shm);
    }
    client_close(&c);
    assert_healthy(&own);
    daemon_stop(&own);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(makes_sealed_zeroed_regions),
        cmocka_unit_test(never_gives_a_region_twice),
        cmocka_unit_test(refuses_sizes),
        cmocka_unit_test(offers_no_device_buffers),
        cmocka_unit_test(gives_and_takes_device_memory),
        cmocka_unit_test(leaves_the_device_its_reserve),
        cmocka_unit_test(registers_only_what_cannot_hurt),
        cmocka_unit_test(keeps_handles_to_their_connection),
        cmocka_unit_test(gives_everything_back),
        cmocka_unit_test(bounds_unread_descriptors),
        cmocka_unit_test(waits_for_unread_answers),
        cmocka_unit_test(survives_clients_that_go_at_once),
        cmocka_unit_test(pins_gently_beside_others),
        cmocka_unit_test(reports_what_cannot_be_pinned),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
