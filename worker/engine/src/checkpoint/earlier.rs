//! What a generation keeps of its earlier saves of a kind until they are committed. Pure; every rank decides alike.
//!
//! A commit's retention frees the disk. While nobody commits, the ranks do so themselves, each for its own files, which carry
//! the generation in their names. Two kinds of saves may go:
//!
//! - One that some rank could not write will never be committed (C2).
//! - Of those that all ranks wrote retention would drop all but the newest and the milestones. An earlier one goes on a rank
//!   whose worker withdraws the report of it, which it does if no coordinator was ever sent it: without that report nobody
//!   can commit the save, not now and not later.
//!
//! The newest complete save is never touched: it is what the next coordinator commits.

use std::collections::VecDeque;

use trainctl_store::layout::CheckpointName;

/// The earlier saves.
#[derive(Debug, Default)]
pub(super) struct Earlier {
    /// How many complete ones stay; `None`: all.
    keep: Option<usize>,
    /// One of step s stays if s + 1 is a multiple of it.
    keep_every_steps: Option<u64>,
    /// The newest, and whether this rank has written its share; not judged yet.
    newest: Option<(CheckpointName, bool)>,
    /// Those that all ranks wrote and that stay so far, in order.
    complete: VecDeque<CheckpointName>,
}

/// Saves that may go.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Leaving {
    /// Some rank could not write its share.
    pub(super) dead: Option<CheckpointName>,
    /// A later one is complete.
    pub(super) superseded: Vec<CheckpointName>,
}

impl Earlier {
    /// As the spec says for commits of this kind.
    pub(super) fn new(keep: Option<u32>, keep_every_steps: Option<u64>) -> Self {
        let keep = keep.map(|keep| keep.max(1) as usize);
        Self { keep, keep_every_steps, ..Self::default() }
    }

    /// A save begins on every rank.
    pub(super) fn begin(&mut self, name: CheckpointName) {
        self.newest = Some((name, false));
    }

    /// This rank has written its share of the newest.
    pub(super) fn written(&mut self) {
        if let Some((_, written)) = &mut self.newest {
            *written = true;
        }
    }

    /// Whether this rank has failed to write its share of the newest. Asked when no rank writes.
    pub(super) fn is_unwritten(&self) -> bool {
        self.newest.is_some_and(|(_, written)| !written)
    }

    /// Judges the newest: so many ranks have not written it.
    pub(super) fn judge(&mut self, unwritten: i64) -> Leaving {
        let mut leaving = Leaving::default();
        match self.newest.take() {
            Some((name, _)) if unwritten > 0 => leaving.dead = Some(name),
            Some((name, _)) => self.complete.push_back(name),
            None => {}
        }
        let is_milestone = |name: &CheckpointName| {
            self.keep_every_steps.is_some_and(|every| (name.step + 1).is_multiple_of(every.max(1)))
        };
        while self.complete.len() > self.keep.unwrap_or(usize::MAX) {
            leaving.superseded.extend(self.complete.pop_front().filter(|name| !is_milestone(name)));
        }
        if self.keep.is_none() {
            self.complete.clear();
        }
        leaving
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(step: u64) -> CheckpointName {
        CheckpointName { epoch: 0, step }
    }

    /// What may go when the save after those of `steps` begins; in each so many ranks failed.
    fn leaving(earlier: &mut Earlier, step: u64, unwritten: i64) -> Leaving {
        earlier.begin(name(step));
        assert!(earlier.is_unwritten());
        if unwritten == 0 {
            earlier.written();
        }
        earlier.judge(unwritten)
    }

    fn superseded(steps: &[u64]) -> Leaving {
        Leaving { dead: None, superseded: steps.iter().copied().map(name).collect() }
    }

    #[test]
    fn as_many_stay_as_retention_keeps_and_each_goes_once() {
        let mut earlier = Earlier::new(Some(2), None);
        let gone = [9, 19, 29, 39].map(|step| leaving(&mut earlier, step, 0));
        assert_eq!(gone, [superseded(&[]), superseded(&[]), superseded(&[9]), superseded(&[19])]);
    }

    #[test]
    fn milestones_stay_and_so_does_everything_without_a_limit() {
        let mut earlier = Earlier::new(Some(1), Some(20));
        let gone = [9, 19, 29, 39].map(|step| leaving(&mut earlier, step, 0));
        assert_eq!(gone, [superseded(&[]), superseded(&[9]), superseded(&[]), superseded(&[29])]);
        let mut all = Earlier::new(None, None);
        assert!((0..9).all(|step| leaving(&mut all, step, 0) == Leaving::default()));
    }

    #[test]
    fn what_a_rank_could_not_write_goes_and_the_newest_complete_one_stays() {
        let mut earlier = Earlier::new(Some(1), None);
        let gone = [(9, 0), (19, 1), (29, 2), (39, 0)].map(|(step, unwritten)| leaving(&mut earlier, step, unwritten));
        let dead = |step| Leaving { dead: Some(name(step)), superseded: vec![] };
        assert_eq!(gone, [superseded(&[]), dead(19), dead(29), superseded(&[9])]);
    }

    #[test]
    fn where_nothing_was_begun_there_is_nothing_to_judge() {
        let mut earlier = Earlier::new(Some(1), None);
        assert!(!earlier.is_unwritten());
        assert_eq!(earlier.judge(0), Leaving::default());
    }
}
