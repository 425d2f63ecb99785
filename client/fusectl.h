/*
 * fusectl.h - what the commands of fusectl share
 *
 * A command is one row (struct command) in the file of its group; fusectl.c parses the command
 * line into a struct ctl and calls the row's run(), whose value is the exit code of the program.
 */
#pragma once

#include <argp.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/bench.h"
#include "client/fused.h"

enum ctl_exit {
    CTL_DONE = 0,
    CTL_REFUSED = 1,    /* the server said no; check: a file is wrong */
    CTL_USAGE = 64,     /* the command line is wrong */
    CTL_NO_SERVER = 69, /* nobody answers */
    CTL_FAILED = 74,    /* this side failed: a file, the disk, memory */
    CTL_STOPPED = 130   /* interrupted by the user */
};

struct command;

struct ctl {
    const struct command *command;
    const char *socket; /* NULL: as libfused finds it */
    bool json;
    char **args; /* positional arguments after the command */
    int n_args;

    /* Options of infer and weights. */
    const char *in, *out;
    bool train, has_seed, has_offset, compact;
    uint64_t seed, offset, deadline_us;
    unsigned repeat;
    int priority;

    /* Options of bench, top and metrics. */
    unsigned clients, in_flight; /* in_flight 0: by the loop */
    unsigned rows[BENCH_SHAPES_MAX], n_rows, ramp;
    double rate, seconds; /* rate 0: closed loop */
    int place;            /* enum bench_place */
    bool constant, verify, reconnect;
    const char *listen;
};

struct command {
    const char *name, *args, *summary;
    const char *text; /* the rest of its --help; NULL: nothing */
    int n_min, n_max; /* positional arguments */
    const struct argp_option *options;
    const char *required; /* keys of options that must be given */
    int (*run)(struct ctl *ctl);
};

/* Keys of options without a short form; the short ones are their own letter. */
enum ctl_key {
    CTL_KEY_SOCKET = 256,
    CTL_KEY_JSON,
    CTL_KEY_TRAIN,
    CTL_KEY_SEED,
    CTL_KEY_OFFSET,
    CTL_KEY_DEADLINE,
    CTL_KEY_RESULT,
    CTL_KEY_REPEAT,
    CTL_KEY_PRIORITY,
    CTL_KEY_CLIENTS,
    CTL_KEY_ROWS,
    CTL_KEY_IN_FLIGHT,
    CTL_KEY_RATE,
    CTL_KEY_CONSTANT,
    CTL_KEY_DURATION,
    CTL_KEY_RAMP,
    CTL_KEY_INTERVAL,
    CTL_KEY_INLINE,
    CTL_KEY_BUFFERS,
    CTL_KEY_DEVICE,
    CTL_KEY_VERIFY,
    CTL_KEY_RECONNECT,
    CTL_KEY_LISTEN
};

extern const struct command ctl_status, ctl_models, ctl_describe, ctl_stats; /* ctl_show.c */
extern const struct command ctl_ping, ctl_load, ctl_unload, ctl_reload, ctl_drain,
    ctl_log;                                        /* ctl_admin.c */
extern const struct command ctl_infer;              /* ctl_infer.c */
extern const struct command ctl_bench;              /* ctl_bench.c */
extern const struct command ctl_top, ctl_metrics;   /* ctl_watch.c */
extern const struct command ctl_check, ctl_weights; /* offline.c */

/* ---- ctl.c ---- */

/* "fusectl: ..." on stderr. */
__attribute__((format(printf, 1, 2))) void ctl_error(const char *format, ...);

/* How long the server may take for an answer that needs no work. */
#define CTL_QUICK_MS 30000

/* Connects and limits how long the server may take to answer (-1: no limit). CTL_DONE or an exit
 * code, after the reason was printed. */
int ctl_connect(const struct ctl *ctl, int timeout_ms, struct fused **ret);

/* The exit code that the value of a library call means; prints the reason when that is not
 * CTL_DONE. `text` NULL: the connection's own. */
int ctl_answer(const struct ctl *ctl, const struct fused *f, int r, const char *text);

/* With --json the server's document, as it is, on stdout. Otherwise parsed into *ret; NULL after
 * printing. Consumes `json`. */
int ctl_document(const struct ctl *ctl, char *json, json_t **ret);

/* A string for JSON of any bytes, such as a file's name: what is no UTF-8 has its bytes above ASCII
 * replaced. */
json_t *ctl_json_str(const char *s);

/* Prints the object as one line and drops it. */
int ctl_print_json(json_t *object);

/*
 * Progress: one line on stderr that is written over, if that is a terminal; an empty format takes
 * it away.
 */
__attribute__((format(printf, 1, 2))) void ctl_progress(const char *format, ...);

/* While caught, an interrupt only sets a flag, so that a half-written file can be removed. */
void ctl_catch_interrupts(bool on);
bool ctl_interrupted(void);

/* Values of a document; a string has its control characters replaced. Absent: "-", 0, false. */
const char *ctl_str(json_t *object, const char *key);
uint64_t ctl_uint(const json_t *object, const char *key);
bool ctl_bool(const json_t *object, const char *key);

/* A shape of a description with the rows put in. 0 or -EPROTO. */
int ctl_fill_shape(const json_t *shape, int64_t rows, int *ret_rank, int64_t *dims);

/* "s" where a noun behind that number has one. */
const char *ctl_s(uint64_t n);

/* "[N, 8192]" and "1.5 GiB" and "1.25 ms" into `text`, which is returned. */
#define CTL_TEXT_MAX 128
const char *ctl_shape(json_t *shape, char text[CTL_TEXT_MAX]);
const char *ctl_dims(int rank, const int64_t *dims, char text[CTL_TEXT_MAX]);
const char *ctl_bytes(uint64_t n, char text[CTL_TEXT_MAX]);
const char *ctl_us(uint64_t us, char text[CTL_TEXT_MAX]);
