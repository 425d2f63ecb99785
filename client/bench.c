/*
 * bench.c - load on a server, and what came of it
 *
 * Each client is a thread with a connection, and `depth` places for requests, each with an input
 * and a result of its own. In the closed loop a place sends its next request when it has its
 * answer. In the open loop requests have instants, whatever the server does: latency counts from
 * the instant that a request was meant to be sent at, so that a stall shows in every request that
 * it delayed, also in those that could not be sent for want of a place. Requests meant before the
 * warm-up's end are not counted.
 *
 * Place k has the same input in every client, of which a request takes as many rows as it has. To
 * verify, each input runs alone first, in each shape; later answers must have its bits, whatever
 * they were batched with.
 */
#include "client/bench.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "proto/base.h"

#define RECONNECT_MS  30000
#define LAST_MS       30000 /* what an answer may take after the end */
#define SAY_EVERY_NS  100000000
#define SLEEP_MAX_NS  100000000 /* until a client sees that the run is over */
#define POISON        0xa5
#define PLACE_ALIGNED 64u

struct place {
    uint64_t due_ns;
    bool is_busy;
    unsigned shape; /* of the request in flight */
    void *x, *y;    /* where this side can touch them */
};

struct client {
    const struct bench_run *run;
    pthread_t thread;
    struct fused *f;
    struct fused_buffer *in, *out;
    struct place *places;
    uint8_t *memory; /* inputs and results, where no buffer has them */
    unsigned number, n_sent;
    uint64_t random, next_ns;
    int last_code; /* of the answer taken last */
    struct bench_result result;
};

/* What the threads share. */
struct bench_run {
    const struct bench_load *load;
    uint64_t in_step, out_step; /* bytes from place to place */
    uint8_t *inputs;            /* one for each place */
    uint8_t *expected;          /* to verify, by place and shape; else NULL */
    uint64_t start_ns, counted_ns, end_ns;
    uint64_t stopped_ns; /* the last client's end, where that is before end_ns */
    atomic_bool is_over; /* before end_ns: the user's wish, or a client cannot go on */
    atomic_ullong n_answers;
};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* ---- histograms ---- */

void histogram_add(struct bench_histogram *histogram, uint64_t value)
{
    unsigned octave = value < 64 ? 0 : 63 - (unsigned)__builtin_clzll(value);
    uint64_t k = value < 64 ? value : (uint64_t)(octave - 5) * 64 + ((value >> (octave - 6)) & 63);

    if (k >= HISTOGRAM_BUCKETS)
        k = HISTOGRAM_BUCKETS - 1;
    histogram->n++;
    histogram->buckets[k]++;
    if (value > histogram->max)
        histogram->max = value;
}

uint64_t histogram_at(const struct bench_histogram *histogram, double part)
{
    uint64_t wanted = (uint64_t)ceil(part * (double)histogram->n), n = 0;

    for (unsigned k = 0; k < HISTOGRAM_BUCKETS && histogram->n > 0; k++) {
        uint64_t upper = k < 64 ? k : ((UINT64_C(65) + k % 64) << (k / 64 - 1)) - 1;

        n += histogram->buckets[k];
        if (n >= wanted && n > 0 && k + 1 < HISTOGRAM_BUCKETS)
            return upper < histogram->max ? upper : histogram->max;
    }
    return histogram->max;
}

static void histogram_join(struct bench_histogram *to, const struct bench_histogram *from)
{
    to->n += from->n;
    if (from->max > to->max)
        to->max = from->max;
    for (unsigned k = 0; k < HISTOGRAM_BUCKETS; k++)
        to->buckets[k] += from->buckets[k];
}

/* ---- places ---- */

/* Numbers from 0.5 to 1 with either sign. */
static void fill(uint8_t *to, uint64_t bytes, enum fused_dtype dtype, uint64_t seed)
{
    uint64_t random = seed;

    for (uint64_t at = 0; at + fused_dtype_size(dtype) <= bytes; at += fused_dtype_size(dtype)) {
        uint64_t z = next_random(&random);
        uint32_t wide = 0x3f000000u | (uint32_t)(z >> 41) | (uint32_t)(z << 31);
        uint16_t narrow = (uint16_t)(dtype == FUSED_FLOAT16 ? 0x3800u | (z >> 54) : wide >> 16);

        if (dtype == FUSED_FLOAT32)
            memcpy(to + at, &wide, sizeof(wide));
        else
            memcpy(to + at, &narrow, sizeof(narrow));
    }
}

