#!/bin/bash
# kill.sh [CLIENTS [DAEMONS]]: kill -9 of that many clients (1000) and of the daemon (200), under load, and what it came to.
set -u
export B=${B:-build} HOSTILE_KILL_CLIENTS=${1:-1000} HOSTILE_KILL_DAEMONS=${2:-200}
out=$("$B/tests/hostile/test_kill" 2>&1)
rc=$?
[ $rc = 0 ] || echo "$out"
grep killed <<<"$out"
exit $rc
