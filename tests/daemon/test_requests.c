/*
 * test_requests.c - infer: every way to be right and every way to be refused, limits, deadlines,
 * cancel, lost clients, with answers checked against golden data
 */
#include "daemon.h"

static struct daemon d; /* the CPU backend */
static struct client c;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    daemon_start(&d, NULL, NULL);
    golden_read(MODEL_A, "x", x, sizeof(x));
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

static void answers_inline(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    assert_int_equal(reply.infer.output.dtype, PROTO_FLOAT32);
    assert_int_equal(reply.infer.output.rank, 4);
    assert_int_equal(reply.infer.output.shape[0], 1);
    assert_int_equal(reply.infer.output.shape[1], A_OUT);
    assert_int_equal(reply.infer.output.shape[2], A_ROWS);
    assert_int_equal(reply.infer.output.shape[3], 1);
    assert_int_equal(reply.infer.offset, 0);
    assert_int_equal(reply.infer.batch_rows, A_ROWS);
    assert_false(reply.infer.late);
    client_close(&c);
}

HELPER struct proto_request infer_a_in(uint32_t buffer, uint64_t in, uint64_t out)
{
    struct proto_request request = infer_a(NULL);

    request.infer.input.is_inline = false;
    request.infer.input.buffer = buffer;
    request.infer.input.offset = in;
    request.infer.has_output = true;
    request.infer.output = (struct proto_tensor){.dtype = PROTO_FLOAT32,
                                                 .rank = 4,
                                                 .shape = {1, A_OUT, A_ROWS, 1},
                                                 .buffer = buffer,
                                                 .offset = out};
    return request;
}

static void answers_in_buffers(void **state)
{
    enum { PAGE = 4096, SIZE = 5 * PAGE };
    static float wanted[A_ROWS * A_OUT];
    struct proto_reply reply;
    struct proto_request request;
    uint32_t handle;
    struct shm shm;

    (void)state;
    golden_read(MODEL_A, "y", wanted, sizeof(wanted));
    client_start(&c, &d);
    handle = client_buffer(&c, SIZE, &shm);
    /* S-05: the very end of the buffer; canaries around what may be written. */
    memset(shm.data, 0xee, SIZE);
    memcpy((uint8_t *)shm.data + 4, x, sizeof(x));
    request = infer_a_in(handle, 4, SIZE - A_OUT_BYTES);
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_false(reply.infer.output.is_inline);
    assert_int_equal(reply.infer.output.buffer, handle);
    assert_int_equal(reply.infer.output.offset, SIZE - A_OUT_BYTES);
    assert_near((float *)((uint8_t *)shm.data + SIZE - A_OUT_BYTES), wanted, A_ROWS * A_OUT);
    for (size_t i = 4 + A_IN_BYTES; i < SIZE - A_OUT_BYTES; i++)
        assert_int_equal(((uint8_t *)shm.data)[i], 0xee);
    shm_deinit(&shm);
    client_close(&c);
    assert_healthy(&d);
}

/* One row each: what is changed in a right request, and the error that it must get. */
static void spoil(int row, struct proto_request *request)
{
    struct proto_infer *infer = &request->infer;

    switch (row) {
    case 0:
        infer->model = str("nobody");
        break;
    case 1:
        infer->input.dtype = PROTO_FLOAT16;
        infer->input.n_bytes /= 2;
        break;
    case 2:
        infer->input.shape[0] = 0;
        infer->input.n_bytes = 0;
        break;
    case 3:
        infer->input.shape[1] = A_IN - 1;
        infer->input.n_bytes = A_ROWS * (A_IN - 1) * 4;
        break;
    case 4:
        infer->input.rank = 3;
        infer->input.shape[2] = 1;
        break;
    case 5:
        infer->input.shape[0] = INT64_C(1) << 40;
        infer->input.is_inline = false;
        break;
    case 6:
        infer->has_output = true;
        infer->output = (struct proto_tensor){
            .dtype = PROTO_FLOAT32, .rank = 4, .shape = {A_ROWS, A_OUT, 1, 1}, .buffer = 1};
        break;
    case 7:
        infer->has_output = true;
        infer->output = (struct proto_tensor){
            .dtype = PROTO_FLOAT16, .rank = 4, .shape = {1, A_OUT, A_ROWS, 1}, .buffer = 1};
        break;
    case 8:
        infer->input.is_inline = false;
        infer->input.buffer = 77;
        break;
    case 9: /* past the end by one element */
        *request = infer_a_in(1, 4096 - A_IN_BYTES + 4, 0);
        break;
    case 10: /* wraps */
        *request = infer_a_in(1, UINT64_MAX - 3, 0);
        break;
    case 11: /* not aligned */
        *request = infer_a_in(1, 2, 4096);
        break;
    case 12: /* S-20: in and out overlap by one element */
        *request = infer_a_in(1, 4096 + A_OUT_BYTES - 4, 4096);
        break;
    case 13:
        infer->offset = 3;
        break;
    case 14: /* no factors */
        infer->model = str(MODEL_FULL);
        infer->input.rank = 5;
        memcpy(infer->input.shape, (int64_t[]){2, 3, 6, 9, 10}, 5 * sizeof(int64_t));
        infer->input.n_bytes = 2 * 3 * 6 * 9 * 10 * 4;
        infer->result = RESULT_COMPACT;
        break;
    case 15: /* a result that does not fit into a message */
        infer->input.shape[0] = 100;
        infer->input.n_bytes = 100 * A_IN * 4;
        break;
    case 16:
        *request = infer_a_in(1, 0, 4096);
        infer->output.buffer = 4000000000u;
        break;
    }
}

