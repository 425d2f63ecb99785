#!/usr/bin/env bats
# fusectl bench, top, metrics against a daemon.

bats_require_minimum_version 1.5.0

setup_file() {
    load common
    make_models "$BATS_FILE_TMPDIR/models" a_5x37x96_g12 a_bfloat16
    start_daemon "$BATS_FILE_TMPDIR/models"
}

teardown_file() {
    load common
    stop_daemon
}

setup() {
    load common
}

@test "bench: closed loop, verified" {
    run "$fusectl" bench a_5x37x96_g12 --duration 0.3 --clients 3 --in-flight 4 --rows 5 --verify
    expect_status 0
    expect_output '^model +a_5x37x96_g12, 5 rows a request \(740 B in, 1.9 KiB out\), buffers$'
    expect_output '^load +3 clients, 4 in flight each, closed loop, 0.3 s$'
    expect_output '^served +[1-9][0-9.]* requests/s, '
    expect_output '^latency +p50 .*, p90 .*, p99 .*, p99.9 .*, max '
    expect_output '^verified +all [1-9][0-9]* answers have the bits of a run alone$'
    expect_output '^errors +none$'
}

@test "bench: open loop, inline, bfloat16, JSON" {
    run "$fusectl" bench a_bfloat16 --duration 0.5 --rate 400 --constant --inline --json
    expect_status 0
    expect_output '^\{"model":"a_bfloat16","clients":1,"in_flight":64,"rows":1,"place":"inline","loop":"constant","rate":400.0,'
    expect_output '"requests":200,"failed":0,"requests_per_s":400.0,'
    expect_output '"latency_us":\{"p50":[0-9.]+,"p90":[0-9.]+,"p99":[0-9.]+,"p99.9":[0-9.]+,"max":[0-9.]+\}'
    run "$fusectl" bench a_bfloat16 --duration 0.5 --rate 400 --clients 2 --verify
    expect_status 0
    expect_output 'open loop of 400 requests/s \(poisson\)'
}

@test "bench: several sizes in turn, verified" {
    run "$fusectl" bench a_5x37x96_g12 --duration 0.3 --clients 2 --in-flight 3 --rows 1,40,7 --verify
    expect_status 0
    expect_output '^model +a_5x37x96_g12, 1, 40 or 7 rows a request, buffers$'
    expect_output '^moved +[0-9.]+ times the [1-9][0-9.]* GB/s that one thread copies in memory$'
    expect_output '^verified +all [1-9][0-9]* answers have the bits of a run alone$'
    run "$fusectl" bench a_5x37x96_g12 --duration 0.2 --rows 2,6 --json
    expect_status 0
    expect_output '"rows":\[2,6\],'
    expect_output '"bound":"memory","bound_bytes_per_s":[1-9]'
    # Half of the requests have 2 rows, half 6.
    python3 -c 'import json,sys; r = json.loads(sys.argv[1]); m = r["rows_per_s"] / r["requests_per_s"]
assert 3.9 < m < 4.1, m' "$output"
    run "$fusectl" bench a_5x37x96_g12 --rows 1,2,3,4,5,6,7,8,9
    expect_status 64
    run "$fusectl" bench a_5x37x96_g12 --rows 1,,2
    expect_status 64
}

@test "bench: a ramp, of clients or of the rate" {
    run "$fusectl" bench a_5x37x96_g12 --duration 0.2 --clients 5 --ramp 3
    expect_status 0
    expect_output '^CLIENTS +RATE +REQUESTS/S'
    [ "$(awk 'NR > 1 && $1 ~ /^[0-9]+$/ { print $1 }' <<<"$output" | xargs)" = "2 4 5" ]
    run "$fusectl" bench a_5x37x96_g12 --duration 0.2 --rate 1000 --ramp 2 --constant --json
    expect_status 0
    python3 -c 'import json,sys; s = json.loads(sys.argv[1])["steps"]
assert [x["rate"] for x in s] == [500, 1000] and s[1]["requests"] + s[1]["unsent"] == 200, s' "$output"
    run "$fusectl" bench a_5x37x96_g12 --ramp 0
    expect_status 64
}

@test "bench: what cannot be asked" {
    run "$fusectl" bench nonesuch --duration 0.1
    expect_status 1
    expect_output 'NOT_FOUND'
    run "$fusectl" bench a_5x37x96_g12 --inline --rows 5000
    expect_status 64
    expect_output '740000 bytes, and 32768 fit'
    run "$fusectl" bench a_5x37x96_g12 --device --duration 0.1
    expect_status 1
    expect_output 'UNSUPPORTED'
    run "$fusectl" bench a_5x37x96_g12 --device --verify
    expect_status 64
    run "$fusectl" bench a_5x37x96_g12 --rate 0
    expect_status 64
    FUSED_SOCKET=/nonexistent run "$fusectl" bench a_5x37x96_g12
    expect_status 69
}

@test "bench: an interrupt ends it early, with the figures so far" {
    "$fusectl" bench a_5x37x96_g12 --duration 60 >"$BATS_TEST_TMPDIR/out" 3>&- &
    sleep 0.7
    kill -INT $!
    wait $!
    grep -q '^served ' "$BATS_TEST_TMPDIR/out"
}

