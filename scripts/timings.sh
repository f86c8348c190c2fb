#!/usr/bin/env bash
# Prints how long each part of the last `make test` took, and which tests (with plain cargo: which test programs) took
# longest. Reads what scripts/test.sh wrote.
set -euo pipefail
cd "$(dirname "$0")/.."

timings=target/timings.tsv
log=target/tests.log
[ -s "$timings" ] || {
    echo "$timings is not there: run \`make test\` first" >&2
    exit 1
}

awk -F '\t' '
    BEGIN { printf "%-12s %9s  %s\n", "PART", "SECONDS", "RESULT" }
    { printf "%-12s %9.1f  %s\n", $1, $2, $3 == 0 ? "ok" : "exit " $3; total += $2 }
    END { printf "%-12s %9.1f\n", "all", total }' "$timings"

# nextest:    "        PASS [   0.313s] (2/2) crate test"
# cargo test: "     Running unittests src/lib.rs (target/…)", then "test result: ok. … finished in 0.31s"
slowest=$(awk '
    { gsub(/\033\[[0-9;]*m/, "") }
    match($0, /^ *(PASS|FAIL|SIGKILL|TIMEOUT|TRY [0-9]+ [A-Z]+) \[ *[0-9.]+s\]/) {
        seconds = $0
        sub(/^[^\[]*\[ */, "", seconds)
        sub(/s\].*/, "", seconds)
        name = $0
        sub(/^[^\]]*\] *(\([ 0-9\/]+\))? */, "", name)
        printf "%9.1f  %s\n", seconds, name
    }
    $1 == "Running" { program = $NF }
    /^test result:.*finished in/ {
        seconds = $NF
        sub(/s$/, "", seconds)
        gsub(/.*\/|-[0-9a-f]+\)|[()]/, "", program)
        printf "%9.1f  %s\n", seconds, program
    }' "$log" 2>/dev/null | sort -rn | awk '$1 >= 1.0 && n++ < 12')
[ -z "$slowest" ] || printf '\n%9s  %s\n%s\n' SECONDS "SLOWEST TESTS" "$slowest"
