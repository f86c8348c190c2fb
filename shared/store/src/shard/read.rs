//! Reading a committed checkpoint by tensor, whatever the world size that wrote it (C8). Every byte that is handed out
//! was hashed first: a range is read by the 8 MiB blocks that it touches.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::{BLOCK_BYTES, SLICES, Slice, Slices};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::Disk;
use crate::layout::{CheckpointName, MANIFEST, Section};
use crate::manifest::Manifest;
use crate::state_hash::{Combiner, element_bytes, elements, whole_tensor};

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
        elements(&self.shape) * element_bytes(&self.dtype).unwrap_or(0) as u64
    }
}

#[derive(Debug)]
struct Piece {
    file: usize,
    start: u64,
    shape: Vec<u64>,
    offset: Vec<u64>,
}

#[derive(Debug)]
struct Entry {
    info: TensorInfo,
    pieces: Vec<Piece>,
}

/// One committed checkpoint, by tensor name: `model/<name>` and `optim/<name>`. Reads are cheapest in the order of
/// [`ShardReader::in_file_order`], because the block read last is kept.
#[derive(Debug)]
pub struct ShardReader {
    disk: Disk,
    manifest: Manifest,
    hash: String,
    tensors: BTreeMap<String, Entry>,
    cached: Option<(usize, u64, Vec<u8>)>,
}

impl ShardReader {
    /// Opens the checkpoint `name` in the directory `root`. With `manifest_hash` it must be exactly that one (C9).
    ///
    /// # Errors
    /// [`Error::NotCommitted`], [`Error::Manifest`], [`Error::OtherManifest`], [`Error::Damaged`], [`Error::Tensor`] if
    /// the pieces of a tensor do not make up a whole, [`Error::Io`].
    pub fn open(root: impl Into<PathBuf>, name: CheckpointName, manifest_hash: Option<&str>) -> Result<Self> {
        let disk = Disk::new(root);
        let not_committed = || Error::NotCommitted { name: name.to_string() };
        disk.pass(&name.key(MANIFEST), FailPoint::LOAD_MANIFEST)?;
        let bytes = disk.read(&name.key(MANIFEST))?.ok_or_else(not_committed)?;
        let path = disk.path(&name.key(MANIFEST))?;
        let (manifest, hash) = Manifest::parse(&bytes).map_err(|fault| Error::Manifest { path, fault })?;
        if let Some(wanted) = manifest_hash.filter(|wanted| *wanted != hash) {
            return Err(Error::OtherManifest { name: name.to_string(), wanted: wanted.to_owned(), found: hash });
        }
        let mut reader = Self { disk, manifest, hash, tensors: BTreeMap::new(), cached: None };
        for file in 0..reader.manifest.files.len() {
            for section in [Section::Model, Section::Optim] {
                let path = &reader.manifest.files[file].path;
                let inside = path.strip_prefix(section.folder()).and_then(|rest| rest.strip_prefix('/'));
                if inside.is_some_and(|inside| inside.starts_with("shard-") && inside.ends_with(".safetensors")) {
                    reader.index_file(file, section)?;
                }
            }
        }
        for (name, entry) in &reader.tensors {
            let covered: u64 = entry.pieces.iter().map(|piece| elements(&piece.shape)).sum();
            if covered != elements(&entry.info.shape) {
                let reason = format!("its pieces have {covered} of {} elements", elements(&entry.info.shape));
                return Err(Error::Tensor { name: name.clone(), reason });
            }
        }
        Ok(reader)
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest's hash.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Every tensor by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), &entry.info))
    }

