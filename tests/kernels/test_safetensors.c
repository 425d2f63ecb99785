/*
 * .safetensors files: every way in which a header can lie, names that lead elsewhere, files that
 * change, writing.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/safetensors.h"

#define F32(shape, offsets) \
    "{\"dtype\":\"F32\",\"shape\":[" shape "],\"data_offsets\":[" offsets "]}"
#define TENSOR(name, shape, offsets) "\"" name "\":" F32(shape, offsets)

static char path[] = "/tmp/fused-test-st-XXXXXX", file_path[64];
static int dir;

static void write_raw(const void *data, size_t n, off_t size)
{
    int fd = openat(dir, "f", O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n), n);
    assert_int_equal(ftruncate(fd, size), 0);
    close(fd);
}

/* A header of that length, its text, and bytes of data. */
static void write_file(uint64_t length, const char *text, size_t n, uint64_t data)
{
    char *all = malloc(8 + n);

    assert_non_null(all);
    memcpy(all, &length, 8);
    memcpy(all + 8, text, n);
    write_raw(all, 8 + n, (off_t)(8 + n + data));
    free(all);
}

static int open_file(struct safetensors **ret, struct report *report)
{
    snprintf(report->text, sizeof(report->text), "none");
    return safetensors_open(dir, "f", ret, report);
}

static void expect(const char *what, int want, const char *error)
{
    struct safetensors *file = NULL;
    struct report report;
    int r = open_file(&file, &report);

    safetensors_free(file);
    if (r != want || !strstr(report.text, error) || strchr(report.text, '/'))
        fail_msg("%s\ngave %d \"%s\", not %d \"%s\"", what, r, report.text, want, error);
}

static void test_lengths(void **state)
{
    static const uint64_t lengths[] = {
        0,         1,          11,         12,         1u << 31,      4194305,
        100000001, 1ULL << 32, 1ULL << 63, UINT64_MAX, UINT64_MAX - 7};
    char bytes[8] = {2};

    (void)state;
    for (size_t n = 0; n < 8; n++) {
        write_raw(bytes, n, (off_t)n);
        expect("too short", -EINVAL, "are no safetensors file");
    }
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        write_file(lengths[i], "{}", 2, 0);
        expect("length", -EINVAL, "is not possible");
    }
    write_file(2, "{}", 2, 0);
    expect("empty", 0, "none");
    /* A sparse file of 1 TiB is refused for what it says, unread, or accepted for the same. */
    write_file(2, "{}", 2, UINT64_C(1) << 40);
    expect("sparse", -EINVAL, "1099511627776 bytes follow the last tensor");
}

