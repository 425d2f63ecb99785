#!/usr/bin/env bats
# An installation in a prefix of its own: its daemon starts with what was installed, whatever the prefix.

bats_require_minimum_version 1.5.0

setup_file() {
    load common
    export P=$BATS_FILE_TMPDIR/prefix
    # What is built stays as it is: the flags of this make need not be those that it was built with.
    make -o all --no-print-directory B="$B" install PREFIX="$P" >"$BATS_FILE_TMPDIR/install.log" 2>&1 ||
        { cat "$BATS_FILE_TMPDIR/install.log" >&2 && return 1; }
    export FUSED_SOCKET=$BATS_FILE_TMPDIR/s
}

setup() {
    load common
}

# Starts the installed daemon, waits for its answer, ends it.
serves() { # [OPTION...]
    local code=0 i pid
    "$P/bin/fused" --backend cpu "$@" >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    pid=$!
    for ((i = 0; i < 100; i++)); do
        ! "$P/bin/fusectl" status >"$BATS_TEST_TMPDIR/status" 2>&1 || break
        sleep 0.1
    done
    kill "$pid" 2>/dev/null || true
    wait "$pid" || code=$?
    [ $code = 0 ] || { cat "$BATS_TEST_TMPDIR/log" && return 1; }
    output=$(cat "$BATS_TEST_TMPDIR/status")
}

@test "the installed configuration names the installation's directories" {
    grep -qx "models_dir = \"$P/etc/fused/models.d\";" "$P/etc/fused/fused.conf"
    grep -qx "weights_dir = \"$P/var/lib/fused/weights\";" "$P/etc/fused/fused.conf"
    run "$P/bin/fused" --check --config "$P/etc/fused/fused.conf"
    expect_status 0
    # The others stay comments: an upgrade may improve a default.
    [ "$(grep -c '^[^#]' "$P/etc/fused/fused.conf")" = 2 ]
}

@test "it serves without a model, with and without --config" {
    serves --config "$P/etc/fused/fused.conf"
    expect_output '^models +0, '
    serves
    expect_output '^models +0, '
}

@test "without --config the installed file is read, and a model that lies there" {
    cp "$golden/a_4x64x64_g1.conf" "$P/etc/fused/models.d/"
    cp "$golden/a_4x64x64_g1.safetensors" "$P/var/lib/fused/weights/"
    run "$P/bin/fused" --check
    expect_status 0
    expect_output '^a_4x64x64_g1.conf: ok'
    serves
    expect_output '^models +1, '
}

@test "installing again leaves a changed configuration alone" {
    echo 'log_level = "debug";' >>"$P/etc/fused/fused.conf"
    make -o all --no-print-directory B="$B" install PREFIX="$P" >/dev/null 2>&1
    grep -q '^log_level = "debug";' "$P/etc/fused/fused.conf"
}

@test "PREFIX=/usr: the file as it is in the tree" {
    make -o all --no-print-directory B="$B" install PREFIX=/usr DESTDIR="$BATS_TEST_TMPDIR/d" >/dev/null 2>&1
    cmp config/fused.conf "$BATS_TEST_TMPDIR/d/etc/fused/fused.conf"
}
