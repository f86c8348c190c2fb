//! The `.jsonl` files of a run: one JSON object a line, one write call a row.
//!
//! Only the coordinator of the highest term writes them. A kill can cut the last row: the next open removes it. Rows of a
//! file with steps come in step order, and a step that is there already is left out, so that a worker may send its spool
//! twice. Opening puts a copy of the whole rows in the file's place: a holder that was frozen and wakes up later still has
//! the old file open, and appends to one that nobody reads (as with the coordinator's journal). Opening passes the fence, and
//! replaces only the file that it has read; a holder whose file was replaced nevertheless (where names cannot be exchanged)
//! notices at its next append, passes the fence and takes it back, with its own rows.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::Disk;
use crate::tenure::{Fence, Unfenced};

/// Whether rows have a step that orders them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// `training.jsonl`, `validation*.jsonl`: rows in step order, each step once.
    ByStep,
    /// `events.jsonl`: every row is kept.
    AsAppended,
}

/// Outcome of [`RowFile::append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// The row is in the file.
    Written,
    /// Its step was there already.
    Ignored,
}

#[derive(Deserialize)]
struct Step {
    step: u64,
}

/// One `.jsonl` file, opened for appending. Calls block for one write; rows are not synced one by one.
#[derive(Debug)]
pub struct RowFile {
    disk: Disk,
    key: String,
    file: File,
    fence: Arc<dyn Fence>,
    order: Order,
    size: u64,
    last_step: Option<u64>,
    repaired: u64,
}

impl RowFile {
    /// [`RowFile::open_fenced`] for files that no coordinator holds.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: impl AsRef<Path>, order: Order) -> Result<Self> {
        Self::open_fenced(path, order, Arc::new(Unfenced))
    }

    /// Takes over a file, or makes it. A last row that is cut off, or is no JSON object, is removed. Whoever had the file
    /// open before writes to a dead copy from now on.
    ///
    /// # Errors
    /// [`Error::Superseded`] from the fence, [`Error::Io`].
    pub fn open_fenced(path: impl AsRef<Path>, order: Order, fence: Arc<dyn Fence>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.file_name().and_then(|name| name.to_str());
        let key = name.ok_or_else(|| Error::Key { key: path.display().to_string() })?.to_owned();
        let disk = Disk::new(path.parent().unwrap_or(Path::new("")));
        let (size, last_step, repaired) = loop {
            let mut old = disk.open_read(&key)?;
            let bytes = match &mut old {
                Some(old) => read_from(old, 0).map_err(|e| Error::io("read", path, e))?,
                None => Vec::new(),
            };
            let (size, last_step) = valid_prefix(&bytes, order);
            fence.pass_blocking()?;
            disk.sweep(&key, FailPoint::ROW_OPEN)?;
            let Some(old) = old else { break (size, last_step, 0) };
            if disk.replace_durable(&key, &old, &bytes[..size as usize], FailPoint::ROW_OPEN)? {
                break (size, last_step, bytes.len() as u64 - size);
            }
        };
        let file = disk.open_append(&key, FailPoint::ROW_OPEN)?;
        let rows = Self { disk, key, file, fence, order, size, last_step, repaired };
        if repaired > 0 {
            tracing::warn!(path = %rows.path().display(), bytes = repaired, "removed a row that was cut off");
        }
        Ok(rows)
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.disk.root().join(&self.key)
    }

    /// Step of the last row; `None` if there is none or rows have no order.
    pub fn last_step(&self) -> Option<u64> {
        self.last_step
    }

    /// Bytes of a torn tail that [`RowFile::open`] removed.
    pub fn repaired_bytes(&self) -> u64 {
        self.repaired
    }

    /// Bytes of all rows.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Adds a row with one write call. A row of a step that is there already changes nothing.
    ///
    /// # Errors
    /// [`Error::Row`] if it has no step although rows have one, or no JSON form; [`Error::Superseded`] if a higher term has
    /// taken over the file; [`Error::Io`], after which the file is as before or has a torn tail that the next append
    /// removes.
    pub fn append<T: Serialize>(&mut self, row: &T) -> Result<Appended> {
        let mut line = serde_json::to_string(row).map_err(|e| self.fault(format!("the row has no JSON form: {e}")))?;
        let step = match self.order {
            Order::AsAppended => None,
            Order::ByStep => {
                let Step { step } =
                    serde_json::from_str(&line).map_err(|e| self.fault(format!("the row has no step: {e}")))?;
                Some(step)
            }
        };
        self.take_back_if_replaced()?;
        if step.is_some() && step <= self.last_step {
            return Ok(Appended::Ignored);
        }
        self.settle()?;
        line.push('\n');
        self.disk.append(&self.key, &self.file, line.as_bytes(), FailPoint::ROW_APPEND)?;
        self.size += line.len() as u64;
        self.last_step = step.or(self.last_step);
        Ok(Appended::Written)
    }

    /// Puts this holder's rows in the place of the file that somebody else put there, or removed.
    fn take_back_if_replaced(&mut self) -> Result<()> {
        if self.disk.is_same_file(&self.key, &self.file)? {
            return Ok(());
        }
        tracing::warn!(path = %self.path().display(), "the file was replaced; takes it back");
        let bytes = self.read_from(0)?;
        self.fence.pass_blocking()?;
        self.disk.put_durable(&self.key, &bytes[..(self.size as usize).min(bytes.len())], FailPoint::ROW_OPEN)?;
        self.file = self.disk.open_append(&self.key, FailPoint::ROW_OPEN)?;
        Ok(())
    }

    /// Cuts off the torn tail of an append that failed half-way.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn settle(&mut self) -> Result<()> {
        let size = self.file.metadata().map_err(|e| Error::io("look at", self.path(), e))?.len();
        if size <= self.size {
            self.size = size;
            return Ok(());
        }
        tracing::warn!(path = %self.path().display(), bytes = size - self.size, "cuts off a row that was written in part");
        self.disk.truncate(&self.key, &self.file, self.size, FailPoint::ROW_REPAIR)
    }

    /// Makes all rows durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        self.disk.sync_file(&self.key, &self.file, FailPoint::ROW_SYNC)
    }

    /// Moves the rows after `step` (`None`: all) to the end of the file `abandoned`; the next append may bring those steps
    /// again. Returns how many moved. They are durable there before they leave here; a kill in between leaves them in both.
    ///
    /// # Errors
    /// [`Error::Superseded`] from the fence, [`Error::Io`].
    pub fn cut_after(&mut self, step: Option<u64>, abandoned: impl AsRef<Path>) -> Result<u64> {
        self.fence.pass_blocking()?;
        self.take_back_if_replaced()?;
        let bytes = self.read_from(0)?;
        let (mut offset, mut last) = (0, None);
        for line in bytes[..(self.size as usize).min(bytes.len())].split_inclusive(|byte| *byte == b'\n') {
            match (step_of(line), step) {
                (Some(found), Some(limit)) if found <= limit => last = Some(found),
                _ => break,
            }
            offset += line.len();
        }
        let later = &bytes[offset..(self.size as usize).clamp(offset, bytes.len())];
        if later.is_empty() {
            return Ok(0);
        }
        let archive = Self::open(abandoned, Order::AsAppended)?;
        archive.disk.append(&archive.key, &archive.file, later, FailPoint::ROW_CUT)?;
        archive.sync()?;
        self.disk.truncate(&self.key, &self.file, offset as u64, FailPoint::ROW_CUT)?;
        (self.size, self.last_step) = (offset as u64, last);
        Ok(later.iter().filter(|byte| **byte == b'\n').count() as u64)
    }

    fn read_from(&mut self, offset: u64) -> Result<Vec<u8>> {
        read_from(&mut self.file, offset).map_err(|e| Error::io("read", self.path(), e))
    }

    fn fault(&self, reason: String) -> Error {
        Error::Row { path: self.path(), reason }
    }
}

