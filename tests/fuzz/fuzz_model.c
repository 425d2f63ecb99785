/*
 * fuzz_model.c - any chain of stages with any weights: a pipeline whose shapes hold and whose proof
 * does not lie, or a reason
 *
 * The bytes choose stages and sizes, so that most inputs are models that could be meant; text that
 * is no configuration at all is fuzz_conf's. The weights are made as the model asks for them, and
 * then spoilt as the bytes say. What comes out small enough is computed by the reference: a
 * pipeline that was proven constant must be.
 */
#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/pipeline.h"
#include "kernels/reference.h"

#define STAGES_MAX 6
#define DATA_MAX   4096 /* elements of all weights together */
#define WORK_MAX   4096 /* elements of the input and output that are computed */

#define check(condition)                                            \
    do {                                                            \
        if (!(condition)) {                                         \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            abort();                                                \
        }                                                           \
    } while (0)

struct input {
    const uint8_t *bytes;
    size_t n;
};

static uint8_t next(struct input *in)
{
    if (in->n == 0)
        return 0;
    in->n--;
    return *in->bytes++;
}

static const char *pick(struct input *in, const char *const *words, size_t n)
{
    return words[next(in) % n];
}

/* ---- a model ---- */

static const char *const numbers[] = {"0.0",   "1.0",    "0.5",    "-0.5",    "2",     "-1e30",
                                      "1e30",  "3.4e38", "1e39",   "-0.0",    "1e-5",  "0",
                                      "1e-40", "-1",     "1e-300", "0.28125", "1e300", "100.0"};
static const char *const sizes[] = {"1", "2", "3", "4", "6", "8", "5", "16", "0", "70000L"};

static void add_stage(struct input *in, FILE *text, int i)
{
    uint8_t flags;

    switch (next(in) % 9) {
    case 0:
        flags = next(in);
        fprintf(text, "{ op = \"linear\"; weight = \"w%d\"; out = %s;", i,
                pick(in, sizes, sizeof(sizes) / sizeof(sizes[0])));
        break;
    case 1:
        flags = next(in);
        fprintf(text, "{ op = \"conv3d\"; weight = \"w%d\"; out = %s; kernel = %d;", i,
                pick(in, sizes, sizeof(sizes) / sizeof(sizes[0])), 1 + (flags >> 2 & 3));
        if (flags & 16)
            fprintf(text, " stride = [ 1, 2, %d ];", next(in) % 5);
        if (flags & 32)
            fprintf(text, " padding = %d;", next(in) % 4);
        break;
    case 2:
        flags = next(in);
        fprintf(text, "{ op = \"group_norm\"; groups = %s;",
                pick(in, sizes, sizeof(sizes) / sizeof(sizes[0])));
        if (flags & 2)
            fprintf(text, " eps = %s;", pick(in, numbers, sizeof(numbers) / sizeof(numbers[0])));
        if (flags & 4)
            fprintf(text, " weight = \"w%d\";", i);
        break;
    case 3:
        flags = 0;
        fprintf(text, "{ op = \"amin\"; dim = %d; keepdim = %s;", next(in) % 6 - 2,
                next(in) & 1 ? "true" : "false");
        break;
    case 4:
        flags = 0;
        fprintf(text, "{ op = \"minimum\"; value = %s;",
                pick(in, numbers, sizeof(numbers) / sizeof(numbers[0])));
        break;
    case 5:
        flags = 0;
        fprintf(text, "{ op = \"clamp\"; min = %s;",
                pick(in, numbers, sizeof(numbers) / sizeof(numbers[0])));
        fprintf(text, " max = %s;", pick(in, numbers, sizeof(numbers) / sizeof(numbers[0])));
        break;
    case 6:
        flags = 0;
        fprintf(text, "{ op = \"add\"; tensor = \"t%d\"; shape = (", i);
        for (int k = next(in) % 4; k >= 0; k--)
            fprintf(text, " %s%s", pick(in, sizes, 6), k > 0 ? "," : "");
        fprintf(text, " );");
        break;
    case 7:
        flags = 0;
        fprintf(text, "{ op = \"dropout\"; p = %s;",
                pick(in, numbers, sizeof(numbers) / sizeof(numbers[0])));
        break;
    default: /* both halves of what is proven constant */
        flags = 0;
        fprintf(text,
                "{ op = \"minimum\"; value = 0.25; }, { op = \"clamp\"; min = 0.25; max = %s;",
                pick(in, numbers, sizeof(numbers) / sizeof(numbers[0])));
    }
    if (flags & 1)
        fprintf(text, " bias = \"b%d\";", i);
    fprintf(text, " }");
}

