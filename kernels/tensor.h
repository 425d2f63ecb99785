/*
 * tensor.h - dtypes and shapes
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TENSOR_RANK_MAX     8
#define TENSOR_ELEMENTS_MAX (INT64_C(1) << 40)

enum dtype {
    DTYPE_FLOAT32 = 1,
    DTYPE_FLOAT16 = 2,
    DTYPE_BFLOAT16 = 3
}; /* numbers as on the wire */

/*
 * The shape of what flows between stages, for a request of N rows. dims[batch] is 1 here, so that
 * elements(shape) is the count for one row; with N rows that dimension is N. batch is 0 until an
 * `add` moves it.
 */
struct shape {
    int8_t rank;
    int8_t batch;
    int64_t dims[TENSOR_RANK_MAX];
};

size_t dtype_size(enum dtype dtype);
const char *dtype_name(enum dtype dtype);
/* 0 when there is no such dtype. */
enum dtype dtype_parse(const char *name);

/* Elements of one row. Shapes are only made through functions that keep this within
 * TENSOR_ELEMENTS_MAX. */
int64_t shape_elements(const struct shape *shape);
/* The shape with N rows in it. */
struct shape shape_rows(const struct shape *shape, int64_t rows);
/* "[N, 3, 16, 64, 64]" into text; the batch dimension prints as N. */
const char *shape_print(const struct shape *shape, char *text, size_t size);

/* One number, exactly (to float32) and rounded to nearest even (from float32). NaN stays NaN. */
float float16_to_float(uint16_t h);
uint16_t float16_from_float(float f);
float bfloat16_to_float(uint16_t h);
uint16_t bfloat16_from_float(float f);
/* n numbers of `dtype` to float32 and back. */
void tensor_to_float(enum dtype dtype, const void *from, float *to, size_t n);
void tensor_from_float(enum dtype dtype, const float *from, void *to, size_t n);
