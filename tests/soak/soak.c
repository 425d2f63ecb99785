/*
 * soak.c - every kind of hostile client beside checked traffic, for a long time
 *
 * Load, a pause, load, a pause: the daemon in the second pause is compared with the daemon in the
 * first. What it has by then (heaps, helper threads) it may keep; from there on nothing may grow.
 * The scripted backend computes as the CPU does, and ends the daemon badly when anything is left
 * pinned or in device memory at its end.
 * Fails on any wrong answer, an ended daemon, or drift. Usage: soak SECONDS, half of which is
 * warming up when there are less than two minutes; $SOAK_LEAK plants a leak (leak.c; "device": of
 * what the backend gave), which must be found.
 */
#include <stdatomic.h>
#include <sys/mman.h>

#include "tests/hostile/hostile.h"

struct quiet {
    unsigned fds, regions, maps, threads;
    long rss_kib;
};

static struct daemon d;
static struct counts {
    atomic_ulong checked, wrong, acts;
} * counts;
static float x[A_ROWS * A_IN], y[A_ROWS * A_OUT];
static unsigned seconds;

/* ---- what clients do, each in a process of its own, until it is killed ---- */

static uint64_t random_state = 88172645463325252ull;

static unsigned roll(unsigned n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)(random_state >> 33) % n;
}

static void check_rows(const float *got, unsigned first, unsigned rows, const char *how)
{
    /* [1, A_OUT, rows, 1] of golden's [1, A_OUT, A_ROWS, 1] */
    for (unsigned k = 0; k < A_OUT; k++) {
        for (unsigned row = 0; row < rows; row++) {
            float wanted = y[k * A_ROWS + first + row], is = got[k * rows + row];

            if (!(fabsf(is - wanted) <= 1e-4f + 1e-4f * fabsf(wanted))) {
                fprintf(stderr, "%s, row %u: %.9g, expected %.9g\n", how, first + row, (double)is,
                        (double)wanted);
                atomic_fetch_add(&counts->wrong, 1);
                return;
            }
        }
    }
    atomic_fetch_add(&counts->checked, 1);
}

static void checked_traffic(void)
{
    static struct client c;
    static float got[A_ROWS * A_OUT];
    struct proto_reply reply;
    struct shm shm;
    uint32_t handle;

    client_start(&c, &d);
    handle = client_buffer(&c, 65536, &shm);
    for (;;) {
        unsigned first = roll(A_ROWS), rows = 1 + roll(A_ROWS - first);
        struct proto_request request = infer_a(x + first * A_IN);

        request.infer.input.shape[0] = rows;
        request.infer.input.n_bytes = rows * A_IN * 4;
        request.infer.priority = (uint8_t)roll(4);
        if (roll(2)) {
            memcpy(shm.data, x + first * A_IN, rows * A_IN * 4);
            request.infer.input.is_inline = false;
            request.infer.input.buffer = handle;
            request.infer.has_output = true;
            request.infer.output = (struct proto_tensor){.dtype = PROTO_FLOAT32,
                                                         .rank = 4,
                                                         .shape = {1, A_OUT, rows, 1},
                                                         .buffer = handle,
                                                         .offset = 32768};
        }
        client_call(&c, &request, -1, &reply, NULL);
        if (reply.error == ERR_NOT_FOUND)
            continue; /* just being reloaded by name */
        if (reply.error != ERR_NONE)
            atomic_fetch_add(&counts->wrong, 1);
        else if (request.infer.has_output)
            check_rows((float *)((uint8_t *)shm.data + 32768), first, rows, "in a buffer");
        else
            check_rows(memcpy(got, reply.infer.output.bytes, reply.infer.output.n_bytes), first,
                       rows, "inline");
    }
}

static void noise(void)
{
    static uint8_t bytes[3000];

    for (;;) {
        int fd = wire_connect(d.socket);

        for (int i = 0; fd >= 0 && i < 20; i++) {
            for (size_t k = 0; k < sizeof(bytes); k += 4)
                memcpy(bytes + k, &(unsigned){roll(UINT32_MAX)}, 4);
            if (roll(2))
                bytes[0] = 0x80 | (bytes[0] & 15);
            wire_send(fd, bytes, 1 + roll(sizeof(bytes) - 1), roll(3) ? -1 : 2);
            atomic_fetch_add(&counts->acts, 1);
        }
        close_fd(fd);
        sleep_ms(1);
    }
}

