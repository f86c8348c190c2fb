//! Time, the network and the faults. Every choice comes from the seed.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use trainctl_coordinator::core;
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_proto::v1::rank_report::Report;
use trainctl_spec::state::JobPhase;
use trainctl_worker::session::machine::{Effect, Event, Outgoing};

use crate::coordinator::{Coordinator, MAX_STEPS, WORLD_SIZE};
use crate::disk::Disk;
use crate::training::{self, End, Group};
use crate::worker::{Trainer, Worker};

/// Milliseconds after which a world that has not come to its end never will.
const LIMIT: u64 = 30 * 60_000;

/// What happens at a moment. Numbers are those of workers; what an earlier incarnation had begun is dropped.
#[derive(Clone, Copy, Debug)]
enum What {
    CoordinatorStarts,
    CoordinatorTick(u64),
    Beats(u64),
    Known(u64),
    IoDone(u64),
    Dialled(usize, u64),
    /// The next message of a stream, to the worker or to the coordinator.
    Delivery {
        session: u64,
        to_worker: bool,
    },
    /// The coordinator learns that a stream has ended.
    StreamEnded(u64),
    WorkerStarts(usize),
    WorkerTick(usize, u64),
    TrainerStarted(usize, u64),
    TrainerEnds(usize, u64, u64, End),
    TrainerGone(usize, u64),
    Step(u64),
    ShardsDurable(usize, u64, u64, u64),
    Finish(usize, u64, u64),
    Fault,
}

enum Message {
    ToWorker(Body),
    ToCoordinator(v1::WorkerMessage),
}

/// How much goes wrong.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    /// None after this, so that the world can come to its end.
    until: u64,
    /// Milliseconds between two.
    every: Range<u64>,
    /// Milliseconds that a message takes.
    delay: Range<u64>,
    /// One coordinator in so many dies between two effects.
    crash_in: u32,
}

impl Faults {
    /// Calm and stormy worlds in turn.
    pub(crate) fn of(seed: u64) -> Self {
        let every = [2_000..6_000, 300..2_500, 50..900][(seed % 3) as usize].clone();
        let delay = [1..10, 1..150, 1..1_500][(seed / 3 % 3) as usize].clone();
        Self { until: 60_000, every, delay, crash_in: 300 }
    }
}

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) generations: u64,
    pub(crate) commits: u64,
    pub(crate) coordinators: u64,
    pub(crate) faults: BTreeMap<&'static str, u64>,
    pub(crate) events: u64,
    pub(crate) seconds: u64,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Self) {
        self.generations += other.generations;
        self.commits += other.commits;
        self.coordinators += other.coordinators;
        self.events += other.events;
        self.seconds += other.seconds;
        other.faults.iter().for_each(|(kind, count)| *self.faults.entry(kind).or_default() += count);
    }
}

/// The world.
pub(crate) struct World {
    random: StdRng,
    faults: Faults,
    now: u64,
    /// By time, then in the order in which they were decided.
    queue: BTreeMap<(u64, u64), What>,
    decided: u64,
    disk: Disk,
    coordinator: Option<Coordinator>,
    /// It does nothing before.
    frozen_until: u64,
    workers: Vec<Worker>,
    /// Nothing passes between the coordinator and the worker before.
    cut_until: Vec<u64>,
    lines: BTreeMap<(u64, bool), VecDeque<Message>>,
    sessions: u64,
    groups: BTreeMap<u64, Group>,
    seen: Summary,
}

