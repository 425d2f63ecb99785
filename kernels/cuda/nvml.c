/*
 * nvml.c - how the device is, without ever waiting for it
 *
 * NVML calls can hang for good when a device is in trouble. So a thread asks once a second and
 * leaves the answer where nvml_read() finds it; a thread that hangs costs stale numbers and nothing
 * else. The library is opened at run time, with prototypes of our own: its header is no part of the
 * CUDA toolkit's runtime, and a host may lack the library.
 *
 * Faults (Xid) are the device's, not ours: most are about some process on it, which may be another
 * user's, and CUDA tells whoever is hit. So they are counted and no more. After a few nothing on
 * the device can be relied on, whoever caused them: those make it lost.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cuda/nvml.h"

#define NVML_TEMPERATURE_GPU 0
#define NVML_CLOCK_SM        1
#define NVML_CORRECTED       0
#define NVML_UNCORRECTED     1
#define NVML_SINCE_LOADED    0 /* "volatile" */
#define NVML_EVENT_XID       8ull
#define NVML_GPU_IS_LOST     15
#define EVENT_WAIT_MS        1 /* they are kept until they are asked for */
#define EVENTS_AT_ONCE       1000

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_event {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
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
    int (*ecc)(void *device, int kind, int since, unsigned long long *n);
    int (*events_new)(void **set);
    int (*events_of)(void *device, unsigned long long types, void *set);
    int (*events_wait)(void *set, struct nvml_event *event, unsigned ms);
    int (*events_free)(void *set);
    char bus[32];
    void *device, *events;
    struct backend_health health; /* the thread's */
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool ending, ended; /* under lock, as what follows */
    struct nvml_reading reading;
};

static struct nvml_reading unknown(void)
{
    return (struct nvml_reading){
        .temperature_c = -1,
        .power_w = -1,
        .clock_mhz = -1,
        .health = {.ecc_corrected = -1, .ecc_uncorrected = -1},
    };
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
        {"nvmlDeviceGetTotalEccErrors", (void **)&nvml->ecc},
        {"nvmlEventSetCreate", (void **)&nvml->events_new},
        {"nvmlDeviceRegisterEvents", (void **)&nvml->events_of},
        {"nvmlEventSetWait_v2", (void **)&nvml->events_wait},
        {"nvmlEventSetFree", (void **)&nvml->events_free},
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

/* Faults of the device as a whole, from which it does not come back without a reset. */
static const unsigned lost_by[] = {
    62,  /* its controller has halted */
    79,  /* it has fallen off the bus */
    95,  /* an error of its memory that is not contained to one process */
    119, /* its system processor does not answer */
    120, /* ... or has failed */
    140, /* an error of its memory that it could not recover from */
};
#define LOST_BY "62, 79, 95, 119, 120, 140"

static void note_xid(struct backend_health *health, unsigned xid)
{
    health->n_xids++;
    health->last_xid = xid;
    for (size_t i = 0; i < sizeof(lost_by) / sizeof(lost_by[0]); i++) {
        if (xid == lost_by[i] && !health->lost[0])
            snprintf(health->lost, sizeof(health->lost), "the driver reports Xid %u", xid);
    }
}

static void watch_events(struct nvml *nvml)
{
    if (nvml->events_new(&nvml->events) != 0) {
        nvml->events = NULL;
    } else if (nvml->events_of(nvml->device, NVML_EVENT_XID, nvml->events) != 0) {
        nvml->events_free(nvml->events);
        nvml->events = NULL;
    }
    nvml->health.watched = nvml->events != NULL;
    nvml->health.lost_by = LOST_BY;
}

static int64_t count_ecc(const struct nvml *nvml, int kind)
{
    unsigned long long n;

    return nvml->ecc(nvml->device, kind, NVML_SINCE_LOADED, &n) == 0 ? (int64_t)n : -1;
}

static void ask_health(struct nvml *nvml)
{
    struct backend_health *health = &nvml->health;
    struct nvml_event event;
    int r = 0;

    health->ecc_corrected = count_ecc(nvml, NVML_CORRECTED);
    health->ecc_uncorrected = count_ecc(nvml, NVML_UNCORRECTED);
    if (!nvml->events)
        return;
    for (int i = 0; i < EVENTS_AT_ONCE && r == 0; i++) {
        r = nvml->events_wait(nvml->events, &event, EVENT_WAIT_MS);
        if (r == 0 && event.type == NVML_EVENT_XID)
            note_xid(health, (unsigned)event.data);
    }
    if (r == NVML_GPU_IS_LOST && !health->lost[0])
        snprintf(health->lost, sizeof(health->lost), "the driver says that it is lost");
}

static struct nvml_reading ask(struct nvml *nvml)
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
    ask_health(nvml);
    reading.health = nvml->health;
    return reading;
}

static void watch(struct nvml *nvml)
{
    struct nvml_reading reading;
    struct timespec next;

    if (nvml->init() != 0)
        return;
    if (nvml->by_bus(nvml->bus, &nvml->device) != 0)
        goto out;
    watch_events(nvml);
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
    if (nvml->events)
        nvml->events_free(nvml->events);
out:
    nvml->shutdown();
}

static void *run(void *data)
{
    struct nvml *nvml = data;

    watch(nvml);
    pthread_mutex_lock(&nvml->lock);
    nvml->ended = true;
    pthread_cond_broadcast(&nvml->wake);
    pthread_mutex_unlock(&nvml->lock);
    return NULL;
}

static int start(struct nvml *nvml)
{
    sigset_t all, before;
    int r;

    /* Signals are for the threads that expect them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    r = -pthread_create(&nvml->thread, NULL, run, nvml);
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

/* False: it hangs in the driver, and keeps what it uses. */
static bool stop(struct nvml *nvml)
{
    struct timespec end;
    bool ended;

    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec++;
    pthread_mutex_lock(&nvml->lock);
    nvml->ending = true;
    pthread_cond_broadcast(&nvml->wake);
    while (!nvml->ended && pthread_cond_timedwait(&nvml->wake, &nvml->lock, &end) == 0)
        ;
    ended = nvml->ended;
    pthread_mutex_unlock(&nvml->lock);
    if (ended)
        pthread_join(nvml->thread, NULL);
    else
        pthread_detach(nvml->thread);
    return ended;
}

struct nvml *nvml_free(struct nvml *nvml)
{
    if (!nvml || (nvml->running && !stop(nvml)))
        return NULL;
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
