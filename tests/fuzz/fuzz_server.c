/*
 * fuzz_server.c - any sequence of verbs, from several clients, through the daemon's core
 *
 * Loop, connections, registry, scheduler and engine are the daemon's own, over socket pairs; the
 * backend is played here, and holds, fails or ends its batches as the bytes say. Whatever is sent:
 * every datagram gets exactly one answer, with its id, unless its connection was closed; and when
 * all clients are gone nothing is charged to anybody and no descriptor is left.
 *
 * drain and log are left out: the one ends the process, the other prints.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>

#include "daemon/log.h"
#include "daemon/server.h"
#include "proto/wire.h"

#define CLIENTS   3
#define IDS       16
#define OWED_ANY  IDS /* another id */
#define OWED_NONE (IDS + 1)
#define SENDS_MAX 200

#define check(condition)                                            \
    do {                                                            \
        if (!(condition)) {                                         \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            abort();                                                \
        }                                                           \
    } while (0)

/* ---- the backend ---- */

struct plan {
    int nothing;
};

static atomic_bool holds;
static atomic_int batch_result, job_result;
static atomic_bool load_fails, pin_fails;
static atomic_bool device_failed; /* a batch ended with EIO, which is INTERNAL to clients */
static atomic_long n_plans, n_pins;

static struct backend {
    struct batch *running[BACKEND_SLOTS_MAX];
} backends[2]; /* two devices */

static void ops_close(struct backend *backend)
{
    (void)backend;
}

static void ops_info(struct backend *backend, struct backend_info *ret)
{
    (void)backend;
    *ret = (struct backend_info){.name = "fuzz", .device = "none", .slots = 2};
}

static int ops_load(struct backend *backend, const struct pipeline *pipeline, uint32_t max_rows,
                    struct plan **ret, struct report *report)
{
    (void)backend;
    (void)pipeline;
    (void)max_rows;
    if (atomic_load(&load_fails))
        return report_set(report, -ENOMEM, "no room");
    *ret = calloc(1, sizeof(**ret));
    check(*ret != NULL);
    atomic_fetch_add(&n_plans, 1);
    return 0;
}

static void ops_plan_info(const struct plan *plan, struct plan_info *ret)
{
    (void)plan;
    *ret = (struct plan_info){.resident_bytes = 1, .arena_bytes = 1, .text = "none"};
}

static void ops_unload(struct backend *backend, struct plan *plan)
{
    (void)backend;
    atomic_fetch_sub(&n_plans, 1);
    free(plan);
}

static int ops_start(struct backend *backend, unsigned slot, struct batch *batch)
{
    check(slot < 2 && !backend->running[slot] && batch->n_jobs > 0);
    if (atomic_load(&batch_result) == 1)
        return -ENOMEM;
    backend->running[slot] = batch;
    return 0;
}

static int ops_poll(struct backend *backend, unsigned slot)
{
    struct batch *batch = backend->running[slot];
    int r = atomic_load(&batch_result);

    check(batch != NULL);
    if (atomic_load(&holds))
        return 0;
    backend->running[slot] = NULL;
    for (unsigned i = 0; i < batch->n_jobs; i++) {
        struct job *job = &batch->jobs[i];

        check(job->rows > 0 && job->x && job->y && job->y_size > 0);
        memset(job->y, 1, job->y_size);
        job->result = i == 0 ? -atomic_load(&job_result) : 0;
    }
    if (r != 2)
        return 1;
    atomic_store(&device_failed, true);
    return -EIO;
}

static int ops_pin(struct backend *backend, void *data, size_t size, bool gently,
                   struct memory **ret, struct report *report)
{
    (void)backend;
    (void)size;
    (void)gently;
    if (atomic_load(&pin_fails))
        return report_set(report, -ENOMEM, "cannot be pinned");
    atomic_fetch_add(&n_pins, 1);
    *ret = data;
    return 0;
}

static void ops_unpin(struct backend *backend, struct memory *memory, bool gently)
{
    (void)backend;
    (void)gently;
    check(memory != NULL);
    atomic_fetch_sub(&n_pins, 1);
}

static const struct backend_ops ops = {
    .abi = BACKEND_ABI,
    .name = "fuzz",
    .close = ops_close,
    .info = ops_info,
    .load = ops_load,
    .plan_info = ops_plan_info,
    .unload = ops_unload,
    .start = ops_start,
    .poll = ops_poll,
    .pin = ops_pin,
    .unpin = ops_unpin,
};

/* ---- the daemon ---- */

