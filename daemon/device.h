/*
 * device.h - the backend that was chosen, opened once a device
 */
#pragma once

#include "config.h"
#include "kernels/backend.h"

struct device {
    const struct backend_ops *ops;
    struct backend *backends[BACKEND_DEVICES_MAX];
    int indices[BACKEND_DEVICES_MAX];                   /* as the configuration names them */
    unsigned n;                                         /* at least 1 */
    struct backend_health healths[BACKEND_DEVICES_MAX]; /* as they were last looked at */
    void *object;                                       /* dlopen's handle; NULL for the CPU */
    char fallback[400]; /* why "auto" did not take CUDA, or not all of it; else empty */
};

/*
 * Opens what config->backend names, "auto", "cpu", "cuda", or the path of a shared object, on each
 * of config->devices. -ENODEV when that is not usable here, with the reason. With "auto" devices of
 * CUDA that do not work are left out, and with none that does, the CPU computes.
 */
int device_open(const struct config *config, struct device *ret, struct report *report);
/* Looks how healthy they are, logs what is new, never waits. -ENOTRECOVERABLE, with the reason,
 * when one must not be used any more. */
int device_look(struct device *device, struct report *report);
void device_close(struct device *device);
