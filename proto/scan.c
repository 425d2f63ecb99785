/*
 * scan.c - raw msgpack, read one item at a time
 *
 * The structural check, the search for one value of a document and the printing of a document all
 * walk the same bytes; this is the one place that knows the codes. Each read is checked against the
 * bytes that remain before it happens, so every caller may hand in anything.
 */
#include "scan.h"

#include <errno.h>
#include <string.h>

#include "proto.h"

static uint64_t read_be(const uint8_t *p, unsigned width)
{
    uint64_t v = 0;

    for (unsigned k = 0; k < width; k++)
        v = v << 8 | p[k];
    return v;
}

static void set_int(struct scan_item *item, int64_t v)
{
    if (v < 0)
        *item = (struct scan_item){.type = SCAN_INT, .i = v};
    else
        *item = (struct scan_item){.type = SCAN_UINT, .u = (uint64_t)v};
}

static void set_float(struct scan_item *item, uint64_t bits, unsigned width)
{
    uint32_t bits32 = (uint32_t)bits;
    float f;

    *item = (struct scan_item){.type = SCAN_DOUBLE};
    if (width == 4) {
        memcpy(&f, &bits32, sizeof f);
        item->d = f;
    } else {
        memcpy(&item->d, &bits, sizeof item->d);
    }
}

/* Codes below 0xc0 and from 0xe0 on carry their value or length themselves. */
static bool fixed_item(uint8_t code, struct scan_item *ret, uint32_t *ret_body)
{
    *ret_body = 0;
    if (code < 0x80)
        *ret = (struct scan_item){.type = SCAN_UINT, .u = code};
    else if (code < 0x90)
        *ret = (struct scan_item){.type = SCAN_MAP, .n = 2 * (uint64_t)(code & 15)};
    else if (code < 0xa0)
        *ret = (struct scan_item){.type = SCAN_LIST, .n = code & 15};
    else if (code < 0xc0)
        *ret = (struct scan_item){.type = SCAN_STR, .raw.n = *ret_body = code & 31};
    else if (code >= 0xe0)
        *ret = (struct scan_item){.type = SCAN_INT, .i = (int8_t)code};
    else
        return false;
    return true;
}

/* Bytes between the code and the body: a length, a count or the value. */
static const uint8_t head_bytes[0x20] = {
    [0x04] = 1, 2, 4,    /* bin */
    [0x07] = 1, 2, 4,    /* ext */
    [0x0a] = 4, 8,       /* float */
    [0x0c] = 1, 2, 4, 8, /* uint */
    [0x10] = 1, 2, 4, 8, /* int */
    [0x19] = 1, 2, 4,    /* str */
    [0x1c] = 2, 4,       /* array */
    [0x1e] = 2, 4,       /* map */
};

/* Codes 0xc0 to 0xdf; v is what stood in the head. False for the unused code. */
static bool headed_item(uint8_t code, uint64_t v, struct scan_item *ret, uint64_t *ret_body)
{
    unsigned width = head_bytes[code - 0xc0];

    *ret_body = 0;
    switch (code) {
    case 0xc0:
        *ret = (struct scan_item){.type = SCAN_NIL};
        return true;
    case 0xc2:
    case 0xc3:
        *ret = (struct scan_item){.type = SCAN_BOOL, .b = code == 0xc3};
        return true;
    case 0xc4 ... 0xc6:
    case 0xd9 ... 0xdb:
        *ret = (struct scan_item){.type = code < 0xc7 ? SCAN_BIN : SCAN_STR, .raw.n = (uint32_t)v};
        *ret_body = v;
        return true;
    case 0xc7 ... 0xc9:
        *ret = (struct scan_item){.type = SCAN_EXT, .raw.n = (uint32_t)v};
        *ret_body = v + 1;
        return true;
    case 0xca:
    case 0xcb:
        set_float(ret, v, width);
        return true;
    case 0xcc ... 0xcf:
        *ret = (struct scan_item){.type = SCAN_UINT, .u = v};
        return true;
    case 0xd0 ... 0xd3: /* sign-extended from its width */
        set_int(ret, (int64_t)(v << (64 - 8 * width)) >> (64 - 8 * width));
        return true;
    case 0xd4 ... 0xd8:
        *ret = (struct scan_item){.type = SCAN_EXT, .raw.n = 1u << (code - 0xd4)};
        *ret_body = ret->raw.n + UINT64_C(1);
        return true;
    case 0xdc:
    case 0xdd:
        *ret = (struct scan_item){.type = SCAN_LIST, .n = v};
        return true;
    case 0xde:
    case 0xdf:
        *ret = (struct scan_item){.type = SCAN_MAP, .n = 2 * v};
        return true;
    default:
        return false;
    }
}

