#!/bin/bash
# demo.sh: the main job, from nothing: random weights for the shipped models, a private daemon, real-size requests through the
# client library, a comparison with the plain reference, a table. Ends with 0 only when every model was right.
# Weights are kept in $B/demo and made again when the model file or fusectl is newer.
set -eu
B=${B:-build}
dir=$B/demo
models=(gemm-groupnorm-min-bias conv3d-groupnorm-min-clamp-dropout conv3d-groupnorm-min-clamp-full)
mkdir -p "$dir"
tmp=$(mktemp -d)
daemon=

finish() {
    status=$?
    trap - EXIT
    if [ -n "$daemon" ]; then
        kill "$daemon" 2>/dev/null || true
        wait "$daemon" || { status=1 && echo "demo: the daemon ended with $?" >&2; }
    fi
    [ $status = 0 ] || [ ! -s "$dir/fused.log" ] || { echo "---- $dir/fused.log" && tail -n 20 "$dir/fused.log"; } >&2
    rm -rf "$tmp"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

for m in "${models[@]}"; do
    conf=config/models.d/$m.conf
    cmp -s "$conf" "$dir/$m.conf" || cp "$conf" "$dir/$m.conf"
    weights=$dir/$m.safetensors
    if [ ! -s "$weights" ] || [ "$dir/$m.conf" -nt "$weights" ] || [ "$B/fusectl" -nt "$weights" ]; then
        echo "making weights of $m"
        "$B/fusectl" weights "$dir/$m.conf" --seed 1 -o "$weights" >/dev/null
    fi
done

"$B/fused" --config config/fused.conf --socket "$tmp/fused.sock" --models "$dir" >"$dir/fused.log" 2>&1 &
daemon=$!
export FUSED_SOCKET=$tmp/fused.sock
echo "starting a daemon (its log: $dir/fused.log)"
for ((i = 0; ; i++)); do
    ! "$B/fusectl" ping >/dev/null 2>&1 || break
    kill -0 "$daemon" 2>/dev/null || { daemon='' && echo "demo: the daemon did not start" >&2 && exit 1; }
    [ $i -lt 600 ] || { echo "demo: the daemon does not answer" >&2 && exit 1; }
    sleep 0.1
done
"$B/tests/demo" "$dir"
