/*
 * document.c - documents, written straight from the loop's state
 *
 * Others' uids appear for administrators only. Lists are cut where the protocol's limits would be
 * passed: a page of models, 64 uids.
 */
#include "document.h"

#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "server.h"

#define UIDS_MAX 64

static void put_uint(struct doc *doc, const char *key, uint64_t value)
{
    doc_key(doc, key);
    doc_uint(doc, value);
}

static void put_int(struct doc *doc, const char *key, int64_t value)
{
    doc_key(doc, key);
    doc_int(doc, value);
}

static void put_str(struct doc *doc, const char *key, const char *value)
{
    doc_key(doc, key);
    if (value)
        doc_str(doc, value);
    else
        doc_nil(doc);
}

static void put_bool(struct doc *doc, const char *key, bool value)
{
    doc_key(doc, key);
    doc_bool(doc, value);
}

void document_empty(struct doc *doc)
{
    doc_map(doc, 0);
}

void document_hello(struct doc *doc, const struct conn *conn)
{
    const struct server *server = conn->server;

    doc_map(doc, 6);
    put_uint(doc, "version", PROTO_VERSION_MAX);
    put_str(doc, "server", "fused " FUSED_VERSION);
    put_str(doc, "backend", server->infos[0].name);
    doc_key(doc, "devices");
    doc_list(doc, server->device.n);
    for (unsigned i = 0; i < server->device.n; i++) {
        doc_map(doc, 2);
        put_str(doc, "name", server->infos[i].device);
        put_str(doc, "uuid", server->infos[i].uuid);
    }
    put_bool(doc, "admin", conn->peer.admin);
    doc_key(doc, "limits");
    doc_map(doc, 7);
    put_uint(doc, "datagram_bytes", PROTO_DATAGRAM_MAX);
    put_uint(doc, "inline_bytes", PROTO_INLINE_MAX);
    put_uint(doc, "buffer_bytes", server->uids.uid_limit[CHARGE_BUFFER_BYTES]);
    put_uint(doc, "buffers", server->uids.uid_limit[CHARGE_BUFFERS]);
    put_uint(doc, "connections", server->uids.uid_limit[CHARGE_CONNECTIONS]);
    put_uint(doc, "requests", server->uids.uid_limit[CHARGE_REQUESTS]);
    put_uint(doc, "unread_replies", CONN_REPLIES_MAX);
}

/* The request that asks is in flight, but none that it asks about. */
static void put_charges(struct doc *doc, const uint64_t *used, bool is_asking)
{
    put_uint(doc, "connections", used[CHARGE_CONNECTIONS]);
    put_uint(doc, "buffers", used[CHARGE_BUFFERS]);
    put_uint(doc, "buffer_bytes", used[CHARGE_BUFFER_BYTES]);
    put_uint(doc, "requests", used[CHARGE_REQUESTS] - is_asking);
}

static void put_uids(struct doc *doc, const struct uids *uids, const struct uid *asking)
{
    const struct uid *uid;
    unsigned n = 0;

    doc_key(doc, "uids");
    doc_list(doc, uids->n < UIDS_MAX ? uids->n : UIDS_MAX);
    TAILQ_FOREACH(uid, &uids->list, link)
    {
        if (n++ == UIDS_MAX)
            break;
        doc_map(doc, 5);
        put_uint(doc, "uid", uid->uid);
        put_charges(doc, uid->used, uid == asking);
    }
}

/* nil where nobody watches. */
static void put_health(struct doc *doc, const struct backend_health *health)
{
    doc_key(doc, "health");
    if (!health->watched) {
        doc_nil(doc);
        return;
    }
    doc_map(doc, 5);
    put_int(doc, "ecc_corrected", health->ecc_corrected);
    put_int(doc, "ecc_uncorrected", health->ecc_uncorrected);
    put_uint(doc, "xids", health->n_xids);
    put_uint(doc, "last_xid", health->last_xid);
    put_str(doc, "lost_by_xid", health->lost_by);
}

