#!/bin/bash
# header.sh: fused.h compiles alone as C99 and as C++, without a warning, and the shared library exports what it declares and
# nothing else. Says nothing when all is well.
set -u
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cat >"$dir/use.c" <<'END'
#include "client/fused.h"

static struct fused_infer call = FUSED_INFER_INIT;

int main(void)
{
    struct fused_result result;
    int64_t shape[] = {1, 2};

    call.input = fused_tensor_at(0, FUSED_FLOAT32, 2, shape);
    return fused_run(0, &call, &result) == FUSED_OK;
}
END
cp "$dir/use.c" "$dir/use.cpp"
strict="-I. -Wall -Wextra -Wshadow -Wconversion -pedantic -pedantic-errors -Werror -fsyntax-only"
bad=0
${CC:-cc} -std=c99 -Wstrict-prototypes $strict "$dir/use.c" || bad=1
${CC:-cc} -std=c17 -Wstrict-prototypes $strict "$dir/use.c" || bad=1
for std in c++98 c++17; do
    flags=$strict
    [ $std != c++98 ] || flags="$flags -Wno-long-long"
    ${CXX:-c++} -std=$std $flags "$dir/use.cpp" || bad=1
done
lib=${B:-build}/libfused.so.1
if [ -e "$lib" ]; then
    nm -D --defined-only "$lib" | awk '$2 == "T" { sub(/@.*/, "", $3); print $3 }' | sort >"$dir/exported"
    grep -oE '\bfused_[a-z_]+\(' client/fused.h | tr -d '(' | sort -u >"$dir/named"
    # Names in comments are declared too, so both lists must be the same.
    diff "$dir/named" "$dir/exported" >&2 || bad=1
fi
exit $bad
