//! A run that stands still: found, its stacks asked for, and only then stopped.

use std::collections::BTreeSet;
use std::time::Duration;

use tracing::{info, warn};
use trainctl_proto::v1;
use trainctl_proto::v1::coordinator_message::Body;
use trainctl_spec::state::{Cause, JobPhase, StopReason};
use trainctl_spec::{JobId, Rank};

use super::live::{Live, RankLive};
use super::ranks::millis;
use super::{Core, Effect, Moment};
use crate::decide::deadlines::{Hang, Seen, Stage, Why, deadline, decide_hang};
use crate::events::Entry;

/// How long workers may take to say what the threads of a hung run do. A trainer that does not answer costs its worker 4 s.
const DUMP_LIMIT: Duration = Duration::from_secs(15);
/// Frames of the rank to blame that its event shows.
const FRAMES: usize = 16;

/// Stacks that are being waited for.
#[derive(Debug)]
pub(super) struct Dumping {
    hang: Hang,
    asked_at: Duration,
    /// Ranks that have not answered.
    waiting: BTreeSet<u32>,
    /// How many of them had moved when the hang was found.
    moves: u64,
}

impl Core {
    /// Looks whether a job stands still, and goes on with one that does.
    pub(super) fn judge_progress(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(live) = job.live.as_ref().filter(|live| live.may_hang(&job.record.phase)) else { return };
        if live.dumping.is_some() {
            return self.dumped(id, at, out);
        }
        let limits = &job.spec.fault_tolerance.hang;
        if !limits.enabled {
            return;
        }
        let is_heard = |rank: &&RankLive| self.workers.get(&rank.worker).is_some_and(|w| w.session.is_some());
        if !live.ranks.iter().filter(|rank| rank.ended.is_none()).all(|rank| is_heard(&rank)) {
            // Unreachable is not hung: its lease decides (J6).
            return;
        }
        let seen: Vec<Seen> = live.seen(at.now);
        let collective = Duration::try_from_secs_f64(job.spec.dist_env.timeout_minutes * 60.0).unwrap_or(Duration::MAX);
        let burn_in = live.burn_in;
        let found = decide_hang(&seen, |stage| deadline(stage, &job.record.history, limits, collective, burn_in));
        if let Some(hang) = found {
            self.ask_for_stacks(id, hang, at, out);
        }
    }

