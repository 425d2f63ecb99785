/*
 * test_nvml.c - what the CUDA backend makes of NVML, without and with one, and with one that hangs
 */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "kernels/cuda/nvml.h"
#include "tests/fake_nvml.h"

static void (*set)(const struct fake_nvml *script);
static void (*left)(int *ret_open, int *ret_sets);

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void assert_unknown(const struct nvml_reading *reading)
{
    assert_int_equal(reading->total_bytes, 0);
    assert_int_equal(reading->temperature_c, -1);
    assert_int_equal(reading->power_w, -1);
    assert_int_equal(reading->clock_mhz, -1);
    assert_string_equal(reading->driver, "");
    assert_false(reading->health.watched);
    assert_int_equal(reading->health.ecc_corrected, -1);
    assert_int_equal(reading->health.ecc_uncorrected, -1);
    assert_int_equal(reading->health.n_xids, 0);
    assert_string_equal(reading->health.lost, "");
}

static struct nvml *open_or_fail(const char *bus)
{
    struct nvml *nvml = NULL;

    assert_int_equal(nvml_new(bus, &nvml), 0);
    return nvml;
}

/* The next reading of the thread's that has what is looked for; it asks once a second. */
static struct nvml_reading read_until(struct nvml *nvml,
                                      bool (*is_there)(const struct nvml_reading *reading))
{
    struct nvml_reading reading;

    for (int i = 0; i < 500; i++) {
        nvml_read(nvml, &reading);
        if (is_there(&reading))
            return reading;
        sleep_ms(10);
    }
    fail_msg("not within 5 s: %llu Xid, last %u, lost \"%s\", %lld and %lld errors of memory",
             (unsigned long long)reading.health.n_xids, reading.health.last_xid,
             reading.health.lost, (long long)reading.health.ecc_corrected,
             (long long)reading.health.ecc_uncorrected);
    return reading;
}

static bool has_been_read(const struct nvml_reading *reading)
{
    return reading->driver[0] != 0;
}

static bool has_three_xids(const struct nvml_reading *reading)
{
    return reading->health.n_xids == 3;
}

static bool is_lost(const struct nvml_reading *reading)
{
    return reading->health.lost[0] != 0;
}

static void close_and_check(struct nvml *nvml)
{
    int n_open, n_sets;

    nvml_free(nvml);
    left(&n_open, &n_sets);
    assert_int_equal(n_open, 0);
    assert_int_equal(n_sets, 0);
}

/* Comes first: afterwards there is a library of that name. */
static void does_without(void **state)
{
    struct nvml_reading reading;
    struct nvml *nvml;
    void *real = dlopen("libnvidia-ml.so.1", RTLD_NOW);

    (void)state;
    if (real) {
        dlclose(real);
        skip();
    }
    nvml = open_or_fail(FAKE_NVML_BUS);
    nvml_read(nvml, &reading);
    assert_unknown(&reading);
    nvml_free(nvml);
    nvml_free(NULL);
}

static void opens_the_stand_in(void **state)
{
    const char *b = getenv("B");
    char path[300];
    void *library;

    (void)state;
    snprintf(path, sizeof(path), "%s%s/fake-nvml.so", b && b[0] == '/' ? "" : "./",
             b ? b : "build");
    library = dlopen(path, RTLD_NOW);
    if (!library)
        fail_msg("%s", dlerror());
    *(void **)&set = dlsym(library, "fake_nvml_set");
    *(void **)&left = dlsym(library, "fake_nvml_left");
    assert_non_null(set);
    assert_non_null(left);
}

static void reads_the_device(void **state)
{
    struct nvml_reading reading;
    struct nvml *nvml;

    (void)state;
    set(&(struct fake_nvml){.ecc_corrected = 7, .ecc_uncorrected = 2});
    nvml = open_or_fail(FAKE_NVML_BUS);
    reading = read_until(nvml, has_been_read);
    assert_int_equal(reading.total_bytes, 1000);
    assert_int_equal(reading.free_bytes, 600);
    assert_int_equal(reading.temperature_c, 41);
    assert_int_equal(reading.power_w, 100);
    assert_int_equal(reading.clock_mhz, 1980);
    assert_string_equal(reading.driver, "580.1");
    assert_true(reading.health.watched);
    assert_int_equal(reading.health.ecc_corrected, 7);
    assert_int_equal(reading.health.ecc_uncorrected, 2);
    assert_int_equal(reading.health.n_xids, 0);
    assert_int_equal(reading.health.last_xid, 0);
    assert_string_equal(reading.health.lost, "");
    assert_string_equal(reading.health.lost_by, "62, 79, 95, 119, 120, 140");
    close_and_check(nvml);
}

