//! What a rank is told ([`TrainJob`]), what it reports and asks ([`Link`]), and how it ends ([`Finished`]).

use std::sync::Arc;
use std::time::Duration;

use trainctl_collective::KeyValue;
use trainctl_spec::job::JobSpec;
use trainctl_spec::report::{BurnInReport, FinishCause, Phase, SaveKind, ShardReport, TrainRow, ValidationRow};
use trainctl_spec::start::{DataPhase, StartFrom};
use trainctl_spec::{Generation, Rank, Step};

use crate::Error;
use crate::pulse::Pulse;

/// One rank's part of one generation.
pub struct TrainJob {
    /// The resolved spec: paths absolute, model config inline, threads filled in.
    pub spec: JobSpec,
    /// This process's rank.
    pub rank: Rank,
    /// Ranks of the generation.
    pub world_size: u32,
    /// This rank's place among the generation's ranks on its host: with the next one it says which blocks of a checkpoint this
    /// rank proves.
    pub local_rank: u32,
    /// The generation's ranks on its host.
    pub local_world_size: u32,
    /// The generation; it is part of every shard's name (C2).
    pub generation: Generation,
    /// Checkpoint to start from; `None` starts from what `model.init` says. Never a pointer (C9).
    pub start_from: Option<StartFrom>,
    /// Which samples follow.
    pub phase: DataPhase,
    /// First step to run: one after the checkpoint's, or 0.
    pub start_step: Step,
    /// Stop before this step (`--until-step` or `max_steps`): the last step is `stop_at − 1`.
    pub stop_at: Step,
    /// Intra-op threads (P4 depends on it).
    pub threads: u32,
    /// Numeric address that this rank's transports bind.
    pub address: String,
    /// The generation's rendezvous keys; sealed by the owner after [`Link::formed`].
    pub rendezvous: Arc<dyn KeyValue>,
    /// How long this rank's device burns in before the rank is formed; zero = not at all.
    pub burn_in: Duration,
    /// The generation's ranks on this host, this one included: they sum among themselves in a burn-in.
    pub node_ranks: Vec<u32>,
    /// Counts this rank's collectives, for whoever watches it.
    pub pulse: Arc<Pulse>,
}

/// What the worker has heard and the trainer should act on. Every rank puts its own view into the per-step all-reduce
/// and acts on the sum, so all act at the same step, whichever rank heard it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Save after the current step and stop.
    pub stop: bool,
    /// Save after the current step. The link clears it when a save of a step at or after the request was started.
    pub save: bool,
}

/// An attempt to write a save that failed on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedSave {
    /// Which save.
    pub kind: SaveKind,
    /// Its step.
    pub step: Step,
    /// Attempts so far, from 1.
    pub attempt: u32,
    /// Another attempt follows. Without it this rank never reports the save as durable.
    pub is_tried_again: bool,
    /// What failed.
    pub why: String,
}

/// The engine's only way to its worker. Calls return at once (a queue, a shared word), but for [`Link::withdraw`]: the
/// training step waits for none of them.
pub trait Link: Send + Sync {
    /// The phase that begins, and the step it belongs to.
    fn phase(&self, phase: Phase, step: Step);
    /// All process groups are made and proved by one collective; the rendezvous store may be sealed.
    fn formed(&self);
    /// The burn-in that the job asks for is over, well or not; before [`Link::formed`].
    fn burned_in(&self, report: BurnInReport);
    /// A step is done (every rank). `compute` is the time of it in which the rank did not wait for others.
    fn step_done(&self, step: Step, compute: Duration);
    /// The row of a step (rank 0 only).
    fn train_row(&self, row: TrainRow);
    /// The row of an evaluation (rank 0 only).
    fn validation_row(&self, row: ValidationRow);
    /// A checkpoint of the current step is being made: it answers every save request that was heard so far.
    fn save_begins(&self);
    /// This rank's shards of a step are written, synced and hashed.
    fn shards_durable(&self, report: ShardReport);
    /// A save failed on this rank; the run goes on on the last commit.
    fn save_failed(&self, failed: FailedSave);
    /// A save was left out on this rank, as `checkpoint.when_busy` says or because nothing can be written.
    fn save_skipped(&self, kind: SaveKind, step: Step, why: &str);
    /// Takes back what this rank has reported as durable of saves of `kind`, as far as no coordinator was ever sent it. The steps
    /// of those that nobody can commit any more. Waits for the worker, though not for long; called beside training.
    fn withdraw(&self, kind: SaveKind, steps: &[Step]) -> Vec<Step>;
    /// What is asked of this rank now. Read once per step, and before a write is tried again.
    fn requests(&self) -> Requests;
    /// This rank has failed by itself (`None`: it panicked) and its process groups still stand. Once they are taken down its peers
    /// fail too, and who is heard of first is chance: a process of one rank ends here, so that its end says why (P6).
    fn failed(&self, _: Option<&Error>) {}
}

/// How a rank ended by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub cause: FinishCause,
    /// The step that would come next: `stop_at`, or less after a stop request.
    pub next_step: Step,
    /// Loss of the last step that ran; `None` when none did.
    pub last_loss: Option<f64>,
}