static struct server server;
static struct codec *codec;
static char dir[] = "/tmp/fused-fuzz-XXXXXX";

static void remove_dir(void)
{
    static const char *const files[] = {"m", "n"};
    char path[64];

    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        snprintf(path, sizeof(path), "%s/%s.conf", dir, files[i]);
        unlink(path);
    }
    rmdir(dir);
}

static void write_model(const char *name, const char *batching)
{
    char path[64];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s.conf", dir, name);
    file = fopen(path, "we");
    check(file != NULL);
    fprintf(file,
            "name = \"%s\"; dtype = \"float32\"; input = { shape = [ 4 ]; };\n"
            "stages = ( { op = \"clamp\"; min = 0.0; max = 1.0; } );\nbatching = { %s };\n",
            name, batching);
    check(fclose(file) == 0);
}

static void progress(void *context)
{
    (void)context;
}

static void lost(void *context, const char *why)
{
    (void)context;
    (void)why;
    abort();
}

static void on_synced(struct registry_job *job, void *context)
{
    (void)context;
    check(job->result == 0);
}

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void turn(void)
{
    uv_run(&server.loop, UV_RUN_NOWAIT);
}

/* Serves both models again, whatever was unloaded. */
static void sync_models(void)
{
    check(registry_submit(&server.registry, TASK_SYNC, NULL, 0, on_synced, NULL) == 0);
    while (server.registry.is_busy) {
        turn();
        sched_yield();
    }
    check(server.registry.n == 2);
}

static void start(void)
{
    struct uids *uids = &server.uids;

    signal(SIGPIPE, SIG_IGN);
    log_init((enum log_level)0);
    check(mkdtemp(dir) != NULL);
    atexit(remove_dir);
    write_model("m", "max_rows = 16; queue_rows = 64;");
    write_model("n", "max_rows = 8; queue_rows = 16; max_delay_us = 500;");
    codec = server.codec = codec_new();
    check(codec && uv_loop_init(&server.loop) == 0);
    works_init(&server.works, &server.loop);
    server.state = SERVER_READY;
    server.admin_gid = (gid_t)-1;
    server.device = (struct device){
        .ops = &ops, .n = 2, .backends = {&backends[0], &backends[1]}, .indices = {0, 1}};
    TAILQ_INIT(&server.conns);
    TAILQ_INIT(&server.paused);
    uv_timer_init(&server.loop, &server.resume);
    server.resume.data = &server;
    uids_init(uids);
    uids->uid_limit[CHARGE_BUFFERS] = 3;
    uids->uid_limit[CHARGE_BUFFER_BYTES] = 100000;
    uids->uid_limit[CHARGE_REQUESTS] = 24;
    uids->uid_limit[CHARGE_CONNECTIONS] = CLIENTS;
    config_defaults(&server.config);
    ops_info(NULL, &server.infos[0]);
    ops_info(NULL, &server.infos[1]);
    server.buffers = (struct buffers){.works = &server.works, .device = &server.device};
    spares_init(&server.buffers.spares, &server.works, &server.device, lost, &server);
    registry_init(&server.registry, &server.works, &server.device, dir, dir);
    check(scheduler_init(&server.scheduler, &server.loop, &server.device, server.infos, 0, progress,
                         lost, &server) == 0);
    sync_models();
}

/* ---- the clients ---- */

struct client {
    int fd; /* -1: none */
    unsigned owed[IDS + 2];
};

static struct client clients[CLIENTS];
static unsigned n_sends;

static void client_open(struct client *client)
{
    int pair[2];

    if (client->fd >= 0)
        return;
    check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    *client = (struct client){.fd = pair[0]};
    conn_new(&server, pair[1]);
}

static void client_close(struct client *client)
{
    client->fd = close_fd(client->fd);
}

/* Takes one answer. False: there is none now, or no connection any more. */
static bool client_read(struct client *client)
{
    static uint8_t bytes[PROTO_DATAGRAM_MAX];
    struct proto_reply reply;
    const char *reason;
    unsigned *owed;
    int fd = -1, n;

    if (client->fd < 0)
        return false;
    n = wire_recv(client->fd, bytes, sizeof(bytes), &fd);
    if (n == -EAGAIN)
        return false;
    if (n <= 0) {
        client_close(client);
        return false;
    }
    check(codec_decode_reply(codec, bytes, (size_t)n, &reply, &reason) == 0);
    check((fd >= 0) == (reply.error == ERR_NONE && reply.verb == VERB_BUFFER_CREATE));
    close_fd(fd);
    check(reply.error != ERR_INTERNAL || atomic_load(&device_failed));
    owed = &client->owed[!reply.has_id ? OWED_NONE : reply.id < IDS ? reply.id : OWED_ANY];
    /* A connection over the limit is told so before it says anything. */
    check(*owed > 0 || reply.error == ERR_QUOTA);
    if (*owed > 0)
        --*owed;
    return true;
}

