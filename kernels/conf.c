/*
 * conf.c - strict reading of libconfig files
 *
 * libconfig 1.5 reads what people write, but forgives too much: integers beyond 32 bits wrap, a
 * number too large becomes infinity, `@include` reads other files (of a directory: exits), "\x00"
 * cuts a string short, and keys that nobody knows pass. So the text is read and scanned here first,
 * then parsed by libconfig from memory, then asked key by key, and what nobody asked for is
 * refused.
 *
 * A conf_group is libconfig's own setting. Its `hook`, which libconfig leaves to the caller, marks
 * a setting that was asked for. Nesting is bounded by the scan.
 */
#include <ctype.h>
#include <errno.h>
#include <libconfig.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "conf.h"
#include "file.h"

#define DEPTH_MAX 8
#define KEYS_MAX  4096 /* libconfig compares every key with all before it */
#define KEY_MAX   64   /* of keys that are quoted from the text */

struct conf {
    config_t config; /* first: a setting leads to it */
    char file[128];  /* for messages: without directory, cut */
    int r;           /* the first error */
    struct report error;
    const config_setting_t *lacking; /* the first error is that this group lacks a key */
};

__attribute__((format(printf, 3, 4))) static int fail_at(struct conf *conf, int line,
                                                         const char *format, ...)
{
    char text[sizeof(conf->error.text)];
    va_list args;

    if (conf->r)
        return conf->r;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    conf->r = report_set(&conf->error, -EINVAL, "%s:%d: %s", conf->file, line, text);
    return conf->r;
}

/* Checks the number at p, and returns the end of what libconfig takes for it. */
static const char *scan_number(struct conf *conf, int line, const char *p)
{
    const char *start = p;
    char *end;
    long long value;
    bool hex, wide;

    p += *p == '+' || *p == '-';
    hex =
        p == start && p[0] == '0' && (p[1] == 'x' || p[1] == 'X') && isxdigit((unsigned char)p[2]);
    if (!hex) {
        bool digits = isdigit((unsigned char)*p);

        while (isdigit((unsigned char)*p))
            p++;
        if (*p == '.') {
            p++;
            if (!digits && !isdigit((unsigned char)*p)) {
                fail_at(conf, line, "a number without digits");
                return p;
            }
            while (isdigit((unsigned char)*p))
                p++;
            digits = false; /* a float, whatever follows */
        }
        if ((*p == 'e' || *p == 'E') &&
            isdigit((unsigned char)p[p[1] == '+' || p[1] == '-' ? 2 : 1])) {
            p += 2;
            while (isdigit((unsigned char)*p))
                p++;
            return p;
        }
        if (!digits)
            return p;
    }
    errno = 0;
    value = strtoll(start, &end, hex ? 16 : 10);
    wide = *end == 'L';
    if (errno == ERANGE)
        fail_at(conf, line, "%.*s is too large for 64 bits", (int)(end - start), start);
    else if (!wide && (value > INT32_MAX || value < INT32_MIN))
        fail_at(conf, line, "%.*s needs 64 bits: write %.*sL", (int)(end - start), start,
                (int)(end - start), start);
    return end + (wide ? 1 + (end[1] == 'L') : 0);
}

/* From the opening quote to behind the closing one, or to the end of the text. */
static const char *scan_string(struct conf *conf, int *line, const char *p)
{
    for (p++; *p && *p != '"'; p++) {
        *line += *p == '\n';
        if (*p != '\\' || p[1] == 0)
            continue;
        p++;
        *line += *p == '\n';
        if (p[0] == 'x' && p[1] == '0' && p[2] == '0')
            fail_at(conf, *line, "a string cannot hold \\x00");
    }
    return p + (*p == '"');
}

static const char *scan_comment(int *line, const char *p)
{
    if (p[0] == '/' && p[1] == '*') {
        for (p += 2; *p && !(p[0] == '*' && p[1] == '/'); p++)
            *line += *p == '\n';
        return *p ? p + 2 : p;
    }
    return p + strcspn(p, "\n");
}

