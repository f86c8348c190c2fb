//! A page of memory in which one process says where it is and another reads the newest of it: no message, no wait, no wake-up.
//!
//! The reader makes it ([`Page::new`]) and names a path to it that the writer opens ([`Writer::open`]): the descriptor in the
//! reader's `/proc`, which stays with the reader's life and user. Neither maps it: a write is one `pwrite`, a read one `pread`. A record is
//! its length (4 bytes, little-endian), the first 8 bytes of its blake3, and itself; a read that meets a write half done does
//! not fit its hash and is repeated.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::sys::memfd::{MFdFlags, memfd_create};

/// The longest record.
pub const MAX_RECORD: usize = 4096 - HEAD;
const HEAD: usize = 12;
/// Reads that meet a write in a row before the record is left for the next look. A write takes a microsecond.
const TRIES: usize = 8;

/// The reader's side.
#[derive(Debug)]
pub struct Page {
    file: File,
}

impl Page {
    /// An empty page.
    ///
    /// # Errors
    /// The system gives no memory or no descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self { file: memfd_create("trainctl-page", MFdFlags::MFD_CLOEXEC)?.into() })
    }

    /// The path by which a process of the same user opens it while this one lives.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    /// The newest record; `None` before the first.
    #[must_use]
    pub fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = [0; HEAD + MAX_RECORD];
        (0..TRIES).find_map(|_| {
            let read = self.file.read_at(&mut bytes, 0).ok()?;
            let (head, rest) = bytes[..read].split_at_checked(HEAD)?;
            let (length, hash) = head.split_at(4);
            let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
            let record = rest.get(..length)?;
            (blake3::hash(record).as_bytes()[..8] == *hash).then(|| record.to_vec())
        })
    }
}

/// The writer's side.
#[derive(Debug)]
pub struct Writer {
    file: File,
}

impl Writer {
    /// Opens the page that a reader named.
    ///
    /// # Errors
    /// The reader has ended, or is another user's.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: OpenOptions::new().write(true).open(path)? })
    }

    /// Replaces the record.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`]: longer than [`MAX_RECORD`].
    pub fn write(&self, record: &[u8]) -> io::Result<()> {
        let length = u32::try_from(record.len()).ok().filter(|_| record.len() <= MAX_RECORD);
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        let hash = blake3::hash(record);
        self.file.write_all_at(&[&length.to_le_bytes(), &hash.as_bytes()[..8], record].concat(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_record_is_read() {
        let page = Page::new().expect("page");
        assert_eq!(page.read(), None);
        let writer = Writer::open(&page.path()).expect("open");
        for record in [&b"a longer one"[..], b"short", b""] {
            writer.write(record).expect("write");
            assert_eq!(page.read().as_deref(), Some(record));
        }
        assert!(writer.write(&[0; MAX_RECORD + 1]).is_err());
        writer.write(&[7; MAX_RECORD]).expect("the longest");
        assert_eq!(page.read(), Some(vec![7; MAX_RECORD]));
    }

    #[test]
    fn a_record_is_read_whole_or_not_at_all() {
        let page = Page::new().expect("page");
        let writer = Writer::open(&page.path()).expect("open");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000_usize {
                    writer.write(&vec![round as u8; 100 + round % 3_000]).expect("write");
                }
            });
            for _ in 0..20_000 {
                let Some(record) = page.read() else { continue };
                assert!(record.iter().all(|byte| Some(byte) == record.first()), "of two records: {record:?}");
            }
        });
    }
}
