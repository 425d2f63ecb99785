/*
 * test_engines.c - several devices: what runs where, and that it is the same everywhere
 */
#include <sys/mman.h>

#include "daemon.h"
#include "proto/scan.h"

#define MIB (UINT64_C(1) << 20)

static float x[A_ROWS * A_IN];
static struct client many[4];

static int prepare(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

/* `batching`, and whatever else: lines that replace MODEL_A's batching. */
static void set_model(const struct daemon *daemon, const char *lines)
{
    char path[300], line[400], text[2000] = "";
    FILE *file;

    snprintf(path, sizeof(path), "tests/golden/%s.conf", MODEL_A);
    file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, "batching", 8) != 0)
            strncat(text, line, sizeof(text) - strlen(text) - 1);
    }
    fclose(file);
    strncat(text, lines, sizeof(text) - strlen(text) - 1);
    snprintf(path, sizeof(path), "%s/%s.conf", daemon->models, MODEL_A);
    write_file(path, text);
}

static void spawn(struct daemon *daemon, const char *script, const char *config, const char *lines)
{
    daemon_prepare(daemon);
    add_model(daemon, MODEL_A);
    add_model(daemon, MODEL_FULL);
    set_model(daemon, lines);
    write_file(daemon->config, config);
    daemon_spawn(daemon, script);
}

static void start(struct daemon *daemon, const char *script, const char *config, const char *lines)
{
    spawn(daemon, script, config, lines);
    daemon_wait_ready(daemon);
}

static uint64_t number_at(const struct proto_reply *reply, const char *path)
{
    struct scan_item item;
    const uint8_t *found;
    size_t n, pos = 0;

    if (scan_find(reply->document.bytes, reply->document.n_bytes, path, &found, &n) != 0)
        fail_msg("there is no %s", path);
    assert_int_equal(scan_item(found, n, &pos, &item), 0);
    assert_int_equal(item.type, SCAN_UINT);
    return item.u;
}

static uint64_t status_of(struct client *client, unsigned device, const char *key)
{
    struct proto_request request = {.verb = VERB_STATUS};
    struct proto_reply reply;
    char path[64];

    client_call(client, &request, -1, &reply, NULL);
    assert_ok(&reply);
    snprintf(path, sizeof(path), "devices.%u.%s", device, key);
    return number_at(&reply, path);
}

static void send_a(struct client *client)
{
    struct proto_request request = infer_a(x);

    client_send(client, &request, -1);
}

static void receive_a(struct client *client, const float *same)
{
    struct proto_reply reply;

    assert_true(client_recv(client, &reply, NULL));
    assert_is_a(&reply);
    if (same)
        assert_memory_equal(reply.infer.output.bytes, same, A_OUT_BYTES);
}

/* Right, the same bits wherever, and everywhere something. */
static void computes_the_same_on_each(void **state)
{
    static const char *const configs[] = {"devices = [ 0 ]; cpu_threads = 1;",
                                          "devices = [ 0, 1 ]; cpu_threads = 2;",
                                          "devices = [ 0, 1, 2, 3 ]; cpu_threads = 4;"};
    static const unsigned counts[] = {1, 2, 4};
    static float same[A_ROWS * A_OUT];
    struct proto_reply reply;
    struct daemon daemon;

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(counts); i++) {
        uint64_t rows = 0;

        start(&daemon, NULL, configs[i], "batching = { max_rows = 16; };\n");
        for (int k = 0; k < 4; k++)
            client_start(&many[k], &daemon);
        if (i == 0) {
            send_a(&many[0]);
            assert_true(client_recv(&many[0], &reply, NULL));
            assert_is_a(&reply);
            memcpy(same, reply.infer.output.bytes, sizeof(same));
        }
        for (int n = 0; n < 50; n++) {
            for (int k = 0; k < 4; k++)
                send_a(&many[k]);
        }
        for (int n = 0; n < 50; n++) {
            for (int k = 0; k < 4; k++)
                receive_a(&many[k], same);
        }
        for (unsigned e = 0; e < counts[i]; e++) {
            assert_true(status_of(&many[0], e, "batches") > 0);
            assert_int_equal(status_of(&many[0], e, "index"), e);
            assert_true(status_of(&many[0], e, "resident_bytes") > 0);
            rows += status_of(&many[0], e, "rows");
        }
        assert_int_equal(rows, (200 + (i == 0)) * A_ROWS);
        for (int k = 0; k < 4; k++)
            client_close(&many[k]);
        assert_healthy(&daemon);
        daemon_stop(&daemon);
    }
}

