#!/bin/bash
# run.sh LIST...: runs test programs and scripts one after the other, and ends with one line, "N passed, N failed, N skipped".
# Cases are counted from TAP (cmocka and bats print it); a program without TAP counts as one case by its exit status: 0 passed,
# 77 skipped. A program that dies or exits non-zero without naming a failed case is a failed case. Each has TEST_LIMIT_S seconds.
set -u
limit=${TEST_LIMIT_S:-180}
B=${B:-build}
export B CMOCKA_MESSAGE_OUTPUT=TAP
logs=$B/tests/logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0
failures=()
skips=()

for t in "$@"; do
    name=${t#"$B"/tests/}
    name=${name#tests/}
    log=$logs/${name//\//.}.log
    start=$(date +%s%N)
    if [[ $t == *.bats ]]; then
        timeout -k 5 "$limit" bats --tap "$t" >"$log" 2>&1 </dev/null
    else
        timeout -k 5 "$limit" "$t" >"$log" 2>&1 </dev/null
    fi
    rc=$?
    ms=$((($(date +%s%N) - start) / 1000000))
    # A case that was skipped is "ok" in TAP, and "not ok" where cmocka writes it.
    skip=$(grep -ciE '^(not )?ok [0-9]+.*# skip' "$log")
    ok=$(grep -E '^ok [0-9]+' "$log" | grep -viEc '# skip')
    bad=$(grep -E '^not ok [0-9]+' "$log" | grep -viEc '# skip')
    if [ $((ok + skip + bad)) = 0 ]; then # no TAP: the program is one case
        case $rc in
        0) ok=1 ;;
        77) skip=1 ;;
        *) bad=1 ;;
        esac
    elif [ $rc != 0 ] && [ $rc != 77 ] && [ "$bad" = 0 ]; then
        bad=1
    fi
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
    [ "$bad" = 0 ] || failures+=("$name (status $rc): $log")
    [ "$skip" = 0 ] || skips+=("$name: $(grep -iE '# skip|^skip' "$log" | head -n 1)")
    printf '  %-40s %4d ok %3d failed %3d skipped %7d ms\n' "$name" "$ok" "$bad" "$skip" "$ms"
    [ "$bad" = 0 ] || { echo "---- the end of $log"; tail -n 30 "$log"; echo "----"; }
done

for s in "${skips[@]+"${skips[@]}"}"; do echo "skipped: $s"; done
for f in "${failures[@]+"${failures[@]}"}"; do echo "failed: $f"; done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
