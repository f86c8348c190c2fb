//! Whole runs: each rank is a process of its own (the test binary started again), and the ranks meet in a store behind a
//! TCP port. What a rank reports over its link comes back to the test as JSON.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trainctl_collective::{KeyValue, KvError, KvErrorKind, MemoryStore};
use trainctl_engine::checkpoint::VERIFY_ENV;
use trainctl_engine::{Error, FailedSave, Finished, Link, Requests, TrainJob, train};
use trainctl_spec::report::{
    BurnInReport, FinishCause, Phase, SaveKind, ShardFile, ShardReport, TensorDigest, TrainRow, ValidationRow,
};
use trainctl_spec::start::{DataPhase, Keep, StartFrom};
use trainctl_spec::{Generation, JobSpec, Rank, Step};

const CASE: &str = "TRAINCTL_ENGINE_TEST_CASE";
const RANK: &str = "TRAINCTL_ENGINE_TEST_RANK";

/// One generation to run.
#[derive(Clone, Serialize, Deserialize)]
pub struct Case {
    pub spec: JobSpec,
    pub world_size: u32,
    pub generation: u64,
    pub start_from: Option<(String, String)>,
    pub phase: DataPhase,
    pub start_step: u64,
    pub stop_at: u64,
    /// These ranks hear a stop request while this step runs.
    pub stop_heard: Option<(Vec<u32>, u64)>,
    /// No coordinator is sent a report: the worker withdraws whatever it is asked to.
    pub is_cut_off: bool,
    /// This rank hears a save request while this step runs.
    pub save_heard: Option<(u32, u64)>,
    /// This rank's write of this step ends only once that phase of that step has begun.
    pub held_save: Option<(u32, u64, Phase, u64)>,
    /// The second step does not end before a failure of the first one's save was reported.
    pub failure_awaited: Option<(u64, u64)>,
    /// What is taken of `start_from`.
    pub keep: Keep,
    /// `TRAINCTL_FAULT` of every rank, or of one.
    pub fault: String,
    pub faulty: Option<u32>,
    /// Where `start_from` is, if not where the run's own checkpoints are.
    pub start_store: String,
    /// Milliseconds of burn-in, and for each host its ranks; empty = one host.
    pub burn_in_ms: u64,
    pub hosts: Vec<Vec<u32>>,
    pub store: Option<SocketAddr>,
    pub out: Option<PathBuf>,
}

/// How a rank ended: cause, next step and last loss, or the error's text.
pub type Ended = Result<(FinishCause, u64, Option<f64>), String>;

/// Name, dtype, shape, first block and blocks of a `TensorDigest`.
pub type Digest = (String, String, Vec<u64>, u64, Vec<[u8; 32]>);

/// What one rank reported.
#[derive(Default, Serialize, Deserialize)]
pub struct Told {
    pub rows: Vec<TrainRow>,
    /// Steps whose row is not finite: JSON has no such numbers.
    pub not_finite: Vec<u64>,
    pub validation: Vec<(String, ValidationRow)>,
    pub reports: Vec<Report>,
    pub phases: Vec<(Phase, u64)>,
    pub steps: Vec<u64>,
    pub formed: u32,
    pub burn_ins: Vec<BurnIn>,
    pub failed_saves: Vec<String>,
    pub skipped_saves: Vec<String>,
    /// Steps of the saves that the worker was asked to withdraw.
    pub withdrawn: Vec<u64>,
    pub ended: Option<Ended>,
}

/// A shard report that serde can carry.
#[derive(Clone, Serialize, Deserialize)]
pub struct Report {
    pub kind: SaveKind,
    pub step: u64,
    pub checkpoint: String,
    pub files: Vec<ShardFile>,
    pub tensors: Vec<Digest>,
    pub consumed_samples: u64,
    pub train_loss: Option<f64>,
    pub val_losses: BTreeMap<String, f64>,
    pub corpora: BTreeMap<String, u64>,
    /// Held and written.
    pub replica: Option<(u128, Option<u128>)>,
}

/// A report of a burn-in that serde can carry.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BurnIn {
    pub digest: u128,
    pub rounds: u64,
    pub wrong_rounds: u64,
    pub gigaflops: f64,
    /// Wrong elements of the host's sum and of the world's, where there is one.
    pub wrong_sums: [Option<u64>; 2],
    pub device: String,
    pub work: String,
}

