/*
 * config.c - the daemon's own configuration
 *
 * One key a fact, flat, each with a range; config/fused.conf is the reference that documents them
 * and parses to exactly these defaults. Paths are absolute and without "..", so that what is
 * reviewed is what is opened. The file is checked whole before anything of it is used.
 */
#include "config.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/proto.h"

#define GIB (UINT64_C(1) << 30)

void config_defaults(struct config *config)
{
    *config = (struct config){
        .socket = PROTO_SOCKET_DEFAULT,
        .socket_mode = 0660,
        .backend = "auto",
        .devices = {0},
        .n_devices = 1,
        .spin_us = 50,
        .models_dir = "/etc/fused/models.d",
        .weights_dir = "/var/lib/fused/weights",
        .log_level = LOG_LEVEL_INFO,
        .uid_buffer_bytes = 4 * GIB,
        .uid_buffers = 256,
        .uid_connections = 256,
        .uid_requests = 1024,
        .spare_buffer_bytes = GIB / 4,
        .device_reserve_bytes = GIB,
        .total_connections = 4096,
        .hello_timeout_ms = 5000,
        .batch_timeout_ms = 30000,
        .drain_timeout_ms = 30000,
    };
}

void config_place(char *to, size_t size)
{
    static const char bin[] = "/bin";
    char self[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char *slash;
    int length;

    self[n < 0 ? 0 : n] = '\0';
    slash = strrchr(self, '/');
    if (slash && slash - self >= (ptrdiff_t)strlen(bin) &&
        strncmp(slash - strlen(bin), bin, strlen(bin)) == 0) {
        slash[-(ptrdiff_t)strlen(bin)] = '\0';
        length = snprintf(to, size, "%s" CONFIG_DEFAULT, self);
        if (length > 0 && (size_t)length < size && access(to, F_OK) == 0)
            return;
    }
    snprintf(to, size, "%s", CONFIG_DEFAULT);
}

static void get_string(struct conf_group *root, const char *key, char *to, size_t size)
{
    const char *s = conf_string(root, key, to);
    size_t n = strlen(s);

    if (s == to)
        return;
    if (n >= size) {
        conf_error(root, key, "is %zu bytes long, at most %zu are allowed", n, size - 1);
        return;
    }
    memcpy(to, s, n + 1);
}

static bool has_dotdot(const char *path)
{
    for (const char *p = path; (p = strstr(p, "..")); p += 2) {
        if ((p == path || p[-1] == '/') && (p[2] == '/' || p[2] == '\0'))
            return true;
    }
    return false;
}

static void get_path(struct conf_group *root, const char *key, char *to, size_t size)
{
    get_string(root, key, to, size);
    if (to[0] != '/' || has_dotdot(to))
        conf_error(root, key, "must be an absolute path without \"..\"");
}

static void get_mode(struct conf_group *root, mode_t *mode)
{
    const char *s = conf_string(root, "socket_mode", NULL);
    unsigned value = 0;

    if (!s)
        return;
    for (const char *p = s; *p; p++) {
        if (*p < '0' || *p > '7' || value > 0777) {
            value = 01000;
            break;
        }
        value = value * 8 + (unsigned)(*p - '0');
    }
    if (value > 0777 || !*s)
        conf_error(root, "socket_mode", "must be octal digits in quotes, as \"0660\"");
    else
        *mode = value;
}

static void get_devices(struct conf_group *root, struct config *config)
{
    int n = conf_indices(root, "devices", MODEL_DEVICE_MAX, config->devices, BACKEND_DEVICES_MAX);

    if (n > 0)
        config->n_devices = (unsigned)n;
}

static void get_log_level(struct conf_group *root, enum log_level *level)
{
    const char *s = conf_string(root, "log_level", NULL);

    if (s && log_level_parse(s, strlen(s), level) < 0)
        conf_error(root, "log_level", "must be \"error\", \"warning\", \"info\" or \"debug\"");
}

static void get_u32(struct conf_group *root, const char *key, int64_t min, int64_t max,
                    uint32_t *value)
{
    *value = (uint32_t)conf_int(root, key, min, max, *value);
}

int config_parse(struct conf *conf, struct config *ret, struct report *report)
{
    struct conf_group *root = conf_root(conf);
    struct config c;
    uint32_t n;
    int r;

    config_defaults(&c);
    get_path(root, "socket", c.socket, CONFIG_SOCKET_MAX + 1);
    get_mode(root, &c.socket_mode);
    get_string(root, "socket_group", c.socket_group, sizeof(c.socket_group));
    get_string(root, "admin_group", c.admin_group, sizeof(c.admin_group));
    get_string(root, "backend", c.backend, sizeof(c.backend));
    /* A shared object may be named on the command line only. */
    if (strcmp(c.backend, "auto") != 0 && strcmp(c.backend, "cpu") != 0 &&
        strcmp(c.backend, "cuda") != 0)
        conf_error(root, "backend", "must be \"auto\", \"cpu\" or \"cuda\"");
    get_devices(root, &c);
    n = c.cpu_threads;
    get_u32(root, "cpu_threads", 0, 1024, &n);
    c.cpu_threads = n;
    n = c.spin_us;
    get_u32(root, "spin_us", 0, 1000000, &n);
    c.spin_us = n;
    get_path(root, "models_dir", c.models_dir, sizeof(c.models_dir));
    get_path(root, "weights_dir", c.weights_dir, sizeof(c.weights_dir));
    get_log_level(root, &c.log_level);
    c.uid_buffer_bytes = (uint64_t)conf_int(root, "uid_buffer_bytes", 0, INT64_C(1) << 50,
                                            (int64_t)c.uid_buffer_bytes);
    get_u32(root, "uid_buffers", 0, 65536, &c.uid_buffers);
    get_u32(root, "uid_connections", 1, 65536, &c.uid_connections);
    get_u32(root, "uid_requests", 1, 1 << 20, &c.uid_requests);
    c.total_buffer_bytes = (uint64_t)conf_int(root, "total_buffer_bytes", 0, INT64_C(1) << 50,
                                              (int64_t)c.total_buffer_bytes);
    c.spare_buffer_bytes = (uint64_t)conf_int(root, "spare_buffer_bytes", 0, INT64_C(1) << 50,
                                              (int64_t)c.spare_buffer_bytes);
    c.device_reserve_bytes = (uint64_t)conf_int(root, "device_reserve_bytes", 0, INT64_C(1) << 50,
                                                (int64_t)c.device_reserve_bytes);
    get_u32(root, "total_connections", 1, 1 << 20, &c.total_connections);
    get_u32(root, "hello_timeout_ms", 10, 600000, &c.hello_timeout_ms);
    get_u32(root, "batch_timeout_ms", 10, 3600000, &c.batch_timeout_ms);
    get_u32(root, "drain_timeout_ms", 0, 3600000, &c.drain_timeout_ms);
    r = conf_finish(conf, report);
    if (r < 0)
        return r;
    *ret = c;
    return 0;
}

int config_load(const char *path, struct config *ret, struct report *report)
{
    struct conf *conf = NULL;
    int r;

    r = conf_open(AT_FDCWD, path, &conf, report);
    if (r < 0)
        return r;
    r = config_parse(conf, ret, report);
    conf_free(conf);
    return r;
}

void config_adopt(struct config *config, const struct config *next)
{
    config->log_level = next->log_level;
    config->uid_buffer_bytes = next->uid_buffer_bytes;
    config->uid_buffers = next->uid_buffers;
    config->uid_connections = next->uid_connections;
    config->uid_requests = next->uid_requests;
    config->total_buffer_bytes = next->total_buffer_bytes;
    config->spare_buffer_bytes = next->spare_buffer_bytes;
    config->device_reserve_bytes = next->device_reserve_bytes;
    config->total_connections = next->total_connections;
    config->hello_timeout_ms = next->hello_timeout_ms;
    config->batch_timeout_ms = next->batch_timeout_ms;
    config->drain_timeout_ms = next->drain_timeout_ms;
}
