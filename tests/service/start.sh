#!/bin/bash
# Starts: READY when a request would succeed and not before, loads that are slow or hang, starts that fail.
. "$(dirname "$0")/common.bash"

ready_when_it_serves() {
    fake load_ms=1200
    systemctl start --no-block fused.service
    soon 2 is SubState start
    # Who connects meanwhile waits in the socket's backlog, and is served.
    infer
    is SubState running
    matches "$(property StatusText)" '^Serving 1 model on fake '
    [ $((($(property ActiveEnterTimestampMonotonic) - $(property InactiveExitTimestampMonotonic)) / 1000)) -ge 1200 ]
}

slow_load_extends_its_time() {
    reset
    serve_model a_3x64x64_g64
    fake load_ms=2000
    dropin short "[Service]" TimeoutStartSec=3500ms
    systemctl start fused.service
    is SubState running
    infer
}

stuck_load_ends() {
    reset
    fake load_ms=60000
    dropin short "[Service]" TimeoutStartSec=500ms Restart=no
    fails systemctl start fused.service
    is Result timeout
    fails journal_has server.ready
}

stop_while_starting() {
    reset
    fake load_ms=60000
    systemctl start --no-block fused.service
    soon 2 is StatusText "Loading models"
    local start
    start=$(now_ms)
    systemctl stop fused.socket fused.service
    at_most $(($(now_ms) - start)) 2000
    is Result success
    fails journal_has server.ready
}

hangup_while_starting() {
    reset
    fake load_ms=700
    systemctl start --no-block fused.service
    soon 2 is StatusText "Loading models"
    serve_model a_3x64x64_g64
    systemctl kill --kill-whom=main -s HUP fused.service
    soon 5 infer a_3x64x64_g64
    is NRestarts 0
}

wrong_files_are_not_tried_again() {
    local what
    for what in fused.conf models.d/$model.conf; do
        reset
        echo 'nonsense = 1;' >>/etc/fused/$what
        dropin soon "[Service]" RestartSec=50ms
        fails systemctl start fused.service
        is ExecMainStatus 78
        sleep 0.3
        is ActiveState failed
        is NRestarts 0
        # Which file, which line, and why.
        matches "$(journal)" "${what##*/}:[0-9]+: nonsense"
    done
}

failing_starts_come_to_an_end() {
    reset
    fake open_fails=1
    dropin soon "[Service]" RestartSec=50ms
    systemctl start fused.socket
    fails fusectl ping
    soon 5 is ActiveState failed
    equals "$(journal | grep -c 'says that there is no device')" 10
    is ExecMainStatus 69
    # Clients are told at once, not left waiting.
    soon 2 is Result service-start-limit-hit fused.socket
    matches "$(fusectl ping 2>&1 || true)" 'Connection refused'
}

and_begin_again_when_asked() {
    rm $dropins/fake.conf
    systemctl daemon-reload
    systemctl reset-failed fused.service fused.socket
    systemctl start fused.socket
    infer
    is NRestarts 0
}

it "READY when it serves; who connects before waits" ready_when_it_serves
it "a load that makes progress may take longer than TimeoutStartSec=" slow_load_extends_its_time
it "a load that hangs may not" stuck_load_ends
it "stop while starting" stop_while_starting
it "SIGHUP while starting is followed" hangup_while_starting
it "wrong configuration or model: 78 and no second try" wrong_files_are_not_tried_again
it "starts that fail end after ten, and clients are refused" failing_starts_come_to_an_end
it "reset-failed and start: it serves again" and_begin_again_when_asked
finish
