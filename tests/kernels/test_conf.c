/*
 * Configuration text: what libconfig would forgive is refused with file, line, key and reason.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/conf.h"

/* Reads every key that these tests use. */
static int read_all(const char *text, size_t n, struct report *report)
{
    struct conf_group *root, *group;
    struct conf *conf;
    int64_t ints[3];
    int r;

    r = conf_parse("/some/where/t.conf", text, n, &conf, report);
    if (r < 0)
        return r;
    root = conf_root(conf);
    conf_string(root, "s", "");
    conf_int(root, "i", -10, 10000000000, 0);
    conf_float(root, "f", 0);
    conf_bool(root, "b", false);
    conf_ints(root, "l", 0, 100, ints, 3);
    group = conf_group(root, "g");
    if (group)
        conf_int(group, "x", 0, 9, 0);
    for (int i = 0; (group = conf_group_at(root, "list", i)); i++) {
        conf_int(group, "x", 0, 9, 0);
        if (conf_has(group, "bad"))
            conf_error(group, "bad", "not this %s", "one");
    }
    r = conf_finish(conf, report);
    conf_free(conf);
    return r;
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"i = 1;\ni = 2;", "t.conf:2: i: given twice"},
        {"f = 1; f = 2;", "t.conf:1: f: given twice"},
        {"list = ( { x = 1; },\n  { x = 1; x = 2; } );", "t.conf:2: x: given twice"},
        {"\n\nunknown = 1;", "t.conf:3: unknown: unknown key"},
        {"g = { x = 1;\n y = { z = 1; }; };", "t.conf:2: y: unknown key"},
        {"list = ( { x = 1; }, { y = 1; } );", "t.conf:1: y: unknown key"},
        {"s = 1;", "t.conf:1: s: must be a string, in quotes"},
        {"i = \"1\";", "t.conf:1: i: must be an integer"},
        {"i = 1.5;", "t.conf:1: i: must be an integer"},
        {"i = -11;", "t.conf:1: i: -11 is outside -10 to 10000000000"},
        {"i = 10000000001L;", "t.conf:1: i: 10000000001 is outside -10 to 10000000000"},
        {"i = 3000000000;", "t.conf:1: 3000000000 needs 64 bits: write 3000000000L"},
        {"i = -2147483649;", "t.conf:1: -2147483649 needs 64 bits: write -2147483649L"},
        {"i = 0xffffffff;", "t.conf:1: 0xffffffff needs 64 bits: write 0xffffffffL"},
        {"i = 9223372036854775808L;", "t.conf:1: 9223372036854775808 is too large for 64 bits"},
        {"i = 0x8000000000000000L;", "t.conf:1: 0x8000000000000000 is too large for 64 bits"},
        {"f = \"1\";", "t.conf:1: f: must be a number"},
        {"f = 1e400;", "t.conf:1: f: is too large for a number"},
        {"f = -1.0e999;", "t.conf:1: f: is too large for a number"},
        {"f = nan;", "t.conf:1: syntax error"},
        {"f = .;", "t.conf:1: a number without digits"},
        {"f = -.e5;", "t.conf:1: a number without digits"},
        {"b = 1;", "t.conf:1: b: must be true or false"},
        {"l = [ 1, 2, 3, 4 ];", "t.conf:1: l: has 4 numbers, more than 3"},
        {"l = [ 1, 101 ];", "t.conf:1: l: 101 is outside 0 to 100"},
        {"l = ( 1, 2.0 );", "t.conf:1: l: must be an integer"},
        {"l = \"x\";", "t.conf:1: l: must be a list of integers"},
        {"l = [ 1, 2.0 ];", "t.conf:1: mismatched element type in array"},
        {"g = 1;", "t.conf:1: g: must be a group: { ... }"},
        {"list = { x = 1; };", "t.conf:1: list: must be a list of groups: ( { ... }, ... )"},
        {"list = ( { x = 1; }, 5 );", "t.conf:1: list: element 2 must be a group: { ... }"},
        {"list = ( { x = 1; },\n {\n  bad = 1; } );", "t.conf:3: bad: not this one"},
        {"@include \"x\"\n", "t.conf:1: @include is not supported"},
        {"i = 1;\n \t@include \"/etc\"\n", "t.conf:2: @include is not supported"},
        {"# a comment\n/*\n@include \"x\"\n*/", "t.conf:3: @include is not supported"},
        {"s = \"\n@include \\\"x\\\"\n\";", "t.conf:2: @include is not supported"},
        {"s = \"a\\x00b\";", "t.conf:1: a string cannot hold \\x00"},
        {"s = \"open", "t.conf:1: syntax error"},
        {"g = {", "t.conf:1: syntax error"},
        {"i = ;", "t.conf:1: syntax error"},
        {"((((((((((((", "t.conf:1: nested deeper than 8"},
        {"i = 1; \001", "t.conf:1: syntax error"},
        {"\377\376", "t.conf:1: syntax error"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct report report = {"none"};
        int r = read_all(cases[i].text, strlen(cases[i].text), &report);

        if (r != -EINVAL || strcmp(report.text, cases[i].error) != 0)
            fail_msg("%s\ngave %d \"%s\", not \"%s\"", cases[i].text, r, report.text,
                     cases[i].error);
    }
}

