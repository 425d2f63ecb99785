/*
 * memory.c - pinning client pages, and device memory that travels as an fd
 *
 * Pages are pinned once, when a buffer is made, and are then read and written by the copy engines
 * and by kernels. While the driver pins, no other thread gets a call of CUDA's through: 23 ms for
 * 440 MiB, 153 where the page table is not filled yet, and a thread that pins again and again keeps
 * the others out for a second. So the page table is filled before, pages are pinned in pieces, one
 * after the other whoever asks, and while others compute with pauses in between. To the driver each
 * piece is a range of its own, and no copy may cross from one to the next; they are large enough
 * for that to be rare. Device buffers are allocations of the driver's virtual memory interface, in
 * whole granules, exported as POSIX fds: another process maps the same memory. They are cleared
 * first, because device memory comes uncleared and may hold another process's data. The interface
 * is reached through the runtime, so that this library loads, and can say what is missing, on a
 * machine without a driver.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/memory.h"

#define MEMORY_PIECE ((size_t)32 << 20)
#define SMALL        ((size_t)1 << 20) /* so short a stall that it need not wait for large ones */
#define NS_A_MS      INT64_C(1000000)
#define NS_A_S       INT64_C(1000000000)
#define PAUSE_NS     (20 * NS_A_MS)
#define LOOK_NS      (200 * NS_A_MS)

/* The driver's functions that are used, found once per call: it is no hot path. */
struct driver {
    __typeof__(cuMemGetAllocationGranularity) *granularity;
    __typeof__(cuMemCreate) *create;
    __typeof__(cuMemRelease) *release;
    __typeof__(cuMemAddressReserve) *reserve;
    __typeof__(cuMemAddressFree) *unreserve;
    __typeof__(cuMemMap) *map;
    __typeof__(cuMemUnmap) *unmap;
    __typeof__(cuMemSetAccess) *set_access;
    __typeof__(cuMemExportToShareableHandle) *export_handle;
    __typeof__(cuMemImportFromShareableHandle) *import_handle;
    __typeof__(cuMemGetAllocationPropertiesFromHandle) *properties;
    __typeof__(cuGetErrorString) *error_string;
};

static int find_driver(struct driver *ret, struct report *report)
{
    const struct {
        const char *name;
        void **to;
    } table[] = {
        {"cuMemGetAllocationGranularity", (void **)&ret->granularity},
        {"cuMemCreate", (void **)&ret->create},
        {"cuMemRelease", (void **)&ret->release},
        {"cuMemAddressReserve", (void **)&ret->reserve},
        {"cuMemAddressFree", (void **)&ret->unreserve},
        {"cuMemMap", (void **)&ret->map},
        {"cuMemUnmap", (void **)&ret->unmap},
        {"cuMemSetAccess", (void **)&ret->set_access},
        {"cuMemExportToShareableHandle", (void **)&ret->export_handle},
        {"cuMemImportFromShareableHandle", (void **)&ret->import_handle},
        {"cuMemGetAllocationPropertiesFromHandle", (void **)&ret->properties},
        {"cuGetErrorString", (void **)&ret->error_string},
    };
    enum cudaDriverEntryPointQueryResult found;
    int r;

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        r = CUDA(report, cudaGetDriverEntryPointByVersion(table[i].name, table[i].to, 12000,
                                                          cudaEnableDefault, &found));
        if (r < 0)
            return r;
        if (found != cudaDriverEntryPointSuccess)
            return report_set(report, -ENODEV, "the driver lacks %s", table[i].name);
    }
    return 0;
}

static int driver_check(const struct driver *driver, CUresult result, const char *call, int line,
                        struct report *report)
{
    const char *text = "unknown error";
    int r;

    if (result == CUDA_SUCCESS)
        return 0;
    driver->error_string(result, &text);
    r = result == CUDA_ERROR_OUT_OF_MEMORY                                   ? -ENOMEM
        : result == CUDA_ERROR_LAUNCH_FAILED || result == CUDA_ERROR_UNKNOWN ? -ENOTRECOVERABLE
        : result == CUDA_ERROR_NOT_SUPPORTED                                 ? -ENODEV
                                                                             : -EINVAL;
    return report_set(report, r, "%s (memory.c:%d: %.120s)", text, line, call);
}
#define DRIVER(report, call) driver_check(&driver, (call), #call, __LINE__, (report))

/* ---- pinned pages ---- */

static _Atomic int64_t last_start_ns;

/* Pinning and its end hold up what others enqueue: one piece at a time, and while others compute
 * not before that time. Rows do not wait for the pauses of another. */
