/*
 * test_golden_cli.c - every golden case through a real daemon, with fusectl infer
 *
 * The cases are what PyTorch computed (tests/golden). float32: |result - y| <= 1e-4 + 1e-4 |y|,
 * widened by PyTorch's own error |y - y64| where that is larger. 16-bit types: the largest error
 * against y64 is at most twice PyTorch's. Dropout alone is exact. NaN and Inf must be where
 * PyTorch has them. Cases go out as .npy and as .safetensors by turns.
 */
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "client/tensorfile.h"
#include "kernels/safetensors.h"
#include "kernels/tensor.h"
#include "tests/client/served.h"

#define GOLDEN "tests/golden"

static struct served served;

static int setup(void **state)
{
    (void)state;
    return served_start(&served, GOLDEN);
}

static int teardown(void **state)
{
    int code = served_stop(&served);

    (void)state;
    if (code != 0)
        print_error("the daemon ended with %d\n", code);
    return code;
}

struct golden {
    char name[128];
    struct safetensors *file;
    const struct st_tensor *y, *y64;
    bool train, exact;
    const char *seed, *offset, *offset_after; /* numbers as JSON text; NULL when not stated */
};

static void golden_open(struct golden *golden, const char *name)
{
    struct report report;
    char path[256];
    const char *train, *stages;

    memset(golden, 0, sizeof(*golden));
    snprintf(golden->name, sizeof(golden->name), "%s", name);
    snprintf(path, sizeof(path), GOLDEN "/%s.safetensors", name);
    if (safetensors_open(AT_FDCWD, path, &golden->file, &report) != 0)
        fail_msg("%s: %s", path, report.text);
    golden->y = safetensors_find(golden->file, "y");
    golden->y64 = safetensors_find(golden->file, "y64");
    assert_non_null(golden->y);
    train = safetensors_metadata(golden->file, "train");
    stages = safetensors_metadata(golden->file, "stages");
    assert_non_null(stages);
    golden->train = train != NULL && strcmp(train, "true") == 0;
    golden->exact = strstr(stages, "dropout") != NULL && strstr(stages, "group_norm") == NULL;
    golden->seed = safetensors_metadata(golden->file, "seed");
    golden->offset = safetensors_metadata(golden->file, "offset");
    golden->offset_after = safetensors_metadata(golden->file, "offset_after");
}

/* Runs fusectl; what it printed is parsed. */
static json_t *infer(const struct golden *golden, const char *out)
{
    char command[1024], text[4096];
    json_t *answer;
    FILE *pipe;
    size_t n;
    int status;

    n = (size_t)snprintf(command, sizeof(command),
                         "%s/fusectl --json --socket %s infer %s -i " GOLDEN
                         "/%s.safetensors -o %s",
                         served_build(), served.socket, golden->name, golden->name, out);
    if (golden->train)
        snprintf(command + n, sizeof(command) - n, " --train --seed %s --offset %s", golden->seed,
                 golden->offset);
    pipe = popen(command, "re");
    assert_non_null(pipe);
    n = fread(text, 1, sizeof(text) - 1, pipe);
    text[n] = 0;
    status = pclose(pipe);
    if (status != 0)
        fail_msg("%s: status %d: %s", command, status, text);
    answer = json_loads(text, 0, NULL);
    if (answer == NULL)
        fail_msg("%s: no JSON: %s", command, text);
    return answer;
}

static float *read_floats(const struct safetensors *file, const struct st_tensor *tensor)
{
    enum dtype dtype = strcmp(tensor->dtype, "F32") == 0   ? DTYPE_FLOAT32
                       : strcmp(tensor->dtype, "F16") == 0 ? DTYPE_FLOAT16
                                                           : DTYPE_BFLOAT16;
    size_t n = (size_t)tensor->elements;
    void *raw = malloc(tensor->size);
    float *floats = malloc(n * sizeof(float));
    struct report report;

    assert_non_null(raw);
    assert_non_null(floats);
    if (safetensors_read(file, tensor, 0, tensor->elements, raw, &report) != 0)
        fail_msg("%s", report.text);
    tensor_to_float(dtype, raw, floats, n);
    free(raw);
    return floats;
}

static double *read_wide(const struct golden *golden)
{
    struct report report;
    double *y64;

    if (golden->y64 == NULL)
        return NULL;
    assert_string_equal(golden->y64->dtype, "F64");
    assert_int_equal(golden->y64->elements, golden->y->elements);
    y64 = malloc(golden->y64->size);
    assert_non_null(y64);
    if (safetensors_read(golden->file, golden->y64, 0, golden->y64->elements, y64, &report) != 0)
        fail_msg("%s", report.text);
    return y64;
}

