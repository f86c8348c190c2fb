//! Saving: a snapshot at the step boundary, then a thread that makes it durable.
//!
//! - **C7** Training waits for the copy to host memory, and for the *write* of the save before where the spec says `wait`;
//!   never for a commit, so a coordinator that is away stops nothing.
//! - Each kind of save has one buffer and at most one writing thread: memory and threads are bounded.
//! - Whether a save is made is decided on counts that are summed over ranks ([`super::decide`]).
//! - A write that fails is reported and the run goes on on the last commit; only the run's last save must succeed.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tch::Device;
use trainctl_spec::job::WhenBusy;
use trainctl_spec::report::SaveKind;
use trainctl_spec::{Generation, Rank, Step};
use trainctl_store::Location;
use trainctl_store::fault::{self, FailPoint};
use trainctl_store::layout::{CheckpointName, WEIGHTS};
use trainctl_store::space::free_bytes;

use super::deal::{self, Piece};
use super::decide::{self, Decision, Obstacles};
use super::snapshot::{Buffer, Plan, State};
use super::write::{Meta, Write};
use crate::Error;
use crate::job::{Link, TrainJob};
use crate::parallel::World;
use crate::params::Parameters;
use crate::schedule::SaveReason;

/// A save hashes and writes on at most so many threads, and on no more than the rank may train with.
const WRITERS: u32 = 2;

/// Saves one rank's share.
pub struct Saver {
    rank: Rank,
    world_size: u32,
    generation: Generation,
    threads: u32,
    when_busy: WhenBusy,
    link: Arc<dyn Link>,
    full: Lane,
    /// Absent where the spec asks for no weights.
    weights: Option<Lane>,
    /// How the newest full save that has ended went.
    newest: Result<(), Error>,
}

/// The saves of one kind.
struct Lane {
    kind: SaveKind,
    place: Location,
    plan: Arc<Plan>,
    /// Bytes of one save, all ranks together.
    all_bytes: u64,
    state: LaneState,
}

enum LaneState {
    /// The buffer's pages are being touched.
    Preparing(JoinHandle<Result<Buffer, Error>>),
    /// A buffer waits for a snapshot.
    Idle(Buffer),
    /// A snapshot is being written.
    Writing(CheckpointName, JoinHandle<Written>),
    /// The buffer was lost with its thread: the next save makes another.
    Empty,
}

/// What a writing thread gives back: the buffer, for the next snapshot, and how it went.
type Written = (Buffer, Result<(), String>);

impl Saver {
    /// A saver for `job`'s rank. Buffers are made in the background.
    ///
    /// # Errors
    /// [`Error::Spec`] when `checkpoint.checkpoint_dir` is no place for checkpoints, [`Error::Internal`].
    pub fn new(job: &TrainJob, params: &Parameters, device: Device, link: Arc<dyn Link>) -> Result<Self, Error> {
        let hands = deal::deal(params.entries(), job.world_size);
        let lane = |kind, place| Lane::new(kind, place, params, &hands, job.rank, device);
        let place = Location::of_job(&job.spec).map_err(|e| Error::Spec(e.to_string()))?;
        let checkpoint = &job.spec.checkpoint;
        let weights = checkpoint.weights_every_steps.map(|_| lane(SaveKind::Weights, place.join(WEIGHTS)));
        Ok(Self {
            rank: job.rank,
            world_size: job.world_size,
            generation: job.generation,
            threads: job.threads,
            when_busy: checkpoint.when_busy,
            link,
            full: lane(SaveKind::Full, place)?,
            weights: weights.transpose()?,
            newest: Ok(()),
        })
    }

    /// Decides with the other ranks whether the save is made, copies the state and starts to write it. Every rank calls it
    /// with the same `kind` and `reason` at the same step.
    ///
    /// # Errors
    /// [`Error::Collective`] when a peer was lost. A save that fails is reported; [`Saver::finish`] returns the last one's.
    pub fn save(
        &mut self,
        kind: SaveKind,
        reason: SaveReason,
        state: State<'_>,
        meta: Meta,
        world: &World,
    ) -> Result<(), Error> {
        let started = Instant::now();
        let step = Step(meta.trainer.step);
        let name = CheckpointName { epoch: meta.trainer.epoch, step: step.0 };
        let busy = !decide::waits(reason, self.when_busy) && self.is_writing(kind);
        if !busy {
            self.settle(kind);
        }
        let Some(lane) = self.lane_mut(kind) else { return Ok(()) };
        let shortage = lane.shortage();
        let counts = world.sum(&[i64::from(busy), i64::from(shortage.is_some())], "agree on a save", step)?;
        let obstacles = match counts[..] {
            [busy, full] => Obstacles { busy, full },
            _ => return Err(Error::Internal("an all-reduce changed a tensor's length".to_owned())),
        };
        match decide::decide(obstacles, self.world_size) {
            Decision::Save => {}
            Decision::Skip(why) => {
                self.link.save_skipped(kind, step, &why);
                return Ok(());
            }
            Decision::Fail(why) => {
                let here = shortage.map_or_else(String::new, |here| format!(": {here}"));
                self.ended(kind, name, Err(format!("{why}{here}")));
                return Ok(());
            }
        }
        let (threads, rank, world_size, generation) = (self.threads, self.rank, self.world_size, self.generation);
        let link = Arc::clone(&self.link);
        let Some(lane) = self.lane_mut(kind) else { return Ok(()) };
        let buffer = match lane.snapshot(state, threads) {
            Ok(buffer) => buffer,
            Err(why) => {
                self.ended(kind, name, Err(format!("snapshot: {why}")));
                return Ok(());
            }
        };
        let write = Write {
            kind,
            place: lane.place.clone(),
            name,
            rank,
            world_size,
            generation,
            meta,
            threads: NonZeroUsize::new(threads.min(WRITERS) as usize).unwrap_or(NonZeroUsize::MIN),
            stall: started.elapsed(),
            link,
        };
        let plan = Arc::clone(&lane.plan);
        let thread = thread::Builder::new().name("save".to_owned()).spawn(move || {
            let result = write.run(&plan, &buffer);
            (buffer, result)
        });
        match thread {
            Ok(thread) => lane.state = LaneState::Writing(name, thread),
            Err(error) => self.ended(kind, name, Err(format!("start a thread: {error}"))),
        }
        Ok(())
    }

