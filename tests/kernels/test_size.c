/*
 * Sizes stop at the largest number.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/size.h"

#define MOST UINT64_MAX

static void check(uint64_t got, uint64_t want)
{
    if (got != want)
        fail_msg("%llu, not %llu", (unsigned long long)got, (unsigned long long)want);
}

static void test_sizes(void **state)
{
    const uint64_t bit = UINT64_C(1) << 63;

    (void)state;
    check(size_plus(2, 3), 5);
    check(size_plus(MOST - 1, 1), MOST);
    check(size_plus(MOST, 1), MOST);
    check(size_plus(bit, bit), MOST);
    check(size_times(6, 7), 42);
    check(size_times(0, MOST), 0);
    check(size_times(MOST, 1), MOST);
    check(size_times(bit, 2), MOST);
    check(size_times(UINT64_C(1) << 40, UINT64_C(1) << 24), MOST);
    check(size_round(0, 256), 0);
    check(size_round(1, 256), 256);
    check(size_round(256, 256), 256);
    check(size_round(MOST, 256), MOST - 255);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
