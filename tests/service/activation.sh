#!/bin/bash
# The shipped units: the first connection starts the daemon, members of its group are served, others are not.
. "$(dirname "$0")/common.bash"

starts_nothing_by_itself() {
    systemctl enable --now fused.socket
    is ActiveState active fused.socket
    is ActiveState inactive
    equals "$(stat -c '%U %G %a' $socket)" "root fused 660"
    equals "$(stat -c '%U %G %a' /run/fused)" "fused fused 750"
}

first_connection_starts_it() {
    as member fusectl ping
    is ActiveState active
    is SubState running
    matches "$(property StatusText)" '^Serving 1 model on cpu '
    equals "$(stat -c '%U %G' "/proc/$(property MainPID)")" "fused fused"
}

others_are_refused() {
    local out rc=0
    out=$(as outsider fusectl ping 2>&1) || rc=$?
    equals $rc 69
    matches "$out" "no permission for the server's socket /run/fused/fused.sock: its group may connect"
}

# The sandbox changes no bit: beside it, the same files served outside.
computes_in_the_sandbox() {
    infer
    mv "$place/y.npy" "$place/inside.npy"
    mkdir "$place/models"
    cp /etc/fused/models.d/* /var/lib/fused/weights/* "$place/models/"
    fused --config config/fused.conf --socket "$place/s" --backend cpu --models "$place/models" &
    soon 5 fusectl --socket "$place/s" ping
    fusectl --socket "$place/s" infer $model -i tests/golden/$model.safetensors -o "$place/outside.npy"
    kill %1
    wait %1
    cmp "$place/inside.npy" "$place/outside.npy"
    is NRestarts 0
}

sandbox_is_on() {
    local pid
    pid=$(property MainPID)
    equals "$(awk '/^CapBnd/ { print $2 }' "/proc/$pid/status")" 0000000000000000
    equals "$(awk '/^NoNewPrivs/ { print $2 }' "/proc/$pid/status")" 1
    equals "$(awk '/^Seccomp:/ { print $2 }' "/proc/$pid/status")" 2
    equals "$(awk '/^Max core/ { print $5 }' "/proc/$pid/limits")" 0
    is LimitNOFILE 65536 # this machine may allow less
    equals "$(awk '/^Max open/ { print $4 == $5 }' "/proc/$pid/limits")" 1
    is OOMScoreAdjust -500
    # No network, and no writing where the daemon's own user may write.
    equals "$(nsenter -t "$pid" -n cat /proc/self/net/dev | grep -c ':')" 1
    chown fused /etc/fused /var/lib/fused/weights
    for f in /etc/fused /run/fused /var/lib/fused/weights; do
        fails nsenter -t "$pid" -m setpriv --reuid=fused --regid=fused --clear-groups touch $f/x
    done
    chown root /etc/fused /var/lib/fused/weights
}

locked_memory_is_unlimited() {
    local limit
    limit=$(awk '/^Max locked/ { print $4 }' "/proc/$(property MainPID)/limits")
    [ "$limit" = unlimited ] || {
        [ "$(property LimitMEMLOCK)" = infinity ] && echo "this machine caps RLIMIT_MEMLOCK at $limit" && exit 77
    }
}

memory_limit_restarts_it() {
    local pid
    pid=$(property MainPID)
    grep -qw memory /sys/fs/cgroup/cgroup.controllers 2>/dev/null ||
        { echo "no memory controller here: MemoryMax= is not enforced" && exit 77; }
    systemctl set-property --runtime fused.service MemoryMax=2M MemorySwapMax=0
    infer || true
    systemctl set-property --runtime fused.service MemoryMax=infinity MemorySwapMax=infinity
    [ "$(property MainPID)" != "$pid" ] || { echo "MemoryMax= is not enforced here" && exit 77; }
    soon 5 served_by_another "$pid"
    infer
}

logs_to_the_journal() {
    journal_has server.ready
    matches "$(journalctl -b -q -o cat -u fused.service FUSED_EVENT=server.ready)" '^Serving 1 model'
    equals "$(journalctl -b -q -o cat FUSED_EVENT=server.ready --output-fields=_UID -o json | grep -c '"_UID":"'"$(id -u fused)")" 1
}

# Shared memory has no names: nothing is left behind even by SIGKILL.
leaves_no_names() {
    local pid
    pid=$(property MainPID)
    traffic 4
    sleep 0.3
    systemctl kill --kill-whom=main -s KILL fused.service
    soon 5 served_by_another "$pid"
    traffic_counts
    equals "$(find /dev/shm /dev/mqueue /tmp -user fused | wc -l)" 0
    equals "$(ls -A /run/fused)" fused.sock
    equals "$(ipcs -m | grep -c '^0x' || true)" 0
    equals "$(ss -xlH 2>/dev/null | grep -c '@.*fused' || true)" 0
}

serves_instances() {
    mkdir -p /etc/fused/other.d
    cp /etc/fused/models.d/$model.conf /etc/fused/other.d/
    sed 's|^#models_dir = .*|models_dir = "/etc/fused/other.d";|' config/fused.conf >/etc/fused/other.conf
    systemctl enable --now fused@other.socket
    as member fusectl --socket /run/fused/other.sock ping
    is ActiveState active fused@other.service
    as member fusectl --socket /run/fused/other.sock infer $model -i tests/golden/$model.safetensors -o "$place/other.npy"
    cmp "$place/other.npy" "$place/inside.npy"
    [ "$(property MainPID)" != "$(property MainPID fused@other.service)" ]
    systemctl reload fused@other.service
    systemctl disable --now fused@other.socket
    systemctl stop fused@other.service
    is Result success fused@other.service
    as member fusectl ping
}

it "the socket is there, the daemon is not" starts_nothing_by_itself
it "the first connection starts it" first_connection_starts_it
it "EACCES for who is not in the group" others_are_refused
it "a member's inference, with the bits that it has outside of the sandbox" computes_in_the_sandbox
it "the sandbox is on" sandbox_is_on
it "memory can be locked" locked_memory_is_unlimited
it "MemoryMax= ends in a restart" memory_limit_restarts_it
it "lines of the journal with fields" logs_to_the_journal
it "no names in tmpfs, no abstract socket, no System V memory" leaves_no_names
it "an instance beside it: socket, configuration and models of its own" serves_instances
finish
