//! The system calls that change a POSIX directory: each is counted, and can be made to fail or to be the last one
//! (`TRAINCTL_FAULT=*:n:…`, [`crate::fault`]). Nothing else in this crate makes one.

#![expect(clippy::disallowed_methods, reason = "the module that others are told to use instead")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use crate::fault::{FailPoint, Faults, Stage, Synced};

/// The calls of one process, and the faults that they meet.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    faults: Arc<Faults>,
}

impl Calls {
    pub(super) fn new(faults: Arc<Faults>) -> Self {
        Self { faults }
    }

    /// Passes a point of the code around the calls.
    pub(super) fn hit(&self, point: FailPoint, stage: Stage) -> io::Result<()> {
        self.faults.hit(point, stage)
    }

    pub(super) fn create_new(&self, path: &Path) -> io::Result<File> {
        self.faults.call()?;
        OpenOptions::new().write(true).create_new(true).open(path)
    }

    /// Opens for reading and appending; made if it is missing.
    pub(super) fn open_append(&self, path: &Path) -> io::Result<File> {
        self.faults.call()?;
        OpenOptions::new().read(true).append(true).create(true).open(path)
    }

    /// One call, however many bytes it takes.
    pub(super) fn write(&self, mut file: &File, bytes: &[u8]) -> io::Result<usize> {
        self.faults.call()?;
        loop {
            match file.write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    pub(super) fn write_all(&self, file: &File, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write(file, bytes)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => bytes = &bytes[written..],
            }
        }
        Ok(())
    }

    pub(super) fn set_len(&self, file: &File, size: u64) -> io::Result<()> {
        self.faults.call()?;
        file.set_len(size)
    }

    /// Makes a file's bytes and size durable.
    pub(super) fn sync_file(&self, file: &File, point: FailPoint) -> io::Result<()> {
        if self.faults.sync(point, Synced::File)? { file.sync_all() } else { Ok(()) }
    }

    /// Makes the names in a directory durable.
    pub(super) fn sync_dir(&self, path: &Path, point: FailPoint) -> io::Result<()> {
        if !self.faults.sync(point, Synced::Directory)? {
            return Ok(());
        }
        match File::open(path).and_then(|directory| directory.sync_all()) {
            // Some network file systems cannot sync a directory; they make names durable by themselves.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.faults.call()?;
        fs::rename(from, to)
    }

    /// Swaps two names in one step. `false` where the file system cannot, and then nothing is done.
    pub(super) fn exchange(&self, a: &Path, b: &Path) -> io::Result<bool> {
        self.faults.call()?;
        match renameat2(AT_FDCWD, a, AT_FDCWD, b, RenameFlags::RENAME_EXCHANGE) {
            Ok(()) => Ok(true),
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(super) fn hard_link(&self, original: &Path, link: &Path) -> io::Result<()> {
        self.faults.call()?;
        fs::hard_link(original, link)
    }

    pub(super) fn symlink(&self, target: &str, link: &Path) -> io::Result<()> {
        self.faults.call()?;
        symlink(target, link)
    }

    pub(super) fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.faults.call()?;
        fs::create_dir(path)
    }

    pub(super) fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.faults.call()?;
        fs::remove_file(path)
    }

    /// Removes a directory and all below it, call by call; symlinks are not followed. What somebody else removes meanwhile
    /// is gone too.
    pub(super) fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let removed = match entry.file_type() {
                Ok(kind) if kind.is_dir() => self.remove_dir_all(&entry.path()),
                Ok(_) => self.remove_file(&entry.path()),
                Err(e) => Err(e),
            };
            match removed {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        self.faults.call()?;
        fs::remove_dir(path)
    }
}
