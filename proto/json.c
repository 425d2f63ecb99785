/*
 * json.c - msgpack printed as JSON text
 *
 * Documents of the server (status, stats, ...) reach people and scripts as JSON. The output does
 * not depend on the locale: a decimal comma would make it unreadable. Nesting is bounded by the
 * structural check, so the open containers stand in a small array.
 */
#include "json.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto.h"
#include "scan.h"

struct level {
    uint64_t left; /* items still to come */
    bool is_map, is_first;
};

static void print_str(FILE *out, const uint8_t *s, size_t n)
{
    fputc('"', out);
    while (n > 0) {
        size_t k = proto_utf8_length((const char *)s, n);

        if (k == 0) {
            fputs("\\ufffd", out);
            k = 1;
        } else if (*s == '"' || *s == '\\') {
            fprintf(out, "\\%c", *s);
        } else if (*s < 0x20 || *s == 0x7f) {
            fprintf(out, "\\u%04x", *s);
        } else {
            fwrite(s, 1, k, out);
        }
        s += k;
        n -= k;
    }
    fputc('"', out);
}

static void print_bin(FILE *out, const uint8_t *bytes, size_t n)
{
    fputc('"', out);
    for (size_t k = 0; k < n; k++)
        fprintf(out, "%02x", bytes[k]);
    fputc('"', out);
}

static void print_double(FILE *out, double d)
{
    static const char number[] = "0123456789+-e";
    unsigned digits = 15;
    char text[40];
    bool is_whole;

    if (!isfinite(d)) {
        fputs(isnan(d) ? "\"NaN\"" : d > 0 ? "\"Infinity\"" : "\"-Infinity\"", out);
        return;
    }
    do /* 17 always read back the same; the mask tells the compiler that text is long enough */
        snprintf(text, sizeof text, "%.*g", (int)(digits++ & 31), d);
    while (strtod(text, NULL) != d);
    is_whole = text[strspn(text, "0123456789-")] == 0;
    /* What is no part of a number is the locale's decimal point, maybe of several bytes. */
    for (const char *c = text; *c; c += strcspn(c, number)) {
        size_t n = strspn(c, number);

        fwrite(c, 1, n, out);
        c += n;
        if (*c)
            fputc('.', out);
    }
    if (is_whole)
        fputs(".0", out);
}

static int print_item(FILE *out, const struct scan_item *item)
{
    switch (item->type) {
    case SCAN_NIL:
        fputs("null", out);
        return 0;
    case SCAN_BOOL:
        fputs(item->b ? "true" : "false", out);
        return 0;
    case SCAN_UINT:
        fprintf(out, "%" PRIu64, item->u);
        return 0;
    case SCAN_INT:
        fprintf(out, "%" PRId64, item->i);
        return 0;
    case SCAN_DOUBLE:
        print_double(out, item->d);
        return 0;
    case SCAN_STR:
        print_str(out, item->raw.bytes, item->raw.n);
        return 0;
    case SCAN_BIN:
        print_bin(out, item->raw.bytes, item->raw.n);
        return 0;
    case SCAN_LIST:
        fputc('[', out);
        return 0;
    case SCAN_MAP:
        fputc('{', out);
        return 0;
    case SCAN_EXT:
    default:
        return -EBADMSG;
    }
}

/* What stands before the next item of the innermost container. */
static int print_separator(FILE *out, struct level *top, const struct scan_item *item)
{
    bool is_key = top->is_map && top->left % 2 == 0;

    if (is_key && item->type != SCAN_STR)
        return -EBADMSG;
    if (!top->is_first)
        fputc(top->is_map && !is_key ? ':' : ',', out);
    top->is_first = false;
    top->left--;
    return 0;
}

static int print_value(FILE *out, const uint8_t *bytes, size_t n)
{
    struct level levels[PROTO_DEPTH_MAX];
    unsigned depth = 0;
    size_t pos = 0;
    struct scan_item item;
    int r;

    do {
        r = scan_item(bytes, n, &pos, &item);
        if (r < 0)
            return r;
        if (depth > 0) {
            r = print_separator(out, &levels[depth - 1], &item);
            if (r < 0)
                return r;
        }
        r = print_item(out, &item);
        if (r < 0)
            return r;
        if (item.type == SCAN_LIST || item.type == SCAN_MAP) {
            if (depth == PROTO_DEPTH_MAX)
                return -EBADMSG;
            levels[depth++] = (struct level){item.n, item.type == SCAN_MAP, true};
        }
        while (depth > 0 && levels[depth - 1].left == 0)
            fputc(levels[--depth].is_map ? '}' : ']', out);
    } while (depth > 0);
    return 0;
}

int json_text(const uint8_t *bytes, size_t n, char **ret_text)
{
    char *text = NULL;
    size_t size;
    FILE *out;
    int r;

    out = open_memstream(&text, &size);
    if (!out)
        return -ENOMEM;
    r = print_value(out, bytes, n);
    if (ferror(out))
        r = -ENOMEM;
    if (fclose(out) != 0)
        r = -ENOMEM;
    if (r < 0) {
        free(text);
        return r;
    }
    *ret_text = text;
    return 0;
}
