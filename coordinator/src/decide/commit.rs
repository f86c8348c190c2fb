//! Is a save complete, and may it be committed?
//!
//! C2: a checkpoint is committed when every rank of one generation has reported its shards of that step durable. The vote is
//! keyed by (generation, step): reports of two generations never add up.

use std::collections::BTreeMap;
use std::fmt;

use trainctl_spec::report::ShardReport;

/// The decision on one save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Commit {
    /// Every rank has reported and the reports agree.
    Now,
    /// Not every rank has reported.
    Wait {
        /// Ranks that have not.
        missing: Vec<u32>,
    },
    /// The reports contradict each other: this save can never be committed.
    Refuse(Contradiction),
}

/// How reports of one save contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contradiction {
    /// Two ranks name the checkpoint differently.
    Names(String, String),
    /// Two ranks have consumed different numbers of samples.
    Consumed(u64, u64),
    /// Two ranks wrote the same file.
    File(String),
}

/// Decides on the save of one (generation, step) from the reports so far, by rank.
pub fn decide_commit(world_size: u32, reports: &BTreeMap<u32, ShardReport>) -> Commit {
    let missing: Vec<u32> = (0..world_size).filter(|rank| !reports.contains_key(rank)).collect();
    if !missing.is_empty() {
        return Commit::Wait { missing };
    }
    let mut files = BTreeMap::new();
    let mut first: Option<&ShardReport> = None;
    for report in reports.values() {
        let head = *first.get_or_insert(report);
        if head.checkpoint != report.checkpoint {
            return Commit::Refuse(Contradiction::Names(head.checkpoint.clone(), report.checkpoint.clone()));
        }
        if head.consumed_samples != report.consumed_samples {
            return Commit::Refuse(Contradiction::Consumed(head.consumed_samples, report.consumed_samples));
        }
        for file in &report.files {
            if files.insert(file.path.as_str(), ()).is_some() {
                return Commit::Refuse(Contradiction::File(file.path.clone()));
            }
        }
    }
    Commit::Now
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Names(a, b) => write!(f, "ranks name the checkpoint {a} and {b}"),
            Self::Consumed(a, b) => write!(f, "ranks have consumed {a} and {b} samples"),
            Self::File(path) => write!(f, "two ranks wrote {path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use trainctl_spec::report::{SaveKind, ShardFile};

    use super::*;

    fn report(file: &str, consumed_samples: u64) -> ShardReport {
        let file =
            ShardFile { path: file.to_owned(), size: 1, blake3: String::new(), block_blake3: Vec::new(), header: None };
        ShardReport {
            step: 9,
            checkpoint: "epoch_0_step_9".to_owned(),
            files: vec![file],
            tensors: Vec::new(),
            consumed_samples,
            train_loss: None,
            val_losses: BTreeMap::new(),
            kind: SaveKind::Full,
            corpora: BTreeMap::new(),
            stall_seconds: 0.0,
            write_seconds: 0.0,
        }
    }

    #[test]
    fn c2_every_rank_must_have_reported() {
        let mut reports = BTreeMap::from([(1, report("b", 8))]);
        assert_eq!(decide_commit(3, &reports), Commit::Wait { missing: vec![0, 2] });
        reports.insert(0, report("a", 8));
        reports.insert(2, report("c", 8));
        assert_eq!(decide_commit(3, &reports), Commit::Now);
    }

    #[test]
    fn contradicting_reports_are_refused() {
        let consumed = BTreeMap::from([(0, report("a", 8)), (1, report("b", 16))]);
        assert_eq!(decide_commit(2, &consumed), Commit::Refuse(Contradiction::Consumed(8, 16)));
        let files = BTreeMap::from([(0, report("a", 8)), (1, report("a", 8))]);
        assert_eq!(decide_commit(2, &files), Commit::Refuse(Contradiction::File("a".to_owned())));
    }
}