@test "bench: where a device has memory of its own, the host's is no bound" {
    cp -r "$BATS_FILE_TMPDIR/models" "$BATS_TEST_TMPDIR/models"
    local other=$BATS_TEST_TMPDIR/s i
    FUSED_FAKE_SCRIPT=memory_mib=4096 "$B/fused" --config config/fused.conf --socket "$other" --backend "$B/fake-backend.so" \
        --models "$BATS_TEST_TMPDIR/models" >/dev/null 2>&1 3>&- &
    for ((i = 0; i < 100; i++)); do
        ! "$fusectl" --socket "$other" ping >/dev/null 2>&1 || break
        sleep 0.1
    done
    run "$fusectl" --socket "$other" bench a_5x37x96_g12 --duration 0.2 --json
    kill -TERM $!
    expect_status 0
    expect_output '"bound":"link","bound_bytes_per_s":0.0,"bound_share":0.0'
    wait $!
}

@test "bench: a server that dies ends it at once" {
    cp -r "$BATS_FILE_TMPDIR/models" "$BATS_TEST_TMPDIR/models"
    local other=$BATS_TEST_TMPDIR/s pid i start
    for loop in "" "--rate 200"; do
        "$B/fused" --config config/fused.conf --socket "$other" --backend cpu --models "$BATS_TEST_TMPDIR/models" \
            >/dev/null 2>&1 3>&- &
        pid=$!
        for ((i = 0; i < 100; i++)); do
            ! "$fusectl" --socket "$other" ping >/dev/null 2>&1 || break
            sleep 0.1
        done
        { sleep 1.5 && kill -KILL $pid; } 3>&- &
        start=$SECONDS
        # shellcheck disable=SC2086
        run "$fusectl" --socket "$other" bench a_5x37x96_g12 --duration 30 --clients 2 $loop --json
        expect_status 69
        expect_output 'the server closed the connection'
        [ $((SECONDS - start)) -lt 10 ] || { echo "it took $((SECONDS - start)) s" && return 1; }
        # The warm-up lasts 1 s, so that about 0.5 s count.
        expect_output '"seconds":[01]\.[0-9]+,"requests":[1-9][0-9]*,.*"requests_per_s":[1-9]'
        wait $pid || true
    done
}

@test "top and metrics say why standard output cannot be written" {
    for c in "top --interval 0.1" metrics; do
        run bash -c '"$0" $1 >/dev/full' "$fusectl" "$c"
        expect_status 74
        [ "$output" = 'fusectl: cannot write to standard output: No space left on device' ] || { echo "$output" && return 1; }
        run bash -c '"$0" $1 >&-' "$fusectl" "$c"
        expect_status 74
        [ "$output" = 'fusectl: cannot write to standard output: Bad file descriptor' ] || { echo "$output" && return 1; }
        run bash -c 'set -o pipefail; { sleep 0.2; "$0" $1; } | true' "$fusectl" "$c"
        expect_status 74
        [ "$output" = 'fusectl: cannot write to standard output: Broken pipe' ] || { echo "$output" && return 1; }
    done
}

@test "top: one interval where there is no terminal" {
    "$fusectl" bench a_5x37x96_g12 --duration 1.5 >/dev/null 3>&- &
    run "$fusectl" top --interval 0.5
    expect_status 0
    expect_output '^fused [0-9.]+, ready, backend cpu, up '
    expect_output '^MODEL +REQUESTS/S'
    expect_output '^a_5x37x96_g12 +[1-9][0-9]*\.'
    wait $!
    run "$fusectl" top --interval 0.1 --json
    expect_status 0
    expect_output '^\{"seconds":0.1.*,"before":\{"status":\{.*"now":'
}

@test "metrics: Prometheus's text" {
    "$fusectl" bench a_5x37x96_g12 --duration 0.2 >/dev/null
    run "$fusectl" metrics
    expect_status 0
    expect_output '^fused_up 1$'
    expect_output '^fused_ready 1$'
    expect_output '^fused_model_requests_total\{model="a_5x37x96_g12"\} [1-9]'
    expect_output '^fused_model_run_seconds_bucket\{model="a_5x37x96_g12",le="\+Inf"\} [1-9]'
    # Each name has its type once, and buckets never fall.
    [ -z "$(grep '^# TYPE' <<<"$output" | sort | uniq -d)" ]
    awk '/^fused_model_run_seconds_bucket\{model="a_5/ { if ($2 < last) exit 1; last = $2 }' <<<"$output"
    # Buckets are the same whatever was measured; a device without memory of its own has none to report.
    for m in a_5x37x96_g12 a_bfloat16; do
        [ "$(grep -c "^fused_model_run_seconds_bucket{model=\"$m\"" <<<"$output")" = 25 ]
    done
    expect_output '^fused_model_queue_seconds_bucket\{model="a_bfloat16",le="0.001023"\} [0-9]+$'
    [[ $output != *fused_device_memory* ]]
    FUSED_SOCKET=/nonexistent run "$fusectl" metrics
    expect_status 69
}

@test "metrics --listen: scrapes on a socket of this host" {
    "$fusectl" metrics --listen "unix:$BATS_TEST_TMPDIR/m" 3>&- &
    local pid=$! i path
    for ((i = 0; i < 50; i++)); do [ ! -S "$BATS_TEST_TMPDIR/m" ] || break; sleep 0.1; done
    scrape() {
        python3 -c '
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(sys.argv[2].encode() + b"\r\nHost: x\r\n\r\n")
data = b""
while (part := s.recv(65536)):
    data += part
print(data.decode())' "$BATS_TEST_TMPDIR/m" "$1"
    }
    run scrape 'GET /metrics HTTP/1.1'
    expect_output '^HTTP/1.1 200 OK'
    expect_output '^fused_up 1$'
    for path in / /other /metrics2; do
        run scrape "GET $path HTTP/1.1"
        expect_output '^HTTP/1.1 404 '
    done
    kill $pid
    wait $pid
    [ ! -e "$BATS_TEST_TMPDIR/m" ]
    run "$fusectl" metrics --listen 0.0.0.0:9999
    expect_status 64
}
