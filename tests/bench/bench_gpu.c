/*
 * bench_gpu [TORCH [JSON [NAME]]]: how long the GPU backend takes, a line per model and number of
 * rows; only models whose names begin with NAME where it is given.
 *
 * "alone" is the median over batches that run one at a time, from start() to the poll() that sees
 * the end, launches included; "spread" is half the distance from the 10th to the 90th percentile;
 * "busy" is the time per batch with every slot kept full. Data lies in device memory, or in pinned
 * host pages where the name says "host". Inputs rotate beyond the L2 cache. The floor is the larger
 * of the bytes over 4.8 TB/s and the tensor core operations over 989 TFLOP/s (fp32 is three
 * products; w-direct and w-cudnn go by float32 units, 67 TFLOP/s); for "host", the bytes of the
 * longer way over 55 GB/s. TORCH is torch_gpu.py's output of the same run; the last columns are how
 * many times as long PyTorch takes.
 *
 * Names: a and b are the two pipelines; -add has an add of a number per channel behind the norm;
 * -nan and -huge have one such number in one of the rows; c1 to c8 are convolutions that differ in
 * every dimension; w-... are the other ways of "Plans" in kernels/README.md, each alone: w-direct
 * and w-cudnn convolutions without a norm, w-norm-small groups of a warp each, w-amin over the last
 * dimension, w-amin-inner over the first. Lists of c and w as in torch_gpu.py.
 */
#include "tests/gpu/models.h"

#define ROUNDS_MAX 300
#define INPUTS     4

enum { K = 8192, C = 8192 };

struct line {
    const char *name, *torch; /* whose lines of torch_gpu.py it stands beside */
    bool host, train;
    float spoilt; /* a number in the middle row; 0: none */
    int products; /* per multiplication; 0: counted by bytes alone */
    double rate;  /* of the products, operations a second */
};

static struct fixture fixture;
static FILE *json, *torch_file;
static const char *only;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void find_torch(const char *name, uint32_t rows, double *ret_eager, double *ret_compiled)
{
    char line[200], found[32];
    unsigned n;

    *ret_eager = *ret_compiled = 0;
    if (!torch_file || !name)
        return;
    rewind(torch_file);
    while (fgets(line, sizeof(line), torch_file)) {
        double eager, compiled;

        if (sscanf(line, "%31s %u %lf %lf", found, &n, &eager, &compiled) == 4 && n == rows &&
            strcmp(found, name) == 0) {
            *ret_eager = eager;
            *ret_compiled = compiled;
        }
    }
}

/* Of the first stage: a number that it gives takes as many products as an output has weights. */
static double operations(const struct pipeline *pipeline, uint32_t rows)
{
    const struct stage *first = &pipeline->stages[0];
    int64_t weights = first->weight.elements / first->weight.tensor->dims[0];

    return 2.0 * rows * (double)shape_elements(&first->out) * (double)weights;
}

static double floor_of(const struct line *line, const struct pipeline *pipeline, uint32_t rows,
                       uint64_t resident)
{
    double in = (double)rows * (double)shape_elements(&pipeline->in);
    double out = (double)rows * (double)shape_elements(&pipeline->out);
    double esize = (double)dtype_size(pipeline->dtype), most, time;

    if (line->host)
        return fmax(in, out) * esize / 55e9;
    time = ((in + out) * esize + (double)resident) / 4.8e12;
    most = line->products ? line->products * operations(pipeline, rows) / line->rate : 0;
    return fmax(time, most);
}

