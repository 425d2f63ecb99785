/*
 * gemm.cu - products by cuBLASLt, the only file that includes it
 *
 * Why three fp16 products: the tensor cores multiply fp16 exactly and add in float32. A row scaled
 * by a power of two so that its largest number lies in [2^14, 2^15) is, to 22 bits, the sum of two
 * fp16 numbers; high x high + high x low + low x high then leaves out only what float32 would round
 * away too. Scales are exact and are undone on the float32 sum.
 *
 * What costs accuracy is the tensor core's truncating sum over a long K. So high x high runs in
 * parts of at most PART of K, each an own product whose float32 result is added to what is there;
 * the two small products need no such care and run first, as one: a row of weights is [high | low]
 * and a row of x is [low | high], so that one product over 2 K is high x low + low x high.
 *
 * Same bits in every batch: one algorithm is chosen when the model is loaded, without split-K, and
 * rows are padded to ROWS; a row's sum never sees another row.
 *
 * Weights that a group_norm follows are centred: the mean over the group's channels is taken from
 * each column, which the norm would take from the result anyway. Sums then stay near zero, however
 * large the mean.
 *
 * NaN and infinity: before a group_norm any of them makes its group NaN, and the halves give that,
 * since the low half of an infinity is NaN. Elsewhere gemm_finish() forms those sums again from the
 * numbers that are not finite alone, since nothing else can change them.
 */
#include <cublasLt.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/gemm.h"
#include "kernels/size.h"

#define THREADS   256
#define WARPS     (THREADS / WARP)
#define ROWS      64   /* rows are padded to a multiple */
#define PART      2048 /* of K: one float32 sum on the tensor cores */
#define ALIGN     64   /* of K and of parts */
#define WORKSPACE (32u << 20)
#define CHOICES   16
#define INFINITE  0x7f800000u
#define UNSIGNED  0x7fffffffu

struct product { /* one cuBLASLt call */
    int64_t k;
    cublasLtMatmulAlgo_t algo;
};

struct gemm {
    struct gemm_shape shape;
    struct gemm_library *library;
    int64_t width; /* elements of a row of weights, and of x's operand: K, or both halves */
    int64_t k;     /* padded */
    int64_t m;     /* out, padded */
    int64_t parts;
    struct product cross, part;
    cudaDataType_t type;
    cublasLtMatmulDescOpaque_t desc;
    char *memory; /* one allocation, in this order: */
    void *weights;
    float *bias;
    int8_t *exponents;
    uint8_t *odd; /* [out]: a weight is not finite */
    bool has_bias;
    char text[200];
};

static int cublas_check(cublasStatus_t status, const char *call, int line, struct report *report)
{
    int r;

    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return 0;
    case CUBLAS_STATUS_ALLOC_FAILED:
        r = -ENOMEM;
        break;
    case CUBLAS_STATUS_NOT_INITIALIZED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
        r = -ENODEV;
        break;
    case CUBLAS_STATUS_EXECUTION_FAILED:
    case CUBLAS_STATUS_INTERNAL_ERROR:
        r = -ENOTRECOVERABLE;
        break;
    default:
        r = -EINVAL;
    }
    return report_set(report, r, "cuBLASLt: %s (gemm.cu:%d: %.120s)", cublasLtGetStatusName(status),
                      line, call);
}
#define CUBLAS(report, call) cublas_check((call), #call, __LINE__, (report))

extern "C" int gemm_library_new(struct gemm_library **ret, struct report *report)
{
    cublasLtHandle_t handle;
    int r = CUBLAS(report, cublasLtCreate(&handle));

    if (r == 0)
        *ret = (struct gemm_library *)handle;
    return r;
}

extern "C" struct gemm_library *gemm_library_free(struct gemm_library *library)
{
    if (library)
        cublasLtDestroy((cublasLtHandle_t)library);
    return NULL;
}

/* Kernels */

