/*
 * loops.c - the loops over elements that decide how fast everything beside oneDNN is
 *
 * target_clones makes one copy of a function per instruction set, chosen when the program starts.
 * It needs functions of their own symbol, so nothing here is static or inline, and nothing calls a
 * clone from a clone. Elementwise loops are left to the compiler. Sums are written in vectors of
 * eight doubles, because a compiler may not reorder a sum: which element goes to which lane, and
 * how lanes are added up, is fixed here and does not depend on the width of the machine.
 *
 * Sums subtract a shift first (any value near the data) and run in double: then neither a mean that
 * dwarfs the spread nor a square can spoil or overflow them, whatever the floats.
 */
#include <math.h>
#include <string.h>

#ifdef __SSE__
#include <immintrin.h>
#endif

#include "loops.h"

#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))

typedef float float4 __attribute__((vector_size(16)));
typedef float float8 __attribute__((vector_size(32)));
typedef double double8 __attribute__((vector_size(64)));

#define DOUBLES(from)                              \
    ({                                             \
        float8 floats_;                            \
        memcpy(&floats_, (from), 32);              \
        __builtin_convertvector(floats_, double8); \
    })

/* Lanes 0 to 7 added up in pairs. */
#define FOLD(v) ((((v)[0] + (v)[4]) + ((v)[2] + (v)[6])) + (((v)[1] + (v)[5]) + ((v)[3] + (v)[7])))

static inline __attribute__((always_inline)) uint32_t bits_of(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    return u;
}

static inline __attribute__((always_inline)) float float_of(uint32_t u)
{
    float f;

    memcpy(&f, &u, 4);
    return f;
}

/* Equal numbers have the same bits, but for zeros: there, and for NaN, or-ing is what is wanted. */
static inline __attribute__((always_inline)) float lesser(float a, float b)
{
    float either = float_of(bits_of(a) | bits_of(b));

    return a < b ? a : b < a ? b : either;
}

CLONES void loops_fill(float *x, size_t n, float value)
{
    for (size_t i = 0; i < n; i++)
        x[i] = value;
}

CLONES uint32_t loops_bits_max(const float *x, size_t n)
{
    uint32_t max = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffff;

        max = bits > max ? bits : max;
    }
    return max;
}

CLONES void loops_minimum(float *x, size_t n, float value)
{
    for (size_t i = 0; i < n; i++)
        x[i] = lesser(x[i], value);
}

CLONES void loops_maximum(float *x, size_t n, float value)
{
    /* -0 gives way to +0, and +0 stays where the value is -0. */
    if (bits_of(value) == 0x80000000) {
        for (size_t i = 0; i < n; i++)
            x[i] = x[i] < value ? value : x[i];
    } else {
        for (size_t i = 0; i < n; i++)
            x[i] = x[i] <= value ? value : x[i];
    }
}

CLONES void loops_add(float *x, size_t n, const float *tensor)
{
    for (size_t i = 0; i < n; i++)
        x[i] += tensor[i];
}

CLONES void loops_add_scalar(float *x, size_t n, float value)
{
    for (size_t i = 0; i < n; i++)
        x[i] += value;
}

