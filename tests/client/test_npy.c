/*
 * test_npy.c - the header of .npy files: what numpy.save() writes is read, all else is refused
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/npy.h"

/* A header of that version around a dict; the number of bytes. */
static size_t make(uint8_t *to, unsigned version, const char *dict)
{
    size_t n = strlen(dict), start = version == 1 ? 10 : 12;

    memcpy(to, "\x93NUMPY", 6);
    to[6] = (uint8_t)version;
    to[7] = 0;
    to[8] = (uint8_t)n;
    to[9] = (uint8_t)(n >> 8);
    if (version != 1)
        to[10] = to[11] = 0;
    memcpy(to + start, dict, n);
    return start + n;
}

/* Parses from memory of exactly n bytes, so that a read past the end is seen. */
static int parse(const uint8_t *bytes, size_t n, struct npy *ret, struct report *report)
{
    uint8_t *copy = malloc(n > 0 ? n : 1);
    int r;

    assert_non_null(copy);
    memcpy(copy, bytes, n);
    r = npy_parse(copy, n, ret, report);
    free(copy);
    return r;
}

#define DICT(descr, shape) \
    "{'descr': '" descr "', 'fortran_order': False, 'shape': " shape ", }      \n"

static void test_accepts(void **state)
{
    static const struct {
        unsigned version;
        const char *dict;
        enum fused_dtype dtype;
        int rank;
        int64_t dims[3];
        uint64_t size;
    } rows[] = {
        {1, DICT("<f4", "(3, 4)"), FUSED_FLOAT32, 2, {3, 4}, 48},
        {2, DICT("<f4", "(3, 4)"), FUSED_FLOAT32, 2, {3, 4}, 48},
        {3, DICT("<f4", "(3, 4)"), FUSED_FLOAT32, 2, {3, 4}, 48},
        {1, DICT("<f2", "(5,)"), FUSED_FLOAT16, 1, {5}, 10},
        {1, DICT("<V2", "(5,)"), FUSED_BFLOAT16, 1, {5}, 10},
        {1, DICT("|V2", "(5,)"), FUSED_BFLOAT16, 1, {5}, 10},
        {1, DICT("|u1", "(7,)"), FUSED_UINT8, 1, {7}, 7},
        {1, DICT("<f4", "()"), FUSED_FLOAT32, 0, {0}, 4},
        {1, DICT("<f4", "(0, 9)"), FUSED_FLOAT32, 2, {0, 9}, 0},
        {1, DICT("<f4", "(1099511627776, 1)"), FUSED_FLOAT32, 2, {1099511627776, 1}, 4398046511104},
        {1,
         "{\"shape\":(2,3,),\"fortran_order\":False,\"descr\":\"<f4\"}",
         FUSED_FLOAT32,
         2,
         {2, 3},
         24},
        {1,
         " { 'fortran_order' : False , 'descr' : '<f4' , 'shape' : ( 2 , 3 ) } \n",
         FUSED_FLOAT32,
         2,
         {2, 3},
         24},
    };
    uint8_t bytes[512];

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        size_t n = make(bytes, rows[i].version, rows[i].dict);
        struct report report = {""};
        struct npy npy;

        if (parse(bytes, n, &npy, &report) != 0)
            fail_msg("row %zu: %s", i, report.text);
        assert_int_equal(npy.dtype, rows[i].dtype);
        assert_int_equal(npy.rank, rows[i].rank);
        for (int j = 0; j < npy.rank; j++)
            assert_int_equal(npy.dims[j], rows[i].dims[j]);
        assert_int_equal(npy.size, rows[i].size);
        assert_int_equal(npy.data_offset, n);
    }
}

static void test_refuses(void **state)
{
    static const struct {
        const char *dict, *reason;
    } rows[] = {
        {DICT(">f4", "(3,)"), "big endian"},
        {DICT("<f8", "(3,)"), "'<f8' is not supported"},
        {DICT("<i4", "(3,)"), "'<i4' is not supported"},
        {DICT("<u2", "(3,)"), "'<u2' is not supported"},
        {DICT("|O", "(3,)"), "'|O' is not supported"},
        {DICT("", "(3,)"), "'' is not supported"},
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (3, 4), }\n", "Fortran order"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (3, 4), }\n", "neither True nor False"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,), }\n", "structured"},
        {"{'descr': 4, 'fortran_order': False, 'shape': (3,), }\n", "descr is not a string"},
        {"{'descr': '<\\x664', 'fortran_order': False, 'shape': (3,), }\n", "not a string"},
        {"{'descr': '<f4', 'shape': (3,), }\n", "fortran_order is missing"},
        {"{'fortran_order': False, 'shape': (3,), }\n", "descr is missing"},
        {"{'descr': '<f4', 'fortran_order': False}\n", "shape is missing"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", "twice"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'x': 1}", "unknown key 'x'"},
        {DICT("<f4", "[3]"), "shape is not a tuple"},
        {DICT("<f4", "3"), "shape is not a tuple"},
        {DICT("<f4", "(-3,)"), "no number"},
        {DICT("<f4", "(3.0,)"), "not a tuple of numbers"},
        {DICT("<f4", "(3 4)"), "not a tuple of numbers"},
        {DICT("<f4", "(,)"), "no number"},
        {DICT("<f4", "(3, 'x')"), "no number"},
        {DICT("<f4", "(3L,)"), "not a tuple of numbers"},
        {DICT("<f4", "(1099511627777,)"), "too large"},
        {DICT("<f4", "(99999999999999999999999,)"), "too large"},
        {DICT("<f4", "(1099511627776, 2)"), "too many elements"},
        {DICT("<f4", "(1099511627776, 1099511627776)"), "too many elements"},
        {DICT("<f4", "(1048576, 1048576, 1048576, 1048576)"), "too many elements"},
        {DICT("<f4", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"), "more than 8 dimensions"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), } x\n", "text after"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,", "no number"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (3,)}", "not a dict"},
        {"{'descr'", "not a dict"},
        {"{'descr", "not a dict"},
        {"{", "not a dict"},
        {"", "not a dict"},
        {"[]", "not a dict"},
        {"\n", "not a dict"},
    };
    uint8_t bytes[512];

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        size_t n = make(bytes, 1, rows[i].dict);
        struct report report = {""};
        struct npy npy = {.rank = -7};
        int r = parse(bytes, n, &npy, &report);

        if (r != -22 || strstr(report.text, rows[i].reason) == NULL)
            fail_msg("%s: %d '%s', not '%s'", rows[i].dict, r, report.text, rows[i].reason);
        assert_int_equal(npy.rank, -7);
    }
}