/* Sixteen batches of 100 ms on four devices, and one request that is cut into as many. */
static void spreads_the_load(void **state)
{
    static float rows[16 * A_ROWS * A_IN], wanted[A_ROWS * A_OUT];
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;
    double begin;

    (void)state;
    start(&daemon, "delay_ms=100", "devices = [ 3, 1, 0, 2 ];", "batching = { max_rows = 8; };\n");
    client_start(&many[0], &daemon);
    begin = now_s();
    for (int i = 0; i < 16; i++)
        send_a(&many[0]);
    for (int i = 0; i < 16; i++)
        receive_a(&many[0], NULL);
    print_message("16 batches of 100 ms on 4 devices: %.0f ms\n", (now_s() - begin) * 1e3);
    assert_in_range((now_s() - begin) * 1e3, 390, 1200);
    for (unsigned e = 0; e < 4; e++)
        assert_int_equal(status_of(&many[0], e, "batches"), 4);
    assert_int_equal(status_of(&many[0], 0, "index"), 3);

    golden_read(MODEL_A, "y", wanted, sizeof(wanted));
    for (int i = 0; i < 16; i++)
        memcpy(rows + (size_t)i * A_ROWS * A_IN, x, sizeof(x));
    request.infer.input = (struct proto_tensor){
        .dtype = PROTO_FLOAT32, .rank = 2, .shape = {(int64_t)16 * A_ROWS, A_IN}};
    request.infer.has_output = true;
    request.infer.output = (struct proto_tensor){.dtype = PROTO_FLOAT32,
                                                 .rank = 4,
                                                 .shape = {1, A_OUT, (int64_t)16 * A_ROWS, 1},
                                                 .offset = sizeof(rows)};
    request.infer.input.buffer = request.infer.output.buffer =
        client_buffer(&many[0], sizeof(rows) + sizeof(float) * 16 * A_ROWS * A_OUT, &shm);
    memcpy(shm.data, rows, sizeof(rows));
    begin = now_s();
    client_call(&many[0], &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_in_range((now_s() - begin) * 1e3, 390, 1200);
    for (unsigned e = 0; e < 4; e++)
        assert_int_equal(status_of(&many[0], e, "batches"), 8);
    /* Row r of channel c lies at [c][r]. */
    for (size_t c = 0; c < A_OUT; c++) {
        for (size_t r = 0; r < (size_t)16 * A_ROWS; r++)
            assert_near((float *)shm.data + 16 * A_ROWS * A_IN + c * 16 * A_ROWS + r,
                        wanted + c * A_ROWS + r % A_ROWS, 1);
    }
    shm_deinit(&shm);
    client_close(&many[0]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

static void places_a_model_where_its_file_says(void **state)
{
    struct proto_request describe = {.verb = VERB_MODEL_DESCRIBE, .model.name = str(MODEL_A)};
    struct proto_request reload = {.verb = VERB_MODEL_RELOAD};
    struct proto_reply reply;
    struct daemon daemon;

    (void)state;
    start(&daemon, "delay_ms=1", "devices = [ 0, 5, 7 ];",
          "batching = { max_rows = 8; };\ndevices = [ 7, 5 ];\n");
    client_start(&many[0], &daemon);
    for (int i = 0; i < 20; i++)
        send_a(&many[0]);
    for (int i = 0; i < 20; i++)
        receive_a(&many[0], NULL);
    assert_int_equal(status_of(&many[0], 0, "batches"), 0);
    assert_int_equal(status_of(&many[0], 1, "batches") + status_of(&many[0], 2, "batches"), 20);
    assert_true(status_of(&many[0], 1, "batches") > 5);
    assert_true(status_of(&many[0], 0, "resident_bytes") <
                status_of(&many[0], 1, "resident_bytes"));
    client_call(&many[0], &describe, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(number_at(&reply, "devices.0"), 5);
    assert_int_equal(number_at(&reply, "devices.1"), 7);

    /* A device that is not there changes nothing. */
    set_model(&daemon, "devices = [ 5, 6 ];\n");
    client_call(&many[0], &reload, -1, &reply, NULL);
    assert_error(&reply, ERR_BAD_MODEL);
    assert_non_null(memmem(reply.text.s, reply.text.n, "devices: 6", 10));
    /* Moved to another one. */
    set_model(&daemon, "devices = 0;\n");
    reload.id = 0;
    client_call(&many[0], &reload, -1, &reply, NULL);
    assert_ok(&reply);
    send_a(&many[0]);
    receive_a(&many[0], NULL);
    assert_int_equal(status_of(&many[0], 0, "batches"), 1);
    client_close(&many[0]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);

    spawn(&daemon, "delay_ms=1", "devices = [ 0, 1 ];", "devices = 2;\n");
    assert_int_equal(daemon_join(&daemon, 10), 78);
    assert_true(log_has(&daemon, "devices: 2"));
    daemon_remove(&daemon);
}

/* A buffer of MODEL_A's input and, at 4096, output, in that device's memory; mapped. */
static uint32_t device_buffer(struct client *client, unsigned device, float **ret)
{
    struct proto_request request = {.verb = VERB_BUFFER_CREATE,
                                    .buffer_create = {2 * MIB, BUFFER_CUDA, device}};
    struct proto_reply reply;
    int fd = -1;

    client_call(client, &request, -1, &reply, &fd);
    assert_ok(&reply);
    *ret = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(*ret, MAP_FAILED);
    close(fd);
    return reply.buffer.buffer;
}

static struct proto_request infer_between(uint32_t in, uint32_t out)
{
    struct proto_request request = infer_a(x);

    request.infer.input = (struct proto_tensor){
        .dtype = PROTO_FLOAT32, .rank = 2, .shape = {A_ROWS, A_IN}, .buffer = in};
    request.infer.has_output = true;
    request.infer.output = (struct proto_tensor){.dtype = PROTO_FLOAT32,
                                                 .rank = 4,
                                                 .shape = {1, A_OUT, A_ROWS, 1},
                                                 .buffer = out,
                                                 .offset = 4096};
    return request;
}

/* The backend aborts when it is given another device's memory. */
static void keeps_buffers_on_their_device(void **state)
{
    static float wanted[A_ROWS * A_OUT];
    struct proto_request create = {.verb = VERB_BUFFER_CREATE,
                                   .buffer_create = {2 * MIB, BUFFER_CUDA, 3}};
    struct proto_request request;
    uint32_t buffers[3];
    struct proto_reply reply;
    struct daemon daemon;
    float *data[3];

    (void)state;
    golden_read(MODEL_A, "y", wanted, sizeof(wanted));
    start(&daemon, "device_memory=1;delay_ms=5", "devices = [ 0, 1, 2 ];",
          "batching = { max_rows = 8; };\ndevices = [ 0, 1 ];\n");
    client_start(&many[0], &daemon);
    for (unsigned e = 0; e < 3; e++)
        buffers[e] = device_buffer(&many[0], e, &data[e]);
    for (unsigned e = 0; e < 2; e++) {
        uint64_t before = status_of(&many[0], e, "batches");

        memcpy(data[e], x, sizeof(x));
        for (int i = 0; i < 4; i++) {
            memset(data[e] + 1024, 0, sizeof(wanted));
            request = infer_between(buffers[e], buffers[e]);
            client_call(&many[0], &request, -1, &reply, NULL);
            assert_ok(&reply);
            assert_near(data[e] + 1024, wanted, A_ROWS * A_OUT);
        }
        assert_int_equal(status_of(&many[0], e, "batches"), before + 4);
    }
    request = infer_between(buffers[0], buffers[1]);
    client_call(&many[0], &request, -1, &reply, NULL);
    assert_error(&reply, ERR_BAD_BUFFER);
    request = infer_between(buffers[2], buffers[2]);
    client_call(&many[0], &request, -1, &reply, NULL);
    assert_error(&reply, ERR_BAD_BUFFER);
    client_call(&many[0], &create, -1, &reply, NULL);
    assert_error(&reply, ERR_BAD_BUFFER);

    /* Bound and free ones in one flood, cancelled by the end of the connection. */
    for (int i = 0; i < 100; i++) {
        send_a(&many[0]);
        request = infer_between(buffers[i % 2], buffers[i % 2]);
        request.infer.output.offset += (uint64_t)(1 + i) * 8192;
        client_send(&many[0], &request, -1);
    }
    for (int i = 0; i < 50; i++)
        assert_true(client_recv(&many[0], &reply, NULL) && reply.error == ERR_NONE);
    client_close(&many[0]);
    for (unsigned e = 0; e < 3; e++)
        munmap(data[e], 2 * MIB);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

/* Every answer is of the old or the new file, nothing is lost, and an end waits for all engines. */
static void reloads_and_drains_under_load(void **state)
{
    struct proto_request reload = {.verb = VERB_MODEL_RELOAD};
    unsigned n_answers = 0, n_reloads = 0;
    struct proto_reply reply;
    struct daemon daemon;

    (void)state;
    start(&daemon, "delay_ms=2;slots=2", "devices = [ 0, 1, 2, 3 ];",
          "batching = { max_rows = 8; };\n");
    client_start(&many[0], &daemon);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 20; i++)
            send_a(&many[0]);
        set_model(&daemon, round % 2 ? "batching = { max_rows = 16; };\ndevices = [ 1, 3 ];\n"
                                     : "batching = { max_rows = 8; };\n");
        reload.id = 0;
        client_send(&many[0], &reload, -1);
        for (int i = 0; i < 21; i++) {
            assert_true(client_recv(&many[0], &reply, NULL));
            assert_ok(&reply);
            if (reply.verb == VERB_INFER) {
                assert_is_a(&reply);
                n_answers++;
            } else {
                n_reloads++;
            }
        }
    }
    assert_int_equal(n_answers, 200);
    assert_int_equal(n_reloads, 10);
    for (int i = 0; i < 40; i++)
        send_a(&many[0]);
    receive_a(&many[0], NULL);
    kill(daemon.pid, SIGTERM);
    for (int i = 0; i < 39; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        if (reply.error != ERR_SHUTTING_DOWN)
            assert_is_a(&reply);
    }
    assert_int_equal(daemon_join(&daemon, 10), 0);
    client_close(&many[0]);
    daemon_remove(&daemon);
}

/* A context is lost with its process: one device takes the others with it, and says so. */
static void ends_when_one_is_lost(void **state)
{
    static const char *const scripts[] = {"delay_ms=20;only=2;sticky_from=2",
                                          "delay_ms=20;only=1;hang_from=1"};
    struct proto_reply reply;
    struct daemon daemon;

    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(scripts); i++) {
        unsigned n_good = 0, n_lost = 0;

        start(&daemon, scripts[i], "devices = [ 0, 1, 2, 3 ]; batch_timeout_ms = 500;",
              "batching = { max_rows = 8; };\n");
        client_start(&many[0], &daemon);
        for (int n = 0; n < 60; n++)
            send_a(&many[0]);
        for (int n = 0; n < 60; n++) {
            assert_true(client_recv(&many[0], &reply, NULL));
            n_good += reply.error == ERR_NONE;
            n_lost += reply.error == ERR_GPU_LOST;
        }
        assert_int_equal(n_good + n_lost, 60);
        assert_true(n_good > 0);
        assert_true(n_lost > 0);
        assert_int_equal(daemon_join(&daemon, 5), 70);
        client_close(&many[0]);
        daemon_remove(&daemon);
    }
}

static void copy_program(const char *from, const struct daemon *daemon, const char *name)
{
    char to[200];

    snprintf(to, sizeof(to), "%s/%s", daemon->dir, name);
    copy_file(from, to);
    assert_int_equal(chmod(to, 0700), 0);
}

/* A daemon with the scripted backend in CUDA's place, beside its program. */
static void spawn_as_cuda(struct daemon *daemon, const char *backend, const char *script)
{
    char program[200];

    daemon_prepare(daemon);
    add_model(daemon, MODEL_A);
    copy_program(built("fused"), daemon, "fused");
    copy_program(built("fake-backend.so"), daemon, "fused-cuda.so");
    set_model(daemon, "batching = { max_rows = 8; };\ndevices = [ 0, 2 ];\n");
    write_file(daemon->config, "devices = [ 0, 1, 2 ];");
    snprintf(program, sizeof(program), "%s/fused", daemon->dir);
    daemon->pid = fork();
    assert_true(daemon->pid >= 0);
    if (daemon->pid == 0) {
        int fd = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fd, STDERR_FILENO);
        setenv("FUSED_FAKE_SCRIPT", script, 1);
        execl(program, program, "--config", daemon->config, "--socket", daemon->socket, "--models",
              daemon->models, "--backend", backend, (char *)NULL);
        _exit(127);
    }
}

/* "auto" takes those GPUs that work, a model those of its own that are there, else what there is.
 * "cuda" takes all or nothing. */
static void leaves_out_what_does_not_work(void **state)
{
    static const struct {
        const char *script, *fallback;
        unsigned n;
    } rows[] = {{"delay_ms=1", NULL, 3},
                {"delay_ms=1;only=1;open_fails=1", "device 1: the script says", 2},
                {"delay_ms=1;only=2;open_fails=1", "device 2: the script says", 2},
                {"open_fails=1", "device 2: the script says", 1}};
    struct proto_request status = {.verb = VERB_STATUS};
    struct proto_reply reply;
    struct daemon daemon;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        spawn_as_cuda(&daemon, "auto", rows[i].script);
        daemon_wait_ready(&daemon);
        client_start(&many[0], &daemon);
        for (int n = 0; n < 10; n++)
            send_a(&many[0]);
        for (int n = 0; n < 10; n++)
            receive_a(&many[0], NULL);
        assert_true(status_of(&many[0], 0, "batches") > 0);
        /* The model is not for device 1. */
        assert_int_equal(status_of(&many[0], rows[i].n - 1, "batches") > 0, i != 2);
        status.id = 0;
        client_call(&many[0], &status, -1, &reply, NULL);
        assert_int_equal(!!memmem(reply.document.bytes, reply.document.n_bytes,
                                  rows[i].fallback ? rows[i].fallback
                                                   : "\xa8"
                                                     "fallback\xc0",
                                  rows[i].fallback ? strlen(rows[i].fallback) : 10),
                         1);
        client_close(&many[0]);
        assert_healthy(&daemon);
        daemon_stop(&daemon);
    }
    spawn_as_cuda(&daemon, "cuda", rows[1].script);
    assert_int_equal(daemon_join(&daemon, 10), 69);
    assert_true(log_has(&daemon, "device 1: the script says"));
    daemon_remove(&daemon);
}

static void names_the_device_that_does_not_open(void **state)
{
    struct daemon daemon;

    (void)state;
    spawn(&daemon, "only=1;open_fails=1", "devices = [ 0, 1 ];", "");
    assert_int_equal(daemon_join(&daemon, 10), 69);
    assert_true(log_has(&daemon, "device 1: "));
    daemon_remove(&daemon);

    /* One that has no room for a model: nothing is served, and what was loaded is gone. */
    spawn(&daemon, "only=1;oom_load_over=1", "devices = [ 0, 1 ];", "");
    assert_int_equal(daemon_join(&daemon, 10), 78);
    assert_true(log_has(&daemon, "device 1: "));
    daemon_remove(&daemon);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(computes_the_same_on_each),
        cmocka_unit_test(spreads_the_load),
        cmocka_unit_test(places_a_model_where_its_file_says),
        cmocka_unit_test(keeps_buffers_on_their_device),
        cmocka_unit_test(reloads_and_drains_under_load),
        cmocka_unit_test(ends_when_one_is_lost),
        cmocka_unit_test(leaves_out_what_does_not_work),
        cmocka_unit_test(names_the_device_that_does_not_open),
    };

    return cmocka_run_group_tests(tests, prepare, NULL);
}
