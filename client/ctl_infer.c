/*
 * ctl_infer.c - fusectl infer: a tensor from a file, through a model, into a file
 *
 * The input is read straight into the buffer that the server reads from, and the result is written
 * to the file straight from the buffer that the server wrote into. Whether the input fits the
 * model is the server's to say: the model's description only sizes the output.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/fusectl.h"
#include "client/tensorfile.h"
#include "proto/base.h"
#include "proto/proto.h"

/* What one run holds, so that one place gives it back. */
struct run {
    struct fused *f;
    json_t *model; /* its description */
    struct tensorfile in;
    struct fused_buffer *x, *y;
    struct fused_infer call;
    struct fused_result result;
    int64_t rows;
    uint64_t wall_us; /* of the fastest repetition */
};

static int say_read(uint64_t done, uint64_t total)
{
    ctl_progress("reading: %d %%", (int)(done * 100 / total));
    return 0;
}

static int say_written(uint64_t done, uint64_t total)
{
    ctl_progress("writing: %d %%", (int)(done * 100 / total));
    return ctl_interrupted() ? -ECANCELED : 0;
}

static int make_buffer(const struct ctl *ctl, struct fused *f, uint64_t size,
                       struct fused_buffer **ret)
{
    /* A tensor without elements is for the server to refuse; a buffer without bytes cannot be. */
    return ctl_answer(ctl, f, fused_buffer_create(f, size > 0 ? (size_t)size : 1, ret), NULL);
}

static bool has_stage(const json_t *model, const char *op)
{
    json_t *stages = json_object_get(model, "stages"), *stage;
    size_t i;

    json_array_foreach(stages, i, stage)
    {
        if (strcmp(ctl_str(stage, "op"), op) == 0)
            return true;
    }
    return false;
}

static int describe(const struct ctl *ctl, struct run *run)
{
    char *json = NULL;
    int r;

    r = ctl_answer(ctl, run->f, fused_describe(run->f, ctl->args[0], &json), NULL);
    if (r != CTL_DONE)
        return r;
    run->model = json_loads(json, JSON_REJECT_DUPLICATES, NULL);
    free(json);
    if (run->model == NULL) {
        ctl_error("the server's description of the model is not understood");
        return CTL_NO_SERVER;
    }
    if (ctl->train && !has_stage(run->model, "dropout"))
        ctl_error("note: %s has no dropout, so --train changes nothing", ctl->args[0]);
    return CTL_DONE;
}

/*
 * Room for the result. A constant model's compact result is bytes: one a row, then whatever rows
 * came back in full, for which there must be room.
 */
static int prepare_output(const struct ctl *ctl, struct run *run)
{
    const char *compact = ctl_str(run->model, "compact"), *dtype = ctl_str(run->model, "dtype");
    const char *key = ctl->compact && strcmp(compact, "outer_sum") == 0 ? "factor" : "output";
    enum fused_dtype type = (enum fused_dtype)proto_dtype_parse(dtype, strlen(dtype));
    int64_t dims[FUSED_RANK_MAX];
    uint64_t size, room;
    int rank, r;

    if (ctl_fill_shape(json_object_get(run->model, key), run->rows, &rank, dims) < 0 ||
        proto_tensor_size((enum proto_dtype)type, (unsigned)rank, dims, &size) < 0) {
        ctl_error("no result of %s has room for %" PRId64 " rows", ctl->args[0], run->rows);
        return CTL_FAILED;
    }
    if (ctl->compact && strcmp(compact, "constant") == 0) {
        room = ((uint64_t)run->rows + 15) / 16 * 16;
        if (!add_u64(size, room, &size)) {
            ctl_error("no result of %s has room for %" PRId64 " rows", ctl->args[0], run->rows);
            return CTL_FAILED;
        }
        type = FUSED_UINT8;
        rank = 1;
        dims[0] = (int64_t)size;
    }
    r = make_buffer(ctl, run->f, size, &run->y);
    if (r == CTL_DONE)
        run->call.output = fused_tensor_in(run->y, 0, type, rank, dims);
    return r;
}

static int prepare_input(const struct ctl *ctl, struct run *run)
{
    struct report report;
    int r;

    r = make_buffer(ctl, run->f, run->in.size, &run->x);
    if (r != CTL_DONE)
        return r;
    r = tensorfile_read(&run->in, fused_buffer_data(run->x), say_read, &report);
    ctl_progress("%s", "");
    if (r < 0) {
        ctl_error("%s", report.text);
        return CTL_FAILED;
    }
    run->call.input = fused_tensor_in(run->x, 0, run->in.dtype, run->in.rank, run->in.dims);
    return CTL_DONE;
}