    /// Waits for the run's last saves; the failure of the last full one is the run's.
    ///
    /// # Errors
    /// [`Error::Save`].
    pub fn finish(&mut self) -> Result<(), Error> {
        self.settle(SaveKind::Weights);
        self.settle(SaveKind::Full);
        std::mem::replace(&mut self.newest, Ok(()))
    }

    fn lane_mut(&mut self, kind: SaveKind) -> Option<&mut Lane> {
        match kind {
            SaveKind::Full => Some(&mut self.full),
            SaveKind::Weights => self.weights.as_mut(),
        }
    }

    fn is_writing(&mut self, kind: SaveKind) -> bool {
        let lane = self.lane_mut(kind);
        lane.is_some_and(|lane| matches!(&lane.state, LaneState::Writing(_, thread) if !thread.is_finished()))
    }

    /// Waits for the lane's write, if there is one, and notes how it went.
    fn settle(&mut self, kind: SaveKind) {
        let Some(lane) = self.lane_mut(kind) else { return };
        let (name, thread) = match std::mem::replace(&mut lane.state, LaneState::Empty) {
            LaneState::Writing(name, thread) => (name, thread),
            other => {
                lane.state = other;
                return;
            }
        };
        let result = match thread.join() {
            Ok((buffer, result)) => {
                lane.state = LaneState::Idle(buffer);
                result
            }
            Err(_) => Err("the writing thread panicked".to_owned()),
        };
        self.ended(kind, name, result);
    }

    /// Notes how a save ended.
    fn ended(&mut self, kind: SaveKind, name: CheckpointName, result: Result<(), String>) {
        let result = result.or_else(|why| self.fail(kind, name, why));
        if kind == SaveKind::Full {
            self.newest = result;
        }
    }

    /// Reports a failed save.
    fn fail(&self, kind: SaveKind, name: CheckpointName, why: String) -> Result<(), Error> {
        tracing::error!(checkpoint = %name, ?kind, error = %why, "a save failed; the run goes on on the last commit");
        self.link.save_failed(kind, Step(name.step), &why);
        Err(Error::Save { name: name.to_string(), why })
    }
}

impl Lane {
    fn new(
        kind: SaveKind,
        place: Location,
        params: &Parameters,
        hands: &[Vec<Piece>],
        rank: Rank,
        device: Device,
    ) -> Result<Self, Error> {
        let mut all_bytes = 0;
        for hand in hands {
            all_bytes += Plan::new(kind, params, hand)?.bytes();
        }
        let hand = hands.get(rank.0 as usize).map(Vec::as_slice).unwrap_or_default();
        let plan = Arc::new(Plan::new(kind, params, hand)?);
        let of = Arc::clone(&plan);
        let thread = thread::Builder::new().name("snapshot".to_owned()).spawn(move || of.buffer(device));
        let state = match thread {
            Ok(thread) => LaneState::Preparing(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread for the snapshot's buffer: the first save makes it");
                LaneState::Empty
            }
        };
        Ok(Self { kind, place, plan, all_bytes, state })
    }

    /// Copies the state; nothing is being written.
    fn snapshot(&mut self, state: State<'_>, threads: u32) -> Result<Buffer, String> {
        let mut buffer = self.take_buffer(state).map_err(|e| e.to_string())?;
        let passed = fault::pass(FailPoint::SAVE_SNAPSHOT).map_err(|e| e.to_string());
        let filled = passed.and_then(|()| self.plan.fill(&mut buffer, state, threads).map_err(|e| e.to_string()));
        match filled {
            Ok(()) => Ok(buffer),
            Err(why) => {
                self.state = LaneState::Idle(buffer);
                Err(why)
            }
        }
    }

    /// The buffer for the next snapshot.
    fn take_buffer(&mut self, state: State<'_>) -> Result<Buffer, Error> {
        match std::mem::replace(&mut self.state, LaneState::Empty) {
            LaneState::Idle(buffer) => Ok(buffer),
            LaneState::Preparing(thread) => {
                thread.join().map_err(|_| Error::Internal("the thread of the snapshot's buffer panicked".to_owned()))?
            }
            LaneState::Empty => {
                let device = state.params.values().first().map_or(Device::Cpu, tch::Tensor::device);
                self.plan.buffer(device)
            }
            LaneState::Writing(..) => Err(Error::Internal(format!("a {:?} save while one is written", self.kind))),
        }
    }

    /// Why the save cannot fit where it goes, if that is certain.
    fn shortage(&self) -> Option<String> {
        // A bucket has no end.
        let directory = self.place.directory()?;
        match free_bytes(directory) {
            Ok(free) => decide::shortage(self.all_bytes, free, &self.place.to_string()),
            Err(error) => {
                tracing::warn!(%error, "a save begins without knowing whether it fits");
                None
            }
        }
    }
}

impl Drop for Lane {
    /// No thread may touch memory of libtorch's while the process ends.
    fn drop(&mut self) {
        if let LaneState::Preparing(thread) = std::mem::replace(&mut self.state, LaneState::Empty)
            && thread.join().is_err()
        {
            tracing::warn!("the thread of the snapshot's buffer panicked");
        }
    }
}
