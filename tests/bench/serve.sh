#!/bin/bash
# serve.sh: the serving table of this machine: a daemon (backend auto) on a small model and the shipped gemm-groupnorm-min-bias,
# fusectl bench in several mixes, answers verified but for the largest and fastest, where clients would do little else; and PyTorch in
# process doing the same work beside it where $PYTHON has it (one request after the other, on the same device; as many threads
# as the daemon's). Then the cost of a call beside a bare ping-pong. A table, and JSON under $B/bench.
# SECONDS_EACH (default 3) for each line; BENCH_SMALL=1 leaves the large model out.
set -eu
B=${B:-build}
each=${SECONDS_EACH:-3}
dir=$B/bench
python=${PYTHON:-python3}
threads=$(nproc)
mkdir -p "$dir/models"
tmp=$(mktemp -d)
daemon=

finish() {
    status=$?
    trap - EXIT
    if [ -n "$daemon" ]; then
        kill "$daemon" 2>/dev/null || true
        wait "$daemon" || { status=1 && echo "serve.sh: the daemon ended with $?" >&2; }
    fi
    rm -rf "$tmp"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

# Starts a daemon with that prefix (taskset) on the models of a directory.
start() { # DIRECTORY [COMMAND...]
    "${@:2}" "$B/fused" --config config/fused.conf --socket "$tmp/s" --models "$1" >"$dir/fused.log" 2>&1 &
    daemon=$!
    export FUSED_SOCKET=$tmp/s
    for ((i = 0; i < 600; i++)); do
        ! "$B/fusectl" ping >/dev/null 2>&1 || return 0
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.1
    done
    echo "serve.sh: the daemon did not start; its log: $dir/fused.log" >&2
    exit 1
}

stop() {
    kill "$daemon"
    wait "$daemon"
    daemon=
}

make_weights() { # MODEL.conf
    local weights=${1%.conf}.safetensors
    if [ ! -s "$weights" ] || [ "$1" -nt "$weights" ]; then
        "$B/fusectl" weights "$1" --seed 1 -o "$weights" >/dev/null
    fi
}

cat >"$tmp/small.conf" <<'END'
name = "small";
weights = "small.safetensors";
input = { shape = [ 128 ]; };
stages = (
  { op = "linear";     weight = "gemm.weight"; bias = "gemm.bias"; out = 256; },
  { op = "group_norm"; groups = 16; weight = "norm.weight"; bias = "norm.bias"; },
  { op = "amin";       dim = 1; keepdim = true; },
  { op = "add";        tensor = "bias"; shape = [ 1, 256, 1, 1 ]; }
);
END
cmp -s "$tmp/small.conf" "$dir/models/small.conf" || cp "$tmp/small.conf" "$dir/models/small.conf"
large=gemm-groupnorm-min-bias conv=conv3d-groupnorm-min-clamp-dropout
for m in $large $conv; do
    if [ "${BENCH_SMALL:-0}" = 0 ]; then
        cmp -s "config/models.d/$m.conf" "$dir/models/$m.conf" || cp "config/models.d/$m.conf" "$dir/models/"
    else
        rm -f "$dir/models/$m.conf"
    fi
done
for conf in "$dir"/models/*.conf; do make_weights "$conf"; done

# One line of the table, from the JSON of a run.
row() { # LABEL FILE
    python3 - "$1" "$2" <<'END'
import json
import sys
r = json.loads(open(sys.argv[2]).read())
t = r["latency_us"]
def us(v):
    return f"{v:.0f} us" if v < 1e4 else f"{v / 1e3:.1f} ms"
extra = f'{r["batch_rows"]:8.1f} {us(r["queue_us"]["p50"]):>9} {us(r["run_us"]["p50"]):>9}' if "batch_rows" in r else ""
tail = [us(t[k]) if k in t else "" for k in ("p50", "p90", "p99", "p99.9", "max")]
wrong = f'  {r["wrong"]} WRONG' if r.get("wrong") else ""
failed = f'  {r["failed"]} FAILED' if r.get("failed") else ""
print(f'{sys.argv[1]:44} {r["requests_per_s"]:10.1f} {r["rows_per_s"]:11.1f} ' + " ".join(f"{v:>9}" for v in tail) + " " + extra
      + wrong + failed)
END
}

results=() verify=--verify
bench() { # LABEL MODEL OPTIONS...
    local out=$dir/serve.${#results[@]}.json
    "$B/fusectl" bench "$2" --json $verify --duration "$each" "${@:3}" >"$out" || {
        [ -s "$out" ] || exit 1
    }
    results+=("$out")
    row "$1" "$out"
}

# The same beside a client that makes buffers of 440 MiB, so many or 0: until the end.
beside() { # COUNT LABEL MODEL OPTIONS...
    local maker
    "$B/tests/bench/serve_maker" "$FUSED_SOCKET" 440 "$1" >"$tmp/maker" 2>&1 &
    maker=$!
    bench "${@:2}"
    kill $maker 2>/dev/null || true
    wait $maker 2>/dev/null || true
    echo "    a buffer took, ms: $(tr '\n' ' ' <"$tmp/maker")"
}

torch() { # LABEL MODEL ROWS
    local out=$dir/serve.${#results[@]}.json
    if "$python" tests/bench/serve_torch.py "$threads" "$each" "$device" "$2" "$3" >"$out" 2>/dev/null; then
        results+=("$out")
        row "$1" "$out"
    fi
}

start "$dir/models"
device=$("$B/fusectl" status --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["backend"])')
[ "$device" = cuda ] || device=cpu
"$B/fusectl" status | sed -n 's/^\(backend\|device\) */\1: /p' | sed '/^device: *$/d'
"$python" -c 'import torch; print("yardstick: PyTorch", torch.__version__, "in process")' 2>/dev/null ||
    echo "yardstick: none, for $python has no PyTorch"
printf '%-44s %10s %11s %9s %9s %9s %9s %9s %8s %9s %9s\n' "" REQUESTS/S ROWS/S P50 P90 P99 P99.9 MAX BATCH WAITING RUNNING
bench "small, 1 row, inline" small --inline
bench "small, 1 row" small
torch "  PyTorch" small 1
bench "small, 1 row, 8 clients x 4" small --clients 8 --in-flight 4
bench "small, 64 rows" small --rows 64
torch "  PyTorch" small 64
bench "small, 1 row, 4 clients, poisson 2000/s" small --clients 4 --rate 2000
if [ "${BENCH_SMALL:-0}" = 0 ]; then
    bench "A, 1 row" $large
    torch "  PyTorch" A 1
    bench "A, 64 rows" $large --rows 64
    torch "  PyTorch" A 64
    bench "A, 1 row, 8 clients x 4" $large --clients 8 --in-flight 4
    bench "B, 16 rows" $conv --rows 16
    if [ "$device" = cuda ]; then
        verify=
        bench "A, 1 row, 64 clients x 4" $large --clients 64 --in-flight 4
        bench "A, 1 row, after half a second" $large --rate 2 --constant
        bench "A, 1024 rows" $large --rows 1024
        torch "  PyTorch" A 1024
        bench "A, 1024 rows, device buffers" $large --rows 1024 --device
        bench "A, 1024 rows, 8 clients" $large --rows 1024 --clients 8
        bench "B, 128 rows" $conv --rows 128
        bench "A, 1 row, 3000/s" $large --rate 3000
        beside 1 "  beside one buffer of 440 MiB" $large --rate 3000
        beside 0 "  beside such buffers in a loop" $large --rate 3000
        verify=--verify
    fi
fi
stop

# The cost of a call: client and daemon on a CPU each, and on one.
mkdir -p "$tmp/tiny"
cp "$dir/models/small.conf" "$dir/models/small.safetensors" "$tmp/tiny/"
mapfile -t cpus < <(taskset -cp $$ | sed 's/.*: //' | tr ',' '\n' | sed 's/-/ /' | while read -r a b; do seq "$a" "${b:-$a}"; done)
for there in ${cpus[1]:-} "${cpus[0]}"; do
    start "$tmp/tiny" taskset -c "$there"
    "$B/tests/bench/serve_ping" "$FUSED_SOCKET" small 128 "$daemon" "${cpus[0]}" "$there" "$dir/ping.$there.json"
    results+=("$dir/ping.$there.json")
    stop
done

# All results as one list.
{
    echo '['
    for ((i = 0; i < ${#results[@]}; i++)); do
        [ $i = 0 ] || echo ,
        cat "${results[i]}"
    done
    echo ']'
} >"$dir/serve.json"
rm -f "${results[@]}"
echo "JSON: $dir/serve.json"
