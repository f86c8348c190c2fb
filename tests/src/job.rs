//! Job specs over the shared corpus.

use std::path::{Path, PathBuf};

use crate::corpus::{Corpus, VOCABULARY};

/// What a test chooses; the rest is the same everywhere.
#[derive(Clone, Debug)]
pub struct Job {
    /// `run_dir`.
    pub run_dir: PathBuf,
    /// World size.
    pub workers: u32,
    /// `max_steps`.
    pub steps: u64,
    /// `ckpt_every_steps`; a checkpoint step validates too.
    pub ckpt_every: u64,
    /// `val_every_steps`.
    pub val_every: u64,
    /// `seed`.
    pub seed: u64,
    /// Dropout of embeddings, attention and residuals.
    pub dropout: f64,
    /// Tokens per sample: with `layers` what makes a step slow.
    pub seq_length: u32,
    /// Layers of the model.
    pub layers: u32,
    /// `fault_tolerance.max_restarts`.
    pub max_restarts: u32,
    /// `fault_tolerance.burn_in_seconds`.
    pub burn_in: Option<f64>,
    /// Peak learning rate.
    pub lr: f64,
    /// Steps until it is reached.
    pub warmup: u64,
    /// `checkpoint.checkpoint_dir`, if it is not the run directory.
    pub checkpoint_dir: Option<String>,
    /// The data.
    pub corpus: Corpus,
}

impl Job {
    /// Two workers, 40 steps, a commit every 10: a GPT-2 of about 150,000 parameters.
    pub fn new(run_dir: impl Into<PathBuf>) -> Self {
        Self {
            run_dir: run_dir.into(),
            workers: 2,
            steps: 40,
            ckpt_every: 10,
            val_every: 10,
            seed: 1111,
            dropout: 0.1,
            seq_length: 64,
            layers: 2,
            max_restarts: 10,
            burn_in: None,
            lr: 3e-3,
            warmup: 4,
            checkpoint_dir: None,
            corpus: crate::corpus::corpus(),
        }
    }

    /// The same with steps that take long enough for something to happen between two of them.
    #[must_use]
    pub fn slow(mut self) -> Self {
        self.seq_length = 128;
        self.layers = 3;
        self
    }

    /// The spec's text.
    pub fn yaml(&self) -> String {
        let Self {
            workers,
            steps,
            ckpt_every,
            val_every,
            seed,
            dropout,
            seq_length,
            layers,
            max_restarts,
            lr,
            warmup,
            ..
        } = self;
        let burn_in = self.burn_in.map_or_else(String::new, |seconds| format!("  burn_in_seconds: {seconds}\n"));
        let place = |place| format!("checkpoint:\n  checkpoint_dir: {place}\n");
        let checkpoint = self.checkpoint_dir.as_ref().map_or_else(String::new, place);
        let [run_dir, prefix, tokenizer, index] =
            [&self.run_dir, &self.corpus.prefix, &self.corpus.tokenizer, &self.corpus.index]
                .map(|path| path.display().to_string());
        format!(
            "\
name: tiny
run_dir: {run_dir}
seed: {seed}
resources:
  workers: {workers}
  threads_per_worker: 1
model:
  config:
    model_type: gpt2
    vocab_size: {VOCABULARY}
    n_positions: {seq_length}
    n_embd: 64
    n_layer: {layers}
    n_head: 4
    embd_pdrop: {dropout}
    resid_pdrop: {dropout}
    attn_pdrop: {dropout}
dataset:
  paths: {prefix}
  index_mapping_dir: {index}
  tokenizer: {tokenizer}
  seq_length: {seq_length}
  split: \"90,10,0\"
validation_dataset:
  num_val_samples: 8
step_scheduler:
  global_batch_size: 8
  local_batch_size: 2
  max_steps: {steps}
  ckpt_every_steps: {ckpt_every}
  val_every_steps: {val_every}
optimizer:
  lr: {lr}
lr_scheduler:
  lr_warmup_steps: {warmup}
clip_grad_norm:
  max_norm: 1.0
fault_tolerance:
  max_restarts: {max_restarts}
{burn_in}{checkpoint}"
        )
    }

    /// Writes the spec.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> PathBuf {
        std::fs::write(&path, self.yaml()).unwrap();
        path.as_ref().to_owned()
    }
}
