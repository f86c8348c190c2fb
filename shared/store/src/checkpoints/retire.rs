//! Where checkpoints go that a generation leaves behind (C6), and what a new holder mends of late ones (C2).

use super::withdraw::Meant;
use super::{CheckpointStore, Committed, Listing, PointerMove, pointer_targets};
use crate::error::Result;
use crate::fault::FailPoint;
use crate::io::Kind;
use crate::layout::{ABANDONED, CheckpointName, MANIFEST, abandoned_key};
use crate::manifest::Manifest;
use crate::tenure::Fence;

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
        let leaving = kept.chain(listing.uncommitted.iter().copied()).filter(|name| later(*name)).collect();
        let retired = self.retire(fence, &listing, leaving, generation, best_metric_key).await?;
        if let Some(bucket) = self.bucket() {
            for name in listing.retired.iter().copied().filter(|name| later(*name)) {
                self.remove_strangers(&bucket, fence, name).await?;
            }
        }
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
        let leaving: Vec<_> = late.map(Committed::name).collect();
        if leaving.is_empty() {
            return Ok(Vec::new());
        }
        self.retire(fence, listing, leaving, generation, best_metric_key).await
    }

    async fn retire(
        &self,
        fence: &dyn Fence,
        listing: &Listing,
        mut leaving: Vec<CheckpointName>,
        generation: u64,
        best_metric_key: &str,
    ) -> Result<Vec<Retired>> {
        leaving.sort();
        let stay: Vec<_> = listing.summaries().into_iter().filter(|summary| !leaving.contains(&summary.name)).collect();
        self.move_pointers(fence, pointer_targets(&stay, best_metric_key)).await?;
        if let Some(bucket) = self.bucket() {
            return self.retire_in_place(bucket, fence, leaving, generation).await;
        }
        let mut retired = Vec::new();
        for name in leaving {
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
            let was_committed = !Meant::Unfinished.is(manifest.as_deref());
            if !was_committed {
                self.io.remove_tree(&to, FailPoint::RETIRE_REMOVE).await?;
            }
            retired.push(Retired { name, moved_to: was_committed.then_some(to) });
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

/// Whether this generation or a later one committed this manifest: then this generation has nothing to retire there.
pub(super) fn is_of(manifest: &[u8], generation: u64) -> bool {
    Manifest::parse(manifest).is_ok_and(|(manifest, _)| manifest.generation >= generation)
}
