//! P2: a process that is killed at any fail point, or frozen there while another takes over, never leaves a run directory
//! whose LATEST cannot be loaded. The children are this test's own executable, with `TRAINCTL_FAULT` set.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use trainctl_spec::report::{ShardFile, TensorDigest};
use trainctl_store::checkpoints::{Depth, ResolveError, ResolveOptions, Selector};
use trainctl_store::fault::{ENV, Faults};
use trainctl_store::io::{Disk, Io};
use trainctl_store::layout::{CheckpointName, LATEST, Section, ShardName};
use trainctl_store::manifest::{FORMAT, Manifest, Metrics};
use trainctl_store::numbers::Taker;
use trainctl_store::rows::{Order, RowFile, parse_rows};
use trainctl_store::shard::{ShardWriter, TensorView};
use trainctl_store::tenure::{Holder, HolderInfo, Policy, Probe, TokioClock};
use trainctl_store::{CheckpointStore, Error, RunDir, Tenure, state_hash};

const DIR: &str = "TRAINCTL_STORE_CRASH_DIR";
const FROM: &str = "TRAINCTL_STORE_CRASH_FROM";
const STEPS: u64 = 4;
const VAL_LOSSES: [f64; STEPS as usize] = [3.0, 1.0, 2.0, 1.0];

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

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// What a coordinator does with a run directory, from start to end: takes the term, repairs, retires, saves every step.
async fn coordinate(dir: &Path, faults: &Arc<Faults>, others_live: bool) -> Result<(), AnyError> {
    coordinate_from(dir, faults, others_live, Selector::Latest).await
}

async fn coordinate_from(dir: &Path, faults: &Arc<Faults>, others_live: bool, from: Selector) -> Result<(), AnyError> {
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
    let host = Host { others_live };
    let tenure = Arc::new(Tenure::acquire(control, info, &host, &TokioClock::default(), &policy).await?);
    store.take_over(&*tenure, "default").await?;
    let generation = tenure.take_generation().await?.0;
    let start = match store.resolve(from, &ResolveOptions::default()).await {
        Ok(resolved) => Some(resolved.checkpoint.manifest.step),
        Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { .. }) => None,
        Err(e) => return Err(e.into()),
    };
    store.retire_after(&*tenure, start, generation, "default").await?;
    store.prune(&*tenure, Some(1), "default").await?;
    let mut rows = RowFile::open_fenced(run.training_rows(), Order::ByStep, Arc::clone(&tenure) as _)?;
    rows.cut_after(start, run.abandoned(generation).join("training.jsonl"))?;
    for step in start.map_or(0, |step| step + 1)..STEPS {
        rows.append(&serde_json::json!({"step": step}))?;
        let name = CheckpointName { epoch: 0, step };
        let (mut files, mut digests) = (Vec::new(), Vec::new());
        for rank in 0..2 {
            let (file, digest) = save_rank(Disk::with_faults(dir, Arc::clone(faults)), name, rank, generation)?;
            files.push(file);
            digests.push(digest);
        }
        let hash = state_hash::combine(&digests)?;
        let draft = draft(name, generation, tenure.term().0, hash, files);
        store.commit(&*tenure, draft, "seed: 1\n").await?;
        store.repair_pointers(&*tenure, "default").await?;
        store.prune(&*tenure, Some(1), "default").await?;
        tenure.beat().await?;
    }
    tenure.release().await?;
    Ok(())
}

fn save_rank(
    disk: Disk,
    name: CheckpointName,
    rank: u32,
    generation: u64,
) -> Result<(ShardFile, TensorDigest), AnyError> {
    let shape = [40, 50];
    let bytes: Vec<u8> = (0..8000u32).map(|i| (i.wrapping_mul(7 + rank) + name.step as u32) as u8).collect();
    let tensor = format!("w{rank}");
    let view = TensorView { name: &tensor, dtype: "F32", shape: &shape, bytes: &bytes, slice: None };
    let shard = ShardName { section: Section::Model, rank, world_size: 2, generation }.to_string();
    let file = ShardWriter::with_disk(disk, name).write_safetensors(&shard, &[view], &[])?;
    Ok((file, state_hash::whole_tensor(&format!("model/{tensor}"), "F32", &shape, &bytes)?))
}

fn draft(name: CheckpointName, generation: u64, term: u64, state_hash: String, files: Vec<ShardFile>) -> Manifest {
    let val_losses = BTreeMap::from([("default".to_owned(), VAL_LOSSES[name.step as usize])]);
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

/// The children's entry; without the variable there is nothing to do.
#[tokio::test]
async fn child() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let from = std::env::var(FROM).unwrap_or_else(|_| LATEST.to_owned()).parse().unwrap();
    match coordinate_from(Path::new(&dir), &Faults::from_env(), false, from).await {
        Ok(()) => {}
        // A child that was frozen wakes up fenced, or finds its half-written directory gone.
        Err(e) => match e.downcast_ref::<Error>() {
            Some(Error::Superseded { .. } | Error::Io { .. } | Error::Commit { .. }) => {}
            _ => panic!("{e}"),
        },
    }
}

fn start(dir: &Path, fault: &str) -> Child {
    start_from(dir, fault, LATEST)
}

