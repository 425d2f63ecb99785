/*
 * server.h - everything that one daemon is: the loop and what hangs on it
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include <uv.h>

#include "buffer.h"
#include "config.h"
#include "conn.h"
#include "device.h"
#include "listener.h"
#include "proto/codec.h"
#include "registry.h"
#include "scheduler.h"
#include "setup.h"
#include "uid.h"
#include "work.h"

enum server_state {
    SERVER_STARTING, /* models load; nobody can connect yet */
    SERVER_READY,
    SERVER_DRAINING, /* what was accepted ends; nothing new begins */
    SERVER_LOST,     /* the device is gone; the process is about to end */
};

enum server_exit {
    EXIT_OK = 0,
    EXIT_USAGE_ERROR = 64,
    EXIT_NO_DEVICE = 69,
    EXIT_DEVICE_LOST = 70,
    EXIT_OUTPUT = 74,
    EXIT_ALREADY_RUNNING = 75,
    EXIT_CONFIGURATION = 78,
};

struct server {
    struct server_options options;
    struct config config;
    struct device device;
    struct backend_info infos[BACKEND_DEVICES_MAX]; /* of each device, as it was last asked */
    gid_t admin_gid;                                /* -1: none */
    struct listener listener;
    uint64_t started_us;

    uv_loop_t loop;
    uv_poll_t accepting;
    bool is_accepting, accept_paused;
    uv_timer_t tick;
    uv_signal_t signals[3];
    struct works works;

    enum server_state state;
    int exit_code;
    bool said_ready, reload_running, reload_again, is_shut, stopping;
    unsigned n_client_works; /* helper work that a client waits for */
    uint64_t drain_until_us, flush_until_us;
    uint64_t watchdog_us, watchdog_next_us;
    unsigned n_loaded_seen;

    struct uids uids;
    TAILQ_HEAD(, conn) conns; /* in order of arrival */
    TAILQ_HEAD(, conn) paused;
    uv_timer_t resume; /* runs while there are any */
    struct registry registry;
    struct scheduler scheduler;
    struct buffers buffers;

    /* Space of the loop thread, one message at a time. */
    struct codec *codec;
    uint8_t rx[PROTO_DATAGRAM_MAX];
    uint8_t tx[PROTO_DATAGRAM_MAX];
    uint8_t document[PROTO_DATAGRAM_MAX - 1024];
};

/* Runs a daemon until it ends; returns its exit code. */
int server_run(const struct server_options *options);

const char *server_state_name(const struct server *server);
/* Something ended: a drain may be over. */
void server_progress(struct server *server);
void server_drain(struct server *server, const char *why);
/* The device is gone: tells everybody who waits, and ends the process. */
void server_lost(struct server *server, const char *why);
/* Logs what a change of models came to. */
void server_changed(struct server *server, const struct registry_job *job);
