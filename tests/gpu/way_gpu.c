/*
 * way_gpu: how results come to pinned client pages, by size. Alone, and beside a product that keeps
 * the device busy: how much of it is left, and how many bytes a second arrive.
 *
 * A backend built with DIRECT_MAX=0 (always the copy engine) and one with a large DIRECT_MAX
 * (kernels always write the pages) are compared: FUSED_CUDA names the backend.
 */
#include "tests/gpu/models.h"

#define FOR_S 0.04
#define TURNS 101

static struct device *device;

static int by_number(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double alone(struct batch *batch)
{
    double took[TURNS];

    for (int i = 0; i < TURNS; i++) {
        took[i] = device_now();
        assert_int_equal(device->ops->start(device->backend, 1, batch), 0);
        assert_int_equal(device_wait(device, 1, 10), 1);
        took[i] = device_now() - took[i];
    }
    qsort(took, TURNS, sizeof(*took), by_number);
    return took[TURNS / 2];
}

/* Batches a second in each slot, which are kept full; NULL leaves a slot empty. */
static void beside(struct batch *batches[3], double rates[3])
{
    double began = device_now(), now;
    bool runs[3] = {false};
    int n[3] = {0};

    do {
        now = device_now();
        for (unsigned s = 0; s < 3; s++) {
            if (runs[s] && device->ops->poll(device->backend, s) == 1) {
                runs[s] = false;
                n[s]++;
            }
            if (!runs[s] && batches[s] && now - began < FOR_S) {
                assert_int_equal(device->ops->start(device->backend, s, batches[s]), 0);
                runs[s] = true;
            }
        }
    } while (runs[0] || runs[1] || runs[2]);
    for (int s = 0; s < 3; s++)
        rates[s] = n[s] / (now - began);
}

int main(void)
{
    enum { K = 4096, C = 4096, ROWS = 1024 };
    static const char form[] = "name = \"m\"; input = { shape = [%d]; };"
                               "stages = ({ op = \"clamp\"; min = 0.25; });";
    struct fixture fixture;
    struct pipeline *product, *pipeline;
    struct region work, on_device, host;
    double rates[3], product_rate;
    struct plan *product_plan;

    device = device_get();
    fixture_make(&fixture);
    product = models_a(&fixture, "float32", "fp32", K, C, C / 16);
    product_plan = device_load(device, product, ROWS);
    work = region_new(device, (size_t)2 * ROWS * (K + C) * 4, true);
    on_device = region_new(device, 8 << 20, true);
    host = region_new(device, 2 * (8 << 20), false);
    struct job products[2];
    struct batch product_batches[2];
    for (int i = 0; i < 2; i++) {
        char *at = work.at + (size_t)i * ROWS * (K + C) * 4;

        products[i] = (struct job){.x = at,
                                   .y = at + (size_t)ROWS * K * 4,
                                   .y_size = (uint64_t)ROWS * C * 4,
                                   .x_memory = work.memory,
                                   .y_memory = work.memory,
                                   .rows = ROWS};
        product_batches[i] =
            (struct batch){.plan = product_plan, .jobs = &products[i], .n_jobs = 1, .rows = ROWS};
    }
    struct batch *slots[3] = {&product_batches[0], NULL, &product_batches[1]};
    beside(slots, rates);
    beside(slots, rates);
    product_rate = rates[0] + rates[2];
    printf("%d x %d x %d: %.0f a second alone\n", ROWS, K, C, product_rate);
    printf("| KiB | alone us | product's rate beside it | arriving GB/s |\n| --- | --- | --- | --- "
           "|\n");
    for (int kib = 4; kib <= 8192; kib *= 2) {
        struct job job = {.x = on_device.at,
                          .y = host.at,
                          .y_size = (uint64_t)kib << 10,
                          .x_memory = on_device.memory,
                          .y_memory = host.memory,
                          .rows = 1};
        struct batch batch = {.jobs = &job, .n_jobs = 1, .rows = 1};
        char text[200];
        double us;

        snprintf(text, sizeof(text), form, kib << 8);
        pipeline = models_build(&fixture, text, 1);
        batch.plan = device_load(device, pipeline, 1);
        us = alone(&batch) * 1e6;
        slots[1] = &batch;
        beside(slots, rates);
        printf("| %d | %.1f | %.2f | %.1f |\n", kib, us, (rates[0] + rates[2]) / product_rate,
               rates[1] * (double)kib * 1024 * 1e-9);
        device->ops->unload(device->backend, batch.plan);
        pipeline_free(pipeline);
    }
    region_free(device, &work);
    region_free(device, &on_device);
    region_free(device, &host);
    device->ops->unload(device->backend, product_plan);
    pipeline_free(product);
    fixture_remove(&fixture);
    return 0;
}
