//! The coordinator's state and what moves it, without any I/O.
//!
//! [`Core::handle`] takes one event and the time and answers the effects, in the order in which they must happen: a journal
//! entry precedes whatever it makes visible. The owner task ([`crate::owner`]) feeds events and carries out effects; a
//! simulator can do the same with a clock, a transport and a journal of its own.
//!
//! Wanted and observed are kept apart: a job's record is what is wanted (and journaled), `live` is what was last seen of its
//! ranks; [`Core`]'s `pump` compares the two after each event and does the next thing.

mod burn_in;
mod changes;
mod event;
mod followers;
mod forming;
mod hang;
mod job;
mod live;
mod policy;
mod probes;
mod quarantine;
mod ranks;
mod replicas;
mod saves;
mod status;
mod stragglers;
mod worker_status;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_spec::state::{Cause, JobEvent, JobPhase, StopReason};
use trainctl_spec::{Generation, JobId, JobSpec, Term};

use crate::events::{self, Entry};
use crate::hooks::HookRequest;
use crate::record::{JobRecord, WorkerRecord};
use crate::run_io::{AckToken, IoRequest, IoResult};

pub use self::event::{Effect, Event, StoreChange};
pub use self::followers::Followers;
pub use self::job::{Job, Rows};
pub use self::live::{Live, RankLive};
pub use self::policy::Policy;
pub use self::probes::Probing;
pub use self::workers::Worker;

/// Number of one stream between a worker and this coordinator.
pub type SessionId = u64;

/// The coordinator's state.
#[derive(Debug)]
pub struct Core {
    policy: Policy,
    adopted_at: Option<Duration>,
    last_tick: Duration,
    doubted_at: Option<Duration>,
    /// When no worker was heard, last.
    alone_at: Option<Duration>,
    jobs: BTreeMap<JobId, Job>,
    workers: BTreeMap<String, Worker>,
    /// Those that take no rank, whether they are there or not.
    quarantined: BTreeMap<String, WorkerRecord>,
    /// What the `endpoint.json` of the run directories names; absent = workers need not prove that they see it.
    nonce: Option<String>,
    /// Those that may have corrupted a state or failed a burn-in, and have passed none since.
    suspects: BTreeSet<String>,
    seed: u64,
    commands: u64,
    /// Jobs that another coordinator holds: their trainers are left alone and their records are not acknowledged.
    foreign: BTreeSet<JobId>,
}

/// The moment at which an event is handled.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Monotonic clock.
    pub now: Duration,
    /// Milliseconds since the Unix epoch, for people.
    pub wall_ms: u64,
}

impl Core {
    /// A core with no jobs. `seed` makes back-off jitter and command ids.
    pub fn new(policy: Policy, now: Duration, seed: u64) -> Self {
        let (jobs, workers, quarantined) = Default::default();
        Self {
            policy,
            foreign: BTreeSet::new(),
            adopted_at: None,
            last_tick: now,
            doubted_at: None,
            alone_at: None,
            jobs,
            workers,
            quarantined,
            nonce: None,
            suspects: BTreeSet::new(),
            seed,
            commands: 0,
        }
    }

    /// Takes over a job from the journal of an earlier term.
    ///
    /// A running generation is adopted: its trainers have not noticed. A forming one is given up without charge, since its
    /// rendezvous keys are gone. No lease expires before the grace is over (J6).
    pub fn adopt(&mut self, mut record: JobRecord, spec: JobSpec, term: Term, at: Moment) -> Vec<Effect> {
        let mut out = Vec::new();
        record.term = record.term.max(term);
        let id = record.id.clone();
        let over = record.phase.is_terminal();
        let live = record.phase.generation().map(|generation| Live::adopted(generation, &record, at.now));
        if let Some(live) = &live {
            self.adopted_at = Some(at.now);
            for place in &record.ranks {
                let worker = Worker::expected(&place.worker, &place.incarnation, at.now);
                self.workers.entry(place.worker.clone()).or_insert(worker);
            }
            info!(job = %id, generation = %live.generation, ranks = record.ranks.len(), "adopted from the journal");
        }
        if !over {
            // Some of them may have proved themselves since; they are asked once more.
            self.suspects.extend(record.avoided.iter().cloned());
        }
        let end = record.end.clone();
        let mut job = Job::new(record, spec, live, at.now);
        if let Some(end) = end {
            job.show(end);
        }
        self.jobs.insert(id.clone(), job);
        if over {
            // Whoever followed the job when the coordinator before was killed asks for its end.
            self.publish(&id, &mut out);
            return out;
        }
        self.event_row(&id, Entry::new("coordinator_adopted"), at, &mut out);
        let forming = self.jobs.get(&id).is_some_and(|job| matches!(job.record.phase, JobPhase::Forming { .. }));
        if forming {
            let message = "the coordinator restarted while it was forming".to_owned();
            self.stop_generation(&id, Cause::Abandoned { message }, at, &mut out);
        } else {
            self.journal(&id, &mut out);
        }
        self.pump(at, &mut out);
        out
    }

