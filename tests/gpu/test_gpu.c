/*
 * What only the GPU backend has: the same bits at any place of any batch, on any slot and in any
 * memory, blocks, compact results, the guard, masks of real size, float64's accuracy at real size,
 * nothing allocated while serving, and how it fails.
 *
 * With an argument this program is its own child: it drives the faulty build and says by its exit
 * status whether that failed as it must.
 */
#include "tests/gpu/models.h"

#include <jansson.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "tests/kernels/sha256.h"

extern char **environ;

static struct fixture fixture;

/* Allocations while serving: calls of malloc and its kin from the backend's own object. */

static atomic_int allocations;
static atomic_bool counting;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t size);

static void count_from(const void *caller)
{
    Dl_info info;

    if (counting && dladdr(caller, &info) && strstr(info.dli_fname, "fused-cuda.so"))
        allocations++;
}

void *malloc(size_t size)
{
    count_from(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    count_from(__builtin_return_address(0));
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    count_from(__builtin_return_address(0));
    return __libc_realloc(p, size);
}

static size_t device_free(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*info)(size_t *, size_t *);
    size_t free_bytes, total;

    *(void **)&info = dlsym(driver, "cuMemGetInfo_v2");
    assert_non_null(info);
    assert_int_equal(info(&free_bytes, &total), 0);
    return free_bytes;
}

static void test_info(void **state)
{
    struct device *device = device_get();
    struct backend_info info;

    (void)state;
    for (int i = 0; i < 30; i++) { /* the watcher's first reading takes a moment */
        device->ops->info(device->backend, &info);
        if (info.temperature_c >= 0)
            break;
        usleep(100000);
    }
    printf("%s %s, driver %s, %s, %u slots, %" PRIu64 " of %" PRIu64 " MiB free, %d C, %d W, %d "
           "MHz\n",
           info.device, info.uuid, info.driver, info.runtime, info.slots,
           info.memory_free_bytes >> 20, info.memory_total_bytes >> 20, info.temperature_c,
           info.power_w, info.clock_mhz);
    assert_string_equal(info.name, "cuda");
    assert_true(strlen(info.uuid) == 40);
    assert_true(info.memory_free_bytes > 0 && info.memory_free_bytes <= info.memory_total_bytes);
    assert_true(info.temperature_c > 0 && info.power_w > 0 && info.clock_mhz > 0);
    assert_true(info.driver[0] != 0);
}

/* Same bits */

/* Rows of x dealt to jobs of the given sizes, in the given order; results go back to y by row. */
static void run_dealt(struct plan *plan, const struct pipeline *pipeline, const float *x, float *y,
                      uint32_t rows, const uint32_t *order, const uint32_t *sizes, unsigned n_jobs,
                      bool compact, int kind)
{
    int64_t in = shape_elements(&pipeline->in);
    int64_t out = compact ? 1 : shape_elements(&pipeline->out);
    struct job *jobs = array(n_jobs, sizeof(*jobs));
    size_t *x_size = array(n_jobs, sizeof(*x_size));
    float *xs = array((size_t)(rows * in), sizeof(*xs)), *ys = array((size_t)(rows * out), 4);
    uint32_t row = 0;

    for (uint32_t i = 0; i < rows; i++)
        memcpy(xs + i * in, x + order[i] * in, (size_t)in * sizeof(*xs));
    for (unsigned i = 0; i < n_jobs; i++) {
        jobs[i] = (struct job){.x = xs + row * in,
                               .y = ys + row * out,
                               .y_size = (uint64_t)(sizes[i] * out) * 4,
                               .rows = sizes[i],
                               .compact = compact};
        x_size[i] = (size_t)(sizes[i] * in) * 4;
        row += sizes[i];
    }
    assert_int_equal(row, rows);
    device_run_in(device_get(), plan, jobs, n_jobs, x_size, kind, 0);
    row = 0;
    for (unsigned i = 0; i < n_jobs; i++) {
        assert_int_equal(jobs[i].result, 0);
        for (uint32_t k = 0; k < sizes[i]; k++)
            for (int64_t e = 0; e < out; e++) /* a moved batch: rows are the fast axis */
                y[order[row + k] * out + e] = pipeline->out.batch ? ys[row * out + e * sizes[i] + k]
                                                                  : ys[(row + k) * out + e];
        row += sizes[i];
    }
    free(jobs);
    free(x_size);
    free(xs);
    free(ys);
}

static void same(const char *what, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof(*a)) != 0 && !(isnan(a[i]) && isnan(b[i])))
            fail_msg("%s: element %zu is %.9g, and %.9g before", what, i, (double)b[i],
                     (double)a[i]);
}

static void shuffle(uint32_t *order, uint32_t n, uint64_t *state)
{
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        uint32_t k = (uint32_t)(*state >> 33) % i, t = order[i - 1];

        order[i - 1] = order[k];
        order[k] = t;
    }
}

