//! The core driven by hand: no clock, no sockets, no files.

use std::collections::BTreeMap;
use std::time::Duration;

use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_proto::v1::rank_report::Report;
use trainctl_spec::report::SaveKind;
use trainctl_spec::state::{Cause, JobPhase, StopReason};
use trainctl_spec::{Generation, JobId, JobSpec, Term};
use trainctl_store::layout::CheckpointName;

use super::{Core, Effect, Event, Moment, Policy, SessionId, StoreChange};
use crate::hooks::HookRequest;
use crate::record::{JobRecord, StartPoint, WorkerRecord};
use crate::run_io::{Changes, CommitError, CommitInfo, Committed, IoRequest, IoResult, Known, Mended, Prepared};

const SPEC: &str = "
name: tiny
run_dir: /runs/tiny
resources: {workers: 2, threads_per_worker: 1}
model: {config: {model_type: gpt2, architectures: [GPT2LMHeadModel], n_layer: 1, n_head: 1, n_embd: 8, vocab_size: 64, n_positions: 16}}
dataset: {paths: /data/text, seq_length: 8, split: '99,1,0'}
step_scheduler: {global_batch_size: 4, local_batch_size: 2, max_steps: 40, ckpt_every_steps: 10}
fault_tolerance: {max_restarts: 2}
checkpoint: {save_consolidated: false}
";

/// A core with what a test sees of the world around it.
struct World {
    core: Core,
    now: Duration,
    sent: Vec<(SessionId, Body)>,
    journal: Vec<JobRecord>,
    /// Workers as journaled.
    workers: Vec<WorkerRecord>,
    io: Vec<IoRequest>,
    stores: Vec<StoreChange>,
    hooks: Vec<HookRequest>,
    exports: Vec<CheckpointName>,
    /// What whoever follows the job was told last.
    published: Option<v1::Job>,
    released: bool,
    left: bool,
    /// The job's spec.
    spec: String,
    generation: u64,
    seq: BTreeMap<SessionId, u64>,
    /// What ranks say that they hold, where they say it.
    held: BTreeMap<u32, u128>,
}

fn job() -> JobId {
    JobId("tiny-1".to_owned())
}

fn record() -> JobRecord {
    JobRecord { request_id: "r".to_owned(), submitted_at_ms: 1, ..JobRecord::queued(job(), SPEC.to_owned(), Term(1)) }
}

impl World {
    fn new() -> Self {
        let core = Core::new(Policy::default(), Duration::ZERO, 7);
        let (sent, journal, workers, io, stores, hooks, exports) = Default::default();
        let (now, released, left, seq) = (Duration::from_secs(100), false, false, BTreeMap::new());
        let spec = SPEC.to_owned();
        let published = None;
        Self {
            core,
            now,
            sent,
            journal,
            workers,
            io,
            stores,
            hooks,
            exports,
            published,
            released,
            left,
            spec,
            generation: 1,
            seq,
            held: BTreeMap::new(),
        }
    }

    /// A world in which generation 2 of the job was started on two workers.
    fn forming() -> Self {
        Self::new().form()
    }

    fn form(self) -> Self {
        let mut world = self;
        world.submit();
        world.join(1, "w0", None);
        world.join(2, "w1", None);
        world.prepare(StartPoint::default());
        world
    }

    /// A world in which the job runs on two workers, at generation 2.
    fn running() -> Self {
        Self::forming().run()
    }

    /// The same with another section of the spec.
    fn running_with(section: &str, keys: &str) -> Self {
        let mut world = Self::new();
        let others = SPEC.lines().filter(|line| !line.starts_with(&format!("{section}:")));
        world.spec = others.chain([format!("{section}: {keys}").as_str()]).collect::<Vec<_>>().join("\n");
        world.form().run()
    }

    fn run(self) -> Self {
        let mut world = self;
        for (session, rank) in [(1, 0), (2, 1)] {
            world.report(session, rank, Report::Started(v1::TrainerStarted { pid: 10 + rank, start_time: 1 }));
            world.report(session, rank, Report::Formed(v1::Formed {}));
        }
        assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
        world
    }

