//! From a snapshot to durable files and a report, on a thread beside training.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trainctl_spec::report::{ReplicaDigest, SaveKind, ShardFile, ShardReport};
use trainctl_spec::{Generation, Rank};
use trainctl_store::Location;
use trainctl_store::fault::{self, FailPoint};
use trainctl_store::io::Files;
use trainctl_store::layout::{CheckpointName, Section, ShardName, trainer_state};
use trainctl_store::shard::{ShardWriter, TensorView, Written};

use super::digest::Digest;
use super::snapshot::{Buffer, Item, Plan};
use crate::job::Link;

/// The sections of a checkpoint, in the order in which a rank writes them.
pub(super) const SECTIONS: [Section; 2] = [Section::Model, Section::Optim];

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

/// Whose files, of which generation.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) kind: SaveKind,
    /// Where all checkpoints of this kind are.
    pub(super) place: Location,
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    pub(super) generation: Generation,
}

impl Share {
    /// The shard of a section.
    pub(super) fn shard(&self, section: Section) -> ShardName {
        ShardName { section, rank: self.rank.0, world_size: self.world_size, generation: self.generation.0 }
    }

    /// The file with what a resume needs besides tensors, if this rank writes it.
    pub(super) fn trainer_state(&self) -> Option<String> {
        (self.rank.0 == 0 && self.kind == SaveKind::Full).then(|| trainer_state(self.generation.0))
    }
}

/// One save on its way to the disk.
pub(super) struct Write {
    pub(super) share: Share,
    pub(super) name: CheckpointName,
    pub(super) meta: Meta,
    /// Threads that hash and write.
    pub(super) threads: NonZeroUsize,
    /// How long training stood still.
    pub(super) stall: Duration,
    pub(super) link: Arc<dyn Link>,
    /// Of all that this rank holds, where replicas are compared.
    pub(super) digest: Option<Digest>,
    /// Shards that are durable: an attempt goes on where the one before it failed.
    pub(super) written: BTreeMap<Section, Written>,
}

/// Why an attempt failed.
#[derive(Debug)]
pub(super) struct Failure {
    /// What failed.
    pub(super) why: String,
    /// It lies with the disk or the object store, so it may pass.
    pub(super) may_pass: bool,
}

impl Failure {
    fn of_store(error: &trainctl_store::Error) -> Self {
        use trainctl_store::Error::{Io, Object, Swept};
        Self { why: describe(error), may_pass: matches!(error, Io { .. } | Swept { .. } | Object { .. }) }
    }

    fn of(error: &dyn std::error::Error) -> Self {
        Self { why: describe(error), may_pass: false }
    }
}

impl Write {
    /// Bytes of the tensors that are not durable yet.
    pub(super) fn bytes_left(&self, plan: &Plan) -> u64 {
        plan.items.iter().filter(|item| !self.written.contains_key(&item.section)).map(Item::bytes).sum()
    }

    /// Writes, syncs and hashes this rank's files, then says so. After an error it can be called again.
    pub(super) fn run(&mut self, plan: &Plan, buffer: &Buffer) -> Result<(), Failure> {
        let started = Instant::now();
        let bytes = buffer.bytes().map_err(|e| Failure::of(&e))?;
        let writer = ShardWriter::at(&self.share.place, self.name).map_err(|e| Failure::of_store(&e))?;
        let writer = writer.with_threads(self.threads);
        for section in SECTIONS {
            let items: Vec<&Item> = plan.items.iter().filter(|item| item.section == section).collect();
            let shard = self.share.shard(section);
            if items.is_empty() || self.written.contains_key(&section) {
                continue;
            }
            let views: Vec<TensorView<'_>> = items.iter().map(|item| item.view(bytes)).collect();
            let written = writer.write_shard(shard, &views, &[]).map_err(|e| Failure::of_store(&e))?;
            self.written.insert(section, written);
        }
        let mut others = Vec::new();
        if let Some(path) = self.share.trainer_state() {
            let bytes = serde_json::to_vec_pretty(&self.meta.trainer).map_err(|e| Failure::of(&e))?;
            others.push(writer.write_bytes(&path, &bytes).map_err(|e| Failure::of_store(&e))?);
        }
        let written = started.elapsed();
        tracing::info!(
            checkpoint = %self.name,
            kind = ?self.share.kind,
            bytes = self.written.values().map(|written| &written.file).chain(&others).map(|file| file.size).sum::<u64>(),
            stall_ms = self.stall.as_millis(),
            write_ms = written.as_millis(),
            "shards are durable"
        );
        let held = self.digest.as_ref().map(Digest::wait).transpose();
        let held = held.map_err(|why| Failure { why: format!("digest of the state: {why}"), may_pass: false })?;
        let replica = held.map(|held| ReplicaDigest { held, written: plan.digest(self.share.kind, bytes) });
        let passed = fault::pass(FailPoint::SAVE_REPORT);
        passed.map_err(|e| Failure { why: format!("report: {e}"), may_pass: true })?;
        let is_first = self.share.rank.0 == 0;
        let Meta { trainer, train_loss, val_losses, corpora } = self.meta.clone();
        let (mut files, mut tensors) = (Vec::with_capacity(3), Vec::with_capacity(plan.items.len()));
        for (_, written) in std::mem::take(&mut self.written) {
            files.push(written.file);
            tensors.extend(written.tensors);
        }
        files.append(&mut others);
        let to_read_ahead = (self.share.kind == SaveKind::Full).then(|| files.clone());
        self.link.shards_durable(ShardReport {
            kind: self.share.kind,
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
            replica,
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

/// Removes what a rank has written of a checkpoint that nobody will commit.
///
/// # Errors
/// [`trainctl_store::Error::Io`], [`trainctl_store::Error::Object`]: something of it stays, for the next commit's retention.
pub(super) fn remove(share: &Share, name: CheckpointName) -> Result<(), trainctl_store::Error> {
    let files = Files::open(&share.place)?;
    let shards = SECTIONS.map(|section| share.shard(section).to_string());
    for path in shards.into_iter().chain(share.trainer_state()) {
        files.remove_file(&name.key(&path), FailPoint::RETIRE_REMOVE)?;
    }
    Ok(())
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