int scan_item(const uint8_t *bytes, size_t n, size_t *pos, struct scan_item *ret)
{
    size_t at = *pos;
    uint8_t code;
    unsigned head = 0;
    uint64_t body = 0;
    uint32_t fixed_body;

    if (at >= n)
        return -EBADMSG;
    code = bytes[at++];
    if (fixed_item(code, ret, &fixed_body)) {
        body = fixed_body;
    } else {
        head = head_bytes[code - 0xc0];
        if (head > n - at || !headed_item(code, read_be(bytes + at, head), ret, &body))
            return -EBADMSG;
        at += head;
    }
    if (body > n - at)
        return -EBADMSG;
    if (ret->type == SCAN_STR || ret->type == SCAN_BIN || ret->type == SCAN_EXT)
        ret->raw.bytes = bytes + at + (body - ret->raw.n);
    *pos = at + body;
    return 0;
}

static int refuse(const char *reason, const char **ret_reason)
{
    *ret_reason = reason;
    return -EBADMSG;
}

int scan_check(const uint8_t *bytes, size_t n, const char **ret_reason)
{
    uint64_t owed[PROTO_DEPTH_MAX];
    unsigned depth = 0, n_elements = 0;
    size_t pos = 0;
    struct scan_item item;

    do {
        if (scan_item(bytes, n, &pos, &item) < 0)
            return refuse("the message is cut short or holds the unused code 0xc1", ret_reason);
        if (++n_elements > PROTO_ELEMENTS_MAX)
            return refuse("more than 4096 elements", ret_reason);
        if (item.type == SCAN_LIST || item.type == SCAN_MAP) {
            if (depth == PROTO_DEPTH_MAX)
                return refuse("maps and arrays nested more than 8 deep", ret_reason);
            if (item.n > n - pos)
                return refuse("a count is larger than the message", ret_reason);
            owed[depth++] = item.n + 1; /* the container itself is taken off next */
        }
        while (depth > 0 && --owed[depth - 1] == 0)
            depth--;
    } while (depth > 0);
    return pos == n ? 0 : refuse("bytes follow the message", ret_reason);
}

int scan_skip(const uint8_t *bytes, size_t n, size_t *pos)
{
    struct scan_item item;
    size_t at = *pos;
    uint64_t left = 1;

    while (left > 0) {
        if (scan_item(bytes, n, &at, &item) < 0)
            return -EBADMSG;
        left--;
        if (item.type == SCAN_LIST || item.type == SCAN_MAP) {
            /* Each item is at least one byte: a larger count would never be met. */
            if (item.n > n - at || left > n - at - item.n)
                return -EBADMSG;
            left += item.n;
        }
    }
    *pos = at;
    return 0;
}

/* True when the part of the path names this position of a list. */
static bool names_position(const char *part, size_t n_part, uint64_t position)
{
    uint64_t v = 0;

    if (n_part == 0 || n_part > 9)
        return false;
    for (size_t k = 0; k < n_part; k++) {
        if (part[k] < '0' || part[k] > '9')
            return false;
        v = v * 10 + (uint64_t)(part[k] - '0');
    }
    return v == position;
}

/* One step of a path: *pos is at a map or list, and moves to the element that the part names. */
static int step(const uint8_t *bytes, size_t n, size_t *pos, const char *part, size_t n_part)
{
    struct scan_item item, key;
    int r;

    r = scan_item(bytes, n, pos, &item);
    if (r < 0)
        return r;
    if (item.type != SCAN_LIST && item.type != SCAN_MAP)
        return -ENOENT;
    for (uint64_t k = 0; k < item.n; k += item.type == SCAN_MAP ? 2 : 1) {
        if (item.type == SCAN_LIST) {
            if (names_position(part, n_part, k))
                return 0;
        } else {
            size_t at = *pos;

            if (scan_item(bytes, n, &at, &key) < 0 || scan_skip(bytes, n, pos) < 0)
                return -EBADMSG;
            if (key.type == SCAN_STR && key.raw.n == n_part &&
                memcmp(key.raw.bytes, part, n_part) == 0)
                return 0;
        }
        r = scan_skip(bytes, n, pos);
        if (r < 0)
            return r;
    }
    return -ENOENT;
}

int scan_find(const uint8_t *bytes, size_t n, const char *path, const uint8_t **ret_bytes,
              size_t *ret_n)
{
    size_t pos = 0, end;
    int r;

    while (*path) {
        size_t n_part = strcspn(path, ".");

        r = step(bytes, n, &pos, path, n_part);
        if (r < 0)
            return r;
        path += n_part;
        path += *path == '.';
    }
    end = pos;
    r = scan_skip(bytes, n, &end);
    if (r < 0)
        return r;
    *ret_bytes = bytes + pos;
    *ret_n = end - pos;
    return 0;
}
