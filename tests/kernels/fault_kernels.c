/*
 * Every allocation, open and read of loading a model fails in turn: an error that says so, no
 * descriptor left, nothing given back that would have to be freed (the address sanitizer watches).
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "kernels/pipeline.h"
#include "kernels/reference.h"
#include "tests/fault.h"

#define GOLDEN "tests/golden/"
#define ROUNDS 1000

static struct model model;

/* Of one round: whether it was the last, that is, nothing failed any more. */
static bool judge(unsigned n, int r, const struct report *report, unsigned fds)
{
    bool last = fault_disarm() < n;

    if (last) {
        if (r != 0)
            fail_msg("without a fault: %d \"%s\"", r, report->text);
        return true;
    }
    if ((r != -ENOMEM && r != -EIO) || report->text[0] == 0)
        fail_msg("fault %u: %d \"%s\"", n, r, report->text);
    assert_int_equal(fault_open_fds(), fds);
    return false;
}

static void fail_parse(const char *conf)
{
    unsigned fds = fault_open_fds(), n;
    bool last = false;

    for (n = 1; !last; n++) {
        struct report report = {""};
        int r;

        assert_true(n < ROUNDS);
        fault_arm(n);
        r = model_parse(AT_FDCWD, conf, &model, &report);
        last = judge(n, r, &report, fds);
    }
    assert_true(n > 5);
}

static struct safetensors *fail_open(const char *weights)
{
    unsigned fds = fault_open_fds(), n, reads = 0;
    struct safetensors *file = NULL;
    bool last = false;

    for (n = 1; !last; n++) {
        struct report report = {""};
        int r;

        assert_true(n < ROUNDS);
        fault_arm(n);
        r = safetensors_open(AT_FDCWD, weights, &file, &report);
        last = judge(n, r, &report, fds);
        assert_true(last || !file);
        reads += strstr(report.text, ": reading at byte ") != NULL;
    }
    assert_int_equal(reads, 2); /* the length and the header */
    return file;
}

static struct pipeline *fail_build(struct safetensors *weights)
{
    unsigned fds = fault_open_fds(), n;
    struct pipeline *pipeline = NULL;
    bool last = false;

    for (n = 1; !last; n++) {
        struct report report = {""};
        int r;

        assert_true(n < ROUNDS);
        fault_arm(n);
        r = pipeline_build(&model, weights, &pipeline, &report);
        last = judge(n, r, &report, fds);
        assert_true(last || !pipeline);
    }
    assert_true(n > 2);
    return pipeline;
}

static void fail_run(const struct pipeline *pipeline)
{
    float *x = calloc((size_t)shape_elements(&pipeline->in), sizeof(*x));
    double *y = calloc((size_t)shape_elements(&pipeline->out), sizeof(*y));
    unsigned fds = fault_open_fds();
    struct reference_run how = {.rows = 1, .train = true};
    bool last = false;

    assert_non_null(x);
    assert_non_null(y);
    for (unsigned n = 1; !last; n++) {
        struct report report = {""};
        int r;

        assert_true(n < ROUNDS);
        fault_arm(n);
        r = reference_run(pipeline, pipeline->n_stages, &how, x, y, false, &report);
        last = judge(n, r, &report, fds);
    }
    free(x);
    free(y);
}

static void test_load(void **state)
{
    static const char *const names[] = {"a_float16", "b_dropout_s1234_o0_w10_min0.0",
                                        "a_bias_rows"};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        char conf[128], weights[300];
        struct safetensors *file;
        struct pipeline *pipeline;

        snprintf(conf, sizeof(conf), GOLDEN "%s.conf", names[i]);
        fail_parse(conf);
        snprintf(weights, sizeof(weights), GOLDEN "%s", model.weights);
        file = fail_open(weights);
        pipeline = fail_build(file);
        fail_run(pipeline);
        pipeline_free(pipeline);
    }
}

static const struct st_tensor tensor = {
    .name = "t", .dtype = "F32", .element_bytes = 4, .elements = 1, .size = 4};

static int write_file(const char *file, struct report *report)
{
    struct st_writer *writer = NULL;
    int r;

    r = st_writer_new(file, &tensor, 1, &writer, report);
    if (r == 0)
        r = st_writer_write(writer, "1234", 4, report);
    if (r == 0)
        r = st_writer_finish(writer, report);
    st_writer_free(writer);
    return r;
}

/* Whatever failed: the file is not there, or it is whole. */
static void test_write(void **state)
{
    char path[] = "/tmp/fused-test-fault-XXXXXX", file[64];
    unsigned fds = fault_open_fds(), n_there = 0;
    bool last = false;

    (void)state;
    assert_non_null(mkdtemp(path));
    snprintf(file, sizeof(file), "%s/f", path);
    for (unsigned n = 1; !last; n++) {
        struct safetensors *whole;
        struct report report = {""};
        int r;

        assert_true(n < ROUNDS);
        fault_arm(n);
        r = write_file(file, &report);
        last = judge(n, r, &report, fds);
        if (access(file, F_OK) == 0) {
            n_there += r != 0;
            assert_int_equal(safetensors_open(AT_FDCWD, file, &whole, &report), 0);
            safetensors_free(whole);
            unlink(file);
        }
        assert_int_equal(fault_open_fds(), fds);
    }
    assert_int_equal(rmdir(path), 0); /* no half of a file is left */
    assert_int_equal(n_there, 1);     /* all but the directory's entry is on disk */
}

