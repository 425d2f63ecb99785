#!/bin/bash
# lint.sh: what a compiler does not see. Includes follow the arrows, each library has one owner, files and functions stay short,
# the format is the formatter's. Every exception stands here, with its limit.
set -u
cd "$(dirname "$0")/.." || exit 1
bad=0
say() { echo "lint: $*"; bad=1; }

# Arrows: client -> proto, daemon -> proto, daemon -> kernels. fusectl's file commands read the same files as the daemon does.
arrows() { # FOLDER ALLOWED-REGEX [FILE-REGEX-EXEMPT ALLOWED]
    grep -rnE '^#include "' "$1" --include='*.[ch]' --include='*.cu' --include='*.cuh' |
        grep -vE "\"($2)" |
        sed 's/^/lint: include against the arrows: /'
}
out=$(
    arrows proto 'proto/|[a-z_]+\.h"'
    arrows kernels 'kernels/|[a-z0-9_]+\.(h|cuh)"'
    arrows daemon 'proto/|kernels/[a-z]+\.h"|daemon/|[a-z_]+\.h"'
    arrows client 'proto/|client/|[a-z_]+\.h"' | grep -vE 'client/(offline|tensorfile|npy)\.[ch]:[0-9]+:#include "kernels/(model|pipeline|safetensors|conf|tensor|report)\.h"'
)
[ -z "$out" ] || { echo "$out"; bad=1; }

# One owner for each library.
owner() { # HEADER-REGEX FILE-REGEX
    out=$(git grep -nE "^#include <($1)" -- '*.[ch]' '*.cu' '*.cuh' | grep -vE "^($2):" | grep -v '^tests/')
    [ -z "$out" ] || say "library outside its owner: $out"
}
owner 'msgpack' 'proto/codec\.c'
owner 'libconfig' 'kernels/conf\.c'
owner 'jansson' 'kernels/safetensors\.c|client/(fusectl\.h|[a-z_]+\.c)'
owner 'oneapi|dnnl' 'kernels/cpu/(linear|conv3d|onednn)\.[ch]'
owner 'cublas' 'kernels/cuda/(gemm|cuda)\.cuh?'
owner 'cudnn' 'kernels/cuda/(conv|cuda)\.cuh?'
owner 'systemd' 'daemon/(service|log)\.c'

# Length of files.
while read -r n f; do
    [ "$f" != total ] || continue
    limit=700
    [ "$n" -le "$limit" ] || say "$f has $n lines; the limit is $limit"
done < <(git ls-files '*.c' '*.h' '*.cu' '*.cuh' | grep -v '^tests/' | xargs -r wc -l)

# Length of functions: from a line that starts a definition to its closing brace in column 0.
out=$(git ls-files '*.c' '*.cu' | grep -v '^tests/' | xargs -r awk '
    FNR == 1 { open = 0 }
    /^\{/ { open = FNR }
    /^\}/ { if (open && FNR - open > 71) printf "lint: %s:%d: function of %d lines; the limit is 70\n", FILENAME, open, FNR - open - 1; open = 0 }')
[ -z "$out" ] || { echo "$out"; bad=1; }

git grep -nE '[[:space:]]$' -- '*.c' '*.h' '*.cu' '*.cuh' '*.mk' Makefile '*.sh' '*.md' '*.conf' && say "trailing space"
git grep -nE '\b(strcpy|strcat|sprintf|vsprintf|gets|strtok|alloca|atoi|atol)\(' -- '*.c' '*.h' '*.cu' && say "banned function"

format=$(command -v clang-format-14 || command -v clang-format)
if [ -n "$format" ]; then
    git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs -r "$format" --dry-run -Werror 2>"${TMPDIR:-/tmp}/fused-lint.$$" || {
        grep -E 'error:' "${TMPDIR:-/tmp}/fused-lint.$$" | cut -d: -f1 | sort | uniq -c | sed 's/^/lint: not formatted: /'
        bad=1
    }
    rm -f "${TMPDIR:-/tmp}/fused-lint.$$"
else
    echo "lint: no clang-format here: format not checked"
fi
exit $bad
