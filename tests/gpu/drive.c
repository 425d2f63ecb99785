/*
 * drive.c - what serve.sh asks of daemons that compute on the GPU, through the client library
 *
 *     drive golden NAME...                 golden cases: inline, from host and from device buffers
 *     drive traffic NAME KIND MS CLIENTS   the same case again and again, each client on its own
 *                                          buffers (KIND inline, host or device): every answer has
 *                                          the bits of the first one. DRIVE_HOLD_MIB: the first
 *                                          client has a buffer of that size as well
 *     drive swap NAME DIR MS CLIENTS       traffic while NAME.1 and NAME.2 of DIR take turns as its
 *                                          weights: each answer is one version's, and the newest's
 *                                          when no reload was near
 *     drive mute NAME                      200 requests whose answers nobody reads, until killed
 *     drive spoil NAME                     memory that is truncated and punched while it is used
 *     drive fill MIB                       takes device memory until MIB are left; until killed
 *
 * $FUSED_SOCKET is the daemon's, DRIVE_DEVICE the index of the device that buffers lie on (0). Ends
 * with 0 when everything was as it must be; prints counts.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

#include "client/fused.h"
#include "tests/kernels/golden.h"

#define CLIENTS_MAX 64
#define TIMEOUT_MS  20000

enum kind { KIND_INLINE, KIND_HOST, KIND_DEVICE };

/* A golden case as requests. */
struct load {
    const char *name;
    struct golden golden;
    struct fused_tensor input, output; /* dtype and shape */
    size_t in_bytes, out_bytes;
    enum kind kind;
};

/* One connection with room for one request. */
struct seat {
    const struct load *load;
    struct fused *f;
    struct fused_buffer *x, *y;
    void *in, *out; /* this side's copy, or the buffers' own pages */
};

static _Noreturn void die(const char *what, const char *why)
{
    fprintf(stderr, "drive: %s: %s\n", what, why);
    exit(1);
}

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* ---- the driver, for device memory ---- */

static void *driver_find(const char *name)
{
    static void *library;
    void *found;

    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    found = library ? dlsym(library, name) : NULL;
    if (!found)
        die(name, "no driver");
    return found;
}

static void driver_ok(int r, const char *what)
{
    if (r != 0) {
        fprintf(stderr, "drive: %s: CUDA error %d\n", what, r);
        exit(1);
    }
}

static unsigned device_index(void)
{
    const char *text = getenv("DRIVE_DEVICE");

    return text ? (unsigned)strtoul(text, NULL, 10) : 0;
}

/* For each thread: the primary context of the device, which the client library uses too. */
static void driver_begin(void)
{
    int (*init)(unsigned), (*get)(int *, int), (*retain)(void **, int), (*use)(void *), device;
    void *context;

    *(void **)&init = driver_find("cuInit");
    *(void **)&get = driver_find("cuDeviceGet");
    *(void **)&retain = driver_find("cuDevicePrimaryCtxRetain");
    *(void **)&use = driver_find("cuCtxSetCurrent");
    driver_ok(init(0), "cuInit");
    driver_ok(get(&device, (int)device_index()), "cuDeviceGet");
    driver_ok(retain(&context, device), "cuDevicePrimaryCtxRetain");
    driver_ok(use(context), "cuCtxSetCurrent");
}

/* A copy from pageable memory may return before its last bytes are on the device. */
static void driver_copy(uint64_t to, uint64_t from, size_t size)
{
    int (*copy)(uint64_t, uint64_t, size_t), (*synchronize)(void *);

    *(void **)&copy = driver_find("cuMemcpy");
    *(void **)&synchronize = driver_find("cuStreamSynchronize");
    driver_ok(copy(to, from, size), "cuMemcpy");
    driver_ok(synchronize(NULL), "cuStreamSynchronize");
}

/* ---- a case, and a seat at the daemon ---- */

static enum kind kind_of(const char *text)
{
    return strcmp(text, "inline") == 0 ? KIND_INLINE
           : strcmp(text, "host") == 0 ? KIND_HOST
                                       : KIND_DEVICE;
}

