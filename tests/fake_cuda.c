/*
 * fake_cuda.c - the calls of libcuda that the client library makes, on memfds
 *
 * Stands for libcuda.so.1 in tests on hosts without a GPU, together with the scripted backend whose
 * device memory are memfds. It sees two GPUs; the second is the scripted backend's. Misuse aborts:
 * mapping without a context, memory that is mapped twice or not unmapped before its address is
 * freed.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define INVALID 1
#define EXPORT  __attribute__((visibility("default")))

typedef unsigned long long u64;

static int n_retained, n_pushed, is_mapped;
static char context;

EXPORT int cuInit(unsigned flags);
EXPORT int cuDeviceGetCount(int *n);
EXPORT int cuDeviceGet(int *device, int ordinal);
EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device);
EXPORT int cuDevicePrimaryCtxRetain(void **to, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxPushCurrent_v2(void *pushed);
EXPORT int cuCtxPopCurrent_v2(void **to);
EXPORT int cuMemImportFromShareableHandle(u64 *handle, void *descriptor, int type);
EXPORT int cuMemRelease(u64 handle);
EXPORT int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags);
EXPORT int cuMemAddressFree(u64 address, size_t size);
EXPORT int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags);
EXPORT int cuMemUnmap(u64 address, size_t size);
EXPORT int cuMemSetAccess(u64 address, size_t size, const int *access, size_t n);

int cuInit(unsigned flags)
{
    return flags == 0 ? 0 : INVALID;
}

int cuDeviceGetCount(int *n)
{
    *n = 2;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    memset(uuid, 0, 16);
    memcpy(uuid, "FAKE", 4);
    uuid[15] = (unsigned char)device;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **to, int device)
{
    if (device != 1)
        abort();
    n_retained++;
    *to = &context;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    if (device != 1 || n_retained-- <= 0)
        abort();
    return 0;
}

int cuCtxPushCurrent_v2(void *pushed)
{
    if (pushed != &context || n_retained <= 0)
        abort();
    n_pushed++;
    return 0;
}

int cuCtxPopCurrent_v2(void **to)
{
    if (n_pushed-- <= 0)
        abort();
    *to = &context;
    return 0;
}

int cuMemImportFromShareableHandle(u64 *handle, void *descriptor, int type)
{
    int fd = dup((int)(intptr_t)descriptor);

    if (type != 1 || fd < 0)
        return INVALID;
    *handle = (u64)fd;
    return 0;
}

int cuMemRelease(u64 handle)
{
    return close((int)handle) == 0 ? 0 : INVALID;
}

int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags)
{
    void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED || alignment != 0 || wanted != 0 || flags != 0 || size % (2 << 20) != 0)
        return INVALID;
    *address = (uintptr_t)p;
    return 0;
}

int cuMemAddressFree(u64 address, size_t size)
{
    return munmap((void *)(uintptr_t)address, size) == 0 ? 0 : INVALID;
}

int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags)
{
    if (n_pushed <= 0 || flags != 0)
        abort();
    is_mapped++;
    return mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle,
                (off_t)offset) == MAP_FAILED
               ? INVALID
               : 0;
}

int cuMemUnmap(u64 address, size_t size)
{
    if (is_mapped-- <= 0)
        abort();
    return mmap((void *)(uintptr_t)address, size, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
               ? INVALID
               : 0;
}

int cuMemSetAccess(u64 address, size_t size, const int *access, size_t n)
{
    if (n != 1 || access[0] != 1 || access[1] != 1 || access[2] != 3)
        return INVALID;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) == 0 ? 0 : INVALID;
}
