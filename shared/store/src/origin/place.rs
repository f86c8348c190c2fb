//! `RUN[/NAME]`: which checkpoints a person means, and where they lie. One reading for what is looked at, exported and
//! begun with.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use trainctl_spec::JobSpec;

use super::FindError;
use super::parent::read_spec;
use crate::checkpoints::Selector;
use crate::error::Error;
use crate::layout::{RunDir, WEIGHTS};
use crate::location::Location;

/// `RUN`, `RUN/NAME` or `RUN/weights/NAME`; NAME is LATEST, LOWEST_VAL or a checkpoint's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRef {
    /// Run directory, or directory or URL of checkpoints.
    pub run: String,
    /// The weights-only checkpoints are meant.
    pub weights: bool,
    /// Which one, if it was said.
    pub name: Option<Selector>,
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

/// Where the checkpoints of a run lie.
#[derive(Clone, Debug)]
pub struct RunPlace {
    /// The directory that was named; `None` where it was a bucket.
    pub dir: Option<PathBuf>,
    /// The resolved spec of its newest job; `None` in a plain directory or bucket of checkpoints.
    pub spec: Option<JobSpec>,
    /// Its full checkpoints: there, or where the spec says (`checkpoint.checkpoint_dir`). A run directory may have been moved
    /// since its spec was written.
    pub full: Location,
}

impl RunPlace {
    /// Looks up a run directory, or a directory or URL of checkpoints. Writes nothing.
    ///
    /// # Errors
    /// [`FindError::Missing`], [`FindError::Spec`], [`FindError::Store`].
    pub fn open(run: &str) -> Result<Self, FindError> {
        let named: Location = run.parse()?;
        let Some(dir) = named.directory().map(Path::to_owned) else {
            return Ok(Self { dir: None, spec: None, full: named });
        };
        if !dir.is_dir() {
            return Err(FindError::Missing { place: dir.display().to_string() });
        }
        let job_spec = RunDir::new(&dir).job_spec();
        // One that cannot be read is said, since it decides where the checkpoints are.
        let spec = if job_spec.try_exists().map_err(|source| Error::io("look at", &job_spec, source))? {
            Some(read_spec(&job_spec)?)
        } else {
            None
        };
        let elsewhere = spec.as_ref().filter(|spec| spec.checkpoint.checkpoint_dir.is_some());
        let full = elsewhere.map(Location::of_job).transpose()?.unwrap_or(named);
        Ok(Self { dir: Some(dir), spec, full })
    }
}

/// Where another run's checkpoint is looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Directory or URL of the checkpoints.
    pub store: String,
    /// The run directory, if it is known.
    pub run: Option<PathBuf>,
    /// Which one.
    pub selector: Selector,
}

impl Place {
    /// From what a person writes, a [`RunRef`]; without a name LATEST is meant. Paths become absolute: they are kept.
    ///
    /// # Errors
    /// [`FindError::Missing`], [`FindError::Spec`], [`FindError::Store`].
    pub fn parse(text: &str) -> Result<Self, FindError> {
        // Only an empty text is no reference.
        let RunRef { run, weights, name } =
            text.parse().map_err(|_| FindError::Missing { place: format!("`{text}`") })?;
        let run = match run.parse::<Location>()?.directory() {
            Some(dir) => {
                let absolute = std::path::absolute(dir).map_err(|source| Error::io("find", dir, source))?;
                absolute.to_str().map(str::to_owned).unwrap_or(run)
            }
            None => run,
        };
        let RunPlace { dir, spec, full } = RunPlace::open(&run)?;
        let store = if weights { full.join(WEIGHTS) } else { full };
        let run = dir.filter(|_| spec.is_some());
        Ok(Self { store: store.to_string(), run, selector: name.unwrap_or(Selector::Latest) })
    }
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
