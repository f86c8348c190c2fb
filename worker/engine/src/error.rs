//! What can go wrong in the engine. Every variant says what, where and why; the remedy where there is one.

use trainctl_spec::Step;
pub use trainctl_spec::model::{TensorFault, TensorFaults};

/// A training run that could not start or could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The spec asks for something that this build cannot do.
    #[error("{key}: {value} is not supported: {why}")]
    Unsupported {
        /// Key of the job spec, for example `resources.device`.
        key: &'static str,
        /// What it says.
        value: String,
        /// Why not, and what to use instead.
        why: String,
    },
    /// The spec contradicts itself or this world in a way that `trainctl validate` should have caught.
    #[error("the spec cannot be trained: {0}")]
    Spec(String),
    /// A fault of the engine itself.
    #[error("internal fault of the engine, please report it: {0}")]
    Internal(String),
    /// A process group or one of its collectives failed; the text names the peer where c10d knows it.
    #[error("{what} (step {step}): {source}")]
    Collective {
        /// What was being done, for example `all-reduce the gradients of block 3`.
        what: String,
        /// Zero-based step.
        step: Step,
        /// c10d's reason.
        source: trainctl_collective::Error,
    },
    /// libtorch refused an operation.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
    /// A libtorch call of ours (`collective`) failed.
    #[error("libtorch: {0}")]
    Shim(trainctl_collective::Error),
    /// The data set could not be opened or read.
    #[error("read {what}: {source}")]
    Data {
        /// Which data set and which part of it.
        what: String,
        /// The reader's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A token id lies outside the model's vocabulary.
    #[error(
        "sample {sample} of the {set} set holds token {token}, but the model's vocab_size is {vocab}: \
         tokenizer and model.config do not belong together"
    )]
    Token {
        /// `train`, or the validation set's name.
        set: String,
        /// Sample id.
        sample: u64,
        /// The token.
        token: i64,
        /// Size of the vocabulary.
        vocab: i64,
    },
    /// Saved weights could not be read.
    #[error("load {what}: {why}")]
    Load {
        /// `checkpoint epoch_0_step_9`, or the Hugging Face directory of `model.init`.
        what: String,
        /// What failed.
        why: String,
        /// Their place is away, which says nothing of the weights: a later try may succeed.
        away: bool,
    },
    /// The saved tensors are not those of this model and optimizer. Nothing was changed.
    #[error("{what} does not fit the model; nothing was loaded:{faults}")]
    Misfit {
        /// As for [`Error::Load`].
        what: String,
        /// Every tensor that is missing, unknown or of another shape.
        faults: TensorFaults,
    },
    /// A save failed and the run cannot end without it.
    #[error("save checkpoint {name}: {why}")]
    Save {
        /// Its directory name.
        name: String,
        /// What failed.
        why: String,
    },
    /// Loss or gradient is not finite and `fault_tolerance.on_nonfinite` says `stop`. Every rank returns it at the same step.
    #[error(
        "step {step}: loss {loss}, gradient norm {grad_norm}: not finite, and fault_tolerance.on_nonfinite is stop. \
         Resume from an earlier checkpoint with a lower optimizer.lr, or set fault_tolerance.on_nonfinite: skip_step"
    )]
    NonFinite {
        /// Zero-based step.
        step: Step,
        /// Loss of the global batch.
        loss: f64,
        /// Global L2 norm.
        grad_norm: f64,
    },
}

impl Error {
    /// An [`Error::Load`] that another try would meet again.
    pub(crate) fn load(what: &str, why: impl std::fmt::Display) -> Self {
        Self::Load { what: what.to_owned(), why: why.to_string(), away: false }
    }

    /// An [`Error::Load`] of what the store answered.
    pub(crate) fn load_stored(what: &str, error: &trainctl_store::Error) -> Self {
        Self::Load { what: what.to_owned(), why: error.to_string(), away: error.is_away() }
    }

    /// An [`Error::Load`] of what the file system answered.
    pub(crate) fn load_io(what: &str, error: &std::io::Error) -> Self {
        Self::Load { what: what.to_owned(), why: error.to_string(), away: trainctl_store::is_away(error) }
    }

    /// Was it this process that failed (`true`), or did it lose a peer (`false`)? The root-cause verdict asks.
    pub fn is_own_fault(&self) -> bool {
        !matches!(self, Self::Collective { .. })
    }
}
