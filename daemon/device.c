/*
 * device.c - choosing a backend
 *
 * The CPU backend is linked in. CUDA's is a shared object beside the program (a build tree) or in
 * ../lib/fused (an installation), so that one program runs on machines with and without it. "auto"
 * falls back to the CPU and keeps the reason, which status and log show. A path is for tests: its
 * backend gets $FUSED_FAKE_SCRIPT.
 */
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "log.h"

#define CUDA_OBJECT "fused-cuda.so"

static int open_backend(const struct backend_ops *ops, const struct config *config,
                        const char *script, struct device *ret, struct report *report)
{
    struct backend_options options = {
        .workers = config->cpu_threads, .device = config->device, .script = script};
    int r;

    if (!ops || ops->abi != BACKEND_ABI)
        return report_set(report, -ENODEV, "the backend was built for another version of fused");
    r = ops->open(&options, &ret->backend, report);
    if (r < 0)
        return r;
    ret->ops = ops;
    return 0;
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
                       struct device *ret, struct report *report)
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
        r = open_backend(symbol(), config, script, ret, report);
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

static int open_cuda(const struct config *config, struct device *ret, struct report *report)
{
    char path[600];

    if (cuda_path(path, sizeof(path)) < 0)
        return report_set(report, -ENODEV, "the CUDA backend (" CUDA_OBJECT ") is not installed");
    return open_object(path, config, NULL, ret, report);
}

int device_open(const struct config *config, struct device *ret, struct report *report)
{
    struct device device = {0};
    struct report reason = {""};
    int r;

    if (strcmp(config->backend, "cpu") == 0) {
        r = open_backend(backend_cpu(), config, NULL, &device, report);
    } else if (strcmp(config->backend, "cuda") == 0) {
        r = open_cuda(config, &device, report);
    } else if (strcmp(config->backend, "auto") == 0) {
        r = open_cuda(config, &device, &reason);
        if (r < 0) {
            r = open_backend(backend_cpu(), config, NULL, &device, report);
            snprintf(device.fallback, sizeof(device.fallback), "%s", reason.text);
        }
    } else {
        r = open_object(config->backend, config, getenv("FUSED_FAKE_SCRIPT"), &device, report);
    }
    if (r == 0)
        *ret = device;
    return r;
}

void device_close(struct device *device)
{
    if (device->backend)
        device->ops->close(device->backend);
    if (device->object)
        dlclose(device->object);
    *device = (struct device){0};
}
