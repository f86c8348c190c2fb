//! From a job that waits to a generation whose trainers start.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_spec::JobId;
use trainctl_spec::state::{Cause, JobEvent, JobPhase, StopReason};

use super::saves::name_of;
use super::{Core, Effect, Live, Moment, StoreChange};
use crate::decide::admission::Refusal;
use crate::decide::placement::{Candidate, Placement, decide_placement};
use crate::events::Entry;
use crate::record::RankPlace;
use crate::run_io::{IoRequest, PrepareRequest, Prepared};

impl Core {
    /// Starts the next formation of a job that wants one, when there are workers for it.
    pub(super) fn form_if_ready(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let restarting = matches!(job.record.phase, JobPhase::Stopping { why: StopReason::Restart { .. }, .. })
            && job.live.as_ref().is_some_and(|live| live.decided);
        let waiting = matches!(job.record.phase, JobPhase::Queued | JobPhase::Suspended { .. });
        // A job that has done its work and died before it could say so may be waiting for its last export.
        if !(restarting || waiting) || job.preparing || at.now < job.form_after || job.followers.is_last {
            return;
        }
        match self.place(id, self.candidates(at.now)) {
            Placement::Wait { missing } => self.wait_for_workers(id, missing, restarting, at, out),
            Placement::Place(placed) => {
                if !self.have_proved(id, &placed, at, out) {
                    return;
                }
                let Some(job) = self.jobs.get_mut(id) else { return };
                job.preparing = true;
                job.waiting.clear();
                let request = PrepareRequest { from: job.record.from.clone() };
                self.io(id, IoRequest::Prepare(request), out);
            }
        }
    }

    fn place(&self, id: &JobId, candidates: Vec<Candidate>) -> Placement {
        let Some(job) = self.jobs.get(id) else { return Placement::Wait { missing: 1 } };
        let before: Vec<String> = job.record.ranks.iter().map(|place| place.worker.clone()).collect();
        decide_placement(job.spec.resources.workers as usize, &before, &job.record.avoided, &candidates)
    }

    fn wait_for_workers(&mut self, id: &JobId, missing: usize, restarting: bool, at: Moment, out: &mut Vec<Effect>) {
        let hindered = self.admitted_as(at.now, Err(Refusal::Quarantined));
        let hindered: Vec<String> = hindered.into_iter().map(|candidate| candidate.worker).collect();
        let Some(job) = self.jobs.get_mut(id) else { return };
        let need = job.spec.resources.workers;
        // They are named where they are what is missing.
        let quarantined = Some(hindered).filter(|names| names.len() >= missing).unwrap_or_default();
        let cause = Cause::WaitingForWorkers { have: need.saturating_sub(missing as u32), need, quarantined };
        let text = cause.to_string();
        if job.waiting == text {
            return;
        }
        job.waiting = text;
        match &mut job.record.phase {
            JobPhase::Suspended { cause: shown } => *shown = cause,
            _ if restarting => self.apply(id, JobEvent::Suspend(cause), at, out),
            _ => {}
        }
        self.publish(id, out);
    }

