/*
 * faulty.h - how batches go wrong on request, in the build for tests alone
 */
#pragma once

#include "kernels/cuda/check.h"

#ifdef __cplusplus
extern "C" {
#endif

struct faulty {
    char what[16];
    unsigned left; /* batches until then; 0: never */
};

/* "fault N", "hang N", "memory N"; NULL is none. */
int faulty_parse(struct faulty *faulty, const char *script, struct report *report);
/* Before every batch. */
int faulty_start(struct faulty *faulty, struct report *report);

#ifdef __cplusplus
}
#endif
