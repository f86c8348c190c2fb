//! Files that are made or replaced in one atomic step.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::temporary::{remove_quietly, temp_path};
use super::{Created, Disk, absent_is_none, is_file, links_refused, parent};
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Stage};

impl Disk {
    /// Makes a file with these bytes unless the name is taken, in one atomic step: a hard link of a synced temporary
    /// file, or O_EXCL where the file system refuses hard links (a crash may then leave a torn file, which readers must
    /// recognise). The numbers of J2 and the manifests of C2 rest on it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn create_if_absent(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<Created> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        let write = || -> Result<Created> {
            self.write_new(&temp, bytes, point)?;
            self.hit(point, Stage::Temp, &path)?;
            match self.calls.hard_link(&temp, &path) {
                Ok(()) => Ok(Created::New),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    // A retransmitted NFS call reports its own success as "exists"; the second link gives it away.
                    let links = fs::metadata(&temp).map(|m| m.nlink()).unwrap_or(1);
                    Ok(if links == 2 { Created::New } else { Created::Exists })
                }
                Err(e) if links_refused(&e) => self.create_exclusive(&path, bytes, point),
                // Whoever took the directory over has swept it: as good as not begun.
                Err(e) if e.kind() == io::ErrorKind::NotFound && !temp.exists() => {
                    Err(Error::Swept { path: path.clone() })
                }
                Err(e) => Err(Error::io("create", &path, e)),
            }
        };
        let outcome = write();
        self.conclude(outcome, &temp, &path, point)
    }

    /// Replaces a file by these bytes: readers see the old or the new ones, and after the call the new ones survive a
    /// power cut.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn put_durable(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<()> {
        let mut writer = self.writer(key, point)?;
        writer.write(bytes)?;
        writer.finish()
    }

    /// [`Disk::put_durable`] in the place of the file that is open as `old`. `false` if the name means another file by then:
    /// that one stays. (Where names cannot be exchanged, a process that is frozen between the look and the rename replaces
    /// it all the same.)
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn replace_durable(&self, key: &str, old: &File, bytes: &[u8], point: FailPoint) -> Result<bool> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        let swap = || -> Result<bool> {
            self.write_new(&temp, bytes, point)?;
            self.hit(point, Stage::Temp, &path)?;
            let failed = |e| Error::io("replace", &path, e);
            if !self.is_same_file(key, old)? {
                return Ok(false);
            }
            if !self.calls.exchange(&temp, &path).map_err(failed)? {
                self.calls.rename(&temp, &path).map_err(failed)?;
                return Ok(true);
            }
            let replaced = fs::metadata(&temp).map_err(failed)?;
            let is_old = is_file(old, &replaced).map_err(failed)?;
            if !is_old {
                self.calls.exchange(&temp, &path).map_err(failed)?;
            }
            Ok(is_old)
        };
        let outcome = swap();
        self.conclude(outcome, &temp, &path, point)
    }

    /// Replaces a file that holds exactly `old` by these bytes. `false` if it holds something else, or is not there.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn replace_exactly(&self, key: &str, old: &[u8], bytes: &[u8], point: FailPoint) -> Result<bool> {
        let Some(mut file) = self.open_read(key)? else { return Ok(false) };
        let mut found = Vec::new();
        file.read_to_end(&mut found).map_err(|e| Error::io("read", self.root.join(key), e))?;
        if found != old {
            return Ok(false);
        }
        self.replace_durable(key, &file, bytes, point)
    }

    /// Removes the temporary file whatever the outcome is, and makes the name durable if it has one.
    fn conclude<T>(&self, outcome: Result<T>, temp: &Path, path: &Path, point: FailPoint) -> Result<T> {
        let cleaned = absent_is_none(self.calls.remove_file(temp), "remove", temp);
        let outcome = outcome?;
        cleaned?;
        self.sync_directory(parent(path), point)?;
        self.hit(point, Stage::Done, path)?;
        Ok(outcome)
    }

    fn write_new(&self, path: &Path, bytes: &[u8], point: FailPoint) -> Result<()> {
        let write = || -> io::Result<()> {
            let file = self.calls.create_new(path)?;
            self.calls.write_all(&file, bytes)?;
            self.calls.sync_file(&file, point)
        };
        write().map_err(|e| Error::io("write", path, e))
    }

    /// For file systems without hard links. A file that could not be written whole goes again: readers would take it for
    /// what a crash left, and nobody could make it.
    pub(super) fn create_exclusive(&self, path: &Path, bytes: &[u8], point: FailPoint) -> Result<Created> {
        let file = match self.calls.create_new(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(Created::Exists),
            other => other.map_err(|e| Error::io("create", path, e))?,
        };
        let written = self.calls.write_all(&file, bytes).and_then(|()| self.calls.sync_file(&file, point));
        written.map(|()| Created::New).map_err(|e| {
            remove_quietly(&self.calls, path);
            Error::io("write", path, e)
        })
    }
}
