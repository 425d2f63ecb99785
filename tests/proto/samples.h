/*
 * samples.h - one or more sound messages of every verb
 */
#pragma once

#include "proto/proto.h"

#define S(text)   ((struct proto_str){text, sizeof text - 1})
#define COUNT(a)  (sizeof(a) / sizeof((a)[0]))
#define EMPTY_MAP .document = {(const uint8_t *)"\x80", 1}
#define INPUT(b)                                                                        \
    {                                                                                   \
        .dtype = PROTO_FLOAT32, .rank = 2, .shape = {2, 3}, .buffer = b, .offset = 4096 \
    }
#define ZEROS ((const uint8_t[256]){0})

static const struct proto_request sample_requests[] = {
    {.id = 1, .verb = VERB_HELLO, .hello = {1, S("example")}},
    {.id = 2, .verb = VERB_PING},
    {.id = 3, .verb = VERB_INFER, .infer = {S("m"), INPUT(7), .priority = 1}},
    {.id = UINT64_MAX,
     .verb = VERB_INFER,
     .infer = {S("conv3d-groupnorm-min-clamp-dropout"),
               {.dtype = PROTO_BFLOAT16,
                .rank = 8,
                .shape = {1, 2, 3, 4, 5, 6, INT64_MAX, 0},
                .is_inline = true,
                .bytes = ZEROS,
                .n_bytes = 256},
               .has_output = true,
               {.dtype = PROTO_FLOAT16, .rank = 0, .buffer = UINT32_MAX, .offset = UINT64_MAX},
               .has_deadline = true,
               UINT64_MAX,
               .priority = 3,
               .train = true,
               .seed = UINT64_MAX,
               .offset = 4,
               .result = RESULT_COMPACT}},
    {.id = 4, .verb = VERB_CANCEL, .cancel = {3}},
    {.id = 5, .verb = VERB_BUFFER_CREATE, .buffer_create = {1 << 20, BUFFER_HOST}},
    {.id = 5, .verb = VERB_BUFFER_CREATE, .buffer_create = {UINT64_MAX, BUFFER_CUDA}},
    {.id = 6, .verb = VERB_BUFFER_REGISTER, .buffer_register = {4096, BUFFER_HOST}},
    {.id = 6, .verb = VERB_BUFFER_REGISTER, .buffer_register = {4096, BUFFER_CUDA}},
    {.id = 7, .verb = VERB_BUFFER_RELEASE, .buffer_release = {7}},
    {.id = 8, .verb = VERB_MODEL_LIST},
    {.id = 8, .verb = VERB_MODEL_LIST, .model_list = {S("m")}},
    {.id = 9, .verb = VERB_MODEL_DESCRIBE, .model = {S("m\xc3\xa9")}},
    {.id = 10, .verb = VERB_MODEL_LOAD, .model = {S("m")}},
    {.id = 11, .verb = VERB_MODEL_UNLOAD, .model = {S("m")}},
    {.id = 12, .verb = VERB_MODEL_RELOAD},
    {.id = 12, .verb = VERB_MODEL_RELOAD, .model = {S("m")}},
    {.id = 13, .verb = VERB_STATUS},
    {.id = 14, .verb = VERB_STATS},
    {.id = 14, .verb = VERB_STATS, .model = {S("m")}},
    {.id = 15, .verb = VERB_DRAIN},
    {.id = 16, .verb = VERB_LOG, .log = {S("debug")}},
};

static const struct proto_reply sample_replies[] = {
    {.has_id = true, .id = 1, .verb = VERB_HELLO, EMPTY_MAP},
    {.has_id = true, .id = 2, .verb = VERB_PING, EMPTY_MAP},
    {.has_id = true,
     .id = 3,
     .verb = VERB_INFER,
     .infer = {.output = INPUT(8),
               .offset = 400,
               .queue_us = 12,
               .run_us = UINT64_MAX,
               .batch_rows = 1024,
               .late = true}},
    {.has_id = true,
     .id = UINT64_MAX,
     .verb = VERB_INFER,
     .infer = {.output = {.dtype = PROTO_UINT8,
                          .rank = 1,
                          .shape = {16},
                          .is_inline = true,
                          .bytes = ZEROS,
                          .n_bytes = 16},
               .batch_rows = UINT32_MAX,
               .has_constant = true,
               .constant = -0.25,
               .n_full = 3}},
    {.has_id = true,
     .id = 4,
     .verb = VERB_CANCEL,
     .document = {(const uint8_t *)"\x81\xa9"
                                   "cancelled\xc3",
                  12}},
    {.has_id = true, .id = 5, .verb = VERB_BUFFER_CREATE, .buffer = {7, 1 << 20}},
    {.has_id = true, .id = 6, .verb = VERB_BUFFER_REGISTER, .buffer = {UINT32_MAX, UINT64_MAX}},
    {.has_id = true, .id = 7, .verb = VERB_BUFFER_RELEASE, EMPTY_MAP},
    {.has_id = true, .id = 8, .verb = VERB_MODEL_LIST, EMPTY_MAP},
    {.has_id = true, .id = 9, .verb = VERB_MODEL_DESCRIBE, EMPTY_MAP},
    {.has_id = true, .id = 10, .verb = VERB_MODEL_LOAD, EMPTY_MAP},
    {.has_id = true, .id = 11, .verb = VERB_MODEL_UNLOAD, EMPTY_MAP},
    {.has_id = true, .id = 12, .verb = VERB_MODEL_RELOAD, EMPTY_MAP},
    {.has_id = true, .id = 13, .verb = VERB_STATUS, EMPTY_MAP},
    {.has_id = true, .id = 14, .verb = VERB_STATS, EMPTY_MAP},
    {.has_id = true, .id = 15, .verb = VERB_DRAIN, EMPTY_MAP},
    {.has_id = true, .id = 16, .verb = VERB_LOG, EMPTY_MAP},
    {.has_id = true, .id = 3, .verb = VERB_INFER, .error = ERR_DEADLINE, .text = S("late")},
    {.has_id = true, .id = 17, .verb = VERB_COUNT, .error = ERR_BAD_MESSAGE, .text = S("no verb")},
    {.verb = VERB_COUNT, .error = ERR_BAD_MESSAGE, .text = S("")},
};
