/*
 * registry.h - the models that are served, and their versions
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/stat.h>

#include "batch.h"
#include "device.h"
#include "kernels/backend.h"
#include "kernels/model.h"
#include "kernels/pipeline.h"
#include "place.h"
#include "stats.h"
#include "work.h"

#define REGISTRY_MODELS_MAX 1024

/* What tells an unchanged file from a changed one. */
struct stamp {
    dev_t dev;
    ino_t ino;
    off_t size;
    struct timespec mtime, ctime;
};

/* One loaded model file. Referenced by the table while current, and by each request made for it. */
struct version {
    struct work work; /* freeing, on a helper thread */
    struct registry *registry;
    unsigned refs;
    struct served *served; /* whose statistics count; referenced; NULL until it is current */
    uint64_t number;
    struct model model;
    struct stamp conf_stamp, weights_stamp;
    struct pipeline *pipeline;
    struct plan *plans[BACKEND_DEVICES_MAX]; /* by device; NULL: not placed there */
    uint32_t places;                         /* a bit for each device that it is placed on */
    struct plan_info info;                   /* of the first of them */
    struct cost cost;
    uint64_t load_us;

    /* The first takes what any of its devices may run, the others what is bound to one, because of
     * a buffer there. */
    struct place_queue queues[1 + BACKEND_DEVICES_MAX];
    unsigned n_queues; /* one where there is no choice of devices */
    uint64_t rows;     /* that wait in all of them */
    uint64_t run_us;   /* that its batches take, smoothed */
};

/* A name that is served. */
struct served {
    char name[MODEL_NAME_MAX + 1];
    unsigned refs;
    struct version *current;
    struct stats stats;
};

struct registry {
    struct works *works;
    const struct device *device;
    const char *models_dir, *weights_dir;
    struct batch_order order;                   /* of all queues */
    struct served *served[REGISTRY_MODELS_MAX]; /* ascending names */
    unsigned n;
    struct stats total; /* all models that are or were served */
    uint64_t last_number;
    struct registry_bytes {
        uint64_t resident, arena;
    } bytes, device_bytes[BACKEND_DEVICES_MAX]; /* of current versions */
    TAILQ_HEAD(, registry_job) jobs;            /* the first is running if is_busy */
    bool is_busy;
};

enum registry_action { ACTION_UNCHANGED, ACTION_LOADED, ACTION_UNLOADED };

/* What became of one model. */
struct registry_change {
    char name[MODEL_NAME_MAX + 1];
    enum registry_action action;
    struct version *version; /* freshly loaded and not yet current; owned */
    const char *file;        /* of what is served then, while the job runs; NULL: unloaded */
    uint64_t number, load_us;
};

enum registry_task {
    TASK_SYNC,   /* make what is served equal to what models_dir holds: start, SIGHUP, reload */
    TASK_LOAD,   /* one model file: load, or reload of one */
    TASK_UNLOAD, /* one name */
};

/* One change of the table: all of it, or nothing. */
struct registry_job {
    TAILQ_ENTRY(registry_job) link;
    struct work work;
    struct registry *registry;
    enum registry_task task;
    char name[MODEL_NAME_MAX + 1];
    void (*done)(struct registry_job *job, void *context);
    void *context;

    struct registry_change *changes;
    unsigned n_changes;
    int result;
    struct report report;
    unsigned n_loaded; /* progress, for whoever watches from the loop: atomic */
};

void registry_init(struct registry *registry, struct works *works, const struct device *device,
                   const char *models_dir, const char *weights_dir);
/* Unloads everything. No job is running. */
void registry_deinit(struct registry *registry);

/* The current version of a name (its reference stays the table's), or NULL. */
struct served *registry_find(const struct registry *registry, const char *name, size_t n);
/* The place of the first name after `name`. */
unsigned registry_after(const struct registry *registry, const char *name, size_t n);

/*
 * Queues a change; jobs run one after the other. `done` is called on the loop thread, after which
 * the job is freed. -ENOMEM.
 */
int registry_submit(struct registry *registry, enum registry_task task, const char *name, size_t n,
                    void (*done)(struct registry_job *job, void *context), void *context);

/* Parses and builds every model of the configuration without a backend, as `fused --check` does;
 * `each` is told about each that is right. */
int registry_check(const struct config *config, void (*each)(const struct model *model),
                   struct report *report);

struct version *version_ref(struct version *version);
struct version *version_unref(struct version *version);
