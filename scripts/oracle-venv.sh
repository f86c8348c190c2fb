#!/usr/bin/env bash
# Prints the Python of target/oracle-venv: PyTorch and transformers, pinned with hashes in tests/oracle/requirements.txt. They
# are the oracle of `make oracle` and the peers of `make bench-checkpoint`; no other check needs them. Makes the venv when
# it is missing or older than the pins (2 GB download, 4 GB on disk). TRAINCTL_ORACLE_PYTHON overrides it.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${TRAINCTL_ORACLE_PYTHON:-}" ]; then
    echo "$TRAINCTL_ORACLE_PYTHON"
    exit 0
fi

venv=$PWD/target/oracle-venv
pins=tests/oracle/requirements.txt
if ! cmp --silent "$pins" "$venv/complete"; then
    python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
        echo "$(python3 --version) is not 3.11 to 3.13: set TRAINCTL_ORACLE_PYTHON to a Python with $pins" >&2
        exit 1
    }
    echo "installing PyTorch and transformers into $venv" >&2
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: -r "$pins" >&2
    cp "$pins" "$venv/complete"
fi
echo "$venv/bin/python"
