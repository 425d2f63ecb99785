/*
 * test_tensorfile.c - tensors to and from .npy and .safetensors
 *
 * Every dtype and rank goes out and comes back with the same bytes through both kinds of file; and
 * what cannot be read or written says why, leaves nothing behind, and never touches what was there.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/tensorfile.h"

static char dir[] = "/tmp/fused-tensorfile-XXXXXX";

static const char *in_dir(const char *name)
{
    static char paths[4][512];
    static unsigned turn;
    char *path = paths[turn++ % 4];

    snprintf(path, sizeof(paths[0]), "%s/%s", dir, name);
    return path;
}

static unsigned files_in_dir(void)
{
    DIR *d = opendir(dir);
    unsigned n = 0;

    assert_non_null(d);
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n - 2;
}

static void put_file(const char *name, const void *bytes, size_t n)
{
    FILE *f = fopen(in_dir(name), "w");

    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) == NULL;
}

static int teardown(void **state)
{
    DIR *d = opendir(dir);
    struct dirent *entry;

    (void)state;
    while (d != NULL && (entry = readdir(d)) != NULL)
        unlink(in_dir(entry->d_name));
    closedir(d);
    return rmdir(dir);
}

static void check_round_trip(const char *place, enum fused_dtype dtype, int rank,
                             const int64_t *dims)
{
    struct report report = {""};
    struct tensorfile file;
    uint8_t *data, *back;
    uint64_t size = fused_dtype_size(dtype);

    for (int i = 0; i < rank; i++)
        size *= (uint64_t)dims[i];
    data = malloc(size + 1);
    back = malloc(size + 1);
    assert_non_null(data);
    assert_non_null(back);
    for (uint64_t i = 0; i < size; i++)
        data[i] = (uint8_t)(i * 131 + i / 256);
    if (tensorfile_write(place, "y", dtype, rank, dims, data, NULL, &report) != 0)
        fail_msg("%s: %s", place, report.text);
    if (tensorfile_open(place, "y", &file, &report) != 0)
        fail_msg("%s: %s", place, report.text);
    assert_int_equal(file.dtype, dtype);
    assert_int_equal(file.rank, rank);
    assert_memory_equal(file.dims, dims, (size_t)rank * sizeof(*dims));
    assert_int_equal(file.size, size);
    back[size] = 0xee;
    assert_int_equal(tensorfile_read(&file, back, NULL, &report), 0);
    assert_memory_equal(back, data, size);
    assert_int_equal(back[size], 0xee);
    tensorfile_close(&file);
    free(data);
    free(back);
}

static void test_round_trip(void **state)
{
    static const enum fused_dtype dtypes[] = {FUSED_FLOAT32, FUSED_FLOAT16, FUSED_BFLOAT16,
                                              FUSED_UINT8};
    static const struct {
        int rank;
        int64_t dims[FUSED_RANK_MAX];
    } shapes[] = {{0, {0}},      {1, {1}},    {1, {17}},
                  {2, {3, 5}},   {2, {0, 5}}, {8, {1, 2, 1, 3, 1, 2, 1, 5}},
                  {1, {3 << 20}}};

    (void)state;
    for (size_t d = 0; d < 4; d++)
        for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
            check_round_trip(in_dir("a.npy"), dtypes[d], shapes[s].rank, shapes[s].dims);
            check_round_trip(in_dir("a.safetensors"), dtypes[d], shapes[s].rank, shapes[s].dims);
            check_round_trip(in_dir("a.safetensors#some#tensor"), dtypes[d], shapes[s].rank,
                             shapes[s].dims);
        }
    unlink(in_dir("a.npy"));
    unlink(in_dir("a.safetensors"));
    assert_int_equal(files_in_dir(), 0);
}

/* The reason that opening gives; the code must be negative. */
static const char *refusal(const char *place)
{
    static struct report report;
    struct tensorfile file;
    int r;

    report.text[0] = 0;
    r = tensorfile_open(place, "x", &file, &report);
    if (r >= 0)
        fail_msg("%s was opened", place);
    if (strstr(report.text, place) == NULL)
        fail_msg("'%s' does not name %s", report.text, place);
    return report.text;
}

