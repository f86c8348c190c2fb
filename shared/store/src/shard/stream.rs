//! A file on its way to the disk: a few threads hash its blocks, and write them in order.
//!
//! The content lies in the caller's memory, and no more is needed than the writer's buffer. While one thread writes a block
//! the others hash the next ones; the writer gets the bytes from the first to the last, as an object store wants them.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use blake3::Hasher;
use trainctl_spec::report::{FileHeader, ShardFile};

use super::hash::{block_count, block_hasher, record};
use super::{BLOCK_BYTES, workers};
use crate::error::Result;
use crate::io::FileWriter;
use crate::state_hash::digest_blocks;

/// Bytes that are hashed at once: in the processor's cache they serve for the file's hash and for the state's.
const PIECE_BYTES: u64 = 256 << 10;

/// A run of the file's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent<'a> {
    /// First byte in the file.
    start: u64,
    bytes: &'a [u8],
    /// Bytes of a block of the state hash, if it is a tensor whose blocks are wanted.
    state_block: Option<usize>,
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct Content<'a> {
    extents: Vec<Extent<'a>>,
    size: u64,
}

impl<'a> Content<'a> {
    /// Adds bytes at the end.
    pub(super) fn push(&mut self, bytes: &'a [u8], state_block: Option<usize>) {
        if !bytes.is_empty() || state_block.is_some() {
            self.extents.push(Extent { start: self.size, bytes, state_block });
        }
        self.size += bytes.len() as u64;
    }

    /// Runs between two bytes of the file, with their place.
    fn between(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, &Extent<'a>, &'a [u8])> {
        let first = self.extents.partition_point(|extent| extent.start + extent.bytes.len() as u64 <= from);
        let touching = self.extents.iter().enumerate().skip(first).take_while(move |(_, extent)| extent.start < to);
        touching.map(move |(index, extent)| {
            let cut = |at: u64| (at.max(extent.start) - extent.start).min(extent.bytes.len() as u64) as usize;
            (index, extent, &extent.bytes[cut(from)..cut(to)])
        })
    }
}

/// A written file.
#[derive(Debug)]
pub(super) struct Streamed {
    pub(super) file: ShardFile,
    /// For each extent with state blocks, in order: their digests.
    pub(super) digests: Vec<Vec<[u8; 32]>>,
}

/// Digests of state blocks: of which extent, from which block on.
type Digests = (usize, usize, Vec<[u8; 32]>);

struct Turn {
    writer: FileWriter,
    /// The block that is written next.
    next: u64,
    /// Somebody could not write: nobody goes on.
    failed: bool,
    hashers: Vec<Hasher>,
    digests: Vec<Digests>,
}

/// Writes and hashes the content with up to `threads` threads, and finishes the file.
pub(super) fn stream(
    writer: FileWriter,
    path: &str,
    content: &Content<'_>,
    header: Option<FileHeader>,
    threads: NonZeroUsize,
) -> Result<Streamed> {
    let turn = Turn { writer, next: 0, failed: false, hashers: vec![], digests: vec![] };
    let (turn, changed) = (Mutex::new(turn), Condvar::new());
    let blocks = (0..block_count(content.size)).collect();
    workers::for_each(threads, blocks, |_: &mut (), block: u64| {
        let mut digests = Vec::new();
        // A panic here must not leave the others waiting for this block.
        let hashed = catch_unwind(AssertUnwindSafe(|| hash_block(content, block, &mut digests)));
        let mut turn = lock(&turn);
        let hasher = hashed.unwrap_or_else(|panic| {
            turn.failed = true;
            changed.notify_all();
            resume_unwind(panic)
        });
        while turn.next != block && !turn.failed {
            turn = changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        if turn.failed {
            return Ok(());
        }
        let written = turn.write(content, block);
        turn.failed = written.is_err();
        turn.next += 1;
        turn.hashers.push(hasher);
        turn.digests.append(&mut digests);
        changed.notify_all();
        written
    })?;
    let turn = turn.into_inner().unwrap_or_else(PoisonError::into_inner);
    turn.writer.finish()?;
    let file = record(path, content.size, &turn.hashers, header);
    let mut digests: Vec<Vec<[u8; 32]>> = vec![Vec::new(); content.extents.len()];
    for (extent, first, mut part) in turn.digests {
        debug_assert_eq!(digests[extent].len(), first, "blocks come in order");
        digests[extent].append(&mut part);
    }
    let of_tensors = content.extents.iter().zip(digests).filter(|(extent, _)| extent.state_block.is_some());
    Ok(Streamed { file, digests: of_tensors.map(|(_, digests)| digests).collect() })
}

impl Turn {
    fn write(&mut self, content: &Content<'_>, block: u64) -> Result<()> {
        let from = block * BLOCK_BYTES as u64;
        let mut runs = content.between(from, from + BLOCK_BYTES as u64);
        runs.try_for_each(|(_, _, bytes)| self.writer.write(bytes))
    }
}

/// Hashes a block of the file, and the state blocks that begin in it.
fn hash_block(content: &Content<'_>, block: u64, digests: &mut Vec<Digests>) -> Hasher {
    let mut hasher = block_hasher(block);
    let begin = block * BLOCK_BYTES as u64;
    let end = content.size.min(begin + BLOCK_BYTES as u64);
    for from in (begin..end).step_by(PIECE_BYTES as usize) {
        let to = end.min(from + PIECE_BYTES);
        for (index, extent, bytes) in content.between(from, to) {
            hasher.update(bytes);
            let Some(size) = extent.state_block else { continue };
            let nth = |at: u64| (at.saturating_sub(extent.start) as usize).min(extent.bytes.len()).div_ceil(size);
            let (first, last) = (nth(from), nth(to));
            if first < last {
                let end = extent.bytes.len().min(last * size);
                let mut part = vec![[0; 32]; last - first];
                digest_blocks(size, &extent.bytes[first * size..end], &mut part);
                digests.push((index, first, part));
            }
        }
    }
    hasher
}

fn lock(turn: &Mutex<Turn>) -> MutexGuard<'_, Turn> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}