/* Takes the mean over the group's channels from column k. */
static __global__ void __launch_bounds__(THREADS)
    centre_kernel(float *weight, int64_t in, int64_t channels)
{
    int64_t k = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    float *column = weight + (int64_t)blockIdx.x * channels * in + k;
    double sum = 0;

    if (k >= in)
        return;
    for (int64_t c = 0; c < channels; c++)
        sum += (double)column[c * in];
    for (int64_t c = 0; c < channels; c++)
        column[c * in] = (float)((double)column[c * in] - sum / (double)channels);
}

static __device__ uint32_t block_max(uint32_t v)
{
    __shared__ uint32_t shared[WARPS];

    v = warp_max(v);
    __syncthreads(); /* shared may still be read from the time before */
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = v;
    __syncthreads();
    v = shared[0];
    for (int i = 1; i < WARPS; i++)
        v = max(v, shared[i]);
    return v;
}

template <typename T> static __device__ uint32_t row_top(const T *row, int64_t in, uint32_t below)
{
    uint32_t top = 0;

#pragma unroll 8
    for (int64_t i = threadIdx.x; i < in; i += THREADS) {
        uint32_t bits = __float_as_uint(widened(row[i])) & UNSIGNED;

        top = max(top, bits < below ? bits : 0);
    }
    return block_max(top);
}

/* The power of two that brings the row's largest number into [2^14, 2^15), or as near as can be. */
static __device__ int row_exponent(uint32_t top)
{
    int exponent = (int)max(top >> 23, 1u) - 127;

    return top == 0 ? 0 : min(14 - exponent, 126);
}

/*
 * One row a block: scaled and split. HALVES 1 writes the high half only. Weights lie [high | low],
 * x lies [low | high]: `high_at` and `low_at` say where. Past `in` there are zeros. The scale is
 * that of the finite numbers.
 */
template <typename T, int HALVES>
static __global__ void __launch_bounds__(THREADS)
    split_kernel(const T *from, int64_t in, int64_t k, __half *to, int64_t high_at, int64_t low_at,
                 int8_t *exponents, uint8_t *odd)
{
    const T *row = from + (int64_t)blockIdx.x * in;
    __half *out = to + (int64_t)blockIdx.x * k * HALVES;
    uint32_t top = row_top(row, in, ~0u);
    bool finite = top < INFINITE;

    if (!finite)
        top = row_top(row, in, INFINITE);
    int exponent = row_exponent(top);
    float scale = power(exponent);

    for (int64_t i = threadIdx.x; i < k / 2; i += THREADS) {
        float a = 2 * i < in ? widened(row[2 * i]) * scale : 0;
        float b = 2 * i + 1 < in ? widened(row[2 * i + 1]) * scale : 0;
        __half2 high = __floats2half2_rn(a, b);

        *(__half2 *)(out + high_at + 2 * i) = high;
        if (HALVES == 2)
            *(__half2 *)(out + low_at + 2 * i) =
                __floats2half2_rn(a - __low2float(high), b - __high2float(high));
    }
    if (threadIdx.x == 0) {
        exponents[blockIdx.x] = (int8_t)exponent;
        if (odd)
            odd[blockIdx.x] = !finite;
    }
}

/* 16-bit numbers as they are, rows padded with zeros. */
template <typename T, typename FROM>
static __global__ void __launch_bounds__(THREADS)
    pad_kernel(const FROM *from, int64_t in, int64_t k, T *to)
{
    const FROM *row = from + (int64_t)blockIdx.x * in;

    for (int64_t i = threadIdx.x; i < k; i += THREADS)
        round_to(i < in ? widened(row[i]) : 0.0f, &to[(int64_t)blockIdx.x * k + i]);
}