    /// One tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|entry| &entry.info)
    }

    /// All names in the order in which they lie on disk.
    pub fn in_file_order(&self) -> Vec<String> {
        let place = |entry: &Entry| entry.pieces.first().map(|piece| (piece.file, piece.start));
        let mut names: Vec<_> = self.tensors.iter().map(|(name, entry)| (place(entry), name.clone())).collect();
        names.sort();
        names.into_iter().map(|(_, name)| name).collect()
    }

    /// Fills `out` with a whole tensor, row-major.
    ///
    /// # Errors
    /// [`Error::Tensor`] for an unknown name or a buffer of another size, [`Error::Damaged`], [`Error::Io`].
    pub fn read_tensor(&mut self, name: &str, out: &mut [u8]) -> Result<()> {
        let fault = |reason: String| Error::Tensor { name: name.to_owned(), reason };
        // Taken out while the blocks are read, so that the cache can change.
        let Some(entry) = self.tensors.remove(name) else {
            return Err(fault("is not in this checkpoint".into()));
        };
        let result = if entry.info.bytes() == out.len() as u64 {
            self.read_pieces(&entry, out)
        } else {
            Err(fault(format!("has {} bytes, the buffer {}", entry.info.bytes(), out.len())))
        };
        self.tensors.insert(name.to_owned(), entry);
        result
    }

    /// Fills `out` with the bytes of a tensor from byte `start` of its row-major form on: tensors of any size in a buffer
    /// of one size. Cheapest for successive ranges.
    ///
    /// # Errors
    /// As [`ShardReader::read_tensor`]; [`Error::Tensor`] too for a range that reaches beyond the tensor.
    pub fn read_tensor_range(&mut self, name: &str, start: u64, out: &mut [u8]) -> Result<()> {
        let fault = |reason: String| Error::Tensor { name: name.to_owned(), reason };
        let Some(entry) = self.tensors.remove(name) else {
            return Err(fault("is not in this checkpoint".into()));
        };
        let end = start.checked_add(out.len() as u64);
        let result = if end.is_some_and(|end| end <= entry.info.bytes()) {
            entry.pieces.iter().try_for_each(|piece| self.read_part(piece, &entry.info, start, out))
        } else {
            Err(fault(format!("has {} bytes, so none at {start} + {}", entry.info.bytes(), out.len())))
        };
        self.tensors.insert(name.to_owned(), entry);
        result
    }

    /// Another file of the checkpoint, for example `optim/trainer.json`; `None` if the manifest has none of that name.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
    pub fn read_file(&mut self, path: &str) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.manifest.files.iter().position(|file| file.path == path) else { return Ok(None) };
        let mut bytes = vec![0; self.manifest.files[file].size as usize];
        self.read_range(file, 0, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// The state hash of the bytes on disk, to compare with the manifest's.
    ///
    /// # Errors
    /// As [`ShardReader::read_tensor`].
    pub fn state_hash(&mut self) -> Result<String> {
        let mut combiner = Combiner::default();
        let mut bytes = Vec::new();
        for name in self.in_file_order() {
            let Some(info) = self.info(&name).cloned() else { continue };
            bytes.resize(info.bytes() as usize, 0);
            self.read_tensor(&name, &mut bytes)?;
            let fault =
                |fault: crate::state_hash::Fault| Error::Tensor { name: name.clone(), reason: fault.to_string() };
            let report = whole_tensor(&name, &info.dtype, &info.shape, &bytes).map_err(fault)?;
            combiner.add(&report).map_err(fault)?;
        }
        combiner.finish().map_err(|fault| Error::Tensor { name: "state".into(), reason: fault.to_string() })
    }

    fn file_path(&self, file: usize) -> PathBuf {
        self.disk.root().join(self.manifest.name.to_string()).join(&self.manifest.files[file].path)
    }

    fn index_file(&mut self, file: usize, section: Section) -> Result<()> {
        let path = self.file_path(file);
        let damaged = |reason: String| Error::Damaged { path: path.clone(), reason };
        let mut length = [0; 8];
        self.read_range(file, 0, &mut length)?;
        let length = u64::from_le_bytes(length);
        let size = self.manifest.files[file].size;
        let header_end = length.checked_add(8).filter(|end| *end <= size);
        let header_end = header_end.ok_or_else(|| damaged(format!("has a header of {length} bytes in {size}")))?;
        let mut header = vec![0; length as usize];
        self.read_range(file, 8, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| damaged(format!("header: {e}")))?;
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

    fn read_pieces(&mut self, entry: &Entry, out: &mut [u8]) -> Result<()> {
        let size = element_bytes(&entry.info.dtype).unwrap_or(0);
        for piece in &entry.pieces {
            if piece.shape == entry.info.shape {
                self.read_range(piece.file, piece.start, out)?;
                continue;
            }
            let mut bytes = vec![0; elements(&piece.shape) as usize * size];
            self.read_range(piece.file, piece.start, &mut bytes)?;
            place(&bytes, piece, &entry.info.shape, size, out);
        }
        Ok(())
    }

    /// Copies what a piece has of `start..start + out.len()`, row by row: rows of a piece lie one behind the other in the
    /// file, and in the whole tensor in the same order.
    fn read_part(&mut self, piece: &Piece, info: &TensorInfo, start: u64, out: &mut [u8]) -> Result<()> {
        let size = element_bytes(&info.dtype).unwrap_or(0) as u64;
        let end = start + out.len() as u64;
        if piece.shape == info.shape {
            return self.read_range(piece.file, piece.start + start, out);
        }
        let row_bytes = piece.shape.last().copied().unwrap_or(1) * size;
        let rows = elements(&piece.shape) * size / row_bytes.max(1);
        let place = |row: u64| row_place(piece, &info.shape, row) * size;
        // The first row that ends behind `start`.
        let (mut low, mut high) = (0, rows);
        while low < high {
            let middle = low + (high - low) / 2;
            if place(middle) + row_bytes > start { high = middle } else { low = middle + 1 }
        }
        for row in low..rows {
            let at = place(row);
            if at >= end {
                break;
            }
            let (from, to) = (at.max(start), (at + row_bytes).min(end));
            let target = &mut out[(from - start) as usize..(to - start) as usize];
            self.read_range(piece.file, piece.start + row * row_bytes + (from - at), target)?;
        }
        Ok(())
    }

    /// Reads by whole blocks, each of which must have the hash that the manifest says.
    fn read_range(&mut self, file: usize, start: u64, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            let at = start + done as u64;
            let block = at / BLOCK_BYTES as u64;
            if !matches!(&self.cached, Some((f, b, _)) if *f == file && *b == block) {
                let bytes = self.read_block(file, block)?;
                self.cached = Some((file, block, bytes));
            }
            let Some((_, _, bytes)) = &self.cached else { continue };
            let from = (at % BLOCK_BYTES as u64) as usize;
            let count = (out.len() - done).min(bytes.len().saturating_sub(from));
            if count == 0 {
                return Err(Error::Damaged { path: self.file_path(file), reason: format!("ends before byte {at}") });
            }
            out[done..done + count].copy_from_slice(&bytes[from..from + count]);
            done += count;
        }
        Ok(())
    }

    fn read_block(&mut self, file: usize, block: u64) -> Result<Vec<u8>> {
        let record = &self.manifest.files[file];
        let start = block * BLOCK_BYTES as u64;
        let size = record.size.saturating_sub(start).min(BLOCK_BYTES as u64) as usize;
        // The old buffer is used again: reading a checkpoint must not allocate it block by block.
        let mut bytes = self.cached.take().map(|(_, _, bytes)| bytes).unwrap_or_default();
        bytes.resize(size, 0);
        let record_hash = record.block_blake3.get(block as usize).cloned();
        let key = self.manifest.name.key(&record.path);
        self.disk.pass(&key, FailPoint::LOAD_BLOCK)?;
        self.disk.read_range(&key, start, &mut bytes)?;
        let found = blake3::hash(&bytes).to_hex();
        if record_hash.as_deref() != Some(found.as_str()) {
            return Err(damaged_block(&self.file_path(file), block));
        }
        Ok(bytes)
    }
}

