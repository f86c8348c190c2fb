//! What a rank reports while it runs: phases, metric rows, durable shards.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a trainer is doing. Each phase has its own deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The process exists and has not asked for its assignment yet.
    Starting,
    /// Making process groups through the rendezvous store.
    Rendezvous,
    /// Reading data indices, weights and optimizer state.
    Loading,
    /// Training steps.
    Stepping,
    /// Evaluating on a validation set.
    Validating,
    /// Copying a snapshot, or waiting for the previous save to end.
    Saving,
    /// Done: only closing down.
    Finished,
}

impl Phase {
    /// As a participle, for messages: "rank 1 was killed while stepping".
    #[must_use]
    pub fn doing(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Rendezvous => "meeting the other ranks",
            Self::Loading => "loading",
            Self::Stepping => "stepping",
            Self::Validating => "validating",
            Self::Saving => "saving",
            Self::Finished => "finishing",
        }
    }
}

/// One row of `training.jsonl`. Key order is NeMo AutoModel's; `generation` is ours and comes last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainRow {
    /// Zero-based optimizer step.
    pub step: u64,
    /// Zero-based epoch.
    pub epoch: u64,
    /// UTC with milliseconds, for example `2026-11-29T22:31:14.123Z`.
    pub timestamp: String,
    /// Sum of token losses over the global batch ÷ its number of label tokens. JSON has no NaN: null in the file.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
    /// Global L2 norm before clipping; null in the file when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f64,
    /// Learning rate that the next step will use, as NeMo AutoModel logs it.
    pub lr: f64,
    /// Peak memory since the last row, GiB.
    pub mem: f64,
    /// Tokens per second over all ranks.
    pub tps: f64,
    /// Tokens per second and rank.
    pub tps_per_gpu: f64,
    /// Model FLOPs utilisation; null when the device's peak is unknown.
    pub mfu: Option<f64>,
    /// Tokens of the global batch.
    pub num_tokens_per_step: u64,
    /// Supervised tokens of the global batch.
    pub num_label_tokens: u64,
    /// Generation that made the row.
    pub generation: u64,
}

/// One row of `validation[_name].jsonl`; `name` chooses the file and is not written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationRow {
    /// `default` for `validation_dataset`, else the name after `validation_dataset_`.
    #[serde(skip, default)]
    pub name: String,
    /// Zero-based optimizer step after which it was evaluated.
    pub step: u64,
    /// Zero-based epoch.
    pub epoch: u64,
    /// UTC with milliseconds.
    pub timestamp: String,
    /// Σ token losses ÷ Σ label tokens; null in the file when it is not finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub val_loss: f64,
    /// Learning rate, as in the training row.
    pub lr: f64,
    /// Label tokens evaluated.
    pub num_label_tokens: u64,
    /// Peak memory, GiB.
    pub mem: f64,
    /// Generation that made the row.
    pub generation: u64,
}

/// One file that a rank has written, synced and hashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFile {
    /// Path relative to the checkpoint's directory.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// blake3 of the whole file, lower-case hexadecimal.
    pub blake3: String,
    /// Chaining values of the successive blocks of 8 MiB, lower-case hexadecimal: the subtrees of `blake3`'s own tree, so
    /// that one pass gives both. Empty for a file of one block or none, which `blake3` proves by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub block_blake3: Vec<String>,
    /// Of a safetensors file: its header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<FileHeader>,
}

/// The part of a safetensors file that comes before its tensors. With a hash of its own it can be read without the rest of
/// its block, and damage to it told from damage to a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHeader {
    /// Bytes from the start of the file to the first tensor.
    pub size: u64,
    /// blake3 of these bytes, lower-case hexadecimal.
    pub blake3: String,
}

/// Digests of a run of whole 1,024-element blocks of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDigest {
    /// `model/<name>` or `optim/<name>`.
    pub name: String,
    /// safetensors spelling: `F32`, `BF16`, `I64`, …
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// First block that `blocks` covers.
    pub first_block: u64,
    /// blake3 of each block.
    pub blocks: Vec<[u8; 32]>,
}

