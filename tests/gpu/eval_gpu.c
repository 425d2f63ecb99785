/*
 * eval_gpu MODEL.conf IN OUT [SEED OFFSET]: one request on the GPU backend, raw rows in, raw result
 * out, as torch_check.py exchanges them. With a seed it trains. Prints where the time went.
 */
#include "tests/gpu/device.h"

#include <libgen.h>
#include <sys/stat.h>

static void *read_file(const char *name, size_t *ret_size)
{
    FILE *file = fopen(name, "r");
    struct stat status;
    void *data;

    if (!file || fstat(fileno(file), &status) < 0) {
        perror(name);
        exit(1);
    }
    data = malloc((size_t)status.st_size + 1);
    assert_non_null(data);
    if (fread(data, 1, (size_t)status.st_size, file) != (size_t)status.st_size) {
        perror(name);
        exit(1);
    }
    fclose(file);
    *ret_size = (size_t)status.st_size;
    return data;
}

static struct pipeline *build(char *conf)
{
    static struct model model;
    struct safetensors *weights = NULL;
    struct pipeline *pipeline;
    struct report report;
    char *copy = strdup(conf);
    int dir;

    assert_non_null(copy);
    dir = open(dirname(copy), O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (model_parse(dir, basename(conf), &model, &report) < 0 ||
        (model.weights[0] && safetensors_open(dir, model.weights, &weights, &report) < 0) ||
        pipeline_build(&model, weights, &pipeline, &report) < 0) {
        printf("%s\n", report.text);
        exit(1);
    }
    close(dir);
    free(copy);
    return pipeline;
}

int main(int argc, char **argv)
{
    struct device *device = device_get();
    struct pipeline *pipeline;
    struct plan_info info;
    struct region x, y;
    struct job job = {.rows = 0};
    size_t size;
    double began;
    FILE *out;
    void *in;

    if (argc != 4 && argc != 6) {
        printf("usage: eval_gpu MODEL.conf IN OUT [SEED OFFSET]\n");
        return 64;
    }
    pipeline = build(argv[1]);
    in = read_file(argv[2], &size);
    job.rows =
        (uint32_t)(size / ((size_t)shape_elements(&pipeline->in) * dtype_size(pipeline->dtype)));
    job.y_size =
        (uint64_t)(job.rows * shape_elements(&pipeline->out)) * dtype_size(pipeline->dtype);
    if (argc == 6) {
        job.train = true;
        job.seed = strtoull(argv[4], NULL, 10);
        job.offset = strtoull(argv[5], NULL, 10);
    }
    x = region_new(device, size, false);
    y = region_new(device, job.y_size, false);
    memcpy(x.at, in, size);
    memset(y.at, 0xff, job.y_size);
    job.x = x.at;
    job.y = y.at;
    job.x_memory = x.memory;
    job.y_memory = y.memory;

    began = device_now();
    struct plan *plan = device_load(device, pipeline, job.rows);
    device->ops->plan_info(plan, &info);
    printf("loaded in %.2f s, %" PRIu64 " MiB resident, %" PRIu64 " MiB of work space\n%s",
           device_now() - began, info.resident_bytes >> 20, info.arena_bytes >> 20, info.text);
    device_run(device, plan, &job, 1);
    if (job.result != 0) {
        printf("result %d\n", job.result);
        return 1;
    }
    out = fopen(argv[3], "w");
    if (!out || fwrite(y.at, 1, job.y_size, out) != job.y_size || fclose(out) != 0) {
        perror(argv[3]);
        return 1;
    }
    return 0;
}
