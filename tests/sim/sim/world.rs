//! Time and what happens next. Every choice comes from the seed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainctl_coordinator::core;
use trainctl_proto::v1::SaveKind;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_spec::state::{Cause, JobPhase};
use trainctl_worker::session::machine;

use crate::coordinator::Coordinator;
use crate::disk::{Disk, Run};
use crate::network::Stream;
use crate::scenario::{Scenario, Wants};
use crate::training::{End, Group};
use crate::worker::Worker;

/// Milliseconds after the last storm within which every job must have come to its end.
const LIMIT: u64 = 20 * 60_000;
/// How many of the last events are shown when a seed fails.
const TRACED: usize = 50;

/// What happens at a moment. A worker or a coordinator is named with its life: what an earlier one had begun is dropped.
#[derive(Clone, Debug)]
pub(crate) enum What {
    /// A coordinator's process starts on this host.
    Launch(usize),
    Supervise,
    Look(u64),
    Answered(u64),
    Take(u64, u64),
    WriteHolder(u64, usize),
    Beat(u64, usize),
    CoordinatorTick(u64),
    /// The owner was held up.
    OwnerGoesOn(u64),
    Task(u64, usize),
    SecondLook(u64, usize),
    Submit(usize),
    Cancel(usize),
    /// The next message of a stream, to the worker or to the coordinator.
    Delivery {
        stream: u64,
        to_worker: bool,
    },
    DialTimeout(u64),
    /// A command arrives again.
    Repeated(usize, Box<Body>),
    WorkerStarts(usize),
    WorkerTick(usize, u64),
    TrainerStarted(usize, u64),
    TrainerEnds(usize, u64, Tag, End),
    TrainerGone(usize, u64),
    Forgotten(usize, u64),
    Step(Tag),
    ShardsDurable(usize, u64, Tag, u64, SaveKind),
    Finish(usize, u64, Tag),
    Fault,
    Flap(usize),
}

/// Job and generation of a trainer.
pub(crate) type Tag = (usize, u64);

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) generations: u64,
    pub(crate) commits: u64,
    pub(crate) coordinators: u64,
    pub(crate) takeovers: u64,
    pub(crate) late_changes: u64,
    pub(crate) faults: BTreeMap<&'static str, u64>,
    pub(crate) events: u64,
    pub(crate) seconds: u64,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Self) {
        self.generations += other.generations;
        self.commits += other.commits;
        self.coordinators += other.coordinators;
        self.takeovers += other.takeovers;
        self.late_changes += other.late_changes;
        self.events += other.events;
        self.seconds += other.seconds;
        other.faults.iter().for_each(|(kind, count)| *self.faults.entry(kind).or_default() += count);
    }
}

/// The world.
pub(crate) struct World {
    pub(crate) random: StdRng,
    pub(crate) scenario: Scenario,
    pub(crate) now: u64,
    /// By time, then in the order in which they were decided.
    queue: BTreeMap<(u64, u64), What>,
    decided: u64,
    pub(crate) disk: Disk,
    pub(crate) coordinators: BTreeMap<u64, Coordinator>,
    pub(crate) workers: Vec<Worker>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) num_streams: u64,
    pub(crate) groups: BTreeMap<Tag, Group>,
    /// The last fault, and all that it held up, is over.
    pub(crate) calm_since: u64,
    pub(crate) num_gone: usize,
    /// Jobs of which a trainer could not be started.
    pub(crate) not_started: BTreeSet<usize>,
    pub(crate) seen: Summary,
    /// The last events, if they are to be shown.
    pub(crate) trace: Option<VecDeque<String>>,
    num_traced: usize,
}

impl World {
    pub(crate) fn new(scenario: Scenario, traced: bool) -> Self {
        let disk = Disk { runs: scenario.jobs.iter().map(|_| Run::default()).collect(), ..Disk::default() };
        let mut world = Self {
            random: StdRng::seed_from_u64(scenario.seed),
            now: 0,
            queue: BTreeMap::new(),
            decided: 0,
            disk,
            coordinators: BTreeMap::new(),
            workers: (0..scenario.num_workers).map(Worker::new).collect(),
            streams: BTreeMap::new(),
            num_streams: 0,
            groups: BTreeMap::new(),
            calm_since: 0,
            num_gone: 0,
            not_started: BTreeSet::new(),
            seen: Summary::default(),
            trace: traced.then(VecDeque::new),
            num_traced: crate::number("TRAINCTL_SIM_TRACE").map_or(TRACED, |events| events as usize),
            scenario,
        };
        world.after(0, What::Launch(0));
        world.after(500, What::Supervise);
        for worker in 0..world.workers.len() {
            world.soon(0..10_000, What::WorkerTick(worker, 1));
        }
        for (number, job) in world.scenario.jobs.clone().into_iter().enumerate() {
            world.after(job.submitted_at, What::Submit(number));
            if let Wants::Cancel { at, .. } = job.wants {
                world.after(at, What::Cancel(number));
            }
        }
        if !world.scenario.weather.storms.is_empty() {
            world.after(0, What::Fault);
        }
        world
    }