impl Report {
    pub fn digests(&self) -> impl Iterator<Item = TensorDigest> {
        self.tensors.iter().cloned().map(|(name, dtype, shape, first_block, blocks)| TensorDigest {
            name,
            dtype,
            shape,
            first_block,
            blocks,
        })
    }
}

impl Case {
    /// The whole of `spec` in one generation.
    pub fn new(spec: JobSpec, world_size: u32) -> Self {
        let stop_at = spec.step_scheduler.max_steps;
        Self {
            spec,
            world_size,
            generation: 1,
            start_from: None,
            phase: DataPhase::default(),
            start_step: 0,
            stop_at,
            stop_heard: None,
            is_cut_off: false,
            save_heard: None,
            held_save: None,
            failure_awaited: None,
            keep: Keep::ALL,
            fault: String::new(),
            faulty: None,
            start_store: String::new(),
            burn_in_ms: 0,
            hosts: Vec::new(),
            store: None,
            out: None,
        }
    }

    /// Runs every rank to its end and returns what each reported, by rank.
    pub fn run(mut self) -> Vec<Told> {
        let out = tempfile::tempdir().unwrap();
        self.store = Some(serve(Arc::new(MemoryStore::new())));
        self.out = Some(out.path().to_owned());
        let json = serde_json::to_string(&self).unwrap();
        let children: Vec<_> = (0..self.world_size)
            .map(|rank| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
                    .env(CASE, &json)
                    .env(VERIFY_ENV, "1")
                    .env(
                        trainctl_store::fault::ENV,
                        if self.faulty.is_none_or(|of| of == rank) { &self.fault } else { "" },
                    )
                    .env(RANK, rank.to_string())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let ends: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        for (rank, end) in ends.iter().enumerate() {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert!(end.status.success(), "rank {rank}: {}\n{}{}", end.status, text(&end.stdout), text(&end.stderr));
        }
        let read = |rank| std::fs::read(rank_file(out.path(), rank)).unwrap();
        (0..self.world_size).map(|rank| serde_json::from_slice(&read(rank)).unwrap()).collect()
    }
}

fn rank_file(out: &Path, rank: u32) -> PathBuf {
    out.join(format!("rank-{rank}.json"))
}

/// Body of the test `rank_process`: trains if this process is a rank, else does nothing.
pub fn rank_process() {
    let Ok(case) = std::env::var(CASE) else { return };
    let case: Case = serde_json::from_str(&case).unwrap();
    let rank: u32 = std::env::var(RANK).unwrap().parse().unwrap();
    let recorder = Arc::new(Recorder {
        told: Mutex::default(),
        stop_at: case.stop_heard.clone().filter(|(of, _)| of.contains(&rank)).map(|(_, step)| step),
        is_cut_off: case.is_cut_off,
        failure_awaited: case.failure_awaited,
        save_at: case.save_heard.filter(|(of, _)| *of == rank).map(|(_, step)| step),
        held: case.held_save.filter(|(of, ..)| *of == rank).map(|(_, save, phase, step)| (save, (phase, step))),
        said: Condvar::new(),
    });
    let ended = train(&case, rank, recorder.clone());
    let mut told = recorder.told.lock().unwrap();
    told.ended = Some(match ended {
        Ok(Finished { cause, next_step, last_loss }) => {
            Ok((cause, next_step.0, last_loss.filter(|loss| loss.is_finite())))
        }
        Err(error) => Err(error.to_string()),
    });
    std::fs::write(rank_file(&case.out.unwrap(), rank), serde_json::to_vec(&*told).unwrap()).unwrap();
}

fn train(case: &Case, rank: u32, link: Arc<dyn Link>) -> Result<Finished, Error> {
    let all: Vec<u32> = (0..case.world_size).collect();
    let job = TrainJob {
        burn_in: Duration::from_millis(case.burn_in_ms),
        node_ranks: case.hosts.iter().find(|ranks| ranks.contains(&rank)).unwrap_or(&all).clone(),
        pulse: Default::default(),
        spec: case.spec.clone(),
        rank: Rank(rank),
        world_size: case.world_size,
        local_rank: rank,
        local_world_size: case.world_size,
        generation: Generation(case.generation),
        start_from: case.start_from.clone().map(|(name, manifest_blake3)| StartFrom {
            store: case.start_store.clone(),
            name,
            manifest_blake3,
            keep: case.keep,
        }),
        phase: case.phase.clone(),
        start_step: Step(case.start_step),
        stop_at: Step(case.stop_at),
        threads: 1,
        address: "127.0.0.1".to_owned(),
        rendezvous: Arc::new(Remote(case.store.unwrap())),
    };
    train::run(job, link)
}

struct Recorder {
    told: Mutex<Told>,
    stop_at: Option<u64>,
    is_cut_off: bool,
    failure_awaited: Option<(u64, u64)>,
    save_at: Option<u64>,
    held: Option<(u64, (Phase, u64))>,
    said: Condvar,
}

impl Link for Recorder {
    fn phase(&self, phase: Phase, step: Step) {
        self.told.lock().unwrap().phases.push((phase, step.0));
        self.said.notify_all();
    }