impl World {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        let workers: Vec<Worker> = (0..=WORLD_SIZE).map(Worker::new).collect();
        let mut world = Self {
            random: StdRng::seed_from_u64(seed),
            faults,
            now: 0,
            queue: BTreeMap::new(),
            decided: 0,
            disk: Disk::default(),
            coordinator: None,
            frozen_until: 0,
            cut_until: vec![0; workers.len()],
            workers,
            lines: BTreeMap::new(),
            sessions: 0,
            groups: BTreeMap::new(),
            seen: Summary::default(),
        };
        world.after(0, What::CoordinatorStarts);
        for worker in 0..world.workers.len() {
            world.soon(0..2_000, What::WorkerTick(worker, 1));
        }
        world.soon(world.faults.every.clone(), What::Fault);
        world
    }

    /// Runs to the job's end.
    pub(crate) fn run(mut self) -> Summary {
        while !self.disk.job().is_some_and(|job| job.phase.is_terminal()) {
            let Some(((at, _), what)) = self.queue.pop_first() else { panic!("nothing happens any more") };
            assert!(at < LIMIT, "no end in sight: {:?}, {:?}", self.disk.job().map(|job| job.phase), self.disk.latest);
            self.now = at;
            self.seen.events += 1;
            self.happens(what);
        }
        let job = self.disk.job().unwrap();
        assert_eq!(job.phase, JobPhase::Succeeded, "{:?}", job.phase);
        assert_eq!(self.disk.latest, Some(MAX_STEPS - 1), "the last step is committed");
        assert_eq!(self.disk.rows, (0..MAX_STEPS).collect::<Vec<_>>(), "each step has its row, once");
        self.seen.seconds = self.now / 1000;
        self.seen.generations = self.disk.generations;
        self.seen.commits = self.disk.commits.len() as u64;
        self.seen
    }

    fn after(&mut self, delay: u64, what: What) {
        self.decided += 1;
        self.queue.insert((self.now + delay, self.decided), what);
    }

    fn soon(&mut self, delay: Range<u64>, what: What) {
        let delay = self.random.random_range(delay);
        self.after(delay, what);
    }

    fn happens(&mut self, what: What) {
        match what {
            What::CoordinatorStarts => self.start_coordinator(),
            What::CoordinatorTick(life) => {
                if self.lives(life, what) {
                    self.after(500, what);
                    self.coordinate(core::Event::Tick);
                }
            }
            What::Beats(life) => {
                if self.lives(life, what) {
                    self.after(1_000, what);
                    let sessions: Vec<u64> =
                        self.coordinator.iter().flat_map(|coordinator| coordinator.sessions.keys().copied()).collect();
                    for session in sessions {
                        self.send(session, Message::ToWorker(Body::Beat(v1::Beat {})));
                    }
                }
            }
            What::Known(life) => {
                if self.lives(life, what) {
                    let (disk, now) = (&self.disk, self.now);
                    let effects = self.coordinator.as_mut().map(|coordinator| coordinator.known(disk, now));
                    self.carry_out(effects.unwrap_or_default());
                }
            }
            What::IoDone(life) => {
                if self.lives(life, what) {
                    let (disk, now) = (&mut self.disk, self.now);
                    let effects = self.coordinator.as_mut().map(|coordinator| coordinator.next_io(disk, now));
                    self.carry_out(effects.unwrap_or_default());
                    if self.coordinator.as_ref().is_some_and(|c| c.incarnation == life && !c.io.is_empty()) {
                        self.soon(1..120, what);
                    }
                }
            }
            What::Dialled(worker, life) => self.dialled(worker, life),
            What::Delivery { session, to_worker } => self.deliver(session, to_worker, what),
            What::StreamEnded(session) => {
                if self.coordinator.as_mut().is_some_and(|c| c.sessions.remove(&session).is_some()) {
                    self.coordinate(core::Event::Gone { session });
                }
            }
            What::WorkerStarts(worker) => self.start_worker(worker),
            What::WorkerTick(worker, life) => {
                if self.is_up(worker, life) {
                    self.after(50, what);
                    self.work(worker, Event::Tick);
                }
            }
            What::TrainerStarted(worker, life) => self.trainer_started(worker, life),
            What::TrainerEnds(worker, life, generation, end) => self.trainer_ends(worker, life, generation, end),
            What::TrainerGone(worker, life) => self.trainer_gone(worker, life),
            What::Step(generation) => self.step(generation),
            What::ShardsDurable(worker, life, generation, step) => {
                if let Some(rank) = self.rank_of(worker, life, generation) {
                    self.disk.shards.entry((generation, step)).or_default().insert(rank);
                    self.spool(worker, training::shards(rank, step));
                }
            }
            What::Finish(worker, life, generation) => {
                if self.rank_of(worker, life, generation).is_some() {
                    self.spool(worker, training::finished(MAX_STEPS));
                    self.soon(5..100, What::TrainerEnds(worker, life, generation, End::Done));
                }
            }
            What::Fault => self.fault(),
        }
    }
}

