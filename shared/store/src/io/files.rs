//! One set of calls over a directory and a bucket. Every call blocks.
//!
//! What differs is said here once. A bucket has no directories: they are neither made nor synced, an object is durable when
//! its request is answered, and there are no temporary names, since an object appears whole or not at all. There is no
//! rename: see [`crate::checkpoints`] for how a checkpoint is retired there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{self, Created, Disk, Entry};
use super::objects::{self, Objects};
use crate::error::{Error, Result};
use crate::fault::{FailPoint, Faults};
use crate::location::Location;

/// The keys of one place.
#[derive(Clone, Debug)]
pub enum Files {
    /// In a POSIX directory.
    Disk(Disk),
    /// In a bucket.
    Objects(Objects),
}

impl From<Disk> for Files {
    fn from(disk: Disk) -> Self {
        Self::Disk(disk)
    }
}

/// Calls the method of the same name on whichever it is.
macro_rules! either {
    ($self:ident, $files:ident => $call:expr) => {
        match $self {
            Files::Disk($files) => $call,
            Files::Objects($files) => $call,
        }
    };
}

impl Files {
    /// Opens a place; faults come from the environment. A bucket is not asked anything yet.
    ///
    /// # Errors
    /// [`Error::Object`] if the environment's settings for the bucket are wrong.
    pub fn open(location: &Location) -> Result<Self> {
        Self::with_faults(location, Faults::from_env())
    }

    /// The same with given faults.
    ///
    /// # Errors
    /// As [`Files::open`].
    pub fn with_faults(location: &Location, faults: Arc<Faults>) -> Result<Self> {
        Ok(match location {
            Location::Directory(path) => Self::Disk(Disk::with_faults(path, faults)),
            Location::Bucket(url) => Self::Objects(Objects::with_faults(url, faults)?),
        })
    }

    /// The place.
    pub fn location(&self) -> Location {
        match self {
            Self::Disk(disk) => Location::Directory(disk.root().to_owned()),
            Self::Objects(objects) => Location::Bucket(objects.url().clone()),
        }
    }

    /// The place below this one, with the same faults; `child` is a name.
    #[must_use]
    pub fn below(&self, child: &str) -> Self {
        match self {
            Self::Disk(disk) => Self::Disk(disk.below(child)),
            Self::Objects(objects) => Self::Objects(objects.below(child)),
        }
    }

    /// The directory; for a bucket its URL, which is for messages only.
    pub fn root(&self) -> &Path {
        either!(self, files => files.root())
    }

    /// The path of a key; for a bucket its URL, which is for messages only.
    ///
    /// # Errors
    /// [`Error::Key`].
    pub fn path(&self, key: &str) -> Result<PathBuf> {
        either!(self, files => files.path(key))
    }

    /// Whether all processes of this host get a file's bytes from one cache, so that what one of them has proved the others
    /// have too.
    pub fn are_read_through_one_cache(&self) -> bool {
        match self {
            Self::Disk(disk) => disk.is_read_through_one_cache(),
            Self::Objects(_) => false,
        }
    }

