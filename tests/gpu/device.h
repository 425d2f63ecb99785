/*
 * device.h - the GPU backend for tests: opened once, and where wanted made to look synchronous
 *
 * FUSED_CUDA names the shared object; without it, it is the one two folders above the program. A
 * machine without a device skips (77), unless FUSED_NEED_GPU is set.
 */
#pragma once

#include "tests/kernels/fixture.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels/backend.h"

/* The backend and its functions; script is for the faulty build. */
struct device {
    const struct backend_ops *ops;
    struct backend *backend;
};

static inline const struct backend_ops *device_library(const char *name)
{
    char path[600], self[512];
    const char *given = getenv("FUSED_CUDA");
    backend_symbol symbol;
    void *library;
    ssize_t n;

    if (given && strcmp(name, "fused-cuda.so") == 0) {
        snprintf(path, sizeof(path), "%s", given);
    } else {
        n = readlink("/proc/self/exe", self, sizeof(self) - 1);
        assert_true(n > 0);
        self[n] = 0;
        for (int i = 0; i < 3; i++)
            *strrchr(self, '/') = 0;
        snprintf(path, sizeof(path), "%s/%s", self, name);
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("%s\n", dlerror());
        exit(getenv("FUSED_NEED_GPU") ? 1 : 77);
    }
    symbol = (backend_symbol)dlsym(library, BACKEND_SYMBOL);
    assert_non_null(symbol);
    assert_int_equal(symbol()->abi, BACKEND_ABI);
    return symbol();
}

static inline struct device device_open(const char *library, const char *script)
{
    struct backend_options options = {.script = script};
    struct device device = {.ops = device_library(library)};
    struct report report;
    int r = device.ops->open(&options, &device.backend, &report);

    if (r < 0) {
        printf("%s\n", report.text);
        exit(r == -ENODEV && !getenv("FUSED_NEED_GPU") ? 77 : 1);
    }
    return device;
}

/* Opened on first use, for the whole program. */
static inline struct device *device_get(void)
{
    static struct device device;

    if (!device.ops)
        device = device_open("fused-cuda.so", NULL);
    return &device;
}

static inline double device_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Waits for a batch in a slot; what poll said last. */
static inline int device_wait(const struct device *device, unsigned slot, double seconds)
{
    double end = device_now() + seconds;
    int r;

    do {
        r = device->ops->poll(device->backend, slot);
    } while (r == 0 && device_now() < end);
    return r;
}

static inline void device_run(const struct device *device, struct plan *plan, struct job *jobs,
                              unsigned n)
{
    struct batch batch = {.plan = plan, .jobs = jobs, .n_jobs = n};

    for (unsigned i = 0; i < n; i++)
        batch.rows += jobs[i].rows;
    assert_int_equal(device->ops->start(device->backend, 0, &batch), 0);
    assert_int_equal(device_wait(device, 0, 60), 1);
}

static inline struct plan *device_load(const struct device *device, const struct pipeline *pipeline,
                                       uint32_t max_rows)
{
    struct report report;
    struct plan *plan;

    if (device->ops->load(device->backend, pipeline, max_rows, &plan, &report) < 0)
        fail_msg("%s", report.text);
    return plan;
}

/* Bytes between host and device memory, by the driver itself. A copy from pageable memory may
 * return before its last bytes are on the device, and slots wait for no other stream. */
static inline void device_copy(void *to, const void *from, size_t size)
{
    static int (*copy)(uint64_t, uint64_t, size_t), (*synchronize)(void *);

    if (!copy) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

        assert_non_null(driver);
        *(void **)&copy = dlsym(driver, "cuMemcpy");
        *(void **)&synchronize = dlsym(driver, "cuStreamSynchronize");
        assert_true(copy && synchronize);
    }
    assert_int_equal(copy((uint64_t)to, (uint64_t)from, size), 0);
    assert_int_equal(synchronize(NULL), 0);
}

/* Memory that the device knows: pinned pages (on_device false) or device memory. */
struct region {
    struct memory *memory;
    char *at;
    size_t size;
    bool on_device;
    int fd;
};