/// The coordinator.
impl World {
    /// Whether this life of it goes on; what a frozen one should do it does when it wakes up.
    fn lives(&mut self, life: u64, what: What) -> bool {
        let lives = self.coordinator.as_ref().is_some_and(|coordinator| coordinator.incarnation == life);
        if lives && self.now < self.frozen_until {
            self.after(self.frozen_until - self.now, what);
            return false;
        }
        lives
    }

    fn start_coordinator(&mut self) {
        self.seen.coordinators += 1;
        let life = self.seen.coordinators;
        let offset = self.random.random_range(0..10_000_000);
        let (coordinator, effects) = Coordinator::start(life, offset, self.now, &mut self.disk);
        self.coordinator = Some(coordinator);
        self.frozen_until = 0;
        self.carry_out(effects);
        self.after(500, What::CoordinatorTick(life));
        self.after(1_000, What::Beats(life));
        self.soon(1..200, What::Known(life));
    }

    fn coordinate(&mut self, event: core::Event) {
        let now = self.now;
        let effects = self.coordinator.as_mut().map(|coordinator| coordinator.handle(event, now));
        self.carry_out(effects.unwrap_or_default());
    }

    fn carry_out(&mut self, effects: Vec<core::Effect>) {
        for effect in effects {
            if self.now < self.faults.until && self.random.random_ratio(1, self.faults.crash_in) {
                return self.crash_coordinator("crash between effects");
            }
            let Some(coordinator) = &mut self.coordinator else { return };
            match effect {
                core::Effect::Journal(record) => self.disk.put_job(&record),
                core::Effect::Send { session, message } => self.send(session, Message::ToWorker(*message)),
                core::Effect::Close { session } => {
                    if let Some(worker) = coordinator.sessions.remove(&session) {
                        self.hang_up(worker, session);
                    }
                }
                core::Effect::Io { request, .. } => {
                    coordinator.io.push_back(*request);
                    let (life, is_idle) = (coordinator.incarnation, coordinator.io.len() == 1);
                    if is_idle {
                        self.soon(1..120, What::IoDone(life));
                    }
                }
                core::Effect::Hook { .. }
                | core::Effect::Export { .. }
                | core::Effect::Rendezvous { .. }
                | core::Effect::Publish(_)
                | core::Effect::Release(_)
                | core::Effect::Leave(_) => {}
            }
        }
    }

    /// What its task was about to do may still have reached the disk.
    fn crash_coordinator(&mut self, how: &'static str) {
        let Some(mut coordinator) = self.coordinator.take() else { return };
        *self.seen.faults.entry(how).or_default() += 1;
        if let Some(request) = coordinator.io.pop_front()
            && self.random.random_bool(0.5)
        {
            coordinator.carry_out(request, &mut self.disk);
        }
        for (session, worker) in coordinator.sessions {
            self.hang_up(worker, session);
        }
        self.soon(100..8_000, What::CoordinatorStarts);
    }
}

/// Streams.
impl World {
    fn send(&mut self, session: u64, message: Message) {
        let to_worker = matches!(message, Message::ToWorker(_));
        self.lines.entry((session, to_worker)).or_default().push_back(message);
        self.soon(self.faults.delay.clone(), What::Delivery { session, to_worker });
    }

