//! The manifest: the file whose existence commits a checkpoint (C1, C3).
//!
//! `manifest.json` is JSON, then a newline, then the blake3 of all bytes before that last line, then a newline. The hash
//! is also the manifest's name for whoever must load exactly this checkpoint (C9).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trainctl_spec::report::{SaveKind, ShardFile};
use trainctl_spec::start::{DataPhase, Keep};

use crate::layout::CheckpointName;

/// The newest format that this program reads, and the one that it writes. A new one needs a reader of the old.
pub const FORMAT: u32 = 2;

/// 64 hexadecimal digits and a newline.
const LAST_LINE_BYTES: usize = 65;

/// How the JSON ends. Its inner objects are indented, so this comes nowhere else.
const END_OF_CONTENT: &[u8] = b"\n}\n";

/// Everything that a checkpoint is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version.
    pub format: u32,
    /// The directory's name.
    pub name: CheckpointName,
    /// Job that wrote it.
    #[serde(default)]
    pub job: String,
    /// Generation that wrote it.
    pub generation: u64,
    /// Term that committed it.
    pub term: u64,
    /// Zero-based step after which the state was saved.
    pub step: u64,
    /// Zero-based epoch.
    pub epoch: u64,
    /// Sampler positions consumed up to and including `step`.
    pub consumed_samples: u64,
    /// Number of ranks.
    pub world_size: u32,
    /// Named axes of the world with their sizes, slowest first.
    #[serde(default)]
    pub mesh: Vec<(String, u32)>,
    /// Skipped ranges of sampler positions, first and one past the last (D2).
    #[serde(default)]
    pub skipped: Vec<(u64, u64)>,
    /// Losses at `step`.
    #[serde(default)]
    pub metrics: Metrics,
    /// Digest of model and optimizer state, independent of sharding ([`crate::state_hash`]).
    pub state_hash: String,
    /// blake3 of `config.yaml`.
    pub spec_hash: String,
    /// Steps of the whole schedule.
    pub max_steps: u64,
    /// Step after which this job was asked to stop, if it was.
    #[serde(default)]
    pub until_step: Option<u64>,
    /// The checkpoint that its generation started from.
    #[serde(default)]
    pub started_from: Option<Parent>,
    /// What it holds.
    #[serde(default)]
    pub kind: SaveKind,
    /// The checkpoint of another run that this run began with.
    #[serde(default)]
    pub parent: Option<ForkParent>,
    /// Which samples its steps read.
    #[serde(default)]
    pub phase: DataPhase,
    /// Samples of each corpus, by its prefix, used up to and including `step`, in all phases.
    #[serde(default)]
    pub corpora: BTreeMap<String, u64>,
    /// When it was committed, in UTC.
    pub created_at: String,
    /// Every other file of the directory.
    pub files: Vec<ShardFile>,
}

/// Losses of one step, also the content of `losses.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Train loss; null if it was not finite.
    pub train_loss: Option<f64>,
    /// Validation losses by the name of the set; null if not finite.
    #[serde(default)]
    pub val_losses: BTreeMap<String, Option<f64>>,
}

impl Metrics {
    /// From a rank's report. JSON has no NaN, so what is not finite becomes null.
    pub fn new(train_loss: Option<f64>, val_losses: &BTreeMap<String, f64>) -> Self {
        let finite = |loss: f64| Some(loss).filter(|loss| loss.is_finite());
        Self {
            train_loss: train_loss.and_then(finite),
            val_losses: val_losses.iter().map(|(name, loss)| (name.clone(), finite(*loss))).collect(),
        }
    }

    /// A finite validation loss.
    pub fn val_loss(&self, name: &str) -> Option<f64> {
        self.val_losses.get(name).copied().flatten().filter(|loss| loss.is_finite())
    }
}

/// A checkpoint by name and content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    /// Its directory.
    pub name: CheckpointName,
    /// Its manifest's hash.
    pub manifest: String,
}

/// The checkpoint of another run that a run began with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkParent {
    /// Directory or URL of that run's checkpoints.
    pub run: String,
    /// Its directory's name.
    pub name: CheckpointName,
    /// Its manifest's hash.
    pub manifest: String,
    /// What was taken of it besides the weights.
    pub keep: Keep,
}

/// Why a manifest cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It ends in the middle: its writer was cut off, so nothing was committed.
    #[error("the manifest is cut off after {bytes} bytes: it was never committed")]
    Torn {
        /// Its size.
        bytes: usize,
    },
    /// Its last line does not fit its bytes: something changed them later.
    #[error("the manifest is damaged: its bytes hash to {found}, its last line says {expected}")]
    Corrupt {
        /// From the last line.
        expected: String,
        /// Of the bytes.
        found: String,
    },
    /// A newer trainctl wrote it.
    #[error("the manifest has format {0}, this trainctl reads up to {FORMAT}: use a newer trainctl")]
    Format(u32),
    /// The JSON is not a manifest.
    #[error("the manifest is not understood: {0}")]
    Content(String),
    /// A file that it names is missing or has another size.
    #[error("{path} {reason}")]
    File {
        /// Relative to the checkpoint.
        path: String,
        /// In which way.
        reason: String,
    },
}

