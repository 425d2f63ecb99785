/*
 * server.c - the loop, from start to end
 *
 * Start: configuration, lock, backend, signals, models on a helper thread while the loop turns (so
 * that a signal ends it), then the socket becomes reachable and the service manager is told READY.
 *
 * One tick, four times a second, does what has no event of its own: silent connections, the age of
 * running batches, how healthy devices are, signs of life for the watchdog, progress of the start,
 * an accept that ran out of descriptors, the end of a drain. That the tick runs is itself the proof
 * that the loop turns.
 *
 * End, one of two ways. A drain answers everything that was accepted, then tears everything down in
 * order. A lost device, or a batch that will not end, is answered and left with _exit(): nothing
 * may call a backend that does not answer.
 */
#include "server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "clock.h"
#include "service.h"

#define TICK_MS        250
#define FLUSH_US       1000000  /* for clients to read their last answers */
#define EXTEND_US      60000000 /* granted for each model that was loaded */
#define LOOK_MS        2        /* between looks at connections that are about to end */
#define ACCEPTS_A_TURN 64
#define STATUS_MAX     700

static void on_tick(uv_timer_t *tick);

/* ---- the end ---- */

/* Leaves without the backend: what the kernel frees is enough. */
static void leave(struct server *server, int code)
{
    listener_close(&server->listener);
    fflush(NULL);
    _exit(code);
}

/* Tells everybody who waits for a helper thread. */
static void fail_works(struct server *server, enum proto_error error)
{
    struct conn *conn, *next;

    for (conn = TAILQ_FIRST(&server->conns); conn; conn = next) {
        next = TAILQ_NEXT(conn, link);
        for (unsigned i = 0; i < REQUEST_TABLE; i++) {
            struct request *request;

            while (!conn->closing && (request = LIST_FIRST(&conn->requests.lists[i])))
                request_tell(request, error);
        }
    }
}

static void end_now(struct server *server, enum proto_error error, int code)
{
    scheduler_fail_all(&server->scheduler, error);
    fail_works(server, error);
    leave(server, code);
}

void server_lost(struct server *server, const char *why)
{
    server->state = SERVER_LOST;
    log_error("device.lost", "%s; answering GPU_LOST and ending", why);
    service_stopping("The device is lost");
    end_now(server, ERR_GPU_LOST, EXIT_DEVICE_LOST);
}

static void on_lost(void *context, const char *why)
{
    server_lost(context, why);
}

static void stop_accepting(struct server *server)
{
    if (server->is_accepting)
        uv_close((uv_handle_t *)&server->accepting, NULL);
    server->is_accepting = false;
    listener_close(&server->listener);
}

/* Closes every handle, so that the loop runs out. Nothing is queued or running. */
static void tear_down(struct server *server)
{
    server->stopping = true;
    stop_accepting(server);
    while (!TAILQ_EMPTY(&server->conns))
        conn_close(TAILQ_FIRST(&server->conns));
    registry_deinit(&server->registry);
    scheduler_deinit(&server->scheduler);
    uv_close((uv_handle_t *)&server->tick, NULL);
    uv_close((uv_handle_t *)&server->resume, NULL);
    for (size_t i = 0; i < ARRAY_SIZE(server->signals); i++) {
        int number = server->signals[i].signum;

        uv_close((uv_handle_t *)&server->signals[i], NULL);
        signal(number, SIG_IGN); /* one more must not end with a signal what ends with 0 */
    }
}

static bool has_unsent(const struct server *server)
{
    const struct conn *conn;

    TAILQ_FOREACH(conn, &server->conns, link)
    {
        if (conn->n_out > 0 || conn->n_posted > 0)
            return true;
    }
    return false;
}

/*
 * What clients have sent by now is read and answered, each connection up to its end; what they send
 * from now on fails at once on their side. So nothing that could be sent is left without an answer.
 */
static void stop_reading(struct server *server)
{
    struct conn *conn;

    server->is_shut = true;
    TAILQ_FOREACH(conn, &server->conns, link)
    shutdown(conn->fd, SHUT_RD);
}

