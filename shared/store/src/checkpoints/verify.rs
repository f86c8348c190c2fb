//! Whether the bytes of a checkpoint are the ones that its ranks hashed.

use std::fmt;

use tokio::sync::watch;

use super::CheckpointStore;
use crate::error::Result;
use crate::layout::CheckpointName;
use crate::manifest::{Fault, Manifest};
use crate::shard::check::{check_files, size_fault};
use crate::shard::workers;

/// How closely files are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// That they are there and have their sizes.
    Sizes,
    /// Every byte.
    Hashes,
}

/// One file that is not what the manifest says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFault {
    /// Relative to the checkpoint.
    pub path: String,
    /// In which way.
    pub reason: String,
}

impl fmt::Display for FileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path, self.reason)
    }
}

/// Result of reading a checkpoint through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Files looked at.
    pub files: usize,
    /// Their bytes, as the manifest says.
    pub bytes: u64,
    /// What is wrong; empty if nothing is.
    pub faults: Vec<FileFault>,
}

impl CheckpointStore {
    /// Reads and hashes every file of a committed checkpoint, on all cores. `progress` gets the bytes done and the bytes in
    /// all, every few blocks of 8 MiB.
    ///
    /// # Errors
    /// [`crate::Error::NotCommitted`], [`crate::Error::Manifest`], [`crate::Error::Io`]; a damaged file is part of the answer.
    pub async fn verify(&self, name: CheckpointName, progress: &(dyn Fn(u64, u64) + Send + Sync)) -> Result<Verified> {
        let committed = self.read_manifest(name).await?;
        self.verify_files(&committed.manifest, progress).await
    }

    pub(super) async fn verify_files(
        &self,
        manifest: &Manifest,
        progress: &(dyn Fn(u64, u64) + Send + Sync),
    ) -> Result<Verified> {
        let total = manifest.total_bytes();
        let (manifest, (send, mut done)) = (manifest.clone(), watch::channel(0));
        let files = manifest.files.len();
        let check = self.io.run(move |files| {
            let faults = check_files(files, &manifest, workers::readers(files), &|bytes| {
                send.send_modify(|done| *done += bytes)
            })?;
            let path = |file: usize| manifest.files[file].path.clone();
            Ok(faults.into_iter().map(|(file, reason)| FileFault { path: path(file), reason }).collect())
        });
        let mut check = std::pin::pin!(check);
        let faults = loop {
            tokio::select! {
                faults = &mut check => break faults?,
                Ok(()) = done.changed() => progress(*done.borrow_and_update(), total),
            }
        };
        progress(total, total);
        Ok(Verified { files, bytes: total, faults })
    }

    /// The first file that is missing or has another size.
    pub(super) async fn check_sizes(&self, manifest: &Manifest) -> Result<Option<Fault>> {
        let (folder, records) = (manifest.name.to_string(), manifest.files.clone());
        self.io
            .run(move |files| {
                let paths: Vec<String> = records.iter().map(|file| file.path.clone()).collect();
                let sizes = files.sizes(&folder, &paths)?;
                let faults = records.iter().zip(sizes).map(|(record, size)| (record, size_fault(size, record)));
                let first = faults.filter_map(|(record, fault)| Some((record.path.clone(), fault?))).next();
                Ok(first.map(|(path, reason)| Fault::File { path, reason }))
            })
            .await
    }
}
