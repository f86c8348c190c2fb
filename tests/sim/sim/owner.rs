//! Coordinators as processes: how they come to hold their places, and the owner's loop around the real core. Effects happen in
//! their order; between any two of them the process may end or freeze.

use rand::Rng;
use rand::seq::IteratorRandom;
use trainctl_coordinator::core::{Effect, Event};
use trainctl_coordinator::run_io::IoRequest;
use trainctl_spec::{JobId, Term};
use trainctl_store::tenure::Decision;

use crate::coordinator::{Coordinator, Waiting};
use crate::network::Message;
use crate::task::Task;
use crate::world::{What, World};

/// Milliseconds that a holder may be silent before another may take its place (J2).
const LEASE: u64 = 15_000;
/// A silent process that accepts connections is given up after so long.
const PROBE: u64 = 3_000;
const BEAT_EVERY: u64 = 2_000;
const TICK: u64 = 500;
const MAX_PROCESSES: usize = 4;

impl World {
    pub(crate) fn launch(&mut self, host: usize) {
        if self.coordinators.len() >= MAX_PROCESSES {
            return;
        }
        self.seen.coordinators += 1;
        let (life, offset) = (self.seen.coordinators, self.random.random_range(0..10_000_000));
        self.coordinators.insert(life, Coordinator::new(life, host, offset, self.now));
        self.after(0, What::Look(life));
    }

    /// Whoever started the run starts a coordinator again when none is left.
    pub(crate) fn supervise(&mut self) {
        self.soon(500..4_000, What::Supervise);
        if self.coordinators.is_empty() {
            // Mostly where the last one was.
            let host = usize::from(self.random.random_bool(0.2));
            self.after(0, What::Launch(host));
        }
    }

    pub(crate) fn coordinator_happens(&mut self, life: u64, what: What) {
        let Some(coordinator) = self.coordinators.get(&life) else { return };
        if coordinator.is_frozen(self.now) {
            let thaw = coordinator.frozen_until - self.now;
            return self.soon(thaw..thaw + 20, what);
        }
        match what {
            What::Look(_) => self.look(life),
            What::Answered(_) => self.answered(life),
            What::Take(_, highest) => self.take(life, highest),
            What::WriteHolder(_, place) => self.write_holder(life, place),
            What::Beat(_, place) => self.beat(life, place),
            What::CoordinatorTick(_) => self.coordinator_tick(life),
            What::OwnerGoesOn(_) => {
                if let Some(coordinator) = self.coordinators.get_mut(&life) {
                    coordinator.is_busy = false;
                }
                self.run_owner(life);
            }
            What::Task(_, job) => self.task_goes_on(life, job),
            What::SecondLook(_, job) => {
                if let Some(task) = self.coordinators.get_mut(&life).and_then(|c| c.tasks.get_mut(&job)) {
                    task.looks_again = true;
                }
                self.schedule_task(life, job);
            }
            _ => {}
        }
    }

