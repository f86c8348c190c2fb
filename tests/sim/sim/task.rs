//! One run directory's task, modelled after the coordinator's `run_io` and the store: the same requests in the same order, cut
//! into steps between which the process may freeze or die. What a step changes it changes under the fence of the step before,
//! however long ago that was.

use std::collections::VecDeque;

use trainctl_coordinator::decide::rows::{RowUse, decide_row};
use trainctl_coordinator::record::StartPoint;
use trainctl_coordinator::run_io::{
    AckToken, Changes, CommitError, CommitInfo, CommitRequest, Committed, IoRequest, IoResult, Known, Prepared,
};
use trainctl_spec::Generation;
use trainctl_spec::report::SaveKind;
use trainctl_store::manifest::Metrics;

use crate::disk::{Manifest, Pointers, Run, name};

/// What is to be done next.
#[derive(Debug)]
pub(crate) enum Step {
    Known,
    /// Looks for a higher term: if there is one, the operation ends here.
    Fence,
    TakeOver,
    Prune(SaveKind),
    Withdraw(SaveKind, Manifest),
    Settle(SaveKind, Manifest),
    Create(Box<CommitRequest>),
    /// Retires what dead generations have committed behind this start.
    RetireLate(SaveKind, u64, Option<u64>),
    Retire(SaveKind, u64, u64),
    /// Moves the pointers to where they belong, if some checkpoints were not there.
    Point(Vec<u64>),
    Swap(bool, Option<u64>),
    Pointed,
    Row(u64, u64, Option<AckToken>),
    Resolve,
    Pin(u64, Option<Manifest>),
    RetireAfter(SaveKind, u64, Option<u64>),
    Cut(u64, Option<Manifest>),
    Announce(Box<CommitRequest>),
    Answer(Box<IoResult>),
}

/// The task of one job.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) term: u64,
    keep: usize,
    requests: VecDeque<IoRequest>,
    steps: VecDeque<Step>,
    /// The newest generation and what it starts after.
    begun: Option<(u64, Option<u64>)>,
    /// The second look is due (C2).
    pub(crate) looks_again: bool,
    /// A step of it is on its way.
    pub(crate) is_scheduled: bool,
    has_passed: bool,
    /// Rows that are written and not acknowledged.
    unsynced: Vec<AckToken>,
}

impl Task {
    pub(crate) fn new(term: u64, keep: usize, begun: Option<(u64, Option<u64>)>) -> Self {
        let steps = VecDeque::from([Step::Known, Step::Fence, Step::TakeOver]);
        let (looks_again, is_scheduled, has_passed) = (false, false, false);
        Self {
            term,
            keep,
            requests: VecDeque::new(),
            steps,
            begun,
            looks_again,
            is_scheduled,
            has_passed,
            unsynced: Vec::new(),
        }
    }

    pub(crate) fn ask(&mut self, request: IoRequest) {
        self.requests.push_back(request);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.steps.is_empty() && self.requests.is_empty() && self.unsynced.is_empty() && !self.looks_again
    }

    /// It has just passed the fence, and will change something next.
    pub(crate) fn is_allowed(&self) -> bool {
        self.has_passed && !self.steps.is_empty()
    }

    /// What it does next takes no time to speak of: a row.
    pub(crate) fn is_quick(&self) -> bool {
        match self.steps.front() {
            Some(Step::Row(..)) => true,
            Some(Step::Fence) => matches!(self.steps.get(1), Some(Step::Row(..))),
            Some(_) => false,
            None => matches!(self.requests.front(), Some(IoRequest::TrainRow { .. })),
        }
    }

    fn first(&mut self, steps: Vec<Step>) {
        steps.into_iter().rev().for_each(|step| self.steps.push_front(step));
    }

    /// Does the next thing; what it answers goes to the owner.
    pub(crate) fn go_on(&mut self, run: &mut Run) -> Option<IoResult> {
        if self.steps.is_empty() {
            match self.requests.pop_front() {
                Some(request) => self.begin(request),
                // Written under a term that is over, a row may stand where nobody reads it.
                None if !self.unsynced.is_empty() => {
                    let tokens = std::mem::take(&mut self.unsynced);
                    self.first(vec![Step::Fence, Step::Answer(Box::new(IoResult::Done(tokens)))]);
                }
                None if std::mem::take(&mut self.looks_again) => self.first(vec![Step::Fence, Step::TakeOver]),
                None => return None,
            }
        }
        let step = self.steps.pop_front()?;
        self.has_passed = matches!(step, Step::Fence);
        self.carry_out(step, run)
    }

