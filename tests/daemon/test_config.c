/*
 * test_config.c - every key: its default, its range, and what is said when it is wrong
 */
#include "unit.h"

#include <fcntl.h>

#include "daemon/config.h"

static int parse(const char *text, struct config *ret, struct report *report)
{
    struct conf *conf = NULL;
    int r = conf_parse("fused.conf", text, strlen(text), &conf, report);

    if (r == 0)
        r = config_parse(conf, ret, report);
    conf_free(conf);
    return r;
}

/* C-01, and the promise of config/fused.conf: what is commented out is what holds. */
static void ships_the_defaults(void **state)
{
    struct config defaults, shipped, spelled;
    struct report report = {""};
    static char text[40000], out[40000];
    size_t n, used = 0;
    FILE *file;

    (void)state;
    config_defaults(&defaults);
    if (config_load("config/fused.conf", &shipped, &report) != 0)
        fail_msg("%s", report.text);
    assert_memory_equal(&defaults, &shipped, sizeof(defaults));
    /* Every commented option, uncommented. */
    file = fopen("config/fused.conf", "re");
    assert_non_null(file);
    n = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[n] = '\0';
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        if (line[0] == '#' && line[1] != ' ' && line[1] != '\0')
            used += (size_t)snprintf(out + used, sizeof(out) - used, "%s\n", line + 1);
    }
    assert_int_equal(parse(out, &spelled, &report), 0);
    assert_memory_equal(&defaults, &spelled, sizeof(defaults));
}

static void takes_every_key(void **state)
{
    struct report report = {""};
    struct config c;

    (void)state;
    assert_int_equal(
        parse("socket = \"/s\"; socket_mode = \"0600\"; socket_group = \"g\";\n"
              "admin_group = \"a\"; backend = \"cpu\"; devices = [ 1, 0 ]; cpu_threads = 3;\n"
              "spin_us = 0; models_dir = \"/m\"; weights_dir = \"/w\";\n"
              "log_level = \"debug\"; uid_buffer_bytes = 5000000000L;\n"
              "uid_buffers = 1; uid_connections = 2; uid_requests = 3;\n"
              "total_buffer_bytes = 6L; total_connections = 7; spare_buffer_bytes = 8;\n"
              "device_reserve_bytes = 9;\n"
              "hello_timeout_ms = 10; batch_timeout_ms = 11; drain_timeout_ms = 0;\n",
              &c, &report),
        0);
    assert_string_equal(c.socket, "/s");
    assert_int_equal(c.socket_mode, 0600);
    assert_string_equal(c.socket_group, "g");
    assert_string_equal(c.admin_group, "a");
    assert_string_equal(c.backend, "cpu");
    assert_int_equal(c.n_devices, 2);
    assert_int_equal(c.devices[0], 1);
    assert_int_equal(c.devices[1], 0);
    assert_int_equal(c.cpu_threads, 3);
    assert_int_equal(c.spin_us, 0);
    assert_string_equal(c.models_dir, "/m");
    assert_string_equal(c.weights_dir, "/w");
    assert_int_equal(c.log_level, LOG_LEVEL_DEBUG);
    assert_int_equal(c.uid_buffer_bytes, 5000000000);
    assert_int_equal(c.uid_buffers, 1);
    assert_int_equal(c.uid_connections, 2);
    assert_int_equal(c.uid_requests, 3);
    assert_int_equal(c.total_buffer_bytes, 6);
    assert_int_equal(c.total_connections, 7);
    assert_int_equal(c.spare_buffer_bytes, 8);
    assert_int_equal(c.device_reserve_bytes, 9);
    assert_int_equal(c.hello_timeout_ms, 10);
    assert_int_equal(c.batch_timeout_ms, 11);
    assert_int_equal(c.drain_timeout_ms, 0);
}

