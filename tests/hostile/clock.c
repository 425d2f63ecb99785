/*
 * clock.c - a wall clock that jumps by ten years, forwards and backwards, whenever it is looked at
 *
 * Preloaded into the daemon. Nothing that it promises may depend on that clock.
 */
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#define TEN_YEARS_S 315576000

static long jump(void)
{
    static int n;

    return __atomic_add_fetch(&n, 1, __ATOMIC_RELAXED) % 2 ? TEN_YEARS_S : -TEN_YEARS_S;
}

static int real_gettime(clockid_t clock, struct timespec *ret)
{
    static int (*next)(clockid_t, struct timespec *);

    if (!next)
        next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return next(clock, ret);
}

#define EXPORT __attribute__((visibility("default")))

EXPORT int clock_gettime(clockid_t clock, struct timespec *ret)
{
    int r = real_gettime(clock, ret);

    if (r == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        ret->tv_sec += jump();
    return r;
}

EXPORT int gettimeofday(struct timeval *ret, void *zone)
{
    struct timespec now;

    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *ret = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
}

EXPORT time_t time(time_t *ret)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (ret)
        *ret = now.tv_sec;
    return now.tv_sec;
}
