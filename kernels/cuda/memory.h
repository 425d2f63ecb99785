/*
 * memory.h - memory that the device knows: pinned client pages, device memory that travels as an fd
 */
#pragma once

#include <cuda_runtime_api.h>
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

/* Gently: slowly while batches are started, of which memory_note_start() tells. */
int memory_pin(void *data, size_t size, bool gently, struct memory **ret, struct report *report);
void memory_unpin(struct memory *memory, bool gently);
void memory_note_start(void);

/* Cleared before anybody else can map it. The fd is the caller's. -ENOMEM also when less than
 * reserve_bytes of the device would be left. */
int memory_create(int device, size_t size, uint64_t reserve_bytes, struct memory **ret, int *ret_fd,
                  struct report *report);
/* The fd stays the caller's. */
int memory_import(int device, int fd, size_t size, struct memory **ret, struct report *report);
void memory_free(struct memory *memory);

/*
 * Enqueue copies between the device and memory, or host memory that is none of it (NULL): what
 * CUDA's own do not, for pinned pages are several ranges to it. The last takes `height` runs of
 * `width` bytes, which come to lie `pitch` apart.
 */
int memory_upload(const struct memory *memory, void *to, const void *from, uint64_t size,
                  cudaStream_t stream, struct report *report);
int memory_download(const struct memory *memory, void *to, const void *from, uint64_t size,
                    cudaStream_t stream, struct report *report);
int memory_download_runs(const struct memory *memory, void *to, uint64_t pitch, const void *from,
                         uint64_t width, uint64_t height, cudaStream_t stream,
                         struct report *report);

/* Where kernels find what the CPU, or memory_address(), calls p. */
void *memory_at(const struct memory *memory, const void *p);
