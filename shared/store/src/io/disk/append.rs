//! Files that grow: logs of rows.

use std::fs::{self, File};
use std::io;

use super::{Disk, absent_is_none, is_file, parent};
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Stage};

impl Disk {
    /// Opens a file for appending; made, durably, if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn open_append(&self, key: &str, point: FailPoint) -> Result<File> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        let missing = !path.exists();
        let file = self.calls.open_append(&path).map_err(|e| Error::io("open", &path, e))?;
        if missing {
            self.sync_directory(parent(&path), point)?;
        }
        Ok(file)
    }

    /// Makes what was written to an open file durable.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn sync_file(&self, key: &str, file: &File, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        self.calls.sync_file(file, point).map_err(|e| Error::io("sync", &path, e))
    }

    /// Whether `key` still names the open file.
    pub(crate) fn is_same_file(&self, key: &str, file: &File) -> Result<bool> {
        let path = self.path(key)?;
        match absent_is_none(fs::metadata(&path), "look at", &path)? {
            Some(named) => is_file(file, &named).map_err(|e| Error::io("look at", &path, e)),
            None => Ok(false),
        }
    }

    /// Appends with one write call; a short write is an error and leaves a torn tail, which the next open repairs.
    pub(crate) fn append(&self, key: &str, file: &File, bytes: &[u8], point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let written = self.calls.write(file, bytes).map_err(|e| Error::io("append to", &path, e))?;
        if written != bytes.len() {
            let short = io::Error::new(io::ErrorKind::StorageFull, format!("{written} of {} bytes fit", bytes.len()));
            return Err(Error::io("append to", &path, short));
        }
        self.hit(point, Stage::Done, &path)
    }

    /// Cuts a file to `size` bytes, durably.
    pub(crate) fn truncate(&self, key: &str, file: &File, size: u64, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let cut = self.calls.set_len(file, size).and_then(|()| self.calls.sync_file(file, point));
        cut.map_err(|e| Error::io("cut", &path, e))?;
        self.hit(point, Stage::Done, &path)
    }
}
