//! Ranks that hold the others up: shown, logged, and moved to a spare where the spec says so.

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_spec::JobId;
use trainctl_spec::report::SaveKind;
use trainctl_spec::state::{Cause, JobPhase};

use super::{Core, Effect, Moment};
use crate::decide::stragglers::{Eviction, Judged, Pace, decide_eviction, decide_stragglers};
use crate::events::Entry;

impl Core {
    /// Judges the ranks of a running job by their last steps.
    pub(super) fn judge_ranks(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let (Some(live), JobPhase::Running { .. }) = (job.live.as_mut(), &job.record.phase) else { return };
        let paces: Option<Vec<Pace>> = live.ranks.iter().map(|rank| rank.window.pace()).collect();
        let Some(paces) = paces else { return };
        let before: Vec<Option<Judged>> = live.ranks.iter().map(|rank| rank.judged).collect();
        let judged = decide_stragglers(&paces, &before, at.now);
        for (rank, judged) in live.ranks.iter_mut().zip(&judged) {
            rank.judged = Some(*judged);
        }
        let was = |before: &Option<Judged>| before.is_some_and(|before| before.is_straggler);
        let changed =
            (0..).zip(before.iter().zip(&judged)).filter(|(_, (before, now))| was(before) != now.is_straggler);
        let changed: Vec<u32> = changed.map(|(rank, _)| rank).collect();
        for rank in &changed {
            self.straggler_changed(id, *rank, &judged[*rank as usize], at, out);
        }
        if !changed.is_empty() {
            self.publish(id, out);
        }
        if judged.iter().any(|judged| judged.is_straggler) {
            self.ask_to_save_before_eviction(id, &judged, at, out);
        } else if let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) {
            live.evicts = None;
        }
    }

    fn straggler_changed(&mut self, id: &JobId, rank: u32, judged: &Judged, at: Moment, out: &mut Vec<Effect>) {
        let Judged { seconds, slower, score, is_straggler, .. } = *judged;
        let suspect = self.suspect(id, rank);
        let step = self.jobs.get(id).and_then(|job| job.live.as_ref()?.ranks.get(rank as usize)?.step);
        if is_straggler {
            warn!(job = %id, %suspect, seconds, slower, score, "a rank holds the others up");
        } else {
            info!(job = %id, %suspect, seconds, slower, score, "a rank no longer holds the others up");
        }
        let mut entry = Entry::new("straggler").rank(rank);
        if let Some(step) = step {
            entry = entry.step(step);
        }
        let entry = entry.with("is_straggler", is_straggler.into()).with("worker", suspect.worker.into());
        let entry = entry.with("host", suspect.host.into()).with("compute_seconds", seconds.into());
        self.event_row(id, entry.with("slower", slower.into()).with("score", score.into()), at, out);
    }

    /// Free workers that a job does not avoid.
    fn spares(&self, id: &JobId, at: Moment) -> usize {
        let Some(job) = self.jobs.get(id) else { return 0 };
        self.candidates(at.now).iter().filter(|free| !job.record.avoided.contains(&free.worker)).count()
    }

    fn ask_to_save_before_eviction(&mut self, id: &JobId, judged: &[Judged], at: Moment, out: &mut Vec<Effect>) {
        let spares = self.spares(id, at);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let wanted = job.spec.fault_tolerance.stragglers;
        let decision = decide_eviction(judged, wanted, spares, job.record.evictions);
        let Some(live) = job.live.as_mut() else { return };
        let rank = match decision {
            Eviction::Evict { rank } => Some(rank),
            Eviction::NoStraggler | Eviction::Observe | Eviction::NoSpare | Eviction::Enough => None,
        };
        let is_new = live.evicts.is_none() && rank.is_some();
        live.evicts = rank;
        if is_new {
            info!(job = %id, ?decision, "a save is asked for before a rank moves to a spare");
            self.control(id, &v1::trainer_control::Request::Save(v1::SaveRequest {}), out);
        }
    }

    /// A commit was made: whoever waits for one to give way does so now, when nothing is lost but the steps since.
    pub(super) fn evict_after_commit(&mut self, id: &JobId, kind: SaveKind, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let (Some(live), JobPhase::Running { .. }) = (job.live.as_ref(), &job.record.phase) else { return };
        let Some(rank) = live.evicts.filter(|_| kind == SaveKind::Full) else { return };
        let slower = live.ranks.get(rank as usize).and_then(|rank| rank.judged).map_or(1.0, |judged| judged.slower);
        let suspect = self.suspect(id, rank);
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.record.avoided.insert(suspect.worker.clone());
        job.record.evictions += 1;
        self.stop_generation(id, Cause::Straggler { suspect, slower }, at, out);
    }
}
