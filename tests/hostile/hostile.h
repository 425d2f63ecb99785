/*
 * hostile.h - what every hostile test shares: raw messages, other uids, and one judgement
 *
 * After each act judge() asks the same of the daemon: the same process, a clean client served
 * within a second, and within 5 s its descriptors, mappings, private memory and all charges back
 * where they were; the log grew by a bounded number of lines, with nothing secret in them. Clients
 * here put SECRET into every name and every byte that they may choose.
 *
 * HOSTILE_LONG=N makes what is counted N times as many, and what is timed N times as long.
 */
#pragma once

#include <sys/resource.h>

#include "tests/daemon/daemon.h"

#define SECRET "s3cr3t"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

/* The log's limiter lets 20 lines through in 10 s, and says once how many it left out. */
#define LINES_MAX 64

struct baseline {
    unsigned regions, maps, lines;
    long rss_kib;
};

HELPER unsigned times_long(unsigned n)
{
    const char *text = getenv("HOSTILE_LONG");
    unsigned long times = text ? strtoul(text, NULL, 10) : 0;

    return times > 0 ? n * (unsigned)times : n;
}

/* ---- the daemon from outside ---- */

HELPER unsigned count_lines(const char *path, const char *word)
{
    FILE *file = fopen(path, "re");
    char line[2400];
    unsigned n = 0;

    while (file && fgets(line, sizeof(line), file))
        n += !word || strstr(line, word);
    if (file)
        fclose(file);
    return n;
}

HELPER unsigned count_maps(pid_t pid, const char *word)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    return count_lines(path, word);
}

HELPER long rss_kib(pid_t pid)
{
    char path[64], line[200];
    long kib = -1;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    file = fopen(path, "re");
    while (file && fgets(line, sizeof(line), file)) {
        if (sscanf(line, "RssAnon: %ld", &kib) == 1)
            break;
    }
    if (file)
        fclose(file);
    return kib;
}

/* ---- the judgement ---- */

HELPER bool charges_are_back(const struct daemon *daemon)
{
    static struct client client;
    struct proto_request request = {.verb = VERB_STATUS};
    struct proto_reply reply;
    char *text = NULL;
    bool back;

    client_start(&client, daemon);
    client_call(&client, &request, -1, &reply, NULL);
    assert_ok(&reply);
    assert_int_equal(codec_json(reply.document.bytes, reply.document.n_bytes, &text), 0);
    /* This connection is all that there is; status leaves itself out. */
    back = strstr(text, "\"totals\":{\"connections\":1,\"buffers\":0,\"buffer_bytes\":0,"
                        "\"requests\":0,\"queued_rows\":0,");
    free(text);
    client_close(&client);
    return back;
}

HELPER void judge_log(const struct daemon *daemon, struct baseline *before)
{
    unsigned lines = count_lines(daemon->log, NULL);

    if (lines > before->lines + LINES_MAX)
        fail_msg("the log grew by %u lines", lines - before->lines);
    before->lines = lines;
    if (log_has(daemon, SECRET) || log_has(daemon, "\x1b") || log_has(daemon, "0x7f"))
        fail_msg("the log holds what it must not");
    assert_false(log_has(daemon, "Sanitizer"));
}

HELPER void judge(struct daemon *daemon, struct baseline *before)
{
    static struct client client;
    double begin = now_s(), until = begin + 5;
    unsigned regions = 0, maps = 0;
    bool charges = false;
    long rss = 0;

    client_start(&client, daemon);
    client_close(&client);
    if (now_s() - begin > (SANITIZED ? 10 : 1))
        fail_msg("a clean client was let in after %g s only", now_s() - begin);
    assert_healthy(daemon);
    while (now_s() < until) {
        regions = count_maps(daemon->pid, "memfd:");
        maps = count_maps(daemon->pid, NULL);
        rss = rss_kib(daemon->pid);
        charges = charges_are_back(daemon);
        /* The sanitizers keep memory and mappings of their own. */
        if (charges && regions <= before->regions &&
            (SANITIZED || (maps <= before->maps + 40 && rss <= before->rss_kib + 8192)))
            return judge_log(daemon, before);
        sleep_ms(20);
    }
    fail_msg("charges %s, regions %u (%u), mappings %u (%u), private memory %ld KiB (%ld)",
             charges ? "back" : "NOT back", regions, before->regions, maps, before->maps, rss,
             before->rss_kib);
}

