/*
 * test_bench.c - the load generator: its percentiles against sorted numbers, and a server whose
 * wrong and failed answers it must count
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "client/bench.h"
#include "server.h"

#define N    20000
#define SEED 20260803

static struct server server;

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void test_percentiles(void **state)
{
    static const double parts[] = {0, 0.1, 0.5, 0.9, 0.99, 0.999, 1};
    struct bench_histogram *histogram = calloc(1, sizeof(*histogram));
    uint64_t *values = calloc(N, sizeof(*values));
    unsigned seed = SEED;

    (void)state;
    print_message("seed %u\n", seed);
    assert_non_null(histogram);
    assert_non_null(values);
    assert_int_equal(histogram_at(histogram, 0.5), 0);
    for (int i = 0; i < N; i++) {
        values[i] = (uint64_t)rand_r(&seed) >> (rand_r(&seed) % 31);
        values[i] <<= rand_r(&seed) % 9;
        histogram_add(histogram, values[i]);
    }
    qsort(values, N, sizeof(*values), by_value);
    for (size_t k = 0; k < ARRAY_SIZE(parts); k++) {
        size_t at = parts[k] > 0 ? (size_t)(parts[k] * N + 0.5) - 1 : 0;
        uint64_t got = histogram_at(histogram, parts[k]), want = values[at];

        if (got < want || (double)got > (double)want * 1.016 + 1)
            fail_msg("%g: %llu, sorted %llu", parts[k], (unsigned long long)got,
                     (unsigned long long)want);
    }
    assert_int_equal(histogram_at(histogram, 1), values[N - 1]);
    histogram_add(histogram, UINT64_MAX);
    assert_true(histogram_at(histogram, 1) == UINT64_MAX);
    free(histogram);
    free(values);
}

/* Every tenth answer is refused, every tenth has a wrong bit; those of the first two are what the
 * client learns. */
static void script_sloppy(struct server *s)
{
    unsigned n = 0;

    server_hello(s);
    while (server_read(s)) {
        if (s->request.verb == VERB_INFER && n++ % 10 == 7) {
            server_error(s, ERR_BUSY, "not now");
            continue;
        }
        server_answer(s);
    }
}

static void script_wrong_bits(struct server *s)
{
    unsigned n = 0;

    server_hello(s);
    while (server_read(s)) {
        uint8_t *x = NULL;

        if (s->request.verb == VERB_INFER && ++n % 10 == 7)
            x = (uint8_t *)s->buffers[0].data + s->request.infer.input.offset;
        if (x)
            *x ^= 1;
        server_answer(s);
        if (x)
            *x ^= 1;
    }
}

static bool say(double part, uint64_t n)
{
    (void)n;
    assert_true(part >= 0 && part <= 1.5);
    return false;
}

static struct bench_result *run_for(void (*script)(struct server *), double rate, uint64_t ns)
{
    struct bench_load load = {
        .model = "m",
        .shapes = {{.rows = 1,
                    .input = {.dtype = FUSED_FLOAT32, .rank = 2, .shape = {1, 100}},
                    .output = {.dtype = FUSED_FLOAT32, .rank = 2, .shape = {1, 100}},
                    .input_bytes = 400,
                    .output_bytes = 400}},
        .n_shapes = 1,
        .n_clients = 1,
        .depth = 2,
        .rate = rate,
        .verify = true,
        .run_ns = ns};
    struct bench_result *result = NULL;
    char text[256];
    int r;

    server_start(&server, script);
    load.socket = server.path;
    r = bench_run(&load, say, &result, text);
    server_stop(&server);
    if (r != 0)
        fail_msg("%s: %s", fused_code_name(r), text);
    return result;
}

static struct bench_result *run(void (*script)(struct server *), double rate)
{
    return run_for(script, rate, 200000000);
}

static void test_counts(void **state)
{
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        struct bench_result *result = run(script_sloppy, k == 0 ? 0 : 500);

        uint64_t n_busy = result->n_codes[ERR_BUSY];

        /* Few where the machine is busy with other things. */
        assert_in_range(result->n_ok, 1, 1000000);
        assert_int_equal(result->n_wrong, 0);
        assert_in_range(n_busy, result->n_ok / 16, result->n_ok / 4 + 1);
        assert_string_equal(result->text, n_busy > 0 ? "not now" : "");
        if (k == 1)
            assert_in_range(result->n_ok + n_busy + result->n_unsent, 95, 101);
        assert_true(result->n_ok == result->latency_ns.n);
        free(result);
    }
}

static void test_verifies(void **state)
{
    struct bench_result *result = run(script_wrong_bits, 0);

    (void)state;
    assert_in_range(result->n_wrong, 1, result->n_ok / 4 + 1);
    free(result);
}

/* A server that stops for a while: the open loop's latency shows it in all requests that it
 * delayed. */
static void script_stall(struct server *s)
{
    unsigned n = 0;

    server_hello(s);
    while (server_read(s)) {
        if (s->request.verb == VERB_INFER && ++n == 40)
            usleep(100000);
        server_answer(s);
    }
}

static void test_open_loop(void **state)
{
    struct bench_result *result = run(script_stall, 1000);
    uint64_t slow;

    (void)state;
    /* 100 instants fall into the stall, and half of those wait for 50 ms and more, or never go out.
     */
    assert_in_range(result->n_ok + result->n_unsent, 150, 250);
    slow = histogram_at(&result->latency_ns, 1 - 30.0 / (double)(result->n_ok + 1));
    if (slow < 40000000 && result->n_unsent < 30)
        fail_msg("the 30th slowest took %llu ns, %llu unsent", (unsigned long long)slow,
                 (unsigned long long)result->n_unsent);
    free(result);
}

/* A server that goes away: the run ends then, with what was served and the time that it took. */
static void script_die(struct server *s)
{
    unsigned n = 0;

    server_hello(s);
    while (n < 20 && server_read(s)) {
        n += s->request.verb == VERB_INFER;
        server_answer(s);
    }
}

static void test_server_dies(void **state)
{
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        struct bench_result *result = run_for(script_die, k == 0 ? 0 : 500, UINT64_C(60000000000));

        assert_int_equal(result->error, -EPIPE);
        assert_string_equal(result->text, "the server closed the connection");
        assert_in_range(result->n_ok, 10, 18);
        if (result->seconds <= 0 || result->seconds > 10)
            fail_msg("%g s", result->seconds);
        assert_in_range(result->n_unsent, 0, 10);
        free(result);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_percentiles), cmocka_unit_test(test_counts),
        cmocka_unit_test(test_verifies),    cmocka_unit_test(test_open_loop),
        cmocka_unit_test(test_server_dies),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