    fn handle(&mut self, event: Event) {
        let effects = self.core.handle(event, Moment { now: self.now, wall_ms: 0 });
        self.take(effects);
    }

    fn take(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Journal(record) => self.journal.push(*record),
                Effect::Send { session, message } => self.sent.push((session, *message)),
                Effect::Io { request, .. } => self.io.push(*request),
                Effect::Rendezvous { change, .. } => self.stores.push(change),
                Effect::Hook { request, .. } => self.hooks.push(request),
                Effect::Export { checkpoint, .. } => self.exports.push(checkpoint),
                Effect::Release(_) => self.released = true,
                Effect::Leave(_) => self.left = true,
                Effect::Publish(status) => self.published = Some(*status),
                Effect::JournalWorker(record) => self.workers.push(*record),
                Effect::Close { .. } => {}
            }
        }
    }

    fn submit(&mut self) {
        let spec = JobSpec::from_yaml(&self.spec).unwrap();
        self.handle(Event::Admitted { record: Box::new(record()), spec: Box::new(spec) });
        self.known("");
    }

    /// The run directory's task says what LATEST names.
    fn known(&mut self, latest: &str) {
        let pointers = (latest.to_owned(), String::new());
        let known = Known { pointers, first: None, last: None, validation: None };
        self.handle(Event::Io { job: job(), result: Box::new(IoResult::Known(Box::new(known))) });
    }

    fn join(&mut self, session: SessionId, worker: &str, running: Option<v1::RunningTrainer>) {
        self.join_from("m", session, worker, running);
    }

    fn join_from(&mut self, machine: &str, session: SessionId, worker: &str, running: Option<v1::RunningTrainer>) {
        self.join_at(machine, session, worker, running, session);
    }

    fn join_at(
        &mut self,
        machine: &str,
        session: SessionId,
        worker: &str,
        running: Option<v1::RunningTrainer>,
        dialled_at_ms: u64,
    ) {
        let hello = v1::Hello {
            dialled_at_ms,
            worker_id: worker.to_owned(),
            incarnation: format!("{worker}-{session}"),
            boot_id: machine.to_owned(),
            address: "127.0.0.1".to_owned(),
            spool: format!("{worker}-spool"),
            running,
            ..v1::Hello::default()
        };
        self.handle(Event::Hello { session, hello: Box::new(hello) });
    }

    /// Answers a pending preparation with the next generation.
    fn prepare(&mut self, start: StartPoint) {
        let asked = self.io.iter().rposition(|request| matches!(request, IoRequest::Prepare(_)));
        self.io.remove(asked.expect("no preparation was asked for"));
        self.generation += 1;
        let generation = Generation(self.generation);
        let prepared =
            Prepared { generation, start, pointers: Default::default(), retired: Vec::new(), notes: Vec::new() };
        self.handle(Event::Io { job: job(), result: Box::new(IoResult::Prepared(Box::new(Ok(prepared)))) });
    }

    fn report(&mut self, session: SessionId, rank: u32, report: Report) {
        self.report_of(session, rank, self.generation, report);
    }

    fn report_of(&mut self, session: SessionId, rank: u32, generation: u64, report: Report) {
        let seq = self.seq.entry(session).or_default();
        *seq += 1;
        let fence = v1::Fence { job: job().0, generation, term: 1 };
        let body = v1::RankReport { fence: Some(fence), rank, report: Some(report) };
        let body = Some(v1::worker_message::Body::RankReport(body));
        let message = v1::WorkerMessage { seq: *seq, age_ms: 0, body };
        self.handle(Event::Message { session, message: Box::new(message) });
    }

    fn beat(&mut self, session: SessionId) {
        self.beat_of(session, v1::Heartbeat::default());
    }

    /// A heartbeat of a rank that has done a step.
    fn step(&mut self, session: SessionId, step: u64) {
        let phase = v1::Phase::Stepping.into();
        self.beat_of(session, v1::Heartbeat { phase, step: Some(step), ..v1::Heartbeat::default() });
    }

    fn beat_of(&mut self, session: SessionId, beat: v1::Heartbeat) {
        let body = Some(v1::worker_message::Body::Heartbeat(beat));
        let message = v1::WorkerMessage { seq: 0, age_ms: 0, body };
        self.handle(Event::Message { session, message: Box::new(message) });
    }

    fn killed(&mut self, session: SessionId, rank: u32) {
        let exit = v1::TrainerExit { signal: Some(9), step: Some(5), ..v1::TrainerExit::default() };
        self.report(session, rank, Report::Exited(exit));
    }

    fn stopped(&mut self, session: SessionId, rank: u32) {
        let exit = v1::TrainerExit { signal: Some(9), stopped_by_us: true, ..v1::TrainerExit::default() };
        self.report(session, rank, Report::Exited(exit));
    }

    fn shards(&mut self, session: SessionId, rank: u32, step: u64) {
        self.save(session, rank, step, SaveKind::Full);
    }

    fn save(&mut self, session: SessionId, rank: u32, step: u64, kind: SaveKind) {
        let checkpoint = format!("epoch_0_step_{step}");
        let file =
            v1::ShardFile { path: format!("model/shard-{rank}"), size: 1, blake3: vec![0; 32], ..Default::default() };
        let (stall_seconds, write_seconds) = (0.25 + f64::from(rank), 2.0 - f64::from(rank));
        let kind = v1::SaveKind::from(kind).into();
        let files = vec![file];
        let replica =
            self.held.get(&rank).map(|held| v1::ReplicaDigest { held: held.to_le_bytes().into(), written: vec![] });
        let shards = v1::ShardsDurable {
            step,
            checkpoint,
            files,
            kind,
            stall_seconds,
            write_seconds,
            replica,
            ..v1::ShardsDurable::default()
        };
        self.report(session, rank, Report::Shards(shards));
    }

    fn committed(&mut self, step: u64, outcome: Result<(), &str>) {
        self.committed_as(SaveKind::Full, step, outcome);
    }

    fn committed_as(&mut self, kind: SaveKind, step: u64, outcome: Result<(), &str>) {
        let info = |()| CommitInfo {
            checkpoint: format!("epoch_0_step_{step}"),
            state_hash: "h".to_owned(),
            changes: Changes {
                moves: vec![("LATEST".to_owned(), String::new(), format!("epoch_0_step_{step}"))],
                ..Changes::default()
            },
            pointers: (format!("epoch_0_step_{step}"), String::new()),
            bytes: 1000,
            commit_seconds: 0.5,
        };
        let outcome = outcome.map(info).map_err(|reason| CommitError { reason: reason.to_owned(), refused: false });
        let committed = Committed { generation: Generation(self.generation), kind, step, outcome };
        self.handle(Event::Io { job: job(), result: Box::new(IoResult::Committed(Box::new(committed))) });
    }

    /// Both trainers have reached the end by themselves.
    fn finish(&mut self, cause: v1::FinishCause, steps_done: u64) {
        for (session, rank) in [(1, 0), (2, 1)] {
            self.report(session, rank, Report::Finished(v1::Finished { steps_done, cause: cause.into() }));
            self.report(session, rank, Report::Exited(v1::TrainerExit { code: Some(0), ..Default::default() }));
        }
    }

    /// The events of a kind, as `events.jsonl` has them.
    fn events(&self, kind: &str) -> Vec<serde_json::Value> {
        let events = self.io.iter().filter_map(|request| match request {
            IoRequest::Event(entry) if entry.kind() == kind => Some(entry.to_json()),
            _ => None,
        });
        events.collect()
    }

    fn later(&mut self, by: Duration) {
        let end = self.now + by;
        while self.now < end {
            self.now += Duration::from_millis(500);
            self.handle(Event::Tick);
        }
    }

    fn phase(&self) -> JobPhase {
        self.core.jobs[&job()].record.phase.clone()
    }

    fn commits(&self) -> usize {
        self.io.iter().filter(|request| matches!(request, IoRequest::Commit(_))).count()
    }

    fn starts(&self) -> Vec<v1::Assignment> {
        let starts = self.sent.iter().filter_map(|(_, body)| match body {
            Body::StartTrainer(start) => start.assignment.clone(),
            _ => None,
        });
        starts.collect()
    }

    fn stops(&self) -> Vec<SessionId> {
        self.sent.iter().filter(|(_, body)| matches!(body, Body::StopTrainer(_))).map(|(session, _)| *session).collect()
    }

    fn acked(&self, session: SessionId) -> u64 {
        let acks = self.sent.iter().filter_map(|(to, body)| match body {
            Body::Ack(ack) if *to == session => Some(ack.up_to),
            _ => None,
        });
        acks.max().unwrap_or_default()
    }
}