enum row { ROW_PIN, ROW_UNPIN, ROW_SMALL, ROW_HASTY, ROWS };

static struct {
    pthread_mutex_t lock;
    int64_t next_ns[ROWS], since_ns[ROWS]; /* when a row began that has not rested since */
} turn = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * NS_A_S + now.tv_nsec;
}

static void sleep_until(int64_t ns)
{
    struct timespec at = {ns / NS_A_S, ns % NS_A_S};

    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

void memory_note_start(void)
{
    atomic_store_explicit(&last_start_ns, now_ns(), memory_order_relaxed);
}

static bool others_compute(int64_t now)
{
    return now - atomic_load_explicit(&last_start_ns, memory_order_relaxed) < NS_A_S;
}

/* Of one buffer's pieces. */
struct pace {
    enum row row;
    int64_t left_ns; /* that it may still wait: the thread is one of few */
    int64_t share;   /* pause behind a piece: times as long as that took, */
    int64_t most_ns; /* but no longer; */
    int64_t long_ns; /* and when its row has not rested for so long, PAUSE_NS for all of a piece */
};

/* Alone: others that begin now get in between. */
static const struct pace hasty = {ROW_HASTY, 10 * NS_A_S, 1, 5 * NS_A_MS, INT64_MAX};
static const struct pace small = {ROW_SMALL, NS_A_S / 2, 20, PAUSE_NS, 3 * NS_A_S};

/* So that of the requests of others 1 in 400 meets a piece: far fewer than decide their p99. */
static struct pace pin_pace(size_t size, bool gently)
{
    const int64_t all_ns = 10 * NS_A_S, each_ns = all_ns / (int64_t)(size / MEMORY_PIECE + 1);

    if (!gently)
        return hasty;
    if (size <= SMALL)
        return small;
    return (struct pace){ROW_PIN, all_ns, 400, each_ns < NS_A_S ? each_ns : NS_A_S, INT64_MAX};
}

/* What is given up is charged until then, and a client that dies gives up all it has: 4 GiB in
 * some six seconds (reckoned), however they are cut. */
static struct pace unpin_pace(size_t size, bool gently)
{
    if (!gently)
        return hasty;
    if (size <= SMALL)
        return small;
    return (struct pace){ROW_UNPIN, 6 * NS_A_S, 400, NS_A_S / 5, 3 * NS_A_S};
}

/* Waits without the lock, which others may need for less. */
static int64_t begin_piece(struct pace *pace)
{
    for (;;) {
        int64_t now, wait;

        pthread_mutex_lock(&turn.lock);
        now = now_ns();
        wait = turn.next_ns[pace->row] - now;
        wait = wait < pace->left_ns ? wait : pace->left_ns;
        if (wait <= 0 || !others_compute(now)) {
            if (now - turn.next_ns[pace->row] > NS_A_S)
                turn.since_ns[pace->row] = now;
            return now;
        }
        pthread_mutex_unlock(&turn.lock);
        wait = wait < LOOK_NS ? wait : LOOK_NS; /* whether they still compute */
        pace->left_ns -= wait;
        sleep_until(now + wait);
    }
}

static void end_piece(const struct pace *pace, size_t size, int64_t began_ns)
{
    int64_t now = now_ns(), pause_ns = (now - began_ns) * pace->share, most_ns = pace->most_ns;

    if (now - turn.since_ns[pace->row] >= pace->long_ns)
        most_ns = PAUSE_NS * (int64_t)size / (int64_t)MEMORY_PIECE;
    pause_ns = pause_ns < most_ns ? pause_ns : most_ns;
    if (turn.next_ns[pace->row] < now + pause_ns)
        turn.next_ns[pace->row] = now + pause_ns;
    pthread_mutex_unlock(&turn.lock);
}

static int pin_piece(char *data, size_t size, uint64_t *ret_address, struct report *report)
{
    void *address;
    int r = CUDA(report,
                 cudaHostRegister(data, size, cudaHostRegisterPortable | cudaHostRegisterMapped));

    if (r < 0)
        return r;
    r = CUDA(report, cudaHostGetDevicePointer(&address, data, 0));
    if (r < 0)
        CUDA(NULL, cudaHostUnregister(data));
    else
        *ret_address = (uint64_t)address;
    return r;
}

static void unpin(char *data, size_t size, bool gently)
{
    struct pace pace = unpin_pace(size, gently);

    for (size_t at = 0, n; at < size; at += n) {
        int64_t began_ns = begin_piece(&pace);

        n = size - at < MEMORY_PIECE ? size - at : MEMORY_PIECE;
        CUDA(NULL, cudaHostUnregister(data + at));
        end_piece(&pace, n, began_ns);
    }
}

int memory_pin(void *data, size_t size, bool gently, struct memory **ret, struct report *report)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    struct pace pace = pin_pace(size, gently);
    size_t at, n;
    char *host = data;
    int r = 0;

    if (!memory)
        return report_set(report, -ENOMEM, "out of memory");
    *memory = (struct memory){.size = size, .host = host};
    for (at = 0; at < size; at += n) {
        uint64_t address = 0;
        int64_t began_ns;

        n = size - at < MEMORY_PIECE ? size - at : MEMORY_PIECE;
        madvise(host + at, n, MADV_POPULATE_WRITE); /* or pinning does it, in its lock */
        began_ns = begin_piece(&pace);
        r = pin_piece(host + at, n, &address, report);
        end_piece(&pace, n, began_ns);
        if (r < 0)
            goto fail;
        if (at == 0)
            memory->address = address;
        if (address != memory->address + at) {
            r = report_set(report, -ENODEV, "the device sees pages in another order");
            at += n;
            goto fail;
        }
    }
    *ret = memory;
    return 0;

fail:
    unpin(host, at, gently);
    free(memory);
    return r;
}

