#!/usr/bin/env bats
# fusectl infer against a daemon: files in and out, options, refusals. What it computes is checked by test_golden_cli.

bats_require_minimum_version 1.5.0

setup_file() {
    load common
    make_models "$BATS_FILE_TMPDIR/models" a_5x37x96_g12 a_bias_rows a_bfloat16 a_float16 b_n2_c3-16_k3_min0.0_max1.0 \
        b_dropout_full_s7_o400 b_nonfinite dropout_n1027_s7_o400 dropout_n4098_s7_o400
    start_daemon "$BATS_FILE_TMPDIR/models"
}

teardown_file() {
    load common
    stop_daemon
}

setup() {
    load common
    dir=$BATS_TEST_TMPDIR/files
    mkdir "$dir"
    m=a_5x37x96_g12
    x=$golden/$m.safetensors
}

# Evaluation of a dropout model is the identity: this turns a golden input into a .npy file.
as_npy() { # FILE
    "$fusectl" infer dropout_n1027_s7_o400 -i "$golden/dropout_n1027_s7_o400.safetensors" -o "$1" >/dev/null
}

# A .npy file of float32 whose data come from standard input.
make_npy() { # SHAPE
    printf '\223NUMPY\001\000\166\000%-117s\n' "{'descr': '<f4', 'fortran_order': False, 'shape': $1, }"
    cat
}

@test "from .safetensors to .npy and to .safetensors: the same bytes" {
    run "$fusectl" infer $m -i "$x" -o "$dir/y.npy"
    expect_status 0
    expect_output "^$m: \[5, 37\] -> \[1, 96, 5, 1\] float32 in $dir/y.npy$"
    run "$fusectl" infer $m -i "$x#x" -o "$dir/y.safetensors"
    expect_status 0
    run "$fusectl" infer $m -i "$x" -o "$dir/z.safetensors#a name"
    expect_status 0
    n=$((96 * 5 * 4))
    for f in y.npy y.safetensors z.safetensors; do
        tail -c $n "$dir/$f" >"$dir/$f.data"
        cmp "$dir/y.npy.data" "$dir/$f.data"
    done
    grep -q '"y"' "$dir/y.safetensors"
    grep -q '"a name"' "$dir/z.safetensors"
}

@test "from .npy" {
    as_npy "$dir/x.npy"
    run "$fusectl" infer dropout_n1027_s7_o400 -i "$dir/x.npy" -o "$dir/y.npy"
    expect_status 0
    cmp "$dir/x.npy" "$dir/y.npy"
}

@test "16-bit types keep their dtype" {
    run "$fusectl" infer a_bfloat16 -i "$golden/a_bfloat16.safetensors" -o "$dir/y.npy"
    expect_status 0
    expect_output ' bfloat16 in '
    grep -aq "'<V2'" "$dir/y.npy"
    run "$fusectl" infer a_float16 -i "$golden/a_float16.safetensors" -o "$dir/y.npy"
    expect_status 0
    grep -aq "'<f2'" "$dir/y.npy"
}

@test "--json: one object" {
    run "$fusectl" infer $m -i "$x" -o "$dir/y.npy" --json --repeat 3
    expect_status 0
    [ "$(wc -l <<<"$output")" = 1 ]
    expect_output '"rows":5,"input":\[5,37\],"output":\[1,96,5,1\],"dtype":"float32"'
    expect_output '"batch_rows":5,"repeat":3,"late":false'
}

@test "--train: the mask follows seed and offset, which advances" {
    t=b_dropout_full_s7_o400
    train=("$fusectl" infer $t -i "$golden/$t.safetensors" --train)
    run "${train[@]}" -o "$dir/1.npy" --seed 7 --offset 400
    expect_status 0
    expect_output '^next offset 404$'
    "${train[@]}" -o "$dir/2.npy" --seed 7 --offset 400
    cmp "$dir/1.npy" "$dir/2.npy"
    "${train[@]}" -o "$dir/2.npy" --seed 8 --offset 400
    run cmp -s "$dir/1.npy" "$dir/2.npy"
    expect_status 1
    "${train[@]}" -o "$dir/2.npy" --seed 7 --offset 404
    run cmp -s "$dir/1.npy" "$dir/2.npy"
    expect_status 1
    run "${train[@]}" -o "$dir/2.npy" --seed 7 --offset 3
    expect_status 1
    run --separate-stderr "${train[@]}" -o "$dir/2.npy"
    expect_status 0
    [ -z "$stderr" ]
    run --separate-stderr "$fusectl" infer $m -i "$x" -o "$dir/y.npy" --train
    expect_status 0
    [ "$stderr" = "fusectl: note: $m has no dropout, so --train changes nothing" ]
}

