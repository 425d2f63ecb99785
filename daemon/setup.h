/*
 * setup.h - the configuration and the limits that a start finds
 */
#pragma once

#include <sys/types.h>

#include "config.h"
#include "kernels/report.h"

/* What the command line asked for; NULL: not given. */
struct server_options {
    const char *config, *socket, *backend, *models;
};

/* The configuration that the options ask for, with the command line's and environment's changes. */
int setup_config(const struct server_options *options, struct config *ret, struct report *report);
/* The gid of a group of the configuration; none when the name is empty. */
int setup_group(const char *key, const char *name, gid_t *ret, struct report *report);
void setup_warn_about_files(const struct server_options *options, const struct config *config);
/* Each connection is a descriptor, and those in flight to clients are counted against this too.
 * With fewer than a start takes, libuv would abort without a word. */
int setup_descriptors(struct report *report);