static void put_device(struct doc *doc, const struct server *server, unsigned i)
{
    const struct backend_info *info = &server->infos[i];
    const struct place *place = &server->scheduler.places.engines[i];
    const struct registry_bytes *bytes = &server->registry.device_bytes[i];

    doc_map(doc, 17);
    put_int(doc, "index", server->device.indices[i]);
    put_str(doc, "name", info->device);
    put_str(doc, "uuid", info->uuid);
    put_uint(doc, "memory_total_bytes", info->memory_total_bytes);
    put_uint(doc, "memory_free_bytes", info->memory_free_bytes);
    put_uint(doc, "link_bytes_per_s", info->link_bytes_per_s);
    put_int(doc, "temperature_c", info->temperature_c);
    put_int(doc, "power_w", info->power_w);
    put_int(doc, "clock_mhz", info->clock_mhz);
    put_str(doc, "driver", info->driver);
    put_str(doc, "runtime", info->runtime);
    put_uint(doc, "in_flight", place->n_in_flight);
    put_uint(doc, "batches", place->n_batches);
    put_uint(doc, "rows", place->rows);
    put_uint(doc, "resident_bytes", bytes->resident);
    put_uint(doc, "arena_bytes", bytes->arena);
    put_health(doc, &server->device.healths[i]);
}

/* As the configuration calls them. */
static void put_limits(struct doc *doc, const struct server *server)
{
    const struct uids *uids = &server->uids;
    const struct config *config = &server->config;

    doc_key(doc, "limits");
    doc_map(doc, 11);
    put_uint(doc, "uid_buffer_bytes", uids->uid_limit[CHARGE_BUFFER_BYTES]);
    put_uint(doc, "uid_buffers", uids->uid_limit[CHARGE_BUFFERS]);
    put_uint(doc, "uid_connections", uids->uid_limit[CHARGE_CONNECTIONS]);
    put_uint(doc, "uid_requests", uids->uid_limit[CHARGE_REQUESTS]);
    put_uint(doc, "total_buffer_bytes", uids->total_limit[CHARGE_BUFFER_BYTES]);
    put_uint(doc, "total_connections", uids->total_limit[CHARGE_CONNECTIONS]);
    put_uint(doc, "spare_buffer_bytes", config->spare_buffer_bytes);
    put_uint(doc, "device_reserve_bytes", config->device_reserve_bytes);
    put_uint(doc, "hello_timeout_ms", config->hello_timeout_ms);
    put_uint(doc, "batch_timeout_ms", config->batch_timeout_ms);
    put_uint(doc, "drain_timeout_ms", config->drain_timeout_ms);
}

void document_status(struct doc *doc, const struct conn *conn)
{
    const struct server *server = conn->server;

    doc_map(doc, conn->peer.admin ? 14 : 13);
    put_str(doc, "server", "fused " FUSED_VERSION);
    put_str(doc, "state", server_state_name(server));
    put_uint(doc, "uptime_s", (clock_us() - server->started_us) / 1000000);
    put_str(doc, "backend", server->infos[0].name);
    put_str(doc, "fallback", server->device.fallback[0] ? server->device.fallback : NULL);
    put_str(doc, "log_level", log_level_name(log_get_level()));
    doc_key(doc, "devices");
    doc_list(doc, server->device.n);
    for (unsigned i = 0; i < server->device.n; i++)
        put_device(doc, server, i);
    put_uint(doc, "models", server->registry.n);
    doc_key(doc, "totals");
    doc_map(doc, 8);
    put_charges(doc, server->uids.total, true);
    put_uint(doc, "queued_rows", server->scheduler.queued_rows);
    put_uint(doc, "answered", server->scheduler.answered);
    put_uint(doc, "refused", server->scheduler.refused);
    put_uint(doc, "spare_bytes", server->buffers.spares.bytes);
    doc_key(doc, "you");
    doc_map(doc, 6);
    put_uint(doc, "uid", conn->peer.uid);
    put_charges(doc, conn->uid->used, true);
    put_bool(doc, "admin", conn->peer.admin);
    put_limits(doc, server);
    put_uint(doc, "resident_bytes", server->registry.bytes.resident);
    put_uint(doc, "arena_bytes", server->registry.bytes.arena);
    if (conn->peer.admin)
        put_uids(doc, &server->uids, conn->uid);
}

