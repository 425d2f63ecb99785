/*
 * service.c - sd_notify and socket activation
 *
 * READY is said once a request would succeed, and again after a reload. RELOADING carries the
 * monotonic time, which newer managers demand and older ones ignore. A notification that fails is
 * not an error of ours: the manager is gone or never was there.
 */
#include "service.h"

#include <inttypes.h>
#include <sys/socket.h>
#include <time.h>

#include <systemd/sd-daemon.h>

void service_ready(const char *status)
{
    sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}

void service_status(const char *status)
{
    sd_notifyf(0, "STATUS=%s", status);
}

void service_stopping(const char *status)
{
    sd_notifyf(0, "STOPPING=1\nSTATUS=%s", status);
}

void service_reloading(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64 "\nSTATUS=Reloading models",
               (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000);
}

void service_extend(uint64_t usec)
{
    sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%" PRIu64, usec);
}

void service_watchdog(void)
{
    sd_notify(0, "WATCHDOG=1");
}

uint64_t service_watchdog_interval_us(void)
{
    uint64_t usec = 0;

    return sd_watchdog_enabled(0, &usec) > 0 ? usec / 2 : 0;
}

int service_listen_fd(int *ret_fd, struct report *report)
{
    int n = sd_listen_fds(1);

    if (n < 0)
        return report_set(report, n, "LISTEN_FDS cannot be read");
    if (n == 0) {
        *ret_fd = -1;
        return 0;
    }
    if (n != 1)
        return report_set(report, -EINVAL, "%d sockets were handed over, 1 is expected", n);
    if (sd_is_socket_unix(SD_LISTEN_FDS_START, SOCK_SEQPACKET, 1, NULL, 0) <= 0)
        return report_set(report, -EINVAL,
                          "the socket that was handed over is no listening Unix socket of type "
                          "SOCK_SEQPACKET (ListenSequentialPacket=)");
    *ret_fd = SD_LISTEN_FDS_START;
    return 0;
}
