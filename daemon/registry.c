/*
 * registry.c - loading, swapping and unloading models
 *
 * The table belongs to the loop thread and changes only when a job commits. Jobs run one at a time,
 * so while a helper thread works on one the table cannot change under it: it compares file stamps
 * with those of the current versions, builds new versions beside them, and the loop then swaps all
 * of them or, after the first error, none.
 *
 * Requests were checked against the version that they refer to, so they run on it even when a newer
 * one is current: a version carries its own queue, and is unloaded on a helper thread when its last
 * request is done. What a model did is counted under its name, over all its versions.
 */
#include "registry.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "proto/base.h"

static struct served *served_unref(struct served *served)
{
    if (served && --served->refs == 0)
        free(served);
    return NULL;
}

/* On a helper thread, or where there is no loop. */
static void version_destroy(struct version *version)
{
    const struct device *device = version->registry->device;

    for (unsigned i = 0; i < device->n; i++) {
        if (version->plans[i])
            device->ops->unload(device->backends[i], version->plans[i]);
    }
    pipeline_free(version->pipeline);
    for (unsigned i = 0; i < version->n_queues; i++)
        batch_deinit(&version->queues[i].batch);
}

static void run_free(struct work *work)
{
    version_destroy((struct version *)work);
}

static void done_free(struct work *work)
{
    struct version *version = (struct version *)work;

    served_unref(version->served);
    free(version);
}

struct version *version_ref(struct version *version)
{
    version->refs++;
    return version;
}

struct version *version_unref(struct version *version)
{
    struct works *works;

    if (!version)
        return NULL;
    works = version->registry->works;
    assert(version->refs > 0);
    if (--version->refs > 0)
        return NULL;
    assert(version->rows == 0);
    work_queue(works, &works->own, &version->work, run_free, done_free);
    return NULL;
}

/* ---- one model file, on a helper thread ---- */

static void stamp_file(int dirfd, const char *name, struct stamp *ret)
{
    struct stat st;

    *ret = (struct stamp){0};
    if (fstatat(dirfd, name, &st, 0) == 0)
        *ret = (struct stamp){st.st_dev, st.st_ino, st.st_size, st.st_mtim, st.st_ctim};
}

static bool stamp_same(const struct stamp *a, const struct stamp *b)
{
    return a->dev == b->dev && a->ino == b->ino && a->size == b->size &&
           a->mtime.tv_sec == b->mtime.tv_sec && a->mtime.tv_nsec == b->mtime.tv_nsec &&
           a->ctime.tv_sec == b->ctime.tv_sec && a->ctime.tv_nsec == b->ctime.tv_nsec;
}

static int open_dir(const char *path, const char *what, int *ret, struct report *report)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        return report_set(report, -EINVAL, "%s: %s", what, strerrordesc_np(errno));
    *ret = fd;
    return 0;
}

/* Parses and checks one file. The stamps are taken first: a later change is seen the next time. */
static int build(int models_fd, const char *weights_dir, const char *file, struct version *version,
                 struct report *report)
{
    _cleanup_close_ int weights_fd = -1;
    struct safetensors *weights = NULL;
    int r;

    stamp_file(models_fd, file, &version->conf_stamp);
    r = model_parse(models_fd, file, &version->model, report);
    if (r < 0)
        return r;
    if (version->model.weights[0]) {
        r = open_dir(weights_dir, "weights_dir", &weights_fd, report);
        if (r < 0)
            return r;
        stamp_file(weights_fd, version->model.weights, &version->weights_stamp);
        r = safetensors_open(weights_fd, version->model.weights, &weights, report);
        if (r == -ENOENT)
            r = -EINVAL; /* the model is there, and wrong */
        if (r < 0)
            return report_prefix(report, r, "%s: ", file);
    }
    r = pipeline_build(&version->model, weights, &version->pipeline, report);
    if (r < 0)
        safetensors_free(weights);
    return r;
}

static int no_such_device(const struct model *model, int i, struct report *report)
{
    return report_set(report, -EINVAL, "%s: devices: %d is none of the daemon's", model->file,
                      (int)model->devices[i]);
}

/* The devices that the model is for: those that its file names, or all. Where devices were left
 * out, those that are there do for them. */
static int place(const struct device *device, const struct model *model, uint32_t *ret,
                 struct report *report)
{
    uint32_t places = 0;

