/*
 * backend.c - the CUDA device behind backend.h
 *
 * One backend is one device. Every entry selects it first, because threads come and go and CUDA's
 * choice is per thread. Start and poll belong to the engine thread, load and unload touch only
 * their own plan, and what they share (cuBLASLt's handle, the watcher of the device) takes any
 * thread. One lock: plans are measured one after the other, because what one takes while another
 * has the device would decide how its requests are cut until it is loaded again.
 *
 * faulty.cu in faultless.c's place makes a backend for tests, never installed, whose batches go
 * wrong on request (backend_options.script).
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/faulty.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/measure.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/nvml.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/slot.h"

#define CAPABILITY_MIN 8 /* fp16 and NaN-propagating minimum on the device */

struct backend {
    int device;
    struct cudaDeviceProp properties;
    uint64_t link_bytes_per_s;
    struct gemm_library *library;
    struct nvml *nvml;
    struct slot *slots[SLOTS];
    struct report *reports[SLOTS]; /* of the batch in each */
    struct faulty faulty;
    pthread_mutex_t measuring;
};

static void cuda_close(struct backend *backend)
{
    if (!backend)
        return;
    cudaSetDevice(backend->device);
    for (int i = 0; i < SLOTS; i++)
        slot_free(backend->slots[i]);
    gemm_library_free(backend->library);
    nvml_free(backend->nvml);
    pthread_mutex_destroy(&backend->measuring);
    free(backend);
}

static int open_device(struct backend *backend, const struct backend_options *options,
                       struct report *report)
{
    int n, r;

    r = CUDA(report, cudaGetDeviceCount(&n));
    if (r < 0)
        return r;
    if (options->device < 0 || options->device >= n)
        return report_set(report, -ENODEV, "there is no CUDA device %d (of %d)", options->device,
                          n);
    r = CUDA(report, cudaGetDeviceProperties(&backend->properties, options->device));
    if (r < 0)
        return r;
    if (backend->properties.major < CAPABILITY_MIN)
        return report_set(report, -ENODEV, "%.60s has compute capability %d.%d, %d.0 is needed",
                          backend->properties.name, backend->properties.major,
                          backend->properties.minor, CAPABILITY_MIN);
    r = CUDA(report, cudaSetDevice(options->device));
    if (r == 0)
        r = CUDA(report, cudaFree(NULL)); /* makes the context */
    return r;
}

static int open_parts(struct backend *backend, struct report *report)
{
    char bus[32];
    int r;

    r = CUDA(report, cudaDeviceGetPCIBusId(bus, sizeof(bus), backend->device));
    if (r == 0) {
        r = nvml_new(bus, &backend->nvml);
        if (r < 0)
            report_set(report, r, "cannot start the thread that watches the device");
    }
    if (r == 0)
        r = gemm_library_new(&backend->library, report);
    for (unsigned i = 0; i < SLOTS && r == 0; i++)
        r = slot_new(backend->device, i, &backend->slots[i], report);
    return r;
}

/* A device that answers but cannot compute, or has no code in here, is found out now. */
static int probe(struct backend *backend, struct report *report)
{
    float host[2] = {1, 2}, *device;
    int r = CUDA(report, cudaMalloc((void **)&device, 2 * sizeof(host)));

    if (r < 0)
        return r;
    r = CUDA(report, cudaMemcpy(device, host, sizeof(host), cudaMemcpyHostToDevice));
    if (r == 0)
        r = widen_cuda(0, DTYPE_FLOAT32, device, device + 2, 2, report);
    if (r == 0)
        r = CUDA(report, cudaMemcpy(host, device + 2, sizeof(host), cudaMemcpyDeviceToHost));
    if (r == 0 && (host[0] != 1 || host[1] != 2))
        r = report_set(report, -ENODEV, "%.60s computes wrong", backend->properties.name);
    cudaFree(device);
    return r;
}

static int cuda_open(const struct backend_options *options, struct backend **ret,
                     struct report *report)
{
    struct backend *backend = calloc(1, sizeof(*backend));
    int r;

    if (!backend)
        return report_set(report, -ENOMEM, "out of memory");
    r = faulty_parse(&backend->faulty, options->script, report);
    if (r < 0) {
        free(backend);
        return r;
    }
    backend->device = options->device;
    pthread_mutex_init(&backend->measuring, NULL);
    r = open_device(backend, options, report);
    if (r == 0)
        r = probe(backend, report);
    if (r == 0)
        r = measure_link(&backend->link_bytes_per_s, report);
    if (r == 0)
        r = open_parts(backend, report);
    if (r < 0) {
        cuda_close(backend);
        return r == -ENOMEM ? r : report_prefix(report, -ENODEV, "CUDA: ");
    }
    *ret = backend;
    return 0;
}

