/*
 * test_scheduling.c - who goes first, and how long a batch waits, seen by clients
 */
#include "daemon.h"
#include "proto/scan.h"

static float x[A_ROWS * A_IN];
static struct client many[4];

static int prepare(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

static void add_batched(const struct daemon *daemon, const char *model, const char *batching)
{
    char path[300], line[400], text[2000] = "";
    FILE *file;

    add_model(daemon, model);
    snprintf(path, sizeof(path), "%s/%s.conf", daemon->models, model);
    file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, "batching", 8) != 0)
            strncat(text, line, sizeof(text) - strlen(text) - 1);
    }
    fclose(file);
    strncat(text, batching, sizeof(text) - strlen(text) - 1);
    write_file(path, text);
}

/* A daemon whose models are batched as told. */
static void start(struct daemon *daemon, const char *script, const char *config,
                  const char *batching)
{
    daemon_prepare(daemon);
    add_batched(daemon, MODEL_A, batching);
    add_batched(daemon, MODEL_B, batching);
    add_batched(daemon, MODEL_FULL, batching);
    add_batched(daemon, MODEL_DROPOUT, batching);
    if (config)
        write_file(daemon->config, config);
    daemon_spawn(daemon, script);
    daemon_wait_ready(daemon);
}

static void send_a(struct client *client, uint64_t deadline_us)
{
    struct proto_request request = infer_a(x);

    request.infer.has_deadline = deadline_us > 0;
    request.infer.deadline_us = deadline_us;
    client_send(client, &request, -1);
}

