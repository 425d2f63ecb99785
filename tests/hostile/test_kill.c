/*
 * test_kill.c - kill -9 of clients and of the daemon, under load, counted
 *
 * A client that dies takes nothing of anybody with it. When the daemon dies, what was in flight on
 * each connection is lost, and nothing else: every other request has had its one answer, the next
 * daemon takes the path over and serves, and no name is left behind.
 *
 * HOSTILE_KILL_CLIENTS and HOSTILE_KILL_DAEMONS say how many; tests/soak/kill.sh asks for many.
 */
#include <dirent.h>

#include "hostile.h"

static struct baseline before;
static float x[A_ROWS * A_IN], y[A_ROWS * A_OUT];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    golden_read(MODEL_A, "y", y, sizeof(y));
    return 0;
}

static unsigned count_of(const char *name, unsigned otherwise)
{
    const char *text = getenv(name);
    unsigned long given = text ? strtoul(text, NULL, 10) : 0;

    return given > 0 ? (unsigned)given : otherwise;
}

/* ---- clients ---- */

/* Sends all kinds of things until it is killed; odd ones stop in the middle of something. */
static void live_until_killed(const struct daemon *daemon, unsigned i)
{
    static struct client mine;
    struct proto_request request = infer_a(x);
    struct proto_request create = {.verb = VERB_BUFFER_CREATE, .buffer_create.size_bytes = 100000};

    client_start(&mine, daemon);
    for (;;) {
        int n;

        request.id = ++mine.last_id;
        n = codec_encode_request(&request, mine.tx, sizeof(mine.tx));
        wire_send(mine.fd, mine.tx, (size_t)n, -1);
        create.id = ++mine.last_id;
        n = codec_encode_request(&create, mine.tx, sizeof(mine.tx));
        wire_send(mine.fd, mine.tx, (size_t)n, -1);
        if (i % 2) {
            wire_send(mine.fd, "\x82\xa2id", 4, -1);
            pause();
        }
        recv(mine.fd, mine.rx, sizeof(mine.rx), 0);
    }
}

static void loses_only_the_dead(void **state)
{
    unsigned total = count_of("HOSTILE_KILL_CLIENTS", times_long(60)), n_right = 0;
    static struct client witness;
    struct proto_request request = infer_a(x);
    struct proto_reply reply;
    double begin = now_s();
    struct daemon d;

    (void)state;
    daemon_start(&d, NULL, NULL);
    judge_first(&d, &before);
    client_start(&witness, &d);
    for (unsigned i = 0; i < total; i++) {
        pid_t child = fork();

        assert_true(child >= 0);
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            live_until_killed(&d, i);
        }
        sleep_ms(i * 7 % 13);
        request.id = 0;
        client_call(&witness, &request, -1, &reply, NULL);
        assert_is_a(&reply);
        n_right++;
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
    }
    client_close(&witness);
    print_message("%u clients killed in %.1f s, %u of %u answers beside them right\n", total,
                  now_s() - begin, n_right, total);
    judge(&d, &before);
    daemon_stop(&d);
}

/* ---- the daemon ---- */

enum { CLIENTS = 4, WINDOW = 8 };

struct stream {
    struct client client;
    bool in_flight[WINDOW];
    unsigned n_in_flight;
};

static struct stream streams[CLIENTS];
static unsigned n_sent, n_answered, n_lost;

static void send_one(struct stream *stream)
{
    struct proto_request request = infer_a(x);
    unsigned i = 0;
    int n;

    while (stream->in_flight[i])
        i++;
    request.id = i + 1;
    n = codec_encode_request(&request, stream->client.tx, sizeof(stream->client.tx));
    if (wire_send(stream->client.fd, stream->client.tx, (size_t)n, -1) != 0)
        return;
    stream->in_flight[i] = true;
    stream->n_in_flight++;
    n_sent++;
}

/* False: the connection is at its end. Every answer must be right, and of something in flight. */
static bool read_one(struct stream *stream)
{
    float got[A_ROWS * A_OUT];
    struct proto_reply reply;

    if (!client_recv(&stream->client, &reply, NULL))
        return false;
    assert_ok(&reply);
    assert_in_range(reply.id, 1, WINDOW);
    assert_true(stream->in_flight[reply.id - 1]);
    memcpy(got, reply.infer.output.bytes, sizeof(got));
    assert_near(got, y, A_ROWS * A_OUT);
    stream->in_flight[reply.id - 1] = false;
    stream->n_in_flight--;
    n_answered++;
    return true;
}

/* Keeps every window full until then. */
static void load_until(double until)
{
    while (now_s() < until) {
        struct pollfd polls[CLIENTS];

        for (int i = 0; i < CLIENTS; i++) {
            while (streams[i].n_in_flight < WINDOW)
                send_one(&streams[i]);
            polls[i] = (struct pollfd){.fd = streams[i].client.fd, .events = POLLIN};
        }
        if (poll(polls, CLIENTS, 1) <= 0)
            continue;
        for (int i = 0; i < CLIENTS; i++) {
            if (polls[i].revents)
                assert_true(read_one(&streams[i]));
        }
    }
}

static void names_left(const struct daemon *daemon)
{
    static const char *const known[] = {".", "..", "models", "log", "fused.conf", "s.lock", "s"};
    struct dirent *entry;
    DIR *dir = opendir(daemon->dir);

    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        bool found = false;

        for (size_t i = 0; i < ARRAY_SIZE(known); i++)
            found = found || strcmp(entry->d_name, known[i]) == 0;
        if (!found)
            fail_msg("%s is left", entry->d_name);
    }
    closedir(dir);
}

static void loses_only_what_was_in_flight(void **state)
{
    unsigned total = count_of("HOSTILE_KILL_DAEMONS", times_long(12)), most = 0;
    double begin = now_s();
    struct daemon d;

    (void)state;
    daemon_prepare(&d);
    add_model(&d, MODEL_A);
    for (unsigned round = 0; round < total; round++) {
        daemon_spawn(&d, NULL);
        daemon_wait_ready(&d);
        for (int i = 0; i < CLIENTS; i++) {
            memset(&streams[i].in_flight, 0, sizeof(streams[i].in_flight));
            streams[i].n_in_flight = 0;
            client_start(&streams[i].client, &d);
        }
        load_until(now_s() + 0.005 + (double)(round * 7 % 40) / 1e3);
        kill(d.pid, SIGKILL);
        for (int i = 0; i < CLIENTS; i++) {
            while (read_one(&streams[i]))
                ;
            n_lost += streams[i].n_in_flight;
            if (streams[i].n_in_flight > most)
                most = streams[i].n_in_flight;
            client_close(&streams[i].client);
        }
        assert_int_equal(daemon_join(&d, 5), 1000 + SIGKILL);
        names_left(&d);
    }
    assert_int_equal(n_sent, n_answered + n_lost);
    assert_true(most <= WINDOW && n_answered > 0);
    daemon_spawn(&d, NULL);
    daemon_wait_ready(&d);
    assert_healthy(&d);
    print_message("%u daemons killed in %.1f s: %u requests sent, %u answered right, %u in flight "
                  "and lost, 0 lost otherwise\n",
                  total, now_s() - begin, n_sent, n_answered, n_lost);
    daemon_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loses_only_the_dead),
        cmocka_unit_test(loses_only_what_was_in_flight),
    };

    return cmocka_run_group_tests(tests, start, NULL);
}
