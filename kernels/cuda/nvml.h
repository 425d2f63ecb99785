/*
 * nvml.h - how the device is: temperature, power, clock, memory, faults; read by a thread of its
 * own
 */
#pragma once

#include <stdint.h>

#include "kernels/backend.h"

struct nvml; /* the watcher of one device */

struct nvml_reading {
    uint64_t total_bytes, free_bytes;      /* 0: not known */
    int temperature_c, power_w, clock_mhz; /* -1: not known */
    char driver[32];                       /* empty: not known */
    struct backend_health health;
};

/* Never fails for want of NVML: readings are then unknown. -ENOMEM, -EAGAIN. */
int nvml_new(const char *pci_bus_id, struct nvml **ret);
struct nvml *nvml_free(struct nvml *nvml);
/* The latest reading; never waits for the device. */
void nvml_read(struct nvml *nvml, struct nvml_reading *ret);
