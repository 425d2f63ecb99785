/*
 * ctl_bench.c - fusectl bench: a load on one model, and its figures
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench.h"
#include "client/bound.h"
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

/* What the load is held against. */
struct bound {
    uint64_t max_rows;  /* of a batch */
    double bytes_per_s; /* 0: not known */
    bool is_link;       /* to the GPU, each way; else memory, in and out together */
};

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

static int fill_tensor(const struct ctl *ctl, json_t *model, const char *key, uint32_t rows,
                       struct fused_tensor *ret, uint64_t *ret_bytes)
{
    const char *dtype = ctl_str(model, "dtype");

    ret->dtype = (enum fused_dtype)proto_dtype_parse(dtype, strlen(dtype));
    if (ctl_fill_shape(json_object_get(model, key), rows, &ret->rank, ret->shape) < 0 ||
        proto_tensor_size((enum proto_dtype)ret->dtype, (unsigned)ret->rank, ret->shape,
                          ret_bytes) < 0 ||
        *ret_bytes == 0 || *ret_bytes > SIZE_MAX / 4096 / BENCH_SHAPES_MAX) {
        ctl_error("%s cannot be asked for %u rows", ctl->args[0], rows);
        return CTL_FAILED;
    }
    if (ctl->place == BENCH_INLINE && *ret_bytes > FUSED_INLINE_MAX) {
        ctl_error("--inline: %s of %u rows has %" PRIu64 " bytes, and %d fit a message", key, rows,
                  *ret_bytes, FUSED_INLINE_MAX);
        return CTL_USAGE;
    }
    return CTL_DONE;
}

static int fill_shapes(const struct ctl *ctl, json_t *model, struct bench_load *load)
{
    int r = CTL_DONE;

    for (unsigned i = 0; i < ctl->n_rows && r == CTL_DONE; i++) {
        struct bench_shape *shape = &load->shapes[load->n_shapes++];

        shape->rows = ctl->rows[i];
        r = fill_tensor(ctl, model, "input", shape->rows, &shape->input, &shape->input_bytes);
        if (r == CTL_DONE)
            r = fill_tensor(ctl, model, "output", shape->rows, &shape->output,
                            &shape->output_bytes);
    }
    return r;
}

static uint64_t failed(const struct bench_result *result)
{
    uint64_t n = 0;

    for (int k = 0; k < BENCH_CODES; k++)
        n += result->n_codes[k];
    return n;
}

static double per_second(const struct bench_result *result, uint64_t n)
{
    return result->seconds > 0 ? (double)n / result->seconds : 0;
}

static double bytes_per_second(const struct bench_result *result)
{
    return per_second(result, result->input_bytes + result->output_bytes);
}

