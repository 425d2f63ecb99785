/*
 * bench_cpu.c - the CPU backend at real size, beside PyTorch's CPU in the same run
 *
 *     bench_cpu [FILE]      a table; with FILE, the same as JSON
 *
 * Times one batch in process: from x to y in plain memory, no daemon, no socket. Runs of the two
 * alternate, so that what happens to the machine happens to both; each is run twice in a row and
 * timed the second time, with the caches its own. The yardstick is
 * tests/bench/torch_cpu.py, run by the interpreter that PYTHON names (default python3); without
 * PyTorch there its columns stay empty. WORKERS sets the threads of both (default: all cores).
 *
 * A request's input is fresh memory of random numbers, the same for all runs. Medians, on which
 * rates and the first ratio go; the fastest runs, which say more on a machine with other work; the
 * spread is the distance from the fastest to the slowest as a part of the median.
 */
#include "tests/cpu/chain.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define RUNS 9

/* What the work is counted in. */
struct work {
    double flop, bytes; /* per row; bytes: read and written at least, without weights */
    double weights;     /* bytes, per batch */
};

struct bench {
    const char *name, *model;
    uint32_t rows;
    bool train;
    struct work work;
};

struct figures {
    double median, fastest, spread;
};

struct yardstick {
    pid_t pid;
    FILE *to, *from;
    char version[64];
};

#define MODEL_A                                                                               \
    "name = \"a\"; weights = \"w\"; input = { shape = [8192]; }; stages = ("                  \
    "{ op = \"linear\"; weight = \"gemm.weight\"; bias = \"gemm.bias\"; out = 8192; },"       \
    "{ op = \"group_norm\"; groups = 512; weight = \"norm.weight\"; bias = \"norm.bias\"; }," \
    "{ op = \"amin\"; dim = 1; keepdim = true; },"                                            \
    "{ op = \"add\"; tensor = \"bias\"; shape = [1, 8192, 1, 1]; });"

#define MODEL_B(minimum)                                                                          \
    "name = \"b\"; weights = \"w\"; input = { shape = [3, 16, 64, 64]; }; stages = ("             \
    "{ op = \"conv3d\"; weight = \"conv.weight\"; bias = \"conv.bias\"; out = 16; kernel = 3; }," \
    "{ op = \"group_norm\"; groups = 8; weight = \"norm.weight\"; bias = \"norm.bias\"; },"       \
    "{ op = \"minimum\"; value = " minimum "; },"                                                 \
    "{ op = \"clamp\"; min = 0.0; max = 1.0; }, { op = \"dropout\"; p = 0.2; });"

#define WORK_A                                                                           \
    {                                                                                    \
        .flop = 2.0 * 8192 * 8192, .bytes = 4.0 * 2 * 8192, .weights = 4.0 * 8192 * 8192 \
    }
#define WORK_B                                                      \
    {                                                               \
        .flop = 2.0 * 81 * 861056, .bytes = 4.0 * (196608 + 861056) \
    }
#define WORK_K                           \
    {                                    \
        .bytes = 4.0 * (196608 + 861056) \
    }

