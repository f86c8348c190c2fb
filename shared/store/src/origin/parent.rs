//! From a place to a checkpoint of another run and the spec behind it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainctl_spec::fork::{Beginning, Source, decide_fork};
use trainctl_spec::job::ModelConfigSource;
use trainctl_spec::start::Keep;
use trainctl_spec::{Architecture, JobSpec};

use super::{Origin, Place, Wanted, decide_wanted};
use crate::checkpoints::{CheckpointStore, Committed, ResolveError, ResolveOptions, Selector};
use crate::error::Error;
use crate::layout::{CONFIG, CheckpointName, RunDir, WEIGHTS};
use crate::location::Location;
use crate::shard::ShardReader;

/// Why there is no such checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// Nothing is there.
    #[error(
        "{place} does not exist or is no directory; name a run directory, or a checkpoint as <run directory>/<name>"
    )]
    Missing {
        /// Where was looked.
        place: String,
    },
    /// The run's spec is not understood.
    #[error("{}: {reason}", path.display())]
    Spec {
        /// `job.yaml` of the run or `config.yaml` of the checkpoint.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// No such checkpoint, or it is damaged.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] Error),
}

impl FindError {
    /// The error of the place, where it says nothing of the checkpoint; else this one again.
    ///
    /// # Errors
    /// What is wrong with the checkpoint, or with what was asked.
    pub fn of_the_place(self) -> Result<Error, Self> {
        match self {
            Self::Store(error @ (Error::Io { .. } | Error::Object { .. } | Error::Stopped(_)))
            | Self::Resolve(ResolveError::Store(error)) => Ok(error),
            error => Err(error),
        }
    }
}

/// The checkpoint that a run begins with cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("{said}: {error}")]
pub struct NotFound {
    /// The checkpoint as people write it.
    pub name: String,
    /// Why not.
    pub error: FindError,
    said: String,
}

/// A checkpoint of another run, whole as far as sizes tell.
#[derive(Clone, Debug)]
pub struct Parent {
    /// Names it for [`Origin`].
    pub origin: Origin,
    /// The checkpoint.
    pub committed: Committed,
    /// The resolved spec that it was made with.
    pub spec: JobSpec,
    /// What was noticed on the way, for people.
    pub notes: Vec<String>,
}

impl Parent {
    /// Finds the checkpoint that a run of `spec` begins with while it has none of its own; `None`: from scratch. `stored` is
    /// what its `control/origin.json` says.
    ///
    /// # Errors
    /// [`NotFound`].
    pub async fn wanted(spec: &JobSpec, stored: Option<Origin>) -> Result<Option<Self>, NotFound> {
        match decide_wanted(spec, stored) {
            Wanted::Scratch => Ok(None),
            Wanted::Exactly(origin) => {
                let name = origin.text();
                let found = Self::of(&origin).await.map(Some);
                found.map_err(|error| NotFound { said: format!("this run begins with {name}"), name, error })
            }
            Wanted::Named { from, keep } => match Self::find(&from, keep).await {
                Ok(mut found) => {
                    found.origin.restore_from = Some(from);
                    Ok(Some(found))
                }
                Err(error) => Err(NotFound { said: format!("checkpoint.restore_from: {from}"), name: from, error }),
            },
        }
    }

    /// Finds the checkpoint that a text names.
    ///
    /// # Errors
    /// [`FindError`].
    pub async fn find(text: &str, keep: Keep) -> Result<Self, FindError> {
        let Place { store, run, selector } = Place::parse(text)?;
        let origin = Origin {
            store,
            name: CheckpointName { epoch: 0, step: 0 },
            manifest: String::new(),
            keep,
            run,
            restore_from: None,
        };
        Self::look(origin, selector).await
    }

    /// Finds the checkpoint that an origin names; it must still be the same.
    ///
    /// # Errors
    /// [`FindError`].
    pub async fn of(origin: &Origin) -> Result<Self, FindError> {
        let found = Self::look(origin.clone(), Selector::Name(origin.name)).await?;
        if found.origin.manifest != origin.manifest {
            let (wanted, found) = (origin.manifest.clone(), found.origin.manifest);
            return Err(Error::OtherManifest { name: origin.name.to_string(), wanted, found }.into());
        }
        Ok(found)
    }

    async fn look(origin: Origin, selector: Selector) -> Result<Self, FindError> {
        let store = open_any(&origin)?;
        let run_spec = origin.run.as_ref().map(|run| read_spec(&RunDir::new(run).job_spec())).transpose()?;
        let best_metric_key = run_spec.as_ref().map_or("default", JobSpec::best_metric_key);
        let options = ResolveOptions { best_metric_key, ..ResolveOptions::default() };
        let resolved = store.resolve(selector, &options).await?;
        let (committed, name) = (resolved.checkpoint.clone(), resolved.checkpoint.name());
        let path = store.path(name).join(CONFIG);
        let bytes = store.io().read(&name.key(CONFIG)).await?.unwrap_or_default();
        let hash = blake3::hash(&bytes).to_hex().to_string();
        if hash != committed.manifest.spec_hash {
            let reason = format!("blake3 {hash}, but its manifest says {}", committed.manifest.spec_hash);
            return Err(Error::Damaged { path, reason }.into());
        }
        let spec = parse_spec(&path, &bytes)?;
        // Weights that are kept apart have no pointers.
        let apart = Path::new(&origin.store).ends_with(WEIGHTS);
        let notes = resolved.notes.iter().filter(|_| !apart).map(ToString::to_string).collect();
        let origin = Origin { name, manifest: committed.hash.clone(), ..origin };
        Ok(Self { origin, committed, spec, notes })
    }