    /// The run directory is ready for a generation: its number is taken, its start is known, later commits are retired.
    pub(super) fn prepared(
        &mut self,
        id: &JobId,
        prepared: Result<Prepared, Cause>,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.preparing = false;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            // A full disk or a file system that is away is waited out, as for commits.
            Err(cause @ Cause::Storage { .. }) => {
                job.form_after = at.now + self.policy.prepare_retry;
                job.waiting = cause.to_string();
                warn!(job = %id, %cause, "the run directory cannot be made ready: trying again");
                let entry = Entry::new("prepare_failed").with("error", cause.to_string().into());
                self.event_row(id, entry, at, out);
                return self.publish(id, out);
            }
            Err(cause) => return self.fail(id, cause, at, out),
        };
        job.pointers = prepared.pointers;
        job.is_known = true;
        // Later commits than the start are retired: from now on the newest one is the start.
        job.record.from = String::new();
        for (kind, name) in prepared.retired {
            let entry = Entry::new("checkpoint_retired").step(name.step).with("save", name_of(kind).into());
            self.event_row(id, entry.with("checkpoint", name.to_string().into()), at, out);
        }
        for note in prepared.notes {
            self.event_row(id, Entry::new("note").with("message", note.into()), at, out);
        }
        let Some(job) = self.jobs.get(id) else { return };
        if job.record.phase.is_terminal()
            || matches!(job.record.phase, JobPhase::Stopping { why: StopReason::Cancel { .. }, .. })
        {
            return;
        }
        if prepared.start.step >= job.stop_at() && job.live.is_some() {
            return self.done_already(id, at, out);
        }
        // Whoever joined meanwhile has not proved itself.
        let Placement::Place(placed) = self.place(id, self.proven(id, self.candidates(at.now))) else { return };
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.record.generation = prepared.generation;
        job.record.start = prepared.start;
        job.record.ranks = placed
            .iter()
            .map(|c| RankPlace {
                worker: c.worker.clone(),
                incarnation: self.workers.get(&c.worker).map(|w| w.incarnation.clone()).unwrap_or_default(),
            })
            .collect();
        info!(job = %id, generation = %prepared.generation, start = ?job.record.start, "forming");
        let burn_in = self.burn_in_due(id, &placed);
        let starts = self.starts(id, &placed, burn_in);
        let mut left = Vec::new();
        if let Some(job) = self.jobs.get_mut(id) {
            job.record.decided = false;
            let live = job.live.replace(Live::assigned(prepared.generation, starts.clone(), burn_in, at.now));
            left = live.map(Live::into_tokens).unwrap_or_default();
        }
        self.apply(id, JobEvent::Form(prepared.generation), at, out);
        self.acknowledge(left, out);
        let (job, generation) = (id.clone(), prepared.generation);
        out.push(Effect::Rendezvous { job, generation, change: StoreChange::Open });
        let entry = Entry::new("generation_forming").with("world_size", placed.len().into());
        let workers: Vec<String> = placed.iter().map(|c| c.worker.clone()).collect();
        self.event_row(id, entry.with("workers", workers.into()), at, out);
        for (worker, start) in starts {
            if let Some(session) = self.workers.get(&worker).and_then(|worker| worker.session) {
                out.push(Effect::Send { session, message: Box::new(Body::StartTrainer(start)) });
            }
        }
    }

    /// The last generation died after its last commit: there is nothing left to run.
    fn done_already(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let why = if job.record.until_step.is_some() { StopReason::UntilStep } else { StopReason::Complete };
        if why == StopReason::Complete && self.waits_for_export(id, out) {
            return;
        }
        let Some(job) = self.jobs.get(id) else { return };
        match job.record.phase.generation() {
            Some(generation) => {
                self.apply(id, JobEvent::Stop { generation, why }, at, out);
                self.apply(id, JobEvent::Stopped(generation), at, out);
            }
            // Suspended: it passes through a formation that starts nobody, since only `Stopped` leads to success.
            None => {
                let generation = job.record.generation;
                self.apply(id, JobEvent::Form(generation), at, out);
                self.apply(id, JobEvent::Stop { generation, why }, at, out);
                self.apply(id, JobEvent::Stopped(generation), at, out);
            }
        }
    }

    fn fail(&mut self, id: &JobId, cause: Cause, at: Moment, out: &mut Vec<Effect>) {
        match self.jobs.get(id).and_then(|job| job.record.phase.generation()) {
            Some(generation) => {
                self.apply(id, JobEvent::Stop { generation, why: StopReason::Fail { cause } }, at, out);
                self.apply(id, JobEvent::Stopped(generation), at, out);
            }
            None => self.apply(id, JobEvent::Fail(cause), at, out),
        }
    }

    /// The start command of each rank.
    fn starts(&mut self, id: &JobId, placed: &[Candidate], burn_in: Duration) -> Vec<(String, v1::StartTrainer)> {
        let ids: Vec<String> = (0..placed.len())
            .map(|rank| {
                let generation = self.jobs.get(id).map(|job| job.record.generation).unwrap_or_default();
                self.command_id("start", generation, rank as u32)
            })
            .collect();
        let Some(job) = self.jobs.get(id) else { return Vec::new() };
        let mut per_machine: BTreeMap<&str, u32> = BTreeMap::new();
        let local_ranks: Vec<u32> = placed
            .iter()
            .map(|c| {
                let count = per_machine.entry(&c.machine).or_default();
                *count += 1;
                *count - 1
            })
            .collect();
        let on_host = |machine: &str| -> Vec<u32> {
            (0..).zip(placed).filter(|(_, c)| c.machine == machine).map(|(rank, _)| rank).collect()
        };
        let record = &job.record;
        let start_from = (!record.start.checkpoint.is_empty()).then(|| v1::CheckpointRef {
            name: record.start.checkpoint.clone(),
            manifest_blake3: unhex(&record.start.manifest_blake3),
            store: record.start.store.clone(),
            keep_optimizer: record.start.keep.optimizer,
            keep_data: record.start.keep.data,
            keep_schedule: record.start.keep.schedule,
        });
        let assignment = |rank: usize, candidate: &Candidate| v1::Assignment {
            fence: Some(v1::Fence { job: id.0.clone(), generation: record.generation.0, term: record.term.0 }),
            rank: rank as u32,
            world_size: placed.len() as u32,
            local_rank: local_ranks[rank],
            local_world_size: per_machine.get(candidate.machine.as_str()).copied().unwrap_or(1),
            spec_yaml: record.spec_yaml.clone(),
            start_from: start_from.clone(),
            start_step: record.start.step,
            stop_at: job.stop_at(),
            threads: job.spec.resources.threads_per_worker.unwrap_or(1),
            address: self.workers.get(&candidate.worker).map(|w| w.address.clone()).unwrap_or_default(),
            phase: Some((&record.start.phase).into()),
            // The worker's to fill in.
            log: String::new(),
            page: String::new(),
            burn_in_ms: u32::try_from(burn_in.as_millis()).unwrap_or(u32::MAX),
            node_ranks: if burn_in.is_zero() { Vec::new() } else { on_host(&candidate.machine) },
        };
        let starts = placed.iter().enumerate().zip(ids).map(|((rank, candidate), command_id)| {
            let assignment = Some(assignment(rank, candidate));
            (candidate.worker.clone(), v1::StartTrainer { command_id, assignment })
        });
        starts.collect()
    }
}

impl super::Job {
    /// Steps done at which the job ends.
    pub fn stop_at(&self) -> u64 {
        let max = self.spec.step_scheduler.max_steps;
        self.record.until_step.map_or(max, |until| until.min(max))
    }
}

/// Bytes of a hexadecimal string; what is not hexadecimal has no bytes.
fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks_exact(2);
    digits.filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}
