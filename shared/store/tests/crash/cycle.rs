//! What a coordinator and two ranks do with a run directory, from start to end.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use trainctl_spec::Architecture;
use trainctl_spec::report::{ShardFile, TensorDigest};
use trainctl_spec::start::Keep;
use trainctl_store::checkpoints::{ResolveError, ResolveOptions, Retention, Selector};
use trainctl_store::export::ExportOptions;
use trainctl_store::fault::Faults;
use trainctl_store::io::{Disk, Io};
use trainctl_store::layout::{CheckpointName, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest, Metrics};
use trainctl_store::numbers::Taker;
use trainctl_store::origin::Origin;
use trainctl_store::rows::{Order, RowFile};
use trainctl_store::shard::{ShardReader, ShardWriter, TensorView};
use trainctl_store::tenure::{Holder, HolderInfo, Policy, Probe, TokioClock};
use trainctl_store::{CheckpointStore, Error, RunDir, Tenure, state_hash};

/// Steps of a run, each with a checkpoint.
pub(crate) const STEPS: u64 = 4;
/// The newest stays, and the lowest of these, the earliest of equals.
const VAL_LOSSES: [f64; STEPS as usize] = [3.0, 1.0, 2.0, 1.0];
/// Where the export of a run's last checkpoint goes.
pub(crate) const EXPORT: &str = "exported";
const MODEL: &str =
    r#"{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4, "n_positions": 4, "vocab_size": 8}"#;

pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// What a holder does.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// What it starts from.
    pub(crate) from: Selector,
    /// Until which step.
    pub(crate) steps: u64,
    /// The processes that held the directory before are alive (frozen).
    pub(crate) others_live: bool,
    /// Where it writes what is done for good, a word and a number a line: what must not be lost after that.
    pub(crate) promises: Option<PathBuf>,
}

impl Default for Plan {
    fn default() -> Self {
        Self { from: Selector::Latest, steps: STEPS, others_live: false, promises: None }
    }
}

