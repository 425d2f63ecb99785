/*
 * onednn.c - what linear.c and conv3d.c share of oneDNN: engine, streams, errors, one thread
 *
 * oneDNN's own choice of threads changes the bits of a result, so every primitive is made and run
 * for one thread: OpenMP's number of threads is a property of the calling thread, set to 1 in each
 * worker and, for the time of a load, in the thread that loads. Scratchpads are ours, sized when a
 * plan is made, so that a request need not find memory for them.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onednn.h"

/* Of OpenMP's library. Its header belongs to one compiler, and other tools do not find it. */
int omp_get_max_threads(void);
void omp_set_num_threads(int threads);

int onednn_result(dnnl_status_t status, const char *what, struct report *report)
{
    switch (status) {
    case dnnl_success:
        return 0;
    case dnnl_out_of_memory:
        return report_set(report, -ENOMEM, "oneDNN %s: out of memory", what);
    case dnnl_unimplemented:
        return report_set(report, -EINVAL, "oneDNN %s: not implemented", what);
    case dnnl_invalid_arguments:
        return report_set(report, -EINVAL, "oneDNN %s: invalid arguments", what);
    default:
        return report_set(report, -EIO, "oneDNN %s: error %d", what, (int)status);
    }
}

int onednn_new(unsigned workers, struct onednn **ret, struct report *report)
{
    struct onednn *onednn;
    int r;

    onednn = calloc(1, sizeof(*onednn));
    if (onednn)
        onednn->streams = calloc(workers, sizeof(dnnl_stream_t));
    if (!onednn || !onednn->streams) {
        onednn_free(onednn);
        return report_set(report, -ENOMEM, "out of memory");
    }
    r = onednn_result(dnnl_engine_create(&onednn->engine, dnnl_cpu, 0), "engine", report);
    for (; r == 0 && onednn->n_streams < workers; onednn->n_streams++)
        r = onednn_result(dnnl_stream_create(&onednn->streams[onednn->n_streams], onednn->engine,
                                             dnnl_stream_default_flags),
                          "stream", report);
    if (r < 0) {
        onednn_free(onednn);
        return r;
    }
    *ret = onednn;
    return 0;
}

struct onednn *onednn_free(struct onednn *onednn)
{
    if (!onednn)
        return NULL;
    for (unsigned i = 0; i < onednn->n_streams; i++)
        if (onednn->streams[i])
            dnnl_stream_destroy(onednn->streams[i]);
    if (onednn->engine)
        dnnl_engine_destroy(onednn->engine);
    free(onednn->streams);
    free(onednn);
    return NULL;
}

int onednn_single_thread(void)
{
    int before = omp_get_max_threads();

    omp_set_num_threads(1);
    return before;
}

void onednn_restore_threads(int threads)
{
    omp_set_num_threads(threads);
}

const char *onednn_isa(void)
{
    switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41:
        return "SSE4.1";
    case dnnl_cpu_isa_avx:
        return "AVX";
    case dnnl_cpu_isa_avx2:
    case dnnl_cpu_isa_avx2_vnni:
        return "AVX2";
    default:
        return "AVX-512";
    }
}

void onednn_version(char *text, size_t size)
{
    const dnnl_version_t *version = dnnl_version();

    snprintf(text, size, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
}

int primitive_new(const struct onednn *onednn, const_dnnl_op_desc_t desc, struct primitive *ret,
                  struct report *report)
{
    struct primitive primitive = {.primitive = NULL};
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_primitive_desc_t chosen = NULL;
    const char *name = "";
    dnnl_status_t status;

    status = dnnl_primitive_attr_create(&attributes);
    if (status == dnnl_success)
        status = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    if (status == dnnl_success)
        status = dnnl_primitive_desc_create(&chosen, desc, attributes, onednn->engine, NULL);
    if (status == dnnl_success)
        status = dnnl_primitive_create(&primitive.primitive, chosen);
    if (status == dnnl_success) {
        primitive.src = *dnnl_primitive_desc_query_md(chosen, dnnl_query_src_md, 0);
        primitive.weights = *dnnl_primitive_desc_query_md(chosen, dnnl_query_weights_md, 0);
        primitive.dst = *dnnl_primitive_desc_query_md(chosen, dnnl_query_dst_md, 0);
        primitive.scratchpad = *dnnl_primitive_desc_query_md(chosen, dnnl_query_scratchpad_md, 0);
        dnnl_primitive_desc_query(chosen, dnnl_query_impl_info_str, 0, &name);
        snprintf(primitive.name, sizeof(primitive.name), "%s", name);
        *ret = primitive;
    }
    if (chosen)
        dnnl_primitive_desc_destroy(chosen);
    if (attributes)
        dnnl_primitive_attr_destroy(attributes);
    return onednn_result(status, "primitive", report);
}

void primitive_free(struct primitive *primitive)
{
    if (primitive->primitive)
        dnnl_primitive_destroy(primitive->primitive);
    primitive->primitive = NULL;
}

int onednn_reorder(const struct onednn *onednn, const dnnl_memory_desc_t *from_desc, void *from,
                   const dnnl_memory_desc_t *to_desc, void *to, struct report *report)
{
    dnnl_memory_t from_memory = NULL, to_memory = NULL;
    dnnl_primitive_desc_t desc = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_status_t status;

    status = dnnl_stream_create(&stream, onednn->engine, dnnl_stream_default_flags);
    if (status == dnnl_success)
        status = dnnl_memory_create(&from_memory, from_desc, onednn->engine, from);
    if (status == dnnl_success)
        status = dnnl_memory_create(&to_memory, to_desc, onednn->engine, to);
    if (status == dnnl_success)
        status = dnnl_reorder_primitive_desc_create(&desc, from_desc, onednn->engine, to_desc,
                                                    onednn->engine, NULL);
    if (status == dnnl_success)
        status = dnnl_primitive_create(&reorder, desc);
    if (status == dnnl_success) {
        dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from_memory}, {DNNL_ARG_TO, to_memory}};

        status = dnnl_primitive_execute(reorder, stream, 2, args);
    }
    if (reorder)
        dnnl_primitive_destroy(reorder);
    if (desc)
        dnnl_primitive_desc_destroy(desc);
    if (to_memory)
        dnnl_memory_destroy(to_memory);
    if (from_memory)
        dnnl_memory_destroy(from_memory);
    if (stream)
        dnnl_stream_destroy(stream);
    return onednn_result(status, "reorder", report);
}
