#!/bin/bash
# run.sh check|sanitizer|bench|serve|demo: the GPU tests, benchmarks and the demo, in the tree (B=build) or in an unpacked bundle (B=.).
# CUDA's own libraries are taken from where the machine has them; nothing is installed.
set -u
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
[ -d "$B" ] || { echo "run.sh: there is no folder $B" >&2; exit 1; }

# cuBLASLt and cuDNN: those of Python packages, which fit one another, else the toolkit's. The bundle's own libraries last.
library_path() {
    local p
    p=$(python3 -c '
import glob, sysconfig
print(":".join(glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib")))' 2>/dev/null </dev/null)
    echo "${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}${p:+$p:}/usr/local/cuda/lib64:$PWD/$B/lib"
}
LD_LIBRARY_PATH=$(library_path)
export LD_LIBRARY_PATH FUSED_NEED_GPU=1

passed=0 failed=0 skipped=0
one() { # SECONDS NAME COMMAND...
    local seconds=$1 name=$2 began=$SECONDS r
    shift 2
    timeout -k 5 "$seconds" "$@" </dev/null
    r=$?
    case $r in
    0) passed=$((passed + 1)); r=passed ;;
    77) skipped=$((skipped + 1)); r=skipped ;;
    *) failed=$((failed + 1)); r="FAILED ($r)" ;;
    esac
    echo "$r: $name, $((SECONDS - began)) s"
}
summary() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
}

# ---- several at a time, each with a log of its own; in the order of their starts when all have ended ----

logs='' names=()
beside() { # SECONDS NAME COMMAND...
    local log=$logs/${#names[@]}
    names+=("$2")
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-8}" ]; do wait -n; done
    (
        began=$SECONDS
        timeout -k 5 "$1" "${@:3}" </dev/null >"$log" 2>&1
        echo "$? $((SECONDS - began))" >"$log.rc"
    ) &
}
all_ended() {
    local i r s
    wait
    for i in "${!names[@]}"; do
        read -r r s <"$logs/$i.rc"
        case $r in
        0) passed=$((passed + 1)) ;;
        77) skipped=$((skipped + 1)) ;;
        *) failed=$((failed + 1)) && tail -n 25 "$logs/$i" ;;
        esac
        echo "status $r: ${names[i]}, $s s: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$i" | sed 's/^=* //' | tail -n 1)"
    done
}

case ${1:-check} in
check)
    for t in test_gpu_golden test_gpu_random test_gpu_small test_product test_conv test_shifted test_constant test_gpu_batch test_gpu_results \
        test_gpu_backend; do
        one 240 $t "$B/tests/gpu/$t"
    done
    one 240 serve tests/gpu/serve.sh
    one 240 torch_check python3 tests/gpu/torch_check.py "$B/tests/gpu/eval_gpu"
    summary
    ;;
sanitizer)
    # The tools slow kernels down up to a thousand times: small cases, for racecheck the smallest alone.
    logs=$(mktemp -d) && trap 'rm -rf "$logs"' EXIT
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    for tool in racecheck memcheck initcheck synccheck; do
        run=("$sanitizer" --tool "$tool" --error-exitcode 9)
        for t in narrow wide scaled kinds library conv conv_implicit conv_shifted conv_library norm points adds adds_fused constant; do
            beside "${LIMIT_S:-120}" "$tool: small_$t" env TESTS=small_$t "${run[@]}" "$B/tests/gpu/test_gpu_small"
        done
        beside "${LIMIT_S:-120}" "$tool: conv bound" env TESTS=test_bound "${run[@]}" "$B/tests/gpu/test_conv"
        for t in places bound fill; do
            beside "${LIMIT_S:-120}" "$tool: constant $t" env TESTS=small_$t "${run[@]}" "$B/tests/gpu/test_constant"
        done
        [ $tool != racecheck ] || continue
        beside "${LIMIT_S:-120}" "$tool: golden" "${run[@]}" "$B/tests/gpu/test_gpu_golden"
        beside "${LIMIT_S:-120}" "$tool: random" env CHAINS=12 "${run[@]}" "$B/tests/gpu/test_gpu_random"
        for t in guard compact_a compact_b overflow; do
            beside "${LIMIT_S:-120}" "$tool: test_$t" env TESTS=test_$t "${run[@]}" "$B/tests/gpu/test_gpu_results"
        done
        beside "${LIMIT_S:-120}" "$tool: test_parts" env TESTS=test_parts "${run[@]}" "$B/tests/gpu/test_gpu_batch"
    done
    all_ended
    summary
    ;;
bench)
    torch=$(mktemp) && trap 'rm -f "$torch"' EXIT
    timeout 300 python3 tests/bench/torch_gpu.py ${COMPILE:+--compile} >"$torch" 2>/dev/null </dev/null
    cat "$torch"
    timeout 300 "$B/tests/bench/bench_gpu" "$torch" "$B/bench_gpu.json" </dev/null
    timeout 120 "$B/tests/bench/bench_product" </dev/null
    ;;
serve)
    timeout 300 tests/bench/serve.sh </dev/null
    ;;
demo)
    timeout 300 tests/demo.sh </dev/null
    ;;
*)
    echo "usage: run.sh check|sanitizer|bench|serve|demo" >&2
    exit 64
    ;;
esac
