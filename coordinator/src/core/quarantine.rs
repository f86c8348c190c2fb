//! Workers that take no rank: put there by a person, by their own figures or by a probe.
//!
//! What a worker carries when it is quarantined goes on, unless a person says otherwise: a doubt about a machine is no reason
//! to lose steps. The quarantine is journaled before anything follows from it, and told in the events of every job that lives,
//! since each of them might have had the worker next.

use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_spec::state::WhyLost;
use trainctl_spec::{Generation, JobId};

use super::{Core, Effect, Moment};
use crate::decide::health::{self, Judgement, Skew};
use crate::decide::verdict::How;
use crate::events::Entry;
use crate::record::{Quarantine, QuarantinedBy, WorkerRecord};

/// A clock's measurement is replaced by a worse one after so long.
const CLOCK_FRESH: Duration = Duration::from_secs(60);

impl Core {
    /// A worker of the journal.
    pub fn know(&mut self, record: WorkerRecord) {
        let Some(quarantine) = &record.quarantine else { return };
        // Whoever lets it in again sees it checked again.
        if quarantine.by == QuarantinedBy::BurnIn {
            self.suspects.insert(record.id.clone());
        }
        self.quarantined.insert(record.id.clone(), record);
    }

    /// A person takes a worker out of service; with `now` its rank is given up too. Asking twice is asking once (J7).
    pub(super) fn take_out(&mut self, worker: &str, reason: String, now: bool, at: Moment, out: &mut Vec<Effect>) {
        self.quarantine(worker, QuarantinedBy::Person, reason, at, out);
        if !now {
            return;
        }
        for (id, rank) in self.carried_by(worker) {
            self.stop_one(&id, rank as u32, worker, out);
            self.rank_ended(&id, rank, How::WorkerLost(WhyLost::TakenOut), at, out);
        }
    }

    /// Kills one rank's trainer.
    fn stop_one(&mut self, id: &JobId, rank: u32, worker: &str, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let generation = job.live.as_ref().map_or(Generation(0), |live| live.generation);
        let fence = v1::Fence { job: id.0.clone(), generation: generation.0, term: job.record.term.0 };
        let command_id = self.command_id("stop", generation, rank);
        if let Some(session) = self.workers.get(worker).and_then(|worker| worker.session) {
            let stop = v1::StopTrainer { command_id, fence: Some(fence) };
            out.push(Effect::Send { session, message: Box::new(Body::StopTrainer(stop)) });
        }
    }

    /// Gives a worker no further rank. The word of a person replaces that of a machine, never the other way round.
    pub(super) fn quarantine(
        &mut self,
        worker: &str,
        by: QuarantinedBy,
        reason: String,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let before = self.quarantined.get(worker).and_then(|record| record.quarantine.as_ref());
        if before.is_some_and(|before| before.by >= by) {
            return;
        }
        let seen = self.workers.get(worker);
        let figures = seen.map(|seen| health::figures(seen.health.as_ref(), seen.clock())).unwrap_or_default();
        let host = seen.map(|seen| seen.host.clone()).unwrap_or_default();
        warn!(worker, host, by = by.name(), reason, figures, "worker quarantined");
        let entry = Entry::new("worker_quarantined").with("worker", worker.into()).with("host", host.clone().into());
        let entry = entry.with("by", by.name().into()).with("reason", reason.clone().into());
        let entry = entry.with("figures", figures.clone().into());
        let quarantine = Some(Quarantine { by, reason, figures, since_ms: at.wall_ms });
        let record = WorkerRecord { id: worker.to_owned(), host, quarantine };
        out.push(Effect::JournalWorker(Box::new(record.clone())));
        self.quarantined.insert(worker.to_owned(), record);
        self.tell_living_jobs(&entry, at, out);
    }

    /// A worker may take ranks again.
    pub(super) fn release_worker(&mut self, worker: &str, why: &'static str, at: Moment, out: &mut Vec<Effect>) {
        let Some(record) = self.quarantined.remove(worker) else { return };
        info!(worker, why, "worker released");
        out.push(Effect::JournalWorker(Box::new(WorkerRecord { quarantine: None, ..record })));
        let entry = Entry::new("worker_released").with("worker", worker.into()).with("reason", why.into());
        self.tell_living_jobs(&entry, at, out);
    }

    fn tell_living_jobs(&self, entry: &Entry, at: Moment, out: &mut Vec<Effect>) {
        for (id, _) in self.jobs.iter().filter(|(_, job)| !job.record.phase.is_terminal()) {
            self.event_row(id, entry.clone(), at, out);
        }
    }

    /// What a heartbeat says of the worker's wall clock: our beat's way there and back bounds the error.
    pub(super) fn measure_clock(&mut self, worker: &str, beat: &v1::Heartbeat, at: Moment) {
        let (Some(worker), Some(wall_ms)) = (self.workers.get_mut(worker), beat.wall_ms) else { return };
        let away = Duration::from_micros(beat.beat_us.saturating_add(beat.held_us));
        let Some(round_trip) = at.now.checked_sub(away).filter(|_| beat.beat_us > 0) else { return };
        let skew = Skew::measured(wall_ms, at.wall_ms, round_trip);
        let is_better = |(old, measured_at): (Skew, Duration)| {
            skew.error_ms <= old.error_ms || at.now.saturating_sub(measured_at) > CLOCK_FRESH
        };
        if worker.skew.is_none_or(is_better) {
            worker.skew = Some((skew, at.now));
        }
    }

    /// Quarantines a worker whose figures are bad, and releases one that was for its figures and measures itself well again.
    pub(super) fn judge_health(&mut self, worker: &str, at: Moment, out: &mut Vec<Effect>) {
        let Some(seen) = self.workers.get(worker) else { return };
        let judged = self.judged(seen);
        let by_health = |record: &WorkerRecord| {
            record.quarantine.as_ref().is_some_and(|quarantine| quarantine.by == QuarantinedBy::Health)
        };
        let is_measured = seen.health.as_ref().is_some_and(|health| !health.busy) && seen.skew.is_some();
        if !judged.unfit.is_empty() {
            self.quarantine(worker, QuarantinedBy::Health, judged.unfit.join("; "), at, out);
        } else if is_measured && self.quarantined.get(worker).is_some_and(by_health) {
            self.release_worker(worker, "it measures itself well again", at, out);
        }
    }

    pub(super) fn judged(&self, worker: &super::Worker) -> Judgement {
        health::judge(worker.health.as_ref(), worker.clock(), &self.policy.health)
    }
}

impl super::Worker {
    /// Its wall clock against ours.
    pub(super) fn clock(&self) -> Option<Skew> {
        self.skew.map(|(skew, _)| skew)
    }
}
