/*
 * ctl_watch.c - fusectl top and metrics: the server's status and every model's counts
 *
 * Both gather the same documents. top shows what changed since the last look, so that rates and
 * mean times are those of the moment. metrics prints Prometheus's text format once, for its
 * textfile collector, or answers scrapes on a socket of this host: the server itself listens to no
 * network, and a scrape may not disturb it, so one is answered at a time, each with a connection of
 * its own.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>

#include "client/fusectl.h"
#include "proto/base.h"

#define INTERVAL_S     1.0
#define NAME_WIDTH     34
#define REQUEST_MAX    4096
#define REQUEST_WAIT_S 2
#define BOUND_FIRST    3  /* of histograms: 2^3 - 1 us */
#define BOUND_LAST     26 /* 67 s */

/* ---- gathering ---- */

/* What a library call answered as a document; NULL after printing why there is none. */
static json_t *parse(const struct ctl *ctl, const struct fused *f, int r, char *json, int *ret)
{
    json_t *document = NULL;

    *ret = ctl_answer(ctl, f, r, NULL);
    if (*ret == CTL_DONE)
        document = json_loads(json, JSON_REJECT_DUPLICATES, NULL);
    if (*ret == CTL_DONE && document == NULL) {
        ctl_error("the server's answer is not understood");
        *ret = CTL_NO_SERVER;
    }
    free(json);
    return document;
}

/* {"status": ..., "models": [stats of each]} */
static int gather(const struct ctl *ctl, struct fused *f, json_t **ret_all)
{
    json_t *status, *models = NULL, *model, *all = json_array();
    char *json = NULL;
    size_t i;
    int r;

    r = fused_status(f, &json);
    status = parse(ctl, f, r, json, &r);
    if (status != NULL) {
        json = NULL;
        r = fused_models(f, &json);
        models = parse(ctl, f, r, json, &r);
    }
    json_array_foreach(models, i, model)
    {
        json_t *stats;
        int code;

        json = NULL;
        code = fused_stats(f, ctl_str(model, "name"), &json);
        if (code == FUSED_NOT_FOUND)
            continue; /* unloaded meanwhile */
        stats = parse(ctl, f, code, json, &r);
        if (stats == NULL)
            break;
        json_array_append_new(all, stats);
    }
    json_decref(models);
    if (r == CTL_DONE)
        *ret_all = json_pack("{s:O, s:O}", "status", status, "models", all);
    json_decref(status);
    json_decref(all);
    return r;
}

/* ---- top ---- */

static uint64_t sum_errors(const json_t *stats)
{
    json_t *errors = json_object_get(stats, "errors"), *count;
    const char *name;
    uint64_t n = 0;

    json_object_foreach(errors, name, count) n += (uint64_t)json_integer_value(count);
    return n;
}

/* The model's counts at the last look; what is not there counts from 0. */
static const json_t *find_model(const json_t *all, const char *name)
{
    json_t *models = json_object_get(all, "models"), *stats;
    size_t i;

    json_array_foreach(models, i, stats)
    {
        const char *other = json_string_value(json_object_get(stats, "model"));

        if (other != NULL && strcmp(other, name) == 0)
            return stats;
    }
    return NULL;
}

static double change(const json_t *now, const json_t *before, const char *key)
{
    uint64_t a = ctl_uint(now, key), b = ctl_uint(before, key);

    return (double)(a >= b ? a - b : a); /* a server that restarted counts from 0 */
}

/* Mean time of what ended since the last look. */
static const char *mean(const json_t *now, const json_t *before, const char *key,
                        char text[CTL_TEXT_MAX])
{
    const json_t *a = json_object_get(now, key), *b = json_object_get(before, key);
    double n = change(a, b, "count");

    return n > 0 ? ctl_us((uint64_t)(change(a, b, "sum") / n), text) : "-";
}

static void print_model(json_t *stats, const json_t *before, double seconds)
{
    double batches = change(stats, before, "batches"), rows = change(stats, before, "rows");
    uint64_t errors = sum_errors(stats), errors_before = sum_errors(before);
    char wait[CTL_TEXT_MAX], run[CTL_TEXT_MAX];

    printf("%-*.*s %10.1f %11.1f %10.1f %9.1f %10s %10s %8.1f\n", NAME_WIDTH, NAME_WIDTH,
           ctl_str(stats, "model"), change(stats, before, "requests") / seconds, rows / seconds,
           batches / seconds, batches > 0 ? rows / batches : 0,
           mean(stats, before, "queue_us", wait), mean(stats, before, "run_us", run),
           (double)(errors >= errors_before ? errors - errors_before : errors) / seconds);
}

