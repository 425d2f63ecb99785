/*
 * check.h - every CUDA call's result, turned into an errno and words
 *
 * CUDA(report, call) evaluates the call and gives 0 or a negative errno; the report then names the
 * statement, its place, the device and CUDA's reason. Launches are checked the same way, through
 * cudaGetLastError(). Errors after which the process must end (CUDA calls them sticky) are
 * -ENOTRECOVERABLE.
 */
#pragma once

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif
#include "kernels/report.h"

int cuda_check(cudaError_t error, const char *call, const char *file, int line,
               struct report *report);

#define CUDA(report, call)    cuda_check((call), #call, __FILE__, __LINE__, (report))
#define CUDA_LAUNCHED(report) CUDA(report, cudaGetLastError())

#ifdef __cplusplus
}
#endif
