/*
 * proof.c - what is known of a pipeline's result before anything is computed
 *
 * minimum(x, a) and then clamp(a, b) gives one number for every x that is not NaN. A chain
 * (conv3d | linear) -> group_norm -> minimum/clamp... -> dropout... is therefore that number, times
 * the dropout mask, for every sample whose normalised values hold no NaN. They hold none when
 * nothing on the way there overflows, and that is certain for inputs below a bound that the weights
 * give:
 *
 *     Y = X max_c(sum |w_c|) + |bias|max              the largest sum that a product can reach
 *     Y max(1, |gamma|max / sqrt(eps)) + |beta|max < 2^125      normalising cannot overflow
 *     Y times the elements of a group < 2^125                   nor can the group's sum
 *
 * The largest such X is the bound. Three powers of two below float32's end leave room for every
 * rounding. A variance that overflows is no NaN: its group gives beta.
 *
 * Inputs of 2^127 and more, and weights that large, are left out: a backend may split or shorten
 * a float32 before it multiplies, and such a part may round to infinity.
 *
 * The number is tracked as an interval in the order in which -0 lies below +0, the order of every
 * minimum and maximum here (kernels/README.md), and counts as known only when both ends have the
 * same bits.
 */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proof.h"

#define CHUNK 65536

/* What the weights say. */
struct sizes {
    double sum;  /* max over outputs of the sum of |w| */
    double w;    /* |w|max */
    double bias; /* |bias|max */
    double gamma, beta;
};

static bool below(float a, float b)
{
    return a < b || (a == b && signbit(a) && !signbit(b));
}

static float lesser(float a, float b)
{
    return below(b, a) ? b : a;
}

static float greater(float a, float b)
{
    return below(a, b) ? b : a;
}

static bool same_bits(float a, float b)
{
    uint32_t a_bits, b_bits;

    memcpy(&a_bits, &a, sizeof(a));
    memcpy(&b_bits, &b, sizeof(b));
    return a_bits == b_bits;
}

/* The values that a run of minimum and clamp leaves, and where it ends. */
static int tail_interval(const struct pipeline *pipeline, int i, float *ret_low, float *ret_high)
{
    float low = -INFINITY, high = INFINITY;

    for (; i < pipeline->n_stages; i++) {
        const struct stage *stage = &pipeline->stages[i];

        if (stage->op == OP_MINIMUM) {
            low = lesser(low, (float)stage->minimum.value);
            high = lesser(high, (float)stage->minimum.value);
        } else if (stage->op == OP_CLAMP) {
            if (stage->clamp.has_min) {
                low = greater(low, (float)stage->clamp.min);
                high = greater(high, (float)stage->clamp.min);
            }
            if (stage->clamp.has_max) {
                low = lesser(low, (float)stage->clamp.max);
                high = lesser(high, (float)stage->clamp.max);
            }
        } else {
            break;
        }
    }
    *ret_low = low;
    *ret_high = high;
    return i;
}

/* Largest magnitude, and largest sum of magnitudes over consecutive runs of `run`; both infinite
 * when any element is not finite. */
static int measure(const struct pipeline *pipeline, const struct param *param, int64_t run,
                   double *ret_max, double *ret_sum, struct report *report)
{
    double max = 0, sum = 0, sum_max = 0;
    int64_t in_run = 0;
    float *values;
    int r = 0;

    values = malloc(CHUNK * sizeof(*values));
    if (!values)
        return report_set(report, -ENOMEM, "out of memory");
    for (int64_t first = 0; first < param->elements; first += CHUNK) {
        int64_t n = param->elements - first < CHUNK ? param->elements - first : CHUNK;

        r = pipeline_param(pipeline, param, first, n, values, report);
        if (r < 0)
            goto out;
        for (int64_t i = 0; i < n; i++) {
            double a = isfinite(values[i]) ? fabs((double)values[i]) : INFINITY;

            sum += a;
            max = a > max ? a : max;
            if (++in_run == run) {
                sum_max = sum > sum_max ? sum : sum_max;
                sum = in_run = 0;
            }
        }
    }
    *ret_max = max;
    *ret_sum = sum_max;

out:
    free(values);
    return r;
}

static int measure_weights(const struct pipeline *pipeline, struct sizes *ret,
                           struct report *report)
{
    const struct stage *product = &pipeline->stages[0], *norm = &pipeline->stages[1];
    struct sizes sizes = {.gamma = 1};
    int64_t outputs =
        product->op == OP_LINEAR ? product->linear.out_features : product->conv3d.out_channels;
    double unused;
    int r;