static void test_accepted(void **state)
{
    static const char *const cases[] = {
        "",
        "\n\n# nothing\n",
        "s = \"#\\\"/*@include\"; /* \"3000000000 */ i = 1; // 9999999999\n",
        "i = 3000000000L; f = 1e-5; l = 7;",
        "i = 0x7fffffff; f = 5;\r\nb = FALSE;",
        "l = []; list = (); g : { x = 1 }",
        "list = ( { x = 1; }, { x = 2; } );",
        "f = 3000000000.0; i = 0xffLL",
        "f = .5e+3; s = \"a\" \"b\";",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct report report;

        if (read_all(cases[i], strlen(cases[i]), &report) != 0)
            fail_msg("%s\ngave \"%s\"", cases[i], report.text);
    }
}

static void test_values(void **state)
{
    static const char text[] = "s = \"x\"; i = -3; f = 2; h = 1.5e-3; b = true; l = (1, 2);\n"
                               "one = 4; g = { deep = { i = 5000000000L; }; };\n"
                               "list = ( { i = 1; },\n{ i = 2; } );";
    struct conf_group *root, *group;
    int64_t ints[4] = {0};
    struct report report;
    struct conf *conf;

    (void)state;
    assert_int_equal(conf_parse("t.conf", text, sizeof(text) - 1, &conf, &report), 0);
    root = conf_root(conf);
    assert_string_equal(conf_string(root, "s", ""), "x");
    assert_string_equal(conf_string(root, "none", "default"), "default");
    assert_int_equal(conf_int(root, "i", -3, 0, 7), -3);
    assert_int_equal(conf_int(root, "none", 0, 0, 7), 7);
    assert_true(conf_float(root, "f", 0) == 2);
    assert_true(conf_float(root, "h", 0) == 1.5e-3);
    assert_true(conf_bool(root, "b", false));
    assert_int_equal(conf_ints(root, "l", 0, 9, ints, 4), 2);
    assert_int_equal(ints[1], 2);
    assert_int_equal(conf_ints(root, "one", 0, 9, ints, 4), 1);
    assert_int_equal(ints[0], 4);
    assert_int_equal(conf_ints(root, "none", 0, 9, ints, 4), -1);
    group = conf_group(conf_group(root, "g"), "deep");
    assert_int_equal(conf_int(group, "i", 0, INT64_MAX, 0), 5000000000);
    assert_null(conf_group(root, "none"));
    group = conf_group_at(root, "list", 1);
    assert_int_equal(conf_line(group), 4);
    assert_int_equal(conf_int(group, "i", 0, 9, 0), 2);
    assert_int_equal(conf_int(conf_group_at(root, "list", 0), "i", 0, 9, 0), 1);
    assert_null(conf_group_at(root, "list", 2));
    assert_null(conf_group_at(root, "list", -1));
    assert_int_equal(conf_finish(conf, &report), 0);
    conf_free(conf);
}

