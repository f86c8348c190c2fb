//! The burn-in of a generation's devices: asked for at its formation, judged when all ranks have reported, and what follows.
//! [`crate::decide::burn_in`] says when and who.
//!
//! What a worker has passed is kept in memory only: after a restart of the coordinator it is asked once more.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::{error, info};
use trainctl_spec::JobId;
use trainctl_spec::report::{BurnInReport, SumCheck};
use trainctl_spec::state::{Cause, JobPhase, Suspect};

use super::{Core, Effect, Moment};
use crate::decide::burn_in::{Outcome, Standing, Wrong, decide_burn_in, decide_due, slowness};
use crate::decide::placement::Candidate;
use crate::events::Entry;
use crate::record::QuarantinedBy;

impl Core {
    /// How long the workers that are to carry a job's ranks burn in; zero = they do not.
    pub(super) fn burn_in_due(&self, id: &JobId, chosen: &[Candidate]) -> Duration {
        let Some(job) = self.jobs.get(id) else { return Duration::ZERO };
        let standing = |candidate: &Candidate| Standing {
            has_passed: self.workers.get(&candidate.worker).is_some_and(|worker| worker.burned_in.is_some()),
            is_suspect: self.suspects.contains(&candidate.worker),
        };
        let chosen: Vec<Standing> = chosen.iter().map(standing).collect();
        decide_due(job.spec.fault_tolerance.burn_in_seconds, job.spec.resources.device, &chosen)
    }

    /// A rank has burnt in. Judged once all have: who is right is known only then.
    pub(super) fn burned_in(&mut self, id: &JobId, rank: u32, report: BurnInReport, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let is_up = matches!(job.record.phase, JobPhase::Forming { .. } | JobPhase::Running { .. });
        let Some(live) = job.live.as_mut().filter(|_| is_up) else { return };
        live.burn_ins.insert(rank, report);
        if live.burn_ins.len() < live.ranks.len() {
            return;
        }
        let reports = std::mem::take(&mut live.burn_ins);
        match decide_burn_in(&reports) {
            Outcome::Fit => self.burn_in_passed(id, reports, at, out),
            Outcome::Wrong(wrong) => self.burn_in_failed(id, &reports, &wrong, at, out),
        }
    }

    fn burn_in_passed(&mut self, id: &JobId, reports: BTreeMap<u32, BurnInReport>, at: Moment, out: &mut Vec<Effect>) {
        info!(job = %id, ranks = reports.len(), "burnt in");
        let entry = self.burn_in_entry("burned_in", id, &reports);
        self.event_row(id, entry, at, out);
        for (rank, report) in reports {
            let worker = self.suspect(id, rank).worker;
            self.suspects.remove(&worker);
            if let Some(worker) = self.workers.get_mut(&worker) {
                worker.burned_in = Some(report);
            }
        }
        if let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) {
            live.burnt_in = true;
        }
        self.formed_if_all(id, at, out);
    }

    /// Who is named is quarantined until a person has looked; where nobody can be, others take the ranks if there are any.
    fn burn_in_failed(
        &mut self,
        id: &JobId,
        reports: &BTreeMap<u32, BurnInReport>,
        wrong: &Wrong,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let suspects: Vec<(Suspect, &String)> =
            wrong.suspects.iter().map(|(rank, reason)| (self.suspect(id, *rank), reason)).collect();
        let named = wrong.named;
        let entry = self.burn_in_entry("burn_in_failed", id, reports).with("named", named.into());
        let numbers: Vec<u32> = wrong.suspects.keys().copied().collect();
        self.event_row(id, entry.with("suspects", numbers.into()).with("reason", wrong.message().into()), at, out);
        for (suspect, reason) in &suspects {
            // Whoever lets it in again sees it checked again, whatever the spec's default is.
            self.suspects.insert(suspect.worker.clone());
            if let Some(worker) = self.workers.get_mut(&suspect.worker) {
                worker.burned_in = None;
            }
            if named {
                self.quarantine(&suspect.worker, QuarantinedBy::BurnIn, format!("burn-in: {reason}"), at, out);
            } else if let Some(job) = self.jobs.get_mut(id) {
                job.record.avoided.insert(suspect.worker.clone());
            }
        }
        let suspects = suspects.into_iter().map(|(suspect, _)| suspect).collect();
        let cause = Cause::BurnIn { suspects, named, message: wrong.message() };
        error!(job = %id, %cause, "the burn-in failed");
        self.stop_generation(id, cause, at, out);
    }

    /// An event with the figures of each rank.
    fn burn_in_entry(&self, kind: &'static str, id: &JobId, reports: &BTreeMap<u32, BurnInReport>) -> Entry {
        let slower = slowness(reports);
        let seconds = |sum: Option<SumCheck>| sum.map(|sum| sum.seconds);
        let wrong = |sum: Option<SumCheck>| sum.map(|sum| sum.wrong_elements);
        let figures = reports.iter().map(|(rank, report)| {
            let Suspect { worker, host, .. } = self.suspect(id, *rank);
            serde_json::json!({
                "rank": rank, "worker": worker, "host": host, "device": report.device, "rounds": report.rounds,
                "wrong_rounds": report.wrong_rounds, "digest": format!("{:032x}", report.digest),
                "seconds": report.seconds, "gigaflops": report.gigaflops, "slower": slower.get(rank),
                "node_reduce_seconds": seconds(report.node_sum), "wrong_node_sums": wrong(report.node_sum),
                "world_reduce_seconds": seconds(report.world_sum), "wrong_world_sums": wrong(report.world_sum),
            })
        });
        let work = reports.values().next().map(|report| report.work.clone());
        Entry::new(kind).with("work", work.into()).with("ranks", figures.collect::<Vec<_>>().into())
    }
}
