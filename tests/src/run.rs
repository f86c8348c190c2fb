//! What a run directory shows to anybody who looks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trainctl_store::{CheckpointName, Manifest};

use crate::process;
use crate::wait;

/// A run directory.
#[derive(Clone, Debug)]
pub struct Run {
    dir: PathBuf,
}

/// A row of training.jsonl, as far as tests look.
#[derive(Clone, Debug)]
pub struct Row {
    /// Zero-based step.
    pub step: u64,
    /// Training loss.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Logged learning rate.
    pub lr: f64,
    /// When the trainer made it, milliseconds since the Unix epoch.
    pub at_ms: i64,
    /// Generation that made it.
    pub generation: u64,
}

/// A trainer that an event named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trainer {
    /// Its generation.
    pub generation: u64,
    /// Its rank.
    pub rank: u64,
    /// Its process.
    pub pid: u32,
}

impl Run {
    /// The run in `dir`, which need not exist yet.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Complete lines of a `.jsonl` file; none if there is no file.
    pub fn lines(&self, file: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{file}: {e}: {line}"))).collect()
    }

    /// Lines of events.jsonl.
    pub fn events(&self) -> Vec<Value> {
        self.lines("events.jsonl")
    }

    /// Lines of events.jsonl of one kind.
    pub fn events_of(&self, kind: &str) -> Vec<Value> {
        self.events().into_iter().filter(|event| event["kind"] == kind).collect()
    }

    /// Rows of training.jsonl.
    pub fn rows(&self) -> Vec<Row> {
        self.lines("training.jsonl").iter().map(Row::from_json).collect()
    }

    /// The last step in training.jsonl.
    pub fn last_step(&self) -> Option<u64> {
        self.rows().last().map(|row| row.step)
    }

    /// Waits until training.jsonl has a row of this step or a later one.
    pub fn wait_for_step(&self, step: u64) {
        let what = format!("step {step} in {}", self.dir.display());
        wait::until(&what, || self.last_step().filter(|last| *last >= step));
    }

    /// Waits until the trainers of a generation after `after` are all started, and gives them in order of rank.
    pub fn wait_for_trainers(&self, world_size: usize, after: u64) -> Vec<Trainer> {
        let what = format!("{world_size} trainers after generation {after}");
        wait::until(&what, || {
            let found = self.trainers();
            (found.len() == world_size && found[0].generation > after).then_some(found)
        })
    }

    /// The trainers of the newest generation that has started any, in order of rank.
    pub fn trainers(&self) -> Vec<Trainer> {
        let mut generations: BTreeMap<u64, BTreeMap<u64, u32>> = BTreeMap::new();
        for event in self.events_of("trainer_started") {
            let (generation, rank) = (event["generation"].as_u64().unwrap(), event["rank"].as_u64().unwrap());
            let pid = u32::try_from(event["pid"].as_u64().unwrap()).unwrap();
            generations.entry(generation).or_default().insert(rank, pid);
        }
        let Some((generation, ranks)) = generations.pop_last() else { return Vec::new() };
        ranks.into_iter().map(|(rank, pid)| Trainer { generation, rank, pid }).collect()
    }

    /// Numbers of all generations that began to form, in order.
    pub fn generations(&self) -> Vec<u64> {
        self.events_of("generation_forming").iter().filter_map(|event| event["generation"].as_u64()).collect()
    }

    /// What a pointer names.
    pub fn pointer(&self, name: &str) -> Option<String> {
        fs::read_link(self.dir.join(name)).ok().map(|target| target.to_string_lossy().into_owned())
    }

    /// The manifest of a checkpoint, if it is committed.
    pub fn manifest(&self, checkpoint: &str) -> Option<Manifest> {
        let bytes = fs::read(self.dir.join(checkpoint).join("manifest.json")).ok()?;
        Some(Manifest::parse(&bytes).unwrap_or_else(|fault| panic!("{checkpoint}: {fault}")).0)
    }

