/*
 * test_health.c - what the device's driver reports of faults, and the limits in force: status shows
 * both, and the daemon ends at a fault that is the device's end
 */
#include "daemon.h"
#include "proto/scan.h"

static struct client c;
static float x[A_ROWS * A_IN];

/* A value of the status document; false where it is nil. */
static bool status_value(const char *path, struct scan_item *ret)
{
    struct proto_request request = {.verb = VERB_STATUS};
    struct proto_reply reply;
    const uint8_t *found;
    size_t n, pos = 0;

    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    if (scan_find(reply.document.bytes, reply.document.n_bytes, path, &found, &n) != 0)
        return false;
    assert_int_equal(scan_item(found, n, &pos, ret), 0);
    return ret->type != SCAN_NIL;
}

static uint64_t status_uint(const char *path)
{
    struct scan_item item;

    if (!status_value(path, &item) || item.type != SCAN_UINT)
        fail_msg("status has no number at %s", path);
    return item.u;
}

static unsigned log_count(const struct daemon *daemon, const char *text)
{
    FILE *file = fopen(daemon->log, "re");
    char line[2400];
    unsigned n = 0;

    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        n += strstr(line, text) != NULL;
    fclose(file);
    return n;
}

/* Within 5 s. */
static void wait_for_xid(void)
{
    for (int i = 0; i < 500; i++) {
        if (status_uint("devices.0.health.xids") == 1)
            return;
        sleep_ms(10);
    }
    fail_msg("status shows no fault");
}

/* G-13: faults that are not the device's end are counted and logged, once, and no more. */
static void shows_what_the_driver_reports(void **state)
{
    struct proto_request request = infer_a(x);
    struct scan_item item;
    struct proto_reply reply;
    struct daemon d;

    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    daemon_start(&d, "xid_ms=500:31;ecc=300:7;ecc_before=5", NULL);
    client_start(&c, &d);
    wait_for_xid();
    assert_int_equal(status_uint("devices.0.health.last_xid"), 31);
    assert_int_equal(status_uint("devices.0.health.ecc_corrected"), 300);
    assert_int_equal(status_uint("devices.0.health.ecc_uncorrected"), 7);
    assert_true(status_value("devices.0.health.lost_by_xid", &item) && item.type == SCAN_STR);
    assert_true(log_has(&d, "device 0: the driver reports Xid 31"));
    assert_true(log_has(&d, "device 0: errors of its memory that were not corrected: 2 more"));
    assert_false(log_has(&d, "device.lost"));
    sleep_ms(600); /* two more looks */
    assert_int_equal(log_count(&d, "device 0:"), 2);
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    client_close(&c);
    assert_healthy(&d);
    daemon_stop(&d);
}

/* Nobody knows what there was before. */
static void counts_from_the_first_count(void **state)
{
    struct daemon d;

    (void)state;
    daemon_start(&d, "xid_ms=500:31;ecc=0:3;ecc_before=-1", NULL);
    client_start(&c, &d);
    wait_for_xid();
    assert_int_equal(status_uint("devices.0.health.ecc_uncorrected"), 3);
    assert_int_equal(log_count(&d, "device 0:"), 1);
    assert_false(log_has(&d, "device.memory"));
    client_close(&c);
    daemon_stop(&d);
}

/* It ends although nobody asks it for anything. */
static void assert_idle_end(const char *script, const char *config, const char *why)
{
    struct daemon d;

    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    write_file(d.config, config);
    daemon_spawn(&d, script);
    assert_int_equal(daemon_join(&d, 10), 70);
    assert_true(log_has(&d, why));
    assert_true(log_has(&d, "device.lost"));
    daemon_remove(&d);
}

/* G-13: those that are: who runs and who waits is told, within 5 s, and so it ends when idle. */
static void ends_at_what_is_the_end(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon d;
    double begin;

    (void)state;
    daemon_start(&d, "xid_ms=1000:79;xid_lost=1;hang_from=1", NULL);
    client_start(&c, &d);
    for (int i = 0; i < 2; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    begin = now_s();
    for (int i = 0; i < 2; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_error(&reply, ERR_GPU_LOST);
    }
    assert_true(client_is_closed(&c));
    client_close(&c);
    assert_int_equal(daemon_join(&d, 5), 70);
    if (now_s() - begin > 7)
        fail_msg("it ended after %.1f s", now_s() - begin);
    assert_true(log_has(&d, "device 0: the driver reports Xid 79"));
    assert_true(log_has(&d, "device.lost"));
    daemon_remove(&d);

    assert_idle_end("xid_ms=300:79;xid_lost=1", "", "device 0: the driver reports Xid 79");
    /* Before anybody has looked. */
    assert_idle_end("xid_ms=1:79;xid_lost=1;info_ms=50", "", "device 0: the driver reports Xid 79");
}

/* The second of two: the daemon's end, too, for requests are on both. */
static void ends_with_any_device(void **state)
{
    (void)state;
    assert_idle_end("only=1;xid_ms=300:79;xid_lost=1", "devices = [ 0, 1 ];",
                    "device 1: the driver reports Xid 79");
}

static void says_that_nobody_watches(void **state)
{
    struct scan_item item;
    struct daemon d;

    (void)state;
    daemon_start(&d, "", NULL);
    client_start(&c, &d);
    assert_false(status_value("devices.0.health", &item));
    assert_true(status_value("devices.0.name", &item));
    client_close(&c);
    daemon_stop(&d);
}

/* Defaults, those of the file, and those of the file after a reload. */
static void shows_the_limits_in_force(void **state)
{
    struct daemon d;

    (void)state;
    daemon_start(&d, "", "uid_buffers = 7; batch_timeout_ms = 1234;");
    client_start(&c, &d);
    assert_int_equal(status_uint("limits.uid_buffers"), 7);
    assert_int_equal(status_uint("limits.batch_timeout_ms"), 1234);
    assert_int_equal(status_uint("limits.uid_buffer_bytes"), UINT64_C(4) << 30);
    assert_int_equal(status_uint("limits.uid_connections"), 256);
    assert_int_equal(status_uint("limits.uid_requests"), 1024);
    assert_true(status_uint("limits.total_buffer_bytes") >
                0); /* 0 in the file: half of the host's */
    assert_int_equal(status_uint("limits.total_connections"), 4096);
    assert_int_equal(status_uint("limits.spare_buffer_bytes"), 256 << 20);
    assert_int_equal(status_uint("limits.device_reserve_bytes"), 1 << 30);
    assert_int_equal(status_uint("limits.hello_timeout_ms"), 5000);
    assert_int_equal(status_uint("limits.drain_timeout_ms"), 30000);
    write_file(d.config, "uid_buffers = 8; total_buffer_bytes = 12345678;");
    kill(d.pid, SIGHUP);
    for (int i = 0; i < 500 && status_uint("limits.uid_buffers") != 8; i++)
        sleep_ms(10);
    assert_int_equal(status_uint("limits.uid_buffers"), 8);
    assert_int_equal(status_uint("limits.total_buffer_bytes"), 12345678);
    assert_int_equal(status_uint("limits.batch_timeout_ms"), 30000);
    client_close(&c);
    daemon_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shows_what_the_driver_reports),
        cmocka_unit_test(counts_from_the_first_count),
        cmocka_unit_test(ends_at_what_is_the_end),
        cmocka_unit_test(ends_with_any_device),
        cmocka_unit_test(says_that_nobody_watches),
        cmocka_unit_test(shows_the_limits_in_force),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