void memory_unpin(struct memory *memory, bool gently)
{
    if (!memory)
        return;
    unpin(memory->host, memory->size, gently);
    free(memory);
}

/* How many bytes from p on, of `size`, one call may copy. */
static uint64_t run_of(const struct memory *memory, const void *p, uint64_t size)
{
    uint64_t left;

    if (!memory || memory->on_device)
        return size;
    left = MEMORY_PIECE - (uint64_t)((const char *)p - memory->host) % MEMORY_PIECE;
    return size < left ? size : left;
}

int memory_upload(const struct memory *memory, void *to, const void *from, uint64_t size,
                  cudaStream_t stream, struct report *report)
{
    int r = 0;

    for (uint64_t at = 0, n; at < size && r == 0; at += n) {
        const char *part = (const char *)from + at;

        n = run_of(memory, part, size - at);
        r = CUDA(report, cudaMemcpyAsync((char *)to + at, memory ? memory_at(memory, part) : part,
                                         n, cudaMemcpyDefault, stream));
    }
    return r;
}

int memory_download(const struct memory *memory, void *to, const void *from, uint64_t size,
                    cudaStream_t stream, struct report *report)
{
    int r = 0;

    for (uint64_t at = 0, n; at < size && r == 0; at += n) {
        n = run_of(memory, (char *)to + at, size - at);
        r = CUDA(report, cudaMemcpyAsync((char *)to + at, (const char *)from + at, n,
                                         cudaMemcpyDeviceToHost, stream));
    }
    return r;
}

int memory_download_runs(const struct memory *memory, void *to, uint64_t pitch, const void *from,
                         uint64_t width, uint64_t height, cudaStream_t stream,
                         struct report *report)
{
    int r = 0;

    for (uint64_t k = 0, n; k < height && r == 0; k += n) {
        char *first = (char *)to + k * pitch;
        const char *runs = (const char *)from + k * width;
        uint64_t bytes = run_of(memory, first, (height - k - 1) * pitch + width);

        n = 1;
        if (height == 1 || bytes < width) { /* maybe across a border */
            r = memory_download(memory, first, runs, width, stream, report);
            continue;
        }
        n = (bytes - width) / pitch + 1;
        r = CUDA(report, cudaMemcpy2DAsync(first, pitch, runs, width, width, n,
                                           cudaMemcpyDeviceToHost, stream));
    }
    return r;
}

/* ---- device memory ---- */

static CUmemAllocationProp properties_of(int device)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
}

static int whole_granules(const struct driver *from, int device, size_t size, size_t *ret,
                          struct report *report)
{
    struct driver driver = *from;
    CUmemAllocationProp properties = properties_of(device);
    size_t granule;
    int r;

