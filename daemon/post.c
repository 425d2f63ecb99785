/*
 * post.c - a thread that sends
 *
 * Most of what an answer costs is waking the client that waits for it, inside of sendmsg(). A batch
 * of many requests has many answers, and meanwhile the loop would read nobody.
 *
 * Letters lie in a ring. The loop fills them in and moves `put`; the thread sends up to `put` and
 * moves `sent`; the loop looks at what became of them and moves `seen`. Each mark has one writer.
 * The lock is for sleeping alone. What a socket does not take comes back to the loop, which owns
 * connections and knows what to do; nothing here waits for a client.
 */
#include "post.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "bell.h"
#include "clock.h"
#include "proto/wire.h"

#define LETTERS 1024

struct letter {
    void *owner;
    int socket, result;
    size_t n;
    uint8_t bytes[POST_LETTER_MAX];
};

struct post {
    struct bell bell; /* letters have been sent */
    void (*said)(void *owner, int result, const uint8_t *bytes, size_t n);
    unsigned spin_us;
    unsigned filled, seen; /* the loop's */
    atomic_uint put, sent;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work;
    bool stop;          /* under lock */
    atomic_bool asleep; /* written under lock */

    struct letter letters[LETTERS];
};

/* Waits for letters. False: stop. */
static bool sleep_until_put(struct post *post, unsigned sent)
{
    bool stop;

    pthread_mutex_lock(&post->lock);
    atomic_store(&post->asleep, true);
    while (atomic_load(&post->put) == sent && !post->stop)
        pthread_cond_wait(&post->work, &post->lock);
    atomic_store(&post->asleep, false);
    stop = post->stop && atomic_load(&post->put) == sent;
    pthread_mutex_unlock(&post->lock);
    return !stop;
}

static void look_for(const struct post *post, unsigned sent)
{
    uint64_t until_us = clock_us() + post->spin_us;

    while (atomic_load_explicit(&post->put, memory_order_relaxed) == sent &&
           clock_us() < until_us) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

static void *post_main(void *argument)
{
    struct post *post = argument;
    unsigned sent = 0, put;

    pthread_setname_np(pthread_self(), "post");
    for (;;) {
        if (post->spin_us > 0)
            look_for(post, sent);
        if (atomic_load(&post->put) == sent && !sleep_until_put(post, sent))
            return NULL;
        while (put = atomic_load(&post->put), sent != put) {
            struct letter *letter = &post->letters[sent % LETTERS];

            letter->result = wire_send(letter->socket, letter->bytes, letter->n, -1);
            atomic_store(&post->sent, ++sent);
        }
        bell_ring(&post->bell);
    }
}

static void look(struct post *post)
{
    unsigned sent = atomic_load(&post->sent);

    while (post->seen != sent) {
        const struct letter *letter = &post->letters[post->seen++ % LETTERS];

        post->said(letter->owner, letter->result, letter->bytes, letter->n);
    }
}

static void on_bell(void *context)
{
    look(context);
}

static void on_closed(void *context)
{
    struct post *post = context;

    pthread_mutex_destroy(&post->lock);
    pthread_cond_destroy(&post->work);
    free(post);
}

int post_new(uv_loop_t *loop, unsigned spin_us,
             void (*sent)(void *owner, int result, const uint8_t *bytes, size_t n),
             struct post **ret)
{
    struct post *post = calloc(1, sizeof(*post));
    sigset_t all, old;
    int r;

    if (!post)
        return -ENOMEM;
    post->said = sent;
    post->spin_us = spin_us;
    pthread_mutex_init(&post->lock, NULL);
    pthread_cond_init(&post->work, NULL);
    r = bell_init(&post->bell, loop, on_bell, post);
    if (r < 0) {
        free(post);
        return r;
    }
    /* Signals are the loop's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    r = -pthread_create(&post->thread, NULL, post_main, post);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r < 0) {
        bell_close(&post->bell, on_closed);
        return r;
    }
    *ret = post;
    return 0;
}

struct post *post_free(struct post *post)
{
    if (!post)
        return NULL;
    post_go(post);
    pthread_mutex_lock(&post->lock);
    post->stop = true;
    pthread_cond_signal(&post->work);
    pthread_mutex_unlock(&post->lock);
    pthread_join(post->thread, NULL);
    look(post);
    bell_close(&post->bell, on_closed);
    return NULL;
}

bool post_put(struct post *post, int socket, void *owner, const uint8_t *bytes, size_t n)
{
    struct letter *letter = &post->letters[post->filled % LETTERS];

    if (n > POST_LETTER_MAX || post->filled - post->seen == LETTERS)
        return false;
    letter->owner = owner;
    letter->socket = socket;
    letter->n = n;
    memcpy(letter->bytes, bytes, n);
    post->filled++;
    return true;
}

void post_go(struct post *post)
{
    if (atomic_load_explicit(&post->put, memory_order_relaxed) == post->filled)
        return;
    atomic_store(&post->put, post->filled);
    /* It says that it sleeps before it looks once more. */
    if (!atomic_load(&post->asleep))
        return;
    pthread_mutex_lock(&post->lock);
    pthread_mutex_unlock(&post->lock);
    pthread_cond_signal(&post->work);
}

void post_flush(struct post *post)
{
    if (!post)
        return;
    post_go(post);
    while (atomic_load(&post->sent) != post->filled)
        sched_yield();
    look(post);
}
