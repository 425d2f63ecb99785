#!/bin/bash
# ptxas.sh SOURCE LOG: prints the compiler's own warnings, and what registers and local memory a source's kernels take.
# The wgmma products must neither spill nor be serialised: either costs more than a tenth of their speed.
set -u
source=$1 log=$2
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame|^$' "$log" >&2
serialised=$(grep -c 'wgmma.mma_async instructions are serialized' "$log")
awk -v source="$source" -v serialised="$serialised" '
    /bytes spill stores/ { kernels++; spill += $5 + $9 }
    /Used [0-9]+ registers/ { for (i = 1; i < NF; i++) if ($i == "Used" && $(i + 1) > most) most = $(i + 1) }
    END {
        if (!kernels)
            exit 0
        printf "  PTXAS    %s: %d kernels, at most %d registers, %d bytes spilled\n", source, kernels, most, spill
        if (source ~ /_product\.cu$/ && (spill || serialised)) {
            printf "%s: %d bytes spilled, %d kernels with serialised wgmma\n", source, spill, serialised >"/dev/stderr"
            exit 1
        }
    }' "$log"
