/*
 * wire.h - one datagram with its file descriptors over a SOCK_SEQPACKET socket
 *
 * Descriptors are received close-on-exec; more than the caller's room, or a truncated control
 * message, closes all of them and is reported, so that none leaks. Neither function blocks when the
 * socket does not.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "proto.h"

/*
 * Sends `n` bytes and, if fd >= 0, that descriptor, which stays the caller's. 0, -EAGAIN when the
 * peer's queue is full, -EPIPE when the peer is gone (no SIGPIPE), -ETOOMANYREFS when too many
 * descriptors of ours are in flight, or another negative errno.
 */
int wire_send(int socket, const void *bytes, size_t n, int fd);

/*
 * Receives one datagram. The number of bytes (0: the peer closed, or sent an empty datagram, which
 * counts as a close), -EAGAIN, -EMSGSIZE (longer than `size`: it is dropped whole), -EPROTO
 * (descriptors beyond PROTO_FDS_MAX: the datagram is dropped and its descriptors are closed), or
 * another negative errno. *ret_fd is the received descriptor, now the caller's; -1: none came;
 * -EMFILE: one came, and this process had no room for it.
 */
int wire_recv(int socket, void *bytes, size_t size, int *ret_fd);

/* Connects to the SOCK_SEQPACKET socket at `path`, close-on-exec, blocking. The fd, -ENAMETOOLONG,
 * -ETIMEDOUT when the listener's queue stays full for 5 s, or -errno. */
int wire_connect(const char *path);

/* The same without waiting: -EAGAIN when the listener's queue is full. The socket does not block.
 */
int wire_connect_now(const char *path);
