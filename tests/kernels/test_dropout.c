/*
 * The dropout mask: against the digests of masks that PyTorch drew, against a mask computed one
 * element at a time by the rule as it is written down, and what multiplying means.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>
#include <jansson.h>

#include "kernels/dropout.h"
#include "sha256.h"

#define GOLDEN "tests/golden/dropout_masks.json"
#define CHUNK  1000003 /* no multiple of anything */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW true
#else
#define SLOW false
#endif

static void test_sha256(void **state)
{
    struct sha256 sha;
    char hex[65];

    (void)state;
    sha256_init(&sha);
    sha256_add(&sha, (const uint8_t *)"abc", 3);
    sha256_end(&sha, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

static void check_mask(const json_t *mask)
{
    int64_t n = json_integer_value(json_object_get(mask, "n")), kept = 0;
    uint64_t seed = (uint64_t)json_integer_value(json_object_get(mask, "seed"));
    uint64_t offset = (uint64_t)json_integer_value(json_object_get(mask, "offset"));
    double p = json_number_value(json_object_get(mask, "p"));
    float *x = malloc(CHUNK * sizeof(*x));
    uint8_t *keep = malloc(CHUNK);
    struct dropout dropout;
    struct sha256 sha;
    char hex[65];

    assert_non_null(x);
    assert_non_null(keep);
    dropout_init(&dropout, p, n, seed, offset, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
    sha256_init(&sha);
    for (int64_t first = 0; first < n; first += CHUNK) {
        int64_t count = n - first < CHUNK ? n - first : CHUNK;

        for (int64_t i = 0; i < count; i++)
            x[i] = 1;
        dropout_apply(&dropout, first, count, x);
        for (int64_t i = 0; i < count; i++) {
            keep[i] = x[i] != 0;
            kept += keep[i];
        }
        sha256_add(&sha, keep, (size_t)count);
    }
    sha256_end(&sha, hex);
    free(x);
    free(keep);
    assert_int_equal(kept, json_integer_value(json_object_get(mask, "kept")));
    assert_string_equal(hex, json_string_value(json_object_get(mask, "sha256")));
    assert_int_equal(offset + dropout_advance(p, n, DROPOUT_SMS, DROPOUT_THREADS_PER_SM),
                     json_integer_value(json_object_get(mask, "offset_after")));
}

/* All masks up to five million elements, and one of the largest; fewer when instrumented. */
static void test_golden(void **state)
{
    json_t *root = json_load_file(GOLDEN, 0, NULL), *mask;
    int large = 0, checked = 0;
    size_t i;

    (void)state;
    assert_non_null(root);
    json_array_foreach(json_object_get(root, "masks"), i, mask)
    {
        if (json_integer_value(json_object_get(mask, "n")) > 5000000 && (SLOW || large++ > 0))
            continue;
        if (SLOW && i % 3) /* one p of each size */
            continue;
        check_mask(mask);
        checked++;
    }
    json_decref(root);
    assert_int_equal(checked, SLOW ? 10 : 31);
}

/* The rule, one element at a time. */
static bool keeps(const struct dropout *d, int64_t e)
{
    uint32_t key0 = (uint32_t)d->seed, key1 = (uint32_t)(d->seed >> 32), w[4];
    int64_t turn, thread, word;
    uint64_t c;

    if (d->n % 4 == 0) {
        word = e % 4, thread = e / 4 % d->threads, turn = e / 4 / d->threads;
    } else if (d->n % 2 == 0) {
        word = e % 2, thread = e / 2 % d->threads, turn = e / 2 / d->threads;
    } else {
        turn = e / (4 * d->threads);
        word = e % (4 * d->threads) / d->threads;
        thread = e % d->threads;
    }
    c = d->counter + (uint64_t)turn;
    w[0] = (uint32_t)c, w[1] = (uint32_t)(c >> 32), w[2] = (uint32_t)thread, w[3] = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * w[0], b = (uint64_t)0xCD9E8D57 * w[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ w[1] ^ key0, (uint32_t)b,
                            (uint32_t)(a >> 32) ^ w[3] ^ key1, (uint32_t)a};

        memcpy(w, next, sizeof(w));
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return (float)w[word] * 0x1p-32f + 0x1p-33f < d->keep_below;
}

static void test_rule(void **state)
{
    static const int64_t sizes[] = {1,    2,    3,    4,     5,     6,     7,
                                    8,    255,  256,  257,   1023,  1024,  1026,
                                    4097, 9998, 9999, 10000, 30001, 30002, 30004};
    static const double ps[] = {0.2, 0.5, 0.35, 1e-9, 1 - 1e-9, 0.9999};
    static float x[30004];
    unsigned seed = 20;

    (void)state;
    print_message("seed %u\n", seed);
    srand(seed);
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (size_t k = 0; k < sizeof(ps) / sizeof(ps[0]); k++) {
            int64_t n = sizes[s], first = 0;
            struct dropout d;

            /* 512 threads and 270336: several turns, or one. */
            dropout_init(&d, ps[k], n, 0x123456789abcdefULL + s, 4 * (0xfffffffeULL + k),
                         k % 2 ? 1 : DROPOUT_SMS, k % 2 ? 512 : DROPOUT_THREADS_PER_SM);
            while (first < n) {
                int64_t count = 1 + rand() % 700;

                count = count < n - first ? count : n - first;
                for (int64_t i = 0; i < count; i++)
                    x[first + i] = 3;
                dropout_apply(&d, first, count, x + first);
                first += count;
            }
            for (int64_t i = 0; i < n; i++) {
                float want = 3 * (keeps(&d, i) ? 1.0f : 0.0f) * d.scale;

                if (x[i] != want)
                    fail_msg("n %ld p %g element %ld: %g, not %g", (long)n, ps[k], (long)i,
                             (double)x[i], (double)want);
            }
        }
}

static void test_multiplies(void **state)
{
    float x[] = {NAN, INFINITY, -INFINITY, -1, -0.0f, 2, 0x1p-149f, 5}, y[8];
    struct dropout d;

    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        dropout_init(&d, 0.5, 8, seed, 0, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
        memcpy(y, x, sizeof(y));
        dropout_apply(&d, 0, 8, y);
        for (int i = 0; i < 8; i++) {
            float want = x[i] * (keeps(&d, i) ? 1.0f : 0.0f) * d.scale;

            if (isnan(want))
                assert_true(isnan(y[i]));
            else
                assert_memory_equal(&y[i], &want, sizeof(want));
        }
    }
}

static void test_ends(void **state)
{
    float x[] = {NAN, INFINITY, -1, 2}, y[4];
    struct dropout d;

    (void)state;
    memcpy(y, x, sizeof(y));
    dropout_init(&d, 0, 4, 1, 0, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
    dropout_apply(&d, 0, 4, y);
    assert_memory_equal(x, y, sizeof(y));
    dropout_init(&d, 1, 4, 1, 0, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
    dropout_apply(&d, 0, 4, y);
    assert_true(isnan(y[0]));
    assert_true(isnan(y[1]));
    assert_true(y[2] == 0 && signbit(y[2]));
    assert_true(y[3] == 0 && !signbit(y[3]));
    assert_int_equal(dropout_advance(0, 4, 132, 2048), 0);
    assert_int_equal(dropout_advance(1, 4, 132, 2048), 0);
    assert_int_equal(dropout_advance(0.5, 1, 132, 2048), 4);
    assert_int_equal(dropout_advance(0.5, 4 * 270336, 132, 2048), 4);
    assert_int_equal(dropout_advance(0.5, 4 * 270336 + 1, 132, 2048), 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256), cmocka_unit_test(test_golden),
        cmocka_unit_test(test_rule),   cmocka_unit_test(test_multiplies),
        cmocka_unit_test(test_ends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
