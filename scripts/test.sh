#!/usr/bin/env bash
# All checks and tests, in release: the profile that runs use too, so that nothing is compiled twice. Everything that they
# need and the machine lacks goes into target/ and the user's cache. How long each part took goes to target/timings.tsv
# (part, seconds, exit status), what the tests said to target/tests.log; scripts/timings.sh prints both.
set -euo pipefail
cd "$(dirname "$0")/.."

timings=target/timings.tsv
log=target/tests.log
mkdir -p target
: >"$timings"
: >"$log"

# part NAME COMMAND…: runs it, records how long it took, and ends everything when it fails.
part() {
    local name=$1 start=${EPOCHREALTIME/,/.} status=0
    shift
    echo "=== $name"
    "$@" || status=$?
    awk -v name="$name" -v start="$start" -v end="${EPOCHREALTIME/,/.}" -v status="$status" \
        'BEGIN { printf "%s\t%.1f\t%d\n", name, end - start, status }' >>"$timings"
    [ "$status" -eq 0 ] || exit "$status"
}

# The second implementation of state_hash (tests/state_hash.py) and Hugging Face's reader of tokenizer.json.
venv=target/venv
install_python() {
    [ ! -f "$venv/complete" ] || return 0
    rm -rf "$venv" &&
        python3 -m venv "$venv" &&
        "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
            -r tests/requirements.txt &&
        touch "$venv/complete"
}

tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --release --locked --workspace --no-fail-fast
    else
        cargo test --release --locked --workspace --no-fail-fast --lib --bins --tests
    fi 2>&1 | tee -a "$log"
}

doctests() {
    cargo test --release --locked --workspace --doc
}

part libtorch make --no-print-directory libtorch
LIBTORCH=$(scripts/libtorch.sh)
export LIBTORCH
part formatting make --no-print-directory fmt
part lints make --no-print-directory lint
part build make --no-print-directory build
part python install_python
TRAINCTL_PYTHON=$PWD/$venv/bin/python
export TRAINCTL_PYTHON
part tests tests
part doctests doctests
scripts/timings.sh
