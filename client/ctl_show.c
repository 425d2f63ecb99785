/*
 * ctl_show.c - fusectl status, models, describe, stats
 *
 * Each prints one of the server's documents for people. A key that this version does not know is
 * not shown, one that the server does not send prints as "-", and a whole map that an older server
 * does not have is left out: --json has everything.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/fusectl.h"

/* A label and the column where its value starts. */
static void label(const char *text)
{
    printf("%-11s ", text);
}

/* What it did, where there are several to compare. */
static void print_work(json_t *device)
{
    char text[CTL_TEXT_MAX];

    label("");
    printf("index %" PRIu64 ", %" PRIu64 " in flight, %" PRIu64 " batches, %" PRIu64
           " rows so far, %s resident\n",
           ctl_uint(device, "index"), ctl_uint(device, "in_flight"), ctl_uint(device, "batches"),
           ctl_uint(device, "rows"), ctl_bytes(ctl_uint(device, "resident_bytes"), text));
}

/* "none", or how often; -1: the device does not count them. */
static void print_errors(const json_t *health, const char *key, const char *what)
{
    json_t *n = json_object_get(health, key);

    if (json_is_integer(n) && json_integer_value(n) >= 0)
        printf("%lld %s", (long long)json_integer_value(n), what);
    else
        printf("%s not counted", what);
}

/* What the driver reports, and what of that ends the server. */
static void print_health(json_t *health)
{
    uint64_t n = ctl_uint(health, "xids");

    label("");
    if (!json_is_object(health)) {
        puts("nobody watches for faults (NVML)");
        return;
    }
    fputs("memory errors: ", stdout);
    print_errors(health, "ecc_corrected", "corrected");
    fputs(", ", stdout);
    print_errors(health, "ecc_uncorrected", "uncorrected");
    printf("; faults (Xid): %" PRIu64, n);
    if (n > 0)
        printf(", the last %" PRIu64, ctl_uint(health, "last_xid"));
    printf("; the server ends at %s\n", ctl_str(health, "lost_by_xid"));
}

static void print_device(json_t *device)
{
    static const struct {
        const char *key, *unit;
    } readings[] = {{"temperature_c", "C"}, {"power_w", "W"}, {"clock_mhz", "MHz"}};
    char used[CTL_TEXT_MAX], total[CTL_TEXT_MAX];
    uint64_t memory = ctl_uint(device, "memory_total_bytes");
    const char *uuid = ctl_str(device, "uuid");

    label("device");
    printf("%s%s%s\n", ctl_str(device, "name"), uuid[0] != 0 && strcmp(uuid, "-") != 0 ? ", " : "",
           strcmp(uuid, "-") != 0 ? uuid : "");
    if (memory == 0)
        return;
    label("");
    printf("%s of %s free", ctl_bytes(ctl_uint(device, "memory_free_bytes"), used),
           ctl_bytes(memory, total));
    for (size_t i = 0; i < sizeof(readings) / sizeof(readings[0]); i++) {
        json_t *value = json_object_get(device, readings[i].key);

        if (json_is_integer(value) && json_integer_value(value) >= 0)
            printf(", %lld %s", (long long)json_integer_value(value), readings[i].unit);
    }
    printf(", driver %s\n", ctl_str(device, "driver"));
    if (json_object_get(device, "health"))
        print_health(json_object_get(device, "health"));
}

static void print_count(const json_t *object, const char *key, const char *noun)
{
    uint64_t n = ctl_uint(object, key);

    printf("%" PRIu64 " %s%s", n, noun, ctl_s(n));
}

static void print_clients(const json_t *use)
{
    char text[CTL_TEXT_MAX];

    print_count(use, "connections", "connection");
    fputs(", ", stdout);
    print_count(use, "buffers", "buffer");
    printf(" (%s)", ctl_bytes(ctl_uint(use, "buffer_bytes"), text));
}

