//! Workers as people see them.

use trainctl_proto::v1;

use super::{Core, Worker};
use crate::decide::liveness::{Liveness, Seen, standing};
use crate::record::WorkerRecord;

impl Core {
    /// All workers by id: those that are known, and quarantined ones that are away.
    pub fn worker_statuses(&self) -> Vec<v1::WorkerStatus> {
        let ids: std::collections::BTreeSet<&String> = self.workers.keys().chain(self.quarantined.keys()).collect();
        ids.into_iter().filter_map(|id| self.worker_status(id)).collect()
    }

    /// One worker.
    pub fn worker_status(&self, id: &str) -> Option<v1::WorkerStatus> {
        let record = self.quarantined.get(id);
        let quarantine = record.and_then(quarantine);
        let Some(worker) = self.workers.get(id) else {
            let record = record?;
            return Some(v1::WorkerStatus {
                id: record.id.clone(),
                host: record.host.clone(),
                state: v1::WorkerState::Quarantined.into(),
                reason: "it is not connected".to_owned(),
                quarantine,
                ..v1::WorkerStatus::default()
            });
        };
        let carries = self.carries(id);
        let (state, reason) = match self.seen_as(worker, carries.as_ref().map(|(_, state)| *state)) {
            (state, reason) if quarantine.is_none() => (state, reason),
            (v1::WorkerState::Unknown, reason) => (v1::WorkerState::Quarantined, reason),
            _ => (v1::WorkerState::Quarantined, String::new()),
        };
        let clock = worker.clock().map(|skew| v1::ClockSkew { ms: skew.ms, error_ms: skew.error_ms });
        let silent = self.last_tick.saturating_sub(worker.heard_at);
        Some(v1::WorkerStatus {
            id: id.to_owned(),
            host: worker.host.clone(),
            address: worker.address.clone(),
            state: state.into(),
            reason,
            carries: carries.map(|(rank, _)| rank),
            quarantine,
            silent_ms: Some(u64::try_from(silent.as_millis()).unwrap_or(u64::MAX)),
            connected: worker.session.is_some(),
            cores: worker.facts.cores,
            device: worker.facts.device.clone(),
            pid: worker.facts.pid,
            health: worker.health.clone(),
            warnings: self.judged(worker).warnings,
            clock,
            boot_id: worker.machine.clone(),
            gigaflops: worker.burned_in.as_ref().map(|report| report.gigaflops),
        })
    }

    /// The rank that a worker carries, and whether its trainer has been heard of.
    fn carries(&self, worker: &str) -> Option<(v1::CarriedRank, v1::WorkerState)> {
        self.jobs.iter().find_map(|(id, job)| {
            let live = job.live.as_ref()?;
            let (number, rank) =
                live.ranks.iter().enumerate().find(|(_, rank)| rank.worker == worker && rank.ended.is_none())?;
            let (job, generation) = (id.0.clone(), live.generation.0);
            let state = if rank.pid == 0 { v1::WorkerState::Starting } else { v1::WorkerState::Running };
            Some((v1::CarriedRank { job, generation, rank: number as u32 }, state))
        })
    }

    fn seen_as(&self, worker: &Worker, carries: Option<v1::WorkerState>) -> (v1::WorkerState, String) {
        let lease = self.policy.liveness.lease.as_secs_f64();
        let seen = Seen { heard_at: worker.heard_at, connected: worker.session.is_some() };
        let silent = self.last_tick.saturating_sub(worker.heard_at).as_secs_f64();
        if standing(self.last_tick, &seen, &self.policy.liveness) != Liveness::Alive {
            let how = if seen.connected { "silent" } else { "without a stream, silent" };
            return (v1::WorkerState::Unknown, format!("{how} for {silent:.1} s; lost after {lease:.0} s"));
        }
        let settling = |why: &str| (v1::WorkerState::Settling, why.to_owned());
        match carries {
            Some(state) => (state, String::new()),
            None if worker.running.is_some() => settling("its last trainer is being stopped"),
            None if !worker.is_drained() => settling("it delivers what it had spooled"),
            None if worker.avoid_until > self.last_tick => settling("it refused a start"),
            None if self.jobs.values().any(|job| !job.record.phase.is_terminal()) => {
                (v1::WorkerState::Spare, String::new())
            }
            None => (v1::WorkerState::Idle, String::new()),
        }
    }
}

fn quarantine(record: &WorkerRecord) -> Option<v1::Quarantine> {
    let quarantine = record.quarantine.as_ref()?;
    Some(v1::Quarantine {
        by: quarantine.by.name().to_owned(),
        reason: quarantine.reason.clone(),
        figures: quarantine.figures.clone(),
        since_ms: quarantine.since_ms,
    })
}
