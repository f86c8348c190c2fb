//! Pins: what a generation, `export` or `verify` is reading is not pruned under it (C9). A pin is honoured for a day, so
//! that a reader that died cannot fill a disk.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::CheckpointStore;
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::layout::CheckpointName;
use crate::wall;

const FOLDER: &str = "pins";
const HONOURED: Duration = Duration::from_secs(24 * 60 * 60);

/// A reader's claim on a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The checkpoint.
    pub name: CheckpointName,
    /// Who reads it, for example `generation 7`.
    pub who: String,
    /// Since when, in UTC.
    pub at: String,
}

impl CheckpointStore {
    /// Pins a checkpoint, or renews the pin. Pin first, then check that the manifest is there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pin(&self, name: CheckpointName, who: &str) -> Result<()> {
        let pin = Pin { name, who: who.to_owned(), at: wall::now() };
        let key = key(name, who);
        let bytes =
            serde_json::to_vec(&pin).map_err(|e| Error::io("write", self.control.root().join(&key), e.into()))?;
        self.control.put_durable(&key, bytes, FailPoint::PIN_WRITE).await
    }

    /// Removes a pin; a missing one is fine.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn unpin(&self, name: CheckpointName, who: &str) -> Result<()> {
        self.control.remove_file(&key(name, who), FailPoint::PIN_REMOVE).await?;
        Ok(())
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

    /// The checkpoints with a pin younger than a day. A pin that cannot be read is honoured by its file name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn pinned(&self) -> Result<BTreeSet<CheckpointName>> {
        let mut pinned = BTreeSet::new();
        for file in self.control.list(FOLDER).await? {
            let Some(bytes) = self.control.read(&format!("{FOLDER}/{}", file.name)).await? else { continue };
            match serde_json::from_slice::<Pin>(&bytes) {
                Ok(pin) => {
                    if wall::age(&pin.at).is_none_or(|age| age < HONOURED) {
                        pinned.insert(pin.name);
                    }
                }
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