/* What one uid has. */
static void print_use(const json_t *use)
{
    print_clients(use);
    fputs(", ", stdout);
    print_count(use, "requests", "request");
}

static void print_limits(const json_t *limits)
{
    char a[CTL_TEXT_MAX], b[CTL_TEXT_MAX], c[CTL_TEXT_MAX];

    label("limits");
    fputs("a uid: ", stdout);
    print_count(limits, "uid_connections", "connection");
    fputs(", ", stdout);
    print_count(limits, "uid_buffers", "buffer");
    printf(" (%s), ", ctl_bytes(ctl_uint(limits, "uid_buffer_bytes"), a));
    print_count(limits, "uid_requests", "request");
    putchar('\n');
    label("");
    fputs("all: ", stdout);
    print_count(limits, "total_connections", "connection");
    printf(", buffers of %s, made ahead %s, left on a device %s\n",
           ctl_bytes(ctl_uint(limits, "total_buffer_bytes"), a),
           ctl_bytes(ctl_uint(limits, "spare_buffer_bytes"), b),
           ctl_bytes(ctl_uint(limits, "device_reserve_bytes"), c));
    label("");
    printf("hello %s, batch %s, drain %s\n", ctl_us(ctl_uint(limits, "hello_timeout_ms") * 1000, a),
           ctl_us(ctl_uint(limits, "batch_timeout_ms") * 1000, b),
           ctl_us(ctl_uint(limits, "drain_timeout_ms") * 1000, c));
}

static void print_uids(json_t *uids)
{
    json_t *uid;
    size_t i;

    json_array_foreach(uids, i, uid)
    {
        label(i == 0 ? "uids" : "");
        printf("%" PRIu64 ": ", ctl_uint(uid, "uid"));
        print_use(uid);
        putchar('\n');
    }
}

static void print_status(json_t *status)
{
    json_t *totals = json_object_get(status, "totals"), *you = json_object_get(status, "you");
    json_t *devices = json_object_get(status, "devices"), *device;
    uint64_t up_s = ctl_uint(status, "uptime_s");
    char a[CTL_TEXT_MAX], b[CTL_TEXT_MAX];
    size_t i;

    label("server");
    printf("%s, %s, up %" PRIu64 ":%02" PRIu64 ":%02" PRIu64 "\n", ctl_str(status, "server"),
           ctl_str(status, "state"), up_s / 3600, up_s / 60 % 60, up_s % 60);
    label("backend");
    printf("%s", ctl_str(status, "backend"));
    if (json_is_string(json_object_get(status, "fallback")))
        printf(" (%s)", ctl_str(status, "fallback"));
    printf(", log level %s\n", ctl_str(status, "log_level"));
    json_array_foreach(devices, i, device)
    {
        print_device(device);
        if (json_array_size(devices) > 1)
            print_work(device);
    }
    label("models");
    printf("%" PRIu64 ", %s resident, %s of work space\n", ctl_uint(status, "models"),
           ctl_bytes(ctl_uint(status, "resident_bytes"), a),
           ctl_bytes(ctl_uint(status, "arena_bytes"), b));
    label("clients");
    print_clients(totals);
    putchar('\n');
    label("requests");
    printf("%" PRIu64 " accepted and not answered, ", ctl_uint(totals, "requests"));
    print_count(totals, "queued_rows", "row");
    printf(" waiting, %" PRIu64 " answered, %" PRIu64 " refused\n", ctl_uint(totals, "answered"),
           ctl_uint(totals, "refused"));
    label("you");
    printf("uid %" PRIu64 "%s, ", ctl_uint(you, "uid"),
           ctl_bool(you, "admin") ? " (administrator)" : "");
    print_use(you);
    putchar('\n');
    if (json_object_get(status, "limits"))
        print_limits(json_object_get(status, "limits"));
    print_uids(json_object_get(status, "uids"));
}

