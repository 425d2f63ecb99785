/*
 * One small case for every family of kernels, against the plain stages: what the tools of
 * compute-sanitizer can look at within seconds. TESTS chooses by name.
 */
#include "tests/gpu/device.h"

#define backend_cpu device_sync
#include "tests/cpu/chain.h"

#include "kernels/reference.h"

#define MODEL(dtype, precision, input)                                        \
    "name = \"m\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"" dtype "\";" \
    "precision = \"" precision "\"; input = { shape = [" input "]; }; stages = ("
#define LINEAR(out)      "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = " out "; },"
#define CONV3D(out)      "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = " out "; kernel = 3; "
#define NORM(groups)     "{ op = \"group_norm\"; groups = " groups "; weight = \"g\"; bias = \"h\"; },"
#define AMIN             "{ op = \"amin\"; dim = 1; keepdim = true; },"
#define OUTER(shape)     "{ op = \"add\"; tensor = \"t\"; shape = [" shape "]; });"
#define ADD(name, shape) "{ op = \"add\"; tensor = \"" name "\"; shape = [" shape "]; },"
#define LIMITS           "{ op = \"minimum\"; value = 1.5; }, { op = \"clamp\"; min = -1.5; },"
#define DROPOUT          "{ op = \"dropout\"; p = 0.2; }"
#define POINTS(minimum)                                                                      \
    "{ op = \"minimum\"; value = " minimum "; }, { op = \"clamp\"; min = 0.0; max = 1.0; }," \
    "{ op = \"dropout\"; p = 0.2; });"

static struct fixture fixture;

static void check(const struct pipeline *pipeline, const struct job *job, double tolerance)
{
    struct reference_run how = {
        .rows = job->rows, .train = job->train, .seed = job->seed, .offset = job->offset};
    size_t n_in = job->rows * (size_t)shape_elements(&pipeline->in);
    size_t n_out = job->rows * (size_t)shape_elements(&pipeline->out);
    float *x = chain_alloc(n_in * sizeof(*x)), *y = chain_alloc(n_out * sizeof(*y));
    double *want = chain_alloc(n_out * sizeof(*want));
    struct report report;

    tensor_to_float(pipeline->dtype, job->x, x, n_in);
    tensor_to_float(pipeline->dtype, job->y, y, n_out);
    if (reference_run(pipeline, pipeline->n_stages, &how, x, want, false, &report) < 0)
        fail_msg("%s", report.text);
    for (size_t i = 0; i < n_out; i++)
        if (isnan(want[i]) != isnan(y[i]) ||
            (!isnan(want[i]) && want[i] != y[i] &&
             !(fabs(want[i] - y[i]) <= tolerance * (1 + fabs(want[i])))))
            fail_msg("y[%zu] of %u rows is %.9g, not %.9g", i, job->rows, (double)y[i], want[i]);
    free(x);
    free(y);
    free(want);
}

/* chain_weight(), but factors of a norm are negative and zero too. */
static float weight(const char *name, int64_t i)
{
    float v = chain_weight(name, i);

    if (!strchr(name, 'g'))
        return v;
    return i % 7 == 3 ? 0 : i % 3 == 1 ? -v : v;
}

/* Rows times 1e18, times 1e-20, subnormal, and of one huge and many tiny numbers; float32. */
static void scale(float *x, size_t elements, uint32_t rows)
{
    static const float times[] = {1e18f, 1e-20f, 1e-42f, 1e-6f};

    for (uint32_t row = 0; row < 4 && row < rows; row++) {
        for (size_t i = 0; i < elements; i++)
            x[row * elements + i] *= times[row];
        if (row == 3)
            x[row * elements] = 1e6f;
    }
}

enum rows { ROWS_PLAIN, ROWS_SPOILT, ROWS_SCALED };

/* Batches of one, then of two requests; each lies in another kind of memory than the one before.
 * Rows that are spoilt: NaN, an infinity and a number beyond any proof's bound in some rows, and
 * one of zeros. */