static void test_headers(void **state)
{
    static const struct {
        const char *text;
        uint64_t data;
        const char *error; /* NULL: accepted */
    } cases[] = {
        {"{" TENSOR("a", "2, 3", "0, 24") "}", 24, NULL},
        {"{" TENSOR("a", "2", "0, 8") "}   ", 8, NULL},
        {"{" TENSOR("b", "1", "8, 12") "," TENSOR("a", "2", "0, 8") "}", 12, NULL},
        {"{" TENSOR("a", "", "0, 4") "}", 4, NULL},
        {"{" TENSOR("a", "0", "0, 0") "}", 0, NULL},
        {"{" TENSOR("a", "0, 5", "0, 0") "," TENSOR("b", "1", "0, 4") "," TENSOR("c", "3, 0",
                                                                                 "4, 4") "}",
         4, NULL},
        {"{\"__metadata__\":{\"k\":\"v\"}," TENSOR("a", "1", "0, 4") "}", 4, NULL},
        {"{\"__metadata__\":{}}", 0, NULL},
        {"{\"../x\":" F32("1", "0, 4") "}", 4, NULL},
        /* not a header */
        {" {}", 0, "does not begin with '{'"},
        {"\357\273\277{}", 0, "does not begin with '{'"},
        {"[]", 0, "does not begin with '{'"},
        {"{ ", 0, "header: "},
        {"{}x", 0, "header: "},
        {"{}{}", 0, "header: "},
        {"{\"a\":[]}", 0, "tensor 'a': it needs dtype, shape, data_offsets"},
        {"{\"a\":1}", 0, "tensor 'a': it needs dtype, shape, data_offsets"},
        {"{\"a\":{}}", 0, "tensor 'a': it needs dtype, shape, data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4],\"x\":1}}", 4,
         "and nothing else"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"offsets\":[0,4]}}", 4, "data_offsets"},
        /* offsets */
        {"{" TENSOR("a", "1", "4, 0") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "-4, 0") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "4") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "0, 4, 4") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "0, 4.0") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "0.0, 4") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "0, 4e0") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "\"0\", \"4\"") "}", 4, "data_offsets must be"},
        {"{" TENSOR("a", "1", "0, 18446744073709551620") "}", 4, "header: "},
        {"{" TENSOR("a", "1", "9223372036854775804, 9223372036854775807") "}", 4, "do not match"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":4}}", 4, "data_offsets must be"},
        /* cover */
        {"{" TENSOR("a", "1", "0, 4") "," TENSOR("b", "1", "0, 4") "}", 4, "'b': it overlaps"},
        {"{" TENSOR("a", "2", "0, 8") "," TENSOR("b", "1", "4, 8") "}", 8, "'b': it overlaps"},
        {"{" TENSOR("a", "1", "0, 4") "," TENSOR("b", "1", "8, 12") "}", 12,
         "'b': there is a hole in"},
        {"{" TENSOR("a", "1", "4, 8") "}", 8, "'a': there is a hole in"},
        {"{" TENSOR("a", "1", "0, 4") "}", 5, "1 bytes follow the last tensor"},
        {"{" TENSOR("a", "1", "0, 4") "}", 3, "'a': it ends behind the file"},
        {"{" TENSOR("a", "1", "0, 4") "," TENSOR("b", "2", "4, 12") "}", 8,
         "'b': it ends behind the file"},
        {"{" TENSOR("a", "1", "0, 4") "}", 0, "'a': it ends behind the file"},
        {"{" TENSOR("a", "0", "4, 4") "}", 0, "'a': there is a hole in"},
        /* shapes */
        {"{" TENSOR("a", "2", "0, 4") "}", 4, "do not match"},
        {"{" TENSOR("a", "1", "0, 8") "}", 8, "do not match"},
        {"{" TENSOR("a", "-1", "0, 4") "}", 4, "shape must be"},
        {"{" TENSOR("a", "-1, -1", "0, 4") "}", 4, "shape must be"},
        {"{" TENSOR("a", "1.0", "0, 4") "}", 4, "shape must be"},
        {"{" TENSOR("a", "\"1\"", "0, 4") "}", 4, "shape must be"},
        {"{" TENSOR("a", "1,1,1,1,1,1,1,1,1", "0, 4") "}", 4, "shape must be"},
        {"{" TENSOR("a", "4294967296, 4294967296", "0, 0") "}", 0, "shape is too large"},
        {"{" TENSOR("a", "4611686018427387904, 4", "0, 0") "}", 0, "shape is too large"},
        {"{" TENSOR("a", "4611686018427387905, 4", "0, 16") "}", 16, "shape is too large"},
        {"{" TENSOR("a", "2305843009213693952", "0, 0") "}", 0, "shape is too large"},
        {"{" TENSOR("a", "4294967296, 4294967296, 0", "0, 0") "}", 0, "shape is too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "shape must be"},
        {"{\"a\":{\"dtype\":\"F32\",\"form\":[1],\"data_offsets\":[0,4]}}", 4, "shape must be"},
        /* dtypes */
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1, "dtype is unknown"},
        {"{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype is unknown"},
        {"{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype is unknown"},
        {"{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, NULL},
        {"{\"a\":{\"dtype\":\"C64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, NULL},
        /* names */
        {"{" TENSOR("a", "1", "0, 4") "," TENSOR("a", "1", "4, 8") "}", 8, "header: duplicate"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "header: duplicate"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__: 'k' must be a string"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ must be an object"},
        {"{" TENSOR("", "1", "0, 4") "}", 4, "its name is empty"},
        {"{" TENSOR("a\\u0000b", "1", "0, 4") "}", 4, "header: "},
        {"{" TENSOR("a\\nb", "1", "0, 4") "}", 4, "tensor 'a?b': its name is"},
        {"{" TENSOR("\\u001b[1m", "1", "0, 4") "}", 4, "its name is"},
        {"{" TENSOR("\\u0085", "1", "0, 4") "}", 4, "its name is"},
        {"{" TENSOR("\377", "1", "0, 4") "}", 4, "header: "},
        {"{" TENSOR("\\ud800", "1", "0, 4") "}", 4, "header: "},
        {"{" TENSOR("\303\244", "1", "0, 4") "}", 4, NULL},
        {"{" TENSOR("\302\240", "1", "0, 4") "}", 4, NULL},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_file(strlen(cases[i].text), cases[i].text, strlen(cases[i].text), cases[i].data);
        expect(cases[i].text, cases[i].error ? -EINVAL : 0,
               cases[i].error ? cases[i].error : "none");
    }
}

