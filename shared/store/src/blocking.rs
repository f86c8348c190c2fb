//! The store for code that is not async: the engine, and small tools. Do not call it on an async thread.
//!
//! Shards ([`crate::shard`]) and rows ([`crate::rows`]) block by nature and need no facade.

use std::path::{Path, PathBuf};

use tokio::runtime::{Builder, Runtime};

use crate::checkpoints::{self, Committed, Listing, ResolveError, ResolveOptions, Resolved, Selector, Verified};
use crate::error::{Error, Result};
use crate::layout::CheckpointName;
use crate::location::Location;

/// [`checkpoints::CheckpointStore`] with a small runtime of its own.
#[derive(Debug)]
pub struct CheckpointStore {
    runtime: Runtime,
    inner: checkpoints::CheckpointStore,
}

impl CheckpointStore {
    /// The checkpoints in a directory.
    ///
    /// # Errors
    /// [`Error::Io`] if no runtime can be made.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        Self::over(checkpoints::CheckpointStore::open(dir))
    }

    /// The checkpoints in a directory or a bucket.
    ///
    /// # Errors
    /// As [`checkpoints::CheckpointStore::open_at`]; [`Error::Io`] if no runtime can be made.
    pub fn open_at(location: &Location, control: impl Into<PathBuf>) -> Result<Self> {
        Self::over(checkpoints::CheckpointStore::open_at(location, control)?)
    }

    fn over(inner: checkpoints::CheckpointStore) -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .max_blocking_threads(2)
            .build()
            .map_err(|e| Error::io("make a runtime for", inner.root(), e))?;
        Ok(Self { runtime, inner })
    }

    /// The directory; for a bucket its URL, which is for messages only.
    pub fn root(&self) -> &Path {
        self.inner.root()
    }

    /// [`checkpoints::CheckpointStore::list`].
    ///
    /// # Errors
    /// Those of the async call.
    pub fn list(&self) -> Result<Listing> {
        self.runtime.block_on(self.inner.list())
    }

    /// [`checkpoints::CheckpointStore::read_manifest`].
    ///
    /// # Errors
    /// Those of the async call.
    pub fn read_manifest(&self, name: CheckpointName) -> Result<Committed> {
        self.runtime.block_on(self.inner.read_manifest(name))
    }

    /// [`checkpoints::CheckpointStore::resolve`].
    ///
    /// # Errors
    /// Those of the async call.
    pub fn resolve(&self, from: Selector, options: &ResolveOptions<'_>) -> Result<Resolved, ResolveError> {
        self.runtime.block_on(self.inner.resolve(from, options))
    }

    /// [`checkpoints::CheckpointStore::verify`].
    ///
    /// # Errors
    /// Those of the async call.
    pub fn verify(&self, name: CheckpointName, progress: &(dyn Fn(u64, u64) + Send + Sync)) -> Result<Verified> {
        self.runtime.block_on(self.inner.verify(name, progress))
    }
}
