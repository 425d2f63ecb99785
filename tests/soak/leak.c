/*
 * leak.c - a leak, planted into a daemon that has none
 *
 * Preloaded into the daemon: every SOAK_LEAK_EVERY-th datagram that it receives leaks what
 * $SOAK_LEAK names, fd, map, memory or thread. A soak that does not notice is worth nothing.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define SOAK_LEAK_EVERY 1000

static void *wait_for_ever(void *data)
{
    for (;;)
        pause();
    return data;
}

static void leak(const char *what)
{
    pthread_t thread;

    if (strcmp(what, "fd") == 0) {
        if (dup(STDERR_FILENO) < 0)
            return;
    } else if (strcmp(what, "map") == 0) {
        /* every second page differs, so that the kernel cannot merge them */
        static int i;

        mmap(NULL, 4096, ++i % 2 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    } else if (strcmp(what, "memory") == 0) {
        static void *volatile kept; /* or the compiler leaves all of it out */

        kept = malloc(100000);
        memset(kept, 1, 100000);
    } else if (strcmp(what, "thread") == 0) {
        pthread_create(&thread, NULL, wait_for_ever, NULL);
    }
}

__attribute__((visibility("default"))) ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    static ssize_t (*next)(int, struct msghdr *, int);
    static unsigned n, most;
    const char *what = getenv("SOAK_LEAK");

    if (!next)
        next = (ssize_t(*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg");
    /* Enough to be seen, and not so much that the daemon ends of it. */
    if (what && ++n % SOAK_LEAK_EVERY == 0 && most < 10000) {
        most++;
        leak(what);
    }
    return next(fd, message, flags);
}
