/*
 * model.h - a model file, parsed but not yet checked against its weights
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "conf.h"
#include "report.h"
#include "tensor.h"

#define MODEL_NAME_MAX        64
#define MODEL_STAGES_MAX      32
#define MODEL_DEVICES_MAX     16
#define MODEL_DEVICE_MAX      255 /* index of one */
#define MODEL_TENSOR_NAME_MAX 128

enum stage_op {
    OP_LINEAR,
    OP_CONV3D,
    OP_GROUP_NORM,
    OP_AMIN,
    OP_MINIMUM,
    OP_CLAMP,
    OP_ADD,
    OP_DROPOUT,
    OP_COUNT
};

enum precision { PRECISION_FP32, PRECISION_TF32 };

/* One entry of `stages`: what the file says. Absent names are empty. */
struct stage_spec {
    enum stage_op op;
    int line;
    char weight[MODEL_TENSOR_NAME_MAX]; /* linear, conv3d, group_norm */
    char bias[MODEL_TENSOR_NAME_MAX];   /* linear, conv3d, group_norm: optional */
    char tensor[MODEL_TENSOR_NAME_MAX]; /* add */
    int64_t size[TENSOR_RANK_MAX];      /* optional and then checked: linear `out`, conv3d `out` +
                                           `kernel`, add `shape` */
    int n_size;                         /* 0: not given. linear 1, conv3d 4, add its rank */
    int64_t stride[3], padding[3];      /* conv3d; 1 and 0 by default */
    int64_t groups;                     /* group_norm */
    double eps;                         /* group_norm */
    int64_t dim;                        /* amin */
    bool keepdim;                       /* amin; PyTorch's default is false */
    bool has_min, has_max;              /* clamp: at least one */
    double min, max;                    /* clamp */
    double value;                       /* minimum */
    double p;                           /* dropout */
};

struct model {
    char file[256];                /* name of the model file, without directory: for messages */
    char name[MODEL_NAME_MAX + 1]; /* [A-Za-z0-9._-]+, not starting with a dot */
    char weights[256];             /* relative to weights_dir; empty when the file names none */
    enum dtype dtype;
    enum precision precision;
    bool prove;         /* default true */
    struct shape input; /* batch dimension 0, then the row's */
    int n_stages;
    struct stage_spec stages[MODEL_STAGES_MAX];
    int64_t devices[MODEL_DEVICES_MAX]; /* indices */
    int n_devices;                      /* 0: all that the daemon uses */
    uint32_t max_rows;                  /* rows of one batch; default 1024 */
    uint32_t max_delay_us;              /* default 0 */
    uint32_t queue_rows;                /* rows that may wait; default 65536 */
};

/* Parses `name` beneath dirfd (or any path with AT_FDCWD). Errors as conf.h: file, line, key,
 * reason. */
int model_parse(int dirfd, const char *name, struct model *ret, struct report *report);
int model_parse_conf(struct conf *conf, const char *name, struct model *ret, struct report *report);

const char *stage_op_name(enum stage_op op);
