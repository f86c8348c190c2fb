//! `RUN[/NAME]`: which checkpoints a person means, and where they lie.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use trainctl_spec::JobSpec;
use trainctl_store::checkpoints::{ResolveError, ResolveOptions, Resolved, Selector};
use trainctl_store::layout::WEIGHTS;
use trainctl_store::{CheckpointStore, Location, RunDir};

use crate::exit::{Exit, Failure};
use crate::output::note;

/// `RUN`, `RUN/NAME` or `RUN/weights/NAME`; NAME is LATEST, LOWEST_VAL or a checkpoint's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunRef {
    /// Run directory, or directory or URL of checkpoints.
    pub(crate) run: String,
    /// The weights-only checkpoints are meant.
    pub(crate) weights: bool,
    /// Which one, if it was said.
    pub(crate) name: Option<Selector>,
}

impl FromStr for RunRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err("name a run directory".to_owned());
        }
        let trimmed = match text.trim_end_matches('/') {
            "" => "/",
            trimmed => trimmed,
        };
        let (parent, last) = trimmed.rsplit_once('/').unwrap_or((".", trimmed));
        let parent = if parent.is_empty() { "/" } else { parent };
        let (run, name) = match last.parse() {
            Ok(selector) => (parent, Some(selector)),
            Err(_) => (trimmed, None),
        };
        let inside = run.strip_suffix(WEIGHTS).and_then(|rest| match rest {
            "" => Some("."),
            rest => rest.strip_suffix('/').map(|rest| if rest.is_empty() { "/" } else { rest }),
        });
        Ok(Self { run: inside.unwrap_or(run).to_owned(), weights: inside.is_some(), name })
    }
}

impl fmt::Display for RunRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.run)?;
        if self.weights {
            write!(f, "/{WEIGHTS}")?;
        }
        self.name.map_or(Ok(()), |name| write!(f, "/{name}"))
    }
}

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
        let named: Location = run.parse().map_err(failure)?;
        let Some(dir) = named.directory() else {
            // No directory of pins: nothing is found there, and nothing can be written.
            let full = CheckpointStore::open_at(&named, "/dev/null").map_err(failure)?;
            return Ok(Self { run_dir: None, spec: None, full });
        };
        if !dir.is_dir() {
            return Err(Failure::usage(format!("{run} is no directory; name a run directory")));
        }
        let run_dir = RunDir::new(dir);
        let spec = read_spec(&run_dir.job_spec())?;
        let elsewhere = spec.as_ref().filter(|spec| spec.checkpoint.checkpoint_dir.is_some());
        let place = match elsewhere {
            Some(spec) => Location::of_job(spec).map_err(failure)?,
            None => named.clone(),
        };
        let full = CheckpointStore::open_at(&place, run_dir.control()).map_err(failure)?;
        Ok(Self { run_dir: Some(run_dir), spec, full })
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

/// A spec that cannot be read is said, since it decides where the checkpoints are.
fn read_spec(path: &Path) -> Result<Option<JobSpec>, Failure> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::internal(format!("read {}: {error}", path.display()))),
    };
    JobSpec::from_yaml(&text).map(Some).map_err(|faults| Failure::usage(format!("{}: {faults}", path.display())))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_and_a_name_are_told_apart() {
        let cases = [
            ("runs/a", ("runs/a", false, None)),
            ("runs/a/", ("runs/a", false, None)),
            ("runs/a/LATEST", ("runs/a", false, Some("LATEST"))),
            ("runs/a/epoch_0_step_9/", ("runs/a", false, Some("epoch_0_step_9"))),
            ("LOWEST_VAL", (".", false, Some("LOWEST_VAL"))),
            ("runs/a/weights/epoch_0_step_9", ("runs/a", true, Some("epoch_0_step_9"))),
            ("runs/a/weights", ("runs/a", true, None)),
            ("weights/LATEST", (".", true, Some("LATEST"))),
            ("/epoch_0_step_9", ("/", false, Some("epoch_0_step_9"))),
            ("s3://bucket/a/LATEST", ("s3://bucket/a", false, Some("LATEST"))),
            ("/", ("/", false, None)),
            ("runs/epoch_0_step_07", ("runs/epoch_0_step_07", false, None)),
            ("runs/my-weights", ("runs/my-weights", false, None)),
        ];
        for (text, (run, weights, name)) in cases {
            let parsed: RunRef = text.parse().unwrap();
            let name = name.map(|name| name.parse::<Selector>().unwrap());
            assert_eq!(parsed, RunRef { run: run.to_owned(), weights, name }, "{text}");
        }
        assert!("".parse::<RunRef>().is_err());
        assert_eq!("a/weights/LATEST".parse::<RunRef>().unwrap().to_string(), "a/weights/LATEST");
    }
}
