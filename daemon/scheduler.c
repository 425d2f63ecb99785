/*
 * scheduler.c - from receipt to the engine and back
 *
 * Work-conserving: whenever a slot of an engine is free and something may run there, a batch is
 * formed (place.c says which), once a turn of the loop, so that everything that arrived in that
 * turn is considered together. Requests wait in queues of the loop until their batch is formed;
 * from then on they run, and cannot be taken back.
 *
 * Waking the loop costs more than small batches take. So it does not sleep for `spin_us` after
 * something happened, nor for a while longer when a batch is about to end.
 *
 * One timerfd serves both the earliest deadline and the earliest batch that waits for more rows.
 */
#include "scheduler.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/timerfd.h>

#include "clock.h"
#include "conn.h"
#include "proto/base.h"

#define MARGIN_SHARE      4 /* of the time to a deadline, for a host that is late */
#define SPIN_IN_FLIGHT_US 1000
#define POST_MIN          4 /* answers at once that are worth the hand-over to another thread */

static struct request *request_of_item(struct batch_item *item)
{
    return (struct request *)((char *)item - offsetof(struct request, item));
}

static struct request *request_of_deadline(struct deadline *deadline)
{
    return (struct request *)((char *)deadline - offsetof(struct request, deadline));
}

static void set_timer(struct scheduler *scheduler, uint64_t at_us)
{
    struct itimerspec spec = {0};

    if (at_us == scheduler->timer_us)
        return;
    if (at_us != UINT64_MAX) {
        spec.it_value.tv_sec = (time_t)(at_us / 1000000);
        spec.it_value.tv_nsec = (long)(at_us % 1000000 * 1000);
        if (at_us == 0)
            spec.it_value.tv_nsec = 1; /* all zero would switch it off */
    }
    if (timerfd_settime(scheduler->timer_fd, TFD_TIMER_ABSTIME, &spec, NULL) == 0)
        scheduler->timer_us = at_us;
}

/* Where it waits: what is bound to a device has its own queue, if there is a choice of them. */
static struct place_queue *queue_of(const struct request *request)
{
    struct version *version = request->version;

    return &version->queues[version->n_queues > 1 && request->is_bound ? 1 + request->device : 0];
}

/* Takes a waiting request, or the rest of one, out of its queue. */
static void unqueue(struct scheduler *scheduler, struct request *request)
{
    struct place_queue *queue = queue_of(request);

    batch_remove(&queue->batch, &request->item);
    places_note(&scheduler->places, queue);
    deadlines_remove(&scheduler->deadlines, &request->deadline);
    request->version->rows -= request->item.rows;
    scheduler->queued_rows -= request->item.rows;
    scheduler->n_queued--;
}

static void end_queued(struct scheduler *scheduler, struct request *request, enum proto_error error)
{
    unqueue(scheduler, request);
    scheduler->n_active--;
    scheduler->refused++;
    request_fail(request, error, NULL);
    scheduler->progress(scheduler->context);
}

/* What waits of a request will not run. Its parts that run end it; between two there is none. */
static void end_rest(struct scheduler *scheduler, struct request *request, enum proto_error error)
{
    if (request->n_parts == 0)
        end_queued(scheduler, request, error);
    else
        unqueue(scheduler, request);
}

static void expire(struct scheduler *scheduler, uint64_t now_us)
{
    struct deadline *first;

    while ((first = deadlines_first(&scheduler->deadlines)) && first->at_us <= now_us)
        end_queued(scheduler, request_of_deadline(first), ERR_DEADLINE);
}

/* With an engine for each request the parts of one overlap with each other; else requests do. */
static unsigned form(struct scheduler *scheduler, struct place_queue *queue,
                     struct batch_item **items, uint64_t now_us, enum batch_reason *ret_reason)
{
    struct batch_item *head = batch_head(&queue->batch);
    uint32_t cut_rows = head->cut_rows, alone_rows = request_of_item(head)->alone_rows;
    unsigned n;

    if (alone_rows > 0 && scheduler->n_active <= scheduler->places.n)
        head->cut_rows = alone_rows;
    n = batch_form(&queue->batch, items, ENGINE_JOBS_MAX, now_us, ret_reason);
    head->cut_rows = cut_rows;
    return n;
}

