//! One coordinator: a process that waits for the state directory by the store's own rules (J2), adopts what the journal has, and
//! then feeds the real core. There may be several: one that is frozen, and whoever took its place.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use trainctl_coordinator::core::{Core, Effect, Event, Moment};
use trainctl_store::numbers::Taker;
use trainctl_store::tenure::{Decision, Holder, HolderInfo, Policy, Reason, View, decide_takeover};

use crate::checks::Watch;
use crate::disk::Control;
use crate::task::Task;

/// It waits for a place with numbers.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// 0 is the state directory, n + 1 is run n.
    pub(crate) place: usize,
    started: u64,
    same_since: u64,
    last: Option<(Option<Holder>, u64)>,
    /// The look that made it ask the holder.
    asks: Option<View>,
    /// For how long the holder had written nothing at the last look, milliseconds.
    pub(crate) silent: u64,
}

impl Waiting {
    pub(crate) fn new(place: usize, now: u64) -> Self {
        Self { place, started: now, same_since: now, last: None, asks: None, silent: 0 }
    }

    /// One look. The holder is asked at the first one, and before a takeover.
    pub(crate) fn look(&mut self, control: &Control, taker_gone: bool, now: u64, policy: &Policy) -> Decision {
        let content = (control.holder.clone(), control.term);
        if self.last.as_ref() != Some(&content) {
            self.same_since = now;
        }
        self.silent = now - control.changed_at;
        let ms = Duration::from_millis;
        let view = View {
            highest: trainctl_spec::Term(control.term),
            holder: content.0.clone(),
            taker_gone,
            same_for: ms(now - self.same_since),
            waited: ms(now - self.started),
            answers: None,
        };
        let (decision, _) = decide_takeover(&view, policy);
        let is_first = self.last.is_none();
        self.last = Some(content);
        if decision == Decision::Probe || (is_first && decision == Decision::Wait) {
            self.asks = Some(view);
            return Decision::Probe;
        }
        decision
    }

    /// The holder has answered, or not; decides by the look that asked.
    pub(crate) fn answered(&mut self, answers: bool, policy: &Policy) -> (Decision, Reason, u64) {
        let Some(view) = self.asks.take() else { return (Decision::Wait, Reason::LeaseRuns, 0) };
        let highest = view.highest.0;
        let (decision, reason) = decide_takeover(&View { answers: Some(answers), ..view }, policy);
        (decision, reason, highest)
    }

    /// Somebody else was faster.
    pub(crate) fn forget(&mut self) {
        self.last = None;
    }
}

/// One life of a coordinator.
pub(crate) struct Coordinator {
    pub(crate) life: u64,
    pub(crate) host: usize,
    /// Its monotonic clock began so long before the world's.
    offset: u64,
    /// Its wall clock, which jumps.
    pub(crate) wall_ms: u64,
    /// It does nothing before.
    pub(crate) frozen_until: u64,
    /// Nothing passes between it and anybody before.
    pub(crate) cut_until: u64,
    pub(crate) waiting: Option<Waiting>,
    /// Terms, by place.
    pub(crate) tenures: BTreeMap<usize, u64>,
    /// Incarnation that held the state directory before.
    pub(crate) predecessor: Option<String>,
    beats: u64,
    pub(crate) core: Core,
    pub(crate) is_serving: bool,
    pub(crate) inbox: VecDeque<Event>,
    pub(crate) effects: VecDeque<Effect>,
    /// Its journal's write is under way.
    pub(crate) is_busy: bool,
    /// A tick is due as soon as it is not.
    pub(crate) tick_is_due: bool,
    pub(crate) tasks: BTreeMap<usize, Task>,
    /// Worker at the other end of each stream.
    pub(crate) sessions: BTreeMap<u64, usize>,
    pub(crate) watch: Watch,
}

impl Coordinator {
    pub(crate) fn new(life: u64, host: usize, offset: u64, now: u64) -> Self {
        let at = Duration::from_millis(now + offset);
        Self {
            life,
            host,
            offset,
            wall_ms: 1_000_000_000_000,
            frozen_until: 0,
            cut_until: 0,
            waiting: Some(Waiting::new(0, now)),
            tenures: BTreeMap::new(),
            predecessor: None,
            beats: 0,
            core: Core::new(trainctl_coordinator::core::Policy::default(), at, life),
            is_serving: false,
            inbox: VecDeque::new(),
            effects: VecDeque::new(),
            is_busy: false,
            tick_is_due: false,
            tasks: BTreeMap::new(),
            sessions: BTreeMap::new(),
            watch: Watch::new(now),
        }
    }

    pub(crate) fn incarnation(life: u64) -> String {
        format!("c{life}")
    }

    pub(crate) fn boot_id(host: usize) -> String {
        format!("boot-{host}")
    }

    /// What it writes into `holder.json`.
    pub(crate) fn holder(&mut self, place: usize, released: bool) -> Holder {
        let term = self.tenures.get(&place).copied().unwrap_or_default();
        self.beats += 1;
        let process = Taker {
            host: format!("h{}", self.host),
            pid: self.life as u32,
            boot_id: Self::boot_id(self.host),
            start_time: self.life,
        };
        let info = HolderInfo { process, incarnation: Self::incarnation(self.life), ..HolderInfo::default() };
        Holder { term, info, beat: self.beats, released, at: String::new() }
    }

    /// How long it waits for a place: where its predecessor in the state directory held too, that was waited out (J2).
    pub(crate) fn policy(&self, holder: Option<&Holder>) -> Policy {
        let before = holder.map(|holder| &holder.info.incarnation);
        match before.is_some() && before == self.predecessor.as_ref() {
            true => Policy { lease: Duration::ZERO, ..Policy::default() },
            false => Policy::default(),
        }
    }

    pub(crate) fn is_frozen(&self, now: u64) -> bool {
        now < self.frozen_until
    }

    pub(crate) fn moment(&self, now: u64) -> Moment {
        Moment { now: Duration::from_millis(now + self.offset), wall_ms: self.wall_ms + now }
    }

    pub(crate) fn term(&self, place: usize) -> u64 {
        self.tenures.get(&place).copied().unwrap_or_default()
    }
}
