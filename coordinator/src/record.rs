//! What the journal keeps of one job.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use trainctl_spec::report::{TrainRow, ValidationRow};
use trainctl_spec::start::{DataPhase, Keep};
use trainctl_spec::state::JobPhase;
use trainctl_spec::{Generation, JobId, Term};
use trainctl_store::manifest::ForkParent;

use crate::decide::deadlines::History;
use crate::decide::restart::Budget;
use crate::decide::saves::FailedSaves;

/// One job as the journal keeps it: enough for a successor to go on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// Job id.
    pub id: JobId,
    /// Idempotency key of the submission.
    pub request_id: String,
    /// The resolved spec.
    pub spec_yaml: String,
    /// Milliseconds since the Unix epoch.
    pub submitted_at_ms: u64,
    /// When it reached a terminal phase.
    pub finished_at_ms: Option<u64>,
    /// `--until-step`: number of steps done at which the job ends.
    pub until_step: Option<u64>,
    /// What the next formation starts from: `LATEST`, `LOWEST_VAL`, a name; empty = the newest commit, else from scratch.
    pub from: String,
    /// Term over the run directory under which the record was written.
    pub term: Term,
    /// Where the job is.
    pub phase: JobPhase,
    /// The newest generation; 0 before the first.
    pub generation: Generation,
    /// What that generation started from.
    pub start: StartPoint,
    /// Who carries each rank of that generation, in rank order.
    pub ranks: Vec<RankPlace>,
    /// Restart budget (J5).
    pub budget: Budget,
    /// Restarts so far, for people.
    pub restarts: u32,
    /// The newest generation has ended and what comes next was decided: its loss is charged.
    #[serde(default)]
    pub decided: bool,
    /// Saves that failed since the last commit.
    #[serde(default)]
    pub failed_saves: FailedSaves,
    /// How long the run has needed for its stages.
    #[serde(default)]
    pub history: History,
    /// Workers that take a rank only where there are not enough others: their replica differed, or their rank was evicted.
    #[serde(default)]
    pub avoided: BTreeSet<String>,
    /// Ranks that were moved since they held the others up.
    #[serde(default)]
    pub evictions: u32,
    /// What the run held when the job ended: a successor need not look.
    #[serde(default)]
    pub end: Option<End>,
}

/// What is shown of a job that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// What LATEST and LOWEST_VAL named; empty = nothing.
    pub pointers: (String, String),
    /// First training row.
    pub first: Option<TrainRow>,
    /// Newest training row.
    pub last: Option<TrainRow>,
    /// Newest validation row, with its set's name.
    pub validation: Option<(String, ValidationRow)>,
}

impl JobRecord {
    /// A job that was just admitted under `term`: queued, with nothing behind it.
    pub fn queued(id: JobId, spec_yaml: String, term: Term) -> Self {
        Self {
            id,
            request_id: String::new(),
            spec_yaml,
            submitted_at_ms: 0,
            finished_at_ms: None,
            until_step: None,
            from: String::new(),
            term,
            phase: JobPhase::Queued,
            generation: Generation(0),
            start: StartPoint::default(),
            ranks: Vec::new(),
            budget: Budget::default(),
            restarts: 0,
            decided: false,
            failed_saves: FailedSaves::default(),
            history: History::default(),
            avoided: BTreeSet::new(),
            evictions: 0,
            end: None,
        }
    }

    /// The newest generation, and the step of the run's own checkpoint that it starts from; `None` before the first one.
    pub fn begun(&self) -> Option<(Generation, Option<u64>)> {
        (self.generation > Generation(0)).then(|| (self.generation, self.start.own_step()))
    }
}

/// What a generation starts from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPoint {
    /// Checkpoint's name; empty = from scratch.
    pub checkpoint: String,
    /// blake3 of its manifest, hexadecimal; empty = from scratch.
    pub manifest_blake3: String,
    /// First zero-based step to compute.
    pub step: u64,
    /// Directory or URL that holds the checkpoint; empty = where the run's own are.
    #[serde(default)]
    pub store: String,
    /// What is taken of it besides the weights.
    #[serde(default)]
    pub keep: Keep,
    /// Which samples follow.
    #[serde(default)]
    pub phase: DataPhase,
    /// The checkpoint of another run that this run began with.
    #[serde(default)]
    pub parent: Option<ForkParent>,
}

impl StartPoint {
    /// The step of the run's own checkpoint that it is; `None` if the run begins here. Nothing later exists by then (C6).
    pub fn own_step(&self) -> Option<u64> {
        let is_own = !self.checkpoint.is_empty() && self.store.is_empty();
        self.step.checked_sub(1).filter(|_| is_own)
    }
}

/// Who carries a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlace {
    /// Worker id.
    pub worker: String,
    /// The worker daemon's incarnation when the rank was assigned.
    pub incarnation: String,
}

/// One worker as the journal keeps it: only what no Hello can tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Worker id.
    pub id: String,
    /// Host name, for people.
    pub host: String,
    /// It takes no rank; absent = it may.
    pub quarantine: Option<Quarantine>,
}

/// Why a worker takes no rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// Who said so.
    pub by: QuarantinedBy,
    /// Why, for people.
    pub reason: String,
    /// What was measured, for a ticket.
    pub figures: String,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// Who quarantined a worker, and so who lifts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuarantinedBy {
    /// Its own figures: lifted when it measures itself well again.
    Health,
    /// A look at the run directory or at its peers, which is not repeated while it carries nothing: lifted by a person.
    Probe,
    /// Its device computed wrongly in a burn-in: lifted by a person.
    BurnIn,
    /// A person, who lifts it.
    Person,
}

impl QuarantinedBy {
    /// As events and `--output json` spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Probe => "probe",
            Self::BurnIn => "burn_in",
            Self::Person => "person",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_knows_what_the_last_generation_started_from() {
        let mut record = JobRecord::queued(JobId("a-1".to_owned()), String::new(), Term(1));
        assert_eq!(record.begun(), None);
        record.generation = Generation(3);
        assert_eq!(record.begun(), Some((Generation(3), None)), "from scratch: nothing older may stay");
        record.start = StartPoint { checkpoint: "epoch_0_step_9".to_owned(), step: 10, ..StartPoint::default() };
        assert_eq!(record.begun(), Some((Generation(3), Some(9))));
    }
}
