//! Failed saves: does the job go on?
//!
//! A run survives a save that fails: it goes on on its last commit, and the next save is due in any case. A run that can not
//! save at all computes steps that a failure will throw away, so `checkpoint.max_failures` ends it. Nothing is computed anew
//! for weights that are saved apart: whether they could be saved counts neither for nor against a run.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use trainctl_spec::Generation;
use trainctl_spec::report::SaveKind;
use trainctl_spec::state::Cause;

/// So many failures are remembered at least; more would say nothing new.
const REMEMBERED: usize = 64;

/// The checkpoints that failed since the last commit of one, as the journal keeps them. A save that several ranks report as failed, or
/// whose commit fails again and again, is one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedSaves(BTreeSet<(Generation, u64)>);

/// What follows from a failed save.
#[derive(Clone, Debug, PartialEq)]
pub enum OnFailure {
    /// The run goes on on its last commit.
    GoOn {
        /// Saves that failed since then.
        in_a_row: u32,
    },
    /// The job stops.
    Stop(Cause),
}

/// Decides on a save of `step` by `generation` that failed because of `error`, and returns what the journal must keep.
pub fn decide_failed_save(
    before: &FailedSaves,
    kind: SaveKind,
    generation: Generation,
    step: u64,
    error: &str,
    max_failures: Option<u32>,
) -> (OnFailure, FailedSaves) {
    let mut after = before.clone();
    if kind == SaveKind::Weights {
        return (OnFailure::GoOn { in_a_row: after.in_a_row() }, after);
    }
    after.0.insert((generation, step));
    let remembered = REMEMBERED.max(max_failures.unwrap_or_default() as usize);
    while after.0.len() > remembered {
        after.0.pop_first();
    }
    let in_a_row = after.in_a_row();
    let decision = match max_failures {
        Some(max) if in_a_row >= max => {
            let saves = if in_a_row == 1 { "save".to_owned() } else { format!("{in_a_row} saves in a row") };
            let message =
                format!("{saves} failed (checkpoint.max_failures = {max}), the last one of step {step}: {error}");
            OnFailure::Stop(Cause::Storage { message })
        }
        _ => OnFailure::GoOn { in_a_row },
    };
    (decision, after)
}

impl FailedSaves {
    fn in_a_row(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

/// A committed checkpoint proves that saves work again: what failed up to it no longer counts. What failed later, and was
/// heard of first, does.
pub fn after_commit(before: &FailedSaves, kind: SaveKind, generation: Generation, step: u64) -> FailedSaves {
    if kind == SaveKind::Weights {
        return before.clone();
    }
    FailedSaves(before.0.iter().copied().filter(|failed| *failed > (generation, step)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Option<u32> = Some(3);

    fn fail(before: &FailedSaves, generation: u64, step: u64) -> (OnFailure, FailedSaves) {
        decide_failed_save(before, SaveKind::Full, Generation(generation), step, "rank 0: disk full", MAX)
    }

    #[test]
    fn the_third_failed_save_in_a_row_stops_the_job_and_says_why() {
        let (first, saves) = fail(&FailedSaves::default(), 1, 9);
        assert_eq!(first, OnFailure::GoOn { in_a_row: 1 });
        let (_, saves) = fail(&saves, 1, 19);
        let (third, _) = fail(&saves, 1, 29);
        let OnFailure::Stop(cause) = third else { panic!("{third:?}") };
        let text = cause.to_string();
        assert!(text.contains("3 saves in a row failed (checkpoint.max_failures = 3)"), "{text}");
        assert!(text.contains("step 29: rank 0: disk full"), "{text}");
        let endless = decide_failed_save(&saves, SaveKind::Full, Generation(1), 29, "disk full", None).0;
        assert_eq!(endless, OnFailure::GoOn { in_a_row: 3 });
    }

    #[test]
    fn a_save_that_fails_on_every_rank_and_again_at_its_commit_is_one() {
        let (_, saves) = fail(&FailedSaves::default(), 1, 9);
        let (again, saves) = fail(&saves, 1, 9);
        assert_eq!(again, OnFailure::GoOn { in_a_row: 1 });
        let (restarted, _) = fail(&saves, 2, 9);
        assert_eq!(
            restarted,
            OnFailure::GoOn { in_a_row: 2 },
            "the next generation's save of that step is another one"
        );
    }

    #[test]
    fn a_commit_forgives_what_failed_before_it_and_not_what_failed_later() {
        let (_, saves) = fail(&FailedSaves::default(), 1, 9);
        let (_, saves) = fail(&saves, 1, 29);
        let saves = after_commit(&saves, SaveKind::Full, Generation(1), 19);
        assert_eq!(fail(&saves, 1, 39).0, OnFailure::GoOn { in_a_row: 2 });
        assert_eq!(after_commit(&saves, SaveKind::Full, Generation(2), 9), FailedSaves::default());
    }

    #[test]
    fn weights_saved_apart_count_neither_for_nor_against() {
        let (_, saves) = fail(&FailedSaves::default(), 1, 9);
        let (_, saves) = fail(&saves, 1, 19);
        let (weights, after) = decide_failed_save(&saves, SaveKind::Weights, Generation(1), 24, "disk full", MAX);
        assert_eq!((weights, &after), (OnFailure::GoOn { in_a_row: 2 }, &saves));
        assert_eq!(after_commit(&saves, SaveKind::Weights, Generation(1), 24), saves);
        assert!(matches!(fail(&saves, 1, 29).0, OnFailure::Stop(_)));
    }

    #[test]
    fn the_record_stays_small() {
        let mut saves = FailedSaves::default();
        for step in 0..1000 {
            saves = decide_failed_save(&saves, SaveKind::Full, Generation(1), step, "full", None).1;
        }
        assert_eq!(saves.0.len(), REMEMBERED);
    }
}
