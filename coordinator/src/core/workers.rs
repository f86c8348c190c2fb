//! Workers: their sessions, spools and leases.

use std::collections::BTreeSet;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_spec::report::{BurnInReport, Phase};
use trainctl_spec::state::{ExitClass, JobPhase, StopReason, WhyLost};
use trainctl_spec::{Generation, JobId};

use super::live::{Live, RankLive};
use super::{Core, Effect, Moment, SessionId};
use crate::decide::admission::{Refusal, Standing, decide_admission};
use crate::decide::health::Skew;
use crate::decide::liveness::{Doubt, Liveness, Seen, decide_liveness, hears_nobody, late_by};
use crate::decide::placement::Candidate;
use crate::decide::verdict::How;
use crate::run_io::AckToken;

/// How long a worker that refused a start is left alone.
const AVOID: Duration = Duration::from_secs(30);
/// Acknowledges a resent record that was taken in before once in so many, so that a long resend does not fill the outbox.
const ACK_AGAIN_EVERY: u64 = 64;

/// A worker does not carry what it should.
const LOST: How = How::WorkerLost(WhyLost::Restarted);

/// One worker daemon.
#[derive(Debug)]
pub struct Worker {
    /// Stable id.
    pub id: String,
    /// New at each start of the daemon.
    pub incarnation: String,
    /// Its stream, while it is up.
    pub session: Option<SessionId>,
    /// Host name, for people.
    pub host: String,
    /// Kernel boot id: equal ones share a machine.
    pub machine: String,
    /// Address that its rank's peers reach it at.
    pub address: String,
    /// When it was last heard, on our clock.
    pub heard_at: Duration,
    /// It refused a start: no rank is placed on it before this, unless it dials again.
    pub avoid_until: Duration,
    /// The trainer that it runs, as far as we were told.
    pub running: Option<(JobId, Generation, u32)>,
    /// The command that stops it, if nobody wants it.
    stopping: Option<String>,
    /// What its Hello said of its machine and process.
    pub(super) facts: Facts,
    /// As it measured itself last.
    pub(super) health: Option<v1::Health>,
    /// Its wall clock against ours, and when that was measured.
    pub(super) skew: Option<(Skew, Duration)>,
    /// What its device did in the burn-in that it passed, since its daemon came.
    pub(super) burned_in: Option<BurnInReport>,
    /// When it dialled, on its machine's clock.
    dialled_at_ms: u64,
    spool: String,
    pub(super) received: u64,
    target: u64,
    acked: u64,
    pending: BTreeSet<u64>,
}

/// What a worker's machine and process are, for people.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) cores: u32,
    pub(super) device: String,
    pub(super) pid: u32,
}

impl Worker {
    /// A worker that the journal names and that has not dialled yet.
    pub fn expected(id: &str, incarnation: &str, now: Duration) -> Self {
        Self {
            id: id.to_owned(),
            incarnation: incarnation.to_owned(),
            session: None,
            host: String::new(),
            machine: String::new(),
            address: String::new(),
            heard_at: now,
            avoid_until: Duration::ZERO,
            running: None,
            stopping: None,
            facts: Facts::default(),
            health: None,
            skew: None,
            burned_in: None,
            dialled_at_ms: 0,
            spool: String::new(),
            received: 0,
            target: 0,
            acked: 0,
            pending: BTreeSet::new(),
        }
    }

    /// It has dialled again since it said this Hello, in this life of its daemon or a later one.
    fn has_dialled_since(&self, hello: &v1::Hello) -> bool {
        self.machine == hello.boot_id && hello.dialled_at_ms < self.dialled_at_ms
    }

    /// Everything that it had spooled when it dialled has arrived.
    pub(super) fn is_drained(&self) -> bool {
        self.session.is_some() && self.received >= self.target
    }