static void report_line(const struct line *line, const struct pipeline *pipeline, uint32_t rows,
                        uint64_t resident, double *times, int n, double busy)
{
    double median, spread, least, eager, compiled, work;

    qsort(times, (size_t)n, sizeof(*times), by_value);
    median = times[n / 2];
    spread = (times[n * 9 / 10] - times[n / 10]) / 2;
    least = floor_of(line, pipeline, rows, resident);
    find_torch(line->torch, rows, &eager, &compiled);
    work = line->products
               ? operations(pipeline, rows) / median * 1e-12
               : (double)rows *
                     (double)(shape_elements(&pipeline->in) + shape_elements(&pipeline->out)) *
                     (double)dtype_size(pipeline->dtype) / median * 1e-9;
    printf("%-14s %5u %9.1f %7.1f %9.1f %8.0f %-7s %5.2f", line->name, rows, median * 1e6,
           spread * 1e6, busy * 1e6, work, line->products ? "TFLOP/s" : "GB/s", least / median);
    if (eager > 0)
        printf(" %7.2f", eager / (median * 1e6));
    if (compiled > 0)
        printf(" %7.2f", compiled / (median * 1e6));
    printf("\n");
    fflush(stdout);
    if (json)
        fprintf(json,
                "{\"model\": \"%s\", \"rows\": %u, \"alone_us\": %.1f, \"spread_us\": %.1f, "
                "\"busy_us\": %.1f, \"floor_us\": %.1f, \"torch_eager_us\": %.1f, "
                "\"torch_compile_us\": %.1f}\n",
                line->name, rows, median * 1e6, spread * 1e6, busy * 1e6, least * 1e6, eager,
                compiled);
}

static double run_busy(const struct device *device, struct plan *plan, const struct job *inputs,
                       unsigned slots, int n)
{
    struct job jobs[BACKEND_SLOTS_MAX];
    struct batch batches[BACKEND_SLOTS_MAX];
    bool running[BACKEND_SLOTS_MAX] = {false};
    int started = 0, ended = 0;
    double began = device_now();

    while (ended < n)
        for (unsigned s = 0; s < slots; s++) {
            if (running[s]) {
                int r = device->ops->poll(device->backend, s);

                assert_true(r >= 0);
                running[s] = r == 0;
                ended += r;
            }
            if (!running[s] && started < n) {
                jobs[s] = inputs[started++ % INPUTS];
                batches[s] = (struct batch){
                    .plan = plan, .jobs = &jobs[s], .n_jobs = 1, .rows = jobs[s].rows};
                assert_int_equal(device->ops->start(device->backend, s, &batches[s]), 0);
                running[s] = true;
            }
        }
    return (device_now() - began) / n;
}

static void fill(void *to, bool on_device, const struct pipeline *pipeline, uint32_t rows,
                 uint64_t seed, float spoilt)
{
    size_t n = rows * (size_t)shape_elements(&pipeline->in), size = n * dtype_size(pipeline->dtype);
    float *values = malloc(n * sizeof(*values));
    void *raw = malloc(size);

    assert_non_null(values);
    assert_non_null(raw);
    models_input(values, n, seed, 0);
    if (spoilt != 0)
        values[n / 2] = spoilt;
    tensor_from_float(pipeline->dtype, values, raw, n);
    if (on_device)
        device_copy(to, raw, size);
    else
        memcpy(to, raw, size);
    free(values);
    free(raw);
}

static void measure(const struct line *line, const struct pipeline *pipeline, struct plan *plan,
                    uint32_t rows)
{
    const struct device *device = device_get();
    size_t esize = dtype_size(pipeline->dtype);
    size_t x_size = rows * (size_t)shape_elements(&pipeline->in) * esize;
    size_t y_size = rows * (size_t)shape_elements(&pipeline->out) * esize;
    struct region x[INPUTS], y[INPUTS];
    struct job inputs[INPUTS];
    double times[ROUNDS_MAX], began, all = device_now();
    struct backend_info info;
    struct plan_info plan_info;
    int n = 0;

    device->ops->info(device->backend, &info);
    device->ops->plan_info(plan, &plan_info);
    for (int i = 0; i < INPUTS; i++) {
        x[i] = region_new(device, x_size, !line->host);
        y[i] = region_new(device, y_size, !line->host);
        fill(x[i].at, !line->host, pipeline, rows, (uint64_t)i + 1, line->spoilt);
        inputs[i] = (struct job){.x = x[i].at,
                                 .y = y[i].at,
                                 .y_size = y_size,
                                 .x_memory = x[i].memory,
                                 .y_memory = y[i].memory,
                                 .rows = rows,
                                 .train = line->train,
                                 .seed = (uint64_t)i};
    }
    for (int i = -5; i < ROUNDS_MAX && (n < 20 || device_now() - all < 0.7); i++) {
        struct job job = inputs[(i + 5) % INPUTS];

        began = device_now();
        device_run(device, plan, &job, 1);
        assert_int_equal(job.result, 0);
        if (i >= 0)
            times[n++] = device_now() - began;
    }
    report_line(line, pipeline, rows, plan_info.resident_bytes, times, n,
                run_busy(device, plan, inputs, info.slots, n));
    for (int i = 0; i < INPUTS; i++) {
        region_free(device, &x[i]);
        region_free(device, &y[i]);
    }
}