static void load_open(struct load *load, const char *name, enum kind kind)
{
    const struct pipeline *pipeline;
    struct shape in, out;

    *load = (struct load){.name = name, .kind = kind};
    golden_open(name, &load->golden);
    pipeline = load->golden.pipeline;
    if (pipeline->dtype != DTYPE_FLOAT32)
        die(name, "is not of float32");
    in = pipeline->in;
    out = pipeline->out;
    in.dims[in.batch] = out.dims[out.batch] = load->golden.rows;
    load->input = fused_tensor_in(NULL, 0, FUSED_FLOAT32, in.rank, in.dims);
    load->output = fused_tensor_in(NULL, 0, FUSED_FLOAT32, out.rank, out.dims);
    load->in_bytes =
        (size_t)load->golden.rows * (size_t)shape_elements(&pipeline->in) * sizeof(float);
    load->out_bytes = (size_t)load->golden.n * sizeof(float);
}

static bool load_fits_inline(const struct load *load)
{
    return load->in_bytes <= FUSED_INLINE_MAX && load->out_bytes <= FUSED_INLINE_MAX;
}

static void must(int code, const struct fused *f, const char *what)
{
    if (code == 0)
        return;
    fprintf(stderr, "drive: %s: %s: %s\n", what, fused_code_name(code), fused_error_text(f));
    exit(1);
}

static void seat_take(struct seat *seat, const struct load *load)
{
    *seat = (struct seat){.load = load};
    must(fused_connect(NULL, "drive", &seat->f), NULL, "connect");
    fused_set_timeout(seat->f, TIMEOUT_MS);
    if (load->kind == KIND_HOST) {
        must(fused_buffer_create(seat->f, load->in_bytes, &seat->x), seat->f, "buffer");
        must(fused_buffer_create(seat->f, load->out_bytes, &seat->y), seat->f, "buffer");
        seat->in = fused_buffer_data(seat->x);
        seat->out = fused_buffer_data(seat->y);
        memcpy(seat->in, load->golden.x, load->in_bytes);
        return;
    }
    seat->in = load->golden.x;
    seat->out = malloc(load->out_bytes);
    if (!seat->out)
        die("memory", "none");
    if (load->kind == KIND_DEVICE) {
        driver_begin();
        must(fused_buffer_create_on(seat->f, device_index(), load->in_bytes, &seat->x), seat->f,
             "buffer");
        must(fused_buffer_create_on(seat->f, device_index(), load->out_bytes, &seat->y), seat->f,
             "buffer");
        driver_copy(fused_buffer_device(seat->x), (uint64_t)(uintptr_t)seat->in, load->in_bytes);
    }
}

static void seat_leave(struct seat *seat)
{
    fused_buffer_free(seat->x);
    fused_buffer_free(seat->y);
    fused_close(seat->f);
    if (seat->load->kind != KIND_HOST)
        free(seat->out);
}

static struct fused_infer seat_call(const struct seat *seat)
{
    const struct golden *golden = &seat->load->golden;
    struct fused_infer call = FUSED_INFER_INIT;

    call.model = seat->load->name;
    call.input = seat->load->input;
    call.output = seat->load->output;
    call.input.buffer = seat->x;
    call.output.buffer = seat->y;
    if (seat->load->kind == KIND_INLINE) {
        call.input.data = seat->in;
        call.output.data = seat->out;
    }
    call.train = golden->train;
    call.seed = golden->seed;
    call.offset = golden->offset;
    return call;
}

/* One request; its result is then in seat->out. The code of its answer, or a negative errno. */
static int seat_run(struct seat *seat)
{
    struct fused_infer call = seat_call(seat);
    struct fused_result result;
    int code;

    if (seat->load->kind != KIND_DEVICE)
        memset(seat->out, 0xff, seat->load->out_bytes);
    code = fused_run(seat->f, &call, &result);
    if (code == 0 && seat->load->kind == KIND_DEVICE)
        driver_copy((uint64_t)(uintptr_t)seat->out, fused_buffer_device(seat->y),
                    seat->load->out_bytes);
    return code;
}

/* ---- golden ---- */

