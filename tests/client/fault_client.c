/*
 * fault_client.c - each allocation and system call of the library fails once: an error from the
 * call or in the result, no crash, and nothing left over
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "client/fused.h"
#include "server.h"
#include "tests/fault.h"

static struct server server;
static unsigned n_seen; /* calls whose failure must show; what gives things back tells nobody */

/* A client's whole life; the first failure ends it early. */
static int live(const char *path)
{
    struct fused_buffer *a = NULL, *b = NULL;
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_result result;
    struct fused *f = NULL;
    char *json = NULL;
    uint8_t data[4] = {1, 2, 3, 4};
    int memfd = -1, r;

    r = fused_connect(path, "test", &f);
    if (r == 0)
        r = fused_ping(f);
    if (r == 0)
        r = fused_status(f, &json);
    if (r == 0)
        r = fused_buffer_create(f, 4096, &a);
    if (r == 0)
        r = memfd = memfd_create("mine", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (r >= 0)
        r = fallocate(memfd, 0, 0, 4096);
    if (r == 0)
        r = fused_buffer_register(f, memfd, 4096, &b);
    call.model = "m";
    call.input = fused_tensor_at(data, FUSED_FLOAT32, 1, (int64_t[]){1});
    for (unsigned k = 0; k < 20 && r == 0; k++)
        r = fused_submit(f, &call, NULL);
    while (r == 0 && fused_in_flight(f) > 0) {
        r = fused_next(f, -1, &result);
        if (r == 0)
            r = result.code;
    }
    if (r == 0)
        r = fused_fd(f) < 0 ? -EMFILE : 0;
    /* Whatever happened, every request still ends. */
    while (f && fused_in_flight(f) > 0)
        assert_int_equal(fused_next(f, -1, &result), 0);
    n_seen = fault_count();
    free(json);
    close_fd(memfd);
    fused_buffer_free(a);
    fused_buffer_free(b);
    fused_close(f);
    return r;
}

/* A client that gives up before hello is no fault of the server's script. */
static void script(struct server *s)
{
    if (!server_read(s))
        return;
    server_document(s, server_limits);
    while (server_read(s))
        server_answer(s);
}

static void test_every_failure(void **state)
{
    unsigned n = 1;

    (void)state;
    for (;; n++) {
        unsigned before = fault_open_fds(), n_calls;
        int r;

        server_start(&server, script);
        fault_arm(n);
        r = live(server.path);
        n_calls = fault_disarm();
        if (n <= n_seen && r == 0)
            fail_msg("failure %u went unseen", n);
        /* Where it never connected, the script still waits for somebody. */
        close_fd(wire_connect(server.path));
        server_stop(&server);
        if (n_calls < n) {
            assert_int_equal(r, 0);
            break;
        }
        assert_int_equal(fault_open_fds(), before);
    }
    assert_in_range(n, 30, 500);
}

/* ---- coming back ---- */

static atomic_bool is_over;

/* Ends at the first inference; each connection after that is served until its client closes it. */
static void script_back(struct server *s)
{
    bool is_first = true;

    while (!atomic_load(&is_over)) {
        while (server_read(s)) {
            if (s->request.verb == VERB_INFER && is_first) {
                is_first = false;
                break;
            }
            if (s->request.verb == VERB_HELLO)
                server_document(s, server_limits);
            else if (s->request.verb == VERB_INFER && !s->request.infer.input.is_inline &&
                     s->request.infer.input.buffer == 0)
                server_error(s, ERR_NOT_FOUND, "there is no such buffer");
            else
                server_answer(s);
        }
        close_fd(s->socket);
        for (unsigned k = 0; k < s->n_buffers; k++)
            shm_deinit(&s->buffers[k]);
        s->n_buffers = 0;
        s->socket = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
        CHECK(s->socket >= 0);
    }
}

/* Four requests over the end of a server; however that goes, each has one result. */
static int live_on(const char *path)
{
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_buffer *b = NULL;
    struct fused_result result;
    struct fused *f = NULL;
    uint8_t data[4] = {1, 2, 3, 4};
    unsigned n_sent = 0, n_done = 0;
    int r;

    r = fused_connect(path, "test", &f);
    if (r == 0) {
        fused_set_reconnect(f, 3000);
        r = fused_fd(f) < 0 ? -EMFILE : 0;
    }
    if (r == 0)
        r = fused_buffer_create(f, 4096, &b);
    call.model = "m";
    for (unsigned k = 0; k < 4 && r == 0; k++) {
        call.input = k == 1 ? fused_tensor_in(b, 0, FUSED_FLOAT32, 1, (int64_t[]){1})
                            : fused_tensor_at(data, FUSED_FLOAT32, 1, (int64_t[]){1});
        r = fused_submit(f, &call, NULL);
        n_sent += r == 0;
    }
    while (f && fused_in_flight(f) > 0) {
        assert_int_equal(fused_next(f, -1, &result), 0);
        n_done++;
        if (r == 0)
            r = result.code;
    }
    assert_int_equal(n_done, n_sent);
    fused_buffer_free(b);
    fused_close(f);
    return r;
}

static void test_every_failure_back(void **state)
{
    unsigned n = 1;

    (void)state;
    for (;; n++) {
        unsigned before = fault_open_fds(), n_calls;
        int r;

        atomic_store(&is_over, false);
        server_start(&server, script_back);
        fault_arm(n);
        r = live_on(server.path);
        n_calls = fault_disarm();
        atomic_store(&is_over, true);
        for (unsigned k = 0; k < 2; k++) /* the script may wait for a first or a next one */
            close_fd(wire_connect(server.path));
        server_stop(&server);
        if (n_calls < n) {
            assert_int_equal(r, 0);
            break;
        }
        assert_int_equal(fault_open_fds(), before);
    }
    assert_in_range(n, 30, 500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_failure),
                                       cmocka_unit_test(test_every_failure_back)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
