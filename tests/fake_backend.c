/*
 * fake_backend.c - a backend that does what its script says
 *
 * A shared object for `fused --backend PATH`: it computes with the CPU backend, so that answers
 * stay checkable, and delays, fails, hangs or is lost where $FUSED_FAKE_SCRIPT says so. The script
 * is a list of NAME=VALUE, separated by semicolons. Batches count from 1.
 *
 *   only=N             fails, hangs and is lost on device N alone (everywhere)
 *   slots=N            batches in flight (1)
 *   delay_ms=N         a batch ends that long after its start (0)
 *   cost_step=N:U      a batch takes U us for each N rows, 3/4 of it for N / 2 at most, and says so
 *   reorder=1          batches with an odd number take three times as long
 *   fail_batch=N:R     batch N ends with -R
 *   fail_start=N:R     batch N is refused by start() with -R
 *   fail_job=N:R       the first request of batch N ends with -R, the others well
 *   hang_from=N        batches from N on never end
 *   sticky_from=N      from batch N on the device is lost, seen when the batch ends
 *   load_ms=N          loading a model takes that long
 *   info_ms=N          saying how the device is takes that long
 *   lost_load=N        from the N-th load on the device is lost; so for lost_pin and lost_memory
 *   oom_load_over=N    a model that keeps more than N bytes does not fit
 *   fail_pin=N:R       the N-th pages to be pinned end with -R
 *   oom_pin_over=N     pages of more than N bytes cannot be pinned
 *   pins=1             offers pin and unpin; closing with something pinned aborts
 *   gentle_ms=N        either takes that long where it is to be gentle
 *   device_memory=1    offers device memory, memfds; closing with some left aborts
 *   memory_mib=N       so much of it is there, says the device
 *   oom_memory_over=N  more than N bytes of it are not there
 *   forget=N           every N-th thing given back, pages or memory, is not
 *   open_fails=1       there is no device
 *   xid_ms=N:X         N ms after it was opened its driver reports the fault X
 *   xid_lost=1         which is the device's end
 *   ecc=N:U            errors of its memory that were corrected, and that were not, from then on
 *   ecc_before=U       those that were not, before (0); -1: not counted
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backend.h"

#define GRANULE ((size_t)2 << 20)

struct script {
    long slots, delay_ms, reorder, fail_batch, fail_batch_r, fail_start, fail_start_r, fail_job,
        fail_job_r, hang_from, sticky_from, load_ms, oom_load_over, oom_pin_over, pins, open_fails,
        device_memory, oom_memory_over, info_ms, lost_load, lost_pin, fail_pin, fail_pin_r,
        lost_memory, gentle_ms, only, forget, cost_step, cost_step_us, memory_mib, xid_ms, xid,
        xid_lost, ecc_corrected, ecc_uncorrected, ecc_before;
};

struct slot {
    struct batch *batch;
    long number;
    double ends_ms;
};

struct backend {
    struct backend *cpu;
    int device;
    struct script script;
    long n_started;
    double opened_ms;
    struct slot slots[BACKEND_SLOTS_MAX];
    atomic_long n_pinned, n_memory, memory_bytes, n_given_back;
    atomic_long n_loads, n_pins, n_memories; /* asked for, whatever came of it */
};

struct memory {
    struct backend *backend; /* whose it is */
    size_t size;
    void *data; /* device memory; NULL: pinned pages */
};

static struct backend_ops fake_ops;
static long cost_step, cost_step_us; /* the script's: a plan does not lead to it */

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static int script_parse(const char *text, struct script *script, struct report *report)
{
    const struct {
        const char *name;
        long *value, *second;
    } words[] = {
        {"slots", &script->slots, NULL},
        {"delay_ms", &script->delay_ms, NULL},
        {"reorder", &script->reorder, NULL},
        {"fail_batch", &script->fail_batch, &script->fail_batch_r},
        {"fail_start", &script->fail_start, &script->fail_start_r},
        {"fail_job", &script->fail_job, &script->fail_job_r},
        {"hang_from", &script->hang_from, NULL},
        {"sticky_from", &script->sticky_from, NULL},
        {"load_ms", &script->load_ms, NULL},
        {"info_ms", &script->info_ms, NULL},
        {"oom_load_over", &script->oom_load_over, NULL},
        {"oom_pin_over", &script->oom_pin_over, NULL},
        {"pins", &script->pins, NULL},
        {"gentle_ms", &script->gentle_ms, NULL},
        {"open_fails", &script->open_fails, NULL},
        {"device_memory", &script->device_memory, NULL},
        {"oom_memory_over", &script->oom_memory_over, NULL},
        {"forget", &script->forget, NULL},
        {"lost_load", &script->lost_load, NULL},
        {"lost_pin", &script->lost_pin, NULL},
        {"fail_pin", &script->fail_pin, &script->fail_pin_r},
        {"lost_memory", &script->lost_memory, NULL},
        {"only", &script->only, NULL},
        {"memory_mib", &script->memory_mib, NULL},
        {"cost_step", &script->cost_step, &script->cost_step_us},
        {"xid_ms", &script->xid_ms, &script->xid},
        {"xid_lost", &script->xid_lost, NULL},
        {"ecc", &script->ecc_corrected, &script->ecc_uncorrected},
        {"ecc_before", &script->ecc_before, NULL},
    };

    script->slots = 1;
    script->only = -1;
    while (text && *text) {
        size_t n = strcspn(text, "=;"), i;
        char *end;

        for (i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            if (strlen(words[i].name) == n && memcmp(words[i].name, text, n) == 0)
                break;
        }
        if (i == sizeof(words) / sizeof(words[0]) || text[n] != '=')
            return report_set(report, -EINVAL, "script: \"%.*s\" is not known", (int)n, text);
        *words[i].value = strtol(text + n + 1, &end, 10);
        if (words[i].second && *end == ':')
            *words[i].second = strtol(end + 1, &end, 10);
        text = end + strspn(end, "; ");
    }
    return 0;
}

