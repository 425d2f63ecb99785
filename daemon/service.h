/*
 * service.h - what the service manager is told, and the socket that it may hand over
 *
 * Without a service manager (NOTIFY_SOCKET not set) every notification does nothing.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "kernels/report.h"
#include "proto/base.h"

void service_ready(const char *status);
void service_status(const char *status);
void service_stopping(const char *status);
void service_reloading(void);
/* A start that makes progress may take that much longer. */
void service_extend(uint64_t usec);
void service_watchdog(void);
/* Half of the manager's watchdog time; 0 when it wants no signs of life. */
uint64_t service_watchdog_interval_us(void);

/*
 * The listening socket that came through LISTEN_FDS, now ours: *ret_fd, or -1 when none came.
 * -EINVAL when what came is not one listening SOCK_SEQPACKET socket of the Unix family.
 */
int service_listen_fd(int *ret_fd, struct report *report);
