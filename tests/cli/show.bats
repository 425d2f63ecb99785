#!/usr/bin/env bats
# fusectl status, models, describe, stats, ping against a daemon.

bats_require_minimum_version 1.5.0

setup_file() {
    load common
    make_models "$BATS_FILE_TMPDIR/models" a_5x37x96_g12 a_bfloat16 b_n2_c3-16_k3_min0.0_max1.0 dropout_n1027_s7_o400
    start_daemon "$BATS_FILE_TMPDIR/models"
}

teardown_file() {
    load common
    stop_daemon
}

setup() {
    load common
}

@test "ping" {
    run "$fusectl" ping
    expect_status 0
    expect_output '^answer after [0-9.]+ (us|ms)$'
    run "$fusectl" ping --json
    expect_status 0
    expect_output '^\{"round_trip_us":[0-9]+\}$'
}

@test "status" {
    run "$fusectl" status
    expect_status 0
    expect_output '^server +fused [0-9.]+, ready, up 0:0'
    expect_output '^backend +cpu.*, log level info$'
    expect_output '^device +[^ ]'
    expect_output '^models +4, '
    expect_output "^you +uid $(id -u) \(administrator\), 1 connection, 0 buffers \(0 B\), [0-9]+ requests?$"
}

@test "status: the limits in force" {
    run "$fusectl" status
    expect_output '^limits +a uid: 256 connections, 256 buffers \(4\.0 GiB\), 1024 requests$'
    expect_output '^ +all: 4096 connections, buffers of [0-9.]+ GiB, made ahead 256\.0 MiB, left on a device 1\.0 GiB$'
    expect_output '^ +hello 5\.00 s, batch 30\.00 s, drain 30\.00 s$'
    run "$fusectl" status --json
    expect_output '"limits": ?\{"uid_buffer_bytes": ?4294967296,'
}

# G-13, on the scripted backend.
@test "status and metrics: what the driver of a device reports" {
    local other=$BATS_TEST_TMPDIR/o pid i
    make_models "$BATS_TEST_TMPDIR/models" a_5x37x96_g12
    FUSED_FAKE_SCRIPT="memory_mib=4096;xid_ms=1:31;ecc=12:3" "$B/fused" --config config/fused.conf --socket "$other" \
        --backend "$B/fake-backend.so" --models "$BATS_TEST_TMPDIR/models" >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    pid=$!
    for ((i = 0; i < 100; i++)); do
        ! "$fusectl" --socket "$other" status 2>/dev/null | grep -q 'Xid): 1' || break
        sleep 0.1
    done
    run "$fusectl" --socket "$other" status
    output2=$output
    run "$fusectl" --socket "$other" metrics
    kill $pid
    wait $pid
    expect_output '^fused_device_ecc_corrected_total\{index="0",device=".*",backend="fake"\} 12$'
    expect_output '^fused_device_ecc_uncorrected_total\{.*\} 3$'
    expect_output '^fused_device_xids_total\{.*\} 1$'
    expect_output '^fused_device_last_xid\{.*\} 31$'
    output=$output2
    expect_output '^ +memory errors: 12 corrected, 3 uncorrected; faults \(Xid\): 1, the last 31; the server ends at those of the script$'
}

@test "metrics leave out what nobody watches" {
    run "$fusectl" metrics
    expect_status 0
    [[ $output != *fused_device_ecc* ]]
    [[ $output != *fused_device_xid* ]]
    expect_output '^fused_device_batches_total\{'
}

@test "status --json: one object" {
    run "$fusectl" status --json
    expect_status 0
    [ "$(wc -l <<<"$output")" = 1 ]
    expect_output '^\{.*"state": ?"ready".*\}$'
    expect_output '"backend": ?"cpu"'
}

