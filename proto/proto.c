/*
 * proto.c - names and texts of the lists in proto.h, and the rules for foreign text
 *
 * Every table is made from the one list, so that a number, its name and its text cannot drift
 * apart. A name from outside may reach a terminal or a log: UTF-8 without control characters, C1
 * ones (which some terminals obey) included.
 */
#include "proto.h"

#include <errno.h>
#include <string.h>

#include "base.h"

const char *proto_verb_name(enum verb verb)
{
    static const char *const names[] = {
#define X(NAME, name, right) [VERB_##NAME] = name,
        PROTO_VERBS(X)
#undef X
    };

    return (unsigned)verb < ARRAY_SIZE(names) ? names[verb] : NULL;
}

enum right proto_verb_right(enum verb verb)
{
    static const enum right rights[] = {
#define X(NAME, name, right) [VERB_##NAME] = right,
        PROTO_VERBS(X)
#undef X
    };

    return (unsigned)verb < ARRAY_SIZE(rights) ? rights[verb] : RIGHT_ADMIN;
}

const char *proto_error_name(enum proto_error error)
{
    static const char *const names[] = {
#define X(number, NAME, text) [number] = #NAME,
        PROTO_ERRORS(X)
#undef X
    };

    return (unsigned)error < ARRAY_SIZE(names) ? names[error] : NULL;
}

const char *proto_error_text(enum proto_error error)
{
    static const char *const texts[] = {
#define X(number, NAME, text) [number] = text,
        PROTO_ERRORS(X)
#undef X
    };

    return (unsigned)error < ARRAY_SIZE(texts) ? texts[error] : NULL;
}

struct dtype_row {
    const char *name;
    size_t size;
};

static const struct dtype_row dtypes[] = {
#define X(number, NAME, name, size) [number] = {name, size},
    PROTO_DTYPES(X)
#undef X
};

const char *proto_dtype_name(enum proto_dtype dtype)
{
    return (unsigned)dtype < ARRAY_SIZE(dtypes) ? dtypes[dtype].name : NULL;
}

size_t proto_dtype_size(enum proto_dtype dtype)
{
    return (unsigned)dtype < ARRAY_SIZE(dtypes) ? dtypes[dtype].size : 0;
}

enum proto_dtype proto_dtype_parse(const char *name, size_t n)
{
    for (unsigned k = 1; k < ARRAY_SIZE(dtypes); k++)
        if (strlen(dtypes[k].name) == n && memcmp(dtypes[k].name, name, n) == 0)
            return (enum proto_dtype)k;
    return (enum proto_dtype)0;
}

int proto_tensor_size(enum proto_dtype dtype, unsigned rank, const int64_t *shape,
                      uint64_t *ret_bytes)
{
    uint64_t bytes = proto_dtype_size(dtype);
    bool is_empty = false, fits = true;

    if (bytes == 0 || rank > PROTO_RANK_MAX)
        return -EINVAL;
    for (unsigned k = 0; k < rank; k++) {
        if (shape[k] < 0)
            return -EINVAL;
        if (shape[k] == 0)
            is_empty = true;
        else if (!mul_u64(bytes, (uint64_t)shape[k], &bytes))
            fits = false;
    }
    /* An empty tensor has no bytes, whatever its other sizes would multiply to. */
    if (is_empty)
        bytes = 0;
    else if (!fits || bytes > INT64_MAX)
        return -EOVERFLOW;
    *ret_bytes = bytes;
    return 0;
}

size_t proto_utf8_length(const char *s, size_t n)
{
    const uint8_t *u = (const uint8_t *)s;
    size_t length;
    uint32_t c;

    if (n == 0)
        return 0;
    if (u[0] < 0x80)
        return 1;
    length = u[0] >= 0xf0 ? 4 : u[0] >= 0xe0 ? 3 : 2;
    if (u[0] < 0xc2 || u[0] > 0xf4 || length > n)
        return 0;
    c = u[0] & (0xffu >> (length + 1));
    for (size_t k = 1; k < length; k++) {
        if ((u[k] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (u[k] & 0x3f);
    }
    /* Longer than needed, a surrogate, or past the last character. */
    if ((length == 3 && c < 0x800) || (length == 4 && (c < 0x10000 || c > 0x10ffff)) ||
        (c >= 0xd800 && c <= 0xdfff))
        return 0;
    return length;
}

size_t proto_text_length(const char *s, size_t n)
{
    size_t length = proto_utf8_length(s, n);
    const uint8_t *u = (const uint8_t *)s;

    if (length == 1 && (u[0] < 0x20 || u[0] == 0x7f))
        return 0;
    if (length == 2 && u[0] == 0xc2 && u[1] < 0xa0)
        return 0;
    return length;
}

bool proto_name_valid(const char *s, size_t n)
{
    if (n == 0 || n > PROTO_NAME_MAX)
        return false;
    for (size_t at = 0, length; at < n; at += length) {
        length = proto_text_length(s + at, n - at);
        if (length == 0)
            return false;
    }
    return true;
}
