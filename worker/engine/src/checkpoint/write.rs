//! From a snapshot to durable files and a report, on a thread beside training.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trainctl_spec::report::{SaveKind, ShardFile, ShardReport};
use trainctl_spec::{Generation, Rank};
use trainctl_store::Location;
use trainctl_store::fault::{self, FailPoint};
use trainctl_store::layout::{CheckpointName, Section, ShardName, trainer_state};
use trainctl_store::shard::{ShardWriter, TensorView};

use super::snapshot::{Buffer, Item, Plan};
use crate::job::Link;

/// `optim/trainer.g<generation>.json`: what a resume needs besides tensors.
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
    /// Goes to `optim/trainer.g<generation>.json`.
    pub trainer: TrainerState,
    /// Loss of the step.
    pub train_loss: f64,
    /// Validation losses of the step by name; empty when it was not evaluated.
    pub val_losses: BTreeMap<String, f64>,
    /// Samples of each corpus used up to and including the step.
    pub corpora: BTreeMap<String, u64>,
}

/// One save on its way to the disk.
pub(super) struct Write {
    pub(super) kind: SaveKind,
    /// Where all checkpoints of this kind are.
    pub(super) place: Location,
    pub(super) name: CheckpointName,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) generation: Generation,
    pub(super) meta: Meta,
    /// Threads that hash and write.
    pub(super) threads: NonZeroUsize,
    /// How long training stood still.
    pub(super) stall: Duration,
    pub(super) link: Arc<dyn Link>,
}

impl Write {
    /// Writes, syncs and hashes this rank's files, then says so.
    pub(super) fn run(self, plan: &Plan, buffer: &Buffer) -> Result<(), String> {
        let started = Instant::now();
        let bytes = buffer.bytes().map_err(|e| describe(&e))?;
        let writer = ShardWriter::at(&self.place, self.name).map_err(|e| describe(&e))?.with_threads(self.threads);
        let mut files = Vec::with_capacity(3);
        let mut tensors = Vec::with_capacity(plan.items.len());
        for section in [Section::Model, Section::Optim] {
            let items: Vec<&Item> = plan.items.iter().filter(|item| item.section == section).collect();
            if items.is_empty() {
                continue;
            }
            let path =
                ShardName { section, rank: self.rank.0, world_size: self.world_size, generation: self.generation.0 };
            let views: Vec<TensorView<'_>> = items.iter().map(|item| item.view(bytes)).collect();
            let written = writer.write_shard(path, &views, &[]).map_err(|e| describe(&e))?;
            files.push(written.file);
            tensors.extend(written.tensors);
        }
        let is_first = self.rank.0 == 0;
        if is_first && self.kind == SaveKind::Full {
            let bytes = serde_json::to_vec_pretty(&self.meta.trainer).map_err(|e| describe(&e))?;
            let path = trainer_state(self.generation.0);
            files.push(writer.write_bytes(&path, &bytes).map_err(|e| describe(&e))?);
        }
        let written = started.elapsed();
        tracing::info!(
            checkpoint = %self.name,
            kind = ?self.kind,
            bytes = files.iter().map(|file| file.size).sum::<u64>(),
            stall_ms = self.stall.as_millis(),
            write_ms = written.as_millis(),
            "shards are durable"
        );
        fault::pass(FailPoint::SAVE_REPORT).map_err(|e| format!("report: {e}"))?;
        let to_read_ahead = (self.kind == SaveKind::Full).then(|| files.clone());
        let Meta { trainer, train_loss, val_losses, corpora } = self.meta;
        self.link.shards_durable(ShardReport {
            kind: self.kind,
            step: trainer.step,
            checkpoint: self.name.to_string(),
            files,
            tensors,
            consumed_samples: trainer.consumed_samples,
            train_loss: is_first.then_some(train_loss),
            val_losses: if is_first { val_losses } else { BTreeMap::new() },
            corpora: if is_first { corpora } else { BTreeMap::new() },
            stall_seconds: self.stall.as_secs_f64(),
            write_seconds: written.as_secs_f64(),
        });
        to_read_ahead.into_iter().for_each(|files| read_ahead(&writer, files));
        Ok(())
    }
}

/// A restart begins with the newest full checkpoint. On a thread of its own: the next save waits for the one that wrote.
fn read_ahead(writer: &ShardWriter, files: Vec<ShardFile>) {
    let writer = writer.clone();
    let work = move || {
        if let Err(error) = writer.read_ahead(&files) {
            tracing::debug!(%error, "a restart on this host will wait for the disk");
        }
    };
    if let Err(error) = thread::Builder::new().name("read-ahead".to_owned()).spawn(work) {
        tracing::debug!(%error, "a restart on this host will wait for the disk");
    }
}

/// An error with its causes, on one line.
pub(super) fn describe(error: &dyn std::error::Error) -> String {
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
