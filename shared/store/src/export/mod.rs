//! Export: a committed checkpoint, full or weights only, as a directory that `transformers` loads.
//!
//! - **Streaming**: tensors go through two buffers of 64 MiB, so memory does not depend on the size of the model.
//! - **Proved**: every byte is hashed before it is used, as in any load.
//! - **Whole or not at all**: files are written to a folder beside the target, which gets the target's name when all are
//!   durable. What a killed export left is removed by the next one to the same target.
//!
//! Which tensors there are and what they are called comes from [`trainctl_spec::model`]: an architecture that is added
//! there can be exported.

mod config;
mod dtype;
mod plan;
mod size;
mod target;
mod tokenizer;
mod write;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::Serialize;
use trainctl_spec::job::ModelConfigSource;
use trainctl_spec::{Architecture, JobSpec};

pub(crate) use self::target::STAGING;
pub use dtype::Dtype;
pub use size::parse_size;

use self::plan::Plan;
use self::target::Target;
use self::tokenizer::{TokenIds, Tokenizer};
use crate::batches::BATCH_BYTES;
use crate::checkpoints::{CheckpointStore, ReadPin};
use crate::error::Error;
use crate::layout::{CONFIG, CheckpointName};
use crate::shard::ShardReader;

/// Default of [`ExportOptions::max_shard_bytes`]: 5GB, as `save_pretrained` of transformers 4 has it.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// How to export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Type of the weights; `None` keeps the model's.
    pub dtype: Option<Dtype>,
    /// Largest size of a safetensors file in bytes; a larger tensor gets a file of its own.
    pub max_shard_bytes: u64,
    /// Tokenizer directory or `tokenizer.json` in place of the spec's `dataset.tokenizer`.
    pub tokenizer: Option<PathBuf>,
    /// Pin the checkpoint while it is read ([`CheckpointStore::export`]); false where no run directory is known.
    pub pin: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { dtype: None, max_shard_bytes: DEFAULT_SHARD_BYTES, tokenizer: None, pin: true }
    }
}

/// What an export made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// The directory.
    pub path: PathBuf,
    /// The checkpoint.
    pub checkpoint: CheckpointName,
    /// Its manifest's hash.
    pub manifest: String,
    /// Files in the directory, sorted.
    pub files: Vec<String>,
    /// Number of tensors.
    pub tensors: usize,
    /// Elements of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Type of the weights as `config.json` has it.
    pub dtype: &'static str,
    /// What a person should know.
    pub warnings: Vec<String>,
}