/// Size of the whole rows, and the step of the last one.
fn valid_prefix(bytes: &[u8], order: Order) -> (u64, Option<u64>) {
    let mut lines: Vec<&[u8]> = bytes.split_inclusive(|byte| *byte == b'\n').collect();
    let is_whole = |line: &[u8]| {
        line.ends_with(b"\n") && serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line).is_ok()
    };
    // Only the tail can be torn: rows before a whole one were written by calls that returned.
    while lines.last().is_some_and(|line| !is_whole(line)) {
        lines.pop();
    }
    let size = lines.iter().map(|line| line.len() as u64).sum();
    let last = match order {
        Order::ByStep => lines.iter().filter_map(|line| step_of(line)).max(),
        Order::AsAppended => None,
    };
    (size, last)
}

fn step_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Step>(line).ok().map(|row| row.step)
}

fn read_from(file: &mut File, offset: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset))?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What [`read_rows`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Whole rows without their newlines.
    pub lines: Vec<String>,
    /// Where the next read goes on.
    pub next_offset: u64,
    /// The file was cut since the offset was given; reading went on at the new end.
    pub cut: bool,
}

/// Reads whole rows from a byte offset on, for `logs`, `metrics` and `events`. A missing file is an empty one; a row that
/// is being written is left for the next call.
///
/// # Errors
/// [`Error::Io`].
pub fn read_rows(path: impl AsRef<Path>, offset: u64) -> Result<Rows> {
    let path = path.as_ref();
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Rows::default()),
        Err(e) => return Err(Error::io("open", path, e)),
    };
    let size = file.metadata().map_err(|e| Error::io("look at", path, e))?.len();
    if size < offset {
        return Ok(Rows { lines: Vec::new(), next_offset: size, cut: true });
    }
    let bytes = read_from(&mut file, offset).map_err(|e| Error::io("read", path, e))?;
    let mut rows = Rows { next_offset: offset, ..Rows::default() };
    for line in bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        rows.next_offset += line.len() as u64;
        rows.lines.push(String::from_utf8_lossy(&line[..line.len() - 1]).into_owned());
    }
    Ok(rows)
}

/// All rows of a file, parsed.
///
/// # Errors
/// [`Error::Row`] that names the line which is no such row; [`Error::Io`].
pub fn parse_rows<T: serde::de::DeserializeOwned>(path: impl AsRef<Path>) -> Result<Vec<T>> {
    let path = path.as_ref();
    let parse = |(index, line): (usize, String)| {
        serde_json::from_str(&line)
            .map_err(|e| Error::Row { path: path.to_owned(), reason: format!("line {}: {e}", index + 1) })
    };
    read_rows(path, 0)?.lines.into_iter().enumerate().map(parse).collect()
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