static double distance(double a, double b)
{
    return a == b || (isnan(a) && isnan(b)) ? 0 : isnan(a - b) ? INFINITY : fabs(a - b);
}

static void compare_float32(const struct golden *golden, const float *r, const float *y,
                            const double *y64)
{
    for (int64_t i = 0; i < golden->y->elements; i++) {
        double tolerance = golden->exact || !isfinite(y[i]) ? 0 : 1e-4 + 1e-4 * fabs(y[i]);

        if (tolerance > 0 && y64 != NULL && isfinite(y64[i]) && fabs(y[i] - y64[i]) > tolerance)
            tolerance = fabs(y[i] - y64[i]);
        if (distance(r[i], y[i]) > tolerance)
            fail_msg("%s[%lld]: %.9g, PyTorch has %.9g", golden->name, (long long)i, (double)r[i],
                     (double)y[i]);
        if (golden->train && golden->exact && memcmp(&r[i], &y[i], 4) != 0 && !isnan(y[i]))
            fail_msg("%s[%lld]: %a, PyTorch has %a", golden->name, (long long)i, (double)r[i],
                     (double)y[i]);
    }
}

static void compare_16(const struct golden *golden, const float *r, const float *y,
                       const double *y64)
{
    double worst = 0, theirs = 0;

    assert_non_null(y64);
    for (int64_t i = 0; i < golden->y->elements; i++) {
        if (isnan(r[i]) != isnan(y[i]))
            fail_msg("%s[%lld]: %g, PyTorch has %g", golden->name, (long long)i, (double)r[i],
                     (double)y[i]);
        worst = fmax(worst, distance(r[i], y64[i]));
        theirs = fmax(theirs, distance(y[i], y64[i]));
    }
    if (!(worst <= 2 * theirs))
        fail_msg("%s: largest error %g, PyTorch's is %g", golden->name, worst, theirs);
}

static void compare(const struct golden *golden, const char *out)
{
    struct report report;
    struct tensorfile file;
    void *raw;
    float *r, *y = read_floats(golden->file, golden->y);
    double *y64 = read_wide(golden);

    if (tensorfile_open(out, "y", &file, &report) != 0)
        fail_msg("%s", report.text);
    assert_int_equal(file.rank, golden->y->rank);
    assert_memory_equal(file.dims, golden->y->dims, (size_t)file.rank * sizeof(*file.dims));
    assert_int_equal(file.size, golden->y->size);
    raw = malloc(file.size);
    r = malloc((size_t)golden->y->elements * sizeof(float));
    assert_non_null(raw);
    assert_non_null(r);
    if (tensorfile_read(&file, raw, NULL, &report) != 0)
        fail_msg("%s", report.text);
    tensor_to_float((enum dtype)file.dtype, raw, r, (size_t)golden->y->elements);
    if (file.dtype == FUSED_FLOAT32)
        compare_float32(golden, r, y, y64);
    else
        compare_16(golden, r, y, y64);
    tensorfile_close(&file);
    free(raw);
    free(r);
    free(y);
    free(y64);
}

static void test_case(void **state)
{
    static unsigned turn;
    const char *name = *state;
    struct golden golden;
    json_t *answer;
    char out[256];

    golden_open(&golden, name);
    snprintf(out, sizeof(out), "%s/%s.%s", served.dir, name, turn++ % 2 ? "npy" : "safetensors");
    answer = infer(&golden, out);
    compare(&golden, out);
    if (golden.train && golden.offset_after != NULL)
        assert_int_equal(json_integer_value(json_object_get(answer, "offset")),
                         strtoll(golden.offset_after, NULL, 10));
    json_decref(answer);
    safetensors_free(golden.file);
}

static int is_model(const struct dirent *entry)
{
    const char *end = strrchr(entry->d_name, '.');

    return end != NULL && strcmp(end, ".conf") == 0;
}

int main(void)
{
    struct dirent **entries;
    struct CMUnitTest *tests;
    int n = scandir(GOLDEN, &entries, is_model, alphasort), r;

    if (n < 1) {
        fprintf(stderr, "no cases in %s: run from the top of the tree\n", GOLDEN);
        return 1;
    }
    tests = calloc((size_t)n, sizeof(*tests));
    if (tests == NULL)
        return 1;
    for (int i = 0; i < n; i++) {
        *strrchr(entries[i]->d_name, '.') = 0;
        tests[i].name = entries[i]->d_name;
        tests[i].test_func = test_case;
        tests[i].initial_state = entries[i]->d_name;
    }
    r = _cmocka_run_group_tests("golden cases through fusectl", tests, (size_t)n, setup, teardown);
    for (int i = 0; i < n; i++)
        free(entries[i]);
    free(entries);
    free(tests);
    return r;
}
