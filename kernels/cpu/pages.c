/*
 * pages.c - large zeroed memory, and how much of it there is
 *
 * Weights and work space are mapped, not malloc'ed: they go back to the system when a model is
 * unloaded, and huge pages make streaming through a quarter of a gigabyte of weights a sixth
 * faster. Linux promises memory that it does not have, so a plan compares what it needs with
 * MemAvailable, and with the limit of the process's control group, before it takes anything.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pages.h"

#define HUGE_PAGE ((size_t)2 << 20)

void *pages_alloc(size_t size)
{
    void *pages;

    if (size == 0)
        size = 1;
    pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return NULL;
    if (size >= HUGE_PAGE)
        madvise(pages, size, MADV_HUGEPAGE); /* a wish */
    return pages;
}

void *pages_free(void *pages, size_t size)
{
    if (pages)
        munmap(pages, size ? size : 1);
    return NULL;
}

/* A small file of the kernel's; an empty text when it cannot be read. */
static void read_text(const char *path, char *text, size_t size)
{
    ssize_t n = -1;
    int fd;

    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        n = read(fd, text, size - 1);
        close(fd);
    }
    text[n > 0 ? n : 0] = 0;
}

static uint64_t read_number(const char *path)
{
    char text[64], *end;
    unsigned long long value;

    read_text(path, text, sizeof(text));
    errno = 0;
    value = strtoull(text, &end, 10);
    return end == text || errno ? UINT64_MAX : value; /* "max" is no number */
}

/* What the control group of this process still allows. Its pages of files can go, but not those of
 * shared memory (memfd, tmpfs), which belong to no file outside. */
static uint64_t group_available(void)
{
    char text[512], path[600], stat[1024], *group;
    uint64_t max, used;
    const char *shared;

    read_text("/proc/self/cgroup", text, sizeof(text));
    group = strstr(text, "0::/");
    if (!group)
        return UINT64_MAX;
    group += 3;
    group[strcspn(group, "\n")] = 0;
    snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.max", group);
    max = read_number(path);
    snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.stat", group);
    read_text(path, stat, sizeof(stat));
    if (max == UINT64_MAX || strncmp(stat, "anon ", 5) != 0)
        return max;
    used = strtoull(stat + 5, NULL, 10);
    shared = strstr(stat, "\nshmem ");
    if (shared)
        used += strtoull(shared + 7, NULL, 10);
    return max > used ? max - used : 0;
}

uint64_t pages_available(void)
{
    uint64_t group = group_available(), available = UINT64_MAX;
    char text[1024];
    const char *line;

    read_text("/proc/meminfo", text, sizeof(text));
    line = strstr(text, "MemAvailable:");
    if (line)
        available = strtoull(line + strlen("MemAvailable:"), NULL, 10) << 10;
    return group < available ? group : available;
}