static const struct bench benches[] = {
    {"A", MODEL_A, 1, false, WORK_A},
    {"A", MODEL_A, 16, false, WORK_A},
    {"A", MODEL_A, 64, false, WORK_A},
    {"A", MODEL_A, 1024, false, WORK_A},
    {"B full", MODEL_B("0.5"), 1, false, WORK_B},
    {"B full", MODEL_B("0.5"), 16, false, WORK_B},
    {"B", MODEL_B("0.0"), 1, false, WORK_K},
    {"B", MODEL_B("0.0"), 16, false, WORK_K},
    {"B train", MODEL_B("0.0"), 16, true, WORK_K},
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static unsigned workers(void)
{
    const char *text = getenv("WORKERS");

    return text ? (unsigned)strtoul(text, NULL, 10) : (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
}

static void yardstick_start(struct yardstick *yardstick)
{
    const char *python = getenv("PYTHON") ? getenv("PYTHON") : "python3";
    int to[2], from[2];
    char threads[16];

    *yardstick = (struct yardstick){.pid = -1};
    snprintf(threads, sizeof(threads), "%u", workers());
    signal(SIGPIPE, SIG_IGN);
    if (pipe2(to, O_CLOEXEC) < 0 || pipe2(from, O_CLOEXEC) < 0)
        return;
    yardstick->pid = fork();
    if (yardstick->pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        execlp(python, python, "tests/bench/torch_cpu.py", threads, NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    yardstick->to = fdopen(to[1], "w");
    yardstick->from = fdopen(from[0], "r");
    if (!fgets(yardstick->version, sizeof(yardstick->version), yardstick->from))
        yardstick->version[0] = 0;
    yardstick->version[strcspn(yardstick->version, "\n")] = 0;
}

static double yardstick_run(struct yardstick *yardstick, const struct bench *bench)
{
    char line[64];
    double seconds;

    if (yardstick->version[0] == 0)
        return NAN;
    fprintf(yardstick->to, "%s %u\n", bench->name, bench->rows);
    fflush(yardstick->to);
    if (!fgets(line, sizeof(line), yardstick->from))
        return NAN;
    seconds = strtod(line, NULL);
    usleep(20000); /* its threads spin for a while */
    return seconds;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static struct figures figures(double *seconds)
{
    qsort(seconds, RUNS, sizeof(*seconds), compare);
    return (struct figures){.median = seconds[RUNS / 2],
                            .fastest = seconds[0],
                            .spread = (seconds[RUNS - 1] - seconds[0]) / seconds[RUNS / 2]};
}

static void measure(const struct bench *bench, const struct chain *chain,
                    struct yardstick *yardstick, struct figures *ours, struct figures *theirs)
{
    const struct pipeline *pipeline = chain->pipeline;
    uint64_t state = 1;
    void *x = chain_input(pipeline, bench->rows, &state);
    void *y = chain_alloc(bench->rows * chain_out_bytes(pipeline));
    struct job job = chain_job(pipeline, x, y, bench->rows);
    double a[RUNS], b[RUNS];

    job.train = bench->train;
    for (int i = 0; i < RUNS; i++) {
        double start;

        chain_run(chain, job);
        start = now();
        chain_run(chain, job);
        a[i] = now() - start;
        b[i] = yardstick_run(yardstick, bench);
    }
    *ours = figures(a);
    *theirs = figures(b);
    free(x);
    free(y);
}

static void print_row(const struct bench *bench, const struct figures *ours,
                      const struct figures *theirs, FILE *json, bool first)
{
    double flop = bench->work.flop * bench->rows;
    double bytes = bench->work.bytes * bench->rows + bench->work.weights;

    printf("%-8s %5u %10.3f %10.3f %6.0f%% %8.1f %7.1f", bench->name, bench->rows,
           ours->median * 1e3, ours->fastest * 1e3, ours->spread * 100, flop / ours->median * 1e-9,
           bytes / ours->median * 1e-9);
    if (!isnan(theirs->median))
        printf(" %10.3f %10.3f %6.0f%% %7.2f %7.2f", theirs->median * 1e3, theirs->fastest * 1e3,
               theirs->spread * 100, theirs->median / ours->median,
               theirs->fastest / ours->fastest);
    printf("\n");
    fflush(stdout);
    if (!json)
        return;
    fprintf(json,
            "%s\n  {\"case\": \"%s\", \"rows\": %u, \"median_ms\": %.4f, \"fastest_ms\": %.4f, "
            "\"spread\": %.3f",
            first ? "" : ",", bench->name, bench->rows, ours->median * 1e3, ours->fastest * 1e3,
            ours->spread);
    if (!isnan(theirs->median))
        fprintf(json,
                ", \"torch_median_ms\": %.4f, \"torch_fastest_ms\": %.4f, \"torch_spread\": %.3f",
                theirs->median * 1e3, theirs->fastest * 1e3, theirs->spread);
    fprintf(json, "}");
}

static void open_model(const struct fixture *fixture, const char *text, struct pipeline **pipeline,
                       struct chain *chain)
{
    struct report report;

    if (fixture_build(fixture, text, chain_weight, pipeline, &report) < 0) {
        fprintf(stderr, "%s\n", report.text);
        exit(1);
    }
    chain_open(*pipeline, workers(), 1024, chain);
    pipeline_drop_weights(*pipeline);
}

int main(int argc, char **argv)
{
    struct pipeline *pipeline = NULL;
    struct yardstick yardstick;
    struct backend_info info;
    struct fixture fixture;
    struct chain chain;
    FILE *json = NULL;

    if (argc > 1) {
        json = fopen(argv[1], "we");
        if (!json) {
            perror(argv[1]);
            return 1;
        }
    }
    yardstick_start(&yardstick);
    fixture_make(&fixture);
    for (size_t i = 0; i < sizeof(benches) / sizeof(benches[0]); i++) {
        const struct bench *bench = &benches[i];
        struct figures ours, theirs;

        if (i == 0 || strcmp(bench->model, benches[i - 1].model) != 0) {
            if (i > 0) {
                chain_close(&chain);
                pipeline_free(pipeline);
            }
            open_model(&fixture, bench->model, &pipeline, &chain);
        }
        if (i == 0) {
            backend_cpu()->info(chain.backend, &info);
            printf("%s, %s; yardstick: %s\n", info.device, info.runtime,
                   yardstick.version[0] ? yardstick.version : "none");
            printf("%-8s %5s %10s %10s %7s %8s %7s %10s %10s %7s %7s %7s\n", "case", "rows", "ms",
                   "fastest", "spread", "GFLOP/s", "GB/s", "torch ms", "fastest", "spread", "ratio",
                   "fastest");
            if (json)
                fprintf(json,
                        "{\"device\": \"%s\", \"runtime\": \"%s\", \"yardstick\": \"%s\", "
                        "\"results\": [",
                        info.device, info.runtime, yardstick.version);
        }
        measure(bench, &chain, &yardstick, &ours, &theirs);
        print_row(bench, &ours, &theirs, json, i == 0);
    }
    chain_close(&chain);
    pipeline_free(pipeline);
    fixture_remove(&fixture);
    if (json && (fprintf(json, "\n]}\n") < 0 || fclose(json) != 0)) {
        perror(argv[1]);
        return 1;
    }
    fclose(yardstick.to);
    fclose(yardstick.from);
    if (yardstick.pid > 0)
        waitpid(yardstick.pid, NULL, 0);
    return 0;
}
