/*
 * post.h - answers that a thread of its own sends
 *
 * All but the sending itself is on the loop thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#define POST_LETTER_MAX 448 /* bytes */

struct post;

/* `sent` is called on the loop thread for each letter, with what wire_send() said and the bytes;
 * until then its socket stays open. `spin_us`: how long the thread looks for more before it sleeps.
 */
int post_new(uv_loop_t *loop, unsigned spin_us,
             void (*sent)(void *owner, int result, const uint8_t *bytes, size_t n),
             struct post **ret);
/* Sends what was put, says so, and ends the thread. Freed from the loop. NULL is fine. */
struct post *post_free(struct post *post);

/* Copies a letter. False when it is too long, or there is no room; post_go() makes the thread see
 * what was put. */
bool post_put(struct post *post, int socket, void *owner, const uint8_t *bytes, size_t n);
void post_go(struct post *post);

/* Waits until all is sent, which never blocks on a client, and says so. */
void post_flush(struct post *post);
