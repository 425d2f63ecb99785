/*
 * conf.h - strict reading of libconfig files
 *
 * conf.c is the only file that includes libconfig. It reads the file itself (regular, at most
 * CONF_SIZE_MAX bytes), refuses @include and integers that libconfig would wrap, and remembers
 * which keys were asked for: conf_finish() refuses the rest as unknown. Every error names file
 * (without its directory), line, key and reason. The first error sticks: later calls return the
 * default.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "report.h"

#define CONF_SIZE_MAX (1u << 20)

struct conf;       /* a file */
struct conf_group; /* a group in it: the root, or one element of a list of groups; owned by the file
                    */

/* Opens beneath dirfd (as safetensors_open), or any path with AT_FDCWD. Non-blocking kinds of files
 * are refused unread. */
int conf_open(int dirfd, const char *name, struct conf **ret, struct report *report);
/* The same from memory; `name` is for messages. For tests and fuzzing. */
int conf_parse(const char *name, const char *text, size_t n, struct conf **ret,
               struct report *report);
struct conf *conf_free(struct conf *conf);

struct conf_group *conf_root(struct conf *conf);
int conf_line(const struct conf_group *group);
bool conf_has(const struct conf_group *group, const char *key);

/* Each returns the default when the key is absent. Strings belong to the file. Floats accept
 * integers, and must be finite. */
const char *conf_string(struct conf_group *group, const char *key, const char *otherwise);
int64_t conf_int(struct conf_group *group, const char *key, int64_t min, int64_t max,
                 int64_t otherwise);
double conf_float(struct conf_group *group, const char *key, double otherwise);
bool conf_bool(struct conf_group *group, const char *key, bool otherwise);
/* A list or array of integers; the count, or -1 when absent. An integer alone counts as a list of
 * one. */
int conf_ints(struct conf_group *group, const char *key, int64_t min, int64_t max, int64_t *to,
              int n_max);
/* The same, of different ones from 0 to max, at least one. */
int conf_indices(struct conf_group *group, const char *key, int64_t max, int64_t *to, int n_max);
/* A group under a key (NULL when absent), and the i-th of a list of groups (NULL past the end). */
struct conf_group *conf_group(struct conf_group *group, const char *key);
struct conf_group *conf_group_at(struct conf_group *group, const char *key, int i);

/* Records an error of the caller's own at that key; keeps the first. Returns -EINVAL. */
__attribute__((format(printf, 3, 4))) int conf_error(struct conf_group *group, const char *key,
                                                     const char *format, ...);

/* That a group lacks a key. To be told of it where the group's other keys are asked for all the
 * same: one that nobody asked for is then named instead, for it may be that key, misspelt. */
int conf_missing(struct conf_group *group, const char *key);

/* The first error, or an unknown key, or 0. */
int conf_finish(struct conf *conf, struct report *report);