static void says_what_it_does_not_know(void **state)
{
    struct nvml_reading reading;
    struct nvml *nvml;

    (void)state;
    set(&(struct fake_nvml){.init_fails = 1});
    nvml = open_or_fail(FAKE_NVML_BUS);
    sleep_ms(50);
    nvml_read(nvml, &reading);
    assert_unknown(&reading);
    close_and_check(nvml);

    set(&(struct fake_nvml){0});
    nvml = open_or_fail("0000:42:00.0");
    sleep_ms(50);
    nvml_read(nvml, &reading);
    assert_unknown(&reading);
    close_and_check(nvml);

    set(&(struct fake_nvml){.no_events = 1, .no_ecc = 1, .n_xids = 1, .xids = {79}});
    nvml = open_or_fail(FAKE_NVML_BUS);
    reading = read_until(nvml, has_been_read);
    assert_int_equal(reading.temperature_c, 41);
    assert_false(reading.health.watched);
    assert_int_equal(reading.health.ecc_corrected, -1);
    assert_int_equal(reading.health.ecc_uncorrected, -1);
    assert_int_equal(reading.health.n_xids, 0);
    close_and_check(nvml);
}

/* Faults of processes on the device, errors of memory: none of them is the device's end. */
static void counts_what_others_do(void **state)
{
    struct nvml_reading reading;
    struct nvml *nvml;

    (void)state;
    set(&(struct fake_nvml){.n_xids = 3, .xids = {13, 31, 94}});
    nvml = open_or_fail(FAKE_NVML_BUS);
    reading = read_until(nvml, has_three_xids);
    assert_int_equal(reading.health.last_xid, 94);
    assert_string_equal(reading.health.lost, "");
    close_and_check(nvml);
    set(&(struct fake_nvml){.n_xids = 3, .xids = {43, 45, 48}});
    nvml = open_or_fail(FAKE_NVML_BUS);
    reading = read_until(nvml, has_three_xids);
    assert_int_equal(reading.health.last_xid, 48);
    assert_string_equal(reading.health.lost, "");
    close_and_check(nvml);
}

static void knows_what_is_the_end(void **state)
{
    struct nvml_reading reading;
    struct nvml *nvml;
    const char *next;

    (void)state;
    set(&(struct fake_nvml){0});
    nvml = open_or_fail(FAKE_NVML_BUS);
    reading = read_until(nvml, has_been_read);
    close_and_check(nvml);
    /* Each number of those that it names, between two that are none. */
    for (const char *p = reading.health.lost_by; *p; p = next + strspn(next, ", ")) {
        char *end, wanted[64];
        unsigned xid = (unsigned)strtoul(p, &end, 10);

        next = end;
        set(&(struct fake_nvml){.n_xids = 3, .xids = {31, xid, 45}});
        nvml = open_or_fail(FAKE_NVML_BUS);
        reading = read_until(nvml, has_three_xids);
        snprintf(wanted, sizeof(wanted), "the driver reports Xid %u", xid);
        assert_string_equal(reading.health.lost, wanted);
        assert_int_equal(reading.health.last_xid, 45);
        close_and_check(nvml);
    }
    set(&(struct fake_nvml){.is_lost = 1});
    nvml = open_or_fail(FAKE_NVML_BUS);
    reading = read_until(nvml, is_lost);
    assert_string_equal(reading.health.lost, "the driver says that it is lost");
    close_and_check(nvml);
}

/* What comes later is seen, and what was counted stays. */
static void sees_what_comes_later(void **state)
{
    struct fake_nvml script = {.n_xids = 2, .xids = {31, 31}};
    struct nvml_reading reading;
    struct nvml *nvml;

    (void)state;
    set(&script);
    nvml = open_or_fail(FAKE_NVML_BUS);
    read_until(nvml, has_been_read);
    set(&(struct fake_nvml){.ecc_corrected = 4, .n_xids = 1, .xids = {45}});
    reading = read_until(nvml, has_three_xids);
    assert_int_equal(reading.health.last_xid, 45);
    assert_int_equal(reading.health.ecc_corrected, 4);
    close_and_check(nvml);
}

/* The thread hangs in the driver: readings are old, nobody waits, closing takes a second, and what
 * the thread uses stays. */
static void never_waits(void **state)
{
    static struct nvml *nvml; /* static: the leak sanitizer still finds it */
    struct nvml_reading reading;
    double began, took;

    (void)state;
    set(&(struct fake_nvml){.hangs = 1});
    nvml = open_or_fail(FAKE_NVML_BUS);
    began = now_s();
    nvml_read(nvml, &reading);
    assert_unknown(&reading);
    assert_true(now_s() - began < 0.5);
    began = now_s();
    nvml_free(nvml);
    took = now_s() - began;
    if (took < 0.9 || took > 3)
        fail_msg("closing took %.2f s, not one", took);
    set(&(struct fake_nvml){0}); /* lets the thread end before the program does */
    for (int i = 0, n_open = 1, n_sets; i < 300 && n_open > 0; i++) {
        sleep_ms(10);
        left(&n_open, &n_sets);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(does_without),          cmocka_unit_test(opens_the_stand_in),
        cmocka_unit_test(reads_the_device),      cmocka_unit_test(says_what_it_does_not_know),
        cmocka_unit_test(counts_what_others_do), cmocka_unit_test(knows_what_is_the_end),
        cmocka_unit_test(sees_what_comes_later), cmocka_unit_test(never_waits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
