#!/bin/bash
# syscalls.sh: the numbers of the system calls that fused.service lets through on this architecture, one a line, for filter.c where
# no service manager is. Needs systemd-analyze and a compiler; 77 without.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v systemd-analyze >/dev/null && command -v "${CC:-cc}" >/dev/null || exit 77

expand() { # @SET or NAME
    local line
    [[ $1 == @* ]] || { echo "$1" && return; }
    systemd-analyze syscall-filter --no-pager "$1" | tail -n +2 | while read -r line; do
        [[ -z $line || $line == \#* ]] || expand "$line"
    done
}

allowed=$(mktemp) && trap 'rm -f "$allowed"' EXIT
# In the order of the unit: a set allows, one behind ~ forbids.
grep -oP '^SystemCallFilter=\K.*' deploy/systemd/fused.service | while read -r -a sets; do
    for s in "${sets[@]#\~}"; do expand "$s"; done | sort -u >"$allowed.set"
    if [[ ${sets[0]} == ~* ]]; then
        comm -23 "$allowed" "$allowed.set" >"$allowed.next"
    else
        sort -u "$allowed" "$allowed.set" >"$allowed.next"
    fi
    mv "$allowed.next" "$allowed"
    rm "$allowed.set"
done
echo '#include <asm/unistd.h>' | "${CC:-cc}" -dM -E - | awk -v names="$allowed" '
    BEGIN { while ((getline name < names) > 0) wanted["__NR_" name] = 1 }
    $2 in wanted && $3 ~ /^[0-9]+$/ { print $3 }' | sort -n