    fn begin(&mut self, request: IoRequest) {
        let steps = match request {
            IoRequest::Event(_) => Vec::new(),
            IoRequest::TrainRow { row, token } => vec![Step::Fence, Step::Row(row.step, row.generation, token)],
            IoRequest::ValidationRow { token, .. } => done(token),
            IoRequest::Commit(request) => self.synced(vec![Step::Fence, Step::Create(request)]),
            IoRequest::Prepare(_) => {
                let late = self.begun.map(|(generation, after)| Step::RetireLate(SaveKind::Full, generation, after));
                late.into_iter().chain([Step::Fence, Step::Resolve]).collect()
            }
            IoRequest::Release => self.synced(vec![Step::Answer(Box::new(IoResult::Released))]),
        };
        self.first(steps);
    }

    /// Rows go before what is to follow them.
    fn synced(&mut self, steps: Vec<Step>) -> Vec<Step> {
        let tokens = std::mem::take(&mut self.unsynced);
        let answer = Step::Answer(Box::new(IoResult::Done(tokens)));
        [Step::Fence, answer].into_iter().chain(steps).collect()
    }

    fn carry_out(&mut self, step: Step, run: &mut Run) -> Option<IoResult> {
        match step {
            Step::Known => {
                let pointers = text(Pointers::of(&run.full.summaries()));
                return Some(IoResult::Known(Box::new(Known { pointers, first: None, last: None, validation: None })));
            }
            Step::Fence if run.control.term > self.term => {
                self.steps.clear();
                return Some(IoResult::Superseded { term: run.control.term });
            }
            Step::Fence => {}
            Step::TakeOver => self.take_over(run),
            Step::Prune(kind) => {
                let seen: Vec<Manifest> = run.saves(kind).committed.values().cloned().collect();
                let removed = run.prunable(kind, self.keep);
                let removed = seen.into_iter().filter(|manifest| removed.contains(&manifest.step));
                self.first(removed.flat_map(|manifest| [Step::Fence, Step::Withdraw(kind, manifest)]).collect());
            }
            // The second look.
            Step::Withdraw(kind, meant) => {
                if run.prunable(kind, self.keep).contains(&meant.step) {
                    run.withdraw(kind, meant.step, self.term);
                    self.first(vec![Step::Settle(kind, meant)]);
                }
            }
            Step::Settle(kind, meant) => {
                let may_remove = run.control.term == self.term;
                run.settle(kind, meant.step, &meant, may_remove);
            }
            Step::Create(request) => return self.create(*request, run),
            Step::RetireLate(kind, generation, after) => {
                let is_late = |m: &&Manifest| m.generation < generation && after.is_none_or(|after| m.step > after);
                let late = run.saves(kind).committed.values().filter(is_late).map(|m| m.step).collect();
                self.retire(kind, late, generation);
            }
            Step::RetireAfter(kind, generation, after) => {
                let committed = run.saves(kind).committed.keys().copied();
                let later = committed.filter(|step| after.is_none_or(|after| *step > after)).collect();
                self.retire(kind, later, generation);
            }
            Step::Retire(kind, step, generation) => run.retire(kind, step, generation, self.term),
            Step::Point(without) => {
                let stay = run.full.summaries().into_iter().filter(|s| !without.contains(&s.name.step));
                let to = Pointers::of(&stay.collect::<Vec<_>>());
                let mut steps = Vec::new();
                if run.pointers.latest != to.latest {
                    steps.extend([Step::Fence, Step::Swap(true, to.latest)]);
                }
                if run.pointers.lowest_val != to.lowest_val {
                    steps.extend([Step::Fence, Step::Swap(false, to.lowest_val)]);
                }
                steps.extend([Step::Fence, Step::Pointed]);
                self.first(steps);
            }
            Step::Swap(latest, to) => run.swap(latest, to, self.term),
            Step::Pointed => run.is_late &= run.control.term != self.term,
            Step::Row(step, generation, token) => {
                let begun = self.begun.map(|(generation, _)| Generation(generation));
                if decide_row(generation, begun) == RowUse::Write {
                    run.put_row(step, generation, self.term);
                }
                self.unsynced.extend(token);
            }
            Step::Resolve => match run.take_generation(self.term) {
                None => self.first(vec![Step::Fence]),
                Some(generation) => {
                    let found = run.full.committed.values().next_back().cloned();
                    let start = found.as_ref().map(|manifest| manifest.step);
                    assert!(start >= run.announced, "C6: starts after {start:?}, but {:?} is committed", run.announced);
                    self.first(vec![Step::Pin(generation, found)]);
                }
            },
            Step::Pin(generation, found) => {
                run.pins.clear();
                run.pins.extend(found.as_ref().map(|manifest| (generation, manifest.step)));
                let after = found.as_ref().map(|manifest| manifest.step);
                let retire = |kind| Step::RetireAfter(kind, generation, after);
                let steps = [retire(SaveKind::Full), Step::Point(Vec::new()), retire(SaveKind::Weights)];
                self.first(steps.into_iter().chain([Step::Fence, Step::Cut(generation, found)]).collect());
            }
            Step::Cut(generation, found) => return Some(self.prepared(generation, found, run)),
            Step::Announce(request) => {
                let is_ours = run.control.term == self.term;
                if request.kind == SaveKind::Full && is_ours {
                    run.announced = run.announced.max(Some(request.step));
                }
                let pointers = text(Pointers::of(&run.full.summaries()));
                let outcome = Ok(CommitInfo {
                    checkpoint: name(request.step).to_string(),
                    state_hash: "h".to_owned(),
                    changes: Changes::default(),
                    pointers,
                    bytes: 1,
                    commit_seconds: 0.0,
                });
                return Some(committed(&request, outcome));
            }
            Step::Answer(result) => return Some(*result),
        }
        None
    }

