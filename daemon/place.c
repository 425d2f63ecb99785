/*
 * place.c - several engines, and queues that may use all or some of them
 *
 * A request goes nowhere until its batch is formed, so an engine never has a queue of its own to
 * run dry while another's is long: whichever is about to be free takes what is next. Among those
 * with a free slot the one is taken that would begin first, among equal ones the one that had the
 * fewest batches. Among queues the one goes first whose first request would go first in one queue
 * of all (batch.c).
 *
 * With several slots a batch can be submitted while another runs, so that its upload overlaps. One
 * that is full or large is, at once; a small one would only queue behind the other, and is formed
 * when the engine is about to be free, by when more may have come. When that is follows from how
 * long the model's batches took lately; a wrong guess costs an earlier or later submission.
 */
#include "place.h"

#define LARGE_BYTES (1u << 20) /* of input: its upload is worth overlapping */
#define LEAD_US     100        /* from deciding on a batch to its first kernel, and the upload */

void places_init(struct places *places)
{
    *places = (struct places){0};
    TAILQ_INIT(&places->active);
}

void places_note(struct places *places, struct place_queue *queue)
{
    bool is_active = queue->batch.n > 0;

    if (queue->is_active == is_active)
        return;
    queue->is_active = is_active;
    if (is_active)
        TAILQ_INSERT_TAIL(&places->active, queue, link);
    else
        TAILQ_REMOVE(&places->active, queue, link);
}

/* When the engine would begin with one more batch. */
static uint64_t begins_us(const struct place *place, uint64_t now_us)
{
    return place->n_in_flight > 0 && place->free_us > now_us ? place->free_us : now_us;
}

static bool is_less_loaded(const struct place *a, const struct place *b, uint64_t now_us)
{
    uint64_t a_us = begins_us(a, now_us), b_us = begins_us(b, now_us);

    if (a_us != b_us)
        return a_us < b_us;
    if (a->n_in_flight != b->n_in_flight)
        return a->n_in_flight < b->n_in_flight;
    return a->n_batches < b->n_batches;
}

/* The least loaded engine with a free slot, or NULL. */
static const struct place *find_engine(const struct places *places, uint32_t among, uint64_t now_us)
{
    const struct place *best = NULL;

    for (unsigned i = 0; i < places->n; i++) {
        const struct place *place = &places->engines[i];

        if (among >> i & 1 && place->n_in_flight < place->n_slots &&
            (!best || is_less_loaded(place, best, now_us)))
            best = place;
    }
    return best;
}

/* From when on the queue's next batch may be formed for that engine. */
static uint64_t ready_us(const struct place *place, struct place_queue *queue)
{
    uint64_t at_us = batch_ready_us(&queue->batch), free_us;

    if (at_us == 0 || place->n_in_flight == 0 || queue->batch.rows > LARGE_BYTES / queue->row_bytes)
        return at_us;
    free_us = place->free_us > LEAD_US ? place->free_us - LEAD_US : 0;
    return at_us > free_us ? at_us : free_us;
}

struct place_queue *places_choose(struct places *places, uint64_t now_us, unsigned *ret_engine,
                                  uint64_t *next_us)
{
    struct place_queue *queue, *best = NULL;

    TAILQ_FOREACH(queue, &places->active, link)
    {
        const struct place *place = find_engine(places, queue->engines, now_us);
        uint64_t at_us;

        if (!place)
            continue;
        at_us = ready_us(place, queue);
        if (at_us > now_us) {
            if (at_us < *next_us)
                *next_us = at_us;
        } else if (!best || batch_before(batch_head(&queue->batch), batch_head(&best->batch))) {
            best = queue;
            *ret_engine = (unsigned)(place - places->engines);
        }
    }
    return best;
}

void place_submit(struct place *place, uint64_t now_us, uint64_t run_us)
{
    /* With nothing in flight it is free, whatever was guessed. */
    if (place->n_in_flight++ == 0 || place->free_us < now_us)
        place->free_us = now_us;
    place->free_us += run_us;
    place->n_batches++;
}

uint64_t place_end(struct place *place, uint64_t rows, uint64_t started_us, uint64_t ended_us)
{
    uint64_t from_us = started_us > place->ended_us ? started_us : place->ended_us;

    place->n_in_flight--;
    place->rows += rows;
    if (ended_us > place->ended_us)
        place->ended_us = ended_us;
    return ended_us > from_us ? ended_us - from_us : 0;
}
