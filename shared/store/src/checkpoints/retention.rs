//! Which checkpoints stay (C4).

use std::collections::BTreeSet;
use std::fmt;

use futures::{StreamExt, TryStreamExt, stream};

use super::bucket::is_abandoned_manifest;
use super::withdraw::Meant;
use super::{CheckpointStore, LOOKS, Listing, Pointers, Summary};
use crate::error::Result;
use crate::export::STAGING as EXPORT_STAGING;
use crate::fault::FailPoint;
use crate::io::{Files, Kind, UPLOAD_NOTE, is_temporary};
use crate::layout::{CheckpointName, generation_of};
use crate::manifest::Manifest;
use crate::tenure::Fence;

/// What the spec says about how long checkpoints stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention<'a> {
    /// How many of the newest stay (`checkpoint.max_recent_checkpoints`); `None` keeps all.
    pub keep: Option<usize>,
    /// A checkpoint of step s stays if s + 1 is a multiple of it (`checkpoint.keep_every_steps`).
    pub keep_every_steps: Option<u64>,
    /// The validation set whose loss moves LOWEST_VAL.
    pub best_metric_key: &'a str,
}

impl<'a> Retention<'a> {
    /// Keeps the newest `keep` and the pointers' targets.
    pub fn newest(keep: Option<usize>, best_metric_key: &'a str) -> Self {
        Self { keep, keep_every_steps: None, best_metric_key }
    }
}

/// Everything that retention decides by.
#[derive(Clone, Debug, Default)]
pub struct PruneInput {
    /// The committed checkpoints.
    pub committed: Vec<Summary>,
    /// What the pointers name on disk.
    pub pointers: Pointers,
    /// Where the pointers belong.
    pub targets: Pointers,
    /// What somebody reads (C9).
    pub pinned: BTreeSet<CheckpointName>,
    /// How many of the newest stay (`checkpoint.max_recent_checkpoints`); `None` keeps all.
    pub keep: Option<usize>,
    /// A checkpoint of step s stays if s + 1, the number of steps done, is a multiple of it.
    pub keep_every_steps: Option<u64>,
}

/// Why a checkpoint stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// Retention is off.
    KeepAll,
    /// It is one of the newest (the newest always stays).
    Recent,
    /// A pointer names it, or ought to.
    PointerTarget,
    /// Its number of steps is a multiple of `keep_every_steps`.
    Milestone,
    /// Somebody reads it.
    Pinned,
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeepAll => "retention is off",
            Self::Recent => "among the newest",
            Self::PointerTarget => "a pointer names it",
            Self::Milestone => "keep_every_steps",
            Self::Pinned => "pinned",
        })
    }
}

/// What happens to a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays.
    Keep(KeepReason),
    /// It goes.
    Remove,
}

/// C4: counts committed checkpoints only, never removes a pointer's target or the newest. The answer is in step order.
pub fn decide_prune(input: &PruneInput) -> Vec<(CheckpointName, Verdict)> {
    let mut names: Vec<CheckpointName> = input.committed.iter().map(|summary| summary.name).collect();
    names.sort();
    names.dedup();
    let is_milestone = |name: CheckpointName| {
        input
            .keep_every_steps
            .is_some_and(|every| name.step.checked_add(1).is_some_and(|done| done % every.max(1) == 0))
    };
    let recent = input.keep.map(|keep| names.len().saturating_sub(keep.max(1)));
    let verdict = |(index, name): (usize, CheckpointName)| {
        let verdict = match recent {
            None => Verdict::Keep(KeepReason::KeepAll),
            Some(first) if index >= first => Verdict::Keep(KeepReason::Recent),
            _ if input.pointers.holds(name) || input.targets.holds(name) => Verdict::Keep(KeepReason::PointerTarget),
            _ if is_milestone(name) => Verdict::Keep(KeepReason::Milestone),
            _ if input.pinned.contains(&name) => Verdict::Keep(KeepReason::Pinned),
            _ => Verdict::Remove,
        };
        (name, verdict)
    };
    names.into_iter().enumerate().map(verdict).collect()
}

