/*
 * ctl.c - what the commands of fusectl share: errors and exit codes, progress, printing
 *
 * Everything that a server or a file says may end on a terminal, so control characters are
 * replaced before anything is printed. Errors go to stderr; with --json a refusal is also one
 * object on stdout, so that a script reads one stream only.
 */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/fusectl.h"
#include "proto/base.h"
#include "proto/proto.h"

static bool progress_shown;
static volatile sig_atomic_t interrupted;

/* Takes control characters (C0, DEL, and C1 in UTF-8) out of a string. */
static void make_printable(char *s)
{
    for (unsigned char *p = (unsigned char *)s; *p != 0; p++) {
        if (*p < 0x20 || *p == 0x7f)
            *p = '?';
        else if (*p == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0)
            p[0] = p[1] = '?';
    }
}

void ctl_error(const char *format, ...)
{
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    make_printable(text);
    ctl_progress("%s", "");
    fprintf(stderr, "fusectl: %s\n", text);
}

void ctl_progress(const char *format, ...)
{
    char text[200];
    va_list args;

    if (!isatty(STDERR_FILENO))
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    make_printable(text);
    if (text[0] == 0 && !progress_shown)
        return;
    fprintf(stderr, "\r\033[K%s", text);
    progress_shown = text[0] != 0;
}

static void on_interrupt(int signal)
{
    (void)signal;
    interrupted = 1;
}

void ctl_catch_interrupts(bool on)
{
    struct sigaction action = {.sa_handler = on ? on_interrupt : SIG_DFL};

    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool ctl_interrupted(void)
{
    return interrupted != 0;
}

json_t *ctl_json_str(const char *s)
{
    json_t *string = json_string(s);
    char *copy = string != NULL ? NULL : strdup(s);

    if (copy == NULL)
        return string;
    for (char *p = copy; *p != 0; p++)
        if ((unsigned char)*p > 0x7e)
            *p = '?';
    string = json_string(copy);
    free(copy);
    return string;
}

int ctl_print_json(json_t *object)
{
    char *text = object == NULL ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(17));

    json_decref(object);
    if (text == NULL) {
        ctl_error("out of memory");
        return CTL_FAILED;
    }
    puts(text);
    free(text);
    return CTL_DONE;
}

/* One object for scripts, beside the line on stderr. */
static void print_refusal(const char *name, const char *text)
{
    ctl_print_json(json_pack("{s:{s:s, s:o}}", "error", "name", name, "text", ctl_json_str(text)));
}

int ctl_answer(const struct ctl *ctl, const struct fused *f, int r, const char *text)
{
    if (r == 0)
        return CTL_DONE;
    if (text == NULL)
        text = f == NULL ? "" : fused_error_text(f);
    if (r > 0) {
        if (text[0] == 0)
            text = proto_error_text((enum proto_error)r);
        if (text == NULL)
            text = "";
        ctl_error("%s: %s", fused_code_name(r), text);
        if (ctl->json)
            print_refusal(fused_code_name(r), text);
        return CTL_REFUSED;
    }
    ctl_error("%s", text[0] != 0 ? text : strerror(-r));
    switch (-r) {
    case EPIPE:
    case ENOTCONN:
    case ECONNRESET:
    case ETIMEDOUT:
    case EPROTO:
        return CTL_NO_SERVER;
    case EINVAL:
        return CTL_USAGE;
    default:
        return CTL_FAILED;
    }
}

int ctl_connect(const struct ctl *ctl, int timeout_ms, struct fused **ret)
{
    struct fused *f = NULL;
    int r;

    r = fused_connect(ctl->socket, "fusectl", &f);
    if (r > 0)
        return ctl_answer(ctl, NULL, r, fused_error_text(NULL));
    if (r == -EACCES) {
        const char *reason = fused_error_text(NULL), *end = strrchr(reason, ':');

        ctl_error("no permission for the server's socket %.*s: its group may connect",
                  end ? (int)(end - reason) : 0, reason);
        return CTL_NO_SERVER;
    }
    if (r < 0) {
        ctl_error("no server at %s", fused_error_text(NULL));
        return r == -ENOMEM || r == -EMFILE ? CTL_FAILED : CTL_NO_SERVER;
    }
    fused_set_timeout(f, timeout_ms);
    *ret = f;
    return CTL_DONE;
}