static void run(const char *text, const uint32_t *rows, int n, bool train, enum rows kind,
                double tolerance)
{
    static const float bad[] = {NAN, 3e38f, -INFINITY};
    struct pipeline *pipeline;
    struct report report;
    struct chain chain;
    uint64_t state = 5;
    uint32_t most = 0;

    if (fixture_build(&fixture, text, weight, &pipeline, &report) < 0)
        fail_msg("%s", report.text);
    /* No more than is needed: a plan measures batches of every size when it is loaded. */
    for (int i = 0; i < n; i++)
        most = rows[i] > most ? rows[i] : most;
    chain_open(pipeline, 1, 2 * most, &chain);
    for (int i = 0; i < n; i++) {
        struct job jobs[2];
        unsigned n_jobs = 1 + i % 2;

        for (unsigned k = 0; k < n_jobs; k++) {
            void *x = chain_input(pipeline, rows[i], &state);

            if (kind == ROWS_SCALED)
                scale(x, (size_t)shape_elements(&pipeline->in), rows[i]);
            for (uint32_t row = 0; kind == ROWS_SPOILT && row < 3 && row < rows[i]; row++)
                tensor_from_float(pipeline->dtype, &bad[row],
                                  (char *)x + row * chain_in_bytes(pipeline), 1);
            if (kind == ROWS_SPOILT && rows[i] > 3)
                memset((char *)x + 3 * chain_in_bytes(pipeline), 0, chain_in_bytes(pipeline));
            jobs[k] =
                chain_job(pipeline, x, chain_alloc(rows[i] * chain_out_bytes(pipeline)), rows[i]);
            jobs[k].train = train;
            jobs[k].seed = 7;
            jobs[k].offset = 4 * k;
        }
        chain_batch(&chain, jobs, n_jobs);
        for (unsigned k = 0; k < n_jobs; k++) {
            assert_int_equal(jobs[k].result, 0);
            check(pipeline, &jobs[k], tolerance);
            free((void *)jobs[k].x);
            free(jobs[k].y);
        }
    }
    chain_close(&chain);
    pipeline_free(pipeline);
}

#define RUN(text, train, kind, tolerance, ...) \
    run(text, (const uint32_t[]){__VA_ARGS__}, \
        (int)(sizeof((uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t)), train, kind, tolerance)

/* linear, group_norm and amin in registers, in narrow tiles. The smallest K that it takes; tiles
 * grow only when there are channels for every multiprocessor. */
static void small_narrow(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "128") LINEAR("256") NORM("16") AMIN OUTER("1, 256, 1, 1"), false,
        ROWS_SPOILT, 1e-4, 3, 7, 100);
    RUN(MODEL("float32", "fp32", "128") LINEAR("8192") NORM("512") AMIN OUTER("1, 8192, 1, 1"),
        false, ROWS_SPOILT, 1e-4, 40, 100, 180);
}

/* The same in wide ones: of 64 channels, and of 128. */
static void small_wide(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "128") LINEAR("8192") NORM("512") AMIN OUTER("1, 8192, 1, 1"),
        false, ROWS_SPOILT, 1e-4, 200, 300);
}

/* Two requests of 480 rows are in no graph: so few channels have too many ranges. */
static void small_kinds(void **state)
{
    (void)state;
    RUN(MODEL("float32", "tf32", "256") LINEAR("256") NORM("16") AMIN OUTER("1, 256, 1, 1"), false,
        ROWS_PLAIN, 1e-2, 5, 150, 512, 480);
    RUN(MODEL("float16", "fp32", "256") LINEAR("256") NORM("16") AMIN OUTER("1, 256, 1, 1"), false,
        ROWS_PLAIN, 1e-2, 5, 150, 512);
    RUN(MODEL("bfloat16", "fp32", "256") LINEAR("256") NORM("16") AMIN OUTER("1, 256, 1, 1"), false,
        ROWS_PLAIN, 5e-2, 5, 150, 512);
}