    fn greet(&mut self, session: SessionId, hello: &v1::Hello, now: Duration) {
        if self.spool != hello.spool {
            self.spool.clone_from(&hello.spool);
            (self.received, self.acked) = (0, 0);
            self.pending.clear();
        }
        self.dialled_at_ms = hello.dialled_at_ms;
        self.incarnation.clone_from(&hello.incarnation);
        self.host.clone_from(&hello.host);
        self.machine.clone_from(&hello.boot_id);
        self.address.clone_from(&hello.address);
        self.facts = Facts { cores: hello.cores, device: hello.device.clone(), pid: hello.pid };
        self.session = Some(session);
        self.heard_at = now;
        self.avoid_until = Duration::ZERO;
        self.received = self.received.max(hello.acked_up_to);
        self.acked = self.acked.max(hello.acked_up_to);
        self.target = hello.spooled_up_to;
        self.running = hello.running.as_ref().and_then(|running| {
            let fence = running.fence.as_ref()?;
            Some((JobId(fence.job.clone()), Generation(fence.generation), running.rank))
        });
    }

    /// Takes in a record; false = it was taken in before.
    fn take(&mut self, seq: u64) -> bool {
        if seq <= self.received {
            return false;
        }
        self.received = seq;
        self.pending.insert(seq);
        true
    }

    /// What record `seq` caused is durable.
    pub fn done(&mut self, spool: &str, seq: u64, out: &mut Vec<Effect>) {
        if self.spool == spool {
            self.pending.remove(&seq);
            self.acknowledge(false, out);
        }
    }

    fn acknowledge(&mut self, again: bool, out: &mut Vec<Effect>) {
        let up_to = self.pending.first().map_or(self.received, |first| first - 1);
        if let Some(session) = self.session
            && (up_to > self.acked || again)
        {
            self.acked = self.acked.max(up_to);
            let ack = v1::Ack { spool: self.spool.clone(), up_to: self.acked };
            out.push(Effect::Send { session, message: Box::new(Body::Ack(ack)) });
        }
    }
}

impl Core {
    /// A worker dialled: greets it, and compares what it runs with what is wanted.
    pub(super) fn hello(&mut self, session: SessionId, hello: v1::Hello, at: Moment, out: &mut Vec<Effect>) {
        let id = hello.worker_id.clone();
        let worker =
            self.workers.entry(id.clone()).or_insert_with(|| Worker::expected(&id, &hello.incarnation, at.now));
        if worker.has_dialled_since(&hello) {
            // From a dial that was given up long ago: what it says is over, and what its stream brings was sent again.
            // That it was heard counts all the same: leases are by our own clock (J6).
            info!(worker = %id, "a late Hello: ignored");
            worker.heard_at = at.now;
            out.push(Effect::Close { session });
            return;
        }
        if let Some(old) = worker.session.replace(session) {
            out.push(Effect::Close { session: old });
        }
        if worker.incarnation != hello.incarnation {
            info!(worker = %id, "worker was restarted");
            worker.burned_in = None;
        }
        worker.greet(session, &hello, at.now);
        info!(worker = %id, host = %worker.host, running = ?worker.running, "worker joined");
        let lease_ms = self.policy.liveness.lease.as_millis() as u64;
        let incarnation = format!("{:x}", self.seed);
        out.push(Effect::Send { session, message: Box::new(Body::Welcome(v1::Welcome { incarnation, lease_ms })) });
        match hello.running {
            Some(running) => self.reattach(&id, session, &running, at, out),
            None => self.resend_starts(&id, session, out),
        }
        self.find_missing(&id, at, out);
    }

