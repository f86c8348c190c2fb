//! What a resume may change: one table that validate, run, resume and the docs read.
//!
//! A run directory holds one run: its data order (P3), its model and its schedule horizon are fixed by its first spec. A
//! resume may change how it is carried out. What must stay, can only change in a new run directory (a fork).

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use crate::emit::NotWritable;
use crate::job::JobSpec;
use crate::parse::VALIDATION;

/// Whether a resume may change a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Must stay: another value is another run and needs a run directory of its own.
    Keep,
    /// May change.
    Change,
}

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Key path; `*` at the end of a part stands for any rest of it, as in `validation_dataset*.seed`; a trailing `.*` stands
    /// for everything below.
    pub key: &'static str,
    /// Whether a resume may change it.
    pub rule: Rule,
    /// Why, or what follows.
    pub note: &'static str,
}

const fn keep(key: &'static str, note: &'static str) -> Field {
    Field { key, rule: Rule::Keep, note }
}

const fn change(key: &'static str, note: &'static str) -> Field {
    Field { key, rule: Rule::Change, note }
}

/// Every key of a resolved spec (a test walks the schema).
pub const FIELDS: &[Field] = &[
    change("name", "a label"),
    change("run_dir", "where the run lies now; moving it is no change of the run"),
    keep("seed", "weights and dropout are drawn from it"),
    change("deterministic", "P4 holds between runs in the mode only"),
    change(
        "resources.workers",
        "any world size continues the run (C8); sums are ordered otherwise, so P4's equality of bits ends",
    ),
    change("resources.spares", "they wait"),
    change("resources.device", "P4's equality of bits ends"),
    change("resources.threads_per_worker", "P4's equality of bits ends"),
    keep("model.config.*", "the weights have this shape"),
    keep("model.init", "the run began so"),
    keep("dataset.paths", "the data order depends on it (P3)"),
    change("dataset.index_mapping_dir", "a cache"),
    keep("dataset.tokenizer", "the token ids mean its entries"),
    keep("dataset.seq_length", "the data order depends on it (P3)"),
    keep("dataset.split", "the data order depends on it (P3)"),
    keep("dataset.seed", "the data order depends on it (P3)"),
    keep("validation_dataset*.paths", "losses would not compare, and LOWEST_VAL would mean nothing"),
    change("validation_dataset*.index_mapping_dir", "a cache"),
    keep("validation_dataset*.tokenizer", "the token ids mean its entries"),
    keep("validation_dataset*.seq_length", "losses would not compare, and LOWEST_VAL would mean nothing"),
    keep("validation_dataset*.split", "losses would not compare, and LOWEST_VAL would mean nothing"),
    keep("validation_dataset*.seed", "losses would not compare, and LOWEST_VAL would mean nothing"),
    change("validation_dataset*.num_val_samples", "losses before and after compare less well"),
    keep("step_scheduler.global_batch_size", "the samples of a step depend on it (P3, D2)"),
    keep("step_scheduler.local_batch_size", "the micro-batches depend on it (D2)"),
    keep("step_scheduler.max_steps", "schedule and sample index depend on it; `--until-step` stops earlier"),
    change("step_scheduler.ckpt_every_steps", ""),
    change("step_scheduler.val_every_steps", ""),
    change("distributed.strategy", "any strategy loads any checkpoint (C8); P4's equality of bits ends"),
    keep("precision", "the state is kept in it"),
    keep("optimizer.name", "the moments belong to it"),
    keep("optimizer.lr", "the schedule depends on it"),
    keep("optimizer.betas", "the moments belong to them"),
    keep("optimizer.eps", "part of the update"),
    keep("optimizer.weight_decay", "part of the update"),
    keep("optimizer.decay", "part of the update"),
    keep("lr_scheduler.lr_decay_style", "the schedule's horizon and shape are the run's"),
    keep("lr_scheduler.lr_warmup_steps", "the schedule's horizon and shape are the run's"),
    keep("lr_scheduler.lr_decay_steps", "the schedule's horizon and shape are the run's"),
    keep("lr_scheduler.init_lr", "the schedule's horizon and shape are the run's"),
    keep("lr_scheduler.max_lr", "the schedule's horizon and shape are the run's"),
    keep("lr_scheduler.min_lr", "the schedule's horizon and shape are the run's"),
    keep("clip_grad_norm.max_norm", "part of the update"),
    change("loss_fn", "the same loss another way; P4's equality of bits ends"),
    keep("checkpoint.checkpoint_dir", "the run's checkpoints lie there"),
    change("checkpoint.max_recent_checkpoints", ""),
    change("checkpoint.keep_every_steps", ""),
    change("checkpoint.best_metric_key", "LOWEST_VAL then follows the other set"),
    change("checkpoint.when_busy", ""),
    change("checkpoint.max_failures", ""),
    change("checkpoint.save_consolidated", ""),
    change("checkpoint.weights_every_steps", ""),
    change("checkpoint.max_recent_weights", ""),
    change("checkpoint.restore_from", "counts only while the run has no checkpoint of its own"),
    change("checkpoint.weights_only", "counts only with restore_from"),
    change("fault_tolerance.max_restarts", ""),
    change("fault_tolerance.on_nonfinite", ""),
    change("fault_tolerance.hang.*", ""),
    change("fault_tolerance.compare_replicas", ""),
    change("fault_tolerance.stragglers", ""),
    change("fault_tolerance.burn_in_seconds", ""),
    change("dist_env.timeout_minutes", ""),
    change("on_commit", ""),
    change("on_end", ""),
];

