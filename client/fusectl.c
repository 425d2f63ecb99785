/*
 * fusectl.c - the command line: finds the command, parses its options, checks stdout at the end
 *
 * One program with commands, as systemctl. Options that all commands share may stand before or
 * after the command's name. Exit codes are those of fusectl.h.
 *
 * Standard output is checked when the program ends, whichever way it does: a full disk or a reader
 * that went away must not look like success. It is a stream with a write function of ours, which
 * keeps the first failure's errno until then. For the same reason SIGPIPE is ignored, and a closed
 * descriptor 0, 1 or 2 is filled first, so that no socket or file of ours can take its number and
 * receive what was meant for people.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/bench.h"
#include "client/fusectl.h"
#include "proto/base.h"
#include "proto/proto.h"

static const struct command *const commands[] = {
    &ctl_status, &ctl_models, &ctl_describe, &ctl_stats,   &ctl_ping,   &ctl_infer,
    &ctl_bench,  &ctl_top,    &ctl_metrics,  &ctl_load,    &ctl_unload, &ctl_reload,
    &ctl_drain,  &ctl_log,    &ctl_check,    &ctl_weights,
};

/* "stats [MODEL]" is the longest that the list of commands has to line up. */
#define COMMAND_COLUMN 24

static const struct argp_option shared_options[] = {
    {"socket", CTL_KEY_SOCKET, "PATH", 0,
     "The server's socket (default: $FUSED_SOCKET, else " PROTO_SOCKET_DEFAULT ")", 100},
    {"json", CTL_KEY_JSON, NULL, 0, "Print one JSON object", 100},
    {0},
};

