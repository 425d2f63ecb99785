#!/bin/bash
# SECURITY.md against what it speaks of: each verb with its right, each limit with its default, the rating of the unit.
cd "$(dirname "$0")/../.." || exit 1
n=0 bad=0

same() { # TITLE FROM-PAGE FROM-SOURCE
    n=$((n + 1))
    if [ -n "$3" ] && [ "$2" = "$3" ]; then
        echo "ok $n - $1"
    else
        echo "not ok $n - $1"
        diff <(echo "$2") <(echo "$3") | sed 's/^/#   /'
        bad=1
    fi
}

same "verbs and rights" \
    "$(sed -nE 's/^\| `([a-z.]+)` \| (any|admin) .*/\1 \2/p' SECURITY.md)" \
    "$(sed -nE 's/^ *X\([A-Z_]+, "([a-z.]+)", RIGHT_(ANY|ADMIN)\).*/\1 \L\2/p' proto/proto.h)"
same "limits of the configuration" \
    "$(sed -nE 's/^\| `([a-z_]+)` \| ([0-9]+) \|.*/\1 \2/p' SECURITY.md)" \
    "$(sed -nE 's/^#((uid|total|spare|device)_[a-z]+(_bytes)?|[a-z]+_timeout_ms) = ([0-9]+)L?;$/\1 \4/p' config/fused.conf)"
define() { # NAME FILE
    sed -nE "s/^#define $1 +\(?([0-9]+)u?\)?( .*)?$/\1/p" "$2"
}
same "limits of messages" \
    "$(sed -nE 's/^\| message \| ([0-9]+) bytes, ([0-9]+) levels deep, ([0-9]+) elements, ([0-9]+) descriptor.*/\1 \2 \3 \4/p' SECURITY.md)" \
    "$(for d in DATAGRAM DEPTH ELEMENTS FDS; do define PROTO_${d}_MAX proto/proto.h; done | xargs)"
if command -v systemd-analyze >/dev/null; then
    same "rating of the unit" \
        "$(sed -nE 's/.*rates it ([0-9.]+) .*/\1/p' SECURITY.md)" \
        "$(systemd-analyze security --offline=yes --no-pager deploy/systemd/fused.service | sed -nE 's/.*level for [^:]*: ([0-9.]+) .*/\1/p')"
fi
echo "1..$n"
exit $bad