    /// The worker runs a trainer: it is ours and wanted, or it is stopped.
    fn reattach(
        &mut self,
        worker: &str,
        session: SessionId,
        running: &v1::RunningTrainer,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(fence) = running.fence.clone() else { return };
        let id = JobId(fence.job.clone());
        if self.foreign.contains(&id) {
            return;
        }
        if self.has_ended(worker, &id, Generation(fence.generation), running.rank) {
            // It was spooled that nothing of it is left, and its session had not heard of that when it dialled.
            if let Some(seen) = self.workers.get_mut(worker) {
                seen.running = None;
            }
            return;
        }
        let wanted = self.jobs.get_mut(&id).and_then(|job| {
            let live = job.live.as_mut().filter(|live| live.generation.0 == fence.generation)?;
            let rank = live.ranks.get_mut(running.rank as usize).filter(|rank| rank.worker == worker)?;
            rank.attach(running, at.now);
            rank.formed |= running.step.is_some();
            match &job.record.phase {
                JobPhase::Forming { .. } | JobPhase::Running { .. } => Some(false),
                JobPhase::Stopping { why: StopReason::Cancel { save: true }, .. } => Some(true),
                _ => None,
            }
        });
        match wanted {
            Some(stop) => {
                if stop {
                    self.ask_trainers_to_stop(&id, out);
                }
                self.formed_if_all(&id, at, out);
                self.tell_sealed(&id, out);
            }
            None => {
                // J3: whatever it carries is of an old generation, or of one that is being stopped.
                info!(worker, job = %id, generation = fence.generation, "stopping a trainer that is not wanted");
                let term = self.jobs.get(&id).map_or(fence.term, |job| job.record.term.0);
                let fence = v1::Fence { term, ..fence };
                let command_id = self.command_id("stop", Generation(fence.generation), running.rank);
                if let Some(seen) = self.workers.get_mut(worker) {
                    seen.stopping = Some(command_id.clone());
                }
                let stop = v1::StopTrainer { command_id, fence: Some(fence) };
                out.push(Effect::Send { session, message: Box::new(Body::StopTrainer(stop)) });
            }
        }
    }

    /// The exit of this trainer was taken in.
    fn has_ended(&self, worker: &str, id: &JobId, generation: Generation, rank: u32) -> bool {
        let live = self.jobs.get(id).and_then(|job| job.live.as_ref()).filter(|live| live.generation == generation);
        let rank = live.and_then(|live| live.ranks.get(rank as usize)).filter(|rank| rank.worker == worker);
        rank.and_then(|rank| rank.ended.as_ref()).is_some_and(|ended| matches!(ended.how, How::Exited(_)))
    }

    /// Whether some job waits for the end of this trainer.
    fn awaits(&self, worker: &str, id: &JobId, generation: Generation, rank: u32) -> bool {
        let live = self.jobs.get(id).and_then(|job| job.live.as_ref()).filter(|live| live.generation == generation);
        let rank = live.and_then(|live| live.ranks.get(rank as usize));
        rank.is_some_and(|rank| rank.worker == worker && rank.ended.is_none())
    }

    /// A trainer that nobody wanted is stopped. Its exit may have been taken in long ago, by a coordinator before us.
    fn stopped(&mut self, worker: &str, result: &v1::CommandResult) {
        let Some(seen) = self.workers.get_mut(worker) else { return };
        if seen.stopping.take_if(|command| *command == result.command_id).is_none() || !result.error.is_empty() {
            return;
        }
        let Some((id, generation, rank)) = seen.running.clone() else { return };
        let still_runs =
            result.current.as_ref().is_some_and(|fence| fence.job == id.0 && fence.generation == generation.0);
        if !still_runs
            && !self.awaits(worker, &id, generation, rank)
            && let Some(seen) = self.workers.get_mut(worker)
        {
            seen.running = None;
        }
    }

    /// The stream broke before we knew whether a start had arrived: it is sent again under its own id (J7).
    fn resend_starts(&mut self, worker: &str, session: SessionId, out: &mut Vec<Effect>) {
        for job in self.jobs.values() {
            let ranks = job.live.iter().flat_map(|live| live.ranks.iter());
            for start in ranks.filter(|r| r.worker == worker && r.is_unheard()).filter_map(|r| r.start.as_ref()) {
                let message = match &job.record.phase {
                    JobPhase::Forming { .. } => Body::StartTrainer(start.clone()),
                    // It may wait behind the end of another trainer.
                    _ => Body::StopTrainer(v1::StopTrainer {
                        command_id: format!("stop-{}", start.command_id),
                        fence: start.assignment.as_ref().and_then(|assignment| assignment.fence.clone()),
                    }),
                };
                out.push(Effect::Send { session, message: Box::new(message) });
            }
        }
    }

