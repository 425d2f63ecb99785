/*
 * test_device.c - device buffers through the library, on stand-ins for the GPU and libcuda
 */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "client/fused.h"
#include "tests/client/served.h"

#define MODEL "a_5x37x96_g12" /* [N, 37] -> [1, 96, N, 1] */
#define ROWS  3
#define K     37
#define C     96

static struct served served;

static int serve(const char *script)
{
    char backend[300];

    snprintf(backend, sizeof(backend), "%s%s/fake-backend.so", served_build()[0] == '/' ? "" : "./",
             served_build());
    setenv("FUSED_FAKE_SCRIPT", script, 1);
    return served_start_on(&served, "tests/golden", backend);
}

static struct fused *connect_or_fail(void)
{
    struct fused *f;
    int r = fused_connect(served.socket, "test", &f);

    if (r != 0)
        fail_msg("fused_connect: %s", fused_code_name(r));
    return f;
}

static void run_or_fail(struct fused *f, const struct fused_infer *call)
{
    int r = fused_run(f, call, NULL);

    if (r != 0)
        fail_msg("%s: %s", fused_code_name(r), fused_error_text(f));
}

/* Comes first: libcuda is not open yet. */
static void says_what_is_missing(void **state)
{
    struct fused_buffer *buffer = NULL;
    struct fused *f;

    (void)state;
    assert_int_equal(serve(""), 0);
    f = connect_or_fail();
    assert_int_equal(fused_buffer_create_device(f, 100, &buffer), FUSED_UNSUPPORTED);
    assert_null(buffer);
    fused_close(f);
    assert_int_equal(served_stop(&served), 0);
}

static void computes_in_device_memory(void **state)
{
    static float x[ROWS * K], wanted[C * ROWS];
    struct fused_infer call = FUSED_INFER_INIT;
    struct fused_buffer *in, *out;
    struct fused *f;
    char path[300];
    float *data;

    (void)state;
    snprintf(path, sizeof(path), "%s%s/fake-cuda.so", served_build()[0] == '/' ? "" : "./",
             served_build());
    assert_non_null(dlopen(path, RTLD_NOW));
    assert_int_equal(serve("device_memory=1;oom_memory_over=8000000"), 0);
    f = connect_or_fail();
    for (int i = 0; i < ROWS * K; i++)
        x[i] = (float)(i % 11) - 5;
    call.model = MODEL;
    call.input = fused_tensor_at(x, FUSED_FLOAT32, 2, (int64_t[]){ROWS, K});
    call.output = fused_tensor_at(wanted, FUSED_FLOAT32, 4, (int64_t[]){1, C, ROWS, 1});
    run_or_fail(f, &call);

    assert_int_equal(fused_buffer_create_device(f, sizeof(x) + 4, &in), 0);
    assert_int_equal(fused_buffer_create_device(f, 3 << 20, &out), 0);
    assert_null(fused_buffer_data(in));
    assert_int_equal(fused_buffer_size(in), sizeof(x) + 4);
    assert_true(fused_buffer_device(in) != 0);
    data = (float *)(uintptr_t)fused_buffer_device(in);
    for (int i = 0; i < ROWS * K + 1; i++)
        assert_true(data[i] == 0);
    memcpy(data + 1, x, sizeof(x));
    call.input = fused_tensor_in(in, 4, FUSED_FLOAT32, 2, (int64_t[]){ROWS, K});
    call.output = fused_tensor_in(out, 2 << 20, FUSED_FLOAT32, 4, (int64_t[]){1, C, ROWS, 1});
    run_or_fail(f, &call);
    data = (float *)(uintptr_t)(fused_buffer_device(out) + (2 << 20));
    assert_memory_equal(data, wanted, sizeof(wanted));

    /* A device buffer is bounded as any other. */
    call.output.offset = (3 << 20) - 4;
    assert_int_equal(fused_run(f, &call, NULL), -EINVAL);
    assert_int_equal(fused_buffer_create_device(f, 9000000, &in), FUSED_NO_MEMORY);
    fused_buffer_free(in);
    fused_close(f);
    fused_buffer_free(out);
    /* The scripted backend aborts if some of its memory were left. */
    assert_int_equal(served_stop(&served), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(says_what_is_missing),
        cmocka_unit_test(computes_in_device_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
