/*
 * check.c - which errors of CUDA mean what
 *
 * Three kinds matter to the caller. No memory: this load or request fails, the next may not. No
 * device: nothing was begun. Lost: a kernel faulted or the hardware failed, every later call in
 * this process fails too, and nothing but its end helps. The list of the last kind follows the
 * runtime's reference, which says of each that "the process must be terminated and relaunched".
 * What is in no list is a mistake of ours and is reported as -EINVAL.
 */
#include <errno.h>
#include <string.h>

#include "check.h"

static int errno_of(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return 0;
    case cudaErrorMemoryAllocation:
        return -ENOMEM;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorSystemNotReady:
    case cudaErrorInitializationError:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorStubLibrary:
    case cudaErrorDeviceNotLicensed:
        return -ENODEV;
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorContained:
    case cudaErrorUnknown:
        return -ENOTRECOVERABLE;
    default:
        return -EINVAL;
    }
}

int cuda_check(cudaError_t error, const char *call, const char *file, int line,
               struct report *report)
{
    const char *name = strrchr(file, '/');
    int device = -1;

    if (error == cudaSuccess)
        return 0;
    cudaGetLastError(); /* one that is not sticky must not be found by the next check */
    cudaGetDevice(&device);
    name = name ? name + 1 : file;
    if (device < 0)
        return report_set(report, errno_of(error), "%s (%s:%d: %.120s)", cudaGetErrorString(error),
                          name, line, call);
    return report_set(report, errno_of(error), "device %d: %s (%s:%d: %.120s)", device,
                      cudaGetErrorString(error), name, line, call);
}