/* C-02, C-03: file, line and key are named. */
static void names_what_is_wrong(void **state)
{
    static const struct {
        const char *text, *key;
    } rows[] = {
        {"\nsocket = 5;", "socket"},
        {"\nsocket = \"relative\";", "socket"},
        {"\nsocket = \"/a/../b\";", "socket"},
        {"\nsocket = \"/a/..\";", "socket"},
        {"\nmodels_dir = \"../m\";", "models_dir"},
        {"\nweights_dir = \"\";", "weights_dir"},
        {"\nsocket_mode = \"0999\";", "socket_mode"},
        {"\nsocket_mode = \"\";", "socket_mode"},
        {"\nsocket_mode = \"07777\";", "socket_mode"},
        {"\nsocket_mode = 660;", "socket_mode"},
        {"\nbackend = \"/tmp/x.so\";", "backend"},
        {"\ndevices = -1;", "devices"},
        {"\ndevices = 256;", "devices"},
        {"\ndevices = [ ];", "devices"},
        {"\ndevices = [ 2, 3, 2 ];", "devices"},
        {"\ndevices = [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16];", "devices"},
        {"\ndevice = 0;", "device"},
        {"\ncpu_threads = 1025;", "cpu_threads"},
        {"\nspin_us = 1000001;", "spin_us"},
        {"\nlog_level = \"loud\";", "log_level"},
        {"\nuid_buffer_bytes = -1;", "uid_buffer_bytes"},
        {"\nuid_buffers = 65537;", "uid_buffers"},
        {"\nuid_connections = 0;", "uid_connections"},
        {"\nuid_requests = 0;", "uid_requests"},
        {"\nuid_requests = 1.5;", "uid_requests"},
        {"\ntotal_connections = 0;", "total_connections"},
        {"\nhello_timeout_ms = 9;", "hello_timeout_ms"},
        {"\nbatch_timeout_ms = 9;", "batch_timeout_ms"},
        {"\ndrain_timeout_ms = -1;", "drain_timeout_ms"},
        {"\nno_such_key = 1;", "no_such_key"},
        {"devices = 1;\ndevices = 2;", "devices"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct config c = {.n_devices = 77};
        struct report report = {""};

        if (parse(rows[i].text, &c, &report) != -EINVAL)
            fail_msg("\"%s\" was accepted", rows[i].text + 1);
        assert_int_equal(c.n_devices, 77); /* untouched */
        if (!strstr(report.text, "fused.conf:2") ||
            (!strstr(report.text, rows[i].key) && i + 1 < ARRAY_SIZE(rows)))
            fail_msg("\"%s\": \"%s\"", rows[i].text + 1, report.text);
    }
}

static void refuses_what_is_no_file(void **state)
{
    static const char *const paths[] = {"/", "/dev/null", "/dev/zero", "/nonexistent"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(paths); i++) {
        struct report report = {""};
        struct config c;

        assert_true(config_load(paths[i], &c, &report) < 0);
        assert_true(report.text[0] != '\0');
    }
}

static void adopts_only_what_a_reload_may(void **state)
{
    struct report report = {""};
    struct config c, next;

    (void)state;
    config_defaults(&c);
    assert_int_equal(
        parse("socket = \"/other\"; devices = 3; log_level = \"error\"; uid_buffers = 9;"
              "drain_timeout_ms = 1;",
              &next, &report),
        0);
    config_adopt(&c, &next);
    assert_string_equal(c.socket, "/run/fused/fused.sock");
    assert_int_equal(c.n_devices, 1);
    assert_int_equal(c.devices[0], 0);
    assert_int_equal(c.log_level, LOG_LEVEL_ERROR);
    assert_int_equal(c.uid_buffers, 9);
    assert_int_equal(c.drain_timeout_ms, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ships_the_defaults),
        cmocka_unit_test(takes_every_key),
        cmocka_unit_test(names_what_is_wrong),
        cmocka_unit_test(refuses_what_is_no_file),
        cmocka_unit_test(adopts_only_what_a_reload_may),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
