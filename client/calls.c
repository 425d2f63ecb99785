/*
 * calls.c - rows, their states, and what is counted of them
 *
 * The counts decide what may be sent and who waits: states are set here alone, by functions
 * that count them. Nothing here speaks to a server.
 */
#include "calls.h"

#include <errno.h>
#include <stdlib.h>

#include "proto/base.h"

void calls_init(struct calls *calls)
{
    *calls =
        (struct calls){.first_free = CALLS_NONE, .first_done = CALLS_NONE, .last_done = CALLS_NONE};
}

void calls_deinit(struct calls *calls)
{
    for (uint32_t k = 0; k < calls->n; k++) {
        free(calls->rows[k].datagram);
        free(calls->rows[k].bytes);
    }
    free(calls->rows);
    calls_init(calls);
}

static bool grow(struct calls *calls)
{
    uint32_t n = calls->n ? 2 * calls->n : 16;
    struct call *rows;

    if (n > CALLS_MAX)
        return false;
    rows = realloc(calls->rows, n * sizeof *rows);
    if (!rows)
        return false;
    for (uint32_t k = calls->n; k < n; k++)
        rows[k] = (struct call){.next = k + 1 < n ? k + 1 : CALLS_NONE};
    calls->first_free = calls->n;
    calls->rows = rows;
    calls->n = n;
    return true;
}

uint64_t calls_new_id(struct calls *calls, uint32_t index)
{
    calls->rows[index].id = ++calls->n_ids * CALLS_MAX + index;
    return calls->rows[index].id;
}

int calls_add(struct calls *calls, const struct call *like, uint32_t *ret_index)
{
    struct call *call;
    uint32_t index;

    if (calls->first_free == CALLS_NONE && !grow(calls))
        return calls->n < CALLS_MAX ? -ENOMEM : -ENOBUFS;
    index = calls->first_free;
    call = &calls->rows[index];
    calls->first_free = call->next;
    *call = *like;
    call->state = CALL_NEW;
    call->result.id = calls_new_id(calls, index);
    *ret_index = index;
    return 0;
}

uint32_t calls_find(const struct calls *calls, uint64_t id)
{
    uint32_t index = (uint32_t)(id % CALLS_MAX);

    return index < calls->n && calls->rows[index].state != CALL_FREE && calls->rows[index].id == id
               ? index
               : CALLS_NONE;
}

/* No answer is to come any more. */
static void uncount(struct calls *calls, uint32_t index)
{
    const struct call *call = &calls->rows[index];

    if (call->state == CALL_SENT || call->state == CALL_HELD || call->state == CALL_DROPPED) {
        calls->n_unanswered--;
        calls->unanswered_bytes -= call->answer_bytes;
    }
    if (call->state == CALL_HELD)
        calls->n_held--;
    if (call->state == CALL_ORPHAN)
        calls->n_orphans--;
}

static void free_row(struct calls *calls, uint32_t index)
{
    struct call *call = &calls->rows[index];

    free(call->datagram);
    free(call->bytes);
    *call = (struct call){.next = calls->first_free};
    calls->first_free = index;
}

void calls_drop(struct calls *calls, uint32_t index)
{
    uncount(calls, index);
    free_row(calls, index);
}

void calls_sent(struct calls *calls, uint32_t index, enum call_state state)
{
    struct call *call = &calls->rows[index];

    call->state = state;
    calls->n_unanswered++;
    calls->unanswered_bytes += call->answer_bytes;
}

void calls_hold(struct calls *calls, uint32_t index)
{
    struct call *call = &calls->rows[index];

    if (call->state == CALL_SENT)
        call->result.repeats++;
    else
        calls_sent(calls, index, CALL_HELD);
    call->state = CALL_HELD;
    calls->n_held++;
}

void calls_resent(struct calls *calls, uint32_t index)
{
    calls->rows[index].state = CALL_SENT;
    calls->n_held--;
}

void calls_forget(struct calls *calls, uint32_t index)
{
    if (calls->rows[index].state == CALL_HELD)
        calls_drop(calls, index);
    else
        calls->rows[index].state = CALL_DROPPED;
}

void calls_join(struct calls *calls, uint32_t index)
{
    calls->rows[index].state = CALL_JOIN;
}

void calls_orphan(struct calls *calls, uint32_t index, uint32_t handle)
{
    struct call *call = &calls->rows[index];

    uncount(calls, index);
    call->state = CALL_ORPHAN;
    call->answer_bytes = 0;
    call->buffer = handle;
    calls->n_orphans++;
}

void calls_returned(struct calls *calls, uint32_t index)
{
    struct call *call = &calls->rows[index];

    call->verb = VERB_BUFFER_RELEASE;
    calls->n_orphans--;
    calls_sent(calls, index, CALL_DROPPED);
}

void calls_done(struct calls *calls, uint32_t index)
{
    struct call *call = &calls->rows[index];

    uncount(calls, index);
    call->state = CALL_DONE;
    call->next = CALLS_NONE;
    call->previous = calls->last_done;
    if (calls->last_done != CALLS_NONE)
        calls->rows[calls->last_done].next = index;
    else
        calls->first_done = index;
    calls->last_done = index;
}

void calls_take(struct calls *calls, uint32_t index, struct fused_result *ret, void **ret_bytes)
{
    struct call *call = &calls->rows[index];

    if (call->previous != CALLS_NONE)
        calls->rows[call->previous].next = call->next;
    else
        calls->first_done = call->next;
    if (call->next != CALLS_NONE)
        calls->rows[call->next].previous = call->previous;
    else
        calls->last_done = call->previous;
    calls->n_inferences--;
    *ret_bytes = take_ptr(call->bytes);
    *ret = call->result;
    free_row(calls, index);
}