    /// The whole file, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        either!(self, files => files.read(key))
    }

    /// Fills `buffer` from `offset`; a shorter file is [`Error::Damaged`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`], [`Error::Damaged`].
    pub fn read_range(&self, key: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        either!(self, files => files.read_range(key, offset, buffer))
    }

    /// Bytes of a file, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        either!(self, files => files.size(key))
    }

    /// The sizes of several files below one folder, in their order. On a bucket this is one listing.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn sizes(&self, folder: &str, files: &[String]) -> Result<Vec<Option<u64>>> {
        match self {
            Self::Disk(disk) => files.iter().map(|file| disk.size(&format!("{folder}/{file}"))).collect(),
            Self::Objects(objects) => {
                let found = objects.walk(folder)?;
                Ok(files.iter().map(|file| found.get(file).copied()).collect())
            }
        }
    }

    /// What lies under a key, sorted by name, without temporary files. A missing directory is an empty one.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn list(&self, key: &str) -> Result<Vec<Entry>> {
        either!(self, files => files.list(key))
    }

    /// Makes sure that a name that another host has made in a directory is found: NFS remembers for up to a minute that there
    /// was none, and asks again when the directory is opened (nfs(5), close-to-open). A bucket and local disks forget nothing.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub(crate) fn refresh(&self, key: &str) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.open_read(key).map(drop),
            Self::Objects(_) => Ok(()),
        }
    }

    /// What a pointer names: the text of a symlink or of a small file or object. `None` if there is neither.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn read_link(&self, key: &str) -> Result<Option<String>> {
        either!(self, files => files.read_link(key))
    }

    /// Makes a directory and its parents, durably. One that exists is fine; a bucket needs none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn make_dir(&self, key: &str) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.make_dir(key),
            Self::Objects(objects) => objects.path(key).map(drop),
        }
    }

    /// Makes a file with these bytes unless the name is taken, in one atomic step.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`]; [`Error::Unconditional`] for a bucket that would overwrite it.
    pub fn create_if_absent(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<Created> {
        either!(self, files => files.create_if_absent(key, bytes, point))
    }

    /// Replaces a file that holds exactly `old`. `false` if it holds something else, or is not there.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn replace_exactly(&self, key: &str, old: &[u8], bytes: &[u8], point: FailPoint) -> Result<bool> {
        either!(self, files => files.replace_exactly(key, old, bytes, point))
    }

    /// Replaces a file by these bytes, durably: readers see the old or the new ones.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn put_durable(&self, key: &str, bytes: &[u8], point: FailPoint) -> Result<()> {
        either!(self, files => files.put_durable(key, bytes, point))
    }

    /// Starts a file that becomes visible, complete and durable, with [`FileWriter::finish`].
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn writer(&self, key: &str, point: FailPoint) -> Result<FileWriter> {
        Ok(match self {
            Self::Disk(disk) => FileWriter::Disk(disk.writer(key, point)?),
            Self::Objects(objects) => FileWriter::Objects(objects.writer(key, point)?),
        })
    }

    /// Reads a file back that was written past the system's cache. A bucket has no such cache.
    ///
    /// # Errors
    /// [`Error::Io`] (also if there is no such file in a directory), [`Error::Key`].
    pub fn read_ahead(&self, key: &str) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.read_ahead(key),
            Self::Objects(_) => Ok(()),
        }
    }

    /// Points `key` at `target` in one atomic step (C3): a relative symlink, or a small text file or object.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`] (also if somebody else moved an object's pointer meanwhile), [`Error::Key`].
    pub fn swap_symlink(&self, key: &str, target: &str, point: FailPoint) -> Result<()> {
        either!(self, files => files.swap_symlink(key, target, point))
    }

    /// Renames a directory. Only a directory can: a bucket has no rename.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn rename_dir(&self, from: &str, to: &str, point: FailPoint) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.rename_dir(from, to, point),
            Self::Objects(objects) => Err(Error::object(
                "rename",
                objects.path(from)?.display(),
                "a bucket has no atomic rename of many objects",
            )),
        }
    }

    /// Removes a pointer in all its forms. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn remove_pointer(&self, key: &str, point: FailPoint) -> Result<bool> {
        match self {
            Self::Disk(disk) => disk.remove_pointer(key, point),
            Self::Objects(objects) => objects.remove_file(key, point),
        }
    }

    /// Removes a file durably. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn remove_file(&self, key: &str, point: FailPoint) -> Result<bool> {
        either!(self, files => files.remove_file(key, point))
    }

    /// Removes a directory and all below it, for a bucket with the uploads that were begun there. `false` if there was none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`], [`Error::Key`].
    pub fn remove_tree(&self, key: &str, point: FailPoint) -> Result<bool> {
        either!(self, files => files.remove_tree(key, point))
    }

    /// Makes the names in a directory durable, if there is one. An object's name is durable from the start.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Key`].
    pub fn sync_dir(&self, key: &str, point: FailPoint) -> Result<()> {
        let Self::Disk(disk) = self else { return Ok(()) };
        let path = disk.path(key)?;
        match path.try_exists().map_err(|e| Error::io("look at", &path, e))? {
            true => disk.sync_dir(key, point),
            false => Ok(()),
        }
    }

    /// Passes a point of code that only reads.
    pub(crate) fn pass(&self, key: &str, point: FailPoint) -> Result<()> {
        either!(self, files => files.pass(key, point))
    }

    /// Removes temporary files of `key` that a killed process left. Only whoever alone may write the key calls this.
    pub(crate) fn sweep(&self, key: &str, point: FailPoint) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.sweep(key, point),
            Self::Objects(_) => Ok(()),
        }
    }

    /// The same for all keys of one directory.
    pub(crate) fn sweep_dir(&self, key: &str, point: FailPoint) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.sweep_dir(key, point),
            Self::Objects(_) => Ok(()),
        }
    }
}

/// A file in the making. Dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub enum FileWriter {
    /// In a directory.
    Disk(disk::FileWriter),
    /// In a bucket.
    Objects(objects::ObjectWriter),
}

impl FileWriter {
    /// Adds bytes.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Disk(writer) => writer.write(bytes),
            Self::Objects(writer) => writer.write(bytes),
        }
    }

    /// Makes the file durable under its name.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Object`].
    pub fn finish(self) -> Result<()> {
        match self {
            Self::Disk(writer) => writer.finish(),
            Self::Objects(writer) => writer.finish(),
        }
    }
}
