//! Which samples a step reads and which rank reads which: pure functions of step, batch sizes and world size (D2, P3).
//!
//! D2: the sample ids of a step are a run of the sampler's ids. They are cut in order into micro-batches of `local_batch_size` (the last
//! may be short), and ranks take contiguous runs of micro-batches whose counts differ by at most one. Hence the samples of a
//! step, and with a loss of Σ token losses ÷ global token count its gradient, do not depend on the world size.

use std::ops::Range;

/// Ids of the samples that `step` (from 0) reads: D2 with a constant global batch and nothing skipped.
#[must_use]
pub fn step_ids(step: u64, global_batch_size: u32) -> Range<u64> {
    let size = u64::from(global_batch_size);
    step.saturating_mul(size)..step.saturating_add(1).saturating_mul(size)
}

/// The ids cut in order into micro-batches of `local_batch_size`; the last may be short (D2). A size of 0 counts as 1.
#[must_use]
pub fn micro_batches(ids: Range<u64>, local_batch_size: u32) -> Vec<Range<u64>> {
    let size = u64::from(local_batch_size.max(1));
    (ids.start..ids.end).step_by(size as usize).map(|from| from..from.saturating_add(size).min(ids.end)).collect()
}

/// The run of micro-batches that one data-parallel rank computes: counts differ by at most one, lower ranks take the surplus (D2).
/// Empty for a rank outside the world.
#[must_use]
pub fn assign(num_micro_batches: usize, dp_rank: u32, dp_size: u32) -> Range<usize> {
    if dp_rank >= dp_size {
        return 0..0;
    }
    let (rank, size) = (dp_rank as usize, dp_size as usize);
    let (each, surplus) = (num_micro_batches / size, num_micro_batches % size);
    let start = rank * each + rank.min(surplus);
    start..start + each + usize::from(rank < surplus)
}

/// Rounds that every rank runs, ⌈micro-batches ÷ dp⌉. A rank whose run is shorter takes part in the last round's collectives
/// with zeros (D2).
#[must_use]
pub fn rounds(num_micro_batches: usize, dp_size: u32) -> usize {
    num_micro_batches.div_ceil(dp_size.max(1) as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn three_ranks_share_seven_micro_batches_in_order() {
        let cut = micro_batches(step_ids(2, 20), 3);
        assert_eq!(cut.first(), Some(&(40..43)));
        assert_eq!(cut.last(), Some(&(58..60)));
        assert_eq!((0..3).map(|rank| assign(cut.len(), rank, 3)).collect::<Vec<_>>(), [0..3, 3..5, 5..7]);
        assert_eq!(rounds(cut.len(), 3), 3);
    }

    #[test]
    fn a_rank_may_have_nothing() {
        assert_eq!(assign(2, 2, 3), 2..2);
        assert_eq!(rounds(2, 3), 1);
        assert_eq!(assign(2, 3, 3), 0..0);
    }

    proptest! {
        /// D2: at any world size the ranks' ids, one rank after another, are the step's ids in order.
        #[test]
        fn d2_union_over_ranks_is_the_step(step in 0u64..1 << 40, batch in 1u32..300, local in 1u32..40, world in 1u32..70) {
            let ids = step_ids(step, batch);
            let cut = micro_batches(ids.clone(), local);
            let runs: Vec<_> = (0..world).map(|rank| assign(cut.len(), rank, world)).collect();
            let seen: Vec<u64> = runs.iter().flat_map(|run| cut[run.clone()].iter().cloned().flatten()).collect();
            prop_assert_eq!(seen, ids.collect::<Vec<_>>());
            let counts: Vec<usize> = runs.iter().map(ExactSizeIterator::len).collect();
            let (least, most) = (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
            prop_assert!(most - least <= 1);
            prop_assert_eq!(most, rounds(cut.len(), world));
        }

        /// D2: consecutive steps read consecutive ids.
        #[test]
        fn d2_steps_follow_each_other(step in 0u64..1 << 40, batch in 1u32..1000) {
            prop_assert_eq!(step_ids(step, batch).end, step_ids(step + 1, batch).start);
        }
    }
}
