//! Committed checkpoints of one directory: what there is, and the commit itself.
//!
//! - **C1** A directory without a valid manifest does not exist for readers, pointers, retention or counts.
//! - **C2** A manifest is made by create-if-absent, and never replaced but in place of a dead generation's late one.
//! - **C3** Order: shards durable → manifest durable → directory durable → pointer swapped → older ones pruned.
//!
//! Every change passes a [`Fence`] directly before it (J2).
//!
//! The same rules hold on a prefix of a bucket, with other means: an object is durable when its put is answered, pointers are
//! small text objects, and since a bucket has no rename, a checkpoint is retired in its place (`bucket`).

mod bucket;
mod commit;
mod pins;
mod pointers;
mod resolve;
mod retention;
mod retire;
mod verify;
mod withdraw;

use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt, stream};
use trainctl_spec::job::JobSpec;

pub use commit::CommitOutcome;
pub use pins::{GENERATION_PIN, Pin, ReadPin};
pub use pointers::{PointerMove, Pointers, Summary, pointer_targets};
pub use resolve::{Note, ResolveError, ResolveOptions, Resolved, Selector};
pub use retention::{KeepReason, PruneInput, PrunePlan, PruneReport, Retention, Verdict, decide_prune};
pub use retire::{Retired, TakenOver};
pub use verify::{Depth, FileFault, Verified};

use crate::error::{Error, Result};
use crate::io::{Io, Kind};
use crate::layout::{ABANDONED, CONFIG, CheckpointName, MANIFEST, RunDir, WEIGHTS};
use crate::location::Location;
use crate::manifest::{Fault, Manifest};
use crate::shard::ShardReader;

/// Manifests that are read at once.
const LOOKS: usize = 8;

/// A checkpoint that exists.
#[derive(Clone, Debug, PartialEq)]
pub struct Committed {
    /// What it holds.
    pub manifest: Manifest,
    /// The manifest's hash, lower-case hexadecimal.
    pub hash: String,
}

impl Committed {
    /// Its directory.
    pub fn name(&self) -> CheckpointName {
        self.manifest.name
    }
}

/// A checkpoint that existed and cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// Its directory.
    pub name: CheckpointName,
    /// What is wrong.
    pub fault: Fault,
}

/// What a checkpoint directory holds; every list in step order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// Checkpoints that exist.
    pub committed: Vec<Committed>,
    /// Directories without a manifest, or with one that was cut off while it was written.
    pub uncommitted: Vec<CheckpointName>,
    /// Directories whose manifest is complete and wrong.
    pub damaged: Vec<Damaged>,
    /// On a bucket: what a generation left behind when it started from an earlier step. It does not exist any more.
    pub retired: Vec<CheckpointName>,
}

impl Listing {
    /// The directories that are no checkpoints, each with what is wrong with it, for people.
    pub fn not_committed(&self) -> Vec<String> {
        let uncommitted = self.uncommitted.iter().map(|name| format!("{name} (no manifest)"));
        uncommitted.chain(self.damaged.iter().map(|damaged| format!("{} ({})", damaged.name, damaged.fault))).collect()
    }

    /// A committed checkpoint by name.
    pub fn get(&self, name: CheckpointName) -> Option<&Committed> {
        self.committed.iter().find(|committed| committed.name() == name)
    }

    /// What pointers and retention look at.
    pub fn summaries(&self) -> Vec<Summary> {
        self.committed.iter().map(|c| Summary { name: c.name(), metrics: c.manifest.metrics.clone() }).collect()
    }
}

/// The checkpoints of one directory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct CheckpointStore {
    io: Io,
    control: Io,
    /// LATEST and LOWEST_VAL are kept here.
    has_pointers: bool,
}

impl CheckpointStore {
    /// The checkpoints in a run directory, which also holds the pins.
    pub fn open(dir: impl Into<PathBuf>) -> Self {
        let dir = dir.into();
        Self { control: Io::new(dir.join("control")), io: Io::new(dir), has_pointers: true }
    }

