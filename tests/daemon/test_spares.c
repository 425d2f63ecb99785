/*
 * test_spares.c - buffers that are there before anybody asks for them
 */
#include <sys/mman.h>

#include "daemon.h"
#include "proto/scan.h"

#define MIB (UINT64_C(1) << 20)

static struct client c, other;

static uint64_t spare_bytes(struct client *client)
{
    struct proto_request request = {.verb = VERB_STATUS};
    struct proto_reply reply;
    struct scan_item item;
    const uint8_t *found;
    size_t n, pos = 0;

    client_call(client, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(
        scan_find(reply.document.bytes, reply.document.n_bytes, "totals.spare_bytes", &found, &n),
        0);
    assert_int_equal(scan_item(found, n, &pos, &item), 0);
    return item.u;
}

/* Within 5 s, there is so much of them. */
static void assert_spare(uint64_t wanted)
{
    uint64_t bytes = 0;

    for (int i = 0; i < 500; i++) {
        bytes = spare_bytes(&c);
        if (bytes == wanted)
            return;
        sleep_ms(10);
    }
    fail_msg("%llu spare bytes, expected %llu", (unsigned long long)bytes,
             (unsigned long long)wanted);
}

static ino_t inode(const struct shm *shm)
{
    struct stat st;

    assert_int_equal(fstat(shm->fd, &st), 0);
    return st.st_ino;
}

static double seconds_to_make(struct client *client, size_t size, struct shm *shm)
{
    double begin = now_s();

    client_buffer(client, size, shm);
    return now_s() - begin;
}

/* At once, zeroed, never one that was somebody's; gone when nobody has buffers. */
static void makes_the_next_one_ahead(void **state)
{
    enum { N = 6 };
    const size_t size = 48 * MIB;
    double first = 0, later = 0;
    struct shm shm[N];
    struct daemon d;

    (void)state;
    daemon_start(&d, "pins=1", NULL);
    client_start(&c, &d);
    client_start(&other, &d);
    assert_int_equal(spare_bytes(&c), 0);
    for (int i = 0; i < N; i++) {
        double took = seconds_to_make(i % 2 ? &other : &c, size, &shm[i]);

        first = i == 0 ? took : first;
        later = i > 0 && took > later ? took : later;
        for (size_t k = 0; k < size; k += 4096)
            assert_int_equal(((uint8_t *)shm[i].data)[k], 0);
        memset(shm[i].data, 0x11 + i, size);
        for (int k = 0; k < i; k++)
            assert_int_not_equal(inode(&shm[k]), inode(&shm[i]));
        assert_spare(size);
    }
    for (int i = 0; i < N; i++) {
        for (size_t k = 0; k < size; k += 4096)
            assert_int_equal(((uint8_t *)shm[i].data)[k], 0x11 + i);
    }
    print_message("48 MiB: the first after %.2f ms, later ones after %.2f at most\n", first * 1e3,
                  later * 1e3);
    client_close(&other);
    /* Who leaves has its pages taken out, and whoever comes then gets none of them. */
    client_start(&other, &d);
    seconds_to_make(&other, size, &shm[1]);
    for (int k = 0; k < N; k++)
        assert_true(k == 1 || inode(&shm[k]) != inode(&shm[1]));
    for (int i = 0; i < N; i++)
        shm_deinit(&shm[i]);
    client_close(&other);
    assert_spare(size); /* `c` still has buffers */
    client_close(&c);
    client_start(&c, &d);
    assert_spare(0);
    client_close(&c);
    assert_healthy(&d);
    daemon_stop(&d);
}

static void keeps_within_the_limit(void **state)
{
    struct shm shm[4];
    struct daemon d;

    (void)state;
    daemon_start(&d, "pins=1", "spare_buffer_bytes = 3145728;");
    client_start(&c, &d);
    client_buffer(&c, 4 * MIB, &shm[0]); /* larger than all of them may be */
    sleep_ms(100);
    assert_int_equal(spare_bytes(&c), 0);
    client_buffer(&c, 2 * MIB, &shm[1]);
    assert_spare(2 * MIB);
    client_buffer(&c, MIB, &shm[2]);
    assert_spare(3 * MIB);
    client_buffer(&c, MIB + 4096, &shm[3]); /* the oldest one goes */
    assert_spare(2 * MIB + 4096);
    for (int i = 0; i < 4; i++)
        shm_deinit(&shm[i]);

    write_file(d.config, "spare_buffer_bytes = 0;");
    kill(d.pid, SIGHUP);
    assert_spare(0);
    client_buffer(&c, MIB, &shm[0]);
    shm_deinit(&shm[0]);
    sleep_ms(100);
    assert_int_equal(spare_bytes(&c), 0);
    client_close(&c);
    assert_healthy(&d);
    daemon_stop(&d);
}

/* One that cannot be pinned, or is made while the daemon ends. The backend aborts when something is
 * left pinned. */
static void fails_and_ends_without_a_trace(void **state)
{
    struct shm shm;
    struct daemon d;

    (void)state;
    daemon_start(&d, "pins=1;fail_pin=2:12", NULL);
    client_start(&c, &d);
    client_buffer(&c, MIB, &shm);
    sleep_ms(100);
    assert_int_equal(spare_bytes(&c), 0);
    shm_deinit(&shm);
    client_close(&c);
    assert_healthy(&d);
    daemon_stop(&d);
    for (int i = 0; i < 5; i++) {
        daemon_start(&d, "pins=1", NULL);
        client_start(&c, &d);
        client_buffer(&c, 200 * MIB, &shm);
        shm_deinit(&shm);
        sleep_ms(i * 20);
        kill(d.pid, SIGTERM);
        assert_int_equal(daemon_join(&d, 10), 0);
        client_close(&c);
        daemon_remove(&d);
    }
}

/* Nobody asked for that one, and nobody else would notice before the next batch. */
static void ends_when_the_device_is_lost(void **state)
{
    struct shm shm;
    struct daemon d;

    (void)state;
    daemon_start(&d, "pins=1;lost_pin=2", NULL);
    client_start(&c, &d);
    client_buffer(&c, MIB, &shm);
    shm_deinit(&shm);
    assert_int_equal(daemon_join(&d, 5), 70);
    assert_true(log_has(&d, "device.lost: the script says that the device is lost"));
    client_close(&c);
    daemon_remove(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(makes_the_next_one_ahead),
        cmocka_unit_test(keeps_within_the_limit),
        cmocka_unit_test(fails_and_ends_without_a_trace),
        cmocka_unit_test(ends_when_the_device_is_lost),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