static int fake_open(const struct backend_options *options, struct backend **ret,
                     struct report *report)
{
    struct backend *backend = calloc(1, sizeof(*backend));
    int r;

    if (!backend)
        return report_set(report, -ENOMEM, "out of memory");
    backend->device = options->device;
    backend->opened_ms = now_ms();
    /* In CUDA's place it is given none. */
    r = script_parse(options->script ? options->script : getenv("FUSED_FAKE_SCRIPT"),
                     &backend->script, report);
    if (r == 0 && backend->script.only >= 0 && backend->script.only != backend->device)
        backend->script.fail_batch = backend->script.fail_start = backend->script.fail_job =
            backend->script.hang_from = backend->script.sticky_from = backend->script.lost_load =
                backend->script.lost_memory = backend->script.open_fails =
                    backend->script.oom_load_over = backend->script.xid = 0;
    cost_step = backend->script.cost_step;
    cost_step_us = backend->script.cost_step_us;
    if (r == 0 && backend->script.open_fails)
        r = report_set(report, -ENODEV, "the script says that there is no device");
    if (r == 0)
        r = backend_cpu()->open(options, &backend->cpu, report);
    if (r < 0) {
        free(backend);
        return r;
    }
    if (!backend->script.pins && backend->script.oom_pin_over == 0)
        fake_ops.pin = NULL;
    if (!backend->script.device_memory)
        fake_ops.memory_create = NULL;
    if (backend->script.xid_ms == 0)
        fake_ops.health = NULL;
    *ret = backend;
    return 0;
}

static void fake_close(struct backend *backend)
{
    if (atomic_load(&backend->n_pinned) != 0 || atomic_load(&backend->n_memory) != 0)
        abort();
    backend_cpu()->close(backend->cpu);
    free(backend);
}

static void fake_info(struct backend *backend, struct backend_info *ret)
{
    sleep_ms(backend->script.info_ms);
    backend_cpu()->info(backend->cpu, ret);
    snprintf(ret->name, sizeof(ret->name), "fake");
    snprintf(ret->uuid, sizeof(ret->uuid), "GPU-46414b45-0000-0000-0000-%012d",
             backend->device + 1);
    ret->device_memory = backend->script.device_memory;
    ret->slots = (unsigned)backend->script.slots;
    ret->memory_total_bytes = (uint64_t)backend->script.memory_mib << 20;
    if (ret->memory_total_bytes > 0)
        ret->memory_free_bytes =
            ret->memory_total_bytes - (uint64_t)atomic_load(&backend->memory_bytes);
}

static void fake_health(struct backend *backend, struct backend_health *ret)
{
    const struct script *script = &backend->script;
    bool is_time = now_ms() - backend->opened_ms >= (double)script->xid_ms;

    *ret = (struct backend_health){
        .watched = true, .ecc_uncorrected = script->ecc_before, .lost_by = "those of the script"};
    if (!is_time)
        return;
    ret->ecc_corrected = script->ecc_corrected;
    ret->ecc_uncorrected = script->ecc_uncorrected;
    ret->n_xids = script->xid > 0;
    ret->last_xid = (unsigned)script->xid;
    if (script->xid > 0 && script->xid_lost)
        snprintf(ret->lost, sizeof(ret->lost), "the driver reports Xid %ld", script->xid);
}

/* Counts a call, which ends so when the device is lost by then. */
static int count_call(atomic_long *n, long lost_from, struct report *report)
{
    if (atomic_fetch_add(n, 1) + 1 < lost_from || lost_from == 0)
        return 0;
    return report_set(report, -ENOTRECOVERABLE, "the script says that the device is lost");
}