#[test]
fn a_job_forms_when_its_workers_are_there_and_seals_its_store() {
    let world = World::running();
    let starts = world.starts();
    assert_eq!(starts.iter().map(|a| (a.rank, a.local_rank, a.world_size)).collect::<Vec<_>>(), [(0, 0, 2), (1, 1, 2)]);
    assert_eq!(world.stores, [StoreChange::Open, StoreChange::Seal]);
}

#[test]
fn ranks_are_counted_on_each_machine() {
    let mut world = World::new();
    world.spec = SPEC.replace("workers: 2", "workers: 5");
    world.submit();
    for (session, machine) in (1..).zip(["a", "b", "a", "b", "a"]) {
        world.join_from(machine, session, &format!("w{session}"), None);
    }
    world.prepare(StartPoint::default());
    let mut places: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for start in world.starts() {
        places.entry(start.local_world_size).or_default().push(start.local_rank);
    }
    // Whoever has a wrong place leaves blocks of a checkpoint that nobody proves.
    places.values_mut().for_each(|ranks| ranks.sort_unstable());
    assert_eq!(places, BTreeMap::from([(2, vec![0, 1]), (3, vec![0, 1, 2])]));
}

#[test]
fn the_journal_precedes_the_starts() {
    let world = World::forming();
    let forming = |record: &JobRecord| matches!(record.phase, JobPhase::Forming { .. }) && record.ranks.len() == 2;
    assert!(world.journal.iter().any(forming), "a successor must know who carries the ranks");
}