/* Called from the tick only, so that no caller's connection goes away under it. */
static void check_drain(struct server *server)
{
    const struct scheduler *scheduler = &server->scheduler;
    uint64_t now_us = clock_us();

    if (server->state != SERVER_DRAINING || server->stopping)
        return;
    if (scheduler->n_queued > 0 || scheduler->n_running > 0 || server->n_client_works > 0) {
        if (now_us < server->drain_until_us)
            return;
        log_warning("server.drain_timeout", "%u queued and %u running requests did not end in time",
                    scheduler->n_queued, scheduler->n_running);
        end_now(server, ERR_SHUTTING_DOWN, server->exit_code);
    }
    if (server->flush_until_us == 0)
        server->flush_until_us = now_us + FLUSH_US;
    if (has_unsent(server) && now_us < server->flush_until_us)
        return;
    stop_accepting(server);
    if (!server->is_shut)
        stop_reading(server);
    if (!TAILQ_EMPTY(&server->conns) && now_us < server->flush_until_us) {
        uv_timer_start(&server->tick, on_tick, LOOK_MS, TICK_MS);
        return;
    }
    if (server->said_ready)
        log_info("server.end", "everything is answered");
    if (server->registry.is_busy)
        leave(server, server->exit_code); /* a reload that nobody waits for */
    tear_down(server);
}

void server_progress(struct server *server)
{
    if (server->state == SERVER_DRAINING && !server->stopping)
        uv_timer_start(&server->tick, on_tick, 0, TICK_MS);
}

static void on_progress(void *context)
{
    server_progress(context);
}

void server_drain(struct server *server, const char *why)
{
    if (server->state == SERVER_STARTING) {
        log_info("server.end", "%s while starting", why);
        leave(server, EXIT_OK);
    }
    if (server->state != SERVER_READY)
        return;
    server->state = SERVER_DRAINING;
    server->buffers.keep = true;
    server->buffers.spares.limit_bytes = 0;
    spares_trim(&server->buffers.spares, clock_us(), true);
    server->drain_until_us = clock_us() + (uint64_t)server->config.drain_timeout_ms * 1000;
    log_info("server.drain", "%s: finishing %u queued and %u running requests", why,
             server->scheduler.n_queued, server->scheduler.n_running);
    service_stopping("Finishing what was accepted");
    /* Whoever connects to a socket of the manager's waits for the next daemon. At one of our own
     * they learn that this one ends, and may ask how far it is. */
    if (server->listener.dir_fd < 0)
        stop_accepting(server);
    server_progress(server);
}

/* ---- connections ---- */

static void on_connect(uv_poll_t *poll, int status, int events)
{
    struct server *server = poll->data;

    (void)status;
    (void)events;
    for (unsigned i = 0; i < ACCEPTS_A_TURN; i++) {
        int fd = listener_accept(&server->listener), r;

        if (fd == -EMFILE || fd == -ENFILE || fd == -ENOBUFS || fd == -ENOMEM) {
            /* Those who wait stay in the backlog; asking again at once would spin. */
            log_client(LOG_LEVEL_WARNING, "accept.paused", "%s", strerrordesc_np(-fd));
            uv_poll_stop(&server->accepting);
            server->accept_paused = true;
            return;
        }
        if (fd == -EAGAIN)
            return;
        if (fd < 0)
            continue; /* that client is gone already */
        r = conn_new(server, fd);
        if (r < 0)
            log_client(LOG_LEVEL_WARNING, "client.refused", "a connection was refused: %s",
                       strerrordesc_np(-r));
    }
}

static int start_accepting(struct server *server)
{
    return uv_poll_start(&server->accepting, UV_READABLE, on_connect);
}

static void close_silent(struct server *server, uint64_t now_us)
{
    uint64_t limit_us = (uint64_t)server->config.hello_timeout_ms * 1000;
    struct conn *conn, *next;

    for (conn = TAILQ_FIRST(&server->conns); conn; conn = next) {
        next = TAILQ_NEXT(conn, link);
        if (conn->hello || now_us - conn->accepted_us < limit_us)
            continue;
        log_client(LOG_LEVEL_INFO, "client.silent", "uid %u, pid %d: no hello, closed",
                   conn->peer.uid, (int)conn->peer.pid);
        conn_close(conn);
    }
}