static int fake_load(struct backend *backend, const struct pipeline *pipeline, uint32_t max_rows,
                     struct plan **ret, struct report *report)
{
    struct plan_info info;
    struct plan *plan;
    int r;

    sleep_ms(backend->script.load_ms);
    r = count_call(&backend->n_loads, backend->script.lost_load, report);
    if (r < 0)
        return r;
    r = backend_cpu()->load(backend->cpu, pipeline, max_rows, &plan, report);
    if (r < 0)
        return r;
    backend_cpu()->plan_info(plan, &info);
    if (backend->script.oom_load_over > 0 &&
        info.resident_bytes > (uint64_t)backend->script.oom_load_over) {
        backend_cpu()->unload(backend->cpu, plan);
        return report_set(report, -ENOMEM, "the plan needs %llu bytes, which are not there",
                          (unsigned long long)info.resident_bytes);
    }
    *ret = plan;
    return 0;
}

static uint32_t cost_of(uint64_t rows)
{
    uint64_t step = (uint64_t)cost_step, us = (uint64_t)cost_step_us;

    return (uint32_t)(rows <= step / 2 ? us * 3 / 4 : (rows + step - 1) / step * us);
}

static void fake_plan_info(const struct plan *plan, struct plan_info *ret)
{
    backend_cpu()->plan_info(plan, ret);
    ret->n_costs = 0;
    for (uint32_t k = 0; cost_step > 0 && ret->n_costs + 2 <= BACKEND_COSTS_MAX; k++) {
        uint32_t step = (uint32_t)cost_step, rows = k < 2 ? k * step / 2 + 1 : (k - 1) * step + 1;
        uint32_t last = k == 0 ? step / 2 : k * step;

        ret->costs[ret->n_costs++] = (struct backend_cost){rows, cost_of(rows)};
        ret->costs[ret->n_costs++] = (struct backend_cost){last, cost_of(last)};
    }
}

static void fake_unload(struct backend *backend, struct plan *plan)
{
    backend_cpu()->unload(backend->cpu, plan);
}

/* Device memory of another device is none of ours. */
static void check_memory(const struct backend *backend, const struct batch *batch)
{
    for (unsigned i = 0; i < batch->n_jobs; i++) {
        const struct memory *x = batch->jobs[i].x_memory, *y = batch->jobs[i].y_memory;

        if ((x && x->data && x->backend != backend) || (y && y->data && y->backend != backend))
            abort();
    }
}

static int fake_start(struct backend *backend, unsigned number, struct batch *batch)
{
    const struct script *script = &backend->script;
    struct slot *slot = &backend->slots[number];
    long delay_ms = script->delay_ms;

    if (number >= (unsigned)script->slots || slot->batch)
        abort();
    check_memory(backend, batch);
    backend->n_started++;
    if (backend->n_started == script->fail_start)
        return (int)-script->fail_start_r;
    if (script->reorder && backend->n_started % 2 == 1)
        delay_ms *= 3;
    *slot = (struct slot){batch, backend->n_started, now_ms() + (double)delay_ms};
    if (script->cost_step > 0)
        slot->ends_ms += cost_of(batch->rows) / 1e3;
    return 0;
}

static int fake_poll(struct backend *backend, unsigned number)
{
    const struct script *script = &backend->script;
    struct slot *slot = &backend->slots[number];
    struct batch *batch = slot->batch;
    int r;

    if (!batch)
        abort();
    if ((script->hang_from > 0 && slot->number >= script->hang_from) || now_ms() < slot->ends_ms)
        return 0;
    slot->batch = NULL;
    if (script->sticky_from > 0 && slot->number >= script->sticky_from)
        return -ENOTRECOVERABLE;
    if (slot->number == script->fail_batch)
        return (int)-script->fail_batch_r;
    /* Results appear only now, as late as a device would write them. */
    r = backend_cpu()->start(backend->cpu, 0, batch);
    while (r == 0)
        r = backend_cpu()->poll(backend->cpu, 0);
    if (slot->number == script->fail_job)
        batch->jobs[0].result = (int)-script->fail_job_r;
    return r;
}

static int fake_pin(struct backend *backend, void *data, size_t size, bool gently,
                    struct memory **ret, struct report *report)
{
    struct memory *memory;
    int r;

    (void)data;
    if (gently)
        sleep_ms(backend->script.gentle_ms);
    r = count_call(&backend->n_pins, backend->script.lost_pin, report);
    if (r < 0)
        return r;
    if (atomic_load(&backend->n_pins) == backend->script.fail_pin)
        return report_set(report, (int)-backend->script.fail_pin_r, "the script says so");
    if (backend->script.oom_pin_over > 0 && size > (size_t)backend->script.oom_pin_over)
        return report_set(report, -ENOMEM, "the pages cannot be pinned");
    memory = calloc(1, sizeof(*memory));
    if (!memory)
        return report_set(report, -ENOMEM, "out of memory");
    memory->backend = backend;
    memory->size = size;
    atomic_fetch_add(&backend->n_pinned, 1);
    *ret = memory;
    return 0;
}

