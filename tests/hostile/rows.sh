#!/bin/bash
# Every test that README.md's tables name, `FILE` FUNCTION, FUNCTION..., is there.
cd "$(dirname "$0")" || exit 1
bad=0 n=0
while read -r file functions; do
    path=$file
    [ -e "$path" ] || path=../$file
    [ -e "$path" ] || { echo "$file is not there" && bad=1 && continue; }
    n=$((n + 1))
    for f in $functions; do
        n=$((n + 1))
        grep -qE "^(static [a-z_ ]*\*?)?$f\(" "$path" || { echo "$file has no $f" && bad=1; }
    done
done < <(grep '^|' README.md | cut -d '|' -f 4 | grep -oE '`[a-z_/]+\.(c|sh)`[a-z_, ]*' | tr -d '`,' |
    awk '{ line = $1; for (i = 2; i <= NF; i++) if ($i ~ /_/) line = line " " $i; print line }')
[ $n -gt 100 ] || { echo "only $n names were found" && bad=1; }
[ $bad = 0 ] && echo "$n files and tests are there"
exit $bad
