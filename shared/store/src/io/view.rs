//! Bytes of a file where the system's page cache holds them: the crate's only `unsafe`.

use std::fs::File;
use std::ops::Deref;

use memmap2::{Advice, Mmap, MmapOptions};

/// A run of a file's bytes, mapped.
#[derive(Debug)]
pub struct View(Mmap);

impl View {
    /// Maps `len` bytes from `offset` and has all of them read into memory; `None` if that cannot be done: the file ends
    /// pages before, a disk fails, or the kernel is older than 5.14. Reading them by a call tells which.
    #[expect(unsafe_code, reason = "a memory map of a file that others could change")]
    pub(super) fn new(file: &File, offset: u64, len: usize) -> Option<Self> {
        // SAFETY: the map is read-only, bytes of any value are valid `u8`, and every access goes through a bounds-checked
        // slice. What remains is a file that changes meanwhile. Files of a checkpoint are never written again; whoever
        // does it nevertheless gives a hash other bytes, which is what it is there to notice. One that is cut off, or that
        // the system drops from memory and then cannot read again, in the milliseconds between `advise` and the last look ends
        // the process by SIGBUS; before that it gives `None`.
        let map = unsafe { MmapOptions::new().offset(offset).len(len).map(file) }.ok()?;
        map.advise(Advice::PopulateRead).ok()?;
        Some(Self(map))
    }
}

impl Deref for View {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
