#!/usr/bin/env bash
# Prints the path of b3sum, the peer of `trainctl checkpoints verify` in `make bench-checkpoint`; builds it into target/tools
# when it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

version=1.8.7
tools=$PWD/target/tools
[ "$("$tools/bin/b3sum" --version 2>/dev/null)" = "b3sum $version" ] ||
    cargo install --quiet --locked --root "$tools" --target-dir "$tools/build" b3sum@$version >&2
echo "$tools/bin/b3sum"
