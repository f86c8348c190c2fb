//! The trainers of one generation: they meet, step together, save, and lose each other.

use std::collections::{BTreeMap, BTreeSet};

use trainctl_proto::v1;

/// Steps between two saves.
pub(crate) const SAVE_EVERY: u64 = 4;

/// What a rank of a generation has begun.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) world_size: u32,
    /// Workers of the ranks that have started and not ended.
    pub(crate) alive: BTreeMap<u32, usize>,
    pub(crate) started: BTreeSet<u32>,
    /// The next step.
    pub(crate) step: u64,
    pub(crate) stop_at: u64,
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
            step: assignment.start_step,
            stop_at: assignment.stop_at,
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
        self.is_broken |= !self.is_done;
    }
}

/// Whether a full save follows a step.
pub(crate) fn saves_after(step: u64, stop_at: u64) -> bool {
    (step + 1).is_multiple_of(SAVE_EVERY) || step + 1 == stop_at
}

pub(crate) fn row(step: u64) -> v1::rank_report::Report {
    v1::rank_report::Report::TrainRow(v1::TrainRow { step, loss: 1.0, ..v1::TrainRow::default() })
}

pub(crate) fn shards(rank: u32, step: u64) -> v1::rank_report::Report {
    let path = format!("model/shard-{rank}");
    let file = v1::ShardFile { path, size: 1, blake3: vec![0; 32], ..v1::ShardFile::default() };
    let kind = v1::SaveKind::Full.into();
    let checkpoint = format!("epoch_0_step_{step}");
    v1::rank_report::Report::Shards(v1::ShardsDurable {
        step,
        checkpoint,
        files: vec![file],
        kind,
        ..Default::default()
    })
}

pub(crate) fn finished(steps_done: u64) -> v1::rank_report::Report {
    v1::rank_report::Report::Finished(v1::Finished { steps_done, cause: v1::FinishCause::Complete.into() })
}

/// How a trainer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Done,
    PeerLost,
    Killed,
    Stopped,
    /// Nobody saw it: its worker was killed too.
    Unseen,
}

pub(crate) fn exited(end: End, step: Option<u64>) -> v1::rank_report::Report {
    let exit = v1::TrainerExit { step, ..v1::TrainerExit::default() };
    v1::rank_report::Report::Exited(match end {
        End::Done => v1::TrainerExit { code: Some(0), ..exit },
        End::PeerLost => v1::TrainerExit { code: Some(71), ..exit },
        End::Killed => v1::TrainerExit { signal: Some(9), ..exit },
        End::Stopped => v1::TrainerExit { signal: Some(9), stopped_by_us: true, ..exit },
        End::Unseen => exit,
    })
}
