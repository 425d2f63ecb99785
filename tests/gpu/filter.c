/*
 * filter FILE COMMAND...: runs the command under the system call filter of the service, where no
 * service manager is. FILE holds the numbers that are let through (syscalls.sh); all others fail
 * with EPERM, and so does every socket that is no Unix socket, with EAFNOSUPPORT.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ALLOWED_MAX 1000
#define FIELD(name) ((unsigned)offsetof(struct seccomp_data, name))

static struct sock_filter program[2 * ALLOWED_MAX + 16];
static unsigned short length;

static void add(struct sock_filter step)
{
    program[length++] = step;
}

static void answer(unsigned what)
{
    add((struct sock_filter)BPF_STMT(BPF_RET | BPF_K, what));
}

int main(int argc, char **argv)
{
    FILE *file = argc > 2 ? fopen(argv[1], "re") : NULL;
    struct sock_fprog all = {.filter = program};
    unsigned number;

    if (!file) {
        fputs("usage: filter FILE COMMAND...\n", stderr);
        return 64;
    }
    add((struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, FIELD(arch)));
    add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0));
    answer(SECCOMP_RET_ERRNO | EPERM);
    add((struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, FIELD(nr)));
    add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 4));
    add((struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, FIELD(args[0])));
    add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1));
    answer(SECCOMP_RET_ALLOW);
    answer(SECCOMP_RET_ERRNO | EAFNOSUPPORT);
    while (length < 2 * ALLOWED_MAX && fscanf(file, "%u", &number) == 1) {
        add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
        answer(SECCOMP_RET_ALLOW);
    }
    answer(SECCOMP_RET_ERRNO | EPERM);
    fclose(file);
    all.len = length;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &all) < 0) {
        perror("filter");
        return 77;
    }
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 74;
}
