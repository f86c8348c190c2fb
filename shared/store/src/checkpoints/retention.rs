//! Which checkpoints stay (C4), and where those go that a generation leaves behind (C6).

use std::collections::BTreeSet;
use std::fmt;

use super::bucket::is_abandoned_manifest;
use super::withdraw::Meant;
use super::{CheckpointStore, Listing, PointerMove, Pointers, Summary, pointer_targets};
use crate::error::Result;
use crate::export::STAGING as EXPORT_STAGING;
use crate::fault::FailPoint;
use crate::io::{Files, Kind, UPLOAD_NOTE, is_temporary};
use crate::layout::{ABANDONED, CheckpointName, MANIFEST, abandoned_key, generation_of};
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

/// A checkpoint that a generation left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retired {
    /// Its old name.
    pub name: CheckpointName,
    /// Where it is now, relative to the checkpoint directory; `None` if it was never committed and is removed.
    pub moved_to: Option<String>,
}

/// What a takeover mended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Checkpoints that a predecessor renamed late and that are back.
    pub restored: Vec<CheckpointName>,
    /// Pointers that moved.
    pub moves: Vec<PointerMove>,
}

impl CheckpointStore {
    /// Removes what retention drops. A checkpoint goes only if it was outside both pointers' targets at two looks (C2), loses
    /// its name first, so that a half-removed one does not exist, and goes only if it is then the one that was looked at. What dead generations left goes too: uncommitted
    /// directories below the newest committed step, which nothing will commit any more, and files in committed ones that no
    /// manifest names.
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
        let pinned = self.pinned().await?;
        for committed in listing.committed.iter().filter(|c| !report.removed.contains(&c.name())) {
            let is_read = pinned.contains(&committed.name());
            report.strays.extend(self.sweep_strays(fence, &committed.manifest, is_read).await?);
        }
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

    /// Removes from a committed checkpoint what its manifest does not name and a dead generation left: shards of its own or an
    /// older generation, temporary files, exports that never ended (unless somebody reads the checkpoint, who may be
    /// exporting it). A holder that looked long ago can harm nothing: what a later commit names carries a later generation.
    async fn sweep_strays(&self, fence: &dyn Fence, manifest: &Manifest, is_read: bool) -> Result<Vec<String>> {
        let mut strays = Vec::new();
        for (key, kind) in self.find_strays(manifest).await? {
            fence.pass().await?;
            match kind {
                Kind::Dir if is_read => continue,
                Kind::Dir => self.io.remove_tree(&key, FailPoint::PRUNE_STRAY).await?,
                _ => self.io.remove_file(&key, FailPoint::PRUNE_STRAY).await?,
            };
            strays.push(key);
        }
        Ok(strays)
    }