/// What a save holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveKind {
    /// Weights and optimizer state: a checkpoint that a run can go on from.
    #[default]
    Full,
    /// bf16 weights alone (`checkpoint.weights_every_steps`).
    Weights,
}

/// Digests of a rank's replica of the state at a save. Pieces of the state add up: the sum of all ranks' `written` is `held`,
/// if each wrote what all hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaDigest {
    /// Of all that the rank holds: equal on all ranks.
    pub held: u128,
    /// Of the share that it wrote; absent where that is not a copy of what it holds (weights that were rounded to bf16).
    pub written: Option<u128>,
}

/// A rank's part of a checkpoint is durable.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardReport {
    /// What was saved.
    pub kind: SaveKind,
    /// Zero-based step whose state was saved.
    pub step: u64,
    /// Directory name, for example `epoch_0_step_999`.
    pub checkpoint: String,
    /// The rank's files.
    pub files: Vec<ShardFile>,
    /// The rank's tensors.
    pub tensors: Vec<TensorDigest>,
    /// Sampler positions consumed up to and including `step`.
    pub consumed_samples: u64,
    /// Train loss of that step (rank 0 only).
    pub train_loss: Option<f64>,
    /// Validation losses of that step by name (rank 0 only).
    pub val_losses: BTreeMap<String, f64>,
    /// Samples of each corpus, by its prefix, used up to and including `step` (rank 0 only).
    pub corpora: BTreeMap<String, u64>,
    /// How long training stood still for the snapshot, seconds.
    pub stall_seconds: f64,
    /// From the snapshot's end until the rank's files were durable, seconds.
    pub write_seconds: f64,
    /// What the rank's replica of the state was like; absent in the report of a trainer that does not say.
    pub replica: Option<ReplicaDigest>,
}

/// What a rank's device did in a burn-in, before the ranks load.
#[derive(Clone, Debug, PartialEq)]
pub struct BurnInReport {
    /// Digest of the first product: equal on all ranks whose devices are of one kind.
    pub digest: u128,
    /// Products that were compared with the first.
    pub rounds: u64,
    /// Those of them that differed from it.
    pub wrong_rounds: u64,
    /// How long that took, seconds.
    pub seconds: f64,
    /// 10⁹ floating-point operations a second, the comparisons' time included.
    pub gigaflops: f64,
    /// The sum over the ranks of this host; absent where there is no other, or no other host.
    pub node_sum: Option<SumCheck>,
    /// The sum over all ranks; absent where there is no other.
    pub world_sum: Option<SumCheck>,
    /// What the device is called: devices of one name compute the same bits. Empty = not known.
    pub device: String,
    /// What was computed, for people: `matmul of 1024×1024 in fp32`.
    pub work: String,
}

/// An all-reduce whose result is known beforehand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumCheck {
    /// How long it took once all had come, seconds.
    pub seconds: f64,
    /// Elements of the sum that were not what they must be.
    pub wrong_elements: u64,
}

/// Why a trainer ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishCause {
    /// `max_steps` are done.
    Complete,
    /// `--until-step` is reached.
    UntilStep,
    /// A stop request that every rank saw at this step.
    Stopped,
}

/// serde_json writes what is not finite as null.
fn null_is_nan<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_a_skipped_step_can_be_read_back() {
        let row = ValidationRow {
            name: String::new(),
            step: 3,
            epoch: 0,
            timestamp: String::new(),
            val_loss: f64::NAN,
            lr: 1.0,
            num_label_tokens: 1,
            mem: 1.0,
            generation: 1,
        };
        let text = serde_json::to_string(&row).expect("JSON");
        assert!(text.contains(r#""val_loss":null"#), "{text}");
        let back: ValidationRow = serde_json::from_str(&text).expect("row");
        assert!(back.val_loss.is_nan());
    }
}