static void print_models(json_t *document)
{
    json_t *models = json_object_get(document, "models"), *model;
    int width = 4;
    size_t i;

    json_array_foreach(models, i, model)
    {
        int n = (int)strlen(ctl_str(model, "name"));

        width = n > width ? n : width;
    }
    printf("%-*s  %-8s  %-7s  %-7s  %s\n", width, "NAME", "DTYPE", "VERSION", "STATE", "PROOF");
    json_array_foreach(models, i, model)
        printf("%-*s  %-8s  %-7" PRIu64 "  %-7s  %s\n", width, ctl_str(model, "name"),
               ctl_str(model, "dtype"), ctl_uint(model, "version"), ctl_str(model, "state"),
               ctl_bool(model, "proof") ? "constant" : "-");
}

static void print_lines(const char *name, json_t *lines)
{
    json_t *line;
    size_t i;

    json_array_foreach(lines, i, line)
    {
        json_t *wrapped = json_pack("{s:O}", "line", line);

        label(i == 0 ? name : "");
        puts(ctl_str(wrapped, "line"));
        json_decref(wrapped);
    }
}

/* What batches took when the model was loaded. */
static void print_costs(json_t *costs)
{
    json_t *cost;
    size_t i;

    if (json_array_size(costs) == 0)
        return;
    label("costs");
    json_array_foreach(costs, i, cost)
    {
        json_int_t rows = json_integer_value(json_array_get(cost, 0));
        char text[CTL_TEXT_MAX];

        printf("%s%lld row%s %s", i > 0 ? ", " : "", (long long)rows, rows == 1 ? "" : "s",
               ctl_us((uint64_t)json_integer_value(json_array_get(cost, 1)), text));
    }
    putchar('\n');
}

static void print_places(json_t *devices)
{
    json_t *device;
    size_t i;

    label("devices");
    json_array_foreach(devices, i, device)
        printf("%s%lld", i > 0 ? ", " : "", (long long)json_integer_value(device));
    putchar('\n');
}

static void print_describe(json_t *model)
{
    json_t *stages = json_object_get(model, "stages"), *stage;
    char a[CTL_TEXT_MAX], b[CTL_TEXT_MAX];
    size_t i;

    label("model");
    printf("%s, version %" PRIu64 "\n", ctl_str(model, "name"), ctl_uint(model, "version"));
    label("dtype");
    printf("%s, precision %s\n", ctl_str(model, "dtype"), ctl_str(model, "precision"));
    label("input");
    puts(ctl_shape(json_object_get(model, "input"), a));
    label("output");
    puts(ctl_shape(json_object_get(model, "output"), a));
    json_array_foreach(stages, i, stage)
    {
        label(i == 0 ? "stages" : "");
        printf("%-10s %s\n", ctl_str(stage, "op"), ctl_str(stage, "text"));
    }
    label("batching");
    printf("max_rows %" PRIu64 ", max_delay_us %" PRIu64 ", queue_rows %" PRIu64 "\n",
           ctl_uint(model, "max_rows"), ctl_uint(model, "max_delay_us"),
           ctl_uint(model, "queue_rows"));
    label("backend");
    printf("%s, %s resident, %s of work space, %" PRIu64 " launch%s a batch\n",
           ctl_str(model, "backend"), ctl_bytes(ctl_uint(model, "resident_bytes"), a),
           ctl_bytes(ctl_uint(model, "arena_bytes"), b), ctl_uint(model, "launches"),
           ctl_uint(model, "launches") == 1 ? "" : "es");
    print_places(json_object_get(model, "devices"));
    print_lines("plan", json_object_get(model, "plan"));
    print_costs(json_object_get(model, "costs_us"));
    label("proof");
    puts(ctl_str(json_object_get(model, "proof"), "text"));
    label("compact");
    puts(ctl_str(model, "compact"));
}

static void print_histogram(const char *name, json_t *histogram)
{
    char p50[CTL_TEXT_MAX], p99[CTL_TEXT_MAX], max[CTL_TEXT_MAX];

    label(name);
    if (ctl_uint(histogram, "count") == 0) {
        puts("-");
        return;
    }
    printf("p50 %s, p99 %s, max %s\n", ctl_us(ctl_uint(histogram, "p50"), p50),
           ctl_us(ctl_uint(histogram, "p99"), p99), ctl_us(ctl_uint(histogram, "max"), max));
}