static int make_memory(struct client *c)
{
    const struct bench_load *load = c->run->load;
    uint64_t in = c->run->in_step * load->depth, out = c->run->out_step * load->depth;
    unsigned device = load->n_devices > 0 ? load->devices[c->number % load->n_devices] : 0;
    uint8_t *x, *y;
    int r = 0;

    c->places = calloc(load->depth, sizeof(*c->places));
    if (!c->places)
        return -ENOMEM;
    if (load->place == BENCH_INLINE)
        c->memory = malloc(in + out);
    else if (load->place == BENCH_DEVICE)
        r = fused_buffer_create_on(c->f, device, in, &c->in);
    else
        r = fused_buffer_create(c->f, in, &c->in);
    if (r == 0 && load->place == BENCH_DEVICE)
        r = fused_buffer_create_on(c->f, device, out, &c->out);
    else if (r == 0 && load->place == BENCH_BUFFERS)
        r = fused_buffer_create(c->f, out, &c->out);
    if (r != 0 || load->place == BENCH_DEVICE)
        return r;
    if (load->place == BENCH_INLINE && !c->memory)
        return -ENOMEM;
    x = c->memory ? c->memory : fused_buffer_data(c->in);
    y = c->memory ? c->memory + in : fused_buffer_data(c->out);
    memcpy(x, c->run->inputs, in);
    for (unsigned k = 0; k < load->depth; k++) {
        c->places[k].x = x + k * c->run->in_step;
        c->places[k].y = y + k * c->run->out_step;
    }
    return 0;
}

static int open_client(struct client *c)
{
    int r;

    r = fused_connect(c->run->load->socket, "fusectl bench", &c->f);
    if (r != 0)
        return r;
    if (c->run->load->reconnect)
        fused_set_reconnect(c->f, RECONNECT_MS);
    return make_memory(c);
}

static void close_client(struct client *c)
{
    fused_buffer_free(c->in);
    fused_buffer_free(c->out);
    fused_close(c->f);
    free(c->places);
    free(c->memory);
}

static int send_place(struct client *c, unsigned k, uint64_t due_ns)
{
    const struct bench_load *load = c->run->load;
    unsigned number = (c->number + c->n_sent++) % load->n_shapes;
    const struct bench_shape *shape = &load->shapes[number];
    struct fused_infer call = FUSED_INFER_INIT;
    struct place *place = &c->places[k];

    place->shape = number;
    call.model = load->model;
    call.input = shape->input;
    call.output = shape->output;
    call.user = place;
    if (load->place == BENCH_INLINE) {
        call.input.data = place->x;
        call.output.data = place->y;
    } else {
        call.input.buffer = c->in;
        call.input.offset = k * c->run->in_step;
        call.output.buffer = c->out;
        call.output.offset = k * c->run->out_step;
    }
    if (c->run->expected)
        memset(place->y, POISON, shape->output_bytes);
    place->due_ns = due_ns;
    place->is_busy = true;
    return fused_submit(c->f, &call, NULL);
}

/* ---- answers ---- */

static void count(struct client *c, const struct fused_result *answer, const struct place *place)
{
    const struct bench_load *load = c->run->load;
    const struct bench_shape *shape = &load->shapes[place->shape];
    struct bench_result *result = &c->result;
    uint64_t now = now_ns();
    size_t k = (size_t)(place - c->places) * load->n_shapes + place->shape;

    atomic_fetch_add_explicit(&((struct bench_run *)c->run)->n_answers, 1, memory_order_relaxed);
    if (c->run->expected && answer->code == 0 &&
        memcmp(place->y, c->run->expected + k * c->run->out_step, shape->output_bytes) != 0)
        result->n_wrong++;
    result->n_repeats += answer->repeats;
    if (place->due_ns < c->run->counted_ns)
        return;
    if (answer->code != 0) {
        result->n_codes[answer->code > 0 && answer->code < BENCH_CODES ? answer->code : 0]++;
        if (result->text[0] == 0)
            snprintf(result->text, sizeof(result->text), "%s", answer->text);
        return;
    }
    result->n_ok++;
    result->n_late += answer->late != 0;
    result->batch_rows += answer->batch_rows;
    result->rows += shape->rows;
    result->input_bytes += shape->input_bytes;
    result->output_bytes += shape->output_bytes;
    histogram_add(&result->latency_ns, now - place->due_ns);
    histogram_add(&result->queue_us, answer->queue_us);
    histogram_add(&result->run_us, answer->run_us);
}

/* The next answer, within that time (ms, as fused_next()). Its place, or NULL with *ret_error. */
static struct place *take(struct client *c, int timeout_ms, int *ret_error)
{
    struct fused_result answer;
    struct place *place;
    int r;

