//! Which samples a step reads and which rank reads which: pure functions of data phase, step, batch sizes and world size (D2, P3).
//!
//! D2: the sample ids of a step are a run of the sampler's ids. They are cut in order into micro-batches of `local_batch_size` (the last
//! may be short), and ranks take contiguous runs of micro-batches whose counts differ by at most one. Hence the samples of a
//! step, and with a loss of Σ token losses ÷ global token count its gradient, do not depend on the world size.

use std::ops::Range;

use trainctl_spec::start::DataPhase;

/// Ids of the samples that `step` reads, \[N(step), N(step + 1)) of its phase: D2 with a constant global batch and nothing skipped.
#[must_use]
pub fn step_ids(phase: &DataPhase, step: u64, global_batch_size: u32) -> Range<u64> {
    phase.position(step, global_batch_size)..phase.position(step.saturating_add(1), global_batch_size)
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
        let cut = micro_batches(step_ids(&DataPhase::default(), 2, 20), 3);
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

    fn phase() -> impl Strategy<Value = DataPhase> {
        let phase = |(first_step, first_sample)| DataPhase { first_step, first_sample, ..DataPhase::default() };
        (0u64..1 << 40, 0u64..1 << 40).prop_map(phase)
    }

    proptest! {
        /// D2: at any world size the ranks' ids, one rank after another, are the step's ids in order.
        #[test]
        fn d2_union_over_ranks_is_the_step(step in 0u64..1 << 40, batch in 1u32..300, local in 1u32..40, world in 1u32..70, phase in phase()) {
            let ids = step_ids(&phase, phase.first_step + step, batch);
            let cut = micro_batches(ids.clone(), local);
            let runs: Vec<_> = (0..world).map(|rank| assign(cut.len(), rank, world)).collect();
            let seen: Vec<u64> = runs.iter().flat_map(|run| cut[run.clone()].iter().cloned().flatten()).collect();
            prop_assert_eq!(seen, ids.collect::<Vec<_>>());
            let counts: Vec<usize> = runs.iter().map(ExactSizeIterator::len).collect();
            let (least, most) = (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
            prop_assert!(most - least <= 1);
            prop_assert_eq!(most, rounds(cut.len(), world));
        }

        /// D2: consecutive steps read consecutive ids, and a phase's first step its first sample.
        #[test]
        fn d2_steps_follow_each_other(step in 0u64..1 << 40, batch in 1u32..1000, phase in phase()) {
            let step = phase.first_step + step;
            prop_assert_eq!(step_ids(&phase, step, batch).end, step_ids(&phase, step + 1, batch).start);
            prop_assert_eq!(step_ids(&phase, phase.first_step, batch).start, phase.first_sample);
        }

        /// P3: a phase that begins where another one stands reads on as if that had gone on.
        #[test]
        fn p3_a_phase_can_be_cut_anywhere(at in 0u64..1 << 20, more in 0u64..1 << 20, batch in 1u32..1000, phase in phase()) {
            let at = phase.first_step + at;
            let rest = DataPhase { first_step: at, first_sample: phase.position(at, batch), ..phase.clone() };
            prop_assert_eq!(step_ids(&rest, at + more, batch), step_ids(&phase, at + more, batch));
        }
    }
}