static void test_framing(void **state)
{
    uint8_t good[512], bytes[512];
    struct report report = {""};
    struct npy npy;
    size_t n = make(good, 1, DICT("<f4", "(3,)"));

    (void)state;
    /* Cut anywhere it is refused. */
    for (size_t cut = 0; cut < n; cut++)
        if (parse(good, cut, &npy, &report) != -22)
            fail_msg("cut at %zu of %zu was accepted", cut, n);
    memcpy(bytes, good, n);
    bytes[0] = 0x92;
    assert_int_equal(parse(bytes, n, &npy, &report), -22);
    assert_non_null(strstr(report.text, "not a .npy"));
    for (unsigned version = 0; version < 256; version++) {
        memcpy(bytes, good, n);
        bytes[6] = (uint8_t)version;
        if (version < 1 || version > 3) {
            assert_int_equal(parse(bytes, n, &npy, &report), -22);
            assert_non_null(strstr(report.text, "is not known"));
        }
    }
    memcpy(bytes, good, n);
    bytes[7] = 1;
    assert_int_equal(parse(bytes, n, &npy, &report), -22);
    /* A length of 4 GiB. */
    n = make(bytes, 2, DICT("<f4", "(3,)"));
    memset(bytes + 8, 0xff, 4);
    assert_int_equal(parse(bytes, n, &npy, &report), -22);
    assert_non_null(strstr(report.text, "too long"));
}

static void test_prints(void **state)
{
    static const enum fused_dtype dtypes[] = {FUSED_FLOAT32, FUSED_FLOAT16, FUSED_BFLOAT16,
                                              FUSED_UINT8};
    int64_t dims[FUSED_RANK_MAX];
    uint8_t bytes[NPY_PRINT_MAX];

    (void)state;
    for (int rank = 0; rank <= FUSED_RANK_MAX; rank++) {
        for (size_t d = 0; d < 4; d++) {
            struct report report = {""};
            struct npy npy;
            int n;

            for (int i = 0; i < rank; i++)
                dims[i] = i + 2;
            n = npy_print(dtypes[d], rank, dims, bytes);
            assert_true(n > 0);
            assert_int_equal(n % 64, 0);
            assert_int_equal(bytes[n - 1], '\n');
            if (parse(bytes, (size_t)n, &npy, &report) != 0)
                fail_msg("%.*s: %s", n - 10, (const char *)bytes + 10, report.text);
            assert_int_equal(npy.data_offset, n);
            assert_int_equal(npy.dtype, dtypes[d]);
            assert_int_equal(npy.rank, rank);
            assert_memory_equal(npy.dims, dims, (size_t)rank * sizeof(*dims));
        }
    }
    assert_true(npy_print((enum fused_dtype)9, 1, dims, bytes) < 0);
    assert_true(npy_print(FUSED_FLOAT32, 9, dims, bytes) < 0);
    assert_true(npy_print(FUSED_FLOAT32, -1, dims, bytes) < 0);
}

/* The bytes of numpy.save(f, numpy.zeros((2, 3), 'float32')) as NumPy 1.26 writes them. */
static void test_as_numpy(void **state)
{
    static const char expected[] = "\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, "
                                   "'shape': (2, 3), }";
    const int64_t dims[] = {2, 3};
    uint8_t bytes[NPY_PRINT_MAX];
    int n = npy_print(FUSED_FLOAT32, 2, dims, bytes);

    (void)state;
    assert_int_equal(n, 128);
    assert_memory_equal(bytes, expected, sizeof(expected) - 1);
    for (int i = (int)sizeof(expected) - 1; i < 127; i++)
        assert_int_equal(bytes[i], ' ');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepts),  cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_framing),  cmocka_unit_test(test_prints),
        cmocka_unit_test(test_as_numpy),
    };

    return cmocka_run_group_tests_name("npy", tests, NULL, NULL);
}
