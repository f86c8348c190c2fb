//! Workers and their trainers in the world.

use rand::Rng;
use trainctl_proto::v1;
use trainctl_proto::v1::rank_report::Report;
use trainctl_worker::session::machine::{Effect, Event, Outgoing};

use crate::network::Message;
use crate::training::{self, End, Group};
use crate::worker::Trainer;
use crate::world::{Tag, What, World};

/// Milliseconds between two ticks of a worker's machine.
const TICK: u64 = 200;

/// The daemon.
impl World {
    pub(crate) fn is_up(&self, worker: usize, life: u64) -> bool {
        self.workers[worker].is_up && self.workers[worker].incarnation == life
    }

    pub(crate) fn worker_happens(&mut self, number: usize, what: What) {
        match what {
            What::WorkerTick(_, life) => {
                self.after(TICK, What::WorkerTick(number, life));
                self.work(number, Event::Tick);
                self.check_dials(number);
            }
            What::TrainerStarted(_, life) => self.trainer_started(number, life),
            What::TrainerEnds(_, life, tag, end) => self.trainer_ends(number, life, tag, end),
            What::TrainerGone(_, life) => self.trainer_gone(number, life),
            What::Forgotten(..) => self.work(number, Event::Gone),
            What::ShardsDurable(_, life, tag, step, kind) => self.shards_durable(number, life, tag, step, kind),
            What::Finish(_, life, tag) => {
                let Some(group) = self.groups.get(&tag) else { return };
                let (steps, cause) = (group.stop_at, group.cause);
                if self.rank_of(number, tag).is_some() {
                    self.spool(number, training::finished(steps, cause));
                    self.soon(5..100, What::TrainerEnds(number, life, tag, End::Done));
                }
            }
            _ => {}
        }
    }

    pub(crate) fn work(&mut self, number: usize, event: Event) {
        let worker = &mut self.workers[number];
        let now = std::time::Duration::from_millis(self.now + worker.offset);
        let order = crate::checks::Order::of(&event);
        let effects = worker.machine.on(now, event);
        if let Some(order) = &order {
            self.note(format!("{}: {order:?} -> {effects:?}", self.workers[number].id));
        }
        let life = self.workers[number].incarnation;
        for effect in effects {
            self.check_effect(number, order.as_ref(), &effect);
            if self.mishap(10 * self.scenario.weather.crash_in) {
                self.disturbed("worker ends between effects", 0);
                return self.kill_worker(number, false);
            }
            match effect {
                Effect::Dial => self.dial(number),
                Effect::HangUp { .. } => self.hang_up(number),
                Effect::Send(message) => self.say_to_coordinator(number, message),
                Effect::Pump => {
                    let worker = &mut self.workers[number];
                    worker.sent = Some(worker.acked);
                    self.pump(number);
                }
                Effect::Remember => {
                    let worker = &mut self.workers[number];
                    worker.fences = worker.machine.fences().clone();
                }
                Effect::Start(assignment) => {
                    self.workers[number].starting = Some(*assignment);
                    let longest = if self.random.random_ratio(1, 10) { 5_000 } else { 400 };
                    self.soon(20..longest, What::TrainerStarted(number, life));
                }
                Effect::Kill { .. } => {
                    if let Some(tag) = self.workers[number].trainer.as_ref().map(|trainer| trainer.tag) {
                        let longest = if self.random.random_ratio(1, 10) { 6_000 } else { 200 };
                        self.soon(1..longest, What::TrainerEnds(number, life, tag, End::Stopped));
                    }
                }
                Effect::Control(control) => self.control(number, control),
                // Nothing stands still for as long as that.
                Effect::DumpStacks => {}
                // Nobody has to prove anything here.
                Effect::Probe(_) => {}
                Effect::Acked(ack) => self.workers[number].acknowledge(ack.up_to),
            }
        }
    }

    fn say_to_coordinator(&mut self, number: usize, message: Outgoing) {
        let body = match message {
            Outgoing::Heartbeat(beat) => v1::worker_message::Body::Heartbeat(beat),
            Outgoing::Result(result) => v1::worker_message::Body::CommandResult(result),
            Outgoing::Report(report) => v1::worker_message::Body::RankReport(*report),
            Outgoing::Health(health) => v1::worker_message::Body::Health(health),
            Outgoing::Probed(result) => v1::worker_message::Body::ProbeResult(result),
        };
        let worker = &self.workers[number];
        if let Some(stream) = worker.stream.filter(|_| worker.is_connected) {
            let message = v1::WorkerMessage { seq: 0, age_ms: 0, body: Some(body) };
            self.send(stream, false, Message::ToCoordinator(message));
        }
    }

