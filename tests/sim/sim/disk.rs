//! All that survives: the state directory and the run directories, with their numbers, holders, manifests, pointers and rows,
//! and the journals. Each call is one change that a disk makes whole or not at all; whether it is allowed was looked at before
//! (the fence), and a process may have slept between the two. Where the content of a change is decided by the store, the
//! store's own functions decide.

use std::collections::{BTreeMap, BTreeSet};

use trainctl_coordinator::record::JobRecord;
use trainctl_spec::JobId;
use trainctl_spec::report::SaveKind;
use trainctl_store::checkpoints::{PruneInput, Summary, Verdict, decide_prune, pointer_targets};
use trainctl_store::layout::CheckpointName;
use trainctl_store::manifest::Metrics;
use trainctl_store::tenure::Holder;

/// `control/`: who may act (J2).
#[derive(Debug, Default)]
pub(crate) struct Control {
    numbers: u64,
    /// The highest term, and the process that took it with its host.
    pub(crate) term: u64,
    pub(crate) taker: Option<(u64, usize)>,
    pub(crate) holder: Option<Holder>,
    /// When `holder.json` was written, or a term taken.
    pub(crate) changed_at: u64,
}

impl Control {
    /// The next number as a term, if `above` is still the highest one.
    pub(crate) fn take_term(&mut self, above: u64, taker: (u64, usize), now: u64) -> Option<u64> {
        (self.term == above).then(|| {
            self.numbers += 1;
            (self.term, self.taker, self.changed_at) = (self.numbers, Some(taker), now);
            self.numbers
        })
    }

    /// The next number as a generation, if the term is still the highest one.
    fn take_generation(&mut self, term: u64) -> Option<u64> {
        (self.term == term).then(|| {
            self.numbers += 1;
            self.numbers
        })
    }
}

/// A checkpoint that exists.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Manifest {
    pub(crate) step: u64,
    pub(crate) generation: u64,
    pub(crate) term: u64,
    pub(crate) metrics: Metrics,
}

/// The saves of one kind.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    /// By step.
    pub(crate) committed: BTreeMap<u64, Manifest>,
    /// Renamed by retention, until they are looked at and removed.
    pub(crate) withdrawn: BTreeMap<u64, Manifest>,
    /// Renamed by a generation because they are later than its start.
    pub(crate) abandoned: Vec<(u64, Manifest)>,
}

impl Saves {
    pub(crate) fn summaries(&self) -> Vec<Summary> {
        let summary = |m: &Manifest| Summary { name: name(m.step), metrics: m.metrics.clone() };
        self.committed.values().map(summary).collect()
    }
}

/// Two pointers, by step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pointers {
    pub(crate) latest: Option<u64>,
    pub(crate) lowest_val: Option<u64>,
}

impl Pointers {
    /// Where they belong (C6).
    pub(crate) fn of(committed: &[Summary]) -> Self {
        let targets = pointer_targets(committed, "default");
        Self { latest: targets.latest.map(|n| n.step), lowest_val: targets.lowest_val.map(|n| n.step) }
    }

    fn named(self) -> trainctl_store::checkpoints::Pointers {
        let (latest, lowest_val) = (self.latest.map(name), self.lowest_val.map(name));
        trainctl_store::checkpoints::Pointers { latest, lowest_val }
    }
}

/// One run directory.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) control: Control,
    pub(crate) full: Saves,
    pub(crate) weights: Saves,
    pub(crate) pointers: Pointers,
    /// Step and generation of each row of `training.jsonl`.
    pub(crate) rows: Vec<(u64, u64)>,
    /// Ranks whose shards of (kind, generation, step) are durable.
    pub(crate) shards: BTreeMap<(SaveKind, u64, u64), BTreeSet<u32>>,
    /// Generations that were prepared.
    pub(crate) generations: Vec<u64>,
    /// What a generation starts from is pinned (C9).
    pub(crate) pins: BTreeMap<u64, u64>,
    /// A holder that is none any more has changed something since the present one last moved the pointers (C2): what they
    /// name then is right again after the next look.
    pub(crate) is_late: bool,
    /// Changes of holders that were none any more.
    pub(crate) late_changes: u64,
    /// The highest step whose commit the holder of the highest term has announced.
    pub(crate) announced: Option<u64>,
}

impl Run {
    pub(crate) fn saves(&mut self, kind: SaveKind) -> &mut Saves {
        match kind {
            SaveKind::Full => &mut self.full,
            SaveKind::Weights => &mut self.weights,
        }
    }

    fn note(&mut self, term: u64) {
        if term < self.control.term {
            self.is_late = true;
            self.late_changes += 1;
        }
    }

    pub(crate) fn take_generation(&mut self, term: u64) -> Option<u64> {
        let generation = self.control.take_generation(term)?;
        self.generations.push(generation);
        Some(generation)
    }

