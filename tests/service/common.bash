# What the tests of the service share. A test is a bash script that sources this file first: outside, that boots a private
# systemd as PID 1 (tests/with-systemd) and runs the script again inside, with what `make install` installs in place. It
# prints TAP. Where no systemd can be booted the test is skipped, and says so.

cd "$(dirname "$0")/../.." || exit 1
B=$(realpath "${B:-build}")
export B
model=a_4x64x64_g1 # the model that is served, and the numbers in one row of it
features=64
socket=/run/fused/fused.sock
dropins=/run/systemd/system/fused.service.d
load=$B/tests/service/load

skip() { # REASON
    echo "skip: $*"
    exit 77
}

if [ -z "${FUSED_INSIDE:-}" ]; then
    [ "$(id -u)" = 0 ] || skip "needs root to boot a systemd of its own"
    [ -x /lib/systemd/systemd ] || skip "needs systemd"
    reason=$(tests/with-systemd true 2>&1) || skip "no systemd can be booted here: ${reason: -200}"
    WITH_SYSTEMD_S=170 exec tests/with-systemd env FUSED_INSIDE=1 B="$B" "$0"
fi

# ---- cases ----

n=0 n_bad=0
# One case: a function in a subshell that ends at the first command that fails.
it() { # TITLE FUNCTION
    local out rc start=$EPOCHREALTIME
    n=$((n + 1))
    out=$(
        exec 2>&1
        set -eE
        trap 'echo "line $LINENO: $BASH_COMMAND"' ERR
        trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # what a failed case has left running
        "$2"
    )
    rc=$?
    if [ $rc = 77 ]; then
        echo "ok $n - $1 # SKIP $out"
    elif [ $rc = 0 ]; then
        echo "ok $n - $1 ($(((${EPOCHREALTIME/./} - ${start/./}) / 1000)) ms)"
    else
        n_bad=$((n_bad + 1))
        echo "not ok $n - $1"
        sed 's/^/#   /' <<<"$out"
        journalctl -b -q --no-pager -o short-monotonic -n 25 --after-cursor="$cursor" | sed 's/^/# | /'
    fi
}

finish() {
    echo "1..$n"
    [ $n_bad = 0 ]
    exit
}

# ---- expectations; each prints what it found ----

equals() { # FOUND EXPECTED
    [ "$1" = "$2" ] || { echo "'$1', not '$2'" && return 1; }
}

matches() { # TEXT EXTENDED-REGEX
    grep -qE -- "$2" <<<"$1" || { echo "'$1' does not match '$2'" && return 1; }
}

at_most() { # NUMBER LIMIT
    [ "$1" -le "$2" ] || { echo "$1 is more than $2" && return 1; }
}

# For what must not succeed: `set -e` is deaf to "! COMMAND".
fails() { # COMMAND...
    ! "$@" || { echo "succeeded: $*" && return 1; }
}

# Runs a command until it succeeds.
soon() { # SECONDS COMMAND...
    local i
    for ((i = 0; i < $1 * 20; i++)); do
        ! "${@:2}" >/dev/null 2>&1 || return 0
        sleep 0.05
    done
    echo "not within $1 s: ${*:2}"
    "${@:2}"
}

property() { # NAME [UNIT]
    systemctl show -P "$1" "${2:-fused.service}"
}

is() { # PROPERTY VALUE [UNIT]
    equals "$(property "$1" "${3:-fused.service}")" "$2"
}

# The number that follows NAME= in a line of $load.
field() { # NAME TEXT
    sed -nE "s/.*\b$1=([0-9]+).*/\1/p" <<<"$2"
}

now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }

# A user inside; "member" is in the group fused, "outsider" is not.
as() { # USER COMMAND...
    setpriv --reuid="$1" --regid="$1" --init-groups "${@:2}"
}

infer() { # [MODEL]
    as member fusectl infer "${1:-$model}" -i "tests/golden/${1:-$model}.safetensors" -o "$place/y.npy"
}

