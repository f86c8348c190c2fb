//! What ranks report, and what follows from it.

use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_proto::v1::rank_report::Report;
use trainctl_proto::{convert, v1};
use trainctl_spec::report::{BurnInReport, FinishCause, Phase, SaveKind, ShardReport, TrainRow, ValidationRow};
use trainctl_spec::state::{Cause, ExitClass, JobEvent, JobPhase, ProcessExit, StopReason, WhyLost};
use trainctl_spec::{Generation, JobId, Step};

use super::live::{Live, RankLive};
use super::saves::{Save, ends_now};
use super::{Core, Effect, Moment, StoreChange};
use crate::decide::deadlines::Stage;
use crate::decide::restart::{self, Restart, decide_restart};
use crate::decide::verdict::{Ending, How, decide_verdict};
use crate::events::{self, Entry};
use crate::run_io::{AckToken, IoRequest};

impl Core {
    /// What a trainer said, or its worker saw of it. Answers the token if nothing durable follows from the report.
    pub(super) fn rank_report(
        &mut self,
        worker: &str,
        report: v1::RankReport,
        token: Option<AckToken>,
        age: Duration,
        at: Moment,
        out: &mut Vec<Effect>,
    ) -> Option<AckToken> {
        let fence = report.fence.unwrap_or_default();
        let (id, generation, number) = (JobId(fence.job), Generation(fence.generation), report.rank);
        let Some(what) = report.report else { return token };
        if self.foreign.contains(&id) {
            // Whoever holds the job needs the record; it stays in the worker's spool.
            return None;
        }
        if let (Some(seen), Report::Exited(_)) = (self.workers.get_mut(worker), &what)
            && seen.running.as_ref() == Some(&(id.clone(), generation, number))
        {
            seen.running = None;
        }
        if shows_formed(&what)
            && let Some(rank) = self.reporter(&id, generation, number, worker).filter(|rank| !rank.formed)
        {
            // Its own word for it went with a stream that broke, and a trainer that has ended says it no more.
            rank.formed = true;
            self.formed_if_all(&id, at, out);
        }
        let Some(rank) = self.reporter(&id, generation, number, worker) else {
            info!(worker, job = %id, %generation, rank = number, "report of a generation that is not current: ignored");
            return token;
        };
        match what {
            Report::Started(started) => {
                rank.pid = started.pid;
                if let Some(seen) = self.workers.get_mut(worker) {
                    seen.running = Some((id.clone(), generation, number));
                }
                let entry = Entry::new("trainer_started").rank(number).with("pid", started.pid.into());
                self.event_row(&id, entry.with("worker", worker.into()), at, out);
                self.publish(&id, out);
            }
            Report::Phase(change) => {
                let left = rank.observe(Phase::try_from(change.phase()).ok(), None, at.now);
                self.learn(&id, number, left);
                self.publish(&id, out);
            }
            Report::TrainRow(row) => {
                return self.train_row(&id, convert::train_row(row, generation), token, out);
            }
            Report::ValidationRow(row) => match convert::validation_row(row, generation) {
                Ok(row) => return self.validation_row(&id, row, token, out),
                Err(error) => warn!(job = %id, rank = number, %error, "validation row refused"),
            },
            Report::Shards(shards) => {
                let (step, kind) = (shards.step, shards.kind());
                match ShardReport::try_from(shards) {
                    Ok(shards) => return self.shards(&id, number, shards, token, at, out),
                    Err(error) => {
                        let kind = if kind == v1::SaveKind::Weights { SaveKind::Weights } else { SaveKind::Full };
                        let why = format!("rank {number}: its report is not understood: {error}");
                        self.give_up_save(&id, (kind, step), &why, at, out);
                    }
                }
            }
            Report::Finished(finished) => {
                match FinishCause::try_from(finished.cause()) {
                    Ok(cause) => rank.finished = Some((cause, finished.steps_done)),
                    Err(error) => warn!(job = %id, rank = number, %error, "finish report refused"),
                }
                let left = rank.observe(Some(Phase::Finished), None, at.now);
                self.learn(&id, number, left);
                return self.keep_until_decided(&id, token);
            }
            Report::Formed(_) => {}
            Report::BurnIn(burn_in) => match BurnInReport::try_from(burn_in) {
                Ok(report) => self.burned_in(&id, number, report, at, out),
                Err(error) => warn!(job = %id, rank = number, %error, "report of a burn-in refused"),
            },
            Report::Stacks(stacks) => self.stacks(&id, number, &stacks, at, out),
            Report::SaveFailed(failed) => match SaveKind::try_from(failed.kind()) {
                Ok(kind) => self.rank_failed_to_save(&id, number, kind, &failed, at, out),
                Err(error) => warn!(job = %id, rank = number, %error, "report of a failed save refused"),
            },
            Report::SaveSkipped(skipped) => match SaveKind::try_from(skipped.kind()) {
                Ok(kind) => self.rank_left_out_save(&id, number, (kind, skipped.step), &skipped.reason, at, out),
                Err(error) => warn!(job = %id, rank = number, %error, "report of a skipped save refused"),
            },
            Report::Exited(exit) => {
                self.exited(&id, number, &exit, at.now.saturating_sub(age), at, out);
                return self.keep_until_decided(&id, token);
            }
        }
        token
    }

