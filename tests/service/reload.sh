#!/bin/bash
# systemctl reload: all or nothing, it fails when the change fails, and it ends when the new models serve.
. "$(dirname "$0")/common.bash"

good_files() {
    systemctl start fused.socket
    infer
    pid=$(property MainPID)
    serve_model a_3x64x64_g64
    sed -i 's/^#log_level = .*/log_level = "debug";/' /etc/fused/fused.conf
    systemctl reload fused.service
    infer a_3x64x64_g64
    matches "$(fusectl status)" 'log level debug'
    matches "$(property StatusText)" '^Serving 2 models'
    is SubState running
    is MainPID "$pid"
    rm /etc/fused/models.d/a_3x64x64_g64.conf
    systemctl reload fused.service
    fails infer a_3x64x64_g64
}

bad_files() {
    local what
    for what in fused.conf models.d/$model.conf; do
        reset
        systemctl start fused.service
        pid=$(property MainPID)
        echo 'nonsense = 1;' >>/etc/fused/$what
        serve_model a_3x64x64_g64
        fails systemctl reload fused.service
        is SubState running
        is MainPID "$pid"
        infer
        fails infer a_3x64x64_g64
        matches "$(journal)" "${what##*/}:[0-9]+: nonsense"
    done
}

# Not through systemctl: nobody looked at the files before.
bad_files_by_signal() {
    systemctl kill --kill-whom=main -s HUP fused.service
    soon 2 matches_status 'the last reload changed nothing: .*models.d|the last reload changed nothing: a_4x64x64_g1.conf:[0-9]+: nonsense'
    is SubState running
    infer
    cp tests/golden/$model.conf /etc/fused/models.d/
    systemctl kill --kill-whom=main -s HUP fused.service
    soon 2 matches_status '^Serving 2 models[^;]*$'
}

matches_status() { # EXTENDED-REGEX
    matches "$(property StatusText)" "$1"
}

ends_when_new_models_serve() {
    reset
    fake load_ms=600
    systemctl start fused.service
    serve_model a_3x64x64_g64
    local start
    start=$(now_ms)
    systemctl reload fused.service
    [ $(($(now_ms) - start)) -ge 600 ]
    infer a_3x64x64_g64
}

fails_when_the_device_refuses() {
    reset
    fake oom_load_over=100000
    systemctl start fused.service
    serve_model a_1x128x256_g16
    fails systemctl reload fused.service
    is SubState running
    matches_status 'the last reload changed nothing: '
    infer
}

slow_reload_extends_its_time() {
    reset
    fake load_ms=2000
    systemctl start fused.service
    dropin short "[Service]" TimeoutStartSec=3500ms
    serve_model a_3x64x64_g64 a_8x64x128_g8
    systemctl reload fused.service
    infer a_8x64x128_g8
}

under_load() {
    reset
    systemctl start fused.service
    pid=$(property MainPID)
    traffic 4
    for i in 1 2 3 4; do
        echo "# $i" >>/etc/fused/models.d/$model.conf
        systemctl reload fused.service
    done
    systemctl daemon-reload
    systemctl restart systemd-journald
    traffic_counts
    matches "$counts" 'connects=4 .*shutting_down=0 gpu_lost=0 other=0 unanswered=0'
    is MainPID "$pid"
    matches "$(fusectl models)" "^$model "
    mark
    systemctl kill --kill-whom=main -s HUP fused.service
    soon 2 journal_has server.reloaded
}

it "new models and limits" good_files
it "a wrong file: reload fails, the old models serve" bad_files
it "SIGHUP with a wrong file: the status says so" bad_files_by_signal
it "reload ends when the new models serve" ends_when_new_models_serve
it "what the device refuses fails the reload" fails_when_the_device_refuses
it "a reload that makes progress may take longer than TimeoutStartSec=" slow_reload_extends_its_time
it "four reloads, daemon-reload and another journald under load: every request answered" under_load
finish
