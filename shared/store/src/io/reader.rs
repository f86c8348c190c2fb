//! Reading parts of one file from several threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, XFS_SUPER_MAGIC,
    statfs,
};

use super::{Disk, Files, ObjectReader, View};
use crate::error::{Error, Result};

/// An open file. Reads do not move anything, so threads can share it.
#[derive(Debug)]
pub enum FileReader {
    /// In a directory.
    File {
        /// Open for reading.
        file: File,
        /// For messages.
        path: PathBuf,
    },
    /// In a bucket.
    Object(ObjectReader),
}

impl Disk {
    /// Opens a file for [`FileReader::read_at`].
    ///
    /// # Errors
    /// [`Error::Io`] (also if there is none), [`Error::Key`].
    pub fn reader(&self, key: &str) -> Result<FileReader> {
        let path = self.path(key)?;
        let file = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
        Ok(FileReader::File { file, path })
    }
}

/// File systems whose files are read through the kernel's page cache, or another one that a host has once. Not FUSE, where each
/// container may have a server of its own.
const ONE_CACHE: [FsType; 9] = [
    BTRFS_SUPER_MAGIC,
    EXT4_SUPER_MAGIC,
    NFS_SUPER_MAGIC,
    OVERLAYFS_SUPER_MAGIC,
    TMPFS_MAGIC,
    XFS_SUPER_MAGIC,
    // Lustre: LL_SUPER_MAGIC of lustre_user.h.
    FsType(0x0BD0_0BD0),
    // Storage Scale, whose page pool a host has once: "GPFS".
    FsType(0x4750_4653),
    // ZFS: its ARC.
    FsType(0x2FC1_2FC1),
];

impl Disk {
    /// See [`Files::are_read_through_one_cache`].
    pub(super) fn is_read_through_one_cache(&self) -> bool {
        statfs(self.root()).is_ok_and(|about| ONE_CACHE.contains(&about.filesystem_type()))
    }
}

impl Files {
    /// Opens a file for [`FileReader::read_at`]; a bucket is not asked before the first read.
    ///
    /// # Errors
    /// [`Error::Io`] (also if there is no such file in a directory), [`Error::Key`].
    pub fn reader(&self, key: &str) -> Result<FileReader> {
        match self {
            Self::Disk(disk) => disk.reader(key),
            Self::Objects(objects) => objects.reader(key).map(FileReader::Object),
        }
    }
}

impl FileReader {
    /// How many bytes a call should ask for at most: few enough to be in the processor's cache when they are hashed
    /// next, but a whole block of a checkpoint where each call is a request. A power of two.
    pub fn piece_bytes(&self) -> usize {
        match self {
            Self::File { .. } => 256 << 10,
            Self::Object(_) => 8 << 20,
        }
    }

    /// Bytes where the system holds them, for whoever only looks at them: nothing is copied. `None` where there is no such
    /// place, or not for all of them; [`FileReader::read_at`] then reads them or says why not.
    pub fn view(&self, offset: u64, len: usize) -> Option<View> {
        match self {
            Self::File { file, .. } => View::new(file, offset, len),
            Self::Object(_) => None,
        }
    }

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the file ends before, [`Error::Io`], [`Error::Object`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let (file, path) = match self {
            Self::File { file, path } => (file, path),
            Self::Object(object) => return object.read_at(offset, buffer),
        };
        file.read_exact_at(buffer, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Error::Damaged {
                path: path.clone(),
                reason: format!("ends before byte {}", offset + buffer.len() as u64),
            },
            _ => Error::io("read", path, e),
        })
    }
}
