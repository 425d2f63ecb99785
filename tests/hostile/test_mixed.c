/*
 * test_mixed.c - everything at once, and each answer looked at
 *
 * Three engines serve four models while one uid floods, others read slowly, die with requests in
 * flight, or cancel what they asked for. Each client keeps account of what it sent: an answer that
 * nobody waits for, a second one, one that never comes, or one with another request's numbers is a
 * failure. In the end all charges are zero and memory is what it was. HOSTILE_LONG=200 takes ten
 * minutes.
 */
#include <stdatomic.h>
#include <sys/mman.h>

#include "hostile.h"

#define SECONDS   3
#define IN_FLIGHT 12
#define SLOT      65536 /* bytes of a client's buffer for one request: input, then result */
#define OUT_AT    16384
#define FLOATS    7168 /* of the largest result */

enum kind { CHECKED, SLOW, DYING, FLOOD, KINDS };

static struct model {
    const char *name;
    unsigned rows, in_rank, out_rank;
    int64_t in[5], out[5]; /* of all rows */
    bool rows_last;        /* the result is [1, C, rows, 1] */
    float x[3240], y[FLOATS];
} models[] = {
    {MODEL_A, A_ROWS, 2, 4, {A_ROWS, A_IN}, {1, A_OUT, A_ROWS, 1}, true, {0}, {0}},
    {MODEL_B, 2, 5, 5, {2, 3, 6, 9, 10}, {2, 16, 4, 7, 8}, false, {0}, {0}},
    {MODEL_FULL, 2, 5, 5, {2, 3, 6, 9, 10}, {2, 16, 4, 7, 8}, false, {0}, {0}},
    {MODEL_DROPOUT, 1, 2, 2, {1, 1027}, {1, 1027}, false, {0}, {0}},
};

static struct daemon d;
static struct counts {
    atomic_ulong sent, right, wrong, refused, cancelled, deaths;
    char text[200]; /* of a wrong one */
} * counts;

/* What one client waits for. */
struct call {
    uint64_t id; /* 0: nothing */
    unsigned model, first, rows;
    bool in_buffer, cancelled;
};

static struct client c;
static struct shm shm;
static uint32_t buffer;
static struct call calls[IN_FLIGHT];
static unsigned seed;

static unsigned roll(unsigned n)
{
    return (unsigned)rand_r(&seed) % n;
}

static unsigned elements(const int64_t *dims, unsigned rank)
{
    int64_t n = 1;

    for (unsigned i = 0; i < rank; i++)
        n *= dims[i];
    return (unsigned)n;
}

static int start(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(models); i++) {
        struct model *m = &models[i];

        golden_read(m->name, "x", m->x, elements(m->in, m->in_rank) * sizeof(float));
        golden_read(m->name, "y", m->y, elements(m->out, m->out_rank) * sizeof(float));
    }
    counts = mmap(NULL, sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(counts, MAP_FAILED);
    return 0;
}

/* ---- one client ---- */

__attribute__((format(printf, 1, 2))) static void wrong(const char *format, ...)
{
    va_list args;

    if (atomic_fetch_add(&counts->wrong, 1) > 0)
        return;
    va_start(args, format);
    vsnprintf(counts->text, sizeof(counts->text), format, args);
    va_end(args);
}

