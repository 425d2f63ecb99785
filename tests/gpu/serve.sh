#!/bin/bash
# The daemon on the GPU: what it answers, beside another one, with a full device, with clients that die, when the device is lost,
# without a device. B is the build's folder, or "." in a bundle; run.sh sets the library path. ONLY=REGEX chooses cases by the
# names of their functions. Prints TAP; 77 without a GPU.
cd "$(dirname "$0")/../.." || exit 1
B=$(realpath "${B:-build}")
drive=$B/tests/gpu/drive
if [ ! -e /dev/nvidiactl ] && [ -z "${FUSED_NEED_GPU:-}" ]; then
    echo "1..0 # SKIP there is no NVIDIA GPU here"
    exit 77
fi
tmp=$(mktemp -d)
chmod 755 "$tmp"
started=() # what may still run
finish() {
    local pid
    for pid in "${started[@]+"${started[@]}"}"; do kill -9 "$pid" 2>/dev/null; done
    rm -rf "$tmp"
}
trap finish EXIT
trap 'exit 130' INT TERM

# ---- cases ----

n=0 n_bad=0
it() { # TITLE FUNCTION
    local rc began=$EPOCHREALTIME
    [[ $2 =~ ${ONLY:-.} ]] || return 0
    n=$((n + 1))
    "$2" >"$tmp/out" 2>&1
    rc=$?
    if [ $rc = 77 ]; then
        echo "ok $n - $1 # SKIP $(cat "$tmp/out")"
    elif [ $rc = 0 ]; then
        echo "ok $n - $1 ($(((${EPOCHREALTIME/./} - ${began/./}) / 1000)) ms)"
        grep '^figure: ' "$tmp/out" | sed 's/^figure: /#   /'
    else
        n_bad=$((n_bad + 1))
        echo "not ok $n - $1"
        tail -n 40 "$tmp/out" | sed 's/^/#   /'
        tail -n 12 "$tmp"/*.log | sed 's/^/# | /'
    fi
    stop_all
}

fail() {
    echo "failed: $*"
    return 1
}

soon() { # SECONDS COMMAND...
    local i
    for ((i = 0; i < $1 * 20; i++)); do
        ! "${@:2}" >/dev/null 2>&1 || return 0
        sleep 0.05
    done
    fail "not within $1 s: ${*:2}"
}

now_ms() { echo $((${EPOCHREALTIME/./} / 1000)); }

# ---- daemons ----

models() { # DIR NAME...: golden cases as models of a directory of their own
    local m
    mkdir -p "$tmp/$1"
    for m in "${@:2}"; do cp tests/golden/"$m".{conf,safetensors} "$tmp/$1/"; done
}

on() { # NAME COMMAND...: with that daemon's socket
    FUSED_SOCKET=$tmp/$1.sock "${@:2}"
}

# $pid is the daemon's; its log is $tmp/NAME.log.
launch() { # NAME MODELS [ARGUMENT...]
    [ -e "$tmp/$1.conf" ] || echo "drain_timeout_ms = 2000;" >"$tmp/$1.conf"
    "${fused:-$B/fused}" --config "$tmp/$1.conf" --socket "$tmp/$1.sock" --models "$tmp/$2" "${@:3}" \
        >"$tmp/$1.log" 2>&1 </dev/null &
    pid=$!
    started+=("$pid")
}

answers_or_ended() { # NAME PID
    on "$1" "$B/fusectl" ping || ! kill -0 "$2"
}

start() { # NAME MODELS [ARGUMENT...]
    launch "$@"
    soon 40 answers_or_ended "$1" "$pid" || return
    on "$1" "$B/fusectl" ping || fail "$1 did not start: $(tail -n 3 "$tmp/$1.log")"
}

stop() { # PID: it ends by itself, with 0
    kill "$1"
    wait "$1" || fail "the daemon ended with $?"
}

stop_all() {
    local p
    for p in "${started[@]+"${started[@]}"}"; do
        kill -9 "$p" 2>/dev/null && wait "$p" 2>/dev/null
    done
    started=()
    rm -f "$tmp"/*.conf "$tmp"/*.log "$tmp"/*.sock
}

# In status the first number or text of that key.
field() { # NAME KEY
    on "$1" "$B/fusectl" status --json | grep -oE "\"$2\": ?(\"[^\"]*\"|-?[0-9]+)" | head -n 1 | sed -E 's/^"[^"]*": ?"?//; s/"$//'
}
is_read() { [ "$(field "$1" temperature_c)" -gt 0 ]; } # the device, by NVML
free_mib() { echo $(($(field "$1" memory_free_bytes) >> 20)); }

count() { # NAME TEXT
    sed -nE "s/.*\b$1=([0-9]+).*/\1/p" <<<"$2"
}

