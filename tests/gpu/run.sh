#!/bin/bash
# run.sh check|sanitizer|bench|demo: the GPU tests, benchmarks and the demo, in the tree (B=build) or in an unpacked bundle (B=.).
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

case ${1:-check} in
check)
    for t in test_gpu_golden test_gpu_random test_gpu; do one 240 $t "$B/tests/gpu/$t"; done
    one 240 torch_check python3 tests/gpu/torch_check.py "$B/tests/gpu/eval_gpu"
    summary
    ;;
sanitizer)
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    # Small tests: the tools slow kernels down up to a thousand times, and racecheck does not end on the golden cases.
    for tool in memcheck initcheck synccheck racecheck; do
        [ $tool = racecheck ] ||
            one 100 "$tool: golden" "$sanitizer" --tool $tool --error-exitcode 9 "$B/tests/gpu/test_gpu_golden"
        for t in test_guard test_compact_a test_compact_b; do
            TESTS=$t one 100 "$tool: $t" "$sanitizer" --tool $tool --error-exitcode 9 "$B/tests/gpu/test_gpu"
        done
    done
    summary
    ;;
bench)
    torch=$(mktemp) && trap 'rm -f "$torch"' EXIT
    timeout 300 python3 tests/bench/torch_gpu.py ${COMPILE:+--compile} >"$torch" 2>/dev/null </dev/null
    cat "$torch"
    timeout 300 "$B/tests/bench/bench_gpu" "$torch" "$B/bench_gpu.json" </dev/null
    ;;
demo)
    timeout 300 tests/demo.sh </dev/null
    ;;
*)
    echo "usage: run.sh check|sanitizer|bench|demo" >&2
    exit 64
    ;;
esac
