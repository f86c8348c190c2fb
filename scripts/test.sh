#!/usr/bin/env bash
# All tests, in release: the profile that runs use too, so that nothing is compiled twice. Everything that they need and
# the machine lacks goes into target/. `make test` checks formatting and lints first.
set -euo pipefail
cd "$(dirname "$0")/.."

LIBTORCH=$(scripts/libtorch.sh)
export LIBTORCH

# The second implementation of state_hash (tests/state_hash.py) and Hugging Face's reader of tokenizer.json.
venv=target/venv
if ! [ -f "$venv/complete" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: -r tests/requirements.txt
    touch "$venv/complete"
fi
TRAINCTL_PYTHON=$PWD/$venv/bin/python
export TRAINCTL_PYTHON

if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --release --locked --workspace --no-fail-fast
    cargo test --release --locked --workspace --doc
else
    cargo test --release --locked --workspace --no-fail-fast
fi
