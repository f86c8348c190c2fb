//! Saving: a snapshot at the step boundary, then a thread that makes it durable.
//!
//! - **C7** Training waits for the copy to host memory, and for the *write* of the save before (at most one is in
//!   flight); never for a commit, so a coordinator that is away stops nothing.
//! - A write that fails is reported and the run goes on on the last commit; only the run's last save must succeed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};
use trainctl_spec::report::{SaveKind, ShardReport};
use trainctl_spec::{Generation, Rank, Step};
use trainctl_store::Location;
use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::shard::{ShardWriter, TensorView};
use trainctl_store::state_hash;

use super::{EXP_AVG, EXP_AVG_SQ, MASTER, TRAINER_STATE, deal, dtype};
use crate::Error;
use crate::job::{Link, TrainJob};
use crate::optim::AdamW;
use crate::params::{Entry, Parameters};

/// `optim/trainer.json`: what a resume needs besides tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Zero-based step whose state this is.
    pub step: u64,
    /// Zero-based epoch.
    pub epoch: u64,
    /// Optimizer updates made: steps less those that `skip_step` skipped.
    pub updates: u64,
    /// Sampler positions consumed up to and including `step`.
    pub consumed_samples: u64,
    /// Learning rate of the next step. For readers; a resume computes it from the spec.
    pub next_lr: f64,
}

/// What goes with a checkpoint besides tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Meta {
    /// Goes to `optim/trainer.json`.
    pub trainer: TrainerState,
    /// Loss of the step.
    pub train_loss: f64,
    /// Validation losses of the step by name; empty when it was not evaluated.
    pub val_losses: BTreeMap<String, f64>,
}

/// The state to save.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// Weights.
    pub params: &'a Parameters,
    /// Moments.
    pub optimizer: &'a AdamW,
}

/// This rank's tensors in host memory.
#[derive(Default)]
struct Snapshot {
    tensors: Vec<(Section, String, Tensor)>,
}

/// What a writing thread gives back: the buffers, for the next snapshot, and how it went.
type Written = (Snapshot, Result<(), String>);

/// Saves one rank's share.
pub struct Saver {
    rank: Rank,
    world_size: u32,
    generation: Generation,
    place: Location,
    /// Indices of the parameters that this rank saves.
    hand: Vec<usize>,
    link: Arc<dyn Link>,
    in_flight: Option<(CheckpointName, JoinHandle<Written>)>,
    spare: Snapshot,
    /// How the newest save that has ended went.
    newest: Result<(), Error>,
}

impl Saver {
    /// A saver for `job`'s rank.
    ///
    /// # Errors
    /// [`Error::Spec`] if the spec names no place for checkpoints.
    pub fn new(job: &TrainJob, entries: &[Entry], link: Arc<dyn Link>) -> Result<Self, Error> {
        let place = Location::of_job(&job.spec).map_err(|e| Error::Spec(e.to_string()))?;
        Ok(Self {
            rank: job.rank,
            world_size: job.world_size,
            generation: job.generation,
            place,
            hand: deal(entries, job.world_size).into_iter().nth(job.rank.0 as usize).unwrap_or_default(),
            link,
            in_flight: None,
            spare: Snapshot::default(),
            newest: Ok(()),
        })
    }

    /// Waits for the previous write, copies the state and starts to write it.
    pub fn save(&mut self, state: State<'_>, meta: Meta) -> Result<(), Error> {
        let started = Instant::now();
        self.wait();
        let mut snapshot = std::mem::take(&mut self.spare);
        snapshot.fill(&self.hand, state)?;
        let name = CheckpointName { epoch: meta.trainer.epoch, step: meta.trainer.step };
        let write = Write {
            place: self.place.clone(),
            name,
            rank: self.rank,
            world_size: self.world_size,
            generation: self.generation,
            meta,
            stall: started.elapsed(),
            link: Arc::clone(&self.link),
        };
        let thread = thread::Builder::new()
            .name("save".to_owned())
            .spawn(move || {
                let result = write.run(&snapshot);
                (snapshot, result)
            })
            .map_err(|error| Error::Save { name: name.to_string(), why: format!("start a thread: {error}") })?;
        self.in_flight = Some((name, thread));
        Ok(())
    }

    /// Waits for the run's last save; its failure is the run's.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.wait();
        std::mem::replace(&mut self.newest, Ok(()))
    }

    fn wait(&mut self) {
        let Some((name, thread)) = self.in_flight.take() else { return };
        let (snapshot, result) =
            thread.join().unwrap_or_else(|_| (Snapshot::default(), Err("the writing thread panicked".to_owned())));
        self.spare = snapshot;
        self.newest = result.map_err(|why| {
            tracing::error!(checkpoint = %name, error = %why, "a save failed; the run goes on on the last commit");
            self.link.save_failed(Step(name.step), &why);
            Error::Save { name: name.to_string(), why }
        });
    }
}