/* Numbers of every size, in registers and by the library, and a norm with one channel a group. */
static void small_scaled(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "128") LINEAR("256") NORM("16") AMIN OUTER("1, 256, 1, 1"), false,
        ROWS_SCALED, 1e-4, 7, 100);
    RUN(MODEL("float32", "fp32", "128") LINEAR("8192") NORM("512") AMIN OUTER("1, 8192, 1, 1"),
        false, ROWS_SCALED, 1e-4, 200);
    RUN(MODEL("float32", "fp32", "37") LINEAR("96") NORM("12") AMIN OUTER("96"), false, ROWS_SCALED,
        1e-4, 5, 21);
    RUN(MODEL("float32", "fp32", "37") LINEAR("24") NORM("24") AMIN OUTER("24"), false, ROWS_SPOILT,
        1e-4, 5);
}

/* Products by cuBLASLt, between kernels of ours: split, pad, centre, finish, norm and minimum. */
static void small_library(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "37") LINEAR("96") NORM("12") AMIN OUTER("96"), false, ROWS_SPOILT,
        1e-4, 5, 21);
    RUN(MODEL("float32", "tf32", "37") LINEAR("24") "{ op = \"clamp\"; min = 0.0; });", false,
        ROWS_SPOILT, 1e-2, 5, 21);
    RUN(MODEL("bfloat16", "fp32", "37") LINEAR("24") "{ op = \"clamp\"; min = 0.0; });", false,
        ROWS_PLAIN, 5e-2, 5);
}

/* Three channels on tensor cores, with the norm; two by float32 units. */
static void small_conv(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "3, 5, 9, 12") CONV3D("16") "}," NORM("8") POINTS("0.5"), true,
        ROWS_SPOILT, 1e-4, 1, 4);
    RUN(MODEL("float16", "fp32", "3, 5, 9, 12") CONV3D("16") "}," NORM("8") POINTS("0.5"), true,
        ROWS_PLAIN, 1e-2, 2);
    RUN(MODEL("float32", "fp32", "2, 5, 9, 12") CONV3D("16") "}," NORM("8") POINTS("0.5"), true,
        ROWS_SPOILT, 1e-4, 1, 4);
}

/* Any shape on tensor cores: tiles of 16, 32, 48 and 64 outputs, several groups of channels, the
 * last of them in part; 16 bits with a norm behind them and without. */
static void small_conv_implicit(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "7, 5, 9, 11") CONV3D("10") "stride = 2; padding = 1; }," NORM("5")
            POINTS("0.5"),
        true, ROWS_SPOILT, 1e-4, 1, 4);
    RUN(MODEL("float32", "fp32", "20, 4, 7, 13") CONV3D("70") "padding = 1; }," NORM("7")
            POINTS("0.5"),
        false, ROWS_SPOILT, 1e-4, 3);
    RUN(MODEL("float32", "fp32", "9, 3, 8, 8") CONV3D("20") "stride = [1, 2, 3]; }," NORM("1")
            POINTS("0.5"),
        false, ROWS_SPOILT, 1e-4, 4);
    RUN(MODEL("float16", "fp32", "17, 5, 6, 9") CONV3D("24") "stride = [2, 1, 1]; }," NORM("4")
            POINTS("0.5"),
        true, ROWS_PLAIN, 1e-2, 1, 4);
    RUN(MODEL("bfloat16", "fp32", "6, 5, 5, 20")
            CONV3D("48") "stride = [1, 1, 2]; padding = [0, 1, 2]; }," POINTS("0.5"),
        true, ROWS_SPOILT, 5e-2, 3);
}

/* 16 bits with stride 1 by wgmma: channels that fill no step, more outputs than a block takes,
 * several tiles to a sample, windows in lines alone. */