/* All rows at once, shuffled at once, in jobs of 1 and of uneven sizes, and each row alone. */
static void check_same_bits(const struct pipeline *pipeline, uint32_t rows, uint32_t max_rows,
                            bool compact, uint32_t n_alone)
{
    struct plan *plan = device_load(device_get(), pipeline, max_rows);
    size_t in = (size_t)shape_elements(&pipeline->in);
    size_t out = compact ? 1 : (size_t)shape_elements(&pipeline->out);
    float *x = array(rows * in, 4), *want = array(rows * out, 4), *y = array(rows * out, 4);
    uint32_t *order = array(rows, sizeof(*order)), *sizes = array(rows, sizeof(*sizes));
    uint64_t state = 99;
    unsigned n = 0;

    models_input(x, rows * in, 7, -0.5f);
    for (uint32_t i = 0; i < rows; i++)
        order[i] = i;
    sizes[0] = rows;
    run_dealt(plan, pipeline, x, want, rows, order, sizes, 1, compact, 2);
    run_dealt(plan, pipeline, x, y, rows, order, sizes, 1, compact, 1);
    same("again", want, y, rows * out);
    shuffle(order, rows, &state);
    run_dealt(plan, pipeline, x, y, rows, order, sizes, 1, compact, 2);
    same("shuffled", want, y, rows * out);
    for (uint32_t left = rows; left > 0; left -= sizes[n++])
        sizes[n] = left < n * 3 % 37 + 1 ? left : n * 3 % 37 + 1;
    run_dealt(plan, pipeline, x, y, rows, order, sizes, n, compact, 0);
    same("in uneven jobs", want, y, rows * out);
    for (uint32_t i = 0; i < rows; i++)
        sizes[i] = 1;
    run_dealt(plan, pipeline, x, y, rows, order, sizes, rows, compact, 1);
    same("in jobs of one", want, y, rows * out);
    for (uint32_t i = 0; i < n_alone; i++) {
        uint32_t row = i * (rows / n_alone), zero = 0;

        run_dealt(plan, pipeline, x + row * in, y, 1, &zero, sizes, 1, compact, 2);
        same("alone", want + row * out, y, out);
    }
    device_get()->ops->unload(device_get()->backend, plan);
    free(x);
    free(want);
    free(y);
    free(order);
    free(sizes);
}

static void test_same_bits_a(void **state)
{
    static const char *const precision[] = {"fp32", "tf32"};
    static const int groups[] = {64, 32}; /* of 16 channels, in one kernel; of 32, by cuBLASLt */
    struct pipeline *pipeline;

    (void)state;
    for (int i = 0; i < 4; i++) {
        pipeline = models_a(&fixture, "float32", precision[i % 2], 2048, 1024, groups[i / 2]);
        check_same_bits(pipeline, 700, 1024, true, 8);
        check_same_bits(pipeline, 130, 48, false, 4);
        pipeline_free(pipeline);
    }
}

static void test_same_bits_b(void **state)
{
    static const char text[] =
        "name = \"c\"; weights = \"" FIXTURE_WEIGHTS "\"; input = { shape = [20, 7, 9, 11]; };"
        "stages = ({ op = \"conv3d\"; weight = \"w\"; bias = \"b\"; out = 24; kernel = 3;"
        "stride = 2; padding = 1; }, { op = \"group_norm\"; groups = 6; });";
    struct pipeline *pipeline = models_b(&fixture, false, 6, 20, 30, "0.5");

    (void)state;
    check_same_bits(pipeline, 37, 64, false, 4);
    pipeline_free(pipeline);
    pipeline = models_build(&fixture, text, 540); /* cuDNN's */
    check_same_bits(pipeline, 150, 100, false, 4);
    pipeline_free(pipeline);
}

/* A job in blocks is the same as a job in one: also where parts of the result are strided, and
 * large enough for the copy engine. */
static void test_blocks(void **state)
{
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", 128, 2048, 128);
    const uint32_t rows = 333, limits[] = {1024, 100, 7};
    size_t in = 128, out = 2048, x_size = rows * in * 4;
    float *x = array(rows * in, 4), *want = array(rows * out, 4), *y = array(rows * out, 4);

    (void)state;
    models_input(x, rows * in, 3, -0.5f);
    for (int i = 0; i < 3; i++) {
        struct plan *plan = device_load(device_get(), pipeline, limits[i]);

        for (int kind = 0; kind < 3; kind++) {
            struct job job = {.x = x, .y = y, .y_size = rows * out * 4, .rows = rows};

            memset(y, 0xff, rows * out * 4);
            device_run_in(device_get(), plan, &job, 1, &x_size, kind, 0);
            assert_int_equal(job.result, 0);
            if (i == 0 && kind == 0)
                memcpy(want, y, rows * out * 4);
            same("in blocks", want, y, rows * out);
        }
        device_get()->ops->unload(device_get()->backend, plan);
    }
    pipeline_free(pipeline);
    free(x);
    free(want);
    free(y);
}