static bool is_right(const struct golden *golden, const float *y)
{
    for (int64_t i = 0; i < golden->n; i++) {
        double want = golden->y[i], tolerance = 1e-4 + 1e-4 * fabs(want);

        if (golden->y64)
            tolerance = fmax(tolerance, fabs(want - golden->y64[i]));
        if (isnan(want) != isnan(y[i]) ||
            (!isnan(want) && y[i] != golden->y[i] && !(fabs(y[i] - want) <= tolerance))) {
            printf("y[%" PRId64 "] is %.9g, not %.9g: ", i, (double)y[i], want);
            return false;
        }
    }
    return true;
}

static int golden(char **names, int n)
{
    static const char *const kinds[] = {"inline", "host", "device"};
    const char *only = getenv("DRIVE_KINDS");
    int wrong = 0;

    for (int i = 0; i < n; i++) {
        for (enum kind kind = KIND_INLINE; kind <= KIND_DEVICE; kind++) {
            struct load load;
            struct seat seat;
            bool right;

            load_open(&load, names[i], kind);
            if ((kind == KIND_INLINE && !load_fits_inline(&load)) ||
                (only && !strstr(only, kinds[kind]))) {
                golden_close(&load.golden);
                continue;
            }
            seat_take(&seat, &load);
            must(seat_run(&seat), seat.f, names[i]);
            right = is_right(&load.golden, seat.out);
            wrong += !right;
            printf("%s, %s: %s\n", names[i], kinds[kind], right ? "right" : "WRONG");
            seat_leave(&seat);
            golden_close(&load.golden);
        }
    }
    return wrong > 0;
}

/* ---- traffic ---- */

struct client {
    pthread_t thread;
    const struct load *load;
    uint64_t ok[2], wrong, stale, lost, no_memory, other, ended;
};

static void *expected[2]; /* of each version of the weights; [1] only while they are swapped */
static atomic_uint epoch; /* odd: a reload runs; else epoch / 2 % 2 is the version */
static atomic_bool over;
static atomic_int n_running;
static pthread_barrier_t seated; /* nobody runs before all have their buffers */
static _Atomic double last_ok_ms;

/* Which of the results it is; -1: none. */
static int version_of(const struct load *load, const void *y)
{
    for (int v = 0; v < 2; v++) {
        if (expected[v] && memcmp(expected[v], y, load->out_bytes) == 0)
            return v;
    }
    return -1;
}

static void count(struct client *client, const struct seat *seat, int code, unsigned before)
{
    int version;

    if (code < 0) {
        client->ended++;
    } else if (code == FUSED_GPU_LOST) {
        client->lost++;
    } else if (code == FUSED_NO_MEMORY) {
        client->no_memory++;
    } else if (code != 0) {
        client->other++;
    } else {
        version = version_of(client->load, seat->out);
        last_ok_ms = now_ms();
        if (version < 0)
            client->wrong++;
        else if (before == epoch && before % 2 == 0 && version != (int)(before / 2 % 2))
            client->stale++;
        else
            client->ok[version]++;
    }
}

static void *client_run(void *argument)
{
    struct client *client = argument;
    struct seat seat;

    seat_take(&seat, client->load);
    pthread_barrier_wait(&seated);
    while (!over) {
        unsigned before = epoch;
        int code = seat_run(&seat);

        count(client, &seat, code, before);
        if (code < 0 || code == FUSED_GPU_LOST)
            break;
    }
    seat_leave(&seat);
    n_running--;
    return NULL;
}

static void first_result(const struct load *load, void **ret)
{
    struct seat seat;

    seat_take(&seat, load);
    must(seat_run(&seat), seat.f, load->name);
    *ret = malloc(load->out_bytes);
    if (!*ret)
        die("memory", "none");
    memcpy(*ret, seat.out, load->out_bytes);
    seat_leave(&seat);
}

static void clients_start(struct client *clients, int n, const struct load *load)
{
    last_ok_ms = now_ms();
    n_running = n;
    if (pthread_barrier_init(&seated, NULL, (unsigned)n) != 0)
        die("barrier", "none");
    for (int i = 0; i < n; i++) {
        clients[i] = (struct client){.load = load};
        if (pthread_create(&clients[i].thread, NULL, client_run, &clients[i]) != 0)
            die("thread", "none");
    }
}