    async fn find_strays(&self, manifest: &Manifest) -> Result<Vec<(String, Kind)>> {
        let (name, generation) = (manifest.name, manifest.generation);
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
                Kind::Dir => file.starts_with(EXPORT_STAGING),
                Kind::Symlink | Kind::Other => false,
            }
        };
        let strays = found.into_iter().filter(|(path, kind)| is_stray(path, *kind));
        Ok(strays.map(|(path, kind)| (name.key(&path), kind)).collect())
    }

    /// What a generation that starts after `step` (`None`: from the beginning) does first (C6): pointers move back to what
    /// stays, then every later checkpoint is renamed to `abandoned/g<generation>/<name>`, or in a bucket loses its manifest's
    /// name. Uncommitted directories of later steps are removed, on a directory after a rename. Afterwards no later step
    /// exists; what a holder that wakes up late commits all the same is for [`CheckpointStore::retire_late`].
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn retire_after(
        &self,
        fence: &dyn Fence,
        step: Option<u64>,
        generation: u64,
        best_metric_key: &str,
    ) -> Result<Vec<Retired>> {
        let listing = self.list().await?;
        let later = |name: CheckpointName| step.is_none_or(|step| name.step > step);
        let kept = listing.committed.iter().map(|c| c.name()).chain(listing.damaged.iter().map(|d| d.name));
        let mut leaving: Vec<(CheckpointName, bool)> = kept.map(|name| (name, true)).collect();
        leaving.extend(listing.uncommitted.iter().map(|name| (*name, false)));
        leaving.retain(|(name, _)| later(*name));
        let mut retired = self.retire(fence, &listing, leaving, generation, best_metric_key).await?;
        if let Some(bucket) = self.bucket() {
            for name in listing.retired.iter().copied().filter(|name| later(*name)) {
                self.remove_strangers(&bucket, fence, name).await?;
            }
        }
        retired.sort_by_key(|gone| gone.name);
        Ok(retired)
    }

    /// Retires what `listing` shows that an older generation committed behind the start of this one, after this one had
    /// retired all that there was: its holder was frozen between its last look and the commit, or its put was long on the
    /// way. Its shards may be gone. Ask before pointers move.
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn retire_late(
        &self,
        fence: &dyn Fence,
        listing: &Listing,
        step: Option<u64>,
        generation: u64,
        best_metric_key: &str,
    ) -> Result<Vec<Retired>> {
        let is_late =
            |manifest: &Manifest| manifest.generation < generation && step.is_none_or(|step| manifest.name.step > step);
        let late = listing.committed.iter().filter(|committed| is_late(&committed.manifest));
        let leaving: Vec<_> = late.map(|committed| (committed.name(), true)).collect();
        if leaving.is_empty() {
            return Ok(Vec::new());
        }
        self.retire(fence, listing, leaving, generation, best_metric_key).await
    }

    /// `leaving`: each with whether it was ever committed.
    async fn retire(
        &self,
        fence: &dyn Fence,
        listing: &Listing,
        mut leaving: Vec<(CheckpointName, bool)>,
        generation: u64,
        best_metric_key: &str,
    ) -> Result<Vec<Retired>> {
        leaving.sort();
        let leaves = |name: CheckpointName| leaving.iter().any(|(other, _)| *other == name);
        let stay: Vec<_> = listing.summaries().into_iter().filter(|summary| !leaves(summary.name)).collect();
        self.move_pointers(fence, pointer_targets(&stay, best_metric_key)).await?;
        if let Some(bucket) = self.bucket() {
            return self.retire_in_place(bucket, fence, leaving, generation).await;
        }
        let mut retired = Vec::new();
        for (name, keep) in leaving {
            let to = self.free_name(&abandoned_key(generation), name).await?;
            fence.pass().await?;
            self.io.rename_dir(&name.to_string(), &to, FailPoint::RETIRE_RENAME).await?;
            // Frozen before the rename, this holder may have taken away what its successor has committed, or saves now.
            let manifest = self.io.read(&format!("{to}/{MANIFEST}")).await?;
            let held = fence.pass().await;
            if manifest.as_deref().is_some_and(|bytes| is_of(bytes, generation)) || held.is_err() {
                let back = self.io.rename_dir(&to, &name.to_string(), FailPoint::RETIRE_RESTORE).await;
                held?;
                back?;
                continue;
            }
            let keep = keep || manifest.is_some();
            if !keep {
                self.io.remove_tree(&to, FailPoint::RETIRE_REMOVE).await?;
            }
            retired.push(Retired { name, moved_to: keep.then_some(to) });
        }
        Ok(retired)
    }

    /// What a new holder does at its takeover and again one lease later (C2): undoes what a predecessor did that was frozen
    /// directly before a rename of [`CheckpointStore::retire_after`] and woke up late, then repairs the pointers.
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn take_over(&self, fence: &dyn Fence, best_metric_key: &str) -> Result<TakenOver> {
        fence.pass().await?;
        self.sweep_pointers().await?;
        self.sweep_commits().await?;
        self.sweep_pins().await?;
        self.sweep_probes().await?;
        self.sweep_withdrawn(fence).await?;
        let restored = self.restore_late_renames(fence).await?;
        let moves = self.repair_pointers(fence, best_metric_key).await?;
        Ok(TakenOver { restored, moves })
    }

    /// Generation g retires only what older generations committed. What lies in `abandoned/g<g>` and was committed by g or
    /// a later one was renamed by a holder that was no longer the holder; it goes back unless its step exists again.
    async fn restore_late_renames(&self, fence: &dyn Fence) -> Result<Vec<CheckpointName>> {
        if self.bucket().is_some() {
            return self.restore_in_place(fence).await;
        }
        let mut restored = Vec::new();
        for folder in self.io.list(ABANDONED).await? {
            let generation = folder.name.strip_prefix('g').and_then(|number| number.parse::<u64>().ok());
            let (Some(generation), Kind::Dir) = (generation, folder.kind) else { continue };
            let from = format!("{ABANDONED}/{}", folder.name);
            for entry in self.io.list(&from).await? {
                // Only a first retirement has the bare name, and a late rename takes the bare name too or fails.
                let Ok(name) = entry.name.parse::<CheckpointName>() else { continue };
                let from = format!("{from}/{name}");
                let Some(bytes) = self.io.read(&format!("{from}/{MANIFEST}")).await? else {
                    // A save that never ended, renamed by a holder that was killed before it removed it.
                    fence.pass().await?;
                    self.io.remove_tree(&from, FailPoint::RETIRE_REMOVE).await?;
                    continue;
                };
                if is_of(&bytes, generation) && self.io.read(&name.key(MANIFEST)).await?.is_none() {
                    fence.pass().await?;
                    self.io.remove_tree(&name.to_string(), FailPoint::RETIRE_REMOVE).await?;
                    self.io.rename_dir(&from, &name.to_string(), FailPoint::RETIRE_RESTORE).await?;
                    restored.push(name);
                }
            }
        }
        Ok(restored)
    }

    async fn free_name(&self, folder: &str, name: CheckpointName) -> Result<String> {
        let taken = self.io.list(folder).await?;
        let is_free = |candidate: &String| taken.iter().all(|entry| entry.name != *candidate);
        let spellings = std::iter::once(name.to_string()).chain((1..).map(|n| format!("{name}.{n}")));
        let free = spellings.into_iter().find(is_free).unwrap_or_else(|| name.to_string());
        Ok(format!("{folder}/{free}"))
    }
}

/// The generation that wrote a file of a checkpoint, if its name says so. A note in a bucket that the upload of a shard was
/// begun is as old as the shard.
pub(super) fn written_by(path: &str) -> Option<u64> {
    generation_of(path.strip_suffix(UPLOAD_NOTE).unwrap_or(path))
}

/// Whether this generation or a later one committed this manifest: then this generation has nothing to retire there.
pub(super) fn is_of(manifest: &[u8], generation: u64) -> bool {
    Manifest::parse(manifest).is_ok_and(|(manifest, _)| manifest.generation >= generation)
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
