#!/usr/bin/env bats
# The command line itself, without a server: help, wrong usage, no server, a standard output that cannot be written.

setup() {
    load common
    export FUSED_SOCKET=$BATS_TEST_TMPDIR/none
}

@test "--help and --version" {
    run "$fusectl" --help
    expect_status 0
    for c in status models describe stats ping infer bench top metrics load unload reload drain log check weights; do
        expect_output "^  $c "
    done
    run "$fusectl" --version
    expect_status 0
    expect_output '^fusectl [0-9]+\.[0-9]+\.[0-9]+$'
}

@test "every command has --help" {
    for c in status models describe stats ping infer bench top metrics load unload reload drain log check weights; do
        run "$fusectl" "$c" --help
        expect_status 0
        expect_output "^Usage: fusectl $c "
    done
}

@test "wrong usage is 64" {
    while read -r line; do
        [ -n "$line" ] || continue
        # shellcheck disable=SC2086
        run "$fusectl" $line
        [ "$status" = 64 ] || { echo "fusectl $line: $status: $output" && return 1; }
    done <<'END'
nonsense
--nonsense
status extra
status --nonsense
models extra
describe
describe a b
stats a b
ping extra
infer
infer m
infer m -i a.npy
infer m -o b.npy
infer m -i a.npy -o b.npy --seed 1
infer m -i a.npy -o b.npy --offset 4
infer m -i a.npy -o b.npy --train --seed -1
infer m -i a.npy -o b.npy --train --seed 18446744073709551616
infer m -i a.npy -o b.npy --train --seed 0x10
infer m -i a.npy -o b.npy --train --seed
infer m -i a.npy -o b.npy --deadline 0
infer m -i a.npy -o b.npy --deadline 1.5
infer m -i a.npy -o b.npy --repeat 0
infer m -i a.npy -o b.npy --priority 4
infer m -i a.npy -o b.npy --result half
load
load a b
unload
reload a b
drain extra
log
log a b
check
weights
weights a.conf
weights a.conf --seed 1
weights a.conf -o a.safetensors
weights a.conf --seed 1 -o a.npy
weights a.conf b.conf --seed 1 -o a.safetensors
infer m -i a.txt -o b.npy
infer m -i a.npy -o b.txt
infer m -i a.safetensors# -o b.npy
END
    run "$fusectl"
    expect_status 64
    expect_output 'COMMAND is missing'
    run "$fusectl" --socket '' status
    expect_status 64
    run "$fusectl" describe ''
    [ "$status" = 64 ] || [ "$status" = 69 ]
}

@test "no server is 69, whatever is asked" {
    for c in status models "describe m" "stats" "stats m" ping "load m" "unload m" reload "reload m" drain "log info"; do
        # shellcheck disable=SC2086
        run "$fusectl" $c
        expect_status 69
        expect_output "^fusectl: no server at $FUSED_SOCKET: No such file or directory$"
    done
    run "$fusectl" infer m -i "$golden/a_4x64x64_g1.safetensors" -o "$BATS_TEST_TMPDIR/y.npy"
    expect_status 69
    [ ! -e "$BATS_TEST_TMPDIR/y.npy" ]
}

@test "a socket that nobody serves, or that is no socket, is 69" {
    echo text >"$BATS_TEST_TMPDIR/file"
    run "$fusectl" --socket "$BATS_TEST_TMPDIR/file" ping
    expect_status 69
    run "$fusectl" --socket "$BATS_TEST_TMPDIR" ping
    expect_status 69
    run "$fusectl" --socket "/$(printf 'x%.0s' {1..120})" ping
    expect_status 69
}

@test "a socket that one may not connect to is 69, and says so" {
    local without=()
    [ "$(id -u)" != 0 ] || without=(setpriv --bounding-set -dac_override,-dac_read_search)
    "${without[@]}" true || skip "capabilities cannot be dropped here"
    python3 -c '
import os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
os.chmod(sys.argv[1], 0)' "$BATS_TEST_TMPDIR/closed"
    run "${without[@]}" "$fusectl" --socket "$BATS_TEST_TMPDIR/closed" ping
    expect_status 69
    expect_output "^fusectl: no permission for the server's socket $BATS_TEST_TMPDIR/closed: its group may connect$"
}

@test "--socket goes before FUSED_SOCKET, on either side of the command" {
    run "$fusectl" --socket /nowhere/a ping
    expect_output 'no server at /nowhere/a:'
    run "$fusectl" ping --socket /nowhere/b
    expect_output 'no server at /nowhere/b:'
}

@test "a full or closed standard output is an error" {
    run bash -c '"$0" --help >/dev/full' "$fusectl"
    expect_status 74
    expect_output 'cannot write to standard output: No space left on device'
    run bash -c '"$0" --help >&-' "$fusectl"
    expect_status 74
    expect_output 'cannot write to standard output'
    run bash -c '"$0" check "$1" >/dev/full' "$fusectl" "$golden/a_4x64x64_g1.conf"
    expect_status 74
    run bash -c '"$0" weights "$1" --seed 1 -o "$2" >&-' "$fusectl" config/models.d/conv3d-groupnorm-min-clamp-full.conf "$BATS_TEST_TMPDIR/w.safetensors"
    expect_status 74
}

@test "a reader that went away is an error, not a signal" {
    run bash -c 'set -o pipefail; { sleep 0.2; "$0" --help; } | true' "$fusectl"
    expect_status 74
    expect_output 'cannot write to standard output: Broken pipe'
}
