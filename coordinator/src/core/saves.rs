//! Saves on their way to a commit.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_spec::JobId;
use trainctl_spec::report::ShardReport;

use super::{Core, Effect, Moment};
use crate::decide::commit::{Commit, decide_commit};
use crate::decide::restart::refill;
use crate::events::Entry;
use crate::run_io::{AckToken, CommitRequest, Committed, IoRequest};

/// A file that is missing may only be late on a shared file system; after so many looks it is gone.
const MAX_REFUSALS: u32 = 5;

/// One step's save, until its manifest exists.
#[derive(Debug, Default)]
pub(super) struct Save {
    reports: BTreeMap<u32, ShardReport>,
    /// Reports that their workers keep until the commit.
    pub(super) tokens: Vec<AckToken>,
    /// How often the store said that it can not be a checkpoint.
    refusals: u32,
    state: State,
}

#[derive(Debug, Default, PartialEq)]
enum State {
    /// Not every rank has reported.
    #[default]
    Collecting,
    /// The run directory's task is at it.
    Committing,
    /// It failed and is tried again.
    RetryAt(Duration),
}

impl Save {
    /// Every rank has reported: it will be a commit unless the store refuses for good.
    pub(super) fn may_commit(&self) -> bool {
        self.state != State::Collecting
    }
}

impl Core {
    /// A rank's shards are durable. Its worker keeps the report until the commit: a coordinator that comes after us must be
    /// able to make it.
    pub(super) fn shards(
        &mut self,
        id: &JobId,
        rank: u32,
        report: ShardReport,
        token: Option<AckToken>,
        at: Moment,
        out: &mut Vec<Effect>,
    ) -> Option<AckToken> {
        let Some(job) = self.jobs.get_mut(id) else { return token };
        let Some(live) = job.live.as_mut().filter(|live| !live.decided) else { return token };
        let (step, world_size) = (report.step, live.ranks.len() as u32);
        let save = live.saves.entry(step).or_default();
        save.tokens.extend(token);
        if save.state != State::Collecting {
            return None;
        }
        save.reports.insert(rank, report);
        match decide_commit(world_size, &save.reports) {
            Commit::Wait { missing } => info!(job = %id, step, ?missing, "save is not complete"),
            Commit::Now => self.commit(id, step, out),
            Commit::Refuse(why) => self.give_up_save(id, step, &why.to_string(), at, out),
        }
        None
    }

    fn give_up_save(&mut self, id: &JobId, step: u64, why: &str, at: Moment, out: &mut Vec<Effect>) {
        warn!(job = %id, step, why, "save can never be committed");
        let live = self.jobs.get_mut(id).and_then(|job| job.live.as_mut());
        let tokens = live.and_then(|live| live.saves.remove(&step)).map(|save| save.tokens).unwrap_or_default();
        self.acknowledge(tokens, out);
        self.event_row(id, Entry::new("checkpoint_refused").step(step).with("reason", why.into()), at, out);
    }

    fn commit(&mut self, id: &JobId, step: u64, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut() else { return };
        let world_size = live.ranks.len() as u32;
        let Some(save) = live.saves.get_mut(&step) else { return };
        save.state = State::Committing;
        let request = CommitRequest {
            generation: live.generation,
            step,
            world_size,
            reports: save.reports.clone(),
            started_from: job.record.start.clone(),
            until_step: job.record.until_step,
        };
        self.io(id, IoRequest::Commit(Box::new(request)), out);
    }

    /// The run directory's task has committed, or failed to.
    pub(super) fn committed(&mut self, id: &JobId, committed: Committed, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let live = job.live.as_mut().filter(|live| live.generation == committed.generation);
        let Some(live) = live else { return };
        let step = committed.step;
        let info = match committed.outcome {
            Ok(info) => info,
            Err(error) => {
                let Some(save) = live.saves.get_mut(&step) else { return };
                save.refusals += u32::from(error.refused);
                if save.refusals >= MAX_REFUSALS {
                    return self.give_up_save(id, step, &error.reason, at, out);
                }
                save.state = State::RetryAt(at.now + self.policy.commit_retry);
                let error = error.reason;
                warn!(job = %id, step, error, "commit failed: trying again");
                job.waiting = format!("commit of step {step} failed: {error}");
                let entry = Entry::new("checkpoint_failed").step(step).with("error", error.into());
                self.event_row(id, entry, at, out);
                self.publish(id, out);
                return;
            }
        };
        // An earlier save is superseded by this one, and retention has swept its files.
        let later = live.saves.split_off(&(step + 1));
        let done = std::mem::replace(&mut live.saves, later);
        let tokens = done.into_values().flat_map(|save| save.tokens).collect();
        job.record.budget = refill(&job.record.budget, step);
        job.pointers = info.pointers;
        job.waiting.clear();
        info!(job = %id, step, checkpoint = %info.checkpoint, "committed");
        self.journal(id, out);
        self.acknowledge(tokens, out);
        let entry = Entry::new("checkpoint_committed").step(step).with("checkpoint", info.checkpoint.into());
        self.event_row(id, entry.with("state_hash", info.state_hash.into()), at, out);
        for (pointer, from, to) in info.moves {
            let entry = Entry::new("pointer_moved").step(step).with("pointer", pointer.into());
            self.event_row(id, entry.with("from", from.into()).with("to", to.into()), at, out);
        }
        for name in info.pruned {
            self.event_row(id, Entry::new("checkpoint_pruned").with("checkpoint", name.into()), at, out);
        }
        self.publish(id, out);
    }

    /// Tries failed commits again when their pause is over.
    pub(super) fn retry_commits(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get(id).and_then(|job| job.live.as_ref()) else { return };
        let due = |save: &Save| matches!(save.state, State::RetryAt(when) if when <= at.now);
        let steps: Vec<u64> = live.saves.iter().filter(|(_, save)| due(save)).map(|(step, _)| *step).collect();
        for step in steps {
            self.commit(id, step, out);
        }
    }
}