/* The part of what the link, or memory, could carry; 0 when that is not known. */
static double share(const struct bench_result *result, const struct bound *bound)
{
    uint64_t in = result->input_bytes, out = result->output_bytes;

    if (bound->bytes_per_s <= 0)
        return 0;
    /* A link carries both ways at once. */
    return per_second(result, !bound->is_link ? in + out
                              : in > out      ? in
                                              : out) /
           bound->bytes_per_s;
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

static json_t *json_rows(const struct bench_load *load)
{
    json_t *list;

    if (load->n_shapes == 1)
        return json_integer(load->shapes[0].rows);
    list = json_array();
    for (unsigned i = 0; i < load->n_shapes; i++)
        json_array_append_new(list, json_integer(load->shapes[i].rows));
    return list;
}

static json_t *json_result(const struct bench_load *load, const struct bench_result *result,
                           const struct bound *bound)
{
    json_t *errors = json_object(), *object;

    for (int k = 0; k < BENCH_CODES; k++)
        if (result->n_codes[k] > 0)
            json_object_set_new(errors, k == 0 ? "EPIPE" : fused_code_name(k),
                                json_integer((json_int_t)result->n_codes[k]));
    object = json_pack("{s:s, s:i, s:i, s:o, s:s, s:s, s:f, s:f, s:I, s:I, s:f, s:f, s:f}", "model",
                       load->model, "clients", (int)load->n_clients, "in_flight", (int)load->depth,
                       "rows", json_rows(load), "place", places[load->place], "loop",
                       load->rate <= 0 ? "closed"
                       : load->poisson ? "poisson"
                                       : "constant",
                       "rate", load->rate, "seconds", result->seconds, "requests",
                       (json_int_t)result->n_ok, "failed", (json_int_t)failed(result),
                       "requests_per_s", per_second(result, result->n_ok), "rows_per_s",
                       per_second(result, result->rows), "bytes_per_s", bytes_per_second(result));
    json_object_set_new(object, "latency_us", json_times(&result->latency_ns, 1e-3));
    json_object_set_new(object, "queue_us", json_times(&result->queue_us, 1));
    json_object_set_new(object, "run_us", json_times(&result->run_us, 1));
    json_object_set_new(object, "batch_rows", json_real(batch_rows(result)));
    json_object_set_new(
        object, "batch_fill",
        json_real(bound->max_rows ? batch_rows(result) / (double)bound->max_rows : 0));
    json_object_set_new(object, "bound", json_string(bound->is_link ? "link" : "memory"));
    json_object_set_new(object, "bound_bytes_per_s", json_real(bound->bytes_per_s));
    json_object_set_new(object, "bound_share", json_real(share(result, bound)));
    json_object_set_new(object, "errors", errors);
    json_object_set_new(object, "late", json_integer((json_int_t)result->n_late));
    json_object_set_new(object, "unsent", json_integer((json_int_t)result->n_unsent));
    json_object_set_new(object, "repeats", json_integer((json_int_t)result->n_repeats));
    if (load->verify)
        json_object_set_new(object, "wrong", json_integer((json_int_t)result->n_wrong));
    return object;
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
    if (histogram->n == 0)
        printf(" no answer");
    for (size_t k = 0; k < N_PARTS && histogram->n > 0; k++)
        printf("%s %s %s", k > 0 ? "," : "", parts[k].name,
               us_text((double)histogram_at(histogram, parts[k].part) * unit, text));
    putchar('\n');
}

static void print_head(const struct bench_load *load)
{
    char in[CTL_TEXT_MAX], out[CTL_TEXT_MAX];

    printf("%-11s %s, ", "model", load->model);
    for (unsigned i = 0; i < load->n_shapes; i++)
        printf("%s%u", i == 0 ? "" : i + 1 < load->n_shapes ? ", " : " or ", load->shapes[i].rows);
    printf(" row%s a request", load->n_shapes == 1 && load->shapes[0].rows == 1 ? "" : "s");
    if (load->n_shapes == 1)
        printf(" (%s in, %s out)", ctl_bytes(load->shapes[0].input_bytes, in),
               ctl_bytes(load->shapes[0].output_bytes, out));
    printf(", %s\n", places[load->place]);
}

static void print_errors(const struct bench_result *result)
{
    printf("%-11s", "errors");
    for (int k = 0; k < BENCH_CODES; k++)
        if (result->n_codes[k] > 0)
            printf(" %s %" PRIu64, k == 0 ? "EPIPE" : fused_code_name(k), result->n_codes[k]);
    puts(failed(result) == 0 ? " none" : "");
}

static void print_table(const struct bench_load *load, const struct bench_result *result,
                        const struct bound *bound)
{
    print_head(load);
    printf("%-11s %u client%s, %u in flight each, ", "load", load->n_clients,
           load->n_clients == 1 ? "" : "s", load->depth);
    if (load->rate > 0)
        printf("open loop of %.6g requests/s (%s)", load->rate,
               load->poisson ? "poisson" : "constant");
    else
        printf("closed loop");
    printf(", %.1f s\n", result->seconds);
    printf("%-11s %.1f requests/s, %.1f rows/s, %.3f GB/s; %" PRIu64 " requests", "served",
           per_second(result, result->n_ok), per_second(result, result->rows),
           bytes_per_second(result) * 1e-9, result->n_ok);
    if (result->n_unsent > 0)
        printf(", %" PRIu64 " more could not be sent in time", result->n_unsent);
    putchar('\n');
    print_times("latency", &result->latency_ns, 1e-3);
    print_times("waiting", &result->queue_us, 1);
    print_times("running", &result->run_us, 1);
    printf("%-11s %.1f rows on average, as requests meet them, of at most %" PRIu64 "\n", "batches",
           batch_rows(result), bound->max_rows);
    if (bound->is_link && bound->bytes_per_s > 0)
        printf("%-11s %.1f %% of the %.1f GB/s that the link to the GPU carries each way\n",
               "bound", 100 * share(result, bound), bound->bytes_per_s * 1e-9);
    else if (bound->bytes_per_s > 0) /* no bound: a result may be less work than a copy */
        printf("%-11s %.2f times the %.1f GB/s that one thread copies in memory\n", "moved",
               share(result, bound), bound->bytes_per_s * 1e-9);
    if (load->verify && result->n_wrong == 0)
        printf("%-11s all %" PRIu64 " answers have the bits of a run alone\n", "verified",
               result->n_ok);
    else if (load->verify)
        printf("%-11s %" PRIu64 " of %" PRIu64 " answers have other bits than alone\n", "verified",
               result->n_wrong, result->n_ok);
    if (result->n_repeats > 0)
        printf("%-11s %" PRIu64 " times, for the server went away\n", "repeated",
               result->n_repeats);
    print_errors(result);
}

/* A line of a ramp; before the first, what the columns are. */
static void print_step(const struct bench_load *load, const struct bench_result *result,
                       unsigned step)
{
    static const double shown[] = {0.5, 0.99, 0.999, 1};
    char text[CTL_TEXT_MAX];

    if (step == 1) {
        print_head(load);
        printf("%7s %10s %11s %11s %10s %10s %10s %10s %8s %8s\n", "CLIENTS", "RATE", "REQUESTS/S",
               "ROWS/S", "P50", "P99", "P99.9", "MAX", "UNSENT", "FAILED");
    }
    printf("%7u %10.6g %11.1f %11.1f", load->n_clients, load->rate,
           per_second(result, result->n_ok), per_second(result, result->rows));
    for (size_t k = 0; k < ARRAY_SIZE(shown); k++)
        printf(" %10s", us_text((double)histogram_at(&result->latency_ns, shown[k]) * 1e-3, text));
    printf(" %8" PRIu64 " %8" PRIu64 "\n", result->n_unsent, failed(result));
    fflush(stdout);
}

static int judge(const struct bench_result *result)
{
    if (failed(result) > 0)
        ctl_error("the first error: %s", result->text);
    if (result->n_wrong > 0)
        ctl_error("%" PRIu64 " answers have other bits than alone", result->n_wrong);
    if (result->error != 0)
        return ctl_answer(NULL, NULL, result->error, result->text);
    return failed(result) > 0 || result->n_wrong > 0 ? CTL_REFUSED : CTL_DONE;
}

/* One load, or one step of a ramp (from 1; else 0). What is for --json is appended to `steps`. */
static int run_load(const struct ctl *ctl, const struct bench_load *load, const struct bound *bound,
                    unsigned step, json_t *steps)
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
        json_array_append_new(steps, json_result(load, result, bound));
    else if (step > 0)
        print_step(load, result, step);
    else
        print_table(load, result, bound);
    r = judge(result);
    free(result);
    return r;
}

