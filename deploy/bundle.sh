#!/bin/bash
# bundle.sh: build/fused-bundle.tar.gz, what a GPU host without packages needs: programs, their libraries, GPU tests, golden
# cases. Not CUDA's own libraries, nor the C library. Unpack, then: tests/gpu/run.sh check (with B=. in the environment).
set -euo pipefail
cd "$(dirname "$0")/.."
B=${B:-build}
name=fused-bundle limit=$((60 << 20))
to=$B/$name
rm -rf "$to"
mkdir -p "$to/lib" "$to/tests/gpu" "$to/tests/bench"
programs=(fused fusectl libfused.so.1 fused-cuda.so fused-cuda-faulty.so tests/demo tests/bench/bench_gpu tests/bench/bench_product
    tests/bench/serve_ping tests/bench/serve_maker)
for p in test_gpu_golden test_gpu_random test_gpu_small test_conv test_shifted test_constant test_product test_gpu_batch test_gpu_results \
    test_gpu_backend eval_gpu way_gpu drive filter; do
    programs+=("tests/gpu/$p")
done
for p in "${programs[@]}"; do
    [ -e "$B/$p" ] || { echo "bundle.sh: there is no $B/$p" >&2; exit 1; }
    cp -L "$B/$p" "$to/$p"
    strip --strip-debug "$to/$p"
done
cp tests/gpu/run.sh tests/gpu/serve.sh tests/gpu/torch_check.py "$to/tests/gpu/"
# Without systemd here, serve.sh leaves the filter of system calls out.
tests/gpu/syscalls.sh >"$to/tests/gpu/syscalls" || rm -f "$to/tests/gpu/syscalls"
cp tests/bench/torch_gpu.py tests/bench/serve.sh tests/bench/serve_torch.py "$to/tests/bench/"
cp tests/demo.sh "$to/tests/"
cp -r tests/golden "$to/tests/"
cp -r config "$to/"

# Libraries that the programs ask for and that a bare host may lack.
for p in "${programs[@]}"; do
    ldd "$to/$p"
done | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*|libcuda|libcublas[^/]*|libcudnn[^/]*|libcudart|libnvidia[^/]*)\.so' |
    xargs -r -I{} cp -L {} "$to/lib/"

tar -C "$B" -czf "$B/$name.tar.gz" "$name"
size=$(stat -c %s "$B/$name.tar.gz")
echo "$B/$name.tar.gz: $((size >> 20)) MiB, $(find "$to/lib" -type f | wc -l) libraries"
[ "$size" -le "$limit" ] || { echo "bundle.sh: larger than 60 MiB" >&2; exit 1; }