@test "models" {
    run "$fusectl" models
    expect_status 0
    expect_output '^NAME +DTYPE +VERSION +STATE +PROOF$'
    expect_output '^a_5x37x96_g12 +float32 +1 +ready +-$'
    expect_output '^a_bfloat16 +bfloat16 +[0-9]+ +ready +-$'
    expect_output '^b_n2_c3-16_k3_min0.0_max1.0 +float32 +[0-9]+ +ready +constant$'
    [ "$(wc -l <<<"$output")" = 5 ]
    run "$fusectl" --json models
    expect_status 0
    expect_output '^\{"models": ?\[.*"name": ?"a_5x37x96_g12".*\].*\}$'
}

@test "describe" {
    run "$fusectl" describe a_5x37x96_g12
    expect_status 0
    expect_output '^model +a_5x37x96_g12, version 1$'
    expect_output '^dtype +float32, precision fp32$'
    expect_output '^input +\[N, 37\]$'
    expect_output '^output +\[1, 96, N, 1\]$'
    expect_output '^stages +.*linear'
    expect_output '^batching +max_rows 256, max_delay_us 0, queue_rows 65536$'
    expect_output '^backend +cpu, '
    expect_output '^plan +[^ ]'
    expect_output '^proof +[^ -]'
    expect_output '^compact +outer_sum$'
    run "$fusectl" describe b_n2_c3-16_k3_min0.0_max1.0
    expect_status 0
    expect_output '^compact +constant$'
    run "$fusectl" describe a_5x37x96_g12 --json
    expect_status 0
    expect_output '"input": ?\[null, ?37\]'
}

@test "stats: of a model, and of all" {
    for _ in 1 2 3; do
        "$fusectl" infer a_5x37x96_g12 -i "$golden/a_5x37x96_g12.safetensors" -o "$BATS_TEST_TMPDIR/y.npy"
    done
    run "$fusectl" stats a_5x37x96_g12
    expect_status 0
    expect_output '^model +a_5x37x96_g12$'
    expect_output '^requests +3$'
    expect_output '^rows +15 in 3 batches, 5.0 a batch, at most 5$'
    expect_output '^running +p50 .*, p99 .*, max '
    expect_output '^errors +none$'
    run "$fusectl" stats
    expect_status 0
    expect_output '^model +all$'
    expect_output '^requests +3$'
    run "$fusectl" stats --json
    expect_status 0
    expect_output '"model": ?null'
}

@test "stats count errors by name" {
    run "$fusectl" infer dropout_n1027_s7_o400 -i "$golden/a_5x37x96_g12.safetensors" -o "$BATS_TEST_TMPDIR/y.npy"
    expect_status 1
    run "$fusectl" stats dropout_n1027_s7_o400
    expect_status 0
    expect_output '^errors +BAD_TENSOR 1'
}

@test "a model that is not there" {
    for c in describe stats; do
        run --separate-stderr "$fusectl" $c nonesuch
        expect_status 1
        [ -z "$output" ]
        grep -q '^fusectl: NOT_FOUND: ' <<<"$stderr"
    done
    run --separate-stderr "$fusectl" --json describe nonesuch
    expect_status 1
    expect_output '^\{"error":\{"name":"NOT_FOUND","text":".*"\}\}$'
}

@test "names that no model can have" {
    escape=$(printf '\033')
    for name in ../x a/b "a${escape}[31m" "$(printf 'x%.0s' {1..65})" "$(printf 'x%.0s' {1..5000})"; do
        run "$fusectl" describe "$name"
        [ "$status" = 1 ] || [ "$status" = 64 ] || { echo "'$name': $status: $output" && return 1; }
        [[ $output != *"$escape"* ]]
    done
    run "$fusectl" ping
    expect_status 0
}

@test "a full standard output is an error" {
    for c in status models "describe a_5x37x96_g12" stats ping "status --json"; do
        run bash -c '"$0" $1 >/dev/full' "$fusectl" "$c"
        expect_status 74
        expect_output 'cannot write to standard output: No space left on device'
    done
}
