/*
 * tensor.c - dtypes and shapes
 *
 * Conversions are written without branches, so that the compiler turns their loops into vectors,
 * and without library or hardware half types, so that every machine gives the same bits. Subnormal
 * halves go through an addition, not a multiplication: it stays exact when a caller's thread
 * flushes subnormals.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tensor.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors lie in memory as in files");

size_t dtype_size(enum dtype dtype)
{
    return dtype == DTYPE_FLOAT32 ? 4 : 2;
}

const char *dtype_name(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_FLOAT32:
        return "float32";
    case DTYPE_FLOAT16:
        return "float16";
    case DTYPE_BFLOAT16:
        return "bfloat16";
    }
    return "?";
}

enum dtype dtype_parse(const char *name)
{
    for (enum dtype dtype = DTYPE_FLOAT32; dtype <= DTYPE_BFLOAT16; dtype++)
        if (strcmp(name, dtype_name(dtype)) == 0)
            return dtype;
    return 0;
}

int64_t shape_elements(const struct shape *shape)
{
    int64_t n = 1;

    for (int i = 0; i < shape->rank; i++)
        n *= shape->dims[i];
    return n;
}

struct shape shape_rows(const struct shape *shape, int64_t rows)
{
    struct shape with = *shape;

    with.dims[with.batch] = rows;
    return with;
}

const char *shape_print(const struct shape *shape, char *text, size_t size)
{
    size_t n = 0;

    if (size == 0)
        return text;
    n += (size_t)snprintf(text, size, "[");
    for (int i = 0; i < shape->rank && n < size; i++) {
        const char *comma = i ? ", " : "";

        if (i == shape->batch)
            n += (size_t)snprintf(text + n, size - n, "%sN", comma);
        else
            n += (size_t)snprintf(text + n, size - n, "%s%" PRId64, comma, shape->dims[i]);
    }
    if (n < size)
        snprintf(text + n, size - n, "]");
    return text;
}

static inline float as_float(uint32_t u)
{
    float f;

    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t as_bits(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    return u;
}

/* All ones when the condition holds: choosing by masks leaves the compiler no branch to make. */
static inline uint32_t mask(bool condition)
{
    return -(uint32_t)condition;
}

static inline float half_widen(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13; /* exponent and fraction at float32's place */
    uint32_t small = mask((h & 0x7c00) == 0), special = mask((h & 0x7c00) == 0x7c00);
    uint32_t subnormal = as_bits(as_float(bits | 0x38800000) - as_float(0x38800000));
    uint32_t other = bits + ((127 - 15) << 23) + (special & ((255 - 31 - 127 + 15) << 23));

    return as_float(sign | (small & subnormal) | (~small & other));
}

static inline uint16_t half_round(float f)
{
    uint32_t bits = as_bits(f);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t a = bits & 0x7fffffff;
    uint32_t nan = mask(a > 0x7f800000), large = mask(a >= 0x47800000);
    uint32_t small = mask(a < 0x38800000);
    /* Moving the exponent, then half an ulp up, ties to even. */
    uint32_t normal = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
    /* At 0.5 the ulp of float32 is the step of subnormal halves: the addition rounds. */
    uint32_t subnormal = as_bits(as_float(small & a) + 0.5f) - 0x3f000000;
    uint32_t special = 0x7c00 | (nan & (0x200 | (a >> 13 & 0x1ff)));

    return (uint16_t)(sign | (small & subnormal) | (large & special) | (~(small | large) & normal));
}

static inline float bfloat_widen(uint16_t h)
{
    return as_float((uint32_t)h << 16);
}

static inline uint16_t bfloat_round(float f)
{
    uint32_t bits = as_bits(f);
    uint32_t nan = mask((bits & 0x7fffffff) > 0x7f800000);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;

    return (uint16_t)((nan & (bits >> 16 | 0x40)) | (~nan & rounded));
}

float float16_to_float(uint16_t h)
{
    return half_widen(h);
}

uint16_t float16_from_float(float f)
{
    return half_round(f);
}

float bfloat16_to_float(uint16_t h)
{
    return bfloat_widen(h);
}

uint16_t bfloat16_from_float(float f)
{
    return bfloat_round(f);
}

__attribute__((target_clones("default", "avx2", "avx512f"))) static void
halves_widen(const uint16_t *restrict from, float *restrict to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = half_widen(from[i]);
}

__attribute__((target_clones("default", "avx2", "avx512f"))) static void
halves_round(const float *restrict from, uint16_t *restrict to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = half_round(from[i]);
}

__attribute__((target_clones("default", "avx2", "avx512f"))) static void
bfloats_widen(const uint16_t *restrict from, float *restrict to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = bfloat_widen(from[i]);
}

__attribute__((target_clones("default", "avx2", "avx512f"))) static void
bfloats_round(const float *restrict from, uint16_t *restrict to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = bfloat_round(from[i]);
}

void tensor_to_float(enum dtype dtype, const void *from, float *to, size_t n)
{
    switch (dtype) {
    case DTYPE_FLOAT32:
        memcpy(to, from, n * 4);
        break;
    case DTYPE_FLOAT16:
        halves_widen(from, to, n);
        break;
    case DTYPE_BFLOAT16:
        bfloats_widen(from, to, n);
        break;
    }
}

void tensor_from_float(enum dtype dtype, const float *from, void *to, size_t n)
{
    switch (dtype) {
    case DTYPE_FLOAT32:
        memcpy(to, from, n * 4);
        break;
    case DTYPE_FLOAT16:
        halves_round(from, to, n);
        break;
    case DTYPE_BFLOAT16:
        bfloats_round(from, to, n);
        break;
    }
}