/* Slots at once, in every order of their ends. */
static void test_slots(void **state)
{
    struct device *device = device_get();
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", 512, 512, 32);
    struct plan *plan = device_load(device, pipeline, 64);
    struct backend_info info;
    struct region region = region_new(device, 8 * 64 * 512 * 8, false);
    const uint32_t rows = 50;
    size_t n = rows * 512;
    float *want = array(n, 4);

    (void)state;
    device->ops->info(device->backend, &info);
    assert_true(info.slots >= 2);
    for (int round = 0; round < 20; round++) {
        struct job jobs[BACKEND_SLOTS_MAX] = {0};
        struct batch batches[BACKEND_SLOTS_MAX];
        int ended[BACKEND_SLOTS_MAX] = {0};

        for (unsigned s = 0; s < info.slots; s++) {
            float *x = (float *)region.at + s * 2 * 64 * 512;

            models_input(x, n, s + 1, 0);
            jobs[s] = (struct job){.x = x,
                                   .y = x + 64 * 512,
                                   .y_size = n * 4,
                                   .rows = rows,
                                   .x_memory = region.memory,
                                   .y_memory = region.memory};
            batches[s] = (struct batch){.plan = plan, .jobs = &jobs[s], .n_jobs = 1, .rows = rows};
            memset(jobs[s].y, 0xff, n * 4);
        }
        for (unsigned s = 0; s < info.slots; s++)
            assert_int_equal(device->ops->start(device->backend, s, &batches[s]), 0);
        for (unsigned left = info.slots; left > 0;)
            for (unsigned s = 0; s < info.slots; s++)
                if (!ended[s] && (ended[s] = device->ops->poll(device->backend, s)) != 0) {
                    assert_int_equal(ended[s], 1);
                    left--;
                }
        if (round == 0)
            memcpy(want, jobs[0].y, n * 4);
        same("slot 0", want, jobs[0].y, n);
        for (unsigned s = 1; s < info.slots; s++) { /* the same rows on another slot */
            struct job job = jobs[0];
            struct batch batch = {.plan = plan, .jobs = &job, .n_jobs = 1, .rows = rows};

            job.y = jobs[s].y;
            assert_int_equal(device->ops->start(device->backend, s, &batch), 0);
            assert_int_equal(device_wait(device, s, 10), 1);
            same("another slot", want, job.y, n);
        }
    }
    region_free(device, &region);
    device->ops->unload(device->backend, plan);
    pipeline_free(pipeline);
    free(want);
}

