//! Pins: what somebody reads or wants to keep is not pruned under him (C9).
//!
//! The pin of a reader (a generation, `export`, `verify`) is honoured for a day, so that a reader that died cannot fill a
//! disk. A pin [for good](Pin::for_good) is honoured until it is removed: a person's, or that of a fork that has not
//! committed yet.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::CheckpointStore;
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::layout::CheckpointName;
use crate::wall;

/// How a coordinator signs the pin of a generation's start, before its number; it also removes such pins.
pub const GENERATION_PIN: &str = "generation-";

const FOLDER: &str = "pins";
const HONOURED: Duration = Duration::from_secs(24 * 60 * 60);

/// A claim on a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The checkpoint.
    pub name: CheckpointName,
    /// Who claims it, for example `generation-7`. There is one pin for each checkpoint and claimant.
    pub who: String,
    /// Since when, in UTC.
    pub at: String,
    /// Honoured without end, not for a day.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub for_good: bool,
    /// A person's reason.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
}

impl Pin {
    /// A reader's pin, from now on.
    pub fn new(name: CheckpointName, who: impl Into<String>) -> Self {
        Self { name, who: who.into(), at: wall::now(), for_good: false, why: String::new() }
    }

    /// The same without end.
    #[must_use]
    pub fn for_good(self) -> Self {
        Self { for_good: true, ..self }
    }

    /// The same with a reason.
    #[must_use]
    pub fn because(self, why: impl Into<String>) -> Self {
        Self { why: why.into(), ..self }
    }

    /// Whether retention honours it now. One whose time cannot be read counts as young.
    pub fn is_honoured(&self) -> bool {
        self.for_good || wall::age(&self.at).is_none_or(|age| age < HONOURED)
    }
}

/// What keeps a checkpoint while somebody reads it; see [`CheckpointStore::pin_to_read`].
#[derive(Debug)]
pub struct ReadPin {
    store: CheckpointStore,
    name: CheckpointName,
    who: String,
    refused: Option<Error>,
}

impl ReadPin {
    /// The reading is over. Says what a person should know of the pins.
    pub async fn release_all(pins: impl IntoIterator<Item = Self>) -> Option<String> {
        let mut warnings = Vec::new();
        for pin in pins {
            warnings.extend(pin.release().await);
        }
        (!warnings.is_empty()).then(|| warnings.join("; "))
    }

    async fn release(self) -> Option<String> {
        let Self { store, name, who, refused } = self;
        match refused {
            Some(error) => Some(format!("{name} could not be pinned while it was read: {error}")),
            None => store.unpin(name, &who).await.err().map(|error| format!("{name} stays pinned for a day: {error}")),
        }
    }
}

impl CheckpointStore {
    /// Pins a checkpoint for `what`, which reads it (C9): it stays until [`ReadPin::release_all`], at most a day. Look only then
    /// whether it is there. Where the run directory cannot be written there is no pin: the owner's retention is then not
    /// held up.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pin_to_read(&self, name: CheckpointName, what: &str) -> Result<ReadPin> {
        // Readers on several nodes, or in several containers, may have the same process number.
        let who = format!("{what}, process {} since {}", std::process::id(), wall::now());
        let refused = match self.pin(name, &who).await {
            Ok(()) => None,
            Err(error) if error.is_refused() => Some(error),
            Err(error) => return Err(error),
        };
        Ok(ReadPin { store: self.clone(), name, who, refused })
    }

    /// Pins a checkpoint for a day, or renews the pin. Pin first, then check that the manifest is there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pin(&self, name: CheckpointName, who: &str) -> Result<()> {
        self.place_pin(&Pin::new(name, who)).await
    }

    /// Pins a checkpoint until [`CheckpointStore::unpin`] is called for the same `who`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pin_for_good(&self, name: CheckpointName, who: &str) -> Result<()> {
        self.place_pin(&Pin::new(name, who).for_good()).await
    }

    /// Writes a pin; it replaces the one of the same checkpoint and claimant.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn place_pin(&self, pin: &Pin) -> Result<()> {
        let key = key(pin.name, &pin.who);
        let bytes =
            serde_json::to_vec(pin).map_err(|e| Error::io("write", self.control.root().join(&key), e.into()))?;
        match self.control.put_durable(&key, bytes.clone(), FailPoint::PIN_WRITE).await {
            // A new holder has swept the directory.
            Err(Error::Swept { .. }) => self.control.put_durable(&key, bytes, FailPoint::PIN_WRITE).await,
            other => other,
        }
    }

    /// Removes what killed readers left of writing one. A living one writes it again.
    pub(super) async fn sweep_pins(&self) -> Result<()> {
        self.control.run(|files| files.sweep_dir(FOLDER, FailPoint::PIN_SWEEP)).await
    }

    /// Removes a pin of either kind; `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn unpin(&self, name: CheckpointName, who: &str) -> Result<bool> {
        self.control.remove_file(&key(name, who), FailPoint::PIN_REMOVE).await
    }

    /// Every pin that can be read, however old.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pins(&self) -> Result<Vec<Pin>> {
        let mut pins = Vec::new();
        for file in self.control.list(FOLDER).await? {
            let Some(bytes) = self.control.read(&format!("{FOLDER}/{}", file.name)).await? else { continue };
            pins.extend(serde_json::from_slice::<Pin>(&bytes).ok());
        }
        Ok(pins)
    }

    /// The checkpoints with a pin that is honoured. A pin that cannot be read is honoured by its file name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pinned(&self) -> Result<BTreeSet<CheckpointName>> {
        let mut pinned = BTreeSet::new();
        for file in self.control.list(FOLDER).await? {
            let Some(bytes) = self.control.read(&format!("{FOLDER}/{}", file.name)).await? else { continue };
            match serde_json::from_slice::<Pin>(&bytes) {
                Ok(pin) => pinned.extend(pin.is_honoured().then_some(pin.name)),
                Err(_) => {
                    pinned.extend(file.name.split('.').next().and_then(|name| name.parse::<CheckpointName>().ok()))
                }
            }
        }
        Ok(pinned)
    }
}

/// One file for each checkpoint and reader. The reader's name is free text, so a hash of it tells equal spellings apart.
fn key(name: CheckpointName, who: &str) -> String {
    let readable: String = who.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(40).collect();
    format!("{FOLDER}/{name}.{readable}.{}.json", &blake3::hash(who.as_bytes()).to_hex()[..8])
}