/* The number at a path of the statistics' document. */
static uint64_t stat_of(struct client *client, const char *path)
{
    struct proto_request request = {.verb = VERB_STATS, .model.name = str(MODEL_A)};
    struct proto_reply reply;
    struct scan_item item;
    const uint8_t *found;
    size_t n, pos = 0;

    client_call(client, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(scan_find(reply.document.bytes, reply.document.n_bytes, path, &found, &n), 0);
    assert_int_equal(scan_item(found, n, &pos, &item), 0);
    assert_int_equal(item.type, SCAN_UINT);
    return item.u;
}

/* How many of `flood`'s answers came before the first of `other`. */
static unsigned answers_before(struct client *flood, struct client *other, unsigned n_flood)
{
    struct proto_reply reply;
    unsigned n = 0, before = 0;
    bool seen = false;

    while (n < n_flood || !seen) {
        struct pollfd p[2] = {{.fd = flood->fd, .events = POLLIN},
                              {.fd = other->fd, .events = POLLIN}};

        assert_true(poll(p, 2, 10000) > 0);
        if (p[0].revents) {
            assert_true(client_recv(flood, &reply, NULL));
            assert_is_a(&reply);
            n++;
            before += !seen;
        } else {
            assert_true(client_recv(other, &reply, NULL));
            assert_is_a(&reply);
            seen = true;
        }
    }
    return before;
}

/* A batch takes one request here: one client's twenty and then another's one. */
static void serves_connections_in_turn(void **state)
{
    struct daemon daemon;
    unsigned before;

    (void)state;
    start(&daemon, "delay_ms=20", NULL, "batching = { max_rows = 8; };\n");
    client_start(&many[0], &daemon);
    client_start(&many[1], &daemon);
    for (int i = 0; i < 20; i++)
        send_a(&many[0], 0);
    sleep_ms(5);
    send_a(&many[1], 0);
    before = answers_before(&many[0], &many[1], 20);
    assert_in_range(before, 0, 3);
    client_close(&many[0]);
    client_close(&many[1]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

/* Another uid's one request against four connections' forty. */
static void serves_uids_by_rows(void **state)
{
    struct daemon daemon;
    unsigned before;

    (void)state;
    if (geteuid() != 0) {
        print_message("only root has other uids at hand\n");
        skip();
    }
    start(&daemon, "delay_ms=10", "socket_mode = \"0666\";", "batching = { max_rows = 8; };\n");
    assert_int_equal(chmod(daemon.dir, 0755), 0);
    for (int k = 0; k < 3; k++)
        client_start(&many[k], &daemon);
    assert_int_equal(seteuid(54321), 0);
    client_start(&many[3], &daemon);
    assert_int_equal(seteuid(0), 0);
    for (int i = 0; i < 60; i++)
        send_a(&many[i % 3], 0);
    sleep_ms(5);
    for (int i = 0; i < 10; i++)
        send_a(&many[3], 0);
    /* Row for row: its ten are done when about ten of the sixty are. */
    for (int i = 0; i < 10; i++) {
        struct proto_reply reply;

        assert_true(client_recv(&many[3], &reply, NULL));
        assert_is_a(&reply);
    }
    before = 0;
    for (int k = 0; k < 3; k++) {
        struct proto_reply reply;

        while (client_readable(&many[k], 0) && client_recv(&many[k], &reply, NULL))
            before++;
    }
    assert_in_range(before, 7, 16);
    for (int k = 0; k < 4; k++)
        client_close(&many[k]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

static void waits_for_more_as_long_as_told(void **state)
{
    struct proto_reply reply;
    struct daemon daemon;
    uint64_t queue_us[2];

    (void)state;
    /* A backend that knows nothing of what batches cost. */
    start(&daemon, "slots=1", NULL, "batching = { max_rows = 32; max_delay_us = 200000; };\n");
    client_start(&many[0], &daemon);
    client_start(&many[1], &daemon);
    send_a(&many[0], 0);
    sleep_ms(30);
    send_a(&many[1], 0);
    for (int k = 0; k < 2; k++) {
        assert_true(client_recv(&many[k], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, 2 * A_ROWS);
        queue_us[k] = reply.infer.queue_us;
    }
    assert_true(queue_us[0] >= 200000);
    assert_true(queue_us[1] < queue_us[0] - 10000);
    assert_int_equal(stat_of(&many[0], "closed.delay"), 1);

    /* A deadline does not pass for the sake of a fuller batch. */
    send_a(&many[0], 0);
    send_a(&many[1], 160000);
    for (int k = 0; k < 2; k++) {
        assert_true(client_recv(&many[k], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, 2 * A_ROWS);
    }
    assert_in_range(reply.infer.queue_us, 1000, 160000); /* and not 200 ms */
    assert_int_equal(stat_of(&many[0], "closed.deadline"), 1);

    /* A full one does not wait. */
    for (int i = 0; i < 4; i++)
        send_a(&many[0], 0);
    for (int i = 0; i < 4; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        assert_is_a(&reply);
        assert_in_range(reply.infer.queue_us, 0, 100000);
    }
    assert_int_equal(stat_of(&many[0], "closed.full"), 1);
    assert_int_equal(stat_of(&many[0], "closed.idle"), 0);
    client_close(&many[0]);
    client_close(&many[1]);
    daemon_stop(&daemon);
}

/* A slot is free, but a small batch would only wait in it. */
static void forms_when_the_device_is_about_to_be_free(void **state)
{
    struct proto_reply reply;
    struct daemon daemon;

    (void)state;
    start(&daemon, "slots=2;delay_ms=200", NULL, "batching = { max_rows = 64; };\n");
    client_start(&many[0], &daemon);
    send_a(&many[0], 0);
    assert_true(client_recv(&many[0], &reply, NULL)); /* it knows now how long a batch takes */
    send_a(&many[0], 0);
    for (int i = 0; i < 3; i++) {
        sleep_ms(30);
        send_a(&many[0], 0);
    }
    for (int i = 0; i < 4; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, i == 0 ? A_ROWS : 3 * A_ROWS);
    }
    /* A full one goes to the free slot at once. */
    send_a(&many[0], 0);
    sleep_ms(30);
    for (int i = 0; i < 8; i++)
        send_a(&many[0], 0);
    for (int i = 0; i < 9; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, i == 0 ? A_ROWS : 8 * A_ROWS);
        assert_in_range(reply.infer.queue_us, 0, 120000);
    }
    client_close(&many[0]);
    daemon_stop(&daemon);
}

/* One uid keeps a model's queue full: it is told BUSY, another with one request at a time is not.
 */
static void full_queue_is_not_for_others(void **state)
{
    struct proto_reply reply;
    struct daemon daemon;
    unsigned n_busy = 0;

    (void)state;
    if (geteuid() != 0) {
        print_message("only root has other uids at hand\n");
        skip();
    }
    start(&daemon, "delay_ms=10", "socket_mode = \"0666\";",
          "batching = { max_rows = 8; queue_rows = 40; };\n");
    assert_int_equal(chmod(daemon.dir, 0755), 0);
    client_start(&many[0], &daemon);
    assert_int_equal(seteuid(54321), 0);
    client_start(&many[1], &daemon);
    assert_int_equal(seteuid(0), 0);
    for (int i = 0; i < 40; i++)
        send_a(&many[0], 0);
    for (int i = 0; i < 40; i++) {
        if (i % 4 == 0) {
            send_a(&many[1], 0);
            assert_true(client_recv(&many[1], &reply, NULL));
            assert_is_a(&reply);
        }
        assert_true(client_recv(&many[0], &reply, NULL));
        n_busy += reply.error == ERR_BUSY;
        send_a(&many[0], 0);
    }
    assert_true(n_busy > 0);
    for (int i = 0; i < 40; i++)
        assert_true(client_recv(&many[0], &reply, NULL));
    client_close(&many[0]);
    client_close(&many[1]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

/* Asks for what is refused, so often that it is not read for a while: every answer comes, in order,
 * another uid waits for none of that, and an end does not wait for it either. */
static void paces_refusals(void **state)
{
    enum { N = 600 };
    struct proto_reply reply;
    struct daemon daemon;
    double begin, waited = 0;

    (void)state;
    start(&daemon, NULL, "socket_mode = \"0666\";", "batching = { max_rows = 8; };\n");
    assert_int_equal(chmod(daemon.dir, 0755), 0);
    client_start(&many[0], &daemon);
    if (geteuid() == 0)
        assert_int_equal(seteuid(54321), 0);
    client_start(&many[1], &daemon);
    if (getuid() == 0)
        assert_int_equal(seteuid(0), 0);
    for (int round = 0; round < 2; round++) {
        int n_answers = 0;

        begin = now_s();
        for (int i = 0; i < N; i++) {
            struct proto_request request = infer_a(x);

            request.infer.model = str("nonesuch");
            request.id = 1 + (uint64_t)round * N + (uint64_t)i;
            client_send(&many[0], &request, -1);
            if (i % 200 != 199)
                continue;
            /* What waits now is more than is refused in one go. */
            waited = now_s();
            send_a(&many[1], 0);
            assert_true(client_recv(&many[1], &reply, NULL));
            assert_is_a(&reply);
            waited = now_s() - waited;
            while (n_answers <= i - (round == 1 && i == N - 1 ? 100 : 0)) {
                assert_true(client_recv(&many[0], &reply, NULL));
                assert_error(&reply, ERR_NOT_FOUND);
                assert_int_equal(reply.id, 1 + round * N + n_answers++);
            }
        }
        assert_in_range((now_s() - begin) * 1e3, 30, 5000);
        if (round == 0)
            continue;
        kill(daemon.pid, SIGTERM);
        while (n_answers < N) {
            assert_true(client_recv(&many[0], &reply, NULL));
            assert_int_equal(reply.id, 1 + round * N + n_answers++);
            if (reply.error != ERR_NOT_FOUND)
                assert_error(&reply, ERR_SHUTTING_DOWN);
        }
    }
    assert_int_equal(daemon_join(&daemon, 5), 0);
    print_message("another uid waited %.2f ms meanwhile\n", waited * 1e3);
    client_close(&many[0]);
    client_close(&many[1]);
    daemon_remove(&daemon);
}

/* Blocks of 16 rows: two of 8 and one more are 16 rows and 8, not 24 that take as long as 32. */
static void keeps_to_what_batches_cost(void **state)
{
    struct proto_request describe = {.verb = VERB_MODEL_DESCRIBE, .model.name = str(MODEL_A)};
    struct proto_reply reply;
    struct scan_item item;
    struct daemon daemon;
    const uint8_t *found;
    size_t n, pos = 0;

    (void)state;
    start(&daemon, "cost_step=16:50000", NULL, "batching = { max_rows = 64; };\n");
    client_start(&many[0], &daemon);
    client_call(&many[0], &describe, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(
        scan_find(reply.document.bytes, reply.document.n_bytes, "costs_us.3.0", &found, &n), 0);
    assert_int_equal(scan_item(found, n, &pos, &item), 0);
    assert_int_equal(item.u, 16);
    for (int i = 0; i < 4; i++) {
        send_a(&many[0], 0);
        if (i == 0)
            sleep_ms(10); /* it runs, the others wait */
    }
    for (int i = 0; i < 4; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, i == 0 || i == 3 ? A_ROWS : 2 * A_ROWS);
    }
    assert_int_equal(stat_of(&many[0], "closed.cost"), 1);
    client_close(&many[0]);
    daemon_stop(&daemon);

    /* Whole blocks get no cheaper by waiting for more of them. */
    start(&daemon, "cost_step=16:1000", NULL,
          "batching = { max_rows = 64; max_delay_us = 400000; };\n");
    client_start(&many[0], &daemon);
    send_a(&many[0], 0);
    sleep_ms(20);
    send_a(&many[0], 0);
    for (int i = 0; i < 2; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, 2 * A_ROWS);
        assert_in_range(reply.infer.queue_us, 0, 200000);
    }
    assert_int_equal(stat_of(&many[0], "closed.cost"), 1);
    assert_int_equal(stat_of(&many[0], "closed.delay"), 0);
    client_close(&many[0]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

/* ---- large requests ---- */

#define ROWS 7 /* of each of the models below; batches take 2 */

static const struct {
    const char *model;
    int in_rank, out_rank;
    int64_t in[5], out[5];
    size_t in_floats, out_floats; /* of a row */
} large[] = {
    {MODEL_A, 2, 4, {ROWS, A_IN}, {1, A_OUT, ROWS, 1}, A_IN, A_OUT},
    {MODEL_B, 5, 5, {ROWS, 3, 6, 9, 10}, {ROWS, 16, 4, 7, 8}, 1620, 3584},
    {MODEL_FULL, 5, 5, {ROWS, 3, 6, 9, 10}, {ROWS, 16, 4, 7, 8}, 1620, 3584},
    {MODEL_DROPOUT, 2, 2, {ROWS, 1027}, {ROWS, 1027}, 1027, 1027},
};

/* The request for one of them: input at the start of the buffer, the result at OUT_AT. */
#define OUT_AT 65536

static struct proto_request infer_large(size_t i, uint32_t buffer)
{
    struct proto_request request = {
        .verb = VERB_INFER,
        .infer = {
            .model = str(large[i].model),
            .input = {.dtype = PROTO_FLOAT32, .rank = (uint8_t)large[i].in_rank, .buffer = buffer},
            .has_output = true,
            .output = {.dtype = PROTO_FLOAT32,
                       .rank = (uint8_t)large[i].out_rank,
                       .buffer = buffer,
                       .offset = OUT_AT},
            .priority = 1,
            .train = true,
            .seed = 7,
            .offset = 400}};

    memcpy(request.infer.input.shape, large[i].in, sizeof(large[i].in));
    memcpy(request.infer.output.shape, large[i].out, sizeof(large[i].out));
    return request;
}

/* Random input, with a few infinite samples. */
static void fill_large(size_t i, struct shm *shm)
{
    float *to = shm->data;
    unsigned seed = 5;

    for (size_t k = 0; k < ROWS * large[i].in_floats; k++)
        to[k] = (float)(rand_r(&seed) % 2000) / 1000 - 1;
    to[3 * large[i].in_floats + 17] = INFINITY;
}

/* Whole or cut, the bits are the same, masks included. */
static void cuts_without_a_trace(void **state)
{
    static float whole[ARRAY_SIZE(large)][ROWS * 3584];
    static const char *const batchings[] = {"batching = { max_rows = 64; };\n",
                                            "batching = { max_rows = 2; };\n"};
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;

    (void)state;
    for (int pass = 0; pass < 2; pass++) {
        start(&daemon, NULL, NULL, batchings[pass]);
        client_start(&many[0], &daemon);
        for (size_t i = 0; i < ARRAY_SIZE(large); i++) {
            uint32_t buffer = client_buffer(&many[0], 1 << 20, &shm);
            struct proto_request request = infer_large(i, buffer);
            float *y = (float *)((uint8_t *)shm.data + OUT_AT);
            size_t size = ROWS * large[i].out_floats * sizeof(float);

            fill_large(i, &shm);
            client_call(&many[0], &request, -1, &reply, NULL);
            assert_ok(&reply);
            assert_int_equal(reply.infer.batch_rows, pass == 0 ? ROWS : 2);
            if (pass == 0)
                memcpy(whole[i], y, size);
            else if (memcmp(whole[i], y, size) != 0)
                fail_msg("%s: other bits when it is cut", large[i].model);
            shm_deinit(&shm);
        }
        client_close(&many[0]);
        daemon_stop(&daemon);
    }
}

/* On a device, bytes of the host's memory go in parts that overlap: of an outer sum, whole runs. */
static void cuts_what_goes_over_the_link(void **state)
{
    enum { ALL = 20000, RUN = 128, AT = 6 << 20, SIZE = 17 << 20 };
    static const char batching[] = "batching = { max_rows = 32768; };\n";
    static float whole[ALL * A_OUT];
    struct proto_request request;
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;

    (void)state;
    for (int pass = 0; pass < 2; pass++) {
        unsigned seed = 5;

        start(&daemon, pass == 0 ? "slots=3" : "device_memory=1;slots=3", NULL, batching);
        client_start(&many[0], &daemon);
        request = infer_large(0, client_buffer(&many[0], SIZE, &shm));
        request.infer.input.shape[0] = request.infer.output.shape[2] = ALL;
        request.infer.output.offset = AT;
        for (size_t k = 0; k < ALL * A_IN; k++)
            ((float *)shm.data)[k] = (float)(rand_r(&seed) % 2000) / 1000 - 1;
        client_call(&many[0], &request, -1, &reply, NULL);
        assert_ok(&reply);
        if (pass == 0) {
            assert_int_equal(reply.infer.batch_rows, ALL);
            memcpy(whole, (uint8_t *)shm.data + AT, sizeof(whole));
        } else {
            assert_in_range(reply.infer.batch_rows, RUN, ALL / 2);
            assert_int_equal(reply.infer.batch_rows % RUN, 0);
            if (memcmp(whole, (uint8_t *)shm.data + AT, sizeof(whole)) != 0)
                fail_msg("other bits when it is cut");
        }
        shm_deinit(&shm);
        client_close(&many[0]);
        daemon_stop(&daemon);
    }
}

/* Where another request waits they overlap with each other, each in one piece. */
static void runs_whole_beside_others(void **state)
{
    enum { ALL = 20000, AT = 6 << 20, NEXT = 11 << 20, SIZE = 28 << 20 };
    struct proto_request request;
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;

    (void)state;
    start(&daemon, "device_memory=1;slots=1;delay_ms=50", NULL,
          "batching = { max_rows = 32768; };\n");
    client_start(&many[0], &daemon);
    request = infer_large(0, client_buffer(&many[0], SIZE, &shm));
    request.infer.input.shape[0] = request.infer.output.shape[2] = ALL;
    for (uint64_t id = 1; id <= 2; id++) {
        request.id = 100 + id;
        request.infer.output.offset = AT + (id - 1) * NEXT;
        client_send(&many[0], &request, -1);
        sleep_ms(10); /* the second comes while the first part of the first runs */
    }
    for (int i = 0; i < 2; i++) {
        assert_true(client_recv(&many[0], &reply, NULL));
        assert_ok(&reply);
        if (reply.id == 102)
            assert_int_equal(reply.infer.batch_rows, ALL);
        else /* what was left of it */
            assert_in_range(reply.infer.batch_rows, ALL / 2, ALL - 128);
    }
    assert_memory_equal((uint8_t *)shm.data + AT, (uint8_t *)shm.data + AT + NEXT,
                        (size_t)ALL * A_OUT * 4);
    shm_deinit(&shm);
    client_close(&many[0]);
    daemon_stop(&daemon);
}

/* Others run between the parts; there is one answer; cancelled in the middle, nothing is written
 * after it. */
static void lets_others_in_between(void **state)
{
    struct proto_request request, cancel = {.verb = VERB_CANCEL};
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;
    uint64_t id;
    double begin;
    uint8_t *y;

    (void)state;
    start(&daemon, "delay_ms=100", NULL, "batching = { max_rows = 2; };\n");
    client_start(&many[0], &daemon);
    client_start(&many[1], &daemon);
    request = infer_large(0, client_buffer(&many[0], 1 << 20, &shm));
    y = (uint8_t *)shm.data + OUT_AT;
    fill_large(0, &shm);
    begin = now_s();
    client_send(&many[0], &request, -1); /* four parts */
    sleep_ms(20);
    request = infer_a(x);
    request.infer.input.shape[0] = 1;
    request.infer.input.n_bytes = A_IN * 4;
    client_call(&many[1], &request, -1, &reply, NULL);
    assert_ok(&reply);
    print_message("answered within %.0f ms, of 500\n", (now_s() - begin) * 1e3);
    assert_false(client_readable(&many[0], 0));
    assert_true(client_recv(&many[0], &reply, NULL));
    assert_ok(&reply);
    assert_true(reply.infer.run_us > 400000);
    assert_false(client_readable(&many[0], 150));

    request = infer_large(0, 1);
    id = client_send(&many[0], &request, -1);
    sleep_ms(150); /* in the second part */
    cancel.cancel.target = id;
    client_send(&many[0], &cancel, -1);
    assert_true(client_recv(&many[0], &reply, NULL));
    assert_ok(&reply); /* of the cancel itself */
    assert_true(client_recv(&many[0], &reply, NULL));
    assert_int_equal(reply.id, id);
    assert_error(&reply, ERR_CANCELLED);
    memset(y, 0x55, ROWS * A_OUT * 4);
    sleep_ms(250);
    for (int i = 0; i < ROWS * A_OUT * 4; i++)
        assert_int_equal(y[i], 0x55);

    /* And the client gone in the middle. */
    client_send(&many[0], &(struct proto_request){.verb = VERB_PING}, -1);
    assert_true(client_recv(&many[0], &reply, NULL));
    request = infer_large(0, 1);
    client_send(&many[0], &request, -1);
    sleep_ms(150);
    client_close(&many[0]);
    client_close(&many[1]);
    shm_deinit(&shm);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

/* The one factor of an outer sum is cut like any result; what a constant leaves cannot be. */
static void cuts_compact_sums(void **state)
{
    static float whole[ROWS];
    struct proto_request request;
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;

    (void)state;
    for (int pass = 0; pass < 2; pass++) {
        float *y;

        start(&daemon, NULL, NULL,
              pass == 0 ? "batching = { max_rows = 64; };\n" : "batching = { max_rows = 2; };\n");
        client_start(&many[0], &daemon);
        request = infer_large(0, client_buffer(&many[0], 1 << 20, &shm));
        request.infer.result = RESULT_COMPACT;
        request.infer.output.rank = 2;
        memcpy(request.infer.output.shape, (int64_t[]){ROWS, 1}, 2 * sizeof(int64_t));
        fill_large(0, &shm);
        y = (float *)((uint8_t *)shm.data + OUT_AT);
        client_call(&many[0], &request, -1, &reply, NULL);
        assert_ok(&reply);
        assert_int_equal(reply.infer.batch_rows, pass == 0 ? ROWS : 2);
        if (pass == 0)
            memcpy(whole, y, sizeof(whole));
        else
            assert_memory_equal(whole, y, sizeof(whole));
        shm_deinit(&shm);

        request = infer_large(1, client_buffer(&many[0], 1 << 20, &shm));
        request.infer.train = false;
        request.infer.result = RESULT_COMPACT;
        request.infer.output = (struct proto_tensor){.dtype = PROTO_UINT8,
                                                     .rank = 1,
                                                     .shape = {1 << 18},
                                                     .buffer = request.infer.input.buffer,
                                                     .offset = OUT_AT};
        client_call(&many[0], &request, -1, &reply, NULL);
        if (pass == 0) {
            assert_ok(&reply);
        } else {
            assert_error(&reply, ERR_BAD_TENSOR);
            assert_non_null(memmem(reply.text.s, reply.text.n, "more than 2 rows", 16));
        }
        shm_deinit(&shm);
        client_close(&many[0]);
        daemon_stop(&daemon);
    }
}

static uint64_t requests_held(struct client *client)
{
    struct proto_request request = {.verb = VERB_STATUS};
    struct proto_reply reply;
    struct scan_item item;
    const uint8_t *found;
    size_t n, pos = 0;

    client_call(client, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(
        scan_find(reply.document.bytes, reply.document.n_bytes, "totals.requests", &found, &n), 0);
    assert_int_equal(scan_item(found, n, &pos, &item), 0);
    return item.u;
}

/* Cancelled, or left by its client, between two parts: none of it runs, so nothing else ends it. */
static void ends_between_its_parts(void **state)
{
    struct proto_request request, cancel = {.verb = VERB_CANCEL}, urgent = infer_a(x);
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;
    uint64_t id, held;

    (void)state;
    urgent.infer.priority = 2;
    urgent.infer.input.shape[0] = 2;
    urgent.infer.input.n_bytes = 2 * A_IN * 4;
    start(&daemon, "delay_ms=300", NULL, "batching = { max_rows = 2; };\n");
    client_start(&many[1], &daemon);
    held = requests_held(&many[1]);
    for (int leaves = 0; leaves < 2; leaves++) {
        client_start(&many[0], &daemon);
        request = infer_large(0, client_buffer(&many[0], 1 << 20, &shm));
        request.infer.input.shape[0] = 20;
        request.infer.output.shape[2] = 20;
        id = client_send(&many[0], &request, -1);
        sleep_ms(50);
        urgent.id = 0;
        client_send(&many[1], &urgent, -1);
        sleep_ms(400); /* in the urgent one's batch */
        if (leaves) {
            client_close(&many[0]);
        } else {
            cancel.cancel.target = id;
            client_send(&many[0], &cancel, -1);
            for (int i = 0; i < 2; i++) {
                assert_true(client_recv(&many[0], &reply, NULL));
                if (reply.id == id)
                    assert_error(&reply, ERR_CANCELLED);
                else
                    assert_ok(&reply);
            }
            assert_false(client_readable(&many[0], 0));
        }
        assert_true(client_recv(&many[1], &reply, NULL));
        assert_ok(&reply);
        assert_int_equal(reply.infer.batch_rows, 2);
        if (!leaves) {
            assert_false(client_readable(&many[0], 350));
            client_close(&many[0]);
        }
        assert_int_equal(requests_held(&many[1]), held);
        shm_deinit(&shm);
    }
    client_close(&many[1]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

/* A part that fails ends all of it, once. */
static void fails_as_a_whole(void **state)
{
    struct proto_request request;
    struct proto_reply reply;
    struct daemon daemon;
    struct shm shm;

    (void)state;
    start(&daemon, "delay_ms=20;slots=2;fail_batch=2:5", NULL, "batching = { max_rows = 2; };\n");
    client_start(&many[0], &daemon);
    request = infer_large(0, client_buffer(&many[0], 1 << 20, &shm));
    fill_large(0, &shm);
    client_call(&many[0], &request, -1, &reply, NULL);
    assert_error(&reply, ERR_INTERNAL);
    assert_false(client_readable(&many[0], 150));
    request.id = 0;
    client_call(&many[0], &request, -1, &reply, NULL);
    assert_ok(&reply);
    shm_deinit(&shm);
    client_close(&many[0]);
    assert_healthy(&daemon);
    daemon_stop(&daemon);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(serves_connections_in_turn),
        cmocka_unit_test(serves_uids_by_rows),
        cmocka_unit_test(waits_for_more_as_long_as_told),
        cmocka_unit_test(forms_when_the_device_is_about_to_be_free),
        cmocka_unit_test(full_queue_is_not_for_others),
        cmocka_unit_test(paces_refusals),
        cmocka_unit_test(keeps_to_what_batches_cost),
        cmocka_unit_test(cuts_without_a_trace),
        cmocka_unit_test(cuts_what_goes_over_the_link),
        cmocka_unit_test(runs_whole_beside_others),
        cmocka_unit_test(lets_others_in_between),
        cmocka_unit_test(cuts_compact_sums),
        cmocka_unit_test(ends_between_its_parts),
        cmocka_unit_test(fails_as_a_whole),
    };

    return cmocka_run_group_tests(tests, prepare, NULL);
}
