//! The job spec's sections as types. Key names are NeMo AutoModel's wherever it has one.
//!
//! These types are what daemons work with: resolved, checked, with every default filled in. Parsing with positions,
//! overrides and the checks across fields live beside them.

mod checkpoint;

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use checkpoint::{Checkpoint, SaveConsolidated, WhenBusy};

/// One training run, from `job.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// Name of the run: letters, digits, `.`, `_`, `-`.
    #[schemars(regex(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"))]
    pub name: String,
    /// POSIX directory that all nodes see. Absolute once resolved.
    pub run_dir: PathBuf,
    /// Seed of weights and dropout.
    #[serde(default = "defaults::seed")]
    pub seed: u64,
    /// Same bits after any restart at the same layout (P4). Defaults to true on CPU.
    #[serde(default = "defaults::yes")]
    pub deterministic: bool,
    /// How many workers, on what.
    #[serde(default)]
    pub resources: Resources,
    /// The architecture and its initial weights.
    pub model: Model,
    /// Training data.
    pub dataset: Dataset,
    /// Validation sets by name: `validation_dataset` is "default", `validation_dataset_web` is "web".
    #[serde(default)]
    pub validation_datasets: BTreeMap<String, ValidationDataset>,
    /// Batch sizes and what happens every so many steps.
    pub step_scheduler: StepScheduler,
    /// How the model is spread over ranks.
    #[serde(default)]
    pub distributed: Distributed,
    /// Compute precision.
    #[serde(default)]
    pub precision: Precision,
    /// The optimizer.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Learning-rate schedule.
    #[serde(default)]
    pub lr_scheduler: LrScheduler,
    /// Gradient clipping.
    #[serde(default)]
    pub clip_grad_norm: ClipGradNorm,
    /// How the loss is computed.
    #[serde(default)]
    pub loss_fn: LossFn,
    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: Checkpoint,
    /// Restarts and what to do about non-finite losses.
    #[serde(default)]
    pub fault_tolerance: FaultTolerance,
    /// Process-group settings.
    #[serde(default)]
    pub dist_env: DistEnv,
    /// Shell command to run after each commit, with the checkpoint's path in its environment.
    #[serde(default)]
    pub on_commit: Option<String>,
    /// Shell command to run when the job has ended, however it did.
    #[serde(default)]
    pub on_end: Option<String>,
}

/// `resources`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Resources {
    /// World size: one worker is one rank.
    #[schemars(range(min = 1, max = 65536))]
    pub workers: u32,
    /// Further workers that wait to take the place of a lost one; whoever starts workers starts so many more.
    #[schemars(range(max = 65536))]
    pub spares: u32,
    /// `cpu` or `cuda`.
    pub device: Device,
    /// Intra-op threads of each rank; resolved at submit to max(1, cores ÷ workers on the node).
    #[schemars(range(min = 1, max = 4096))]
    pub threads_per_worker: Option<u32>,
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// Gloo, host memory.
    #[default]
    Cpu,
    /// NCCL, one GPU a rank.
    Cuda,
}

/// `model`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Path of a Hugging Face `config.json` or of the directory that holds it, or the same keys inline.
    pub config: ModelConfigSource,
    /// `random`, or a Hugging Face directory whose weights the run starts with.
    #[serde(default)]
    pub init: ModelInit,
}

/// Where the architecture comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ModelConfigSource {
    /// A file; resolving replaces it by its contents.
    Path(PathBuf),
    /// The keys of `config.json` inline.
    Inline(serde_json::Map<String, serde_json::Value>),
}

/// Initial weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "String", into = "String")]
#[schemars(with = "String")]
pub enum ModelInit {
    /// The architecture's own initialisation from `seed`.
    #[default]
    Random,
    /// The weights of a Hugging Face directory.
    HuggingFace(String),
}

impl From<String> for ModelInit {
    fn from(text: String) -> Self {
        if text == "random" { Self::Random } else { Self::HuggingFace(text) }
    }
}

impl From<ModelInit> for String {
    fn from(init: ModelInit) -> Self {
        match init {
            ModelInit::Random => "random".to_owned(),
            ModelInit::HuggingFace(directory) => directory,
        }
    }
}

/// `dataset`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dataset {
    /// Prefixes of `.bin/.idx` pairs, with optional weights.
    #[schemars(schema_with = "crate::schema::paths")]
    pub paths: Vec<WeightedPath>,
    /// Where index caches go; default `<prefix>/cache`.
    #[serde(default)]
    pub index_mapping_dir: Option<PathBuf>,
    /// Directory with `tokenizer.json`, or the file.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    /// Tokens per sample.
    #[schemars(range(min = 1, max = 16777216))]
    pub seq_length: u32,
    /// Train, validation and test shares, for example `99,1,0`.
    #[serde(default = "defaults::split")]
    pub split: String,
    /// Seed of the shuffles.
    #[serde(default = "defaults::data_seed")]
    pub seed: u32,
}

