/*
 * reference.c - every stage in plain C: the oracle of every backend
 *
 * What a stage computes is stated here once, in the shortest loops that say it. Inputs, parameters
 * and sums are double; unless a run is `wide`, each stage's result is rounded to float32, and where
 * PyTorch's float32 overflows on the way to a finite result, so does this: a group whose sum of
 * squared deviations exceeds float32 has rstd 0 and gives beta.
 *
 * NaN: a group with a NaN or an infinity is NaN throughout; amin, minimum and clamp pass NaN on;
 * clamp with max below min gives max. Zeros: -0 lies below +0, as the GPU's min and max have it.
 */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "dropout.h"
#include "reference.h"

#define MASK 1024 /* elements whose mask is made at once */

/* A parameter as float32, or NULL when the stage has none. Not to be had once weights are dropped.
 */
static int load(const struct pipeline *pipeline, const struct param *param, float **ret,
                struct report *report)
{
    float *values;
    int r;

    *ret = NULL;
    if (param->elements == 0)
        return 0;
    if (!param->tensor)
        return report_set(report, -EINVAL, "the weights were dropped");
    values = malloc((size_t)param->elements * sizeof(*values));
    if (!values)
        return report_set(report, -ENOMEM, "out of memory");
    r = pipeline_param(pipeline, param, 0, param->elements, values, report);
    if (r < 0) {
        free(values);
        return r;
    }
    *ret = values;
    return 0;
}

static double smaller(double a, double b)
{
    if (isnan(a) || isnan(b))
        return NAN;
    return b < a || (a == b && signbit(b)) ? b : a;
}

static double larger(double a, double b)
{
    if (isnan(a) || isnan(b))
        return NAN;
    return b > a || (a == b && signbit(a)) ? b : a;
}

static void linear(const struct stage *stage, int64_t rows, const float *weight, const float *bias,
                   const double *x, double *y)
{
    int64_t in = stage->linear.in_features, out = stage->linear.out_features;

    for (int64_t m = 0; m < rows * stage->linear.rows; m++)
        for (int64_t n = 0; n < out; n++) {
            double sum = bias ? bias[n] : 0;

            for (int64_t k = 0; k < in; k++)
                sum += x[m * in + k] * weight[n * in + k];
            y[m * out + n] = sum;
        }
}

/* One output element: the window that begins at (d, h, w), which padding may put outside. */
static double window(const struct stage *stage, const float *weight, const double *x, int64_t d,
                     int64_t h, int64_t w)
{
    const int64_t *size = stage->in.dims + 2, *kernel = stage->conv3d.kernel;
    double sum = 0;

    for (int64_t c = 0; c < stage->conv3d.in_channels; c++)
        for (int64_t i = 0; i < kernel[0]; i++)
            for (int64_t j = 0; j < kernel[1]; j++)
                for (int64_t k = 0; k < kernel[2]; k++, weight++)
                    if (d + i >= 0 && d + i < size[0] && h + j >= 0 && h + j < size[1] &&
                        w + k >= 0 && w + k < size[2])
                        sum += x[((c * size[0] + d + i) * size[1] + h + j) * size[2] + w + k] *
                               *weight;
    return sum;
}

static void conv3d(const struct stage *stage, int64_t rows, const float *weight, const float *bias,
                   const double *x, double *y)
{
    const int64_t *out = stage->out.dims + 2, *stride = stage->conv3d.stride;
    const int64_t *padding = stage->conv3d.padding, *kernel = stage->conv3d.kernel;
    int64_t in_row = shape_elements(&stage->in);
    int64_t filter = stage->conv3d.in_channels * kernel[0] * kernel[1] * kernel[2];

    for (int64_t n = 0; n < rows; n++)
        for (int64_t c = 0; c < stage->conv3d.out_channels; c++)
            for (int64_t d = 0; d < out[0]; d++)
                for (int64_t h = 0; h < out[1]; h++)
                    for (int64_t w = 0; w < out[2]; w++)
                        *y++ = (bias ? bias[c] : 0) +
                               window(stage, weight + c * filter, x + n * in_row,
                                      d * stride[0] - padding[0], h * stride[1] - padding[1],
                                      w * stride[2] - padding[2]);
}

static void group_norm(const struct stage *stage, int64_t rows, const float *gamma,
                       const float *beta, const double *x, double *y, bool wide)
{
    int64_t groups = stage->group_norm.groups, spatial = stage->group_norm.spatial;
    int64_t channels = stage->group_norm.channels / groups, n = channels * spatial;
    double eps = wide ? stage->group_norm.eps : (double)(float)stage->group_norm.eps;

    for (int64_t g = 0; g < rows * groups; g++, x += n, y += n) {
        double mean = 0, squares = 0, rstd;

        for (int64_t i = 0; i < n; i++)
            mean += x[i];
        mean /= (double)n;
        for (int64_t i = 0; i < n; i++)
            squares += (x[i] - mean) * (x[i] - mean);
        rstd = 1 / sqrt(squares / (double)n + eps);
        if (!wide && isinf((float)squares))
            rstd = 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t c = g % groups * channels + i / spatial;

            y[i] = (x[i] - mean) * rstd * (gamma ? gamma[c] : 1) + (beta ? beta[c] : 0);
        }
    }
}