/* 0 when every answer was right. What the device, or memory, refused is for the caller to judge. */
static int clients_end(struct client *clients, int n)
{
    struct client sum = {0};
    double end_ms;

    for (int i = 0; i < n; i++) {
        const struct client *c = &clients[i];

        pthread_join(c->thread, NULL);
        sum.ok[0] += c->ok[0];
        sum.ok[1] += c->ok[1];
        sum.wrong += c->wrong;
        sum.stale += c->stale;
        sum.lost += c->lost;
        sum.no_memory += c->no_memory;
        sum.other += c->other;
        sum.ended += c->ended;
    }
    pthread_barrier_destroy(&seated);
    end_ms = now_ms();
    free(expected[0]);
    free(expected[1]);
    printf("ok=%" PRIu64 " of_second=%" PRIu64 " wrong=%" PRIu64 " stale=%" PRIu64
           " gpu_lost=%" PRIu64 " no_memory=%" PRIu64 " other=%" PRIu64 " ended=%" PRIu64
           " since_ok_ms=%.0f\n",
           sum.ok[0], sum.ok[1], sum.wrong, sum.stale, sum.lost, sum.no_memory, sum.other,
           sum.ended, end_ms - last_ok_ms);
    return sum.wrong + sum.stale + sum.other > 0;
}

static void hold(void)
{
    const char *mib = getenv("DRIVE_HOLD_MIB");
    struct fused_buffer *buffer;
    struct fused *f;

    if (!mib)
        return;
    must(fused_connect(NULL, "hold", &f), NULL, "connect");
    must(fused_buffer_create_device(f, strtoul(mib, NULL, 10) << 20, &buffer), f, "buffer");
}

static void sleep_ms(double ms)
{
    struct timespec pause = {.tv_sec = (time_t)(ms / 1e3)};

    pause.tv_nsec = (long)((ms - (double)pause.tv_sec * 1e3) * 1e6);
    nanosleep(&pause, NULL);
}

static int traffic(const char *name, const char *kind, double ms, int n)
{
    static struct client clients[CLIENTS_MAX];
    struct load load;
    int r;

    load_open(&load, name, kind_of(kind));
    first_result(&load, &expected[0]);
    hold();
    puts("running");
    fflush(stdout);
    clients_start(clients, n, &load);
    for (double end = now_ms() + ms; now_ms() < end && n_running > 0;)
        sleep_ms(20);
    over = true;
    r = clients_end(clients, n);
    golden_close(&load.golden);
    return r;
}

/* ---- swap ---- */

/* The weights file is replaced as a whole: what is being read is never changed. */
static void install(const char *dir, const char *name, int version)
{
    char from[512], next[512], to[512];

    snprintf(from, sizeof(from), "%s/%s.%d", dir, name, version + 1);
    snprintf(next, sizeof(next), "%s/%s.next", dir, name);
    snprintf(to, sizeof(to), "%s/%s.safetensors", dir, name);
    unlink(next);
    if (link(from, next) < 0 || rename(next, to) < 0)
        die(to, strerror(errno));
}

static int swap(const char *name, const char *dir, double ms, int n)
{
    static struct client clients[CLIENTS_MAX];
    struct load load;
    struct fused *f;
    double end;
    int r;

    load_open(&load, name, KIND_HOST);
    must(fused_connect(NULL, "swap", &f), NULL, "connect");
    for (int v = 1; v >= 0; v--) {
        install(dir, name, v);
        must(fused_reload(f, name, NULL), f, "reload");
        first_result(&load, &expected[v]);
    }
    if (memcmp(expected[0], expected[1], load.out_bytes) == 0)
        die(name, "both weights give the same result");
    clients_start(clients, n, &load);
    for (end = now_ms() + ms; now_ms() < end; sleep_ms(30)) {
        epoch++;
        install(dir, name, (int)((epoch + 1) / 2 % 2));
        must(fused_reload(f, name, NULL), f, "reload");
        epoch++;
    }
    over = true;
    printf("swaps=%u ", epoch / 2);
    fused_close(f);
    r = clients_end(clients, n);
    golden_close(&load.golden);
    return r;
}