    fn formed(&self) {
        self.told.lock().unwrap().formed += 1;
    }

    fn burned_in(&self, report: BurnInReport) {
        let mut told = self.told.lock().unwrap();
        assert_eq!(told.formed, 0, "the store may be sealed once it is formed");
        told.burn_ins.push(BurnIn {
            digest: report.digest,
            rounds: report.rounds,
            wrong_rounds: report.wrong_rounds,
            gigaflops: report.gigaflops,
            wrong_sums: [report.node_sum, report.world_sum].map(|sum| sum.map(|sum| sum.wrong_elements)),
            device: report.device,
            work: report.work,
        });
    }

    fn step_done(&self, step: Step, compute: Duration) {
        assert!(compute > Duration::ZERO, "step {step:?}");
        let mut told = self.told.lock().unwrap();
        if let Some((save, _)) = self.failure_awaited.filter(|(_, until)| *until == step.0) {
            let is_reported =
                |told: &mut Told| told.failed_saves.iter().any(|why| why.starts_with(&format!("{save}: ")));
            let limit = Duration::from_secs(30);
            let (now, waited) = self.said.wait_timeout_while(told, limit, |told| !is_reported(told)).unwrap();
            assert!(!waited.timed_out(), "no failure of step {save} within {limit:?}");
            told = now;
        }
        told.steps.push(step.0);
    }

    fn train_row(&self, row: TrainRow) {
        let mut told = self.told.lock().unwrap();
        if row.loss.is_finite() && row.grad_norm.is_finite() {
            told.rows.push(row);
        } else {
            told.not_finite.push(row.step);
        }
    }

    fn validation_row(&self, row: ValidationRow) {
        if row.val_loss.is_finite() {
            self.told.lock().unwrap().validation.push((row.name.clone(), row));
        }
    }

    fn save_begins(&self) {}

    fn shards_durable(&self, report: ShardReport) {
        if let Some((_, until)) = self.held.filter(|(save, _)| *save == report.step && report.kind == SaveKind::Full) {
            let told = self.told.lock().unwrap();
            drop(self.said.wait_while(told, |told| !told.phases.contains(&until)).unwrap());
        }
        assert!(report.stall_seconds > 0.0 && report.write_seconds > 0.0, "{report:?}");
        let ShardReport {
            kind,
            step,
            checkpoint,
            files,
            tensors,
            consumed_samples,
            train_loss,
            val_losses,
            corpora,
            replica,
            ..
        } = report;
        let replica = replica.map(|digest| (digest.held, digest.written));
        let tensors = tensors.into_iter().map(|t| (t.name, t.dtype, t.shape, t.first_block, t.blocks)).collect();
        let finite = |loss: &f64| loss.is_finite();
        let val_losses = val_losses.into_iter().filter(|(_, loss)| finite(loss)).collect();
        let train_loss = train_loss.filter(finite);
        let report = Report {
            kind,
            step,
            checkpoint,
            files,
            tensors,
            consumed_samples,
            train_loss,
            val_losses,
            corpora,
            replica,
        };
        self.told.lock().unwrap().reports.push(report);
    }

    fn save_failed(&self, failed: FailedSave) {
        let FailedSave { step, attempt, is_tried_again, why, .. } = failed;
        assert_eq!(why.contains("; trying again in "), is_tried_again, "{why}");
        let attempt = if attempt > 1 { format!(", attempt {attempt}") } else { String::new() };
        self.told.lock().unwrap().failed_saves.push(format!("{step}{attempt}: {why}"));
        self.said.notify_all();
    }

    fn withdraw(&self, _: SaveKind, steps: &[Step]) -> Vec<Step> {
        let mut told = self.told.lock().unwrap();
        told.withdrawn.extend(steps.iter().map(|step| step.0));
        if self.is_cut_off { steps.to_vec() } else { Vec::new() }
    }

