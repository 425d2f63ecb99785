/*
 * The golden cases of the CPU backend's test, on the GPU: what PyTorch computed, and the same bits
 * from plain, pinned and device memory.
 */
#include "device.h"

#define backend_cpu device_sync
#include "../cpu/test_cpu_golden.c"