/* ---- clients that misbehave ---- */

static _Noreturn void mute(const char *name)
{
    struct load load;
    struct seat seat;

    load_open(&load, name, KIND_INLINE);
    seat_take(&seat, &load);
    for (int i = 0; i < 200; i++) {
        struct fused_infer call = seat_call(&seat);

        must(fused_submit(seat.f, &call, NULL), seat.f, "submit");
    }
    puts("mute");
    fflush(stdout);
    for (;;)
        pause();
}

/* Registered memory whose size must not change, and whose pages go, while requests use it. */
static int spoil(const char *name)
{
    struct load load;

    load_open(&load, name, KIND_HOST);
    for (int round = 0; round < 30; round++) {
        size_t size = load.in_bytes > load.out_bytes ? load.in_bytes : load.out_bytes;
        int fd[2];
        struct seat seat = {.load = &load};
        struct fused_infer call;

        must(fused_connect(NULL, "spoil", &seat.f), NULL, "connect");
        for (int i = 0; i < 2; i++) {
            fd[i] = memfd_create("spoil", MFD_CLOEXEC | MFD_ALLOW_SEALING);
            if (fd[i] < 0 || posix_fallocate(fd[i], 0, (off_t)size) != 0)
                die("memfd", strerror(errno));
            must(fused_buffer_register(seat.f, fd[i], size, i ? &seat.y : &seat.x), seat.f,
                 "register");
        }
        for (int i = 0; i < 4; i++) {
            call = seat_call(&seat);
            must(fused_submit(seat.f, &call, NULL), seat.f, "submit");
            if (ftruncate(fd[i % 2], 0) == 0)
                die("ftruncate", "the memory could be truncated");
            if (fallocate(fd[i % 2], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)size) <
                0)
                die("fallocate", strerror(errno));
        }
        close(fd[0]);
        close(fd[1]);
        fused_close(seat.f); /* with answers on their way */
        fused_buffer_free(seat.x);
        fused_buffer_free(seat.y);
    }
    golden_close(&load.golden);
    puts("spoilt");
    return 0;
}

static _Noreturn void fill(size_t left)
{
    int (*info)(size_t *, size_t *), (*allocate)(uint64_t *, size_t);
    size_t free_bytes, total, step = (size_t)1 << 30;
    uint64_t address;

    driver_begin();
    *(void **)&info = driver_find("cuMemGetInfo_v2");
    *(void **)&allocate = driver_find("cuMemAlloc_v2");
    for (;;) {
        driver_ok(info(&free_bytes, &total), "cuMemGetInfo");
        while (step > left / 8 && step > free_bytes - left)
            step /= 2;
        if (free_bytes <= left || step <= left / 8 || allocate(&address, step) != 0)
            break;
    }
    printf("full: %zu MiB of %zu are free\n", free_bytes >> 20, total >> 20);
    fflush(stdout);
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    const char *what = argc > 2 ? argv[1] : "";
    int n = argc == 6 ? (int)strtol(argv[5], NULL, 10) : 0;
    bool is_timed = n > 0 && n <= CLIENTS_MAX;
    double ms = is_timed ? strtod(argv[4], NULL) : 0;

    if (strcmp(what, "golden") == 0)
        return golden(argv + 2, argc - 2);
    if (strcmp(what, "traffic") == 0 && is_timed)
        return traffic(argv[2], argv[3], ms, n);
    if (strcmp(what, "swap") == 0 && is_timed)
        return swap(argv[2], argv[3], ms, n);
    if (strcmp(what, "mute") == 0)
        mute(argv[2]);
    if (strcmp(what, "spoil") == 0)
        return spoil(argv[2]);
    if (strcmp(what, "fill") == 0)
        fill(strtoul(argv[2], NULL, 10) << 20);
    fputs("usage: see the head of drive.c\n", stderr);
    return 64;
}