@test "--result compact: the row minima of an outer sum" {
    run "$fusectl" infer $m -i "$x" -o "$dir/y.npy" --result compact
    expect_status 0
    expect_output '\[5, 37\] -> \[5, 1\] float32 in'
}

@test "--result compact: a constant" {
    c=b_n2_c3-16_k3_min0.0_max1.0
    run "$fusectl" infer $c -i "$golden/$c.safetensors" -o "$dir/y.npy" --result compact
    expect_status 0
    expect_output '^constant 0, 0 rows in full$'
    grep -aq "'|u1'" "$dir/y.npy"
    [ "$(tail -c 16 "$dir/y.npy" | od -An -tx1 | tr -d ' 0\n')" = '' ]
    run "$fusectl" infer $c -i "$golden/$c.safetensors" -o "$dir/y.npy" --result compact --json
    expect_output '"constant":0.0,"full":0'
}

@test "--result compact: samples that are not the constant" {
    run "$fusectl" infer b_nonfinite -i "$golden/b_nonfinite.safetensors" -o "$dir/y.npy" --result compact --json
    expect_status 0
    expect_output '"constant":0'
    expect_output '"full":[0-9]'
}

@test "--result compact where there are no factors is UNSUPPORTED" {
    run "$fusectl" infer dropout_n1027_s7_o400 -i "$golden/dropout_n1027_s7_o400.safetensors" -o "$dir/y.npy" --result compact
    expect_status 1
    expect_output '^fusectl: UNSUPPORTED: '
    [ ! -e "$dir/y.npy" ]
}

@test "--priority and --deadline" {
    for p in 0 1 2 3; do
        run "$fusectl" infer $m -i "$x" -o "$dir/y.npy" --priority $p --deadline 60000
        expect_status 0
    done
}

@test "a refusal names its error, and leaves no file" {
    while read -r model file; do
        run "$fusectl" infer "$model" -i "$golden/$file.safetensors" -o "$dir/y.npy"
        expect_status 1
        expect_output '^fusectl: BAD_TENSOR: .'
        [ -z "$(ls -A "$dir")" ]
    done <<'END'
a_5x37x96_g12 a_3x64x64_g64
a_5x37x96_g12 b_n2_c3-16_k3_min0.0_max1.0
a_5x37x96_g12 a_bfloat16
a_bfloat16 a_5x37x96_g12
b_n2_c3-16_k3_min0.0_max1.0 a_5x37x96_g12
END
    run "$fusectl" infer nonesuch -i "$x" -o "$dir/y.npy"
    expect_status 1
    expect_output '^fusectl: NOT_FOUND: .'
    run --separate-stderr "$fusectl" infer nonesuch -i "$x" -o "$dir/y.npy" --json
    expect_status 1
    expect_output '^\{"error":\{"name":"NOT_FOUND","text":'
    [ -z "$(ls -A "$dir")" ]
}

@test "no rows, and a tensor without dimensions" {
    make_npy '(0, 37)' </dev/null >"$dir/x.npy"
    run "$fusectl" infer $m -i "$dir/x.npy" -o "$dir/y.npy"
    [ "$status" = 1 ] || [ "$status" = 64 ] || { echo "$status $output" && return 1; }
    printf 'abcd' | make_npy '()' >"$dir/x.npy"
    run "$fusectl" infer $m -i "$dir/x.npy" -o "$dir/y.npy"
    [ "$status" = 1 ] || [ "$status" = 64 ] || { echo "$status $output" && return 1; }
    [ ! -e "$dir/y.npy" ]
}

