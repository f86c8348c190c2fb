//! May a spec run in its run directory, and from where? Looked at by the command line before anything is started, and decided
//! by the coordinator under its term: one look ([`look`]) and one rule ([`decide`]) for both. Writes nothing.

mod decide;

use trainctl_spec::fork::Beginning;
use trainctl_spec::{JobSpec, resume};

pub use decide::{Admission, Begins, Finished, Found, Reason, Refusal, Start, decide, people};

use crate::checkpoints::{ResolveError, ResolveOptions, Resolved, Selector};
use crate::error::Error;
use crate::io::Io;
use crate::layout::{CONFIG, LATEST};
use crate::origin::{Origin, Parent};
use crate::{CheckpointStore, RunDir};

/// What was asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Empty, `LATEST`, `LOWEST_VAL` or a checkpoint's name.
    pub from: String,
    /// Number of steps done at which the job ends before `max_steps`.
    pub until_step: Option<u64>,
    /// Refuse a directory that holds anything.
    pub fresh: bool,
    /// Take an older checkpoint where the wanted one is damaged.
    pub allow_older: bool,
}

impl Asked {
    /// Steps done at which a job of `spec` ends.
    pub fn stop_at(&self, spec: &JobSpec) -> u64 {
        self.until_step.unwrap_or(u64::MAX).min(spec.step_scheduler.max_steps)
    }

    /// The newest checkpoint is meant.
    pub fn is_latest(&self) -> bool {
        self.from.is_empty() || self.from == LATEST
    }
}

/// What a look found.
#[derive(Clone, Debug)]
pub struct Looked {
    /// For the decision.
    pub found: Found,
    /// What a person should be told.
    pub notes: Vec<String>,
    /// The checkpoint of another run that the run may begin with, and how.
    pub begins: Option<(Parent, Beginning)>,
}

/// Why nothing can be decided.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// What was asked cannot be understood, or the place of the checkpoints not be used.
    #[error("{0}")]
    Asked(String),
    /// What is there cannot be read.
    #[error(transparent)]
    Store(#[from] Error),
    /// The spec that a checkpoint was saved with is not understood.
    #[error("{path}: {reason}")]
    Spec {
        /// The checkpoint's `config.yaml`.
        path: String,
        /// Why.
        reason: String,
    },
}

/// Gathers what [`decide`] goes by.
///
/// # Errors
/// [`LookError`].
pub async fn look(spec: &JobSpec, asked: &Asked) -> Result<Looked, LookError> {
    let selector: Selector = match asked.from.as_str() {
        "" => Selector::Latest,
        from => {
            from.parse().map_err(|error| LookError::Asked(format!("--from {from}: {error}, {LATEST} or LOWEST_VAL")))?
        }
    };
    let store = CheckpointStore::of_job(spec).map_err(|error| LookError::Asked(error.to_string()))?;
    let options = ResolveOptions {
        best_metric_key: spec.best_metric_key(),
        allow_older: asked.allow_older,
        ..ResolveOptions::default()
    };
    let not_empty = holds_a_run(spec)?;
    let (mut notes, mut begins) = (Vec::new(), None);
    let start = match store.resolve(selector, &options).await {
        Ok(resolved) => {
            notes.extend(resolved.notes.iter().map(ToString::to_string));
            checkpoint(&store, spec, &resolved).await?
        }
        Err(ResolveError::Store(error)) => return Err(error.into()),
        Err(ResolveError::Empty { .. }) if asked.from.is_empty() => match parent(spec, asked.stop_at(spec)).await? {
            None => Start::Nothing { begins: None },
            Some((told, found)) => {
                begins = found;
                Start::Nothing { begins: Some(told) }
            }
        },
        Err(error @ ResolveError::Empty { .. }) => {
            Start::Missing(format!("{error}; leave out --from to start from step 0"))
        }
        Err(error) => Start::Missing(error.to_string()),
    };
    Ok(Looked { found: Found { not_empty, start }, notes, begins })
}

/// Whether there is anything in the run directory but what `trainctl run` keeps there before it submits.
fn holds_a_run(spec: &JobSpec) -> Result<bool, Error> {
    let entries = match std::fs::read_dir(&spec.run_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io("list", &spec.run_dir, error)),
    };
    for entry in entries {
        let entry = entry.map_err(|error| Error::io("list", &spec.run_dir, error))?;
        if !matches!(entry.file_name().to_str(), Some("control" | "logs")) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The spec that a checkpoint was made with fixes what a resume may not change.
async fn checkpoint(store: &CheckpointStore, spec: &JobSpec, resolved: &Resolved) -> Result<Start, LookError> {
    let name = resolved.checkpoint.name();
    let fault = |reason: String| LookError::Spec { path: store.path(name).join(CONFIG).display().to_string(), reason };
    let saved_with = store.read_config(name).await?;
    let old = JobSpec::from_yaml(&saved_with).map_err(|faults| fault(faults.to_string()))?;
    let differences = resume::differences(&old, spec).map_err(|error| LookError::Asked(error.to_string()))?;
    let forbidden = resume::forbidden(&differences).iter().map(ToString::to_string).collect();
    Ok(Start::Checkpoint { name, step: resolved.checkpoint.manifest.step, forbidden })
}

/// The checkpoint of another run that a run without commits begins with, and whether it may.
async fn parent(spec: &JobSpec, stop_at: u64) -> Result<Option<(Begins, Option<(Parent, Beginning)>)>, LookError> {
    let stored = Origin::read(&Io::new(RunDir::new(&spec.run_dir).control())).await?;
    let found = match Parent::wanted(spec, stored).await {
        Ok(None) => return Ok(None),
        Ok(Some(found)) => found,
        Err(not_found) => {
            let (parent, said) = (not_found.name.clone(), not_found.to_string());
            // A store that is away says nothing of the checkpoint.
            return match not_found.error.of_the_place() {
                Ok(error) => Err(error.into()),
                Err(_) => Ok(Some((Begins { parent, outcome: Err(vec![said]) }, None))),
            };
        }
    };
    let (parent, keep) = (found.origin.text(), found.origin.keep);
    Ok(Some(match found.decide(spec, stop_at).await? {
        Ok(beginning) => (Begins { parent, outcome: Ok((keep, beginning.start_step)) }, Some((found, beginning))),
        Err(reasons) => (Begins { parent, outcome: Err(reasons) }, None),
    }))
}
