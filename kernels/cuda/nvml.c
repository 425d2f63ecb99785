/*
 * nvml.c - how the device is, without ever waiting for it
 *
 * NVML calls can hang for good when a device is in trouble. So a thread asks once a second and
 * leaves the answer where nvml_read() finds it; a thread that hangs costs stale numbers and nothing
 * else. The library is opened at run time, with prototypes of our own: its header is no part of the
 * CUDA toolkit's runtime, and a host may lack the library.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cuda/nvml.h"

#define NVML_TEMPERATURE_GPU 0
#define NVML_CLOCK_SM        1

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_bus)(const char *bus, void **device);
    int (*memory)(void *device, struct nvml_memory *memory);
    int (*temperature)(void *device, int sensor, unsigned *celsius);
    int (*power)(void *device, unsigned *milliwatt);
    int (*clock)(void *device, int kind, unsigned *mhz);
    int (*driver)(char *text, unsigned size);
    char bus[32];
    void *device;
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool ending; /* under lock, as what follows */
    struct nvml_reading reading;
};

static struct nvml_reading unknown(void)
{
    return (struct nvml_reading){.temperature_c = -1, .power_w = -1, .clock_mhz = -1};
}

static bool find(struct nvml *nvml)
{
    const struct {
        const char *name;
        void **to;
    } table[] = {
        {"nvmlInit_v2", (void **)&nvml->init},
        {"nvmlShutdown", (void **)&nvml->shutdown},
        {"nvmlDeviceGetHandleByPciBusId_v2", (void **)&nvml->by_bus},
        {"nvmlDeviceGetMemoryInfo", (void **)&nvml->memory},
        {"nvmlDeviceGetTemperature", (void **)&nvml->temperature},
        {"nvmlDeviceGetPowerUsage", (void **)&nvml->power},
        {"nvmlDeviceGetClockInfo", (void **)&nvml->clock},
        {"nvmlSystemGetDriverVersion", (void **)&nvml->driver},
    };

    nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library)
        return false;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        *table[i].to = dlsym(nvml->library, table[i].name);
        if (!*table[i].to)
            return false;
    }
    return true;
}

static struct nvml_reading ask(const struct nvml *nvml)
{
    struct nvml_reading reading = unknown();
    struct nvml_memory memory;
    unsigned value;

    if (nvml->memory(nvml->device, &memory) == 0) {
        reading.total_bytes = memory.total;
        reading.free_bytes = memory.free;
    }
    if (nvml->temperature(nvml->device, NVML_TEMPERATURE_GPU, &value) == 0)
        reading.temperature_c = (int)value;
    if (nvml->power(nvml->device, &value) == 0)
        reading.power_w = (int)((value + 500) / 1000);
    if (nvml->clock(nvml->device, NVML_CLOCK_SM, &value) == 0)
        reading.clock_mhz = (int)value;
    if (nvml->driver(reading.driver, sizeof(reading.driver)) != 0)
        reading.driver[0] = 0;
    return reading;
}

static void *watch(void *data)
{
    struct nvml *nvml = data;
    struct nvml_reading reading;
    struct timespec next;

    if (nvml->init() != 0)
        return NULL;
    if (nvml->by_bus(nvml->bus, &nvml->device) != 0)
        goto out;
    pthread_mutex_lock(&nvml->lock);
    while (!nvml->ending) {
        pthread_mutex_unlock(&nvml->lock);
        reading = ask(nvml);
        clock_gettime(CLOCK_MONOTONIC, &next);
        next.tv_sec++;
        pthread_mutex_lock(&nvml->lock);
        nvml->reading = reading;
        while (!nvml->ending && pthread_cond_timedwait(&nvml->wake, &nvml->lock, &next) == 0)
            ;
    }
    pthread_mutex_unlock(&nvml->lock);
out:
    nvml->shutdown();
    return NULL;
}

static int start(struct nvml *nvml)
{
    sigset_t all, before;
    int r;

    /* Signals are for the threads that expect them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    r = -pthread_create(&nvml->thread, NULL, watch, nvml);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    nvml->running = r == 0;
    return r;
}

int nvml_new(const char *pci_bus_id, struct nvml **ret)
{
    struct nvml *nvml = calloc(1, sizeof(*nvml));
    pthread_condattr_t attributes;
    int r = 0;

    if (!nvml)
        return -ENOMEM;
    for (size_t i = 0; pci_bus_id[i] && i < sizeof(nvml->bus) - 1; i++)
        nvml->bus[i] = pci_bus_id[i];
    nvml->reading = unknown();
    pthread_mutex_init(&nvml->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&nvml->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    if (find(nvml))
        r = start(nvml);
    if (r < 0) {
        nvml_free(nvml);
        return r;
    }
    *ret = nvml;
    return 0;
}

struct nvml *nvml_free(struct nvml *nvml)
{
    struct timespec end;

    if (!nvml)
        return NULL;
    if (nvml->running) {
        pthread_mutex_lock(&nvml->lock);
        nvml->ending = true;
        pthread_cond_signal(&nvml->wake);
        pthread_mutex_unlock(&nvml->lock);
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec++;
        if (pthread_timedjoin_np(nvml->thread, NULL, &end) != 0)
            return NULL; /* it hangs in the driver, and keeps what it uses */
    }
    if (nvml->library)
        dlclose(nvml->library);
    pthread_cond_destroy(&nvml->wake);
    pthread_mutex_destroy(&nvml->lock);
    free(nvml);
    return NULL;
}

void nvml_read(struct nvml *nvml, struct nvml_reading *ret)
{
    pthread_mutex_lock(&nvml->lock);
    *ret = nvml->reading;
    pthread_mutex_unlock(&nvml->lock);
}