    /// Makes a manifest by create-if-absent, or in place of a dead generation's. False = another one is there.
    pub(crate) fn create(&mut self, kind: SaveKind, manifest: Manifest, world_size: u32) -> bool {
        let (generation, step, term) = (manifest.generation, manifest.step, manifest.term);
        let written = self.shards.get(&(kind, generation, step)).cloned().unwrap_or_default();
        let all: BTreeSet<u32> = (0..world_size).collect();
        assert_eq!(written, all, "C2: step {step} of generation {generation} was committed without all shards");
        let newest = self.generations.last().copied().unwrap_or_default();
        let is_late = term < self.control.term;
        assert!(is_late || generation == newest, "C2: generation {generation} committed when {newest} had begun");
        self.note(term);
        match self.saves(kind).committed.get(&step) {
            Some(there) if there.generation > generation => return false,
            Some(there) if there.generation == generation => return true,
            _ => {}
        }
        self.saves(kind).committed.insert(step, manifest);
        true
    }

    pub(crate) fn swap(&mut self, latest: bool, to: Option<u64>, term: u64) {
        self.note(term);
        let pointer = if latest { &mut self.pointers.latest } else { &mut self.pointers.lowest_val };
        *pointer = to;
    }

    /// What retention would remove now.
    pub(crate) fn prunable(&mut self, kind: SaveKind, keep: usize) -> Vec<u64> {
        let pointers = self.pointers.named();
        let pinned = self.pins.values().map(|step| name(*step)).collect();
        let committed = self.saves(kind).summaries();
        let (pointers, targets) = match kind {
            SaveKind::Full => (pointers, Pointers::of(&committed).named()),
            SaveKind::Weights => Default::default(),
        };
        let input = PruneInput { committed, pointers, targets, pinned, keep: Some(keep), keep_every_steps: None };
        let verdicts = decide_prune(&input).into_iter();
        verdicts.filter(|(_, verdict)| *verdict == Verdict::Remove).map(|(name, _)| name.step).collect()
    }

    /// Takes a checkpoint's name away, whatever it is by now.
    pub(crate) fn withdraw(&mut self, kind: SaveKind, step: u64, term: u64) {
        self.note(term);
        let saves = self.saves(kind);
        if let Some(manifest) = saves.committed.remove(&step) {
            saves.withdrawn.insert(step, manifest);
        }
    }

    /// Looks at what was withdrawn: it goes if it is what was meant, else it comes back.
    pub(crate) fn settle(&mut self, kind: SaveKind, step: u64, meant: &Manifest, may_remove: bool) {
        let is_pinned = self.pins.values().any(|pinned| *pinned == step);
        let saves = self.saves(kind);
        let Some(found) = saves.withdrawn.remove(&step) else { return };
        if found != *meant || is_pinned || !may_remove {
            saves.committed.entry(step).or_insert(found);
            return;
        }
        let newest = saves.committed.keys().next_back().copied();
        assert!(newest.is_some_and(|newest| newest > step), "C4: the newest checkpoint, of step {step}, was removed");
        let is_named = kind == SaveKind::Full && [self.pointers.latest, self.pointers.lowest_val].contains(&Some(step));
        assert!(!is_named || self.is_late, "C4: a pointer's target, of step {step}, was removed");
    }

    /// Renames a checkpoint into `abandoned/g<generation>/`, and back if that was not this generation's to do.
    pub(crate) fn retire(&mut self, kind: SaveKind, step: u64, generation: u64, term: u64) {
        self.note(term);
        let may = term == self.control.term;
        let saves = self.saves(kind);
        let Some(found) = saves.committed.remove(&step) else { return };
        if found.generation >= generation || !may {
            saves.committed.insert(step, found);
        } else {
            saves.abandoned.push((generation, found));
        }
    }

    /// A row, unless its step is there. A holder that is none any more writes to a file that nobody reads.
    pub(crate) fn put_row(&mut self, step: u64, generation: u64, term: u64) {
        if term == self.control.term && self.rows.last().is_none_or(|(last, _)| *last < step) {
            self.rows.push((step, generation));
        }
    }
}

/// What is durable, whoever lives.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    /// The state directory's.
    pub(crate) control: Control,
    pub(crate) runs: Vec<Run>,
    /// By term over the state directory.
    pub(crate) journals: BTreeMap<u64, BTreeMap<JobId, JobRecord>>,
    /// The coordinator that `endpoint.json` names.
    pub(crate) endpoint: Option<u64>,
}

impl Disk {
    /// A place with numbers: 0 is the state directory, n + 1 is run n.
    pub(crate) fn control(&mut self, place: usize) -> &mut Control {
        match place.checked_sub(1) {
            None => &mut self.control,
            Some(run) => &mut self.runs[run].control,
        }
    }

    /// A successor goes on with a copy of its predecessor's journal.
    pub(crate) fn open_journal(&mut self, term: u64) -> Vec<JobRecord> {
        let newest = self.journals.range(..term).next_back().map(|(_, jobs)| jobs.clone()).unwrap_or_default();
        let text = serde_json::to_string(&newest.values().collect::<Vec<_>>()).unwrap_or_else(|e| panic!("{e}"));
        self.journals.insert(term, newest);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// A job as the newest journal has it.
    pub(crate) fn job(&self, id: &JobId) -> Option<&JobRecord> {
        self.journals.values().next_back()?.get(id)
    }
}

pub(crate) fn name(step: u64) -> CheckpointName {
    CheckpointName { epoch: 0, step }
}