static void print_top(json_t *all, const json_t *before, double seconds, bool clear)
{
    json_t *status = json_object_get(all, "status"), *totals = json_object_get(status, "totals");
    json_t *models = json_object_get(all, "models"), *stats;
    uint64_t n_connections = ctl_uint(totals, "connections"),
             n_buffers = ctl_uint(totals, "buffers");
    uint64_t n_requests = ctl_uint(totals, "requests"), n_rows = ctl_uint(totals, "queued_rows");
    uint64_t up_s = ctl_uint(status, "uptime_s");
    char text[CTL_TEXT_MAX];
    size_t i;

    if (clear)
        fputs("\033[H\033[2J", stdout);
    printf("%s, %s, backend %s, up %" PRIu64 ":%02" PRIu64 ":%02" PRIu64 "\n",
           ctl_str(status, "server"), ctl_str(status, "state"), ctl_str(status, "backend"),
           up_s / 3600, up_s / 60 % 60, up_s % 60);
    printf("%" PRIu64 " connection%s, %" PRIu64 " buffer%s (%s), %" PRIu64
           " request%s accepted and not answered, %" PRIu64 " row%s waiting\n\n",
           n_connections, ctl_s(n_connections), n_buffers, ctl_s(n_buffers),
           ctl_bytes(ctl_uint(totals, "buffer_bytes"), text), n_requests, ctl_s(n_requests), n_rows,
           ctl_s(n_rows));
    printf("%-*s %10s %11s %10s %9s %10s %10s %8s\n", NAME_WIDTH, "MODEL", "REQUESTS/S", "ROWS/S",
           "BATCHES/S", "ROWS EACH", "WAITING", "RUNNING", "ERRORS/S");
    json_array_foreach(models, i, stats)
        print_model(stats, find_model(before, ctl_str(stats, "model")), seconds);
    fflush(stdout);
}

static void sleep_s(double seconds)
{
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};

    nanosleep(&pause, NULL); /* an interrupt ends it */
}

/* On a terminal until interrupted; elsewhere one interval. */
static int run_top(struct ctl *ctl)
{
    double seconds = ctl->seconds > 0 ? ctl->seconds : INTERVAL_S;
    bool refresh = isatty(STDOUT_FILENO) && !ctl->json;
    json_t *before = NULL, *now = NULL;
    struct fused *f;
    int r;

    r = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (r != CTL_DONE)
        return r;
    ctl_catch_interrupts(true);
    r = gather(ctl, f, &before);
    do {
        if (r == CTL_DONE)
            sleep_s(seconds);
        if (r != CTL_DONE || ctl_interrupted())
            break;
        r = gather(ctl, f, &now);
        if (r == CTL_DONE && ctl->json)
            r = ctl_print_json(
                json_pack("{s:f, s:O, s:O}", "seconds", seconds, "before", before, "now", now));
        else if (r == CTL_DONE)
            print_top(now, before, seconds, refresh);
        json_decref(before);
        before = take_ptr(now);
    } while (r == CTL_DONE && refresh && !ferror(stdout));
    ctl_catch_interrupts(false);
    json_decref(before);
    fused_close(f);
    return r;
}

/* ---- metrics ---- */

/* A label's value: quotes, backslashes and line ends are escaped. */
static void put_label(FILE *out, const char *s)
{
    fputc('"', out);
    for (; *s != 0; s++) {
        if (*s == '"' || *s == '\\')
            fputc('\\', out);
        if (*s == '\n')
            fputs("\\n", out);
        else
            fputc(*s, out);
    }
    fputc('"', out);
}