    r = DRIVER(report, driver.granularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    if (r < 0)
        return r;
    if (size == 0 || __builtin_add_overflow(size, granule - 1, &size))
        return report_set(report, -EINVAL, "a device buffer cannot have this size");
    *ret = size / granule * granule;
    return 0;
}

/* Gives the handle an address that kernels can use. */
static int map(const struct driver *from, int device, size_t mapped,
               CUmemGenericAllocationHandle handle, uint64_t *ret, struct report *report)
{
    struct driver driver = *from;
    CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    CUdeviceptr address;
    int r;

    r = DRIVER(report, driver.reserve(&address, mapped, 0, 0, 0));
    if (r < 0)
        return r;
    r = DRIVER(report, driver.map(address, mapped, 0, handle, 0));
    if (r < 0)
        goto fail;
    r = DRIVER(report, driver.set_access(address, mapped, &access, 1));
    if (r < 0) {
        driver.unmap(address, mapped);
        goto fail;
    }
    *ret = address;
    return 0;

fail:
    driver.unreserve(address, mapped);
    return r;
}

void memory_free(struct memory *memory)
{
    struct driver driver;

    if (!memory)
        return;
    if (memory->address && find_driver(&driver, NULL) == 0) {
        driver.unmap(memory->address, memory->mapped);
        driver.unreserve(memory->address, memory->mapped);
        driver.release(memory->handle);
    }
    free(memory);
}

/* Takes the handle over, also when it fails. */
static int memory_of(const struct driver *driver, int device, size_t size, size_t mapped,
                     CUmemGenericAllocationHandle handle, struct memory **ret,
                     struct report *report)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    int r;

    if (!memory) {
        r = report_set(report, -ENOMEM, "out of memory");
        goto fail;
    }
    *memory = (struct memory){.on_device = true, .size = size, .mapped = mapped, .handle = handle};
    r = map(driver, device, mapped, handle, &memory->address, report);
    if (r < 0)
        goto fail;
    *ret = memory;
    return 0;

fail:
    driver->release(handle);
    free(memory);
    return r;
}

/* What is free is looked at and taken at once, or several that ask together would pass the reserve.
 */
static int allocate(const struct driver *from, int device, size_t mapped, uint64_t reserve_bytes,
                    CUmemGenericAllocationHandle *ret, struct report *report)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    CUmemAllocationProp properties = properties_of(device);
    struct driver driver = *from;
    size_t n_free, n_all;
    int r;

    pthread_mutex_lock(&one_at_a_time);
    r = CUDA(report, cudaMemGetInfo(&n_free, &n_all));
    if (r == 0 && (n_free < mapped || n_free - mapped < reserve_bytes))
        r = report_set(report, -ENOMEM, "the device would keep less than its reserve");
    if (r == 0)
        r = DRIVER(report, driver.create(ret, mapped, &properties, 0));
    pthread_mutex_unlock(&one_at_a_time);
    return r;
}

int memory_create(int device, size_t size, uint64_t reserve_bytes, struct memory **ret, int *ret_fd,
                  struct report *report)
{
    CUmemGenericAllocationHandle handle;
    struct memory *memory;
    struct driver driver;
    size_t mapped;
    int fd, r;

    r = find_driver(&driver, report);
    if (r == 0)
        r = whole_granules(&driver, device, size, &mapped, report);
    if (r == 0)
        r = allocate(&driver, device, mapped, reserve_bytes, &handle, report);
    if (r == 0)
        r = memory_of(&driver, device, size, mapped, handle, &memory, report);
    if (r < 0)
        return r;
    r = CUDA(report, cudaMemset((void *)memory->address, 0, mapped));
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(0));
    if (r == 0)
        r = DRIVER(report,
                   driver.export_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    if (r < 0) {
        memory_free(memory);
        return r;
    }
    *ret = memory;
    *ret_fd = fd;
    return 0;
}

int memory_import(int device, int fd, size_t size, struct memory **ret, struct report *report)
{
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties;
    struct driver driver;
    size_t mapped;
    int r;

    r = find_driver(&driver, report);
    if (r == 0)
        r = whole_granules(&driver, device, size, &mapped, report);
    if (r < 0)
        return r;
    /* Another kind of fd is an unknown error to the driver; it is the client's mistake. */
    if (DRIVER(report, driver.import_handle(&handle, (void *)(intptr_t)fd,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) < 0)
        return -EINVAL;
    r = DRIVER(report, driver.properties(&properties, handle));
    if (r == 0 && (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                   properties.location.id != device))
        r = report_set(report, -EINVAL, "the memory lies on another device");
    if (r < 0) {
        driver.release(handle);
        return r;
    }
    r = memory_of(&driver, device, size, mapped, handle, ret, report);
    return r == -ENODEV ? -EINVAL : r; /* a size that is not the memory's is "not supported" */
}

void *memory_at(const struct memory *memory, const void *p)
{
    if (memory->on_device)
        return (void *)p;
    return (void *)(memory->address + (uint64_t)((const char *)p - memory->host));
}
