//! Pointers: symlinks, or small files where symlinks are refused.

use std::fs;
use std::io;

use super::temporary::{remove_quietly, temp_path};
use super::{Disk, is_absent, links_refused, parent};
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Stage};

/// A pointer that is a file holds one name.
pub(in crate::io) const MAX_POINTER_FILE: u64 = 256;

impl Disk {
    /// What a pointer names: the text of a symlink, or of a small file of its name, or of that name with `.txt`, which NeMo
    /// AutoModel writes where symlinks are refused and which may hold a path. `None` if there is none of them.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn read_link(&self, key: &str) -> Result<Option<String>> {
        let path = self.path(key)?;
        match fs::read_link(&path) {
            Ok(target) => Ok(Some(target.to_string_lossy().into_owned())),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => match self.size(key)? {
                Some(size) if size <= MAX_POINTER_FILE => self.read_pointer_file(key),
                _ => Ok(None),
            },
            Err(e) if is_absent(&e) => self.read_pointer_file(&text_key(key)),
            Err(e) => Err(Error::io("read the link", &path, e)),
        }
    }

    /// The last part of the path in a small file.
    fn read_pointer_file(&self, key: &str) -> Result<Option<String>> {
        let Some(bytes) = self.read(key)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let path = text.trim().trim_end_matches('/');
        Ok(Some(path.rsplit('/').next().unwrap_or(path).to_owned()))
    }

    /// Points a symlink at `target` (a relative name) in one atomic step (C3): the name is never absent in between. Where
    /// symlinks are refused, a file `<key>.txt` with that text takes its place, as with NeMo AutoModel, whose tools find it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn swap_symlink(&self, key: &str, target: &str, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        match self.calls.symlink(target, &temp) {
            Err(e) if links_refused(&e) => {
                self.put_durable(&text_key(key), format!("{target}\n").as_bytes(), point)?;
                return self.remove_stale(key, point);
            }
            other => other.map_err(|e| Error::io("make the symlink", &temp, e))?,
        }
        let swap = self
            .hit(point, Stage::Temp, &path)
            .and_then(|()| self.calls.rename(&temp, &path).map_err(|e| Error::io("swap the symlink", &path, e)));
        if swap.is_err() {
            remove_quietly(&self.calls, &temp);
        }
        swap?;
        self.sync_directory(parent(&path), point)?;
        self.remove_stale(&text_key(key), point)?;
        self.hit(point, Stage::Done, &path)
    }

    /// Removes a pointer in all its forms. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn remove_pointer(&self, key: &str, point: FailPoint) -> Result<bool> {
        let removed = self.remove_file(key, point)?;
        Ok(self.remove_file(&text_key(key), point)? || removed)
    }

    /// The other form of a pointer, from before the directory was copied to another file system.
    fn remove_stale(&self, key: &str, point: FailPoint) -> Result<()> {
        if self.size(key)?.is_some() {
            self.remove_file(key, point)?;
        }
        Ok(())
    }
}

/// The form of a pointer that NeMo AutoModel writes where symlinks are refused.
pub(crate) fn text_key(key: &str) -> String {
    format!("{key}.txt")
}