/* The sum where a factor is not finite: nothing finite can change it. */
template <typename T>
static __device__ float odd_sum(float v, const T *x, const __half *weights, int64_t in)
{
    bool found = false;
    float sum = 0;

    for (int64_t i = 0; i < in && !isnan(sum); i++) {
        float a = widened(x[i]), b = __half2float(weights[i]);

        if (!isfinite(a) || !isfinite(b)) {
            found = true;
            sum += a * b;
        }
    }
    return found ? sum : v;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    finish_kernel(struct sums sums, const T *x, int64_t in, const __half *weights, int64_t width,
                  const uint8_t *odd, int64_t out, float *to)
{
    int64_t row = blockIdx.x, c = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    int e = 0;

    if (c >= out)
        return;
    if (sums.row_exponents)
        e = sums.row_exponents[row] + sums.column_exponents[c];
    float v = unscale(sums.sums[row * sums.pitch + c], e);

    if (odd && (odd[c] || !isfinite(v)))
        v = odd_sum(v, x + row * in, weights + c * width, in);
    to[row * out + c] = v + (sums.bias ? sums.bias[c] : 0.0f);
}

/* Sizes */

static int64_t rounded(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static void measure(const struct gemm_shape *shape, struct gemm *gemm)
{
    int64_t parts = shape->kind == GEMM_EXACT ? (shape->in + PART - 1) / PART : 1;

    gemm->shape = *shape;
    gemm->parts = parts;
    gemm->k = parts * rounded((shape->in + parts - 1) / parts, ALIGN);
    gemm->width = shape->kind == GEMM_EXACT ? 2 * gemm->k : gemm->k;
    gemm->m = rounded(shape->out, 16);
    gemm->cross.k = 2 * gemm->k;
    gemm->part.k = gemm->k / parts;
}

extern "C" void gemm_size(const struct gemm_shape *shape, struct gemm_size *ret)
{
    int64_t rows = rounded(shape->rows, ROWS);
    struct gemm gemm;

    measure(shape, &gemm);
    ret->resident =
        size_plus(size_times((uint64_t)gemm.m, (uint64_t)gemm.width * 2 + 4 + 1 + 1), 3 * 256);
    ret->operand = size_times((uint64_t)rows, (uint64_t)gemm.width * 2);
    ret->exponents = (uint64_t)rows;
    ret->sums = size_times((uint64_t)rows, (uint64_t)gemm.m * 4);
    ret->workspace = WORKSPACE;
}

/* The algorithm. cuBLASLt is column-major: weights are its A, transposed, rows its B, and then D
 * [m, rows] lies as our [rows, m] does. */

struct layouts {
    cublasLtMatrixLayoutOpaque_t a, b, d;
};

static int layouts_of(const struct gemm *gemm, int64_t k, int64_t rows, struct layouts *ret,
                      struct report *report)
{
    uint64_t m = (uint64_t)gemm->m, n = (uint64_t)rows, depth = (uint64_t)k;
    int r;

    r = CUBLAS(report, cublasLtMatrixLayoutInit(&ret->a, gemm->type, depth, m, gemm->width));
    if (r == 0)
        r = CUBLAS(report, cublasLtMatrixLayoutInit(&ret->b, gemm->type, depth, n, gemm->width));
    if (r == 0)
        r = CUBLAS(report, cublasLtMatrixLayoutInit(&ret->d, CUDA_R_32F, m, n, gemm->m));
    return r;
}

/* True when the algorithm takes every number of rows, and adds up in one place. */
static bool suits(const struct gemm *gemm, int64_t k, const cublasLtMatmulAlgo_t *algo)
{
    int64_t most = rounded(gemm->shape.rows, ROWS);
    cublasLtHandle_t handle = (cublasLtHandle_t)gemm->library;
    cublasLtMatmulHeuristicResult_t result;
    uint32_t reduction = 0;
    int32_t split = 0;
    struct layouts l;
    size_t written;

    if (cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split,
                                             sizeof(split), &written) ||
        cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                             &reduction, sizeof(reduction), &written))
        return false;
    if (split > 1 || reduction != CUBLASLT_REDUCTION_SCHEME_NONE)
        return false;
    for (int64_t rows = ROWS; rows <= most; rows += ROWS)
        if (layouts_of(gemm, k, rows, &l, NULL) < 0 ||
            cublasLtMatmulAlgoCheck(handle, (cublasLtMatmulDesc_t)&gemm->desc, &l.a, &l.b, &l.d,
                                    &l.d, algo, &result) ||
            result.workspaceSize > WORKSPACE)
            return false;
    return true;
}