static void launch(struct scheduler *scheduler, struct place_queue *queue, unsigned engine,
                   uint64_t now_us)
{
    static struct batch_item *items[ENGINE_JOBS_MAX];
    struct engine_batch *batch = engine_take(scheduler->engines[engine]);
    struct version *version = queue->owner;
    unsigned n = form(scheduler, queue, items, now_us, &batch->reason);

    places_note(&scheduler->places, queue);
    batch->version = version_ref(version);
    batch->why.text[0] = '\0';
    batch->batch = (struct batch){
        .plan = version->plans[engine], .jobs = batch->jobs, .n_jobs = n, .report = &batch->why};
    for (unsigned i = 0; i < n; i++) {
        struct request *request = request_of_item(items[i]);
        uint32_t rows = request->item.taken_rows;

        batch->owners[i] = request;
        batch->jobs[i] = request->job;
        if (rows < request->job.rows) {
            batch->jobs[i].first_row = request->job.rows - request->item.rows - rows;
            batch->jobs[i].part_rows = rows;
        }
        batch->batch.rows += rows;
        if (!request->item.queued)
            scheduler->n_queued--;
        deadlines_remove(&scheduler->deadlines, &request->deadline);
        request->state = REQUEST_RUNNING;
        request->n_parts++;
    }
    version->rows -= batch->batch.rows;
    scheduler->queued_rows -= batch->batch.rows;
    scheduler->n_running += n;
    place_submit(&scheduler->places.engines[engine], now_us, version->run_us);
    engine_submit(scheduler->engines[engine], batch);
}

static void run(struct scheduler *scheduler)
{
    uint64_t now_us, next_us = UINT64_MAX;
    struct place_queue *queue;
    struct deadline *first;
    unsigned engine;

    if (scheduler->n_queued == 0) {
        set_timer(scheduler, UINT64_MAX);
        return;
    }
    now_us = clock_us();
    expire(scheduler, now_us);
    while ((queue = places_choose(&scheduler->places, now_us, &engine, &next_us)))
        launch(scheduler, queue, engine, now_us);
    first = deadlines_first(&scheduler->deadlines);
    if (first && first->at_us < next_us)
        next_us = first->at_us;
    set_timer(scheduler, next_us);
}

/* A request, or a part of it, has ended. False: others of it have not. */
static bool end_part(struct scheduler *scheduler, struct request *request,
                     const struct engine_batch *batch, const struct job *job)
{
    uint64_t rows = batch->batch.rows < UINT32_MAX ? batch->batch.rows : UINT32_MAX;
    int r = batch->result < 0 ? batch->result : job->result;

    if (r < 0)
        request->job.result = r;
    request->job.n_full = job->n_full;
    if (request->started_us == 0 || batch->started_us < request->started_us)
        request->started_us = batch->started_us;
    if (batch->ended_us > request->ended_us)
        request->ended_us = batch->ended_us;
    if (rows > request->batch_rows)
        request->batch_rows = (uint32_t)rows;
    if (request->item.queued && r < 0)
        unqueue(scheduler, request);
    return --request->n_parts == 0 && !request->item.queued;
}

/* Takes the results over and frees the slot. Returns the number of requests in `ended`. */
static unsigned collect(struct scheduler *scheduler, unsigned engine, struct engine_batch *batch,
                        struct request **ended)
{
    uint64_t run_us = place_end(&scheduler->places.engines[engine], batch->batch.rows,
                                batch->started_us, batch->ended_us);
    struct version *version = batch->version;
    unsigned n_jobs = batch->batch.n_jobs, n = 0;
    uint64_t rows = batch->batch.rows;

    if (batch->result == 0) {
        stats_batch(&version->served->stats, rows, batch->reason);
        stats_batch(&version->registry->total, rows, batch->reason);
        version->run_us = version->run_us ? (3 * version->run_us + run_us) / 4 : run_us;
    }
    for (unsigned i = 0; i < n_jobs; i++) {
        if (end_part(scheduler, batch->owners[i], batch, &batch->jobs[i]))
            ended[n++] = batch->owners[i];
    }
    scheduler->n_running -= n_jobs;
    engine_release(scheduler->engines[engine], batch);
    version_unref(version);
    return n;
}

static void answer(struct scheduler *scheduler, struct request *request)
{
    int r = request->cancelled ? -ECANCELED : request->job.result;

    scheduler->n_active--;
    if (r < 0) {
        scheduler->refused++;
        request_fail(request, request_error(VERB_INFER, r), NULL);
    } else {
        scheduler->answered++;
        request_answer_infer(request);
    }
}

