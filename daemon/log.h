/*
 * log.h - lines for the operator: to the journal with fields, elsewhere to stderr
 *
 * Only the loop thread and main() log. An event is one stable word ("model.loaded"), which the
 * journal keeps as FUSED_EVENT.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base.h"

/* Numbers are syslog's priorities. */
enum log_level {
    LOG_LEVEL_ERROR = 3,
    LOG_LEVEL_WARNING = 4,
    LOG_LEVEL_INFO = 6,
    LOG_LEVEL_DEBUG = 7
};

/* Looks once whether stderr is the journal. */
void log_init(enum log_level level);
void log_set_level(enum log_level level);
enum log_level log_get_level(void);
const char *log_level_name(enum log_level level);
/* 0, or -EINVAL when there is no such level: error, warning, info, debug. */
int log_level_parse(const char *name, size_t n, enum log_level *ret);

void log_at(enum log_level level, const char *event, const char *format, ...) _printf_(3, 4);
#define log_error(...)   log_at(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_at(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_info(...)    log_at(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)   log_at(LOG_LEVEL_DEBUG, __VA_ARGS__)

/* A line that a client can cause at will: at most LOG_CLIENT_BURST in LOG_CLIENT_INTERVAL_US; the
 * first one after a pause says how many were left out. */
#define LOG_CLIENT_BURST       20
#define LOG_CLIENT_INTERVAL_US 10000000
void log_client(enum log_level level, const char *event, const char *format, ...) _printf_(3, 4);

/* The limiter behind it, time passed in. True when the line may be written; *ret_left_out is what
 * was suppressed since the last one that was. */
struct log_limit {
    uint64_t since_us;
    unsigned n, left_out;
};
bool log_limit_pass(struct log_limit *limit, uint64_t now_us, unsigned *ret_left_out);

/* Copies text with control characters and bytes outside printable ASCII as \xNN. Returns `to`. */
const char *log_escape(const char *from, size_t n, char *to, size_t size);