    /// For the decision.
    pub fn source(&self) -> Source<'_> {
        let manifest = &self.committed.manifest;
        Source {
            spec: &self.spec,
            kind: manifest.kind,
            step: manifest.step,
            consumed_samples: manifest.consumed_samples,
            phase: &manifest.phase,
            corpora: &manifest.corpora,
        }
    }

    /// Whether a run of `spec` that ends at `stop_at` steps may begin with it; else every reason against it.
    ///
    /// # Errors
    /// [`Error`] if the checkpoint cannot be read.
    pub async fn decide(&self, spec: &JobSpec, stop_at: u64) -> Result<Result<Beginning, Vec<String>>, Error> {
        let mut reasons = Vec::new();
        let real = |place: Location| match place.directory().map(std::fs::canonicalize) {
            Some(Ok(dir)) => Location::from(dir),
            _ => place,
        };
        let own = [Location::from(spec.run_dir.as_path()), Location::of_job(spec)?].map(real);
        if own.contains(&real(self.origin.store.parse()?)) {
            reasons.push("it is a checkpoint of this run itself, with which `trainctl resume` goes on".to_owned());
        }
        let decided = match decide_fork(&self.source(), spec, self.origin.keep, stop_at) {
            Ok(Ok(beginning)) => Some(beginning),
            Ok(Err(objections)) => {
                reasons.extend(objections.iter().map(ToString::to_string));
                None
            }
            Err(error) => {
                reasons.push(error.to_string());
                None
            }
        };
        match model_of(spec) {
            Ok(model) => {
                let misfits = self.misfits(&model).await?;
                if !misfits.is_empty() {
                    reasons.push(format!("its weights do not fit the model:\n    {}", misfits.join("\n    ")));
                }
            }
            Err(reason) => reasons.push(reason),
        }
        Ok(decided.filter(|_| reasons.is_empty()).ok_or(reasons))
    }

    /// Weights that do not fit a model, one line each with both shapes. Reads the headers of the shards.
    ///
    /// # Errors
    /// [`Error`] if they cannot be read.
    pub async fn misfits(&self, model: &Architecture) -> Result<Vec<String>, Error> {
        let (name, hash) = (self.origin.name, self.origin.manifest.clone());
        let place: Location = self.origin.store.parse()?;
        let wanted: BTreeMap<String, Vec<u64>> =
            model.parameters().into_iter().map(|tensor| (format!("model/{}", tensor.name), tensor.shape)).collect();
        open_any(&self.origin)?
            .io()
            .run(move |_| {
                let reader = ShardReader::open_at(&place, name, Some(&hash))?;
                let found: BTreeMap<&str, &[u64]> = reader
                    .tensors()
                    .filter(|(name, _)| name.starts_with("model/"))
                    .map(|(name, info)| (name, info.shape.as_slice()))
                    .collect();
                Ok(differences(&wanted, &found))
            })
            .await
    }
}

fn model_of(spec: &JobSpec) -> Result<Architecture, String> {
    match &spec.model.config {
        ModelConfigSource::Inline(config) => {
            Architecture::from_config(config).map_err(|error| format!("model.config: {error}"))
        }
        ModelConfigSource::Path(path) => Err(format!("model.config still names the file {}", path.display())),
    }
}

fn differences(wanted: &BTreeMap<String, Vec<u64>>, found: &BTreeMap<&str, &[u64]>) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, want) in wanted {
        match found.get(name.as_str()) {
            None => lines.push(format!("{name}: missing in the checkpoint, {want:?} in the model")),
            Some(shape) if shape != want => {
                lines.push(format!("{name}: {shape:?} in the checkpoint, {want:?} in the model"));
            }
            Some(_) => {}
        }
    }
    let unknown = found.iter().filter(|(name, _)| !wanted.contains_key(**name));
    lines.extend(unknown.map(|(name, shape)| format!("{name}: {shape:?} in the checkpoint, unknown to the model")));
    lines
}

/// The store with the pins of the parent's run; `None` if that is not known.
pub(super) fn open(origin: &Origin) -> Result<Option<CheckpointStore>, Error> {
    let Some(run) = &origin.run else { return Ok(None) };
    CheckpointStore::open_at(&origin.store.parse()?, RunDir::new(run).control()).map(Some)
}

/// The store, to read: without a run directory there are no pins.
fn open_any(origin: &Origin) -> Result<CheckpointStore, Error> {
    match open(origin)? {
        Some(store) => Ok(store),
        None => CheckpointStore::open_at(&origin.store.parse()?, "/dev/null"),
    }
}

pub(super) fn read_spec(path: &Path) -> Result<JobSpec, FindError> {
    let bytes = std::fs::read(path).map_err(|source| Error::io("read", path, source))?;
    parse_spec(path, &bytes)
}

fn parse_spec(path: &Path, bytes: &[u8]) -> Result<JobSpec, FindError> {
    let fail = |reason: String| FindError::Spec { path: path.to_owned(), reason };
    let text = std::str::from_utf8(bytes).map_err(|error| fail(error.to_string()))?;
    JobSpec::from_yaml(text).map_err(|faults| fail(faults.to_string()))
}
