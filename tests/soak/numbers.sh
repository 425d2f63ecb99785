#!/bin/bash
# numbers.sh: the figures of README.md about what the daemon bears, each from the test that also judges it: faults with their
# tests, calls that failed in turn, killed clients and daemons, connections held, requests refused, the rating of the unit.
# Fuzzing (make fuzz) and soaking (make soak) take a time of your choice and have their own commands.
set -u
export B=${B:-build}
cd "$(dirname "$0")/../.." || exit 1
failed=0

figures() { # PATTERN COMMAND...
    local out
    out=$("${@:2}" 2>&1) || { echo "FAILED: ${*:2}" && tail -n 20 <<<"$out" && failed=1; }
    grep -E "$1" <<<"$out" | sed 's/^\(ok [0-9]* - \)\?/  /'
}

echo "faults with a test of their own:"
figures 'are there' tests/hostile/rows.sh
echo "allocations and calls of the daemon that failed in turn, of its loop and of its helpers:"
figures 'calls, ' "$B/tests/daemon/fault_daemon"
echo "killed under load:"
figures 'killed in' tests/soak/kill.sh "$@"
echo "many at once:"
figures 'refused [0-9]+ requests|connections held' "$B/tests/hostile/test_load"
echo "rating of the unit, 0 best:"
figures 'level for' systemd-analyze security --offline=yes --no-pager deploy/systemd/fused.service
exit $failed
