/*
 * access.c - peer credentials and the right to administrate
 *
 * SO_PEERCRED names uid, primary gid and pid; the supplementary groups come from SO_PEERGROUPS.
 * Both are what the kernel noted at connect(), so a client cannot change them later, and one that
 * vanishes stays who it was. Inside a user namespace every unmapped uid shows as the overflow uid:
 * that one is nobody in particular and never an administrator, even if the daemon runs as it.
 */
#include "access.h"

#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base.h"

#ifndef SO_PEERGROUPS
#define SO_PEERGROUPS 59
#endif

bool access_is_admin(uid_t uid, uid_t own, uid_t overflow, gid_t admin_gid, gid_t gid,
                     const gid_t *groups, unsigned n_groups)
{
    if (uid == overflow)
        return false;
    if (uid == 0 || uid == own)
        return true;
    if (admin_gid == (gid_t)-1)
        return false;
    if (gid == admin_gid)
        return true;
    for (unsigned i = 0; i < n_groups; i++) {
        if (groups[i] == admin_gid)
            return true;
    }
    return false;
}

static uid_t overflow_uid(void)
{
    FILE *file = fopen("/proc/sys/kernel/overflowuid", "re");
    char text[16] = "";
    unsigned long uid = 0;

    if (file) {
        if (fgets(text, sizeof(text), file))
            uid = strtoul(text, NULL, 10);
        fclose(file);
    }
    return uid > 0 && uid < UINT32_MAX ? (uid_t)uid : 65534;
}

static int peer_groups(int socket, gid_t **ret_groups, unsigned *ret_n)
{
    socklen_t size = 0;
    gid_t *groups;

    /* Too small a buffer answers ERANGE and says the size. */
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, NULL, &size) == 0 || errno == ENODATA) {
        *ret_groups = NULL;
        *ret_n = 0;
        return 0;
    }
    if (errno != ERANGE)
        return -errno;
    if (size / sizeof(gid_t) > ACCESS_GROUPS_MAX)
        return -E2BIG;
    groups = malloc(size);
    if (!groups)
        return -ENOMEM;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups, &size) != 0) {
        int r = -errno;

        free(groups);
        return r;
    }
    *ret_groups = groups;
    *ret_n = size / sizeof(gid_t);
    return 0;
}

int access_peer(int socket, gid_t admin_gid, struct peer *ret)
{
    _cleanup_free_ gid_t *groups = NULL;
    static bool overflow_known;
    static uid_t overflow;
    struct ucred cred;
    socklen_t size = sizeof(cred);
    unsigned n = 0;
    int r;

    if (!overflow_known) {
        overflow = overflow_uid();
        overflow_known = true;
    }
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0)
        return -errno;
    if (admin_gid != (gid_t)-1) {
        r = peer_groups(socket, &groups, &n);
        if (r < 0)
            return r;
    }
    *ret = (struct peer){
        .uid = cred.uid,
        .gid = cred.gid,
        .pid = cred.pid,
        .admin = access_is_admin(cred.uid, geteuid(), overflow, admin_gid, cred.gid, groups, n),
    };
    return 0;
}

bool access_allowed(const struct peer *peer, enum verb verb)
{
    return proto_verb_right(verb) == RIGHT_ANY || peer->admin;
}

int access_group(const char *name, gid_t *ret)
{
    struct group group, *found = NULL;
    size_t size = 4096;
    int r;

    for (;;) {
        _cleanup_free_ char *text = malloc(size);

        if (!text)
            return -ENOMEM;
        r = getgrnam_r(name, &group, text, size, &found);
        if (r == 0) {
            if (!found)
                return -ENOENT;
            *ret = found->gr_gid;
            return 0;
        }
        if (r != ERANGE || size >= (1u << 22))
            return -r;
        size *= 2;
    }
}
