//! Is a save complete, and may it be committed?
//!
//! C2: a checkpoint is committed when every rank of one generation has reported its shards of that step durable. The vote is
//! keyed by (generation, step): reports of two generations never add up. And it is a commit only if all ranks hold the same
//! state and have written that one ([`super::replicas`]).

use std::collections::BTreeMap;
use std::fmt;

use trainctl_spec::report::{ReplicaDigest, ShardReport};

use super::replicas::{Agreement, Divergence, decide_replicas};

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
    /// The ranks do not hold the same state: neither can this save be committed, nor may the generation go on.
    Diverged(Divergence),
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
    /// All ranks hold the same state, but what they wrote is another one.
    Written,
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
    let replicas = || reports.iter().filter_map(|(rank, report)| Some((*rank, report.replica?)));
    match decide_replicas(&replicas().map(|(rank, replica)| (rank, replica.held)).collect()) {
        Agreement::Diverged(divergence) => Commit::Diverged(divergence),
        Agreement::Unanimous | Agreement::NotCompared => match replicas().next() {
            Some((_, ReplicaDigest { held, .. })) if written(reports).is_some_and(|written| written != held) => {
                Commit::Refuse(Contradiction::Written)
            }
            _ => Commit::Now,
        },
    }
}

/// The digest of what all ranks together have written, if all say it.
fn written(reports: &BTreeMap<u32, ShardReport>) -> Option<u128> {
    let shares = reports.values().map(|report| report.replica?.written);
    shares.into_iter().try_fold(0_u128, |sum, share| Some(sum.wrapping_add(share?)))
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Names(a, b) => write!(f, "ranks name the checkpoint {a} and {b}"),
            Self::Consumed(a, b) => write!(f, "ranks have consumed {a} and {b} samples"),
            Self::File(path) => write!(f, "two ranks wrote {path}"),
            Self::Written => f.write_str(
                "what the ranks wrote is not what all of them hold: a snapshot was damaged in the memory of one of them",
            ),
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
            replica: None,
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
    fn c2_only_what_all_ranks_hold_and_have_written_is_a_commit() {
        let save = |replicas: &[(u128, Option<u128>)]| {
            let reports = (0..).zip(replicas).map(|(rank, (held, written))| {
                let replica = Some(ReplicaDigest { held: *held, written: *written });
                (rank, ShardReport { replica, ..report(&rank.to_string(), 8) })
            });
            decide_commit(replicas.len() as u32, &reports.collect())
        };
        // Sums wrap.
        assert_eq!(save(&[(9, Some(u128::MAX)), (9, Some(10))]), Commit::Now);
        assert_eq!(save(&[(9, Some(4)), (9, Some(6))]), Commit::Refuse(Contradiction::Written));
        assert_eq!(save(&[(9, Some(8))]), Commit::Refuse(Contradiction::Written), "a rank alone");
        assert_eq!(save(&[(9, None), (9, None)]), Commit::Now, "weights that were rounded");
        let divergence = Divergence { replicas: 3, suspects: vec![1], named: true };
        assert_eq!(save(&[(9, Some(3)), (8, Some(3)), (9, Some(3))]), Commit::Diverged(divergence));
    }

    #[test]
    fn contradicting_reports_are_refused() {
        let consumed = BTreeMap::from([(0, report("a", 8)), (1, report("b", 16))]);
        assert_eq!(decide_commit(2, &consumed), Commit::Refuse(Contradiction::Consumed(8, 16)));
        let files = BTreeMap::from([(0, report("a", 8)), (1, report("a", 8))]);
        assert_eq!(decide_commit(2, &files), Commit::Refuse(Contradiction::File("a".to_owned())));
    }
}