    /// Runs until every job has come to its end.
    pub(crate) fn run(&mut self) {
        let limit = self.scenario.weather.ends_at() + LIMIT;
        while !self.is_over() {
            self.happens_next(limit);
        }
        self.check_ends();
        self.seen.seconds = self.now / 1000;
        for run in &self.disk.runs {
            self.seen.generations += run.generations.len() as u64;
            self.seen.commits += (run.full.committed.len() + run.full.abandoned.len()) as u64;
            self.seen.late_changes += run.late_changes;
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        let is_over = |id| self.disk.job(id).is_some_and(|job| job.phase.is_terminal());
        self.scenario.jobs.iter().all(|job| is_over(&job.id))
    }

    pub(crate) fn happens_next(&mut self, limit: u64) {
        let Some(((at, _), what)) = self.queue.pop_first() else { panic!("nothing happens any more") };
        if at > limit {
            let phases: Vec<_> =
                self.scenario.jobs.iter().map(|job| self.disk.job(&job.id).map(|j| &j.phase)).collect();
            panic!("no end in sight: {phases:?}");
        }
        self.now = at;
        self.seen.events += 1;
        if self.trace.is_some()
            && !matches!(
                what,
                What::WorkerTick(..)
                    | What::CoordinatorTick(_)
                    | What::Delivery { .. }
                    | What::Look(_)
                    | What::Task(..)
            )
        {
            self.note(format!("{what:?}"));
        }
        self.happens(what);
        self.check_disk();
    }

    /// For whoever reads why a seed failed.
    pub(crate) fn note(&mut self, text: String) {
        if let Some(trace) = &mut self.trace {
            trace.push_back(format!("{:>9.3} s  {text}", self.now as f64 / 1000.0));
            if trace.len() > self.num_traced {
                trace.pop_front();
            }
        }
    }

    pub(crate) fn after(&mut self, delay: u64, what: What) {
        self.decided += 1;
        self.queue.insert((self.now + delay, self.decided), what);
    }

    pub(crate) fn soon(&mut self, delay: Range<u64>, what: What) {
        let delay = self.random.random_range(delay);
        self.after(delay, what);
    }

    pub(crate) fn storms(&self) -> bool {
        self.scenario.weather.storms_at(self.now)
    }

    /// Something goes wrong in one case of so many, while it storms.
    pub(crate) fn mishap(&mut self, in_so_many: u32) -> bool {
        self.storms() && self.random.random_ratio(1, in_so_many)
    }

    /// A fault whose effect lasts until then.
    pub(crate) fn disturbed(&mut self, kind: &'static str, until: u64) {
        self.calm_since = self.calm_since.max(until).max(self.now);
        *self.seen.faults.entry(kind).or_default() += 1;
    }

    /// How long a change of the disk takes.
    pub(crate) fn disk_time(&mut self) -> u64 {
        if self.mishap(100) {
            let takes = self.random.random_range(100..10_000);
            self.disturbed("slow disk", self.now + takes);
            return takes;
        }
        let usual = self.scenario.weather.disk.clone();
        self.random.random_range(usual)
    }

    fn happens(&mut self, what: What) {
        match what {
            What::Launch(host) => self.launch(host),
            What::Supervise => self.supervise(),
            What::Look(life)
            | What::Answered(life)
            | What::Take(life, _)
            | What::CoordinatorTick(life)
            | What::WriteHolder(life, ..)
            | What::Beat(life, _)
            | What::OwnerGoesOn(life)
            | What::Task(life, _)
            | What::SecondLook(life, _) => self.coordinator_happens(life, what),
            What::Submit(job) => self.submit(job),
            What::Cancel(job) => self.cancel(job),
            What::Delivery { stream, to_worker } => self.deliver(stream, to_worker),
            What::DialTimeout(stream) => self.dial_timeout(stream),
            What::Repeated(worker, body) => {
                if self.workers[worker].is_up && self.workers[worker].is_connected {
                    self.seen.faults.entry("command repeated").and_modify(|count| *count += 1).or_insert(1);
                    self.workers[worker].heard_at = self.now;
                    self.work(worker, machine::Event::Heard(*body));
                }
            }
            What::WorkerStarts(worker) => self.start_worker(worker),
            What::WorkerTick(worker, life)
            | What::TrainerStarted(worker, life)
            | What::TrainerEnds(worker, life, ..)
            | What::TrainerGone(worker, life)
            | What::Forgotten(worker, life)
            | What::ShardsDurable(worker, life, ..)
            | What::Finish(worker, life, _) => {
                let thaw = self.workers[worker].frozen_until;
                if thaw > self.now {
                    self.after(thaw - self.now, what);
                } else if self.is_up(worker, life) {
                    self.worker_happens(worker, what);
                }
            }
            What::Step(tag) => self.step(tag),
            What::Fault => self.fault(),
            What::Flap(worker) => self.flap(worker),
        }
    }
}

/// A person.
impl World {
    /// Submits until the journal has it; an answer may be lost (J7).
    fn submit(&mut self, number: usize) {
        let job = self.scenario.jobs[number].clone();
        if self.disk.job(&job.id).is_some() && !self.random.random_bool(0.3) {
            return;
        }
        self.soon(1_000..4_000, What::Submit(number));
        let Some(life) = self.reachable() else { return };
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let (request_id, term) = (format!("request-{number}"), coordinator.term(number + 1));
        let is_known = coordinator.core.submitted_as(&request_id).is_some();
        if is_known || term == 0 || coordinator.inbox.iter().any(|e| matches!(e, core::Event::Admitted { .. })) {
            return;
        }
        let queued = trainctl_coordinator::record::JobRecord::queued(job.id, job.yaml, trainctl_spec::Term(term));
        let record = Box::new(trainctl_coordinator::record::JobRecord { request_id, ..queued });
        self.owner(life, core::Event::Admitted { record, spec: Box::new(job.spec) });
    }