/* Replies whose descriptors the kernel did not take at the time. */
static void flush_held_up(struct server *server)
{
    struct conn *conn, *next;

    for (conn = TAILQ_FIRST(&server->conns); conn; conn = next) {
        next = TAILQ_NEXT(conn, link);
        if (conn->is_held_up)
            conn_flush(conn);
    }
}

/* Asks for more time on progress only, so that a start or reload that hangs still ends. */
static void say_progress(struct server *server)
{
    const struct registry_job *job =
        server->registry.is_busy ? TAILQ_FIRST(&server->registry.jobs) : NULL;
    unsigned n = 0;

    if (job && job->task == TASK_SYNC)
        n = __atomic_load_n(&job->n_loaded, __ATOMIC_RELAXED);
    if (n > server->n_loaded_seen)
        service_extend(EXTEND_US);
    server->n_loaded_seen = n;
}

static void on_tick(uv_timer_t *tick)
{
    struct server *server = tick->data;
    uint64_t now_us = clock_us();
    uint64_t oldest_us = scheduler_oldest_us(&server->scheduler);
    struct report report = {""};

    if (device_look(&server->device, &report) < 0)
        server_lost(server, report.text);
    if (oldest_us < now_us &&
        now_us - oldest_us >= (uint64_t)server->config.batch_timeout_ms * 1000)
        server_lost(server, "a batch runs longer than batch_timeout_ms");
    if (server->watchdog_us > 0 && now_us >= server->watchdog_next_us) {
        service_watchdog();
        server->watchdog_next_us = now_us + server->watchdog_us;
    }
    say_progress(server);
    if (server->accept_paused && server->is_accepting) {
        server->accept_paused = false;
        start_accepting(server);
    }
    close_silent(server, now_us);
    flush_held_up(server);
    spares_trim(&server->buffers.spares, now_us, server->uids.total[CHARGE_BUFFERS] == 0);
    check_drain(server);
}

/* ---- models and configuration ---- */

void server_changed(struct server *server, const struct registry_job *job)
{
    if (job->result == -ENOTRECOVERABLE)
        server_lost(server, job->report.text);
    if (job->result < 0) {
        log_error("models.failed", "%s", job->report.text);
        return;
    }
    for (unsigned i = 0; i < job->n_changes; i++) {
        const struct registry_change *change = &job->changes[i];
        const struct version *version;

        if (change->action == ACTION_UNCHANGED)
            continue;
        if (change->action == ACTION_UNLOADED) {
            log_info("model.unloaded", "%s", change->name);
            continue;
        }
        version = registry_find(&server->registry, change->name, strlen(change->name))->current;
        log_info("model.loaded", "%s: version %llu in %llu ms, %llu bytes resident, %llu of arenas",
                 change->name, (unsigned long long)change->number,
                 (unsigned long long)change->load_us / 1000,
                 (unsigned long long)version->info.resident_bytes,
                 (unsigned long long)version->info.arena_bytes);
        if (version->pipeline->proof.constant)
            log_info("model.proof", "%s: %s", change->name, version->pipeline->proof.text);
    }
}

/* `failure`: why the last reload changed nothing, or NULL. */
static void say_ready(struct server *server, const char *failure)
{
    char text[STATUS_MAX], more[40] = "";
    const struct device *device = &server->device;

    if (device->n > 1)
        snprintf(more, sizeof(more), " and %u more", device->n - 1);
    snprintf(text, sizeof(text), "Serving %u model%s on %s (%s%s)%s%s%s%s", server->registry.n,
             server->registry.n == 1 ? "" : "s", server->infos[0].name, server->infos[0].device,
             more,
             device->fallback[0] == '\0'    ? ""
             : device->ops == backend_cpu() ? ", without a GPU: "
                                            : ", without a part of the GPUs: ",
             device->fallback, failure ? "; the last reload changed nothing: " : "",
             failure ? failure : "");
    if (!server->said_ready)
        log_info("server.ready", "%s", text);
    server->said_ready = true;
    service_ready(text);
}

static uint64_t half_of_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);

    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size / 2 : UINT64_MAX;
}