    fn ask_for_stacks(&mut self, id: &JobId, hang: Hang, at: Moment, out: &mut Vec<Effect>) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let term = job.record.term.0;
        let Some(live) = job.live.as_mut() else { return };
        warn!(job = %id, ?hang, "the run stands still: asking for stacks");
        let fence = v1::Fence { job: id.0.clone(), generation: live.generation.0, term };
        let mut waiting = BTreeSet::new();
        for (number, rank) in live.ranks.iter().enumerate().filter(|(_, rank)| rank.ended.is_none() && rank.pid != 0) {
            if let Some(session) = self.workers.get(&rank.worker).and_then(|worker| worker.session) {
                waiting.insert(number as u32);
                let dump = v1::DumpStacks { fence: Some(fence.clone()) };
                out.push(Effect::Send { session, message: Box::new(Body::DumpStacks(dump)) });
            }
        }
        let mut entry = Entry::new("hang_detected");
        if let Some(rank) = hang.rank {
            entry = entry.rank(rank);
        }
        if let Some(step) = live.ranks.iter().filter_map(|rank| rank.step).min() {
            entry = entry.step(step);
        }
        entry = entry.with("stage", serde_json::to_value(hang.stage).unwrap_or_default());
        entry = entry.with("stands_ms", millis(hang.stands)).with("deadline_ms", millis(hang.deadline));
        entry = entry.with("why", why(&hang).into()).with("collective", hang.collective.clone().into());
        entry = entry.with("waiting", hang.waiting.into());
        live.dumping = Some(Dumping { hang, asked_at: at.now, waiting, moves: live.moves() });
        self.event_row(id, entry, at, out);
        self.judge_progress(id, at, out);
    }

    /// A worker says what the threads of its trainer do.
    pub(super) fn stacks(&mut self, id: &JobId, number: u32, stacks: &v1::Stacks, at: Moment, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) else { return };
        if let Some(dumping) = &mut live.dumping {
            dumping.waiting.remove(&number);
        }
        let shown = |thread: &v1::ThreadStack| {
            let frames = &thread.frames[..thread.frames.len().min(FRAMES)];
            serde_json::json!({"thread": thread.name, "state": thread.state, "frames": frames})
        };
        let threads: Vec<serde_json::Value> = stacks.threads.iter().map(shown).collect();
        let mut entry = Entry::new("stacks").rank(number).with("path", stacks.path.clone().into());
        if !stacks.flight_record_path.is_empty() {
            entry = entry.with("collectives_path", stacks.flight_record_path.clone().into());
        }
        self.event_row(id, entry.with("threads", threads.into()), at, out);
        self.judge_progress(id, at, out);
    }

    /// All stacks are there, or will not come: stops the run, unless it went on meanwhile.
    fn dumped(&mut self, id: &JobId, at: Moment, out: &mut Vec<Effect>) {
        let Some(live) = self.jobs.get_mut(id).and_then(|job| job.live.as_mut()) else { return };
        let moves = live.moves();
        let Some(Dumping { hang, .. }) = live
            .dumping
            .take_if(|dumping| dumping.waiting.is_empty() || at.now.saturating_sub(dumping.asked_at) > DUMP_LIMIT)
            .filter(|dumping| {
                let goes_on = moves > dumping.moves;
                if goes_on {
                    info!(job = %id, "the run goes on by itself: it was no hang");
                }
                !goes_on
            })
        else {
            if live.dumping.is_none() {
                self.event_row(id, Entry::new("hang_over"), at, out);
            }
            return;
        };
        let phase = live.phase_of(hang.rank);
        let cause = Cause::Hung {
            rank: hang.rank.map(Rank),
            phase,
            seconds: hang.stands.as_secs(),
            collective: hang.collective,
            waiting: hang.waiting,
        };
        let stopping = self.jobs.get(id).is_some_and(|job| {
            matches!(&job.record.phase, JobPhase::Stopping { why, .. } if !matches!(why, StopReason::Restart { .. }))
        });
        if stopping {
            // A person's stop, or the end of the run: there is nothing to restart, but the trainers must go.
            self.stop_ranks(id, &cause.to_string(), out);
        } else {
            self.stop_generation(id, cause, at, out);
        }
    }
}

fn why(hang: &Hang) -> &'static str {
    match hang.why {
        Why::NotArrived => "it did not arrive in the collective that the others wait in",
        Why::Behind => "it has come less far than the others",
        Why::Frozen => "its process is frozen",
        Why::Alone => "it is the only rank",
        Why::AllInside => "every rank waits in the same collective",
        Why::AllOutside => "every rank stands outside of collectives",
    }
}

impl Live {
    /// Whether its ranks are to make progress.
    fn may_hang(&self, phase: &JobPhase) -> bool {
        !self.decided && !self.stop_sent && !phase.is_terminal() && phase.generation() == Some(self.generation)
    }

    fn moves(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.moves).sum()
    }

    fn seen(&self, now: Duration) -> Vec<Seen> {
        let there = self.ranks.iter().enumerate().filter(|(_, rank)| rank.ended.is_none());
        there
            .map(|(number, rank)| Seen {
                rank: number as u32,
                stage: Stage::of(rank.phase, rank.step.is_some()),
                stands: now.saturating_sub(rank.since),
                progress: rank.progress.clone(),
                silent: rank.silent,
            })
            .collect()
    }

    /// What the rank to blame is at, else the first one.
    fn phase_of(&self, rank: Option<u32>) -> trainctl_spec::report::Phase {
        let blamed = rank.and_then(|rank| self.ranks.get(rank as usize)).or(self.ranks.first());
        blamed.map_or(trainctl_spec::report::Phase::Stepping, |rank| rank.phase)
    }
}
