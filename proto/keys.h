/*
 * keys.h - the keys of messages, and in words what each one's value must be
 *
 * One list, from which the decoder makes its table and every reason for a refusal.
 */
#pragma once

#define WANT_U32  "an integer from 0 to 4294967295"
#define WANT_U64  "an integer from 0 to 18446744073709551615"
#define WANT_NAME "1 to 64 bytes of UTF-8 without control characters"

/* X(KEY, "key", what its value must be). "result" is a word in a request and a map in a reply. */
#define KEYS(X)                                                              \
    X(ID, "id", WANT_U64)                                                    \
    X(VERB, "verb", "a string")                                              \
    X(VERSION, "version", WANT_U32)                                          \
    X(NAME, "name", WANT_NAME)                                               \
    X(MODEL, "model", WANT_NAME)                                             \
    X(INPUT, "input", "a tensor")                                            \
    X(OUTPUT, "output", "a tensor")                                          \
    X(DEADLINE_US, "deadline_us", WANT_U64)                                  \
    X(PRIORITY, "priority", "an integer from 0 to 3")                        \
    X(TRAIN, "train", "a boolean")                                           \
    X(SEED, "seed", WANT_U64)                                                \
    X(OFFSET, "offset", WANT_U64)                                            \
    X(RESULT, "result", "\"full\" or \"compact\" (in a reply: a map)")       \
    X(TARGET, "target", WANT_U64)                                            \
    X(SIZE, "size", WANT_U64)                                                \
    X(KIND, "kind", "\"host\" or \"cuda\"")                                  \
    X(DEVICE, "device", WANT_U32)                                            \
    X(BUFFER, "buffer", WANT_U32)                                            \
    X(AFTER, "after", WANT_NAME)                                             \
    X(LEVEL, "level", WANT_NAME)                                             \
    X(DTYPE, "dtype", "\"float32\", \"float16\", \"bfloat16\" or \"uint8\"") \
    X(SHAPE, "shape", "at most 8 integers from 0 to 9223372036854775807")    \
    X(BYTES, "bytes", "at most 32768 bytes of bin")                          \
    X(ERROR, "error", "a map")                                               \
    X(CODE, "code", "an integer from 1 to 4294967295")                       \
    X(TEXT, "text", "at most 400 bytes of UTF-8 without control characters") \
    X(QUEUE_US, "queue_us", WANT_U64)                                        \
    X(RUN_US, "run_us", WANT_U64)                                            \
    X(BATCH_ROWS, "batch_rows", WANT_U32)                                    \
    X(LATE, "late", "a boolean")                                             \
    X(CONSTANT, "constant", "a floating-point number")                       \
    X(FULL, "full", WANT_U32)