/* Headers near the limits: many tensors, long names, deep nesting, 4 MiB. */
static void test_large(void **state)
{
    size_t size = (4u << 20) + 4096, n;
    char *text = malloc(size);

    (void)state;
    assert_non_null(text);
    for (int with = 0; with <= 1; with++)
        for (int tensors = 4096; tensors <= 4097; tensors++) {
            n = (size_t)snprintf(text, size,
                                 with ? "{\"__metadata__\":{}" : "{" TENSOR("t", "0", "0, 0"));
            for (int i = !with; i < tensors; i++)
                n += (size_t)snprintf(text + n, size - n, "," TENSOR("t%d", "0", "0, 0"), i);
            n += (size_t)snprintf(text + n, size - n, "}");
            write_file(n, text, n, 0);
            expect("many", tensors == 4096 ? 0 : -EINVAL,
                   tensors == 4096 ? "none" : "more than 4096");
        }
    for (int length = 256; length <= 257; length++) {
        memset(text, 'n', size);
        n = (size_t)snprintf(text, size, "{\"%0*d\":" F32("0", "0, 0") "}", length, 0);
        write_file(n, text, n, 0);
        expect("long name", length == 256 ? 0 : -EINVAL, length == 256 ? "none" : "its name is");
    }
    memset(text, 'x', size);
    memcpy(text, "{\"", 2);
    write_file(4u << 20, text, 4u << 20, 0);
    expect("a name of 4 MiB", -EINVAL, "header: ");
    memset(text, ' ', size);
    memcpy(text, "{}", 2);
    write_file(4u << 20, text, 4u << 20, 0);
    expect("spaces", 0, "none");
    memset(text, '[', 1u << 20);
    memcpy(text, "{\"a\":", 5);
    write_file(1u << 20, text, 1u << 20, 0);
    expect("deep", -EINVAL, "header: ");
    free(text);
}

