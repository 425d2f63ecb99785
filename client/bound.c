/*
 * bound.c - what a load is held against
 *
 * A request cannot be served faster than its bytes can be moved. With the CPU backend that is
 * memory: the fastest of a few copies of more than any cache holds.
 */
#include "client/bound.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SIZE  ((size_t)64 << 20)
#define TRIES 5

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

double bound_memory(void)
{
    uint8_t *from = malloc(SIZE), *to = malloc(SIZE);
    double best = 0;

    if (from && to)
        memset(from, 1, SIZE);
    for (int i = 0; from && to && i <= TRIES; i++) {
        double begin = now_s(), rate;

        memcpy(to, from, SIZE);
        rate = 2.0 * (double)SIZE / (now_s() - begin);
        if (i > 0 && to[i] == 1 && rate > best) /* the first one makes the pages */
            best = rate;
    }
    free(from);
    free(to);
    return best;
}
