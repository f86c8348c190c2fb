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

/// A save that failed.
#[derive(Clone, Copy, Debug)]
pub struct Failure<'a> {
    /// Of which kind.
    pub kind: SaveKind,
    /// Whose.
    pub generation: Generation,
    /// Zero-based.
    pub step: u64,
    /// Attempts that failed. Only a run's last save is tried again; then each counts, since no other save follows.
    pub attempt: u32,
    /// Why.
    pub error: &'a str,
}

/// Decides on a failed save, and returns what the journal must keep. Saves of the generation that are `under_way`, by their steps,
/// may still be committed: what failed before such a one is not in a row with what failed after it. (Reports of an outage come
/// in all at once, and commits take longer.)
pub fn decide_failed_save(
    before: &FailedSaves,
    failure: &Failure<'_>,
    under_way: impl Iterator<Item = u64>,
    max_failures: Option<u32>,
) -> (OnFailure, FailedSaves) {
    let Failure { kind, generation, step, attempt, error } = *failure;
    let mut after = before.clone();
    if kind == SaveKind::Full {
        after.0.insert((generation, step));
        let remembered = REMEMBERED.max(max_failures.unwrap_or_default() as usize);
        while after.0.len() > remembered {
            after.0.pop_first();
        }
    }
    let pending = under_way.map(|step| (generation, step)).filter(|save| !after.0.contains(save)).max();
    let since = after.0.iter().filter(|failed| pending.is_none_or(|pending| **failed > pending)).count();
    let in_a_row = u32::try_from(since).unwrap_or(u32::MAX).saturating_add(attempt.saturating_sub(1));
    if kind == SaveKind::Weights {
        return (OnFailure::GoOn { in_a_row }, after);
    }
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

    fn failure(kind: SaveKind, generation: u64, step: u64, attempt: u32) -> Failure<'static> {
        Failure { kind, generation: Generation(generation), step, attempt, error: "rank 0: disk full" }
    }

    fn fail(before: &FailedSaves, generation: u64, step: u64) -> (OnFailure, FailedSaves) {
        decide_failed_save(before, &failure(SaveKind::Full, generation, step, 1), [].into_iter(), MAX)
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
        let endless = decide_failed_save(&saves, &failure(SaveKind::Full, 1, 29, 1), [].into_iter(), None).0;
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
    fn each_attempt_of_the_last_save_counts() {
        let (_, saves) = fail(&FailedSaves::default(), 1, 9);
        let nth = |attempt| decide_failed_save(&saves, &failure(SaveKind::Full, 1, 39, attempt), [].into_iter(), MAX).0;
        assert_eq!(nth(1), OnFailure::GoOn { in_a_row: 2 });
        assert!(matches!(nth(2), OnFailure::Stop(_)));
    }

    #[test]
    fn a_save_under_way_parts_what_failed_before_it_from_what_failed_after_it() {
        let (_, saves) = fail(&FailedSaves::default(), 1, 9);
        let (_, saves) = fail(&saves, 1, 19);
        let with = |under_way: &[u64]| {
            let under_way = under_way.iter().copied();
            decide_failed_save(&saves, &failure(SaveKind::Full, 1, 39, 1), under_way, MAX).0
        };
        assert_eq!(with(&[29]), OnFailure::GoOn { in_a_row: 1 });
        assert_eq!(with(&[14]), OnFailure::GoOn { in_a_row: 2 });
        assert!(matches!(with(&[]), OnFailure::Stop(_)));
        assert!(matches!(with(&[19, 39]), OnFailure::Stop(_)), "those have failed themselves");
    }

    #[test]
    fn weights_saved_apart_count_neither_for_nor_against() {
        let (_, saves) = fail(&FailedSaves::default(), 1, 9);
        let (_, saves) = fail(&saves, 1, 19);
        let weights = failure(SaveKind::Weights, 1, 24, 1);
        let (weights, after) = decide_failed_save(&saves, &weights, [].into_iter(), MAX);
        assert_eq!((weights, &after), (OnFailure::GoOn { in_a_row: 2 }, &saves));
        assert_eq!(after_commit(&saves, SaveKind::Weights, Generation(1), 24), saves);
        assert!(matches!(fail(&saves, 1, 29).0, OnFailure::Stop(_)));
    }

    #[test]
    fn the_record_stays_small() {
        let mut saves = FailedSaves::default();
        for step in 0..1000 {
            saves = decide_failed_save(&saves, &failure(SaveKind::Full, 1, step, 1), [].into_iter(), None).1;
        }
        assert_eq!(saves.0.len(), REMEMBERED);
    }
}