    for (int i = 0; i < model->n_devices; i++) {
        unsigned k = 0;

        while (k < device->n && device->indices[k] != model->devices[i])
            k++;
        if (k == device->n && device->fallback[0])
            continue;
        if (k == device->n)
            return no_such_device(model, i, report);
        places |= UINT32_C(1) << k;
    }
    *ret = places ? places : (UINT32_C(1) << device->n) - 1;
    return 0;
}

static int load_plans(struct version *version, struct report *report)
{
    const struct device *device = version->registry->device;
    const struct model *model = &version->model;
    int r = place(device, model, &version->places, report);

    for (unsigned i = 0; i < device->n && r == 0; i++) {
        if (!(version->places >> i & 1))
            continue;
        r = device->ops->load(device->backends[i], version->pipeline, model->max_rows,
                              &version->plans[i], report);
        if (r < 0 && device->n > 1)
            report_prefix(report, r, "device %d: ", device->indices[i]);
        if (r < 0)
            report_prefix(report, r, "%s: ", model->file);
    }
    return r;
}

static void init_queues(struct version *version)
{
    const struct device *device = version->registry->device;
    const struct model *model = &version->model;
    bool has_choice = version->places & (version->places - 1);

    device->ops->plan_info(version->plans[__builtin_ctz(version->places)], &version->info);
    cost_init(&version->cost, version->info.costs, version->info.n_costs);
    version->n_queues = has_choice ? 1 + device->n : 1;
    for (unsigned i = 0; i < version->n_queues; i++) {
        struct place_queue *queue = &version->queues[i];

        batch_init(&queue->batch, &version->registry->order, model->max_rows, model->max_delay_us,
                   model->queue_rows);
        batch_set_cost(&queue->batch, &version->cost);
        queue->engines = i == 0 ? version->places : UINT32_C(1) << (i - 1) & version->places;
        queue->row_bytes =
            (uint64_t)shape_elements(&version->pipeline->in) * dtype_size(version->pipeline->dtype);
        queue->owner = version;
    }
}

static int load(struct registry *registry, int models_fd, const char *file, struct version **ret,
                struct report *report)
{
    uint64_t begin_us = clock_us();
    struct version *version;
    int r;

    version = calloc(1, sizeof(*version));
    if (!version) {
        report_set(report, -ENOMEM, "%s: out of memory", file);
        return -ENOMEM;
    }
    version->registry = registry;
    version->refs = 1;
    r = build(models_fd, registry->weights_dir, file, version, report);
    if (r == 0)
        r = load_plans(version, report);
    if (r < 0) {
        version_destroy(version);
        free(version);
        return r;
    }
    pipeline_drop_weights(version->pipeline);
    init_queues(version);
    version->load_us = clock_us() - begin_us;
    *ret = version;
    return 0;
}

/* ---- the files of models_dir ---- */

static int is_conf(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name);

    return n > 5 && entry->d_name[0] != '.' && strcmp(entry->d_name + n - 5, ".conf") == 0;
}

static int list_files(int models_fd, struct dirent ***ret, int *ret_n, struct report *report)
{
    int n = scandirat(models_fd, ".", ret, is_conf, alphasort);

    if (n < 0)
        return report_set(report, errno == ENOMEM ? -ENOMEM : -EIO, "models_dir: %s",
                          strerrordesc_np(errno));
    *ret_n = n;
    return 0;
}

static void free_files(struct dirent **files, int n)
{
    for (int i = 0; i < n; i++)
        free(files[i]);
    free(files);
}

/* Which devices work is not known here: what "auto" may leave out counts as there. */
static int check_devices(const struct config *config, const struct model *model,
                         struct report *report)
{
    for (int i = 0; i < model->n_devices; i++) {
        unsigned k = 0;

        while (k < config->n_devices && config->devices[k] != model->devices[i])
            k++;
        if (k == config->n_devices)
            return no_such_device(model, i, report);
    }
    return 0;
}

int registry_check(const struct config *config, void (*each)(const struct model *model),
                   struct report *report)
{
    _cleanup_close_ int models_fd = -1;
    char(*names)[MODEL_NAME_MAX + 1] = NULL;
    struct dirent **files = NULL;
    int n = 0, r;

