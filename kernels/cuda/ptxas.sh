#!/bin/bash
# ptxas.sh SOURCE LOG: prints the compiler's own warnings, and what registers, shared and local memory a source's kernels take. (What
# shared memory is asked for at launch the compiler does not know: the products and window.cu take nearly all of it.)
# The wgmma products must neither spill nor be serialised: either costs more than a tenth of their speed.
set -u
source=$1 log=$2
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame|^$' "$log" >&2
serialised=$(grep -c 'wgmma.mma_async instructions are serialized' "$log")
awk -v source="$source" -v serialised="$serialised" '
    /bytes spill stores/ { kernels++; spill += $5 + $9 }
    /Used [0-9]+ registers/ {
        for (i = 2; i <= NF; i++) {
            if ($(i - 1) == "Used" && $i > most) most = $i
            if ($i ~ /^smem/ && $(i - 2) > shared) shared = $(i - 2)
        }
    }
    END {
        if (!kernels)
            exit 0
        printf "  PTXAS    %s: %d kernels, at most %d registers, %d bytes shared, %d bytes spilled\n", source, kernels, most, shared, spill
        if (source ~ /_product\.cu$/ && (spill || serialised)) {
            printf "%s: %d bytes spilled, %d kernels with serialised wgmma\n", source, spill, serialised >"/dev/stderr"
            exit 1
        }
    }' "$log"
