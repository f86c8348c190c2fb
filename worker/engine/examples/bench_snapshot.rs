//! How long training stands still for a save, against a copy of the same bytes into touched memory, in turn in one process.
//!
//!     bench_snapshot [--bytes N] [--rounds R] [--threads T] [--dir D]
//!
//! One rank holds a GPT-2 with AdamW's moments of about N bytes in all (default 1 GiB) and saves it R times with
//! `Saver::save`, each time after the save before is durable. The digest of what the rank holds runs beside the next step; it is
//! timed too, with the write beside it. The copy has as many threads as the snapshot. The last line on
//! standard output is a JSON object; the first round warms up and is not in it.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for measuring, not part of the product"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tch::{Device, Kind};
use trainctl_collective::{GroupOptions, MemoryStore, ProcessGroup};
use trainctl_engine::checkpoint::{Meta, Saver, State, TrainerState};
use trainctl_engine::model::Gpt2;
use trainctl_engine::optim::AdamW;
use trainctl_engine::parallel::World;
use trainctl_engine::params::Parameters;
use trainctl_engine::schedule::SaveReason;
use trainctl_engine::{FailedSave, Link, Requests, TrainJob};
use trainctl_spec::model::Architecture;
use trainctl_spec::report::{Phase, SaveKind, ShardReport, TrainRow, ValidationRow};
use trainctl_spec::start::DataPhase;
use trainctl_spec::{Generation, JobSpec, Rank, Step};

const WIDTH: u64 = 640;
const VOCABULARY: u64 = 50_257;
/// fp32 weight and two fp32 moments.
const BYTES_PER_PARAMETER: u64 = 12;

/// Keeps the reports.
#[derive(Default)]
struct Reports(Mutex<Vec<ShardReport>>);

impl Link for Reports {
    fn phase(&self, _: Phase, _: Step) {}
    fn formed(&self) {}
    fn burned_in(&self, _: trainctl_spec::report::BurnInReport) {}
    fn step_done(&self, _: Step, _: Duration) {}
    fn train_row(&self, _: TrainRow) {}
    fn validation_row(&self, _: ValidationRow) {}
    fn save_begins(&self) {}
    fn shards_durable(&self, report: ShardReport) {
        self.0.lock().unwrap().push(report);
    }
    fn save_failed(&self, failed: FailedSave) {
        panic!("{failed:?}");
    }
    fn save_skipped(&self, kind: SaveKind, step: Step, why: &str) {
        panic!("{kind:?} of step {step}: {why}");
    }
    fn withdraw(&self, _: SaveKind, _: &[Step]) -> Vec<Step> {
        Vec::new()
    }
    fn requests(&self) -> Requests {
        Requests::default()
    }
}

struct Options {
    bytes: u64,
    rounds: u64,
    threads: u32,
    dir: Option<PathBuf>,
}

impl Options {
    fn from_args() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let mut options = Self { bytes: 1 << 30, rounds: 5, threads: cores, dir: None };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let value = arguments.next().unwrap_or_else(|| panic!("{name} needs a value"));
            match name.as_str() {
                "--bytes" => options.bytes = value.parse().unwrap(),
                "--rounds" => options.rounds = value.parse().unwrap(),
                "--threads" => options.threads = value.parse().unwrap(),
                "--dir" => options.dir = Some(value.into()),
                other => panic!("{other} is unknown"),
            }
        }
        options
    }
}

