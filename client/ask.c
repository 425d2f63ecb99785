/*
 * ask.c - the library's calls that ask and administer: one request each, its document as JSON
 *
 * Names are checked before they are sent. The list of models comes in pages, each after the last
 * name of the one before, and is handed out as one array.
 */
#include "fused.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "link.h"
#include "proto/scan.h"

#define PAGES_MAX 1024u

static int give_json(struct fused *f, const uint8_t *bytes, size_t n, char **ret_json)
{
    int r = ret_json ? codec_json(bytes, n, ret_json) : 0;

    if (r == -EBADMSG)
        return link_fail(f, -EPROTO, "the server sent a document that is none");
    return r < 0 ? link_fail_errno(f, r) : 0;
}

/* Sends a request about a name, NULL where the verb has none or may be without, and gives its
 * document back as JSON. */
static int ask(struct fused *f, enum verb verb, const char *text, char **ret_json)
{
    struct proto_request request = {.verb = verb};
    struct proto_str name = {text, text ? (uint32_t)strnlen(text, PROTO_NAME_MAX + 1) : 0};
    int r;

    r = link_enter(f);
    if (r < 0)
        return r;
    if (text && !proto_name_valid(name.s, name.n))
        return link_fail(f, -EINVAL, "no sound name");
    if (verb == VERB_LOG)
        request.log.level = name;
    else
        request.model.name = name;
    r = link_transact(f, &request, -1, link_deadline(f->timeout_ms));
    return r != 0 ? r : give_json(f, f->reply.document.bytes, f->reply.document.n_bytes, ret_json);
}

int fused_ping(struct fused *f)
{
    return ask(f, VERB_PING, NULL, NULL);
}

int fused_hello(struct fused *f, char **ret_json)
{
    int r = link_enter(f);

    return r < 0 ? r : give_json(f, f->hello, f->n_hello, ret_json);
}

int fused_status(struct fused *f, char **ret_json)
{
    return ask(f, VERB_STATUS, NULL, ret_json);
}

int fused_stats(struct fused *f, const char *model, char **ret_json)
{
    return ask(f, VERB_STATS, model, ret_json);
}

int fused_describe(struct fused *f, const char *model, char **ret_json)
{
    return ask(f, VERB_MODEL_DESCRIBE, model ? model : "", ret_json);
}

int fused_load(struct fused *f, const char *model, char **ret_json)
{
    return ask(f, VERB_MODEL_LOAD, model ? model : "", ret_json);
}

int fused_unload(struct fused *f, const char *model, char **ret_json)
{
    return ask(f, VERB_MODEL_UNLOAD, model ? model : "", ret_json);
}

int fused_reload(struct fused *f, const char *model, char **ret_json)
{
    return ask(f, VERB_MODEL_RELOAD, model, ret_json);
}

int fused_drain(struct fused *f, char **ret_json)
{
    return ask(f, VERB_DRAIN, NULL, ret_json);
}

int fused_log_level(struct fused *f, const char *level, char **ret_json)
{
    return ask(f, VERB_LOG, level ? level : "", ret_json);
}

/* Appends the elements of one JSON list to another: "[a]" and "[b]" become "[a, b]". */
static int join_lists(char **list, const char *more)
{
    size_t n = *list ? strlen(*list) : 0, n_more = strlen(more);
    char *joined;

    if (n > 2 && n_more <= 2)
        return 0;
    n = n > 2 ? n : 0;
    joined = realloc(*list, n + n_more + 1);
    if (!joined)
        return -ENOMEM;
    *list = joined;
    memcpy(joined + n, more, n_more);
    if (n > 0) {
        joined[n - 1] = ','; /* was ] */
        joined[n] = ' ';     /* was [ */
    }
    joined[n + n_more] = 0;
    return 0;
}

/* Reads one page into *list; the name of its last model goes to `after`. 1: more follow. */
static int models_page(struct fused *f, char *after, char **list)
{
    const struct proto_reply *reply = &f->reply;
    struct scan_item item = {0};
    const uint8_t *models, *found;
    _cleanup_free_ char *json = NULL;
    size_t n, n_found, pos = 0;
    char path[32];
    int r;

    if (scan_find(reply->document.bytes, reply->document.n_bytes, "models", &models, &n) < 0 ||
        scan_item(models, n, &pos, &item) < 0 || item.type != SCAN_LIST)
        return -EPROTO;
    r = codec_json(models, n, &json);
    if (r == 0)
        r = join_lists(list, json);
    if (r < 0)
        return r == -ENOMEM ? r : -EPROTO;
    snprintf(path, sizeof path, "%llu.name", (unsigned long long)item.n - 1);
    pos = 0;
    if (scan_find(reply->document.bytes, reply->document.n_bytes, "more", &found, &n_found) < 0 ||
        scan_item(found, n_found, &pos, &item) < 0 || item.type != SCAN_BOOL || !item.b)
        return 0;
    pos = 0;
    if (scan_find(models, n, path, &found, &n_found) < 0 ||
        scan_item(found, n_found, &pos, &item) < 0 || item.type != SCAN_STR ||
        !proto_name_valid((const char *)item.raw.bytes, item.raw.n))
        return -EPROTO;
    memcpy(after, item.raw.bytes, item.raw.n);
    after[item.raw.n] = 0;
    return 1;
}

int fused_models(struct fused *f, char **ret_json)
{
    struct proto_request request = {.verb = VERB_MODEL_LIST};
    char after[PROTO_NAME_MAX + 1] = "", *list = NULL;
    unsigned n_pages = 0;
    int r, more = 1;

    r = link_enter(f);
    while (r == 0 && more > 0) {
        request.model_list.after = (struct proto_str){after, (uint32_t)strlen(after)};
        r = link_transact(f, &request, -1, link_deadline(f->timeout_ms));
        if (r == 0)
            more = ++n_pages > PAGES_MAX ? -EPROTO : models_page(f, after, &list);
    }
    if (r == 0 && more == -EPROTO)
        r = link_fail(f, more, "the server sent a list of models that is none");
    else if (r == 0 && more < 0)
        r = link_fail_errno(f, more);
    if (r == 0 && ret_json)
        *ret_json = take_ptr(list);
    free(list);
    return r;
}