    fn take_over(&mut self, run: &mut Run) {
        for saves in [&mut run.full, &mut run.weights] {
            // A checkpoint that has lost its name gets it back; who took it away is not known.
            for (step, manifest) in std::mem::take(&mut saves.withdrawn) {
                saves.committed.entry(step).or_insert(manifest);
            }
        }
        let mut steps = Vec::new();
        for kind in [SaveKind::Weights, SaveKind::Full] {
            steps.extend(self.begun.map(|(generation, after)| Step::RetireLate(kind, generation, after)));
            if kind == SaveKind::Full {
                steps.push(Step::Point(Vec::new()));
            }
            steps.extend([Step::Fence, Step::Prune(kind)]);
        }
        self.first(steps);
    }

    fn retire(&mut self, kind: SaveKind, steps: Vec<u64>, generation: u64) {
        if steps.is_empty() {
            return;
        }
        let renames = steps.iter().flat_map(|step| [Step::Fence, Step::Retire(kind, *step, generation)]);
        let renames: Vec<Step> = renames.collect();
        let pointers = (kind == SaveKind::Full).then(|| Step::Point(steps.clone()));
        self.first(pointers.into_iter().chain(renames).collect());
    }

    /// C3: manifest, pointers, retention, in this order.
    fn create(&mut self, request: CommitRequest, run: &mut Run) -> Option<IoResult> {
        let (kind, generation) = (request.kind, request.generation.0);
        let val_losses = request.reports.get(&0).map(|report| report.val_losses.clone()).unwrap_or_default();
        let metrics = Metrics::new(None, &val_losses);
        let manifest = Manifest { step: request.step, generation, term: self.term, metrics };
        if !run.create(kind, manifest, request.world_size) {
            let reason = "a later generation committed it with other content".to_owned();
            return Some(committed(&request, Err(CommitError { reason, refused: true })));
        }
        let after = request.started_from.own_step();
        let mut steps = vec![Step::RetireLate(kind, generation, after)];
        if kind == SaveKind::Full {
            steps.push(Step::Point(Vec::new()));
        }
        steps.extend([Step::Fence, Step::Prune(kind), Step::Announce(Box::new(request))]);
        self.first(steps);
        None
    }

    fn prepared(&mut self, generation: u64, found: Option<Manifest>, run: &mut Run) -> IoResult {
        let start = found.map_or_else(StartPoint::default, |manifest| StartPoint {
            checkpoint: name(manifest.step).to_string(),
            manifest_blake3: "00".repeat(32),
            step: manifest.step + 1,
            ..StartPoint::default()
        });
        if run.control.term == self.term {
            run.rows.retain(|(step, _)| *step < start.step);
        }
        self.begun = Some((generation, start.own_step()));
        let pointers = text(Pointers::of(&run.full.summaries()));
        let (generation, retired, notes) = (Generation(generation), Vec::new(), Vec::new());
        IoResult::Prepared(Box::new(Ok(Prepared { generation, start, pointers, retired, notes })))
    }
}

fn done(token: Option<AckToken>) -> Vec<Step> {
    token.into_iter().map(|token| Step::Answer(Box::new(IoResult::Done(vec![token])))).collect()
}

fn committed(request: &CommitRequest, outcome: Result<CommitInfo, CommitError>) -> IoResult {
    let (generation, kind, step) = (request.generation, request.kind, request.step);
    IoResult::Committed(Box::new(Committed { generation, kind, step, outcome }))
}

fn text(pointers: Pointers) -> (String, String) {
    let text = |step: Option<u64>| step.map(|step| name(step).to_string()).unwrap_or_default();
    (text(pointers.latest), text(pointers.lowest_val))
}