static void client_send(struct client *client, const uint8_t *bytes, size_t n, int fd)
{
    struct proto_request request;
    bool has_id = false;
    const char *reason;
    uint64_t id = 0;
    int r;

    if (client->fd < 0 || n == 0 || n_sends >= SENDS_MAX)
        return;
    r = codec_decode_request(codec, bytes, n, &request, &has_id, &id, &reason);
    if (r == 0 && (request.verb == VERB_DRAIN || request.verb == VERB_LOG))
        return;
    if (n > PROTO_DATAGRAM_MAX)
        has_id = false;
    if (wire_send(client->fd, bytes, n, fd) != 0)
        return;
    n_sends++;
    client->owed[!has_id ? OWED_NONE : id < IDS ? id : OWED_ANY]++;
}

static unsigned owed_to(const struct client *client)
{
    unsigned n = 0;

    for (unsigned i = 0; client->fd >= 0 && i < IDS + 2; i++)
        n += client->owed[i];
    return n;
}

/* ---- what the bytes say ---- */

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

static const uint64_t sizes[] = {1, 4096, 40000, 0, 100001, UINT64_C(1) << 40, INT64_MAX, ~0ull};

static struct proto_str name(uint8_t which)
{
    static const char *const names[] = {"m", "n", "nobody", "../m"};
    const char *s = names[which % ARRAY_SIZE(names)];

    return (struct proto_str){s, (uint32_t)strlen(s)};
}

static struct proto_tensor tensor(struct input *in)
{
    static const uint8_t zeros[64 * 16];
    uint8_t shape = next(in), place = next(in);
    struct proto_tensor t = {.dtype = PROTO_FLOAT32, .rank = 2};

    t.shape[0] = shape & 63;
    t.shape[1] = shape & 64 ? 5 : 4;
    if (shape & 128 && place & 1)
        t.dtype = PROTO_FLOAT16;
    if (place & 128) {
        t.is_inline = true;
        t.bytes = zeros;
        t.n_bytes = (uint32_t)(t.shape[0] * 16);
        t.shape[1] = 4;
        t.dtype = PROTO_FLOAT32;
    } else {
        t.buffer = place & 3;
        t.offset = (uint64_t)(place >> 2 & 31) * 64;
        if (shape == 255)
            t.shape[0] = INT64_MAX / 16;
    }
    return t;
}

static void infer(struct input *in, struct proto_infer *infer)
{
    static const uint64_t deadlines[] = {0, 1, 2000, UINT64_MAX};
    uint8_t flags = next(in);

    infer->model = name(flags & 1 ? 1 : flags >> 6 == 3 ? 2 : 0);
    infer->priority = flags >> 1 & 3;
    infer->has_deadline = flags & 8;
    infer->deadline_us = deadlines[flags >> 4 & 3];
    infer->result = flags >> 6 == 2 ? RESULT_COMPACT : RESULT_FULL;
    infer->input = tensor(in);
    infer->has_output = next(in) & 1;
    if (infer->has_output)
        infer->output = tensor(in);
}

static void send_request(struct client *client, struct input *in)
{
    static uint8_t bytes[PROTO_DATAGRAM_MAX];
    struct proto_request request = {.verb = next(in) % VERB_COUNT, .id = next(in)};
    int fd = -1, n;

    switch (request.verb) {
    case VERB_HELLO:
        request.hello.version = next(in) & 3;
        request.hello.name = name(0);
        break;
    case VERB_INFER:
        infer(in, &request.infer);
        break;
    case VERB_CANCEL:
        request.cancel.target = next(in);
        break;
    case VERB_BUFFER_CREATE:
        request.buffer_create.size_bytes = sizes[next(in) % ARRAY_SIZE(sizes)];
        request.buffer_create.kind = next(in) == 255 ? BUFFER_CUDA : BUFFER_HOST;
        break;
    case VERB_BUFFER_REGISTER:
        request.buffer_register.size_bytes = sizes[next(in) % ARRAY_SIZE(sizes)];
        break;
    case VERB_BUFFER_RELEASE:
        request.buffer_release.buffer = next(in) % 6;
        break;
    case VERB_MODEL_LIST:
        if (next(in) & 1)
            request.model_list.after = name(0);
        break;
    case VERB_MODEL_DESCRIBE:
    case VERB_MODEL_LOAD:
    case VERB_MODEL_UNLOAD:
        request.model.name = name(next(in));
        break;
    case VERB_MODEL_RELOAD:
    case VERB_STATS:
        if (next(in) & 1)
            request.model.name = name(next(in));
        break;
    default:
        break;
    }
    if (request.verb == VERB_BUFFER_REGISTER || next(in) > 250) {
        fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        check(fd >= 0 && ftruncate(fd, 4096) == 0 &&
              (next(in) > 200 || fallocate(fd, 0, 0, 4096) == 0));
    }
    n = codec_encode_request(&request, bytes, sizeof(bytes));
    if (n > 0)
        client_send(client, bytes, (size_t)n, fd);
    close_fd(fd);
}