static void test_contents(void **state)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"}," TENSOR(
        "b", "1", "8, 12") "," TENSOR("a.w", "1, 2", "0, 8") "}";
    float data[3] = {1, 2, 3}, out[2];
    struct safetensors *file;
    struct report report;
    const struct st_tensor *a, *b;
    uint64_t length = sizeof(header) - 1;
    char all[512];

    (void)state;
    memcpy(all, &length, 8);
    memcpy(all + 8, header, length);
    memcpy(all + 8 + length, data, 12);
    write_raw(all, 20 + length, (off_t)(20 + length));
    assert_int_equal(open_file(&file, &report), 0);
    assert_int_equal(safetensors_count(file), 2);
    a = safetensors_find(file, "a.w");
    b = safetensors_find(file, "b");
    assert_null(safetensors_find(file, "c"));
    assert_null(safetensors_find(file, "__metadata__"));
    assert_ptr_equal(a, safetensors_at(file, 0));
    assert_ptr_equal(b, safetensors_at(file, 1));
    assert_string_equal(a->dtype, "F32");
    assert_int_equal(a->rank, 2);
    assert_int_equal(a->dims[1], 2);
    assert_int_equal(a->elements, 2);
    assert_int_equal(a->element_bytes, 4);
    assert_int_equal(a->size, 8);
    assert_int_equal(a->offset, 8 + length);
    assert_string_equal(safetensors_metadata(file, "format"), "pt");
    assert_null(safetensors_metadata(file, "none"));
    assert_int_equal(safetensors_read(file, a, 0, 2, out, &report), 0);
    assert_true(out[0] == 1 && out[1] == 2);
    assert_int_equal(safetensors_read(file, a, 1, 1, out, &report), 0);
    assert_true(out[0] == 2);
    assert_int_equal(safetensors_read(file, b, 0, 1, out, &report), 0);
    assert_true(out[0] == 3);
    assert_int_equal(safetensors_read(file, a, 2, 0, out, &report), 0);
    assert_int_equal(safetensors_read(file, a, 0, 3, out, &report), -EINVAL);
    assert_int_equal(safetensors_read(file, a, -1, 1, out, &report), -EINVAL);
    assert_int_equal(safetensors_read(file, a, 3, 0, out, &report), -EINVAL);
    assert_int_equal(safetensors_read(file, a, 0, INT64_MAX, out, &report), -EINVAL);
    /* A file that shrinks after it was opened is an error, not a signal. */
    assert_int_equal(truncate(file_path, (off_t)(12 + length)), 0);
    assert_int_equal(safetensors_read(file, a, 0, 2, out, &report), -EIO);
    snprintf(all, sizeof(all), "f: reading at byte %zu: the file ends", (size_t)(12 + length));
    assert_string_equal(report.text, all);
    safetensors_free(file);
    assert_null(safetensors_free(NULL));
}

static void expect_name(int at, const char *name, int want, const char *error)
{
    struct safetensors *file = NULL;
    struct report report = {"none"};
    struct timespec before, after;
    int r;

    clock_gettime(CLOCK_MONOTONIC, &before);
    r = safetensors_open(at, name, &file, &report);
    clock_gettime(CLOCK_MONOTONIC, &after);
    safetensors_free(file);
    if (r != want || !strstr(report.text, error))
        fail_msg("%.60s: %d \"%s\", not %d \"%s\"", name, r, report.text, want, error);
    assert_true(after.tv_sec - before.tv_sec < 2);
}

static void test_names(void **state)
{
    char large[4097];

    (void)state;
    write_file(2, "{}", 2, 0);
    assert_int_equal(mkfifoat(dir, "fifo", 0600), 0);
    assert_int_equal(mkdirat(dir, "sub", 0700), 0);
    assert_int_equal(symlinkat("loop", dir, "loop"), 0);
    assert_int_equal(symlinkat("f", dir, "inside"), 0);
    assert_int_equal(symlinkat("../../etc/passwd", dir, "outside"), 0);
    assert_int_equal(symlinkat("/proc/self/exe", dir, "magic"), 0);
    memset(large, 'x', sizeof(large) - 1);
    large[sizeof(large) - 1] = 0;
    expect_name(dir, "f", 0, "none");
    expect_name(dir, "./f", 0, "none");
    expect_name(dir, "inside", 0, "none");
    expect_name(dir, "sub/../f", -EINVAL, "must stay inside");
    expect_name(dir, "sub/../../f", -EINVAL, "must stay inside");
    expect_name(dir, "..", -EINVAL, "must stay inside");
    expect_name(dir, "../f", -EINVAL, "must stay inside");
    expect_name(dir, "sub/..", -EINVAL, "must stay inside");
    expect_name(dir, file_path, -EINVAL, "must stay inside");
    expect_name(dir, "outside", -EINVAL, "must stay inside");
    expect_name(dir, "magic", -EINVAL, "must stay inside");
    expect_name(dir, "", -EINVAL, "an empty file name");
    expect_name(dir, ".", -EINVAL, "not a regular file");
    expect_name(dir, "sub", -EINVAL, "not a regular file");
    expect_name(dir, "fifo", -EINVAL, "not a regular file");
    expect_name(dir, "loop", -EINVAL, "loop: ");
    expect_name(dir, large, -EINVAL, "name too long");
    expect_name(dir, "none", -ENOENT, "none: ");
    expect_name(dir, "f/x", -ENOENT, "x: ");
    expect_name(AT_FDCWD, file_path, 0, "none");
    expect_name(AT_FDCWD, "/dev/null", -EINVAL, "not a regular file");
    unlinkat(dir, "fifo", 0);
    unlinkat(dir, "sub", AT_REMOVEDIR);
    unlinkat(dir, "loop", 0);
    unlinkat(dir, "inside", 0);
    unlinkat(dir, "outside", 0);
    unlinkat(dir, "magic", 0);
}