    /// Checkpoints in a directory or a bucket; `control` is the run directory's `control/`. No request is made.
    ///
    /// # Errors
    /// [`Error::Object`] if the environment's settings for the bucket are wrong.
    pub fn open_at(location: &Location, control: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { io: Io::open(location)?, control: Io::new(control), has_pointers: true })
    }

    /// The weights-only checkpoints of the same run: a store of its own in `weights/`, with the same pins and no pointers.
    #[must_use]
    pub fn weights(&self) -> Self {
        Self { io: self.io.below(WEIGHTS), control: self.control.clone(), has_pointers: false }
    }

    /// The checkpoints of a job's run: in its `checkpoint.checkpoint_dir`, or in the run directory. No request is made.
    ///
    /// # Errors
    /// [`Error::Location`], [`Error::Object`].
    pub fn of_job(spec: &JobSpec) -> Result<Self> {
        Self::open_at(&Location::of_job(spec)?, RunDir::new(&spec.run_dir).control())
    }

    /// The same over given places, for tests with faults.
    pub fn with_io(io: Io, control: Io) -> Self {
        Self { io, control, has_pointers: true }
    }

    /// Where the checkpoints lie.
    pub fn location(&self) -> Location {
        self.io.files().location()
    }

    /// The directory; for a bucket its URL, which is for messages only.
    pub fn root(&self) -> &Path {
        self.io.root()
    }

    /// The place's I/O.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// The path of a checkpoint's directory, or its URL for a bucket.
    pub fn path(&self, name: CheckpointName) -> PathBuf {
        self.io.root().join(name.to_string())
    }

    /// What generations set aside in a directory because they started before it (C6), by its key: `abandoned/g7` and so on. In a
    /// bucket it stays where it is: [`Listing::retired`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn set_aside(&self) -> Result<Vec<(String, Listing)>> {
        let mut found = Vec::new();
        if self.bucket().is_some() {
            return Ok(found);
        }
        let abandoned = self.io.below(ABANDONED);
        for folder in abandoned.list("").await?.into_iter().filter(|entry| entry.kind == Kind::Dir) {
            let store = Self { io: abandoned.below(&folder.name), control: self.control.clone(), has_pointers: false };
            found.push((format!("{ABANDONED}/{}", folder.name), store.list().await?));
        }
        Ok(found)
    }

    /// Opens a committed checkpoint for reading; with `manifest` it must be exactly that one. Blocks.
    ///
    /// # Errors
    /// Those of [`ShardReader::open`].
    pub fn reader(&self, name: CheckpointName, manifest: Option<&str>) -> Result<ShardReader> {
        ShardReader::over(self.io.files().as_ref().clone(), name, manifest)
    }

    /// What there is. Reads every manifest and no other file.
    ///
    /// # Errors
    /// [`Error::Io`]. A checkpoint that cannot be understood is part of the answer, not an error.
    pub async fn list(&self) -> Result<Listing> {
        let mut names: Vec<CheckpointName> = self
            .io
            .list("")
            .await?
            .into_iter()
            .filter(|entry| entry.kind == Kind::Dir)
            .filter_map(|entry| entry.name.parse().ok())
            .collect();
        names.sort();
        let look = |name| async move {
            let found = self.look(name).await?;
            let retired = found.is_none() && self.is_retired(name).await?;
            Ok::<_, Error>((name, found, retired))
        };
        // Each look in a bucket is a request, and waits for its answer.
        let mut looks = stream::iter(names).map(look).buffered(LOOKS);
        let mut listing = Listing::default();
        while let Some((name, found, retired)) = looks.try_next().await? {
            match found {
                None if retired => listing.retired.push(name),
                None => listing.uncommitted.push(name),
                Some(Ok(committed)) => listing.committed.push(committed),
                Some(Err(fault)) if fault.was_committed() => listing.damaged.push(Damaged { name, fault }),
                Some(Err(_)) => listing.uncommitted.push(name),
            }
        }
        Ok(listing)
    }

    /// The manifest of one checkpoint.
    ///
    /// # Errors
    /// [`Error::NotCommitted`], [`Error::Manifest`], [`Error::Io`].
    pub async fn read_manifest(&self, name: CheckpointName) -> Result<Committed> {
        match self.look(name).await? {
            Some(Ok(committed)) => Ok(committed),
            Some(Err(fault)) if fault.was_committed() => {
                Err(Error::Manifest { path: self.path(name).join(MANIFEST), fault })
            }
            _ => Err(Error::NotCommitted { name: name.to_string() }),
        }
    }

    /// The resolved spec that a checkpoint was saved with: its `config.yaml`.
    ///
    /// # Errors
    /// [`Error::Damaged`] if it is missing or no text; [`Error::Io`], [`Error::Object`].
    pub async fn read_config(&self, name: CheckpointName) -> Result<String> {
        let damaged = |reason: &str| Error::Damaged { path: self.path(name).join(CONFIG), reason: reason.to_owned() };
        let bytes = self.io.read(&name.key(CONFIG)).await?.ok_or_else(|| damaged("is missing"))?;
        String::from_utf8(bytes).map_err(|_| damaged("is no text"))
    }

    /// Whether checkpoints can be committed safely here: a bucket's server must honour the conditions of puts (C2). Ask
    /// before a job starts; the first commit asks in any case.
    ///
    /// # Errors
    /// [`Error::Unconditional`], [`Error::Object`].
    pub async fn check_server(&self) -> Result<()> {
        match self.bucket() {
            Some(bucket) => self.io.run(move |_| bucket.require_conditional_put()).await,
            None => Ok(()),
        }
    }

    /// A manifest, or why it is none; `None` without one.
    async fn look(&self, name: CheckpointName) -> Result<Option<Result<Committed, Fault>>> {
        let bytes = self.io.read(&name.key(MANIFEST)).await?;
        Ok(bytes.map(|bytes| Self::parse(name, &bytes)))
    }

    fn parse(name: CheckpointName, bytes: &[u8]) -> Result<Committed, Fault> {
        let (manifest, hash) = Manifest::parse(bytes)?;
        if manifest.name != name {
            return Err(Fault::Content(format!("it says that it is {}", manifest.name)));
        }
        Ok(Committed { manifest, hash })
    }
}

#[cfg(test)]
pub(crate) mod tests;
