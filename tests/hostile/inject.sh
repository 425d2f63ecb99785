#!/bin/bash
# inject.sh: system calls of the daemon fail, by strace, where link-time wrapping does not reach: inside libuv, libsystemd and
# the C library, at start, in requests, at reload and at stop. A clean run counts the calls of each kind; then
# INJECT_POINTS of them, spread over the whole run, fail once each. Whatever that hits: the daemon ends with one of its exit codes
# (127: the loader's), or serves again and ends with 0 at SIGTERM; it never hangs and never dies of a signal.
set -u
B=$(realpath "${B:-build}")
points=${INJECT_POINTS:-1}
dir=$(mktemp -d /tmp/fused-inject.XXXXXX)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/models"
cp tests/golden/a_8x64x128_g8.{conf,safetensors} "$dir/models/"
: >"$dir/fused.conf"

if grep -q __asan_init "$B/fused"; then
    echo "skip: the leak sanitizer does not work under strace"
    exit 77
fi
if ! strace -o /dev/null true 2>/dev/null; then
    echo "skip: strace may not trace here"
    exit 77
fi

# NAME:ERROR. Not EAGAIN of a write: the daemon writes to wake its own threads, and a wake-up that is full says that one is on
# its way; injected, that is a lie which nobody could live with. After a second colon: libuv aborts where a pipe, a thread or
# the poll of its own fails, and the C library where the stack of an ended thread cannot be unmapped; nothing of ours can be
# put in between.
calls=(
    read:EINTR write:EINTR epoll_pwait:EINTR epoll_ctl:ENOMEM:ABRT accept4:ECONNABORTED accept4:EMFILE
    accept4:EINTR recvmsg:EINTR recvmsg:ENOMEM sendmsg:EINTR sendmsg:ENOBUFS sendmsg:ECONNRESET getsockopt:ENOBUFS
    mmap:ENOMEM:ABRT munmap:ENOMEM:ABRT mprotect:ENOMEM:ABRT openat:EMFILE openat:ENFILE openat:EINTR fcntl:EMFILE close:EINTR close:EIO
    memfd_create:ENFILE fallocate:EINTR fallocate:ENOSPC timerfd_settime:EINVAL prlimit64:EPERM clone3:EAGAIN:ABRT
    ftruncate:EIO newfstatat:EIO getdents64:EIO rename:EXDEV unlink:EROFS unlinkat:EROFS flock:EINTR bind:EADDRNOTAVAIL
    listen:EADDRINUSE ioctl:EINVAL eventfd2:EMFILE pipe2:EMFILE:ABRT epoll_create1:EMFILE
)

fusectl() { FUSED_SOCKET=$dir/s timeout 5 "$B/fusectl" "$@" >/dev/null 2>&1; }

# Answers, and computes.
serves() {
    local i
    for i in 1 2 3 4 5 6; do
        ! fusectl ping || ! fusectl bench a_8x64x128_g8 --clients 1 --rows 2 --duration 0.02 || return 0
        sleep 0.05
    done
    return 1
}

# STRACE-OPTION...: one life of the daemon; sets $outcome to "ended CODE", "served CODE", or what is wrong
live() {
    local i pid code traced
    rm -f "$dir/s" "$dir/s.lock"
    strace -f -qq "$@" -o "$dir/trace" "$B/fused" --config "$dir/fused.conf" --socket "$dir/s" --backend cpu \
        --models "$dir/models" >"$dir/log" 2>&1 &
    pid=$!
    for ((i = 0; i < 200; i++)); do
        [ ! -S "$dir/s" ] || ! fusectl ping || break
        kill -0 $pid 2>/dev/null || break
        sleep 0.02
    done
    traced=$(pgrep -P $pid | head -n 1)
    if [ -n "$traced" ] && [ -S "$dir/s" ]; then
        fusectl status
        fusectl bench a_8x64x128_g8 --clients 1 --rows 2 --duration 0.05 --buffers
        kill -HUP "$traced" 2>/dev/null
        sleep 0.05
        fusectl reload
        # Who ended meanwhile, maybe while it was asked, is judged by how.
        if kill -0 "$traced" 2>/dev/null && ! serves && sleep 0.1 && kill -0 "$traced" 2>/dev/null; then
            outcome="does not serve"
            kill -KILL "$traced"
            wait $pid
            return
        fi
    fi
    [ -z "$traced" ] || kill -TERM "$traced" 2>/dev/null
    for ((i = 0; i < 250; i++)); do
        kill -0 $pid 2>/dev/null || break
        sleep 0.02
    done
    if kill -0 $pid 2>/dev/null; then
        outcome="hangs"
        kill -KILL "$traced" 2>/dev/null
        wait $pid
        return
    fi
    wait $pid 2>/dev/null
    code=$?
    outcome="ended $code"
}

live -e trace=all
[ "$outcome" = "ended 0" ] || { echo "a clean run $outcome"; exit 1; }
mv "$dir/trace" "$dir/clean"
first=$(awk 'NR == 1 { print $1 }' "$dir/clean")

failed=0 n=0 n_lived=0 n_ended=0 n_aborted=0
for entry in "${calls[@]}"; do
    IFS=: read -r call error death <<<"$entry"
    count=$(grep -c "^$first *$call(" "$dir/clean")
    [ "$count" -gt 0 ] || count=1
    last=0
    for ((k = 1; k <= points; k++)); do
        at=$(((count * k + points - 1) / points))
        [ $at != $last ] || continue
        last=$at
        live -e "trace=$call" -e "inject=$call:error=$error:when=$at"
        n=$((n + 1))
        case $outcome in
        "ended 0") n_lived=$((n_lived + 1)) ;;
        "ended 69" | "ended 70" | "ended 75" | "ended 78" | "ended 127") n_ended=$((n_ended + 1)) ;;
        "ended 134") # SIGABRT
            n_aborted=$((n_aborted + 1))
            [ "$death" = ABRT ] || { echo "$call:$error at $at of $count: aborted"; tail -n 3 "$dir/log"; failed=1; }
            ;;
        *)
            echo "$call:$error at $at of $count: $outcome"
            tail -n 5 "$dir/log"
            failed=1
            ;;
        esac
    done
done
echo "$n injected failures of ${#calls[@]} kinds: $n_lived served on, $n_ended ended with an exit code, $n_aborted aborted"
exit $failed