static int preference_of(cublasLtMatmulPreferenceOpaque_t *ret, struct report *report)
{
    uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE, align = 128;
    size_t workspace = WORKSPACE;
    int r;

    r = CUBLAS(report, cublasLtMatmulPreferenceInit(ret));
    if (r == 0)
        r = CUBLAS(report, cublasLtMatmulPreferenceSetAttribute(
                               ret, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                               sizeof(workspace)));
    if (r == 0)
        r = CUBLAS(report,
                   cublasLtMatmulPreferenceSetAttribute(
                       ret, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof(none)));
    if (r == 0)
        r = CUBLAS(report,
                   cublasLtMatmulPreferenceSetAttribute(
                       ret, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align, sizeof(align)));
    if (r == 0)
        r = CUBLAS(report,
                   cublasLtMatmulPreferenceSetAttribute(
                       ret, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align, sizeof(align)));
    return r;
}

static int choose(const struct gemm *gemm, struct product *product, struct report *report)
{
    int64_t rows = rounded(gemm->shape.rows < 1024 ? gemm->shape.rows : 1024, ROWS);
    cublasLtMatmulHeuristicResult_t found[CHOICES];
    cublasLtMatmulPreferenceOpaque_t preference;
    struct layouts l;
    int n = 0, r;

    r = layouts_of(gemm, product->k, rows, &l, report);
    if (r == 0)
        r = preference_of(&preference, report);
    if (r == 0)
        r = CUBLAS(report, cublasLtMatmulAlgoGetHeuristic(
                               (cublasLtHandle_t)gemm->library, (cublasLtMatmulDesc_t)&gemm->desc,
                               &l.a, &l.b, &l.d, &l.d, &preference, CHOICES, found, &n));
    if (r < 0)
        return r;
    for (int i = 0; i < n; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && suits(gemm, product->k, &found[i].algo)) {
            product->algo = found[i].algo;
            return 0;
        }
    return report_set(report, -EINVAL,
                      "cuBLASLt has no algorithm without split-K for a product of %lld x %lld",
                      (long long)gemm->m, (long long)product->k);
}

static int32_t config(const struct product *product, cublasLtMatmulAlgoConfigAttributes_t what)
{
    int32_t value = -1;
    size_t written;

    cublasLtMatmulAlgoConfigGetAttribute(&product->algo, what, &value, sizeof(value), &written);
    return value;
}

static void describe(struct gemm *gemm)
{
    const struct gemm_shape *shape = &gemm->shape;

    snprintf(gemm->text, sizeof(gemm->text),
             "%s, K %lld in %lld part%s, float32 sums%s, cuBLASLt algorithm %d tile %d stages %d",
             shape->kind == GEMM_EXACT    ? "three products of scaled fp16 halves"
             : shape->kind == GEMM_SINGLE ? "one product of scaled fp16"
                                          : dtype_name(shape->dtype),
             (long long)gemm->k, (long long)gemm->parts, gemm->parts == 1 ? "" : "s",
             shape->centre ? ", centred per group" : "",
             config(&gemm->part, CUBLASLT_ALGO_CONFIG_ID),
             config(&gemm->part, CUBLASLT_ALGO_CONFIG_TILE_ID),
             config(&gemm->part, CUBLASLT_ALGO_CONFIG_STAGES_ID));
}

