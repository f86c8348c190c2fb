//! A coordinator: the real core, with a run directory's task that is modelled.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use trainctl_coordinator::core::{Core, Effect, Event, Moment, Policy};
use trainctl_coordinator::record::{JobRecord, StartPoint};
use trainctl_coordinator::run_io::{Changes, CommitInfo, Committed, IoRequest, IoResult, Known, Prepared};
use trainctl_spec::{Generation, JobId, JobSpec, Term};

use crate::disk::{Commit, Disk};

/// Ranks of the job; one worker more is there.
pub(crate) const WORLD_SIZE: usize = 3;
/// Its steps.
pub(crate) const MAX_STEPS: u64 = 120;

const SPEC: &str = "
name: tiny
run_dir: /runs/tiny
resources: {workers: 3, threads_per_worker: 1}
model: {config: {model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 8, vocab_size: 64, n_positions: 16}}
dataset: {paths: /data/text, seq_length: 8, split: '99,1,0'}
step_scheduler: {global_batch_size: 6, local_batch_size: 2, max_steps: 120, ckpt_every_steps: 4}
fault_tolerance: {max_restarts: 1000}
checkpoint: {save_consolidated: false}
";

pub(crate) fn job() -> JobId {
    JobId("tiny-1".to_owned())
}

/// One life of a coordinator.
pub(crate) struct Coordinator {
    pub(crate) core: Core,
    pub(crate) incarnation: u64,
    term: u64,
    /// Its monotonic clock began so long before the world's.
    offset: u64,
    /// Worker at the other end of each stream.
    pub(crate) sessions: BTreeMap<u64, usize>,
    /// What its run directory's task has still to do.
    pub(crate) io: VecDeque<IoRequest>,
}

impl Coordinator {
    /// Starts: adopts the job that the journal has, or admits it.
    pub(crate) fn start(incarnation: u64, offset: u64, now: u64, disk: &mut Disk) -> (Self, Vec<Effect>) {
        let term = disk.take_term();
        let core = Core::new(Policy::default(), Duration::from_millis(now + offset), incarnation);
        let (sessions, io) = (BTreeMap::new(), VecDeque::new());
        let mut coordinator = Self { core, incarnation, term, offset, sessions, io };
        let at = coordinator.moment(now);
        let spec = JobSpec::from_yaml(SPEC).unwrap();
        let effects = match disk.job() {
            Some(record) => coordinator.core.adopt(record, spec, Term(term), at),
            None => {
                let record =
                    JobRecord { request_id: "r".to_owned(), ..JobRecord::queued(job(), SPEC.to_owned(), Term(term)) };
                coordinator.core.handle(Event::Admitted { record: Box::new(record), spec: Box::new(spec) }, at)
            }
        };
        (coordinator, effects)
    }

    fn moment(&self, now: u64) -> Moment {
        Moment { now: Duration::from_millis(now + self.offset), wall_ms: now }
    }

    pub(crate) fn handle(&mut self, event: Event, now: u64) -> Vec<Effect> {
        let at = self.moment(now);
        self.core.handle(event, at)
    }

    /// What the task finds when it starts.
    pub(crate) fn known(&mut self, disk: &Disk, now: u64) -> Vec<Effect> {
        let known = Known { pointers: pointers(disk), first: None, last: None, validation: None };
        self.answer(IoResult::Known(Box::new(known)), now)
    }

    fn answer(&mut self, result: IoResult, now: u64) -> Vec<Effect> {
        self.handle(Event::Io { job: job(), result: Box::new(result) }, now)
    }

    /// The task carries out its next request. A commit is durable even if nobody lives to hear of it.
    pub(crate) fn next_io(&mut self, disk: &mut Disk, now: u64) -> Vec<Effect> {
        let Some(request) = self.io.pop_front() else { return Vec::new() };
        let result = self.carry_out(request, disk);
        result.map(|result| self.answer(result, now)).unwrap_or_default()
    }

    pub(crate) fn carry_out(&self, request: IoRequest, disk: &mut Disk) -> Option<IoResult> {
        match request {
            IoRequest::Event(_) => None,
            IoRequest::TrainRow { row, token } => {
                disk.put_row(row.step);
                Some(IoResult::Done(token.into_iter().collect()))
            }
            IoRequest::ValidationRow { token, .. } => Some(IoResult::Done(token.into_iter().collect())),
            IoRequest::Commit(asked) => {
                let (generation, kind, step) = (asked.generation, asked.kind, asked.step);
                let before = pointers(disk).0;
                disk.commit(step, asked.world_size, Commit { generation: generation.0, term: self.term });
                let moves = vec![("LATEST".to_owned(), before, name(step))];
                let outcome = Ok(CommitInfo {
                    checkpoint: name(step),
                    state_hash: "h".to_owned(),
                    changes: Changes { moves, ..Changes::default() },
                    pointers: pointers(disk),
                    bytes: 1,
                    commit_seconds: 0.0,
                });
                Some(IoResult::Committed(Box::new(Committed { generation, kind, step, outcome })))
            }
            IoRequest::Prepare(_) => {
                let (generation, start) = disk.prepare();
                let start = start.map_or_else(StartPoint::default, |step| StartPoint {
                    checkpoint: name(step),
                    manifest_blake3: "00".repeat(32),
                    step: step + 1,
                    ..StartPoint::default()
                });
                let (retired, notes) = (Vec::new(), Vec::new());
                let generation = Generation(generation);
                let prepared = Prepared { generation, start, pointers: pointers(disk), retired, notes };
                Some(IoResult::Prepared(Box::new(Ok(prepared))))
            }
            IoRequest::Release => Some(IoResult::Released),
        }
    }
}

fn name(step: u64) -> String {
    format!("epoch_0_step_{step}")
}

fn pointers(disk: &Disk) -> (String, String) {
    (disk.latest.map(name).unwrap_or_default(), String::new())
}
