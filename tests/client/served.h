/*
 * served.h - a real daemon for a test: started on a socket in a directory of its own, stopped at
 * the end
 *
 * The daemon is $B/fused (B: the build folder, "build" when not set). It dies with the test.
 */
#pragma once

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/fused.h"

struct served {
    char dir[64], socket[96];
    pid_t pid;
};

static inline const char *served_build(void)
{
    const char *build = getenv("B");

    return build != NULL && build[0] != 0 ? build : "build";
}

/* Starts the daemon on the socket of `served`, on that backend. 0 once it answers. */
static inline int served_again_on(struct served *served, const char *models, const char *backend)
{
    const struct timespec pause = {.tv_nsec = 20000000};
    char program[256];
    pid_t parent = getpid();

    snprintf(program, sizeof(program), "%s/fused", served_build());
    served->pid = fork();
    if (served->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            execl(program, program, "--config", "config/fused.conf", "--socket", served->socket,
                  "--backend", backend, "--models", models, (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 1500 && served->pid > 0; i++) {
        struct fused *f;

        if (fused_connect(served->socket, "test", &f) == 0) {
            fused_close(f);
            return 0;
        }
        if (waitpid(served->pid, NULL, WNOHANG) == served->pid)
            return -1;
        nanosleep(&pause, NULL);
    }
    return -1;
}

/* Serves the models of a directory with the weights beside them, on that backend. 0 once it
 * answers. */
static inline int served_start_on(struct served *served, const char *models, const char *backend)
{
    snprintf(served->dir, sizeof(served->dir), "/tmp/fused-served-XXXXXX");
    if (mkdtemp(served->dir) == NULL)
        return -1;
    snprintf(served->socket, sizeof(served->socket), "%s/s", served->dir);
    return served_again_on(served, models, backend);
}

static inline int served_start(struct served *served, const char *models)
{
    return served_start_on(served, models, "cpu");
}

/* Asks it to end and waits. Its exit code, or -1 when a signal ended it. */
static inline int served_stop(struct served *served)
{
    char path[128];
    int status = 0;

    kill(served->pid, SIGTERM);
    if (waitpid(served->pid, &status, 0) != served->pid)
        return -1;
    unlink(served->socket);
    snprintf(path, sizeof(path), "rm -rf '%s'", served->dir);
    if (system(path) != 0)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