    /// The rank that a report is about, if it is that worker's in the current generation (J3).
    fn reporter(&mut self, id: &JobId, generation: Generation, number: u32, worker: &str) -> Option<&mut RankLive> {
        let job = self.jobs.get_mut(id).filter(|job| !job.record.phase.is_terminal())?;
        let live = job.live.as_mut().filter(|live| live.generation == generation)?;
        live.ranks.get_mut(number as usize).filter(|rank| rank.worker == worker)
    }

    /// Remembers how long rank 0 needed for the stage that it has left: later deadlines follow from it.
    pub(super) fn learn(&mut self, id: &JobId, rank: u32, left: Option<(Stage, Duration)>) {
        if let (Some(job), 0, Some((stage, took))) = (self.jobs.get_mut(id), rank, left) {
            // Most generations meet without a burn-in.
            let burn_in = job.live.as_ref().map(|live| live.burn_in).filter(|_| stage == Stage::Rendezvous);
            job.record.history.record(stage, took.saturating_sub(burn_in.unwrap_or_default()));
        }
    }

    /// A successor must learn of an ending too, until what follows from it is in the journal.
    fn keep_until_decided(&mut self, id: &JobId, token: Option<AckToken>) -> Option<AckToken> {
        match self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) {
            Some(live) if !live.decided => {
                live.tokens.extend(token);
                None
            }
            _ => token,
        }
    }

    fn exited(
        &mut self,
        id: &JobId,
        number: u32,
        exit: &v1::TrainerExit,
        when: Duration,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let stopping = matches!(job.record.phase, JobPhase::Stopping { .. });
        let Some(live) = job.live.as_mut() else { return };
        let Some(rank) = live.ranks.get_mut(number as usize).filter(|rank| rank.ended.is_none()) else { return };
        rank.observe(Phase::try_from(exit.phase()).ok(), exit.step, at.now);
        let seen = ProcessExit {
            code: exit.code,
            signal: exit.signal,
            core: exit.core,
            oom: exit.oom,
            stopped_by_us: exit.stopped_by_us,
        };
        // Whoever had finished is finished, however its process went afterwards.
        let class = ExitClass::of(&seen).with_last_words(&exit.stderr_tail);
        let class = if rank.finished.is_some() { ExitClass::Finished } else { class };
        // A stop that we did not ask for is the worker's own leave.
        let how = match class {
            ExitClass::StoppedByUs if !stopping => How::WorkerLost(WhyLost::Left),
            class => How::Exited(class),
        };
        rank.end(number, how, when, exit.stderr_tail.clone());
        let mut entry = Entry::new("trainer_exited").rank(number).with("class", class.to_string().into());
        if let Some(step) = rank.step {
            entry = entry.step(step);
        }
        entry = entry.with("code", exit.code.into()).with("signal", exit.signal.into()).with("core", exit.core.into());
        entry = entry.with("worker", rank.worker.clone().into()).with("age_ms", millis(at.now.saturating_sub(when)));
        entry = entry.with("stderr_tail", exit.stderr_tail.clone().into());
        self.event_row(id, entry, at, out);
    }

    /// Every rank is formed, and its device has proved itself where it must: the store is sealed and steps begin. A successor adopts
    /// what runs and does not judge it again.
    pub(super) fn formed_if_all(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let JobPhase::Forming { generation } = job.record.phase else { return };
        let ready = job.live.as_ref().is_some_and(|live| live.is_fit() && live.all(|rank| rank.formed));
        if !ready {
            return;
        }
        let from = Step(job.record.start.step);
        let (world, checkpoint) = (job.record.ranks.len(), job.record.start.checkpoint.clone());
        self.apply(id, JobEvent::Formed { generation, from }, at, out);
        out.push(Effect::Rendezvous { job: id.clone(), generation, change: StoreChange::Seal });
        self.tell_sealed(id, out);
        let entry = Entry::new("generation_formed").step(from.0).with("world_size", world.into());
        self.event_row(id, entry.with("started_from", checkpoint.into()), at, out);
    }

    /// Tells the trainers of a running generation that its rendezvous store is sealed.
    pub(super) fn tell_sealed(&mut self, id: &JobId, out: &mut Vec<Effect>) {
        let running = self.jobs.get(id).is_some_and(|job| matches!(job.record.phase, JobPhase::Running { .. }));
        if running {
            self.control(id, &v1::trainer_control::Request::Sealed(v1::Sealed {}), out);
        }
    }

    /// Asks every trainer to stop in band; one that hears it is enough.
    pub(super) fn ask_trainers_to_stop(&mut self, id: &JobId, out: &mut Vec<Effect>) {
        self.control(id, &v1::trainer_control::Request::Stop(v1::StopRequest {}), out);
    }

    pub(super) fn control(&mut self, id: &JobId, request: &v1::trainer_control::Request, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(live) = &job.live else { return };
        let fence = v1::Fence { job: id.0.clone(), generation: live.generation.0, term: job.record.term.0 };
        for rank in live.ranks.iter().filter(|rank| rank.ended.is_none()) {
            if let Some(session) = self.workers.get(&rank.worker).and_then(|worker| worker.session) {
                let control = v1::TrainerControl { fence: Some(fence.clone()), request: Some(*request) };
                out.push(Effect::Send { session, message: Box::new(Body::Control(control)) });
            }
        }
    }

    pub(super) fn stepped(&mut self, id: &JobId, rank: u32, step: u64, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        // Steps are far too many for the journal; the phase's step is for people and for the next formation's report.
        if let (JobPhase::Running { generation, .. }, 0) = (&job.record.phase, rank)
            && let Ok(phase) = job.record.phase.apply(JobEvent::Stepped { generation: *generation, done: Step(step) })
        {
            job.record.phase = phase;
        }
        let first = rank == 0 && job.live.as_mut().is_some_and(|live| !std::mem::replace(&mut live.stepped, true));
        if first {
            self.event_row(id, Entry::new("step_first").rank(rank).step(step), at, out);
        }
        if rank == 0 {
            self.publish(id, out);
        }
    }

    fn train_row(
        &mut self,
        id: &JobId,
        row: TrainRow,
        token: Option<AckToken>,
        out: &mut Vec<Effect>,
    ) -> Option<AckToken> {
        if let Some(job) = self.jobs.get_mut(id) {
            job.rows.first.get_or_insert_with(|| row.clone());
            job.rows.last = Some(row.clone());
        }
        self.io(id, IoRequest::TrainRow { row, token }, out);
        None
    }

    fn validation_row(
        &mut self,
        id: &JobId,
        row: ValidationRow,
        token: Option<AckToken>,
        out: &mut Vec<Effect>,
    ) -> Option<AckToken> {
        if let Some(job) = self.jobs.get_mut(id) {
            job.rows.validation = Some(row.clone());
        }
        self.io(id, IoRequest::ValidationRow { row, token }, out);
        None
    }

    /// Brings a generation that lost a rank, or that has done its work, to its end.
    pub(super) fn settle(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let (Some(live), false) = (&job.live, job.record.phase.is_terminal()) else { return };
        let is_known = job.is_known;
        if job.record.phase.generation() != Some(live.generation) {
            return;
        }
        if live.decided {
            // All its processes are gone; a person's word while it waited to form again ends it.
            let generation = live.generation;
            if let JobPhase::Stopping { why, .. } = &job.record.phase
                && is_known
                && !matches!(why, StopReason::Restart { .. })
            {
                self.apply(id, JobEvent::Stopped(generation), at, out);
            }
            return;
        }
        let broken = |rank: &RankLive| rank.ended.as_ref().is_some_and(|e| e.how != How::Exited(ExitClass::Finished));
        let stopping = matches!(job.record.phase, JobPhase::Stopping { .. });
        if live.ranks.iter().any(broken) {
            if !stopping {
                let (cause, _) = decide_verdict(&endings(live));
                self.stop_generation(id, cause, at, out);
            } else if !live.stop_sent {
                // A saving stop that lost a rank can save no more, and the others would wait for it.
                self.stop_ranks(id, "a rank was lost while the job was stopping", out);
            }
        }
        if is_known {
            self.conclude(id, at, out);
        }
    }

    /// Stops what is left of a generation: survivors are killed at once, their state is thrown away.
    pub(super) fn stop_generation(&mut self, id: &JobId, cause: Cause, at: Moment, out: &mut Vec<Effect>) {
        let Some(generation) = self.jobs.get(id).and_then(|job| job.record.phase.generation()) else { return };
        let reason = cause.to_string();
        self.apply(id, JobEvent::Stop { generation, why: StopReason::Restart { cause } }, at, out);
        self.event_row(id, Entry::new("generation_stopping").with("reason", reason.clone().into()), at, out);
        self.stop_ranks(id, &reason, out);
    }

    /// Ends the rendezvous and kills every trainer that may live.
    pub(super) fn stop_ranks(&mut self, id: &JobId, reason: &str, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut() else { return };
        live.stop_sent = true;
        let generation = live.generation;
        let fence = v1::Fence { job: id.0.clone(), generation: generation.0, term: job.record.term.0 };
        let alive: Vec<(u32, String)> = live
            .ranks
            .iter()
            .enumerate()
            .filter(|(_, rank)| rank.ended.is_none())
            .map(|(number, rank)| (number as u32, rank.worker.clone()))
            .collect();
        out.push(Effect::Rendezvous { job: id.clone(), generation, change: StoreChange::Close(reason.to_owned()) });
        for (number, worker) in alive {
            let command_id = self.command_id("stop", generation, number);
            if let Some(session) = self.workers.get(&worker).and_then(|worker| worker.session) {
                let stop = v1::StopTrainer { command_id, fence: Some(fence.clone()) };
                out.push(Effect::Send { session, message: Box::new(Body::StopTrainer(stop)) });
            }
        }
    }

    /// Every rank is accounted for and every commit is done: what comes next?
    fn conclude(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut() else { return };
        let generation = live.generation;
        if !live.all(|rank| rank.ended.is_some()) || live.saves.values().any(Save::may_commit) {
            return;
        }
        let finished = live.ranks.first().and_then(|rank| rank.finished).filter(|_| live.all(|r| r.finished.is_some()));
        let leaves_now = ends_now(&job.record.phase);
        let waits = match finished {
            Some(_) if leaves_now => false,
            Some((FinishCause::Complete, _)) => self.waits_for_export(id, out),
            Some((FinishCause::UntilStep | FinishCause::Stopped, _)) => job.followers.is_exporting(),
            None => false,
        };
        if waits {
            return;
        }
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut() else { return };
        // What is left can never be complete: no rank will report any more.
        let saves = std::mem::take(&mut live.saves).into_values().flat_map(|save| save.tokens);
        let left: Vec<AckToken> = saves.chain(std::mem::take(&mut live.tokens)).collect();
        let endings = endings(live);
        let reached = live.ranks.iter().filter_map(|rank| rank.step).max();
        let lost_end = live.lost_end();
        let start = job.record.start.step;
        // Work that is done stays done, unless its last checkpoint will never exist.
        let is_done =
            lost_end.is_none() && !matches!(job.record.phase, JobPhase::Stopping { why: StopReason::Fail { .. }, .. });
        if let Some((cause, _)) = finished.filter(|_| is_done) {
            let why = match cause {
                FinishCause::Complete => StopReason::Complete,
                FinishCause::UntilStep => StopReason::UntilStep,
                FinishCause::Stopped => StopReason::Cancel { save: true },
            };
            self.apply(id, JobEvent::Stop { generation, why }, at, out);
        }
        let change = StoreChange::Close("the generation is over".to_owned());
        out.push(Effect::Rendezvous { job: id.clone(), generation, change });
        match self.jobs.get(id).map(|job| job.record.phase.clone()) {
            Some(JobPhase::Stopping { why: StopReason::Restart { cause }, .. }) => {
                let by_ranks = cause.is_charged() || cause.is_store_away();
                let (cause, step) = match cause {
                    // Whoever was stopped for it knows less.
                    Cause::Hung { .. } => (cause, reached),
                    Cause::Corrupt { step, .. } => (cause, Some(step)),
                    // No step was done. Where the budget counts it, the start's tells whether the run has come further since.
                    Cause::BurnIn { named, .. } => (cause, Some(start).filter(|_| !named)),
                    _ if by_ranks => decide_verdict(&endings),
                    _ => (cause, None),
                };
                self.restart_or_fail(id, cause, step, at, out);
            }
            Some(JobPhase::Stopping { .. }) => self.apply(id, JobEvent::Stopped(generation), at, out),
            _ => {
                // The step counts: without it any commit would pay for a failure that comes again and again (J5).
                let (cause, step) = match (finished, lost_end) {
                    (Some(_), Some((step, why))) => {
                        let message = format!("the last save, of step {step}, could not become a checkpoint: {why}");
                        (Cause::Storage { message }, Some(step))
                    }
                    _ => {
                        let message = "every rank has ended, but not every one said that it had finished".to_owned();
                        (Cause::Unknown { message }, reached)
                    }
                };
                self.stop_generation(id, cause.clone(), at, out);
                self.restart_or_fail(id, cause, step, at, out);
            }
        }
        // Only now: what follows from these endings is journaled.
        self.acknowledge(left, out);
    }

    fn restart_or_fail(&mut self, id: &JobId, cause: Cause, step: Option<u64>, at: Moment, out: &mut Vec<Effect>) {
        let jitter = self.jitter();
        let Some(job) = self.jobs.get_mut(id) else { return };
        let policy = restart::Policy::new(job.spec.fault_tolerance.max_restarts);
        let (decision, budget) = decide_restart(&job.record.budget, &cause, step, jitter, &policy);
        let generation = job.record.generation;
        job.record.budget = budget;
        job.record.decided = true;
        if let Some(live) = job.live.as_mut() {
            live.decided = true;
        }
        match decision {
            Restart::After(delay) => {
                warn!(job = %id, %generation, %cause, ?delay, "generation lost: restarting");
                job.record.restarts += u32::from(cause.is_charged());
                job.record.phase = JobPhase::Stopping { generation, why: StopReason::Restart { cause: cause.clone() } };
                job.form_after = at.now + delay;
                self.journal(id, out);
                let mut entry = Entry::new("generation_lost").with("cause", cause.to_string().into());
                if let Some(step) = step {
                    entry = entry.step(step);
                }
                entry = entry.with("delay_ms", millis(delay)).with("verdict", events::verdict(&cause));
                self.event_row(id, entry, at, out);
                self.publish(id, out);
            }
            Restart::GiveUp(cause) => {
                self.apply(id, JobEvent::Stop { generation, why: StopReason::Fail { cause } }, at, out);
                self.apply(id, JobEvent::Stopped(generation), at, out);
            }
        }
    }
}

pub(super) fn millis(time: Duration) -> serde_json::Value {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).into()
}

fn endings(live: &Live) -> Vec<Ending> {
    live.ranks.iter().filter_map(|rank| rank.ended.clone()).collect()
}

/// Whether only a rank whose process groups are made can say that.
fn shows_formed(report: &Report) -> bool {
    match report {
        Report::Formed(_)
        | Report::TrainRow(_)
        | Report::ValidationRow(_)
        | Report::Shards(_)
        | Report::SaveFailed(_)
        | Report::SaveSkipped(_)
        | Report::Finished(_) => true,
        Report::Started(_) | Report::Phase(_) | Report::BurnIn(_) | Report::Stacks(_) | Report::Exited(_) => false,
    }
}