fn main() {
    let Options { bytes, rounds, threads, dir } = Options::from_args();
    let scratch = tempfile::tempdir_in(dir.unwrap_or_else(std::env::temp_dir)).unwrap();
    trainctl_collective::set_num_threads(threads as usize).unwrap();

    let layer = 12 * WIDTH * WIDTH + 13 * WIDTH;
    let embeddings = (VOCABULARY + 1024) * WIDTH;
    let layers = ((bytes / BYTES_PER_PARAMETER).saturating_sub(embeddings) / layer).max(1);
    let config = serde_json::json!({
        "model_type": "gpt2", "n_layer": layers, "n_embd": WIDTH, "n_head": 10, "vocab_size": VOCABULARY, "n_positions": 1024,
    });
    let spec: JobSpec = serde_json::from_value(serde_json::json!({
        "name": "bench", "run_dir": scratch.path(), "model": {"config": config},
        "dataset": {"paths": [], "seq_length": 1024}, "step_scheduler": {"max_steps": 1},
    }))
    .unwrap();
    let architecture = Architecture::from_config(config.as_object().unwrap()).unwrap();
    let known = architecture.parameters();
    let Architecture::Gpt2(config) = architecture;
    let model = Gpt2::new(config, 1024, Device::Cpu).unwrap();
    let mut params = Parameters::zeros(&model.block_names(), &known, Kind::Float, Device::Cpu).unwrap();
    params.init(&known, 1).unwrap();
    let mut optimizer = AdamW::new(&spec.optimizer, params.entries(), Device::Cpu).unwrap();
    let (first, second) = optimizer.moments_mut();
    for moment in first.iter_mut().chain(second) {
        drop(moment.fill_(0.5));
    }

    let store = Arc::new(MemoryStore::new());
    let options = GroupOptions {
        rank: 0,
        world_size: 1,
        address: "127.0.0.1".parse().unwrap(),
        timeout: Duration::from_secs(60),
    };
    let group = ProcessGroup::gloo(store.clone(), &options).unwrap();
    let world = World::new(group, Device::Cpu, 1, Step(0), Default::default()).unwrap();
    let job = TrainJob {
        pulse: Default::default(),
        spec,
        rank: Rank(0),
        world_size: 1,
        local_rank: 0,
        local_world_size: 1,
        generation: Generation(1),
        start_from: None,
        phase: DataPhase::default(),
        start_step: Step(0),
        stop_at: Step(1),
        burn_in: Duration::ZERO,
        node_ranks: Vec::new(),
        threads,
        address: "127.0.0.1".to_owned(),
        rendezvous: store,
    };
    let reports = Arc::new(Reports::default());
    let mut saver = Saver::new(&job, &params, Device::Cpu, reports.clone()).unwrap();

    let total = params.entries().iter().map(|entry| entry.numel().unsigned_abs()).sum::<u64>() * BYTES_PER_PARAMETER;
    let source = vec![1_u8; total as usize];
    let mut target = vec![2_u8; total as usize];
    let (mut snapshots, mut copies, mut digests) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let trainer = TrainerState { step: round, epoch: 0, updates: 0, consumed_samples: 0, next_lr: 0.0 };
        let meta = Meta { trainer, train_loss: 0.0, val_losses: BTreeMap::new(), corpora: BTreeMap::new() };
        let state = State { params: &params, optimizer: &optimizer };
        saver.save(SaveKind::Full, SaveReason::Every, state, meta, &world).unwrap();
        // What the update would wait for if no forward and backward came before it.
        let started = Instant::now();
        saver.before_update();
        let digest = started.elapsed().as_secs_f64();
        saver.finish().unwrap();
        let report = reports.0.lock().unwrap().pop().unwrap();
        let copy = time_copy(&mut target, &source, threads as usize);
        eprintln!(
            "round {round}: stall {:.4} s, copy {copy:.4} s, digest {digest:.4} s, write {:.2} s",
            report.stall_seconds, report.write_seconds
        );
        if round > 0 {
            snapshots.push(report.stall_seconds);
            copies.push(copy);
            digests.push(digest);
        }
        std::fs::remove_dir_all(scratch.path().join(report.checkpoint)).unwrap();
    }
    let figures = serde_json::json!({
        "bytes": total, "threads": threads, "snapshot_seconds": snapshots, "memcpy_seconds": copies,
        "digest_seconds": digests,
    });
    println!("{figures}");
}

fn time_copy(target: &mut [u8], source: &[u8], threads: usize) -> f64 {
    let share = source.len().div_ceil(threads);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (target, source) in target.chunks_mut(share).zip(source.chunks(share)) {
            scope.spawn(move || target.copy_from_slice(source));
        }
    });
    started.elapsed().as_secs_f64()
}