static void bench(const struct line *line, struct pipeline *pipeline, const uint32_t *rows,
                  uint32_t max_rows)
{
    bool hosted = line->torch && line->name[0] != 'c' && rows[0] == 1;
    struct line host = *line;
    struct plan *plan;
    char name[32];

    if (only && strncmp(only, line->name, strlen(only)) != 0) {
        pipeline_free(pipeline);
        return;
    }
    plan = device_load(device_get(), pipeline, max_rows);
    for (; *rows; rows++) {
        measure(line, pipeline, plan, *rows);
        if (hosted && (*rows == 1 || *rows == max_rows)) {
            snprintf(name, sizeof(name), "%s host", line->name);
            host.name = name;
            host.host = true;
            host.torch = NULL;
            measure(&host, pipeline, plan, *rows);
        }
    }
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
}

/* B in another dtype, or with an add in front of its minimum: 0.0 makes it constant, 0.5 or an add
 * does not. */
static struct pipeline *model_b(const char *dtype, const char *add, const char *minimum)
{
    char text[1024];

    snprintf(text, sizeof(text),
             "name = \"b\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\";"
             "input = { shape = [3, 16, 64, 64]; };"
             "stages = ({ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 16; kernel = 3; },"
             "{ op = \"group_norm\"; groups = 8; weight = \"g\"; bias = \"h\"; }, %s"
             "{ op = \"minimum\"; value = %s; }, { op = \"clamp\"; min = 0.0; max = 1.0; },"
             "{ op = \"dropout\"; p = 0.2; });",
             dtype, add, minimum);
    return models_build(&fixture, text, 81);
}

/* conv3d, group_norm, minimum 0.5, clamp 0 to 1, dropout 0.2. */
struct shape_line {
    const char *name, *dtype;
    int channels, in[3], outs, kernel[3], stride[3], padding[3], groups;
    uint32_t rows;
    bool train;
};

static const struct shape_line shapes[] = {
    {"c1", "float32", 3, {16, 56, 56}, 32, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, 8, 32, false},
    {"c2", "float32", 1, {24, 33, 47}, 8, {5, 5, 5}, {1, 1, 1}, {2, 2, 2}, 4, 64, false},
    {"c3", "float32", 16, {12, 28, 28}, 32, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, 16, 64, true},
    {"c4", "float32", 32, {17, 41, 41}, 64, {3, 3, 3}, {2, 2, 2}, {1, 1, 1}, 32, 24, false},
    {"c5", "float32", 64, {9, 32, 30}, 20, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, 1, 48, false},
    {"c6", "bfloat16", 24, {10, 31, 29}, 48, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, 6, 40, false},
    {"c7", "float16", 64, {8, 28, 28}, 96, {3, 3, 3}, {1, 1, 1}, {1, 1, 1}, 12, 16, false},
    {"c8", "float32", 7, {13, 27, 35}, 10, {3, 5, 1}, {2, 1, 1}, {1, 2, 0}, 10, 96, true},
};