    fn save_skipped(&self, _: SaveKind, step: Step, why: &str) {
        self.told.lock().unwrap().skipped_saves.push(format!("{step}: {why}"));
    }

    fn requests(&self) -> Requests {
        let step = self.told.lock().unwrap().phases.last().map(|(_, step)| *step);
        Requests { stop: step == self.stop_at && step.is_some(), save: step == self.save_at && step.is_some() }
    }
}

#[derive(Serialize, Deserialize)]
enum Call {
    Set(String, Vec<u8>),
    Get(String, Duration),
    Add(String, i64),
    Check(Vec<String>),
    Wait(Vec<String>, Duration),
    Delete(String),
    CompareSet(String, Vec<u8>, Vec<u8>),
    NumKeys,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Bytes(Vec<u8>),
    Number(i64),
    Timeout(String),
    Closed(String),
}

fn answer(store: &MemoryStore, call: Call) -> Result<Answer, KvError> {
    let flag = |yes: bool| Answer::Number(yes.into());
    let borrow = |keys: &[String], run: &dyn Fn(&[&str]) -> Result<Answer, KvError>| {
        run(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    };
    match call {
        Call::Set(key, value) => store.set(&key, &value).map(|()| Answer::Number(0)),
        Call::Get(key, timeout) => store.get(&key, timeout).map(Answer::Bytes),
        Call::Add(key, amount) => store.add(&key, amount).map(Answer::Number),
        Call::Check(wanted) => borrow(&wanted, &|keys| store.check(keys).map(flag)),
        Call::Wait(wanted, timeout) => borrow(&wanted, &|keys| store.wait(keys, timeout).map(|()| Answer::Number(0))),
        Call::Delete(key) => store.delete(&key).map(flag),
        Call::CompareSet(key, expected, desired) => store.compare_set(&key, &expected, &desired).map(Answer::Bytes),
        Call::NumKeys => store.num_keys().map(Answer::Number),
    }
}

/// One call per connection, one JSON line each way; serves until the process ends.
fn serve(store: Arc<MemoryStore>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let store = Arc::clone(&store);
            thread::spawn(move || {
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line)?;
                let answer = answer(&store, serde_json::from_str(&line)?).unwrap_or_else(|error| match error.kind {
                    KvErrorKind::Timeout => Answer::Timeout(error.message),
                    _ => Answer::Closed(error.message),
                });
                writeln!(&stream, "{}", serde_json::to_string(&answer)?)
            });
        }
    });
    address
}

struct Remote(SocketAddr);

impl Remote {
    fn call(&self, call: &Call) -> Result<(Vec<u8>, i64), KvError> {
        let exchange = || -> std::io::Result<Answer> {
            let stream = TcpStream::connect(self.0)?;
            writeln!(&stream, "{}", serde_json::to_string(call)?)?;
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line)?;
            Ok(serde_json::from_str(&line)?)
        };
        match exchange().map_err(|error| KvError::closed(format!("the store is gone: {error}")))? {
            Answer::Bytes(bytes) => Ok((bytes, 0)),
            Answer::Number(number) => Ok((Vec::new(), number)),
            Answer::Timeout(message) => Err(KvError::timeout(message)),
            Answer::Closed(message) => Err(KvError::closed(message)),
        }
    }
}

fn owned(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|&key| key.to_owned()).collect()
}

impl KeyValue for Remote {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        self.call(&Call::Set(key.to_owned(), value.to_vec())).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        self.call(&Call::Get(key.to_owned(), timeout)).map(|(bytes, _)| bytes)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, KvError> {
        self.call(&Call::Add(key.to_owned(), amount)).map(|(_, sum)| sum)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, KvError> {
        self.call(&Call::Check(owned(keys))).map(|(_, yes)| yes != 0)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), KvError> {
        self.call(&Call::Wait(owned(keys), timeout)).map(drop)
    }

    fn delete(&self, key: &str) -> Result<bool, KvError> {
        self.call(&Call::Delete(key.to_owned())).map(|(_, yes)| yes != 0)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, KvError> {
        self.call(&Call::CompareSet(key.to_owned(), expected.to_vec(), desired.to_vec())).map(|(bytes, _)| bytes)
    }

    fn num_keys(&self) -> Result<i64, KvError> {
        self.call(&Call::NumKeys).map(|(_, count)| count)
    }
}