/* The first error stays; what comes later returns defaults. */
static void test_sticks(void **state)
{
    struct report report;
    struct conf *conf;

    (void)state;
    assert_int_equal(conf_parse("t.conf", "i = 1;\nk = 2;", 13, &conf, &report), 0);
    assert_int_equal(conf_error(conf_root(conf), "k", "first"), -EINVAL);
    assert_int_equal(conf_error(conf_root(conf), "i", "second"), -EINVAL);
    assert_int_equal(conf_finish(conf, &report), -EINVAL);
    assert_string_equal(report.text, "t.conf:2: k: first");
    assert_null(conf_free(conf));
    assert_null(conf_free(NULL));
}

/* Nobody asked: the first such setting is named, and an element without a name by its list. */
static void test_unknown(void **state)
{
    static const char text[] = "a = 1;\nlist = ( { i = 1; }, 3, 4 );\nb = 2;\n";
    struct conf_group *root, *group;
    struct report report;
    struct conf *conf;

    (void)state;
    assert_int_equal(conf_parse("t.conf", text, sizeof(text) - 1, &conf, &report), 0);
    root = conf_root(conf);
    assert_int_equal(conf_int(root, "a", 0, 9, 0), 1);
    group = conf_group_at(root, "list", 0);
    assert_int_equal(conf_int(group, "i", 0, 9, 0), 1);
    assert_int_equal(conf_finish(conf, &report), -EINVAL);
    assert_string_equal(report.text, "t.conf:2: list: unknown key");
    conf_free(conf);
    assert_int_equal(conf_parse("t.conf", text, sizeof(text) - 1, &conf, &report), 0);
    root = conf_root(conf);
    assert_int_equal(conf_int(root, "a", 0, 9, 0), 1);
    group = conf_group_at(root, "list", 0);
    assert_int_equal(conf_finish(conf, &report), -EINVAL);
    assert_string_equal(report.text, "t.conf:2: i: unknown key");
    conf_free(conf);
}

/* As large as a file may be, and worse: refused or read in no time. */
static void test_many_keys(void **state)
{
    char *text = malloc(CONF_SIZE_MAX + 1);
    struct report report;
    struct conf *conf;
    size_t n = 0;

    (void)state;
    assert_non_null(text);
    for (int keys = 0; keys < 4096; keys++)
        n += (size_t)snprintf(text + n, 32, "k%d = 1;\n", keys);
    assert_int_equal(conf_parse("t.conf", text, n, &conf, &report), 0);
    conf_free(conf);
    while (n + 32 < CONF_SIZE_MAX)
        n += (size_t)snprintf(text + n, 32, "k%zu = 1;\n", n);
    assert_int_equal(conf_parse("t.conf", text, n, &conf, &report), -EINVAL);
    assert_string_equal(report.text, "t.conf:4097: more than 4096 keys");
    memset(text, ' ', CONF_SIZE_MAX + 1);
    assert_int_equal(conf_parse("t.conf", text, CONF_SIZE_MAX, &conf, &report), 0);
    conf_free(conf);
    assert_int_equal(conf_parse("t.conf", text, CONF_SIZE_MAX + 1, &conf, &report), -EINVAL);
    free(text);
}

static void open_fails(int dir, const char *name, int want, const char *text)
{
    struct report report = {"none"};
    struct conf *conf;
    int r = conf_open(dir, name, &conf, &report);

    if (r != want || !strstr(report.text, text) || strchr(report.text, '/'))
        fail_msg("%s: %d \"%s\", not %d \"%s\"", name, r, report.text, want, text);
}