static void refuses(void **state)
{
    static const enum proto_error wanted[] = {
        ERR_NOT_FOUND,  ERR_BAD_TENSOR, ERR_BAD_TENSOR, ERR_BAD_TENSOR,  ERR_BAD_TENSOR,
        ERR_BAD_TENSOR, ERR_BAD_TENSOR, ERR_BAD_TENSOR, ERR_NOT_FOUND,   ERR_BAD_BUFFER,
        ERR_BAD_BUFFER, ERR_BAD_TENSOR, ERR_BAD_BUFFER, ERR_BAD_MESSAGE, ERR_UNSUPPORTED,
        ERR_BAD_TENSOR, ERR_NOT_FOUND,
    };
    static float much[8192];
    struct proto_reply reply;
    struct shm shm;

    (void)state;
    memcpy(much, x, sizeof(x));
    client_start(&c, &d);
    assert_int_equal(client_buffer(&c, 4096 + A_OUT_BYTES + A_IN_BYTES, &shm), 1);
    for (size_t i = 0; i < ARRAY_SIZE(wanted); i++) {
        struct proto_request request = infer_a(much);

        spoil((int)i, &request);
        /* Row 9 needs a buffer that ends where its input does. */
        if (i == 9)
            request.infer.input.offset = 4096 + A_OUT_BYTES + 4;
        client_call(&c, &request, -1, &reply, NULL);
        if (reply.error != wanted[i])
            print_message("row %zu:\n", i);
        assert_error(&reply, wanted[i]);
    }
    shm_deinit(&shm);
    client_close(&c);
    assert_healthy(&d);
}

static void answers_compact(void **state)
{
    static float input[2 * 3 * 6 * 9 * 10];
    struct proto_request request = infer_a(x);
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    /* An outer sum gives its one factor. */
    request.infer.result = RESULT_COMPACT;
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(reply.infer.output.rank, 2);
    assert_int_equal(reply.infer.output.shape[0], A_ROWS);
    assert_int_equal(reply.infer.output.shape[1], 1);
    /* A constant gives a state per sample. */
    golden_read(MODEL_B, "x", input, sizeof(input));
    request.infer.model = str(MODEL_B);
    request.infer.input.rank = 5;
    memcpy(request.infer.input.shape, (int64_t[]){2, 3, 6, 9, 10}, 5 * sizeof(int64_t));
    request.infer.input.bytes = (uint8_t *)input;
    request.infer.input.n_bytes = sizeof(input);
    request.id = 0;
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_true(reply.infer.has_constant);
    assert_true(reply.infer.constant == 0);
    assert_int_equal(reply.infer.n_full, 0);
    assert_int_equal(reply.infer.output.dtype, PROTO_UINT8);
    assert_int_equal(reply.infer.output.n_bytes, 16);
    for (int i = 0; i < 16; i++)
        assert_int_equal(reply.infer.output.bytes[i], 0);
    /* A sample with a NaN is NaN throughout. */
    input[sizeof(input) / 8] = NAN;
    request.id = 0;
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(reply.infer.output.bytes[0], 0);
    assert_int_equal(reply.infer.output.bytes[1], 1);
    client_close(&c);
}

