//! What a coordinator and two ranks do: take the term, repair, retire, then save, commit, move pointers and prune each step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use trainctl_spec::report::{ShardFile, TensorDigest};
use trainctl_store::checkpoints::{ResolveError, ResolveOptions, Retention, Selector};
use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest, Metrics};
use trainctl_store::numbers::Taker;
use trainctl_store::shard::{ShardWriter, TensorView};
use trainctl_store::tenure::{Holder, HolderInfo, Policy, Probe, TokioClock};
use trainctl_store::{Tenure, state_hash};

use crate::child::Place;

pub(crate) const STEPS: u64 = 4;
const VAL_LOSSES: [f64; STEPS as usize] = [3.0, 1.0, 2.0, 1.0];

pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct Options {
    pub(crate) from: Selector,
    pub(crate) steps: u64,
    pub(crate) shard_bytes: usize,
    /// Whether the holder before is taken for alive: it is frozen then, and its term is waited for.
    pub(crate) others_live: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { from: Selector::Latest, steps: STEPS, shard_bytes: 8000, others_live: false }
    }
}

impl Options {
    /// One step of shards that are uploaded in three parts.
    pub(crate) fn large() -> Self {
        Self { shard_bytes: 40 << 20, steps: 1, ..Self::default() }
    }

    pub(crate) fn beside_a_frozen_one() -> Self {
        Self { others_live: true, ..Self::default() }
    }
}

struct Host {
    others_live: bool,
}

#[async_trait]
impl Probe for Host {
    async fn answers(&self, _: &Holder) -> bool {
        false
    }

    fn lives(&self, _: u32, _: u64) -> bool {
        self.others_live
    }
}

pub(crate) async fn coordinate(place: &Place, options: &Options) -> Result<(), AnyError> {
    let store = place.store()?;
    let process = Taker { host: "h".into(), pid: std::process::id(), boot_id: "b".into(), start_time: 1 };
    let info = HolderInfo { process, ..HolderInfo::default() };
    let policy = Policy {
        lease: Duration::from_millis(60),
        look_every: Duration::from_millis(10),
        patience: Duration::from_secs(20),
    };
    let host = Host { others_live: options.others_live };
    let tenure = Tenure::acquire(place.control_io(), info, &host, &TokioClock::default(), &policy).await?;
    let tenure = Arc::new(tenure);
    store.take_over(&*tenure, "default").await?;
    let generation = tenure.take_generation().await?.0;
    let start = match store.resolve(options.from, &ResolveOptions::default()).await {
        Ok(resolved) => Some(resolved.checkpoint.manifest.step),
        Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    store.retire_after(&*tenure, start, generation, "default").await?;
    store.prune(&*tenure, &Retention::newest(Some(1), "default")).await?;
    for step in start.map_or(0, |step| step + 1)..options.steps {
        let name = CheckpointName { epoch: 0, step };
        let mut ranks = Vec::new();
        for rank in 0..2 {
            let (files, bytes) = (place.files()?, options.shard_bytes);
            ranks.push(tokio::task::spawn_blocking(move || {
                save_rank(&ShardWriter::with_disk(files, name), name, rank, generation, bytes)
            }));
        }
        let (mut files, mut digests) = (Vec::new(), Vec::new());
        for rank in ranks {
            let (file, digest) = rank.await??;
            files.push(file);
            digests.push(digest);
        }
        let hash = state_hash::combine(&digests)?;
        let draft = draft(name, generation, tenure.term().0, hash, files);
        store.commit(&*tenure, draft, "seed: 1\n").await?;
        store.repair_pointers(&*tenure, "default").await?;
        store.prune(&*tenure, &Retention::newest(Some(1), "default")).await?;
        tenure.beat().await?;
    }
    tenure.release().await?;
    Ok(())
}

/// One tensor a rank.
fn save_rank(
    writer: &ShardWriter,
    name: CheckpointName,
    rank: u32,
    generation: u64,
    size: usize,
) -> Result<(ShardFile, TensorDigest), AnyError> {
    let bytes: Vec<u8> =
        (0..size).map(|i| (i.wrapping_mul(7 + rank as usize) ^ (i >> 8)) as u8 ^ name.step as u8).collect();
    let shape = [size as u64 / 4];
    let tensor = format!("w{rank}");
    let view = TensorView { name: &tensor, dtype: "F32", shape: &shape, bytes: &bytes, slice: None };
    let shard = ShardName { section: Section::Model, rank, world_size: 2, generation }.to_string();
    let file = writer.write_safetensors(&shard, &[view], &[])?;
    Ok((file, state_hash::whole_tensor(&format!("model/{tensor}"), "F32", &shape, &bytes)?))
}

fn draft(name: CheckpointName, generation: u64, term: u64, state_hash: String, files: Vec<ShardFile>) -> Manifest {
    let val_losses = BTreeMap::from([("default".to_owned(), VAL_LOSSES[name.step as usize])]);
    Manifest {
        format: FORMAT,
        name,
        job: "bucket".into(),
        generation,
        term,
        step: name.step,
        epoch: 0,
        consumed_samples: (name.step + 1) * 8,
        world_size: 2,
        mesh: vec![],
        skipped: vec![],
        metrics: Metrics::new(Some(2.0), &val_losses),
        state_hash,
        spec_hash: String::new(),
        max_steps: STEPS,
        until_step: None,
        started_from: None,
        kind: Default::default(),
        parent: None,
        phase: Default::default(),
        corpora: BTreeMap::new(),
        created_at: String::new(),
        files,
    }
}