/* True for what the script says is never given back. */
static bool forgets(struct backend *backend)
{
    long n = atomic_fetch_add(&backend->n_given_back, 1) + 1;

    return backend->script.forget > 0 && n % backend->script.forget == 0;
}

static void fake_unpin(struct backend *backend, struct memory *memory, bool gently)
{
    if (gently)
        sleep_ms(backend->script.gentle_ms);
    if (forgets(backend))
        return;
    atomic_fetch_sub(&backend->n_pinned, 1);
    free(memory);
}

/* Maps a memfd of whole granules; the descriptor stays the caller's. */
static int memory_map(struct backend *backend, int fd, size_t size, struct memory **ret,
                      struct report *report)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    size_t mapped = (size + GRANULE - 1) / GRANULE * GRANULE;
    struct stat st;
    int r;

    if (!memory)
        return report_set(report, -ENOMEM, "out of memory");
    r = count_call(&backend->n_memories, backend->script.lost_memory, report);
    if (r < 0) {
        free(memory);
        return r;
    }
    memory->backend = backend;
    memory->size = mapped;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || (size_t)st.st_size != mapped) {
        free(memory);
        return report_set(report, -EINVAL, "the descriptor is no memory of that size");
    }
    memory->data = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory->data == MAP_FAILED) {
        free(memory);
        return report_set(report, -EINVAL, "the memory cannot be mapped");
    }
    atomic_fetch_add(&backend->n_memory, 1);
    *ret = memory;
    return 0;
}

/* memory_mib is looked at and taken at once, as the reserve wants it. */
static int memory_take(struct backend *backend, size_t mapped, uint64_t reserve_bytes,
                       struct report *report)
{
    long all = backend->script.memory_mib << 20, now = atomic_load(&backend->memory_bytes);

    do {
        uint64_t left = all > now ? (uint64_t)(all - now) : 0;

        if (all > 0 && (left < mapped || left - mapped < reserve_bytes))
            return report_set(report, -ENOMEM, "the device would keep less than its reserve");
    } while (!atomic_compare_exchange_weak(&backend->memory_bytes, &now, now + (long)mapped));
    return 0;
}

static int fake_memory_create(struct backend *backend, size_t size, uint64_t reserve_bytes,
                              struct memory **ret, int *ret_fd, struct report *report)
{
    size_t mapped = (size + GRANULE - 1) / GRANULE * GRANULE;
    int fd, r;

    if (backend->script.oom_memory_over > 0 && size > (size_t)backend->script.oom_memory_over)
        return report_set(report, -ENOMEM, "the device has no memory for it");
    r = memory_take(backend, mapped, reserve_bytes, report);
    if (r < 0)
        return r;
    fd = memfd_create("fake", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)mapped) != 0)
        r = report_set(report, -ENOMEM, "no memfd");
    else
        r = memory_map(backend, fd, size, ret, report);
    if (r < 0)
        atomic_fetch_sub(&backend->memory_bytes, (long)mapped);
    if (r < 0 && fd >= 0)
        close(fd);
    if (r == 0)
        *ret_fd = fd;
    return r;
}

static int fake_memory_import(struct backend *backend, int fd, size_t size, struct memory **ret,
                              struct report *report)
{
    int r = memory_map(backend, fd, size, ret, report);

    if (r == 0)
        atomic_fetch_add(&backend->memory_bytes, (long)(*ret)->size);
    return r;
}

static uint64_t fake_memory_address(const struct memory *memory)
{
    return (uintptr_t)memory->data;
}

static void fake_memory_free(struct backend *backend, struct memory *memory)
{
    if (forgets(backend))
        return;
    munmap(memory->data, memory->size);
    atomic_fetch_sub(&backend->memory_bytes, (long)memory->size);
    free(memory);
    atomic_fetch_sub(&backend->n_memory, 1);
}

static struct backend_ops fake_ops = {
    .abi = BACKEND_ABI,
    .name = "fake",
    .open = fake_open,
    .close = fake_close,
    .info = fake_info,
    .health = fake_health,
    .load = fake_load,
    .plan_info = fake_plan_info,
    .unload = fake_unload,
    .start = fake_start,
    .poll = fake_poll,
    .pin = fake_pin,
    .unpin = fake_unpin,
    .memory_create = fake_memory_create,
    .memory_import = fake_memory_import,
    .memory_address = fake_memory_address,
    .memory_free = fake_memory_free,
};

__attribute__((visibility("default"))) const struct backend_ops *fused_backend(void);

const struct backend_ops *fused_backend(void)
{
    return &fake_ops;
}
