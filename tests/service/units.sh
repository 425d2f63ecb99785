#!/bin/bash
# What is installed, without running it: systemd finds nothing wrong in the units and rates their sandbox at most 1.0.
cd "$(dirname "$0")/../.." || exit 1
stage=${B:-build}/stage
units=$stage/usr/lib/systemd/system
command -v systemd-analyze >/dev/null || { echo "skip: no systemd-analyze here" && exit 77; }
[ -d "$units" ] || { echo "nothing is installed in $stage" && exit 1; }
n=0 bad=0

case_of() { # TITLE OUTPUT: right when there is no output
    n=$((n + 1))
    if [ -z "$2" ]; then
        echo "ok $n - $1"
    else
        echo "not ok $n - $1"
        sed 's/^/#   /' <<<"$2"
        bad=1
    fi
}

for u in fused.service fused@.service; do
    out=$(systemd-analyze security --offline=yes --threshold=10 --no-pager "$units/$u" 2>&1) && out=
    case_of "$u: exposure at most 1.0" "$out"
done
# In a root of its own with the units that ours name, so that only ours are judged.
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
cp -a "$stage/." "$root/"
mkdir -p "$root/usr/lib/systemd/system" "$root/usr/bin"
cp -a /lib/systemd/system/*.target "$root/usr/lib/systemd/system/"
ln -s usr/lib "$root/lib"
ln -s usr/bin "$root/bin"
cp /bin/kill "$root/usr/bin/" 2>/dev/null
for u in fused.service fused.socket fused@x.service fused@x.socket; do
    out=$(systemd-analyze verify --man=no --root="$root" "$u" 2>&1) || out=${out:-failed}
    case_of "$u: verify has nothing to say" "$out"
done
out=$(grep -nE '^[A-Z][A-Za-z]+=' "$units/fused.service" | awk -F: '
    # Comments precede what they explain; lines of one paragraph share one.
    { print $1 }' | while read -r line; do
    awk -v l="$line" 'NR < l && /^#/ { c = NR } NR < l && /^$/ { b = NR } NR == l { if (c < b) print FILENAME ":" l ": " $0 }' "$units/fused.service"
done | grep -vE ': (Description|Documentation|WantedBy|Also|User|Group)=')
case_of "every line of the sandbox is explained" "$out"
out=$(systemd-sysusers --root="$root" --dry-run "$root/usr/lib/sysusers.d/fused.conf" 2>&1 >/dev/null) && out=
case_of "sysusers.d is accepted" "$out"
echo "1..$n"
exit $bad