    fn pump(&mut self, number: usize) {
        let (worker, now) = (&mut self.workers[number], self.now);
        let Some(stream) = worker.stream.filter(|_| worker.is_connected) else { return };
        for message in worker.pumped(now) {
            self.send(stream, false, Message::ToCoordinator(message));
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

    /// The daemon dies, and its trainer with it; its node may be gone for good.
    pub(crate) fn kill_worker(&mut self, number: usize, for_good: bool) {
        self.note(format!("{} is killed", self.workers[number].id));
        let worker = &mut self.workers[number];
        worker.incarnation += 1;
        (worker.is_up, worker.is_gone, worker.starting) = (false, for_good, None);
        worker.is_connected = false;
        if let Some(stream) = worker.stream.take()
            && !for_good
        {
            self.close(stream);
        }
        if let Some(Trainer { tag, rank, .. }) = self.workers[number].trainer.clone() {
            self.leave(tag, rank);
        }
        if !for_good {
            self.soon(100..4_000, What::WorkerStarts(number));
        }
    }

    /// The next daemon says of its predecessor's trainer that it is gone.
    pub(crate) fn start_worker(&mut self, number: usize) {
        let now = self.now;
        let worker = &mut self.workers[number];
        if worker.is_up || worker.is_gone {
            return;
        }
        worker.restart(now);
        let life = worker.incarnation;
        if let Some(trainer) = self.workers[number].trainer.clone() {
            self.spool(number, training::exited(trainer.end.unwrap_or(End::Unseen), trainer.step));
            self.workers[number].trainer = None;
        }
        self.soon(1..50, What::WorkerTick(number, life));
    }

    fn control(&mut self, number: usize, control: v1::TrainerControl) {
        let Some(tag) = self.workers[number].trainer.as_ref().map(|trainer| trainer.tag) else { return };
        if let (Some(v1::trainer_control::Request::Stop(_)), Some(group)) = (control.request, self.groups.get_mut(&tag))
        {
            group.is_asked_to_stop = true;
        }
    }
}

/// Trainers.
impl World {
    /// The rank that a worker's trainer has, if it lives and is of that generation.
    fn rank_of(&self, worker: usize, tag: Tag) -> Option<u32> {
        let trainer = self.workers[worker].trainer.as_ref()?;
        let is_alive = self.groups.get(&tag).is_some_and(|group| group.alive.contains_key(&trainer.rank));
        (trainer.tag == tag && is_alive).then_some(trainer.rank)
    }

    fn trainer_started(&mut self, number: usize, life: u64) {
        let Some(assignment) = self.workers[number].starting.take() else { return };
        let Some(fence) = assignment.fence.clone() else { return };
        let Some(job) = self.scenario.jobs.iter().position(|job| job.id.0 == fence.job) else { return };
        // Once for each job: the same failure twice at a step is its own fault (J5).
        if self.mishap(50) && self.not_started.insert(job) {
            self.disturbed("trainer does not start", 0);
            return self.work(number, Event::StartFailed { reason: "no process".to_owned() });
        }
        let (tag, rank) = ((job, fence.generation), assignment.rank);
        let (step, steps, end) = (None, 0, None);
        self.workers[number].trainer = Some(Trainer { tag, fence, rank, step, steps, end });
        let group = self.groups.entry(tag).or_insert_with(|| Group::new(&assignment));
        assert!(group.started.insert(rank), "J7: rank {rank} of generation {} was started twice", tag.1);
        group.alive.insert(rank, number);
        let (is_whole, is_broken) = (group.is_whole(), group.is_broken);
        let pid = 100 + number as u32;
        self.spool(number, Report::Started(v1::TrainerStarted { pid, start_time: life }));
        self.work(number, Event::Started { pid, start_time: life });
        if is_broken {
            self.soon(50..900, What::TrainerEnds(number, life, tag, End::PeerLost));
        }
        if is_whole {
            let Some(group) = self.groups.get_mut(&tag) else { return };
            group.whole_since = Some(self.now);
            let members: Vec<usize> = group.alive.values().copied().collect();
            members.into_iter().for_each(|worker| self.say(worker, Report::Formed(v1::Formed {})));
            let Some(group) = self.groups.get_mut(&tag).filter(|group| group.step >= group.stop_at) else {
                return self.soon(20..300, What::Step(tag));
            };
            // Nothing is left to do.
            (group.is_done, group.stop_at) = (true, group.step);
            for worker in group.alive.values().copied().collect::<Vec<_>>() {
                let life = self.workers[worker].incarnation;
                self.soon(1..300, What::Finish(worker, life, tag));
            }
        }
    }

    pub(crate) fn step(&mut self, tag: Tag) {
        let Some(group) = self.groups.get_mut(&tag).filter(|group| group.is_whole() && !group.is_done) else { return };
        // Nobody steps alone.
        let thaw = group.alive.values().map(|worker| self.workers[*worker].frozen_until).max().unwrap_or_default();
        if thaw > self.now {
            return self.after(thaw - self.now, What::Step(tag));
        }
        let (step, members, job) = (group.step, group.alive.clone(), &self.scenario.jobs[tag.0]);
        if let Some(worker) = training::poisoned(job, step).and_then(|rank| members.get(&rank).copied()) {
            let life = self.workers[worker].incarnation;
            return self.after(0, What::TrainerEnds(worker, life, tag, End::Failed));
        }
        group.step += 1;
        if group.is_asked_to_stop && group.step < group.stop_at {
            (group.stop_at, group.cause) = (group.step, v1::FinishCause::Stopped);
        }
        let is_last = group.step == group.stop_at;
        group.is_done = is_last;
        let is_busy = !group.saving.is_empty();
        let saves = group.step.is_multiple_of(job.save_every) || is_last;
        let of_weights = job.weights_every.is_some_and(|every| group.step.is_multiple_of(every));
        let kind = match (saves, of_weights) {
            (true, _) => Some(v1::SaveKind::Full),
            (false, true) if !is_busy => Some(v1::SaveKind::Weights),
            _ => None,
        };
        let (is_left_out, step_ms) = (saves && is_busy && !is_last, job.step_ms.clone());
        if kind.is_some() && !is_left_out {
            group.saving.extend(members.keys().copied());
        }
        for (rank, worker) in members {
            if let Some(trainer) = &mut self.workers[worker].trainer {
                (trainer.step, trainer.steps) = (Some(step), trainer.steps + 1);
                let steps = trainer.steps;
                self.work(worker, Event::Place(v1::Place { beats: steps, steps, step, ..v1::Place::default() }));
            }
            if rank == 0 {
                self.spool(worker, training::row(step));
            }
            let life = self.workers[worker].incarnation;
            if is_left_out {
                self.spool(worker, training::skipped(step));
            } else if let Some(kind) = kind {
                // The last save waits for the one before.
                let waits = if is_busy { 10_000 } else { 0 };
                let takes = self.disk_time().min(9_000) + self.random.random_range(5..400);
                self.after(waits + takes, What::ShardsDurable(worker, life, tag, step, kind));
            }
        }
        if !is_last {
            self.soon(step_ms, What::Step(tag));
        }
    }

    fn shards_durable(&mut self, number: usize, life: u64, tag: Tag, step: u64, kind: v1::SaveKind) {
        let Some(rank) = self.rank_of(number, tag) else { return };
        let Some(group) = self.groups.get_mut(&tag) else { return };
        group.saving.remove(&rank);
        let is_last = group.is_done && step + 1 == group.stop_at;
        let Ok(of) = trainctl_spec::report::SaveKind::try_from(kind) else { return };
        self.disk.runs[tag.0].shards.entry((of, tag.1, step)).or_default().insert(rank);
        self.spool(number, training::shards(rank, step, kind));
        if is_last {
            self.soon(1..300, What::Finish(number, life, tag));
        }
    }

    /// A rank is gone: whoever is left notices, sooner or later.
    pub(crate) fn leave(&mut self, tag: Tag, rank: u32) {
        let Some(group) = self.groups.get_mut(&tag) else { return };
        let is_new = group.alive.contains_key(&rank);
        group.left(rank);
        if group.is_broken && is_new {
            for worker in group.alive.values().copied().collect::<Vec<_>>() {
                let life = self.workers[worker].incarnation;
                self.soon(10..900, What::TrainerEnds(worker, life, tag, End::PeerLost));
            }
        }
    }

    fn trainer_ends(&mut self, number: usize, life: u64, tag: Tag, end: End) {
        let Some(rank) = self.rank_of(number, tag) else { return };
        self.leave(tag, rank);
        if let Some(trainer) = &mut self.workers[number].trainer {
            trainer.end = Some(end);
        }
        self.work(number, Event::Ended);
        // What descends from it may take long to die.
        let longest = if self.random.random_ratio(1, 5) { 6_000 } else { 150 };
        self.soon(1..longest, What::TrainerGone(number, life));
    }

    /// Its exit is spooled; a little later the session knows.
    fn trainer_gone(&mut self, number: usize, life: u64) {
        let Some(trainer) = self.workers[number].trainer.clone() else { return };
        let Some(end) = trainer.end else { return };
        self.spool(number, training::exited(end, trainer.step));
        self.workers[number].trainer = None;
        let longest = if self.random.random_ratio(1, 5) { 2_000 } else { 20 };
        self.soon(0..longest, What::Forgotten(number, life));
    }
}
