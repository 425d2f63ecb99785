/*
 * dropout.h - PyTorch's CUDA dropout mask, bit for bit
 *
 * Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011)
 * with the way in which PyTorch's kernel deals counters to elements; the device's size is a
 * parameter of the mask.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dropout {
    float keep_below;       /* float(1 - p) */
    float scale;            /* float(1.0 / double(float(1 - p))) */
    int64_t n;              /* elements of the request's own tensor */
    int64_t threads;        /* T */
    uint64_t seed, counter; /* offset / 4 */
    int vector;             /* 4, 2 or 1 elements a thread takes at a time */
    bool identity;          /* p == 0 */
    bool zero;              /* p == 1: x times 0 */
};

#define DROPOUT_SMS            132
#define DROPOUT_THREADS_PER_SM 2048

/* p from 0 to 1, n at least 1; offset is a multiple of 4. */
void dropout_init(struct dropout *dropout, double p, int64_t n, uint64_t seed, uint64_t offset,
                  int sms, int threads_per_sm);
/* How far the offset moves for n elements; 0 for p = 0 and p = 1. */
uint64_t dropout_advance(double p, int64_t n, int sms, int threads_per_sm);
/* The smallest of Philox's words that drops: every word below it keeps. */
uint32_t dropout_first_dropped(float keep_below);
/* Multiplies elements [first, first + count) of the tensor, which lie in x: (x times mask) times
 * scale. */
void dropout_apply(const struct dropout *dropout, int64_t first, int64_t count, float *x);
