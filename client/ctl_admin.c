/*
 * ctl_admin.c - fusectl ping, load, unload, reload, drain, log
 *
 * The verbs that change the server. It decides who may; nothing is checked here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "client/fusectl.h"

static int print_models(const struct ctl *ctl, char *json)
{
    json_t *document;
    json_t *models, *model;
    char text[CTL_TEXT_MAX];
    size_t i;
    int r;

    r = ctl_document(ctl, json, &document);
    if (document == NULL)
        return r;
    models = json_object_get(document, "models");
    json_array_foreach(models, i, model)
    {
        printf("%s: %s", ctl_str(model, "name"), ctl_str(model, "action"));
        if (json_object_get(model, "load_ms") != NULL)
            printf(", version %llu, %s", (unsigned long long)ctl_uint(model, "version"),
                   ctl_uint(model, "load_ms") == 0
                       ? "less than 1 ms"
                       : ctl_us(ctl_uint(model, "load_ms") * 1000, text));
        putchar('\n');
    }
    if (json_array_size(models) == 0)
        puts("nothing to do");
    json_decref(document);
    return CTL_DONE;
}

typedef int (*model_verb)(struct fused *f, const char *model, char **ret_json);

static int run_model_verb(struct ctl *ctl, model_verb verb, const char *doing)
{
    const char *model = ctl->n_args > 0 ? ctl->args[0] : NULL;
    struct fused *f;
    char *json = NULL;
    int r;

    /* No limit: loading reads weights and warms up. */
    r = ctl_connect(ctl, -1, &f);
    if (r != CTL_DONE)
        return r;
    ctl_progress("%s %s ...", doing, model != NULL ? model : "models");
    r = ctl_answer(ctl, f, verb(f, model, &json), NULL);
    ctl_progress("%s", "");
    if (r == CTL_DONE)
        r = print_models(ctl, json);
    fused_close(f);
    return r;
}

static int run_load(struct ctl *ctl)
{
    return run_model_verb(ctl, fused_load, "loading");
}

static int run_unload(struct ctl *ctl)
{
    return run_model_verb(ctl, fused_unload, "unloading");
}

static int run_reload(struct ctl *ctl)
{
    return run_model_verb(ctl, fused_reload, "reloading");
}

static int run_drain(struct ctl *ctl)
{
    struct fused *f;
    json_t *document;
    char *json = NULL;
    int r;

    r = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (r != CTL_DONE)
        return r;
    r = ctl_answer(ctl, f, fused_drain(f, &json), NULL);
    if (r == CTL_DONE)
        r = ctl_document(ctl, json, &document);
    if (r == CTL_DONE && document != NULL) {
        puts(ctl_str(document, "state"));
        json_decref(document);
    }
    fused_close(f);
    return r;
}

static int run_log(struct ctl *ctl)
{
    struct fused *f;
    json_t *document;
    char *json = NULL;
    int r;

    r = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (r != CTL_DONE)
        return r;
    r = ctl_answer(ctl, f, fused_log_level(f, ctl->args[0], &json), NULL);
    if (r == CTL_DONE)
        r = ctl_document(ctl, json, &document);
    if (r == CTL_DONE && document != NULL) {
        printf("log level %s\n", ctl_str(document, "level"));
        json_decref(document);
    }
    fused_close(f);
    return r;
}

static int run_ping(struct ctl *ctl)
{
    struct timespec before, after;
    struct fused *f;
    char text[CTL_TEXT_MAX];
    int64_t ns;
    int r;

    r = ctl_connect(ctl, CTL_QUICK_MS, &f);
    if (r != CTL_DONE)
        return r;
    clock_gettime(CLOCK_MONOTONIC, &before);
    r = ctl_answer(ctl, f, fused_ping(f), NULL);
    clock_gettime(CLOCK_MONOTONIC, &after);
    fused_close(f);
    if (r != CTL_DONE)
        return r;
    ns = (after.tv_sec - before.tv_sec) * INT64_C(1000000000) + after.tv_nsec - before.tv_nsec;
    if (ctl->json)
        return ctl_print_json(json_pack("{s:I}", "round_trip_us", (json_int_t)(ns / 1000)));
    printf("answer after %s\n", ctl_us((uint64_t)ns / 1000, text));
    return CTL_DONE;
}

const struct command ctl_ping = {
    .name = "ping",
    .args = "",
    .summary = "Ask whether the server answers",
    .run = run_ping,
};

const struct command ctl_load = {
    .name = "load",
    .args = "MODEL",
    .summary = "Load a model, or its new version",
    .text = "The server reads MODEL.conf of its models directory, loads it beside the running "
            "version, and swaps when it is ready. Needs to be an administrator.",
    .n_min = 1,
    .n_max = 1,
    .run = run_load,
};

const struct command ctl_unload = {
    .name = "unload",
    .args = "MODEL",
    .summary = "Take a model away",
    .text = "Requests that were accepted finish. Needs to be an administrator.",
    .n_min = 1,
    .n_max = 1,
    .run = run_unload,
};

const struct command ctl_reload = {
    .name = "reload",
    .args = "[MODEL]",
    .summary = "Load what changed in the models directory",
    .text = "All or nothing: when one file is wrong, everything stays as it is. Needs to be an "
            "administrator.",
    .n_max = 1,
    .run = run_reload,
};

const struct command ctl_drain = {
    .name = "drain",
    .args = "",
    .summary = "Refuse new requests and let the rest finish",
    .text = "Returns at once: the server ends by itself when the rest is done. Needs to be an "
            "administrator.",
    .run = run_drain,
};

const struct command ctl_log = {
    .name = "log",
    .args = "LEVEL",
    .summary = "Set how much the server logs",
    .text = "LEVEL is error, warning, info or debug. Needs to be an administrator.",
    .n_min = 1,
    .n_max = 1,
    .run = run_log,
};