static void head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void put_devices(FILE *out, json_t *status)
{
    static const struct {
        const char *name, *type, *in, *key, *help;
    } rows[] = {
        {"fused_device_memory_free_bytes", "gauge", NULL, "memory_free_bytes",
         "Free memory of the device."},
        {"fused_device_batches_in_flight", "gauge", NULL, "in_flight",
         "Batches that it has to do."},
        {"fused_device_batches_total", "counter", NULL, "batches", "Batches that it has begun."},
        {"fused_device_rows_total", "counter", NULL, "rows", "Rows that it has computed."},
        {"fused_device_ecc_corrected_total", "counter", "health", "ecc_corrected",
         "Errors of its memory that were corrected, since the driver was loaded."},
        {"fused_device_ecc_uncorrected_total", "counter", "health", "ecc_uncorrected",
         "Errors of its memory that were not."},
        {"fused_device_xids_total", "counter", "health", "xids",
         "Faults that the driver reported, of any process on it."},
        {"fused_device_last_xid", "gauge", "health", "last_xid", "The last of them; 0: none."},
    };
    json_t *devices = json_object_get(status, "devices"), *device;
    size_t k;

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        bool has_head = false;

        json_array_foreach(devices, k, device)
        {
            json_t *from = rows[i].in ? json_object_get(device, rows[i].in) : device;
            json_int_t value = json_integer_value(json_object_get(from, rows[i].key));

            if (i == 0 && ctl_uint(device, "memory_total_bytes") == 0)
                continue; /* a device without memory of its own */
            if (!from || json_is_null(from) || value < 0)
                continue; /* nobody watches, or it does not count that */
            if (!has_head)
                head(out, rows[i].name, rows[i].type, rows[i].help);
            has_head = true;
            fprintf(out, "%s{index=\"%" PRIu64 "\",device=", rows[i].name,
                    ctl_uint(device, "index"));
            put_label(out, ctl_str(device, "name"));
            fputs(",backend=", out);
            put_label(out, ctl_str(status, "backend"));
            fprintf(out, "} %" JSON_INTEGER_FORMAT "\n", value);
        }
    }
}

static void put_status(FILE *out, json_t *status)
{
    static const struct {
        const char *name, *type, *in, *key, *help;
    } rows[] = {
        {"fused_uptime_seconds", "gauge", NULL, "uptime_s", "Since the server started."},
        {"fused_models", "gauge", NULL, "models", "Models served."},
        {"fused_resident_bytes", "gauge", NULL, "resident_bytes", "Weights on the device."},
        {"fused_arena_bytes", "gauge", NULL, "arena_bytes", "Work space on the device."},
        {"fused_connections", "gauge", "totals", "connections", "Clients connected."},
        {"fused_buffers", "gauge", "totals", "buffers", "Buffers of all clients."},
        {"fused_buffer_bytes", "gauge", "totals", "buffer_bytes", "Bytes of those."},
        {"fused_requests_in_flight", "gauge", "totals", "requests", "Accepted, not answered."},
        {"fused_queued_rows", "gauge", "totals", "queued_rows", "Rows that wait."},
        {"fused_answered_total", "counter", "totals", "answered", "Inferences answered."},
        {"fused_refused_total", "counter", "totals", "refused", "Inferences ended by an error."},
    };
    size_t i;

    head(out, "fused_ready", "gauge", "1: a request would be taken now.");
    fprintf(out, "fused_ready %d\n", strcmp(ctl_str(status, "state"), "ready") == 0);
    for (i = 0; i < ARRAY_SIZE(rows); i++) {
        json_t *from = rows[i].in != NULL ? json_object_get(status, rows[i].in) : status;

        head(out, rows[i].name, rows[i].type, rows[i].help);
        fprintf(out, "%s %" PRIu64 "\n", rows[i].name, ctl_uint(from, rows[i].key));
    }
    put_devices(out, status);
}

/* name{model="...",key="value"} */
static void put_sample(FILE *out, const char *name, json_t *stats, const char *key,
                       const char *value)
{
    fprintf(out, "%s{model=", name);
    put_label(out, ctl_str(stats, "model"));
    if (key != NULL) {
        fprintf(out, ",%s=", key);
        put_label(out, value);
    }
    fputs("} ", out);
}