    fn deliver(&mut self, session: u64, to_worker: bool, what: What) {
        let Some(worker) = self.workers.iter().position(|worker| worker.session == Some(session)) else {
            self.lines.remove(&(session, to_worker));
            return;
        };
        // TCP: what cannot pass waits, and nothing overtakes.
        let waits = self.cut_until[worker].max(if to_worker { 0 } else { self.frozen_until });
        if self.now < waits {
            return self.after(waits - self.now, what);
        }
        let is_open = self.coordinator.as_ref().is_some_and(|c| c.sessions.contains_key(&session));
        match self.lines.get_mut(&(session, to_worker)).and_then(VecDeque::pop_front) {
            Some(Message::ToWorker(body)) => self.work(worker, Event::Heard(body)),
            Some(Message::ToCoordinator(message)) if is_open => {
                self.coordinate(core::Event::Message { session, message: Box::new(message) });
            }
            _ => {}
        }
    }

    fn dialled(&mut self, number: usize, life: u64) {
        if !self.is_up(number, life) || self.workers[number].session.is_some() {
            return;
        }
        let reachable = self.now >= self.cut_until[number] && self.now >= self.frozen_until;
        let worker = &mut self.workers[number];
        match &mut self.coordinator {
            Some(coordinator) if reachable => {
                self.sessions += 1;
                let session = self.sessions;
                coordinator.sessions.insert(session, number);
                (worker.session, worker.sent, worker.retry_ms) = (Some(session), None, 100);
                let hello = Box::new(worker.hello());
                self.work(number, Event::Connected);
                self.coordinate(core::Event::Hello { session, hello });
            }
            _ => {
                let retry_in = worker.next_retry();
                self.work(number, Event::Disconnected { reason: "no answer".to_owned(), retry_in });
            }
        }
    }

    /// A stream ends at the worker's side.
    fn hang_up(&mut self, number: usize, session: u64) {
        let worker = &mut self.workers[number];
        if worker.session != Some(session) {
            return;
        }
        (worker.session, worker.sent) = (None, None);
        let retry_in = worker.next_retry();
        if worker.is_up {
            self.work(number, Event::Disconnected { reason: "the stream ended".to_owned(), retry_in });
        }
        self.soon(1..3_000, What::StreamEnded(session));
    }
}

/// Workers.
impl World {
    fn is_up(&self, worker: usize, life: u64) -> bool {
        self.workers[worker].is_up && self.workers[worker].incarnation == life
    }

    fn work(&mut self, number: usize, event: Event) {
        let now = std::time::Duration::from_millis(self.now);
        let effects = self.workers[number].machine.on(now, event);
        for effect in effects {
            let worker = &mut self.workers[number];
            let life = worker.incarnation;
            match effect {
                Effect::Dial => self.soon(1..60, What::Dialled(number, life)),
                Effect::HangUp { .. } => {
                    if let Some(session) = worker.session {
                        self.hang_up(number, session);
                    }
                }
                Effect::Send(message) => {
                    let body = match message {
                        Outgoing::Heartbeat(beat) => v1::worker_message::Body::Heartbeat(beat),
                        Outgoing::Result(result) => v1::worker_message::Body::CommandResult(result),
                        Outgoing::Report(report) => v1::worker_message::Body::RankReport(*report),
                    };
                    if let Some(session) = worker.session {
                        let message = v1::WorkerMessage { seq: 0, age_ms: 0, body: Some(body) };
                        self.send(session, Message::ToCoordinator(message));
                    }
                }
                Effect::Pump => {
                    worker.sent = Some(worker.acked);
                    self.pump(number);
                }
                Effect::Remember => worker.fences = worker.machine.fences().clone(),
                Effect::Start(assignment) => {
                    worker.starting = Some(*assignment);
                    self.soon(20..400, What::TrainerStarted(number, life));
                }
                Effect::Kill { .. } => {
                    if let Some(generation) = worker.trainer.as_ref().map(|trainer| trainer.fence.generation) {
                        self.soon(1..200, What::TrainerEnds(number, life, generation, End::Stopped));
                    }
                }
                Effect::Control(_) => {}
                Effect::Acked(ack) => worker.acknowledge(ack.up_to),
            }
        }
    }