/// One corpus of a blend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightedPath {
    /// Prefix without `.bin`/`.idx`.
    pub prefix: PathBuf,
    /// Sampling weight; all or none of a blend have one.
    #[serde(default)]
    pub weight: Option<f64>,
}

/// `validation_dataset[_name]`: what it does not say it inherits from `dataset`.
///
/// Written flat: `num_val_samples` stands among the keys of a dataset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "FlatValidationDataset", into = "FlatValidationDataset")]
pub struct ValidationDataset {
    /// The data; the split's second share is read.
    pub dataset: Dataset,
    /// Samples of one evaluation; default (max_steps ÷ val_every_steps) · global_batch_size.
    pub num_val_samples: Option<u64>,
}

/// How a [`ValidationDataset`] is written. Serde's `flatten` would switch `deny_unknown_fields` off.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FlatValidationDataset {
    #[schemars(schema_with = "crate::schema::paths")]
    paths: Vec<WeightedPath>,
    #[serde(default)]
    index_mapping_dir: Option<PathBuf>,
    #[serde(default)]
    tokenizer: Option<PathBuf>,
    #[schemars(range(min = 1, max = 16777216))]
    seq_length: u32,
    #[serde(default = "defaults::split")]
    split: String,
    #[serde(default = "defaults::data_seed")]
    seed: u32,
    /// Samples of one evaluation; default (max_steps ÷ val_every_steps) · global_batch_size.
    #[serde(default)]
    #[schemars(range(min = 1))]
    num_val_samples: Option<u64>,
}

impl From<FlatValidationDataset> for ValidationDataset {
    fn from(flat: FlatValidationDataset) -> Self {
        let FlatValidationDataset { paths, index_mapping_dir, tokenizer, seq_length, split, seed, num_val_samples } =
            flat;
        Self { dataset: Dataset { paths, index_mapping_dir, tokenizer, seq_length, split, seed }, num_val_samples }
    }
}

impl From<ValidationDataset> for FlatValidationDataset {
    fn from(set: ValidationDataset) -> Self {
        let Dataset { paths, index_mapping_dir, tokenizer, seq_length, split, seed } = set.dataset;
        Self { paths, index_mapping_dir, tokenizer, seq_length, split, seed, num_val_samples: set.num_val_samples }
    }
}

/// `step_scheduler`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepScheduler {
    /// Sequences per optimizer step over all ranks.
    #[serde(default = "defaults::global_batch")]
    #[schemars(range(min = 1))]
    pub global_batch_size: u32,
    /// Sequences per micro-batch.
    #[serde(default = "defaults::one")]
    #[schemars(range(min = 1))]
    pub local_batch_size: u32,
    /// Optimizer steps of the whole run: the horizon of schedule and sample index.
    #[schemars(range(min = 1))]
    pub max_steps: u64,
    /// Save every so many steps.
    #[serde(default = "defaults::ckpt_every")]
    #[schemars(range(min = 1))]
    pub ckpt_every_steps: u64,
    /// Validate every so many steps; a checkpoint step always validates.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub val_every_steps: Option<u64>,
}

/// `distributed`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Distributed {
    /// `ddp`.
    pub strategy: Strategy,
}

/// Data-parallel strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Replicated weights, reduced gradients.
    #[default]
    Ddp,
}

/// `precision`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats throughout.
    #[default]
    Fp32,
    /// bf16 compute with fp32 master weights.
    Bf16,
}

/// `optimizer`: AdamW with fp32 state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// `adamw`.
    pub name: OptimizerName,
    /// Peak learning rate.
    pub lr: f64,
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Which parameters decay: `all` (NeMo AutoModel's rule) or `matrices` (llm.c's: two-dimensional ones).
    pub decay: DecayRule,
}

/// Known optimizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Loshchilov & Hutter, decoupled weight decay.
    #[default]
    Adamw,
}

/// Which parameters get weight decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DecayRule {
    /// Every parameter.
    #[default]
    All,
    /// Parameters of two or more dimensions.
    Matrices,
}

/// `lr_scheduler`, Megatron's OptimizerParamScheduler. Unset values resolve to the defaults that each names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LrScheduler {
    /// `cosine` by default.
    pub lr_decay_style: LrDecayStyle,
    /// Default min(1000, max_steps ÷ 10).
    pub lr_warmup_steps: Option<u64>,
    /// Default max_steps.
    #[schemars(range(min = 1))]
    pub lr_decay_steps: Option<u64>,
    /// Default 0.1 · lr.
    pub init_lr: Option<f64>,
    /// Default optimizer.lr.
    pub max_lr: Option<f64>,
    /// Default 0.01 · lr.
    pub min_lr: Option<f64>,
}

/// Shape of the decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LrDecayStyle {
    /// max_lr after the warm-up.
    Constant,
    /// Straight line to min_lr.
    Linear,
    /// Half a cosine to min_lr.
    #[default]
    Cosine,
}

/// `clip_grad_norm`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClipGradNorm {
    /// Largest global L2 norm of the gradients.
    pub max_norm: f64,
}

/// `loss_fn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LossFn {
    /// Linear head and cross-entropy in chunks of rows; the full logits never exist.
    #[default]
    Chunked,
    /// Plain cross-entropy: the reference.
    Masked,
}

