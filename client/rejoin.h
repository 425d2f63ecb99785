/*
 * rejoin.h - coming back to a server that went away
 */
#pragma once

#include "link.h"

/* How often the servers that end while they have a request may do so before the request ends, too:
 * it may be what they end of. */
#define REJOIN_LOSSES_MAX 3u

/* The connection has ended. What waits for an answer is kept to be sent again, or ends here. */
void rejoin_begin(struct fused *f);

/* What is to be done by now: connecting, sending what was kept, ending what is out of time. Never
 * waits. 1 when something changed, 0, or why the connection is at its end. */
int rejoin_step(struct fused *f);

/* The server let us in: called with the answer to a request of this file in f->reply. `index` is
 * its row. */
void rejoin_answer(struct fused *f, uint32_t index);

/* The server ends and said so to this request: kept for the next one. False: it is to be told. */
bool rejoin_hold(struct fused *f, uint32_t index);

/* This try has failed; the next one comes by itself. */
void rejoin_drop(struct fused *f);
