/*
 * scheduler.h - queued requests, deadlines, and what the engines run next
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include <uv.h>

#include "deadline.h"
#include "device.h"
#include "engine.h"
#include "place.h"
#include "post.h"
#include "registry.h"
#include "request.h"

struct scheduler {
    struct engine *engines[BACKEND_DEVICES_MAX]; /* one a device */
    struct places places;
    struct post *post;
    bool is_posting; /* what is answered now goes by it */
    struct deadlines deadlines;
    uint64_t n_turns; /* of the loop */
    uint64_t queued_rows;
    unsigned n_queued, n_running;
    unsigned n_active;          /* requests that are not answered yet, each once */
    uint64_t answered, refused; /* requests that ended with a result, and with an error */

    int timer_fd; /* timerfd: microseconds, which libuv's timers do not have */
    uv_poll_t timer;
    uint64_t timer_us; /* what it is set to; UINT64_MAX: off */
    uv_check_t turn;   /* once a turn of the loop, after everything that arrived in it */

    uv_idle_t spin; /* while it is active the loop looks for events instead of sleeping */
    unsigned spin_us;
    bool is_spinning, has_news; /* has_news: something arrived or ended in this turn */
    uint64_t news_us;           /* when that was the last time */

    void (*progress)(void *context);              /* something ended */
    void (*lost)(void *context, const char *why); /* the device is gone */
    void *context;
};

/* `infos`: of each device. */
int scheduler_init(struct scheduler *scheduler, uv_loop_t *loop, const struct device *device,
                   const struct backend_info *infos, unsigned spin_us,
                   void (*progress)(void *context), void (*lost)(void *context, const char *why),
                   void *context);
/* Nothing is queued or running. */
void scheduler_deinit(struct scheduler *scheduler);

/* Queues a request that is complete. -EBUSY when its model's queue is full, -ENOMEM. */
int scheduler_add(struct scheduler *scheduler, struct request *request);
/* Ends a request of an infer: at once when it is queued, after its batch when it runs. */
void scheduler_cancel(struct scheduler *scheduler, struct request *request);
/* The same when the client is gone: nobody is answered. */
void scheduler_abandon(struct scheduler *scheduler, struct request *request);
/* Answers all that is queued or runs: the caller then ends the process without the backend. */
void scheduler_fail_all(struct scheduler *scheduler, enum proto_error error);
/* When the oldest batch that runs was started; UINT64_MAX when none runs. */
uint64_t scheduler_oldest_us(const struct scheduler *scheduler);