    r = open_dir(config->models_dir, "models_dir", &models_fd, report);
    if (r < 0)
        return r;
    r = list_files(models_fd, &files, &n, report);
    if (r < 0)
        return r;
    names = calloc((size_t)n + 1, sizeof(*names));
    if (!names)
        r = report_set(report, -ENOMEM, "out of memory");
    for (int i = 0; names && i < n && r == 0; i++) {
        struct version *version = calloc(1, sizeof(*version));

        if (!version) {
            r = report_set(report, -ENOMEM, "out of memory");
            break;
        }
        r = build(models_fd, config->weights_dir, files[i]->d_name, version, report);
        if (r == 0)
            r = check_devices(config, &version->model, report);
        memcpy(names[i], version->model.name, sizeof(names[i]));
        for (int k = 0; k < i && r == 0; k++) {
            if (strcmp(names[k], names[i]) == 0)
                r = report_set(report, -EINVAL, "%s: name: \"%s\" is the name of %s too",
                               files[i]->d_name, names[i], files[k]->d_name);
        }
        if (r == 0)
            each(&version->model);
        pipeline_free(version->pipeline);
        free(version);
    }
    free(names);
    free_files(files, n);
    return r;
}

/* ---- jobs, on a helper thread ---- */

static struct registry_job *job_of(struct work *work)
{
    return (struct registry_job *)((char *)work - offsetof(struct registry_job, work));
}

static int change_add(struct registry_job *job, const char *name, enum registry_action action,
                      struct version *version, const char *file)
{
    struct registry_change *change;

    for (unsigned i = 0; file && i < job->n_changes; i++) {
        if (strcmp(job->changes[i].name, name) == 0)
            return report_set(&job->report, -EINVAL, "%s: name: \"%s\" is the name of %s too", file,
                              name, job->changes[i].file);
    }
    if (job->n_changes == REGISTRY_MODELS_MAX)
        return report_set(&job->report, -EINVAL, "more than %d models", REGISTRY_MODELS_MAX);
    change = reallocarray(job->changes, job->n_changes + 1, sizeof(*change));
    if (!change)
        return report_set(&job->report, -ENOMEM, "out of memory");
    job->changes = change;
    change = &job->changes[job->n_changes++];
    *change = (struct registry_change){.action = action, .version = version, .file = file};
    snprintf(change->name, sizeof(change->name), "%s", name);
    return 0;
}

/* The current version that came from that file, if neither it nor its weights changed since. */
static struct version *find_unchanged(struct registry *registry, int models_fd, const char *file)
{
    _cleanup_close_ int weights_fd = -1;
    struct stamp stamp;

    for (unsigned i = 0; i < registry->n; i++) {
        struct version *version = registry->served[i]->current;

        if (strcmp(version->model.file, file) != 0)
            continue;
        stamp_file(models_fd, file, &stamp);
        if (!stamp_same(&stamp, &version->conf_stamp))
            return NULL;
        if (!version->model.weights[0])
            return version;
        if (open_dir(registry->weights_dir, "weights_dir", &weights_fd, NULL) < 0)
            return NULL;
        stamp_file(weights_fd, version->model.weights, &stamp);
        return stamp_same(&stamp, &version->weights_stamp) ? version : NULL;
    }
    return NULL;
}

/* `name`: the model that was asked for, or NULL. */
static int check_name(struct registry_job *job, const struct version *version, const char *file,
                      const char *name)
{
    if (!name || strcmp(version->model.name, name) == 0)
        return 0;
    return report_set(&job->report, -EINVAL, "%s: name: is \"%s\", but \"%s\" was asked for", file,
                      version->model.name, name);
}

static int change_file(struct registry_job *job, int models_fd, const char *file, const char *name)
{
    struct version *version = find_unchanged(job->registry, models_fd, file);
    int r;

    if (version) {
        r = check_name(job, version, file, name);
        return r < 0 ? r
                     : change_add(job, version->model.name, ACTION_UNCHANGED, NULL,
                                  version->model.file);
    }
    r = load(job->registry, models_fd, file, &version, &job->report);
    if (r < 0)
        return r;
    r = check_name(job, version, file, name);
    if (r == 0)
        r = change_add(job, version->model.name, ACTION_LOADED, version, version->model.file);
    if (r < 0) {
        version_destroy(version);
        free(version);
        return r;
    }
    __atomic_add_fetch(&job->n_loaded, 1, __ATOMIC_RELAXED);
    return 0;
}