/* Once warm: helper threads and their heaps are there. */
HELPER void judge_first(struct daemon *daemon, struct baseline *ret)
{
    static struct client client;
    struct shm shm;

    for (int i = 0; i < 8; i++) {
        assert_healthy(daemon);
        client_start(&client, daemon);
        client_buffer(&client, 4096, &shm);
        shm_deinit(&shm);
        client_close(&client);
    }
    sleep_ms(50);
    *ret = (struct baseline){.regions = count_maps(daemon->pid, "memfd:"),
                             .maps = count_maps(daemon->pid, NULL),
                             .lines = count_lines(daemon->log, NULL),
                             .rss_kib = rss_kib(daemon->pid)};
}

/* ---- messages written by hand ---- */

struct raw {
    size_t n;
    uint8_t bytes[2 * PROTO_DATAGRAM_MAX];
};

HELPER void raw_byte(struct raw *raw, unsigned byte)
{
    assert_true(raw->n < sizeof(raw->bytes));
    raw->bytes[raw->n++] = (uint8_t)byte;
}

HELPER void raw_big(struct raw *raw, uint64_t value, unsigned bytes)
{
    while (bytes-- > 0)
        raw_byte(raw, (unsigned)(value >> 8 * bytes) & 255);
}

HELPER void raw_map(struct raw *raw, unsigned n)
{
    raw_byte(raw, 0x80 | n);
}

HELPER void raw_uint(struct raw *raw, uint64_t value)
{
    raw_byte(raw, 0xcf);
    raw_big(raw, value, 8);
}

HELPER void raw_int(struct raw *raw, int64_t value)
{
    raw_byte(raw, 0xd3);
    raw_big(raw, (uint64_t)value, 8);
}

HELPER void raw_str_n(struct raw *raw, const void *s, size_t n)
{
    assert_true(raw->n + n + 5 <= sizeof(raw->bytes));
    raw_byte(raw, 0xdb);
    raw_big(raw, n, 4);
    memcpy(raw->bytes + raw->n, s, n);
    raw->n += n;
}

HELPER void raw_str(struct raw *raw, const char *s)
{
    raw_str_n(raw, s, strlen(s));
}

/* {"id": 7, "verb": verb, and n more pairs to come */
HELPER void raw_begin(struct raw *raw, const char *verb, unsigned n)
{
    raw->n = 0;
    raw_map(raw, n + 2);
    raw_str(raw, "id");
    raw_uint(raw, 7);
    raw_str(raw, "verb");
    raw_str(raw, verb);
}

/* ---- clients that expect anything ---- */

/* One answer to what is sent: its error, ERR_NONE for a result; -1 when the connection ended. */
HELPER int client_try(struct client *client, const void *bytes, size_t n, int fd,
                      struct proto_reply *reply)
{
    if (wire_send(client->fd, bytes, n, fd) != 0 || !client_recv(client, reply, NULL))
        return -1;
    if (reply->error != ERR_NONE)
        assert_text_is_clean(reply);
    return (int)reply->error;
}

/* Runs `act` as another uid; false, said loudly, where that is not possible. */
HELPER bool as_uid(uid_t uid, int (*act)(void))
{
    pid_t child;
    int status;

    if (getuid() != 0) {
        print_message("not root: what other uids may do is not tested here\n");
        return false;
    }
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0)
            _exit(99);
        _exit(act());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("as uid %u: check %d failed", uid, WEXITSTATUS(status));
    return true;
}

HELPER void let_others_in(const struct daemon *daemon)
{
    assert_int_equal(chmod(daemon->dir, 0711), 0);
    assert_int_equal(chmod(daemon->socket, 0666), 0);
}

/* As many descriptors as this process may have. */
HELPER unsigned raise_nofile(void)
{
    struct rlimit limit;

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    return limit.rlim_cur > 1000000 ? 1000000 : (unsigned)limit.rlim_cur;
}