static uint64_t now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static int repeat(const struct ctl *ctl, struct run *run)
{
    struct fused_result fastest = {0};

    run->wall_us = UINT64_MAX;
    for (unsigned i = 0; i < ctl->repeat; i++) {
        uint64_t start, took;
        int r;

        ctl_progress("running: %u of %u", i + 1, ctl->repeat);
        start = now_us();
        r = fused_run(run->f, &run->call, &run->result);
        took = now_us() - start;
        if (r != 0)
            return ctl_answer(ctl, run->f, r, r > 0 ? run->result.text : NULL);
        if (took < run->wall_us) {
            run->wall_us = took;
            fastest = run->result;
        }
    }
    /* What is told of times is all of one run. */
    run->result.queue_us = fastest.queue_us;
    run->result.run_us = fastest.run_us;
    run->result.batch_rows = fastest.batch_rows;
    ctl_progress("%s", "");
    return CTL_DONE;
}

/* The result lies in our buffer, where and as long as the answer says. */
static int write_output(const struct ctl *ctl, const struct run *run)
{
    const struct fused_tensor *y = &run->result.output;
    struct report report;
    uint64_t size, end;
    int r;

    if (y->buffer != run->y || y->rank < 0 || y->rank > FUSED_RANK_MAX ||
        proto_tensor_size((enum proto_dtype)y->dtype, (unsigned)y->rank, y->shape, &size) < 0 ||
        !add_u64(size, y->offset, &end) || end > fused_buffer_size(run->y)) {
        ctl_error("the server's answer does not fit the request");
        return CTL_NO_SERVER;
    }
    ctl_catch_interrupts(true);
    r = tensorfile_write(ctl->out, "y", y->dtype, y->rank, y->shape,
                         (const uint8_t *)fused_buffer_data(run->y) + y->offset, say_written,
                         &report);
    ctl_catch_interrupts(false);
    ctl_progress("%s", "");
    if (r < 0)
        ctl_error("%s", report.text);
    return r == 0 ? CTL_DONE : r == -ECANCELED ? CTL_STOPPED : CTL_FAILED;
}

static json_t *json_dims(int rank, const int64_t *dims)
{
    json_t *list = json_array();

    for (int i = 0; i < rank; i++)
        json_array_append_new(list, json_integer(dims[i]));
    return list;
}

static int print_json(const struct ctl *ctl, const struct run *run)
{
    const struct fused_result *result = &run->result;
    json_t *object;

    object = json_pack(
        "{s:s, s:I, s:o, s:o, s:s, s:o, s:I, s:I, s:I, s:I, s:i, s:i, s:b}", "model", ctl->args[0],
        "rows", (json_int_t)run->rows, "input", json_dims(run->in.rank, run->in.dims), "output",
        json_dims(result->output.rank, result->output.shape), "dtype",
        proto_dtype_name((enum proto_dtype)result->output.dtype), "file", ctl_json_str(ctl->out),
        "offset", (json_int_t)result->offset, "queue_us", (json_int_t)result->queue_us, "run_us",
        (json_int_t)result->run_us, "wall_us", (json_int_t)run->wall_us, "batch_rows",
        (int)result->batch_rows, "repeat", (int)ctl->repeat, "late", result->late);
    if (object != NULL && result->has_constant) {
        json_object_set_new(object, "constant", json_real(result->constant));
        json_object_set_new(object, "full", json_integer(result->n_full));
    }
    return ctl_print_json(object);
}

static int print_result(const struct ctl *ctl, const struct run *run)
{
    const struct fused_result *result = &run->result;
    char x[CTL_TEXT_MAX], y[CTL_TEXT_MAX], queue[CTL_TEXT_MAX], took[CTL_TEXT_MAX];
    char wall[CTL_TEXT_MAX];

    if (ctl->json)
        return print_json(ctl, run);
    printf("%s: %s -> %s %s in %s\n", ctl->args[0], ctl_dims(run->in.rank, run->in.dims, x),
           ctl_dims(result->output.rank, result->output.shape, y),
           proto_dtype_name((enum proto_dtype)result->output.dtype), ctl->out);
    printf("waited %s, ran %s in a batch of %u row%s, %s in all%s\n",
           ctl_us(result->queue_us, queue), ctl_us(result->run_us, took), result->batch_rows,
           ctl_s(result->batch_rows), ctl_us(run->wall_us, wall),
           result->late ? ", after its deadline" : "");
    if (ctl->train)
        printf("next offset %" PRIu64 "\n", result->offset);
    if (result->has_constant)
        printf("constant %.9g, %u row%s in full\n", result->constant, result->n_full,
               ctl_s(result->n_full));
    return CTL_DONE;
}

