//! A file that is written from its first byte to its last.
//!
//! Large files bypass the system's cache on local disks: a checkpoint that goes through it takes as much memory as it has
//! bytes, which the kernel must find and clear while training wants the processor, and is slowed down by its own dirty pages.
//! Bytes are copied to a small buffer that is aligned as the disk wants it; the writer's thread waits for the disk, so a rank
//! keeps it busy with the next rank's help.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::statfs::{EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, fstatfs};

use super::temporary::remove_quietly;
use super::{Disk, parent};
use crate::error::{Error, Result};
use crate::fault::{self, FailPoint};
use crate::io::calls::Calls;

/// Bytes of one write. A file of fewer goes through the cache.
pub(super) const STAGING_BYTES: usize = 4 << 20;

/// Where a disk's blocks and the memory that is written to them begin: a multiple of every block size in use.
const ALIGNMENT: usize = 4096;

/// Bytes that are read ahead at once.
const READ_AHEAD_BYTES: usize = 256 << 10;

/// A file in the making. Dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub struct FileWriter {
    file: File,
    temp: PathBuf,
    path: PathBuf,
    point: FailPoint,
    calls: Calls,
    staging: Staging,
    cache: Cache,
    finished: bool,
}

/// What writes of a file have to do with the system's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    /// Not a whole buffer was written yet.
    Undecided,
    /// Writes go to the disk.
    Bypassed,
    /// Writes go to the cache: the file's end does, and all of it where the file system is no local disk's or refuses.
    Used,
}

impl FileWriter {
    pub(super) fn new(file: File, temp: PathBuf, path: PathBuf, point: FailPoint, calls: Calls) -> Self {
        Self { file, temp, path, point, calls, staging: Staging::new(), cache: Cache::Undecided, finished: false }
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            bytes = self.staging.fill(bytes);
            if self.staging.is_full() {
                self.flush().map_err(|e| Error::io("write", &self.path, e))?;
            }
        }
        Ok(())
    }

    /// Writes what is gathered. Only whole ones go past the cache, so each begins at a multiple of the alignment in the file too.
    fn flush(&mut self) -> io::Result<()> {
        match self.cache {
            Cache::Undecided if self.staging.is_full() && is_local_disk(&self.file) => {
                // Refused where the file system wants all bytes itself (encrypted, compressed).
                self.cache = if set_direct(&self.file, true).is_ok() { Cache::Bypassed } else { Cache::Used };
            }
            Cache::Bypassed if !self.staging.is_full() => {
                set_direct(&self.file, false)?;
                self.cache = Cache::Used;
            }
            _ => {}
        }
        let mut bytes = self.staging.held();
        while !bytes.is_empty() {
            match self.calls.write(&self.file, bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                // The disk's blocks are larger than our alignment, or a short write has ended inside one.
                Err(e) if self.cache == Cache::Bypassed && e.raw_os_error() == Some(Errno::EINVAL as i32) => {
                    set_direct(&self.file, false)?;
                    self.cache = Cache::Used;
                }
                Err(e) => return Err(e),
            }
        }
        self.staging.clear();
        Ok(())
    }

    /// Syncs, gives the file its name and syncs the directory.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(mut self) -> Result<()> {
        let publish = |writer: &mut Self| -> io::Result<()> {
            writer.flush()?;
            writer.calls.sync_file(&writer.file, writer.point)?;
            writer.calls.hit(writer.point, fault::Stage::Temp)?;
            writer.calls.rename(&writer.temp, &writer.path)
        };
        publish(&mut self).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound if !self.temp.exists() && parent(&self.path).exists() => {
                Error::Swept { path: self.path.clone() }
            }
            _ => Error::io("write", &self.path, e),
        })?;
        self.finished = true;
        let done = || {
            self.calls
                .sync_dir(parent(&self.path), self.point)
                .and_then(|()| self.calls.hit(self.point, fault::Stage::Done))
        };
        done().map_err(|e| Error::io("write", &self.path, e))
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if !self.finished {
            remove_quietly(&self.calls, &self.temp);
        }
    }
}

/// Bytes that wait to be written, in memory that is aligned.
#[derive(Debug)]
struct Staging {
    memory: Vec<u8>,
    /// The first aligned byte.
    start: usize,
}

impl Staging {
    fn new() -> Self {
        let mut memory: Vec<u8> = Vec::with_capacity(STAGING_BYTES + ALIGNMENT);
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        memory.resize(start, 0);
        Self { memory, start }
    }

    /// Takes what fits; the rest comes back.
    fn fill<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (now, later) = bytes.split_at(bytes.len().min(STAGING_BYTES - self.held().len()));
        self.memory.extend_from_slice(now);
        later
    }

    fn held(&self) -> &[u8] {
        &self.memory[self.start..]
    }

    fn is_full(&self) -> bool {
        self.held().len() == STAGING_BYTES
    }

    fn clear(&mut self) {
        self.memory.truncate(self.start);
    }
}

impl Disk {
    /// Reads a file into the system's cache, which its writer has bypassed: whoever restarts on this host then need not wait for
    /// the disk. Where the cache was not bypassed nothing is done. It is read from front to back and not by hints, after which
    /// Linux keeps it in small pages, from which it is copied more slowly.
    ///
    /// # Errors
    /// [`Error::Io`] (also if there is no such file), [`Error::Key`].
    pub fn read_ahead(&self, key: &str) -> Result<()> {
        let path = self.path(key)?;
        let failed = |e| Error::io("read ahead", &path, e);
        let mut file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        if size >= STAGING_BYTES as u64 && is_local_disk(&file) {
            let mut buffer = vec![0; READ_AHEAD_BYTES];
            while file.read(&mut buffer).map_err(failed)? > 0 {}
        }
        Ok(())
    }
}

/// Whether a file lies where bypassing the cache is known to be faster. Network file systems write several requests at a
/// time only from their cache.
fn is_local_disk(file: &File) -> bool {
    fstatfs(file).is_ok_and(|about| [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC].contains(&about.filesystem_type()))
}

fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    let flags = if direct { flags | OFlag::O_DIRECT } else { flags - OFlag::O_DIRECT };
    fcntl(file, FcntlArg::F_SETFL(flags))?;
    Ok(())
}

#[cfg(test)]
impl FileWriter {
    pub(super) fn bypasses_cache(&self) -> bool {
        self.cache == Cache::Bypassed
    }

    pub(super) fn is_on_local_disk(&self) -> bool {
        is_local_disk(&self.file)
    }

    pub(super) fn write_unaligned(&self, bytes: &[u8]) {
        self.calls.write_all(&self.file, bytes).unwrap();
    }
}
