/*
 * offline.c - fusectl check and weights: what needs files but no server
 *
 * check says of model files what the server would say when it loads them. weights makes random
 * weights for a model file that states its sizes, with the distributions that PyTorch's layers
 * start with, so that demos, tests and measurements need no training.
 *
 * The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
 * OOPSLA 2014), one stream for each tensor: it starts at a mix of the seed and the tensor's name,
 * so that a tensor's values depend on nothing else in the model. A uniform number takes the upper
 * 53 bits of one output, a normal pair is Box-Muller on two.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/fusectl.h"
#include "client/tensorfile.h"
#include "kernels/model.h"
#include "kernels/pipeline.h"
#include "kernels/safetensors.h"
#include "proto/base.h"

/* ---- check ---- */

/* The directory that a file lies in, opened for openat; *ret_name is the file's name in it. */
static int open_directory(const char *path, const char **ret_name, struct report *report)
{
    const char *slash = strrchr(path, '/');
    char *directory;
    int fd;

    *ret_name = slash == NULL ? path : slash + 1;
    directory = slash == NULL ? strdup(".") : strndup(path, (size_t)(slash - path) + 1);
    if (directory == NULL)
        return report_set(report, -ENOMEM, "out of memory");
    fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        fd = report_set(report, -errno, "%s: %s", *ret_name, strerror(errno));
    free(directory);
    return fd;
}

static int build(const char *path, struct pipeline **ret, struct report *report)
{
    _cleanup_close_ int directory = -1;
    _cleanup_free_ struct model *model = NULL;
    struct safetensors *weights = NULL;
    const char *name;
    int r;

    directory = open_directory(path, &name, report);
    if (directory < 0)
        return directory;
    model = malloc(sizeof(*model));
    if (model == NULL)
        return report_set(report, -ENOMEM, "%s: out of memory", name);
    r = model_parse(directory, name, model, report);
    if (r < 0)
        return r;
    if (model->weights[0] != 0) {
        r = safetensors_open(directory, model->weights, &weights, report);
        if (r < 0)
            return report_prefix(report, r, "%s: ", name);
    }
    r = pipeline_build(model, weights, ret, report);
    if (r < 0)
        safetensors_free(weights);
    return r;
}

/* Reports start with the file's name but never with its directory, which a person wants to see. */
static void print_wrong(const char *path, const char *text)
{
    const char *slash = strrchr(path, '/');
    int n = slash == NULL ? 0 : (int)(slash - path) + 1;

    ctl_error("%.*s%s", n, path, text);
}

static void print_right(const char *path, const struct pipeline *pipeline)
{
    char x[CTL_TEXT_MAX], y[CTL_TEXT_MAX];

    printf("%s: ok\n", path);
    printf("  %s -> %s, %s\n", shape_print(&pipeline->in, x, sizeof(x)),
           shape_print(&pipeline->out, y, sizeof(y)), dtype_name(pipeline->dtype));
    printf("  proof: %s\n", pipeline->proof.text);
}

static json_t *json_right(const char *path, const struct pipeline *pipeline)
{
    char x[CTL_TEXT_MAX], y[CTL_TEXT_MAX];

    return json_pack("{s:o, s:b, s:s, s:s, s:s, s:{s:b, s:s}}", "file", ctl_json_str(path), "ok", 1,
                     "input", shape_print(&pipeline->in, x, sizeof(x)), "output",
                     shape_print(&pipeline->out, y, sizeof(y)), "dtype",
                     dtype_name(pipeline->dtype), "proof", "constant", pipeline->proof.constant,
                     "text", pipeline->proof.text);
}

static int run_check(struct ctl *ctl)
{
    json_t *files = json_array();
    int code = CTL_DONE;

    for (int i = 0; i < ctl->n_args; i++) {
        const char *path = ctl->args[i];
        struct pipeline *pipeline = NULL;
        struct report report;

        build(path, &pipeline, &report);
        if (pipeline == NULL) {
            code = CTL_REFUSED;
            print_wrong(path, report.text);
            json_array_append_new(files, json_pack("{s:o, s:b, s:o}", "file", ctl_json_str(path),
                                                   "ok", 0, "error", ctl_json_str(report.text)));
        } else if (ctl->json) {
            json_array_append_new(files, json_right(path, pipeline));
        } else {
            print_right(path, pipeline);
        }
        pipeline_free(pipeline);
    }
    if (ctl->json && ctl_print_json(json_pack("{s:O}", "files", files)) != CTL_DONE)
        code = CTL_FAILED;
    json_decref(files);
    return code;
}

