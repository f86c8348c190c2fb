//! What the headers of a checkpoint's shards say: which tensors there are, and where their pieces lie.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::Metadata;

use super::{SLICES, Slice, Slices};
use crate::error::{Error, Result};
use crate::layout::Section;
use crate::state_hash::{element_bytes, elements};

/// What is known of a tensor without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// safetensors' spelling.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        elements(&self.shape) * self.element_bytes()
    }

    pub(super) fn element_bytes(&self) -> u64 {
        element_bytes(&self.dtype).unwrap_or(0) as u64
    }
}

/// A part of a tensor in one file.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Index into the manifest's files.
    pub(super) file: usize,
    /// Its first byte in the file.
    pub(super) start: u64,
    pub(super) shape: Vec<u64>,
    pub(super) offset: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) info: TensorInfo,
    pub(super) pieces: Vec<Piece>,
}

/// Every tensor of a checkpoint by its name, `model/<name>` or `optim/<name>`.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub(super) tensors: BTreeMap<String, Entry>,
}

/// The section of a shard, by its path in the checkpoint; `None` for every other file.
pub(crate) fn section_of(path: &str) -> Option<Section> {
    [Section::Model, Section::Optim].into_iter().find(|section| {
        let inside = path.strip_prefix(section.folder()).and_then(|rest| rest.strip_prefix('/'));
        inside.is_some_and(|inside| inside.starts_with("shard-") && inside.ends_with(".safetensors"))
    })
}

impl Index {
    /// Adds the tensors of one file. `header` is the JSON, which begins at byte 8 of the file's `size` bytes.
    pub(super) fn add(&mut self, file: usize, path: &Path, section: Section, size: u64, header: &[u8]) -> Result<()> {
        let damaged = |reason: String| Error::Damaged { path: path.to_owned(), reason };
        let header_end = 8 + header.len() as u64;
        let metadata: Metadata = serde_json::from_slice(header).map_err(|e| damaged(format!("header: {e}")))?;
        let about = metadata.metadata().as_ref().and_then(|about| about.get(SLICES));
        let slices: Slices = match about {
            Some(text) => serde_json::from_str(text).map_err(|e| damaged(format!("header, {SLICES}: {e}")))?,
            None => Slices::new(),
        };
        for (inner, tensor) in metadata.tensors() {
            let name = format!("{}/{inner}", section.folder());
            let fault = |reason: String| Error::Tensor { name: name.clone(), reason };
            let shape: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
            let slice = slices.get(&inner).cloned().unwrap_or_else(|| Slice::whole(&shape));
            let dtype = tensor.dtype.to_string();
            let bytes = element_bytes(&dtype).map(|size| elements(&shape) * size as u64);
            let (start, end) = tensor.data_offsets;
            if !slice.holds(&shape) || bytes != Some(end.saturating_sub(start) as u64) || end as u64 > size - header_end
            {
                return Err(fault(format!("does not fit its header in {}", path.display())));
            }
            let info = TensorInfo { dtype, shape: slice.shape };
            let piece = Piece { file, start: header_end + start as u64, shape, offset: slice.offset };
            let entry =
                self.tensors.entry(name.clone()).or_insert_with(|| Entry { info: info.clone(), pieces: vec![] });
            if entry.info != info {
                return Err(fault(format!("is {:?} in one shard and {info:?} in another", entry.info)));
            }
            entry.pieces.push(piece);
        }
        Ok(())
    }

    /// That every tensor is all there.
    pub(super) fn check(&self) -> Result<()> {
        for (name, entry) in &self.tensors {
            let covered: u64 = entry.pieces.iter().map(|piece| elements(&piece.shape)).sum();
            if covered != elements(&entry.info.shape) {
                let reason = format!("its pieces have {covered} of {} elements", elements(&entry.info.shape));
                return Err(Error::Tensor { name: name.clone(), reason });
            }
        }
        Ok(())
    }

    /// The tensors with bytes in a range of a file, in the order of the file.
    pub(super) fn at(&self, file: usize, from: u64, to: u64) -> Vec<&str> {
        let mut found = Vec::new();
        for (name, entry) in &self.tensors {
            for piece in entry.pieces.iter().filter(|piece| piece.file == file) {
                let end = piece.start + elements(&piece.shape) * entry.info.element_bytes();
                if piece.start < to && from < end {
                    found.push((piece.start, name.as_str()));
                }
            }
        }
        found.sort_unstable();
        found.dedup_by(|a, b| a.1 == b.1);
        found.into_iter().map(|(_, name)| name).collect()
    }
}
