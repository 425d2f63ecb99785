/*
 * device.h - the backend that was chosen
 */
#pragma once

#include "config.h"
#include "kernels/backend.h"

struct device {
    const struct backend_ops *ops;
    struct backend *backend;
    void *object;       /* dlopen's handle; NULL for the CPU */
    char fallback[400]; /* why "auto" did not take CUDA; empty when it did, or was not asked to */
};

/*
 * Opens what config->backend names: "auto", "cpu", "cuda", or the path of a shared object. -ENODEV
 * when that backend is not usable here, with the reason.
 */
int device_open(const struct config *config, struct device *ret, struct report *report);
void device_close(struct device *device);