#[test]
fn a_killed_trainer_stops_the_others_and_a_new_generation_forms() {
    let mut world = World::running();
    world.killed(2, 1);
    assert_eq!(world.stops(), [1], "the survivor is stopped, the dead one is not");
    assert!(matches!(world.stores.last(), Some(StoreChange::Close(reason)) if reason.contains("rank 1")));
    world.stopped(1, 0);
    let start = StartPoint {
        checkpoint: "epoch_0_step_9".to_owned(),
        manifest_blake3: "ab".to_owned(),
        step: 10,
        ..StartPoint::default()
    };
    world.prepare(start);
    assert_eq!(world.phase(), JobPhase::Forming { generation: Generation(3) });
    assert_eq!(world.starts().last().map(|a| a.start_step), Some(10));
}

#[test]
fn j3_reports_of_an_old_generation_change_nothing_and_are_acknowledged() {
    let mut world = World::running();
    let before = world.phase();
    world.report_of(1, 0, 1, Report::Exited(v1::TrainerExit { signal: Some(9), ..Default::default() }));
    assert_eq!(world.phase(), before);
    assert_eq!(world.acked(1), world.seq[&1]);
}

#[test]
fn c2_a_save_is_committed_when_every_rank_has_reported_and_acknowledged_when_it_is_committed() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    assert_eq!(world.commits(), 0);
    let (first, second) = (world.seq[&1], world.seq[&2] + 1);
    world.shards(2, 1, 9);
    assert_eq!(world.commits(), 1);
    assert!(world.acked(1) < first, "a successor must be able to make this commit");
    world.committed(9, Ok(()));
    assert_eq!((world.acked(1), world.acked(2)), (first, second));
}