a=a_33x512x1024_g64 small=a_8x64x128_g8
served=("$a" a_130x100x48_g16 a_bias_rows "$small" b_full_n2_c3-16_k3 b_n2_c3-16_k3_min0.0_max1.0 b_dropout_s7_o400_w10_min0.5
    dropout_n65536_s7_o400)

# ---- right ----

answers_right() {
    models all "${served[@]}"
    start one all --backend cuda &&
        [ "$(field one backend)" = cuda ] &&
        on one "$drive" golden "${served[@]}" || return
    soon 5 is_read one || return
    echo "figure: $(grep -o 'device.open.*' "$tmp/one.log"), driver $(field one driver)"
    stop "$pid"
}

# Clients of both at once; each daemon has a context, weights and slots of its own.
two_share_a_device() {
    local first second text1 text2 p
    models all "${served[@]}"
    start one all --backend cuda || return
    first=$pid
    start two all --backend cuda || return
    second=$pid
    on one "$drive" traffic "$a" host 3000 4 >"$tmp/t1" &
    p=$!
    text2=$(on two "$drive" traffic b_full_n2_c3-16_k3 device 3000 4) || fail "$text2" || return
    wait $p || fail "$(cat "$tmp/t1")" || return
    text1=$(cat "$tmp/t1")
    on one "$drive" golden "${served[@]}" && on two "$drive" golden "${served[@]}" || return
    for p in "$text1" "$text2"; do
        echo "figure: ${p#running?}"
        [ "$(count ok "$p")" -gt 100 ] && [ "$(count ended "$p")" = 0 ] || fail "$p" || return
    done
    stop $first && stop $second
}

# One daemon, every device of the host: each computes, and all of them right.
computes_on_every_device() {
    local count text i
    count=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU)
    [ "$count" -ge 2 ] || { echo "one device" && return 77; }
    models all "${served[@]}"
    echo "devices = [ $(seq -s ', ' 0 $((count - 1))) ];" >"$tmp/one.conf"
    start one all --backend cuda && on one "$drive" golden "${served[@]}" || return
    text=$(on one "$drive" traffic b_full_n2_c3-16_k3 host 3000 32) || fail "$text" || return
    echo "figure: ${text#running?}"
    text=$(on one "$B/fusectl" status --json | grep -oE '"batches": ?[0-9]+' | xargs)
    echo "figure: of $count devices: $text"
    [ "$(grep -oE '[0-9]{2,}' <<<"$text" | wc -l)" = "$count" ] || fail "$text" || return
    for ((i = 0; i < count; i++)); do
        DRIVE_KINDS=device DRIVE_DEVICE=$i on one "$drive" golden "${served[@]}" || return
    done
    stop "$pid"
}

# ---- memory ----