static void check_refusal(const char *place, const char *reason)
{
    const char *text = refusal(place);

    if (strstr(text, reason) == NULL)
        fail_msg("'%s' does not say '%s'", text, reason);
}

static void test_wrong_places(void **state)
{
    (void)state;
    check_refusal("x", "must end in");
    check_refusal("x.txt", "must end in");
    check_refusal(".npy", "must end in");
    check_refusal("x.npy#x", "must end in");
    check_refusal("x.safetensors#", "no name of a tensor");
    check_refusal(in_dir("none.npy"), "No such file");
    refusal(in_dir("none.safetensors"));
    assert_int_equal(mkfifo(in_dir("fifo.npy"), 0600), 0);
    assert_int_equal(mkfifo(in_dir("fifo.safetensors"), 0600), 0);
    check_refusal(in_dir("fifo.npy"), "not a regular file");
    refusal(in_dir("fifo.safetensors"));
    unlink(in_dir("fifo.npy"));
    unlink(in_dir("fifo.safetensors"));
    assert_int_equal(mkdir(in_dir("dir.npy"), 0700), 0);
    check_refusal(in_dir("dir.npy"), "not a regular file");
    rmdir(in_dir("dir.npy"));
}

static void test_long_place(void **state)
{
    static char place[9000];
    struct report report = {""};
    struct tensorfile file;

    (void)state;
    memset(place, 'x', sizeof(place) - 1);
    memcpy(place + sizeof(place) - 5, ".npy", 4);
    assert_int_equal(tensorfile_open(place, "x", &file, &report), -ENAMETOOLONG);
    assert_non_null(strstr(report.text, "the name is too long"));
    assert_int_equal(tensorfile_check(place, &report), -ENAMETOOLONG);
}

static void test_wrong_files(void **state)
{
    static const float numbers[6] = {1, 2, 3, 4, 5, 6};
    static const int64_t dims[] = {2, 3};
    struct report report = {""};
    struct tensorfile file;
    float back[6];

    (void)state;
    put_file("a.npy", "", 0);
    check_refusal(in_dir("a.npy"), "not a .npy");
    put_file("a.npy", "hello, this is text", 19);
    check_refusal(in_dir("a.npy"), "not a .npy");
    assert_int_equal(
        tensorfile_write(in_dir("a.npy"), "y", FUSED_FLOAT32, 2, dims, numbers, NULL, &report), 0);
    assert_int_equal(truncate(in_dir("a.npy"), 128 + 23), 0);
    check_refusal(in_dir("a.npy"), "has 151 bytes, its header means 152");
    assert_int_equal(truncate(in_dir("a.npy"), 128 + 25), 0);
    check_refusal(in_dir("a.npy"), "has 153 bytes, its header means 152");
    assert_int_equal(truncate(in_dir("a.npy"), 40), 0);
    check_refusal(in_dir("a.npy"), "ends in its header");
    assert_int_equal(tensorfile_write(in_dir("a.safetensors#other"), "y", FUSED_FLOAT32, 2, dims,
                                      numbers, NULL, &report),
                     0);
    check_refusal(in_dir("a.safetensors"), "no tensor 'x'");
    check_refusal(in_dir("a.safetensors#nope"), "no tensor 'nope'");
    /* Cut after it was opened: an error of reading, no signal. */
    assert_int_equal(
        tensorfile_write(in_dir("a.npy"), "y", FUSED_FLOAT32, 2, dims, numbers, NULL, &report), 0);
    assert_int_equal(tensorfile_open(in_dir("a.npy"), "x", &file, &report), 0);
    assert_int_equal(truncate(in_dir("a.npy"), 140), 0);
    assert_int_equal(tensorfile_read(&file, back, NULL, &report), -EIO);
    assert_non_null(strstr(report.text, "ended early"));
    tensorfile_close(&file);
    unlink(in_dir("a.npy"));
    unlink(in_dir("a.safetensors"));
}