/// Gets the bytes read and the bytes to read while an export is written. After a break nothing is left at the target.
pub type Progress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Why there is no export. Nothing is left at the target.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The checkpoint cannot be read, or the target not be written.
    #[error(transparent)]
    Store(#[from] Error),
    /// `progress` said so.
    #[error("the export was stopped before its end")]
    Stopped,
    /// There is something at the target.
    #[error("cannot export to {}: {reason}", path.display())]
    Target {
        /// The target.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The spec in the checkpoint does not say which model this is.
    #[error("config.yaml of {checkpoint}: {reason}")]
    Spec {
        /// The checkpoint.
        checkpoint: String,
        /// Why not.
        reason: String,
    },
    /// The tensors are not the model's.
    #[error("the tensors of the checkpoint are not those of its model: {}", faults.join("; "))]
    Tensors {
        /// One sentence each.
        faults: Vec<String>,
    },
    /// A tensor is not of floating-point numbers.
    #[error("tensor {name} has type {dtype}, which no export casts: F32, BF16 and F16 are exported")]
    Dtype {
        /// The tensor.
        name: String,
        /// safetensors' spelling.
        dtype: String,
    },
    /// A finite value would become infinite.
    #[error("tensor {name} holds {value:e}, which {dtype} can only hold as infinity: export as bf16 or fp32")]
    Overflow {
        /// The tensor.
        name: String,
        /// The first such value.
        value: f32,
        /// The type.
        dtype: Dtype,
    },
    /// The tokenizer cannot be used.
    #[error("tokenizer {}: {reason}; name another with --tokenizer", path.display())]
    Tokenizer {
        /// The directory or file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// Writes the checkpoint that `reader` has open to the directory `to`, which must be missing or empty. Blocks.
/// `progress` gets the bytes read and the bytes to read, and may stop it. Nobody pins the checkpoint here: [`CheckpointStore::export`] does.
///
/// # Errors
/// [`ExportError`].
pub fn export(
    reader: &ShardReader,
    to: &Path,
    options: &ExportOptions,
    progress: &mut Progress<'_>,
) -> Result<Exported, ExportError> {
    export_by(reader, to, options, BATCH_BYTES, progress)
}

/// [`export`] with another size of the batches, for tests.
fn export_by(
    reader: &ShardReader,
    to: &Path,
    options: &ExportOptions,
    batch_bytes: u64,
    progress: &mut Progress<'_>,
) -> Result<Exported, ExportError> {
    let target = Target::check(to)?;
    let (spec, config, model) = read_spec(reader)?;
    let plan = Plan::new(&model, reader.tensors(), options.dtype, options.max_shard_bytes)?;
    let mut warnings = Vec::new();
    let tokenizer = find_tokenizer(options, &spec, &model, &mut warnings)?;

    let staging = target.begin()?;
    let written = (|| {
        let casts = write::write_files(reader, &plan, batch_bytes, staging.disk(), staging.folder(), progress)?;
        let ids = tokenizer.as_ref().map_or_else(TokenIds::default, |tokenizer| tokenizer.ids);
        staging.json("config.json", &config::config_json(&config, &model, plan.dtype, ids))?;
        staging.json("generation_config.json", &config::generation_json(&config, &model, ids))?;
        if let Some(index) = plan.index() {
            staging.json("model.safetensors.index.json", &index)?;
        }
        for file in tokenizer.iter().flat_map(Tokenizer::files) {
            let (name, bytes) = file?;
            staging.bytes(name, bytes)?;
        }
        Ok::<_, ExportError>(casts)
    })();
    let casts = match written {
        Ok(casts) => casts,
        Err(error) => {
            staging.discard();
            return Err(error);
        }
    };
    if casts.flushed > 0 {
        let count = casts.flushed;
        warnings.push(format!("{count} values are too small for {} and became zero", plan.dtype));
    }
    let files = staging.publish()?;
    Ok(Exported {
        path: target.path().to_owned(),
        checkpoint: reader.manifest().name,
        manifest: reader.hash().to_owned(),
        files,
        tensors: plan.tensors().count(),
        parameters: plan.parameters(),
        bytes: plan.bytes(),
        dtype: plan.dtype.torch(),
        warnings,
    })
}

type Config = serde_json::Map<String, serde_json::Value>;

fn read_spec(reader: &ShardReader) -> Result<(JobSpec, Config, Architecture), ExportError> {
    let checkpoint = reader.manifest().name.to_string();
    let fault = |reason: String| ExportError::Spec { checkpoint: checkpoint.clone(), reason };
    let bytes = reader.read_file(CONFIG)?.ok_or_else(|| fault("is not in the checkpoint".to_owned()))?;
    let text = String::from_utf8(bytes).map_err(|e| fault(e.to_string()))?;
    let spec = JobSpec::from_yaml(&text).map_err(|e| fault(e.to_string()))?;
    let ModelConfigSource::Inline(config) = spec.model.config.clone() else {
        return Err(fault("model.config names a file; a resolved spec has the config itself".to_owned()));
    };
    let model = Architecture::from_config(&config).map_err(|e| fault(e.to_string()))?;
    Ok((spec, config, model))
}

/// The tokenizer that was asked for must be there; one that the spec names may have gone since the training.
fn find_tokenizer(
    options: &ExportOptions,
    spec: &JobSpec,
    model: &Architecture,
    warnings: &mut Vec<String>,
) -> Result<Option<Tokenizer>, ExportError> {
    let max_positions = model.max_positions();
    if let Some(path) = &options.tokenizer {
        let missing = || ExportError::Tokenizer { path: path.clone(), reason: "does not exist".to_owned() };
        return Tokenizer::find(path, max_positions)?.map(Some).ok_or_else(missing);
    }
    let Some(path) = &spec.dataset.tokenizer else {
        warnings.push("the run has no dataset.tokenizer: the export has no tokenizer files".to_owned());
        return Ok(None);
    };
    let found = Tokenizer::find(path, max_positions)?;
    if found.is_none() {
        warnings.push(format!("the run's tokenizer {} is gone: the export has no tokenizer files", path.display()));
    }
    Ok(found)
}

impl CheckpointStore {
    /// [`export`] of a committed checkpoint, on a thread of its own and pinned while it is read (C9). With `manifest` it
    /// must be exactly that one. Where the run directory cannot be written the pin is left out and a warning says so: the
    /// export then fails if the checkpoint is pruned meanwhile.
    ///
    /// # Errors
    /// [`ExportError`].
    pub async fn export(
        &self,
        name: CheckpointName,
        manifest: Option<&str>,
        to: &Path,
        options: &ExportOptions,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Exported, ExportError> {
        let pin = match options.pin {
            true => Some(self.pin_to_read(name, "export").await?),
            false => None,
        };
        let (store, to, options) = (self.clone(), to.to_owned(), options.clone());
        let manifest = manifest.map(str::to_owned);
        let work = tokio::task::spawn_blocking(move || {
            let reader = store.reader(name, manifest.as_deref())?;
            export(&reader, &to, &options, &mut progress)
        });
        let result = work.await.unwrap_or_else(|stopped| Err(Error::Stopped(stopped.to_string()).into()));
        let warning = ReadPin::release_all(pin).await;
        let mut exported = result?;
        exported.warnings.extend(warning);
        Ok(exported)
    }
}

#[cfg(test)]
mod tests;