/* Operands: of the weights once, of x in every run. */
template <typename T>
static void make_operand(const struct gemm *gemm, cudaStream_t stream, const T *from, int64_t rows,
                         void *to, int64_t high_at, int64_t low_at, int8_t *exponents, uint8_t *odd)
{
    const struct gemm_shape *shape = &gemm->shape;
    unsigned n = (unsigned)rows;

    if (shape->kind == GEMM_EXACT)
        split_kernel<T, 2><<<n, THREADS, 0, stream>>>(from, shape->in, gemm->k, (__half *)to,
                                                      high_at, low_at, exponents, odd);
    else if (shape->kind == GEMM_SINGLE)
        split_kernel<T, 1><<<n, THREADS, 0, stream>>>(from, shape->in, gemm->k, (__half *)to, 0, 0,
                                                      exponents, odd);
    else if (shape->dtype == DTYPE_FLOAT16)
        pad_kernel<<<n, THREADS, 0, stream>>>(from, shape->in, gemm->k, (__half *)to);
    else
        pad_kernel<<<n, THREADS, 0, stream>>>(from, shape->in, gemm->k, (__nv_bfloat16 *)to);
}

static int prepare(const struct gemm *gemm, float *weight, const float *bias, cudaStream_t stream,
                   struct report *report)
{
    const struct gemm_shape *shape = &gemm->shape;
    int r = 0;

    if (bias)
        r = CUDA(report, cudaMemcpyAsync(gemm->bias, bias, (size_t)shape->out * sizeof(*bias),
                                         cudaMemcpyDeviceToDevice, stream));
    if (r < 0)
        return r;
    if (shape->centre) {
        unsigned groups = (unsigned)(shape->out / shape->centre);
        unsigned columns = (unsigned)((shape->in + THREADS - 1) / THREADS);

        centre_kernel<<<dim3(groups, columns), THREADS, 0, stream>>>(weight, shape->in,
                                                                     shape->centre);
        if (bias)
            centre_kernel<<<groups, THREADS, 0, stream>>>(gemm->bias, 1, shape->centre);
    }
    make_operand(gemm, stream, weight, shape->out, gemm->weights, 0, gemm->k, gemm->exponents,
                 gemm->odd);
    r = CUDA_LAUNCHED(report);
    if (r == 0)
        r = CUDA(report, cudaStreamSynchronize(stream));
    return r;
}

