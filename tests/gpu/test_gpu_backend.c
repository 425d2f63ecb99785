/*
 * The backend as a library: what it says of its device, that it allocates nothing while serving,
 * what an unload gives back, what it refuses, memory shared through an fd, and how it fails.
 *
 * With an argument this program is its own child: it drives the faulty build and says by its exit
 * status whether that failed as it must.
 */
#include "tests/gpu/models.h"

#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>

extern char **environ;

static struct fixture fixture;

/* Allocations while serving: calls of malloc and its kin from the backend's own object. */

static atomic_int allocations;
static atomic_bool counting;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t size);

static void count_from(const void *caller)
{
    Dl_info info;

    if (counting && dladdr(caller, &info) && strstr(info.dli_fname, "fused-cuda.so"))
        allocations++;
}

void *malloc(size_t size)
{
    count_from(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    count_from(__builtin_return_address(0));
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    count_from(__builtin_return_address(0));
    return __libc_realloc(p, size);
}

static size_t device_free(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*info)(size_t *, size_t *);
    size_t free_bytes, total;

    *(void **)&info = dlsym(driver, "cuMemGetInfo_v2");
    assert_non_null(info);
    assert_int_equal(info(&free_bytes, &total), 0);
    return free_bytes;
}

static void test_info(void **state)
{
    struct device *device = device_get();
    struct backend_info info;

    (void)state;
    for (int i = 0; i < 30; i++) { /* the watcher's first reading takes a moment */
        device->ops->info(device->backend, &info);
        if (info.temperature_c >= 0)
            break;
        usleep(100000);
    }
    printf("%s %s, driver %s, %s, %u slots, %" PRIu64 " of %" PRIu64 " MiB free, %d C, %d W, %d "
           "MHz\n",
           info.device, info.uuid, info.driver, info.runtime, info.slots,
           info.memory_free_bytes >> 20, info.memory_total_bytes >> 20, info.temperature_c,
           info.power_w, info.clock_mhz);
    assert_string_equal(info.name, "cuda");
    assert_true(strlen(info.uuid) == 40);
    assert_true(info.memory_free_bytes > 0 && info.memory_free_bytes <= info.memory_total_bytes);
    assert_true(info.temperature_c > 0 && info.power_w > 0 && info.clock_mhz > 0);
    assert_true(info.driver[0] != 0);
}

/* Serving takes no memory, on the host or on the device. */
static void test_allocations(void **state)
{
    struct device *device = device_get();
    struct pipeline *a = models_a(&fixture, "float32", "fp32", 512, 512, 32);
    struct plan *plan_a = device_load(device, a, 256);
    struct pipeline *b = models_b(&fixture, true, 5, 9, 12, "0.0");
    struct plan *plan_b = device_load(device, b, 64);
    struct region pinned = region_new(device, 4 << 20, false);
    struct region plain = region_new(device, 4 << 20, true);
    size_t before;

    (void)state;
    models_input((float *)pinned.at, 1 << 20, 1, 0);
    for (int round = 0; round < 2; round++) { /* the first is CUDA's own: it counts nothing */
        before = device_free();
        counting = round > 0;
        for (uint32_t rows = 1; rows <= 60; rows += rows < 4 ? 1 : 13) {
            struct region *region = rows % 2 ? &pinned : &plain;
            struct job job = {.x = region->at,
                              .y = region->at + (1 << 20),
                              .y_size = 3 << 20,
                              .x_memory = region->memory,
                              .y_memory = region->memory,
                              .rows = rows};

            device_run(device, plan_a, &job, 1);
            assert_int_equal(job.result, 0);
            job.y_size = rows * (uint64_t)shape_elements(&b->out) * 4;
            job.train = true;
            device_run(device, plan_b, &job, 1);
            assert_int_equal(job.result, 0);
        }
        counting = false;
        if (round > 0 && device_free() != before)
            fail_msg("%zu bytes of device memory were free, then %zu", before, device_free());
    }
    assert_int_equal(allocations, 0);
    region_free(device, &pinned);
    region_free(device, &plain);
    device->ops->unload(device->backend, plan_a);
    device->ops->unload(device->backend, plan_b);
    pipeline_free(a);
    pipeline_free(b);
}

/* Everything that a load takes comes back with the unload. */
static void test_unload(void **state)
{
    struct device *device = device_get();
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", 2048, 2048, 128);
    size_t before = 0, after;

    (void)state;
    for (int round = 0; round < 6; round++) {
        if (round == 1) /* what the first leaves is the driver's pool */
            before = device_free();
        device->ops->unload(device->backend, device_load(device, pipeline, 256));
    }
    after = device_free();
    if (after < before)
        fail_msg("%zu bytes free, then %zu", before, after);
    pipeline_free(pipeline);
}