/// `fault_tolerance`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FaultTolerance {
    /// Restarts before the job fails; a commit refills it (J5).
    pub max_restarts: u32,
    /// What to do when loss or gradient is not finite.
    pub on_nonfinite: OnNonfinite,
    /// When a run that makes no progress is taken for hung.
    pub hang: HangDetection,
    /// At each save, compare what the ranks hold, and commit nothing on which they differ.
    pub compare_replicas: bool,
    /// What to do about a rank that holds the others up.
    pub stragglers: Stragglers,
    /// How long devices that have not proved themselves compute before a generation loads, seconds; 0 = never. Without it: 5 on
    /// cuda; on cpu 5 where a rank is suspected of silent corruption, else not at all.
    // Not filled in by resolving: "off, since the device is a CPU" still checks suspects, and a written 0 does not.
    #[schemars(range(min = 0, max = 60))]
    pub burn_in_seconds: Option<f64>,
}

/// What to do about a rank whose steps take much longer than the others'.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stragglers {
    /// Show and log it.
    #[default]
    Observe,
    /// Save, and go on from there with a spare worker in its place, if there is one.
    Evict,
}

/// `fault_tolerance.hang`: how long a rank may stay in a phase without progress. The deadline of a phase is the larger of its
/// floor here and `factor` × what the run has needed for it so far (the median of its steps, the longest of the other phases).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HangDetection {
    /// Whether hangs are looked for.
    pub enabled: bool,
    /// How much longer than before a phase may take.
    pub factor: u32,
    /// Floor for a trainer to start, and to end after its last step.
    pub start_seconds: u32,
    /// Floor for the ranks to meet.
    pub rendezvous_seconds: u32,
    /// Floor for loading data indices, weights and optimizer state.
    pub load_seconds: u32,
    /// Floor for the first step of a generation.
    pub first_step_seconds: u32,
    /// Floor for any other step.
    pub step_seconds: u32,
    /// Floor for an evaluation.
    pub validate_seconds: u32,
    /// Floor for a snapshot, with the wait for the save before.
    pub save_seconds: u32,
}

/// What to do when loss or gradient is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnNonfinite {
    /// Fail the job with that cause.
    #[default]
    Stop,
    /// Leave the weights as they are and go on.
    SkipStep,
}

/// `dist_env`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DistEnv {
    /// Deadline for one collective, minutes.
    pub timeout_minutes: f64,
}

impl Default for Resources {
    fn default() -> Self {
        Self { workers: 1, spares: 0, device: Device::Cpu, threads_per_worker: None }
    }
}

impl Default for Optimizer {
    fn default() -> Self {
        Self {
            name: OptimizerName::Adamw,
            lr: 1e-4,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            decay: DecayRule::All,
        }
    }
}

impl Default for ClipGradNorm {
    fn default() -> Self {
        Self { max_norm: 1.0 }
    }
}

impl Default for FaultTolerance {
    fn default() -> Self {
        Self {
            max_restarts: 10,
            on_nonfinite: OnNonfinite::Stop,
            hang: HangDetection::default(),
            compare_replicas: true,
            stragglers: Stragglers::Observe,
            burn_in_seconds: None,
        }
    }
}

impl Default for HangDetection {
    fn default() -> Self {
        Self {
            enabled: true,
            factor: 10,
            start_seconds: 120,
            rendezvous_seconds: 300,
            load_seconds: 1_800,
            first_step_seconds: 600,
            step_seconds: 60,
            validate_seconds: 1_800,
            save_seconds: 1_800,
        }
    }
}

impl Default for DistEnv {
    fn default() -> Self {
        Self { timeout_minutes: 30.0 }
    }
}

impl JobSpec {
    /// The validation set whose loss moves LOWEST_VAL: the spec's, else "default", else the only one.
    #[must_use]
    pub fn best_metric_key(&self) -> &str {
        let mut names = self.validation_datasets.keys();
        match (&self.checkpoint.best_metric_key, names.next(), names.next()) {
            (Some(key), _, _) => key,
            (None, Some(only), None) => only,
            _ => "default",
        }
    }
}

/// Defaults that parsing and deserialising share.
pub(crate) mod defaults {
    pub(crate) const SEED: u64 = 42;
    pub(crate) const DATA_SEED: u32 = 1234;
    pub(crate) const GLOBAL_BATCH: u32 = 32;
    pub(crate) const CKPT_EVERY: u64 = 100;

    pub(crate) fn seed() -> u64 {
        SEED
    }

    pub(crate) fn data_seed() -> u32 {
        DATA_SEED
    }

    pub(crate) fn split() -> String {
        "1,0,0".to_owned()
    }

    pub(crate) fn global_batch() -> u32 {
        GLOBAL_BATCH
    }

    pub(crate) fn ckpt_every() -> u64 {
        CKPT_EVERY
    }

    pub(crate) fn one() -> u32 {
        1
    }

    pub(crate) fn yes() -> bool {
        true
    }
}
