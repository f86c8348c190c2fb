//! Retiring in a bucket (C6), which has no rename: the manifest gets another name, and the shards stay where they are.
//!
//! `<name>/manifest.json` becomes `<name>/manifest.abandoned.g<generation>.json`, in that order: copied, then removed. Without
//! its manifest the checkpoint does not exist (C1), and its step may be committed again into the same prefix, since the names
//! of shards carry their generation. The generation in the name says who retired it: a manifest that its own or a later
//! generation committed was retired by a holder that woke up late, and gets its name back.

use super::retention::written_by;
use super::retire::is_of;
use super::{CheckpointStore, Retired};
use crate::error::Result;
use crate::fault::FailPoint;
use crate::io::{Files, Kind, Objects};
use crate::layout::{CheckpointName, MANIFEST};
use crate::manifest::Manifest;
use crate::tenure::Fence;

const PREFIX: &str = "manifest.abandoned.g";

fn abandoned_manifest(generation: u64) -> String {
    format!("{PREFIX}{generation}.json")
}

/// Whether a file of a checkpoint says that the checkpoint was retired in its place.
pub(super) fn is_abandoned_manifest(file: &str) -> bool {
    retired_by(file).is_some()
}

fn retired_by(file: &str) -> Option<u64> {
    file.strip_prefix(PREFIX)?.strip_suffix(".json")?.parse().ok()
}

impl CheckpointStore {
    /// The bucket, if the checkpoints lie in one.
    pub(super) fn bucket(&self) -> Option<Objects> {
        match &**self.io.files() {
            Files::Objects(objects) => Some(objects.clone()),
            Files::Disk(_) => None,
        }
    }

    /// Whether a checkpoint without a manifest is one that was retired in its place.
    pub(super) async fn is_retired(&self, name: CheckpointName) -> Result<bool> {
        if self.bucket().is_none() {
            return Ok(false);
        }
        let files = self.io.list(&name.to_string()).await?;
        Ok(files.iter().any(|file| retired_by(&file.name).is_some()))
    }

    /// Removes what is left in a bucket of killed processes' questions to its server.
    pub(super) async fn sweep_probes(&self) -> Result<()> {
        match self.bucket() {
            Some(bucket) => self.io.run(move |_| bucket.sweep_probes(FailPoint::COMMIT_SWEEP)).await,
            None => Ok(()),
        }
    }

    /// Retires what `leaving` names if there is a manifest by now, and removes what was never committed.
    pub(super) async fn retire_in_place(
        &self,
        bucket: Objects,
        fence: &dyn Fence,
        leaving: Vec<CheckpointName>,
        generation: u64,
    ) -> Result<Vec<Retired>> {
        let mut retired = Vec::new();
        for name in leaving {
            let manifest = self.io.read(&name.key(MANIFEST)).await?;
            if manifest.as_deref().is_some_and(|bytes| is_of(bytes, generation)) {
                continue;
            }
            if let Some(bytes) = manifest {
                let (from, to) = (name.key(MANIFEST), name.key(&abandoned_manifest(generation)));
                let (objects, moved) = (bucket.clone(), to.clone());
                fence.pass().await?;
                let rename = move |_: &_| objects.move_exactly(&from, &moved, &bytes, FailPoint::RETIRE_RENAME);
                if self.io.run(rename).await? {
                    self.remove_strangers(&bucket, fence, name).await?;
                    retired.push(Retired { name, moved_to: Some(to) });
                }
            } else {
                let (objects, folder) = (bucket.clone(), name.to_string());
                let all = self.io.run(move |_| objects.walk(&folder)).await?;
                // A holder that does this late must not meet what its successor commits there: the two small files without a
                // generation stay until then.
                let older = |file: &String| written_by(file).is_some_and(|of| of < generation);
                let gone: Vec<String> = all.into_keys().filter(older).collect();
                self.remove(&bucket, fence, name, gone).await?;
                retired.push(Retired { name, moved_to: None });
            }
        }
        Ok(retired)
    }

    /// Removes what no manifest of a retired checkpoint names: shards and uploads of generations that died before a commit.
    pub(super) async fn remove_strangers(
        &self,
        bucket: &Objects,
        fence: &dyn Fence,
        name: CheckpointName,
    ) -> Result<()> {
        let objects = bucket.clone();
        let strangers = self.io.run(move |_| strangers(&objects, name)).await?;
        self.remove(bucket, fence, name, strangers).await
    }

    async fn remove(
        &self,
        bucket: &Objects,
        fence: &dyn Fence,
        name: CheckpointName,
        files: Vec<String>,
    ) -> Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        fence.pass().await?;
        let (objects, folder) = (bucket.clone(), name.to_string());
        self.io.run(move |_| objects.remove_files(&folder, &files, FailPoint::RETIRE_REMOVE)).await
    }

    /// Gives back its name to each manifest that a holder retired late.
    pub(super) async fn restore_in_place(&self, fence: &dyn Fence) -> Result<Vec<CheckpointName>> {
        let mut restored = Vec::new();
        for folder in self.io.list("").await?.into_iter().filter(|entry| entry.kind == Kind::Dir) {
            let Ok(name) = folder.name.parse::<CheckpointName>() else { continue };
            let inside = self.io.list(&folder.name).await?;
            if inside.iter().any(|file| file.name == MANIFEST) {
                continue;
            }
            for file in inside {
                let Some(generation) = retired_by(&file.name) else { continue };
                let key = name.key(&file.name);
                let Some(bytes) = self.io.read(&key).await? else { continue };
                if is_of(&bytes, generation) {
                    fence.pass().await?;
                    self.io.create_if_absent(&name.key(MANIFEST), bytes, FailPoint::RETIRE_RESTORE).await?;
                    self.io.remove_file(&key, FailPoint::RETIRE_REMOVE).await?;
                    restored.push(name);
                    break;
                }
            }
        }
        Ok(restored)
    }
}

/// Files of a checkpoint's prefix that none of its manifests names. With a manifest that cannot be read nothing is one.
fn strangers(objects: &Objects, name: CheckpointName) -> Result<Vec<String>> {
    let all = objects.walk(&name.to_string())?;
    let mut known = std::collections::BTreeSet::new();
    for file in all.keys().filter(|file| *file == MANIFEST || retired_by(file).is_some()) {
        let Some(bytes) = objects.read(&name.key(file))? else { continue };
        let Ok((manifest, _)) = Manifest::parse(&bytes) else { return Ok(Vec::new()) };
        known.extend(manifest.files.into_iter().map(|file| file.path));
        known.insert(file.clone());
    }
    Ok(all.into_keys().filter(|file| !known.contains(file)).collect())
}
