/*
 * How rows become jobs, blocks, slots, parts and pieces: the same bits at any place of any batch,
 * in any memory and on any slot, in blocks, in parts and across the borders of pinned pieces; and
 * no call waits for the device, however many jobs a batch has.
 */
#include "tests/gpu/models.h"

static struct fixture fixture;

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
    models_same("again", want, y, rows * out);
    shuffle(order, rows, &state);
    run_dealt(plan, pipeline, x, y, rows, order, sizes, 1, compact, 2);
    models_same("shuffled", want, y, rows * out);
    for (uint32_t left = rows; left > 0; left -= sizes[n++])
        sizes[n] = left < n * 3 % 37 + 1 ? left : n * 3 % 37 + 1;
    run_dealt(plan, pipeline, x, y, rows, order, sizes, n, compact, 0);
    models_same("in uneven jobs", want, y, rows * out);
    for (uint32_t i = 0; i < rows; i++)
        sizes[i] = 1;
    run_dealt(plan, pipeline, x, y, rows, order, sizes, rows, compact, 1);
    models_same("in jobs of one", want, y, rows * out);
    for (uint32_t i = 0; i < n_alone; i++) {
        uint32_t row = i * (rows / n_alone), zero = 0;

        run_dealt(plan, pipeline, x + row * in, y, 1, &zero, sizes, 1, compact, 2);
        models_same("alone", want + row * out, y, out);
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
            models_same("in blocks", want, y, rows * out);
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
        models_same("slot 0", want, jobs[0].y, n);
        for (unsigned s = 1; s < info.slots; s++) { /* the same rows on another slot */
            struct job job = jobs[0];
            struct batch batch = {.plan = plan, .jobs = &job, .n_jobs = 1, .rows = rows};

            job.y = jobs[s].y;
            assert_int_equal(device->ops->start(device->backend, s, &batch), 0);
            assert_int_equal(device_wait(device, s, 10), 1);
            models_same("another slot", want, job.y, n);
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
    models_same("in parts", want, y, out / 4);
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
    models_same("whole", want, job.y, out / 4);
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
    models_same("in parts", want, job.y, out / 4);
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
    enum { K = 8192, C = 2048, BUSY = 16384, PLAIN = 512, ROUNDS = 5 };
    /* Copying 8 MiB takes a millisecond or two; for 512 MiB the bus takes ten. */
    const double late = 3e-3;
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
    double began, took, longest;
    int r, n_late = 0;

    (void)state;
    models_input(x, (size_t)PLAIN * K, 1, 0);
    for (int i = 0; i < PLAIN; i++)
        jobs[i] = (struct job){
            .x = x + (size_t)i * K, .y = y + (size_t)i * C, .y_size = (uint64_t)C * 4, .rows = 1};
    for (int round = 0; round < ROUNDS; round++) { /* the first touches pages */
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
        n_late += longest >= late;
        assert_int_equal(device_wait(device, 0, 10), 1);
    }
    printf("%d plain requests took %.2f ms beside %d rows, the longest call %.2f ms; %d of %d "
           "rounds were late\n",
           PLAIN, took * 1e3, BUSY, longest * 1e3, n_late, ROUNDS);
    /* Others may take the processor for as long now and then. */
    assert_true(2 * n_late < ROUNDS);
    region_free(device, &region);
    device->ops->unload(device->backend, plan);
    pipeline_free(pipeline);
    free(x);
    free(y);
    free(jobs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_a), cmocka_unit_test(test_same_bits_b),
        cmocka_unit_test(test_blocks),      cmocka_unit_test(test_slots),
        cmocka_unit_test(test_parts),       cmocka_unit_test(test_never_waits),
        cmocka_unit_test(test_pieces),
    };

    return device_run_tests(&fixture, tests, sizeof(tests) / sizeof(tests[0]));
}