    fn cancel(&mut self, number: usize) {
        let job = self.scenario.jobs[number].clone();
        let Wants::Cancel { save, .. } = job.wants else { return };
        if self.disk.job(&job.id).is_some_and(|job| job.phase.is_terminal()) {
            return;
        }
        self.soon(1_000..4_000, What::Cancel(number));
        if let Some(life) = self.reachable() {
            self.owner(life, core::Event::Cancel { job: job.id, save });
        }
    }

    /// The coordinator that answers.
    fn reachable(&self) -> Option<u64> {
        let life = self.disk.endpoint?;
        let coordinator = self.coordinators.get(&life)?;
        (coordinator.is_serving && !coordinator.is_frozen(self.now)).then_some(life)
    }
}

/// The end.
impl World {
    fn check_ends(&self) {
        for (number, job) in self.scenario.jobs.iter().enumerate() {
            let Some(record) = self.disk.job(&job.id) else { continue };
            let run = &self.disk.runs[number];
            let phase = &record.phase;
            match job.wants {
                Wants::Success => assert_eq!(*phase, JobPhase::Succeeded, "{}: {phase:?}", job.id),
                Wants::Cancel { .. } => {
                    assert!(matches!(phase, JobPhase::Cancelled | JobPhase::Succeeded), "{}: {phase:?}", job.id);
                }
                Wants::Poison { .. } => {
                    let stopped = matches!(phase, JobPhase::Failed { cause: Cause::Deterministic { .. } });
                    assert!(stopped, "J5: {} fails at the same step each time: {phase:?}", job.id);
                }
            }
            if *phase != JobPhase::Succeeded {
                continue;
            }
            let last = run.full.committed.keys().next_back().copied();
            assert_eq!(last, Some(job.max_steps - 1), "{}: the last step is committed", job.id);
            let rows: Vec<u64> = run.rows.iter().map(|(step, _)| *step).collect();
            let wrong = (0..job.max_steps).find(|step| rows.get(*step as usize) != Some(step));
            assert_eq!(wrong, None, "P5: {}: each step has its row, once; this one has not", job.id);
        }
    }
}