void document_list(struct doc *doc, const struct registry *registry, const char *after, size_t n)
{
    unsigned first = n > 0 ? registry_after(registry, after, n) : 0;
    unsigned end = registry->n - first > PROTO_LIST_MAX ? first + PROTO_LIST_MAX : registry->n;

    doc_map(doc, 2);
    doc_key(doc, "models");
    doc_list(doc, end - first);
    for (unsigned i = first; i < end; i++) {
        const struct version *version = registry->served[i]->current;

        doc_map(doc, 5);
        put_str(doc, "name", registry->served[i]->name);
        put_str(doc, "dtype", dtype_name(version->model.dtype));
        put_uint(doc, "version", version->number);
        put_str(doc, "state", "ready");
        put_bool(doc, "proof", version->pipeline->proof.constant);
    }
    put_bool(doc, "more", end < registry->n);
}

static void put_shape(struct doc *doc, const char *key, const struct shape *shape)
{
    doc_key(doc, key);
    doc_list(doc, (uint32_t)shape->rank);
    for (int i = 0; i < shape->rank; i++) {
        if (i == shape->batch)
            doc_nil(doc);
        else
            doc_int(doc, shape->dims[i]);
    }
}

/* A text of several lines as a list. */
static void put_lines(struct doc *doc, const char *key, const char *text)
{
    uint32_t n = 0;

    for (const char *p = text; *p; p += strcspn(p, "\n"), p += *p == '\n')
        n++;
    doc_key(doc, key);
    doc_list(doc, n);
    for (const char *p = text; *p; p += *p == '\n') {
        char line[1025];
        size_t length = strcspn(p, "\n");

        if (length >= sizeof(line))
            length = sizeof(line) - 1;
        memcpy(line, p, length);
        line[length] = '\0';
        doc_str(doc, line);
        p += strcspn(p, "\n");
    }
}

static void put_stages(struct doc *doc, const struct pipeline *pipeline)
{
    doc_key(doc, "stages");
    doc_list(doc, (uint32_t)pipeline->n_stages);
    for (int i = 0; i < pipeline->n_stages; i++) {
        const struct stage *stage = &pipeline->stages[i];
        char in[160], out[160], text[360];

        shape_print(&stage->in, in, sizeof(in));
        shape_print(&stage->out, out, sizeof(out));
        snprintf(text, sizeof(text), "%s -> %s", in, out);
        doc_map(doc, 2);
        put_str(doc, "op", stage_op_name(stage->op));
        put_str(doc, "text", text);
    }
}

static void put_places(struct doc *doc, const struct device *device, const struct version *version)
{
    doc_key(doc, "devices");
    doc_list(doc, (uint32_t)__builtin_popcount(version->places));
    for (unsigned i = 0; i < device->n; i++) {
        if (version->plans[i])
            doc_int(doc, device->indices[i]);
    }
}

static void put_costs(struct doc *doc, const struct cost *cost)
{
    doc_key(doc, "costs_us");
    doc_list(doc, cost->n);
    for (unsigned i = 0; i < cost->n; i++) {
        doc_list(doc, 2);
        doc_uint(doc, cost->points[i].rows);
        doc_uint(doc, cost->points[i].us);
    }
}

