#!/usr/bin/env bash
# Builds libtrainctl_nccl.so, which the trainer opens when a job asks for CUDA. Needs no GPU and no CUDA toolkit: the headers
# come from PyPI wheels, pinned with hashes, unpacked once into the user's cache. NCCL itself is needed at run time only.
#
#   worker/collective/nccl/build.sh [OUTPUT]       default: target/release/libtrainctl_nccl.so, beside the trainer
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
output=${1:-$root/target/release/libtrainctl_nccl.so}
libtorch=$("$root/scripts/libtorch.sh")
cuda=$libtorch/../nvidia/cu13

headers="${XDG_CACHE_HOME:-$HOME/.cache}/trainctl/nccl-headers-2.29.7"
if [ ! -f "$headers/complete" ]; then
    mkdir -p "$(dirname "$headers")"
    work=$(mktemp -d "$headers.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cat >"$work/requirements.txt" <<'REQ'
nvidia-nccl-cu13==2.29.7 --hash=sha256:edd81538446786ec3b73972543e53bb43bcaf0bfc8ef76cb679fcc390ffe136d
nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649
REQ
    echo "fetching the headers of NCCL and CUDA into $headers (210 MB download)" >&2
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
        --python-version 3.11 --implementation cp --abi cp311 --abi none \
        --platform manylinux_2_18_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
        -d "$work/wheels" -r "$work/requirements.txt" >&2
    python3 - "$work" <<'PY'
import glob, sys, zipfile
for wheel in glob.glob(sys.argv[1] + "/wheels/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sys.argv[1] + "/unpacked", [name for name in archive.namelist() if "/include/" in name])
PY
    touch "$work/unpacked/complete"
    mv -T "$work/unpacked" "$headers" 2>/dev/null || [ -f "$headers/complete" ]
fi

# The folders of the wheels that hold the three headers in question.
include() { dirname "$(find "$headers/nvidia" -path "*/include/$1" -print -quit | sed "s|/$1\$|/x|")"; }

mkdir -p "$(dirname "$output")"
"${CXX:-c++}" -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -Wall -Wextra -DUSE_C10D_NCCL \
    -isystem "$libtorch/include" -isystem "$libtorch/include/torch/csrc/api/include" -isystem "$cuda/include" \
    -isystem "$(include nccl.h)" -isystem "$(include crt/host_config.h)" -isystem "$(include nv/target)" \
    -isystem "$here/../csrc/cuda_headers" "$here/../csrc/nccl_plugin.cpp" -o "$output" \
    -L"$libtorch/lib" -ltorch_cuda -ltorch_cpu -lc10_cuda -lc10 -Wl,--allow-shlib-undefined -Wl,-rpath,"$libtorch/lib"
echo "$output"