static void amin(const struct stage *stage, int64_t rows, const double *x, double *y)
{
    int64_t n = stage->amin.n, inner = stage->amin.inner;

    for (int64_t o = 0; o < rows * stage->amin.outer; o++)
        for (int64_t i = 0; i < inner; i++) {
            double least = INFINITY;

            for (int64_t k = 0; k < n; k++)
                least = smaller(least, x[(o * n + k) * inner + i]);
            y[o * inner + i] = least;
        }
}

static void minimum(const struct stage *stage, int64_t n, const double *x, double *y)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = smaller(x[i], (double)(float)stage->minimum.value);
}

static void clamp(const struct stage *stage, int64_t n, const double *x, double *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i];
        if (stage->clamp.has_min)
            y[i] = larger(y[i], (double)(float)stage->clamp.min);
        if (stage->clamp.has_max)
            y[i] = smaller(y[i], (double)(float)stage->clamp.max);
    }
}

/* Walks the result's indices from the last dimension; both operands stand still where they have
 * size 1. */
static void add(const struct stage *stage, int64_t rows, const float *tensor, const double *x,
                double *y)
{
    struct shape out = shape_rows(&stage->out, rows), in = shape_rows(&stage->in, rows);
    int shift = out.rank - in.rank;
    int64_t n = shape_elements(&out);

    assert(tensor);
    for (int64_t i = 0; i < n; i++) {
        int64_t left = i, at_x = 0, at_t = 0, step_x = 1, step_t = 1;

        for (int d = out.rank - 1; d >= 0; d--) {
            int64_t index = left % out.dims[d];
            int64_t in_size = d < shift ? 1 : in.dims[d - shift];
            int64_t tensor_size = stage->add.tensor.dims[d];

            left /= out.dims[d];
            at_x += in_size == 1 ? 0 : index * step_x;
            at_t += tensor_size == 1 ? 0 : index * step_t;
            step_x *= in_size;
            step_t *= tensor_size;
        }
        y[i] = x[at_x] + tensor[at_t];
    }
}

static void dropout(const struct stage *stage, int64_t n, const struct reference_run *run,
                    uint64_t *offset, const double *x, double *y)
{
    struct dropout mask;

    dropout_init(&mask, stage->dropout.p, n, run->seed, *offset, DROPOUT_SMS,
                 DROPOUT_THREADS_PER_SM);
    for (int64_t i = 0; i < n; i += MASK) {
        int64_t count = n - i < MASK ? n - i : MASK;
        float factors[MASK];

        for (int k = 0; k < MASK; k++)
            factors[k] = 1;
        if (run->train)
            dropout_apply(&mask, i, count, factors);
        for (int64_t k = 0; k < count; k++)
            y[i + k] = x[i + k] * factors[k];
    }
    if (run->train)
        *offset += dropout_advance(stage->dropout.p, n, DROPOUT_SMS, DROPOUT_THREADS_PER_SM);
}

int reference_stage(const struct pipeline *pipeline, int i, const struct reference_run *run,
                    uint64_t *offset, const double *x, double *y, bool wide, struct report *report)
{
    const struct stage *stage = &pipeline->stages[i];
    int64_t n = run->rows * shape_elements(&stage->out);
    float *weight = NULL, *bias = NULL;
    int r;

    r = load(pipeline, &stage->weight, &weight, report);
    if (r == 0)
        r = load(pipeline, &stage->bias, &bias, report);
    if (r < 0)
        goto out;
    switch (stage->op) {
    case OP_LINEAR:
        linear(stage, run->rows, weight, bias, x, y);
        break;
    case OP_CONV3D:
        conv3d(stage, run->rows, weight, bias, x, y);
        break;
    case OP_GROUP_NORM:
        group_norm(stage, run->rows, weight, bias, x, y, wide);
        break;
    case OP_AMIN:
        amin(stage, run->rows, x, y);
        break;
    case OP_MINIMUM:
        minimum(stage, n, x, y);
        break;
    case OP_CLAMP:
        clamp(stage, n, x, y);
        break;
    case OP_ADD:
        add(stage, run->rows, weight, x, y);
        break;
    case OP_DROPOUT:
        dropout(stage, n, run, offset, x, y);
        break;
    case OP_COUNT:
        break;
    }
    for (int64_t k = 0; k < n && !wide; k++)
        y[k] = (double)(float)y[k];

out:
    free(weight);
    free(bias);
    return r;
}

int reference_run(const struct pipeline *pipeline, int n_stages, const struct reference_run *run,
                  const float *x, double *y, bool wide, struct report *report)
{
    int64_t n = run->rows * shape_elements(&pipeline->in);
    uint64_t offset = run->offset;
    double *from, *to;
    int r = 0;

    from = calloc((size_t)n, sizeof(*from));
    if (!from)
        return report_set(report, -ENOMEM, "out of memory");
    for (int64_t i = 0; i < n; i++)
        from[i] = x[i];
    for (int i = 0; i < n_stages; i++) {
        n = run->rows * shape_elements(&pipeline->stages[i].out);
        to = calloc((size_t)n, sizeof(*to));
        if (!to) {
            r = report_set(report, -ENOMEM, "out of memory");
            goto out;
        }
        r = reference_stage(pipeline, i, run, &offset, from, to, wide, report);
        free(from);
        from = to;
        if (r < 0)
            goto out;
    }
    for (int64_t i = 0; i < n; i++)
        y[i] = from[i];

out:
    free(from);
    return r;
}
