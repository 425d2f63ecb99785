#!/bin/bash
# fuzz.sh SECONDS TARGET...: runs each libFuzzer target for its share of the time, from tests/fuzz/corpus/NOUN, and prints how
# many executions it made. A find stops at once, keeps its input as $B/fuzz/crash-*, and fails. FUZZ_RUNS=N runs each N times
# instead of for a time, FUZZ_LEN=N bounds the inputs' bytes (4096).
#
# Where libconfig reads, leaks are not looked for here: it forgets a string at each syntax error, and libFuzzer would walk the
# whole heap after every such input, which takes forty times as long. The suite replays the corpora under `make asan`.
set -u
seconds=$1
shift
share=$((seconds / $#))
[ "$share" -ge 1 ] || share=1
failed=0
for t in "$@"; do
    noun=${t#fuzz_}
    found=$B/fuzz/found/$noun
    log=$B/fuzz/$t.log
    mkdir -p "$found"
    limit=(-max_total_time="$share")
    [ -z "${FUZZ_RUNS:-}" ] || limit=(-runs="$FUZZ_RUNS")
    case $noun in conf | config | model) limit+=(-detect_leaks=0) ;; esac
    "$B/fuzz/$t" "${limit[@]}" -max_len="${FUZZ_LEN:-4096}" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
        -artifact_prefix="$B/fuzz/crash-$noun-" "$found" "tests/fuzz/corpus/$noun" >"$log" 2>&1 </dev/null
    rc=$?
    n=$(sed -n 's/^stat::number_of_executed_units: //p' "$log")
    if [ $rc = 0 ]; then
        printf '  %-20s %10s executions, no find\n' "$t" "${n:-?}"
    else
        printf '  %-20s FOUND something (status %d), see %s\n' "$t" $rc "$log"
        tail -n 40 "$log"
        failed=1
    fi
done
exit $failed
