/*
 * The random chains of the CPU backend's test, on the GPU.
 */
#include "device.h"

#define backend_cpu device_sync
#include "../cpu/test_cpu_random.c"
