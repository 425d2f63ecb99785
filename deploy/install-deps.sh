#!/bin/bash
# install-deps.sh [--check]: what building and testing needs on Debian 12, installed with apt-get (as root or through sudo).
# --check installs nothing and exits 1 when something is missing. One line of reason for each choice that is not plain.
set -euo pipefail

packages=(
    gcc g++ make pkg-config ca-certificates
    libuv1-dev        # event loop
    libmsgpack-dev    # msgpack-c, the wire encoding
    libsystemd-dev    # sd-daemon, sd-journal
    libconfig-dev     # configuration and model files: lists of groups, line numbers
    libjansson-dev    # safetensors headers, --json: 64-bit integers, refuses duplicate keys
    libdnnl-dev       # oneDNN: matmul and conv3d of the CPU backend
    libcmocka-dev     # C tests
    bats              # tests of the command line
    scdoc             # manuals
    dpkg-dev          # dependencies of the package that make deb builds
    strace            # failing system calls in tests
    clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev # fuzzing, format, lint
    util-linux procps # setpriv, unshare, flock: tests of other users and of the service
)

missing=()
for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "${1:-}" = --check ]; then
    echo "missing: ${missing[*]}" >&2
    exit 1
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "install-deps: needs root or sudo to install: ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q >/dev/null
"${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