static void print_stats(json_t *stats)
{
    json_t *errors = json_object_get(stats, "errors"), *count;
    const char *name;
    uint64_t batches = ctl_uint(stats, "batches"), rows = ctl_uint(stats, "rows");

    label("model");
    puts(json_is_string(json_object_get(stats, "model")) ? ctl_str(stats, "model") : "all");
    label("requests");
    printf("%" PRIu64 "\n", ctl_uint(stats, "requests"));
    label("rows");
    printf("%" PRIu64 " in %" PRIu64 " batch%s", rows, batches, batches == 1 ? "" : "es");
    if (batches > 0)
        printf(", %.1f a batch, at most %" PRIu64, (double)rows / (double)batches,
               ctl_uint(stats, "batch_rows_max"));
    putchar('\n');
    print_histogram("waiting", json_object_get(stats, "queue_us"));
    print_histogram("running", json_object_get(stats, "run_us"));
    label("errors");
    json_object_foreach(errors, name, count)
    {
        /* A name of the error list: letters only, unless the server is none of ours. */
        if (strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == strlen(name))
            printf("%s %lld  ", name, (long long)json_integer_value(count));
    }
    puts(json_object_size(errors) == 0 ? "none" : "");
}

/* Asks, and prints the answer one way or the other. */
static int show(struct ctl *ctl, int (*ask)(struct fused *f, const char *model, char **ret_json),
                void (*print)(json_t *document))
{
    struct fused *f;
    json_t *document;
    char *json = NULL;
    int r;

    r = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (r != CTL_DONE)
        return r;
    r = ctl_answer(ctl, f, ask(f, ctl->n_args > 0 ? ctl->args[0] : NULL, &json), NULL);
    if (r == CTL_DONE)
        r = ctl_document(ctl, json, &document);
    if (r == CTL_DONE && document != NULL) {
        print(document);
        json_decref(document);
    }
    fused_close(f);
    return r;
}

static int ask_status(struct fused *f, const char *model, char **ret_json)
{
    (void)model;
    return fused_status(f, ret_json);
}

/* The library's list of all pages is an array; a document is an object. */
static int ask_models(struct fused *f, const char *model, char **ret_json)
{
    char *list = NULL, *json;
    int r;

    (void)model;
    r = fused_models(f, &list);
    if (r != 0)
        return r;
    r = asprintf(&json, "{\"models\":%s}", list) < 0 ? -ENOMEM : 0;
    free(list);
    if (r == 0)
        *ret_json = json;
    return r;
}

static int run_status(struct ctl *ctl)
{
    return show(ctl, ask_status, print_status);
}

static int run_models(struct ctl *ctl)
{
    return show(ctl, ask_models, print_models);
}

static int run_describe(struct ctl *ctl)
{
    return show(ctl, fused_describe, print_describe);
}

static int run_stats(struct ctl *ctl)
{
    return show(ctl, fused_stats, print_stats);
}

const struct command ctl_status = {
    .name = "status",
    .args = "",
    .summary = "Show the server, its devices, its clients and the limits in force",
    .run = run_status,
};

const struct command ctl_models = {
    .name = "models",
    .args = "",
    .summary = "List the models",
    .text = "Versions are counted over all models: each load takes the next number.",
    .run = run_models,
};

const struct command ctl_describe = {
    .name = "describe",
    .args = "MODEL",
    .summary = "Show a model: shapes, stages, plan, proof",
    .n_min = 1,
    .n_max = 1,
    .run = run_describe,
};

const struct command ctl_stats = {
    .name = "stats",
    .args = "[MODEL]",
    .summary = "Show counts and times of a model, or of all",
    .n_max = 1,
    .run = run_stats,
};