static void small_conv_shifted(void **state)
{
    (void)state;
    RUN(MODEL("float16", "fp32", "17, 3, 6, 9") CONV3D("24") "}," NORM("4") POINTS("0.5"), true,
        ROWS_PLAIN, 1e-2, 1, 4);
    RUN(MODEL("bfloat16", "fp32", "6, 5, 5, 20")
            CONV3D("48") "padding = [0, 1, 2]; }," POINTS("0.5"),
        true, ROWS_SPOILT, 5e-2, 3);
    RUN(MODEL("float16", "fp32", "20, 4, 9, 12") CONV3D("140") "padding = 1; }," POINTS("0.5"),
        false, ROWS_SPOILT, 1e-2, 4);
    RUN(MODEL("bfloat16", "fp32", "40, 1, 3, 30")
            CONV3D("20") "padding = [1, 0, 2]; }," POINTS("0.5"),
        false, ROWS_PLAIN, 5e-2, 2);
}

/* cuDNN's, and the bias behind it. */
static void small_conv_library(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "2, 5, 9, 11")
            CONV3D("6") "stride = 2; padding = 1; }," POINTS("0.5"),
        false, ROWS_PLAIN, 1e-4, 1, 4);
}

/* Groups of a warp, and of several blocks. */
static void small_norm(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "6, 50") NORM("3") POINTS("0.5"), true, ROWS_SPOILT, 1e-4, 1, 9);
    RUN(MODEL("float32", "fp32", "4, 15, 20, 30") NORM("2") POINTS("0.5"), true, ROWS_PLAIN, 1e-4,
        1, 3);
}

static void small_points(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "7, 33") "{ op = \"amin\"; dim = 1; }," OUTER("3, 1, 33"), false,
        ROWS_SPOILT, 1e-6, 1, 9);
    RUN(MODEL("float32", "fp32", "70, 3") "{ op = \"amin\"; dim = 1; }," POINTS("0.5"), true,
        ROWS_SPOILT, 1e-6, 1, 9);
    RUN(MODEL("bfloat16", "fp32",
              "9, 5") "{ op = \"add\"; tensor = \"t\"; shape = [9, 1]; }," POINTS("0.5"),
        true, ROWS_SPOILT, 1e-2, 1, 9);
}

/* Adds that leave the shape as it is, among the other points: of every kind of tensor, behind the
 * fused convolution, behind a norm of its own and behind nothing, in rows of every length; and more
 * than one pass takes. */
static void small_adds(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "3, 5, 9, 12") CONV3D("16") "}," NORM("8") ADD("t", "16, 1, 1, 1")
            ADD("u", "3, 1, 10") "{ op = \"clamp\"; min = -2.0; }," ADD("v", "16, 3, 7, 10")
                POINTS("0.5"),
        true, ROWS_SPOILT, 1e-4, 1, 4);
    RUN(MODEL("float16", "fp32", "3, 5, 9, 70") CONV3D("10") "padding = 1; }," NORM("5")
            ADD("t", "9, 1") "{ op = \"dropout\"; p = 0.2; }," ADD("u", "10, 1, 1, 70")
                ADD("v", "1") POINTS("0.5"),
        true, ROWS_PLAIN, 1e-2, 2);
    RUN(MODEL("float32", "fp32", "3, 4, 9, 11") CONV3D("4") "}," NORM("2") ADD("t", "4, 1, 7, 1")
            ADD("u", "4, 2, 7, 9") ADD("v", "9") ADD("x", "2, 1, 1") ADD("y", "4, 1, 1, 9")
                ADD("z", "7, 9") POINTS("0.5"),
        false, ROWS_SPOILT, 1e-4, 3);
    RUN(MODEL("float32", "fp32", "4, 15, 20, 30") NORM("2") ADD("t", "4, 1, 1, 1")
            ADD("u", "15, 1, 30") POINTS("0.5"),
        true, ROWS_PLAIN, 1e-4, 1, 3);
    RUN(MODEL("bfloat16", "fp32", "3, 5") ADD("t", "5") ADD("u", "3, 1") POINTS("0.5"), true,
        ROWS_SPOILT, 1e-2, 1, 9);
    RUN(MODEL("float32", "fp32", "1, 7") ADD("t", "3, 1") ADD("u", "3, 7") ADD("v", "1, 7")
            POINTS("0.5"),
        true, ROWS_SPOILT, 1e-4, 1, 9);
}

