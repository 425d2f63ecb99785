/*
 * device.h - GPU memory that the server shares, mapped into this process
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct device_map;

/*
 * Maps an allocation that came as a descriptor (borrowed) on the GPU of that uuid ("GPU-...").
 * Opens libcuda the first time. 0; -ENODEV without libcuda or without that GPU, -ENOMEM, or -EINVAL
 * when the driver refuses; *ret_reason then says why, static.
 */
int device_map(int fd, size_t size, const char *uuid, struct device_map **ret,
               const char **ret_reason);
uint64_t device_address(const struct device_map *map);
/* NULL is fine. */
struct device_map *device_unmap(struct device_map *map);
