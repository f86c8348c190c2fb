//! `checkpoint`: what is saved, where it goes, how long it stays.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `checkpoint`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    /// Where checkpoints and pointers go: a directory or a URL (`s3://bucket/prefix`); default: the run directory.
    pub checkpoint_dir: Option<String>,
    /// Keep the newest so many commits, besides pointer targets; absent = all.
    #[schemars(range(min = 1))]
    pub max_recent_checkpoints: Option<u32>,
    /// Also keep each commit at which a multiple of so many steps is done.
    #[schemars(range(min = 1))]
    pub keep_every_steps: Option<u64>,
    /// Validation set whose loss moves LOWEST_VAL; default "default", else the only one.
    pub best_metric_key: Option<String>,
    /// What a save does while the one before is still being written.
    pub when_busy: WhenBusy,
    /// Failed saves in a row after which the job stops; absent = it goes on on its last commit.
    #[schemars(range(min = 1))]
    pub max_failures: Option<u32>,
    /// When a Hugging Face directory is written into a checkpoint.
    #[schemars(schema_with = "crate::schema::save_consolidated")]
    pub save_consolidated: SaveConsolidated,
    /// Save bf16 weights alone every so many steps, apart from the checkpoints.
    #[schemars(range(min = 1))]
    pub weights_every_steps: Option<u64>,
    /// Keep the newest so many of those; absent = all.
    #[schemars(range(min = 1))]
    pub max_recent_weights: Option<u32>,
    /// Start from another run's checkpoint while this run has none: a run directory or URL, with or without `/<name>`.
    pub restore_from: Option<String>,
    /// Of `restore_from` take the weights only: optimizer, data and schedule begin anew.
    pub weights_only: bool,
}

/// What a save does while the one before is still being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WhenBusy {
    /// Training waits until it is written.
    #[default]
    Wait,
    /// The new save is left out, and the run says so. A run's last save always waits.
    Skip,
}

/// When a Hugging Face directory (`model/consolidated/`) is written into a checkpoint. The names are NeMo AutoModel's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SaveConsolidated {
    /// Never; `trainctl export` makes one at any time.
    False,
    /// Into the last checkpoint of a run that reaches its end.
    #[default]
    Final,
    /// Into each checkpoint, after its commit.
    Every,
}
