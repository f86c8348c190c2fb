//! Taking a checkpoint's name away so that whoever does it late harms nothing (C2).
//!
//! A holder may freeze before any change, and wake up when its successor has committed another checkpoint of that name. On a
//! directory a checkpoint is therefore renamed to where nobody looks for one, looked at there, and comes back if it is not
//! what was meant. A bucket has no rename: what is removed is compared directly before, object by object.

use super::CheckpointStore;
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Kind, Objects};
use crate::layout::{CheckpointName, MANIFEST};
use crate::manifest::Manifest;
use crate::tenure::Fence;

/// Where a checkpoint lies between the loss of its name and its removal.
const WITHDRAWN: &str = ".withdrawn-";

/// What is to be taken away.
#[derive(Clone, Copy, Debug)]
pub(super) enum Meant<'a> {
    /// The checkpoint with the manifest of this hash.
    Committed(&'a str),
    /// A save that nothing will commit any more.
    Unfinished,
}

impl Meant<'_> {
    /// Whether a checkpoint with this manifest is it.
    pub(super) fn is(self, manifest: Option<&[u8]>) -> bool {
        match (self, manifest.map(Manifest::parse)) {
            (Self::Committed(hash), Some(Ok((_, found)))) => hash == found,
            (Self::Committed(_), _) => false,
            (Self::Unfinished, None) => true,
            (Self::Unfinished, Some(found)) => found.is_err_and(|fault| !fault.was_committed()),
        }
    }
}

impl CheckpointStore {
    /// Removes a checkpoint for good. `false` if it is not (any more) what was meant, or somebody pinned it meanwhile: then
    /// it stays.
    ///
    /// # Errors
    /// [`Error::Superseded`] from the fence, [`Error::Io`], [`Error::Object`].
    pub(super) async fn withdraw(&self, fence: &dyn Fence, name: CheckpointName, meant: Meant<'_>) -> Result<bool> {
        if let Some(bucket) = self.bucket() {
            return self.withdraw_in_place(&bucket, fence, name, meant).await;
        }
        fence.pass().await?;
        let withdrawn = format!("{WITHDRAWN}{name}");
        match self.io.rename_dir(&name.to_string(), &withdrawn, FailPoint::PRUNE_RENAME).await {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            other => other?,
        }
        let manifest = self.io.read(&format!("{withdrawn}/{MANIFEST}")).await?;
        // Whoever pins looks afterwards whether the checkpoint is there: who was told that it is has pinned it by now (C9).
        let stays = !meant.is(manifest.as_deref()) || self.pinned().await?.contains(&name);
        let held = fence.pass().await;
        if stays || held.is_err() {
            let back = self.io.rename_dir(&withdrawn, &name.to_string(), FailPoint::RETIRE_RESTORE).await;
            return held.and(back).map(|()| false);
        }
        // First of all (C4): without it the rest can not come back.
        self.io.remove_file(&format!("{withdrawn}/{MANIFEST}"), FailPoint::PRUNE_MANIFEST).await?;
        self.io.remove_tree(&withdrawn, FailPoint::PRUNE_DIRECTORY).await?;
        Ok(true)
    }

    async fn withdraw_in_place(
        &self,
        bucket: &Objects,
        fence: &dyn Fence,
        name: CheckpointName,
        meant: Meant<'_>,
    ) -> Result<bool> {
        let folder = name.to_string();
        let manifest = self.io.read(&name.key(MANIFEST)).await?;
        let (objects, below) = (bucket.clone(), folder.clone());
        let all = self.io.run(move |_| objects.walk(&below)).await?;
        if !meant.is(manifest.as_deref()) {
            return Ok(false);
        }
        fence.pass().await?;
        if let Some(bytes) = manifest {
            let (objects, key, expected) = (bucket.clone(), name.key(MANIFEST), bytes.clone());
            let remove = move |_: &_| objects.remove_exactly(&key, &expected, FailPoint::PRUNE_MANIFEST);
            if !self.io.run(remove).await? {
                return Ok(false);
            }
            if self.pinned().await?.contains(&name) {
                self.io.create_if_absent(&name.key(MANIFEST), bytes, FailPoint::RETIRE_RESTORE).await?;
                return Ok(false);
            }
            fence.pass().await?;
        }
        let rest: Vec<String> = all.into_keys().filter(|file| file != MANIFEST).collect();
        let objects = bucket.clone();
        self.io.run(move |_| objects.remove_files(&folder, &rest, FailPoint::PRUNE_DIRECTORY)).await?;
        Ok(true)
    }

    /// Ends what a killed holder began: a checkpoint that has lost its name gets it back if it is whole and the name is free,
    /// since nobody knows whether that holder had looked at it; else it is removed.
    pub(super) async fn sweep_withdrawn(&self, fence: &dyn Fence) -> Result<()> {
        if self.bucket().is_some() {
            return Ok(());
        }
        for entry in self.io.list("").await?.into_iter().filter(|entry| entry.kind == Kind::Dir) {
            let name = entry.name.strip_prefix(WITHDRAWN).and_then(|name| name.parse::<CheckpointName>().ok());
            let Some(name) = name else { continue };
            let manifest = self.io.read(&format!("{}/{MANIFEST}", entry.name)).await?;
            let is_free = self.io.list(&name.to_string()).await?.is_empty();
            fence.pass().await?;
            if is_free && manifest.is_some_and(|bytes| Manifest::parse(&bytes).is_ok()) {
                self.io.rename_dir(&entry.name, &name.to_string(), FailPoint::RETIRE_RESTORE).await?;
            } else {
                self.io.remove_tree(&entry.name, FailPoint::PRUNE_DIRECTORY).await?;
            }
        }
        Ok(())
    }
}