static void advances_the_offset(void **state)
{
    static float input[1027], wanted[1027], got[1027];
    struct proto_request request = {
        .verb = VERB_INFER,
        .infer = {.model = str(MODEL_DROPOUT),
                  .input = {.dtype = PROTO_FLOAT32, .is_inline = true, .n_bytes = sizeof(input)},
                  .priority = 1,
                  .train = true,
                  .seed = 7,
                  .offset = 400}};
    struct proto_reply reply;

    (void)state;
    golden_read(MODEL_DROPOUT, "x", input, sizeof(input));
    golden_read(MODEL_DROPOUT, "y", wanted, sizeof(wanted));
    request.infer.input.bytes = (uint8_t *)input;
    request.infer.input.rank = 2;
    request.infer.input.shape[0] = 1;
    request.infer.input.shape[1] = 1027;
    client_start(&c, &d);
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(reply.infer.offset, 404);
    memcpy(got, reply.infer.output.bytes, sizeof(got));
    assert_memory_equal(got, wanted, sizeof(got));
    client_close(&c);
}

/* Many at once, in any order, each answer for its own input. */
static void answers_each_its_own(void **state)
{
    enum { N = 200 };
    static float first[N][A_OUT];
    static bool seen[N];
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    for (int pass = 0; pass < 2; pass++) {
        memset(seen, 0, sizeof(seen));
        for (int i = 0; i < N; i++) {
            struct proto_request request;
            float row[A_IN];

            for (int k = 0; k < A_IN; k++)
                row[k] = sinf((float)(i * A_IN + k));
            request = infer_a(row);
            request.id = (uint64_t)i + 1;
            request.infer.input.shape[0] = 1;
            request.infer.input.n_bytes = sizeof(row);
            if (pass == 0) {
                client_call(&c, &request, -1, &reply, NULL);
                assert_ok(&reply);
                memcpy(first[i], reply.infer.output.bytes, sizeof(first[i]));
            } else {
                client_send(&c, &request, -1);
            }
        }
        for (int i = 0; pass == 1 && i < N; i++) {
            assert_true(client_recv(&c, &reply, NULL));
            assert_ok(&reply);
            assert_in_range(reply.id, 1, N);
            assert_false(seen[reply.id - 1]);
            seen[reply.id - 1] = true;
            assert_memory_equal(first[reply.id - 1], reply.infer.output.bytes, sizeof(first[0]));
        }
    }
    client_close(&c);
    assert_healthy(&d);
}

/* ---- on the scripted backend, one daemon each ---- */

static void keeps_deadlines(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    uint64_t running, waiting;
    struct daemon slow;
    double begin;

    (void)state;
    daemon_start(&slow, "delay_ms=800", NULL);
    client_start(&c, &slow);
    begin = now_s();
    running = client_send(&c, &request, -1);
    sleep_ms(30);
    request.id = 0;
    request.infer.has_deadline = true;
    request.infer.deadline_us = 50000;
    waiting = client_send(&c, &request, -1); /* its deadline passes while the other runs */
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, waiting);
    assert_error(&reply, ERR_DEADLINE);
    assert_in_range((int)((now_s() - begin) * 1000), 70, 700);
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, running);
    assert_is_a(&reply);
    /* One that runs when its deadline passes is answered, and marked. */
    request.id = 0;
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    assert_true(reply.infer.late);
    request.id = 0;
    request.infer.deadline_us = 0;
    client_call(&c, &request, -1, &reply, NULL);
    assert_error(&reply, ERR_DEADLINE);
    request.id = 0;
    request.infer.deadline_us = UINT64_MAX;
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    assert_false(reply.infer.late);
    client_close(&c);
    assert_healthy(&slow);
    daemon_stop(&slow);
}

static void cancels(void **state)
{
    struct proto_request request = infer_a(x), cancel = {.verb = VERB_CANCEL};
    struct proto_reply reply;
    struct daemon slow;
    uint64_t running, waiting;

    (void)state;
    daemon_start(&slow, "delay_ms=300", NULL);
    client_start(&c, &slow);
    running = client_send(&c, &request, -1);
    sleep_ms(50);
    request.id = 0;
    waiting = client_send(&c, &request, -1);
    cancel.cancel.target = waiting;
    client_send(&c, &cancel, -1);
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, waiting);
    assert_error(&reply, ERR_CANCELLED);
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, cancel.id);
    assert_ok(&reply);
    cancel.id = 0;
    cancel.cancel.target = running;
    client_call(&c, &cancel, -1, &reply, NULL);
    assert_ok(&reply);
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, running);
    assert_error(&reply, ERR_CANCELLED);
    /* Nothing of that id any more: not an error, because an answer may have crossed the cancel. */
    cancel.id = 0;
    client_call(&c, &cancel, -1, &reply, NULL);
    assert_ok(&reply);
    client_close(&c);
    daemon_stop(&slow);
}