void document_describe(struct doc *doc, const struct server *server, const struct served *served)
{
    const struct version *version = served->current;
    const struct pipeline *pipeline = version->pipeline;
    const struct proof *proof = &pipeline->proof;

    doc_map(doc, pipeline->outer_sum ? 20 : 19);
    put_str(doc, "name", served->name);
    put_uint(doc, "version", version->number);
    put_str(doc, "dtype", dtype_name(version->model.dtype));
    put_str(doc, "precision", version->model.precision == PRECISION_TF32 ? "tf32" : "fp32");
    put_shape(doc, "input", &pipeline->in);
    put_shape(doc, "output", &pipeline->out);
    put_stages(doc, pipeline);
    put_uint(doc, "max_rows", version->model.max_rows);
    put_uint(doc, "max_delay_us", version->model.max_delay_us);
    put_uint(doc, "queue_rows", version->model.queue_rows);
    put_str(doc, "backend", server->infos[0].name);
    put_places(doc, &server->device, version);
    put_lines(doc, "plan", version->info.text);
    put_uint(doc, "resident_bytes", version->info.resident_bytes);
    put_uint(doc, "arena_bytes", version->info.arena_bytes);
    put_uint(doc, "launches", version->info.launches);
    put_costs(doc, &version->cost);
    doc_key(doc, "proof");
    doc_map(doc, 4);
    put_bool(doc, "constant", proof->constant);
    doc_key(doc, "value");
    doc_double(doc, (double)proof->value);
    doc_key(doc, "bound");
    doc_double(doc, (double)proof->bound);
    put_str(doc, "text", proof->text);
    put_str(doc, "compact",
            pipeline->outer_sum ? "outer_sum"
            : proof->constant   ? "constant"
                                : "none");
    /* The shape of the compact result: what the last stage adds to. */
    if (pipeline->outer_sum)
        put_shape(doc, "factor", &pipeline->stages[pipeline->n_stages - 1].in);
}

static void put_histogram(struct doc *doc, const char *key, const struct histogram *histogram)
{
    uint32_t n = 0;

    for (unsigned i = 0; i < STATS_BUCKETS; i++)
        n += histogram->buckets[i] > 0;
    doc_key(doc, key);
    doc_map(doc, 6);
    put_uint(doc, "count", histogram->count);
    put_uint(doc, "sum", histogram->sum);
    put_uint(doc, "max", histogram->max);
    put_uint(doc, "p50", histogram_percentile(histogram, 50));
    put_uint(doc, "p99", histogram_percentile(histogram, 99));
    doc_key(doc, "buckets");
    doc_list(doc, n);
    for (unsigned i = 0; i < STATS_BUCKETS; i++) {
        if (histogram->buckets[i] == 0)
            continue;
        doc_list(doc, 2);
        doc_uint(doc, histogram_bound(i));
        doc_uint(doc, histogram->buckets[i]);
    }
}

void document_stats(struct doc *doc, const char *name, const struct stats *stats)
{
    static const char *const reasons[BATCH_REASONS] = {"full", "idle", "delay", "deadline", "cost"};
    uint32_t n = 0;

    for (unsigned i = 0; i < STATS_ERRORS; i++)
        n += stats->errors[i] > 0;
    doc_map(doc, 9);
    put_str(doc, "model", name);
    put_uint(doc, "requests", stats->requests);
    put_uint(doc, "rows", stats->rows);
    put_uint(doc, "batches", stats->batches);
    doc_key(doc, "errors");
    doc_map(doc, n);
    for (unsigned i = 0; i < STATS_ERRORS; i++) {
        if (stats->errors[i] > 0)
            put_uint(doc, proto_error_name((enum proto_error)i), stats->errors[i]);
    }
    put_uint(doc, "batch_rows_max", stats->batch_rows_max);
    doc_key(doc, "closed");
    doc_map(doc, BATCH_REASONS);
    for (unsigned i = 0; i < BATCH_REASONS; i++)
        put_uint(doc, reasons[i], stats->closed[i]);
    put_histogram(doc, "queue_us", &stats->queue_us);
    put_histogram(doc, "run_us", &stats->run_us);
}

void document_changes(struct doc *doc, const struct registry_job *job)
{
    static const char *const actions[] = {
        [ACTION_UNCHANGED] = "unchanged",
        [ACTION_LOADED] = "loaded",
        [ACTION_UNLOADED] = "unloaded",
    };
    unsigned n = job->n_changes < PROTO_LIST_MAX ? job->n_changes : PROTO_LIST_MAX;

    doc_map(doc, 1);
    doc_key(doc, "models");
    doc_list(doc, n);
    for (unsigned i = 0; i < n; i++) {
        const struct registry_change *change = &job->changes[i];

        doc_map(doc, change->action == ACTION_LOADED ? 4 : 3);
        put_str(doc, "name", change->name);
        put_str(doc, "action", actions[change->action]);
        put_uint(doc, "version", change->number);
        if (change->action == ACTION_LOADED)
            put_uint(doc, "load_ms", change->load_us / 1000);
    }
}
