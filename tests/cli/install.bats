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

@test "the pages that the installed README points to are there" {
    local doc=$P/share/doc/fused path
    for path in $(grep -ohE '`[a-zA-Z_/]+\.md`' "$doc"/{README,SECURITY}.md | tr -d '`' | sort -u); do
        [ -s "$doc/$path" ] || { echo "$path is not there" && return 1; }
        cmp "$path" "$doc/$path"
    done
    [ -s "$doc/proto/PROTOCOL.md" ]
}

@test "uninstall leaves nothing behind" {
    local d=$BATS_TEST_TMPDIR/d prefix
    for prefix in /usr /opt/x; do
        make -o all --no-print-directory B="$B" install PREFIX=$prefix DESTDIR="$d" >/dev/null 2>&1
        [ -x "$d$prefix/bin/fused" ]
        make -o all --no-print-directory B="$B" uninstall PREFIX=$prefix DESTDIR="$d" >/dev/null 2>&1
        output=$(find "$d" ! -type d)
        expect_output '^$'
        # Folders of the system's stay, fused's own do not.
        output=$(find "$d" -type d -name '*fused*')
        expect_output '^$'
    done
}

@test "uninstall leaves what is the administrator's" {
    local d=$BATS_TEST_TMPDIR/d
    make -o all --no-print-directory B="$B" install PREFIX=/usr DESTDIR="$d" >/dev/null 2>&1
    echo 'log_level = "debug";' >>"$d/etc/fused/fused.conf"
    touch "$d/etc/fused/models.d/m.conf" "$d/var/lib/fused/weights/m.safetensors" "$d/usr/lib/other"
    make -o all --no-print-directory B="$B" uninstall PREFIX=/usr DESTDIR="$d" >/dev/null 2>&1
    output=$(cd "$d" && find . ! -type d | sort | xargs)
    expect_output '^./etc/fused/fused.conf ./etc/fused/models.d/m.conf ./usr/lib/other ./var/lib/fused/weights/m.safetensors$'
    # Once more is no error.
    make -o all --no-print-directory B="$B" uninstall PREFIX=/usr DESTDIR="$d"
}