static void bench_shape(const struct shape_line *shape)
{
    const int *in = shape->in, *kernel = shape->kernel, *stride = shape->stride;
    const int *padding = shape->padding;
    const uint32_t rows[] = {1, shape->rows, 0};
    struct line line = {shape->name, shape->name, .train = shape->train};
    char text[1024];

    snprintf(text, sizeof(text),
             "name = \"c\"; weights = \"" FIXTURE_WEIGHTS "\"; dtype = \"%s\";"
             "input = { shape = [%d, %d, %d, %d]; };"
             "stages = ({ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = %d;"
             "kernel = [%d, %d, %d]; stride = [%d, %d, %d]; padding = [%d, %d, %d]; },"
             "{ op = \"group_norm\"; groups = %d; weight = \"g\"; bias = \"h\"; },"
             "{ op = \"minimum\"; value = 0.5; }, { op = \"clamp\"; min = 0.0; max = 1.0; },"
             "{ op = \"dropout\"; p = 0.2; });",
             shape->dtype, shape->channels, in[0], in[1], in[2], shape->outs, kernel[0], kernel[1],
             kernel[2], stride[0], stride[1], stride[2], padding[0], padding[1], padding[2],
             shape->groups);
    bench(&line, models_build(&fixture, text, shape->channels * kernel[0] * kernel[1] * kernel[2]),
          rows, shape->rows);
}

/* A model of these stages alone; products and rate as in struct line. */
struct way_line {
    const char *name, *keys, *input, *stages;
    uint32_t rows;
    int fan_in, products;
    double rate;
    bool train;
};

#define LINEAR "{ op = \"linear\"; weight = \"w\"; bias = \"b\"; out = 4096; }"
#define CONV3D "{ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; "
#define NORM   "{ op = \"group_norm\"; weight = \"g\"; bias = \"h\"; "

static const struct way_line ways[] = {
    {"w-linear", "", "4096", LINEAR, .rows = 1024, .fan_in = 4096, .products = 3, .rate = 989e12},
    {"w-linear-tf32", "precision = \"tf32\";", "4096", LINEAR, .rows = 1024, .fan_in = 4096,
     .products = 1, .rate = 989e12},
    {"w-linear-bf16", "dtype = \"bfloat16\";", "4096", LINEAR, .rows = 1024, .fan_in = 4096,
     .products = 1, .rate = 989e12},
    /* Shared memory has room for 5 channels of 3 x 3 x 3, or 17 of these. */
    {"w-direct", "", "16, 16, 64, 64",
     CONV3D "out = 16; kernel = [1, 3, 3]; padding = [0, 1, 1]; }", .rows = 16, .fan_in = 144,
     .products = 1, .rate = 67e12},
    {"w-cudnn", "", "32, 16, 56, 56", CONV3D "out = 64; kernel = 3; stride = 2; padding = 1; }",
     .rows = 16, .fan_in = 864, .products = 1, .rate = 67e12},
    {"w-norm", "", "32, 8, 64, 64", NORM "groups = 8; }", .rows = 16},
    {"w-norm-small", "", "64, 8, 8", NORM "groups = 16; }", .rows = 4096},
    {"w-tail", "", "16, 256, 256",
     "{ op = \"clamp\"; min = 0.25; max = 0.75; }, { op = \"dropout\"; p = 0.2; }", .rows = 16,
     .train = true},
    {"w-add", "", "16, 256, 256", "{ op = \"add\"; tensor = \"t\"; shape = [16, 1, 1]; }",
     .rows = 16},
    {"w-amin", "", "8192", "{ op = \"amin\"; dim = 1; }", .rows = 3072},
    {"w-amin-inner", "", "64, 64, 64", "{ op = \"amin\"; dim = 1; }", .rows = 96},
};

static void bench_way(const struct way_line *way)
{
    const uint32_t rows[] = {way->rows, 0};
    struct line line = {way->name, way->name, .train = way->train, .products = way->products,
                        .rate = way->rate};
    char text[1024];

    snprintf(text, sizeof(text),
             "name = \"w\"; weights = \"" FIXTURE_WEIGHTS "\"; %s input = { shape = [%s]; };"
             "stages = (%s);",
             way->keys, way->input, way->stages);
    bench(&line, models_build(&fixture, text, way->fan_in), rows, way->rows);
}