impl Snapshot {
    /// Copies this rank's tensors, into the buffers of an earlier snapshot where there are any.
    fn fill(&mut self, hand: &[usize], state: State<'_>) -> Result<(), Error> {
        let State { params, optimizer } = state;
        let (exp_avg, exp_avg_sq) = optimizer.moments();
        let mut sources: Vec<(Section, &str, &Entry, &Tensor)> = Vec::with_capacity(4 * hand.len());
        for &i in hand {
            let entry = &params.entries()[i];
            sources.push((Section::Model, "", entry, &params.values()[i]));
            sources.push((Section::Optim, EXP_AVG, entry, &exp_avg[i]));
            sources.push((Section::Optim, EXP_AVG_SQ, entry, &exp_avg_sq[i]));
            if params.has_masters() {
                sources.push((Section::Optim, MASTER, entry, &params.masters()[i]));
            }
        }
        tch::no_grad(|| {
            if self.tensors.len() != sources.len() {
                self.tensors.clear();
                for (section, prefix, entry, source) in &sources {
                    let buffer = Tensor::f_empty(entry.shape.as_slice(), (source.kind(), Device::Cpu))?;
                    self.tensors.push((*section, format!("{prefix}{}", entry.name), buffer));
                }
            }
            for ((_, _, buffer), (.., source)) in self.tensors.iter_mut().zip(&sources) {
                buffer.f_copy_(source)?;
            }
            Ok(())
        })
    }
}

/// One save on its way to the disk.
struct Write {
    place: Location,
    name: CheckpointName,
    rank: Rank,
    world_size: u32,
    generation: Generation,
    meta: Meta,
    /// How long training stood still for the snapshot.
    stall: Duration,
    link: Arc<dyn Link>,
}

impl Write {
    /// Writes, syncs and hashes this rank's files, then says so.
    fn run(&self, snapshot: &Snapshot) -> Result<(), String> {
        let started = Instant::now();
        let writer = ShardWriter::at(&self.place, self.name).map_err(|e| e.to_string())?;
        let mut files = Vec::with_capacity(3);
        let mut tensors = Vec::with_capacity(snapshot.tensors.len());
        for section in [Section::Model, Section::Optim] {
            let held: Vec<Held<'_>> = snapshot
                .tensors
                .iter()
                .filter(|(of, ..)| *of == section)
                .map(|(_, name, tensor)| Held::new(name, tensor))
                .collect::<Result<_, _>>()?;
            if held.is_empty() {
                continue;
            }
            let path =
                ShardName { section, rank: self.rank.0, world_size: self.world_size, generation: self.generation.0 };
            let views: Vec<TensorView<'_>> = held.iter().map(Held::view).collect();
            let file = writer.write_safetensors(&path.to_string(), &views, &[]).map_err(|e| describe(&e))?;
            files.push(file);
            for held in &held {
                let name = format!("{}/{}", section.folder(), held.name);
                let digest = state_hash::whole_tensor(&name, held.dtype, &held.shape, held.bytes);
                tensors.push(digest.map_err(|e| describe(&e))?);
            }
        }
        if self.rank.0 == 0 {
            let bytes = serde_json::to_vec_pretty(&self.meta.trainer).map_err(|e| describe(&e))?;
            files.push(writer.write_bytes(TRAINER_STATE, &bytes).map_err(|e| describe(&e))?);
        }
        tracing::info!(
            checkpoint = %self.name,
            bytes = files.iter().map(|file| file.size).sum::<u64>(),
            ms = started.elapsed().as_millis(),
            "shards are durable"
        );
        let rank0 = self.rank.0 == 0;
        self.link.shards_durable(ShardReport {
            step: self.meta.trainer.step,
            checkpoint: self.name.to_string(),
            files,
            tensors,
            consumed_samples: self.meta.trainer.consumed_samples,
            train_loss: rank0.then_some(self.meta.train_loss),
            val_losses: if rank0 { self.meta.val_losses.clone() } else { BTreeMap::new() },
            kind: SaveKind::Full,
            corpora: BTreeMap::new(),
            stall_seconds: self.stall.as_secs_f64(),
            write_seconds: started.elapsed().as_secs_f64(),
        });
        Ok(())
    }
}

/// A tensor of a snapshot, as the store takes it.
struct Held<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: &'a [u8],
}

impl<'a> Held<'a> {
    fn new(name: &'a str, tensor: &'a Tensor) -> Result<Self, String> {
        Ok(Self {
            name,
            dtype: dtype(tensor.kind()).ok_or_else(|| format!("{name}: no file type for {:?}", tensor.kind()))?,
            shape: tensor.size().iter().map(|n| n.cast_unsigned()).collect(),
            bytes: trainctl_collective::bytes(tensor).map_err(|e| describe(&e))?,
        })
    }

    fn view(&self) -> TensorView<'_> {
        TensorView { name: self.name, dtype: self.dtype, shape: &self.shape, bytes: self.bytes, slice: None }
    }
}

/// An error with its causes, on one line.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