int ctl_document(const struct ctl *ctl, char *json, json_t **ret)
{
    json_t *document;

    *ret = NULL;
    if (ctl->json) {
        puts(json);
        free(json);
        return CTL_DONE;
    }
    document = json_loads(json, JSON_REJECT_DUPLICATES, NULL);
    free(json);
    if (document == NULL) {
        ctl_error("the server's answer is not understood");
        return CTL_NO_SERVER;
    }
    *ret = document;
    return CTL_DONE;
}

const char *ctl_str(json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    const char *s = json_string_value(value);
    char *copy = s == NULL ? NULL : strdup(s);

    if (copy == NULL)
        return "-";
    make_printable(copy);
    if (strcmp(copy, s) != 0 && json_string_set(value, copy) < 0)
        s = "-";
    else
        s = json_string_value(value);
    free(copy);
    return s;
}

uint64_t ctl_uint(const json_t *object, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(object, key));
}

bool ctl_bool(const json_t *object, const char *key)
{
    return json_is_true(json_object_get(object, key));
}

const char *ctl_s(uint64_t n)
{
    return n == 1 ? "" : "s";
}

/* Appends to a text of CTL_TEXT_MAX bytes; what does not fit is cut. */
__attribute__((format(printf, 2, 3))) static void append(char *text, const char *format, ...)
{
    size_t n = strlen(text);
    va_list args;

    va_start(args, format);
    vsnprintf(text + n, CTL_TEXT_MAX - n, format, args);
    va_end(args);
}

const char *ctl_shape(json_t *shape, char text[CTL_TEXT_MAX])
{
    json_t *dim;
    size_t i;

    snprintf(text, CTL_TEXT_MAX, "[");
    json_array_foreach(shape, i, dim)
    {
        append(text, "%s", i > 0 ? ", " : "");
        if (json_is_integer(dim))
            append(text, "%lld", (long long)json_integer_value(dim));
        else
            append(text, "N");
    }
    append(text, "]");
    return text;
}

int ctl_fill_shape(const json_t *shape, int64_t rows, int *ret_rank, int64_t *dims)
{
    size_t rank = json_array_size(shape);

    if (rank > FUSED_RANK_MAX)
        return -EPROTO;
    for (size_t i = 0; i < rank; i++) {
        const json_t *dim = json_array_get(shape, i);

        dims[i] = json_is_integer(dim) ? json_integer_value(dim) : rows;
    }
    *ret_rank = (int)rank;
    return 0;
}

const char *ctl_dims(int rank, const int64_t *dims, char text[CTL_TEXT_MAX])
{
    snprintf(text, CTL_TEXT_MAX, "[");
    for (int i = 0; i < rank; i++)
        append(text, "%s%lld", i > 0 ? ", " : "", (long long)dims[i]);
    append(text, "]");
    return text;
}

const char *ctl_bytes(uint64_t n, char text[CTL_TEXT_MAX])
{
    static const char *units[] = {"KiB", "MiB", "GiB", "TiB"};
    double value = (double)n / 1024;
    size_t unit = 0;

    if (n < 1024) {
        snprintf(text, CTL_TEXT_MAX, "%u B", (unsigned)n);
        return text;
    }
    for (; value >= 1024 && unit + 1 < ARRAY_SIZE(units); unit++)
        value /= 1024;
    snprintf(text, CTL_TEXT_MAX, "%.1f %s", value, units[unit]);
    return text;
}

const char *ctl_us(uint64_t us, char text[CTL_TEXT_MAX])
{
    if (us < 1000)
        snprintf(text, CTL_TEXT_MAX, "%u us", (unsigned)us);
    else if (us < 1000000)
        snprintf(text, CTL_TEXT_MAX, "%.2f ms", (double)us / 1e3);
    else
        snprintf(text, CTL_TEXT_MAX, "%.2f s", (double)us / 1e6);
    return text;
}
