#!/usr/bin/env bats
# fusectl load, unload, reload, log and drain against a daemon; the last one ends it.

bats_require_minimum_version 1.5.0

setup_file() {
    load common
    make_models "$BATS_FILE_TMPDIR/models" a_5x37x96_g12 a_4x64x64_g1
    start_daemon "$BATS_FILE_TMPDIR/models"
}

teardown_file() {
    load common
    stop_daemon
}

setup() {
    load common
    dir=$BATS_FILE_TMPDIR/models
    m=a_5x37x96_g12
}

infer() {
    run "$fusectl" infer $m -i "$golden/$m.safetensors" -o "$BATS_TEST_TMPDIR/y.npy"
}

@test "unload, load" {
    run "$fusectl" unload $m
    expect_status 0
    expect_output "^$m: unloaded"
    infer
    expect_status 1
    expect_output '^fusectl: NOT_FOUND: '
    run "$fusectl" unload $m
    expect_status 1
    expect_output '^fusectl: NOT_FOUND: '
    run "$fusectl" load $m
    expect_status 0
    expect_output "^$m: loaded, version [0-9]+, "
    infer
    expect_status 0
}

@test "load again: a new version of a file that changed, else nothing to do" {
    run "$fusectl" load $m
    expect_status 0
    expect_output "^$m: unchanged"
    echo '# changed' >>"$dir/$m.conf"
    run "$fusectl" load $m --json
    expect_status 0
    expect_output '"action": ?"loaded"'
    infer
    expect_status 0
}

@test "load of a wrong model: BAD_MODEL with file and line, the old one serves on" {
    cp "$dir/$m.conf" "$BATS_TEST_TMPDIR/good.conf"
    sed -i 's/groups = 12/groups = 7/' "$dir/$m.conf"
    run "$fusectl" load $m
    cp "$BATS_TEST_TMPDIR/good.conf" "$dir/$m.conf"
    expect_status 1
    expect_output "^fusectl: BAD_MODEL: $m.conf:8: "
    [[ $output != *"$dir"* ]]
    infer
    expect_status 0
}

@test "load of what is not there" {
    run "$fusectl" load nonesuch
    expect_status 1
    expect_output '^fusectl: (NOT_FOUND|BAD_MODEL): '
    run "$fusectl" load ../models/$m
    [ "$status" = 1 ] || [ "$status" = 64 ]
}

@test "reload: new, removed and unchanged models; all or nothing" {
    make_models "$dir" a_3x64x64_g64
    run "$fusectl" reload
    expect_status 0
    expect_output '^a_3x64x64_g64: loaded'
    make_models "$dir" a_8x64x128_g8
    sed -i 's/groups = 8/groups = 7/' "$dir/a_8x64x128_g8.conf"
    rm "$dir/a_3x64x64_g64.conf"
    run "$fusectl" reload
    expect_status 1
    expect_output '^fusectl: BAD_MODEL: a_8x64x128_g8.conf:8: '
    run "$fusectl" models
    expect_output '^a_3x64x64_g64 '
    rm "$dir/a_8x64x128_g8.conf"
    run "$fusectl" reload
    expect_status 0
    expect_output '^a_3x64x64_g64: unloaded'
    run "$fusectl" reload $m
    expect_status 0
    infer
    expect_status 0
}

@test "log" {
    run "$fusectl" log debug
    expect_status 0
    expect_output '^log level debug$'
    run "$fusectl" status
    expect_output 'log level debug'
    run "$fusectl" log info --json
    expect_status 0
    expect_output '"level": ?"info"'
    run "$fusectl" log loud
    expect_status 1
}

@test "who is no administrator is DENIED" {
    [ "$(id -u)" = 0 ] || skip "needs root to become another user"
    # Another user must reach the socket, the program and the files: a place and modes of their own.
    shared=$(mktemp -d)
    chmod 755 "$shared"
    cp "$fusectl" "$golden/$m.safetensors" "$shared/"
    chmod 755 "$shared/fusectl"
    mkdir -m 777 "$shared/out"
    chmod 666 "$FUSED_SOCKET"
    ln "$FUSED_SOCKET" "$shared/s"
    other=(setpriv --reuid=1234 --regid=1234 --clear-groups "$shared/fusectl" --socket "$shared/s")
    run "${other[@]}" ping
    expect_status 0
    run "${other[@]}" status
    expect_status 0
    expect_output '^you +uid 1234, '
    [[ $output != *uids* ]]
    for c in "load $m" "unload $m" reload "reload $m" drain "log debug"; do
        # shellcheck disable=SC2086
        run "${other[@]}" $c
        expect_status 1
        expect_output '^fusectl: DENIED: '
    done
    run "${other[@]}" infer $m -i "$shared/$m.safetensors" -o "$shared/out/y.npy" --priority 3
    expect_status 1
    expect_output '^fusectl: DENIED: '
    run "${other[@]}" infer $m -i "$shared/$m.safetensors" -o "$shared/out/y.npy"
    expect_status 0
    rm -rf "$shared"
}

@test "drain: what comes after is refused, and the daemon ends with 0" {
    run "$fusectl" drain
    expect_status 0
    expect_output '^draining$'
    run "$fusectl" infer $m -i "$golden/$m.safetensors" -o "$BATS_TEST_TMPDIR/y.npy"
    [ "$status" = 69 ] || { expect_status 1 && expect_output 'SHUTTING_DOWN'; }
}
