/*
 * ctl_bench.c - fusectl bench: a load on one model, and its figures
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench.h"
#include "client/fusectl.h"
#include "proto/base.h"
#include "proto/proto.h"

#define SECONDS          5.0
#define DEPTH_OPEN       64 /* in flight at most, where --in-flight does not say */
#define WARM_SECONDS_MAX 1.0
#define N_PARTS          ARRAY_SIZE(parts)

static const struct {
    const char *name;
    double part;
} parts[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99.9", 0.999}, {"max", 1.0}};

static const char *const places[] = {
    [BENCH_BUFFERS] = "buffers", [BENCH_INLINE] = "inline", [BENCH_DEVICE] = "device"};

static bool say(double part, uint64_t n)
{
    ctl_progress("running: %d %%, %" PRIu64 " answers", (int)(100 * part), n);
    return ctl_interrupted();
}

static int understand(char *json, json_t **ret)
{
    *ret = json_loads(json, JSON_REJECT_DUPLICATES, NULL);
    free(json);
    if (*ret == NULL) {
        ctl_error("the server's description of the model is not understood");
        return CTL_NO_SERVER;
    }
    return CTL_DONE;
}

/* The model, and the state of the server. */
static int describe(const struct ctl *ctl, json_t **ret, json_t **ret_status)
{
    char *model = NULL, *status = NULL;
    struct fused *f;
    int r;

    r = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (r != CTL_DONE)
        return r;
    r = ctl_answer(ctl, f, fused_describe(f, ctl->args[0], &model), NULL);
    if (r == CTL_DONE)
        r = ctl_answer(ctl, f, fused_status(f, &status), NULL);
    fused_close(f);
    if (r == CTL_DONE)
        r = understand(take_ptr(model), ret);
    if (r == CTL_DONE)
        r = understand(take_ptr(status), ret_status);
    free(model);
    free(status);
    return r;
}

/* Those of the server's devices that the model is on: the server names them by other numbers. */
static void find_devices(json_t *model, json_t *status, struct bench_load *load)
{
    json_t *on = json_object_get(model, "devices"), *place, *device;
    size_t i, k;

    json_array_foreach(json_object_get(status, "devices"), i, device)
    {
        json_array_foreach(on, k, place)
        {
            if (json_equal(place, json_object_get(device, "index")) &&
                load->n_devices < BENCH_DEVICES_MAX)
                load->devices[load->n_devices++] = (unsigned)i;
        }
    }
}

static int fill_tensor(const struct ctl *ctl, json_t *model, const char *key,
                       struct fused_tensor *ret, uint64_t *ret_bytes)
{
    const char *dtype = ctl_str(model, "dtype");

    ret->dtype = (enum fused_dtype)proto_dtype_parse(dtype, strlen(dtype));
    if (ctl_fill_shape(json_object_get(model, key), ctl->rows, &ret->rank, ret->shape) < 0 ||
        proto_tensor_size((enum proto_dtype)ret->dtype, (unsigned)ret->rank, ret->shape,
                          ret_bytes) < 0 ||
        *ret_bytes == 0 || *ret_bytes > SIZE_MAX / 4096) {
        ctl_error("%s cannot be asked for %u rows", ctl->args[0], ctl->rows);
        return CTL_FAILED;
    }
    if (ctl->place == BENCH_INLINE && *ret_bytes > FUSED_INLINE_MAX) {
        ctl_error("--inline: %s of %u rows has %" PRIu64 " bytes, and %d fit a message", key,
                  ctl->rows, *ret_bytes, FUSED_INLINE_MAX);
        return CTL_USAGE;
    }
    return CTL_DONE;
}

static uint64_t failed(const struct bench_result *result)
{
    uint64_t n = 0;

    for (int k = 0; k < BENCH_CODES; k++)
        n += result->n_codes[k];
    return n;
}

static double per_second(const struct bench_result *result, double each)
{
    return result->seconds > 0 ? (double)result->n_ok * each / result->seconds : 0;
}

static double batch_rows(const struct bench_result *result)
{
    return result->n_ok > 0 ? (double)result->batch_rows / (double)result->n_ok : 0;
}

static json_t *json_times(const struct bench_histogram *histogram, double unit)
{
    json_t *object = json_object();

    for (size_t k = 0; k < N_PARTS; k++)
        json_object_set_new(object, parts[k].name,
                            json_real((double)histogram_at(histogram, parts[k].part) * unit));
    return object;
}

static int print_json(const struct ctl *ctl, const struct bench_load *load,
                      const struct bench_result *result, uint64_t max_rows)
{
    double bytes = (double)(load->input_bytes + load->output_bytes);
    json_t *errors = json_object(), *object;

    for (int k = 0; k < BENCH_CODES; k++)
        if (result->n_codes[k] > 0)
            json_object_set_new(errors, k == 0 ? "EPIPE" : fused_code_name(k),
                                json_integer((json_int_t)result->n_codes[k]));
    object = json_pack("{s:s, s:i, s:i, s:i, s:s, s:s, s:f, s:f, s:I, s:I, s:f, s:f, s:f}", "model",
                       load->model, "clients", (int)load->n_clients, "in_flight", (int)load->depth,
                       "rows", (int)ctl->rows, "place", places[load->place], "loop",
                       load->rate <= 0 ? "closed"
                       : load->poisson ? "poisson"
                                       : "constant",
                       "rate", load->rate, "seconds", result->seconds, "requests",
                       (json_int_t)result->n_ok, "failed", (json_int_t)failed(result),
                       "requests_per_s", per_second(result, 1), "rows_per_s",
                       per_second(result, ctl->rows), "bytes_per_s", per_second(result, bytes));
    json_object_set_new(object, "latency_us", json_times(&result->latency_ns, 1e-3));
    json_object_set_new(object, "queue_us", json_times(&result->queue_us, 1));
    json_object_set_new(object, "run_us", json_times(&result->run_us, 1));
    json_object_set_new(object, "batch_rows", json_real(batch_rows(result)));
    json_object_set_new(object, "batch_fill",
                        json_real(max_rows ? batch_rows(result) / (double)max_rows : 0));
    json_object_set_new(object, "errors", errors);
    json_object_set_new(object, "late", json_integer((json_int_t)result->n_late));
    json_object_set_new(object, "unsent", json_integer((json_int_t)result->n_unsent));
    json_object_set_new(object, "repeats", json_integer((json_int_t)result->n_repeats));
    if (load->verify)
        json_object_set_new(object, "wrong", json_integer((json_int_t)result->n_wrong));
    return ctl_print_json(object);
}

static const char *us_text(double us, char text[CTL_TEXT_MAX])
{
    if (us < 1000)
        snprintf(text, CTL_TEXT_MAX, "%.1f us", us);
    else
        ctl_us((uint64_t)us, text);
    return text;
}

static void print_times(const char *name, const struct bench_histogram *histogram, double unit)
{
    char text[CTL_TEXT_MAX];

    printf("%-11s", name);
    for (size_t k = 0; k < N_PARTS; k++)
        printf("%s %s %s", k > 0 ? "," : "", parts[k].name,
               us_text((double)histogram_at(histogram, parts[k].part) * unit, text));
    putchar('\n');
}

static void print_table(const struct ctl *ctl, const struct bench_load *load,
                        const struct bench_result *result, uint64_t max_rows)
{
    char in[CTL_TEXT_MAX], out[CTL_TEXT_MAX];
    double bytes = (double)(load->input_bytes + load->output_bytes);

    printf("%-11s %s, %u row%s a request (%s in, %s out), %s\n", "model", load->model, ctl->rows,
           ctl->rows == 1 ? "" : "s", ctl_bytes(load->input_bytes, in),
           ctl_bytes(load->output_bytes, out), places[load->place]);
    printf("%-11s %u client%s, %u in flight each, ", "load", load->n_clients,
           load->n_clients == 1 ? "" : "s", load->depth);
    if (load->rate > 0)
        printf("open loop of %.6g requests/s (%s)", load->rate,
               load->poisson ? "poisson" : "constant");
    else
        printf("closed loop");
    printf(", %.1f s\n", result->seconds);
    printf("%-11s %.1f requests/s, %.1f rows/s, %.3f GB/s; %" PRIu64 " requests", "served",
           per_second(result, 1), per_second(result, ctl->rows), per_second(result, bytes) * 1e-9,
           result->n_ok);
    if (result->n_unsent > 0)
        printf(", %" PRIu64 " more could not be sent in time", result->n_unsent);
    putchar('\n');
    print_times("latency", &result->latency_ns, 1e-3);
    print_times("waiting", &result->queue_us, 1);
    print_times("running", &result->run_us, 1);
    printf("%-11s %.1f rows of the %" PRIu64 " that fit one, in the mean of all requests\n",
           "batches", batch_rows(result), max_rows);
    if (load->verify)
        printf("%-11s %" PRIu64 " answers with other bits than alone\n", "verified",
               result->n_wrong);
    if (result->n_repeats > 0)
        printf("%-11s %" PRIu64 " times, for the server went away\n", "repeated",
               result->n_repeats);
    printf("%-11s", "errors");
    for (int k = 0; k < BENCH_CODES; k++)
        if (result->n_codes[k] > 0)
            printf(" %s %" PRIu64, k == 0 ? "EPIPE" : fused_code_name(k), result->n_codes[k]);
    puts(failed(result) == 0 ? " none" : "");
}

static int run_load(const struct ctl *ctl, const struct bench_load *load, uint64_t max_rows)
{
    struct bench_result *result = NULL;
    char text[256];
    int r;

    ctl_catch_interrupts(true);
    r = bench_run(load, say, &result, text);
    ctl_catch_interrupts(false);
    ctl_progress("%s", "");
    if (r != 0)
        return ctl_answer(ctl, NULL, r, text);
    if (ctl->json)
        r = print_json(ctl, load, result, max_rows);
    else
        print_table(ctl, load, result, max_rows);
    if (result->error != 0 && r == CTL_DONE)
        r = ctl_answer(ctl, NULL, result->error, result->text);
    else if (failed(result) > 0 || result->n_wrong > 0)
        r = CTL_REFUSED;
    if (failed(result) > 0)
        ctl_error("the first error: %s", result->text);
    if (result->n_wrong > 0)
        ctl_error("%" PRIu64 " answers have other bits than alone", result->n_wrong);
    free(result);
    return r;
}

static int run_bench(struct ctl *ctl)
{
    double seconds = ctl->seconds > 0 ? ctl->seconds : SECONDS;
    double warm = seconds / 10 < WARM_SECONDS_MAX ? seconds / 10 : WARM_SECONDS_MAX;
    struct bench_load load = {
        .socket = ctl->socket,
        .model = ctl->args[0],
        .n_clients = ctl->clients,
        .depth = ctl->in_flight > 0 ? ctl->in_flight
                 : ctl->rate > 0    ? DEPTH_OPEN
                                    : 1,
        .place = (enum bench_place)ctl->place,
        .rate = ctl->rate,
        .poisson = ctl->rate > 0 && !ctl->constant,
        .verify = ctl->verify,
        .reconnect = ctl->reconnect,
        .warm_ns = (uint64_t)(warm * 1e9),
        .run_ns = (uint64_t)(seconds * 1e9),
    };
    json_t *model = NULL, *status = NULL;
    int r;

    r = describe(ctl, &model, &status);
    if (r == CTL_DONE)
        r = fill_tensor(ctl, model, "input", &load.input, &load.input_bytes);
    if (r == CTL_DONE)
        r = fill_tensor(ctl, model, "output", &load.output, &load.output_bytes);
    if (r == CTL_DONE) {
        find_devices(model, status, &load);
        r = run_load(ctl, &load, ctl_uint(model, "max_rows"));
    }
    json_decref(model);
    json_decref(status);
    return r;
}

static const struct argp_option options[] = {
    {"clients", CTL_KEY_CLIENTS, "N", 0, "Connections, each with a thread (default 1)", 1},
    {"rows", CTL_KEY_ROWS, "N", 0, "Rows of each request (default 1)", 1},
    {"in-flight", CTL_KEY_IN_FLIGHT, "N", 0,
     "Requests of a client in flight at most (default 1; with --rate 64)", 1},
    {"rate", CTL_KEY_RATE, "R", 0, "Send so many requests a second, of all clients together", 2},
    {"constant", CTL_KEY_CONSTANT, NULL, 0, "At equal distances, not those of a Poisson process",
     2},
    {"duration", CTL_KEY_DURATION, "S", 0, "Seconds that count (default 5)", 2},
    {"buffers", CTL_KEY_BUFFERS, NULL, 0, "Tensors in shared memory (default)", 3},
    {"inline", CTL_KEY_INLINE, NULL, 0, "Tensors in the messages", 3},
    {"device", CTL_KEY_DEVICE, NULL, 0,
     "Tensors in the GPU's memory (inputs are zeros), of several GPUs in turn", 3},
    {"verify", CTL_KEY_VERIFY, NULL, 0, "Compare each answer with that of its input alone", 4},
    {"reconnect", CTL_KEY_RECONNECT, NULL, 0, "Come back when the server restarts", 4},
    {0},
};

const struct command ctl_bench = {
    .name = "bench",
    .args = "MODEL",
    .summary = "Put a load on a model and measure",
    .text = "Without --rate each client sends its next request when it has an answer. With it, "
            "requests have instants, and latency counts from there, however late they were sent.",
    .n_min = 1,
    .n_max = 1,
    .options = options,
    .run = run_bench,
};