static void refuses_an_id_in_flight(void **state)
{
    struct proto_request request = infer_a(x), ping = {.verb = VERB_PING};
    struct proto_reply reply;
    struct daemon slow;

    (void)state;
    daemon_start(&slow, "delay_ms=200", NULL);
    client_start(&c, &slow);
    ping.id = client_send(&c, &request, -1);
    client_send(&c, &ping, -1);
    assert_true(client_recv(&c, &reply, NULL));
    assert_error(&reply, ERR_BAD_MESSAGE);
    assert_true(client_recv(&c, &reply, NULL));
    assert_is_a(&reply);
    client_close(&c);
    daemon_stop(&slow);
}

static void batches_what_waits(void **state)
{
    enum { N = 20 };
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon slow;
    uint32_t most = 0;

    (void)state;
    daemon_start(&slow, "delay_ms=100", NULL);
    client_start(&c, &slow);
    for (int i = 0; i < N; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    for (int i = 0; i < N; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_is_a(&reply);
        if (reply.infer.batch_rows > most)
            most = reply.infer.batch_rows;
    }
    assert_true(most >= (N / 2) * A_ROWS);
    client_close(&c);
    daemon_stop(&slow);
}

/* MODEL_A with another last line. */
static void add_a_with(const struct daemon *daemon, const char *batching)
{
    char path[200], text[2000], *last;
    FILE *file;
    size_t n;

    add_model(daemon, MODEL_A);
    snprintf(path, sizeof(path), "%s/%s.conf", daemon->models, MODEL_A);
    file = fopen(path, "re");
    assert_non_null(file);
    n = fread(text, 1, sizeof(text) - 200, file);
    fclose(file);
    text[n] = '\0';
    last = strstr(text, "batching");
    assert_non_null(last);
    snprintf(last, 200, "%s", batching);
    write_file(path, text);
}

static void prefers_priority(void **state)
{
    static const uint8_t priorities[] = {0, 1, 2, 3};
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon slow;
    uint64_t first;

    (void)state;
    daemon_prepare(&slow);
    add_a_with(&slow, "batching = { max_rows = 8; };\n");
    daemon_spawn(&slow, "delay_ms=60");
    daemon_wait_ready(&slow);
    client_start(&c, &slow);
    first = client_send(&c, &request, -1);
    sleep_ms(20);
    for (size_t i = 0; i < ARRAY_SIZE(priorities); i++) {
        request.id = 100 + priorities[i];
        request.infer.priority = priorities[i];
        client_send(&c, &request, -1);
    }
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, first);
    for (uint64_t id = 103; id >= 100; id--) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.id, id);
    }
    client_close(&c);
    daemon_stop(&slow);
}

/* max_delay_us waits for more rows, but no longer, and not when the batch is full. */
static void waits_for_more(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon patient;
    double begin;

    (void)state;
    daemon_prepare(&patient);
    add_a_with(&patient, "batching = { max_rows = 16; max_delay_us = 150000; };\n");
    /* Not the CPU backend: where it measures that half a batch costs half, nothing waits. */
    daemon_spawn(&patient, "");
    daemon_wait_ready(&patient);
    client_start(&c, &patient);
    begin = now_s();
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    assert_in_range((int)((now_s() - begin) * 1000), 140, 1000);
    assert_in_range(reply.infer.queue_us, 140000, 1000000);
    begin = now_s();
    for (int i = 0; i < 2; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    for (int i = 0; i < 2; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_is_a(&reply);
        assert_int_equal(reply.infer.batch_rows, 2 * A_ROWS);
    }
    assert_true(now_s() - begin < 0.14);
    client_close(&c);
    daemon_stop(&patient);
}

/* Two slots that end out of order: every answer still belongs to its request. */
static void survives_reordering(void **state)
{
    enum { N = 40 };
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    struct daemon odd;

    (void)state;
    daemon_start(&odd, "slots=2;delay_ms=10;reorder=1", NULL);
    client_start(&c, &odd);
    for (int i = 0; i < N; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
        sleep_ms(3);
    }
    for (int i = 0; i < N; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        assert_is_a(&reply);
    }
    client_close(&c);
    assert_healthy(&odd);
    daemon_stop(&odd);
}

static void names_failures(void **state)
{
    static const struct {
        const char *script;
        enum proto_error error;
    } rows[] = {
        {"fail_batch=1:12", ERR_NO_MEMORY},                                    /* ENOMEM */
        {"fail_batch=1:5", ERR_INTERNAL},                                      /* EIO */
        {"fail_start=1:12", ERR_NO_MEMORY}, {"fail_job=1:28", ERR_BAD_TENSOR}, /* ENOSPC */
        {"fail_job=1:22", ERR_BAD_TENSOR},                                     /* EINVAL */
    };
    struct proto_request request = infer_a(x);
    struct proto_reply reply;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct daemon faulty;

        daemon_start(&faulty, rows[i].script, NULL);
        client_start(&c, &faulty);
        request.id = 0;
        client_call(&c, &request, -1, &reply, NULL);
        assert_error(&reply, rows[i].error);
        request.id = 0;
        client_call(&c, &request, -1, &reply, NULL);
        assert_is_a(&reply);
        client_close(&c);
        assert_healthy(&faulty);
        daemon_stop(&faulty);
    }
}