static void answer_all(struct scheduler *scheduler, struct request **ended, unsigned n)
{
    scheduler->is_posting = n >= POST_MIN;
    for (unsigned i = 0; i < n; i++)
        answer(scheduler, ended[i]);
    scheduler->is_posting = false;
    post_go(scheduler->post);
}

/*
 * The device gets its next batch before the answers of the last one are sent. One batch of each
 * engine a turn: they may end as fast as they are answered, and who has something to say would have
 * to wait until nothing does.
 */
static void on_done(void *context)
{
    static struct request *ended[ENGINE_JOBS_MAX];
    struct scheduler *scheduler = context;

    scheduler->has_news = true;
    for (unsigned engine = 0; engine < scheduler->places.n; engine++) {
        struct engine_batch *batch = engine_done(scheduler->engines[engine]);
        bool lost = batch && batch->result == -ENOTRECOVERABLE;
        unsigned n;

        if (!batch)
            continue;
        n = collect(scheduler, engine, batch, ended);
        if (!lost)
            run(scheduler);
        answer_all(scheduler, ended, n);
        if (lost) {
            const char *why = batch->why.text;

            scheduler->lost(scheduler->context,
                            why[0] ? why : "the backend reports that the device is lost");
            return;
        }
    }
    scheduler->progress(scheduler->context);
}

static void on_timer(uv_poll_t *timer, int status, int events)
{
    struct scheduler *scheduler = timer->data;
    uint64_t n;

    (void)status;
    (void)events;
    if (read(scheduler->timer_fd, &n, sizeof(n)) == sizeof(n))
        scheduler->timer_us = UINT64_MAX;
    run(scheduler);
}

static void on_spin(uv_idle_t *spin)
{
    (void)spin;
}

static void decide_to_spin(struct scheduler *scheduler)
{
    uint64_t now_us, limit_us = scheduler->spin_us;
    bool spins;

    if (scheduler->spin_us == 0 || (!scheduler->has_news && !scheduler->is_spinning))
        return;
    now_us = clock_us();
    if (scheduler->has_news)
        scheduler->news_us = now_us;
    scheduler->has_news = false;
    if (scheduler->n_running > 0 && limit_us < SPIN_IN_FLIGHT_US)
        limit_us = SPIN_IN_FLIGHT_US;
    spins = now_us - scheduler->news_us < limit_us;
    if (spins == scheduler->is_spinning)
        return;
    scheduler->is_spinning = spins;
    if (spins)
        uv_idle_start(&scheduler->spin, on_spin);
    else
        uv_idle_stop(&scheduler->spin);
}

static void on_turn(uv_check_t *turn)
{
    struct scheduler *scheduler = turn->data;

    scheduler->n_turns++;
    run(scheduler);
    decide_to_spin(scheduler);
}

static void free_engines(struct scheduler *scheduler)
{
    for (unsigned i = 0; i < scheduler->places.n; i++)
        scheduler->engines[i] = engine_free(scheduler->engines[i]);
}

int scheduler_init(struct scheduler *scheduler, uv_loop_t *loop, const struct device *device,
                   const struct backend_info *infos, unsigned spin_us,
                   void (*progress)(void *context), void (*lost)(void *context, const char *why),
                   void *context)
{
    int r;

    *scheduler = (struct scheduler){
        .progress = progress, .lost = lost, .context = context, .timer_us = UINT64_MAX};
    places_init(&scheduler->places);
    scheduler->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (scheduler->timer_fd < 0)
        return -errno;
    r = uv_poll_init(loop, &scheduler->timer, scheduler->timer_fd);
    if (r < 0)
        goto close_timer;
    scheduler->timer.data = scheduler;
    r = uv_poll_start(&scheduler->timer, UV_READABLE, on_timer);
    if (r < 0)
        goto close_handle;
    uv_check_init(loop, &scheduler->turn);
    scheduler->turn.data = scheduler;
    uv_check_start(&scheduler->turn, on_turn);
    uv_idle_init(loop, &scheduler->spin);
    scheduler->spin_us = engine_has_few_cores(device->n) ? 0 : spin_us;
    r = post_new(loop, scheduler->spin_us, conn_sent, &scheduler->post);
    if (r < 0)
        goto close_turn;
    for (unsigned i = 0; i < device->n; i++) {
        r = engine_new(loop, device->ops, device->backends[i], infos[i].slots, device->n, spin_us,
                       on_done, scheduler, &scheduler->engines[i]);
        if (r < 0)
            goto close_engines;
        scheduler->places.engines[i].n_slots = infos[i].slots;
        scheduler->places.n++;
    }
    return 0;

close_engines:
    free_engines(scheduler);
    scheduler->post = post_free(scheduler->post);
close_turn:
    uv_close((uv_handle_t *)&scheduler->spin, NULL);
    uv_close((uv_handle_t *)&scheduler->turn, NULL);
close_handle:
    uv_close((uv_handle_t *)&scheduler->timer, NULL);
close_timer:
    scheduler->timer_fd = close_fd(scheduler->timer_fd);
    return r;
}

