/*
 * pack.h - msgpack from a text that reads like JSON, for test messages that the encoder refuses to
 * make: {"id": 1, "id": 2}. Beside JSON it knows <00ff> (bin) and #c1ff# (raw bytes).
 */
#pragma once

#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pack {
    uint8_t *to;
    size_t n, size;
};

static void pack_bytes(struct pack *p, const void *bytes, size_t n)
{
    if (n > p->size - p->n)
        abort();
    memcpy(p->to + p->n, bytes, n);
    p->n += n;
}

static void pack_code(struct pack *p, uint8_t code, uint64_t v, unsigned width)
{
    pack_bytes(p, &code, 1);
    while (width--) {
        uint8_t b = (uint8_t)(v >> (8 * width));

        pack_bytes(p, &b, 1);
    }
}

static const char *pack_hex(struct pack *p, const char *s, char end)
{
    while (*s != end) {
        char pair[3] = {s[0], s[1], 0};
        uint8_t b = (uint8_t)strtoul(pair, NULL, 16);

        pack_bytes(p, &b, 1);
        s += 2;
        while (*s == ' ')
            s++;
    }
    return s + 1;
}

static const char *pack_value(struct pack *p, const char *s);

static const char *pack_items(struct pack *p, const char *s, char end, uint8_t code)
{
    size_t head = p->n;
    unsigned n = 0;

    pack_code(p, code, 0, 2);
    for (;;) {
        while (*s && strchr(" ,:\n", *s))
            s++;
        if (*s == end)
            break;
        s = pack_value(p, s);
        n++;
    }
    if (code == 0xde)
        n /= 2;
    p->to[head + 1] = (uint8_t)(n >> 8);
    p->to[head + 2] = (uint8_t)n;
    return s + 1;
}

static const char *pack_number(struct pack *p, const char *s)
{
    size_t n = strspn(s, "+-.0123456789eE");
    char text[64];
    double d;
    uint64_t v;

    if (n == 0 || n >= sizeof text)
        abort();
    memcpy(text, s, n);
    text[n] = 0;
    if (strpbrk(text, ".e")) {
        d = strtod(text, NULL);
        memcpy(&v, &d, sizeof v);
        pack_code(p, 0xcb, v, 8);
    } else if (*text == '-') {
        pack_code(p, 0xd3, (uint64_t)strtoll(text, NULL, 10), 8);
    } else {
        v = strtoull(text, NULL, 10);
        if (v < 128)
            pack_code(p, (uint8_t)v, 0, 0);
        else
            pack_code(p, 0xcf, v, 8);
    }
    return s + n;
}

static const char *pack_value(struct pack *p, const char *s)
{
    while (isspace((unsigned char)*s))
        s++;
    if (*s == '{')
        return pack_items(p, s + 1, '}', 0xde);
    if (*s == '[')
        return pack_items(p, s + 1, ']', 0xdc);
    if (*s == '"') {
        size_t n = strcspn(s + 1, "\"");

        pack_code(p, 0xdb, n, 4);
        pack_bytes(p, s + 1, n);
        return s + n + 2;
    }
    if (*s == '<') {
        size_t head = p->n;

        pack_code(p, 0xc5, 0, 2);
        s = pack_hex(p, s + 1, '>');
        p->to[head + 1] = (uint8_t)((p->n - head - 3) >> 8);
        p->to[head + 2] = (uint8_t)(p->n - head - 3);
        return s;
    }
    if (*s == '#')
        return pack_hex(p, s + 1, '#');
    if (strncmp(s, "true", 4) == 0)
        return pack_code(p, 0xc3, 0, 0), s + 4;
    if (strncmp(s, "false", 5) == 0)
        return pack_code(p, 0xc2, 0, 0), s + 5;
    if (strncmp(s, "null", 4) == 0)
        return pack_code(p, 0xc0, 0, 0), s + 4;
    return pack_number(p, s);
}

/* The number of bytes; aborts when they do not fit. */
static inline size_t pack(const char *text, uint8_t *to, size_t size)
{
    struct pack p = {to, 0, size};

    pack_value(&p, text);
    return p.n;
}
