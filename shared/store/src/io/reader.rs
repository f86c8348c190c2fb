//! Reading parts of one file from several threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::Disk;
use crate::error::{Error, Result};

/// An open file. Reads do not move anything, so threads can share it.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    path: PathBuf,
}

impl Disk {
    /// Opens a file for [`FileReader::read_at`].
    ///
    /// # Errors
    /// [`Error::Io`] (also if there is none), [`Error::Key`].
    pub fn reader(&self, key: &str) -> Result<FileReader> {
        let path = self.path(key)?;
        let file = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
        Ok(FileReader { file, path })
    }
}

impl FileReader {
    /// How many bytes a call should ask for at most: few enough to be in the processor's cache when they are hashed
    /// next. A power of two.
    pub fn piece_bytes(&self) -> usize {
        256 << 10
    }

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// [`Error::Damaged`] if the file ends before, [`Error::Io`].
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Error::Damaged {
                path: self.path.clone(),
                reason: format!("ends before byte {}", offset + buffer.len() as u64),
            },
            _ => Error::io("read", &self.path, e),
        })
    }
}
