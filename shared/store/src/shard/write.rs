//! Writing shards: header and tensors go to disk and through the hash once, then the file gets its name.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Serialize;
use trainctl_spec::report::ShardFile;

use super::{FileHasher, SLICES, Slice, Slices};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Disk, FileWriter};
use crate::layout::CheckpointName;
use crate::state_hash::{element_bytes, elements};

/// A tensor, or a piece of one, to write.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// The name in the file.
    pub name: &'a str,
    /// safetensors' spelling: `F32`, `BF16`, …
    pub dtype: &'a str,
    /// Shape of what is in `bytes`.
    pub shape: &'a [u64],
    /// Row-major, little-endian.
    pub bytes: &'a [u8],
    /// Where it belongs; `None` if it is a whole tensor.
    pub slice: Option<Slice>,
}

#[derive(Serialize)]
struct HeaderEntry<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// Writes the files of one rank into one checkpoint's directory.
#[derive(Debug)]
pub struct ShardWriter {
    disk: Disk,
    checkpoint: CheckpointName,
}

impl ShardWriter {
    /// For the checkpoint `name` in the directory `root`.
    pub fn new(root: impl Into<PathBuf>, checkpoint: CheckpointName) -> Self {
        Self { disk: Disk::new(root), checkpoint }
    }

    /// The same over a given disk, for tests with faults.
    pub fn with_disk(disk: Disk, checkpoint: CheckpointName) -> Self {
        Self { disk, checkpoint }
    }

    /// Writes a safetensors file at `path` inside the checkpoint. After it returns the file is durable. `metadata` is added
    /// to the header.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a view contradicts itself or a name comes twice; [`Error::Io`].
    pub fn write_safetensors(
        &self,
        path: &str,
        tensors: &[TensorView<'_>],
        metadata: &[(&str, &str)],
    ) -> Result<ShardFile> {
        let (header, order) = header(tensors, metadata)?;
        let mut file = self.start(path)?;
        file.add(&(header.len() as u64).to_le_bytes())?;
        file.add(&header)?;
        for index in order {
            file.add(tensors[index].bytes)?;
        }
        file.finish(path)
    }

    /// Writes any other file of the checkpoint, for example `optim/trainer.json`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_bytes(&self, path: &str, bytes: &[u8]) -> Result<ShardFile> {
        let mut file = self.start(path)?;
        file.add(bytes)?;
        file.finish(path)
    }

    fn start(&self, path: &str) -> Result<HashedFile> {
        let writer = self.disk.writer(&self.checkpoint.key(path), FailPoint::SHARD_WRITE)?;
        Ok(HashedFile { writer, hasher: FileHasher::default() })
    }
}

/// Writes a safetensors file that is no part of a checkpoint, durably: an export.
///
/// # Errors
/// [`Error::Tensor`], [`Error::Io`].
pub fn write_file(root: impl Into<PathBuf>, key: &str, tensors: &[TensorView<'_>]) -> Result<ShardFile> {
    let (header, order) = header(tensors, &[])?;
    let writer = Disk::new(root).writer(key, FailPoint::SHARD_WRITE)?;
    let mut file = HashedFile { writer, hasher: FileHasher::default() };
    file.add(&(header.len() as u64).to_le_bytes())?;
    file.add(&header)?;
    for index in order {
        file.add(tensors[index].bytes)?;
    }
    file.finish(key)
}

struct HashedFile {
    writer: FileWriter,
    hasher: FileHasher,
}

impl HashedFile {
    /// Writes and hashes in pieces that stay in the processor's cache between the two.
    fn add(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(1 << 20) {
            self.writer.write(piece)?;
            self.hasher.update(piece);
        }
        Ok(())
    }

    fn finish(self, path: &str) -> Result<ShardFile> {
        self.writer.finish()?;
        Ok(self.hasher.finish(path))
    }
}

/// The header (padded with spaces to 8 bytes, as the format's own writer does) and the order of the tensors in the file:
/// wide elements first, so that every tensor is aligned, then by name.
fn header(tensors: &[TensorView<'_>], metadata: &[(&str, &str)]) -> Result<(Vec<u8>, Vec<usize>)> {
    let mut names = BTreeSet::new();
    let mut slices = Slices::new();
    for view in tensors {
        check(view)?;
        if !names.insert(view.name) {
            return Err(fault(view, "comes twice in one file".into()));
        }
        slices.insert(view.name.to_owned(), view.slice.clone().unwrap_or_else(|| Slice::whole(view.shape)));
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(element_bytes(tensors[i].dtype)), tensors[i].name));
    let json = |value: Result<serde_json::Value, serde_json::Error>| {
        value.map_err(|e| Error::Tensor { name: "header".into(), reason: e.to_string() })
    };
    let mut about = serde_json::Map::new();
    about.insert("format".into(), "pt".into());
    about.insert(SLICES.into(), json(serde_json::to_value(&slices))?.to_string().into());
    about.extend(metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())));
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".into(), about.into());
    let mut offset = 0;
    for &index in &order {
        let view = &tensors[index];
        let end = offset + view.bytes.len() as u64;
        let entry = HeaderEntry { dtype: view.dtype, shape: view.shape, data_offsets: [offset, end] };
        entries.insert(view.name.to_owned(), json(serde_json::to_value(entry))?);
        offset = end;
    }
    let mut header = serde_json::Value::Object(entries).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok((header, order))
}

fn check(view: &TensorView<'_>) -> Result<()> {
    let Some(size) = element_bytes(view.dtype) else {
        return Err(fault(view, format!("dtype {} is not known", view.dtype)));
    };
    let expected = elements(view.shape) * size as u64;
    if expected != view.bytes.len() as u64 {
        return Err(fault(
            view,
            format!("has {} bytes, but shape {:?} of {} needs {expected}", view.bytes.len(), view.shape, view.dtype),
        ));
    }
    match &view.slice {
        Some(slice) if !slice.holds(view.shape) => Err(fault(
            view,
            format!("shape {:?} at {:?} reaches beyond the whole shape {:?}", view.shape, slice.offset, slice.shape),
        )),
        _ => Ok(()),
    }
}

fn fault(view: &TensorView<'_>, reason: String) -> Error {
    Error::Tensor { name: view.name.to_owned(), reason }
}
