//! Saves on their way to a commit.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_spec::JobId;
use trainctl_spec::report::{SaveKind, ShardReport};
use trainctl_spec::state::{JobEvent, JobPhase, StopReason};

use super::live::{Live, RankLive};
use super::{Core, Effect, Moment};
use crate::decide::commit::{Commit, decide_commit};
use crate::decide::restart::refill;
use crate::decide::saves::{Failure, OnFailure, after_commit, decide_failed_save};
use crate::events::Entry;
use crate::run_io::{AckToken, CommitRequest, Committed, IoRequest};

/// A file that is missing may only be late on a shared file system; after so many looks it is gone.
const MAX_REFUSALS: u32 = 5;

/// So many complete saves of a kind wait for their commit to be tried again: later ones supersede earlier ones. Not one, since
/// the store may refuse the newest for good.
const MAX_RETRIED: usize = 2;

/// Names a save of one generation. Weights that are saved apart are saves of their own: their reports never add up with those
/// of a checkpoint of the same step.
pub(super) type SaveKey = (SaveKind, u64);

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

    /// The store is at it: what comes of that is waited for.
    pub(super) fn is_committing(&self) -> bool {
        self.state == State::Committing
    }

    /// What each rank holds, in rank order, in hexadecimal.
    pub(super) fn held(&self) -> Vec<String> {
        let held = self.reports.values().map(|report| report.replica.map(|replica| format!("{:032x}", replica.held)));
        held.map(Option::unwrap_or_default).collect()
    }

    fn is_tried_again(&self) -> bool {
        matches!(self.state, State::RetryAt(_))
    }

    /// What it cost, over all ranks: the longest stall and the longest write.
    fn times(&self) -> (f64, f64) {
        let longest = |time: fn(&ShardReport) -> f64| self.reports.values().map(time).fold(0.0, f64::max);
        (longest(|report| report.stall_seconds), longest(|report| report.write_seconds))
    }
}

impl Live {
    /// What becomes of a save on a rank is settled.
    fn note_saved(&mut self, rank: u32, (kind, step): SaveKey) {
        if let Some(rank) = self.ranks.get_mut(rank as usize) {
            let newest = rank.saved.entry(kind).or_default();
            *newest = step.max(*newest);
        }
    }

    /// Whether some rank that has not reported a save never will: what becomes of it there is settled, or of a later one.
    fn never_complete(&self, (kind, step): SaveKey, has_reported: impl Fn(u32) -> bool) -> bool {
        let is_settled = |rank: &RankLive| rank.saved.get(&kind).is_some_and(|newest| *newest >= step);
        (0..).zip(&self.ranks).any(|(number, rank)| is_settled(rank) && !has_reported(number))
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
        if job.corrupt_from().is_some_and(|from| report.step >= from) {
            return token;
        }
        let Some(live) = job.live.as_mut().filter(|live| !live.decided) else { return token };
        let (key, world_size) = ((report.kind, report.step), live.ranks.len() as u32);
        live.note_saved(rank, key);
        // A later one of the generation is committed: this one is superseded, and its files are swept.
        let is_superseded = live.committed.get(&report.kind).is_some_and(|newest| report.step < *newest);
        let is_new = !live.saves.contains_key(&key);
        if is_superseded || is_new && live.never_complete(key, |other| other == rank) {
            self.drop_incomplete(id, out);
            return token;
        }
        let save = live.saves.entry(key).or_default();
        save.tokens.extend(token);
        if save.state != State::Collecting {
            return None;
        }
        save.reports.insert(rank, report);
        match decide_commit(world_size, &save.reports) {
            Commit::Wait { missing } => info!(job = %id, kind = ?key.0, step = key.1, ?missing, "save is not complete"),
            Commit::Now => self.commit(id, key, out),
            Commit::Refuse(why) => self.give_up_save(id, key, &why.to_string(), at, out),
            Commit::Diverged(divergence) => self.replicas_differ(id, key, &divergence, at, out),
        }
        self.drop_incomplete(id, out);
        None
    }