/* A write that a signal ends before it wrote begins again. */
static void test_interrupted(void **state)
{
    char path[] = "/tmp/fused-test-fault-XXXXXX", file[64];
    unsigned n_through = 0, n = 1;
    struct report report;
    int r;

    (void)state;
    assert_non_null(mkdtemp(path));
    snprintf(file, sizeof(file), "%s/f", path);
    do {
        fault_arm_with(n, EINTR);
        r = write_file(file, &report);
        n_through += r == 0;
    } while (fault_disarm() >= n++);
    assert_int_equal(r, 0);
    assert_int_equal(n_through, 5); /* length, header, padding, data; and without a fault */
    unlink(file);
    assert_int_equal(rmdir(path), 0);
}

/* W-14. Reads that a signal ends, or that give less than was asked for, go on. */
static void test_interrupted_reads(void **state)
{
    static const int errors[] = {EINTR, FAULT_SHORT};
    static const char weights[] = GOLDEN "a_float16.safetensors", conf[] = GOLDEN "a_float16.conf";

    (void)state;
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        unsigned n_through = 0, n = 1;
        struct safetensors *file;
        struct report report;
        bool last;
        int r;

        do {
            fault_arm_with(n, errors[i]);
            r = safetensors_open(AT_FDCWD, weights, &file, &report);
            if (r == 0) {
                uint64_t first[64]; /* as large as numbers get */

                r = safetensors_read(file, safetensors_at(file, 0), 0, 64, first, &report);
                safetensors_free(file);
            }
            n_through += r == 0;
        } while (fault_disarm() >= n++);
        assert_int_equal(r, 0);
        assert_int_equal(n_through, 4); /* length, header, data; and without a fault */
        n_through = 0;
        n = 1;
        do {
            fault_arm_with(n, errors[i]);
            r = model_parse(AT_FDCWD, conf, &model, &report);
            last = fault_disarm() < n++;
            n_through += r == 0;
        } while (!last);
        assert_int_equal(r, 0);
        assert_int_equal(n_through, 2);
    }
}

/* ---- jansson's own allocations ---- */

static unsigned n_json, fail_json;

static void *json_alloc(size_t size)
{
    return ++n_json == fail_json ? NULL : malloc(size);
}

/* Reading and writing a header, each allocation of jansson failing in turn. Where its lexer has no
 * memory, it takes that for the end of a word. */
static void test_json(void **state)
{
    static const struct st_tensor shaped = {.name = "t",
                                            .dtype = "F32",
                                            .element_bytes = 4,
                                            .rank = 2,
                                            .dims = {0, 3},
                                            .elements = 0,
                                            .size = 0};
    static const char header[] = "\x68\0\0\0\0\0\0\0{\"__metadata__\":{\"k\":\"v\"},"
                                 "\"t\":{\"dtype\":\"F32\",\"shape\":[0,3],"
                                 "\"data_offsets\":[0,0]}}"
                                 "                            ";
    char path[] = "/tmp/fused-test-fault-XXXXXX", file[64];
    unsigned n_no_memory = 0;
    struct report report;
    int fd, r;

    (void)state;
    assert_non_null(mkdtemp(path));
    snprintf(file, sizeof(file), "%s/f", path);
    fd = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(write(fd, header, 8 + 0x68), 8 + 0x68);
    close(fd);
    json_set_alloc_funcs(json_alloc, free);
    for (fail_json = 1;; fail_json++) {
        struct safetensors *read = NULL;

        n_json = 0;
        r = safetensors_open(AT_FDCWD, file, &read, &report);
        safetensors_free(read);
        if (n_json < fail_json)
            break;
        if ((r != -ENOMEM && r != -EINVAL) || read)
            fail_msg("allocation %u: %d \"%s\"", fail_json, r, report.text);
        n_no_memory += r == -ENOMEM;
    }
    if (r != 0)
        fail_msg("without a fault: %d \"%s\"", r, report.text);
    assert_true(fail_json > 10);
    assert_true(n_no_memory > 5);
    unlink(file);
    for (fail_json = 1;; fail_json++) {
        struct st_writer *writer = NULL;

        n_json = 0;
        r = st_writer_new(file, &shaped, 1, &writer, &report);
        st_writer_free(writer);
        if (n_json < fail_json)
            break;
        if ((r != -ENOMEM && r != -EINVAL) || !strstr(report.text, "memory"))
            fail_msg("allocation %u: %d \"%s\"", fail_json, r, report.text);
        assert_int_equal(access(file, F_OK), -1);
    }
    assert_int_equal(r, 0);
    assert_true(fail_json > 10);
    json_set_alloc_funcs(malloc, free);
    assert_int_equal(rmdir(path), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_load),        cmocka_unit_test(test_write),
        cmocka_unit_test(test_interrupted), cmocka_unit_test(test_interrupted_reads),
        cmocka_unit_test(test_json),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
