/*
 * memory.h - memory that the device knows: pinned client pages, device memory that travels as an fd
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/backend.h"

struct memory {
    bool on_device;
    size_t size;      /* as asked for */
    char *host;       /* pinned pages; NULL on the device */
    uint64_t address; /* for kernels and copies */
    size_t mapped;    /* on the device: whole pages of it */
    uint64_t handle;
};

int memory_pin(void *data, size_t size, struct memory **ret, struct report *report);
void memory_unpin(struct memory *memory);

/* Cleared before anybody else can map it. The fd is the caller's. -ENOMEM also when less than
 * reserve_bytes of the device would be left. */
int memory_create(int device, size_t size, uint64_t reserve_bytes, struct memory **ret, int *ret_fd,
                  struct report *report);
/* The fd stays the caller's. */
int memory_import(int device, int fd, size_t size, struct memory **ret, struct report *report);
void memory_free(struct memory *memory);

/* Where kernels find what the CPU, or memory_address(), calls p. */
void *memory_at(const struct memory *memory, const void *p);
