//! Saving: a snapshot at the step boundary, then a thread that makes it durable.
//!
//! - **C7** Training waits for the copy to host memory, and for the *write* of the save before where the spec says `wait`;
//!   never for a commit, so a coordinator that is away stops nothing.
//! - Each kind of save has one buffer and at most one writing thread: memory and threads are bounded.
//! - Whether a save is made is decided on counts that are summed over ranks ([`super::decide`]).
//! - A write that fails is reported by its thread, at once, and the run goes on on the last commit. Only the run's last full save
//!   must succeed: its thread holds the snapshot and tries again ([`super::retry`]).
//! - With each save every rank says what it holds ([`super::digest`]), so that replicas that differ are no commit.
//! - What can never be committed, and what retention would drop, goes before the next save is written ([`super::earlier`]).

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tch::Device;
use trainctl_spec::Step;
use trainctl_spec::job::WhenBusy;
use trainctl_spec::report::SaveKind;
use trainctl_store::Location;
use trainctl_store::fault::{self, FailPoint};
use trainctl_store::layout::{CheckpointName, WEIGHTS};
use trainctl_store::space::free_bytes;

use super::deal::{self, Piece};
use super::decide::{self, Decision, Obstacles};
use super::digest::Digest;
use super::earlier::{Earlier, Leaving};
use super::retry::Failures;
use super::snapshot::{Buffer, Plan, State};
use super::write::{Failure, Meta, Share, Write, remove};
use crate::Error;
use crate::job::{FailedSave, Link, TrainJob};
use crate::parallel::World;
use crate::params::Parameters;
use crate::pulse::Collective;
use crate::schedule::SaveReason;

/// A save hashes and writes on at most so many threads, and on no more than the rank may train with.
const WRITERS: u32 = 2;
/// Pause between two looks whether a stop was asked for, while a write waits to be tried again.
const POLL: Duration = Duration::from_millis(50);

/// Saves one rank's share.
pub struct Saver {
    world_size: u32,
    threads: u32,
    when_busy: WhenBusy,
    link: Arc<dyn Link>,
    full: Lane,
    /// Absent where the spec asks for no weights.
    weights: Option<Lane>,
    /// How the newest full save that has ended went.
    newest: Result<(), Error>,
    /// Whether replicas are compared.
    compares: bool,
    /// The digest of the state after the newest step that was saved.
    digest: Option<(Step, Digest)>,
}

