/*
 * scan.h - raw msgpack, read one item at a time
 *
 * Knows the format's byte layout and nothing of messages. An item is a scalar with its value, or
 * the head of a map or list, whose elements follow as items of their own. Nothing allocates or
 * recurses.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum scan_type {
    SCAN_NIL,
    SCAN_BOOL,
    SCAN_UINT,
    SCAN_INT, /* below zero */
    SCAN_DOUBLE,
    SCAN_STR,
    SCAN_BIN,
    SCAN_EXT,
    SCAN_LIST,
    SCAN_MAP
};

struct scan_item {
    enum scan_type type;
    union {
        bool b;
        uint64_t u;
        int64_t i;
        double d;
        struct {
            const uint8_t *bytes;
            uint32_t n;
        } raw;      /* str, bin, ext (without its type) */
        uint64_t n; /* items that follow in a list; twice the pairs of a map */
    };
};

/* Reads the item at *pos and moves past it. 0, or -EBADMSG when it does not end within n bytes or
 * its code is the unused one; *pos is untouched then. */
int scan_item(const uint8_t *bytes, size_t n, size_t *pos, struct scan_item *ret);

/* What codec_check() promises. */
int scan_check(const uint8_t *bytes, size_t n, const char **ret_reason);

/* Moves past one whole value. */
int scan_skip(const uint8_t *bytes, size_t n, size_t *pos);

/*
 * The value at a path of map keys and list positions, "limits.unread_replies" or "models.0.name",
 * as a range of the bytes. -ENOENT when there is none, -EBADMSG.
 */
int scan_find(const uint8_t *bytes, size_t n, const char *path, const uint8_t **ret_bytes,
              size_t *ret_n);