#[test]
fn a_failed_commit_is_tried_again_and_holds_the_next_formation_back() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.committed(9, Err("no space left"));
    world.killed(2, 1);
    world.stopped(1, 0);
    let prepares = |world: &World| world.io.iter().any(|request| matches!(request, IoRequest::Prepare(_)));
    assert!(!prepares(&world), "the next generation would start from an older commit");
    world.later(Duration::from_secs(3));
    assert_eq!(world.commits(), 2);
    world.committed(9, Ok(()));
    assert!(prepares(&world));
}

/// What a Hello says of the trainer of generation 2.
fn running(rank: u32) -> v1::RunningTrainer {
    let fence = v1::Fence { job: job().0, generation: 2, term: 1 };
    v1::RunningTrainer { fence: Some(fence), rank, pid: 10 + rank, ..v1::RunningTrainer::default() }
}

#[test]
fn an_incomplete_save_of_a_dead_generation_is_given_up() {
    let mut world = World::running();
    world.shards(1, 0, 9);
    world.killed(2, 1);
    world.stopped(1, 0);
    assert_eq!(world.acked(1), world.seq[&1]);
}

#[test]
fn a_worker_that_dials_again_with_its_trainer_is_taken_back() {
    let mut world = World::running();
    world.handle(Event::Gone { session: 2 });
    let fence = v1::Fence { job: job().0, generation: world.generation, term: 1 };
    world.join(3, "w1", Some(v1::RunningTrainer { fence: Some(fence), rank: 1, pid: 11, ..Default::default() }));
    assert!(matches!(world.phase(), JobPhase::Running { .. }));
    assert!(world.stops().is_empty());
    assert!(
        world.sent.iter().any(|(session, body)| *session == 3 && matches!(body, Body::Control(_))),
        "told sealed again"
    );
}

#[test]
fn a_worker_that_came_back_without_its_trainer_has_lost_it() {
    let mut world = World::running();
    world.join(3, "w1", None);
    assert!(matches!(world.phase(), JobPhase::Stopping { why: StopReason::Restart { .. }, .. }), "{:?}", world.phase());
    world.stopped(1, 0);
    world.prepare(StartPoint::default());
    assert_eq!(world.phase(), JobPhase::Forming { generation: Generation(3) });
}

#[test]
fn a_restarted_coordinator_adopts_a_running_generation_without_touching_it() {
    let mut world = World::running();
    let record = world.journal.last().cloned().unwrap();
    let mut successor = World { generation: world.generation, ..World::new() };
    let spec = JobSpec::from_yaml(SPEC).unwrap();
    let at = Moment { now: successor.now, wall_ms: 0 };
    let effects = successor.core.adopt(record, spec, Term(3), at);
    successor.take(effects);
    let running = |rank: u32| {
        let fence = v1::Fence { job: job().0, generation: 2, term: 1 };
        Some(v1::RunningTrainer { fence: Some(fence), rank, pid: 10 + rank, ..Default::default() })
    };
    successor.join(1, "w0", running(0));
    successor.join(2, "w1", running(1));
    assert!(matches!(successor.phase(), JobPhase::Running { .. }));
    assert!(successor.stops().is_empty() && successor.starts().is_empty());
    // A save whose first report reached the predecessor only is reported again, since it was never acknowledged.
    successor.shards(1, 0, 9);
    successor.shards(2, 1, 9);
    assert_eq!(successor.commits(), 1);
    world.handle(Event::Tick);
}