static void test_other_dtype(void **state)
{
    static const char header[] =
        "{\"x\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8]}}      ";
    uint8_t bytes[256] = {sizeof(header) - 1};

    (void)state;
    memcpy(bytes + 8, header, sizeof(header) - 1);
    put_file("f64.safetensors", bytes, 8 + sizeof(header) - 1 + 8);
    check_refusal(in_dir("f64.safetensors"), "F64, which is not supported");
    unlink(in_dir("f64.safetensors"));
}

static int stop(uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    return -ECANCELED;
}

/* A write that fails, wherever, leaves the old file and nothing else. */
static void check_untouched(const char *name, struct report *report)
{
    char text[4] = "";
    FILE *f = fopen(in_dir(name), "r");

    assert_non_null(f);
    assert_int_equal(fread(text, 1, 3, f), 3);
    fclose(f);
    assert_string_equal(text, "old");
    if (strstr(report->text, in_dir(name)) == NULL)
        fail_msg("'%s' does not name %s", report->text, in_dir(name));
    if (files_in_dir() != 1)
        fail_msg("%u files in %s after '%s'", files_in_dir(), dir, report->text);
}

static void test_failed_writes(void **state)
{
    static const char *const names[] = {"a.npy", "a.safetensors"};
    static uint8_t data[1 << 20];
    static const int64_t dims[] = {1 << 20};
    struct rlimit before, limit;
    struct report report;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t i = 0; i < 2; i++) {
        put_file(names[i], "old", 3);
        /* As on a full disk: room for some, then none. */
        limit = (struct rlimit){.rlim_cur = 65536, .rlim_max = before.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        report.text[0] = 0;
        assert_true(
            tensorfile_write(in_dir(names[i]), "y", FUSED_UINT8, 1, dims, data, NULL, &report) < 0);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        check_untouched(names[i], &report);
        report.text[0] = 0;
        assert_int_equal(
            tensorfile_write(in_dir(names[i]), "y", FUSED_UINT8, 1, dims, data, stop, &report),
            -ECANCELED);
        check_untouched(names[i], &report);
        report.text[0] = 0;
        assert_int_equal(
            tensorfile_write(in_dir(names[i]), "y", FUSED_FLOAT32, 9, dims, data, NULL, &report),
            -EINVAL);
        check_untouched(names[i], &report);
        unlink(in_dir(names[i]));
    }
}

static void test_unwritable_places(void **state)
{
    struct report report = {""};

    (void)state;
    assert_int_equal(tensorfile_check(in_dir("new.npy"), &report), 0);
    assert_int_equal(tensorfile_check(in_dir("new.safetensors#z"), &report), 0);
    assert_int_equal(tensorfile_check(in_dir("no/new.npy"), &report), -ENOENT);
    assert_non_null(strstr(report.text, "cannot be written: No such file"));
    assert_int_equal(tensorfile_check("new", &report), -EINVAL);
    assert_int_equal(mkfifo(in_dir("fifo.npy"), 0600), 0);
    assert_int_equal(tensorfile_check(in_dir("fifo.npy"), &report), -EINVAL);
    assert_non_null(strstr(report.text, "not a regular file"));
    unlink(in_dir("fifo.npy"));
}

/* As any program's new file: what the umask leaves. */
static void test_mode(void **state)
{
    static const int64_t dims[] = {4};
    struct report report = {""};
    mode_t mask = umask(027);
    struct stat st;

    (void)state;
    assert_int_equal(
        tensorfile_write(in_dir("a.npy"), "y", FUSED_UINT8, 1, dims, "abcd", NULL, &report), 0);
    assert_int_equal(umask(mask), 027);
    assert_int_equal(stat(in_dir("a.npy"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    unlink(in_dir("a.npy"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),        cmocka_unit_test(test_wrong_places),
        cmocka_unit_test(test_long_place),        cmocka_unit_test(test_wrong_files),
        cmocka_unit_test(test_other_dtype),       cmocka_unit_test(test_failed_writes),
        cmocka_unit_test(test_unwritable_places), cmocka_unit_test(test_mode),
    };

    return cmocka_run_group_tests_name("tensorfile", tests, setup, teardown);
}
