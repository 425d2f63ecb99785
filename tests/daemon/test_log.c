/*
 * test_log.c - escaping, levels, the limiter
 */
#include "unit.h"

#include <fcntl.h>
#include <unistd.h>

#include "daemon/log.h"

static void escapes_what_could_deceive(void **state)
{
    static const struct {
        const char *from, *to;
    } rows[] = {
        {"plain text", "plain text"},
        {"two\nlines", "two\\x0alines"},
        {"\x1b[31mred", "\\x1b[31mred"},
        {"\x7f\xc3\xa9", "\\x7f\\xc3\\xa9"},
        {"", ""},
    };
    char text[100];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        assert_string_equal(log_escape(rows[i].from, strlen(rows[i].from), text, sizeof(text)),
                            rows[i].to);
    /* cut, but always whole escapes and a NUL */
    assert_string_equal(log_escape("\n\n\n\n", 4, text, 9), "\\x0a\\x0a");
    assert_string_equal(log_escape("abc", 3, text, 5), "a");
}

static void knows_levels(void **state)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    enum log_level level = LOG_LEVEL_INFO;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        assert_int_equal(log_level_parse(names[i], strlen(names[i]), &level), 0);
        assert_string_equal(log_level_name(level), names[i]);
    }
    assert_int_equal(log_level_parse("infos", 5, &level), -EINVAL);
    assert_int_equal(log_level_parse("inf", 3, &level), -EINVAL);
    assert_int_equal(log_level_parse("", 0, &level), -EINVAL);
    assert_int_equal(level, LOG_LEVEL_DEBUG);
}

static void limits_what_clients_cause(void **state)
{
    struct log_limit limit = {0};
    unsigned left_out = 99, passed = 0;

    (void)state;
    for (int i = 0; i < 1000; i++)
        passed += log_limit_pass(&limit, 20000000, &left_out);
    assert_int_equal(passed, LOG_CLIENT_BURST);
    assert_int_equal(left_out, 0);
    assert_true(log_limit_pass(&limit, 20000000 + LOG_CLIENT_INTERVAL_US, &left_out));
    assert_int_equal(left_out, 1000 - LOG_CLIENT_BURST);
    assert_true(log_limit_pass(&limit, 20000000 + LOG_CLIENT_INTERVAL_US, &left_out));
    assert_int_equal(left_out, 0);
}

static void writes_lines(void **state)
{
    int pipes[2], old = dup(STDERR_FILENO);
    char text[400];
    ssize_t n;

    (void)state;
    assert_int_equal(pipe(pipes), 0);
    dup2(pipes[1], STDERR_FILENO);
    log_init(LOG_LEVEL_WARNING);
    log_info("test.info", "not written");
    log_warning("test.warning", "%s", "one\ntwo");
    dup2(old, STDERR_FILENO);
    close(old);
    close(pipes[1]);
    n = read(pipes[0], text, sizeof(text) - 1);
    close(pipes[0]);
    assert_true(n > 0);
    text[n] = '\0';
    assert_string_equal(text, "fused: warning: test.warning: one\\x0atwo\n");
    log_set_level(LOG_LEVEL_INFO);
    assert_int_equal(log_get_level(), LOG_LEVEL_INFO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(escapes_what_could_deceive),
        cmocka_unit_test(knows_levels),
        cmocka_unit_test(limits_what_clients_cause),
        cmocka_unit_test(writes_lines),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