/// What pruning would do now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrunePlan {
    /// Committed checkpoints, in step order.
    pub verdicts: Vec<(CheckpointName, Verdict)>,
    /// Directories below the newest committed step that nothing will commit any more.
    pub dead: Vec<CheckpointName>,
}

impl PrunePlan {
    /// Everything that goes.
    pub fn leaving(&self) -> impl Iterator<Item = CheckpointName> + '_ {
        self.removed().chain(self.dead.iter().copied())
    }

    /// Whether anything goes.
    pub fn removes(&self) -> bool {
        self.leaving().next().is_some()
    }

    fn removed(&self) -> impl Iterator<Item = CheckpointName> + '_ {
        self.verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Remove).map(|(name, _)| *name)
    }
}

/// What pruning removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Checkpoints that retention dropped.
    pub removed: Vec<CheckpointName>,
    /// Directories that were never committed, or whose removal was cut off.
    pub swept: Vec<CheckpointName>,
    /// Files of dead generations inside of committed checkpoints, and temporary files.
    pub strays: Vec<String>,
}

impl PruneReport {
    /// What no commit ever named, relative to the checkpoint directory.
    pub fn orphans(&self) -> Vec<String> {
        self.swept.iter().map(ToString::to_string).chain(self.strays.iter().cloned()).collect()
    }
}

impl CheckpointStore {
    /// Removes what retention drops. A checkpoint goes only if it was outside both pointers' targets at two looks (C2). It
    /// loses its name first, so that a half-removed one does not exist, and goes if it is then the one that was looked at.
    /// What dead generations left goes too: uncommitted directories below the newest committed step, which nothing will
    /// commit any more, and files in committed ones that no manifest names.
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn prune(&self, fence: &dyn Fence, retention: &Retention<'_>) -> Result<PruneReport> {
        self.prune_seen(fence, retention, &self.list().await?).await
    }

    /// The same with a listing that was taken before: it is the first of the two looks.
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn prune_seen(
        &self,
        fence: &dyn Fence,
        retention: &Retention<'_>,
        seen: &Listing,
    ) -> Result<PruneReport> {
        let first = self.plan(retention, seen).await?;
        fence.pass().await?;
        self.sweep_withdrawn(fence).await?;
        let listing = self.list().await?;
        let second = self.plan(retention, &listing).await?;
        let mut report = PruneReport::default();
        for name in first.removed().filter(|name| second.removed().any(|again| again == *name)) {
            let Some(committed) = listing.get(name) else { continue };
            if self.withdraw(fence, name, Meant::Committed(&committed.hash)).await? {
                report.removed.push(name);
            }
        }
        for name in first.dead.iter().copied().filter(|name| second.dead.contains(name)) {
            if self.withdraw(fence, name, Meant::Unfinished).await? {
                report.swept.push(name);
            }
        }
        report.strays = self.sweep_strays(fence, &listing, &report.removed).await?;
        Ok(report)
    }