    /// A worker that has told all it knew, and runs nothing of what it should, has lost it.
    fn find_missing(&mut self, worker: &str, at: Moment, out: &mut Vec<Effect>) {
        let Some(seen) = self.workers.get(worker).filter(|w| w.is_drained()) else { return };
        let running = seen.running.clone();
        let mut missing = Vec::new();
        for (id, job) in &self.jobs {
            let Some(live) = &job.live else { continue };
            for (number, rank) in live.ranks.iter().enumerate() {
                let carried = running.as_ref().is_some_and(|(job, generation, rank)| {
                    job == id && *generation == live.generation && *rank as usize == number
                });
                // A start that was just sent is not known to have arrived; once the generation is given up it is taken back, which
                // is nobody's fault (P6).
                let starting = rank.is_unheard() && matches!(job.record.phase, JobPhase::Forming { .. });
                if rank.worker == worker && rank.ended.is_none() && !carried && !starting {
                    let is_taken_back = rank.is_unheard();
                    let how = if is_taken_back { How::Exited(ExitClass::StoppedByUs) } else { LOST };
                    missing.push((id.clone(), number, how));
                }
            }
        }
        for (id, rank, how) in missing {
            self.rank_ended(&id, rank, how, at, out);
        }
    }

    /// A message of a stream.
    pub(super) fn message(
        &mut self,
        session: SessionId,
        message: v1::WorkerMessage,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(worker) = self.workers.values_mut().find(|worker| worker.session == Some(session)) else { return };
        worker.heard_at = at.now;
        let id = worker.id.clone();
        let token = match message.seq {
            0 => None,
            seq if worker.take(seq) => Some(AckToken { worker: id.clone(), spool: worker.spool.clone(), seq }),
            seq => {
                let again = seq == worker.received || seq.is_multiple_of(ACK_AGAIN_EVERY);
                return worker.acknowledge(again, out);
            }
        };
        let left = match message.body {
            Some(v1::worker_message::Body::RankReport(report)) => {
                let age = Duration::from_millis(message.age_ms);
                self.rank_report(&id, report, token, age, at, out)
            }
            Some(v1::worker_message::Body::Heartbeat(beat)) => {
                self.heartbeat(&id, &beat, at, out);
                self.measure_clock(&id, &beat, at);
                self.judge_health(&id, at, out);
                token
            }
            Some(v1::worker_message::Body::Health(health)) => {
                if let Some(worker) = self.workers.get_mut(&id) {
                    worker.health = Some(health);
                }
                self.judge_health(&id, at, out);
                token
            }
            Some(v1::worker_message::Body::CommandResult(result)) => {
                self.command_result(&id, &result, at, out);
                token
            }
            Some(v1::worker_message::Body::ProbeResult(result)) => {
                self.probed(&id, result, at, out);
                token
            }
            Some(v1::worker_message::Body::Hello(_)) | None => {
                warn!(worker = %id, "message without a meaning here");
                token
            }
        };
        // A token that nobody took is done with: the record changes nothing (J3) or was applied at once.
        self.acknowledge(left.into_iter().collect(), out);
        self.find_missing(&id, at, out);
    }