static int scan(struct conf *conf, const char *text)
{
    int line = 1, depth = 0, keys = 0;

    /* libconfig acts on @include at the start of a line only. Whatever stands around it, such a
     * line is refused: then no disagreement about strings or comments can let one through. */
    for (const char *p = text; p; p = strchr(p, '\n'), line++) {
        p += *p == '\n';
        if (strncmp(p + strspn(p, " \t"), "@include", 8) == 0)
            return fail_at(conf, line, "@include is not supported");
    }
    line = 1;
    for (const char *p = text; *p && !conf->r;) {
        if (*p == '"') {
            p = scan_string(conf, &line, p);
        } else if (*p == '#' || (p[0] == '/' && (p[1] == '/' || p[1] == '*'))) {
            p = scan_comment(&line, p);
        } else if (isalpha((unsigned char)*p) || *p == '*') {
            while (isalnum((unsigned char)*p) || *p == '_' || *p == '-' || *p == '*')
                p++;
        } else if (isdigit((unsigned char)*p) || *p == '+' || *p == '-' || *p == '.') {
            p = scan_number(conf, line, p);
        } else {
            line += *p == '\n';
            depth += (*p == '(' || *p == '{' || *p == '[') - (*p == ')' || *p == '}' || *p == ']');
            keys += *p == '=' || *p == ':';
            if (depth > DEPTH_MAX)
                fail_at(conf, line, "nested deeper than %d", DEPTH_MAX);
            if (keys > KEYS_MAX)
                fail_at(conf, line, "more than %d keys", KEYS_MAX);
            p++;
        }
    }
    return conf->r;
}

/* libconfig tells the line on which a key came twice, not the key. Finds it where the line has but
 * one key, or has it twice. */
static bool repeated_key(const char *text, int line, char key[KEY_MAX])
{
    char keys[8][KEY_MAX];
    int n = 0;

    for (; line > 1; line--) {
        text += strcspn(text, "\n");
        text += *text == '\n';
    }
    while (*text && *text != '\n' && n < 8) {
        size_t length = 0, after;

        if (!isalpha((unsigned char)*text)) {
            text++;
            continue;
        }
        while (isalnum((unsigned char)text[length]) || text[length] == '_' || text[length] == '-')
            length++;
        after = length + strspn(text + length, " \t");
        if ((text[after] == '=' || text[after] == ':') && length < sizeof(keys[0])) {
            memcpy(keys[n], text, length);
            keys[n++][length] = 0;
        }
        text += length;
    }
    for (int i = 0; i < n; i++)
        for (int k = n == 1 ? 0 : i + 1; k < n; k++)
            if (strcmp(keys[i], keys[k]) == 0) {
                memcpy(key, keys[i], KEY_MAX);
                return true;
            }
    return false;
}

static int parse(struct conf *conf, const char *text)
{
    char key[KEY_MAX];
    int line;

    if (scan(conf, text))
        return conf->r;
    if (config_read_string(&conf->config, text))
        return 0;
    line = config_error_line(&conf->config);
    if (strstr(config_error_text(&conf->config), "duplicate") && repeated_key(text, line, key))
        return fail_at(conf, line, "%s: given twice", key);
    return fail_at(conf, line, "%s", config_error_text(&conf->config));
}

int conf_parse(const char *name, const char *text, size_t n, struct conf **ret,
               struct report *report)
{
    struct conf *conf;
    char *copy = NULL;
    int r;

    name = file_base(name);
    if (n > CONF_SIZE_MAX)
        return report_set(report, -EINVAL, "%s: larger than %u bytes", name, CONF_SIZE_MAX);
    if (n > 0 && memchr(text, 0, n))
        return report_set(report, -EINVAL, "%s: not a text file: it holds a zero byte", name);
    conf = calloc(1, sizeof(*conf));
    if (!conf)
        return report_set(report, -ENOMEM, "%s: out of memory", name);
    config_init(&conf->config);
    snprintf(conf->file, sizeof(conf->file), "%s", name);
    copy = malloc(n + 1);
    if (!copy) {
        r = report_set(report, -ENOMEM, "%s: out of memory", name);
        goto fail;
    }
    if (n > 0)
        memcpy(copy, text, n);
    copy[n] = 0;
    r = parse(conf, copy);
    if (r) {
        report_set(report, r, "%s", conf->error.text);
        goto fail;
    }
    free(copy);
    *ret = conf;
    return 0;

fail:
    free(copy);
    conf_free(conf);
    return r;
}

int conf_open(int dirfd, const char *name, struct conf **ret, struct report *report)
{
    uint64_t size;
    char *text;
    int fd, r;

    r = file_open(dirfd, name, &fd, &size, report);
    if (r < 0)
        return r;
    if (size > CONF_SIZE_MAX) {
        close(fd);
        return report_set(report, -EINVAL, "%s: larger than %u bytes", file_base(name),
                          CONF_SIZE_MAX);
    }
    text = malloc(size + 1);
    if (!text) {
        close(fd);
        return report_set(report, -ENOMEM, "%s: out of memory", file_base(name));
    }
    r = file_read(fd, name, 0, text, size, report);
    close(fd);
    if (r == 0)
        r = conf_parse(name, text, size, ret, report);
    free(text);
    return r;
}

