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

/* A daemon with MODEL_A only, batched as told. */
static void start(struct daemon *daemon, const char *script, const char *config,
                  const char *batching)
{
    char path[300], line[400], text[2000] = "";
    FILE *file;

    daemon_prepare(daemon);
    add_model(daemon, MODEL_A);
    snprintf(path, sizeof(path), "%s/%s.conf", daemon->models, MODEL_A);
    file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (strncmp(line, "batching", 8) != 0)
            strncat(text, line, sizeof(text) - strlen(text) - 1);
    }
    fclose(file);
    strncat(text, batching, sizeof(text) - strlen(text) - 1);
    write_file(path, text);
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

    (void)state;
    start(&daemon, NULL, NULL, "batching = { max_rows = 32; max_delay_us = 200000; };\n");
    client_start(&many[0], &daemon);
    client_start(&many[1], &daemon);
    send_a(&many[0], 0);
    sleep_ms(30);
    send_a(&many[1], 0);
    for (int k = 0; k < 2; k++) {
        assert_true(client_recv(&many[k], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, 2 * A_ROWS);
    }
    assert_in_range(reply.infer.queue_us, 100000, 190000);
    assert_int_equal(stat_of(&many[0], "closed.delay"), 1);

    /* A deadline does not pass for the sake of a fuller batch. */
    send_a(&many[0], 0);
    send_a(&many[1], 60000);
    for (int k = 0; k < 2; k++) {
        assert_true(client_recv(&many[k], &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, 2 * A_ROWS);
        assert_false(reply.infer.late);
    }
    assert_in_range(reply.infer.queue_us, 1000, 60000);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(serves_connections_in_turn),
        cmocka_unit_test(serves_uids_by_rows),
        cmocka_unit_test(waits_for_more_as_long_as_told),
    };

    return cmocka_run_group_tests(tests, prepare, NULL);
}