static size_t make_text(struct input *in, char *to, size_t size)
{
    static const char *const dtypes[] = {"float32", "float16", "bfloat16"};
    FILE *text = fmemopen(to, size, "w");
    uint8_t flags = next(in);
    int n_stages = 1 + next(in) % STAGES_MAX;
    long n;

    check(text != NULL);
    fprintf(text, "name = \"m\"; dtype = \"%s\"; prove = %s; input = { shape = (",
            dtypes[flags % 3], flags & 4 ? "false" : "true");
    for (int k = flags >> 4 & 3; k >= 0; k--)
        fprintf(text, " %s%s", pick(in, sizes, sizeof(sizes) / sizeof(sizes[0])), k > 0 ? "," : "");
    fprintf(text, " ); };\nstages = (");
    for (int i = 0; i < n_stages; i++) {
        if (i > 0)
            fprintf(text, ",\n");
        add_stage(in, text, i);
    }
    fprintf(text, " );\n");
    n = ftell(text);
    check(n > 0 && (size_t)n < size);
    fclose(text);
    return (size_t)n;
}

/* ---- its weights ---- */

static const uint32_t odd_values[] = {0,          0x80000000, 0x7f800000, 0xff800000,
                                      0x7fc00000, 0x7f7fffff, 0x00000001, 0x3f800000};

/* A weights file as the shapes say, unless the bytes say otherwise. Its descriptor, or -1: too
 * large. */
static int make_weights(struct input *in, const struct weight_shape *shapes, int n,
                        enum dtype dtype)
{
    static uint32_t data[DATA_MAX];
    static char header[16384];
    size_t element = dtype == DTYPE_FLOAT32 ? 4 : 2, at = 8, elements = 0;
    uint8_t how = next(in), spoilt = next(in);
    uint32_t random = (uint32_t)how << 8 | 1;
    uint64_t length;
    int fd;

    at += (size_t)snprintf(header + at, sizeof(header) - at, "{");
    for (int i = 0; i < n; i++) {
        size_t count = 1, begin = elements;

        for (int k = 0; k < shapes[i].rank; k++)
            if (__builtin_mul_overflow(count, (size_t)shapes[i].dims[k], &count) ||
                count > DATA_MAX)
                return -1;
        elements += count;
        if (elements > DATA_MAX)
            return -1;
        at += (size_t)snprintf(header + at, sizeof(header) - at,
                               "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i > 0 ? "," : "",
                               shapes[i].name,
                               dtype == DTYPE_FLOAT32   ? "F32"
                               : dtype == DTYPE_FLOAT16 ? "F16"
                                                        : "BF16");
        for (int k = 0; k < shapes[i].rank; k++)
            at += (size_t)snprintf(header + at, sizeof(header) - at, "%s%lld", k > 0 ? "," : "",
                                   (long long)shapes[i].dims[k]);
        at += (size_t)snprintf(header + at, sizeof(header) - at, "],\"data_offsets\":[%zu,%zu]}",
                               begin * element, elements * element);
    }
    at += (size_t)snprintf(header + at, sizeof(header) - at, "}");
    check(at < sizeof(header));
    length = at - 8;
    memcpy(header, &length, 8);
    if (spoilt & 1) /* one character of the header is another */
        header[8 + next(in) % length] ^= (char)(1 << (spoilt >> 1 & 7));
    for (size_t i = 0; i < elements; i++) {
        random = random * 1664525 + 1013904223;
        data[i] = how & 1 && random >> 28 == 0 ? odd_values[random >> 24 & 7]
                                               : 0x3e000000 | (random >> 9 & 0x81ffffff);
    }
    fd = memfd_create("fuzz", MFD_CLOEXEC);
    check(fd >= 0);
    check(write(fd, header, at) == (ssize_t)at);
    check(write(fd, data, elements * element) == (ssize_t)(elements * element));
    return fd;
}

