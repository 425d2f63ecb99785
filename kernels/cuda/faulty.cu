/*
 * faulty.cu - the build for tests, never installed: a batch that faults, hangs, or finds no memory
 *
 * A kernel that writes to an address of nobody ends the CUDA context for this process; one that
 * never ends cannot be stopped by anything but the process's end. Both run on a stream of their own
 * that the device's other work waits for, as a kernel of ours that went wrong would.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/faulty.h"

static __global__ void fault_kernel(uint64_t address)
{
    *(volatile uint32_t *)address = 1;
}

static __global__ void hang_kernel(volatile uint32_t *never)
{
    while (!*never)
        __nanosleep(1000);
}

extern "C" int faulty_parse(struct faulty *faulty, const char *script, struct report *report)
{
    faulty->left = 0;
    if (script && sscanf(script, "%15s %u", faulty->what, &faulty->left) != 2)
        return report_set(report, -EINVAL, "the script is \"fault N\", \"hang N\" or \"memory N\"");
    return 0;
}

extern "C" int faulty_start(struct faulty *faulty, struct report *report)
{
    uint32_t *zero;
    int r;

    if (faulty->left == 0 || --faulty->left > 0)
        return 0;
    if (strcmp(faulty->what, "memory") == 0)
        return report_set(report, -ENOMEM, "out of memory, as the script says");
    if (strcmp(faulty->what, "fault") == 0) {
        fault_kernel<<<1, 1>>>(16);
        return CUDA_LAUNCHED(report);
    }
    r = CUDA(report, cudaMalloc((void **)&zero, sizeof(*zero)));
    if (r == 0)
        r = CUDA(report, cudaMemset(zero, 0, sizeof(*zero)));
    if (r < 0)
        return r;
    /* Every multiprocessor, and more than fit: what follows never gets a place. */
    hang_kernel<<<132 * 64, 1024>>>(zero);
    return CUDA_LAUNCHED(report);
}