    /// Handles one event.
    pub fn handle(&mut self, event: Event, at: Moment) -> Vec<Effect> {
        let mut out = Vec::new();
        match event {
            Event::Admitted { record, spec } => self.admitted(*record, *spec, at, &mut out),
            Event::Cancel { job, save } => self.cancel(&job, save, at, &mut out),
            Event::Quarantine { worker, reason, now } => self.take_out(&worker, reason, now, at, &mut out),
            Event::Release { worker } => self.release_worker(&worker, "released by a person", at, &mut out),
            Event::Hello { session, hello } => self.hello(session, *hello, at, &mut out),
            Event::Message { session, message } => self.message(session, *message, at, &mut out),
            Event::Gone { session } => self.gone(session, at),
            Event::Io { job, result } => self.io_done(&job, *result, at, &mut out),
            Event::Hook { job, result } => self.hook_done(&job, result, at, &mut out),
            Event::Exported { job, result } => self.exported(&job, result, at, &mut out),
            Event::Tick => self.tick(at, &mut out),
        }
        self.pump(at, &mut out);
        out
    }

    /// Jobs that hold their run directories, as their specs spell them: those that are not over, or whose commands are not.
    pub fn live_jobs(&self) -> Vec<(JobId, PathBuf)> {
        let holds = |job: &&Job| !job.record.phase.is_terminal() || !job.followers.commands.is_empty();
        let live = self.jobs.values().filter(holds);
        live.map(|job| (job.record.id.clone(), job.spec.run_dir.clone())).collect()
    }

    /// The job that this submission made before, if it was sent twice (J7).
    pub fn submitted_as(&self, request_id: &str) -> Option<&JobId> {
        self.jobs.values().find(|job| job.record.request_id == request_id).map(|job| &job.record.id)
    }

    fn admitted(&mut self, record: JobRecord, spec: JobSpec, at: Moment, out: &mut Vec<Effect>) {
        let id = record.id.clone();
        self.jobs.insert(id.clone(), Job::new(record, spec, None, at.now));
        self.journal(&id, out);
        self.event_row(&id, Entry::new("job_submitted"), at, out);
        self.publish(&id, out);
    }

    /// Stops a job: with `save` at the next step boundary, else now. Asking twice is asking once (J7).
    fn cancel(&mut self, id: &JobId, save: bool, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let phase = &job.record.phase;
        if phase.is_terminal() {
            return;
        }
        // A generation that has not stepped has nothing to save.
        let stepping =
            matches!(phase, JobPhase::Running { .. } | JobPhase::Stopping { why: StopReason::Cancel { .. }, .. });
        match phase.generation() {
            None => self.apply(id, JobEvent::Cancel, at, out),
            Some(generation) => {
                self.apply(id, JobEvent::Stop { generation, why: StopReason::Cancel { save } }, at, out);
                self.event_row(id, Entry::new("cancel_requested").with("save", save.into()), at, out);
                if save && stepping {
                    self.ask_trainers_to_stop(id, out);
                } else {
                    self.give_up_retries(id, at, out);
                    self.stop_ranks(id, "cancelled", out);
                }
            }
        }
    }

    /// Applies an event to a job's phase, journals the result and tells who watches. What the state machine does not allow
    /// changes nothing and is logged: it means that a message came late (J3) or that the core is wrong.
    fn apply(&mut self, id: &JobId, event: JobEvent, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        match job.record.phase.apply(event) {
            Ok(phase) if phase == job.record.phase => {}
            Ok(phase) => {
                info!(job = %id, from = %job.record.phase, to = %phase, reason = %phase.reason(), "phase");
                job.record.phase = phase;
                if job.record.phase.is_terminal() {
                    job.record.finished_at_ms = Some(at.wall_ms);
                    self.finished(id, at, out);
                } else {
                    self.journal(id, out);
                    self.publish(id, out);
                }
            }
            Err(refused) => warn!(job = %id, %refused, "event refused"),
        }
    }

    fn finished(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.record.end = Some(job.end());
        let mut entry = Entry::new("job_finished")
            .with("phase", job.record.phase.name().into())
            .with("reason", job.record.phase.reason().into());
        if let JobPhase::Failed { cause } = &job.record.phase {
            entry = entry.with("verdict", events::verdict(cause));
        }
        // The end is written where people look before the journal says so: after a crash between the two it is written again,
        // never missed.
        self.event_row(id, entry, at, out);
        self.journal(id, out);
        let has_commands = self.end_hooks(id, out);
        self.publish(id, out);
        if !has_commands {
            out.push(Effect::Release(id.clone()));
        }
    }