/// A key whose value differs between two resolved specs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Key path as in `job.yaml`.
    pub key: String,
    /// In the run's spec; absent when unset there.
    pub old: Option<Value>,
    /// In the new spec; absent when unset there.
    pub new: Option<Value>,
    /// Whether a resume may change it.
    pub rule: Rule,
    /// Why, or what follows.
    pub note: &'static str,
}

impl fmt::Display for Difference {
    /// `optimizer.lr: 0.001 → 0.002 (the schedule depends on it)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| value.as_ref().map_or_else(|| "unset".to_owned(), Value::to_string);
        write!(f, "{}: {} → {}", self.key, shown(&self.old), shown(&self.new))?;
        if self.note.is_empty() { Ok(()) } else { write!(f, " ({})", self.note) }
    }
}

/// The line of the table for a key; a key that it does not list must be kept.
#[must_use]
pub fn field(key: &str) -> Field {
    FIELDS
        .iter()
        .find(|field| matches(field.key, key))
        .copied()
        .unwrap_or(keep("", "this version does not know the key"))
}

fn matches(pattern: &str, key: &str) -> bool {
    if let Some(parent) = pattern.strip_suffix(".*") {
        return key == parent || key.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.'));
    }
    match pattern.split_once('*') {
        None => pattern == key,
        Some((before, after)) => key.strip_prefix(before).is_some_and(|rest| {
            // A set's own name may contain dots, its keys do not.
            rest.strip_suffix(after).is_some_and(|name| name.is_empty() || name.starts_with('_'))
        }),
    }
}

/// Keys that differ between a run's resolved spec and a new one, in the order of the table's sections.
///
/// # Errors
/// When a path of either is not UTF-8.
pub fn differences(old: &JobSpec, new: &JobSpec) -> Result<Vec<Difference>, NotWritable> {
    let (old, new) = (leaves(&old.to_json()?), leaves(&new.to_json()?));
    let find =
        |leaves: &Leaves, key: &str| leaves.iter().find(|(other, _)| other == key).map(|(_, value)| value.clone());
    let mut differences = Vec::new();
    let (old, gone) = split_sets(old, &new);
    let (new, came) = split_sets(new, &old);
    differences.extend(gone.into_iter().map(|set| whole_set(set, true)));
    differences.extend(came.into_iter().map(|set| whole_set(set, false)));
    for (key, value) in &old {
        let there = find(&new, key);
        if there.as_ref() != Some(value) {
            differences.push(difference(key, Some(value.clone()), there));
        }
    }
    for (key, value) in &new {
        if find(&old, key).is_none() {
            differences.push(difference(key, None, Some(value.clone())));
        }
    }
    Ok(differences)
}

/// Takes out the leaves of validation sets that the other spec does not have at all, and names those sets.
fn split_sets(leaves: Leaves, other: &Leaves) -> (Leaves, Vec<String>) {
    let set_of =
        |key: &str| key.starts_with(VALIDATION).then(|| key.rsplit_once('.').map_or(key, |(set, _)| set).to_owned());
    let theirs: Vec<_> = other.iter().filter_map(|(key, _)| set_of(key)).collect();
    let mut alone = Vec::new();
    let mut shared = Vec::new();
    for (key, value) in leaves {
        match set_of(&key) {
            Some(set) if !theirs.contains(&set) => {
                if !alone.contains(&set) {
                    alone.push(set);
                }
            }
            _ => shared.push((key, value)),
        }
    }
    (shared, alone)
}

fn whole_set(key: String, gone: bool) -> Difference {
    let there = Some(Value::from("a validation set"));
    let (old, new) = if gone { (there, None) } else { (None, there) };
    Difference { key, old, new, rule: Rule::Change, note: "training does not depend on it" }
}

fn difference(key: &str, old: Option<Value>, new: Option<Value>) -> Difference {
    let Field { rule, note, .. } = field(key);
    Difference { key: key.to_owned(), old, new, rule, note }
}

/// Those that a resume may not make.
#[must_use]
pub fn forbidden(differences: &[Difference]) -> Vec<&Difference> {
    differences.iter().filter(|difference| difference.rule == Rule::Keep).collect()
}

type Leaves = Vec<(String, Value)>;

/// Leaves by key path; lists are leaves.
fn leaves(value: &Value) -> Leaves {
    fn walk(value: &Value, path: &str, out: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (key, value) in map {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    walk(value, &path, out);
                }
            }
            // An empty section says nothing.
            Value::Object(_) => {}
            leaf => out.push((path.to_owned(), leaf.clone())),
        }
    }
    let mut out = Vec::new();
    walk(value, "", &mut out);
    out
}

#[cfg(test)]
mod tests;
