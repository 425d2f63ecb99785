/*
 * deadline.h - which deadline comes first
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Embedded in a request. */
struct deadline {
    uint64_t at_us;
    size_t place; /* in the heap, from 1; 0: not in it */
};

struct deadlines {
    struct deadline **heap;
    size_t n, room;
};

/* 0 or -ENOMEM. */
int deadlines_add(struct deadlines *deadlines, struct deadline *deadline);
/* Does nothing when it is not in the heap. */
void deadlines_remove(struct deadlines *deadlines, struct deadline *deadline);
/* The earliest, or NULL. */
struct deadline *deadlines_first(const struct deadlines *deadlines);
void deadlines_deinit(struct deadlines *deadlines);
