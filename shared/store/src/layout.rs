//! The names of everything in a run directory, in one place.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Pointer to the committed checkpoint of the highest step.
pub const LATEST: &str = "LATEST";
/// Pointer to the committed checkpoint of the lowest validation loss.
pub const LOWEST_VAL: &str = "LOWEST_VAL";
/// The commit of a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The resolved spec inside a checkpoint.
pub const CONFIG: &str = "config.yaml";
/// Train and validation losses inside a checkpoint.
pub const LOSSES: &str = "losses.json";
/// Folder of the weights-only checkpoints.
pub const WEIGHTS: &str = "weights";
/// Where retired checkpoints and rows go (C6).
pub const ABANDONED: &str = "abandoned";

/// A run directory: a POSIX directory that all nodes see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    root: PathBuf,
}

impl RunDir {
    /// The run directory at `root`; nothing is made or looked at.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `control/`: numbers, holder, endpoint, tokens, journals, pins.
    pub fn control(&self) -> PathBuf {
        self.root.join("control")
    }

    /// `logs/g0007/`: the trainers' output of one generation.
    pub fn generation_logs(&self, generation: u64) -> PathBuf {
        self.root.join(format!("logs/g{generation:04}"))
    }

    /// `logs/g0007/rank-00003.log`: standard output and error of one trainer.
    pub fn rank_log(&self, generation: u64, rank: u32) -> PathBuf {
        self.generation_logs(generation).join(format!("rank-{rank:05}.log"))
    }

    /// `events.jsonl`.
    pub fn events(&self) -> PathBuf {
        self.root.join("events.jsonl")
    }

    /// `training.jsonl`.
    pub fn training_rows(&self) -> PathBuf {
        self.root.join("training.jsonl")
    }

    /// `validation.jsonl` for `default`, `validation_<name>.jsonl` for every other validation set.
    pub fn validation_rows(&self, name: &str) -> PathBuf {
        match name {
            "default" => self.root.join("validation.jsonl"),
            name => self.root.join(format!("validation_{name}.jsonl")),
        }
    }

    /// `abandoned/g7/`: what generation 7 retired when it started.
    pub fn abandoned(&self, generation: u64) -> PathBuf {
        self.root.join(abandoned_key(generation))
    }

    /// `job.yaml`: the resolved spec of the newest job.
    pub fn job_spec(&self) -> PathBuf {
        self.root.join("job.yaml")
    }
}

/// `abandoned/g7`.
pub(crate) fn abandoned_key(generation: u64) -> String {
    format!("{ABANDONED}/g{generation}")
}

/// A checkpoint's directory, `epoch_<E>_step_<S>`, both zero-based. Ordered by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CheckpointName {
    /// Zero-based epoch.
    pub epoch: u64,
    /// Zero-based optimizer step after which the state was saved.
    pub step: u64,
}

impl CheckpointName {
    /// The key of a file of this checkpoint.
    pub fn key(self, file: &str) -> String {
        format!("{self}/{file}")
    }
}

impl PartialOrd for CheckpointName {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for CheckpointName {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.step, self.epoch).cmp(&(other.step, other.epoch))
    }
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch_{}_step_{}", self.epoch, self.step)
    }
}

/// A directory name that is none of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a checkpoint's name: expected epoch_<E>_step_<S>, for example epoch_0_step_999")]
pub struct NotACheckpoint(pub String);

impl FromStr for CheckpointName {
    type Err = NotACheckpoint;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (epoch, step) = text.strip_prefix("epoch_")?.split_once("_step_")?;
            Some(Self { epoch: epoch.parse().ok()?, step: step.parse().ok()? })
        };
        // The canonical spelling only: `epoch_0_step_07` and `+7` would be a second name of the same step.
        parse().filter(|name| name.to_string() == text).ok_or_else(|| NotACheckpoint(text.to_owned()))
    }
}

impl TryFrom<String> for CheckpointName {
    type Error = NotACheckpoint;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<CheckpointName> for String {
    fn from(name: CheckpointName) -> Self {
        name.to_string()
    }
}

/// The two kinds of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Section {
    /// Weights under their Hugging Face names.
    Model,
    /// Moments and master weights.
    Optim,
}

impl Section {
    /// The folder's name, which is also the prefix of tensor names in state_hash.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Optim => "optim",
        }
    }
}

