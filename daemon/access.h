/*
 * access.h - who is at the other end, and what they may do
 */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

#include "proto/proto.h"

#define ACCESS_GROUPS_MAX 65536 /* the kernel's own limit */

struct peer {
    uid_t uid;
    gid_t gid;
    pid_t pid;
    bool admin;
};

/* The rule, over plain numbers: uid 0, the daemon's own uid, or a member of admin_gid (-1: no such
 * group); never the overflow uid, which stands for anybody. */
bool access_is_admin(uid_t uid, uid_t own, uid_t overflow, gid_t admin_gid, gid_t gid,
                     const gid_t *groups, unsigned n_groups);

/* Asks the kernel who connected, once: credentials are those of the time of connect(). 0 or -errno.
 */
int access_peer(int socket, gid_t admin_gid, struct peer *ret);

/* May this peer use this verb? The one gate, by the table of proto.h. */
bool access_allowed(const struct peer *peer, enum verb verb);

/* The gid of a group name: 0, -ENOENT or -errno. */
int access_group(const char *name, gid_t *ret);
