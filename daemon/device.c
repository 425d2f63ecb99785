/*
 * device.c - choosing a backend
 *
 * The CPU backend is linked in. CUDA's is a shared object beside the program (a build tree) or in
 * ../lib/fused (an installation), so that one program runs on machines with and without it. "auto"
 * falls back to the CPU and keeps the reason, which status and log show; so it does for devices
 * that it leaves out. A path is for tests: its backend gets $FUSED_FAKE_SCRIPT.
 *
 * What a device's driver reports of faults is logged and shown. Which of them are the device's end
 * the backend knows: CUDA tells the daemon itself when it was hit, so these are few.
 */
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "log.h"

#define CUDA_OBJECT "fused-cuda.so"

static void close_backends(struct device *device)
{
    while (device->n > 0)
        device->ops->close(device->backends[--device->n]);
}

/* Threads of each engine; 0 leaves it to the backend. */
static unsigned share_of_threads(const struct config *config)
{
    cpu_set_t set;
    unsigned all = config->cpu_threads;

    if (config->n_devices == 1)
        return all;
    if (all == 0 && sched_getaffinity(0, sizeof(set), &set) == 0)
        all = (unsigned)CPU_COUNT(&set);
    return all > config->n_devices ? all / config->n_devices : 1;
}

/* Opens each device. `leave_out`: as many as work, at least one; the last reason stays. */
static int open_backends(const struct backend_ops *ops, const struct config *config,
                         const char *script, bool leave_out, struct device *ret,
                         struct report *report)
{
    struct backend_options options = {.workers = share_of_threads(config), .script = script};
    int r = 0;

    if (!ops || ops->abi != BACKEND_ABI)
        return report_set(report, -ENODEV, "the backend was built for another version of fused");
    ret->ops = ops;
    for (unsigned i = 0; i < config->n_devices; i++) {
        options.device = (int)config->devices[i];
        r = ops->open(&options, &ret->backends[ret->n], report);
        if (r == 0) {
            ret->indices[ret->n++] = options.device;
            continue;
        }
        if (config->n_devices > 1)
            report_prefix(report, r, "device %d: ", options.device);
        if (!leave_out)
            break;
        log_warning("device.left_out", "%s", report->text);
    }
    if (r < 0 && leave_out && ret->n > 0)
        r = 0;
    if (r < 0)
        close_backends(ret);
    return r;
}

/* The linker's reason names files. Their folders are for the log alone: status shows the rest to
 * everybody. */
static int no_object(const char *path, struct report *report)
{
    const char *error = dlerror(), *slash = strrchr(path, '/');
    size_t n_dir = slash ? (size_t)(slash + 1 - path) : 0, n = 0;
    char text[sizeof(report->text)];

    log_warning("device.object", "%s", error);
    if (strncmp(error, path, n_dir) == 0)
        error += n_dir;
    for (; *error && n < sizeof(text) - 1; error++) {
        if (*error == '/')
            while (n > 0 && text[n - 1] != ' ')
                n--;
        else
            text[n++] = *error;
    }
    text[n] = '\0';
    return report_set(report, -ENODEV, "%s", text);
}

static int open_object(const char *path, const struct config *config, const char *script,
                       bool leave_out, struct device *ret, struct report *report)
{
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    backend_symbol symbol;
    int r;

    if (!object)
        return no_object(path, report);
    *(void **)&symbol = dlsym(object, BACKEND_SYMBOL);
    if (!symbol)
        r = report_set(report, -ENODEV, "the shared object is no backend of fused");
    else
        r = open_backends(symbol(), config, script, leave_out, ret, report);
    if (r < 0)
        dlclose(object);
    else
        ret->object = object;
    return r;
}

/* The place of the CUDA object: beside the program, else where it is installed. */
static int cuda_path(char *to, size_t size)
{
    static const char *const places[] = {"", "../lib/fused/"};
    char self[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char *slash;

    if (n < 0)
        return -errno;
    self[n] = '\0';
    slash = strrchr(self, '/');
    if (!slash)
        return -ENOENT;
    slash[1] = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
        int length = snprintf(to, size, "%s%s%s", self, places[i], CUDA_OBJECT);

        if (length > 0 && (size_t)length < size && access(to, R_OK) == 0)
            return 0;
    }
    return -ENOENT;
}

static int open_cuda(const struct config *config, bool leave_out, struct device *ret,
                     struct report *report)
{
    char path[600];

    if (cuda_path(path, sizeof(path)) < 0)
        return report_set(report, -ENODEV, "the CUDA backend (" CUDA_OBJECT ") is not installed");
    return open_object(path, config, NULL, leave_out, ret, report);
}

/* CUDA as far as it works, else the CPU: one engine in place of all. */
static int open_any(const struct config *config, struct device *ret, struct report *report)
{
    struct report reason = {""};
    struct config substitute;
    int r = open_cuda(config, true, ret, &reason);

    if (r < 0) {
        substitute = *config;
        substitute.n_devices = 1;
        r = open_backends(backend_cpu(), &substitute, NULL, false, ret, report);
    }
    snprintf(ret->fallback, sizeof(ret->fallback), "%s", reason.text);
    return r;
}

int device_open(const struct config *config, struct device *ret, struct report *report)
{
    struct device device = {0};
    int r;

    if (strcmp(config->backend, "cpu") == 0)
        r = open_backends(backend_cpu(), config, NULL, false, &device, report);
    else if (strcmp(config->backend, "cuda") == 0)
        r = open_cuda(config, false, &device, report);
    else if (strcmp(config->backend, "auto") == 0)
        r = open_any(config, &device, report);
    else
        r = open_object(config->backend, config, getenv("FUSED_FAKE_SCRIPT"), false, &device,
                        report);
    if (r == 0)
        *ret = device;
    return r;
}

/* Where nobody watches, nothing is ever new. */
static void log_news(int index, const struct backend_health *before,
                     const struct backend_health *now)
{
    uint64_t n = now->n_xids - before->n_xids;

    if (n == 1)
        log_warning("device.xid", "device %d: the driver reports Xid %u", index, now->last_xid);
    else if (n > 1)
        log_warning("device.xid", "device %d: the driver reports %llu faults, the last is Xid %u",
                    index, (unsigned long long)n, now->last_xid);
    /* What was counted before the start, or while nobody could ask, is no news. */
    if (before->watched && before->ecc_uncorrected >= 0 &&
        now->ecc_uncorrected > before->ecc_uncorrected)
        log_warning("device.memory",
                    "device %d: errors of its memory that were not corrected: %lld more", index,
                    (long long)(now->ecc_uncorrected - before->ecc_uncorrected));
}

int device_look(struct device *device, struct report *report)
{
    for (unsigned i = 0; i < device->n && device->ops->health; i++) {
        struct backend_health *health = &device->healths[i], before = *health;

        device->ops->health(device->backends[i], health);
        log_news(device->indices[i], &before, health);
        if (health->lost[0])
            return report_set(report, -ENOTRECOVERABLE, "device %d: %s", device->indices[i],
                              health->lost);
    }
    return 0;
}

void device_close(struct device *device)
{
    close_backends(device);
    if (device->object)
        dlclose(device->object);
    *device = (struct device){0};
}