static void apply_limits(struct server *server)
{
    const struct config *config = &server->config;
    struct uids *uids = &server->uids;

    uids->uid_limit[CHARGE_CONNECTIONS] = config->uid_connections;
    uids->uid_limit[CHARGE_BUFFERS] = config->uid_buffers;
    uids->uid_limit[CHARGE_BUFFER_BYTES] = config->uid_buffer_bytes;
    uids->uid_limit[CHARGE_REQUESTS] = config->uid_requests;
    uids->total_limit[CHARGE_CONNECTIONS] = config->total_connections;
    uids->total_limit[CHARGE_BUFFER_BYTES] =
        config->total_buffer_bytes ? config->total_buffer_bytes : half_of_memory();
    server->buffers.spares.limit_bytes = config->spare_buffer_bytes;
    server->buffers.device_reserve_bytes = config->device_reserve_bytes;
}

static void reload(struct server *server);

static void on_reloaded(struct registry_job *job, void *context)
{
    struct server *server = context;

    server->reload_running = false;
    server_changed(server, job);
    log_info("server.reloaded", job->result < 0 ? "nothing changed" : "models are up to date");
    if (server->state != SERVER_READY)
        return;
    say_ready(server, job->result < 0 ? job->report.text : NULL);
    if (server->reload_again)
        reload(server);
}

static void reload(struct server *server)
{
    struct report report = {""};
    struct config next;
    int r;

    if (server->state != SERVER_READY && server->state != SERVER_STARTING)
        return;
    /* What changed after a running one, or the start, looked would be missed. */
    server->reload_again = server->reload_running || server->state == SERVER_STARTING;
    if (server->reload_again)
        return;
    service_reloading();
    r = setup_config(&server->options, &next, &report);
    if (r < 0) {
        log_error("config.failed", "%s; nothing changed", report.text);
    } else {
        config_adopt(&server->config, &next);
        log_set_level(server->config.log_level);
        apply_limits(server);
        r = registry_submit(&server->registry, TASK_SYNC, NULL, 0, on_reloaded, server);
    }
    server->reload_running = r == 0;
    if (r < 0)
        say_ready(server, report.text[0] ? report.text : strerrordesc_np(-r));
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct server *server = handle->data;

    if (number == SIGHUP) {
        reload(server);
    } else if (server->state == SERVER_DRAINING) {
        log_warning("server.end", "a second signal: ending at once");
        end_now(server, ERR_SHUTTING_DOWN, server->exit_code);
    } else {
        server_drain(server, number == SIGTERM ? "SIGTERM" : "SIGINT");
    }
}

/* ---- the start ---- */

const char *server_state_name(const struct server *server)
{
    switch (server->state) {
    case SERVER_DRAINING:
        return "draining";
    case SERVER_LOST:
        return "lost";
    default:
        return "ready";
    }
}

static void on_started(struct registry_job *job, void *context)
{
    struct server *server = context;
    struct report report = {""};
    gid_t group = (gid_t)-1;
    int r;

    server_changed(server, job);
    r = job->result;
    if (r == 0)
        r = setup_group("socket_group", server->config.socket_group, &group, &report);
    if (r == 0)
        r = listener_open(&server->listener, server->config.socket_mode, group, &report);
    if (r == 0) {
        r = uv_poll_init(&server->loop, &server->accepting, server->listener.fd);
        server->is_accepting = r == 0;
        server->accepting.data = server;
    }
    if (r == 0)
        r = start_accepting(server);
    if (r == 0) {
        server->state = SERVER_READY;
        say_ready(server, NULL);
        if (server->reload_again)
            reload(server);
        return;
    }
    if (job->result == 0)
        log_error("server.start", "%s", report.text[0] ? report.text : strerrordesc_np(-r));
    server->exit_code = EXIT_CONFIGURATION;
    server->state = SERVER_DRAINING;
    server_progress(server);
}

static int init_loop(struct server *server)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    int r;

    r = uv_loop_init(&server->loop);
    if (r < 0)
        return r;
    works_init(&server->works, &server->loop);
    uv_timer_init(&server->loop, &server->tick);
    server->tick.data = server;
    uv_timer_start(&server->tick, on_tick, 0, TICK_MS);
    uv_timer_init(&server->loop, &server->resume);
    server->resume.data = server;
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        uv_signal_init(&server->loop, &server->signals[i]);
        server->signals[i].data = server;
        r = uv_signal_start(&server->signals[i], on_signal, numbers[i]);
        if (r < 0)
            return r;
    }
    server->buffers = (struct buffers){
        .works = &server->works,
        .device = &server->device,
        .device_memory = server->infos[0].device_memory,
    };
    spares_init(&server->buffers.spares, &server->works, &server->device, on_lost, server);
    registry_init(&server->registry, &server->works, &server->device, server->config.models_dir,
                  server->config.weights_dir);
    return scheduler_init(&server->scheduler, &server->loop, &server->device, server->infos,
                          server->config.spin_us, on_progress, on_lost, server);
}