fn damaged_block(path: &Path, block: u64) -> Error {
    Error::Damaged {
        path: path.to_owned(),
        reason: format!("its 8 MiB block {block} has other bytes than were written"),
    }
}

/// Copies a piece row by row to its place in the whole tensor.
fn place(bytes: &[u8], piece: &Piece, whole: &[u64], size: usize, out: &mut [u8]) {
    let Some(&row) = piece.shape.last() else { return out.copy_from_slice(bytes) };
    let row_bytes = row as usize * size;
    if row_bytes == 0 {
        return;
    }
    for (index, source) in bytes.chunks_exact(row_bytes).enumerate() {
        let start = row_place(piece, whole, index as u64) as usize * size;
        out[start..start + row_bytes].copy_from_slice(source);
    }
}

/// Index in the whole tensor of the first element of a piece's row (its elements along the last axis).
fn row_place(piece: &Piece, whole: &[u64], row: u64) -> u64 {
    let Some((_, outer)) = piece.shape.split_last() else { return 0 };
    let (mut rest, mut target, mut stride) = (row, 0, whole[outer.len()]);
    // The row's index on every outer axis, last axis fastest.
    for axis in (0..outer.len()).rev() {
        target += (rest % outer[axis] + piece.offset[axis]) * stride;
        rest /= outer[axis];
        stride *= whole[axis];
    }
    target + piece.offset[outer.len()]
}
