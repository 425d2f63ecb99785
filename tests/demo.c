/*
 * demo.c - what `make demo` runs against its daemon: real sizes, checked against the reference
 *
 * For each shipped model: random input in a shared buffer, one request through the client library
 * (the faster of two), then some rows of the result against the plain C reference in double. The
 * daemon is found through $FUSED_SOCKET; the argument is the directory of the model files that it
 * serves.
 *
 * A row may differ by 1e-4 + 1e-4 |y|; a NaN anywhere else than in the reference is wrong.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "client/fused.h"
#include "kernels/pipeline.h"
#include "kernels/reference.h"
#include "proto/base.h"

#define RUNS 2

/* A model, and how much of it. */
struct job {
    const char *name;
    int64_t rows, compared;
};

static const struct job jobs[] = {
    {"gemm-groupnorm-min-bias", 1024, 32},
    {"conv3d-groupnorm-min-clamp-dropout", 128, 2},
    {"conv3d-groupnorm-min-clamp-full", 128, 2},
};

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Numbers in [0, 1), the same ones on every machine. */
static void fill_random(float *x, size_t n, uint64_t seed)
{
    uint64_t state = seed;

    for (size_t i = 0; i < n; i++) {
        uint64_t z = state += UINT64_C(0x9e3779b97f4a7c15);

        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        x[i] = (float)((z ^ z >> 31) >> 40) * 0x1p-24f;
    }
}

static uint64_t fnv1a(const uint8_t *bytes, size_t n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "demo: %s: %s\n", what, why);
    return -1;
}

static struct pipeline *load(const char *dir, const char *name)
{
    struct model *model = malloc(sizeof(*model));
    struct safetensors *weights = NULL;
    struct pipeline *pipeline = NULL;
    struct report report = {"out of memory"};
    char path[512];

    snprintf(path, sizeof(path), "%s/%s.conf", dir, name);
    if (model == NULL || model_parse(AT_FDCWD, path, model, &report) < 0) {
        fail(path, report.text);
        goto out;
    }
    snprintf(path, sizeof(path), "%s/%s", dir, model->weights);
    if (safetensors_open(AT_FDCWD, path, &weights, &report) < 0 ||
        pipeline_build(model, weights, &pipeline, &report) < 0) {
        fail(path, report.text);
        safetensors_free(weights);
    }
out:
    free(model);
    return pipeline;
}

/* What one job holds. */
struct bench {
    const struct job *job;
    struct pipeline *pipeline;
    struct fused_buffer *x, *y;
    struct shape in, out;
    int64_t row_in, row_out; /* elements of one row */
    double took_s, error;
};

static int run_job(struct fused *f, struct bench *bench)
{
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_result result;

    call.model = bench->job->name;
    call.input = fused_tensor_in(bench->x, 0, FUSED_FLOAT32, bench->in.rank, bench->in.dims);
    call.output = fused_tensor_in(bench->y, 0, FUSED_FLOAT32, bench->out.rank, bench->out.dims);
    bench->took_s = INFINITY;
    for (int i = 0; i < RUNS; i++) {
        double start = now_s();
        int r = fused_run(f, &call, &result);

        if (r != 0)
            return fail(call.model, r > 0 ? result.text : fused_error_text(f));
        bench->took_s = fmin(bench->took_s, now_s() - start);
    }
    return 0;
}

/* Rows spread over the request, computed by the reference as a request of their own. */
static int compare(struct bench *bench)
{
    const struct job *job = bench->job;
    const float *x = fused_buffer_data(bench->x), *y = fused_buffer_data(bench->y);
    struct reference_run run = {.rows = job->compared};
    int64_t inner = 1, outer;
    struct report report = {"out of memory"};
    _cleanup_free_ float *some = NULL;
    _cleanup_free_ double *expected = NULL;

    some = calloc((size_t)(job->compared * bench->row_in), sizeof(*some));
    expected = calloc((size_t)(job->compared * bench->row_out), sizeof(*expected));
    if (some == NULL || expected == NULL)
        return fail(job->name, report.text);
    for (int64_t i = 0; i < job->compared; i++)
        memcpy(some + i * bench->row_in, x + i * job->rows / job->compared * bench->row_in,
               (size_t)bench->row_in * sizeof(*some));
    if (reference_run(bench->pipeline, bench->pipeline->n_stages, &run, some, expected, true,
                      &report) < 0)
        return fail(job->name, report.text);
    for (int i = bench->out.batch + 1; i < bench->out.rank; i++)
        inner *= bench->out.dims[i];
    outer = bench->row_out / inner;
    for (int64_t k = 0; k < outer * job->compared * inner; k++) {
        int64_t o = k / inner / job->compared, i = k / inner % job->compared, j = k % inner;
        double got = y[(o * job->rows + i * job->rows / job->compared) * inner + j];
        double error = fabs(got - expected[k]);

        if (isnan(got) && isnan(expected[k]))
            continue;
        if (!(error <= 1e-4 + 1e-4 * fabs(expected[k]))) {
            fprintf(stderr, "demo: %s: %.9g, the reference has %.9g\n", job->name, got,
                    expected[k]);
            return -1;
        }
        bench->error = fmax(bench->error, error);
    }
    return 0;
}

