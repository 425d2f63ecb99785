#!/bin/bash
# Faults: a stopped daemon, a stuck batch, a lost device, SIGKILL. It is back in time, and clients are served again.
. "$(dirname "$0")/common.bash"

begin() { # SCRIPT
    reset
    [ -z "$1" ] || fake "$1"
    dropin soon "[Unit]" StartLimitBurst=100 "[Service]" RestartSec=100ms
    sed -i 's/^#batch_timeout_ms = .*/batch_timeout_ms = 500;/' /etc/fused/fused.conf
    systemctl start fused.socket
    infer
    pid=$(property MainPID)
}

stopped_daemon() {
    begin ""
    systemctl stop fused.service
    dropin watchdog "[Service]" WatchdogSec=1
    infer
    pid=$(property MainPID)
    # Signs of life keep it for longer than the limit.
    sleep 1.5
    is MainPID "$pid"
    traffic 2
    sleep 0.3
    kill -STOP "$pid"
    soon 5 served_by_another "$pid"
    matches "$(journal)" 'Watchdog timeout'
    traffic_counts
    # Clients saw their connections end, nothing else.
    at_most "$(field gap_ms "$counts")" 3000
    is NRestarts 1
}

# One thread of the daemon stands still, all others run.
hold() { # [THREAD]
    : >"$place/held" # of the case before
    "$B/tests/service/hold" "$pid" "$@" >"$place/held" 2>&1 &
    soon 2 grep -q held "$place/held"
}

# All of it hangs for those outside, though helpers and engine run: the sign of life is the loop's.
blocked_loop() {
    begin ""
    systemctl stop fused.service
    dropin watchdog "[Service]" WatchdogSec=1
    infer
    pid=$(property MainPID)
    traffic 2
    sleep 0.3
    hold
    soon 7 served_by_another "$pid"
    matches "$(journal)" 'Watchdog timeout'
    traffic_counts
    at_most "$(field gap_ms "$counts")" 4000
    is NRestarts 1
}

# A driver's call that never returns: the loop turns, and sees that a batch is too old.
blocked_engine() {
    begin delay_ms=100
    traffic 2
    sleep 0.3
    hold engine
    soon 5 served_by_another "$pid"
    matches "$(journal)" 'status=70'
    traffic_counts
    [ "$(field gpu_lost "$counts")" -ge 1 ]
    journal_has device.lost
}

# The same before it has begun with anything.
blocked_idle_engine() {
    begin ""
    hold engine
    traffic 2
    soon 5 served_by_another "$pid"
    matches "$(journal)" 'status=70'
    traffic_counts
    [ "$(field gpu_lost "$counts")" -ge 1 ]
    journal_has device.lost
}

no_core_is_left() {
    equals "$(find / -xdev -name 'core*' -newer "$place" -type f -size +100k 2>/dev/null | wc -l)" 0
    matches "$(journal)" 'status=6/ABRT'
}

stuck_batch() {
    begin hang_from=20
    traffic 2
    soon 5 served_by_another "$pid"
    matches "$(journal)" 'status=70'
    traffic_counts
    [ "$(field gpu_lost "$counts")" -ge 1 ]
    journal_has device.lost
}

lost_device() {
    begin sticky_from=20
    traffic 4 1500 # as long as there is any, it is lost again and again
    soon 5 served_by_another "$pid"
    matches "$(journal)" 'status=70'
    traffic_counts
    # What ran and what waited was told so; it was back at once, each time.
    [ "$(field gpu_lost "$counts")" -ge 1 ]
    at_most "$(field gap_ms "$counts")" 2000
    is ActiveState active
}

killed() {
    local i
    begin ""
    traffic 4
    for i in 1 2 3 4 5; do
        sleep 0.2
        pid=$(property MainPID)
        kill -KILL "$pid"
        soon 5 served_by_another "$pid"
    done
    traffic_counts
    is NRestarts 5
    # What was in flight is lost with it: at most one request of each client each time.
    at_most "$(field unanswered "$counts")" 20
    infer
}


it "stopped (SIGSTOP): the watchdog ends it, and it is back" stopped_daemon
it "its loop alone is blocked: the watchdog ends it, and it is back" blocked_loop
it "its engine alone is blocked: GPU_LOST, 70, and it is back" blocked_engine
it "its engine alone is blocked while it is idle: the same" blocked_idle_engine
it "ended by SIGABRT without a core file" no_core_is_left
it "a stuck batch: GPU_LOST, 70, and it is back" stuck_batch
it "a lost device: GPU_LOST, 70, and it is back" lost_device
it "killed five times under load: back each time, nobody refused" killed
finish