static void keeps_limits(void **state)
{
    struct proto_request request = infer_a(x),
                         create = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 4096};
    static struct client more[2];
    unsigned n_quota = 0, n_ok = 0;
    struct proto_reply reply;
    struct daemon small;
    struct shm shm[3];

    (void)state;
    daemon_start(&small, "delay_ms=200",
                 "uid_requests = 4; uid_buffers = 3; uid_buffer_bytes = 100000;");
    client_start(&c, &small);
    for (int i = 0; i < 6; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    for (int i = 0; i < 6; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        n_ok += reply.error == ERR_NONE;
        n_quota += reply.error == ERR_QUOTA;
        if (reply.error == ERR_QUOTA)
            assert_refused(&reply, ERR_QUOTA, "uid_requests is 4, 4 in use, 1 more");
    }
    assert_int_equal(n_ok, 4);
    assert_int_equal(n_quota, 2);
    /* Bytes, then their number. */
    create.buffer_create.size_bytes = 100001;
    client_call(&c, &create, -1, &reply, NULL);
    assert_refused(&reply, ERR_QUOTA, "uid_buffer_bytes is 100000, 0 in use, 100001 more");
    create.buffer_create.size_bytes = UINT64_MAX >> 2;
    create.id = 0;
    client_call(&c, &create, -1, &reply, NULL);
    assert_refused(&reply, ERR_QUOTA, "uid_buffer_bytes is 100000, 0 in use, 46116");
    for (int i = 0; i < 3; i++)
        client_buffer(&c, 4096, &shm[i]);
    create.id = 0;
    create.buffer_create.size_bytes = 4096;
    client_call(&c, &create, -1, &reply, NULL);
    assert_refused(&reply, ERR_QUOTA, "uid_buffers is 3, 3 in use, 1 more asked for");
    for (int i = 0; i < 3; i++)
        shm_deinit(&shm[i]);
    client_close(&c);
    assert_healthy(&small);
    daemon_stop(&small);
    /* What all share. */
    daemon_start(&small, "", "total_buffer_bytes = 5000; total_connections = 2;");
    client_start(&c, &small);
    client_buffer(&c, 4096, &shm[0]);
    create.id = 0;
    client_call(&c, &create, -1, &reply, NULL);
    assert_error(&reply, ERR_BUSY);
    shm_deinit(&shm[0]);
    client_open(&more[0], &small);
    client_open(&more[1], &small);
    assert_true(client_recv(&more[1], &reply, NULL));
    assert_error(&reply, ERR_BUSY);
    client_close(&more[0]);
    client_close(&more[1]);
    sleep_ms(50);
    client_close(&c);
    sleep_ms(50);
    assert_healthy(&small);
    daemon_stop(&small);
}

