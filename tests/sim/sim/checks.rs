//! The invariants, by number. Each is checked where it could be broken; a failure names it and ends the seed.

use std::collections::{BTreeMap, BTreeSet};

use trainctl_coordinator::core;
use trainctl_coordinator::record::JobRecord;
use trainctl_coordinator::run_io::{IoRequest, IoResult};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_spec::state::{Cause, JobPhase, StopReason, WhyLost};
use trainctl_worker::session::machine::{Effect, Event, Outgoing};

use crate::world::World;

/// A coordinator's lease of a worker, milliseconds.
const LEASE: u64 = 5_000;
/// No lease ends so soon after jobs were taken over.
const GRACE: u64 = 30_000;
const TICK: u64 = 500;
/// How long a world without faults may take to settle.
const SETTLE: u64 = 20_000;

/// How long each worker was silent, counted in ticks that came on time: what a coordinator may hold against it (J6).
#[derive(Debug)]
pub(crate) struct Watch {
    adopted_at: Option<u64>,
    last_tick: u64,
    ticked: u64,
    heard: BTreeMap<String, u64>,
}

impl Watch {
    pub(crate) fn new(now: u64) -> Self {
        Self { adopted_at: None, last_tick: now, ticked: 0, heard: BTreeMap::new() }
    }

    pub(crate) fn adopts(&mut self, has_generation: bool, now: u64) {
        if has_generation {
            self.adopted_at = Some(now);
        }
    }

    fn at(&self, now: u64) -> u64 {
        self.ticked + (now - self.last_tick).min(TICK)
    }

    fn hears(&mut self, worker: &str, now: u64) {
        let at = self.at(now);
        self.heard.insert(worker.to_owned(), at);
    }

    fn ticks(&mut self, now: u64) {
        (self.ticked, self.last_tick) = (self.at(now), now);
    }

    fn silence(&self, worker: &str) -> u64 {
        self.ticked - self.heard.get(worker).copied().unwrap_or_default()
    }
}

/// What a core was before an event.
pub(crate) struct Before {
    is_tick: bool,
    workers: BTreeSet<String>,
    /// The worker that says Hello.
    joins: Option<String>,
    /// The report's generation is not the job's.
    is_old: bool,
}

/// A command to a worker.
#[derive(Debug)]
pub(crate) struct Order {
    kind: &'static str,
    fence: v1::Fence,
}

impl Order {
    pub(crate) fn of(event: &Event) -> Option<Self> {
        let Event::Heard(body) = event else { return None };
        let (kind, fence) = match body {
            Body::StartTrainer(start) => ("start", start.assignment.as_ref()?.fence.clone()?),
            Body::StopTrainer(stop) => ("stop", stop.fence.clone()?),
            Body::Control(control) => ("control", control.fence.clone()?),
            // To be asked for stacks changes nothing.
            Body::Welcome(_) | Body::Beat(_) | Body::Ack(_) | Body::DumpStacks(_) | Body::Probe(_) => return None,
        };
        Some(Self { kind, fence })
    }
}