# A linear layer of 8192 x 8192: 256 MiB of weights, all zero.
big_model() { # DIR MAX-ROWS
    local header='{"gemm.weight":{"dtype":"F32","shape":[8192,8192],"data_offsets":[0,268435456]}}'
    cat >"$tmp/$1/big.conf" <<EOF
name = "big"; weights = "big.safetensors"; input = { shape = [ 8192 ]; };
stages = ( { op = "linear"; weight = "gemm.weight"; out = 8192; } );
batching = { max_rows = $2; };
EOF
    printf "\\x$(printf %02x ${#header})\\0\\0\\0\\0\\0\\0\\0%s" "$header" >"$tmp/$1/big.safetensors"
    truncate -s $((8 + ${#header} + 268435456)) "$tmp/$1/big.safetensors"
}

refused_for_memory() { # NAME VERB MODEL
    local text rc
    text=$(on "$1" "$B/fusectl" "$2" "$3" 2>&1)
    rc=$?
    echo "figure: $text"
    [ $rc = 1 ] && grep -q 'NO_MEMORY.*of device memory' <<<"$text" || fail "$2 of $3: status $rc"
}

a_full_device_refuses_loads() {
    local filler before
    models few "$a"
    start one few --backend cuda && on one "$drive" golden "$a" || return
    sleep 1.2 # the reading of the device's memory is a second old at most
    before=$(free_mib one)
    # Too large for any device: its work space would be.
    big_model few 1048576
    refused_for_memory one load big || return
    # Too large for what others have left: a new model, a new version of one that serves.
    "$drive" fill 300 >"$tmp/filler" 2>&1 &
    filler=$!
    started+=("$filler")
    soon 20 grep -q full "$tmp/filler" || return
    echo "figure: $(cat "$tmp/filler")"
    big_model few 64
    sed -i 's/max_rows = 256/max_rows = 262144/' "$tmp/few/$a.conf"
    refused_for_memory one load big && refused_for_memory one reload "$a" || return
    # Not even this client would have a context of its own: host memory only.
    DRIVE_HOLD_MIB=1024 on one "$drive" traffic "$a" host 100 1 >"$tmp/client" 2>&1
    grep NO_MEMORY "$tmp/client" || fail "a device buffer: $(cat "$tmp/client")" || return
    DRIVE_KINDS=host on one "$drive" golden "$a" || return
    kill -9 "$filler"
    wait "$filler" 2>/dev/null
    sleep 1.2
    [ "$(free_mib one)" -ge $((before - 32)) ] || fail "$(free_mib one) MiB are free, $before before" || return
    on one "$B/fusectl" load big && on one "$B/fusectl" reload "$a" && on one "$drive" golden "$a" || return
    stop "$pid"
}

is_back() { # NAME MIB
    [ "$(free_mib "$1")" -ge "$2" ] && on "$1" "$B/fusectl" status --json |
        grep -qE '"totals": ?\{"connections": ?1, ?"buffers": ?0, ?"buffer_bytes": ?0, ?"requests": ?0, ?"queued_rows": ?0'
}

# Killed while requests on its buffers run: charges and device memory are back within 5 s.
gives_back_what_the_dead_had() {
    local before kind client began
    models all "${served[@]}"
    start one all --backend cuda && on one "$drive" golden "${served[@]}" || return
    sleep 1.2
    before=$(free_mib one)
    for kind in host device device; do
        : >"$tmp/client"
        DRIVE_HOLD_MIB=1024 FUSED_SOCKET=$tmp/one.sock "$drive" traffic "$a" $kind 60000 8 >"$tmp/client" 2>&1 &
        client=$!
        started+=("$client")
        soon 20 grep -q running "$tmp/client" || return
        sleep 1.5
        [ "$(free_mib one)" -le $((before - 1024)) ] || fail "nothing was taken: $(free_mib one) of $before MiB are free" || return
        kill -9 $client
        began=$(now_ms)
        wait $client 2>/dev/null
        soon 5 is_back one $((before - 32)) || fail "$(free_mib one) MiB are free, $before before" || return
        echo "figure: $kind buffers and 1 GiB: all back $(($(now_ms) - began)) ms after the kill"
    done
    on one "$drive" golden "${served[@]}" && stop "$pid"
}

bears_clients_that_spoil() {
    local client
    models all "${served[@]}"
    start one all --backend cuda || return
    FUSED_SOCKET=$tmp/one.sock "$drive" mute $small >"$tmp/client" 2>&1 &
    client=$!
    started+=("$client")
    soon 10 grep -q mute "$tmp/client" || return
    on one "$drive" spoil "$a" && on one "$drive" golden "${served[@]}" || return
    kill -9 $client
    wait $client 2>/dev/null
    soon 5 is_back one 0 && stop "$pid"
}

# ---- reload ----

swaps_whole_versions() {
    local text
    models few "$a"
    cp "$tmp/few/$a.safetensors" "$tmp/few/$a.1"
    sed -i 's/"linear";/& out = 1024;/; s/tensor = "bias";/& shape = [ 1, 1024, 1, 1 ];/' "$tmp/few/$a.conf"
    "$B/fusectl" weights "$tmp/few/$a.conf" --seed 2 -o "$tmp/few/$a.safetensors" &&
        cp "$tmp/few/$a.safetensors" "$tmp/few/$a.2" || return
    start one few --backend cuda || return
    text=$(on one "$drive" swap "$a" "$tmp/few" 4000 8) || fail "$text" || return
    echo "figure: $text"
    [ "$(count swaps "$text")" -ge 10 ] && [ "$(count ok "$text")" -gt 100 ] && [ "$(count of_second "$text")" -gt 100 ] &&
        [ "$(count ended "$text")" = 0 ] || fail "$text" || return
    stop "$pid"
}

# ---- the device is lost ----

# Every client learns it, nothing else happens to anybody, and the process is gone within 5 s.
loses_the_device() { # SCRIPT LOG-REGEX
    local text rc began gone
    models few "$a"
    echo "batch_timeout_ms = 1000;" >"$tmp/one.conf"
    export FUSED_FAKE_SCRIPT=$1
    start one few --backend "$B/fused-cuda-faulty.so" || return
    unset FUSED_FAKE_SCRIPT
    text=$(on one "$drive" traffic "$a" host 20000 8) || fail "$text" || return
    began=$(now_ms)
    wait "$pid"
    rc=$?
    gone=$(($(count since_ok_ms "$text") + $(now_ms) - began))
    echo "figure: $1: GPU_LOST to $(count gpu_lost "$text") of 8 clients, exit status $rc $gone ms after the last result"
    echo "figure: $(grep 'device.lost' "$tmp/one.log")"
    [ $rc = 70 ] && [ $gone -le 5000 ] || fail "status $rc after $gone ms" || return
    [ $(($(count gpu_lost "$text") + $(count ended "$text"))) = 8 ] && [ "$(count gpu_lost "$text")" -ge 1 ] ||
        fail "$text" || return
    grep -qE "$2" "$tmp/one.log" || fail "the log does not say why"
}
ends_when_a_kernel_faults() { loses_the_device "fault 300" 'device.lost: .*illegal memory access.*\.c(u)?:[0-9]+: '; }
ends_when_a_kernel_hangs() { loses_the_device "hang 300" 'device.lost: a batch runs longer than batch_timeout_ms'; }

# The driver tells everybody on the device of it, and nobody else ends.
has_xid() { [ "$(field "$1" xids)" -ge 1 ]; }
counts_anothers_fault() {
    local first
    models few "$a"
    start one few --backend cuda || return
    first=$pid
    soon 5 is_read one || return
    [ -n "$(field one xids)" ] || { echo "the driver tells nothing of faults here" && return 77; }
    [ "$(field one xids)" = 0 ] || fail "faults before there was one" || return
    FUSED_FAKE_SCRIPT="fault 20" start two few --backend "$B/fused-cuda-faulty.so" || return
    on two "$drive" traffic "$a" host 20000 1
    wait "$pid"
    [ $? = 70 ] && soon 5 has_xid one || return
    echo "figure: $(grep -o 'device.xid.*' "$tmp/one.log"), seen by the other daemon"
    on one "$drive" golden "$a" && stop "$first"
}

survives_a_batch_without_memory() {
    local text
    models few "$a"
    FUSED_FAKE_SCRIPT="memory 200" start one few --backend "$B/fused-cuda-faulty.so" || return
    text=$(on one "$drive" traffic "$a" host 1500 8) || fail "$text" || return
    echo "figure: ${text#running?}"
    [ "$(count no_memory "$text")" -ge 1 ] && [ "$(count ended "$text")" = 0 ] && [ "$(count gpu_lost "$text")" = 0 ] ||
        fail "$text" || return
    on one "$drive" golden "$a" && stop "$pid"
}

# ---- no device ----

# "cuda" refuses to start, with the reason; "auto" computes on the CPU, and says so.
without_a_device() { # REASON-REGEX
    local rc
    models few "$a"
    launch one few --backend cuda
    wait "$pid"
    rc=$?
    echo "figure: $(tail -n 1 "$tmp/one.log")"
    [ $rc = 69 ] || fail "status $rc" || return
    grep -qE "device.failed: .*($1)" "$tmp/one.log" || fail "the log does not say why" || return
    start one few --backend auto && [ "$(field one backend)" = cpu ] || return
    grep -qE "($1)" <<<"$(on one "$B/fusectl" status --json)" || fail "status does not say why" || return
    DRIVE_KINDS=inline,host on one "$drive" golden "$a" && stop "$pid"
}
sees_no_device() { (export CUDA_VISIBLE_DEVICES= && without_a_device 'no CUDA-capable device'); }
has_no_driver() {
    mkdir -p "$tmp/none"
    echo "no driver" >"$tmp/none/libcuda.so.1"
    (LD_LIBRARY_PATH=$tmp/none:$LD_LIBRARY_PATH && without_a_device 'driver version is insufficient')
}
has_no_backend() {
    mkdir -p "$tmp/bare"
    cp "$B/fused" "$tmp/bare/"
    (fused=$tmp/bare/fused && without_a_device 'is not installed')
}
has_another_file() {
    mkdir -p "$tmp/other"
    cp "$B/fused" "$tmp/other/"
    head -c 200000 /dev/zero >"$tmp/other/fused-cuda.so"
    (fused=$tmp/other/fused && without_a_device 'fused-cuda.so: invalid ELF header')
}

# ---- the service's sandbox, as far as it goes without a service manager ----

# Another user without any privilege nor a way to one, no network, all files read-only but the socket's folder, no core, and the
# unit's filter of system calls. What is missing: the list of devices.
runs_in_a_sandbox() {
    local filter=()
    models all "${served[@]}"
    mkdir -p "$tmp/run"
    cp -r "$B/fused" "$B/fused-cuda.so" "$B/tests/gpu/filter" "$tmp/run/"
    [ ! -d "$B/lib" ] || cp -r "$B/lib" "$tmp/run/"
    cp "$B/tests/gpu/syscalls" "$tmp/run/" 2>/dev/null || tests/gpu/syscalls.sh >"$tmp/run/syscalls"
    [ ! -s "$tmp/run/syscalls" ] || filter=("$tmp/run/filter" "$tmp/run/syscalls")
    chown -R 65534:65534 "$tmp/run" "$tmp/all"
    echo "drain_timeout_ms = 2000; socket_mode = \"0666\";" >"$tmp/one.conf"
    ln -sf run/one.sock "$tmp/one.sock"
    cat >"$tmp/sandbox" <<'EOF'
mount --make-rprivate /
mount --bind "$1/run" "$1/run"
mount -o remount,bind,ro /
ulimit -c 0
exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
    env CUDA_CACHE_DISABLE=1 HOME=/nonexistent "${@:2}"
EOF
    unshare --net --ipc --uts --mount bash -e "$tmp/sandbox" "$tmp" "${filter[@]+"${filter[@]}"}" \
        "$tmp/run/fused" --config "$tmp/one.conf" --socket "$tmp/run/one.sock" --models "$tmp/all" --backend cuda \
        >"$tmp/one.log" 2>&1 </dev/null &
    pid=$!
    started+=("$pid")
    soon 40 answers_or_ended one "$pid" && on one "$drive" golden "${served[@]}" || return
    grep -E '^(Uid|NoNewPrivs|CapBnd|Seccomp):' "/proc/$pid/status" | xargs echo "figure:"
    grep -q '^Uid:.65534' "/proc/$pid/status" || fail "not the sandbox's user" || return
    echo "figure: faults (Xid) that the driver has told it: $(field one xids)"
    [ "$(count ok "$(on one "$drive" traffic "$a" host 1000 4)")" -gt 100 ] && stop "$pid"
}

it "golden cases are right, inline, from host and from device buffers" answers_right
it "two daemons on one device are both right" two_share_a_device
it "every device of the host computes" computes_on_every_device
it "a load that does not fit is refused, and the version before keeps serving" a_full_device_refuses_loads
it "what a killed client had is back within 5 s" gives_back_what_the_dead_had
it "clients that never read, or change memory under requests, harm nobody" bears_clients_that_spoil
it "a reload under traffic swaps whole versions" swaps_whole_versions
it "a kernel that faults: GPU_LOST, the reason in the log, exit status 70 within 5 s" ends_when_a_kernel_faults
it "a kernel that hangs: GPU_LOST, exit status 70 within 5 s" ends_when_a_kernel_hangs
it "a fault of another process is counted, and no more" counts_anothers_fault
it "a batch without memory fails alone" survives_a_batch_without_memory
it "no device to see: cuda refuses with 69, auto takes the CPU" sees_no_device
it "no driver: the same" has_no_driver
it "no backend: the same" has_no_backend
it "a file that is no backend: the same" has_another_file
it "another user's process without privileges, network and writable files computes" runs_in_a_sandbox
echo "1..$n"
[ $n_bad = 0 ]
