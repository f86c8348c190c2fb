#!/usr/bin/env bash
# Shows that the power-cut matrix notices a missing fsync: runs it once for each sync that the store needs, with that one left
# out, and fails if the matrix passes. Arguments: names of syncs, for example commit.manifest.fsync; default: the main ones.
set -euo pipefail
cd "$(dirname "$0")/.."

syncs=("$@")
if [ ${#syncs[@]} -eq 0 ]; then
    syncs=(shard.write.fsync commit.config.fsync commit.losses.fsync commit.manifest.fsync commit.manifest.fsync_dir
        pointer.latest.fsync_dir numbers.take.fsync directory.make.fsync_dir rows.sync.fsync)
fi
matrix() {
    TRAINCTL_REQUIRE=fuse cargo test --quiet --release --locked -p trainctl-store --test crash -- \
        --exact cuts::a_power_cut_anywhere_leaves_a_run_that_loads_and_goes_on
}
matrix
for sync in "${syncs[@]}"; do
    if TRAINCTL_WITHOUT_FSYNC=$sync matrix >target/without-fsync.log 2>&1; then
        echo "the matrix passes without $sync" >&2
        exit 1
    fi
    grep -m1 -E '^(Fresh|Rollback): ' target/without-fsync.log | sed "s/^/without $sync: /"
done
