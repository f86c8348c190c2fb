//! The run directory and the journal: all that survives.

use std::collections::{BTreeMap, BTreeSet};

use trainctl_coordinator::record::JobRecord;

/// A committed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) generation: u64,
    pub(crate) term: u64,
}

/// What is durable, whoever lives.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    /// The one sequence of terms and generations (J2).
    numbers: u64,
    /// The highest term.
    pub(crate) term: u64,
    /// The job as its journal has it.
    pub(crate) journal: Option<String>,
    /// By step.
    pub(crate) commits: BTreeMap<u64, Commit>,
    /// What LATEST names.
    pub(crate) latest: Option<u64>,
    /// Steps in `training.jsonl`, in order.
    pub(crate) rows: Vec<u64>,
    /// Shards that ranks have made durable: (generation, step) → ranks.
    pub(crate) shards: BTreeMap<(u64, u64), BTreeSet<u32>>,
    /// Generations that were prepared.
    pub(crate) generations: u64,
}

impl Disk {
    fn take_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// A coordinator starts.
    pub(crate) fn take_term(&mut self) -> u64 {
        self.term = self.take_number();
        self.term
    }

    /// A generation begins: what is later than its start goes (C6). Returns it with the checkpoint that it starts from.
    pub(crate) fn prepare(&mut self) -> (u64, Option<u64>) {
        let start = self.latest;
        let next = start.map_or(0, |step| step + 1);
        self.rows.retain(|step| *step < next);
        self.generations += 1;
        (self.take_number(), start)
    }

    /// C2: complete saves only, of a term that nobody has superseded.
    pub(crate) fn commit(&mut self, step: u64, world_size: u32, commit: Commit) {
        assert_eq!(commit.term, self.term, "C2: term {} committed under term {}", commit.term, self.term);
        let written = self.shards.get(&(commit.generation, step)).cloned().unwrap_or_default();
        let all: BTreeSet<u32> = (0..world_size).collect();
        assert_eq!(
            written, all,
            "C2: step {step} of generation {} was committed without all shards",
            commit.generation
        );
        // A successor that does not know of it commits it once more, which changes nothing.
        if self.commits.get(&step).is_some_and(|there| there.generation == commit.generation) {
            return;
        }
        assert!(self.latest.is_none_or(|latest| latest < step), "LATEST went from {:?} to {step}", self.latest);
        self.commits.insert(step, commit);
        self.latest = Some(step);
    }

    pub(crate) fn put_row(&mut self, step: u64) {
        if self.rows.last().is_none_or(|last| *last < step) {
            self.rows.push(step);
        }
    }

    /// J1: nothing leaves a terminal phase. J5: only progress refills the budget.
    pub(crate) fn put_job(&mut self, record: &JobRecord) {
        if let Some(before) = self.job() {
            let stays = !before.phase.is_terminal() || before.phase == record.phase;
            assert!(stays, "J1: from {} to {}", before.phase, record.phase);
            assert!(before.generation <= record.generation, "the generation fell");
            let progress = self.latest > before.budget.last_failure_step;
            let refilled = record.budget.used < before.budget.used;
            assert!(!refilled || progress, "J5: the budget was refilled without a later commit");
        }
        self.journal = Some(serde_json::to_string(record).unwrap());
    }

    pub(crate) fn job(&self) -> Option<JobRecord> {
        self.journal.as_deref().map(|text| serde_json::from_str(text).unwrap())
    }
}
