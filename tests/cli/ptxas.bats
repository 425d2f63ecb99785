#!/usr/bin/env bats
# kernels/cuda/ptxas.sh: what the compiler says of the kernels is printed, and ends the build where it costs speed.

bats_require_minimum_version 1.5.0

# Logs as ptxas -v writes them: bytes spilled, then further lines.
setup() {
    load common
    log=$BATS_TEST_TMPDIR/log
}

kernel() { # BYTES [LINE...]
    printf "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n    0 bytes stack frame, %d bytes spill stores, %d bytes spill loads\n" \
        "$1" "$1"
    printf 'ptxas info    : Used 168 registers, used 4 barriers, 4928 bytes smem\n'
    shift
    [ $# = 0 ] || printf '%s\n' "$@"
}

check() { # SOURCE
    run "${BATS_TEST_DIRNAME}/../../kernels/cuda/ptxas.sh" "$1" "$log"
}

@test "registers, shared memory and spills are printed" {
    { kernel 0; kernel 0; } >"$log"
    check kernels/cuda/wide_product.cu
    expect_status 0
    expect_output '^  PTXAS    kernels/cuda/wide_product.cu: 2 kernels, at most 168 registers, 4928 bytes shared, 0 bytes spilled$'
}

@test "a spill in a product ends the build" {
    { kernel 0; kernel 8; } >"$log"
    check kernels/cuda/wide_product.cu
    expect_status 1
    expect_output 'wide_product.cu: 16 bytes spilled, 0 kernels with serialised wgmma'
}

@test "elsewhere a spill is printed" {
    kernel 8 >"$log"
    check kernels/cuda/tail.cu
    expect_status 0
    expect_output '1 kernels, at most 168 registers, 4928 bytes shared, 16 bytes spilled$'
}

@test "serialised wgmma in a product ends the build" {
    kernel 0 "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions" \
        >"$log"
    check kernels/cuda/narrow_product.cu
    expect_status 1
    expect_output 'narrow_product.cu: 0 bytes spilled, 1 kernels with serialised wgmma'
}

@test "what else the compiler says is passed on" {
    kernel 0 "ptxas warning : setmaxnreg ignored" >"$log"
    check kernels/cuda/wide_product.cu
    expect_status 0
    expect_output 'ptxas warning : setmaxnreg ignored'
}
