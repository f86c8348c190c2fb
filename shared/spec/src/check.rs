//! Rules across keys of a resolved spec, and against what the caller found out about its files (P8).
//!
//! All faults at once; errors stop the job, warnings do not. The rules of one key alone (type, range) are parsing's.

mod saving;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::fault::{Faults, Spans};
use crate::job::{Dataset, Device, JobSpec, LrDecayStyle, ModelConfigSource, Precision};
use crate::lr::Schedule;
use crate::model::{Architecture, Saved};
use crate::parse::Parsed;
use crate::resolve::{Files, Resolved, resolve, validation_key};

/// What a caller found out about files and machine. What is absent was not looked at, and its rules are left out.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// By prefix as in the resolved spec: what its `.idx` says, or why it cannot be read.
    pub corpora: BTreeMap<PathBuf, Result<CorpusFacts, String>>,
    /// By path as in the resolved spec: number of ids (added tokens included), or why it cannot be read.
    pub tokenizers: BTreeMap<PathBuf, Result<u64, String>>,
    /// The directory of `model.init`, or why it cannot be read.
    pub pretrained: Option<Result<PretrainedFacts, String>>,
    /// Free space where the checkpoints are or will be, bytes; absent for an object store.
    pub free_bytes: Option<u64>,
    /// Cores of the machine that carries all workers; absent when workers come from elsewhere.
    pub cores: Option<u32>,
}

/// What a `.bin/.idx` pair says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorpusFacts {
    /// Tokens of all documents.
    pub tokens: u64,
    /// Documents.
    pub documents: u64,
    /// Largest token id, where the caller looked.
    pub max_token: Option<u64>,
}

/// What a Hugging Face directory says about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PretrainedFacts {
    /// Its tensors by name.
    pub tensors: BTreeMap<String, Saved>,
    /// Its `config.json`, if it has one.
    pub config: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Resolves a parsed spec, lets `gather` look at its files, checks it, and gives all faults of both at once.
#[must_use]
pub fn prepare(parsed: Parsed, base: &Path, files: &dyn Files, gather: impl FnOnce(&JobSpec) -> Facts) -> Resolved {
    let mut resolved = resolve(parsed, base, files);
    let facts = gather(&resolved.spec);
    resolved.faults.extend(check(&resolved.spec, &facts, &resolved.spans));
    resolved
}

/// Checks a resolved spec. `spans` point faults at their lines; [`Spans::nowhere`] where there are none.
#[must_use]
pub fn check(spec: &JobSpec, facts: &Facts, spans: &Spans) -> Faults {
    let mut checker = Checker { spec, facts, spans, faults: Faults::default() };
    checker.batches();
    checker.schedule();
    let architecture = checker.model();
    checker.dataset("dataset", &spec.dataset, architecture.as_ref(), true);
    for (name, set) in &spec.validation_datasets {
        checker.dataset(&validation_key(name), &set.dataset, architecture.as_ref(), false);
    }
    checker.validation();
    checker.saves();
    checker.start();
    checker.machine();
    if let Some(architecture) = &architecture {
        checker.pretrained(architecture);
        checker.space(architecture);
    }
    checker.faults.sort();
    checker.faults
}

struct Checker<'a> {
    spec: &'a JobSpec,
    facts: &'a Facts,
    spans: &'a Spans,
    faults: Faults,
}

