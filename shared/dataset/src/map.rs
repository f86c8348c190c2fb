//! Read-only memory maps: the crate's only `unsafe`.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A whole file as bytes. An empty file is an empty slice (the kernel refuses to map one).
#[derive(Debug)]
pub(crate) struct Map(Option<Mmap>);

impl Map {
    /// Maps `path` read-only.
    #[expect(unsafe_code, reason = "a memory map of a file that others could change")]
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let len = file.metadata().map_err(Error::io("read the size of", path))?.len();
        if len == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the map is read-only and private to this process, bytes of any value are valid `u8`, and every access
        // goes through a bounds-checked slice. What remains is another process that shortens or rewrites the file while it
        // is mapped: shortening gives SIGBUS (a crash, which the restart handles), rewriting gives other bytes. Our
        // own writers never do either: they write to a temporary name and rename, which leaves a mapped inode alone.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        Ok(Self(Some(map)))
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or(&[])
    }
}

/// The `N` bytes at `offset`, for unaligned little-endian reads.
pub(crate) fn bytes_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
}
