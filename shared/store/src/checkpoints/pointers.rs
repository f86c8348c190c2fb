//! LATEST and LOWEST_VAL: a pure function of the committed manifests (C6), written down as relative symlinks, or as small text
//! objects in a bucket.

use std::fmt;

use super::{CheckpointStore, Listing};
use crate::error::Result;
use crate::fault::FailPoint;
use crate::io::text_key;
use crate::layout::{CheckpointName, LATEST, LOWEST_VAL};
use crate::manifest::Metrics;
use crate::tenure::Fence;

/// What pointers and retention know of a committed checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Its directory.
    pub name: CheckpointName,
    /// Its losses.
    pub metrics: Metrics,
}

/// Where the pointers belong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pointers {
    /// The highest step.
    pub latest: Option<CheckpointName>,
    /// The lowest finite validation loss, the earliest of equals.
    pub lowest_val: Option<CheckpointName>,
}

impl Pointers {
    /// Whether one of them names this checkpoint.
    pub fn holds(&self, name: CheckpointName) -> bool {
        self.latest == Some(name) || self.lowest_val == Some(name)
    }
}

/// C6. `best_metric_key` is the validation set's name (`default` for the unnamed one). The order of `committed` does not
/// matter.
pub fn pointer_targets(committed: &[Summary], best_metric_key: &str) -> Pointers {
    let latest = committed.iter().map(|summary| summary.name).max();
    let lowest_val = committed
        .iter()
        .filter_map(|summary| Some((summary.metrics.val_loss(best_metric_key)?, summary.name)))
        .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        .map(|(_, name)| name);
    Pointers { latest, lowest_val }
}

/// A pointer that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointerMove {
    /// `LATEST` or `LOWEST_VAL`.
    pub pointer: &'static str,
    /// What it named before; `None` if it was missing.
    pub from: Option<String>,
    /// What it names now; `None` if it was removed.
    pub to: Option<CheckpointName>,
}

impl fmt::Display for PointerMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = self.from.as_deref().unwrap_or("nothing");
        match self.to {
            Some(to) => write!(f, "{}: {from} -> {to}", self.pointer),
            None => write!(f, "{}: {from} -> removed", self.pointer),
        }
    }
}

impl CheckpointStore {
    /// Moves the pointers to where the committed manifests say they belong, and says what it moved. Call it after a
    /// commit; at a takeover call [`CheckpointStore::take_over`].
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn repair_pointers(&self, fence: &dyn Fence, best_metric_key: &str) -> Result<Vec<PointerMove>> {
        let listing = self.list().await?;
        self.move_pointers(fence, self.targets(&listing, best_metric_key)).await
    }

    /// [`CheckpointStore::repair_pointers`] by a listing that was taken after the commit.
    ///
    /// # Errors
    /// [`crate::Error::Superseded`] from the fence, [`crate::Error::Io`].
    pub async fn point(&self, fence: &dyn Fence, listing: &Listing, best_metric_key: &str) -> Result<Vec<PointerMove>> {
        self.move_pointers(fence, self.targets(listing, best_metric_key)).await
    }

    /// Where the pointers belong. Weights that are saved apart have none.
    pub fn targets(&self, listing: &Listing, best_metric_key: &str) -> Pointers {
        if self.has_pointers { pointer_targets(&listing.summaries(), best_metric_key) } else { Pointers::default() }
    }

    pub(super) async fn move_pointers(&self, fence: &dyn Fence, targets: Pointers) -> Result<Vec<PointerMove>> {
        let mut moves = Vec::new();
        if !self.has_pointers {
            return Ok(moves);
        }
        for (pointer, to, point) in [
            (LATEST, targets.latest, FailPoint::POINTER_LATEST),
            (LOWEST_VAL, targets.lowest_val, FailPoint::POINTER_LOWEST_VAL),
        ] {
            let from = self.io.read_link(pointer).await?;
            if from == to.map(|name| name.to_string()) {
                continue;
            }
            fence.pass().await?;
            match to {
                Some(name) => self.io.swap_symlink(pointer, &name.to_string(), point).await?,
                None => {
                    self.io.run(move |files| files.remove_pointer(pointer, point)).await?;
                }
            }
            moves.push(PointerMove { pointer, from, to });
        }
        Ok(moves)
    }

    /// Removes what killed predecessors left of a swap.
    pub(super) async fn sweep_pointers(&self) -> Result<()> {
        for pointer in [LATEST, LOWEST_VAL] {
            self.io.run(move |files| files.sweep(pointer, FailPoint::POINTER_SWEEP)).await?;
            self.io.run(move |files| files.sweep(&text_key(pointer), FailPoint::POINTER_SWEEP)).await?;
        }
        Ok(())
    }

    /// What LATEST and LOWEST_VAL name now, whatever it is.
    pub(super) async fn pointer_names(&self) -> Result<[Option<CheckpointName>; 2]> {
        let mut found = [None, None];
        for (slot, pointer) in found.iter_mut().zip([LATEST, LOWEST_VAL]) {
            *slot = self.io.read_link(pointer).await?.and_then(|text| text.parse().ok());
        }
        Ok(found)
    }
}