# Traffic in the background, until traffic_counts has its counts, or that long.
traffic() { # CLIENTS [MS]
    "$load" $socket $model $features loop "${2:-60000}" "$1" >"$place/counts" 2>/dev/null &
    traffic=$!
}

# Nobody was refused, and every result had the right bits.
traffic_counts() {
    sleep 0.5 # for results from whoever serves now
    kill $traffic 2>/dev/null || true
    wait
    counts=$(cat "$place/counts")
    matches "$counts" 'refused=0 failed=0 ok=[1-9].* other=0 .*wrong=0'
}

served_by_another() { # PID
    [ "$(property MainPID)" != "$1" ] && [ "$(property SubState)" = running ]
}

# What was logged since mark. Without a match of journalctl: beside --after-cursor that leaves out the first entry.
journal() {
    journalctl -b -q -o cat --after-cursor="$cursor"
}

journal_has() { # EVENT: has the daemon logged it since mark?
    journalctl -b -q -o json --after-cursor="$cursor" | grep -q "\"FUSED_EVENT\":\"$1\""
}

mark() {
    journalctl --sync
    cursor=$(journalctl -b -q -n 0 --show-cursor | sed -n 's/^-- cursor: //p')
}

# ---- installation ----

# What a package and an administrator do: files, users, directories, models. Nothing is started. With $package it is that
# one that does the first part.
install_fused() {
    systemctl log-target journal
    systemctl log-level info
    if [ -n "${package:-}" ]; then
        dpkg --force-unsafe-io --no-triggers -i "$package" >/dev/null
    else
        cp -a "$B/stage/." /
        systemd-sysusers 2>/dev/null
        systemd-tmpfiles --create fused.conf
    fi
    useradd -M -U -G fused member
    useradd -M -U outsider
    serve_model $model
    allow_sanitizers
    place=$(mktemp -d)
    chmod 777 "$place"
    cursor=
    mark
}

serve_model() { # NAME...
    local m
    for m in "$@"; do
        install -m 644 "tests/golden/$m.conf" /etc/fused/models.d/
        install -m 644 "tests/golden/$m.safetensors" /var/lib/fused/weights/
    done
}

# A sanitizer's leak check traces the process, and the thread sanitizer sets its personality.
allow_sanitizers() {
    local d
    case $(ldd "$B/fused") in *libasan* | *libtsan*) ;; *) return 0 ;; esac
    for d in $dropins /run/systemd/system/fused@.service.d; do
        mkdir -p "$d"
        printf '%s\n' "[Service]" "SystemCallFilter=ptrace personality" "LockPersonality=no" "ProtectProc=default" \
            >"$d/sanitizer.conf"
    done
}

# Lines for fused.service on top of what is shipped.
dropin() { # NAME LINE...
    mkdir -p $dropins
    printf '%s\n' "${@:2}" >"$dropins/$1.conf"
    systemctl daemon-reload
}

# The daemon on the scripted backend.
fake() { # SCRIPT
    install -D -m 755 "$B/fake-backend.so" /usr/lib/fused/fake-backend.so
    dropin fake "[Service]" "ExecStart=" \
        "ExecStart=/usr/bin/fused --config /etc/fused/fused.conf --backend /usr/lib/fused/fake-backend.so" \
        "Environment=\"FUSED_FAKE_SCRIPT=$1\""
}

# Back to the shipped unit and configuration, stopped.
reset() {
    systemctl stop fused.socket fused.service 2>/dev/null || true
    find $dropins -name '*.conf' ! -name sanitizer.conf -delete 2>/dev/null || true
    cp "$B/stage/etc/fused/fused.conf" /etc/fused/fused.conf
    find /etc/fused/models.d /var/lib/fused/weights -type f -delete
    serve_model $model
    systemctl daemon-reload
    systemctl reset-failed fused.socket fused.service 2>/dev/null || true
    mark
}

[ -d "$B/stage" ] || { echo "nothing is installed in $B/stage: make B=$B tests" && exit 1; }
install_fused
