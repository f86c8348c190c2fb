//! What is seen of a generation and its ranks.

use std::collections::BTreeMap;
use std::time::Duration;

use trainctl_proto::v1;
use trainctl_spec::Generation;
use trainctl_spec::report::{BurnInReport, FinishCause, Phase, SaveKind};
use trainctl_spec::state::JobPhase;

use super::hang::Dumping;
use super::saves::{Save, SaveKey};
use crate::decide::deadlines::Stage;
use crate::decide::stragglers::{Judged, Window};
use crate::decide::verdict::{Ending, How};
use crate::record::JobRecord;
use crate::run_io::AckToken;

/// The current generation as seen.
#[derive(Debug)]
pub struct Live {
    /// Its number.
    pub generation: Generation,
    /// Its ranks, in order.
    pub ranks: Vec<RankLive>,
    /// Saves whose commit is not done.
    pub(super) saves: BTreeMap<SaveKey, Save>,
    /// The highest zero-based step that this generation has committed, by kind.
    pub(super) committed: BTreeMap<SaveKind, u64>,
    /// Rank 0 has reported its first step.
    pub(super) stepped: bool,
    /// Endings that their workers keep until what follows from them is journaled.
    pub(super) tokens: Vec<AckToken>,
    /// What is left of it was told to stop.
    pub(super) stop_sent: bool,
    /// What comes after its end was decided and journaled.
    pub(super) decided: bool,
    /// It stands still, and its workers are asked what its threads do.
    pub(super) dumping: Option<Dumping>,
    /// The highest zero-based step whose full save was given up, and why: unless a later one is committed, its work is not done.
    pub(super) gave_up: Option<(u64, String)>,
    /// The zero-based step whose save has shown that replicas differ: no save from it on is committed.
    pub(super) corrupt_from: Option<u64>,
    /// How long its ranks burn in before they are formed; zero = not at all.
    pub(super) burn_in: Duration,
    /// All of them have passed it.
    pub(super) burnt_in: bool,
    /// Who has said what came of it, until all have.
    pub(super) burn_ins: BTreeMap<u32, BurnInReport>,
    /// The rank that moves to a spare after the next commit.
    pub(super) evicts: Option<u32>,
}

/// One rank as seen.
#[derive(Debug)]
pub struct RankLive {
    /// Worker that carries it.
    pub worker: String,
    /// The start command, as long as it may have to be sent again.
    pub start: Option<v1::StartTrainer>,
    /// The trainer's process id; 0 before it was reported.
    pub pid: u32,
    /// What it does.
    pub phase: Phase,
    /// Last zero-based step that it reported.
    pub step: Option<u64>,
    /// Since when it has been there, on our clock.
    pub(super) since: Duration,
    /// How often it has moved on.
    pub(super) moves: u64,
    /// Where it last said that it was among the collectives.
    pub(super) progress: Option<v1::Progress>,
    /// How long its trainer has said nothing to its worker.
    pub(super) silent: Duration,
    /// Its process groups are made.
    pub formed: bool,
    /// The newest save of a kind that it has written, or never will: it reports saves of a kind in the order of their steps.
    pub(super) saved: BTreeMap<SaveKind, u64>,
    /// It reached its end by itself, with this many steps done.
    pub finished: Option<(FinishCause, u64)>,
    /// It is over.
    pub ended: Option<Ending>,
    /// Its own times of its last steps.
    pub(super) window: Window,
    /// What they say, once there are enough.
    pub(super) judged: Option<Judged>,
}

impl Live {
    /// A generation whose starts are about to go out; its ranks burn in for so long.
    pub fn assigned(
        generation: Generation,
        starts: Vec<(String, v1::StartTrainer)>,
        burn_in: Duration,
        now: Duration,
    ) -> Self {
        let ranks = starts.into_iter().map(|(worker, start)| RankLive::new(worker, Some(start), now)).collect();
        Self { burn_in, ..Self::of(generation, ranks, false, false) }
    }

    /// Nothing speaks against its devices: they had nothing to prove, or have.
    pub(super) fn is_fit(&self) -> bool {
        self.burn_in.is_zero() || self.burnt_in
    }