    r = measure(pipeline, &product->weight, product->weight.elements / outputs, &sizes.w,
                &sizes.sum, report);
    if (r == 0 && product->bias.tensor)
        r = measure(pipeline, &product->bias, 1, &sizes.bias, &unused, report);
    if (r == 0 && norm->weight.tensor)
        r = measure(pipeline, &norm->weight, 1, &sizes.gamma, &unused, report);
    if (r == 0 && norm->bias.tensor)
        r = measure(pipeline, &norm->bias, 1, &sizes.beta, &unused, report);
    if (r == 0)
        *ret = sizes;
    return r;
}

/* The exclusive bound, 0 when there is none. */
static float input_bound(const struct stage *norm, const struct sizes *sizes)
{
    /* Backends may take eps as float32: the smaller one counts. */
    double eps = fmin(norm->group_norm.eps, (double)(float)norm->group_norm.eps);
    int64_t channels = norm->group_norm.channels / norm->group_norm.groups;
    double group = (double)channels * (double)norm->group_norm.spatial;
    double scale = fmax(1, sizes->gamma / sqrt(eps));
    double y = fmin((0x1p125 - sizes->beta) / scale, 0x1p125 / group);
    double x = (y - sizes->bias) / sizes->sum; /* no weights but zero: any finite x */
    float bound;

    if (!(x > 0))
        return 0;
    if (x >= 0x1p127)
        return 0x1p127f;
    bound = (float)x;
    return (double)bound > x ? nextafterf(bound, 0) : bound;
}

/* Does one NaN or infinity in a sample reach every group? */
static bool spreads(const struct pipeline *pipeline)
{
    const struct stage *product = &pipeline->stages[0];

    /* A linear's outputs of one row of features lie in one channel unless they are the channels. */
    if (product->op == OP_LINEAR)
        return product->in.rank == 2 || pipeline->stages[1].group_norm.groups == 1;
    for (int i = 0; i < 3; i++)
        if (product->conv3d.stride[i] != 1 || product->conv3d.padding[i] != 0)
            return false;
    return true;
}

/* Why the chain's form has no proof; NULL when it has. */
static const char *form(const struct pipeline *pipeline, float *ret_value, int *ret_n_stages)
{
    const struct stage *stages = pipeline->stages;
    float low, high;
    int end, i;

    if (pipeline->n_stages < 3 || (stages[0].op != OP_LINEAR && stages[0].op != OP_CONV3D) ||
        stages[1].op != OP_GROUP_NORM)
        return "it does not begin with linear or conv3d, then group_norm";
    end = tail_interval(pipeline, 2, &low, &high);
    for (i = end; i < pipeline->n_stages && stages[i].op == OP_DROPOUT; i++)
        ;
    if (i < pipeline->n_stages)
        return "group_norm is not followed by minimum, clamp and a last dropout alone";
    if (!same_bits(low, high))
        return "minimum and clamp leave more than one number";
    *ret_value = low;
    *ret_n_stages = end;
    return NULL;
}

/* Why these weights allow none; NULL when they do. */
static const char *weights_doubt(const struct stage *norm, const struct sizes *sizes)
{
    float eps = (float)norm->group_norm.eps;

    if (!(eps > 0))
        return "eps is zero";
    if (!isfinite(sizes->w) || !isfinite(sizes->bias) || !isfinite(sizes->gamma) ||
        !isfinite(sizes->beta))
        return "a weight is NaN or infinite";
    if (sizes->w >= 0x1p127)
        return "a weight is too large";
    return NULL;
}

int proof_make(struct pipeline *pipeline, bool prove, struct report *report)
{
    struct proof *proof = &pipeline->proof;
    const char *doubt;
    struct sizes sizes = {.gamma = 1};
    int r;

    *proof = (struct proof){.constant = false};
    doubt =
        prove ? form(pipeline, &proof->value, &proof->n_stages) : "switched off (prove = false)";
    if (!doubt) {
        r = measure_weights(pipeline, &sizes, report);
        if (r < 0)
            return r;
        doubt = weights_doubt(&pipeline->stages[1], &sizes);
    }
    if (!doubt) {
        proof->bound = input_bound(&pipeline->stages[1], &sizes);
        if (proof->bound == 0)
            doubt = "the weights leave no room below overflow";
    }
    if (doubt) {
        *proof = (struct proof){.constant = false};
        snprintf(proof->text, sizeof(proof->text), "not known before computing: %s", doubt);
        return 0;
    }
    proof->constant = true;
    proof->nonfinite_spreads = spreads(pipeline);
    snprintf(proof->text, sizeof(proof->text),
             "constant: minimum and clamp leave %g of everything but NaN, and a sample with every "
             "|x| < %g has no NaN before them, so that it is not computed. %s",
             (double)proof->value, (double)proof->bound,
             proof->nonfinite_spreads
                 ? "A sample with NaN or infinity is NaN throughout. Others take the full path."
                 : "Others take the full path.");
    return 0;
}