static void write_file(int dir, const char *name, const char *text, size_t n)
{
    int fd = openat(dir, name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, n), n);
    close(fd);
}

static void test_files(void **state)
{
    static const char *const made[] = {"fifo", "loop", "out", "large", "good.conf", "zero"};
    char path[] = "/tmp/fused-test-conf-XXXXXX";
    struct report report;
    struct conf *conf;
    int dir, fd;

    (void)state;
    assert_non_null(mkdtemp(path));
    dir = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    assert_true(dir >= 0);
    assert_int_equal(mkfifoat(dir, "fifo", 0600), 0);
    assert_int_equal(mkdirat(dir, "dir", 0700), 0);
    assert_int_equal(symlinkat("loop", dir, "loop"), 0);
    assert_int_equal(symlinkat("/etc/passwd", dir, "out"), 0);
    fd = openat(dir, "large", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_int_equal(ftruncate(fd, 1 << 30), 0);
    close(fd);
    write_file(dir, "good.conf", "i = 1;", 6);
    write_file(dir, "zero", "i\0= 1;", 6);

    open_fails(dir, "none", -ENOENT, "none: ");
    open_fails(dir, "", -EINVAL, "empty");
    open_fails(dir, "fifo", -EINVAL, "not a regular file");
    open_fails(dir, "dir", -EINVAL, "not a regular file");
    open_fails(dir, ".", -EINVAL, "not a regular file");
    open_fails(dir, "..", -EINVAL, "must stay inside");
    open_fails(dir, "dir/../good.conf", -EINVAL, "must stay inside");
    open_fails(dir, "/etc/passwd", -EINVAL, "must stay inside");
    open_fails(dir, "out", -EINVAL, "must stay inside");
    open_fails(dir, "loop", -EINVAL, "loop: ");
    open_fails(dir, "large", -EINVAL, "larger than 1048576 bytes");
    open_fails(dir, "zero", -EINVAL, "zero byte");
    open_fails(AT_FDCWD, "/dev/zero", -EINVAL, "not a regular file");
    assert_int_equal(conf_open(dir, "good.conf", &conf, &report), 0);
    assert_int_equal(conf_int(conf_root(conf), "i", 0, 9, 0), 1);
    assert_int_equal(conf_finish(conf, &report), 0);
    conf_free(conf);

    for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); i++)
        unlinkat(dir, made[i], 0);
    unlinkat(dir, "dir", AT_REMOVEDIR);
    close(dir);
    assert_int_equal(rmdir(path), 0);
}

static void test_report(void **state)
{
    struct report report;
    char large[600];

    (void)state;
    assert_int_equal(report_set(NULL, -EIO, "x"), -EIO);
    assert_int_equal(report_prefix(NULL, -EIO, "x"), -EIO);
    report_set(&report, 0, "%s", "a\nb\033[1m\177 \303\244 \303 \302\205 \355\240\200");
    assert_string_equal(report.text, "a?b?[1m? \303\244 ? ?? ???");
    assert_int_equal(report_prefix(&report, -EINVAL, "%s:%d: ", "f", 3), -EINVAL);
    assert_string_equal(report.text, "f:3: a?b?[1m? \303\244 ? ?? ???");
    memset(large, 'x', sizeof(large) - 1);
    large[sizeof(large) - 1] = 0;
    memcpy(large + sizeof(report.text) - 2, "\303\244", 2);
    report_set(&report, 0, "%s", large);
    assert_int_equal(strlen(report.text), sizeof(report.text) - 1);
    assert_int_equal(report.text[sizeof(report.text) - 2], '?');
    report_prefix(&report, 0, "12345");
    assert_int_equal(strlen(report.text), sizeof(report.text) - 1);
    assert_memory_equal(report.text, "12345xxx", 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_values),    cmocka_unit_test(test_sticks),
        cmocka_unit_test(test_files),     cmocka_unit_test(test_report),
        cmocka_unit_test(test_many_keys), cmocka_unit_test(test_unknown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
