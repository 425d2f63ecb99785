/*
 * deadline.c - a binary heap of deadlines
 *
 * Each entry knows its place, so that a request which is answered early leaves in logarithmic time.
 * One timer is set to the first; with thousands of requests in flight that is one timer, not
 * thousands. Places count from 1, so that the zero of a fresh request means "not here".
 */
#include "deadline.h"

#include <errno.h>
#include <stdlib.h>

static void put(struct deadlines *deadlines, size_t place, struct deadline *deadline)
{
    deadlines->heap[place - 1] = deadline;
    deadline->place = place;
}

static void sift_up(struct deadlines *deadlines, struct deadline *deadline, size_t place)
{
    while (place > 1 && deadlines->heap[place / 2 - 1]->at_us > deadline->at_us) {
        put(deadlines, place, deadlines->heap[place / 2 - 1]);
        place /= 2;
    }
    put(deadlines, place, deadline);
}

static void sift_down(struct deadlines *deadlines, struct deadline *deadline, size_t place)
{
    for (;;) {
        size_t child = 2 * place;

        if (child > deadlines->n)
            break;
        if (child < deadlines->n &&
            deadlines->heap[child]->at_us < deadlines->heap[child - 1]->at_us)
            child++;
        if (deadlines->heap[child - 1]->at_us >= deadline->at_us)
            break;
        put(deadlines, place, deadlines->heap[child - 1]);
        place = child;
    }
    put(deadlines, place, deadline);
}

int deadlines_add(struct deadlines *deadlines, struct deadline *deadline)
{
    if (deadlines->n == deadlines->room) {
        size_t room = deadlines->room ? 2 * deadlines->room : 64;
        struct deadline **heap = reallocarray(deadlines->heap, room, sizeof(*heap));

        if (!heap)
            return -ENOMEM;
        deadlines->heap = heap;
        deadlines->room = room;
    }
    deadlines->n++;
    sift_up(deadlines, deadline, deadlines->n);
    return 0;
}

void deadlines_remove(struct deadlines *deadlines, struct deadline *deadline)
{
    size_t place = deadline->place;
    struct deadline *last;

    if (place == 0)
        return;
    last = deadlines->heap[deadlines->n - 1];
    deadlines->n--;
    deadline->place = 0;
    if (last == deadline)
        return;
    if (place > 1 && deadlines->heap[place / 2 - 1]->at_us > last->at_us)
        sift_up(deadlines, last, place);
    else
        sift_down(deadlines, last, place);
}

struct deadline *deadlines_first(const struct deadlines *deadlines)
{
    return deadlines->n ? deadlines->heap[0] : NULL;
}

void deadlines_deinit(struct deadlines *deadlines)
{
    free(deadlines->heap);
    *deadlines = (struct deadlines){0};
}