/* "[128, 3, 16, 64, 64]" */
static const char *print_dims(const struct shape *shape, char text[64])
{
    int n = 0;

    for (int i = 0; i < shape->rank && n < 64; i++)
        n += snprintf(text + n, 64 - (size_t)n, "%s%" PRId64, i > 0 ? ", " : "[", shape->dims[i]);
    if (n < 64)
        snprintf(text + n, 64 - (size_t)n, "]");
    return text;
}

static int do_job(struct fused *f, const char *dir, const struct job *job)
{
    struct bench bench = {.job = job};
    char in[64], out[64];
    size_t size_in, size_out;
    int r = -1;

    bench.pipeline = load(dir, job->name);
    if (bench.pipeline == NULL)
        return -1;
    bench.in = shape_rows(&bench.pipeline->in, job->rows);
    bench.out = shape_rows(&bench.pipeline->out, job->rows);
    bench.row_in = shape_elements(&bench.pipeline->in);
    bench.row_out = shape_elements(&bench.pipeline->out);
    size_in = (size_t)(job->rows * bench.row_in) * sizeof(float);
    size_out = (size_t)(job->rows * bench.row_out) * sizeof(float);
    if (fused_buffer_create(f, size_in, &bench.x) != 0 ||
        fused_buffer_create(f, size_out, &bench.y) != 0) {
        fail(job->name, fused_error_text(f));
        goto end;
    }
    fill_random(fused_buffer_data(bench.x), size_in / sizeof(float), 1);
    if (run_job(f, &bench) < 0 || compare(&bench) < 0)
        goto end;
    printf("%-34s %5" PRId64 "  %-21s  %-22s  %-9.2g %9.1f ms  %016" PRIx64 "\n", job->name,
           job->rows, print_dims(&bench.in, in), print_dims(&bench.out, out), bench.error,
           bench.took_s * 1e3, fnv1a(fused_buffer_data(bench.y), size_out));
    fflush(stdout);
    r = 0;
end:
    fused_buffer_free(bench.x);
    fused_buffer_free(bench.y);
    pipeline_free(bench.pipeline);
    return r;
}

static void print_server(struct fused *f)
{
    char *json = NULL;
    json_t *status, *device;

    if (fused_status(f, &json) != 0)
        return;
    status = json_loads(json, 0, NULL);
    device = json_array_get(json_object_get(status, "devices"), 0);
    printf("server %s, backend %s, device %s\n\n",
           json_string_value(json_object_get(status, "server")),
           json_string_value(json_object_get(status, "backend")),
           json_string_value(json_object_get(device, "name")));
    json_decref(status);
    free(json);
}

int main(int argc, char **argv)
{
    struct fused *f;
    int failed = 0, r;

    if (argc != 2) {
        fprintf(stderr, "usage: demo DIRECTORY-OF-MODELS\n");
        return 64;
    }
    r = fused_connect(NULL, "demo", &f);
    if (r != 0) {
        fail("no server", fused_code_name(r));
        return 69;
    }
    print_server(f);
    printf("%-34s %5s  %-21s  %-22s  %-9s %12s  %s\n", "MODEL", "ROWS", "INPUT", "RESULT",
           "MAX ERROR", "TIME", "CHECKSUM");
    for (size_t i = 0; i < ARRAY_SIZE(jobs); i++)
        failed += do_job(f, argv[1], &jobs[i]) < 0;
    fused_close(f);
    if (failed != 0)
        printf("\n%d of %zu models are wrong\n", failed, ARRAY_SIZE(jobs));
    else
        printf("\nall right: the rows compared with the reference are within 1e-4 + 1e-4 |y|\n");
    return failed != 0 || fflush(stdout) != 0;
}