    fn tick(&mut self, at: Moment, out: &mut Vec<Effect>) {
        self.judge_workers(at, out);
        let sent_us = u64::try_from(at.now.as_micros()).unwrap_or(u64::MAX);
        for worker in self.workers.values() {
            if let Some(session) = worker.session {
                let beat = v1::coordinator_message::Body::Beat(v1::Beat { sent_us });
                out.push(Effect::Send { session, message: Box::new(beat) });
            }
        }
        let retry: Vec<JobId> = self.jobs.keys().cloned().collect();
        for id in retry {
            self.retry_commits(&id, at, out);
            self.judge_progress(&id, at, out);
            self.judge_ranks(&id, at, out);
            self.prove_spares(&id, at, out);
        }
    }

    fn io_done(&mut self, id: &JobId, result: IoResult, at: Moment, out: &mut Vec<Effect>) {
        match result {
            IoResult::Done(tokens) => self.acknowledge(tokens, out),
            IoResult::Prepared(prepared) => self.prepared(id, *prepared, at, out),
            IoResult::Committed(committed) => self.committed(id, *committed, at, out),
            IoResult::Known(known) => {
                if let Some(job) = self.jobs.get_mut(id) {
                    job.pointers = known.pointers;
                    job.is_known = true;
                    job.rows = Rows { first: known.first, last: known.last, validation: known.validation };
                    self.publish(id, out);
                }
            }
            IoResult::Mended(mended) => self.mended(id, *mended, at, out),
            IoResult::Released => out.push(Effect::Leave(id.clone())),
            IoResult::Superseded { term } => self.forget(id, term, out),
        }
    }

    /// Another coordinator holds the job's run directory: it is not ours any more. Its trainers are left alone, since the
    /// holder has adopted them (J2).
    fn forget(&mut self, id: &JobId, term: u64, out: &mut Vec<Effect>) {
        warn!(job = %id, term, "job forgotten: a higher term holds its run directory");
        self.jobs.remove(id);
        self.leave_alone(id.clone());
        out.push(Effect::Hook { job: id.clone(), request: HookRequest::Forget });
        out.push(Effect::Release(id.clone()));
    }

    /// A job of the journal whose run directory another coordinator holds, or that cannot be read here.
    pub fn leave_alone(&mut self, id: JobId) {
        self.foreign.insert(id);
    }

    /// Compares wanted with observed and does the next thing, for every job.
    fn pump(&mut self, at: Moment, out: &mut Vec<Effect>) {
        let ids: Vec<JobId> = self.jobs.keys().cloned().collect();
        for id in ids {
            self.watch_round(&id, at, out);
            self.settle(&id, at, out);
            self.form_if_ready(&id, at, out);
        }
    }

    fn journal(&self, id: &JobId, out: &mut Vec<Effect>) {
        if let Some(job) = self.jobs.get(id) {
            out.push(Effect::Journal(Box::new(job.record.clone())));
        }
    }

    fn publish(&self, id: &JobId, out: &mut Vec<Effect>) {
        if let Some(status) = self.status(id) {
            out.push(Effect::Publish(Box::new(status)));
        }
    }

    fn event_row(&self, id: &JobId, entry: Entry, at: Moment, out: &mut Vec<Effect>) {
        let generation = self.jobs.get(id).map(|job| job.record.generation).unwrap_or_default();
        let entry = entry.of(id, generation, at.wall_ms);
        self.io(id, IoRequest::Event(entry), out);
    }

    fn io(&self, id: &JobId, request: IoRequest, out: &mut Vec<Effect>) {
        out.push(Effect::Io { job: id.clone(), request: Box::new(request) });
    }

    /// What a spooled record caused is durable (or will never be): its worker may forget it.
    fn acknowledge(&mut self, tokens: Vec<AckToken>, out: &mut Vec<Effect>) {
        for token in tokens {
            if let Some(worker) = self.workers.get_mut(&token.worker) {
                worker.done(&token.spool, token.seq, out);
            }
        }
    }

    /// A number in [0, 1) that a seed repeats (SplitMix64).
    fn jitter(&mut self) -> f64 {
        self.seed = self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A command id that no other command of this coordinator has (J7).
    fn command_id(&mut self, what: &str, generation: Generation, rank: u32) -> String {
        self.commands += 1;
        format!("{what}-g{generation}-r{rank}-{:x}-{}", self.seed & 0xffff_ffff, self.commands)
    }
}

#[cfg(test)]
mod tests;