static int change_gone(struct registry_job *job)
{
    struct registry *registry = job->registry;
    unsigned n_kept = job->n_changes;

    for (unsigned i = 0; i < registry->n; i++) {
        bool kept = false;
        int r;

        for (unsigned k = 0; k < n_kept && !kept; k++)
            kept = strcmp(job->changes[k].name, registry->served[i]->name) == 0;
        if (kept)
            continue;
        r = change_add(job, registry->served[i]->name, ACTION_UNLOADED, NULL, NULL);
        if (r < 0)
            return r;
    }
    return 0;
}

static int run_sync(struct registry_job *job)
{
    _cleanup_close_ int models_fd = -1;
    struct dirent **files = NULL;
    int n = 0, r;

    r = open_dir(job->registry->models_dir, "models_dir", &models_fd, &job->report);
    if (r < 0)
        return r;
    r = list_files(models_fd, &files, &n, &job->report);
    if (r < 0)
        return r;
    for (int i = 0; i < n && r == 0; i++)
        r = change_file(job, models_fd, files[i]->d_name, NULL);
    free_files(files, n);
    return r < 0 ? r : change_gone(job);
}

static int run_load(struct registry_job *job)
{
    const struct served *served = registry_find(job->registry, job->name, strlen(job->name));
    _cleanup_close_ int models_fd = -1;
    char file[MODEL_NAME_MAX + 8];
    int r;

    r = open_dir(job->registry->models_dir, "models_dir", &models_fd, &job->report);
    if (r < 0)
        return r;
    if (served)
        return change_file(job, models_fd, served->current->model.file, job->name);
    if (job->registry->n == REGISTRY_MODELS_MAX)
        return report_set(&job->report, -EBUSY, "%d models are served already",
                          REGISTRY_MODELS_MAX);
    snprintf(file, sizeof(file), "%s.conf", job->name);
    return change_file(job, models_fd, file, job->name);
}

static void run_job(struct work *work)
{
    struct registry_job *job = job_of(work);

    switch (job->task) {
    case TASK_SYNC:
        job->result = run_sync(job);
        break;
    case TASK_LOAD:
        job->result = run_load(job);
        break;
    case TASK_UNLOAD:
        if (registry_find(job->registry, job->name, strlen(job->name)))
            job->result = change_add(job, job->name, ACTION_UNLOADED, NULL, NULL);
        else
            job->result = report_set(&job->report, -ENOENT, "no such model");
        break;
    }
    if (job->result == 0)
        return;
    for (unsigned i = 0; i < job->n_changes; i++) {
        if (job->changes[i].version) {
            version_destroy(job->changes[i].version);
            free(job->changes[i].version);
        }
    }
    job->n_changes = 0;
}

/* ---- the table, on the loop thread ---- */

static int compare(const char *a, const char *b, size_t n_b)
{
    int r = strncmp(a, b, n_b);

    return r != 0 ? r : a[n_b] != '\0';
}