/// Coordinators.
impl World {
    pub(crate) fn before(&mut self, life: u64, event: &core::Event) -> Before {
        let now = self.now;
        let mut before = Before { is_tick: false, workers: BTreeSet::new(), joins: None, is_old: false };
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return before };
        match event {
            core::Event::Tick => {
                before.is_tick = true;
                coordinator.watch.ticks(now);
                before.workers = coordinator.core.workers().map(|worker| worker.id.clone()).collect();
            }
            core::Event::Hello { hello, .. } => {
                coordinator.watch.hears(&hello.worker_id, now);
                before.joins = Some(hello.worker_id.clone());
            }
            core::Event::Message { session, message } => {
                let known = coordinator.core.workers().find(|worker| worker.session == Some(*session));
                if let Some(id) = known.map(|worker| worker.id.clone()) {
                    coordinator.watch.hears(&id, now);
                }
                if let Some(v1::worker_message::Body::RankReport(report)) = &message.body
                    && let Some(fence) = &report.fence
                {
                    let job = coordinator.core.status(&trainctl_spec::JobId(fence.job.clone()));
                    before.is_old = job.is_some_and(|job| job.generation != fence.generation);
                }
            }
            _ => {}
        }
        before
    }

    pub(crate) fn check_handled(&mut self, life: u64, before: Before, effects: &[core::Effect]) {
        if before.is_tick {
            self.check_losses(life, &before.workers);
        }
        for effect in effects {
            match effect {
                // J4: a join ends no generation but the one that its own worker had left.
                core::Effect::Journal(record) => {
                    if let (Some(joins), JobPhase::Stopping { why: StopReason::Restart { cause }, generation }) =
                        (&before.joins, &record.phase)
                    {
                        let number = self.scenario.jobs.iter().position(|job| job.id == record.id);
                        let carries = record.ranks.iter().any(|place| place.worker == *joins);
                        assert!(carries, "J4: {joins} joined and ended generation {generation}: {cause} {number:?}");
                    }
                }
                core::Effect::Io { request, .. } => {
                    let writes = matches!(
                        **request,
                        IoRequest::TrainRow { .. } | IoRequest::ValidationRow { .. } | IoRequest::Commit(_)
                    );
                    assert!(!(before.is_old && writes), "J3: a report of an old generation led to {request:?}");
                }
                _ => {}
            }
        }
    }

    /// J6: what is lost in a tick was silent for its lease, not in the grace, and not with most others at once.
    fn check_losses(&mut self, life: u64, before: &BTreeSet<String>) {
        let now = self.now;
        let Some(coordinator) = self.coordinators.get(&life) else { return };
        let left: BTreeSet<String> = coordinator.core.workers().map(|worker| worker.id.clone()).collect();
        let lost: Vec<&String> = before.difference(&left).collect();
        let watch = &coordinator.watch;
        for worker in &lost {
            let silent = watch.silence(worker);
            assert!(silent + TICK > LEASE, "J6: {worker} was lost after {silent} ms of silence");
            let in_grace = watch.adopted_at.is_some_and(|at| now - at < GRACE);
            assert!(!in_grace, "J6: {worker} was lost in the grace after a takeover");
        }
        let sudden = lost.iter().filter(|worker| watch.silence(worker) < LEASE + LEASE / 2 - TICK).count();
        let is_mass = sudden > 1 && 2 * sudden > before.len();
        assert!(!is_mass, "J6: {sudden} of {} leases lapsed at once and nobody doubted it", before.len());
    }

    pub(crate) fn check_sent(&self, life: u64, message: &Body) {
        let fence = match message {
            Body::StartTrainer(start) => start.assignment.as_ref().and_then(|assignment| assignment.fence.as_ref()),
            Body::Control(control) => control.fence.as_ref(),
            _ => None,
        };
        let (Some(fence), Some(coordinator)) = (fence, self.coordinators.get(&life)) else { return };
        let Some(job) = self.scenario.jobs.iter().position(|job| job.id.0 == fence.job) else { return };
        let term = coordinator.term(job + 1);
        assert_eq!(fence.term, term, "J2: coordinator {life} commands under another term than its own");
        if matches!(message, Body::StartTrainer(_)) {
            let journal =
                self.disk.journals.get(&coordinator.term(0)).and_then(|jobs| jobs.get(&self.scenario.jobs[job].id));
            let is_journaled = journal.is_some_and(|record| record.generation.0 == fence.generation);
            assert!(is_journaled, "J7: a start of generation {} precedes its journal entry", fence.generation);
        }
    }

    /// J1: nothing leaves a terminal phase. J5: only progress refills the budget.
    pub(crate) fn check_journal(&self, life: u64, record: &JobRecord) {
        let Some(coordinator) = self.coordinators.get(&life) else { return };
        let journal = self.disk.journals.get(&coordinator.term(0));
        let Some(number) = self.scenario.jobs.iter().position(|job| job.id == record.id) else { return };
        if let JobPhase::Stopping { generation, why: StopReason::Restart { cause } } = &record.phase {
            self.check_cause((number, generation.0), cause);
        }
        let Some(before) = journal.and_then(|jobs| jobs.get(&record.id)) else { return };
        let stays = !before.phase.is_terminal() || before.phase == record.phase;
        assert!(stays, "J1: {} went from {} to {}", record.id, before.phase, record.phase);
        assert!(before.generation <= record.generation, "J3: the generation fell");
        let (old, new) = (&before.budget, &record.budget);
        let run = &self.disk.runs[number];
        let committed = run.full.committed.keys().next_back().copied();
        let retired = run.full.abandoned.iter().map(|(_, manifest)| manifest.step).max();
        let progress = committed.max(retired) > old.last_failure_step;
        assert!(new.used >= old.used || progress, "J5: the budget was refilled without a later commit");
        assert!(new.used <= old.used + 1, "J5: one failure was charged more than once");
    }

    /// J7: nothing hangs in this world, so a generation that stands still waits for a command that never came. J6: nobody is said
    /// to have lost a trainer that lives and was always there.
    fn check_cause(&self, tag: crate::world::Tag, cause: &Cause) {
        assert!(!matches!(cause, Cause::Hung { .. }), "J7: generation {} waits for what never comes: {cause}", tag.1);
        let Cause::WorkerLost { worker, rank: Some(rank), why: WhyLost::Restarted } = cause else { return };
        let Some(worker) = self.workers.iter().find(|known| known.id == *worker) else { return };
        let lives = worker.trainer.as_ref().is_some_and(|trainer| {
            trainer.tag == tag && trainer.rank == rank.0 && trainer.end.is_none() && worker.is_up
        });
        assert!(!lives, "J6: {} is said to have lost a trainer that it runs", worker.id);
    }
}

