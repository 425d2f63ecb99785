# What the tests of the command line share: a daemon on a socket of its own, serving a few golden models.

cd "$BATS_TEST_DIRNAME/../.." || exit 1
B=$(realpath "${B:-build}")
fusectl=$B/fusectl
golden=tests/golden

# A directory of model files and weights to serve; names of golden cases follow.
make_models() { # DIRECTORY NAME...
    mkdir -p "$1"
    local m
    for m in "${@:2}"; do
        cp "$golden/$m.conf" "$golden/$m.safetensors" "$1/"
    done
}

# Starts a daemon and waits until it answers. Its log goes to $BATS_FILE_TMPDIR/fused.log.
start_daemon() { # DIRECTORY-OF-MODELS
    export FUSED_SOCKET=$BATS_FILE_TMPDIR/s
    "$B/fused" --config config/fused.conf --socket "$FUSED_SOCKET" --backend cpu --models "$1" \
        >"$BATS_FILE_TMPDIR/fused.log" 2>&1 3>&- &
    echo $! >"$BATS_FILE_TMPDIR/fused.pid"
    local i
    for ((i = 0; i < 300; i++)); do
        ! "$fusectl" ping >/dev/null 2>&1 || return 0
        kill -0 "$(cat "$BATS_FILE_TMPDIR/fused.pid")" 2>/dev/null || break
        sleep 0.1
    done
    cat "$BATS_FILE_TMPDIR/fused.log" >&2
    return 1
}

# SIGTERM must end it with 0; so must whatever ended it before.
stop_daemon() {
    local pid code=0
    pid=$(cat "$BATS_FILE_TMPDIR/fused.pid")
    kill "$pid" 2>/dev/null || true
    wait "$pid" || code=$?
    [ $code = 0 ] || { echo "the daemon ended with $code" && cat "$BATS_FILE_TMPDIR/fused.log"; } >&2
    return $code
}

# Says what was printed when an expectation fails.
expect_status() { # CODE
    [ "$status" = "$1" ] || { echo "status $status, not $1: $output" && return 1; }
}

expect_output() { # EXTENDED-REGEX
    grep -qE -- "$1" <<<"$output" || { echo "'$output' does not match '$1'" && return 1; }
}