static void step(struct input *in)
{
    uint8_t op = next(in);
    struct client *client = &clients[op >> 4 & 3 ? (op >> 4) % CLIENTS : 0];

    switch (op & 15) {
    case 0:
        client_open(client);
        break;
    case 1:
        client_close(client);
        break;
    case 2: {
        size_t n = next(in);

        n = n < in->n ? n : in->n;
        client_send(client, in->bytes, n, -1);
        in->bytes += n;
        in->n -= n;
        break;
    }
    case 3:
        atomic_store(&holds, next(in) & 1);
        break;
    case 4:
        op = next(in);
        atomic_store(&batch_result, op & 3);
        atomic_store(&job_result, op & 4 ? ENOSPC : op & 8 ? ENOMEM : 0);
        atomic_store(&load_fails, op & 16);
        atomic_store(&pin_fails, op & 32);
        break;
    case 5:
        client_read(client);
        break;
    case 6: /* several at once, before the loop turns */
        for (int i = next(in) & 7; i > 0; i--)
            send_request(client, in);
        break;
    default:
        send_request(client, in);
        break;
    }
    turn();
}

/* Lets everything end, and sees that it did. */
static void settle(void)
{
    double until = now_s() + 10;
    unsigned owed;

    atomic_store(&holds, false);
    do {
        owed = 0;
        turn();
        for (unsigned i = 0; i < CLIENTS; i++) {
            while (client_read(&clients[i]))
                ;
            owed += owed_to(&clients[i]);
        }
        sched_yield();
        check(now_s() < until);
    } while (owed > 0);
    for (unsigned i = 0; i < CLIENTS; i++)
        client_close(&clients[i]);
    while (server.uids.n > 0 || server.works.n > 0 || server.n_client_works > 0 ||
           server.registry.is_busy || server.scheduler.n_running > 0) {
        turn();
        sched_yield();
        check(now_s() < until);
    }
    for (int i = 0; i < CHARGE_COUNT; i++)
        check(server.uids.total[i] == 0);
    check(TAILQ_EMPTY(&server.conns) && server.scheduler.n_queued == 0 &&
          server.scheduler.queued_rows == 0 && atomic_load(&n_pins) == 0);
}

/* The next descriptor's number: higher when one was left open. */
static int lowest_fd(void)
{
    int fd = dup(0);

    check(fd >= 0);
    close(fd);
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const served[] = {"m", "n"};
    static bool started;
    struct input in = {data, size};
    int fd;

    if (!started)
        start();
    started = true;
    fd = lowest_fd();
    n_sends = 0;
    atomic_store(&batch_result, 0);
    atomic_store(&job_result, 0);
    atomic_store(&load_fails, false);
    atomic_store(&pin_fails, false);
    atomic_store(&device_failed, false);
    for (unsigned i = 0; i < CLIENTS; i++)
        clients[i].fd = -1;
    client_open(&clients[0]);
    /* Most sequences begin with a client that is let in. */
    if (size > 0 && data[0] & 1)
        send_request(&clients[0], &(struct input){(const uint8_t *)"\0\0\1\0", 4});
    while (in.n > 0)
        step(&in);
    settle();
    atomic_store(&load_fails, false);
    for (size_t i = 0; i < ARRAY_SIZE(served); i++) {
        if (!registry_find(&server.registry, served[i], 1))
            sync_models();
    }
    while (server.works.n > 0)
        turn();
    check(atomic_load(&n_plans) == 4);
    check(lowest_fd() == fd);
    return 0;
}