/// Workers.
impl World {
    pub(crate) fn check_effect(&mut self, number: usize, order: Option<&Order>, effect: &Effect) {
        let worker = &mut self.workers[number];
        let id = &worker.id;
        if let Effect::Send(Outgoing::Result(result)) = effect {
            let first = worker.deeds.answers.entry(result.command_id.clone()).or_insert_with(|| result.clone());
            assert_eq!(first, result, "W1: {id} answers {} anew", result.command_id);
        }
        if let Effect::Start(assignment) = effect {
            let fence = assignment.fence.clone().unwrap_or_default();
            let is_idle = worker.trainer.is_none() && worker.starting.is_none();
            assert!(is_idle, "W4: {id} starts generation {} before its predecessor is gone", fence.generation);
            let stored = worker.fences.get(&fence.job);
            let is_stored = stored.is_some_and(|s| s.generation == fence.generation && s.term >= fence.term);
            assert!(is_stored, "W3: {id} starts generation {} without having stored its fence", fence.generation);
            let last = worker.deeds.generation.insert(fence.job.clone(), fence.generation).unwrap_or_default();
            assert!(last < fence.generation, "W2: {id} starts generation {} after {last}", fence.generation);
            let name = format!("{}-{}-{}", fence.job, fence.generation, assignment.rank);
            assert!(worker.deeds.starts.insert(name), "J7: {id} starts generation {} twice", fence.generation);
            let obeyed = worker.deeds.term.entry(fence.job.clone()).or_default();
            assert!(fence.term >= *obeyed, "J2: {id} obeys term {} after term {obeyed}", fence.term);
            *obeyed = fence.term;
        }
        let Some(order) = order.filter(|_| matches!(effect, Effect::Kill { .. } | Effect::Control(_))) else { return };
        let Order { kind, fence } = order;
        let obeyed = worker.deeds.term.entry(fence.job.clone()).or_default();
        assert!(fence.term >= *obeyed, "J2: {id} obeys a {kind} of term {} after term {obeyed}", fence.term);
        *obeyed = fence.term;
        let stored = worker.fences.get(&fence.job).is_some_and(|stored| stored.term >= fence.term);
        assert!(stored, "W3: {id} obeys a {kind} of term {} without having stored it", fence.term);
        let runs = worker.trainer.as_ref().map(|trainer| (trainer.fence.job.clone(), trainer.tag.1));
        let is_meant = runs.is_none_or(|(job, generation)| job == fence.job && generation == fence.generation);
        assert!(is_meant, "W2: {id} obeys a {kind} of generation {}, which does not run there", fence.generation);
    }

    /// W5: a silent coordinator is given up after its lease, and dialled again without end.
    pub(crate) fn check_dials(&mut self, number: usize) {
        let now = self.now;
        let worker = &mut self.workers[number];
        // What it slept through does not count.
        let slept = Some(now - worker.ticked_at).filter(|since| *since > TICK).unwrap_or_default();
        worker.ticked_at = now;
        worker.heard_at = (worker.heard_at + slept).min(now);
        worker.idle_since += slept;
        if worker.stream.is_some() {
            worker.idle_since = now;
        }
        if worker.is_connected {
            // The first lease, before the Welcome, is the longer one.
            let silent = now.saturating_sub(worker.heard_at);
            assert!(silent < 2 * LEASE + 2_000, "W5: {} has heard nothing for {silent} ms", worker.id);
        }
        let idle = now.saturating_sub(worker.idle_since);
        assert!(idle < 2_000, "W5: {} has not dialled for {idle} ms", worker.id);
    }
}

/// What is on the disk, after each event.
impl World {
    pub(crate) fn check_disk(&self) {
        for run in &self.disk.runs {
            if run.is_late {
                continue;
            }
            for (pointer, step) in [("LATEST", run.pointers.latest), ("LOWEST_VAL", run.pointers.lowest_val)] {
                let exists = step.is_none_or(|step| run.full.committed.contains_key(&step));
                assert!(exists, "P2: {pointer} names step {step:?}, which is not committed");
            }
        }
        if self.now < self.calm_since.saturating_add(SETTLE) || self.storms() {
            return;
        }
        for (number, job) in self.scenario.jobs.iter().enumerate() {
            let Some(JobPhase::Forming { generation }) = self.disk.job(&job.id).map(|job| &job.phase) else { continue };
            let whole_since =
                self.groups.get(&(number, generation.0)).filter(|g| g.is_whole()).and_then(|g| g.whole_since);
            let is_settled = whole_since.is_none_or(|since| self.now < since + SETTLE);
            assert!(is_settled, "J7: generation {generation} was never told that all its ranks are formed");
        }
    }
}

/// An answer of a run directory's task in short.
pub(crate) fn describe(result: &IoResult) -> String {
    match result {
        IoResult::Done(tokens) => format!("{} rows are durable", tokens.len()),
        IoResult::Prepared(prepared) => match &**prepared {
            Ok(prepared) => format!("generation {} starts with step {}", prepared.generation, prepared.start.step),
            Err(cause) => format!("not prepared: {cause}"),
        },
        IoResult::Committed(committed) => {
            format!("{:?} save of step {} of generation {}", committed.kind, committed.step, committed.generation)
        }
        IoResult::Superseded { term } => format!("superseded by term {term}"),
        IoResult::Known(_) | IoResult::Mended(_) | IoResult::Released => "known, mended or released".to_owned(),
    }
}
