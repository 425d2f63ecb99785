/*
 * hold.c - stops one thread of a process, and lets all others run
 *
 *     hold PID [THREAD]     its main thread, or the one of that name
 *
 * SIGSTOP stops a whole process; a loop or an engine that hangs is one thread. A tracer stops that
 * one and does nothing more. Prints "held" and stays until it is killed or the process is gone,
 * with 0; 1 when there is nothing to hold.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* The id of a thread by its name, 0 when there is none. */
static pid_t find_thread(pid_t pid, const char *name)
{
    struct dirent *entry;
    char path[64];
    pid_t found = 0;
    DIR *tasks;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    tasks = opendir(path);
    while (tasks && !found && (entry = readdir(tasks))) {
        char file[400], comm[32] = "";
        FILE *f;

        snprintf(file, sizeof(file), "%s/%s/comm", path, entry->d_name);
        f = fopen(file, "re");
        if (!f)
            continue;
        if (fgets(comm, sizeof(comm), f)) {
            comm[strcspn(comm, "\n")] = 0;
            if (strcmp(comm, name) == 0)
                found = (pid_t)strtol(entry->d_name, NULL, 10);
        }
        fclose(f);
    }
    if (tasks)
        closedir(tasks);
    return found;
}

/* Asleep, it holds no lock; stopped at work it may, and then the others stand still, too. */
static void wait_until_asleep(pid_t pid, pid_t thread)
{
    char path[80], text[200];

    snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", (int)pid, (int)thread);
    for (int i = 0; i < 20000; i++) {
        FILE *f = fopen(path, "re");
        const char *end = f && fgets(text, sizeof(text), f) ? strrchr(text, ')') : NULL;

        if (f)
            fclose(f);
        if (!end || end[2] == 'S')
            return;
        usleep(100);
    }
}

int main(int argc, char **argv)
{
    pid_t pid = argc > 1 ? (pid_t)strtol(argv[1], NULL, 10) : 0;
    pid_t thread = argc > 2 ? find_thread(pid, argv[2]) : pid;
    int status;

    if (thread <= 0) {
        fprintf(stderr, "hold: no such thread\n");
        return 1;
    }
    wait_until_asleep(pid, thread);
    if (ptrace(PTRACE_SEIZE, thread, NULL, NULL) < 0 ||
        ptrace(PTRACE_INTERRUPT, thread, NULL, NULL) < 0) {
        fprintf(stderr, "hold: %s\n", strerror(errno));
        return 1;
    }
    /* The first report is the stop, any later one the end. */
    if (waitpid(thread, &status, __WALL) != thread || !WIFSTOPPED(status)) {
        fprintf(stderr, "hold: it did not stop\n");
        return 1;
    }
    puts("held");
    fflush(stdout);
    while (waitpid(thread, &status, __WALL) == thread && WIFSTOPPED(status))
        ;
    return 0;
}