static void bounds_the_queue(void **state)
{
    struct proto_request request = infer_a(x);
    unsigned n_busy = 0, n_ok = 0;
    struct proto_reply reply;
    struct daemon slow;

    (void)state;
    daemon_prepare(&slow);
    add_a_with(&slow, "batching = { max_rows = 8; queue_rows = 16; };\n");
    daemon_spawn(&slow, "delay_ms=100");
    daemon_wait_ready(&slow);
    client_start(&c, &slow);
    client_send(&c, &request, -1);
    sleep_ms(30);
    for (int i = 0; i < 4; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    for (int i = 0; i < 5; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        n_ok += reply.error == ERR_NONE;
        n_busy += reply.error == ERR_BUSY;
    }
    assert_int_equal(n_ok, 3);
    assert_int_equal(n_busy, 2);
    client_close(&c);
    daemon_stop(&slow);
}

/* S-11, Q-04, L-02: the client goes, or releases, while requests use its buffer. */
static void survives_lost_clients(void **state)
{
    struct proto_request request, release = {.verb = VERB_BUFFER_RELEASE};
    struct proto_reply reply;
    struct daemon slow;
    struct shm shm;

    (void)state;
    daemon_start(&slow, "delay_ms=60;pins=1", NULL);
    for (int n = 1; n <= 64; n *= 8) {
        uint32_t handle;
        size_t size = (size_t)n * (A_IN_BYTES + A_OUT_BYTES);

        client_start(&c, &slow);
        handle = client_buffer(&c, size, &shm);
        for (int i = 0; i < n; i++) {
            uint64_t at = (uint64_t)i * (A_IN_BYTES + A_OUT_BYTES);

            request = infer_a_in(handle, at, at + A_IN_BYTES);
            memcpy((uint8_t *)shm.data + at, x, sizeof(x));
            client_send(&c, &request, -1);
        }
        sleep_ms(10);
        if (n == 8) { /* released: the requests still end well */
            release.buffer_release.buffer = handle;
            client_call(&c, &release, -1, &reply, NULL);
            assert_ok(&reply);
            for (int i = 0; i < n; i++) {
                assert_true(client_recv(&c, &reply, NULL));
                assert_ok(&reply);
            }
        }
        client_close(&c);
        shm_deinit(&shm);
        assert_healthy(&slow);
    }
    daemon_stop(&slow);
}

/* S-20: nothing orders two requests in flight, so neither may write what the other uses. */
static void refuses_overlaps_in_flight(void **state)
{
    enum { OUT = 4096, FREE = OUT + A_OUT_BYTES };
    const struct {
        uint64_t in, out;
        enum proto_error error;
    } rows[] = {
        {0, OUT, ERR_BAD_BUFFER},               /* the same output */
        {0, FREE - 4, ERR_BAD_BUFFER},          /* one element of it */
        {OUT, FREE, ERR_BAD_BUFFER},            /* reads what is being written */
        {FREE, A_IN_BYTES - 4, ERR_BAD_BUFFER}, /* writes what is being read */
        {0, FREE, ERR_NONE},                    /* reads the same input */
    };
    struct proto_request request;
    struct proto_reply reply;
    struct daemon slow;
    uint64_t first;
    uint32_t handle;
    struct shm shm;

    (void)state;
    daemon_start(&slow, "delay_ms=200", NULL);
    client_start(&c, &slow);
    handle = client_buffer(&c, 4 * 4096, &shm);
    request = infer_a_in(handle, 0, OUT);
    first = client_send(&c, &request, -1);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        uint64_t id;

        request = infer_a_in(handle, rows[i].in, rows[i].out);
        id = client_send(&c, &request, -1);
        if (rows[i].error == ERR_NONE)
            break;
        assert_true(client_recv(&c, &reply, NULL));
        assert_int_equal(reply.id, id);
        assert_error(&reply, rows[i].error);
    }
    assert_true(client_recv(&c, &reply, NULL));
    assert_int_equal(reply.id, first);
    assert_ok(&reply);
    assert_true(client_recv(&c, &reply, NULL));
    assert_ok(&reply);
    /* answered: the ranges are free again */
    request = infer_a_in(handle, 0, OUT);
    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    shm_deinit(&shm);
    client_close(&c);
    assert_healthy(&slow);
    daemon_stop(&slow);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_inline),
        cmocka_unit_test(answers_in_buffers),
        cmocka_unit_test(refuses),
        cmocka_unit_test(answers_compact),
        cmocka_unit_test(advances_the_offset),
        cmocka_unit_test(answers_each_its_own),
        cmocka_unit_test(keeps_deadlines),
        cmocka_unit_test(cancels),
        cmocka_unit_test(refuses_an_id_in_flight),
        cmocka_unit_test(batches_what_waits),
        cmocka_unit_test(prefers_priority),
        cmocka_unit_test(waits_for_more),
        cmocka_unit_test(survives_reordering),
        cmocka_unit_test(names_failures),
        cmocka_unit_test(keeps_limits),
        cmocka_unit_test(bounds_the_queue),
        cmocka_unit_test(survives_lost_clients),
        cmocka_unit_test(refuses_overlaps_in_flight),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