@test "inputs that cannot be read" {
    run "$fusectl" infer $m -i "$dir/none.npy" -o "$dir/y.npy"
    expect_status 74
    expect_output "^fusectl: $dir/none.npy: No such file or directory$"
    run "$fusectl" infer $m -i "$x#nope" -o "$dir/y.npy"
    expect_status 74
    expect_output "there is no tensor 'nope'"
    run "$fusectl" infer $m -i "$x#y64" -o "$dir/y.npy"
    expect_status 74
    expect_output "F64, which is not supported"
    run "$fusectl" infer $m -i Makefile -o "$dir/y.npy"
    expect_status 64
    expect_output 'must end in .npy or .safetensors'
    as_npy "$dir/x.npy"
    sed 's/<f4/>f4/' "$dir/x.npy" >"$dir/big.npy"
    run "$fusectl" infer $m -i "$dir/big.npy" -o "$dir/y.npy"
    expect_status 74
    expect_output 'big endian'
    sed 's/False/True /' "$dir/x.npy" >"$dir/f.npy"
    run "$fusectl" infer $m -i "$dir/f.npy" -o "$dir/y.npy"
    expect_status 74
    expect_output 'Fortran order'
    truncate -s -4 "$dir/x.npy"
    run "$fusectl" infer $m -i "$dir/x.npy" -o "$dir/y.npy"
    expect_status 74
    expect_output 'its header means'
    [ ! -e "$dir/y.npy" ]
}

@test "outputs that cannot be written" {
    run "$fusectl" infer $m -i "$x" -o "$dir/no/y.npy"
    expect_status 74
    expect_output 'its directory cannot be written: No such file'
    run "$fusectl" infer $m -i "$x" -o "$dir/y.txt"
    expect_status 64
    expect_output 'must end in .npy or .safetensors'
    ln -s /dev/full "$dir/full.npy"
    run "$fusectl" infer $m -i "$x" -o "$dir/full.npy"
    expect_status 74
    expect_output 'exists and is not a regular file'
    [ -L "$dir/full.npy" ]
}

@test "the input is not written over, whatever it is called" {
    cp "$x" "$dir/x.safetensors"
    ln "$dir/x.safetensors" "$dir/hard.safetensors"
    ln -s x.safetensors "$dir/soft.safetensors"
    for out in x x.safetensors#y hard soft; do
        [[ $out == *.safetensors* ]] || out=$out.safetensors
        run "$fusectl" infer $m -i "$dir/x.safetensors" -o "$dir/$out"
        expect_status 64
        expect_output "^fusectl: $dir/$out would be written over its own input$"
    done
    cmp "$x" "$dir/x.safetensors"
}

@test "a disk that fills up leaves the old file and nothing else" {
    t=dropout_n4098_s7_o400
    for kind in npy safetensors; do
        mkdir "$dir/$kind"
        echo old >"$dir/$kind/y.$kind"
        run bash -c 'trap "" XFSZ; ulimit -f 8; "$0" infer $1 -i "$2" -o "$3"' "$fusectl" $t "$golden/$t.safetensors" "$dir/$kind/y.$kind"
        expect_status 74
        expect_output "y.$kind: .*File too large"
        [ "$(cat "$dir/$kind/y.$kind")" = old ]
        [ "$(ls -A "$dir/$kind")" = y.$kind ]
    done
}

@test "a closed standard input, output or error receives nothing of ours" {
    run bash -c '"$0" infer $1 -i "$2" -o "$3" <&- >&- 2>&-' "$fusectl" $m "$x" "$dir/y.npy"
    expect_status 74
    run bash -c '"$0" infer $1 -i "$2" -o "$3" <&- 2>&-' "$fusectl" $m "$x" "$dir/z.npy"
    expect_status 0
    cmp "$dir/y.npy" "$dir/z.npy"
}

@test "twenty at once, each its own answer" {
    "$fusectl" infer $m -i "$x" -o "$dir/expected.npy"
    pids=()
    for i in {1..20}; do
        "$fusectl" infer $m -i "$x" -o "$dir/$i.npy" --repeat 5 >/dev/null 3>&- &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid"
    done
    for i in {1..20}; do
        cmp "$dir/expected.npy" "$dir/$i.npy"
    done
}
