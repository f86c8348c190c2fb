//! Models without torch: Hugging Face `config.json` → architecture, every tensor's name and shape, parameter count, FLOPs
//! and memory.
//!
//! Nothing is guessed: an architecture that the engine does not build, or an option that it would compute differently, is an
//! error that names the key.

mod config;
mod fit;
mod gpt2;

use std::fmt;

use serde_json::{Map, Value};

pub use self::config::ConfigError;
pub use self::fit::{Fit, Saved, TensorFault, TensorFaults, WEIGHT_TYPES};
pub use self::gpt2::{Activation, Gpt2Config};

/// An architecture that the engine builds.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    /// GPT-2 (Radford et al. 2019), as `transformers` lays it out.
    Gpt2(Gpt2Config),
}

/// How a tensor begins with `init: random`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
}

/// One trainable tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Hugging Face's name, for example `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Shape as stored. GPT-2's Conv1D weights are [in, out].
    pub shape: Vec<u64>,
    /// How it begins.
    pub init: Init,
}

impl Parameter {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether it has two or more dimensions: `optimizer.decay: matrices` decays those only.
    #[must_use]
    pub fn is_matrix(&self) -> bool {
        self.shape.len() >= 2
    }
}

/// Bytes of training state, before activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights in the compute precision.
    pub weights: u64,
    /// fp32 master weights, when the compute precision is bf16.
    pub master: u64,
    /// fp32 gradients.
    pub gradients: u64,
    /// AdamW's two fp32 moments.
    pub optimizer: u64,
}

impl Memory {
    /// Sum of all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.weights + self.master + self.gradients + self.optimizer
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        write!(
            f,
            "{} MiB (weights {}, master {}, gradients {}, optimizer {})",
            mib(self.total()),
            mib(self.weights),
            mib(self.master),
            mib(self.gradients),
            mib(self.optimizer)
        )
    }
}

impl Architecture {
    /// Reads the keys of a Hugging Face `config.json`.
    ///
    /// # Errors
    /// The first key whose value is missing, wrong, or asks for something that is not built.
    pub fn from_config(config: &Map<String, Value>) -> Result<Self, ConfigError> {
        let named =
            config.get("architectures").and_then(Value::as_array).and_then(|list| list.first()).and_then(Value::as_str);
        match (config.get("model_type").and_then(Value::as_str), named) {
            // The base model's keys are the same; the head is ours to add.
            (Some("gpt2"), None | Some("GPT2LMHeadModel" | "GPT2Model"))
            | (None, Some("GPT2LMHeadModel" | "GPT2Model")) => Gpt2Config::from_config(config).map(Self::Gpt2),
            (Some("gpt2"), Some(other)) => {
                Err(ConfigError::new("architectures", other, "must be GPT2LMHeadModel or GPT2Model"))
            }
            (Some(other), _) => Err(ConfigError::new("model_type", other, "must be gpt2")),
            (None, Some(other)) => {
                Err(ConfigError::new("architectures", other, "must be GPT2LMHeadModel or GPT2Model"))
            }
            (None, None) => Err(ConfigError::missing("model_type", "must be gpt2")),
        }
    }

    /// Every trainable tensor: embeddings, then block by block, then the final norm, then an untied head.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        match self {
            Self::Gpt2(config) => config.parameters(),
        }
    }

    /// Number of trainable parameters; a tied head counts once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(Parameter::elements).sum()
    }

    /// FLOPs of forward and backward per token at this sequence length (PaLM appendix B: 6 a weight, plus attention).
    #[must_use]
    pub fn flops_per_token(&self, seq_length: u32) -> f64 {
        match self {
            Self::Gpt2(config) => config.flops_per_token(seq_length),
        }
    }

    /// Training state of one replica under ddp.
    #[must_use]
    pub fn memory(&self, precision: crate::job::Precision) -> Memory {
        let count = self.parameter_count();
        let bf16 = precision == crate::job::Precision::Bf16;
        Memory {
            weights: count * if bf16 { 2 } else { 4 },
            master: if bf16 { count * 4 } else { 0 },
            gradients: count * 4,
            optimizer: count * 8,
        }
    }

    /// Rows of the token embedding: token ids must be below it.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        match self {
            Self::Gpt2(config) => config.vocab_size,
        }
    }

    /// The class of `transformers` that has these tensors: `architectures` of a `config.json`.
    #[must_use]
    pub fn class_name(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "GPT2LMHeadModel",
        }
    }

    /// `model_type` of a `config.json`.
    #[must_use]
    pub fn model_type(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "gpt2",
        }
    }

    /// Whether the output head is the token embedding, so that it has no tensor of its own.
    #[must_use]
    pub fn ties_embeddings(&self) -> bool {
        match self {
            Self::Gpt2(config) => config.tie_word_embeddings,
        }
    }

    /// The ids of the begin and the end of a text that `transformers` takes where a `config.json` has none.
    #[must_use]
    pub fn default_token_ids(&self) -> (u32, u32) {
        match self {
            Self::Gpt2(_) => (50256, 50256),
        }
    }

    /// Longest sequence that it can take.
    #[must_use]
    pub fn max_positions(&self) -> u32 {
        match self {
            Self::Gpt2(config) => config.n_positions,
        }
    }
}

#[cfg(test)]
mod tests;
