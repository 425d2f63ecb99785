#!/bin/bash
# Stops and restarts: what was accepted is answered, and with the socket unit nobody is ever refused.
. "$(dirname "$0")/common.bash"

stop_idle() {
    systemctl start fused.service
    infer
    local start
    start=$(now_ms)
    systemctl stop fused.service
    at_most $(($(now_ms) - start)) 1000
    is Result success
    is ExecMainStatus 0
}

# Batches of 300 ms, and eight requests in line when SIGTERM comes.
stop_under_load() {
    local start
    reset
    fake delay_ms=300
    systemctl start fused.service
    "$load" $socket $model $features burst 8 >"$place/counts" &
    soon 2 grep -q sent "$place/counts"
    start=$(now_ms)
    systemctl stop fused.service
    at_most $(($(now_ms) - start)) 2000
    wait
    matches "$(cat "$place/counts")" ' ok=8 shutting_down=0 .*unanswered=0 unsent=0 wrong=0'
    is Result success
    is ExecMainStatus 0
    is ActiveState active fused.socket
}

restart_under_load() {
    local i
    reset
    systemctl start fused.socket
    traffic 8
    for i in 1 2 3 4; do
        sleep 0.4
        systemctl restart fused.service
    done
    traffic_counts
    # Whatever a client could still send was answered, with its result or SHUTTING_DOWN.
    equals "$(field unanswered "$counts")" 0
    at_most "$(field gap_ms "$counts")" 2000
    is Result success
}

stopped_is_started_by_the_next() {
    systemctl stop fused.service
    infer
    is SubState running
}

two_on_one_path() {
    local rc=0 out
    out=$(timeout 5 fused --socket $socket --backend cpu 2>&1) || rc=$?
    equals $rc 75
    matches "$out" 'another server answers there'
    infer
    # Not even while the daemon sleeps: the socket is somebody's.
    systemctl stop fused.service
    rc=0
    timeout 5 fused --socket $socket --backend cpu >/dev/null 2>&1 || rc=$?
    equals $rc 75
    infer
}

disabled_leaves_nothing() {
    systemctl stop fused.socket fused.service
    matches "$(fusectl ping 2>&1 || true)" 'no server at'
    equals "$(pgrep -cx fused || true)" 0
}

it "stop: exit 0 at once" stop_idle
it "stop under load: all that was accepted is answered, exit 0" stop_under_load
it "restart under load: nobody is refused" restart_under_load
it "stopped: the next connection starts it" stopped_is_started_by_the_next
it "a second daemon on its path ends with 75" two_on_one_path
it "both stopped: nothing runs" disabled_leaves_nothing
finish