static int run_steps(struct ctl *ctl, struct run *run)
{
    int r;

    /* No limit of ours: a request may wait long behind others, and a deadline is the user's. */
    r = ctl_connect(ctl, -1, &run->f);
    if (r == CTL_DONE)
        r = describe(ctl, run);
    if (r == CTL_DONE)
        r = prepare_input(ctl, run);
    if (r == CTL_DONE)
        r = prepare_output(ctl, run);
    if (r == CTL_DONE)
        r = repeat(ctl, run);
    if (r == CTL_DONE)
        r = write_output(ctl, run);
    if (r == CTL_DONE)
        r = print_result(ctl, run);
    return r;
}

/* Before the server is bothered: do the names mean files, two of them, and can the result be kept?
 */
static int check_files(const struct ctl *ctl)
{
    struct report report;

    if (tensorfile_check_name(ctl->in, &report) < 0 ||
        tensorfile_check_name(ctl->out, &report) < 0) {
        ctl_error("%s", report.text);
        return CTL_USAGE;
    }
    if (tensorfile_is_same(ctl->in, ctl->out)) {
        ctl_error("%s would be written over its own input", ctl->out);
        return CTL_USAGE;
    }
    if (tensorfile_check(ctl->out, &report) < 0) {
        ctl_error("%s", report.text);
        return CTL_FAILED;
    }
    return CTL_DONE;
}

static int run_infer(struct ctl *ctl)
{
    struct run run = {.call = FUSED_INFER_INIT};
    struct report report;
    int r;

    r = check_files(ctl);
    if (r != CTL_DONE)
        return r;
    if (tensorfile_open(ctl->in, "x", &run.in, &report) < 0) {
        ctl_error("%s", report.text);
        return CTL_FAILED;
    }
    run.rows = run.in.rank > 0 ? run.in.dims[0] : 0;
    run.call.model = ctl->args[0];
    run.call.deadline_us = ctl->deadline_us;
    run.call.priority = ctl->priority;
    run.call.train = ctl->train;
    run.call.seed = ctl->seed;
    run.call.offset = ctl->offset;
    run.call.compact = ctl->compact;
    r = run_steps(ctl, &run);
    fused_buffer_free(run.x);
    fused_buffer_free(run.y);
    fused_close(run.f);
    json_decref(run.model);
    tensorfile_close(&run.in);
    return r;
}

static const struct argp_option options[] = {
    {NULL, 'i', "IN", 0, "Input: FILE.npy or FILE.safetensors[#TENSOR] (tensor x)", 1},
    {NULL, 'o', "OUT", 0, "Result: FILE.npy or FILE.safetensors[#TENSOR] (tensor y)", 1},
    {"train", CTL_KEY_TRAIN, NULL, 0, "Apply dropout", 2},
    {"seed", CTL_KEY_SEED, "N", 0, "Seed of the dropout mask (default 0)", 2},
    {"offset", CTL_KEY_OFFSET, "N", 0, "Offset of its generator, a multiple of 4 (default 0)", 2},
    {"deadline", CTL_KEY_DEADLINE, "MS", 0, "Give up when it has not begun by then", 3},
    {"priority", CTL_KEY_PRIORITY, "N", 0, "0 waits most, 3 is for administrators (default 1)", 3},
    {"result", CTL_KEY_RESULT, "KIND", 0, "full (default) or compact: only the factors", 3},
    {"repeat", CTL_KEY_REPEAT, "N", 0, "Run N times; the time is the fastest's", 3},
    {0},
};

const struct command ctl_infer = {
    .name = "infer",
    .args = "MODEL",
    .summary = "Run a model on a tensor of a file",
    .text = "OUT is replaced as a whole when the result is complete, or not touched.",
    .n_min = 1,
    .n_max = 1,
    .options = options,
    .required = "io",
    .run = run_infer,
};