struct conf *conf_free(struct conf *conf)
{
    if (conf) {
        config_destroy(&conf->config);
        free(conf);
    }
    return NULL;
}

static config_setting_t *setting_of(const struct conf_group *group)
{
    return (config_setting_t *)group;
}

static struct conf_group *group_of(config_setting_t *setting)
{
    return (struct conf_group *)setting;
}

static struct conf *conf_of(const struct conf_group *group)
{
    return (struct conf *)setting_of(group)->config;
}

/* Looks a key up and remembers that it was asked for. */
static config_setting_t *ask(struct conf_group *group, const char *key)
{
    config_setting_t *setting = config_setting_get_member(setting_of(group), key);

    if (setting)
        config_setting_set_hook(setting, group);
    return setting;
}

struct conf_group *conf_root(struct conf *conf)
{
    return group_of(config_root_setting(&conf->config));
}

int conf_line(const struct conf_group *group)
{
    return (int)config_setting_source_line(setting_of(group));
}

bool conf_has(const struct conf_group *group, const char *key)
{
    return config_setting_get_member(setting_of(group), key) != NULL;
}

int conf_error(struct conf_group *group, const char *key, const char *format, ...)
{
    config_setting_t *setting = config_setting_get_member(setting_of(group), key);
    char text[sizeof(struct report)];
    va_list args;
    int line = (int)config_setting_source_line(setting ? setting : setting_of(group));

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    /* The root has no line of its own: what it lacks is missing from the first line on. */
    fail_at(conf_of(group), line ? line : 1, "%s: %s", key, text);
    return -EINVAL;
}

int conf_missing(struct conf_group *group, const char *key)
{
    struct conf *conf = conf_of(group);

    if (!conf->r)
        conf->lacking = setting_of(group);
    return conf_error(group, key, "is missing");
}

const char *conf_string(struct conf_group *group, const char *key, const char *otherwise)
{
    config_setting_t *setting = ask(group, key);

    if (!setting)
        return otherwise;
    if (config_setting_type(setting) != CONFIG_TYPE_STRING) {
        conf_error(group, key, "must be a string, in quotes");
        return otherwise;
    }
    return config_setting_get_string(setting);
}

static bool is_int(const config_setting_t *setting)
{
    int type = config_setting_type(setting);

    return type == CONFIG_TYPE_INT || type == CONFIG_TYPE_INT64;
}

/* libconfig's own getters refuse the other width. */
static int64_t int_value(const config_setting_t *setting)
{
    return config_setting_type(setting) == CONFIG_TYPE_INT ? config_setting_get_int(setting)
                                                           : config_setting_get_int64(setting);
}

static bool read_int(struct conf_group *group, const char *key, const config_setting_t *setting,
                     int64_t min, int64_t max, int64_t *to)
{
    int64_t value;

    if (!is_int(setting)) {
        conf_error(group, key, "must be an integer");
        return false;
    }
    value = int_value(setting);
    if (value < min || value > max) {
        conf_error(group, key, "%lld is outside %lld to %lld", (long long)value, (long long)min,
                   (long long)max);
        return false;
    }
    *to = value;
    return true;
}

int64_t conf_int(struct conf_group *group, const char *key, int64_t min, int64_t max,
                 int64_t otherwise)
{
    config_setting_t *setting = ask(group, key);
    int64_t value = otherwise;

    if (setting)
        read_int(group, key, setting, min, max, &value);
    return value;
}

double conf_float(struct conf_group *group, const char *key, double otherwise)
{
    config_setting_t *setting = ask(group, key);
    double value;

    if (!setting)
        return otherwise;
    if (is_int(setting))
        return (double)int_value(setting);
    if (config_setting_type(setting) != CONFIG_TYPE_FLOAT) {
        conf_error(group, key, "must be a number");
        return otherwise;
    }
    value = config_setting_get_float(setting);
    if (!isfinite(value)) {
        conf_error(group, key, "is too large for a number");
        return otherwise;
    }
    return value;
}

bool conf_bool(struct conf_group *group, const char *key, bool otherwise)
{
    config_setting_t *setting = ask(group, key);

    if (!setting)
        return otherwise;
    if (config_setting_type(setting) != CONFIG_TYPE_BOOL) {
        conf_error(group, key, "must be true or false");
        return otherwise;
    }
    return config_setting_get_bool(setting);
}

