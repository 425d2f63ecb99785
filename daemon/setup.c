/*
 * setup.c - what a start needs to know of the system before anything runs
 *
 * The configuration is the file's, changed by the environment and then by the command line. A file
 * alone cannot say whether its groups and folders are there, so that is asked here, for a start, a
 * reload and --check alike.
 */
#include "setup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "access.h"
#include "proto/base.h"

#define PLACE_MAX       640
#define FOLDER_MAX      200
#define DESCRIPTORS_MIN 32u /* about half of them open when idle */

int setup_group(const char *key, const char *name, gid_t *ret, struct report *report)
{
    int r = name[0] ? access_group(name, ret) : 0;

    if (r == -ENOENT)
        return report_set(report, -EINVAL, "%s: there is no group \"%s\"", key, name);
    if (r < 0)
        return report_set(report, -EINVAL, "%s: \"%s\": %s", key, name, strerrordesc_np(-r));
    return 0;
}

/* What a file alone cannot say to be right. */
static int check_system(const struct server_options *options, const struct config *config,
                        struct report *report)
{
    gid_t gid;
    int fd, r;

    r = setup_group("socket_group", config->socket_group, &gid, report);
    if (r == 0)
        r = setup_group("admin_group", config->admin_group, &gid, report);
    if (r < 0)
        return r;
    fd = open(config->models_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return report_set(report, -EINVAL, "%s: %s: %s",
                          options->models ? "--models" : "models_dir", config->models_dir,
                          strerrordesc_np(errno));
    close_fd(fd);
    return 0;
}

/* What goes before a file's own name, which reasons begin with. Of a path so long that it would
 * crowd out the reason, nothing. */
static int folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash && slash - path < FOLDER_MAX ? (int)(slash + 1 - path) : 0;
}

int setup_config(const struct server_options *options, struct config *ret, struct report *report)
{
    const char *socket = options->socket ? options->socket : getenv("FUSED_SOCKET");
    struct config config;
    char place[PLACE_MAX];
    const char *path = options->config ? options->config : place;
    int r;

    config_defaults(&config);
    config_place(place, sizeof(place));
    r = config_load(path, &config, report);
    /* The default file need not be there. */
    if (r < 0 && (r != -ENOENT || options->config))
        return report_prefix(report, r, "%.*s", folder_length(path), path);
    if (socket && *socket) {
        if (strlen(socket) > CONFIG_SOCKET_MAX)
            return report_set(report, -EINVAL, "socket: the path is longer than %d bytes",
                              CONFIG_SOCKET_MAX);
        snprintf(config.socket, sizeof(config.socket), "%s", socket);
    }
    if ((options->backend && strlen(options->backend) >= sizeof(config.backend)) ||
        (options->models && strlen(options->models) >= sizeof(config.models_dir)))
        return report_set(report, -EINVAL, "a path on the command line is too long");
    if (options->backend)
        snprintf(config.backend, sizeof(config.backend), "%s", options->backend);
    if (options->models) {
        snprintf(config.models_dir, sizeof(config.models_dir), "%s", options->models);
        snprintf(config.weights_dir, sizeof(config.weights_dir), "%s", options->models);
    }
    r = check_system(options, &config, report);
    if (r == 0)
        *ret = config;
    return r;
}

/* What others may write decides what is computed here. */
static void warn_if_writable(const char *path, const char *what)
{
    struct stat st;

    if (stat(path, &st) == 0 && (st.st_mode & S_IWOTH))
        log_warning("config.writable", "everybody may write to the %s", what);
}

void setup_warn_about_files(const struct server_options *options, const struct config *config)
{
    char place[PLACE_MAX];

    config_place(place, sizeof(place));
    warn_if_writable(options->config ? options->config : place, "configuration");
    warn_if_writable(config->models_dir, "models_dir");
    warn_if_writable(config->weights_dir, "weights_dir");
}

int setup_descriptors(struct report *report)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 0;
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
            log_warning("limits.descriptors", "RLIMIT_NOFILE cannot be raised: %s",
                        strerrordesc_np(errno));
    }
    if (limit.rlim_max < DESCRIPTORS_MIN)
        return report_set(report, -EMFILE, "RLIMIT_NOFILE is %llu, at least %u are needed",
                          (unsigned long long)limit.rlim_max, DESCRIPTORS_MIN);
    return 0;
}
