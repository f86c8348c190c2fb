//! A job as people see it.

use trainctl_proto::v1;
use trainctl_spec::JobId;
use trainctl_spec::state::{JobPhase, StopReason};

use super::{Core, Worker};

impl Core {
    /// All jobs, oldest first.
    pub fn statuses(&self) -> Vec<v1::Job> {
        let mut all: Vec<v1::Job> = self.jobs.keys().filter_map(|id| self.status(id)).collect();
        all.sort_by_key(|job| job.submitted_at_ms);
        all
    }

    /// Id of the job that was submitted last.
    pub fn latest(&self) -> Option<&JobId> {
        self.jobs.values().max_by_key(|job| job.record.submitted_at_ms).map(|job| &job.record.id)
    }

    /// All workers that are not lost.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// One job.
    pub fn status(&self, id: &JobId) -> Option<v1::Job> {
        let job = self.jobs.get(id)?;
        let record = &job.record;
        let ranks = job.live.iter().flat_map(|live| live.ranks.iter().enumerate()).map(|(number, rank)| {
            let worker = self.workers.get(&rank.worker);
            v1::RankStatus {
                rank: number as u32,
                worker: rank.worker.clone(),
                host: worker.map(|w| w.host.clone()).unwrap_or_default(),
                pid: if rank.ended.is_some() { 0 } else { rank.pid },
                phase: v1::Phase::from(rank.phase) as i32,
                step: rank.step,
                connected: worker.is_some_and(|w| w.session.is_some()),
                compute_seconds: rank.judged.map(|judged| judged.seconds),
                straggler_score: rank.judged.map(|judged| judged.score),
                straggler: rank.judged.is_some_and(|judged| judged.is_straggler),
            }
        });
        let steps_done = match (&record.phase, &job.rows.last) {
            (JobPhase::Running { step, .. }, _) => step.0,
            (_, Some(row)) => row.step + 1,
            _ => record.start.step,
        };
        // A restart that waits: why it is one, and for what it waits.
        let is_restart = matches!(record.phase, JobPhase::Stopping { why: StopReason::Restart { .. }, .. });
        let reason = match record.phase.reason() {
            reason if is_restart && !job.waiting.is_empty() => format!("{reason}; now {}", job.waiting),
            reason => reason,
        };
        Some(v1::Job {
            id: record.id.0.clone(),
            name: job.spec.name.clone(),
            run_dir: job.spec.run_dir.display().to_string(),
            phase: phase(&record.phase) as i32,
            reason: [reason, job.waiting.clone()]
                .into_iter()
                .find(|reason| !reason.is_empty())
                .unwrap_or_else(|| job.save_trouble.values().map(String::as_str).collect::<Vec<_>>().join("; ")),
            generation: record.generation.0,
            term: record.term.0,
            steps_done,
            max_steps: job.spec.step_scheduler.max_steps,
            until_step: record.until_step,
            world_size: job.spec.resources.workers,
            restarts: record.restarts,
            max_restarts: job.spec.fault_tolerance.max_restarts,
            submitted_at_ms: record.submitted_at_ms,
            finished_at_ms: record.finished_at_ms,
            latest: job.pointers.0.clone(),
            lowest_val: job.pointers.1.clone(),
            started_from: record.start.checkpoint.clone(),
            last_row: job.rows.last.as_ref().map(Into::into),
            first_row: job.rows.first.as_ref().map(Into::into),
            last_validation: job.rows.validation.as_ref().map(Into::into),
            ranks: ranks.collect(),
            last_save: job.last_save.clone(),
            commands: job.followers.commands.clone(),
        })
    }
}

fn phase(phase: &JobPhase) -> v1::JobPhase {
    match phase {
        JobPhase::Queued => v1::JobPhase::Queued,
        JobPhase::Held => v1::JobPhase::Held,
        JobPhase::Forming { .. } => v1::JobPhase::Forming,
        JobPhase::Running { .. } => v1::JobPhase::Running,
        JobPhase::Stopping { .. } => v1::JobPhase::Stopping,
        JobPhase::Suspended { .. } => v1::JobPhase::Suspended,
        JobPhase::Succeeded => v1::JobPhase::Succeeded,
        JobPhase::Failed { .. } => v1::JobPhase::Failed,
        JobPhase::Cancelled => v1::JobPhase::Cancelled,
    }
}