static int fail(int code, const char *event, const struct report *report)
{
    log_error(event, "%s", report->text);
    return code;
}

static int ask_devices(struct server *server, struct report *report)
{
    const struct device *device = &server->device;

    for (unsigned i = 0; i < device->n; i++) {
        struct backend_info *info = &server->infos[i];

        device->ops->info(device->backends[i], info);
        if (info->slots < 1 || info->slots > BACKEND_SLOTS_MAX)
            return report_set(report, -ENODEV, "the backend offers %u slots", info->slots);
        log_info("device.open", "%s: device %d, %s", info->name, device->indices[i], info->device);
        /* A result must not depend on where it was computed. */
        if (strcmp(info->device, server->infos[0].device) != 0)
            log_warning("device.mixed", "device %d is no %s: results may differ in their last bits",
                        device->indices[i], server->infos[0].device);
    }
    if (device->fallback[0] && device->ops == backend_cpu())
        log_warning("device.fallback", "computing on the CPU: %s", device->fallback);
    return 0;
}

/* Everything that can be refused before the loop turns. */
static int prepare(struct server *server)
{
    struct report report = {""};
    int r;

    if (setup_config(&server->options, &server->config, &report) < 0)
        return fail(EXIT_CONFIGURATION, "config.failed", &report);
    log_set_level(server->config.log_level);
    setup_warn_about_files(&server->options, &server->config);
    if (setup_descriptors(&report) < 0)
        return fail(EXIT_CONFIGURATION, "limits.descriptors", &report);
    server->admin_gid = (gid_t)-1;
    if (setup_group("admin_group", server->config.admin_group, &server->admin_gid, &report) < 0)
        return fail(EXIT_CONFIGURATION, "config.failed", &report);
    r = listener_claim(&server->listener, server->config.socket, &report);
    if (r < 0)
        return fail(r == -EALREADY ? EXIT_ALREADY_RUNNING : EXIT_CONFIGURATION, "socket.failed",
                    &report);
    r = device_open(&server->config, &server->device, &report);
    if (r < 0)
        return fail(EXIT_NO_DEVICE, "device.failed", &report);
    r = ask_devices(server, &report);
    if (r < 0)
        return fail(EXIT_NO_DEVICE, "device.failed", &report);
    return EXIT_OK;
}

int server_run(const struct server_options *options)
{
    struct server *server = calloc(1, sizeof(*server));
    int code, r;

    if (!server)
        return EXIT_CONFIGURATION;
    server->options = *options;
    server->listener = LISTENER_INIT;
    server->started_us = clock_us();
    server->codec = codec_new();
    TAILQ_INIT(&server->conns);
    TAILQ_INIT(&server->paused);
    uids_init(&server->uids);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN); /* until models load: they are read after it anyway */
    r = works_prepare();
    if (!server->codec || r < 0)
        log_error("server.start", "%s", strerrordesc_np(ENOMEM));
    code = server->codec && r == 0 ? prepare(server) : EXIT_CONFIGURATION;
    if (code != EXIT_OK)
        goto end;
    server->watchdog_us = service_watchdog_interval_us();
    r = init_loop(server);
    apply_limits(server);
    if (r == 0)
        r = registry_submit(&server->registry, TASK_SYNC, NULL, 0, on_started, server);
    if (r < 0) {
        log_error("server.start", "%s", strerrordesc_np(-r));
        leave(server, EXIT_CONFIGURATION);
    }
    service_status("Loading models");
    uv_run(&server->loop, UV_RUN_DEFAULT);
    uv_loop_close(&server->loop);
    code = server->exit_code;

end:
    listener_close(&server->listener);
    close_fd(server->listener.dir_fd);
    close_fd(server->listener.lock_fd);
    device_close(&server->device);
    codec_free(server->codec);
    free(server);
    return code;
}