int main(int argc, char **argv)
{
    static const uint32_t a_rows[] = {1, 16, 64, 256, 1024, 4096, 0}, few[] = {1, 1024, 0};
    static const uint32_t b_rows[] = {1, 8, 32, 128, 0}, many[] = {128, 0};
    struct backend_info info;

    torch_file = argc > 1 ? fopen(argv[1], "r") : NULL;
    json = argc > 2 ? fopen(argv[2], "w") : NULL;
    only = argc > 3 ? argv[3] : NULL;
    device_get()->ops->info(device_get()->backend, &info);
    printf("%s, driver %s, %s\n", info.device, info.driver, info.runtime);
    printf("%-14s %5s %9s %7s %9s %8s %-7s %5s %7s %7s\n", "model", "rows", "alone us", "spread",
           "busy us", "rate", "", "floor", "eager", "compile");
    fixture_make(&fixture);
    bench(&(struct line){"a-fp32", "a-fp32", .products = 3, .rate = 989e12},
          models_a(&fixture, "float32", "fp32", K, C, 512), a_rows, 1024);
    bench(&(struct line){"a-tf32", "a-tf32", .products = 1, .rate = 989e12},
          models_a(&fixture, "float32", "tf32", K, C, 512), few, 1024);
    bench(&(struct line){"a-bf16", "a-bf16", .products = 1, .rate = 989e12},
          models_a(&fixture, "bfloat16", "fp32", K, C, 512), few, 1024);
    bench(&(struct line){"b-train", "b-train", .train = true},
          models_b(&fixture, true, 16, 64, 64, "0.0"), b_rows, 128);
    bench(&(struct line){.name = "b-eval", .torch = "b-eval"},
          models_b(&fixture, true, 16, 64, 64, "0.0"), b_rows, 128);
    bench(&(struct line){.name = "b-full", .torch = "b-full"},
          models_b(&fixture, true, 16, 64, 64, "0.5"), b_rows, 128);
    bench(&(struct line){.name = "b-full-train", .torch = "b-full-train", .train = true},
          models_b(&fixture, true, 16, 64, 64, "0.5"), many, 128);
    bench(&(struct line){.name = "b-full-add", .torch = "b-full-add"},
          model_b("float32", "{ op = \"add\"; tensor = \"t\"; shape = [16, 1, 1, 1]; },", "0.5"),
          many, 128);
    bench(&(struct line){.name = "b-full-add-all", .torch = "b-full-add-all"},
          model_b("float32", "{ op = \"add\"; tensor = \"t\"; shape = [16, 14, 62, 62]; },", "0.5"),
          many, 128);
    bench(&(struct line){.name = "b-eval-nan", .spoilt = NAN}, model_b("float32", "", "0.0"), many,
          128);
    bench(&(struct line){.name = "b-eval-huge", .spoilt = 1e38f}, model_b("float32", "", "0.0"),
          many, 128);
    bench(&(struct line){.name = "b-train-nan", .train = true, .spoilt = NAN},
          model_b("float32", "", "0.0"), many, 128);
    bench(&(struct line){.name = "b-train-huge", .train = true, .spoilt = 1e38f},
          model_b("float32", "", "0.0"), many, 128);
    for (int i = 0; i < 6; i++) {
        static const char *const names[] = {"b-eval-bf16", "b-train-bf16", "b-full-bf16",
                                            "b-eval-f16",  "b-train-f16",  "b-full-f16"};

        bench(&(struct line){names[i], names[i], .train = i % 3 == 1},
              model_b(i < 3 ? "bfloat16" : "float16", "", i % 3 == 2 ? "0.5" : "0.0"), many, 128);
    }
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        bench_shape(&shapes[i]);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        bench_way(&ways[i]);
    fixture_remove(&fixture);
    if (torch_file)
        fclose(torch_file);
    return json && fclose(json) != 0;
}
