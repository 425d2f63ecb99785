/*
 * npy.c - headers of NumPy's .npy files
 *
 * The header is a literal of the Python language. Only the form that numpy.save() writes is read:
 * one dict with exactly the three keys, in any order, with any spacing and either quote. Arrays
 * that are big endian, in Fortran order, structured, or of a type that no model takes are refused
 * with what to do about it. Nothing is allocated, and no number is used before it was checked.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "client/npy.h"
#include "kernels/tensor.h"
#include "proto/base.h"

#define MAGIC      "\x93NUMPY"
#define MAGIC_SIZE 6

static const struct {
    const char *descr;
    enum fused_dtype dtype;
} types[] = {
    /* The first of a dtype is the one written. */
    {"<f4", FUSED_FLOAT32},  {"<f2", FUSED_FLOAT16}, {"<V2", FUSED_BFLOAT16},
    {"|V2", FUSED_BFLOAT16}, {"|u1", FUSED_UINT8},
};

struct cursor {
    const char *p, *end;
};

static void skip_space(struct cursor *at)
{
    while (at->p < at->end && (*at->p == ' ' || *at->p == '\t' || *at->p == '\n'))
        at->p++;
}

/* Takes one character, after spaces. */
static bool take(struct cursor *at, char c)
{
    skip_space(at);
    if (at->p == at->end || *at->p != c)
        return false;
    at->p++;
    return true;
}

static bool take_word(struct cursor *at, const char *word)
{
    size_t n = strlen(word);

    skip_space(at);
    if ((size_t)(at->end - at->p) < n || memcmp(at->p, word, n) != 0)
        return false;
    at->p += n;
    return true;
}

/* A quoted string of printable ASCII without escapes. */
static bool take_string(struct cursor *at, char *to, size_t size)
{
    size_t n = 0;
    char quote;

    skip_space(at);
    if (at->p == at->end || (*at->p != '\'' && *at->p != '"'))
        return false;
    quote = *at->p++;
    while (at->p < at->end && *at->p != quote) {
        if (*at->p < 0x20 || *at->p > 0x7e || *at->p == '\\' || n + 1 >= size)
            return false;
        to[n++] = *at->p++;
    }
    if (at->p == at->end)
        return false;
    at->p++;
    to[n] = 0;
    return true;
}

static bool take_number(struct cursor *at, int64_t *ret)
{
    int64_t value = 0;
    const char *start;

    skip_space(at);
    start = at->p;
    while (at->p < at->end && *at->p >= '0' && *at->p <= '9') {
        value = value * 10 + (*at->p++ - '0');
        if (value > TENSOR_ELEMENTS_MAX)
            return false;
    }
    *ret = value;
    return at->p > start;
}

static int parse_shape(struct cursor *at, struct npy *npy, struct report *report)
{
    if (!take(at, '('))
        return report_set(report, -EINVAL, "shape is not a tuple");
    while (!take(at, ')')) {
        if (npy->rank == FUSED_RANK_MAX)
            return report_set(report, -EINVAL, "more than %d dimensions", FUSED_RANK_MAX);
        if (!take_number(at, &npy->dims[npy->rank]))
            return report_set(report, -EINVAL, "a dimension is no number, or too large");
        npy->rank++;
        /* "(3)" is a number in Python, but cannot mean anything else here. */
        if (!take(at, ',') && (at->p == at->end || *at->p != ')'))
            return report_set(report, -EINVAL, "shape is not a tuple of numbers");
    }
    return 0;
}

static int parse_descr(struct cursor *at, struct npy *npy, struct report *report)
{
    char descr[64];

    skip_space(at);
    if (at->p < at->end && *at->p == '[')
        return report_set(report, -EINVAL, "structured arrays are not supported");
    if (!take_string(at, descr, sizeof(descr)))
        return report_set(report, -EINVAL, "descr is not a string");
    for (size_t i = 0; i < ARRAY_SIZE(types); i++)
        if (strcmp(descr, types[i].descr) == 0)
            npy->dtype = types[i].dtype;
    if (npy->dtype != 0)
        return 0;
    if (descr[0] == '>')
        return report_set(report, -EINVAL,
                          "big endian ('%s') is not supported: save x.astype('<%s')", descr,
                          descr + 1);
    return report_set(report, -EINVAL,
                      "type '%s' is not supported: float32, float16 and bfloat16 are", descr);
}

static int parse_order(struct cursor *at, struct report *report)
{
    if (take_word(at, "False"))
        return 0;
    if (take_word(at, "True"))
        return report_set(report, -EINVAL,
                          "Fortran order is not supported: save numpy.ascontiguousarray(x)");
    return report_set(report, -EINVAL, "fortran_order is neither True nor False");
}

