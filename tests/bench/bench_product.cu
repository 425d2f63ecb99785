/*
 * bench_product.cu - pipeline A on the device alone: split of x, product in registers, outer sum
 *
 * Times by events, x and y in device memory, the L2 emptied before each, beside the yardsticks of
 * the same run: cuBLASLt's bare fp16 product of the same work and a copy. Prints the tables of
 * kernels/cuda/BENCH.md. No test: what it runs, test_product checks.
 */
#include <cublasLt.h>
#include <cuda_fp16.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_norm_min.h"

#define K        8192
#define C        8192
#define ROWS_MAX 4096
#define FLUSH    ((size_t)256 << 20)
#define COPY     ((size_t)512 << 20)
#define TIMES    11
#define ROUNDS   30

#define NEED(call)                                                                          \
    do {                                                                                    \
        if ((call) != 0) {                                                                  \
            fprintf(stderr, "bench_product: %s, line %d: %s\n", #call, __LINE__,            \
                    report.text[0] ? report.text : cudaGetErrorString(cudaGetLastError())); \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

static struct report report;
static cudaStream_t stream;
static cudaEvent_t begun, ended;
static void *flush;

/* Reads memory that is as large as the L2 several times over: written lines would stay. */
static __global__ void read_all(const uint4 *from, size_t n, uint32_t *to)
{
    uint32_t sum = 0;

    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        sum ^= from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
    if (sum == 0x12345678)
        *to = sum;
}

/* Numbers that fill the mantissa, from -0.5 to 0.5 times `scale`. */
static __global__ void fill(float *to, size_t n, float scale, uint32_t seed)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint32_t v = (uint32_t)i * 2654435761u + seed;

    v ^= v >> 15;
    v *= 2246822519u;
    v ^= v >> 13;
    if (i < n)
        to[i] = ((float)v * 0x1p-32f - 0.5f) * scale;
}

static __global__ void to_half(const float *from, void *to, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;

    if (i < n)
        ((__half *)to)[i] = __float2half_rn(from[i]);
}

static void *device_memory(size_t size)
{
    void *p;

    NEED(cudaMalloc(&p, size));
    return p;
}

static float *device_numbers(size_t n, float scale, uint32_t seed)
{
    float *p = (float *)device_memory(n * sizeof(float));

    fill<<<(unsigned)((n + 255) / 256), 256, 0, stream>>>(p, n, scale, seed);
    return p;
}

static int rising(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

/* A model's kernels with their operands. */
struct bench {
    struct linear_norm_min *fused;
    struct tail tail;
    struct segment *segment;
    int32_t *tiles, n_tiles;
    void *x, *y, *work;
};

/* cuBLASLt: y [1024, C] = x [1024, k] times w [C, k]. */
struct library {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t left, right, out;
    cublasLtMatmulHeuristicResult_t chosen;
    void *x, *w, *y, *work;
    size_t work_size;
};

static void library_run(const struct library *library)
{
    float one = 1, zero = 0;

    NEED(cublasLtMatmul(library->handle, library->product, &one, library->w, library->left,
                        library->x, library->right, &zero, library->y, library->out, library->y,
                        library->out, &library->chosen.algo, library->work, library->work_size,
                        stream));
}

static void bench_run(const struct bench *bench, int64_t rows)
{
    NEED(linear_norm_min_run(bench->fused, stream, bench->work, bench->x, NULL, rows, NULL, true,
                             &report));
    NEED(outer_cuda(stream, &bench->tail, bench->n_tiles, &report));
}

/* One run in microseconds; exactly one of the two is given, or a copy. */
static float time_of(const struct bench *bench, int64_t rows, const struct library *library,
                     bool empty)
{
    float ms;

    if (empty)
        read_all<<<1056, 256, 0, stream>>>((const uint4 *)flush, FLUSH / 16, (uint32_t *)flush);
    NEED(cudaEventRecord(begun, stream));
    if (bench)
        bench_run(bench, rows);
    else if (library)
        library_run(library);
    else
        NEED(cudaMemcpyAsync(flush, (char *)flush + COPY, COPY, cudaMemcpyDeviceToDevice, stream));
    NEED(cudaEventRecord(ended, stream));
    NEED(cudaEventSynchronize(ended));
    NEED(cudaEventElapsedTime(&ms, begun, ended));
    return ms * 1000;
}

static float median_of(const struct bench *bench, int64_t rows, const struct library *library)
{
    float t[TIMES];

    for (int i = -3; i < TIMES; i++) {
        float us = time_of(bench, rows, library, true);

        if (i >= 0)
            t[i] = us;
    }
    qsort(t, TIMES, sizeof(*t), rising);
    return t[TIMES / 2];
}

static struct bench bench_new(enum gemm_kind kind, enum dtype dtype)
{
    struct linear_norm_min_shape shape = {kind, dtype, K, C, C / 16, ROWS_MAX, 1e-5f};
    float *w = device_numbers((size_t)C * K, 0.022f, 1), *affine = device_numbers(3 * C, 1, 2);
    float *x = device_numbers((size_t)ROWS_MAX * K, 1, 3);
    uint64_t resident, work;
    struct bench bench = {};

    linear_norm_min_size(&shape, &resident, &work);
    NEED(linear_norm_min_new(&shape, w, affine, affine + C, affine + 2 * C, stream, &bench.fused,
                             &report));
    NEED(cudaFree(w));
    bench.x = x;
    if (dtype != DTYPE_FLOAT32) {
        bench.x = device_memory((size_t)ROWS_MAX * K * 2);
        to_half<<<ROWS_MAX *(K / 256), 256, 0, stream>>>(x, bench.x, (size_t)ROWS_MAX * K);
    }
    bench.work = device_memory(work);
    bench.y = device_memory((size_t)ROWS_MAX * C * sizeof(float));
    bench.segment = (struct segment *)device_memory(sizeof(struct segment));
    bench.tiles = (int32_t *)device_memory(2 * sizeof(int32_t));
    bench.tail.source = TAIL_ADD;
    bench.tail.from = (const float *)linear_norm_min_keys(bench.fused, bench.work);
    bench.tail.keys = true;
    bench.tail.elements = bench.tail.outer = C;
    bench.tail.from_elements = bench.tail.inner = bench.tail.add.outer_stride = 1;
    bench.tail.add.tensor = affine;
    bench.tail.dtype = dtype;
    bench.tail.segments = bench.segment;
    bench.tail.tiles = bench.tiles;
    bench.tail.n_segments = 1;
    return bench;
}

static void bench_rows(struct bench *bench, int64_t rows)
{
    struct segment segment = {};
    int32_t tiles[2] = {};

    segment.rows = segment.out_rows = segment.job_rows = rows;
    segment.y = bench->y;
    bench->tail.tile = tail_tile(&bench->tail, rows);
    tiles[1] = bench->n_tiles = (int32_t)tail_tiles(&bench->tail, bench->tail.tile, rows);
    NEED(cudaMemcpy(bench->segment, &segment, sizeof(segment), cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(bench->tiles, tiles, sizeof(tiles), cudaMemcpyHostToDevice));
}

static struct library library_new(int k)
{
    struct library library = {};
    float *numbers = device_numbers((size_t)C * k, 1, 4);
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtMatmulPreference_t preference;
    int found = 0;

    library.work_size = (size_t)64 << 20;
    library.work = device_memory(library.work_size);
    library.w = device_memory((size_t)C * k * 2);
    library.x = device_memory((size_t)1024 * k * 2);
    library.y = device_memory((size_t)1024 * C * sizeof(float));
    to_half<<<(unsigned)((size_t)C * k / 256), 256, 0, stream>>>(numbers, library.w, (size_t)C * k);
    to_half<<<1024 * (k / 256), 256, 0, stream>>>(numbers + 1000, library.x, (size_t)1024 * k);
    NEED(cudaStreamSynchronize(stream));
    NEED(cudaFree(numbers));
    NEED(cublasLtCreate(&library.handle));
    NEED(cublasLtMatmulDescCreate(&library.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    NEED(cublasLtMatmulDescSetAttribute(library.product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                        sizeof(transposed)));
    NEED(cublasLtMatrixLayoutCreate(&library.left, CUDA_R_16F, k, C, k));
    NEED(cublasLtMatrixLayoutCreate(&library.right, CUDA_R_16F, k, 1024, k));
    NEED(cublasLtMatrixLayoutCreate(&library.out, CUDA_R_32F, C, 1024, C));
    NEED(cublasLtMatmulPreferenceCreate(&preference));
    NEED(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &library.work_size, sizeof(library.work_size)));
    NEED(cublasLtMatmulAlgoGetHeuristic(library.handle, library.product, library.left,
                                        library.right, library.out, library.out, preference, 1,
                                        &library.chosen, &found));
    NEED(found != 1);
    return library;
}

/* The whole of 1024 rows and the library's bare product in turn, as the card gets hot. */
static void in_turn(const struct bench *bench, const struct library *library, bool empty)
{
    float ours[ROUNDS], theirs[ROUNDS];

    for (int i = -3; i < ROUNDS; i++) {
        float a = time_of(bench, 1024, NULL, empty), b = time_of(NULL, 0, library, empty);

        if (i >= 0) {
            ours[i] = a;
            theirs[i] = b;
        }
    }
    qsort(ours, ROUNDS, sizeof(*ours), rising);
    qsort(theirs, ROUNDS, sizeof(*theirs), rising);
    printf("1024 rows in turn with cuBLASLt's bare product, %s: %.1f us and %.1f us, %.3f times\n",
           empty ? "the L2 emptied" : "back to back", (double)ours[ROUNDS / 2],
           (double)theirs[ROUNDS / 2], (double)(ours[ROUNDS / 2] / theirs[ROUNDS / 2]));
}

int main(void)
{
    static const int rows[] = {1,   2,   8,   16,  32,   64,   65,   96,   112,  128, 144,
                               160, 176, 192, 224, 256,  257,  320,  384,  448,  512, 513,
                               576, 640, 768, 896, 1000, 1024, 1025, 1536, 2048, 4096};
    enum { N = sizeof(rows) / sizeof(*rows), SETTINGS = 3 };
    static const struct {
        const char *name;
        enum gemm_kind kind;
        enum dtype dtype;
        double bytes, products;
    } settings[SETTINGS] = {{"fp32", GEMM_EXACT, DTYPE_FLOAT32, 4, 3},
                            {"tf32", GEMM_SINGLE, DTYPE_FLOAT32, 2, 1},
                            {"bf16", GEMM_NATIVE, DTYPE_BFLOAT16, 2, 1}};
    float us[SETTINGS][N];
    struct library exact, single;

    NEED(cudaStreamCreate(&stream));
    NEED(cudaEventCreate(&begun));
    NEED(cudaEventCreate(&ended));
    flush = device_memory(2 * COPY);
    NEED(cudaMemset(flush, 1, 2 * COPY));
    exact = library_new(3 * K);
    single = library_new(K);
    for (int s = 0; s < SETTINGS; s++) {
        struct bench bench = bench_new(settings[s].kind, settings[s].dtype);

        if (s == 0)
            printf("%s\n\n", linear_norm_min_text(bench.fused));
        for (int i = 0; i < N; i++) {
            bench_rows(&bench, rows[i]);
            us[s][i] = median_of(&bench, rows[i], NULL);
        }
        if (s == 0) {
            bench_rows(&bench, 1024);
            in_turn(&bench, &exact, true);
            in_turn(&bench, &exact, false);
        }
        linear_norm_min_free(bench.fused);
    }
    printf("cuBLASLt, fp16, 1024 x %d x %d: %.1f us, x %d: %.1f us; copy of 512 MiB: %.2f TB/s\n\n",
           C, 3 * K, (double)median_of(NULL, 0, &exact), K, (double)median_of(NULL, 0, &single),
           2e-6 * COPY / (double)median_of(NULL, 0, NULL));
    printf("| rows | fp32 us | x limit | tf32 us | x limit | bf16 us | x limit |\n"
           "| --- | --- | --- | --- | --- | --- | --- |\n");
    for (int i = 0; i < N; i++) {
        printf("| %d |", rows[i]);
        for (int s = 0; s < SETTINGS; s++) {
            double memory = (double)C * K * settings[s].bytes / 4.2e6;
            double products = settings[s].products * 2.0 * rows[i] * C * K / 800e6;

            printf(" %.1f | %.2f |", (double)us[s][i],
                   (double)us[s][i] / (memory > products ? memory : products));
        }
        printf("\n");
    }
    return 0;
}