    fn look(&mut self, life: u64) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let (host, holder) =
            (coordinator.host, |disk: &mut crate::disk::Disk, place| disk.control(place).holder.clone());
        let Some(place) = coordinator.waiting.as_ref().map(|waiting| waiting.place) else { return };
        let policy = coordinator.policy(holder(&mut self.disk, place).as_ref());
        let control = self.disk.control(place);
        let taker = control.taker;
        let is_gone = taker.is_some_and(|(taker, on)| on == host && !self.coordinators.contains_key(&taker));
        let control = self.disk.control(place);
        let waiting = self.coordinators.get_mut(&life).and_then(|coordinator| coordinator.waiting.as_mut());
        let Some(waiting) = waiting else { return };
        let decision = waiting.look(control, is_gone, self.now, &policy);
        let highest = control.term;
        match decision {
            Decision::Take => self.soon(1..20, What::Take(life, highest)),
            Decision::Wait => self.after(500, What::Look(life)),
            Decision::Refuse => self.refused(life),
            Decision::Probe => {
                let asked = self.asked(life, place);
                let is_dead = asked.is_none_or(|asked| !self.coordinators.contains_key(&asked));
                let takes = if is_dead || self.answers(life, place) { 1..30 } else { PROBE..PROBE + 1 };
                self.soon(takes, What::Answered(life));
            }
        }
    }

    /// The coordinator that `holder.json` names.
    fn asked(&mut self, life: u64, place: usize) -> Option<u64> {
        let holder = self.disk.control(place).holder.as_ref();
        holder.map(|holder| holder.info.process.start_time).filter(|asked| *asked != life)
    }

    fn answers(&mut self, life: u64, place: usize) -> bool {
        let Some(asked) = self.asked(life, place) else { return false };
        let is_cut = |c: &Coordinator| c.cut_until > self.now;
        let (Some(asked), Some(asks)) = (self.coordinators.get(&asked), self.coordinators.get(&life)) else {
            return false;
        };
        asked.is_serving && !asked.is_frozen(self.now) && !is_cut(asked) && !is_cut(asks)
    }

    fn answered(&mut self, life: u64) {
        let Some(place) = self.coordinators.get(&life).and_then(|c| c.waiting.as_ref()).map(|w| w.place) else {
            return;
        };
        let answers = self.answers(life, place);
        let holder = self.disk.control(place).holder.clone();
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let policy = coordinator.policy(holder.as_ref());
        let Some(waiting) = coordinator.waiting.as_mut() else { return };
        let (decision, reason, highest) = waiting.answered(answers, &policy);
        self.note(format!("coordinator {life} at place {place}: {decision:?} since {reason:?}"));
        match decision {
            Decision::Take => self.soon(1..20, What::Take(life, highest)),
            Decision::Refuse => self.refused(life),
            Decision::Wait | Decision::Probe => self.after(500, What::Look(life)),
        }
    }

    /// A live holder. Without the state directory it leaves, without a run directory it leaves that job alone.
    fn refused(&mut self, life: u64) {
        let place = self.coordinators.get(&life).and_then(|c| c.waiting.as_ref()).map(|waiting| waiting.place);
        match place {
            Some(0) | None => self.end_coordinator(life),
            Some(place) => self.next_place(life, place),
        }
    }

    fn take(&mut self, life: u64, highest: u64) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let Some(waiting) = coordinator.waiting.as_mut() else { return };
        let place = waiting.place;
        let control = self.disk.control(place);
        let (taker, holder, silent) = (control.taker, control.holder.clone(), waiting.silent);
        let Some(term) = control.take_term(highest, (life, coordinator.host), self.now) else {
            waiting.forget();
            return self.after(0, What::Look(life));
        };
        let waits = !coordinator.policy(holder.as_ref()).lease.is_zero();
        let is_released = holder.as_ref().is_some_and(|holder| holder.released && holder.term >= highest);
        if place == 0 {
            coordinator.predecessor = holder.map(|holder| holder.info.incarnation);
        }
        coordinator.tenures.insert(place, term);
        if taker.is_some_and(|(taker, _)| self.coordinators.contains_key(&taker)) && waits && !is_released {
            assert!(
                silent >= LEASE,
                "J2: coordinator {life} takes a place whose holder was silent for {silent} ms only"
            );
            self.seen.takeovers += 1;
        }
        self.soon(1..30, What::WriteHolder(life, place));
        self.after(BEAT_EVERY, What::Beat(life, place));
    }

    fn write_holder(&mut self, life: u64, place: usize) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let holder = coordinator.holder(place, false);
        let waits_here = coordinator.waiting.as_ref().is_some_and(|waiting| waiting.place == place);
        let control = self.disk.control(place);
        (control.holder, control.changed_at) = (Some(holder), self.now);
        if waits_here {
            self.next_place(life, place);
        }
    }

    fn next_place(&mut self, life: u64, place: usize) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        if place == self.scenario.jobs.len() {
            coordinator.waiting = None;
            return self.serve(life);
        }
        coordinator.waiting = Some(Waiting::new(place + 1, self.now));
        self.after(0, What::Look(life));
    }

    fn beat(&mut self, life: u64, place: usize) {
        let Some(coordinator) = self.coordinators.get(&life) else { return };
        let term = coordinator.term(place);
        if self.disk.control(place).term > term {
            // Its other places are not its own either; a run's task notices by itself.
            if place == 0 {
                self.end_coordinator(life);
            }
            return;
        }
        let takes = self.disk_time();
        self.after(takes, What::WriteHolder(life, place));
        self.after(takes + BEAT_EVERY, What::Beat(life, place));
    }

    /// Holds its places: adopts what the journal has and opens its doors.
    fn serve(&mut self, life: u64) {
        let jobs = self.scenario.jobs.clone();
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let records = self.disk.open_journal(coordinator.term(0));
        let at = coordinator.moment(self.now);
        let mut tasks = Vec::new();
        for record in records {
            let id = record.id.clone();
            let Some(number) = jobs.iter().position(|job| job.id == id) else { continue };
            let term = coordinator.term(number + 1);
            let spec = jobs[number].spec.clone();
            if record.phase.is_terminal() {
                coordinator.effects.extend(coordinator.core.adopt(record, spec, Term(0), at));
            } else if term == 0 {
                coordinator.core.leave_alone(id);
            } else {
                let begun = record.begun().map(|(generation, after)| (generation.0, after));
                coordinator.watch.adopts(record.phase.generation().is_some(), self.now);
                coordinator.effects.extend(coordinator.core.adopt(record, spec, Term(term), at));
                coordinator.tasks.insert(number, Task::new(term, jobs[number].keep, begun));
                tasks.push(number);
            }
        }
        coordinator.is_serving = true;
        self.disk.endpoint = Some(life);
        self.note(format!("coordinator {life} serves"));
        self.after(TICK, What::CoordinatorTick(life));
        for job in tasks {
            self.after(LEASE, What::SecondLook(life, job));
            self.schedule_task(life, job);
        }
        self.run_owner(life);
    }

    /// The process is gone, whatever it was doing.
    pub(crate) fn end_coordinator(&mut self, life: u64) {
        let Some(mut coordinator) = self.coordinators.remove(&life) else { return };
        self.note(format!("coordinator {life} is gone"));
        // What was on its way to the disk may still arrive.
        for (job, task) in &mut coordinator.tasks {
            if self.random.random_bool(0.3) {
                task.go_on(&mut self.disk.runs[*job]);
            }
        }
        for stream in coordinator.sessions.into_keys() {
            self.send(stream, true, Message::End);
        }
    }

    /// It says that it leaves: a successor need not wait.
    pub(crate) fn release(&mut self, life: u64) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        for (place, term) in coordinator.tenures.clone() {
            let control = self.disk.control(place);
            if control.term == term {
                (control.holder, control.changed_at) = (Some(coordinator.holder(place, true)), self.now);
            }
        }
        self.end_coordinator(life);
    }

    fn coordinator_tick(&mut self, life: u64) {
        self.after(TICK, What::CoordinatorTick(life));
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        if coordinator.is_busy {
            coordinator.tick_is_due = true;
        } else {
            self.owner(life, Event::Tick);
        }
    }

    /// An event for a coordinator's owner.
    pub(crate) fn owner(&mut self, life: u64, event: Event) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        coordinator.inbox.push_back(event);
        self.run_owner(life);
    }

    pub(crate) fn run_owner(&mut self, life: u64) {
        loop {
            let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
            if coordinator.is_busy || coordinator.is_frozen(self.now) || !coordinator.is_serving {
                return;
            }
            if let Some(effect) = coordinator.effects.pop_front() {
                if self.mishap(self.scenario.weather.crash_in) {
                    return self.mishap_of_coordinator(life, effect);
                }
                self.carry_out(life, effect);
            } else if std::mem::take(&mut coordinator.tick_is_due) {
                self.handle(life, Event::Tick);
            } else if let Some(event) = coordinator.inbox.pop_front() {
                self.handle(life, event);
            } else {
                return;
            }
        }
    }

    /// It ends or freezes before an effect.
    fn mishap_of_coordinator(&mut self, life: u64, effect: Effect) {
        if self.random.random_bool(0.5) {
            self.disturbed("coordinator ends between effects", 0);
            return self.end_coordinator(life);
        }
        if let Some(coordinator) = self.coordinators.get_mut(&life) {
            coordinator.effects.push_front(effect);
        }
        self.freeze(life, "coordinator frozen between effects");
    }

    pub(crate) fn freeze(&mut self, life: u64, kind: &'static str) {
        let lasts = if self.random.random_bool(0.5) { 100..8_000 } else { 15_000..60_000 };
        let lasts = self.random.random_range(lasts);
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        coordinator.frozen_until = coordinator.frozen_until.max(self.now + lasts);
        self.note(format!("coordinator {life} freezes for {lasts} ms"));
        self.disturbed(kind, self.now + lasts);
        self.after(lasts, What::OwnerGoesOn(life));
        // Somebody may miss it.
        if self.random.random_bool(0.6) {
            let host = self.random.random_range(0..2);
            self.soon(0..10_000, What::Launch(host));
        }
    }

    fn handle(&mut self, life: u64, event: Event) {
        let admitted = match &event {
            Event::Admitted { record, .. } => self.scenario.jobs.iter().position(|job| job.id == record.id),
            _ => None,
        };
        let before = self.before(life, &event);
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        let at = coordinator.moment(self.now);
        let effects = coordinator.core.handle(event, at);
        self.check_handled(life, before, &effects);
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        coordinator.effects.extend(effects);
        if let Some(job) = admitted {
            let term = coordinator.term(job + 1);
            coordinator.tasks.insert(job, Task::new(term, self.scenario.jobs[job].keep, None));
            self.schedule_task(life, job);
        }
    }

    fn carry_out(&mut self, life: u64, effect: Effect) {
        let Some(coordinator) = self.coordinators.get_mut(&life) else { return };
        match effect {
            Effect::Journal(record) => {
                let (term, takes) = (coordinator.term(0), self.disk_time());
                self.check_journal(life, &record);
                self.note(format!(
                    "coordinator {life} journals {}: {} {}",
                    record.id,
                    record.phase,
                    record.phase.reason()
                ));
                self.disk.journals.entry(term).or_default().insert(record.id.clone(), *record);
                if takes > 100 {
                    if let Some(coordinator) = self.coordinators.get_mut(&life) {
                        coordinator.is_busy = true;
                    }
                    self.after(takes, What::OwnerGoesOn(life));
                }
            }
            Effect::Send { session, message } => {
                self.check_sent(life, &message);
                self.send(session, true, Message::ToWorker(*message));
            }
            Effect::Close { session } => self.send(session, true, Message::End),
            Effect::Io { job, request } => self.ask(life, &job, *request),
            Effect::Release(job) => self.ask(life, &job, IoRequest::Release),
            Effect::Leave(job) => {
                let number = self.scenario.jobs.iter().position(|known| known.id == job);
                number.and_then(|number| coordinator.tasks.remove(&number));
            }
            // Nobody is quarantined here.
            Effect::JournalWorker(_) => {}
            Effect::Hook { .. } | Effect::Export { .. } | Effect::Rendezvous { .. } | Effect::Publish(_) => {}
        }
    }

    fn ask(&mut self, life: u64, job: &JobId, request: IoRequest) {
        let Some(number) = self.scenario.jobs.iter().position(|known| known.id == *job) else { return };
        let task = self.coordinators.get_mut(&life).and_then(|coordinator| coordinator.tasks.get_mut(&number));
        let Some(task) = task.filter(|_| !matches!(request, IoRequest::Event(_))) else { return };
        task.ask(request);
        self.schedule_task(life, number);
    }

    fn schedule_task(&mut self, life: u64, job: usize) {
        let takes = self.disk_time();
        let task = self.coordinators.get_mut(&life).and_then(|coordinator| coordinator.tasks.get_mut(&job));
        if let Some(task) = task.filter(|task| !task.is_scheduled && !task.is_idle()) {
            task.is_scheduled = true;
            let takes = if task.is_quick() { 0 } else { takes };
            self.after(takes, What::Task(life, job));
        }
    }

    fn task_goes_on(&mut self, life: u64, job: usize) {
        let task = self.coordinators.get_mut(&life).and_then(|coordinator| coordinator.tasks.get_mut(&job));
        let Some(task) = task else { return };
        task.is_scheduled = false;
        let answer = task.go_on(&mut self.disk.runs[job]);
        let is_allowed = task.is_allowed();
        self.schedule_task(life, job);
        if let Some(result) = answer {
            let id = self.scenario.jobs[job].id.clone();
            self.note(format!("coordinator {life}: {id}: {}", crate::checks::describe(&result)));
            self.owner(life, Event::Io { job: id, result: Box::new(result) });
        }
        // A long sleep between a look and a change is what fences are for (C2).
        if is_allowed && self.mishap(self.scenario.weather.crash_in / 8) {
            self.freeze(life, "coordinator frozen at its disk");
        }
    }

    /// A coordinator by chance.
    pub(crate) fn some_coordinator(&mut self) -> Option<u64> {
        self.coordinators.keys().copied().choose(&mut self.random)
    }
}