/* What could not be read back is not written. */
static void test_large_header(void **state)
{
    enum { MANY = 20000 };
    struct st_tensor *tensors = calloc(MANY, sizeof(*tensors));
    char(*names)[256] = calloc(MANY, sizeof(*names));
    struct st_writer *writer;
    struct report report;

    (void)state;
    assert_non_null(tensors);
    assert_non_null(names);
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof(names[i]), "%0200d", i);
        tensors[i] = (struct st_tensor){.name = names[i], .dtype = "U8", .rank = 1};
    }
    assert_int_equal(st_writer_new(file_path, tensors, MANY, &writer, &report), -EINVAL);
    assert_string_equal(report.text, "the header is too large");
    free(tensors);
    free(names);
}

static int files_in_dir(void)
{
    DIR *list = opendir(path);
    int n = 0;

    assert_non_null(list);
    while (readdir(list))
        n++;
    closedir(list);
    return n - 2;
}

static void test_writer(void **state)
{
    static const struct st_tensor tensors[] = {
        {.name = "w",
         .dtype = "F32",
         .element_bytes = 4,
         .rank = 2,
         .dims = {2, 3},
         .elements = 6,
         .size = 24},
        {.name = "none", .dtype = "F32", .element_bytes = 4, .rank = 1, .dims = {0}},
        {.name = "h \"\303\244\\",
         .dtype = "BF16",
         .element_bytes = 2,
         .rank = 0,
         .elements = 1,
         .size = 2},
    };
    static const struct st_tensor empty = {
        .name = "e", .dtype = "F32", .element_bytes = 4, .rank = 1, .dims = {0}};
    static const struct st_tensor twice[] = {{.name = "w", .dtype = "F32"},
                                             {.name = "w", .dtype = "F32"}};
    static const struct st_tensor too_large[] = {{.name = "a", .dtype = "U8", .size = INT64_MAX},
                                                 {.name = "b", .dtype = "U8", .size = 1},
                                                 {.name = "c", .dtype = "U8", .size = UINT64_MAX}};
    static const struct st_tensor not_utf8 = {.name = "\377", .dtype = "U8"};
    float data[6] = {1, 2, 3, 4, 5, 6}, back[6];
    struct safetensors *file;
    struct st_writer *writer;
    struct report report;
    uint16_t half = 0x3f80;
    struct stat st;
    int before;

    (void)state;
    unlinkat(dir, "f", 0);
    assert_int_equal(st_writer_new(file_path, tensors, 3, &writer, &report), 0);
    assert_int_equal(st_writer_write(writer, data, 5, &report), 0);
    assert_int_equal(st_writer_write(writer, (char *)data + 5, 19, &report), 0);
    assert_int_equal(st_writer_finish(writer, &report), -EINVAL);
    assert_string_equal(report.text, "f: 2 bytes of data are missing");
    assert_int_equal(st_writer_write(writer, data, 3, &report), -EINVAL);
    assert_string_equal(report.text, "f: more data than described");
    assert_int_equal(faccessat(dir, "f", F_OK, 0), -1);
    assert_int_equal(st_writer_write(writer, &half, 2, &report), 0);
    assert_int_equal(st_writer_finish(writer, &report), 0);
    assert_null(st_writer_free(writer));
    assert_int_equal(files_in_dir(), 1);
    assert_int_equal(fstatat(dir, "f", &st, 0), 0);
    assert_int_equal((st.st_size - 26) % 8, 0);

    /* A name without a directory; a directory that went away. */
    before = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(before >= 0);
    assert_int_equal(fchdir(dir), 0);
    assert_int_equal(st_writer_new("g", &empty, 1, &writer, &report), 0);
    assert_int_equal(st_writer_finish(writer, &report), 0);
    assert_null(st_writer_free(writer));
    assert_int_equal(unlinkat(dir, "g", 0), 0);
    assert_int_equal(mkdir("gone", 0700), 0);
    assert_int_equal(st_writer_new("gone/g", &empty, 1, &writer, &report), 0);
    assert_int_equal(rename("gone", "away"), 0);
    assert_int_equal(st_writer_finish(writer, &report), -EIO);
    assert_string_equal(report.text, "g: its directory: No such file or directory");
    assert_int_equal(rename("away", "gone"), 0);
    assert_null(st_writer_free(writer));
    assert_int_equal(rmdir("gone"), 0);
    assert_int_equal(fchdir(before), 0);
    close(before);

    assert_int_equal(open_file(&file, &report), 0);
    assert_int_equal(safetensors_count(file), 3);
    for (int i = 0; i < 3; i++) {
        const struct st_tensor *tensor = safetensors_find(file, tensors[i].name);

        assert_non_null(tensor);
        assert_string_equal(tensor->dtype, tensors[i].dtype);
        assert_int_equal(tensor->rank, tensors[i].rank);
        assert_int_equal(tensor->size, tensors[i].size);
    }
    assert_int_equal(safetensors_read(file, safetensors_find(file, "w"), 0, 6, back, &report), 0);
    assert_memory_equal(data, back, sizeof(data));
    safetensors_free(file);

    /* Replaced only when complete; what was given up leaves nothing. */
    assert_int_equal(st_writer_new(file_path, tensors, 1, &writer, &report), 0);
    assert_int_equal(files_in_dir(), 2);
    st_writer_free(writer);
    assert_int_equal(files_in_dir(), 1);
    assert_int_equal(open_file(&file, &report), 0);
    assert_int_equal(safetensors_count(file), 3);
    safetensors_free(file);
    assert_int_equal(st_writer_new(file_path, twice, 2, &writer, &report), -EINVAL);
    assert_string_equal(report.text, "tensor 'w' comes twice");
    assert_int_equal(st_writer_new(file_path, too_large, 2, &writer, &report), -EINVAL);
    assert_string_equal(report.text, "tensor 'b' is too large");
    assert_int_equal(st_writer_new(file_path, too_large + 1, 2, &writer, &report), -EINVAL);
    assert_string_equal(report.text, "tensor 'c' is too large");
    assert_int_equal(st_writer_new(file_path, &not_utf8, 1, &writer, &report), -EINVAL);
    assert_non_null(strstr(report.text, "cannot be described"));
    assert_int_equal(st_writer_new("/tmp/fused-test-no-such-dir/f", tensors, 1, &writer, &report),
                     -ENOENT);
    assert_int_equal(st_writer_new("/dev/full/f", tensors, 1, &writer, &report), -EIO);
    assert_int_equal(files_in_dir(), 1);
}

static int setup(void **state)
{
    (void)state;
    if (!mkdtemp(path))
        return -1;
    snprintf(file_path, sizeof(file_path), "%s/f", path);
    dir = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return dir < 0 ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    unlinkat(dir, "f", 0);
    close(dir);
    return rmdir(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),      cmocka_unit_test(test_headers),
        cmocka_unit_test(test_large),        cmocka_unit_test(test_contents),
        cmocka_unit_test(test_names),        cmocka_unit_test(test_writer),
        cmocka_unit_test(test_large_header),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
