/*
 * npy.h - headers of NumPy's .npy files
 *
 * The format: the six bytes "\x93NUMPY", two version bytes, the header's length (two bytes in
 * version 1, four in 2 and 3, little endian), a Python dict with descr, fortran_order and shape,
 * spaces, a newline, then the data (https://numpy.org/doc/stable/reference/generated/
 * numpy.lib.format.html). NumPy has no bfloat16: an array of it is stored as two-byte void, '<V2',
 * which is what numpy.save() makes of the ml_dtypes package's bfloat16, and read back with
 * x.view(ml_dtypes.bfloat16).
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "client/fused.h"
#include "kernels/report.h"

#define NPY_HEADER_MAX 4096 /* bytes before the data; 8 dimensions need less than 300 */

struct npy {
    enum fused_dtype dtype;
    int rank;
    int64_t dims[FUSED_RANK_MAX];
    uint64_t size;        /* bytes of data */
    uint64_t data_offset; /* where they start in the file */
};

/* Reads the header at the start of a file of which `bytes` are the first n (NPY_HEADER_MAX are
 * enough). 0, or -EINVAL with the reason. */
int npy_parse(const uint8_t *bytes, size_t n, struct npy *ret, struct report *report);

/* Writes the header of a C-contiguous array into `to`; the number of bytes, a multiple of 64, or
 * -EINVAL for a rank or dtype that has none. */
#define NPY_PRINT_MAX 512
int npy_print(enum fused_dtype dtype, int rank, const int64_t *dims, uint8_t to[NPY_PRINT_MAX]);
