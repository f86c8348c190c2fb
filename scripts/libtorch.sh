#!/usr/bin/env bash
# Prints the folder of libtorch 2.13.0 (lib/, include/), installing it into the user's cache when it is missing.
#
# libtorch comes from the PyPI wheel of torch, the only prebuilt libtorch in the registries that we may assume. CPU use
# needs two more wheels: libtorch_cpu.so names libcudart.so.13 and libcupti.so.13 and finds them by its own RPATH
# beside it (../../nvidia/cu13/lib), so unpacking the three wheels into one folder is enough. LIBTORCH overrides all.
set -euo pipefail

if [ -n "${LIBTORCH:-}" ]; then
    [ -f "$LIBTORCH/lib/libtorch_cpu.so" ] || {
        echo "LIBTORCH=$LIBTORCH has no lib/libtorch_cpu.so: point it at a libtorch 2.13.0 folder or unset it" >&2
        exit 1
    }
    echo "$LIBTORCH"
    exit 0
fi

version=2.13.0
root="${XDG_CACHE_HOME:-$HOME/.cache}/trainctl/libtorch-$version"
if [ -f "$root/complete" ]; then
    echo "$root/torch"
    exit 0
fi
[ "$(uname -m)" = x86_64 ] || { echo "no pinned libtorch for $(uname -m): set LIBTORCH to a libtorch $version folder" >&2; exit 1; }

mkdir -p "$(dirname "$root")"
work=$(mktemp -d "$root.XXXXXX")
trap 'rm -rf "$work"' EXIT
cat >"$work/requirements.txt" <<'REQ'
torch==2.13.0 --hash=sha256:60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8
REQ
echo "installing libtorch $version into $root (530 MB download, 1.2 GB on disk)" >&2
python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    --python-version 3.11 --implementation cp --abi cp311 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 --platform manylinux2014_x86_64 \
    -d "$work/wheels" -r "$work/requirements.txt" >&2
python3 - "$work" <<'PY'
import glob, sys, zipfile
for wheel in sorted(glob.glob(sys.argv[1] + "/wheels/*.whl")):
    zipfile.ZipFile(wheel).extractall(sys.argv[1] + "/unpacked")
PY
touch "$work/unpacked/complete"
# Another clone may have finished first: whoever renames first wins, the result is the same.
mv -T "$work/unpacked" "$root" 2>/dev/null || [ -f "$root/complete" ]
echo "$root/torch"