/* One number for a run, one for a line, a line's, a run's own: with limits between, and a mask. */
#define ALL_ADDS(c, d, h, w) \
    ADD("t", c ", 1, 1, 1")  \
    ADD("u", h ", 1")        \
    LIMITS ADD("v", w) DROPOUT "," LIMITS ADD("x", c ", " d ", " h ", " w) DROPOUT ");"

/* The same behind the fused convolution, of which nothing is cut off: in whole fours and not, in
 * runs of a line and of several, of more fours than a warp has lanes, from channels of which 16 do
 * not make a tile; drawn masks alone as well. */
static void small_adds_fused(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "3, 4, 8, 12") CONV3D("16") "}," NORM("8")
            ALL_ADDS("16", "2", "6", "10"),
        true, ROWS_SPOILT, 1e-4, 1, 4);
    RUN(MODEL("float32", "fp32", "3, 3, 8, 64") CONV3D("16") "}," NORM("8") ADD("t", "16, 1, 1, 1")
            LIMITS DROPOUT ");",
        false, ROWS_PLAIN, 1e-4, 1, 4);
    RUN(MODEL("float32", "fp32", "3, 3, 8, 64") CONV3D("16") "}," NORM("8")
            ALL_ADDS("16", "1", "6", "62"),
        true, ROWS_PLAIN, 1e-4, 3);
    RUN(MODEL("float32", "fp32", "3, 4, 4, 12") CONV3D("10") "padding = 1; }," NORM("5")
            ADD("t", "4, 1, 1") LIMITS ADD("u", "10, 1, 4, 12") DROPOUT "," ADD("v", "4, 4, 12")
                LIMITS DROPOUT ");",
        true, ROWS_PLAIN, 1e-4, 3);
    RUN(MODEL("float32", "fp32", "3, 4, 7, 11") CONV3D("20") "}," NORM("10")
            ALL_ADDS("20", "2", "5", "9"),
        true, ROWS_PLAIN, 1e-4, 3);
    RUN(MODEL("bfloat16", "fp32", "3, 3, 5, 71") CONV3D("16") "}," NORM("8")
            ALL_ADDS("16", "1", "3", "69"),
        true, ROWS_PLAIN, 5e-2, 3);
    RUN(MODEL("float16", "fp32", "3, 4, 8, 12") CONV3D("16") "}," NORM("8")
            ALL_ADDS("16", "2", "6", "10"),
        false, ROWS_PLAIN, 1e-2, 3);
    RUN(MODEL("float32", "fp32", "3, 4, 7, 64") CONV3D("16") "}," NORM("8") LIMITS DROPOUT
        "," LIMITS DROPOUT ");",
        true, ROWS_PLAIN, 1e-4, 1, 4);
}

/* The guard, the fill, and the full path of rows that the guard stops. */
static void small_constant(void **state)
{
    (void)state;
    RUN(MODEL("float32", "fp32", "3, 5, 9, 12") CONV3D("16") "}," NORM("8") POINTS("0.0"), true,
        ROWS_SPOILT, 1e-4, 1, 9);
    RUN(MODEL("float32", "fp32", "3, 5, 9, 12") CONV3D("16") "}," NORM("8") POINTS("0.0"), false,
        ROWS_SPOILT, 1e-4, 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_narrow),       cmocka_unit_test(small_wide),
        cmocka_unit_test(small_kinds),        cmocka_unit_test(small_library),
        cmocka_unit_test(small_conv),         cmocka_unit_test(small_conv_library),
        cmocka_unit_test(small_norm),         cmocka_unit_test(small_points),
        cmocka_unit_test(small_constant),     cmocka_unit_test(small_conv_implicit),
        cmocka_unit_test(small_conv_shifted), cmocka_unit_test(small_adds),
        cmocka_unit_test(small_scaled),       cmocka_unit_test(small_adds_fused),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
