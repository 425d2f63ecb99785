#!/bin/bash
# coverage.sh: branch coverage of the decoders and the daemon, from the counters that a run of the suite left under $B/obj.
# The decoders read what strangers wrote: 100 % is their goal, and each branch short of it is listed. A branch counts as gcov
# counts it, so a condition of two parts has four.
set -u
decoders=(proto/codec.c proto/scan.c proto/json.c kernels/safetensors.c kernels/conf.c kernels/model.c client/npy.c)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# FILE: "lines% branches% taken total", and with a second argument the places that are short
measure() {
    gcov -b -c -o "$B/obj/$1.gcda" "$1" 2>/dev/null >"$scratch/out"
    awk -v f="File '$1'" '
        $0 == f { on = 1; next }
        /^File / { on = 0 }
        on && /^Lines executed:/ { split($0, a, /[:%]/); lines = a[2] }
        on && /^Taken at least once:/ { split($0, a, /[:% ]+/); n = $NF; taken = a[5] }
        END { printf "%s %s %s\n", lines == "" ? 0 : lines, taken == "" ? 0 : taken, n == "" ? 0 : n }' "$scratch/out"
    rm -f ./*.gcov
}

table() {
    printf '  %-28s %9s %12s %9s\n' "$1" 'lines %' 'branches %' 'branches'
    shift
    for f in "$@"; do
        read -r lines taken n < <(measure "$f")
        printf '  %-28s %9s %12s %9s\n' "$f" "$lines" "$taken" "$n"
    done
}

table decoders "${decoders[@]}"
table daemon daemon/*.c
for f in "${decoders[@]}"; do
    gcov -b -c -t -o "$B/obj/$f.gcda" "$f" 2>/dev/null | awk -v f="$f" '
        /^ *-: *0:Source:/ { source = $0; sub(/.*Source:/, "", source) }
        /^ *[-0-9#=*]+: *[0-9]+:/ { line = $0 }
        source == f && /^branch .*(never executed|taken 0)/ {
            split(line, a, ":"); n = a[2] + 0; if (n != last) print "  not taken: " f ":" n; last = n }'
done