    r = fused_next(c->f, timeout_ms, &answer);
    *ret_error = r;
    if (r != 0)
        return NULL;
    place = answer.user;
    place->is_busy = false;
    c->last_code = answer.code;
    count(c, &answer, place);
    if (answer.code < 0)
        *ret_error = answer.code;
    return place;
}

static bool goes_on(const struct client *c)
{
    return !atomic_load_explicit(&c->run->is_over, memory_order_relaxed) &&
           now_ns() < c->run->end_ns;
}

static int closed_loop(struct client *c)
{
    int r = 0;

    for (unsigned k = 0; k < c->run->load->depth && r == 0; k++)
        r = send_place(c, k, now_ns());
    while (r == 0 && goes_on(c)) {
        struct place *place = take(c, 100, &r);

        if (place && r == 0)
            r = send_place(c, (unsigned)(place - c->places), now_ns());
        if (r == -EAGAIN)
            r = 0;
    }
    return r;
}

/* ---- open loop ---- */

static void next_instant(struct client *c)
{
    double gap = 1e9 * c->run->load->n_clients / c->run->load->rate;

    if (c->run->load->poisson)
        gap *= -log(1.0 - (double)(next_random(&c->random) >> 11) * 0x1p-53);
    c->next_ns += (uint64_t)gap;
}

static unsigned free_place(const struct client *c)
{
    unsigned k = 0;

    while (k < c->run->load->depth && c->places[k].is_busy)
        k++;
    return k;
}

static void sleep_until(struct client *c, uint64_t ns)
{
    struct pollfd poller = {.fd = fused_fd(c->f), .events = POLLIN};
    uint64_t now = now_ns(), left = ns > now ? ns - now : 0;
    struct timespec wait = {.tv_nsec = (long)(left < SLEEP_MAX_NS ? left : SLEEP_MAX_NS)};

    ppoll(&poller, 1, &wait, NULL);
}

static int open_loop(struct client *c)
{
    uint64_t end_ns;
    int r = 0;

    prctl(PR_SET_TIMERSLACK, 1000UL);
    c->next_ns = c->run->start_ns;
    next_instant(c);
    while (r == 0 && goes_on(c)) {
        unsigned k = free_place(c);
        bool has_place = k < c->run->load->depth;

        if (has_place && c->next_ns <= now_ns()) {
            r = send_place(c, k, c->next_ns);
            next_instant(c);
        }
        while (r == 0 && take(c, 0, &r))
            ;
        if (r == -EAGAIN || r == -ENOENT)
            r = 0;
        if (r == 0 && (free_place(c) == c->run->load->depth || c->next_ns > now_ns()))
            sleep_until(c, has_place && c->next_ns < c->run->end_ns ? c->next_ns : c->run->end_ns);
    }
    end_ns = now_ns() < c->run->end_ns ? now_ns() : c->run->end_ns;
    for (; r == 0 && c->next_ns < end_ns; next_instant(c))
        c->result.n_unsent++;
    return r;
}

/* A client that cannot go on ends the run: what the others do then is not what was asked for. */
static void *run_client(void *data)
{
    struct client *c = data;
    int r;

    r = c->run->load->rate > 0 ? open_loop(c) : closed_loop(c);
    while (r == 0 && fused_in_flight(c->f) > 0)
        take(c, LAST_MS, &r);
    if (r != 0 && c->result.error == 0) {
        c->result.error = r;
        snprintf(c->result.text, sizeof(c->result.text), "%s", fused_error_text(c->f));
        atomic_store(&((struct bench_run *)c->run)->is_over, true);
    }
    return NULL;
}

/* ---- the whole ---- */

/* Each input alone, for its bits. */
static int learn(struct bench_run *run, struct client *c)
{
    const struct bench_load *load = run->load;
    size_t n = (size_t)load->depth * load->n_shapes;
    uint8_t *expected = calloc(n, run->out_step);
    int r = expected ? 0 : -ENOMEM;

    /* The shapes come in turn, and this is the first client. */
    for (size_t i = 0; i < n && r == 0; i++) {
        struct place *place = &c->places[i / load->n_shapes];

        r = send_place(c, (unsigned)(i / load->n_shapes), 0);
        if (r == 0)
            take(c, -1, &r);
        if (r == 0)
            r = c->last_code;
        if (r == 0)
            memcpy(expected + i * run->out_step, place->y, load->shapes[place->shape].output_bytes);
    }
    c->result = (struct bench_result){0};
    run->expected = expected;
    return r;
}