void scheduler_deinit(struct scheduler *scheduler)
{
    assert(scheduler->n_queued == 0);
    assert(scheduler->n_running == 0);
    free_engines(scheduler);
    scheduler->post = post_free(scheduler->post);
    uv_close((uv_handle_t *)&scheduler->spin, NULL);
    uv_close((uv_handle_t *)&scheduler->turn, NULL);
    uv_close((uv_handle_t *)&scheduler->timer, NULL);
    scheduler->timer_fd = close_fd(scheduler->timer_fd);
    deadlines_deinit(&scheduler->deadlines);
}

/* When a request's batch must be formed at the latest, for it to end by the deadline. */
static uint64_t latest_us(const struct request *request, uint64_t now_us)
{
    uint64_t at_us = request->deadline.at_us, left_us = at_us > now_us ? at_us - now_us : 0;
    uint64_t needs_us = request->version->run_us + left_us / MARGIN_SHARE;

    if (at_us == UINT64_MAX)
        return UINT64_MAX;
    return now_us + (left_us > needs_us ? left_us - needs_us : 0);
}

int scheduler_add(struct scheduler *scheduler, struct request *request)
{
    struct place_queue *queue = queue_of(request);
    struct version *version = request->version;
    uint64_t now_us = clock_us();
    int r;

    request->item.party = &request->uid->party;
    if (!batch_admits(&queue->batch, &request->item, version->rows))
        return -EBUSY;
    request->item.source = &request->conn->source;
    request->item.latest_us = latest_us(request, now_us);
    r = batch_push(&queue->batch, &request->item, now_us);
    if (r < 0)
        return r;
    if (request->deadline.at_us != UINT64_MAX) {
        r = deadlines_add(&scheduler->deadlines, &request->deadline);
        if (r < 0) {
            batch_remove(&queue->batch, &request->item);
            return r;
        }
    }
    request->state = REQUEST_QUEUED;
    version->rows += request->item.rows;
    scheduler->queued_rows += request->item.rows;
    scheduler->n_queued++;
    scheduler->n_active++;
    scheduler->has_news = true;
    places_note(&scheduler->places, queue);
    return 0;
}

void scheduler_cancel(struct scheduler *scheduler, struct request *request)
{
    request->cancelled = true;
    if (request->item.queued)
        end_rest(scheduler, request, ERR_CANCELLED);
}

void scheduler_abandon(struct scheduler *scheduler, struct request *request)
{
    request_orphan(request);
    scheduler_cancel(scheduler, request);
}

static void fail_running(struct scheduler *scheduler, struct engine *engine, enum proto_error error)
{
    for (unsigned i = 0; i < BACKEND_SLOTS_MAX; i++) {
        struct engine_batch *batch = engine_slot(engine, i);

        for (unsigned k = 0; batch && k < batch->batch.n_jobs; k++) {
            struct request *request = batch->owners[k];

            scheduler->n_running--;
            scheduler->refused += --request->n_parts == 0;
            /* The device may still write: this record's memory stays, only its client is told. */
            request_tell(request, error);
        }
    }
}

void scheduler_fail_all(struct scheduler *scheduler, enum proto_error error)
{
    struct place_queue *queue;

    post_flush(scheduler->post);
    while ((queue = TAILQ_FIRST(&scheduler->places.active)))
        end_rest(scheduler, request_of_item(batch_head(&queue->batch)), error);
    for (unsigned i = 0; i < scheduler->places.n; i++)
        fail_running(scheduler, scheduler->engines[i], error);
}

uint64_t scheduler_oldest_us(const struct scheduler *scheduler)
{
    uint64_t oldest_us = UINT64_MAX;

    for (unsigned i = 0; i < scheduler->places.n; i++) {
        uint64_t at_us = engine_oldest_us(scheduler->engines[i]);

        if (at_us < oldest_us)
            oldest_us = at_us;
    }
    return oldest_us;
}
