/*
 * fake_nvml.c - the calls of NVML that the CUDA backend makes, as a test scripts them
 *
 * Stands for libnvidia-ml.so.1 in tests on hosts without a driver: whoever has opened it already
 * finds it under that name. There is one device. A call out of order, or on anything else, is
 * "invalid argument", which the test sees as a reading that is not known.
 */
#include "tests/fake_nvml.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define OK            0
#define INVALID       2
#define NOT_SUPPORTED 3
#define TIMEOUT       10
#define IS_LOST       15
#define EVENT_XID     8ull

#define EXPORT __attribute__((visibility("default")))

struct memory {
    unsigned long long total, free, used;
};

struct event {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **to);
EXPORT int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory);
EXPORT int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius);
EXPORT int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatt);
EXPORT int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz);
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size);
EXPORT int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int since, unsigned long long *n);
EXPORT int nvmlEventSetCreate(void **to);
EXPORT int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set);
EXPORT int nvmlEventSetWait_v2(void *set, struct event *event, unsigned ms);
EXPORT int nvmlEventSetFree(void *set);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fake_nvml now; /* under lock, as all that follows */
static int n_open, n_sets, is_registered;
static char device, events;

void fake_nvml_set(const struct fake_nvml *script)
{
    pthread_mutex_lock(&lock);
    now = *script;
    pthread_mutex_unlock(&lock);
}

void fake_nvml_left(int *ret_open, int *ret_sets)
{
    pthread_mutex_lock(&lock);
    *ret_open = n_open;
    *ret_sets = n_sets;
    pthread_mutex_unlock(&lock);
}

/* A call of the device: waits as long as the driver is scripted to. */
static int call(const void *handle)
{
    int r;

    pthread_mutex_lock(&lock);
    while (now.hangs) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        pthread_mutex_lock(&lock);
    }
    r = n_open > 0 && handle == &device ? OK : INVALID;
    pthread_mutex_unlock(&lock);
    return r;
}

int nvmlInit_v2(void)
{
    int r;

    pthread_mutex_lock(&lock);
    r = now.init_fails ? INVALID : OK;
    n_open += r == OK;
    pthread_mutex_unlock(&lock);
    return r;
}

int nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    n_open--;
    pthread_mutex_unlock(&lock);
    return OK;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **to)
{
    *to = &device;
    return strcmp(bus, FAKE_NVML_BUS) == 0 ? OK : INVALID;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    *memory = (struct memory){.total = 1000, .free = 600, .used = 400};
    return call(handle);
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius)
{
    *celsius = 41;
    return sensor == 0 ? call(handle) : INVALID;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatt)
{
    *milliwatt = 99500;
    return call(handle);
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz)
{
    *mhz = 1980;
    return kind == 1 ? call(handle) : INVALID;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    snprintf(text, size, "580.1");
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int since, unsigned long long *n)
{
    int r = call(handle);

    pthread_mutex_lock(&lock);
    if (r == OK && (kind < 0 || kind > 1 || since != 0))
        r = INVALID;
    else if (r == OK && now.no_ecc)
        r = NOT_SUPPORTED;
    else if (r == OK)
        *n = kind == 0 ? now.ecc_corrected : now.ecc_uncorrected;
    pthread_mutex_unlock(&lock);
    return r;
}

int nvmlEventSetCreate(void **to)
{
    pthread_mutex_lock(&lock);
    n_sets++;
    pthread_mutex_unlock(&lock);
    *to = &events;
    return OK;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set)
{
    int r = call(handle);

    pthread_mutex_lock(&lock);
    if (r == OK && (types != EVENT_XID || set != &events))
        r = INVALID;
    else if (r == OK && now.no_events)
        r = NOT_SUPPORTED;
    is_registered = r == OK;
    pthread_mutex_unlock(&lock);
    return r;
}

/* The events that the test scripted come in their order, each once. */
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned ms)
{
    int r = TIMEOUT;

    (void)ms;
    pthread_mutex_lock(&lock);
    if (set != &events || !is_registered) {
        r = INVALID;
    } else if (now.n_xids > 0) {
        *event = (struct event){.device = &device, .type = EVENT_XID, .data = now.xids[0]};
        now.n_xids--;
        memmove(now.xids, now.xids + 1, now.n_xids * sizeof(now.xids[0]));
        r = OK;
    } else if (now.is_lost) {
        r = IS_LOST;
    }
    pthread_mutex_unlock(&lock);
    return r;
}

int nvmlEventSetFree(void *set)
{
    pthread_mutex_lock(&lock);
    n_sets--;
    is_registered = 0;
    pthread_mutex_unlock(&lock);
    return set == &events ? OK : INVALID;
}