static void join_results(struct bench_result *to, const struct bench_result *from)
{
    histogram_join(&to->latency_ns, &from->latency_ns);
    histogram_join(&to->queue_us, &from->queue_us);
    histogram_join(&to->run_us, &from->run_us);
    for (unsigned k = 0; k < BENCH_CODES; k++)
        to->n_codes[k] += from->n_codes[k];
    to->n_ok += from->n_ok;
    to->n_wrong += from->n_wrong;
    to->n_late += from->n_late;
    to->n_unsent += from->n_unsent;
    to->n_repeats += from->n_repeats;
    to->batch_rows += from->batch_rows;
    to->rows += from->rows;
    to->input_bytes += from->input_bytes;
    to->output_bytes += from->output_bytes;
    if (to->error == 0)
        to->error = from->error;
    if (to->text[0] == 0)
        memcpy(to->text, from->text, sizeof(to->text));
}

static void watch(struct bench_run *run, bool (*say)(double part, uint64_t n))
{
    const struct timespec pause = {.tv_nsec = SAY_EVERY_NS};
    uint64_t now;

    while ((now = now_ns()) < run->end_ns && !atomic_load(&run->is_over)) {
        double part = (double)(now - run->start_ns) / (double)(run->end_ns - run->start_ns);

        if (say(now < run->start_ns ? 0 : part, atomic_load(&run->n_answers)))
            atomic_store(&run->is_over, true);
        else
            nanosleep(&pause, NULL);
    }
}

/* Starts all at the same instant and waits for the last. */
static int run_threads(struct bench_run *run, struct client *clients,
                       bool (*say)(double part, uint64_t n))
{
    unsigned n = 0;
    int r = 0;

    run->start_ns = now_ns();
    run->counted_ns = run->start_ns + run->load->warm_ns;
    run->end_ns = run->counted_ns + run->load->run_ns;
    for (; n < run->load->n_clients && r == 0; n += r == 0)
        r = -pthread_create(&clients[n].thread, NULL, run_client, &clients[n]);
    if (r == 0)
        watch(run, say);
    else
        atomic_store(&run->is_over, true);
    for (unsigned k = 0; k < n; k++)
        pthread_join(clients[k].thread, NULL);
    run->stopped_ns = now_ns();
    if (!atomic_load(&run->is_over) || run->stopped_ns > run->end_ns)
        run->stopped_ns = run->end_ns;
    return r;
}

static int open_clients(struct bench_run *run, struct client *clients, char text[256])
{
    const struct bench_load *load = run->load;
    int r = 0;

    for (unsigned k = 0; k < load->n_clients && r == 0; k++) {
        clients[k].run = run;
        clients[k].number = k;
        clients[k].random = k;
        r = open_client(&clients[k]);
        if (r == 0 && k == 0 && load->verify)
            r = learn(run, &clients[0]);
        if (r != 0)
            snprintf(text, 256, "%s", fused_error_text(clients[k].f));
    }
    return r;
}

int bench_run(const struct bench_load *load, bool (*say)(double part, uint64_t n),
              struct bench_result **ret, char text[256])
{
    struct bench_run run = {.load = load, .in_step = PLACE_ALIGNED, .out_step = PLACE_ALIGNED};
    struct bench_result *result = calloc(1, sizeof(*result));
    struct client *clients = calloc(load->n_clients, sizeof(*clients));
    int r = -ENOMEM;

    text[0] = 0;
    for (unsigned s = 0; s < load->n_shapes; s++) {
        uint64_t in = (load->shapes[s].input_bytes + PLACE_ALIGNED - 1) / PLACE_ALIGNED;
        uint64_t out = (load->shapes[s].output_bytes + PLACE_ALIGNED - 1) / PLACE_ALIGNED;

        run.in_step = in * PLACE_ALIGNED > run.in_step ? in * PLACE_ALIGNED : run.in_step;
        run.out_step = out * PLACE_ALIGNED > run.out_step ? out * PLACE_ALIGNED : run.out_step;
    }
    run.inputs = calloc(load->depth, run.in_step);
    if (!result || !clients || !run.inputs)
        goto out;
    for (unsigned k = 0; k < load->depth; k++)
        fill(run.inputs + k * run.in_step, run.in_step, load->shapes[0].input.dtype, k + 1);
    r = open_clients(&run, clients, text);
    if (r == 0)
        r = run_threads(&run, clients, say);
    for (unsigned k = 0; k < load->n_clients; k++) {
        join_results(result, &clients[k].result);
        close_client(&clients[k]);
    }
    if (run.stopped_ns > run.counted_ns)
        result->seconds = (double)(run.stopped_ns - run.counted_ns) * 1e-9;
    if (r == 0)
        *ret = take_ptr(result);
out:
    free(result);
    free(clients);
    free(run.inputs);
    free(run.expected);
    return r;
}
