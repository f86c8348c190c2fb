//! The trainers of one generation: they meet, step together, save, and lose each other.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use trainctl_proto::v1;
use trainctl_proto::v1::rank_report::Report;

use crate::scenario::{Job, Wants};

/// What the ranks of a generation have begun.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) world_size: u32,
    /// Workers of the ranks that have started and not ended.
    pub(crate) alive: BTreeMap<u32, usize>,
    pub(crate) started: BTreeSet<u32>,
    /// When the last one had started.
    pub(crate) whole_since: Option<u64>,
    /// The next step.
    pub(crate) step: u64,
    pub(crate) stop_at: u64,
    /// A rank was asked to stop: all do, after the next step.
    pub(crate) is_asked_to_stop: bool,
    pub(crate) cause: v1::FinishCause,
    /// Ranks that still write: one save is in flight at most (C7).
    pub(crate) saving: BTreeSet<u32>,
    /// Somebody is gone: whoever is left will notice.
    pub(crate) is_broken: bool,
    pub(crate) is_done: bool,
}

impl Group {
    pub(crate) fn new(assignment: &v1::Assignment) -> Self {
        Self {
            world_size: assignment.world_size,
            alive: BTreeMap::new(),
            started: BTreeSet::new(),
            whole_since: None,
            step: assignment.start_step,
            stop_at: assignment.stop_at,
            is_asked_to_stop: false,
            cause: v1::FinishCause::Complete,
            saving: BTreeSet::new(),
            is_broken: false,
            is_done: false,
        }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.started.len() == self.world_size as usize && !self.is_broken
    }

    /// A rank has ended.
    pub(crate) fn left(&mut self, rank: u32) {
        self.alive.remove(&rank);
        self.saving.remove(&rank);
        self.is_broken |= !self.is_done;
    }
}

/// The rank that fails by itself at this step.
pub(crate) fn poisoned(job: &Job, step: u64) -> Option<u32> {
    match job.wants {
        Wants::Poison { rank, step: at } if at == step => Some(rank),
        _ => None,
    }
}

pub(crate) fn row(step: u64) -> Report {
    Report::TrainRow(v1::TrainRow { step, loss: 1.0, ..v1::TrainRow::default() })
}

/// A loss that goes up and down, so that LOWEST_VAL is not LATEST.
fn val_loss(step: u64) -> f64 {
    (step * 7 % 11) as f64
}

pub(crate) fn shards(rank: u32, step: u64, kind: v1::SaveKind) -> Report {
    let path = format!("model/shard-{rank}");
    let file = v1::ShardFile { path, size: 1, blake3: vec![0; 32], ..v1::ShardFile::default() };
    let val_losses = HashMap::from([("default".to_owned(), val_loss(step))]);
    Report::Shards(v1::ShardsDurable {
        step,
        checkpoint: format!("epoch_0_step_{step}"),
        files: vec![file],
        kind: kind.into(),
        val_losses,
        ..Default::default()
    })
}

pub(crate) fn skipped(step: u64) -> Report {
    let (kind, reason) = (v1::SaveKind::Full.into(), "the save before is still being written".to_owned());
    Report::SaveSkipped(v1::SaveSkipped { step, reason, kind })
}

pub(crate) fn finished(steps_done: u64, cause: v1::FinishCause) -> Report {
    Report::Finished(v1::Finished { steps_done, cause: cause.into() })
}

/// How a trainer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    PeerLost,
    Killed,
    /// By its own fault.
    Failed,
    Stopped,
    /// Nobody saw it: its worker was killed too.
    Unseen,
}

pub(crate) fn exited(end: End, step: Option<u64>) -> Report {
    let exit = v1::TrainerExit { step, ..v1::TrainerExit::default() };
    Report::Exited(match end {
        End::Done => v1::TrainerExit { code: Some(0), ..exit },
        End::PeerLost => v1::TrainerExit { code: Some(71), ..exit },
        End::Killed => v1::TrainerExit { signal: Some(9), ..exit },
        End::Failed => {
            let stderr_tail = vec!["thread 'main' panicked: index out of bounds".to_owned()];
            v1::TrainerExit { code: Some(101), stderr_tail, phase: v1::Phase::Stepping.into(), ..exit }
        }
        End::Stopped => v1::TrainerExit { signal: Some(9), stopped_by_us: true, ..exit },
        End::Unseen => exit,
    })
}