impl Fault {
    /// The checkpoint was committed once and is damaged now; otherwise it never was (C1).
    pub fn was_committed(&self) -> bool {
        !matches!(self, Self::Torn { .. })
    }
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

impl Manifest {
    /// The file's bytes, and the manifest's hash.
    ///
    /// # Errors
    /// [`Fault::Content`] if a field has no JSON form.
    pub fn encode(&self) -> Result<(Vec<u8>, String), Fault> {
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|e| Fault::Content(e.to_string()))?;
        bytes.push(b'\n');
        let hash = blake3::hash(&bytes).to_hex().to_string();
        bytes.extend_from_slice(hash.as_bytes());
        bytes.push(b'\n');
        Ok((bytes, hash))
    }

    /// Reads what [`Manifest::encode`] wrote, and gives the manifest's hash with it. Anything else is refused: no byte
    /// is used before the hash of all of them is right.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn parse(bytes: &[u8]) -> Result<(Self, String), Fault> {
        let (content, last) = bytes.split_at(bytes.len().saturating_sub(LAST_LINE_BYTES));
        let found = blake3::hash(content).to_hex().to_string();
        let expected =
            last.strip_suffix(b"\n").filter(|hash| hash.len() == 64 && hash.iter().all(u8::is_ascii_hexdigit));
        let expected = expected.map(|hash| String::from_utf8_lossy(hash).into_owned());
        if expected.as_ref() != Some(&found) {
            // Whole but for its content, or for its last line: it was committed, and changed later. Else its end is missing.
            return Err(match expected {
                Some(expected) => Fault::Corrupt { expected, found },
                None if content.ends_with(END_OF_CONTENT) => {
                    Fault::Corrupt { expected: String::from_utf8_lossy(last).trim_end().to_owned(), found }
                }
                None => Fault::Torn { bytes: bytes.len() },
            });
        }
        let content_fault = |e: serde_json::Error| Fault::Content(e.to_string());
        let FormatOnly { format } = serde_json::from_slice(content).map_err(content_fault)?;
        if format > FORMAT {
            return Err(Fault::Format(format));
        }
        Ok((serde_json::from_slice(content).map_err(content_fault)?, found))
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// The record of one file.
    pub fn file(&self, path: &str) -> Option<&ShardFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn example(step: u64, val_loss: Option<f64>) -> Manifest {
        Manifest {
            format: FORMAT,
            name: CheckpointName { epoch: 0, step },
            job: "j-00000000".into(),
            generation: 2,
            term: 1,
            step,
            epoch: 0,
            consumed_samples: (step + 1) * 8,
            world_size: 2,
            mesh: vec![("dp_replicate".into(), 2)],
            skipped: vec![],
            metrics: Metrics {
                train_loss: Some(0.1 + 0.2),
                val_losses: val_loss.map(|loss| ("default".to_owned(), Some(loss))).into_iter().collect(),
            },
            state_hash: "00".repeat(32),
            spec_hash: "11".repeat(32),
            max_steps: 40,
            until_step: None,
            started_from: None,
            kind: SaveKind::Full,
            parent: None,
            phase: DataPhase::default(),
            corpora: BTreeMap::new(),
            created_at: "2026-11-29T22:31:14.123Z".into(),
            files: vec![],
        }
    }

    #[test]
    fn manifests_round_trip_with_every_bit_of_a_loss() {
        let manifest = example(9, Some(f64::from_bits(0x3FF1_2345_6789_ABCD)));
        let (bytes, hash) = manifest.encode().unwrap();
        assert_eq!(Manifest::parse(&bytes).unwrap(), (manifest, hash));
    }

    #[test]
    fn every_cut_is_torn_and_every_flip_is_refused() {
        let (bytes, _) = example(9, Some(3.5)).encode().unwrap();
        for end in 0..bytes.len() {
            assert_eq!(Manifest::parse(&bytes[..end]).unwrap_err(), Fault::Torn { bytes: end }, "cut at {end}");
        }
        for (at, bit) in (0..bytes.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            let fault = Manifest::parse(&flipped).unwrap_err();
            assert!(fault.was_committed(), "bit {bit} of byte {at}: damage must not make it look uncommitted: {fault}");
        }
    }

    #[test]
    fn what_is_not_finite_becomes_null() {
        let metrics = Metrics::new(Some(f64::NAN), &[("default".to_owned(), f64::INFINITY)].into());
        let text = serde_json::to_string(&metrics).unwrap();
        assert_eq!(text, r#"{"train_loss":null,"val_losses":{"default":null}}"#);
        assert_eq!(serde_json::from_str::<Metrics>(&text).unwrap(), metrics);
        assert_eq!(metrics.val_loss("default"), None);
    }

    #[test]
    fn a_newer_format_is_named() {
        let (bytes, _) = Manifest { format: 9, ..example(1, None) }.encode().unwrap();
        assert_eq!(Manifest::parse(&bytes).unwrap_err(), Fault::Format(9));
    }
}