static int set_up(struct gemm *gemm, cudaStream_t stream, struct report *report)
{
    cublasOperation_t transposed = CUBLAS_OP_T;
    struct gemm_size size;
    int r;

    gemm_size(&gemm->shape, &size);
    r = CUDA(report, cudaMalloc((void **)&gemm->memory, size.resident));
    if (r < 0)
        return r;
    gemm->weights = gemm->memory;
    gemm->bias = (float *)(gemm->memory + rounded(gemm->m * gemm->width * 2, 256));
    gemm->exponents = (int8_t *)gemm->bias + rounded(gemm->m * 4, 256);
    gemm->odd = (uint8_t *)gemm->exponents + rounded(gemm->m, 256);
    r = CUDA(report, cudaMemsetAsync(gemm->memory, 0, size.resident, stream));
    if (r == 0)
        r = CUBLAS(report, cublasLtMatmulDescInit(&gemm->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (r == 0)
        r = CUBLAS(report, cublasLtMatmulDescSetAttribute(&gemm->desc, CUBLASLT_MATMUL_DESC_TRANSA,
                                                          &transposed, sizeof(transposed)));
    if (r == 0)
        r = choose(gemm, &gemm->part, report);
    if (r == 0 && gemm->shape.kind == GEMM_EXACT)
        r = choose(gemm, &gemm->cross, report);
    return r;
}

extern "C" int gemm_new(struct gemm_library *library, const struct gemm_shape *shape, float *weight,
                        const float *bias, cudaStream_t stream, struct gemm **ret,
                        struct report *report)
{
    struct gemm *gemm = (struct gemm *)calloc(1, sizeof(*gemm));
    int r;

    if (!gemm)
        return report_set(report, -ENOMEM, "out of memory");
    measure(shape, gemm);
    gemm->library = library;
    gemm->has_bias = bias != NULL;
    gemm->type =
        shape->kind == GEMM_NATIVE && shape->dtype == DTYPE_BFLOAT16 ? CUDA_R_16BF : CUDA_R_16F;
    r = set_up(gemm, stream, report);
    if (r == 0)
        r = prepare(gemm, weight, bias, stream, report);
    if (r < 0) {
        gemm_free(gemm);
        return r;
    }
    describe(gemm);
    *ret = gemm;
    return 0;
}

extern "C" struct gemm *gemm_free(struct gemm *gemm)
{
    if (gemm) {
        cudaFree(gemm->memory);
        free(gemm);
    }
    return NULL;
}

extern "C" const char *gemm_text(const struct gemm *gemm)
{
    return gemm->text;
}

extern "C" unsigned gemm_launches(const struct gemm *gemm)
{
    return 1 + (unsigned)gemm->parts + (gemm->shape.kind == GEMM_EXACT);
}

/* Running */

static int multiply(const struct gemm *gemm, cudaStream_t stream, const struct gemm_work *work,
                    const struct product *product, int64_t weights_at, int64_t x_at, int64_t rows,
                    float beta, struct report *report)
{
    const uint16_t *weights = (const uint16_t *)gemm->weights + weights_at;
    const uint16_t *x = (const uint16_t *)work->operand + x_at;
    float alpha = 1;
    struct layouts l;
    int r = layouts_of(gemm, product->k, rounded(rows, ROWS), &l, report);

    if (r < 0)
        return r;
    return CUBLAS(report, cublasLtMatmul((cublasLtHandle_t)gemm->library,
                                         (cublasLtMatmulDesc_t)&gemm->desc, &alpha, weights, &l.a,
                                         x, &l.b, &beta, work->sums, &l.d, work->sums, &l.d,
                                         &product->algo, work->workspace, WORKSPACE, stream));
}

extern "C" int gemm_run(const struct gemm *gemm, cudaStream_t stream, const struct gemm_work *work,
                        enum dtype dtype, const void *x, int64_t rows, struct report *report)
{
    bool exact = gemm->shape.kind == GEMM_EXACT;
    int64_t high_at = exact ? gemm->k : 0;
    int r;

    WITH_DTYPE(dtype, T,
               make_operand(gemm, stream, (const T *)x, rows, work->operand, high_at, 0,
                            work->exponents, NULL));
    r = CUDA_LAUNCHED(report);
    if (r == 0 && exact)
        r = multiply(gemm, stream, work, &gemm->cross, 0, 0, rows, 0, report);
    for (int64_t p = 0; r == 0 && p < gemm->parts; p++)
        r = multiply(gemm, stream, work, &gemm->part, p * gemm->part.k, high_at + p * gemm->part.k,
                     rows, exact || p > 0 ? 1 : 0, report);
    return r;
}

extern "C" struct sums gemm_sums(const struct gemm *gemm, const struct gemm_work *work)
{
    bool scaled = gemm->shape.kind != GEMM_NATIVE;
    struct sums sums = {work->sums, gemm->m, scaled ? work->exponents : NULL,
                        scaled ? gemm->exponents : NULL, gemm->has_bias ? gemm->bias : NULL};

    return sums;
}

extern "C" int gemm_finish(const struct gemm *gemm, cudaStream_t stream,
                           const struct gemm_work *work, enum dtype dtype, const void *x,
                           int64_t rows, float *to, struct report *report)
{
    const uint8_t *odd = gemm->shape.kind != GEMM_NATIVE && !gemm->shape.centre ? gemm->odd : NULL;
    dim3 grid((unsigned)rows, (unsigned)((gemm->shape.out + THREADS - 1) / THREADS));

    WITH_DTYPE(dtype, T,
               (finish_kernel<<<grid, THREADS, 0, stream>>>(
                   gemm_sums(gemm, work), (const T *)x, gemm->shape.in,
                   (const __half *)gemm->weights, gemm->width, odd, gemm->shape.out, to)));
    return CUDA_LAUNCHED(report);
}