CLONES float loops_amin(const float *x, size_t n)
{
    float lanes[32], least;
    size_t i = 0;

    for (int l = 0; l < 32; l++)
        lanes[l] = INFINITY;
    for (; i + 32 <= n; i += 32)
        for (int l = 0; l < 32; l++)
            lanes[l] = lesser(lanes[l], x[i + (size_t)l]);
    for (int half = 16; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            lanes[l] = lesser(lanes[l], lanes[l + half]);
    least = lanes[0];
    for (; i < n; i++)
        least = lesser(least, x[i]);
    return least;
}

CLONES void loops_amin_rows(float *least, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        least[i] = lesser(least[i], x[i]);
}

CLONES void loops_sums(const float *x, size_t n, float shift, struct loops_sums *ret)
{
    double8 sum0 = {0}, sum1 = {0}, square0 = {0}, square1 = {0};
    double8 shifts = {0};
    float rest[16];
    size_t i = 0;

    shifts += (double)shift;
    for (; i + 16 <= n; i += 16) {
        double8 d0 = DOUBLES(x + i) - shifts, d1 = DOUBLES(x + i + 8) - shifts;

        sum0 += d0;
        sum1 += d1;
        square0 += d0 * d0;
        square1 += d1 * d1;
    }
    if (i < n) {
        double8 d0, d1;

        for (size_t l = 0; l < 16; l++)
            rest[l] = i + l < n ? x[i + l] : shift;
        d0 = DOUBLES(rest) - shifts;
        d1 = DOUBLES(rest + 8) - shifts;
        sum0 += d0;
        sum1 += d1;
        square0 += d0 * d0;
        square1 += d1 * d1;
    }
    sum0 += sum1;
    square0 += square1;
    ret->sum = FOLD(sum0);
    ret->square = FOLD(square0);
}

/* Eight channels; two places at a time, because an addition takes longer than a step. */
CLONES static void sums_of_8(const float *x, size_t n, size_t block, const float *shift,
                             struct loops_sums *ret)
{
    double8 sum0 = {0}, sum1 = {0}, square0 = {0}, square1 = {0};
    double8 shifts = DOUBLES(shift);
    size_t i = 0;

    for (; i + 2 <= n; i += 2) {
        double8 d0 = DOUBLES(x + i * block) - shifts, d1 = DOUBLES(x + (i + 1) * block) - shifts;

        sum0 += d0;
        sum1 += d1;
        square0 += d0 * d0;
        square1 += d1 * d1;
    }
    if (i < n) {
        double8 d0 = DOUBLES(x + i * block) - shifts;

        sum0 += d0;
        square0 += d0 * d0;
    }
    sum0 += sum1;
    square0 += square1;
    for (int l = 0; l < 8; l++)
        ret[l] = (struct loops_sums){sum0[l], square0[l]};
}

CLONES static void sums_of_16(const float *x, size_t n, const float *shift, struct loops_sums *ret)
{
    double8 sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
    double8 square0 = {0}, square1 = {0}, square2 = {0}, square3 = {0};
    double8 shifts0 = DOUBLES(shift), shifts1 = DOUBLES(shift + 8);
    size_t i = 0;

    for (; i + 2 <= n; i += 2) {
        const float *at = x + i * 16;
        double8 d0 = DOUBLES(at) - shifts0, d1 = DOUBLES(at + 8) - shifts1;
        double8 d2 = DOUBLES(at + 16) - shifts0, d3 = DOUBLES(at + 24) - shifts1;

        sum0 += d0;
        sum1 += d1;
        sum2 += d2;
        sum3 += d3;
        square0 += d0 * d0;
        square1 += d1 * d1;
        square2 += d2 * d2;
        square3 += d3 * d3;
    }
    if (i < n) {
        double8 d0 = DOUBLES(x + i * 16) - shifts0, d1 = DOUBLES(x + i * 16 + 8) - shifts1;

        sum0 += d0;
        sum1 += d1;
        square0 += d0 * d0;
        square1 += d1 * d1;
    }
    sum0 += sum2;
    sum1 += sum3;
    square0 += square2;
    square1 += square3;
    for (int l = 0; l < 8; l++) {
        ret[l] = (struct loops_sums){sum0[l], square0[l]};
        ret[l + 8] = (struct loops_sums){sum1[l], square1[l]};
    }
}

void loops_sums_blocked(const float *x, size_t n, size_t block, const float *shift,
                        struct loops_sums *ret)
{
    if (block == 16)
        sums_of_16(x, n, shift, ret);
    else
        sums_of_8(x, n, block, shift, ret);
}

CLONES void loops_affine(const float *x, float *y, size_t n, float mean, float scale, float beta)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] - mean) * scale + beta;
}

CLONES void loops_affine_rows(const float *x, float *y, size_t n, float mean, float rstd,
                              const float *gamma, const float *beta)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] - mean) * (rstd * gamma[i]) + beta[i];
}

/* Squares of four by four: eight shuffles move sixteen numbers. */
CLONES void loops_unblock(const float *x, size_t n, size_t block, float *y, size_t ld)
{
    size_t i = 0;

    for (; i + 4 <= n; i += 4)
        for (size_t c = 0; c < block; c += 4) {
            const float *at = x + i * block + c;
            float *to = y + c * ld + i;
            float4 r0, r1, r2, r3, low01, high01, low23, high23;

            memcpy(&r0, at, 16);
            memcpy(&r1, at + block, 16);
            memcpy(&r2, at + 2 * block, 16);
            memcpy(&r3, at + 3 * block, 16);
            low01 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5);
            high01 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
            low23 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
            high23 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
            r0 = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
            r1 = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
            r2 = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
            r3 = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
            memcpy(to, &r0, 16);
            memcpy(to + ld, &r1, 16);
            memcpy(to + 2 * ld, &r2, 16);
            memcpy(to + 3 * ld, &r3, 16);
        }
    for (; i < n; i++)
        for (size_t c = 0; c < block; c++)
            y[c * ld + i] = x[i * block + c];
}

#ifdef __SSE__
__attribute__((target("avx512f"))) static void stream_512(const float *x, float *y, size_t n)
{
    for (size_t i = 0; i < n; i += 16)
        _mm512_stream_ps(y + i, _mm512_loadu_ps(x + i));
}

static void stream_128(const float *x, float *y, size_t n)
{
    for (size_t i = 0; i < n; i += 4)
        _mm_stream_ps(y + i, _mm_loadu_ps(x + i));
}

void loops_stream(const float *x, float *y, size_t n)
{
    /* Whole lines past the caches, what is left on both sides in the usual way. */
    size_t before = (size_t)(-(uintptr_t)y & 63) / sizeof(*y), lines;

    before = before < n ? before : n;
    lines = (n - before) / 16 * 16;
    memcpy(y, x, before * sizeof(*y));
    if (__builtin_cpu_supports("avx512f"))
        stream_512(x + before, y + before, lines);
    else
        stream_128(x + before, y + before, lines);
    memcpy(y + before + lines, x + before + lines, (n - before - lines) * sizeof(*y));
}

void loops_stream_end(void)
{
    _mm_sfence();
}
#else
void loops_stream(const float *x, float *y, size_t n)
{
    memcpy(y, x, n * sizeof(*y));
}

void loops_stream_end(void)
{
}
#endif