    fn heartbeat(&mut self, worker: &str, beat: &v1::Heartbeat, at: Moment, out: &mut Vec<Effect>) {
        let Some((job, generation, number)) = self.workers.get(worker).and_then(|w| w.running.clone()) else { return };
        let live =
            self.jobs.get_mut(&job).and_then(|job| job.live.as_mut()).filter(|live| live.generation == generation);
        if let Some(rank) = live.and_then(|live| live.ranks.get_mut(number as usize)) {
            let left = rank.observe(Phase::try_from(beat.phase()).ok(), beat.step, at.now);
            rank.progress.clone_from(&beat.progress);
            rank.silent = Duration::from_millis(beat.silent_ms);
            for seconds in &beat.compute_seconds {
                rank.window.push(*seconds);
            }
            // Whoever steps is formed, though its word for it went with a stream that broke.
            let forms = beat.step.is_some() && !rank.formed;
            rank.formed |= forms;
            self.learn(&job, number, left);
            if forms {
                self.formed_if_all(&job, at, out);
            }
            if let Some(step) = beat.step.filter(|_| left.is_some()) {
                self.stepped(&job, number, step, at, out);
            }
        }
    }

    fn command_result(&mut self, worker: &str, result: &v1::CommandResult, at: Moment, out: &mut Vec<Effect>) {
        self.stopped(worker, result);
        if result.error.is_empty() && !result.stale {
            return;
        }
        warn!(worker, command = %result.command_id, error = %result.error, stale = result.stale, "command refused");
        // A coordinator that has taken over does not know the command, but waits for its trainer.
        let never_was = result.current.as_ref().filter(|_| result.not_started);
        let is_it = |id: &JobId, live: &Live, rank: &RankLive| {
            let is_ours = rank.start.as_ref().is_some_and(|start| start.command_id == result.command_id);
            let is_adopted = never_was.is_some_and(|fence| fence.job == id.0 && fence.generation == live.generation.0);
            rank.ended.is_none() && (is_ours || is_adopted && rank.worker == worker)
        };
        let found = self.jobs.iter().find_map(|(id, job)| {
            let live = job.live.as_ref()?;
            Some((id.clone(), live.ranks.iter().position(|rank| is_it(id, live, rank))?))
        });
        if let Some((id, rank)) = found {
            let generation = self.jobs.get(&id).map(|job| job.record.generation).unwrap_or_default();
            if let Some(seen) = self.workers.get_mut(worker) {
                seen.avoid_until = at.now + AVOID;
                seen.running.take_if(|running| *running == (id.clone(), generation, rank as u32));
            }
            // It had the start already and has lost the trainer since, or obeys another term: no fault of the job's (J5).
            let how = if result.stale { LOST } else { How::NotStarted(result.error.clone()) };
            self.rank_ended(&id, rank, how, at, out);
        }
    }

    /// A stream ended: the worker is UNKNOWN until it dials again or its lease is over (J6).
    pub(super) fn gone(&mut self, session: SessionId, _at: Moment) {
        if let Some(worker) = self.workers.values_mut().find(|worker| worker.session == Some(session)) {
            info!(worker = %worker.id, "worker's stream ended");
            worker.session = None;
        }
    }

    /// Judges leases (J6): what is lost takes its rank with it.
    pub(super) fn judge_workers(&mut self, at: Moment, out: &mut Vec<Effect>) {
        let policy = self.policy.liveness;
        let late = late_by(at.now.saturating_sub(self.last_tick), &policy);
        self.last_tick = at.now;
        for worker in self.workers.values_mut() {
            worker.heard_at = (worker.heard_at + late).min(at.now);
        }
        for at_ours in [&mut self.alone_at, &mut self.doubted_at].into_iter().flatten() {
            *at_ours = (*at_ours + late).min(at.now);
        }
        for rank in self.jobs.values_mut().filter_map(|job| job.live.as_mut()).flat_map(|live| &mut live.ranks) {
            rank.since = (rank.since + late).min(at.now);
        }
        let seen: Vec<Seen> =
            self.workers.values().map(|w| Seen { heard_at: w.heard_at, connected: w.session.is_some() }).collect();
        if hears_nobody(at.now, &seen, &policy) {
            if self.alone_at.is_none_or(|alone| at.now.saturating_sub(alone) > policy.lease) {
                warn!(
                    workers = seen.len(),
                    "no worker is heard: this coordinator is cut off, and nothing restarts meanwhile"
                );
            }
            self.alone_at = Some(at.now);
        }
        // The doubt holds for one lease: who has not been heard by then is lost.
        let doubted = self.doubted_at.is_some_and(|since| at.now.saturating_sub(since) <= policy.lease);
        let (verdicts, doubt) = decide_liveness(at.now, self.adopted_at, self.alone_at, &seen, doubted, &policy);
        if doubt == Doubt::MassExpiry {
            self.doubted_at = Some(at.now);
            warn!(workers = seen.len(), "most leases lapsed at once: looking again before anything restarts");
            for worker in self.workers.values_mut() {
                worker.heard_at = worker.heard_at.max(at.now.saturating_sub(policy.lease / 2));
            }
        }
        let lost: Vec<String> = self
            .workers
            .keys()
            .zip(verdicts)
            .filter(|(_, verdict)| *verdict == Liveness::Lost)
            .map(|(id, _)| id.clone())
            .collect();
        for id in lost {
            self.lose_worker(&id, at, out);
        }
    }