fn start_from(dir: &Path, fault: &str, from: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--test-threads", "1"])
        .env(DIR, dir)
        .env(FROM, from)
        .env(ENV, fault)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// In memory where there is a tmpfs: the page cache survives a SIGKILL anyway, and every fsync of a disk costs 10 ms.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Every point that a whole run passes, with how often.
async fn points() -> BTreeMap<String, u64> {
    let dir = scratch();
    let faults = Faults::tracing();
    coordinate(dir.path(), &faults, false).await.unwrap();
    let mut points = BTreeMap::new();
    for point in faults.trace() {
        *points.entry(point).or_insert(0) += 1;
    }
    points
}

/// P2, read-only: what LATEST names loads, and resolving it gives a checkpoint whose every byte is right.
async fn assert_loads(dir: &Path, context: &str) {
    let store = CheckpointStore::open(dir);
    if let Ok(target) = std::fs::read_link(dir.join(LATEST)) {
        let name = target.to_str().unwrap().parse().unwrap();
        let verified = store.verify(name, &|_, _| {}).await.unwrap_or_else(|e| panic!("{context}: LATEST: {e}"));
        assert_eq!(verified.faults, vec![], "{context}");
    }
    let options = ResolveOptions { depth: Depth::Hashes, ..ResolveOptions::default() };
    let listing = store.list().await.unwrap();
    for committed in &listing.committed {
        let verified = store.verify(committed.name(), &|_, _| {}).await.unwrap();
        assert_eq!(verified.faults, vec![], "{context}: {} is half there (C3, C4)", committed.name());
    }
    match store.resolve(Selector::Latest, &options).await {
        Ok(_) => {}
        Err(ResolveError::Empty { .. } | ResolveError::NoneCommitted { .. }) => {
            assert!(listing.committed.is_empty() && listing.damaged.is_empty(), "{context}");
            assert!(!dir.join(LATEST).is_symlink(), "{context}: LATEST before the first commit");
        }
        Err(e) => panic!("{context}: {e}"),
    }
}

async fn assert_complete(dir: &Path, context: &str) {
    assert_loads(dir, context).await;
    let store = CheckpointStore::open(dir);
    let listing = store.list().await.unwrap();
    let steps: Vec<_> = listing.committed.iter().map(|c| c.name().step).collect();
    assert_eq!((steps, listing.uncommitted), (vec![1, 3], vec![]), "{context}");
    for (pointer, step) in [("LATEST", 3), ("LOWEST_VAL", 1)] {
        let target = std::fs::read_link(dir.join(pointer)).unwrap();
        assert_eq!(target.to_str().unwrap(), format!("epoch_0_step_{step}"), "{context}");
    }
    let rows: Vec<serde_json::Value> = parse_rows(dir.join("training.jsonl")).unwrap();
    let steps: Vec<_> = rows.iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 1, 2, 3], "{context}");
}

#[tokio::test]
async fn a_kill_at_any_point_leaves_a_run_that_loads_and_goes_on() {
    let points = points().await;
    for family in ["commit.manifest", "commit.config", "pointer.latest.temp", "prune.manifest", "numbers.take.temp"] {
        assert!(points.contains_key(family), "{family} is not passed: {points:?}");
    }
    for (point, count) in points {
        for nth in 1..=count {
            let dir = scratch();
            let fault = format!("{point}:{nth}:exit");
            let status = start(dir.path(), &fault).wait().unwrap();
            assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{fault} was not reached");
            assert_loads(dir.path(), &fault).await;
            coordinate(dir.path(), &Arc::default(), false).await.unwrap_or_else(|e| panic!("{fault}: {e}"));
            assert_complete(dir.path(), &fault).await;
        }
    }
}

#[tokio::test]
async fn a_holder_that_is_frozen_and_wakes_up_after_a_takeover_does_no_harm() {
    for point in [
        "commit.config:2",
        "commit.config.temp:2",
        "commit.manifest:2",
        "commit.manifest.temp:2",
        "commit.manifest.done:2",
        "pointer.latest:2",
        "pointer.latest.temp:2",
        "pointer.lowest_val:2",
        "prune.manifest:1",
        "prune.directory:1",
        "holder.beat:2",
        "holder.beat.temp:2",
        "rows.append:2",
    ] {
        let dir = scratch();
        let fault = format!("{point}:stop");
        let mut child = start(dir.path(), &fault);
        let pid = Pid::from_raw(child.id() as i32);
        let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(stopped, WaitStatus::Stopped(..)), "{fault}: {stopped:?}");
        coordinate(dir.path(), &Arc::default(), true).await.unwrap_or_else(|e| panic!("{fault}: {e}"));
        assert_complete(dir.path(), &fault).await;
        kill(pid, Signal::SIGCONT).unwrap();
        assert!(child.wait().unwrap().success(), "{fault}");
        // C2: whoever holds the run looks again one lease after the takeover.
        let store = CheckpointStore::open(dir.path());
        store.take_over(&trainctl_store::Unfenced, "default").await.unwrap();
        store.prune(&trainctl_store::Unfenced, Some(1), "default").await.unwrap();
        assert_complete(dir.path(), &fault).await;
    }
}

#[tokio::test]
async fn a_late_rename_of_what_the_successor_committed_is_undone() {
    let dir = scratch();
    coordinate(dir.path(), &Arc::default(), false).await.unwrap();
    let mut child = start_from(dir.path(), "retire.rename:1:stop", "epoch_0_step_1");
    let pid = Pid::from_raw(child.id() as i32);
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert!(matches!(stopped, WaitStatus::Stopped(..)), "{stopped:?}");
    let from = "epoch_0_step_1".parse().unwrap();
    coordinate_from(dir.path(), &Arc::default(), true, from).await.unwrap();
    assert_complete(dir.path(), "successor").await;
    kill(pid, Signal::SIGCONT).unwrap();
    assert!(child.wait().unwrap().success());
    let store = CheckpointStore::open(dir.path());
    let last = CheckpointName { epoch: 0, step: 3 };
    assert!(store.list().await.unwrap().get(last).is_none(), "the late rename took it away");
    let taken_over = store.take_over(&trainctl_store::Unfenced, "default").await.unwrap();
    assert_eq!(taken_over.restored, [last]);
    assert_complete(dir.path(), "restored").await;
}
