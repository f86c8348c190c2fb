//! Rules about what is saved, where, for how long, and what a run starts with.

use super::Checker;
use crate::job::{ModelInit, SaveConsolidated};
use crate::model::Architecture;

impl Checker<'_> {
    pub(super) fn validation(&mut self) {
        let names: Vec<_> = self.spec.validation_datasets.keys().map(String::as_str).collect();
        match (&self.spec.checkpoint.best_metric_key, names.as_slice()) {
            (Some(name), []) => {
                self.error(
                    "checkpoint.best_metric_key",
                    name,
                    "names a validation set, and the spec has none: add validation_dataset",
                );
            }
            (Some(name), names) if !names.contains(&name.as_str()) => {
                let message = format!("must be one of the validation sets: {}", names.join(", "));
                self.error("checkpoint.best_metric_key", name, message);
            }
            (None, [_, _, ..]) => {
                let message = format!("missing, so LOWEST_VAL never moves; name one of {}", names.join(", "));
                self.warn("checkpoint.best_metric_key", "", message);
            }
            _ => {}
        }
        if names.is_empty()
            && let Some(every) = self.spec.step_scheduler.val_every_steps
        {
            self.warn("step_scheduler.val_every_steps", every, "has no effect without a validation_dataset");
        }
    }

    /// Keys that say how saves are kept, and have no effect or not the one that was wanted.
    pub(super) fn saves(&mut self) {
        let (steps, keep) = (&self.spec.step_scheduler, &self.spec.checkpoint);
        if let Some(every) = keep.keep_every_steps {
            if keep.max_recent_checkpoints.is_none() {
                let message = "has no effect: without checkpoint.max_recent_checkpoints every checkpoint is kept";
                self.warn("checkpoint.keep_every_steps", every, message);
            } else if common_multiple(every, steps.ckpt_every_steps).is_none_or(|first| first > steps.max_steps) {
                let message = format!(
                    "keeps nothing: no step that is saved (ckpt_every_steps = {}, max_steps = {}) is a multiple of it. Make it a multiple of ckpt_every_steps",
                    steps.ckpt_every_steps, steps.max_steps
                );
                self.warn("checkpoint.keep_every_steps", every, message);
            }
        }
        match (keep.weights_every_steps, keep.max_recent_weights) {
            (None, Some(recent)) => {
                let message = "has no effect without checkpoint.weights_every_steps";
                self.warn("checkpoint.max_recent_weights", recent, message);
            }
            (Some(every), _) if every > steps.max_steps => {
                let message = format!("is beyond max_steps = {}: no weights are saved apart", steps.max_steps);
                self.warn("checkpoint.weights_every_steps", every, message);
            }
            _ => {}
        }
    }

    /// Where the weights of a new run come from.
    pub(super) fn start(&mut self) {
        let checkpoint = &self.spec.checkpoint;
        match &checkpoint.restore_from {
            None if checkpoint.weights_only => {
                let message = "needs checkpoint.restore_from: without it the run starts from scratch. Name the run or checkpoint whose weights it takes, or leave it out";
                self.error("checkpoint.weights_only", true, message);
            }
            None => {}
            Some(from) => {
                let run_dir = self.spec.run_dir.to_string_lossy();
                if from.trim_end_matches('/') == run_dir {
                    let message = "is this run's own run_dir, from which `trainctl resume` goes on; name another run";
                    self.error("checkpoint.restore_from", from, message);
                }
                if let ModelInit::HuggingFace(directory) = &self.spec.model.init {
                    let message = format!("has no effect: the weights come from checkpoint.restore_from = {from}");
                    self.warn("model.init", directory, message);
                }
            }
        }
    }

    /// The weights of `model.init` must be those of the model.
    pub(super) fn pretrained(&mut self, architecture: &Architecture) {
        let (ModelInit::HuggingFace(directory), Some(facts)) = (&self.spec.model.init, &self.facts.pretrained) else {
            return;
        };
        let message = match facts {
            Err(message) => message.clone(),
            Ok(facts) => {
                let theirs = facts.config.as_ref().map(Architecture::of_weights).transpose();
                match (theirs, architecture.fit(&facts.tensors)) {
                    (Err(error), _) => format!("its config.json is that of another model: {error}"),
                    (Ok(_), Err(faults)) => format!("does not fit model.config:{faults}"),
                    (Ok(theirs), Ok(_)) => match theirs.and_then(|theirs| architecture.disagreements(&theirs).pop()) {
                        Some((key, mine, theirs)) => {
                            format!(
                                "its config.json says {key} {theirs}, model.config says {mine}: name its config.json"
                            )
                        }
                        None => return,
                    },
                }
            }
        };
        self.error("model.init", directory, message);
    }

    /// The checkpoints that retention keeps, both pointers' targets, the one in the making and the weights that are kept
    /// apart must fit.
    pub(super) fn space(&mut self, architecture: &Architecture) {
        let Some(free) = self.facts.free_bytes else { return };
        let memory = architecture.memory(self.spec.precision);
        let (steps, keep) = (&self.spec.step_scheduler, &self.spec.checkpoint);
        let (key, place) = match &keep.checkpoint_dir {
            Some(directory) => ("checkpoint.checkpoint_dir", directory.clone()),
            None => ("run_dir", self.spec.run_dir.display().to_string()),
        };
        let each = memory.weights + memory.master + memory.optimizer;
        let saves = steps.max_steps.div_ceil(steps.ckpt_every_steps.max(1));
        let kept = match keep.max_recent_checkpoints {
            Some(recent) => {
                let milestones = keep.keep_every_steps.and_then(|every| common_multiple(every, steps.ckpt_every_steps));
                let milestones = milestones.map_or(0, |every| steps.max_steps / every);
                saves.min((u64::from(recent) + 2).saturating_add(milestones))
            }
            None => saves,
        };
        let exports = match keep.save_consolidated {
            SaveConsolidated::False => 0,
            SaveConsolidated::Final => 1,
            SaveConsolidated::Every => kept,
        };
        let weights = keep.weights_every_steps.map_or(0, |every| steps.max_steps / every.max(1));
        let weights = keep.max_recent_weights.map_or(weights, |recent| weights.min(u64::from(recent) + 1));
        let apart = weights.saturating_mul(2 * architecture.parameter_count());
        let export = exports.saturating_mul(4 * architecture.parameter_count());
        let total = each.saturating_mul(kept).saturating_add(export).saturating_add(apart);
        if each > free {
            let message = format!(
                "one checkpoint takes about {} and {} are free; free space or name another directory",
                size(each),
                size(free)
            );
            self.error(key, place, message);
        } else if total > free {
            let mut what = format!("{kept} checkpoints of about {}", size(each));
            let mut remedy = "checkpoint.max_recent_checkpoints".to_owned();
            if exports > 0 {
                what += &format!(", Hugging Face directories of {}", size(export));
            }
            if weights > 0 {
                what += &format!(", bf16 weights of {}", size(apart));
                remedy += " and checkpoint.max_recent_weights";
            }
            let message = format!("{what} are kept and {} are free; free space, or set {remedy}", size(free));
            self.warn(key, place, message);
        }
    }
}

/// The lowest number of steps that is a multiple of both; `None` beyond 64 bits.
fn common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a.max(1), b.max(1));
    let (a, b) = (x, y);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

/// Binary units, one decimal.
fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..0x10_0000 => (1u64 << 10, "KiB"),
        0x10_0000..0x4000_0000 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    format!("{:.1} {name}", bytes as f64 / unit as f64)
}