    fn lose_worker(&mut self, worker: &str, at: Moment, out: &mut Vec<Effect>) {
        warn!(worker, "worker lost: not heard within its lease");
        if let Some(Worker { session: Some(session), .. }) = self.workers.remove(worker) {
            out.push(Effect::Close { session });
        }
        for (id, rank) in self.carried_by(worker) {
            self.rank_ended(&id, rank, How::WorkerLost(WhyLost::LeaseExpired), at, out);
        }
    }

    /// Ranks on a worker that are not over.
    pub(super) fn carried_by(&self, worker: &str) -> Vec<(JobId, usize)> {
        let of_job = |(id, job): (&JobId, &super::Job)| {
            let ranks = job.live.iter().flat_map(|live| live.ranks.iter().enumerate());
            let carried = ranks.filter(|(_, rank)| rank.worker == worker && rank.ended.is_none());
            carried.map(|(number, _)| (id.clone(), number)).collect::<Vec<_>>()
        };
        self.jobs.iter().flat_map(of_job).collect()
    }

    /// Workers that could take a rank now.
    pub(super) fn candidates(&self, now: Duration) -> Vec<Candidate> {
        self.admitted_as(now, Ok(()))
    }

    /// Workers of which admission says this.
    pub(super) fn admitted_as(&self, now: Duration, wanted: Result<(), Refusal>) -> Vec<Candidate> {
        let ranks = self.jobs.values().flat_map(|job| job.live.iter().flat_map(|live| live.ranks.iter()));
        let taken: BTreeSet<&str> =
            ranks.filter(|rank| rank.ended.is_none()).map(|rank| rank.worker.as_str()).collect();
        let standing = |w: &Worker| Standing {
            is_connected: w.session.is_some(),
            is_drained: w.is_drained(),
            is_avoided: w.avoid_until > now,
            is_busy: w.running.is_some() || taken.contains(w.id.as_str()),
            is_quarantined: self.quarantined.contains_key(&w.id),
        };
        let wanted = self.workers.values().filter(|worker| decide_admission(&standing(worker)) == wanted);
        wanted.map(|w| Candidate { worker: w.id.clone(), machine: w.machine.clone() }).collect()
    }

    /// A rank is over without a report of its own trainer.
    pub(super) fn rank_ended(&mut self, id: &JobId, rank: usize, how: How, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut().and_then(|live| live.ranks.get_mut(rank)) else { return };
        if live.ended.is_some() {
            return;
        }
        live.end(rank as u32, how.clone(), at.now, Vec::new());
        let class = match &how {
            How::Exited(class) => class.to_string(),
            How::WorkerLost(_) => ExitClass::Lost.to_string(),
            How::NotStarted(error) => format!("not started: {error}"),
        };
        let worker = live.worker.clone();
        let entry = crate::events::Entry::new("trainer_exited").rank(rank as u32);
        let entry = entry.with("class", class.into()).with("worker", worker.into());
        self.event_row(id, entry, at, out);
    }
}
