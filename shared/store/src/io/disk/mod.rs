//! Durable changes of a POSIX directory: a temporary file in the same directory, fsync, one atomic call, fsync of the
//! directory. What this does not do: it cannot make a drive honest that acknowledges writes it has not made.

mod append;
mod create;
mod pointers;
mod temporary;
mod writer;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;

pub(in crate::io) use self::pointers::MAX_POINTER_FILE;
pub(crate) use self::pointers::text_key;
pub(crate) use self::temporary::is_temporary;
use self::temporary::{TEMP_PREFIX, temp_path};
pub use self::writer::FileWriter;
use super::calls::Calls;
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults, Stage};

/// Outcome of [`Disk::create_if_absent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// The file is new and holds the given bytes.
    New,
    /// The name was taken; nothing was changed.
    Exists,
}

/// What a name in a directory is. Symlinks are not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// Something else.
    Other,
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The last part of the key.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// A directory of keys; every call blocks.
#[derive(Clone, Debug)]
pub struct Disk {
    root: PathBuf,
    calls: Calls,
}

impl Disk {
    /// A directory that exists or will be made by the first write; faults come from the environment.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::with_faults(root, Faults::from_env())
    }

    /// The same with given faults.
    pub fn with_faults(root: impl Into<PathBuf>, faults: Arc<Faults>) -> Self {
        let root: PathBuf = root.into();
        let root = if root.as_os_str().is_empty() { PathBuf::from(".") } else { root };
        Self { root, calls: Calls::new(faults) }
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory below this one, with the same faults; `child` is a name.
    #[must_use]
    pub fn below(&self, child: &str) -> Self {
        Self { root: self.root.join(child), calls: self.calls.clone() }
    }

    /// The path of a key; an empty key is the root.
    ///
    /// # Errors
    /// [`Error::Key`] for absolute paths and paths with `.` or `..`.
    pub fn path(&self, key: &str) -> Result<PathBuf> {
        let inside = Path::new(key).components().all(|part| matches!(part, Component::Normal(_)));
        if !inside || key.contains('\0') {
            return Err(Error::Key { key: key.to_owned() });
        }
        Ok(if key.is_empty() { self.root.clone() } else { self.root.join(key) })
    }

    /// The whole file, or `None` if there is none (a name whose parent is missing too).
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(key)?;
        absent_is_none(fs::read(&path), "read", &path)
    }

    /// Fills `buffer` from `offset`; a shorter file is [`Error::Damaged`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`], [`Error::Damaged`].
    pub fn read_range(&self, key: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let path = self.path(key)?;
        let mut file = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
        file.seek(SeekFrom::Start(offset)).map_err(|e| Error::io("read", &path, e))?;
        file.read_exact(buffer).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Error::Damaged {
                path: path.clone(),
                reason: format!("ends before byte {}", offset + buffer.len() as u64),
            },
            _ => Error::io("read", &path, e),
        })
    }

    /// Bytes of a file, or `None` if there is none. Symlinks are not followed.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        let path = self.path(key)?;
        let metadata = absent_is_none(fs::symlink_metadata(&path), "look at", &path)?;
        Ok(metadata.filter(fs::Metadata::is_file).map(|m| m.len()))
    }

    /// What lies under a key, sorted by name, without temporary files. A missing directory is an empty one.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn list(&self, key: &str) -> Result<Vec<Entry>> {
        let mut entries = self.list_all(key)?;
        entries.retain(|entry| !entry.name.starts_with(TEMP_PREFIX));
        Ok(entries)
    }

    /// The same with temporary files.
    pub(crate) fn list_all(&self, key: &str) -> Result<Vec<Entry>> {
        let path = self.path(key)?;
        let Some(reader) = absent_is_none(fs::read_dir(&path), "list", &path)? else { return Ok(Vec::new()) };
        let mut entries = Vec::new();
        for entry in reader {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            // A name that is no UTF-8 is none of ours.
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Some(kind) = absent_is_none(entry.file_type(), "look at", &entry.path())? else { continue };
            let kind = match kind {
                kind if kind.is_symlink() => Kind::Symlink,
                kind if kind.is_dir() => Kind::Dir,
                kind if kind.is_file() => Kind::File,
                _ => Kind::Other,
            };
            entries.push(Entry { name, kind });
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Makes a directory and its parents, durably. One that exists is fine.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn make_dir(&self, key: &str) -> Result<()> {
        let path = self.path(key)?;
        if path.is_dir() {
            return Ok(());
        }
        self.hit(FailPoint::MAKE_DIRECTORY, Stage::Before, &path)?;
        let missing: Vec<_> = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.is_dir()).collect();
        for directory in missing.iter().rev() {
            match self.calls.create_dir(directory) {
                // Another rank was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => {}
                other => other.map_err(|e| Error::io("make the directory", directory, e))?,
            }
        }
        for made in missing {
            self.sync_directory(parent(made), FailPoint::MAKE_DIRECTORY)?;
        }
        self.hit(FailPoint::MAKE_DIRECTORY, Stage::Done, &path)
    }

    /// Starts a file that becomes visible, complete and durable, with [`FileWriter::finish`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn writer(&self, key: &str, point: FailPoint) -> Result<FileWriter> {
        let path = self.path(key)?;
        self.make_parent(key)?;
        self.hit(point, Stage::Before, &path)?;
        let temp = temp_path(&path);
        let file = self.calls.create_new(&temp).map_err(|e| Error::io("create", &temp, e))?;
        Ok(FileWriter::new(file, temp, path, point, self.calls.clone()))
    }

    /// Renames a directory; both parents are synced. The new parent is made if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`] (also if `to` is a directory that is not empty), [`Error::Key`].
    pub fn rename_dir(&self, from: &str, to: &str, point: FailPoint) -> Result<()> {
        let (source, path) = (self.path(from)?, self.path(to)?);
        self.make_parent(to)?;
        self.hit(point, Stage::Before, &path)?;
        self.calls.rename(&source, &path).map_err(|e| Error::io("rename", &source, e))?;
        self.sync_directory(parent(&path), point)?;
        self.sync_directory(parent(&source), point)?;
        self.hit(point, Stage::Done, &path)
    }

    /// Removes a file or symlink durably. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn remove_file(&self, key: &str, point: FailPoint) -> Result<bool> {
        self.remove(key, point, |path| self.calls.remove_file(path))
    }

    /// Removes a directory and all below it. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn remove_tree(&self, key: &str, point: FailPoint) -> Result<bool> {
        self.remove(key, point, |path| self.calls.remove_dir_all(path))
    }

    fn remove(&self, key: &str, point: FailPoint, remove: impl FnOnce(&Path) -> io::Result<()>) -> Result<bool> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        let removed = absent_is_none(remove(&path), "remove", &path)?.is_some();
        if removed {
            self.sync_directory(parent(&path), point)?;
        }
        self.hit(point, Stage::Done, &path)?;
        Ok(removed)
    }

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn sync_dir(&self, key: &str, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.hit(point, Stage::Before, &path)?;
        self.sync_directory(&path, point)
    }

    /// Opens a file for reading; `None` if there is none.
    pub(crate) fn open_read(&self, key: &str) -> Result<Option<File>> {
        let path = self.path(key)?;
        absent_is_none(File::open(&path), "open", &path)
    }

    fn make_parent(&self, key: &str) -> Result<()> {
        self.make_dir(key.rsplit_once('/').map_or("", |(directory, _)| directory))
    }

    /// Passes a point of code that only reads.
    pub(crate) fn pass(&self, key: &str, point: FailPoint) -> Result<()> {
        let path = self.path(key)?;
        self.calls.hit(point, Stage::Before).map_err(|e| Error::io("read", path, e))
    }

    fn hit(&self, point: FailPoint, stage: Stage, path: &Path) -> Result<()> {
        self.calls.hit(point, stage).map_err(|e| Error::io("write", path, e))
    }

    fn sync_directory(&self, path: &Path, point: FailPoint) -> Result<()> {
        self.calls.sync_dir(path, point).map_err(|e| Error::io("sync", path, e))
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn is_file(open: &File, named: &fs::Metadata) -> io::Result<bool> {
    let open = open.metadata()?;
    Ok(named.ino() == open.ino() && named.dev() == open.dev())
}

fn links_refused(e: &io::Error) -> bool {
    let refused = [Errno::EPERM, Errno::EOPNOTSUPP, Errno::ENOSYS, Errno::EMLINK, Errno::EXDEV];
    e.raw_os_error().is_some_and(|code| refused.contains(&Errno::from_raw(code)))
}

fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn absent_is_none<T>(result: io::Result<T>, action: &'static str, path: &Path) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io(action, path, e)),
    }
}

#[cfg(test)]
mod tests;