    /// Committed checkpoints in order of their steps.
    pub fn commits(&self) -> Vec<Manifest> {
        let names = fs::read_dir(&self.dir).unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        let names = names.filter(|name| name.parse::<CheckpointName>().is_ok());
        let mut found: Vec<Manifest> = names.filter_map(|name| self.manifest(&name)).collect();
        found.sort_by_key(|manifest| manifest.step);
        found
    }

    /// Waits until the checkpoint of a zero-based step, or a later one, is committed.
    pub fn wait_for_commit(&self, step: u64) -> Manifest {
        let what = format!("a commit of step {step} in {}", self.dir.display());
        wait::until(&what, || self.dir.exists().then(|| self.commits().pop())?.filter(|last| last.step >= step))
    }

    /// What is left in the directory that no run has a use for: temporary files, checkpoints without a manifest.
    pub fn left_behind(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut folders = vec![self.dir.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
                let name = entry.file_name().into_string().unwrap();
                let is_dir = entry.file_type().unwrap().is_dir();
                let is_torn = || folder == self.dir && name.parse::<CheckpointName>().is_ok();
                if name.starts_with(".tmp-") || (is_dir && is_torn() && self.manifest(&name).is_none()) {
                    found.push(entry.path().display().to_string());
                }
                if is_dir {
                    folders.push(entry.path());
                }
            }
        }
        found
    }

    /// Names of the files in a checkpoint's folders (`model/`, `optim/`), committed or not; none if it is not there.
    pub fn files(&self, checkpoint: &str) -> Vec<String> {
        let sections = fs::read_dir(self.dir.join(checkpoint)).into_iter().flatten().flatten();
        let sections = sections.filter(|entry| entry.path().is_dir());
        let files = sections.flat_map(|section| fs::read_dir(section.path()).into_iter().flatten().flatten());
        files.filter_map(|file| file.file_name().into_string().ok()).collect()
    }

    /// The manifest that LATEST names.
    ///
    /// # Panics
    /// If there is none: LATEST can always be loaded (P2).
    pub fn latest(&self) -> Manifest {
        let name = self.pointer("LATEST").unwrap_or_else(|| panic!("{}: no LATEST", self.dir.display()));
        self.manifest(&name).unwrap_or_else(|| panic!("LATEST -> {name}, which is not committed"))
    }
}

impl Row {
    fn from_json(value: &Value) -> Self {
        let number = |key: &str| value[key].as_f64().unwrap_or_else(|| panic!("{key} in {value}"));
        let timestamp: jiff::Timestamp = value["timestamp"].as_str().unwrap().parse().unwrap();
        Self {
            step: value["step"].as_u64().unwrap(),
            loss: number("loss"),
            grad_norm: number("grad_norm"),
            lr: number("lr"),
            at_ms: timestamp.as_millisecond(),
            generation: value["generation"].as_u64().unwrap(),
        }
    }

    /// All that must not depend on interruptions, bit by bit (P4).
    pub fn bits(&self) -> (u64, u64, u64, u64) {
        (self.step, self.loss.to_bits(), self.grad_norm.to_bits(), self.lr.to_bits())
    }
}

/// Asserts that two runs made the same `steps` rows, bit for bit, each step once and in order (P4).
///
/// # Panics
/// At the first difference.
#[track_caller]
pub fn assert_same_rows(got: &Run, want: &Run, steps: u64) {
    let (got, want) = (got.rows(), want.rows());
    let numbers: Vec<u64> = got.iter().map(|row| row.step).collect();
    assert_eq!(numbers, (0..steps).collect::<Vec<_>>(), "steps of training.jsonl");
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(got.bits(), want.bits(), "{got:?}\n{want:?}");
    }
    assert_eq!(want.len() as u64, steps);
}

impl Trainer {
    /// Kills it with signal 9.
    pub fn kill9(&self) {
        process::send(self.pid, nix::sys::signal::Signal::SIGKILL);
    }
}