static void buffers(void)
{
    static struct client c;

    for (;;) {
        struct proto_request create = {.verb = VERB_BUFFER_CREATE};
        struct proto_reply reply;
        int fd = memfd_create(SECRET, MFD_CLOEXEC | MFD_ALLOW_SEALING);

        client_start(&c, &d);
        for (int i = 0; i < 20; i++) {
            struct proto_request adopt = {.verb = VERB_BUFFER_REGISTER,
                                          .buffer_register.size_bytes = 40960};
            struct proto_request release = {.verb = VERB_BUFFER_RELEASE};

            create.id = 0;
            create.buffer_create.size_bytes = 1 + roll(200000);
            create.buffer_create.kind = roll(4) ? BUFFER_HOST : BUFFER_CUDA;
            client_call(&c, &create, -1, &reply, NULL);
            release.buffer_release.buffer = reply.buffer.buffer;
            if (reply.error == ERR_NONE && roll(2))
                client_call(&c, &release, -1, &reply, NULL);
            if (roll(2))
                fallocate(fd, 0, 0, 40960 + roll(2));
            client_call(&c, &adopt, fd, &reply, NULL);
            atomic_fetch_add(&counts->acts, 3);
        }
        close(fd);
        client_close(&c);
    }
}

static void unread(void)
{
    static struct client c;

    for (;;) {
        struct proto_request request = infer_a(x);

        client_start(&c, &d);
        for (int i = 0; i < 400; i++) {
            int n;

            request.id = ++c.last_id;
            n = codec_encode_request(&request, c.tx, sizeof(c.tx));
            if (wire_send(c.fd, c.tx, (size_t)n, -1) != 0)
                break;
            atomic_fetch_add(&counts->acts, 1);
        }
        client_close(&c);
        sleep_ms(20);
    }
}

static void dying(void)
{
    for (;;) {
        pid_t child = fork();

        if (child == 0) {
            static struct client mine;
            struct proto_request request = infer_a(x);

            prctl(PR_SET_PDEATHSIG, SIGKILL);
            client_start(&mine, &d);
            for (;;) {
                int n;

                request.id = ++mine.last_id;
                n = codec_encode_request(&request, mine.tx, sizeof(mine.tx));
                wire_send(mine.fd, mine.tx, (size_t)n, -1);
                if (mine.last_id % 3 == 0)
                    recv(mine.fd, mine.rx, sizeof(mine.rx), 0);
            }
        }
        sleep_ms(1 + roll(20));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        atomic_fetch_add(&counts->acts, 1);
    }
}

static void silent(void)
{
    int fds[50];

    for (;;) {
        for (int i = 0; i < 50; i++)
            fds[i] = wire_connect(d.socket);
        sleep_ms(400);
        for (int i = 0; i < 50; i++)
            close_fd(fds[i]);
        atomic_fetch_add(&counts->acts, 50);
    }
}

/* Loads and unloads one model beside the others; every tenth file is bad. */
static void administer(void)
{
    static struct client c;
    char path[200], text[300];

    snprintf(path, sizeof(path), "%s/clamp.conf", d.models);
    client_start(&c, &d);
    for (unsigned i = 0;; i++) {
        static const enum verb verbs[] = {VERB_MODEL_LOAD,   VERB_MODEL_RELOAD, VERB_STATUS,
                                          VERB_MODEL_UNLOAD, VERB_STATS,        VERB_MODEL_LIST};
        struct proto_request request = {.verb = verbs[roll(ARRAY_SIZE(verbs))]};
        struct proto_reply reply;

        snprintf(text, sizeof(text),
                 i % 10 == 9
                     ? "name = %u;\n"
                     : "name = \"clamp\"; dtype = \"float32\"; input = { shape = [ 4 ]; };\n"
                       "stages = ( { op = \"clamp\"; min = 0.0; max = %u.0; } );\n",
                 1 + i % 7);
        write_file(path, text);
        if (request.verb == VERB_MODEL_LOAD || request.verb == VERB_MODEL_UNLOAD)
            request.model.name = str("clamp");
        client_call(&c, &request, -1, &reply, NULL);
        if (i % 50 == 0)
            kill(d.pid, SIGHUP);
        atomic_fetch_add(&counts->acts, 1);
        sleep_ms(5);
    }
}

