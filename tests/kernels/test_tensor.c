/*
 * Dtypes and shapes: every 16-bit value, rounding against arithmetic in double, printing.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/tensor.h"

/* The value of sign, exponent and fraction by the formats' definition. */
static double value(uint16_t h, int exponent_bits, int fraction_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = h >> fraction_bits & ((1 << exponent_bits) - 1);
    int fraction = h & ((1 << fraction_bits) - 1);
    double a;

    if (exponent == (1 << exponent_bits) - 1)
        a = fraction ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        a = ldexp(fraction, 1 - bias - fraction_bits);
    else
        a = ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
    return h >> 15 ? -a : a;
}

static void check_every(enum dtype dtype, int exponent_bits, int fraction_bits)
{
    static uint16_t all[65536], back[65536];
    static float wide[65536];

    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    tensor_to_float(dtype, all, wide, 65536);
    tensor_from_float(dtype, wide, back, 65536);
    for (int i = 0; i < 65536; i++) {
        double want = value((uint16_t)i, exponent_bits, fraction_bits);
        float one =
            dtype == DTYPE_FLOAT16 ? float16_to_float((uint16_t)i) : bfloat16_to_float((uint16_t)i);

        if (isnan(want)) {
            if (!isnan(wide[i]) || !isnan(one) ||
                !isnan(value(back[i], exponent_bits, fraction_bits)))
                fail_msg("%04x: NaN is lost: %g, back %04x", i, (double)wide[i], back[i]);
        } else if ((double)wide[i] != want || !signbit(wide[i]) != !signbit(want) ||
                   (double)one != want || back[i] != i) {
            fail_msg("%04x: %.9g, not %.9g; back %04x", i, (double)wide[i], want, back[i]);
        }
    }
}

static void test_every_value(void **state)
{
    (void)state;
    check_every(DTYPE_FLOAT16, 5, 10);
    check_every(DTYPE_BFLOAT16, 8, 7);
}

/* The nearest value of the format, ties to even, by comparing distances in double. */
static uint16_t nearest(float f, int exponent_bits, int fraction_bits)
{
    uint16_t infinity = (uint16_t)(((1 << exponent_bits) - 1) << fraction_bits), low = 0;
    uint16_t high = infinity, sign = signbit(f) ? 0x8000 : 0;
    double a = fabs((double)f), below, above;

    if (isinf(f))
        return sign | infinity;
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);

        if (value(middle, exponent_bits, fraction_bits) <= a)
            low = middle;
        else
            high = middle;
    }
    below = value(low, exponent_bits, fraction_bits);
    /* Infinity stands where the next number would. */
    above = high == infinity ? ldexp(1, 1 << (exponent_bits - 1))
                             : value(high, exponent_bits, fraction_bits);
    if (a - below > above - a || (a - below == above - a && low % 2))
        low = high;
    return sign | low;
}

static void test_rounding(void **state)
{
    unsigned seed = 1;

    (void)state;
    print_message("seed %u\n", seed);
    srand(seed);
    for (int i = 0; i < 300000; i++) {
        uint32_t bits = (uint32_t)rand() ^ (uint32_t)rand() << 16;
        float f;
        uint16_t h, b;

        if (i % 2) /* a half's range, at or beside a tie */
            bits = (bits & 0x80000000) |
                   (0x32000000 + bits % 0x16000000 / 0x1000 * 0x1000 + (uint32_t)(rand() % 3) - 1);
        memcpy(&f, &bits, 4);
        h = float16_from_float(f);
        b = bfloat16_from_float(f);
        if (isnan(f))
            assert_true(isnan(float16_to_float(h)) && isnan(bfloat16_to_float(b)));
        else if (h != nearest(f, 5, 10) || b != nearest(f, 8, 7))
            fail_msg("%.9g (%08x): %04x %04x, not %04x %04x", (double)f, bits, h, b,
                     nearest(f, 5, 10), nearest(f, 8, 7));
    }
    assert_int_equal(float16_from_float(65519.99f), 0x7bff);
    assert_int_equal(float16_from_float(65520), 0x7c00);
    assert_int_equal(float16_from_float(INFINITY), 0x7c00);
    assert_int_equal(float16_from_float(0x1p-25f), 0);
    assert_int_equal(float16_from_float(-0x1.8p-25f), 0x8001);
    assert_int_equal(bfloat16_from_float(3.4028235e38f), 0x7f80);
    assert_int_equal(bfloat16_from_float(-0.0f), 0x8000);
}

static void test_names(void **state)
{
    (void)state;
    for (enum dtype d = DTYPE_FLOAT32; d <= DTYPE_BFLOAT16; d++)
        assert_int_equal(dtype_parse(dtype_name(d)), d);
    assert_int_equal(dtype_parse("double"), 0);
    assert_int_equal(dtype_parse(""), 0);
    assert_int_equal(dtype_size(DTYPE_FLOAT32), 4);
    assert_int_equal(dtype_size(DTYPE_BFLOAT16), 2);
}

static void test_shapes(void **state)
{
    struct shape shape = {.rank = 4, .batch = 2, .dims = {1, 8192, 1, 1}};
    struct shape with = shape_rows(&shape, 17), none = {.rank = 0};
    char text[64], small[8];

    (void)state;
    assert_int_equal(shape_elements(&shape), 8192);
    assert_int_equal(shape_elements(&with), 17 * 8192);
    assert_int_equal(with.dims[2], 17);
    assert_string_equal(shape_print(&shape, text, sizeof(text)), "[1, 8192, N, 1]");
    shape.batch = -1;
    assert_string_equal(shape_print(&shape, text, sizeof(text)), "[1, 8192, 1, 1]");
    assert_string_equal(shape_print(&shape, small, sizeof(small)), "[1, 819");
    assert_string_equal(shape_print(&none, text, sizeof(text)), "[]");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_value),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_shapes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
