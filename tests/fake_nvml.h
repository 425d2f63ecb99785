/*
 * fake_nvml.h - what a test tells the NVML that is none
 */
#pragma once

#define FAKE_NVML_BUS  "0000:41:00.0"
#define FAKE_NVML_XIDS 8
#define FAKE_NVML_API  __attribute__((visibility("default")))

struct fake_nvml {
    int init_fails, no_events, no_ecc;
    int hangs;   /* calls of the device do not return while it is set */
    int is_lost; /* waiting for events says that the device is lost */
    unsigned long long ecc_corrected, ecc_uncorrected;
    unsigned n_xids; /* of events that are there to be waited for */
    unsigned xids[FAKE_NVML_XIDS];
};

FAKE_NVML_API void fake_nvml_set(const struct fake_nvml *script);
/* How often it is open, and how many sets of events there are. */
FAKE_NVML_API void fake_nvml_left(int *ret_open, int *ret_sets);
