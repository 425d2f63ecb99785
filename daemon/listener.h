/*
 * listener.h - the listening socket
 */
#pragma once

#include <stdbool.h>
#include <sys/stat.h>

#include "config.h"
#include "kernels/report.h"

struct listener {
    int fd;      /* listening, non-blocking; -1 when there is none yet */
    int dir_fd;  /* directory of the path; -1 when the socket was handed over */
    int lock_fd; /* held for as long as the daemon lives */
    char base[CONFIG_SOCKET_MAX + 1];
    dev_t dev; /* of our socket at the path, so that only ours is ever removed */
    ino_t ino;
};

#define LISTENER_INIT ((struct listener){.fd = -1, .dir_fd = -1, .lock_fd = -1})

/*
 * Takes the handed-over socket, or locks `path`. -EALREADY when another daemon serves it, -EINVAL
 * when it holds something that is no socket of ours, or is no usable path.
 */
int listener_claim(struct listener *listener, const char *path, struct report *report);
/* Makes the claimed socket reachable: mode and group are right before anybody can connect. */
int listener_open(struct listener *listener, mode_t mode, gid_t group, struct report *report);
/* Stops listening. The path is removed if it still is ours. */
void listener_close(struct listener *listener);
/* A new connection, close-on-exec and non-blocking, or -errno. */
int listener_accept(struct listener *listener);
