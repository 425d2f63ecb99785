/*
 * example.c - one request, from nothing to a few numbers
 *
 *     cc example.c $(pkg-config --cflags --libs fused) -o example && ./example [MODEL [ROWS]]
 */
#include <fused.h>
#include <stdio.h>
#include <stdlib.h>

enum { FEATURES = 8192 };

static int fail(const char *what, int code, const struct fused *f)
{
    fprintf(stderr, "%s: %s: %s\n", what, fused_code_name(code), fused_error_text(f));
    return 1;
}

int main(int argc, char **argv)
{
    const char *model = argc > 1 ? argv[1] : "gemm-groupnorm-min-bias";
    int64_t rows = argc > 2 ? strtol(argv[2], NULL, 10) : 4;
    size_t size = (size_t)rows * FEATURES * sizeof(float);
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_buffer *in, *out;
    struct fused_result result;
    struct fused *f = NULL;
    float *x, *y;
    int r;

    if (rows < 1 || rows > 65536)
        return fprintf(stderr, "ROWS is 1 to 65536\n"), 64;
    if ((r = fused_connect(NULL, "example", &f)) != 0)
        return fail("connect", r, f);
    if ((r = fused_buffer_create(f, size, &in)) != 0)
        return fail("input buffer", r, f);
    if ((r = fused_buffer_create(f, size, &out)) != 0)
        return fail("output buffer", r, f);

    x = fused_buffer_data(in); /* the daemon sees these pages: nothing is copied */
    for (int64_t k = 0; k < rows * FEATURES; k++)
        x[k] = (float)(k % 1000) / 1000;

    call.model = model;
    call.input = fused_tensor_in(in, 0, FUSED_FLOAT32, 2, (int64_t[]){rows, FEATURES});
    call.output = fused_tensor_in(out, 0, FUSED_FLOAT32, 4, (int64_t[]){1, FEATURES, rows, 1});
    if ((r = fused_run(f, &call, &result)) != 0)
        return fail(model, r, f);

    y = fused_buffer_data(out); /* y[channel][row] */
    for (int64_t row = 0; row < rows && row < 4; row++)
        printf("row %lld: %g %g %g ...\n", (long long)row, (double)y[row], (double)y[rows + row],
               (double)y[2 * rows + row]);
    printf("%llu us waiting, %llu us running, in a batch of %u rows\n",
           (unsigned long long)result.queue_us, (unsigned long long)result.run_us,
           result.batch_rows);
    fused_buffer_free(in);
    fused_buffer_free(out);
    fused_close(f);
    return 0;
}