    /// Forgets saves that some rank has not written and never will: their workers need not keep the reports.
    fn drop_incomplete(&mut self, id: &JobId, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) else { return };
        let collecting = live.saves.iter().filter(|(_, save)| save.state == State::Collecting);
        let dead = collecting.filter(|(key, save)| live.never_complete(**key, |rank| save.reports.contains_key(&rank)));
        let dead: Vec<SaveKey> = dead.map(|(key, _)| *key).collect();
        for key in dead {
            info!(job = %id, kind = ?key.0, step = key.1, "save can never be complete");
            let tokens = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()?.saves.remove(&key));
            self.acknowledge(tokens.map(|save| save.tokens).unwrap_or_default(), out);
        }
    }

    pub(super) fn give_up_save(&mut self, id: &JobId, key: SaveKey, why: &str, at: Moment, out: &mut Vec<Effect>) {
        let step = key.1;
        warn!(job = %id, step, why, "save can never be committed");
        let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) else { return };
        live.gave_up = live.gave_up.take().max((key.0 == SaveKind::Full).then(|| (step, why.to_owned())));
        let tokens = live.saves.remove(&key).map(|save| save.tokens).unwrap_or_default();
        self.acknowledge(tokens, out);
        let entry = Entry::new("checkpoint_refused").step(step).with("save", name_of(key.0).into());
        self.event_row(id, entry.with("reason", why.into()), at, out);
        self.save_failed(id, key, 1, why, at, out);
    }

    /// A rank could not write its share of a save.
    pub(super) fn rank_failed_to_save(
        &mut self,
        id: &JobId,
        rank: u32,
        kind: SaveKind,
        failed: &v1::SaveFailed,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let v1::SaveFailed { step, error, attempt, tried_again, .. } = failed;
        let (key, attempt) = ((kind, *step), (*attempt).max(1));
        warn!(job = %id, rank, step, ?kind, attempt, error, "save failed");
        let entry = Entry::new("save_failed").rank(rank).step(*step).with("save", name_of(kind).into());
        let entry = entry.with("attempt", attempt.into()).with("tried_again", (*tried_again).into());
        self.event_row(id, entry.with("error", error.clone().into()), at, out);
        if let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) {
            if let Some(rank) = live.ranks.get_mut(rank as usize) {
                // A last save is tried until there is room: that is no hang.
                rank.moves_on(at.now);
            }
            if !tried_again {
                live.note_saved(rank, key);
            }
        }
        self.save_failed(id, key, attempt, &format!("rank {rank}: {error}"), at, out);
        self.drop_incomplete(id, out);
    }

    /// A rank left out a save.
    pub(super) fn rank_left_out_save(
        &mut self,
        id: &JobId,
        rank: u32,
        key @ (kind, step): SaveKey,
        reason: &str,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        info!(job = %id, rank, step, ?kind, reason, "save left out");
        let entry = Entry::new("save_skipped").rank(rank).step(step).with("save", name_of(kind).into());
        self.event_row(id, entry.with("reason", reason.into()), at, out);
        if let Some(job) = self.jobs.get_mut(id) {
            job.save_trouble.insert(kind, format!("{} was left out: {reason}", for_people(key)));
        }
        self.publish(id, out);
    }

    /// A save of the current generation failed. The run goes on on its last commit, unless the spec says that it must not.
    fn save_failed(
        &mut self,
        id: &JobId,
        key @ (kind, step): SaveKey,
        attempt: u32,
        why: &str,
        at: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = &job.live else { return };
        let generation = live.generation;
        let max = job.spec.checkpoint.max_failures;
        let under_way = live.saves.keys().filter(|(of, _)| *of == SaveKind::Full).map(|(_, step)| *step);
        let failure = Failure { kind, generation, step, attempt, error: why };
        let (decision, failed) = decide_failed_save(&job.record.failed_saves, &failure, under_way, max);
        let is_new = failed != job.record.failed_saves;
        job.record.failed_saves = failed;
        let trouble = |in_a_row: u32| match in_a_row {
            2.. if kind == SaveKind::Full => {
                format!("{in_a_row} saves in a row failed, the last one of step {step}: {why}")
            }
            _ => format!("{} failed: {why}", for_people(key)),
        };
        match decision {
            OnFailure::GoOn { in_a_row } => {
                job.save_trouble.insert(kind, trouble(in_a_row));
                if is_new {
                    self.journal(id, out);
                }
                self.publish(id, out);
            }
            OnFailure::Stop(cause) => {
                let reason = cause.to_string();
                self.apply(id, JobEvent::Stop { generation, why: StopReason::Fail { cause } }, at, out);
                self.event_row(id, Entry::new("generation_stopping").with("reason", reason.clone().into()), at, out);
                self.give_up_retries(id, at, out);
                self.stop_ranks(id, &reason, out);
            }
        }
    }

    /// The job is to end: what could not be committed so far will not be.
    pub(super) fn give_up_retries(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) else { return };
        let given_up: Vec<(SaveKey, Save)> = live.saves.extract_if(.., |_, save| save.is_tried_again()).collect();
        let full = given_up.iter().filter(|((kind, _), _)| *kind == SaveKind::Full).map(|((_, step), _)| *step);
        let reason = "the job stops before it could be committed";
        live.gave_up = live.gave_up.take().max(full.max().map(|step| (step, reason.to_owned())));
        self.refuse(id, given_up, reason, at, out);
    }

    /// Saves that will not be committed although they are complete.
    fn refuse(&mut self, id: &JobId, saves: Vec<(SaveKey, Save)>, reason: &str, at: Moment, out: &mut Vec<Effect>) {
        for ((kind, step), save) in saves {
            self.acknowledge(save.tokens, out);
            let entry = Entry::new("checkpoint_refused").step(step).with("save", name_of(kind).into());
            self.event_row(id, entry.with("reason", reason.into()), at, out);
        }
    }

    /// Of the saves of a kind that are tried again the newest stay.
    fn supersede_retried(&mut self, id: &JobId, kind: SaveKind, at: Moment, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) else { return };
        let retried = live.saves.iter().filter(|((of, _), save)| *of == kind && save.is_tried_again());
        let Some(oldest) = retried.map(|(key, _)| *key).rev().nth(MAX_RETRIED - 1) else { return };
        let is_older = |key: &SaveKey, save: &Save| key.0 == kind && *key < oldest && save.is_tried_again();
        let superseded: Vec<(SaveKey, Save)> = live.saves.extract_if(.., |key, save| is_older(key, save)).collect();
        self.refuse(id, superseded, "later saves wait for their commit", at, out);
    }

    fn commit(&mut self, id: &JobId, key: SaveKey, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(live) = job.live.as_mut() else { return };
        let world_size = live.ranks.len() as u32;
        let Some(save) = live.saves.get_mut(&key) else { return };
        save.state = State::Committing;
        let request = CommitRequest {
            generation: live.generation,
            kind: key.0,
            step: key.1,
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
        let key @ (kind, step) = (committed.kind, committed.step);
        let info = match committed.outcome {
            Ok(info) => info,
            Err(error) => {
                let Some(save) = live.saves.get_mut(&key) else { return };
                save.refusals += u32::from(error.refused);
                if save.refusals >= MAX_REFUSALS {
                    return self.give_up_save(id, key, &error.reason, at, out);
                }
                save.state = State::RetryAt(at.now + self.policy.commit_retry);
                let error = error.reason;
                warn!(job = %id, step, error, "commit failed: trying again");
                let entry = Entry::new("checkpoint_failed").step(step).with("save", name_of(kind).into());
                self.event_row(id, entry.with("error", error.clone().into()), at, out);
                self.save_failed(id, key, 1, &format!("commit: {error}"), at, out);
                self.supersede_retried(id, kind, at, out);
                if self.jobs.get(id).is_some_and(|job| ends_now(&job.record.phase)) {
                    self.give_up_retries(id, at, out);
                }
                return;
            }
        };
        let (stall_seconds, write_seconds) = live.saves.get(&key).map(Save::times).unwrap_or_default();
        // An earlier save of the kind is superseded by this one, and retention has swept its files.
        let done: Vec<(SaveKey, Save)> = live.saves.extract_if(..=key, |(of, _), _| *of == kind).collect();
        let tokens = done.into_iter().flat_map(|(_, save)| save.tokens).collect();
        let newest = live.committed.entry(kind).or_default();
        *newest = step.max(*newest);
        job.record.failed_saves = after_commit(&job.record.failed_saves, kind, committed.generation, step);
        job.save_trouble.remove(&kind);
        let (latest, lowest_val) = info.pointers.clone();
        if kind == SaveKind::Full {
            job.record.budget = refill(&job.record.budget, step);
            job.pointers = info.pointers;
        }
        job.last_save = Some(v1::SaveSummary {
            checkpoint: info.checkpoint.clone(),
            kind: v1::SaveKind::from(kind).into(),
            step,
            bytes: info.bytes,
            stall_seconds,
            write_seconds,
            commit_seconds: info.commit_seconds,
        });
        info!(job = %id, step, checkpoint = %info.checkpoint, kind = name_of(kind), "committed");
        self.journal(id, out);
        self.acknowledge(tokens, out);
        let entry = Entry::new("checkpoint_committed").step(step).with("checkpoint", info.checkpoint.clone().into());
        let entry = entry.with("save", name_of(kind).into()).with("state_hash", info.state_hash.into());
        let entry = entry.with("bytes", info.bytes.into()).with("stall_seconds", stall_seconds.into());
        let entry = entry.with("write_seconds", write_seconds.into());
        self.event_row(id, entry.with("commit_seconds", info.commit_seconds.into()), at, out);
        // By what they name: a save that was committed before moves nothing now, and a pointer may move elsewhere.
        let named = [("LATEST", &latest), ("LOWEST_VAL", &lowest_val)];
        let moved = named.into_iter().filter(|(_, to)| kind == SaveKind::Full && **to == info.checkpoint);
        let moved = moved.map(|(pointer, _)| pointer.to_owned()).collect();
        self.changed(id, kind, info.changes, Some(step), at, out);
        self.after_commit(id, kind, &info.checkpoint, moved, out);
        self.publish(id, out);
        self.evict_after_commit(id, kind, at, out);
    }

    /// Tries failed commits again when their pause is over.
    pub(super) fn retry_commits(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get(id).and_then(|job| job.live.as_ref()) else { return };
        let due = |save: &Save| matches!(save.state, State::RetryAt(when) if when <= at.now);
        let due: Vec<SaveKey> = live.saves.iter().filter(|(_, save)| due(save)).map(|(key, _)| *key).collect();
        for key in due {
            self.commit(id, key, out);
        }
    }
}

fn for_people((kind, step): SaveKey) -> String {
    match kind {
        SaveKind::Full => format!("the save of step {step}"),
        SaveKind::Weights => format!("the save of the weights of step {step}"),
    }
}

/// The job waits for no save any more.
pub(super) fn ends_now(phase: &JobPhase) -> bool {
    let JobPhase::Stopping { why, .. } = phase else { return false };
    matches!(why, StopReason::Cancel { save: false } | StopReason::Fail { .. })
}

/// A save's kind as `events.jsonl` has it.
pub(super) fn name_of(kind: SaveKind) -> &'static str {
    match kind {
        SaveKind::Full => "full",
        SaveKind::Weights => "weights",
    }
}
