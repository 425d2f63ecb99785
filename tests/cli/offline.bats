#!/usr/bin/env bats
# fusectl check and weights: no server.

bats_require_minimum_version 1.5.0

setup() {
    load common
    dir=$BATS_TEST_TMPDIR/files
    mkdir "$dir"
    m=conv3d-groupnorm-min-clamp-full
}

@test "check: right files" {
    run "$fusectl" check "$golden/a_5x37x96_g12.conf" "$golden/b_n2_c3-16_k3_min0.0_max1.0.conf"
    expect_status 0
    expect_output '^tests/golden/a_5x37x96_g12.conf: ok$'
    expect_output '\[N, 37\] -> \[1, 96, N, 1\], float32'
    expect_output '^tests/golden/b_n2_c3-16_k3_min0.0_max1.0.conf: ok$'
    expect_output 'proof: constant'
}

@test "check: every golden and shipped model" {
    cp config/models.d/*.conf "$dir"
    for f in "$dir"/conv*.conf; do
        "$fusectl" weights "$f" --seed 1 -o "${f%.conf}.safetensors"
    done
    run "$fusectl" check "$golden"/*.conf "$dir"/conv*.conf
    expect_status 0
    [ "$(grep -c ': ok$' <<<"$output")" -gt 50 ]
}

@test "check: a wrong file is named with its line, the others are still checked" {
    make_models "$dir" a_5x37x96_g12 a_4x64x64_g1
    sed -i 's/groups = 12/groups = 7/' "$dir/a_5x37x96_g12.conf"
    run "$fusectl" check "$dir/a_5x37x96_g12.conf" "$dir/a_4x64x64_g1.conf"
    expect_status 1
    expect_output "^fusectl: $dir/a_5x37x96_g12.conf:8: "
    expect_output "^$dir/a_4x64x64_g1.conf: ok"
}

@test "check: missing file, missing weights, cut weights, directory" {
    run "$fusectl" check "$dir/none.conf"
    expect_status 1
    expect_output 'none.conf: No such file'
    run "$fusectl" check "$dir/no/none.conf"
    expect_status 1
    expect_output 'none.conf: No such file'
    make_models "$dir" a_5x37x96_g12
    truncate -s -1 "$dir/a_5x37x96_g12.safetensors"
    run "$fusectl" check "$dir/a_5x37x96_g12.conf"
    expect_status 1
    expect_output 'a_5x37x96_g12.safetensors'
    rm "$dir/a_5x37x96_g12.safetensors"
    run "$fusectl" check "$dir/a_5x37x96_g12.conf"
    expect_status 1
    expect_output 'a_5x37x96_g12.safetensors: No such file'
    run "$fusectl" check "$dir"
    expect_status 1
    run "$fusectl" check /dev/null
    expect_status 1
}

@test "check --json: one object, right and wrong files" {
    run --separate-stderr "$fusectl" --json check "$golden/a_4x64x64_g1.conf" "$dir/none.conf"
    expect_status 1
    [ "$(wc -l <<<"$output")" = 1 ]
    expect_output '^\{"files":\[\{"file":"tests/golden/a_4x64x64_g1.conf","ok":true,'
    expect_output '"ok":false,"error":"none.conf: No such file'
}

@test "check --json: a name that is no UTF-8" {
    run --separate-stderr "$fusectl" check --json "$dir/$(printf 'a\377').conf"
    expect_status 1
    expect_output '^\{"files":\[\{"file":".*/a\?.conf","ok":false,"error":"a.*.conf: No such file'
}

@test "weights: the same seed gives the same file, another one does not" {
    for n in 1 2; do
        run "$fusectl" weights config/models.d/$m.conf --seed 7 -o "$dir/$n.safetensors"
        expect_status 0
        expect_output '^conv.weight F32 \[16, 3, 3, 3, 3\]$'
    done
    cmp "$dir/1.safetensors" "$dir/2.safetensors"
    "$fusectl" weights config/models.d/$m.conf --seed 8 -o "$dir/2.safetensors"
    run cmp -s "$dir/1.safetensors" "$dir/2.safetensors"
    expect_status 1
}

@test "weights: fit the model, in every dtype" {
    for dtype in float32 float16 bfloat16; do
        sed "s/\"float32\"/\"$dtype\"/" config/models.d/$m.conf >"$dir/$m.conf"
        "$fusectl" weights "$dir/$m.conf" --seed 1 -o "$dir/$m.safetensors"
        run "$fusectl" check "$dir/$m.conf"
        expect_status 0
        expect_output "$dtype"
    done
}

@test "weights --json" {
    run "$fusectl" weights config/models.d/$m.conf --seed 7 -o "$dir/w.safetensors" --json
    expect_status 0
    expect_output '"tensors":\[\{"name":"conv.weight","dtype":"F32","shape":\[16,3,3,3,3\]\}'
}

@test "weights: no sizes, no file, no model: refused, and nothing is written" {
    run "$fusectl" weights "$golden/a_5x37x96_g12.conf" --seed 1 -o "$dir/w.safetensors"
    expect_status 74
    expect_output '^fusectl: tests/golden/a_5x37x96_g12.conf:7: '
    run "$fusectl" weights "$golden/dropout_n2_s7_o400.conf" --seed 1 -o "$dir/w.safetensors"
    expect_status 74
    expect_output 'no stage with weights'
    run "$fusectl" weights "$dir/none.conf" --seed 1 -o "$dir/w.safetensors"
    expect_status 74
    expect_output 'No such file'
    run "$fusectl" weights config/models.d/$m.conf --seed 1 -o "$dir/no/w.safetensors"
    expect_status 74
    expect_output 'its directory cannot be written'
    [ -z "$(ls -A "$dir")" ]
}

@test "weights: a disk that fills up leaves the old file and nothing else" {
    echo old >"$dir/w.safetensors"
    run bash -c 'trap "" XFSZ; ulimit -f 64; "$0" weights "$1" --seed 1 -o "$2"' "$fusectl" config/models.d/gemm-groupnorm-min-bias.conf "$dir/w.safetensors"
    expect_status 74
    expect_output 'w.safetensors: .*File too large'
    [[ $output != *w.safetensors:*w.safetensors:* ]]
    [ "$(cat "$dir/w.safetensors")" = old ]
    [ "$(ls -A "$dir")" = w.safetensors ]
}

@test "weights: an interrupt leaves nothing" {
    "$fusectl" weights config/models.d/gemm-groupnorm-min-bias.conf --seed 1 -o "$dir/w.safetensors" >/dev/null 3>&- &
    pid=$!
    sleep 0.05
    kill -TERM $pid
    status=0
    wait $pid || status=$?
    # It may have been caught before it began, or when it was done.
    [ "$status" = 130 ] || [ "$status" = 143 ] || [ "$status" = 0 ]
    [ "$status" = 0 ] || [ -z "$(ls -A "$dir")" ]
}
