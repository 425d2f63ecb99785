/*
 * config.h - fused.conf
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/backend.h"
#include "kernels/conf.h"
#include "kernels/report.h"
#include "log.h"

#define CONFIG_DEFAULT    "/etc/fused/fused.conf" /* see config_place() */
#define CONFIG_PATH_MAX   256
#define CONFIG_SOCKET_MAX 107 /* sun_path without its NUL */

struct config {
    char socket[CONFIG_PATH_MAX];
    mode_t socket_mode;
    char socket_group[64]; /* empty: the daemon's own group */
    char admin_group[64];  /* empty: none */
    char backend[CONFIG_PATH_MAX];
    int64_t devices[BACKEND_DEVICES_MAX]; /* indices, in the order of the engines */
    unsigned n_devices;                   /* at least 1 */
    unsigned cpu_threads;                 /* 0: one per core that the daemon may use */
    unsigned spin_us;
    char models_dir[CONFIG_PATH_MAX], weights_dir[CONFIG_PATH_MAX];

    /* What a reload takes over. */
    enum log_level log_level;
    uint64_t uid_buffer_bytes;
    uint32_t uid_buffers, uid_connections, uid_requests;
    uint64_t total_buffer_bytes; /* 0: half of the memory of the host */
    uint64_t spare_buffer_bytes, device_reserve_bytes;
    uint32_t total_connections;
    uint32_t hello_timeout_ms, batch_timeout_ms, drain_timeout_ms;
};

void config_defaults(struct config *config);
/* The file that is read when none is named: ../etc/fused/fused.conf of the folder bin/ that the
 * program lies in, if there is one, else CONFIG_DEFAULT. */
void config_place(char *to, size_t size);
/* Consumes nothing; the whole file is checked before *ret is touched. -EINVAL with file, line, key
 * and reason. */
int config_parse(struct conf *conf, struct config *ret, struct report *report);
/* Reads a file. A file that is not there is -ENOENT. */
int config_load(const char *path, struct config *ret, struct report *report);
/* Takes over from `next` what a reload may change. */
void config_adopt(struct config *config, const struct config *next);