const struct command ctl_check = {
    .name = "check",
    .args = "FILE...",
    .summary = "Check model files and the weights beside them",
    .text = "Needs no server. Prints shapes and proof of each file that is right; names file, "
            "line and reason of each that is wrong, and ends with 1.",
    .n_min = 1,
    .n_max = INT32_MAX,
    .run = run_check,
};

/* ---- weights ---- */

#define CHUNK 16384 /* numbers made at a time */

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static uint64_t next(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return mix(*state);
}

/* In (0, 1), never at an end: the logarithm below needs that. */
static double uniform(uint64_t *state)
{
    return ((double)(next(state) >> 11) + 0.5) * 0x1p-53;
}

/* Where the stream of a tensor starts: FNV-1a of its name, and the seed. */
static uint64_t stream_start(uint64_t seed, const char *name)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (; *name != 0; name++)
        hash = (hash ^ (uint8_t)*name) * UINT64_C(0x100000001b3);
    return mix(mix(seed + UINT64_C(0x9e3779b97f4a7c15)) ^ hash);
}

/* `n` is even unless these are a tensor's last. */
static void make_numbers(const struct weight_shape *shape, uint64_t *state, float *to, size_t n)
{
    if (shape->normal) {
        for (size_t i = 0; i < n; i += 2) {
            double radius = sqrt(-2 * log(uniform(state)));
            double angle = 2 * M_PI * uniform(state);

            to[i] = (float)(radius * cos(angle));
            if (i + 1 < n)
                to[i + 1] = (float)(radius * sin(angle));
        }
        return;
    }
    for (size_t i = 0; i < n; i++)
        to[i] = shape->bound != 0 ? (float)(shape->bound * (2 * uniform(state) - 1))
                                  : (float)shape->value;
}

/* A file in the making. */
struct making {
    struct model model;
    struct weight_shape shapes[2 * MODEL_STAGES_MAX];
    struct st_tensor tensors[2 * MODEL_STAGES_MAX];
    int n;
    uint64_t size, done;
    struct st_writer *writer;
    float numbers[CHUNK], packed[CHUNK];
};

static int describe_tensors(struct making *making, struct report *report)
{
    size_t element = dtype_size(making->model.dtype);
    const char *dtype = making->model.dtype == DTYPE_FLOAT32   ? "F32"
                        : making->model.dtype == DTYPE_FLOAT16 ? "F16"
                                                               : "BF16";

    making->n =
        pipeline_weight_shapes(&making->model, making->shapes, ARRAY_SIZE(making->shapes), report);
    if (making->n < 0)
        return making->n;
    if (making->n == 0)
        return report_set(report, -EINVAL, "%s has no stage with weights", making->model.file);
    for (int i = 0; i < making->n; i++) {
        const struct weight_shape *shape = &making->shapes[i];
        struct st_tensor *tensor = &making->tensors[i];

        *tensor = (struct st_tensor){.name = shape->name,
                                     .dtype = dtype,
                                     .element_bytes = element,
                                     .rank = shape->rank,
                                     .elements = 1};
        for (int j = 0; j < shape->rank; j++) {
            tensor->dims[j] = shape->dims[j];
            if (__builtin_mul_overflow(tensor->elements, shape->dims[j], &tensor->elements) ||
                tensor->elements > TENSOR_ELEMENTS_MAX)
                return report_set(report, -EINVAL, "%s is too large", shape->name);
        }
        tensor->size = (uint64_t)tensor->elements * element;
        making->size += tensor->size;
    }
    return 0;
}

static int write_tensor(struct making *making, int i, uint64_t seed, struct report *report)
{
    const struct st_tensor *tensor = &making->tensors[i];
    uint64_t state = stream_start(seed, tensor->name);

    for (int64_t done = 0; done < tensor->elements;) {
        int64_t left = tensor->elements - done;
        size_t n = left < CHUNK ? (size_t)left : CHUNK;
        int r;

        make_numbers(&making->shapes[i], &state, making->numbers, n);
        tensor_from_float(making->model.dtype, making->numbers, making->packed, n);
        r = st_writer_write(making->writer, making->packed, n * tensor->element_bytes, report);
        if (r < 0)
            return r;
        if (ctl_interrupted())
            return report_set(report, -ECANCELED, "stopped");
        done += (int64_t)n;
        making->done += n * tensor->element_bytes;
        if (done % (1 << 20) == 0)
            ctl_progress("%s: %d %%", tensor->name, (int)(making->done * 100 / making->size));
    }
    return 0;
}