impl Plan {
    fn promise(&self, what: &str, step: u64) -> Result<(), AnyError> {
        let Some(path) = &self.promises else { return Ok(()) };
        let mut file = std::fs::File::options().append(true).create(true).open(path)?;
        Ok(file.write_all(format!("{what} {step}\n").as_bytes())?)
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

fn model() -> Architecture {
    Architecture::from_config(&serde_json::from_str(MODEL).unwrap()).unwrap()
}

/// The validation loss of a step.
fn val_loss(step: u64) -> f64 {
    VAL_LOSSES.get(step as usize).copied().unwrap_or(2.0)
}

/// One tensor's bytes after a step.
fn bytes_of(tensor: usize, elements: u64, step: u64) -> Vec<u8> {
    (0..elements).flat_map(|i| (i as f32 + tensor as f32 * 0.5 + step as f32).to_le_bytes()).collect()
}

/// Takes the term, repairs, retires, loads, saves every step and exports the last one.
pub(crate) async fn coordinate(dir: &Path, faults: &Arc<Faults>, plan: &Plan) -> Result<(), AnyError> {
    let run = RunDir::new(dir);
    let control = Io::with_faults(run.control(), Arc::clone(faults));
    let store = CheckpointStore::with_io(Io::with_faults(dir, Arc::clone(faults)), control.clone());
    let process = Taker { host: "h".into(), pid: std::process::id(), boot_id: "b".into(), start_time: 1 };
    let info = HolderInfo { process, ..HolderInfo::default() };
    let policy = Policy {
        lease: Duration::from_millis(60),
        look_every: Duration::from_millis(10),
        patience: Duration::from_secs(20),
    };
    let host = Host { others_live: plan.others_live };
    let tenure = Arc::new(Tenure::acquire(control, info, &host, &TokioClock::default(), &policy).await?);
    store.take_over(&*tenure, "default").await?;
    plan.promise("number", tenure.term().0)?;
    let generation = tenure.take_generation().await?.0;
    plan.promise("number", generation)?;
    let start = match store.resolve(plan.from, &ResolveOptions::default()).await {
        Ok(resolved) => Some(resolved.checkpoint),
        Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { .. }) => None,
        Err(e) => return Err(e.into()),
    };
    let step = start.as_ref().map(|start| start.manifest.step);
    if start.is_none() {
        origin(dir).write(&Io::with_faults(run.control(), Arc::clone(faults))).await?;
    }
    if let Some(start) = &start {
        pin_only(&store, start.name(), generation).await?;
        plan.promise("pin", start.name().step)?;
    }
    store.retire_after(&*tenure, step, generation, "default").await?;
    store.prune(&*tenure, &Retention::newest(Some(1), "default")).await?;
    let mut rows = RowFile::open_fenced(run.training_rows(), Order::ByStep, Arc::clone(&tenure) as _)?;
    rows.cut_after(step, run.abandoned(generation).join("training.jsonl"))?;
    if let Some(start) = &start {
        load(dir, start.name(), &start.hash)?;
    }
    for step in step.map_or(0, |step| step + 1)..plan.steps {
        rows.append(&serde_json::json!({"step": step}))?;
        tear(&run.training_rows(), step)?;
        rows.sync()?;
        plan.promise("row", step)?;
        let name = CheckpointName { epoch: 0, step };
        let (mut files, mut digests) = (Vec::new(), Vec::new());
        for rank in 0..2 {
            let (shard, mut tensors) = save_rank(Disk::with_faults(dir, Arc::clone(faults)), name, rank, generation)?;
            files.push(shard);
            digests.append(&mut tensors);
        }
        let hash = state_hash::combine(&digests)?;
        litter(dir, name)?;
        let draft = draft(name, generation, tenure.term().0, hash, files);
        commit(&store, &tenure, &draft, &config(dir)).await?;
        plan.promise("commit", step)?;
        store.repair_pointers(&*tenure, "default").await?;
        plan.promise("latest", step)?;
        store.prune(&*tenure, &Retention::newest(Some(1), "default")).await?;
        tenure.beat().await?;
    }
    export(&store, dir, plan).await?;
    tenure.release().await?;
    Ok(())
}

/// Where a run without a commit says that it begins; the cycle begins at nothing all the same.
fn origin(dir: &Path) -> Origin {
    Origin {
        store: dir.display().to_string(),
        name: CheckpointName { epoch: 0, step: 0 },
        manifest: String::new(),
        keep: Keep { optimizer: true, data: true, schedule: true },
        run: None,
        restore_from: None,
    }
}

/// A failed commit is tried again, as the coordinator does.
async fn commit(store: &CheckpointStore, tenure: &Tenure, draft: &Manifest, config: &str) -> Result<(), Error> {
    match store.commit(tenure, draft.clone(), config).await {
        Err(Error::Io { .. }) => store.commit(tenure, draft.clone(), config).await.map(|_| ()),
        other => other.map(|_| ()),
    }
}

/// Pins a generation's start; the pins of earlier ones end.
async fn pin_only(store: &CheckpointStore, name: CheckpointName, generation: u64) -> Result<(), Error> {
    let who = |generation: u64| format!("generation-{generation}");
    store.pin(name, &who(generation)).await?;
    for pin in store.pins().await? {
        if pin.who != who(generation) {
            store.unpin(pin.name, &pin.who).await?;
        }
    }
    Ok(())
}

/// What an append leaves that was cut off by a full disk.
fn tear(rows: &Path, step: u64) -> Result<(), AnyError> {
    if step == 2 {
        std::fs::File::options().append(true).open(rows)?.write_all(b"{\"st")?;
    }
    Ok(())
}

/// What a coordinator leaves that is killed within a commit, which its successor makes, and a dead generation's slow writer.
fn litter(dir: &Path, name: CheckpointName) -> Result<(), AnyError> {
    if name.step == 2 {
        let dir = dir.join(name.to_string());
        std::fs::write(dir.join(".tmp-config.yaml-1-00000000-0"), b"na")?;
        std::fs::write(dir.join("model/shard-00007-of-00008.g0.safetensors"), b"late")?;
    }
    Ok(())
}

fn load(dir: &Path, name: CheckpointName, hash: &str) -> Result<(), AnyError> {
    let reader = ShardReader::open(dir, name, Some(hash))?;
    for (index, parameter) in model().parameters().into_iter().enumerate() {
        let expected = bytes_of(index, parameter.elements(), name.step);
        let mut bytes = vec![0; expected.len()];
        reader.read_tensor(&format!("model/{}", parameter.name), &mut bytes)?;
        assert_eq!(bytes, expected, "{name}: {}", parameter.name);
    }
    Ok(())
}

async fn export(store: &CheckpointStore, dir: &Path, plan: &Plan) -> Result<(), AnyError> {
    let to = dir.join(EXPORT);
    if !to.exists() {
        let latest = store.resolve(Selector::Latest, &ResolveOptions::default()).await?.checkpoint;
        store
            .export(latest.name(), None, &to, &ExportOptions::default(), |_, _| std::ops::ControlFlow::Continue(()))
            .await?;
        plan.promise("export", latest.manifest.step)?;
    }
    Ok(())
}

/// Both ranks' shards of a step, of generation 1.
pub(crate) fn save(dir: &Path, name: CheckpointName) -> Result<Manifest, AnyError> {
    let (mut files, mut digests) = (Vec::new(), Vec::new());
    for rank in 0..2 {
        let disk = Disk::with_faults(dir, Arc::default());
        let (file, mut tensors) = save_rank(disk, name, rank, 1)?;
        files.push(file);
        digests.append(&mut tensors);
    }
    Ok(draft(name, 1, 1, state_hash::combine(&digests)?, files))
}

fn save_rank(
    disk: Disk,
    name: CheckpointName,
    rank: u32,
    generation: u64,
) -> Result<(ShardFile, Vec<TensorDigest>), AnyError> {
    let mine = model().parameters().into_iter().enumerate().filter(|(index, _)| *index as u32 % 2 == rank);
    let held: Vec<_> = mine.map(|(index, p)| (bytes_of(index, p.elements(), name.step), p)).collect();
    let views: Vec<TensorView<'_>> = held
        .iter()
        .map(|(bytes, p)| TensorView { name: &p.name, dtype: "F32", shape: &p.shape, bytes, slice: None })
        .collect();
    let shard = ShardName { section: Section::Model, rank, world_size: 2, generation }.to_string();
    let file = ShardWriter::with_disk(disk, name).write_safetensors(&shard, &views, &[])?;
    let digest = |(bytes, p): &(Vec<u8>, trainctl_spec::model::Parameter)| {
        state_hash::whole_tensor(&format!("model/{}", p.name), "F32", &p.shape, bytes)
    };
    Ok((file, held.iter().map(digest).collect::<Result<_, _>>()?))
}

fn config(dir: &Path) -> String {
    format!(
        "name: crash\nrun_dir: {}\nmodel: {{config: {MODEL}}}\n\
         dataset: {{paths: [{{prefix: text}}], seq_length: 4}}\nstep_scheduler: {{max_steps: {STEPS}}}\n",
        dir.display()
    )
}

fn draft(name: CheckpointName, generation: u64, term: u64, state_hash: String, files: Vec<ShardFile>) -> Manifest {
    let val_losses = BTreeMap::from([("default".to_owned(), val_loss(name.step))]);
    Manifest {
        format: FORMAT,
        name,
        job: "crash".into(),
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
        corpora: Default::default(),
        created_at: String::new(),
        files,
    }
}