/* ---- load, pause, compare ---- */

static void (*const kinds[])(void) = {checked_traffic, checked_traffic, noise,  buffers,
                                      unread,          dying,           silent, administer};

static void load_for(double duration)
{
    pid_t children[ARRAY_SIZE(kinds)];
    double until = now_s() + duration;
    int status;

    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            random_state += i * 7919;
            kinds[i]();
        }
    }
    while (now_s() < until) {
        sleep_ms(100);
        if (waitpid(-1, &status, WNOHANG) > 0) {
            print_log(&d);
            fail_msg("the daemon or a client ended with %x", status);
        }
    }
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
}

static unsigned count_threads(void)
{
    char path[64];
    unsigned n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)d.pid);
    dir = opendir(path);
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n - 2;
}

static struct quiet look_now(void)
{
    return (struct quiet){.fds = count_fds(d.pid),
                          .regions = count_maps(d.pid, "memfd:"),
                          .maps = count_maps(d.pid, NULL),
                          .threads = count_threads(),
                          .rss_kib = rss_kib(d.pid)};
}

/* Looks once everything that clients held is given back, and the helpers are done with it. */
static struct quiet look(void)
{
    struct quiet now, before;

    for (int i = 0; i < 500 && !charges_are_back(&d); i++)
        sleep_ms(20);
    now = look_now();
    for (int i = 0; i < 40; i++) {
        before = now;
        sleep_ms(500);
        now = look_now();
        if (now.fds == before.fds && now.regions == before.regions && now.maps == before.maps)
            break;
    }
    return now;
}

static void grows_by_nothing(void **state)
{
    double warm = seconds < 120 ? seconds / 2.0 : 60;
    struct quiet first, last;

    (void)state;
    load_for(warm);
    first = look();
    load_for(seconds - warm);
    last = look();
    print_message("%u s: %lu answers checked, %lu wrong, %lu hostile acts\n", seconds,
                  atomic_load(&counts->checked), atomic_load(&counts->wrong),
                  atomic_load(&counts->acts));
    print_message("drift over %.0f s: descriptors %+d, regions %+d, mappings %+d, threads %+d, "
                  "private memory %+ld KiB of %ld\n",
                  seconds - warm, (int)(last.fds - first.fds), (int)(last.regions - first.regions),
                  (int)(last.maps - first.maps), (int)(last.threads - first.threads),
                  last.rss_kib - first.rss_kib, first.rss_kib);
    assert_true(atomic_load(&counts->checked) > 0);
    assert_int_equal(atomic_load(&counts->wrong), 0);
    assert_true(charges_are_back(&d));
    assert_true(last.fds <= first.fds && last.regions <= first.regions);
    assert_true(last.threads <= first.threads && last.maps <= first.maps + 8);
    assert_true(last.rss_kib <= first.rss_kib + 8192);
    assert_healthy(&d);
}

static int start(void **state)
{
    const char *leak = getenv("SOAK_LEAK");
    char path[400];

    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    golden_read(MODEL_A, "y", y, sizeof(y));
    counts = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(counts != MAP_FAILED);
    if (leak) {
        snprintf(path, sizeof(path), "%s%s", built("")[0] == '/' ? "" : "./", built("leak.so"));
        setenv("LD_PRELOAD", path, 1);
    }
    daemon_start(&d,
                 leak && strcmp(leak, "device") == 0 ? "pins=1;device_memory=1;forget=100"
                                                     : "pins=1;device_memory=1",
                 "hello_timeout_ms = 300; uid_connections = 250; uid_requests = 4096;");
    unsetenv("LD_PRELOAD");
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(grows_by_nothing)};

    unsigned long given = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;

    seconds = given > 3 ? (unsigned)given : 10;
    return cmocka_run_group_tests(tests, start, stop);
}