static void test_refusals(void **state)
{
    struct device *device = device_get();
    struct pipeline *a = models_a(&fixture, "float32", "fp32", 8192, 4096, 256);
    struct pipeline *b = models_b(&fixture, false, 5, 9, 12, "0.5");
    struct plan *plan;
    struct report report;
    size_t before = device_free();
    float *x = array((size_t)shape_elements(&b->in), 4);
    float *y = array((size_t)shape_elements(&b->out), 4);
    struct backend_options wrong = {.script = "fault"};
    struct backend *backend = NULL;
    struct job jobs[3] = {
        {.x = x, .y = y, .y_size = 16, .rows = 1, .compact = true},
        {.x = x, .y = y, .y_size = (uint64_t)shape_elements(&b->out) * 4 - 1, .rows = 1},
        {.x = x, .y = y, .y_size = (uint64_t)shape_elements(&b->out) * 4, .rows = 1},
    };

    (void)state;
    assert_int_equal(device->ops->open(&wrong, &backend, &report), -EINVAL);
    assert_string_equal(report.text, "this backend takes no script");
    assert_null(backend);
    assert_int_equal(device->ops->load(device->backend, a, 100u << 20, &plan, &report), -ENOMEM);
    printf("%s\n", report.text);
    assert_int_equal(device_free(), before);
    plan = device_load(device, b, 8);
    device_run(device, plan, jobs, 3);
    assert_int_equal(jobs[0].result, -EINVAL);
    assert_int_equal(jobs[1].result, -ENOSPC);
    assert_int_equal(jobs[2].result, 0);
    device_run(device, plan, jobs, 2); /* no job that can run */
    device->ops->unload(device->backend, plan);
    pipeline_free(a);
    pipeline_free(b);
    free(x);
    free(y);
}

/* Device memory through an fd: another mapping sees the same bytes, cleared at first; another kind
 * of fd, or a size beyond the memory's, is refused. */
static void test_device_memory(void **state)
{
    struct device *device = device_get();
    struct region region = region_new(device, 8 << 20, true);
    size_t before = device_free();
    struct memory *other;
    struct report report;
    uint32_t words[4] = {1, 2, 3, 4}, back[4];
    int fd;

    (void)state;
    device_copy(back, region.at + (5 << 20), sizeof(back));
    for (int i = 0; i < 4; i++)
        assert_int_equal(back[i], 0);
    if (device->ops->memory_import(device->backend, region.fd, 8 << 20, &other, &report) < 0)
        fail_msg("%s", report.text);
    device_copy((char *)device->ops->memory_address(other) + 4096, words, sizeof(words));
    device_copy(back, region.at + 4096, sizeof(back));
    assert_memory_equal(words, back, sizeof(words));
    device->ops->memory_free(device->backend, other);
    device_copy(back, region.at + 4096, sizeof(back));
    assert_memory_equal(words, back, sizeof(words));
    assert_true(device->ops->memory_import(device->backend, region.fd, 64 << 20, &other, &report) <
                0);
    printf("%s\n", report.text);
    fd = memfd_create("no device memory", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_true(device->ops->memory_import(device->backend, fd, 8 << 20, &other, &report) < 0);
    printf("%s\n", report.text);
    close(fd);
    assert_true(device->ops->memory_import(device->backend, region.fd, 0, &other, &report) < 0);
    assert_int_equal(device->ops->memory_create(device->backend, 8 << 20, before - (4 << 20),
                                                &other, &fd, &report),
                     -ENOMEM);
    printf("%s\n", report.text);
    assert_int_equal(device_free(), before);
    region_free(device, &region);
}

/* The faulty build, in a child. */

static int child(const char *what)
{
    struct device device;
    struct pipeline *pipeline;
    struct plan *plan;
    char script[32];
    float x[64] = {0}, y[64];
    struct job job = {.x = x, .y = y, .y_size = sizeof(y), .rows = 1};
    struct batch batch = {.jobs = &job, .n_jobs = 1, .rows = 1};
    double began;
    int r;

    snprintf(script, sizeof(script), "%s 2", what);
    device = device_open("fused-cuda-faulty.so", script);
    pipeline = models_build(&fixture,
                            "name = \"m\"; input = { shape = [64]; };"
                            "stages = ({ op = \"clamp\"; min = 0.0; });",
                            1);
    batch.plan = plan = device_load(&device, pipeline, 4);
    device_run(&device, plan, &job, 1);
    began = device_now();
    r = device.ops->start(device.backend, 1, &batch);
    if (strcmp(what, "memory") == 0) {
        assert_int_equal(r, -ENOMEM);
        device_run(&device, plan, &job, 1);
        return 0;
    }
    if (r == 0)
        r = device_wait(&device, 1, 2);
    printf("%s: %d after %.0f ms\n", what, r, (device_now() - began) * 1e3);
    fflush(stdout);
    if (strcmp(what, "fault") == 0)
        _exit(r == -ENOTRECOVERABLE && device_now() - began < 1 ? 0 : 1);
    _exit(r == 0 ? 0 : 1); /* hung: still not ended; the process must still be able to */
}

static void test_faults(void **state)
{
    static const char *const kinds[] = {"memory", "fault", "hang"};

    (void)state;
    for (int i = 0; i < 3; i++) {
        char *arguments[] = {(char *)"test_gpu_backend", (char *)kinds[i], NULL};
        double began = device_now();
        int status;
        pid_t pid;

        assert_int_equal(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("%s: status %#x", kinds[i], status);
        printf("%s: the process ended after %.1f s\n", kinds[i], device_now() - began);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_info),          cmocka_unit_test(test_allocations),
        cmocka_unit_test(test_unload),        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_device_memory), cmocka_unit_test(test_faults),
    };

    if (argc > 1)
        return child(argv[1]);
    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
