#!/bin/bash
# soak.sh MINUTES: hostile clients and checked traffic for that long, which must pass; then the same, shorter, on a daemon
# with a planted leak of each kind, which must each be found.
set -u
export B=${B:-build}
minutes=${1:-1}
failed=0
"$B/tests/soak/soak" $((minutes * 60)) 2>&1 | tee "$B/tests/soak/soak.log" | grep -E 'checked|drift|ERROR|Error|expected'
[ "${PIPESTATUS[0]}" = 0 ] || { echo "FAILED: see $B/tests/soak/soak.log"; failed=1; }
for leak in fd map memory thread device; do
    log=$B/tests/soak/leak-$leak.log
    if SOAK_LEAK=$leak "$B/tests/soak/soak" 12 >"$log" 2>&1; then
        echo "FAILED: a planted leak ($leak) was not found, see $log"
        failed=1
    elif ! grep -q '^drift' "$log"; then
        echo "FAILED: the run with a planted leak ($leak) ended early, see $log"
        failed=1
    else
        # 0x3ee: SIGABRT, with which the scripted backend answers what is left at its end.
        echo "planted leak ($leak) found: $(grep -m 1 '^drift' "$log")$(grep -q '0x3ee != 0' "$log" && echo ', abort at its end')"
    fi
done
[ $failed = 0 ] && echo "soak passed: $minutes minutes without drift, every planted leak found"
exit $failed