static void send_call(unsigned place)
{
    struct call *call = &calls[place];
    const struct model *m = &models[call->model = roll(ARRAY_SIZE(models))];
    unsigned row = elements(m->in, m->in_rank) / m->rows;
    struct proto_request request = {.verb = VERB_INFER, .infer.model = str(m->name)};
    struct proto_infer *infer = &request.infer;
    const float *x;

    /* The mask of a request is that of its own rows: dropout's one row is whole. */
    call->first = roll(m->rows);
    call->rows = 1 + roll(m->rows - call->first);
    call->in_buffer = roll(2);
    call->cancelled = false;
    x = m->x + (size_t)call->first * row;
    infer->priority = (uint8_t)roll(3);
    infer->train = call->model == 3;
    infer->seed = 7;
    infer->offset = 400;
    infer->input = (struct proto_tensor){.dtype = PROTO_FLOAT32, .rank = (uint8_t)m->in_rank};
    memcpy(infer->input.shape, m->in, sizeof(m->in));
    infer->input.shape[0] = call->rows;
    if (call->in_buffer) {
        uint64_t at = (uint64_t)place * SLOT;

        memcpy((uint8_t *)shm.data + at, x, (size_t)call->rows * row * sizeof(float));
        infer->input.buffer = infer->output.buffer = buffer;
        infer->input.offset = at;
        infer->has_output = true;
        infer->output.dtype = PROTO_FLOAT32;
        infer->output.rank = (uint8_t)m->out_rank;
        infer->output.offset = at + OUT_AT;
        memcpy(infer->output.shape, m->out, sizeof(m->out));
        infer->output.shape[m->rows_last ? 2 : 0] = call->rows;
    } else {
        infer->input.is_inline = true;
        infer->input.bytes = (const uint8_t *)x;
        infer->input.n_bytes = call->rows * row * (uint32_t)sizeof(float);
    }
    call->id = client_send(&c, &request, -1);
    atomic_fetch_add(&counts->sent, 1);
}

static void cancel(struct call *call)
{
    struct proto_request request = {.verb = VERB_CANCEL, .cancel.target = call->id};

    call->cancelled = true;
    client_send(&c, &request, -1);
}

static void check_numbers(const struct call *call, unsigned place, const struct proto_reply *reply)
{
    static float got[FLOATS];
    const struct model *m = &models[call->model];
    unsigned n = elements(m->out, m->out_rank) / m->rows; /* of a row */

    if (call->in_buffer)
        memcpy(got, (uint8_t *)shm.data + (size_t)place * SLOT + OUT_AT,
               (size_t)n * call->rows * sizeof(float));
    else if (reply->infer.output.n_bytes == n * call->rows * sizeof(float))
        memcpy(got, reply->infer.output.bytes, reply->infer.output.n_bytes);
    else
        return wrong("%s: %u bytes of %u rows", m->name, reply->infer.output.n_bytes, call->rows);
    for (unsigned r = 0; r < call->rows; r++) {
        for (unsigned k = 0; k < n; k++) {
            unsigned row = call->first + r;
            float is = got[m->rows_last ? k * call->rows + r : r * n + k];
            float wanted = m->y[m->rows_last ? k * m->rows + row : row * n + k];

            if (!(fabsf(is - wanted) <= 1e-4f + 1e-4f * fabsf(wanted)))
                return wrong("%s, row %u of %u, element %u: %.9g, expected %.9g", m->name, row,
                             call->rows, k, (double)is, (double)wanted);
        }
    }
    atomic_fetch_add(&counts->right, 1);
}

/* Takes one answer. */
static void receive(void)
{
    struct proto_reply reply;
    unsigned place = 0;

    if (!client_recv(&c, &reply, NULL))
        _exit(1);
    if (reply.verb == VERB_CANCEL)
        return;
    while (place < IN_FLIGHT && (calls[place].id != reply.id || calls[place].id == 0))
        place++;
    if (place == IN_FLIGHT)
        return wrong("an answer that nobody waits for, or a second one: id %llu",
                     (unsigned long long)reply.id);
    if (reply.error == ERR_NONE)
        check_numbers(&calls[place], place, &reply);
    else if (reply.error == ERR_CANCELLED && calls[place].cancelled)
        atomic_fetch_add(&counts->cancelled, 1);
    else if (reply.error == ERR_QUOTA || reply.error == ERR_BUSY)
        atomic_fetch_add(&counts->refused, 1);
    else
        wrong("%s", proto_error_name(reply.error));
    calls[place].id = 0;
}

static unsigned n_waiting(void)
{
    unsigned n = 0;

    for (unsigned i = 0; i < IN_FLIGHT; i++)
        n += calls[i].id != 0;
    return n;
}

