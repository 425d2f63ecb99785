/*
 * device.c - the client's end of a device buffer
 *
 * The server exports an allocation of CUDA's virtual memory interface as a descriptor; importing
 * and mapping it gives this process an address of the same bytes. libcuda is opened only when
 * somebody asks for such a buffer, so that the library has no other tie to CUDA; the few prototypes
 * that are needed stand here, since they are part of a stable ABI and a host without CUDA has no
 * headers. It is never closed again: the driver does not support that.
 *
 * The GPU is found by its uuid, because indices depend on the process's environment. Its primary
 * context, the one that the CUDA runtime uses too, is kept while a mapping lives. The mapping
 * itself belongs to the process: any context on that GPU may use the address.
 */
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base.h"

#define LIBRARY           "libcuda.so.1"
#define GRANULE           ((size_t)2 << 20)
#define OUT_OF_MEMORY     2 /* CUDA_ERROR_OUT_OF_MEMORY */
#define POSIX_DESCRIPTOR  1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
#define LOCATION_DEVICE   1 /* CU_MEM_LOCATION_TYPE_DEVICE */
#define ACCESS_READ_WRITE 3 /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */

struct access {
    int location_type, location_id, flags;
};
_Static_assert(sizeof(struct access) == 12, "CUmemAccessDesc");

struct cuda {
    int (*init)(unsigned flags);
    int (*count)(int *n);
    int (*device)(int *device, int ordinal);
    int (*uuid)(unsigned char *uuid, int device);
    int (*retain)(void **context, int device);
    int (*release)(int device);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*import)(unsigned long long *handle, void *descriptor, int type);
    int (*drop)(unsigned long long handle);
    int (*reserve)(unsigned long long *address, size_t size, size_t alignment,
                   unsigned long long wanted, unsigned long long flags);
    int (*unreserve)(unsigned long long address, size_t size);
    int (*map)(unsigned long long address, size_t size, size_t offset, unsigned long long handle,
               unsigned long long flags);
    int (*unmap)(unsigned long long address, size_t size);
    int (*set_access)(unsigned long long address, size_t size, const struct access *access,
                      size_t n);
};

struct device_map {
    struct cuda cuda;
    int device;
    void *context;
    unsigned long long address;
    size_t size; /* mapped */
};

static int load(struct cuda *cuda, const char **ret_reason)
{
    const struct {
        const char *name;
        void **to;
    } table[] = {
        {"cuInit", (void **)&cuda->init},
        {"cuDeviceGetCount", (void **)&cuda->count},
        {"cuDeviceGet", (void **)&cuda->device},
        {"cuDeviceGetUuid_v2", (void **)&cuda->uuid},
        {"cuDevicePrimaryCtxRetain", (void **)&cuda->retain},
        {"cuDevicePrimaryCtxRelease_v2", (void **)&cuda->release},
        {"cuCtxPushCurrent_v2", (void **)&cuda->push},
        {"cuCtxPopCurrent_v2", (void **)&cuda->pop},
        {"cuMemImportFromShareableHandle", (void **)&cuda->import},
        {"cuMemRelease", (void **)&cuda->drop},
        {"cuMemAddressReserve", (void **)&cuda->reserve},
        {"cuMemAddressFree", (void **)&cuda->unreserve},
        {"cuMemMap", (void **)&cuda->map},
        {"cuMemUnmap", (void **)&cuda->unmap},
        {"cuMemSetAccess", (void **)&cuda->set_access},
    };
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    *ret_reason = "this process cannot open " LIBRARY;
    if (!library)
        return -ENODEV;
    for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
        *table[i].to = dlsym(library, table[i].name);
        *ret_reason = LIBRARY " is too old";
        if (!*table[i].to)
            return -ENODEV;
    }
    *ret_reason = "CUDA cannot be initialised in this process";
    return cuda->init(0) == 0 ? 0 : -ENODEV;
}

static void print_uuid(const unsigned char id[16], char to[48])
{
    int n = snprintf(to, 48, "GPU");

    for (int i = 0; i < 16; i++)
        n += snprintf(to + n, 48 - (size_t)n,
                      i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", id[i]);
}

static int find(const struct cuda *cuda, const char *wanted, int *ret_device)
{
    int n = 0;

    if (cuda->count(&n) != 0)
        return -ENODEV;
    for (int i = 0; i < n; i++) {
        unsigned char id[16];
        char text[48];
        int device;

        if (cuda->device(&device, i) != 0 || cuda->uuid(id, device) != 0)
            continue;
        print_uuid(id, text);
        if (strcmp(text, wanted) == 0) {
            *ret_device = device;
            return 0;
        }
    }
    return -ENODEV;
}

static int import(struct device_map *map, int fd)
{
    const struct access access = {LOCATION_DEVICE, map->device, ACCESS_READ_WRITE};
    const struct cuda *cuda = &map->cuda;
    unsigned long long handle;
    int r;

    /* NOLINTNEXTLINE(performance-no-int-to-ptr): so it is declared */
    r = cuda->import(&handle, (void *)(intptr_t)fd, POSIX_DESCRIPTOR);
    if (r != 0)
        return r;
    r = cuda->reserve(&map->address, map->size, 0, 0, 0);
    if (r != 0)
        goto drop;
    r = cuda->map(map->address, map->size, 0, handle, 0);
    if (r != 0)
        goto unreserve;
    r = cuda->set_access(map->address, map->size, &access, 1);
    if (r != 0)
        goto unmap;
    cuda->drop(handle); /* the mapping keeps the memory */
    return 0;

unmap:
    cuda->unmap(map->address, map->size);
unreserve:
    cuda->unreserve(map->address, map->size);
drop:
    cuda->drop(handle);
    return r;
}

int device_map(int fd, size_t size, const char *uuid, struct device_map **ret,
               const char **ret_reason)
{
    struct device_map *map;
    void *context;
    int r;

    *ret_reason = "out of memory";
    if (size > SIZE_MAX - GRANULE)
        return -ENOMEM;
    map = calloc(1, sizeof *map);
    if (!map)
        return -ENOMEM;
    map->size = (size + GRANULE - 1) / GRANULE * GRANULE;
    r = load(&map->cuda, ret_reason);
    if (r < 0)
        goto fail;
    r = find(&map->cuda, uuid, &map->device);
    *ret_reason = "this process does not see the server's GPU";
    if (r < 0)
        goto fail;
    *ret_reason = "CUDA refuses to map the server's memory";
    r = map->cuda.retain(&map->context, map->device);
    if (r == 0) {
        r = map->cuda.push(map->context);
        if (r == 0) {
            r = import(map, fd);
            map->cuda.pop(&context);
        }
        if (r != 0)
            map->cuda.release(map->device);
    }
    r = r == 0 ? 0 : r == OUT_OF_MEMORY ? -ENOMEM : -EINVAL;
    if (r < 0)
        goto fail;
    *ret = map;
    return 0;

fail:
    free(map);
    return r;
}

uint64_t device_address(const struct device_map *map)
{
    return map->address;
}

struct device_map *device_unmap(struct device_map *map)
{
    void *context;

    if (!map)
        return NULL;
    map->cuda.push(map->context);
    map->cuda.unmap(map->address, map->size);
    map->cuda.unreserve(map->address, map->size);
    map->cuda.pop(&context);
    map->cuda.release(map->device);
    free(map);
    return NULL;
}