#[test]
fn a_formation_that_lost_its_coordinator_is_given_up_without_charge() {
    let world = World::forming();
    let record = world.journal.last().cloned().unwrap();
    assert!(matches!(record.phase, JobPhase::Forming { .. }));
    let mut successor = World { generation: world.generation, ..World::new() };
    let at = Moment { now: successor.now, wall_ms: 0 };
    let effects = successor.core.adopt(record, JobSpec::from_yaml(SPEC).unwrap(), Term(3), at);
    successor.take(effects);
    successor.known("");
    successor.join(1, "w0", None);
    successor.join(2, "w1", None);
    successor.prepare(StartPoint::default());
    assert_eq!(successor.phase(), JobPhase::Forming { generation: Generation(3) });
    assert_eq!(successor.core.jobs[&job()].record.budget.used, 0);
}

#[test]
fn j7_a_start_that_may_not_have_arrived_is_sent_again_under_its_own_id() {
    let mut world = World::forming();
    world.handle(Event::Gone { session: 2 });
    world.join(3, "w1", None);
    let ids: Vec<_> = world
        .sent
        .iter()
        .filter_map(|(session, body)| match body {
            Body::StartTrainer(start) if *session >= 2 => Some(start.command_id.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(ids[0], ids[1]);
}

#[test]
fn a_finished_job_succeeds_only_after_its_last_commit() {
    let mut world = World::running();
    world.shards(1, 0, 39);
    world.shards(2, 1, 39);
    for (session, rank) in [(1, 0), (2, 1)] {
        let cause = v1::FinishCause::Complete as i32;
        world.report(session, rank, Report::Finished(v1::Finished { steps_done: 40, cause }));
        world.report(session, rank, Report::Exited(v1::TrainerExit { code: Some(0), ..Default::default() }));
    }
    assert!(matches!(world.phase(), JobPhase::Running { .. }), "{:?}", world.phase());
    world.committed(39, Ok(()));
    assert_eq!(world.phase(), JobPhase::Succeeded);
}

#[test]
fn j5_a_failure_that_repeats_itself_ends_the_job_with_that_explanation() {
    let mut world = World::running();
    let fail = |world: &mut World| {
        let stderr_tail = vec!["trainctl-trainer: error: boom".to_owned()];
        let exit = v1::TrainerExit { code: Some(1), step: Some(5), stderr_tail, ..Default::default() };
        world.report(2, 1, Report::Exited(exit));
        world.stopped(1, 0);
    };
    fail(&mut world);
    world.prepare(StartPoint::default());
    for (session, rank) in [(1, 0), (2, 1)] {
        world.report(session, rank, Report::Started(v1::TrainerStarted { pid: 20 + rank, start_time: 1 }));
    }
    fail(&mut world);
    let JobPhase::Failed { cause } = world.phase() else { panic!("{:?}", world.phase()) };
    assert!(cause.to_string().contains("boom"), "{cause}");
}

#[test]
fn a_cancel_with_save_asks_the_trainers_and_one_without_kills_them() {
    let mut world = World::running();
    world.handle(Event::Cancel { job: job(), save: true });
    let asked = |body: &Body| {
        matches!(body, Body::Control(v1::TrainerControl { request: Some(v1::trainer_control::Request::Stop(_)), .. }))
    };
    assert_eq!(world.sent.iter().filter(|(_, body)| asked(body)).count(), 2);
    assert!(world.stops().is_empty());
    world.handle(Event::Cancel { job: job(), save: false });
    assert_eq!(world.stops(), [1, 2]);
    world.stopped(1, 0);
    world.stopped(2, 1);
    assert_eq!(world.phase(), JobPhase::Cancelled);
}

#[test]
fn a_start_that_never_arrived_does_not_hold_up_the_end_of_its_generation() {
    let mut world = World::forming();
    world.handle(Event::Gone { session: 2 });
    world.report(1, 0, Report::Started(v1::TrainerStarted { pid: 10, start_time: 1 }));
    world.killed(1, 0);
    assert!(matches!(world.phase(), JobPhase::Stopping { .. }));
    world.join(3, "w1", None);
    world.prepare(StartPoint::default());
    assert_eq!(world.phase(), JobPhase::Forming { generation: Generation(3) });
}

#[test]
fn endings_are_acknowledged_only_when_what_follows_is_journaled() {
    let mut world = World::running();
    let cause = v1::FinishCause::Complete as i32;
    for (session, rank) in [(1, 0), (2, 1)] {
        world.report(session, rank, Report::Finished(v1::Finished { steps_done: 40, cause }));
        let before = world.acked(session);
        world.report(session, rank, Report::Exited(v1::TrainerExit { code: Some(0), ..Default::default() }));
        if session == 1 {
            assert_eq!(world.acked(session), before, "a successor must learn of it too");
        }
    }
    assert_eq!(world.phase(), JobPhase::Succeeded);
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
    assert_eq!(world.journal.last().map(|record| record.phase.clone()), Some(JobPhase::Succeeded));
}

#[test]
fn a_later_commit_supersedes_an_earlier_one_that_fails() {
    let mut world = World::running();
    for step in [9, 19] {
        world.shards(1, 0, step);
        world.shards(2, 1, step);
    }
    world.committed(9, Err("no space left"));
    world.committed(19, Ok(()));
    assert_eq!((world.acked(1), world.acked(2)), (world.seq[&1], world.seq[&2]));
    let commits = world.commits();
    world.later(Duration::from_secs(5));
    assert_eq!(world.commits(), commits, "its files are swept: it is not tried again");
}

#[test]
fn a_saving_stop_that_loses_a_rank_stops_the_others() {
    let mut world = World::running();
    world.handle(Event::Cancel { job: job(), save: true });
    world.killed(2, 1);
    assert_eq!(world.stops(), [1]);
    world.stopped(1, 0);
    assert_eq!(world.phase(), JobPhase::Cancelled);
}

#[test]
fn j5_a_worker_that_leaves_in_order_is_external_however_often() {
    let mut world = World::running();
    for round in 0..2 {
        // Its daemon was told to end and stopped the trainer; nobody here asked for that.
        world.stopped(2, 1);
        let JobPhase::Stopping { why: StopReason::Restart { cause }, .. } = world.phase() else {
            panic!("round {round}: {:?}", world.phase())
        };
        assert!(matches!(cause, Cause::WorkerLost { .. }), "{cause}");
        world.stopped(1, 0);
        world.later(Duration::from_secs(2));
        world.beat(1);
        world.beat(2);
        world.prepare(StartPoint::default());
        for (session, rank) in [(1, 0), (2, 1)] {
            world.report(session, rank, Report::Started(v1::TrainerStarted { pid: 10, start_time: 1 }));
            world.report(session, rank, Report::Formed(v1::Formed {}));
        }
    }
}

#[test]
fn a_worker_that_refuses_a_start_is_left_alone_for_a_while() {
    let mut world = World::new();
    world.submit();
    world.join(1, "w0", None);
    world.join(2, "w1", None);
    world.join(3, "w2", None);
    world.prepare(StartPoint::default());
    let (session, command_id) = world
        .sent
        .iter()
        .find_map(|(session, body)| match body {
            Body::StartTrainer(start) if *session == 2 => Some((*session, start.command_id.clone())),
            _ => None,
        })
        .expect("a start");
    let result = v1::CommandResult { command_id, error: "quarantined".to_owned(), ..Default::default() };
    let body = Some(v1::worker_message::Body::CommandResult(result));
    world.handle(Event::Message { session, message: Box::new(v1::WorkerMessage { seq: 0, age_ms: 0, body }) });
    world.stopped(1, 0);
    world.prepare(StartPoint::default());
    let workers: Vec<_> = world.core.jobs[&job()].record.ranks.iter().map(|place| place.worker.clone()).collect();
    assert_eq!(workers, ["w0", "w2"]);
}

#[test]
fn a_directory_that_cannot_be_made_ready_is_waited_out() {
    let mut world = World::new();
    world.submit();
    world.join(1, "w0", None);
    world.join(2, "w1", None);
    let asked = |world: &World| world.io.iter().filter(|request| matches!(request, IoRequest::Prepare(_))).count();
    assert_eq!(asked(&world), 1);
    let full = Cause::Storage { message: "no space left".to_owned() };
    world.handle(Event::Io { job: job(), result: Box::new(IoResult::Prepared(Box::new(Err(full)))) });
    assert_eq!(world.phase(), JobPhase::Queued);
    for _ in 0..3 {
        world.later(Duration::from_secs(2));
        world.beat(1);
        world.beat(2);
    }
    assert_eq!(asked(&world), 2);
}

#[test]
fn j4_surplus_workers_wait_and_a_spare_takes_a_lost_rank() {
    let mut world = World::running();
    let (starts, stores) = (world.starts().len(), world.stores.len());
    for spare in 3..13 {
        world.join(spare, &format!("spare-{spare}"), None);
    }
    assert!(matches!(world.phase(), JobPhase::Running { .. }));
    assert_eq!((world.starts().len(), world.stores.len()), (starts, stores), "a join changes no generation");
    world.handle(Event::Gone { session: 2 });
    world.join(20, "w1", None);
    world.stopped(1, 0);
    world.handle(Event::Gone { session: 20 });
    world.prepare(StartPoint::default());
    let workers: Vec<_> = world.core.jobs[&job()].record.ranks.iter().map(|place| place.worker.clone()).collect();
    assert_eq!(workers, ["w0", "spare-10"], "the first of the spares takes the lost rank's number");
}

#[test]
fn a_release_is_answered_and_only_then_the_directory_is_left() {
    let mut world = World::running();
    world.handle(Event::Cancel { job: job(), save: false });
    world.stopped(1, 0);
    world.stopped(2, 1);
    assert!(world.released && !world.left, "what the task still writes must reach its queue");
    world.handle(Event::Io { job: job(), result: Box::new(IoResult::Released) });
    assert!(world.left);
}

#[test]
fn a_job_that_is_over_is_shown_from_the_journal() {
    let mut world = World::running();
    let row = v1::TrainRow { step: 7, loss: f64::NAN, ..Default::default() };
    world.report(1, 0, Report::TrainRow(row));
    let row = v1::ValidationRow { name: "web".to_owned(), step: 7, val_loss: 2.0, ..Default::default() };
    world.report(1, 0, Report::ValidationRow(row));
    world.shards(1, 0, 9);
    world.shards(2, 1, 9);
    world.committed(9, Ok(()));
    world.handle(Event::Cancel { job: job(), save: false });
    world.stopped(1, 0);
    world.stopped(2, 1);
    let want = world.core.status(&job()).unwrap();
    let text = serde_json::to_string(world.journal.last().unwrap()).unwrap();

    let mut successor = World::new();
    let at = Moment { now: successor.now, wall_ms: 0 };
    let record = serde_json::from_str(&text).unwrap();
    let effects = successor.core.adopt(record, JobSpec::from_yaml(SPEC).unwrap(), Term(0), at);
    successor.take(effects);
    assert!(successor.io.is_empty(), "nothing of its run is touched: {:?}", successor.io);
    let got = successor.core.status(&job()).unwrap();
    let told = successor.published.as_ref().map(|job| (job.phase(), job.latest.as_str()));
    assert_eq!(told, Some((v1::JobPhase::Cancelled, "epoch_0_step_9")), "whoever followed it learns its end");
    assert_eq!((&got.latest, got.steps_done), (&want.latest, want.steps_done));
    assert_eq!((got.latest.as_str(), got.steps_done), ("epoch_0_step_9", 8));
    assert_eq!(got.last_validation, want.last_validation);
    assert_eq!(got.first_row.map(|row| row.step), Some(7));
}

mod burn_in;
mod hang;
mod liveness;
mod replicas;
mod saves;
mod stragglers;

mod quarantine;
mod workers;
