/*
 * main.c - the command line of the daemon
 *
 * What is not given here comes from the configuration file. --check does everything that a start
 * does up to the backend, and says what it found.
 */
#include <argp.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "server.h"

static const char doc[] = "Inference daemon: serves model pipelines over a Unix socket.\v"
                          "Exit codes: 0 done, 64 usage, 69 no usable device, 70 device lost, 74 "
                          "standard output cannot be written, 75 already running, 78 "
                          "configuration or model.";

static const struct argp_option options[] = {
    {"config", 'c', "FILE", 0,
     "Configuration (default: the installation's, else " CONFIG_DEFAULT ", which may be missing)",
     0},
    {"socket", 's', "PATH", 0,
     "Socket to listen on (default $FUSED_SOCKET, then the configuration's)", 0},
    {"backend", 'b', "NAME", 0, "auto, cpu, cuda, or the path of a shared object", 0},
    {"models", 'm', "DIR", 0, "Serve every *.conf of DIR, with the weights beside it", 0},
    {"check", 'k', 0, 0, "Check configuration, models and weights, and end", 0},
    {0},
};

struct arguments {
    struct server_options server;
    bool check;
};

static error_t parse(int key, char *value, struct argp_state *state)
{
    struct arguments *arguments = state->input;

    switch (key) {
    case 'c':
        arguments->server.config = value;
        return 0;
    case 's':
        arguments->server.socket = value;
        return 0;
    case 'b':
        if (strcmp(value, "auto") != 0 && strcmp(value, "cpu") != 0 && strcmp(value, "cuda") != 0 &&
            !strchr(value, '/'))
            argp_error(state, "--backend: \"%s\" is none of auto, cpu, cuda, and no path", value);
        arguments->server.backend = value;
        return 0;
    case 'm':
        arguments->server.models = value;
        return 0;
    case 'k':
        arguments->check = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "unexpected argument \"%s\"", value);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static unsigned n_models;

static void print_model(const struct model *model)
{
    n_models++;
    printf("%s: ok (%s)\n", model->file, model->name);
}

static int check(const struct server_options *given)
{
    struct report report = {""};
    struct config config;
    int r;

    r = setup_config(given, &config, &report);
    if (r == 0) {
        printf("configuration: ok\n");
        r = registry_check(&config, print_model, &report);
        if (r == 0 && n_models == 0)
            printf("no model in %s: it would serve nothing\n", config.models_dir);
    }
    if (r < 0)
        fprintf(stderr, "fused: %s\n", report.text);
    return r < 0 ? EXIT_CONFIGURATION : EXIT_OK;
}

/* What exit() would lose without a word. */
static void check_output(void)
{
    bool failed = ferror(stdout);

    if (fflush(stdout) == 0 && !failed)
        return;
    fprintf(stderr, "fused: standard output: %s\n", strerrordesc_np(errno ? errno : EIO));
    _exit(EXIT_OUTPUT);
}

/* A descriptor of ours must never become stdout: whatever is printed would go into it. */
static void open_standard_fds(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            _exit(EXIT_CONFIGURATION);
    }
}

int main(int argc, char **argv)
{
    const struct argp argp = {options, parse, NULL, doc, NULL, NULL, NULL};
    struct arguments arguments = {0};

    open_standard_fds();
    atexit(check_output);
    argp_err_exit_status = EXIT_USAGE_ERROR;
    argp_program_version = "fused " FUSED_VERSION;
    argp_parse(&argp, argc, argv, 0, NULL, &arguments);
    if (arguments.check)
        return check(&arguments.server);
    log_init(LOG_LEVEL_INFO);
    return server_run(&arguments.server);
}
