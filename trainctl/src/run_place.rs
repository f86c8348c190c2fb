//! `RUN[/NAME]`: which checkpoints a person means, and where they lie.

use trainctl_spec::JobSpec;
use trainctl_store::checkpoints::{ResolveError, ResolveOptions, Resolved, Selector};
pub(crate) use trainctl_store::origin::RunRef;
use trainctl_store::origin::{self, FindError};
use trainctl_store::{CheckpointStore, RunDir};

use crate::exit::{Exit, Failure};
use crate::output::note;

/// Where a run's checkpoints are.
#[derive(Debug)]
pub(crate) struct RunPlace {
    /// The run directory, for pins and the holder; `None` where only a bucket was named.
    run_dir: Option<RunDir>,
    /// The resolved spec of its newest job; `None` in a plain directory or bucket of checkpoints.
    pub(crate) spec: Option<JobSpec>,
    /// Its full checkpoints.
    pub(crate) full: CheckpointStore,
}

impl RunPlace {
    /// Looks up where the checkpoints of `run` lie: a run directory, which may say that they are elsewhere
    /// (`checkpoint.checkpoint_dir`), or the directory or URL itself. Writes nothing.
    pub(crate) fn open(run: &str) -> Result<Self, Failure> {
        let origin::RunPlace { dir, spec, full } = origin::RunPlace::open(run).map_err(not_found)?;
        // Without a run directory there are no pins: nothing is found there, and nothing can be written.
        let control = dir.as_ref().map_or_else(|| "/dev/null".into(), |dir| RunDir::new(dir).control());
        let full = CheckpointStore::open_at(&full, control).map_err(failure)?;
        Ok(Self { run_dir: dir.map(RunDir::new), spec, full })
    }

    /// The run directory, for what is kept there wherever the checkpoints lie.
    pub(crate) fn run_dir(&self) -> Result<&RunDir, Failure> {
        let is_run = |run_dir: &&RunDir| self.spec.is_some() || run_dir.control().is_dir();
        self.run_dir.as_ref().filter(is_run).ok_or_else(|| {
            Failure::usage(format!(
                "{} is no run directory: its pins and its holder are not known; name the run directory of these checkpoints",
                self.full.location()
            ))
        })
    }

    /// Whether there is a run directory in which pins can be kept: none is made of a plain directory of checkpoints.
    pub(crate) fn has_pins(&self) -> bool {
        self.run_dir().is_ok()
    }

    /// The full or the weights-only checkpoints.
    pub(crate) fn store(&self, weights: bool) -> CheckpointStore {
        if weights { self.full.weights() } else { self.full.clone() }
    }

    /// The spec's, and "default" where there is no spec.
    pub(crate) fn best_metric_key(&self) -> &str {
        self.spec.as_ref().map_or("default", JobSpec::best_metric_key)
    }

    /// The committed checkpoint that is meant (LATEST if nothing was said), with its notes told.
    pub(crate) async fn resolve(&self, wanted: &RunRef) -> Result<Resolved, Failure> {
        let best = self.best_metric_key();
        let options = ResolveOptions { best_metric_key: best, ..ResolveOptions::default() };
        let selector = wanted.name.unwrap_or(Selector::Latest);
        let resolved = self.store(wanted.weights).resolve(selector, &options).await.map_err(refusal)?;
        // Weights-only checkpoints have no pointers: LATEST is the newest there.
        if !wanted.weights {
            resolved.notes.iter().for_each(|told| note(&told.to_string()));
        }
        Ok(resolved)
    }
}

/// A place that is not there is the person's affair, a disk that fails is not.
fn not_found(error: FindError) -> Failure {
    match error {
        FindError::Store(error) => failure(error),
        FindError::Resolve(error) => refusal(error),
        error => Failure::usage(error.to_string()),
    }
}

/// What is wrong with the checkpoints is 1, what is wrong with the question 64, what is wrong with the disk 2.
pub(crate) fn refusal(error: ResolveError) -> Failure {
    match error {
        ResolveError::Store(error) => failure(error),
        ResolveError::Damaged { .. } => Failure { exit: Exit::JobFailed, message: error.to_string() },
        other => Failure::usage(other.to_string()),
    }
}

/// The same for an error of the store.
pub(crate) fn failure(error: trainctl_store::Error) -> Failure {
    use trainctl_store::Error;
    let exit = match &error {
        Error::NotCommitted { .. } | Error::Location { .. } => Exit::Usage,
        Error::Manifest { .. } | Error::Damaged { .. } | Error::Tensor { .. } => Exit::JobFailed,
        Error::Superseded { .. } => Exit::Unreachable,
        _ => Exit::Internal,
    };
    Failure { exit, message: error.to_string() }
}