/* Asks until the time is over, then takes what is still owed. */
static void be_client(enum kind kind, double until)
{
    client_start(&c, &d);
    buffer = client_buffer(&c, (size_t)IN_FLIGHT * SLOT, &shm);
    while (now_s() < until) {
        for (unsigned i = 0; i < IN_FLIGHT; i++) {
            if (calls[i].id == 0)
                send_call(i);
        }
        if (kind == CHECKED && roll(8) == 0) {
            struct call *call = &calls[roll(IN_FLIGHT)];

            if (!call->cancelled)
                cancel(call);
        }
        if (kind == SLOW)
            sleep_ms(20);
        if (kind == DYING && roll(40) == 0) {
            atomic_fetch_add(&counts->deaths, 1);
            kill(getpid(), SIGKILL);
        }
        receive();
    }
    while (n_waiting() > 0)
        receive();
    client_close(&c);
}

static void be_flood(double until)
{
    struct proto_request request = infer_a(models[0].x);
    static uint8_t bytes[4096];

    client_start(&c, &d);
    while (now_s() < until) {
        struct pollfd p = {.fd = c.fd, .events = POLLIN | POLLOUT};
        int n;

        if (poll(&p, 1, 100) == 1 && p.revents & POLLIN)
            recv(c.fd, c.rx, sizeof(c.rx), MSG_DONTWAIT);
        request.id = ++c.last_id;
        n = codec_encode_request(&request, bytes, sizeof(bytes));
        send(c.fd, bytes, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

static pid_t spawn(enum kind kind, unsigned number, double until)
{
    pid_t child = fork();

    assert_true(child >= 0);
    if (child != 0)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    seed = 20261129 + number;
    if (kind == FLOOD && getuid() == 0 &&
        (setresgid(1234, 1234, 1234) != 0 || setresuid(1234, 1234, 1234) != 0))
        _exit(99);
    if (kind == FLOOD)
        be_flood(until);
    else
        be_client(kind, until);
    _exit(0);
}

static void answers_each_once_and_right(void **state)
{
    static const enum kind kinds[] = {CHECKED, CHECKED, CHECKED, SLOW, SLOW, DYING, DYING, FLOOD};
    static struct baseline before;
    pid_t children[ARRAY_SIZE(kinds)];
    unsigned number = 0;
    double until;

    (void)state;
    daemon_start(&d, "delay_ms=1;slots=2;reorder=1;pins=1",
                 "devices = [ 0, 1, 2 ]; cpu_threads = 1; uid_requests = 200;");
    judge_first(&d, &before);
    let_others_in(&d);
    until = now_s() + times_long(SECONDS);
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        children[i] = spawn(kinds[i], number++, until);
    for (size_t n_left = ARRAY_SIZE(kinds); n_left > 0; sleep_ms(1)) {
        for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
            int status;

            if (children[i] == 0 || waitpid(children[i], &status, WNOHANG) == 0)
                continue;
            if (kinds[i] == DYING && WIFSIGNALED(status) && now_s() < until) {
                children[i] = spawn(DYING, number++, until);
                continue;
            }
            if (kinds[i] != DYING && (!WIFEXITED(status) || WEXITSTATUS(status) != 0))
                fail_msg("client %zu ended with %x", i, status);
            children[i] = 0;
            n_left--;
        }
    }
    print_message("%lu sent: %lu right, %lu wrong, %lu cancelled, %lu refused; %lu clients died\n",
                  counts->sent, counts->right, counts->wrong, counts->cancelled, counts->refused,
                  counts->deaths);
    if (counts->wrong > 0)
        fail_msg("%s", counts->text);
    assert_true(counts->right > 0 && counts->deaths > 0 && counts->cancelled > 0);
    judge(&d, &before);
    daemon_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_each_once_and_right),
    };

    return cmocka_run_group_tests(tests, start, NULL);
}