static void cuda_info(struct backend *backend, struct backend_info *ret)
{
    const unsigned char *id = (const unsigned char *)backend->properties.uuid.bytes;
    struct nvml_reading reading;
    int runtime = 0;

    nvml_read(backend->nvml, &reading);
    cudaRuntimeGetVersion(&runtime);
    *ret = (struct backend_info){
        .name = "cuda",
        .slots = SLOTS,
        .device_memory = true,
        .parts = true,
        .memory_total_bytes =
            reading.total_bytes ? reading.total_bytes : backend->properties.totalGlobalMem,
        .memory_free_bytes = reading.free_bytes,
        .link_bytes_per_s = backend->link_bytes_per_s,
        .temperature_c = reading.temperature_c,
        .power_w = reading.power_w,
        .clock_mhz = reading.clock_mhz,
    };
    snprintf(ret->device, sizeof(ret->device), "%.127s", backend->properties.name);
    snprintf(ret->uuid, sizeof(ret->uuid),
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", id[0],
             id[1], id[2], id[3], id[4], id[5], id[6], id[7], id[8], id[9], id[10], id[11], id[12],
             id[13], id[14], id[15]);
    snprintf(ret->driver, sizeof(ret->driver), "%s", reading.driver);
    snprintf(ret->runtime, sizeof(ret->runtime), "CUDA %d.%d", runtime / 1000, runtime % 1000 / 10);
}

static void cuda_health(struct backend *backend, struct backend_health *ret)
{
    struct nvml_reading reading;

    nvml_read(backend->nvml, &reading);
    *ret = reading.health;
}

static int cuda_load(struct backend *backend, const struct pipeline *pipeline, uint32_t max_rows,
                     struct plan **ret, struct report *report)
{
    struct slot *slot = NULL;
    struct plan *plan = NULL;
    int r;

    r = CUDA(report, cudaSetDevice(backend->device));
    if (r == 0)
        r = plan_new(backend->library, pipeline, max_rows, &plan, report);
    if (r == 0)
        r = plan_arenas(plan, report);
    if (r == 0)
        r = slot_new(backend->device, 0, &slot, report);
    pthread_mutex_lock(&backend->measuring);
    if (r == 0)
        r = slot_warm(slot, plan, report);
    if (r == 0)
        r = measure_plan(slot, plan, report);
    pthread_mutex_unlock(&backend->measuring);
    for (int i = 0; i < SLOTS && r == 0; i++)
        r = graph_capture(slot, backend->slots[i], plan, report);
    slot_free(slot);
    if (r < 0) {
        plan_free(plan);
        return r;
    }
    *ret = plan;
    return 0;
}

static void cuda_plan_info(const struct plan *plan, struct plan_info *ret)
{
    *ret = (struct plan_info){
        .resident_bytes = plan->resident_bytes,
        .arena_bytes = SLOTS * plan->size.all,
        .launches = plan->launches,
        .n_costs = plan->n_costs,
    };
    memcpy(ret->costs, plan->costs, sizeof(ret->costs));
    snprintf(ret->text, sizeof(ret->text), "%s", plan->text);
}

static void cuda_unload(struct backend *backend, struct plan *plan)
{
    cudaSetDevice(backend->device);
    plan_free(plan);
}

static int cuda_start(struct backend *backend, unsigned slot, struct batch *batch)
{
    int r;

    memory_note_start(); /* before a call that pinning holds up */
    r = CUDA(batch->report, cudaSetDevice(backend->device));
    backend->reports[slot] = batch->report;
    if (r == 0)
        r = faulty_start(&backend->faulty, batch->report);
    if (r == 0)
        r = slot_start(backend->slots[slot], batch->plan, batch, batch->report);
    return r;
}

static int cuda_poll(struct backend *backend, unsigned slot)
{
    return slot_poll(backend->slots[slot], backend->reports[slot]);
}

static int cuda_pin(struct backend *backend, void *data, size_t size, bool gently,
                    struct memory **ret, struct report *report)
{
    int r = CUDA(report, cudaSetDevice(backend->device));

    return r < 0 ? r : memory_pin(data, size, gently, ret, report);
}

static void cuda_unpin(struct backend *backend, struct memory *memory, bool gently)
{
    cudaSetDevice(backend->device);
    memory_unpin(memory, gently);
}

static int cuda_memory_create(struct backend *backend, size_t size, uint64_t reserve_bytes,
                              struct memory **ret, int *ret_fd, struct report *report)
{
    int r = CUDA(report, cudaSetDevice(backend->device));

    return r < 0 ? r : memory_create(backend->device, size, reserve_bytes, ret, ret_fd, report);
}

static int cuda_memory_import(struct backend *backend, int fd, size_t size, struct memory **ret,
                              struct report *report)
{
    int r = CUDA(report, cudaSetDevice(backend->device));

    return r < 0 ? r : memory_import(backend->device, fd, size, ret, report);
}

static uint64_t cuda_memory_address(const struct memory *memory)
{
    return memory->address;
}

static void cuda_memory_free(struct backend *backend, struct memory *memory)
{
    cudaSetDevice(backend->device);
    memory_free(memory);
}

__attribute__((visibility("default"))) const struct backend_ops *fused_backend(void);

const struct backend_ops *fused_backend(void)
{
    static const struct backend_ops ops = {
        .abi = BACKEND_ABI,
        .name = "cuda",
        .open = cuda_open,
        .close = cuda_close,
        .info = cuda_info,
        .health = cuda_health,
        .load = cuda_load,
        .plan_info = cuda_plan_info,
        .unload = cuda_unload,
        .start = cuda_start,
        .poll = cuda_poll,
        .pin = cuda_pin,
        .unpin = cuda_unpin,
        .memory_create = cuda_memory_create,
        .memory_import = cuda_memory_import,
        .memory_address = cuda_memory_address,
        .memory_free = cuda_memory_free,
    };

    return &ops;
}
