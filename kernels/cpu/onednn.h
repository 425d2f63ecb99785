/*
 * onednn.h - what linear.c and conv3d.c share of oneDNN: engine, streams, errors, one thread
 */
#pragma once

#include <dnnl.h>

#include "kernels/report.h"

struct onednn {
    dnnl_engine_t engine;
    unsigned n_streams;
    dnnl_stream_t *streams; /* one a worker */
};

/* 0, or what a failure of oneDNN is in errno's terms, with a report. */
int onednn_result(dnnl_status_t status, const char *what, struct report *report);

int onednn_new(unsigned workers, struct onednn **ret, struct report *report);
struct onednn *onednn_free(struct onednn *onednn);

/* Keeps oneDNN's OpenMP to the calling thread alone. Returns what it was. */
int onednn_single_thread(void);
void onednn_restore_threads(int threads);

/* "AVX-512", "AVX2", ...: what oneDNN generates code for. */
const char *onednn_isa(void);
/* "oneDNN 2.6.3" */
void onednn_version(char *text, size_t size);

/* A primitive with the arguments' layouts that it chose, and no hidden scratchpad. */
struct primitive {
    dnnl_primitive_t primitive;
    dnnl_memory_desc_t src, weights, dst, scratchpad;
    char name[32];
};
/* `desc` is an operation descriptor. -ENOTSUP: no implementation. */
int primitive_new(const struct onednn *onednn, const_dnnl_op_desc_t desc, struct primitive *ret,
                  struct report *report);
void primitive_free(struct primitive *primitive);

/* Rearranges data once. */
int onednn_reorder(const struct onednn *onednn, const dnnl_memory_desc_t *from_desc, void *from,
                   const dnnl_memory_desc_t *to_desc, void *to, struct report *report);