static void put_counts(FILE *out, json_t *models)
{
    static const struct {
        const char *name, *key, *help;
    } rows[] = {
        {"fused_model_requests_total", "requests", "Requests received, refused ones included."},
        {"fused_model_rows_total", "rows", "Rows of the requests that have a result."},
        {"fused_model_batches_total", "batches", "Batches that ran."},
    };
    static const struct {
        const char *name, *key, *label, *help;
    } lists[] = {
        {"fused_model_errors_total", "errors", "code", "Requests ended by that error."},
        {"fused_model_batches_closed_total", "closed", "reason", "Why batches took no more."},
    };
    json_t *stats, *count;
    const char *which;
    size_t i;

    for (size_t k = 0; k < ARRAY_SIZE(rows); k++) {
        head(out, rows[k].name, "counter", rows[k].help);
        json_array_foreach(models, i, stats)
        {
            put_sample(out, rows[k].name, stats, NULL, NULL);
            fprintf(out, "%" PRIu64 "\n", ctl_uint(stats, rows[k].key));
        }
    }
    for (size_t k = 0; k < ARRAY_SIZE(lists); k++) {
        head(out, lists[k].name, "counter", lists[k].help);
        json_array_foreach(models, i, stats)
        {
            json_object_foreach(json_object_get(stats, lists[k].key), which, count)
            {
                put_sample(out, lists[k].name, stats, lists[k].label, which);
                fprintf(out, "%" JSON_INTEGER_FORMAT "\n", json_integer_value(count));
            }
        }
    }
}

/* How many of the histogram are not above that. */
static uint64_t count_below(const json_t *buckets, json_int_t bound_us)
{
    const json_t *bucket;
    uint64_t n = 0;
    size_t k;

    json_array_foreach(buckets, k, bucket)
    {
        if (json_integer_value(json_array_get(bucket, 0)) <= bound_us)
            n += (uint64_t)json_integer_value(json_array_get(bucket, 1));
    }
    return n;
}

/*
 * The server counts by upper bound in microseconds, and tells those with a count. Prometheus wants
 * sums of all below, at bounds that are always the same: 2^n - 1 us, which are bounds of the
 * server's, too.
 */
static void put_times(FILE *out, json_t *models, const char *key, const char *name,
                      const char *help)
{
    json_t *stats;
    char full[80], bound[40];
    size_t i;

    head(out, name, "histogram", help);
    json_array_foreach(models, i, stats)
    {
        json_t *histogram = json_object_get(stats, key);

        snprintf(full, sizeof(full), "%s_bucket", name);
        for (unsigned k = BOUND_FIRST; k <= BOUND_LAST; k++) {
            json_int_t us = ((json_int_t)1 << k) - 1;

            snprintf(bound, sizeof(bound), "%.9g", (double)us * 1e-6);
            put_sample(out, full, stats, "le", bound);
            fprintf(out, "%" PRIu64 "\n", count_below(json_object_get(histogram, "buckets"), us));
        }
        put_sample(out, full, stats, "le", "+Inf");
        fprintf(out, "%" PRIu64 "\n", ctl_uint(histogram, "count"));
        snprintf(full, sizeof(full), "%s_sum", name);
        put_sample(out, full, stats, NULL, NULL);
        fprintf(out, "%.9g\n", (double)ctl_uint(histogram, "sum") * 1e-6);
        snprintf(full, sizeof(full), "%s_count", name);
        put_sample(out, full, stats, NULL, NULL);
        fprintf(out, "%" PRIu64 "\n", ctl_uint(histogram, "count"));
    }
}

static void put_metrics(FILE *out, json_t *all)
{
    json_t *models = json_object_get(all, "models");

    head(out, "fused_up", "gauge", "1: the server answers.");
    fprintf(out, "fused_up %d\n", all != NULL);
    if (all == NULL)
        return;
    put_status(out, json_object_get(all, "status"));
    put_counts(out, models);
    put_times(out, models, "queue_us", "fused_model_queue_seconds", "Time that requests waited.");
    put_times(out, models, "run_us", "fused_model_run_seconds", "Time that their batch ran.");
}

/* The text, to be freed; without a server it says so. */
static char *metrics_text(const struct ctl *ctl, int *ret)
{
    json_t *all = NULL;
    struct fused *f = NULL;
    char *text = NULL;
    size_t size = 0;
    FILE *out;

    *ret = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (*ret == CTL_DONE)
        *ret = gather(ctl, f, &all);
    fused_close(f);
    out = open_memstream(&text, &size);
    if (out != NULL) {
        put_metrics(out, all);
        if (fclose(out) != 0)
            free(take_ptr(text));
    }
    json_decref(all);
    return text;
}

/* ---- answering scrapes ---- */