    fn pump(&mut self, number: usize) {
        let (worker, now) = (&mut self.workers[number], self.now);
        let Some(session) = worker.session else { return };
        for message in worker.pumped(now) {
            self.send(session, Message::ToCoordinator(message));
        }
    }

    /// A report of the worker's trainer that must not be lost.
    fn spool(&mut self, number: usize, report: Report) {
        let worker = &mut self.workers[number];
        let Some(trainer) = &worker.trainer else { return };
        let report = v1::RankReport { fence: Some(trainer.fence.clone()), rank: trainer.rank, report: Some(report) };
        worker.append(self.now, report);
        self.pump(number);
    }

    /// One that may be.
    fn say(&mut self, number: usize, report: Report) {
        let Some(trainer) = &self.workers[number].trainer else { return };
        let report = v1::RankReport { fence: Some(trainer.fence.clone()), rank: trainer.rank, report: Some(report) };
        self.work(number, Event::Said(report));
    }

    fn kill_worker(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        worker.incarnation += 1;
        worker.is_up = false;
        worker.starting = None;
        if let Some(session) = worker.session.take() {
            self.soon(1..200, What::StreamEnded(session));
        }
        if let Some(Trainer { fence, rank, .. }) = self.workers[number].trainer.clone() {
            self.leave(fence.generation, rank);
        }
        self.soon(100..4_000, What::WorkerStarts(number));
    }

    /// The next daemon says of its predecessor's trainer that it is gone.
    fn start_worker(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        worker.restart();
        let life = worker.incarnation;
        if let Some(trainer) = self.workers[number].trainer.clone() {
            self.spool(number, training::exited(End::Unseen, trainer.step));
            self.workers[number].trainer = None;
        }
        self.soon(1..50, What::WorkerTick(number, life));
    }
}

/// Trainers.
impl World {
    fn rank_of(&self, worker: usize, life: u64, generation: u64) -> Option<u32> {
        let trainer = self.workers[worker].trainer.as_ref().filter(|_| self.is_up(worker, life))?;
        let is_alive = self.groups.get(&generation).is_some_and(|group| group.alive.contains_key(&trainer.rank));
        (trainer.fence.generation == generation && is_alive).then_some(trainer.rank)
    }

    fn trainer_started(&mut self, number: usize, life: u64) {
        if !self.is_up(number, life) {
            return;
        }
        let Some(assignment) = self.workers[number].starting.take() else { return };
        let (fence, rank) = (assignment.fence.clone().unwrap(), assignment.rank);
        let generation = fence.generation;
        assert!(self.workers[number].trainer.is_none(), "W4: two trainers on {}", self.workers[number].id);
        self.workers[number].trainer = Some(Trainer { fence, rank, step: None });
        let group = self.groups.entry(generation).or_insert_with(|| Group::new(&assignment));
        assert!(group.started.insert(rank), "rank {rank} of generation {generation} was started twice");
        group.alive.insert(rank, number);
        let (is_whole, is_broken) = (group.is_whole(), group.is_broken);
        let pid = 100 + number as u32;
        self.spool(number, Report::Started(v1::TrainerStarted { pid, start_time: life }));
        self.work(number, Event::Started { pid, start_time: life });
        if is_broken {
            self.soon(50..900, What::TrainerEnds(number, life, generation, End::PeerLost));
        }
        if is_whole {
            let members: Vec<usize> = self.groups[&generation].alive.values().copied().collect();
            members.into_iter().for_each(|worker| self.say(worker, Report::Formed(v1::Formed {})));
            self.soon(20..300, What::Step(generation));
        }
    }