/// The saves of one kind.
struct Lane {
    share: Share,
    plan: Arc<Plan>,
    /// Bytes of one save, all ranks together.
    all_bytes: u64,
    state: LaneState,
    earlier: Earlier,
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
        let (rank, world_size, generation) = (job.rank, job.world_size, job.generation);
        let lane = |kind, place, earlier| {
            Lane::new(Share { kind, place, rank, world_size, generation }, params, &hands, device, earlier)
        };
        let place = Location::of_job(&job.spec).map_err(|e| Error::Spec(e.to_string()))?;
        let checkpoint = &job.spec.checkpoint;
        let weights = checkpoint
            .weights_every_steps
            .map(|_| lane(SaveKind::Weights, place.join(WEIGHTS), Earlier::new(checkpoint.max_recent_weights, None)));
        let earlier = Earlier::new(checkpoint.max_recent_checkpoints, checkpoint.keep_every_steps);
        Ok(Self {
            world_size,
            threads: job.threads,
            when_busy: checkpoint.when_busy,
            link,
            full: lane(SaveKind::Full, place, earlier)?,
            weights: weights.transpose()?,
            newest: Ok(()),
            compares: job.spec.fault_tolerance.compare_replicas,
            digest: None,
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
        // The run is not done without its last full save, so that one waits for room.
        let must_succeed = kind == SaveKind::Full && decide::is_last(reason);
        let shortage = if must_succeed { None } else { shortage(&lane.share, lane.all_bytes) };
        let unwritten = lane.earlier.is_unwritten();
        let counts = [busy, shortage.is_some(), unwritten].map(i64::from);
        let (obstacles, unwritten) = match world.sum(&counts, Collective::Save, step)?[..] {
            [busy, full, unwritten] => (Obstacles { busy, full }, unwritten),
            _ => return Err(Error::Internal("an all-reduce changed a tensor's length".to_owned())),
        };
        let decision = decide::decide(obstacles, self.world_size);
        if let Decision::Skip(why) = decision {
            self.link.save_skipped(kind, step, &why);
            return Ok(());
        }
        let (threads, link) = (self.threads, Arc::clone(&self.link));
        let Some(lane) = self.lane_mut(kind) else { return Ok(()) };
        let leaving = lane.earlier.judge(unwritten);
        if let Decision::Fail(why) = decision {
            // There is no room, so what may go does not wait for a thread.
            make_room(&lane.share, &leaving, link.as_ref());
            let here = shortage.map_or_else(String::new, |here| format!(": {here}"));
            self.failed(kind, name, format!("{why}{here}"));
            return Ok(());
        }
        lane.earlier.begin(name);
        let buffer = match lane.snapshot(state, threads) {
            Ok(buffer) => buffer,
            Err(why) => {
                make_room(&lane.share, &leaving, link.as_ref());
                self.failed(kind, name, format!("snapshot: {why}"));
                return Ok(());
            }
        };
        let plan = Arc::clone(&lane.plan);
        let share = lane.share.clone();
        let write = Write {
            share,
            name,
            meta,
            threads: NonZeroUsize::new(threads.min(WRITERS) as usize).unwrap_or(NonZeroUsize::MIN),
            stall: started.elapsed(),
            link,
            digest: self.compares.then(|| self.digest_of(step, state)),
            written: BTreeMap::new(),
        };
        let thread = thread::Builder::new().name("save".to_owned()).spawn(move || {
            make_room(&write.share, &leaving, write.link.as_ref());
            let result = write_out(write, &plan, &buffer, must_succeed);
            (buffer, result)
        });
        let Some(lane) = self.lane_mut(kind) else { return Ok(()) };
        match thread {
            Ok(thread) => lane.state = LaneState::Writing(name, thread),
            Err(error) => self.failed(kind, name, format!("start a thread: {error}")),
        }
        Ok(())
    }

    /// The state is about to change: waits until its digest is taken. A digest that failed has failed its save.
    pub fn before_update(&mut self) {
        if let Some((_, digest)) = self.digest.take() {
            drop(digest.wait());
        }
    }

    /// Both kinds of save of one step share it.
    fn digest_of(&mut self, step: Step, state: State<'_>) -> Digest {
        if let Some((of, digest)) = &self.digest
            && *of == step
        {
            return digest.clone();
        }
        self.before_update();
        let digest = Digest::begin(state);
        self.digest = Some((step, digest.clone()));
        digest
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
        match thread.join() {
            Ok((buffer, result)) => {
                lane.state = LaneState::Idle(buffer);
                if result.is_ok() {
                    lane.earlier.written();
                }
                self.ended(kind, name, result);
            }
            Err(_) => self.failed(kind, name, "the writing thread panicked".to_owned()),
        }
    }

    /// Reports a save that failed on this thread.
    fn failed(&mut self, kind: SaveKind, name: CheckpointName, why: String) {
        let step = Step(name.step);
        self.link.save_failed(FailedSave { kind, step, attempt: 1, is_tried_again: false, why: why.clone() });
        self.ended(kind, name, Err(why));
    }

    /// Notes how a save ended.
    fn ended(&mut self, kind: SaveKind, name: CheckpointName, result: Result<(), String>) {
        if kind == SaveKind::Full {
            self.newest = result.map_err(|why| Error::Save { name: name.to_string(), why });
        }
    }
}

/// Writes a save and reports how that went, again and again if it must succeed.
fn write_out(mut write: Write, plan: &Plan, buffer: &Buffer, must_succeed: bool) -> Result<(), String> {
    let mut failures = Failures::default();
    loop {
        let short = if must_succeed { shortage(&write.share, write.bytes_left(plan)) } else { None };
        let attempt = short.map_or_else(|| write.run(plan, buffer), |why| Err(Failure { why, may_pass: true }));
        let Err(failure) = attempt else { return Ok(()) };
        let is_stopping = write.link.requests().stop;
        let pause = failures.add(is_stopping).filter(|_| must_succeed && failure.may_pass);
        let why = match pause {
            Some(pause) => format!("{}; trying again in {} s", failure.why, pause.as_secs()),
            None => failure.why,
        };
        write.link.save_failed(FailedSave {
            kind: write.share.kind,
            step: Step(write.name.step),
            attempt: failures.count(),
            is_tried_again: pause.is_some(),
            why: why.clone(),
        });
        let Some(pause) = pause else { return Err(why) };
        let until = Instant::now() + pause;
        while Instant::now() < until && write.link.requests().stop == is_stopping {
            thread::sleep(POLL);
        }
    }
}

/// Why so many bytes cannot fit where they go, if that is certain.
fn shortage(share: &Share, needed: u64) -> Option<String> {
    // A bucket has no end.
    let directory = share.place.directory()?;
    match free_bytes(directory) {
        Ok(free) => decide::shortage(needed, free, &share.place.to_string()),
        Err(error) => {
            tracing::warn!(%error, "a save begins without knowing whether it fits");
            None
        }
    }
}

/// Removes this rank's files of earlier saves that may go.
fn make_room(share: &Share, leaving: &Leaving, link: &dyn Link) {
    let steps: Vec<Step> = leaving.superseded.iter().map(|name| Step(name.step)).collect();
    let withdrawn = if steps.is_empty() { Vec::new() } else { link.withdraw(share.kind, &steps) };
    let superseded = leaving.superseded.iter().filter(|name| withdrawn.contains(&Step(name.step)));
    for name in superseded.chain(&leaving.dead) {
        match remove(share, *name) {
            Ok(()) => {
                tracing::info!(checkpoint = %name, kind = ?share.kind, "a save that nobody will commit is removed")
            }
            Err(error) => tracing::warn!(checkpoint = %name, %error, "a save that nobody will commit stays"),
        }
    }
}

impl Lane {
    fn new(
        share: Share,
        params: &Parameters,
        hands: &[Vec<Piece>],
        device: Device,
        earlier: Earlier,
    ) -> Result<Self, Error> {
        let mut all_bytes = 0;
        for hand in hands {
            all_bytes += Plan::new(share.kind, params, hand)?.bytes();
        }
        let hand = hands.get(share.rank.0 as usize).map(Vec::as_slice).unwrap_or_default();
        let plan = Arc::new(Plan::new(share.kind, params, hand)?);
        let of = Arc::clone(&plan);
        let thread = thread::Builder::new().name("snapshot".to_owned()).spawn(move || of.buffer(device));
        let state = match thread {
            Ok(thread) => LaneState::Preparing(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread for the snapshot's buffer: the first save makes it");
                LaneState::Empty
            }
        };
        Ok(Self { share, plan, all_bytes, state, earlier })
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
            LaneState::Writing(..) => {
                Err(Error::Internal(format!("a {:?} save while one is written", self.share.kind)))
            }
        }
    }
}

impl Drop for Saver {
    /// As for a lane's thread.
    fn drop(&mut self) {
        self.before_update();
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
