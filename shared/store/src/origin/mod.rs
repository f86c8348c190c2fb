//! Where a run without a commit of its own begins: a checkpoint of another run, from scratch otherwise.
//!
//! `control/origin.json` names that checkpoint exactly. `trainctl fork` writes it; for `checkpoint.restore_from` the
//! coordinator does at the first formation, so that a restart before the first commit begins with the same checkpoint even
//! when the parent's LATEST has moved on. The parent is pinned without end until the run has a commit of its own.

mod parent;
mod place;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainctl_spec::JobSpec;
use trainctl_spec::start::Keep;

pub use parent::{FindError, NotFound, Parent};
pub use place::{Place, RunPlace, RunRef};

use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::Io;
use crate::layout::{CheckpointName, WEIGHTS};
use crate::manifest::ForkParent;

/// The file's name in `control/`.
pub const ORIGIN: &str = "origin.json";

/// The content of `control/origin.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Directory or URL of the parent's checkpoints.
    pub store: String,
    /// The checkpoint.
    pub name: CheckpointName,
    /// blake3 of its manifest, hexadecimal.
    pub manifest: String,
    /// What is taken of it besides the weights.
    pub keep: Keep,
    /// The parent's run directory, whose `control/` holds the pin; absent if only its checkpoints are known.
    #[serde(default)]
    pub run: Option<PathBuf>,
    /// The value of `checkpoint.restore_from` that led here; absent for `trainctl fork`.
    #[serde(default)]
    pub restore_from: Option<String>,
}

impl Origin {
    /// Reads it from a `control/` directory.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Origin`] for a file that is not understood.
    pub async fn read(control: &Io) -> Result<Option<Self>> {
        let Some(bytes) = control.read(ORIGIN).await? else { return Ok(None) };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| Error::Origin { path: control.root().join(ORIGIN), reason: error.to_string() })
    }

    /// Writes it into a `control/` directory, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn write(&self, control: &Io) -> Result<()> {
        let bytes = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::io("write", control.root().join(ORIGIN), error.into()))?;
        control.put_durable(ORIGIN, bytes, FailPoint::ORIGIN_WRITE).await
    }

    /// The checkpoint as people write it: `<run or store>/<name>`.
    pub fn text(&self) -> String {
        let place = self.run.as_ref().map_or_else(|| self.store.clone(), |run| run.display().to_string());
        let weights = self.run.is_some() && Path::new(&self.store).ends_with(WEIGHTS);
        if weights { format!("{place}/{}/{}", WEIGHTS, self.name) } else { format!("{place}/{}", self.name) }
    }

    /// Whether both name the same checkpoint, so that one pin serves both.
    pub fn is_same_checkpoint(&self, other: &Self) -> bool {
        (&self.store, self.name, &self.run) == (&other.store, other.name, &other.run)
    }

    /// As manifests of the run name it.
    pub fn parent(&self) -> ForkParent {
        let run = self.run.as_ref().map_or_else(|| self.store.clone(), |run| run.display().to_string());
        ForkParent { run, name: self.name, manifest: self.manifest.clone(), keep: self.keep }
    }

    /// Keeps the parent's checkpoint for the run in `run_dir` until [`Origin::release`]. `false`: its run directory is not
    /// known or may not be written (another person's run), so nothing keeps it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pin(&self, run_dir: &Path) -> Result<bool> {
        let Some(store) = parent::open(self)? else { return Ok(false) };
        match store.pin_for_good(self.name, &claimant(run_dir)).await {
            Ok(()) => Ok(true),
            Err(error) if error.is_refused() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes that pin away; a missing one is fine.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn release(&self, run_dir: &Path) -> Result<()> {
        let Some(store) = parent::open(self)? else { return Ok(()) };
        match store.unpin(self.name, &claimant(run_dir)).await {
            Err(error) if !error.is_refused() => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// What to tell a person when [`Origin::pin`] could not pin.
    pub fn not_pinned(&self) -> String {
        let why = if self.run.is_some() { "may not be written" } else { "is not known" };
        format!("{} is not pinned, since its run directory {why}: keep it until this run's first commit", self.text())
    }
}

/// Who pins a parent.
fn claimant(run_dir: &Path) -> String {
    format!("fork {}", run_dir.display())
}

/// Where a run without a commit of its own is to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// From scratch.
    Scratch,
    /// With exactly this checkpoint.
    Exactly(Origin),
    /// With what this names now.
    Named {
        /// `checkpoint.restore_from`.
        from: String,
        /// What is kept.
        keep: Keep,
    },
}

/// A fork's own origin counts first; then `checkpoint.restore_from`, by what it named at the first formation. An origin that
/// an earlier value of `restore_from` left counts no more.
pub fn decide_wanted(spec: &JobSpec, stored: Option<Origin>) -> Wanted {
    let keep = if spec.checkpoint.weights_only { Keep::WEIGHTS } else { Keep::ALL };
    match (stored, &spec.checkpoint.restore_from) {
        (Some(origin), _) if origin.restore_from.is_none() => Wanted::Exactly(origin),
        (Some(origin), Some(from)) if origin.restore_from.as_ref() == Some(from) && origin.keep == keep => {
            Wanted::Exactly(origin)
        }
        (_, Some(from)) => Wanted::Named { from: from.clone(), keep },
        (_, None) => Wanted::Scratch,
    }
}

#[cfg(test)]
mod tests;