/* Reads a request's head and answers it. A peer that is slow or sends nonsense is left. */
static void answer_scrape(const struct ctl *ctl, int fd)
{
    struct timeval wait = {.tv_sec = REQUEST_WAIT_S};
    char request[REQUEST_MAX + 1] = "";
    const char *status = "404 Not Found";
    _cleanup_free_ char *text = NULL;
    size_t n = 0;
    ssize_t got;
    int ignored;

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
    while (strstr(request, "\r\n\r\n") == NULL && n < REQUEST_MAX) {
        got = recv(fd, request + n, REQUEST_MAX - n, 0);
        if (got <= 0)
            return;
        n += (size_t)got;
        request[n] = 0;
    }
    if (strncmp(request, "GET /metrics ", 13) == 0) {
        text = metrics_text(ctl, &ignored);
        status = text != NULL ? "200 OK" : "500 Internal Server Error";
    }
    dprintf(fd,
            "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %zu\r\n"
            "Connection: close\r\n\r\n%s",
            status, text != NULL ? strlen(text) : 0, text != NULL ? text : "");
}

/* "unix:PATH" or "127.0.0.1:PORT"; nothing that another host could reach. */
static int open_listener(const char *address)
{
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    struct sockaddr_in loopback = {.sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    bool is_unix = strncmp(address, "unix:", 5) == 0;
    _cleanup_close_ int fd = -1;
    unsigned long port = 0;
    char *end;

    if (is_unix && strlen(address + 5) > 0 && strlen(address + 5) < sizeof(local.sun_path))
        memcpy(local.sun_path, address + 5, strlen(address + 5) + 1);
    else if (is_unix || strncmp(address, "127.0.0.1:", 10) != 0 || address[10] < '0' ||
             address[10] > '9' || (port = strtoul(address + 10, &end, 10)) == 0 || *end != 0 ||
             port > UINT16_MAX)
        return -EINVAL;
    loopback.sin_port = htons((uint16_t)port);
    fd = socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    if (!is_unix)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(fd, is_unix ? (struct sockaddr *)&local : (struct sockaddr *)&loopback,
             is_unix ? sizeof(local) : sizeof(loopback)) < 0 ||
        listen(fd, 8) < 0)
        return -errno;
    return take_fd(&fd);
}

static int serve_metrics(const struct ctl *ctl)
{
    int listener = open_listener(ctl->listen);

    if (listener == -EINVAL) {
        ctl_error("--listen: '%s' is neither unix:PATH nor 127.0.0.1:PORT", ctl->listen);
        return CTL_USAGE;
    }
    if (listener < 0) {
        ctl_error("--listen: %s: %s", ctl->listen, strerror(-listener));
        return CTL_FAILED;
    }
    ctl_catch_interrupts(true);
    while (!ctl_interrupted()) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

        if (fd >= 0)
            answer_scrape(ctl, fd);
        else if (errno != EINTR)
            sleep_s(0.1); /* out of descriptors, perhaps */
        close_fd(fd);
    }
    close_fd(listener);
    if (strncmp(ctl->listen, "unix:", 5) == 0)
        unlink(ctl->listen + 5);
    return CTL_DONE;
}

static int run_metrics(struct ctl *ctl)
{
    char *text;
    int r;

    if (ctl->listen != NULL)
        return serve_metrics(ctl);
    text = metrics_text(ctl, &r);
    if (r == CTL_DONE && text != NULL)
        fputs(text, stdout);
    free(text);
    return r;
}

static const struct argp_option top_options[] = {
    {"interval", CTL_KEY_INTERVAL, "S", 0, "Seconds between two looks (default 1)", 1},
    {0},
};

const struct command ctl_top = {
    .name = "top",
    .args = "",
    .summary = "Watch what the server does",
    .text = "On a terminal until interrupted; elsewhere once, for one interval. Times are means of "
            "what ended in it.",
    .options = top_options,
    .run = run_top,
};

static const struct argp_option metrics_options[] = {
    {"listen", CTL_KEY_LISTEN, "ADDR", 0,
     "Answer scrapes on unix:PATH or 127.0.0.1:PORT until interrupted", 1},
    {0},
};

const struct command ctl_metrics = {
    .name = "metrics",
    .args = "",
    .summary = "Print counts and times for Prometheus",
    .options = metrics_options,
    .run = run_metrics,
};