/* The load in equal steps up to the whole: of its rate, or else of its clients. A step that failed
 * is the last: what follows asks for more. */
static int run_ramp(const struct ctl *ctl, const struct bench_load *whole,
                    const struct bound *bound, json_t *steps)
{
    int r = CTL_DONE;

    for (unsigned step = 1; step <= ctl->ramp && r == CTL_DONE && !ctl_interrupted(); step++) {
        struct bench_load load = *whole;

        load.rate = whole->rate * step / ctl->ramp;
        if (whole->rate <= 0)
            load.n_clients = (whole->n_clients * step + ctl->ramp - 1) / ctl->ramp;
        r = run_load(ctl, &load, bound, step, steps);
    }
    return r;
}

static int run_all(const struct ctl *ctl, const struct bench_load *load, const struct bound *bound)
{
    json_t *steps = json_array(), *object;
    int r, written = CTL_DONE;

    r = ctl->ramp > 0 ? run_ramp(ctl, load, bound, steps) : run_load(ctl, load, bound, 0, steps);
    object = json_incref(json_array_get(steps, 0));
    if (ctl->json && ctl->ramp > 0)
        written = ctl_print_json(json_pack("{s:O}", "steps", steps));
    else if (ctl->json && object)
        written = ctl_print_json(json_incref(object));
    json_decref(object);
    json_decref(steps);
    return r == CTL_DONE ? written : r;
}

/* The links of the GPUs that the model is on, as far as the server knows them; else, where no GPU
 * computes, this machine's memory. Memory of the GPU is bound by neither. */
static void find_bound(json_t *status, const struct bench_load *load, struct bound *bound)
{
    for (unsigned i = 0; i < load->n_devices; i++) {
        json_t *device = json_array_get(json_object_get(status, "devices"), load->devices[i]);

        bound->bytes_per_s += (double)ctl_uint(device, "link_bytes_per_s");
        bound->is_link |= ctl_uint(device, "memory_total_bytes") > 0;
    }
    if (load->place == BENCH_DEVICE)
        bound->bytes_per_s = 0;
    else if (!bound->is_link)
        bound->bytes_per_s = bound_memory();
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
    struct bound bound = {0};
    int r;

    r = describe(ctl, &model, &status);
    if (r == CTL_DONE)
        r = fill_shapes(ctl, model, &load);
    if (r == CTL_DONE) {
        find_devices(model, status, &load);
        find_bound(status, &load, &bound);
        bound.max_rows = ctl_uint(model, "max_rows");
        r = run_all(ctl, &load, &bound);
    }
    json_decref(model);
    json_decref(status);
    return r;
}

static const struct argp_option options[] = {
    {"clients", CTL_KEY_CLIENTS, "N", 0, "Connections, each with a thread (default 1)", 1},
    {"rows", CTL_KEY_ROWS, "N,...", 0, "Rows of each request (default 1); of several in turn", 1},
    {"in-flight", CTL_KEY_IN_FLIGHT, "N", 0,
     "Requests of a client in flight at most (default 1; with --rate 64)", 1},
    {"rate", CTL_KEY_RATE, "R", 0, "Send so many requests a second, of all clients together", 2},
    {"constant", CTL_KEY_CONSTANT, NULL, 0, "At equal distances, not those of a Poisson process",
     2},
    {"duration", CTL_KEY_DURATION, "S", 0, "Seconds that count (default 5)", 2},
    {"ramp", CTL_KEY_RAMP, "N", 0,
     "In N steps, each that long, up to the rate, or else to all clients", 2},
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