    fn step(&mut self, generation: u64) {
        let Some(group) = self.groups.get_mut(&generation).filter(|group| group.is_whole()) else { return };
        let step = group.step;
        group.step += 1;
        let (stop_at, members) = (group.stop_at, group.alive.clone());
        let is_last = group.step == stop_at;
        group.is_done = is_last;
        for (rank, worker) in members {
            let life = self.workers[worker].incarnation;
            if let Some(trainer) = &mut self.workers[worker].trainer {
                trainer.step = Some(step);
            }
            self.say(worker, Report::Step(v1::StepDone { step }));
            if rank == 0 {
                self.spool(worker, training::row(step));
            }
            if training::saves_after(step, stop_at) {
                self.soon(5..400, What::ShardsDurable(worker, life, generation, step));
            }
            if is_last {
                self.soon(401..700, What::Finish(worker, life, generation));
            }
        }
        if !is_last {
            self.soon(30..300, What::Step(generation));
        }
    }

    /// A rank is gone: whoever is left notices, sooner or later.
    fn leave(&mut self, generation: u64, rank: u32) {
        let Some(group) = self.groups.get_mut(&generation) else { return };
        group.left(rank);
        if group.is_broken {
            for worker in group.alive.values().copied().collect::<Vec<_>>() {
                let life = self.workers[worker].incarnation;
                self.soon(10..900, What::TrainerEnds(worker, life, generation, End::PeerLost));
            }
        }
    }

    fn trainer_ends(&mut self, number: usize, life: u64, generation: u64, end: End) {
        let Some(rank) = self.rank_of(number, life, generation) else { return };
        self.leave(generation, rank);
        self.workers[number].ending = Some(end);
        self.work(number, Event::Ended);
        self.soon(1..150, What::TrainerGone(number, life));
    }

    fn trainer_gone(&mut self, number: usize, life: u64) {
        if !self.is_up(number, life) {
            return;
        }
        let Some(end) = self.workers[number].ending.take() else { return };
        let step = self.workers[number].trainer.as_ref().and_then(|trainer| trainer.step);
        self.spool(number, training::exited(end, step));
        self.workers[number].trainer = None;
        self.work(number, Event::Gone);
    }
}

/// Faults.
impl World {
    fn fault(&mut self) {
        if self.now >= self.faults.until {
            return;
        }
        self.soon(self.faults.every.clone(), What::Fault);
        let mut number = self.random.random_range(0..self.workers.len());
        let kinds =
            ["trainer killed", "worker killed", "stream broken", "cut off", "coordinator killed", "coordinator frozen"];
        let kind = *kinds.choose(&mut self.random).unwrap();
        match kind {
            "trainer killed" => {
                let with_trainer = (0..self.workers.len()).filter(|worker| self.workers[*worker].trainer.is_some());
                number = with_trainer.collect::<Vec<_>>().choose(&mut self.random).copied().unwrap_or(number);
                let (life, trainer) = (self.workers[number].incarnation, self.workers[number].trainer.as_ref());
                let Some(generation) = trainer.map(|trainer| trainer.fence.generation) else { return };
                self.after(0, What::TrainerEnds(number, life, generation, End::Killed));
            }
            "worker killed" if self.workers[number].is_up => self.kill_worker(number),
            "stream broken" => {
                let Some(session) = self.workers[number].session else { return };
                self.hang_up(number, session);
            }
            "cut off" => self.cut_until[number] = self.now + self.random.random_range(100..12_000),
            "coordinator killed" => return self.crash_coordinator(kind),
            "coordinator frozen" if self.coordinator.is_some() => {
                self.frozen_until = self.now + self.random.random_range(100..12_000);
            }
            _ => return,
        }
        *self.seen.faults.entry(kind).or_default() += 1;
    }
}