    /// What [`CheckpointStore::prune`] would remove now, and why the rest stays. Changes nothing.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub async fn plan_prune(&self, retention: &Retention<'_>) -> Result<PrunePlan> {
        self.plan(retention, &self.list().await?).await
    }

    async fn plan(&self, retention: &Retention<'_>, listing: &Listing) -> Result<PrunePlan> {
        let Retention { keep, keep_every_steps, best_metric_key } = *retention;
        let committed = listing.summaries();
        let newest = committed.iter().map(|summary| summary.name).max();
        let targets = self.targets(listing, best_metric_key);
        let named = self.pointer_names().await?;
        // A pointer that names anything else than a commit is as good as missing.
        let [latest, lowest_val] = named.map(|name| name.filter(|name| listing.get(*name).is_some()));
        let pointers = Pointers { latest, lowest_val };
        let pinned = self.pinned().await?;
        // A manifest that was damaged by being cut off looks like a save that never ended.
        let is_dead = |name: &CheckpointName| {
            newest.is_some_and(|newest| *name < newest) && !pinned.contains(name) && !named.contains(&Some(*name))
        };
        let dead = listing.uncommitted.iter().copied().filter(is_dead).collect();
        let verdicts = decide_prune(&PruneInput { committed, pointers, targets, pinned, keep, keep_every_steps });
        Ok(PrunePlan { verdicts, dead })
    }

    /// Removes from the committed checkpoints that stay what their manifests do not name and a dead generation left: shards
    /// of their own or an older generation, temporary files, exports that never ended (unless somebody reads the checkpoint,
    /// who may be exporting it). A holder that looked long ago can harm nothing: what a later commit names carries a later
    /// generation.
    async fn sweep_strays(
        &self,
        fence: &dyn Fence,
        listing: &Listing,
        removed: &[CheckpointName],
    ) -> Result<Vec<String>> {
        let pinned = self.pinned().await?;
        let staying = listing.committed.iter().filter(|committed| !removed.contains(&committed.name()));
        let looks: Vec<_> = staying.map(|committed| self.find_strays(&committed.manifest, &pinned)).collect();
        // Each look in a bucket is a request.
        let found: Vec<Vec<(String, Kind)>> = stream::iter(looks).buffered(LOOKS).try_collect().await?;
        let mut strays = Vec::new();
        for (key, kind) in found.into_iter().flatten() {
            fence.pass().await?;
            match kind {
                Kind::Dir => self.io.remove_tree(&key, FailPoint::PRUNE_STRAY).await?,
                _ => self.io.remove_file(&key, FailPoint::PRUNE_STRAY).await?,
            };
            strays.push(key);
        }
        Ok(strays)
    }

    async fn find_strays(&self, manifest: &Manifest, pinned: &BTreeSet<CheckpointName>) -> Result<Vec<(String, Kind)>> {
        let (name, generation) = (manifest.name, manifest.generation);
        let is_read = pinned.contains(&name);
        let named: BTreeSet<String> = manifest.files.iter().map(|file| file.path.clone()).collect();
        let found = self.io.run(move |files| inside(files, name)).await?;
        // In a bucket the shards of a retired checkpoint stay beside those of the one that took its name.
        if found.iter().any(|(path, _)| is_abandoned_manifest(path)) {
            return Ok(Vec::new());
        }
        let is_stray = |path: &str, kind: Kind| {
            let file = path.rsplit('/').next().unwrap_or(path);
            let is_old_shard = || written_by(path).is_some_and(|of| of <= generation);
            match kind {
                Kind::File => !named.contains(path) && (is_temporary(file) || is_old_shard()),
                Kind::Dir => !is_read && file.starts_with(EXPORT_STAGING),
                Kind::Symlink | Kind::Other => false,
            }
        };
        let strays = found.into_iter().filter(|(path, kind)| is_stray(path, *kind));
        Ok(strays.map(|(path, kind)| (name.key(&path), kind)).collect())
    }
}

/// The generation that wrote a file of a checkpoint, if its name says so. A note in a bucket that the upload of a shard was
/// begun is as old as the shard.
pub(super) fn written_by(path: &str) -> Option<u64> {
    generation_of(path.strip_suffix(UPLOAD_NOTE).unwrap_or(path))
}

/// What lies where a checkpoint's own files lie, temporary files too.
fn inside(files: &Files, name: CheckpointName) -> Result<Vec<(String, Kind)>> {
    let disk = match files {
        Files::Objects(objects) => {
            return Ok(objects.walk(&name.to_string())?.into_keys().map(|path| (path, Kind::File)).collect());
        }
        Files::Disk(disk) => disk,
    };
    let mut found = Vec::new();
    for (folder, prefix) in [(String::new(), ""), (name.key("model"), "model/"), (name.key("optim"), "optim/")] {
        let directory = if folder.is_empty() { name.to_string() } else { folder };
        let entries = disk.list_all(&directory)?;
        found.extend(entries.into_iter().map(|entry| (format!("{prefix}{}", entry.name), entry.kind)));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