/// A shard's path inside its checkpoint: `model/shard-00003-of-00008.g7.safetensors`. The generation is in the name, so
/// that a fenced writer overwrites nothing (C2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardName {
    /// Weights or optimizer state.
    pub section: Section,
    /// Rank that wrote it.
    pub rank: u32,
    /// World size of its generation.
    pub world_size: u32,
    /// Generation that wrote it.
    pub generation: u64,
}

impl fmt::Display for ShardName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { section, rank, world_size, generation } = self;
        write!(f, "{}/shard-{rank:05}-of-{world_size:05}.g{generation}.safetensors", section.folder())
    }
}

impl ShardName {
    /// Reads a path that [`fmt::Display`] wrote.
    pub fn parse(path: &str) -> Option<Self> {
        let (folder, file) = path.split_once('/')?;
        let section = match folder {
            "model" => Section::Model,
            "optim" => Section::Optim,
            _ => return None,
        };
        let (rank, rest) = file.strip_prefix("shard-")?.split_once("-of-")?;
        let (world_size, rest) = rest.split_once(".g")?;
        let generation = rest.strip_suffix(".safetensors")?.parse().ok()?;
        let name = Self { section, rank: rank.parse().ok()?, world_size: world_size.parse().ok()?, generation };
        (name.to_string() == path).then_some(name)
    }
}

const TRAINER_STATE: (&str, &str) = ("optim/trainer.g", ".json");

/// The file in which rank 0 keeps what a resume needs besides tensors: `optim/trainer.g7.json`. Its generation is in the name
/// for the same reason as a shard's.
pub fn trainer_state(generation: u64) -> String {
    let (start, end) = TRAINER_STATE;
    format!("{start}{generation}{end}")
}

/// Its name in checkpoints that are older than that.
pub(crate) const OLD_TRAINER_STATE: &str = "optim/trainer.json";

/// The generation that wrote a file of a checkpoint, if its name says so.
pub(crate) fn generation_of(path: &str) -> Option<u64> {
    let (start, end) = TRAINER_STATE;
    let trainer = || path.strip_prefix(start)?.strip_suffix(end)?.parse().ok();
    ShardName::parse(path).map(|shard| shard.generation).or_else(trainer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_names_have_one_spelling_and_are_ordered_by_step() {
        let name: CheckpointName = "epoch_1_step_999".parse().unwrap();
        assert_eq!((name.epoch, name.step), (1, 999));
        assert_eq!(name.to_string(), "epoch_1_step_999");
        for bad in
            ["", "LATEST", "epoch_0_step_", "epoch_0_step_07", "epoch_0_step_+7", "epoch_0_step_-1", "xepoch_0_step_1"]
        {
            assert_eq!(bad.parse::<CheckpointName>(), Err(NotACheckpoint(bad.to_owned())));
        }
        let mut names: Vec<CheckpointName> =
            ["epoch_0_step_10", "epoch_0_step_9", "epoch_1_step_100"].iter().map(|n| n.parse().unwrap()).collect();
        names.sort();
        assert_eq!(names.iter().map(|n| n.step).collect::<Vec<_>>(), [9, 10, 100]);
    }

    #[test]
    fn shard_names_round_trip() {
        let name = ShardName { section: Section::Model, rank: 3, world_size: 8, generation: 7 };
        assert_eq!(name.to_string(), "model/shard-00003-of-00008.g7.safetensors");
        assert_eq!(ShardName::parse(&name.to_string()), Some(name));
        assert_eq!(ShardName::parse("model/shard-3-of-8.g7.safetensors"), None);
        assert_eq!(ShardName::parse("other/shard-00003-of-00008.g7.safetensors"), None);
    }

    #[test]
    fn generations_are_in_the_names_of_what_ranks_write() {
        assert_eq!(trainer_state(7), "optim/trainer.g7.json");
        for path in [trainer_state(7), "optim/shard-00003-of-00008.g7.safetensors".to_owned()] {
            assert_eq!(generation_of(&path), Some(7), "{path}");
        }
        for path in ["config.yaml", "optim/trainer.json", "optim/trainer.gx.json"] {
            assert_eq!(generation_of(path), None, "{path}");
        }
    }

    #[test]
    fn run_directory_names_are_the_documented_ones() {
        let run = RunDir::new("r");
        assert_eq!(run.rank_log(7, 3), Path::new("r/logs/g0007/rank-00003.log"));
        assert_eq!(run.validation_rows("default"), Path::new("r/validation.jsonl"));
        assert_eq!(run.validation_rows("web"), Path::new("r/validation_web.jsonl"));
        assert_eq!(run.abandoned(7), Path::new("r/abandoned/g7"));
    }
}
