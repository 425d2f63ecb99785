/*
 * place.h - which queue's batch is formed next, and for which engine: pure logic, time passed in
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "batch.h"
#include "kernels/backend.h"

/* An engine, as much of it as decides. */
struct place {
    unsigned n_slots, n_in_flight;
    uint64_t free_us;   /* when it will have done all that was submitted: a guess */
    uint64_t ended_us;  /* when its last batch ended */
    uint64_t n_batches; /* submitted */
    uint64_t rows;      /* of those that ended */
};

/* What waits for the same engines. */
struct place_queue {
    struct batch_queue batch;
    uint32_t engines;   /* a bit for each that may run it */
    uint64_t row_bytes; /* of input */
    void *owner;
    TAILQ_ENTRY(place_queue) link; /* in the list of those in which something waits */
    bool is_active;
};

struct places {
    struct place engines[BACKEND_DEVICES_MAX];
    unsigned n;
    TAILQ_HEAD(, place_queue) active;
};

void places_init(struct places *places);
/* The queue got something, or lost it. */
void places_note(struct places *places, struct place_queue *queue);

/*
 * The queue whose batch may be formed now and goes first, and the engine for it; NULL when there is
 * none, or no free slot for it. *next_us becomes the time at which one may be formed, if that is
 * earlier.
 */
struct place_queue *places_choose(struct places *places, uint64_t now_us, unsigned *ret_engine,
                                  uint64_t *next_us);

/* A batch was submitted, which is guessed to take run_us. */
void place_submit(struct place *place, uint64_t now_us, uint64_t run_us);
/* It has ended. Returns how long it took, without the time that it waited for the one before. */
uint64_t place_end(struct place *place, uint64_t rows, uint64_t started_us, uint64_t ended_us);