/* Parts of one request, each on a slot of its own, are the same as the request. */
static void check_parts(const struct pipeline *pipeline, uint32_t rows, bool train, bool compact,
                        int kind)
{
    struct device *device = device_get();
    struct plan *plan = device_load(device, pipeline, 128);
    const uint32_t ends[] = {0, 100, 228, rows};
    size_t in = (size_t)shape_elements(&pipeline->in) * 4 * rows;
    size_t out = (compact ? 1 : (size_t)shape_elements(&pipeline->out)) * 4 * rows;
    struct region region = region_new(device, in + out, kind == 2);
    float *x = array(in, 1), *want = array(out, 1), *y = array(out, 1);
    struct job whole = {.x = x,
                        .y = want,
                        .y_size = out,
                        .rows = rows,
                        .train = train,
                        .compact = compact,
                        .seed = 3};
    struct batch batches[3];
    struct job parts[3];

    models_input(x, in / 4, 5, -0.5f);
    device_run_in(device, plan, &whole, 1, &in, kind, 0);
    assert_int_equal(whole.result, 0);
    region_copy(&region, region.at, x, in);
    memset(y, 0xff, out);
    region_copy(&region, region.at + in, y, out);
    for (int i = 0; i < 3; i++) {
        parts[i] = whole;
        parts[i].x = region.at;
        parts[i].y = region.at + in;
        parts[i].x_memory = parts[i].y_memory = region.memory;
        parts[i].first_row = ends[i];
        parts[i].part_rows = ends[i + 1] - ends[i];
        batches[i] = (struct batch){
            .plan = plan, .jobs = &parts[i], .n_jobs = 1, .rows = parts[i].part_rows};
        assert_int_equal(device->ops->start(device->backend, (unsigned)i, &batches[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(device_wait(device, (unsigned)i, 10), 1);
        assert_int_equal(parts[i].result, 0);
    }
    region_copy(&region, y, region.at + in, out);
    same("in parts", want, y, out / 4);
    region_free(device, &region);
    device->ops->unload(device->backend, plan);
    free(x);
    free(want);
    free(y);
}

static void test_parts(void **state)
{
    struct pipeline *a = models_a(&fixture, "float32", "fp32", 128, 2048, 128);
    struct pipeline *b = models_b(&fixture, true, 5, 9, 12, "0.0");
    struct pipeline *full = models_b(&fixture, false, 5, 9, 12, "0.5");

    (void)state;
    for (int kind = 1; kind < 3; kind++) {
        check_parts(a, 333, false, false, kind); /* strided, by the copy engine */
        check_parts(a, 333, false, true, kind);
        check_parts(b, 301, true, false, kind);
        check_parts(full, 301, true, false, kind);
    }
    pipeline_free(a);
    pipeline_free(b);
    pipeline_free(full);
}

/* Pinned pages are ranges of 32 MiB to the driver: rows up, and results down, in one piece and in
 * runs, lie across their borders. */
static void check_pieces(const struct pipeline *pipeline, uint32_t rows, uint32_t most)
{
    struct device *device = device_get();
    struct plan *plan = device_load(device, pipeline, most);
    size_t in = (size_t)shape_elements(&pipeline->in) * 4 * rows;
    size_t out = (size_t)shape_elements(&pipeline->out) * 4 * rows;
    const size_t x_at = ((size_t)12 << 20) + 4, y_at = ((size_t)52 << 20) + 8;
    struct region region = region_new(device, y_at + out, false);
    float *x = array(in, 1), *want = array(out, 1);
    struct job whole = {.x = x, .y = want, .y_size = out, .rows = rows};
    struct job job, parts[3];
    struct batch batch = {.plan = plan, .jobs = &job, .n_jobs = 1, .rows = rows}, batches[3];

    assert_true(x_at + in < y_at);
    assert_true(y_at + out > (size_t)64 << 20);
    models_input(x, in / 4, 9, -0.5f);
    device_run_in(device, plan, &whole, 1, &in, 2, 0);
    assert_int_equal(whole.result, 0);
    memcpy(region.at + x_at, x, in);
    job = whole;
    job.x = region.at + x_at;
    job.y = region.at + y_at;
    job.x_memory = job.y_memory = region.memory;
    memset(job.y, 0xff, out);
    assert_int_equal(device->ops->start(device->backend, 0, &batch), 0);
    assert_int_equal(device_wait(device, 0, 10), 1);
    assert_int_equal(job.result, 0);
    same("whole", want, job.y, out / 4);
    memset(job.y, 0xff, out);
    for (uint32_t i = 0; i < 3; i++) {
        parts[i] = job;
        parts[i].first_row = i * (rows / 3);
        parts[i].part_rows = i < 2 ? rows / 3 : rows - 2 * (rows / 3);
        batches[i] = (struct batch){
            .plan = plan, .jobs = &parts[i], .n_jobs = 1, .rows = parts[i].part_rows};
        assert_int_equal(device->ops->start(device->backend, i, &batches[i]), 0);
    }
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(device_wait(device, i, 10), 1);
        assert_int_equal(parts[i].result, 0);
    }
    same("in parts", want, job.y, out / 4);
    region_free(device, &region);
    device->ops->unload(device->backend, plan);
    free(x);
    free(want);
}

static void test_pieces(void **state)
{
    struct pipeline *a = models_a(&fixture, "float32", "fp32", 1024, 1024, 64);
    struct pipeline *full = models_b(&fixture, false, 16, 64, 64, "0.5");

    (void)state;
    check_pieces(a, 6001, 2048);
    check_pieces(full, 13, 8);
    pipeline_free(a);
    pipeline_free(full);
}

/* Many requests in no buffer, and a device that is busy: start and poll copy what they must, and
 * never wait for the device. */
static void test_never_waits(void **state)
{
    enum { K = 8192, C = 2048, BUSY = 16384, PLAIN = 512 };
    struct device *device = device_get();
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", K, C, 128);
    struct plan *plan = device_load(device, pipeline, BUSY);
    struct region region = region_new(device, (size_t)BUSY * (K + C) * 4, true);
    float *x = array((size_t)PLAIN * K, 4), *y = array((size_t)PLAIN * C, 4);
    struct job busy = {.x = region.at,
                       .y = region.at + (size_t)BUSY * K * 4,
                       .y_size = (uint64_t)BUSY * C * 4,
                       .x_memory = region.memory,
                       .y_memory = region.memory,
                       .rows = BUSY};
    struct job *jobs = array(PLAIN, sizeof(*jobs));
    struct batch batches[2] = {
        {.plan = plan, .jobs = &busy, .n_jobs = 1, .rows = BUSY},
        {.plan = plan, .jobs = jobs, .n_jobs = PLAIN, .rows = PLAIN},
    };
    double began, took, longest, least = INFINITY; /* of the rounds: what waits does so in all */
    int r;

    (void)state;
    models_input(x, (size_t)PLAIN * K, 1, 0);
    for (int i = 0; i < PLAIN; i++)
        jobs[i] = (struct job){
            .x = x + (size_t)i * K, .y = y + (size_t)i * C, .y_size = (uint64_t)C * 4, .rows = 1};
    for (int round = 0; round < 5; round++) { /* the first touches pages */
        assert_int_equal(device->ops->start(device->backend, 0, &batches[0]), 0);
        began = device_now();
        assert_int_equal(device->ops->start(device->backend, 1, &batches[1]), 0);
        longest = device_now() - began;
        do {
            took = device_now();
            r = device->ops->poll(device->backend, 1);
            took = device_now() - took;
            longest = took > longest ? took : longest;
        } while (r == 0);
        assert_int_equal(r, 1);
        took = device_now() - began;
        least = fmin(least, longest);
        assert_int_equal(device_wait(device, 0, 10), 1);
    }
    printf("%d plain requests took %.2f ms beside %d rows, the longest call %.2f ms\n", PLAIN,
           took * 1e3, BUSY, least * 1e3);
    assert_true(least < 1.5e-3);
    region_free(device, &region);
    device->ops->unload(device->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(y);
    free(jobs);
}

/* The guard: what the proof gives is what the full path gives, for every kind of sample. */
static void test_guard(void **state)
{
    struct pipeline *full = models_b(&fixture, false, 5, 9, 12, "0.0");
    struct pipeline *proven = models_b(&fixture, true, 5, 9, 12, "0.0");
    struct plan *full_plan = device_load(device_get(), full, 64);
    struct plan *plan = device_load(device_get(), proven, 64);
    size_t in = (size_t)shape_elements(&full->in), out = (size_t)shape_elements(&full->out);
    const uint32_t rows = 90;
    size_t x_size = rows * in * 4;
    float *x = array(rows * in, 4), *want = array(rows * out, 4), *y = array(rows * out, 4);

    (void)state;
    assert_true(proven->proof.constant && !full->proof.constant);
    models_input(x, rows * in, 5, -0.5f);
    for (uint32_t row = 0; row < rows; row += 7) {
        float *sample = x + row * in + row % 50;

        *sample = (const float[]){NAN, INFINITY, -INFINITY, 3e38f, -1e38f, 1e37f}[row / 7 % 6];
    }
    for (int train = 0; train < 2; train++)
        for (int kind = 0; kind < 3; kind++) {
            struct job job = {.x = x,
                              .y = want,
                              .y_size = rows * out * 4,
                              .rows = rows,
                              .train = train,
                              .seed = 42,
                              .offset = 4 * 77};

            device_run_in(device_get(), full_plan, &job, 1, &x_size, kind, 0);
            assert_int_equal(job.result, 0);
            job.y = y;
            memset(y, 0xff, rows * out * 4);
            device_run_in(device_get(), plan, &job, 1, &x_size, kind, 0);
            assert_int_equal(job.result, 0);
            same("the proof's result", want, y, rows * out);
        }
    device_get()->ops->unload(device_get()->backend, full_plan);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(full);
    pipeline_free(proven);
    free(x);
    free(want);
    free(y);
}

/* Compact results of B: states, then full samples in order, two in a block; too little room fails
 * that job alone. */
static void check_compact(int d, int h, int w)
{
    struct pipeline *pipeline = models_b(&fixture, true, d, h, w, "0.0");
    struct plan *plan = device_load(device_get(), pipeline, 16);
    size_t in = (size_t)shape_elements(&pipeline->in), out = (size_t)shape_elements(&pipeline->out);
    const uint32_t rows = 37;
    size_t x_size[3] = {rows * in * 4, in * 4, rows * in * 4}, room = BACKEND_COMPACT_ROOM(rows);
    float *x = array(rows * in, 4), *whole = array(rows * out, 4);
    uint8_t *y = array(1, room + rows * out * 4), *small = array(1, room + out * 4 - 1);

    models_input(x, rows * in, 5, -0.5f);
    for (uint32_t row = 3; row < rows; row += 4)
        x[row * in + row] = row % 8 == 3 ? 1e38f : NAN;
    for (int kind = 0; kind < 3; kind++) {
        struct job jobs[3] = {
            {.x = x, .y = y, .y_size = room + rows * out * 4, .rows = rows, .compact = true},
            {.x = x, .y = whole, .y_size = out * 4, .rows = 1},
            {.x = x, .y = small, .y_size = room + out * 4 - 1, .rows = rows, .compact = true},
        };
        uint32_t n_full = 0;

        memset(y, 0xee, room + rows * out * 4);
        device_run_in(device_get(), plan, jobs, 3, x_size, kind, 0);
        assert_int_equal(jobs[0].result, 0);
        assert_int_equal(jobs[1].result, 0);
        assert_int_equal(jobs[2].result, -ENOSPC);
        jobs[1] = (struct job){.x = x, .y = whole, .y_size = rows * out * 4, .rows = rows};
        device_run_in(device_get(), plan, &jobs[1], 1, x_size, kind, 0);
        for (uint32_t row = 0; row < rows; row++) {
            int want = row % 4 != 3 ? 0 : row % 8 == 3 ? 2 : 1;

            if (y[row] != want)
                fail_msg("state of row %u is %d, not %d", row, y[row], want);
            if (want == 2)
                same("a full sample", whole + row * out, (float *)(y + room) + n_full++ * out, out);
        }
        for (size_t i = rows; i < room; i++)
            assert_int_equal(y[i], 0);
        assert_int_equal(jobs[0].n_full, n_full);
    }
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(whole);
    free(y);
    free(small);
}

/* A variance beyond float32 gives beta, also where a difference from the mean is beyond it too. */
static void test_overflow(void **state)
{
    static const char text[] =
        "name = \"n\"; weights = \"" FIXTURE_WEIGHTS "\"; input = { shape = [32]; };"
        "stages = ({ op = \"group_norm\"; groups = 2; weight = \"g\"; bias = \"h\"; });";
    struct pipeline *pipeline = models_build(&fixture, text, 1);
    struct plan *plan = device_load(device_get(), pipeline, 4);
    float x[32], y[32];
    struct job job = {.x = x, .y = y, .y_size = sizeof(y), .rows = 1};

    (void)state;
    models_input(x, 32, 1, -0.5f);
    for (int i = 0; i < 16; i++)
        x[i] = i == 5 ? -3e38f : 3e38f;
    device_run(device_get(), plan, &job, 1);
    assert_int_equal(job.result, 0);
    for (int i = 0; i < 32; i++)
        if (i < 16 ? y[i] != models_fill("h", i) : !isfinite(y[i]))
            fail_msg("y[%d] is %.9g, beta %.9g", i, (double)y[i], (double)models_fill("h", i));
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
}

/* Samples that kernels write themselves, and those above 512 KiB that the copy engine brings. */
static void test_compact_b(void **state)
{
    (void)state;
    check_compact(5, 9, 12);
    check_compact(20, 26, 26);
}

/* Compact and full results of A in one batch. */
static void test_compact_a(void **state)
{
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", 96, 128, 8);
    struct plan *plan = device_load(device_get(), pipeline, 64);
    const uint32_t rows = 21;
    size_t x_size[3] = {rows * 96 * 4, rows * 96 * 4, 5 * 96 * 4};
    float *x = array(rows * 96, 4), *m = array(rows, 4), *y = array(rows * 128, 4);
    float *few = array(5, 4), tensor[128];
    struct report report;

    (void)state;
    models_input(x, rows * 96, 5, -0.5f);
    if (pipeline_param(pipeline, &pipeline->stages[3].weight, 0, 128, tensor, &report) < 0)
        fail_msg("%s", report.text);
    for (int kind = 0; kind < 3; kind++) {
        struct job jobs[3] = {
            {.x = x, .y = m, .y_size = rows * 4, .rows = rows, .compact = true},
            {.x = x, .y = y, .y_size = rows * 128 * 4, .rows = rows},
            {.x = x, .y = few, .y_size = 5 * 4, .rows = 5, .compact = true},
        };

        device_run_in(device_get(), plan, jobs, 3, x_size, kind, 0);
        for (int i = 0; i < 3; i++)
            assert_int_equal(jobs[i].result, 0);
        same("the first rows", m, few, 5);
        for (uint32_t c = 0; c < 128; c++)
            for (uint32_t row = 0; row < rows; row++)
                if (y[c * rows + row] != m[row] + tensor[c])
                    fail_msg("y[%u, %u] is %.9g, not %.9g", c, row, (double)y[c * rows + row],
                             (double)(m[row] + tensor[c]));
    }
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(m);
    free(y);
    free(few);
}

/* Masks that PyTorch drew: every size, and two of the largest. */
static void check_mask(const json_t *mask)
{
    int64_t n = json_integer_value(json_object_get(mask, "n"));
    double p = json_number_value(json_object_get(mask, "p"));
    struct region region = region_new(device_get(), (size_t)n * 8, false);
    float *x = (float *)region.at, *y = x + n;
    uint8_t *keep = (uint8_t *)x;
    struct pipeline *pipeline;
    struct plan *plan;
    struct sha256 sha;
    char text[300], hex[65];
    struct job job = {.x = x,
                      .y = y,
                      .y_size = (uint64_t)n * 4,
                      .x_memory = region.memory,
                      .y_memory = region.memory,
                      .rows = 1,
                      .train = true};

    job.seed = (uint64_t)json_integer_value(json_object_get(mask, "seed"));
    job.offset = (uint64_t)json_integer_value(json_object_get(mask, "offset"));
    snprintf(text, sizeof(text),
             "name = \"d\"; input = { shape = [%" PRId64
             "]; }; stages = ({ op = \"dropout\"; p = %.17g; });",
             n, p);
    pipeline = models_build(&fixture, text, 1);
    plan = device_load(device_get(), pipeline, 1);
    for (int64_t i = 0; i < n; i++)
        x[i] = 1;
    device_run(device_get(), plan, &job, 1);
    assert_int_equal(job.result, 0);
    for (int64_t i = 0; i < n; i++)
        keep[i] = y[i] != 0;
    sha256_init(&sha);
    sha256_add(&sha, keep, (size_t)n);
    sha256_end(&sha, hex);
    if (strcmp(hex, json_string_value(json_object_get(mask, "sha256"))) != 0)
        fail_msg("the mask of %" PRId64 " elements, p %g, seed %" PRIu64 " is another", n, p,
                 job.seed);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    region_free(device_get(), &region);
}

static void test_masks(void **state)
{
    json_t *root = json_load_file("tests/golden/dropout_masks.json", 0, NULL), *mask;
    int large = 0, checked = 0;
    size_t i;

    (void)state;
    assert_non_null(root);
    json_array_foreach(json_object_get(root, "masks"), i, mask)
    {
        if (json_integer_value(json_object_get(mask, "n")) > 10000000 && large++ >= 2)
            continue;
        check_mask(mask);
        checked++;
    }
    assert_true(checked >= 32);
    json_decref(root);
}

/* A at real size against float64: row minima of some rows of a batch of 1024. */
static void check_accuracy(const char *precision, double most)
{
    enum { K = 8192, C = 8192, GROUPS = 512, ROWS = 1024, CHECKED = 8 };
    struct pipeline *pipeline = models_a(&fixture, "float32", precision, K, C, GROUPS);
    struct plan *plan = device_load(device_get(), pipeline, ROWS);
    float *x = array((size_t)ROWS * K, 4), *m = array(ROWS, 4), *w = array(K, 4);
    size_t x_size = (size_t)ROWS * K * 4;
    struct job job = {.x = x, .y = m, .y_size = ROWS * 4, .rows = ROWS, .compact = true};
    double(*v)[C] = array(CHECKED, sizeof(*v)), error = 0;
    struct report report;

    models_input(x, (size_t)ROWS * K, 11, 0);
    device_run_in(device_get(), plan, &job, 1, &x_size, 1, 0);
    assert_int_equal(job.result, 0);
    for (int c = 0; c < C; c++) {
        if (pipeline_param(pipeline, &pipeline->stages[0].weight, (int64_t)c * K, K, w, &report) <
            0)
            fail_msg("%s", report.text);
        for (int i = 0; i < CHECKED; i++) {
            const float *row = x + (size_t)i * (ROWS / CHECKED) * K;
            double sum = 0;

            for (int k = 0; k < K; k++)
                sum += (double)row[k] * (double)w[k];
            v[i][c] = sum + (double)models_fill("b", c);
        }
    }
    for (int i = 0; i < CHECKED; i++) {
        double lowest = INFINITY;

        for (int g = 0; g < GROUPS; g++) {
            double mean = 0, squares = 0, rstd;

            for (int c = g * 16; c < g * 16 + 16; c++)
                mean += v[i][c] / 16;
            for (int c = g * 16; c < g * 16 + 16; c++)
                squares += (v[i][c] - mean) * (v[i][c] - mean);
            rstd = 1 / sqrt(squares / 16 + 1e-5);
            for (int c = g * 16; c < g * 16 + 16; c++)
                lowest = fmin(lowest, (v[i][c] - mean) * rstd * (double)models_fill("g", c) +
                                          (double)models_fill("h", c));
        }
        error = fmax(error, fabs(lowest - (double)m[i * (ROWS / CHECKED)]));
    }
    printf("%s: largest error of %d row minima against float64: %.3g\n", precision, CHECKED, error);
    assert_true(error <= most);
    device_get()->ops->unload(device_get()->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(m);
    free(w);
    free(v);
}

static void test_accuracy(void **state)
{
    (void)state;
    check_accuracy("fp32", 5.4e-6);
}

/* Serving takes no memory, on the host or on the device. */
static void test_allocations(void **state)
{
    struct device *device = device_get();
    struct pipeline *a = models_a(&fixture, "float32", "fp32", 512, 512, 32);
    struct plan *plan_a = device_load(device, a, 256);
    struct pipeline *b = models_b(&fixture, true, 5, 9, 12, "0.0");
    struct plan *plan_b = device_load(device, b, 64);
    struct region pinned = region_new(device, 4 << 20, false);
    struct region plain = region_new(device, 4 << 20, true);
    size_t before;

    (void)state;
    models_input((float *)pinned.at, 1 << 20, 1, 0);
    for (int round = 0; round < 2; round++) { /* the first is CUDA's own: it counts nothing */
        before = device_free();
        counting = round > 0;
        for (uint32_t rows = 1; rows <= 60; rows += rows < 4 ? 1 : 13) {
            struct region *region = rows % 2 ? &pinned : &plain;
            struct job job = {.x = region->at,
                              .y = region->at + (1 << 20),
                              .y_size = 3 << 20,
                              .x_memory = region->memory,
                              .y_memory = region->memory,
                              .rows = rows};

            device_run(device, plan_a, &job, 1);
            assert_int_equal(job.result, 0);
            job.y_size = rows * (uint64_t)shape_elements(&b->out) * 4;
            job.train = true;
            device_run(device, plan_b, &job, 1);
            assert_int_equal(job.result, 0);
        }
        counting = false;
        if (round > 0 && device_free() != before)
            fail_msg("%zu bytes of device memory were free, then %zu", before, device_free());
    }
    assert_int_equal(allocations, 0);
    region_free(device, &pinned);
    region_free(device, &plain);
    device->ops->unload(device->backend, plan_a);
    device->ops->unload(device->backend, plan_b);
    pipeline_free(a);
    pipeline_free(b);
}

/* Everything that a load takes comes back with the unload. */
static void test_unload(void **state)
{
    struct device *device = device_get();
    struct pipeline *pipeline = models_a(&fixture, "float32", "fp32", 2048, 2048, 128);
    size_t before = 0, after;

    (void)state;
    for (int round = 0; round < 6; round++) {
        if (round == 1) /* what the first leaves is the driver's pool */
            before = device_free();
        device->ops->unload(device->backend, device_load(device, pipeline, 256));
    }
    after = device_free();
    if (after < before)
        fail_msg("%zu bytes free, then %zu", before, after);
    pipeline_free(pipeline);
}

static void test_refusals(void **state)
{
    struct device *device = device_get();
    struct pipeline *a = models_a(&fixture, "float32", "fp32", 8192, 4096, 256);
    struct pipeline *b = models_b(&fixture, false, 5, 9, 12, "0.5");
    struct plan *plan;
    struct report report;
    size_t before = device_free();
    float *x = array((size_t)shape_elements(&b->in), 4);
    float *y = array((size_t)shape_elements(&b->out), 4);
    struct backend_options wrong = {.script = "fault"};
    struct backend *backend = NULL;
    struct job jobs[3] = {
        {.x = x, .y = y, .y_size = 16, .rows = 1, .compact = true},
        {.x = x, .y = y, .y_size = (uint64_t)shape_elements(&b->out) * 4 - 1, .rows = 1},
        {.x = x, .y = y, .y_size = (uint64_t)shape_elements(&b->out) * 4, .rows = 1},
    };

    (void)state;
    assert_int_equal(device->ops->open(&wrong, &backend, &report), -EINVAL);
    assert_string_equal(report.text, "this backend takes no script");
    assert_null(backend);
    assert_int_equal(device->ops->load(device->backend, a, 100u << 20, &plan, &report), -ENOMEM);
    printf("%s\n", report.text);
    assert_int_equal(device_free(), before);
    plan = device_load(device, b, 8);
    device_run(device, plan, jobs, 3);
    assert_int_equal(jobs[0].result, -EINVAL);
    assert_int_equal(jobs[1].result, -ENOSPC);
    assert_int_equal(jobs[2].result, 0);
    device_run(device, plan, jobs, 2); /* no job that can run */
    device->ops->unload(device->backend, plan);
    pipeline_free(a);
    pipeline_free(b);
    free(x);
    free(y);
}

/* Device memory through an fd: another mapping sees the same bytes, cleared at first; another kind
 * of fd, or a size beyond the memory's, is refused. */
static void test_device_memory(void **state)
{
    struct device *device = device_get();
    struct region region = region_new(device, 8 << 20, true);
    size_t before = device_free();
    struct memory *other;
    struct report report;
    uint32_t words[4] = {1, 2, 3, 4}, back[4];
    int fd;

    (void)state;
    device_copy(back, region.at + (5 << 20), sizeof(back));
    for (int i = 0; i < 4; i++)
        assert_int_equal(back[i], 0);
    if (device->ops->memory_import(device->backend, region.fd, 8 << 20, &other, &report) < 0)
        fail_msg("%s", report.text);
    device_copy((char *)device->ops->memory_address(other) + 4096, words, sizeof(words));
    device_copy(back, region.at + 4096, sizeof(back));
    assert_memory_equal(words, back, sizeof(words));
    device->ops->memory_free(device->backend, other);
    device_copy(back, region.at + 4096, sizeof(back));
    assert_memory_equal(words, back, sizeof(words));
    assert_true(device->ops->memory_import(device->backend, region.fd, 64 << 20, &other, &report) <
                0);
    printf("%s\n", report.text);
    fd = memfd_create("no device memory", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_true(device->ops->memory_import(device->backend, fd, 8 << 20, &other, &report) < 0);
    printf("%s\n", report.text);
    close(fd);
    assert_true(device->ops->memory_import(device->backend, region.fd, 0, &other, &report) < 0);
    assert_int_equal(device->ops->memory_create(device->backend, 8 << 20, before - (4 << 20),
                                                &other, &fd, &report),
                     -ENOMEM);
    printf("%s\n", report.text);
    assert_int_equal(device_free(), before);
    region_free(device, &region);
}

/* The faulty build, in a child. */

static int child(const char *what)
{
    struct device device;
    struct pipeline *pipeline;
    struct plan *plan;
    char script[32];
    float x[64] = {0}, y[64];
    struct job job = {.x = x, .y = y, .y_size = sizeof(y), .rows = 1};
    struct batch batch = {.jobs = &job, .n_jobs = 1, .rows = 1};
    double began;
    int r;

    snprintf(script, sizeof(script), "%s 2", what);
    device = device_open("fused-cuda-faulty.so", script);
    pipeline = models_build(&fixture,
                            "name = \"m\"; input = { shape = [64]; };"
                            "stages = ({ op = \"clamp\"; min = 0.0; });",
                            1);
    batch.plan = plan = device_load(&device, pipeline, 4);
    device_run(&device, plan, &job, 1);
    began = device_now();
    r = device.ops->start(device.backend, 1, &batch);
    if (strcmp(what, "memory") == 0) {
        assert_int_equal(r, -ENOMEM);
        device_run(&device, plan, &job, 1);
        return 0;
    }
    if (r == 0)
        r = device_wait(&device, 1, 2);
    printf("%s: %d after %.0f ms\n", what, r, (device_now() - began) * 1e3);
    fflush(stdout);
    if (strcmp(what, "fault") == 0)
        _exit(r == -ENOTRECOVERABLE && device_now() - began < 1 ? 0 : 1);
    _exit(r == 0 ? 0 : 1); /* hung: still not ended; the process must still be able to */
}

static void test_faults(void **state)
{
    static const char *const kinds[] = {"memory", "fault", "hang"};

    (void)state;
    for (int i = 0; i < 3; i++) {
        char *arguments[] = {(char *)"test_gpu", (char *)kinds[i], NULL};
        double began = device_now();
        int status;
        pid_t pid;

        assert_int_equal(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("%s: status %#x", kinds[i], status);
        printf("%s: the process ended after %.1f s\n", kinds[i], device_now() - began);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_info),        cmocka_unit_test(test_same_bits_a),
        cmocka_unit_test(test_same_bits_b), cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_slots),       cmocka_unit_test(test_guard),
        cmocka_unit_test(test_compact_b),   cmocka_unit_test(test_compact_a),
        cmocka_unit_test(test_allocations), cmocka_unit_test(test_unload),
        cmocka_unit_test(test_refusals),    cmocka_unit_test(test_device_memory),
        cmocka_unit_test(test_masks),       cmocka_unit_test(test_accuracy),
        cmocka_unit_test(test_faults),      cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_parts),       cmocka_unit_test(test_never_waits),
        cmocka_unit_test(test_pieces),
    };

    if (argc > 1)
        return child(argv[1]);
    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
