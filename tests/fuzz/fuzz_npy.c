/*
 * fuzz_npy.c - a header that is read prints as one that reads the same
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "client/npy.h"

static void check(int holds)
{
    if (!holds)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t bytes[NPY_PRINT_MAX];
    struct report report = {""};
    struct npy npy, again;
    int n;

    if (npy_parse(data, size, &npy, &report) != 0) {
        check(report.text[0] != 0);
        return 0;
    }
    check(npy.data_offset <= size && npy.rank >= 0 && npy.rank <= FUSED_RANK_MAX);
    n = npy_print(npy.dtype, npy.rank, npy.dims, bytes);
    check(n > 0 && n <= NPY_PRINT_MAX);
    check(npy_parse(bytes, (size_t)n, &again, &report) == 0);
    check(again.dtype == npy.dtype && again.rank == npy.rank && again.size == npy.size &&
          memcmp(again.dims, npy.dims, sizeof(npy.dims)) == 0);
    return 0;
}