static int parse_dict(struct cursor *at, struct npy *npy, struct report *report)
{
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    unsigned seen = 0;
    char key[32];

    if (!take(at, '{'))
        return report_set(report, -EINVAL, "the header is not a dict");
    while (!take(at, '}')) {
        size_t i = 0;
        int r;

        if (!take_string(at, key, sizeof(key)) || !take(at, ':'))
            return report_set(report, -EINVAL, "the header is not a dict of names");
        while (i < ARRAY_SIZE(keys) && strcmp(key, keys[i]) != 0)
            i++;
        if (i == ARRAY_SIZE(keys))
            return report_set(report, -EINVAL, "unknown key '%s' in the header", key);
        if ((seen & 1u << i) != 0)
            return report_set(report, -EINVAL, "%s comes twice in the header", key);
        seen |= 1u << i;
        r = i == 0   ? parse_descr(at, npy, report)
            : i == 1 ? parse_order(at, report)
                     : parse_shape(at, npy, report);
        if (r < 0)
            return r;
        skip_space(at);
        if (!take(at, ',') && (at->p == at->end || *at->p != '}'))
            return report_set(report, -EINVAL, "the header is not a dict");
    }
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if ((seen & 1u << i) == 0)
            return report_set(report, -EINVAL, "%s is missing in the header", keys[i]);
    skip_space(at);
    return at->p == at->end ? 0 : report_set(report, -EINVAL, "text after the header's dict");
}

static int count_bytes(struct npy *npy, struct report *report)
{
    int64_t elements = 1;

    for (int i = 0; i < npy->rank; i++)
        if (__builtin_mul_overflow(elements, npy->dims[i], &elements) ||
            elements > TENSOR_ELEMENTS_MAX)
            return report_set(report, -EINVAL, "too many elements");
    npy->size = (uint64_t)elements * fused_dtype_size(npy->dtype);
    return 0;
}

int npy_parse(const uint8_t *bytes, size_t n, struct npy *ret, struct report *report)
{
    struct npy npy = {0};
    struct cursor at;
    size_t length, start;
    int r;

    if (n < MAGIC_SIZE + 4 || memcmp(bytes, MAGIC, MAGIC_SIZE) != 0)
        return report_set(report, -EINVAL, "not a .npy file");
    if (bytes[6] < 1 || bytes[6] > 3 || bytes[7] != 0)
        return report_set(report, -EINVAL, "version %u.%u of .npy is not known", bytes[6],
                          bytes[7]);
    length = (size_t)bytes[8] | (size_t)bytes[9] << 8;
    start = 10;
    if (bytes[6] > 1) {
        if (n < 12)
            return report_set(report, -EINVAL, "the file ends in its header");
        length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
        start = 12;
    }
    if (length > NPY_HEADER_MAX - start)
        return report_set(report, -EINVAL, "a header of %zu bytes is too long", length);
    if (length > n - start)
        return report_set(report, -EINVAL, "the file ends in its header");
    at = (struct cursor){(const char *)bytes + start, (const char *)bytes + start + length};
    r = parse_dict(&at, &npy, report);
    if (r == 0)
        r = count_bytes(&npy, report);
    if (r < 0)
        return r;
    npy.data_offset = start + length;
    *ret = npy;
    return 0;
}

int npy_print(enum fused_dtype dtype, int rank, const int64_t *dims, uint8_t to[NPY_PRINT_MAX])
{
    char shape[256] = "", dict[NPY_PRINT_MAX];
    const char *descr = NULL;
    size_t n = 0, total;

    for (size_t i = 0; i < ARRAY_SIZE(types) && descr == NULL; i++)
        if (types[i].dtype == dtype)
            descr = types[i].descr;
    if (descr == NULL || rank < 0 || rank > FUSED_RANK_MAX)
        return -EINVAL;
    for (int i = 0; i < rank; i++)
        n += (size_t)snprintf(shape + n, sizeof(shape) - n, "%lld%s", (long long)dims[i],
                              i + 1 < rank ? ", "
                              : rank == 1  ? ","
                                           : "");
    n = (size_t)snprintf(dict, sizeof(dict),
                         "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, shape);
    /* Data start at a multiple of 64, so that a mapping of the file is aligned. */
    total = (10 + n + 1 + 63) / 64 * 64;
    memset(to, ' ', total);
    memcpy(to, MAGIC "\x01\x00", MAGIC_SIZE + 2);
    to[8] = (uint8_t)((total - 10) & 0xff);
    to[9] = (uint8_t)((total - 10) >> 8);
    memcpy(to + 10, dict, n);
    to[total - 1] = '\n';
    return (int)total;
}