    /// A generation that the journal says may live; one whose end was decided has no ranks any more.
    pub fn adopted(generation: Generation, record: &JobRecord, now: Duration) -> Self {
        let running = matches!(record.phase, JobPhase::Running { .. });
        let ranks = record.ranks.iter().map(|place| {
            let mut rank = RankLive::new(place.worker.clone(), None, now);
            rank.formed = running;
            rank
        });
        let ranks = if record.decided { Vec::new() } else { ranks.collect() };
        Self::of(generation, ranks, running, record.decided)
    }

    fn of(generation: Generation, ranks: Vec<RankLive>, stepped: bool, decided: bool) -> Self {
        let (saves, committed, tokens) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let (stop_sent, dumping, gave_up, corrupt_from, evicts) = (false, None, None, None, None);
        Self {
            generation,
            ranks,
            saves,
            committed,
            stepped,
            tokens,
            stop_sent,
            decided,
            dumping,
            gave_up,
            corrupt_from,
            burn_in: Duration::ZERO,
            burnt_in: false,
            burn_ins: BTreeMap::new(),
            evicts,
        }
    }

    /// Records of this generation that were not acknowledged: nothing will follow from them any more.
    pub(super) fn into_tokens(self) -> Vec<AckToken> {
        self.saves.into_values().flat_map(|save| save.tokens).chain(self.tokens).collect()
    }

    /// The newest full save, if it was given up, and why.
    pub(super) fn lost_end(&self) -> Option<(u64, String)> {
        let committed = self.committed.get(&SaveKind::Full).copied();
        self.gave_up.clone().filter(|(step, _)| Some(*step) > committed)
    }

    pub(super) fn all(&self, what: impl Fn(&RankLive) -> bool) -> bool {
        self.ranks.iter().all(what)
    }
}

impl RankLive {
    fn new(worker: String, start: Option<v1::StartTrainer>, since: Duration) -> Self {
        Self {
            worker,
            start,
            pid: 0,
            phase: Phase::Starting,
            step: None,
            since,
            moves: 0,
            progress: None,
            silent: Duration::ZERO,
            formed: false,
            saved: BTreeMap::new(),
            finished: None,
            ended: None,
            window: Window::default(),
            judged: None,
        }
    }

    /// Nothing was heard of it since its start was sent.
    pub fn is_unheard(&self) -> bool {
        self.start.is_some() && self.pid == 0 && self.ended.is_none()
    }

    /// Its worker says that it runs.
    pub fn attach(&mut self, running: &v1::RunningTrainer, now: Duration) {
        self.pid = running.pid;
        self.observe(Phase::try_from(running.phase()).ok(), running.step, now);
    }

    /// What it was last seen doing. If that is new: the stage that it has left, and how long it was there; of steps, how long
    /// one of those took that it has done meanwhile.
    pub fn observe(&mut self, phase: Option<Phase>, step: Option<u64>, now: Duration) -> Option<(Stage, Duration)> {
        let (phase, step) = (phase.unwrap_or(self.phase), step.max(self.step));
        if (phase, step) == (self.phase, self.step) {
            return None;
        }
        let steps = self.step.zip(step).map_or(1, |(last, step)| step.saturating_sub(last).max(1));
        let took = now.saturating_sub(self.since) / u32::try_from(steps).unwrap_or(u32::MAX);
        let left = (Stage::of(self.phase, self.step.is_some()), took);
        (self.phase, self.step) = (phase, step);
        self.moves_on(now);
        Some(left)
    }

    /// It is alive and at work, though nothing else shows it.
    pub(super) fn moves_on(&mut self, now: Duration) {
        self.since = now;
        self.moves += 1;
    }

    /// It is over.
    pub fn end(&mut self, rank: u32, how: How, at: Duration, stderr_tail: Vec<String>) {
        let (worker, phase, step) = (self.worker.clone(), self.phase, self.step);
        self.ended = Some(Ending { rank, worker, at, how, phase, step, stderr_tail });
    }
}