static int make_weights(struct making *making, const struct ctl *ctl, struct report *report)
{
    int r;

    r = st_writer_new(ctl->out, making->tensors, (size_t)making->n, &making->writer, report);
    for (int i = 0; i < making->n && r == 0; i++)
        r = write_tensor(making, i, ctl->seed, report);
    if (r == 0)
        r = st_writer_finish(making->writer, report);
    making->writer = st_writer_free(making->writer);
    return r < 0 ? tensorfile_report(report, r, ctl->out) : 0;
}

static int print_weights(const struct ctl *ctl, const struct making *making)
{
    char size[CTL_TEXT_MAX], dims[CTL_TEXT_MAX];
    json_t *tensors = json_array();

    for (int i = 0; i < making->n; i++) {
        const struct st_tensor *tensor = &making->tensors[i];
        json_t *shape = json_array();

        for (int j = 0; j < tensor->rank; j++)
            json_array_append_new(shape, json_integer(tensor->dims[j]));
        json_array_append_new(tensors, json_pack("{s:s, s:s, s:o}", "name", tensor->name, "dtype",
                                                 tensor->dtype, "shape", shape));
        if (!ctl->json)
            printf("%s %s %s\n", tensor->name, tensor->dtype,
                   ctl_dims(tensor->rank, tensor->dims, dims));
    }
    if (ctl->json)
        return ctl_print_json(json_pack("{s:o, s:I, s:o}", "file", ctl_json_str(ctl->out), "bytes",
                                        (json_int_t)making->size, "tensors", tensors));
    json_decref(tensors);
    printf("%s: %s\n", ctl->out, ctl_bytes(making->size, size));
    return CTL_DONE;
}

/* Where the weights may go: a name for this kind of file, and a place that can be written. */
static int check_weights_file(const struct ctl *ctl)
{
    const char *end = strrchr(ctl->out, '.');
    struct report report;

    if (end == NULL || end == ctl->out || strcmp(end, ".safetensors") != 0) {
        ctl_error("%s: the name must end in .safetensors", ctl->out);
        return CTL_USAGE;
    }
    if (tensorfile_check(ctl->out, &report) < 0) {
        ctl_error("%s", report.text);
        return CTL_FAILED;
    }
    return CTL_DONE;
}

static int run_weights(struct ctl *ctl)
{
    _cleanup_free_ struct making *making = NULL;
    struct report report;
    int r;

    r = check_weights_file(ctl);
    if (r != CTL_DONE)
        return r;
    making = calloc(1, sizeof(*making));
    if (making == NULL) {
        ctl_error("out of memory");
        return CTL_FAILED;
    }
    r = model_parse(AT_FDCWD, ctl->args[0], &making->model, &report);
    if (r == 0)
        r = describe_tensors(making, &report);
    if (r < 0) {
        print_wrong(ctl->args[0], report.text);
        return CTL_FAILED;
    }
    ctl_catch_interrupts(true);
    r = make_weights(making, ctl, &report);
    ctl_catch_interrupts(false);
    ctl_progress("%s", "");
    if (r < 0) {
        ctl_error("%s", report.text);
        return r == -ECANCELED ? CTL_STOPPED : CTL_FAILED;
    }
    return print_weights(ctl, making);
}

static const struct argp_option weights_options[] = {
    {NULL, 'o', "FILE", 0, "Weights file to write (.safetensors)", 1},
    {"seed", CTL_KEY_SEED, "N", 0, "Seed: the same one gives the same file", 1},
    {0},
};

const struct command ctl_weights = {
    .name = "weights",
    .args = "MODEL.conf",
    .summary = "Make random weights for a model file",
    .text = "Needs no server. Draws from the distributions that PyTorch's layers start with. The "
            "model file must state its sizes: out of linear, out and kernel of conv3d, shape of "
            "add.",
    .n_min = 1,
    .n_max = 1,
    .options = weights_options,
    .required = "os",
    .run = run_weights,
};