static error_t parse_shared(int key, char *arg, struct argp_state *state)
{
    struct ctl *ctl = state->input;

    switch (key) {
    case CTL_KEY_SOCKET:
        if (arg[0] == 0)
            argp_error(state, "--socket: an empty path");
        ctl->socket = arg;
        return 0;
    case CTL_KEY_JSON:
        ctl->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp shared = {.options = shared_options, .parser = parse_shared};

/* A whole decimal number in a range, or a usage error that ends the program. */
static uint64_t parse_number(struct argp_state *state, const char *option, const char *arg,
                             uint64_t min, uint64_t max)
{
    char *end;
    uint64_t value;

    errno = 0;
    value = strtoull(arg, &end, 10);
    if (arg[0] < '0' || arg[0] > '9' || *end != 0 || errno != 0 || value < min || value > max)
        argp_error(state, "%s: '%s' is not a number from %" PRIu64 " to %" PRIu64, option, arg, min,
                   max);
    return value;
}

/* A decimal number above 0, or a usage error that ends the program. */
static double parse_positive(struct argp_state *state, const char *option, const char *arg,
                             double max)
{
    char *end;
    double value = strtod(arg, &end);

    if (arg[0] < '0' || arg[0] > '9' || *end != 0 || !(value > 0) || value > max)
        argp_error(state, "%s: '%s' is not a number above 0, at most %g", option, arg, max);
    return value;
}

static void parse_result(struct ctl *ctl, const char *arg, struct argp_state *state)
{
    if (strcmp(arg, "full") != 0 && strcmp(arg, "compact") != 0)
        argp_error(state, "--result: '%s' is neither full nor compact", arg);
    ctl->compact = arg[0] == 'c';
}

/* What can only be said when all options are known. */
static void check_command(const struct ctl *ctl, struct argp_state *state)
{
    const struct command *command = ctl->command;

    if (ctl->n_args < command->n_min)
        argp_error(state, "%s is missing", command->args);
    for (const char *key = command->required; key != NULL && *key != 0; key++) {
        if (*key == 'i' && ctl->in == NULL)
            argp_error(state, "-i IN is missing");
        if (*key == 'o' && ctl->out == NULL)
            argp_error(state, "-o FILE is missing");
        if (*key == 's' && !ctl->has_seed)
            argp_error(state, "--seed N is missing");
    }
    if (command == &ctl_infer && !ctl->train && (ctl->has_seed || ctl->has_offset))
        argp_error(state, "--seed and --offset need --train");
    if (ctl->verify && ctl->place == BENCH_DEVICE)
        argp_error(state, "--verify cannot look into --device");
    if (ctl->constant && ctl->rate == 0)
        argp_error(state, "--constant needs --rate");
}

/* One number, or several with commas in between. */
static void parse_rows(struct ctl *ctl, char *arg, struct argp_state *state)
{
    char *rest = arg, *part;

    ctl->n_rows = 0;
    while ((part = strsep(&rest, ","))) {
        if (ctl->n_rows == BENCH_SHAPES_MAX)
            argp_error(state, "--rows: more than %d numbers", BENCH_SHAPES_MAX);
        ctl->rows[ctl->n_rows++] = (unsigned)parse_number(state, "--rows", part, 1, 1 << 24);
    }
}

static error_t parse_load(int key, char *arg, struct argp_state *state)
{
    struct ctl *ctl = state->input;

    switch (key) {
    case CTL_KEY_CLIENTS:
        ctl->clients = (unsigned)parse_number(state, "--clients", arg, 1, 4096);
        return 0;
    case CTL_KEY_ROWS:
        parse_rows(ctl, arg, state);
        return 0;
    case CTL_KEY_RAMP:
        ctl->ramp = (unsigned)parse_number(state, "--ramp", arg, 1, 100);
        return 0;
    case CTL_KEY_IN_FLIGHT:
        ctl->in_flight = (unsigned)parse_number(state, "--in-flight", arg, 1, 1024);
        return 0;
    case CTL_KEY_RATE:
        ctl->rate = parse_positive(state, "--rate", arg, 1e8);
        return 0;
    case CTL_KEY_DURATION:
    case CTL_KEY_INTERVAL:
        ctl->seconds =
            parse_positive(state, key == CTL_KEY_DURATION ? "--duration" : "--interval", arg, 1e6);
        return 0;
    case CTL_KEY_CONSTANT:
        ctl->constant = true;
        return 0;
    case CTL_KEY_BUFFERS:
    case CTL_KEY_INLINE:
    case CTL_KEY_DEVICE:
        ctl->place = key == CTL_KEY_INLINE   ? BENCH_INLINE
                     : key == CTL_KEY_DEVICE ? BENCH_DEVICE
                                             : BENCH_BUFFERS;
        return 0;
    case CTL_KEY_VERIFY:
        ctl->verify = true;
        return 0;
    case CTL_KEY_RECONNECT:
        ctl->reconnect = true;
        return 0;
    case CTL_KEY_LISTEN:
        ctl->listen = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse_command(int key, char *arg, struct argp_state *state)
{
    struct ctl *ctl = state->input;

    switch (key) {
    case 'i':
        ctl->in = arg;
        return 0;
    case 'o':
        ctl->out = arg;
        return 0;
    case CTL_KEY_TRAIN:
        ctl->train = true;
        return 0;
    case CTL_KEY_SEED:
        ctl->seed = parse_number(state, "--seed", arg, 0, UINT64_MAX);
        ctl->has_seed = true;
        return 0;
    case CTL_KEY_OFFSET:
        ctl->offset = parse_number(state, "--offset", arg, 0, UINT64_MAX);
        ctl->has_offset = true;
        return 0;
    case CTL_KEY_DEADLINE:
        ctl->deadline_us = 1000 * parse_number(state, "--deadline", arg, 1, 86400000);
        return 0;
    case CTL_KEY_RESULT:
        parse_result(ctl, arg, state);
        return 0;
    case CTL_KEY_REPEAT:
        ctl->repeat = (unsigned)parse_number(state, "--repeat", arg, 1, 1000000);
        return 0;
    case CTL_KEY_PRIORITY:
        ctl->priority = (int)parse_number(state, "--priority", arg, 0, PROTO_PRIORITY_MAX);
        return 0;
    case ARGP_KEY_INIT:
        state->child_inputs[0] = ctl;
        return 0;
    case ARGP_KEY_ARG:
        if (ctl->n_args == ctl->command->n_max)
            argp_error(state, "'%s' is one argument too many", arg);
        ctl->args[ctl->n_args++] = arg;
        return 0;
    case ARGP_KEY_END:
        check_command(ctl, state);
        return 0;
    default:
        return parse_load(key, arg, state);
    }
}

/* Parses what follows the command's name, in place: the arguments kept are never more than those
 * already read. */
static int run_command(struct ctl *ctl, int argc, char **argv)
{
    const struct argp_child children[] = {{.argp = &shared}, {0}};
    struct argp argp = {
        .options = ctl->command->options, .parser = parse_command, .children = children};
    _cleanup_free_ char *name = NULL, *doc = NULL;

    ctl->args = calloc((size_t)argc, sizeof(*ctl->args));
    if (ctl->args == NULL || asprintf(&name, "fusectl %s", ctl->command->name) < 0 ||
        asprintf(&doc, "%s.%s%s", ctl->command->summary, ctl->command->text != NULL ? "\v" : "",
                 ctl->command->text != NULL ? ctl->command->text : "") < 0) {
        ctl_error("out of memory");
        return CTL_FAILED;
    }
    argv[0] = name;
    argp.args_doc = ctl->command->args;
    argp.doc = doc;
    if (argp_parse(&argp, argc, argv, 0, NULL, ctl) != 0)
        return CTL_USAGE;
    return ctl->command->run(ctl);
}

/* What the top level found before it hands over. */
struct top {
    struct ctl *ctl;
    int first; /* index of the command's name */
};

static error_t parse_top(int key, char *arg, struct argp_state *state)
{
    struct top *top = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = top->ctl;
        return 0;
    case ARGP_KEY_ARG:
        for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
            if (strcmp(arg, commands[i]->name) == 0)
                top->ctl->command = commands[i];
        if (top->ctl->command == NULL)
            argp_error(state, "there is no command '%s'", arg);
        top->first = state->next - 1;
        state->next = state->argc;
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "COMMAND is missing");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* The list of commands, below the options. argp frees the text. */
static char *list_commands(int key, const char *text, void *input)
{
    char *list = NULL;
    size_t size = 0;
    FILE *stream;

    (void)input;
    if (key != ARGP_KEY_HELP_POST_DOC)
        return (char *)text;
    stream = open_memstream(&list, &size);
    if (stream == NULL)
        return (char *)text;
    fputs("Commands:\n", stream);
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        const struct command *command = commands[i];
        int n = fprintf(stream, "  %s%s%s", command->name, command->args[0] != 0 ? " " : "",
                        command->args);

        fprintf(stream, "%*s%s\n", n < COMMAND_COLUMN ? COMMAND_COLUMN - n : 1, "",
                command->summary);
    }
    fputs("\nExit codes: 0 done, 1 the server refused, 64 wrong usage, 69 no server, 74 a file or "
          "this side failed. 'fusectl COMMAND --help' says more.",
          stream);
    return fclose(stream) == 0 ? list : (char *)text;
}

static int stdout_errno; /* of the first write that failed */

static ssize_t write_stdout(void *cookie, const char *data, size_t n)
{
    size_t done = 0;

    (void)cookie;
    while (done < n) {
        ssize_t r = write(STDOUT_FILENO, data + done, n - done);

        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0 && stdout_errno == 0)
            stdout_errno = errno;
        if (r < 0)
            break;
        done += (size_t)r;
    }
    return (ssize_t)done; /* fewer is how a cookie's stream is told of a failure */
}

static int close_stdout(void *cookie)
{
    (void)cookie;
    if (close(STDOUT_FILENO) == 0)
        return 0;
    if (stdout_errno == 0)
        stdout_errno = errno;
    return -1;
}

static int open_stdout(void)
{
    const cookie_io_functions_t functions = {.write = write_stdout, .close = close_stdout};
    FILE *stream = fopencookie(NULL, "w", functions);

    if (stream == NULL)
        return -1;
    if (isatty(STDOUT_FILENO))
        setvbuf(stream, NULL, _IOLBF, BUFSIZ);
    stdout = stream;
    return 0;
}

/* Runs at exit. Only what was printed can be lost: an unused, closed stdout is no error. */
static void check_stdout(void)
{
    bool failed = ferror(stdout) != 0;

    if (fclose(stdout) != 0 || failed) {
        ctl_error("cannot write to standard output: %s",
                  strerror(stdout_errno != 0 ? stdout_errno : EIO));
        _exit(CTL_FAILED);
    }
}

static int fill_standard_fds(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDONLY) != fd)
            return -1;
    return 0;
}

int main(int argc, char **argv)
{
    const struct argp_child children[] = {{.argp = &shared}, {0}};
    const struct argp argp = {
        .parser = parse_top,
        .args_doc = "COMMAND [ARGUMENT...]",
        .doc = "Talks to the fused inference daemon.\v ",
        .children = children,
        .help_filter = list_commands,
    };
    struct ctl ctl = {
        .repeat = 1, .priority = PROTO_PRIORITY_DEFAULT, .clients = 1, .rows = {1}, .n_rows = 1};
    struct top top = {.ctl = &ctl};
    int r;

    argp_program_version = "fusectl " FUSED_VERSION;
    argp_err_exit_status = CTL_USAGE;
    if (fill_standard_fds() < 0 || signal(SIGPIPE, SIG_IGN) == SIG_ERR || open_stdout() < 0 ||
        atexit(check_stdout) != 0)
        return CTL_FAILED;
    if (argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &top) != 0)
        return CTL_USAGE;
    r = run_command(&ctl, argc - top.first, argv + top.first);
    ctl_progress("%s", "");
    free(ctl.args);
    return r;
}