int conf_ints(struct conf_group *group, const char *key, int64_t min, int64_t max, int64_t *to,
              int n_max)
{
    config_setting_t *setting = ask(group, key);
    int n;

    if (!setting)
        return -1;
    if (is_int(setting))
        return read_int(group, key, setting, min, max, to) ? 1 : -1;
    if (!config_setting_is_array(setting) && !config_setting_is_list(setting)) {
        conf_error(group, key, "must be a list of integers");
        return -1;
    }
    n = config_setting_length(setting);
    if (n > n_max) {
        conf_error(group, key, "has %d numbers, more than %d", n, n_max);
        return -1;
    }
    for (int i = 0; i < n; i++)
        if (!read_int(group, key, config_setting_get_elem(setting, (unsigned)i), min, max, &to[i]))
            return -1;
    return n;
}

int conf_indices(struct conf_group *group, const char *key, int64_t max, int64_t *to, int n_max)
{
    int n = conf_ints(group, key, 0, max, to, n_max);

    if (n == 0)
        conf_error(group, key, "names none");
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++) {
            if (to[k] == to[i])
                conf_error(group, key, "names %lld twice", (long long)to[i]);
        }
    }
    return n;
}

struct conf_group *conf_group(struct conf_group *group, const char *key)
{
    config_setting_t *setting = ask(group, key);

    if (!setting)
        return NULL;
    if (!config_setting_is_group(setting)) {
        conf_error(group, key, "must be a group: { ... }");
        return NULL;
    }
    return group_of(setting);
}

struct conf_group *conf_group_at(struct conf_group *group, const char *key, int i)
{
    config_setting_t *setting = ask(group, key), *element;

    if (!setting)
        return NULL;
    if (!config_setting_is_list(setting)) {
        conf_error(group, key, "must be a list of groups: ( { ... }, ... )");
        return NULL;
    }
    element = config_setting_get_elem(setting, (unsigned)i);
    if (!element)
        return NULL;
    if (!config_setting_is_group(element)) {
        conf_error(group, key, "element %d must be a group: { ... }", i + 1);
        return NULL;
    }
    config_setting_set_hook(element, group);
    return group_of(element);
}

/* Whether a setting was taken key by key. Elements of lists of numbers were taken with their list.
 */
static bool has_keys(const config_setting_t *setting)
{
    return config_setting_length(setting) > 0 &&
           (config_setting_is_group(setting) ||
            (config_setting_is_list(setting) &&
             config_setting_is_group(config_setting_get_elem(setting, 0))));
}

/* The one that stands next in the text, NULL behind the last. */
static config_setting_t *next_setting(config_setting_t *setting)
{
    config_setting_t *parent = config_setting_parent(setting);
    int next;

    if (has_keys(setting))
        return config_setting_get_elem(setting, 0);
    for (; parent; setting = parent, parent = config_setting_parent(setting)) {
        next = config_setting_index(setting) + 1;
        if (next < config_setting_length(parent))
            return config_setting_get_elem(parent, (unsigned)next);
    }
    return NULL;
}

/* Records the first setting that nobody asked for. */
static void find_unknown(struct conf *conf)
{
    config_setting_t *setting = config_root_setting(&conf->config);

    while ((setting = next_setting(setting))) {
        const char *name = config_setting_name(setting);

        if (!config_setting_get_hook(setting)) {
            fail_at(conf, (int)config_setting_source_line(setting), "%s: unknown key",
                    name ? name : config_setting_name(config_setting_parent(setting)));
            return;
        }
    }
}

/* What a group lacks may be there under a name that nobody asked for: that is the better message.
 */
static void find_misspelt(struct conf *conf)
{
    int n = config_setting_length(conf->lacking);

    for (int i = 0; i < n; i++) {
        config_setting_t *member = config_setting_get_elem(conf->lacking, (unsigned)i);

        if (config_setting_get_hook(member))
            continue;
        conf->r = 0;
        fail_at(conf, (int)config_setting_source_line(member), "%s: unknown key",
                config_setting_name(member));
        return;
    }
}

int conf_finish(struct conf *conf, struct report *report)
{
    if (!conf->r)
        find_unknown(conf);
    else if (conf->lacking)
        find_misspelt(conf);
    if (conf->r)
        return report_set(report, conf->r, "%s", conf->error.text);
    return 0;
}
