/*
 * fuzz_conf.c - any text: a model within its limits whose shapes hold, or one line that says why
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model.h"
#include "kernels/pipeline.h"

static struct model model;
static struct weight_shape shapes[2 * MODEL_STAGES_MAX];

static void check(int holds)
{
    if (!holds)
        abort();
}

static void check_report(const struct report *report)
{
    check(report->text[0] != 0 && memchr(report->text, 0, sizeof(report->text)) != NULL);
    for (const char *c = report->text; *c; c++)
        check((unsigned char)*c >= 0x20 && *c != 0x7f);
}

static void check_model(void)
{
    struct report report = {""};
    int n;

    check(model.name[0] && model.name[0] != '.' && strlen(model.name) <= MODEL_NAME_MAX);
    check(!strchr(model.name, '/'));
    check(model.input.rank >= 2 && model.input.rank <= TENSOR_RANK_MAX);
    check(shape_elements(&model.input) >= 1 && shape_elements(&model.input) <= TENSOR_ELEMENTS_MAX);
    check(model.n_stages >= 1 && model.n_stages <= MODEL_STAGES_MAX);
    check(model.max_rows >= 1 && model.queue_rows >= 1);
    n = pipeline_weight_shapes(&model, shapes, 2 * MODEL_STAGES_MAX, &report);
    if (n < 0)
        check_report(&report);
    for (int i = 0; i < n; i++) {
        int64_t elements = 1;

        check(shapes[i].name[0] && shapes[i].rank >= 0 && shapes[i].rank <= TENSOR_RANK_MAX);
        for (int k = 0; k < shapes[i].rank; k++) {
            check(shapes[i].dims[k] >= 1);
            check(!__builtin_mul_overflow(elements, shapes[i].dims[k], &elements));
        }
        check(elements <= TENSOR_ELEMENTS_MAX);
    }
}

/* libconfig 1.5 forgets the string that a syntax error follows. */
const char *__lsan_default_suppressions(void);

const char *__lsan_default_suppressions(void)
{
    return "leak:libconfig.so\n";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct report report = {""};
    struct conf *conf;
    int r;

    r = conf_parse("fuzz.conf", (const char *)data, size, &conf, &report);
    if (r == 0) {
        r = model_parse_conf(conf, "fuzz.conf", &model, &report);
        conf_free(conf);
    }
    if (r == 0)
        check_model();
    else
        check_report(&report);
    return 0;
}