/* ---- what must hold ---- */

static void check_report(const struct report *report)
{
    check(report->text[0] != 0 && memchr(report->text, 0, sizeof(report->text)) != NULL);
    for (const char *c = report->text; *c; c++)
        check((unsigned char)*c >= 0x20 && *c != 0x7f);
}

static void check_shape(const struct shape *shape)
{
    check(shape->rank >= 1 && shape->rank <= TENSOR_RANK_MAX);
    check(shape_elements(shape) >= 1 && shape_elements(shape) <= TENSOR_ELEMENTS_MAX);
}

/* The stages that the proof replaces, on inputs below its bound. */
static void check_proof(const struct pipeline *pipeline)
{
    const struct proof *proof = &pipeline->proof;
    const struct reference_run run = {.rows = 1};
    const struct shape *out = &pipeline->stages[proof->n_stages - 1].out;
    static float x[WORK_MAX];
    static double y[WORK_MAX];
    struct report report = {""};
    int64_t n = shape_elements(&pipeline->in), n_out = shape_elements(out);

    check(proof->n_stages >= 1 && proof->n_stages <= pipeline->n_stages && proof->bound > 0);
    for (int i = 0; i < pipeline->n_stages; i++) {
        const struct stage *stage = &pipeline->stages[i];

        if (shape_elements(&stage->out) > WORK_MAX)
            return;
    }
    if (n > WORK_MAX)
        return;
    for (int64_t i = 0; i < n; i++) {
        float large = nextafterf(proof->bound, 0);

        x[i] = i % 3 == 0 ? large : i % 3 == 1 ? -large : (float)i / 7;
        if (fabsf(x[i]) >= proof->bound)
            x[i] = 0;
    }
    check(reference_run(pipeline, proof->n_stages, &run, x, y, false, &report) == 0);
    for (int64_t i = 0; i < n_out; i++)
        check((float)y[i] == proof->value);
}

static void check_pipeline(const struct pipeline *pipeline, const struct model *model)
{
    check(pipeline->n_stages == model->n_stages);
    check_shape(&pipeline->in);
    check_shape(&pipeline->out);
    for (int i = 0; i < pipeline->n_stages; i++) {
        check_shape(&pipeline->stages[i].in);
        check_shape(&pipeline->stages[i].out);
        check(i == 0 || memcmp(&pipeline->stages[i].in, &pipeline->stages[i - 1].out,
                               sizeof(struct shape)) == 0);
    }
    check(memchr(pipeline->proof.text, 0, sizeof(pipeline->proof.text)) != NULL);
    check(!pipeline->proof.constant || model->prove);
    if (pipeline->proof.constant)
        check_proof(pipeline);
}

/* The model with its weights; consumes fd, -1 for none. */
static void build(const struct model *model, int fd)
{
    struct safetensors *weights = NULL;
    struct pipeline *pipeline = NULL;
    struct report report = {""};
    char path[32];
    int r = 0;

    if (fd >= 0) {
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        r = safetensors_open(AT_FDCWD, path, &weights, &report);
        close(fd);
    }
    if (r == 0)
        r = pipeline_build(model, weights, &pipeline, &report);
    if (r == 0) {
        check_pipeline(pipeline, model);
        pipeline_free(pipeline);
        return;
    }
    check_report(&report);
    safetensors_free(weights);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct weight_shape shapes[2 * MODEL_STAGES_MAX];
    static struct model model;
    static char text[4096];
    struct input in = {data, size};
    struct report report = {""};
    struct conf *conf;
    size_t n = make_text(&in, text, sizeof(text));
    int fd, n_shapes;

    check(conf_parse("fuzz.conf", text, n, &conf, &report) == 0);
    if (model_parse_conf(conf, "fuzz.conf", &model, &report) == 0) {
        n_shapes = pipeline_weight_shapes(&model, shapes, 2 * MODEL_STAGES_MAX, &report);
        if (n_shapes < 0)
            check_report(&report);
        fd = n_shapes > 0 ? make_weights(&in, shapes, n_shapes, model.dtype) : -1;
        build(&model, fd);
    } else {
        check_report(&report);
    }
    conf_free(conf);
    return 0;
}
