//! May a run begin with a checkpoint of another run, and which steps and samples follow? One pure decision, which `fork`, `run` and
//! the coordinator take alike.
//!
//! - The weights are always taken.
//! - `optimizer`: the moments too. They belong to an optimizer and a precision.
//! - `schedule`: step numbers go on, and with them the learning rate; else both begin at step 0.
//! - `data`: the same blend goes on where it was; another one begins at its own sample 0, and every corpus that both have goes on
//!   behind what was used of it. Else all data begins anew.

use std::fmt;
use std::str::FromStr;

use crate::emit::NotWritable;
use crate::job::JobSpec;
use crate::report::SaveKind;
use crate::resume::{Difference, Rule, differences};
use crate::start::{DataPhase, Keep};

/// The checkpoint that a run would begin with, as its manifest and its `config.yaml` describe it.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    /// The resolved spec that it was made with.
    pub spec: &'a JobSpec,
    /// What it holds.
    pub kind: SaveKind,
    /// Zero-based step of its state.
    pub step: u64,
    /// Sampler positions used up to and including that step: N(step + 1) of its phase.
    pub consumed_samples: u64,
    /// Its data phase.
    pub phase: &'a DataPhase,
    /// Samples of each corpus used in all phases.
    pub corpora: &'a std::collections::BTreeMap<String, u64>,
}

/// How the run begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Beginning {
    /// First zero-based step to compute.
    pub start_step: u64,
    /// Which samples follow.
    pub phase: DataPhase,
    /// Keys that a resume could not change and that differ here, for people.
    pub differences: Vec<Difference>,
}

/// Why what was asked cannot be kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Objection {
    /// The checkpoint holds no more than weights.
    WeightsOnly {
        /// What was asked.
        keep: Keep,
    },
    /// The optimizer's state does not fit.
    Optimizer(Difference),
    /// The place in the data means something else.
    Data(Difference),
    /// The manifest does not say how much of each corpus was used.
    NotCounted,
    /// No step is left to compute.
    NothingLeft {
        /// Steps done in the checkpoint.
        steps_done: u64,
        /// Steps at which the run ends.
        stop_at: u64,
    },
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |difference: &Difference| Difference { note: "", ..difference.clone() };
        match self {
            Self::WeightsOnly { keep } => {
                let (keep, alone) = (keep.to_string(), format!("{}, ", Keep::WEIGHTS));
                let more = keep.strip_prefix(&alone).unwrap_or(&keep);
                write!(
                    f,
                    "it holds weights only, so {more} cannot be kept: keep weights alone (--keep weights, or \
                     checkpoint.weights_only beside restore_from)"
                )
            }
            Self::Optimizer(difference) => write!(
                f,
                "the optimizer's state cannot be kept with {}; set it back, or leave optimizer out of what is kept",
                of(difference)
            ),
            Self::Data(difference) => write!(
                f,
                "the place in the data cannot be kept with {}: its samples are others; set it back, or leave data out of what is kept",
                of(difference)
            ),
            Self::NotCounted => f.write_str(
                "its manifest does not say how many samples of each corpus were used, so the place in the data cannot be kept \
                 for another blend; keep dataset.paths, or leave data out of what is kept",
            ),
            Self::NothingLeft { steps_done, stop_at } => write!(
                f,
                "{steps_done} steps are done and the run ends at {stop_at}; raise step_scheduler.max_steps, or leave schedule out of what \
                 is kept (then steps count from 0)"
            ),
        }
    }
}

/// Decides whether a run of `spec` that ends at `stop_at` steps may begin with `source`.
///
/// # Errors
/// When a path of either spec is not UTF-8.
pub fn decide_fork(
    source: &Source<'_>,
    spec: &JobSpec,
    keep: Keep,
    stop_at: u64,
) -> Result<Result<Beginning, Vec<Objection>>, NotWritable> {
    let differences: Vec<Difference> = differences(source.spec, spec)?
        .into_iter()
        .filter(|difference| difference.rule == Rule::Keep && !IRRELEVANT.contains(&difference.key.as_str()))
        .collect();
    let mut objections = Vec::new();
    if source.kind == SaveKind::Weights && keep != Keep::WEIGHTS {
        objections.push(Objection::WeightsOnly { keep });
    }
    if keep.optimizer {
        let belongs = |difference: &&Difference| OPTIMIZER.contains(&difference.key.as_str());
        objections.extend(differences.iter().filter(belongs).cloned().map(Objection::Optimizer));
    }
    if keep.data {
        let belongs = |difference: &&Difference| DATA.contains(&difference.key.as_str());
        objections.extend(differences.iter().filter(belongs).cloned().map(Objection::Data));
    }
    let start_step = if keep.schedule { source.step + 1 } else { 0 };
    if start_step >= stop_at {
        objections.push(Objection::NothingLeft { steps_done: start_step, stop_at });
    }
    let (first_sample, corpora) = match () {
        () if !keep.data => Default::default(),
        () if source.spec.dataset.paths == spec.dataset.paths => {
            (source.consumed_samples, source.phase.corpora.clone())
        }
        () => {
            if source.corpora.is_empty() && source.kind == SaveKind::Full {
                objections.push(Objection::NotCounted);
            }
            (0, source.corpora.clone())
        }
    };
    if !objections.is_empty() {
        return Ok(Err(objections));
    }
    Ok(Ok(Beginning { start_step, phase: DataPhase { first_step: start_step, first_sample, corpora }, differences }))
}

/// Keys that say nothing about a run that begins with given weights.
const IRRELEVANT: [&str; 2] = ["model.init", "checkpoint.checkpoint_dir"];
/// What the optimizer's state is made for. Its other keys may change; they are reported.
const OPTIMIZER: [&str; 2] = ["optimizer.name", "precision"];
/// What decides, besides the blend, which tokens are sample n of a corpus.
const DATA: [&str; 3] = ["dataset.seq_length", "dataset.seed", "dataset.split"];

/// A list of what is kept that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` cannot be kept; name weights, optimizer, data, schedule, separated by commas")]
pub struct UnknownPart(pub String);

impl FromStr for Keep {
    type Err = UnknownPart;

    /// `weights,optimizer,data,schedule`: any of them, in any order; weights may be left out, since they are always kept.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut keep = Self::WEIGHTS;
        for part in text.split(',').map(str::trim) {
            match part {
                "weights" => {}
                "optimizer" => keep.optimizer = true,
                "data" => keep.data = true,
                "schedule" => keep.schedule = true,
                other => return Err(UnknownPart(other.to_owned())),
            }
        }
        Ok(keep)
    }
}

impl fmt::Display for Keep {
    /// `weights, optimizer, data`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("weights")?;
        for (kept, name) in [(self.optimizer, "optimizer"), (self.data, "data"), (self.schedule, "schedule")] {
            if kept {
                write!(f, ", {name}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
