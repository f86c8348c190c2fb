//! Evaluation on a held-out set: Σ token losses ÷ Σ label tokens over the whole set, without dropout.

use trainctl_dataset::batch;
use trainctl_spec::Step;
use trainctl_spec::job::{JobSpec, ValidationDataset};

use crate::Error;
use crate::data::Source;
use crate::executor::Executor;
use crate::parallel::World;
use crate::params::Parameters;
use crate::pulse::Collective;

/// One validation set and how much of it an evaluation reads.
pub struct ValidationSet {
    /// `default` for `validation_dataset`, else the name after `validation_dataset_`.
    pub name: String,
    /// The data.
    pub source: Source,
    /// Samples of one evaluation.
    pub num_samples: u64,
}

/// Result of an evaluation, equal on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Σ token losses ÷ Σ label tokens.
    pub loss: f64,
    /// Σ label tokens.
    pub num_label_tokens: u64,
}

/// Which rank this is and how it cuts its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// This rank.
    pub rank: u32,
    /// Ranks that share the work.
    pub size: u32,
    /// Sequences per micro-batch.
    pub local_batch_size: u32,
}

/// Samples of one evaluation when the spec does not say: (max_steps ÷ val_every_steps) · global_batch_size, at least one
/// global batch. Without `val_every_steps` evaluations happen at checkpoints.
pub fn num_samples(spec: &JobSpec, set: &ValidationDataset) -> u64 {
    let scheduler = &spec.step_scheduler;
    let every = scheduler.val_every_steps.filter(|&n| n > 0).unwrap_or(scheduler.ckpt_every_steps).max(1);
    let batches = (scheduler.max_steps / every).max(1);
    set.num_val_samples.unwrap_or_else(|| batches * u64::from(scheduler.global_batch_size))
}

/// Evaluates `set`. Samples 0, 1, … are cut into micro-batches exactly as a training step's are and dealt to ranks the
/// same way (D2); sums are in f64, so the result depends on the world size by rounding only.
pub fn evaluate(
    executor: &mut Executor,
    params: &Parameters,
    set: &mut ValidationSet,
    world: &World,
    share: Share,
    step: Step,
) -> Result<Evaluation, Error> {
    let cut = batch::micro_batches(0..set.num_samples, share.local_batch_size);
    let mut sums = [0.0, 0.0];
    for range in &cut[batch::assign(cut.len(), share.rank, share.size)] {
        let batch = set.source.batch(range.clone(), range.start)?;
        sums[0] += executor.evaluate(params, &batch)?;
        sums[1] += batch.targets.numel() as f64;
    }
    let sums = world.sum(&sums, Collective::Validation, step)?;
    Ok(Evaluation { loss: sums[0] / sums[1], num_label_tokens: sums[1] as u64 })
}
