#!/bin/bash
# tidy.sh FLAG...: clang-tidy over the sources that it reads without CUDA, two at a time; prints findings alone.
set -u
tidy=$(command -v clang-tidy-14 || command -v clang-tidy) || { echo "tidy: no clang-tidy here: not checked"; exit 0; }
flags=()
for f in "$@"; do
    case $f in
    -fstack-clash-protection | -fsanitize* | -fno-sanitize*) ;; # gcc's, and no business of the analyser
    *) flags+=("$f") ;;
    esac
done
one() {
    local tidy=$1 out
    shift
    local files=()
    while [ "$1" != -- ]; do
        files+=("$1")
        shift
    done
    out=$("$tidy" --quiet "${files[@]}" "$@" 2>/dev/null) && return 0
    echo "$out" | grep -vE '^[0-9]+ warnings? '
    return 1
}
export -f one
git ls-files 'proto/*.c' 'kernels/*.c' 'daemon/*.c' 'client/*.c' ':!kernels/cuda' |
    FLAGS=$(printf '%q ' "${flags[@]}") TIDY=$tidy xargs -P 2 -n 1 bash -c 'eval "flags=($FLAGS)"; one "$TIDY" "$@" -- "${flags[@]}" -Iclient' _