static inline struct region region_new(const struct device *device, size_t size, bool on_device)
{
    struct region region = {.on_device = on_device, .fd = -1};
    struct report report;
    int r;

    region.size = (size + 4095) / 4096 * 4096;
    if (on_device) {
        r = device->ops->memory_create(device->backend, region.size, 0, &region.memory, &region.fd,
                                       &report);
        if (r == 0)
            region.at = (char *)device->ops->memory_address(region.memory);
    } else {
        region.at = mmap(NULL, region.size, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        assert_true(region.at != MAP_FAILED);
        r = device->ops->pin(device->backend, region.at, region.size, false, &region.memory,
                             &report);
    }
    if (r < 0)
        fail_msg("%s", report.text);
    return region;
}

static inline void region_free(const struct device *device, struct region *region)
{
    if (region->on_device) {
        close(region->fd);
        device->ops->memory_free(device->backend, region->memory);
    } else {
        device->ops->unpin(device->backend, region->memory, false);
        munmap(region->at, region->size);
    }
}

/* Into a region or out of one. What the device reads from pinned pages in one copy may not cross
 * from one piece that was pinned to the next, so this process copies those itself. */
static inline void region_copy(const struct region *region, void *to, const void *from, size_t size)
{
    if (region->on_device)
        device_copy(to, from, size);
    else
        memcpy(to, from, size);
}

/* Runs jobs over plain memory with their data in one kind of memory: 0 plain, 1 pinned, 2 on the
 * device. Results come back to the jobs' own y. `shift` moves them off whole 16 bytes. */
static inline void device_run_in(const struct device *device, struct plan *plan, struct job *jobs,
                                 unsigned n, const size_t *x_size, int kind, size_t shift)
{
    struct job *moved = calloc(n, sizeof(*moved));
    size_t total = 0, at = 0;
    struct region region;

    assert_non_null(moved);
    if (kind == 0) {
        device_run(device, plan, jobs, n);
        free(moved);
        return;
    }
    for (unsigned i = 0; i < n; i++)
        total += (x_size[i] + 15) / 16 * 16 + (jobs[i].y_size + 15) / 16 * 16 + 2 * shift;
    region = region_new(device, total + 16, kind == 2);
    for (unsigned i = 0; i < n; i++) {
        moved[i] = jobs[i];
        moved[i].x = region.at + at + shift;
        moved[i].x_memory = moved[i].y_memory = region.memory;
        at += (x_size[i] + 15) / 16 * 16 + shift;
        moved[i].y = region.at + at + shift;
        at += (jobs[i].y_size + 15) / 16 * 16 + shift;
        region_copy(&region, (void *)moved[i].x, jobs[i].x, x_size[i]);
    }
    device_run(device, plan, moved, n);
    for (unsigned i = 0; i < n; i++) {
        if (moved[i].result == 0)
            region_copy(&region, jobs[i].y, moved[i].y, jobs[i].y_size);
        jobs[i].result = moved[i].result;
        jobs[i].n_full = moved[i].n_full;
    }
    region_free(device, &region);
    free(moved);
}

/*
 * For tests written for the CPU backend: start() returns when the batch has ended, each batch's
 * data lies in another kind of memory than the one before, open() and close() keep one backend.
 */
static const struct pipeline *device_pipeline; /* of the plan that was loaded last */
static bool device_done;

static inline int device_sync_open(const struct backend_options *options, struct backend **ret,
                                   struct report *report)
{
    (void)options, (void)report;
    *ret = device_get()->backend;
    return 0;
}

static inline void device_sync_close(struct backend *backend)
{
    (void)backend;
}

static inline int device_sync_load(struct backend *backend, const struct pipeline *pipeline,
                                   uint32_t max_rows, struct plan **ret, struct report *report)
{
    device_pipeline = pipeline;
    return device_get()->ops->load(backend, pipeline, max_rows, ret, report);
}

static inline void device_sync_unload(struct backend *backend, struct plan *plan)
{
    device_get()->ops->unload(backend, plan);
}

static inline int device_sync_start(struct backend *backend, unsigned slot, struct batch *batch)
{
    static int turn;
    size_t *sizes = calloc(batch->n_jobs, sizeof(*sizes));

    (void)backend, (void)slot;
    assert_non_null(sizes);
    for (unsigned i = 0; i < batch->n_jobs; i++)
        sizes[i] = batch->jobs[i].rows * (size_t)shape_elements(&device_pipeline->in) *
                   dtype_size(device_pipeline->dtype);
    device_run_in(device_get(), batch->plan, batch->jobs, batch->n_jobs, sizes, turn % 3,
                  turn % 2 ? dtype_size(device_pipeline->dtype) * 2 : 0);
    turn++;
    free(sizes);
    device_done = true;
    return 0;
}

static inline int device_sync_poll(struct backend *backend, unsigned slot)
{
    bool done = device_done;

    (void)backend, (void)slot;
    device_done = false;
    return done;
}

static inline const struct backend_ops *device_sync(void)
{
    static const struct backend_ops ops = {
        .abi = BACKEND_ABI,
        .name = "cuda",
        .open = device_sync_open,
        .close = device_sync_close,
        .load = device_sync_load,
        .unload = device_sync_unload,
        .start = device_sync_start,
        .poll = device_sync_poll,
    };

    return &ops;
}

static inline void *array(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);

    assert_non_null(p);
    return p;
}

/* Runs them on the device, those that TESTS names if it is set; says how many failed. */
static inline int device_run_tests(struct fixture *fixture, const struct CMUnitTest *tests,
                                   size_t n)
{
    int r;

    device_get();
    fixture_make(fixture);
    if (getenv("TESTS"))
        cmocka_set_test_filter(getenv("TESTS"));
    r = _cmocka_run_group_tests("tests", tests, n, NULL, NULL);
    fixture_remove(fixture);
    return r;
}
