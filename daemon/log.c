/*
 * log.c - one line a fact, once
 *
 * systemd sets JOURNAL_STREAM to the device and inode of the stream that it connected to stderr;
 * when stderr still is that stream, lines go to the journal with their fields, else to stderr as
 * text. Whatever comes from a client or a file may hold control characters and terminal escapes, so
 * the finished line is escaped as a whole: nobody can forge a second line. What a client can cause
 * at will passes a limiter, so that a hostile one cannot fill the disk.
 */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define SD_JOURNAL_SUPPRESS_LOCATION
#include <systemd/sd-journal.h>

#define LINE_MAX_BYTES 1024

static enum log_level current = LOG_LEVEL_INFO;
static bool to_journal;
static struct log_limit client_limit;

static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long dev, ino;
    struct stat st;
    char *end;

    if (!stream || fstat(STDERR_FILENO, &st) != 0)
        return false;
    dev = strtoull(stream, &end, 10); /* "device:inode" */
    if (*end != ':')
        return false;
    ino = strtoull(end + 1, NULL, 10);
    return st.st_dev == dev && st.st_ino == ino;
}

void log_init(enum log_level level)
{
    current = level;
    to_journal = stderr_is_journal();
    client_limit = (struct log_limit){0};
}

void log_set_level(enum log_level level)
{
    current = level;
}

enum log_level log_get_level(void)
{
    return current;
}

const char *log_level_name(enum log_level level)
{
    switch (level) {
    case LOG_LEVEL_ERROR:
        return "error";
    case LOG_LEVEL_WARNING:
        return "warning";
    case LOG_LEVEL_INFO:
        return "info";
    case LOG_LEVEL_DEBUG:
        return "debug";
    }
    return "info";
}

int log_level_parse(const char *name, size_t n, enum log_level *ret)
{
    static const enum log_level levels[] = {LOG_LEVEL_ERROR, LOG_LEVEL_WARNING, LOG_LEVEL_INFO,
                                            LOG_LEVEL_DEBUG};

    for (size_t i = 0; i < ARRAY_SIZE(levels); i++) {
        const char *known = log_level_name(levels[i]);

        if (strlen(known) == n && memcmp(known, name, n) == 0) {
            *ret = levels[i];
            return 0;
        }
    }
    return -EINVAL;
}

const char *log_escape(const char *from, size_t n, char *to, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    size_t used = 0;

    for (size_t i = 0; i < n && used + 5 <= size; i++) {
        unsigned char c = (unsigned char)from[i];

        if (c >= 0x20 && c < 0x7f) {
            to[used++] = (char)c;
        } else {
            to[used++] = '\\';
            to[used++] = 'x';
            to[used++] = digits[c >> 4];
            to[used++] = digits[c & 15];
        }
    }
    to[used] = '\0';
    return to;
}

static void write_line(enum log_level level, const char *event, const char *format, va_list args)
{
    char raw[LINE_MAX_BYTES], line[2 * LINE_MAX_BYTES];

    vsnprintf(raw, sizeof(raw), format, args);
    log_escape(raw, strlen(raw), line, sizeof(line));
    if (to_journal)
        sd_journal_send("MESSAGE=%s", line, "PRIORITY=%i", (int)level, "FUSED_EVENT=%s", event,
                        "SYSLOG_IDENTIFIER=fused", NULL);
    else
        fprintf(stderr, "fused: %s: %s: %s\n", log_level_name(level), event, line);
}

void log_at(enum log_level level, const char *event, const char *format, ...)
{
    va_list args;

    if (level > current)
        return;
    va_start(args, format);
    write_line(level, event, format, args);
    va_end(args);
}

bool log_limit_pass(struct log_limit *limit, uint64_t now_us, unsigned *ret_left_out)
{
    if (now_us - limit->since_us >= LOG_CLIENT_INTERVAL_US) {
        limit->since_us = now_us;
        limit->n = 0;
    }
    if (limit->n >= LOG_CLIENT_BURST) {
        limit->left_out++;
        return false;
    }
    limit->n++;
    *ret_left_out = limit->left_out;
    limit->left_out = 0;
    return true;
}

void log_client(enum log_level level, const char *event, const char *format, ...)
{
    struct timespec now;
    unsigned left_out;
    va_list args;

    if (level > current)
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!log_limit_pass(&client_limit,
                        (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000, &left_out))
        return;
    if (left_out > 0)
        log_at(level, "log.suppressed", "%u lines caused by clients were left out", left_out);
    va_start(args, format);
    write_line(level, event, format, args);
    va_end(args);
}