unsigned registry_after(const struct registry *registry, const char *name, size_t n)
{
    unsigned low = 0, high = registry->n;

    while (low < high) {
        unsigned middle = low + (high - low) / 2;

        if (compare(registry->served[middle]->name, name, n) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct served *registry_find(const struct registry *registry, const char *name, size_t n)
{
    unsigned after = registry_after(registry, name, n);

    if (after == 0 || compare(registry->served[after - 1]->name, name, n) != 0)
        return NULL;
    return registry->served[after - 1];
}

static void count_bytes(struct registry *registry)
{
    const struct device *device = registry->device;

    registry->bytes = (struct registry_bytes){0};
    for (unsigned k = 0; k < device->n; k++) {
        struct registry_bytes *bytes = &registry->device_bytes[k];

        *bytes = (struct registry_bytes){0};
        for (unsigned i = 0; i < registry->n; i++) {
            const struct version *version = registry->served[i]->current;

            bytes->resident += version->plans[k] ? version->info.resident_bytes : 0;
            bytes->arena += version->plans[k] ? version->info.arena_bytes : 0;
        }
        registry->bytes.resident += bytes->resident;
        registry->bytes.arena += bytes->arena;
    }
}

static void remove_served(struct registry *registry, struct served *served)
{
    unsigned place;

    assert(served);
    place = registry_after(registry, served->name, strlen(served->name)) - 1;
    registry->n--;
    memmove(&registry->served[place], &registry->served[place + 1],
            (registry->n - place) * sizeof(struct served *));
    version_unref(served->current);
    served->current = NULL;
    served_unref(served);
}

static void commit_loaded(struct registry *registry, struct registry_change *change,
                          struct served *fresh)
{
    struct served *served = registry_find(registry, change->name, strlen(change->name));
    struct version *version = take_ptr(change->version);

    if (!served) {
        unsigned place = registry_after(registry, change->name, strlen(change->name));

        assert(registry->n < REGISTRY_MODELS_MAX);
        memmove(&registry->served[place + 1], &registry->served[place],
                (registry->n - place) * sizeof(struct served *));
        registry->served[place] = served = fresh;
        registry->n++;
    } else {
        free(fresh);
    }
    version->number = ++registry->last_number;
    version->served = served;
    served->refs++;
    version_unref(served->current);
    served->current = version;
    change->number = version->number;
    change->load_us = version->load_us;
}

/* Everything that can fail comes first, so that a change is whole. */
static int commit(struct registry_job *job)
{
    struct registry *registry = job->registry;
    struct served **fresh = calloc(job->n_changes + 1, sizeof(struct served *));
    bool failed = !fresh;

    for (unsigned i = 0; i < job->n_changes && !failed; i++) {
        if (job->changes[i].action != ACTION_LOADED)
            continue;
        fresh[i] = calloc(1, sizeof(*fresh[i]));
        failed = !fresh[i];
        if (!failed) {
            fresh[i]->refs = 1;
            memcpy(fresh[i]->name, job->changes[i].name, sizeof(fresh[i]->name));
        }
    }
    for (unsigned i = 0; i < job->n_changes && failed; i++) {
        if (fresh)
            free(fresh[i]);
        job->changes[i].version = version_unref(job->changes[i].version);
    }
    /* Unloading first makes room in the table. */
    for (unsigned i = 0; i < job->n_changes && !failed; i++) {
        struct registry_change *change = &job->changes[i];
        struct served *served = registry_find(registry, change->name, strlen(change->name));

        if (change->action == ACTION_UNLOADED)
            remove_served(registry, served);
        else if (change->action == ACTION_UNCHANGED)
            change->number = served->current->number;
    }
    for (unsigned i = 0; i < job->n_changes && !failed; i++) {
        if (job->changes[i].action == ACTION_LOADED)
            commit_loaded(registry, &job->changes[i], fresh[i]);
    }
    free(fresh);
    count_bytes(registry);
    return failed ? report_set(&job->report, -ENOMEM, "out of memory") : 0;
}

static void begin(struct registry *registry);

static void done_job(struct work *work)
{
    struct registry_job *job = job_of(work);
    struct registry *registry = job->registry;

    if (job->result == 0)
        job->result = commit(job);
    registry->is_busy = false;
    TAILQ_REMOVE(&registry->jobs, job, link);
    job->done(job, job->context);
    free(job->changes);
    free(job);
    begin(registry);
}

static void begin(struct registry *registry)
{
    struct registry_job *job = TAILQ_FIRST(&registry->jobs);

    if (!job || registry->is_busy)
        return;
    registry->is_busy = true;
    work_queue(registry->works, &registry->works->loads, &job->work, run_job, done_job);
}

int registry_submit(struct registry *registry, enum registry_task task, const char *name, size_t n,
                    void (*done)(struct registry_job *job, void *context), void *context)
{
    struct registry_job *job;

    assert(n <= MODEL_NAME_MAX);
    job = calloc(1, sizeof(*job));
    if (!job)
        return -ENOMEM;
    job->registry = registry;
    job->task = task;
    job->done = done;
    job->context = context;
    if (n > 0)
        memcpy(job->name, name, n);
    TAILQ_INSERT_TAIL(&registry->jobs, job, link);
    begin(registry);
    return 0;
}

void registry_init(struct registry *registry, struct works *works, const struct device *device,
                   const char *models_dir, const char *weights_dir)
{
    *registry = (struct registry){
        .works = works,
        .device = device,
        .models_dir = models_dir,
        .weights_dir = weights_dir,
    };
    TAILQ_INIT(&registry->jobs);
}

void registry_deinit(struct registry *registry)
{
    while (registry->n > 0)
        remove_served(registry, registry->served[registry->n - 1]);
    count_bytes(registry);
}