impl Checker<'_> {
    fn error(&mut self, key: &str, value: impl ToString, message: impl Into<String>) {
        self.faults.0.push(self.spans.error(key, value.to_string(), message));
    }

    fn warn(&mut self, key: &str, value: impl ToString, message: impl Into<String>) {
        self.faults.0.push(self.spans.warning(key, value.to_string(), message));
    }

    /// D2: any world size with at least one micro-batch a rank can carry any global batch; what does not divide idles.
    fn batches(&mut self) {
        let steps = &self.spec.step_scheduler;
        let (global, local, workers) = (steps.global_batch_size, steps.local_batch_size, self.spec.resources.workers);
        let micro = u64::from(global.div_ceil(local.max(1)));
        let ranks = u64::from(workers.max(1));
        if micro < ranks {
            let message = format!(
                "makes {micro} micro-batch{} of local_batch_size = {local} for resources.workers = {workers}: each worker needs at least one. Raise it to {} or more, or lower one of the others",
                if micro == 1 { "" } else { "es" },
                u64::from(local) * (ranks - 1) + 1,
            );
            self.error("step_scheduler.global_batch_size", global, message);
            return;
        }
        let places = micro.div_ceil(ranks) * ranks * u64::from(local);
        let idle = 100 * (places - u64::from(global)) / places;
        if idle >= 1 {
            let message = format!(
                "does not divide by workers {workers} × local_batch_size {local}: about {idle} % of the workers' time idles"
            );
            self.warn("step_scheduler.global_batch_size", global, message);
        }
        if steps.max_steps.checked_mul(u64::from(global)).is_none_or(|samples| i64::try_from(samples).is_err()) {
            self.error(
                "step_scheduler.max_steps",
                steps.max_steps,
                format!("times global_batch_size = {global} is more samples than can be counted"),
            );
        }
        // The default on a short run is nobody's mistake.
        if steps.ckpt_every_steps > steps.max_steps && self.spans.is_written("step_scheduler.ckpt_every_steps") {
            let message = format!(
                "is beyond max_steps = {}: only the last step is saved, and a failure before it loses all",
                steps.max_steps
            );
            self.warn("step_scheduler.ckpt_every_steps", steps.ckpt_every_steps, message);
        }
    }

    fn schedule(&mut self) {
        let schedule = Schedule::of(self.spec);
        if schedule.style != LrDecayStyle::Constant && schedule.warmup >= schedule.decay {
            let key = if self.spans.is_written("lr_scheduler.lr_warmup_steps") {
                "lr_scheduler.lr_warmup_steps"
            } else {
                "lr_scheduler.lr_decay_steps"
            };
            let value = if key.ends_with("warmup_steps") { schedule.warmup } else { schedule.decay };
            let message = format!(
                "the warm-up of {} steps must end before the decay does (lr_decay_steps = {})",
                schedule.warmup, schedule.decay
            );
            self.error(key, value, message);
        }
        if schedule.min > schedule.max {
            self.error("lr_scheduler.min_lr", schedule.min, format!("must be at most max_lr = {}", schedule.max));
        }
        if schedule.warmup > 0 && schedule.init > schedule.max {
            self.error("lr_scheduler.init_lr", schedule.init, format!("must be at most max_lr = {}", schedule.max));
        }
        if schedule.style != LrDecayStyle::Constant
            && schedule.decay < self.spec.step_scheduler.max_steps
            && schedule.min == 0.0
        {
            let message = format!(
                "ends before max_steps = {} and min_lr is 0: the steps after it change nothing",
                self.spec.step_scheduler.max_steps
            );
            self.warn("lr_scheduler.lr_decay_steps", schedule.decay, message);
        }
    }

    fn model(&mut self) -> Option<Architecture> {
        let ModelConfigSource::Inline(config) = &self.spec.model.config else {
            // Resolving has said why it is still a path.
            return None;
        };
        match Architecture::from_config(config) {
            Ok(architecture) => Some(architecture),
            Err(error) => {
                self.error(&format!("model.config.{}", error.key), error.value.unwrap_or_default(), error.allowed);
                None
            }
        }
    }

    fn dataset(&mut self, key: &str, dataset: &Dataset, architecture: Option<&Architecture>, is_training: bool) {
        let seq_key = format!("{key}.seq_length");
        if let Some(architecture) = architecture
            && (is_training || dataset.seq_length != self.spec.dataset.seq_length)
            && dataset.seq_length > architecture.max_positions()
        {
            let message = format!("must be at most the model's n_positions = {}", architecture.max_positions());
            self.error(&seq_key, dataset.seq_length, message);
        }
        self.split(key, dataset, is_training);
        if is_training || dataset.tokenizer != self.spec.dataset.tokenizer {
            self.tokenizer(key, dataset, architecture);
        }
        if is_training || dataset.paths != self.spec.dataset.paths || dataset.seq_length != self.spec.dataset.seq_length
        {
            self.corpora(key, dataset, architecture);
        }
    }

    /// Training reads the first share of the split, validation the second.
    fn split(&mut self, key: &str, dataset: &Dataset, is_training: bool) {
        let share = |index: usize| {
            dataset.split.split(',').nth(index).and_then(|share| share.trim().parse::<f64>().ok()).unwrap_or(0.0)
        };
        let key = format!("{key}.split");
        if is_training && share(0) <= 0.0 {
            self.error(
                &key,
                &dataset.split,
                "gives training no share; the first number must be > 0, for example \"99,1,0\"",
            );
        }
        if !is_training && share(1) <= 0.0 {
            self.error(
                &key,
                &dataset.split,
                "gives validation no share; the second number must be > 0, for example \"99,1,0\"",
            );
        }
    }

    fn tokenizer(&mut self, key: &str, dataset: &Dataset, architecture: Option<&Architecture>) {
        let Some(path) = &dataset.tokenizer else { return };
        let key = format!("{key}.tokenizer");
        match self.facts.tokenizers.get(path) {
            None => {}
            Some(Err(message)) => self.error(&key, path.display(), format!("cannot be read: {message}")),
            Some(Ok(ids)) => {
                let Some(architecture) = architecture else { return };
                if *ids > u64::from(architecture.vocab_size()) {
                    let message = format!(
                        "has {ids} ids; the model's vocab_size = {} must be at least that",
                        architecture.vocab_size()
                    );
                    self.error(&key, path.display(), message);
                }
            }
        }
    }

    fn corpora(&mut self, key: &str, dataset: &Dataset, architecture: Option<&Architecture>) {
        let weighted = dataset.paths.iter().filter(|path| path.weight.is_some()).count();
        let key = format!("{key}.paths");
        if weighted != 0 && weighted != dataset.paths.len() {
            let message =
                format!("{weighted} of {} paths have a weight; give all or none of them one", dataset.paths.len());
            self.error(&key, "", message);
        }
        for (index, path) in dataset.paths.iter().enumerate() {
            let key = format!("{key}[{index}]");
            if dataset.paths[..index].iter().any(|other| other.prefix == path.prefix) {
                self.warn(&key, path.prefix.display(), "is named twice");
            }
            match self.facts.corpora.get(&path.prefix) {
                None => {}
                Some(Err(message)) => {
                    self.error(&key, path.prefix.display(), format!("not a .bin/.idx pair that can be read: {message}"))
                }
                Some(Ok(corpus)) => {
                    if corpus.tokens <= u64::from(dataset.seq_length) {
                        let message = format!(
                            "has {} tokens; one sample needs seq_length + 1 = {}",
                            corpus.tokens,
                            u64::from(dataset.seq_length) + 1
                        );
                        self.error(&key, path.prefix.display(), message);
                    }
                    if let (Some(max), Some(architecture)) = (corpus.max_token, architecture)
                        && max >= u64::from(architecture.vocab_size())
                    {
                        let message =
                            format!("holds token {max}; the model's vocab_size is {}", architecture.vocab_size());
                        self.error(&key, path.prefix.display(), message);
                    }
                }
            }
        }
    }

    fn machine(&mut self) {
        let resources = &self.spec.resources;
        match resources.device {
            // P8: the engine refuses it too, but only after the job has its workers.
            Device::Cuda => {
                let message = "this version trains on CPUs only (its NCCL path is compiled and was never run); use cpu";
                self.error("resources.device", "cuda", message.to_owned());
            }
            Device::Cpu if self.spec.precision == Precision::Bf16 => {
                self.warn("precision", "bf16", "is slow on most CPUs; fp32 is faster there");
            }
            Device::Cpu => {}
        }
        if let (Some(threads), Some(cores)) = (resources.threads_per_worker, self.facts.cores)
            && u64::from(threads) * u64::from(resources.workers) > u64::from(cores).max(u64::from(resources.workers))
        {
            let message = format!(
                "times {} workers is more than the {cores} cores of this machine: they will slow each other down",
                resources.workers
            );
            self.warn("resources.threads_per_worker", threads, message);
        }
    }
}

#[cfg(test)]
mod tests;
