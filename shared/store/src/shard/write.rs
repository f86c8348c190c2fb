//! Writing shards: header and tensors go to disk and through the hash once, then the file gets its name.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::Serialize;
use trainctl_spec::report::{FileHeader, ShardFile, TensorDigest};

use super::stream::{Content, Streamed, stream};
use super::{DCP_SHARDING_INFO, DCP_VERSION, SLICES, Slice, Slices, workers};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Disk, FileWriter, Files};
use crate::layout::{CheckpointName, ShardName};
use crate::location::Location;
use crate::state_hash::{BLOCK_ELEMENTS, element_bytes, elements, first_block};

/// Threads of a write unless told otherwise.
const THREADS: NonZeroUsize = NonZeroUsize::new(2).unwrap();

/// Tensors begin at a multiple of this.
const PAGE_BYTES: usize = 4096;

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

/// A shard that is durable, and the digests of what is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The file.
    pub file: ShardFile,
    /// Its tensors, for the state hash.
    pub tensors: Vec<TensorDigest>,
}

/// Writes the files of one rank into one checkpoint's directory. Two threads hash and write unless told otherwise: training
/// goes on meanwhile. A write needs one buffer of 4 MiB (in a bucket: a few parts) besides the digests (8 bytes for each KiB
/// of fp32).
#[derive(Clone, Debug)]
pub struct ShardWriter {
    files: Files,
    checkpoint: CheckpointName,
    threads: NonZeroUsize,
}

impl ShardWriter {
    /// For the checkpoint `name` in the directory `root`.
    pub fn new(root: impl Into<PathBuf>, checkpoint: CheckpointName) -> Self {
        Self::with_disk(Disk::new(root), checkpoint)
    }

    /// For the checkpoint `name` in a directory or a bucket.
    ///
    /// # Errors
    /// [`Error::Object`] if the environment's settings for the bucket are wrong.
    pub fn at(location: &Location, checkpoint: CheckpointName) -> Result<Self> {
        Ok(Self::with_disk(Files::open(location)?, checkpoint))
    }

    /// The same over given files, for tests with faults.
    pub fn with_disk(files: impl Into<Files>, checkpoint: CheckpointName) -> Self {
        let threads = workers::all_cores().min(THREADS);
        Self { files: files.into(), checkpoint, threads }
    }

    /// Hashes and writes with so many threads.
    #[must_use]
    pub fn with_threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// Writes a shard, and takes the digests of its tensors in the same pass. After it returns the file is durable.
    /// `metadata` is added to the header.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a view contradicts itself, a name comes twice, or a piece is not cut as
    /// [`crate::state_hash::row_cuts`] says; [`Error::Io`].
    pub fn write_shard(
        &self,
        shard: ShardName,
        tensors: &[TensorView<'_>],
        metadata: &[(&str, &str)],
    ) -> Result<Written> {
        let mut digests = Vec::with_capacity(tensors.len());
        for view in tensors {
            check(view)?;
            let slice = view.slice.clone().unwrap_or_else(|| Slice::whole(view.shape));
            let first_block = first_block(&slice, view.shape).ok_or_else(|| {
                fault(view, format!("{:?} at {:?} is not cut between blocks", view.shape, slice.offset))
            })?;
            digests.push(TensorDigest {
                name: format!("{}/{}", shard.section.folder(), view.name),
                dtype: view.dtype.to_owned(),
                shape: slice.shape,
                first_block,
                blocks: Vec::new(),
            });
        }
        let path = shard.to_string();
        let (streamed, order) = self.write(&path, tensors, metadata, true)?;
        for (index, blocks) in order.into_iter().zip(streamed.digests) {
            digests[index].blocks = blocks;
        }
        Ok(Written { file: streamed.file, tensors: digests })
    }

    /// Writes a safetensors file at `path` inside the checkpoint, without digests. After it returns the file is durable.
    /// `metadata` is added to the header.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a view contradicts itself or a name comes twice; [`Error::Io`].
    pub fn write_safetensors(
        &self,
        path: &str,
        tensors: &[TensorView<'_>],
        metadata: &[(&str, &str)],
    ) -> Result<ShardFile> {
        Ok(self.write(path, tensors, metadata, false)?.0.file)
    }

    /// Writes any other file of the checkpoint, for example `optim/trainer.g7.json`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_bytes(&self, path: &str, bytes: &[u8]) -> Result<ShardFile> {
        let mut content = Content::default();
        content.push(bytes, None);
        let writer = self.files.writer(&self.checkpoint.key(path), FailPoint::SHARD_WRITE)?;
        Ok(stream(writer, path, &content, None, self.threads)?.file)
    }

    /// Reads files of the checkpoint back that were written past the system's cache, so that a restart on this host does not
    /// wait for the disk. Call it when nobody waits.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read_ahead(&self, files: &[ShardFile]) -> Result<()> {
        files.iter().try_for_each(|file| self.files.read_ahead(&self.checkpoint.key(&file.path)))
    }

    fn write(
        &self,
        path: &str,
        tensors: &[TensorView<'_>],
        metadata: &[(&str, &str)],
        digests: bool,
    ) -> Result<(Streamed, Vec<usize>)> {
        let (header, order) = header(tensors, metadata)?;
        let writer = self.files.writer(&self.checkpoint.key(path), FailPoint::SHARD_WRITE)?;
        let streamed = write_tensors(writer, path, &header, tensors, &order, digests, self.threads)?;
        Ok((streamed, order))
    }
}

fn write_tensors(
    writer: FileWriter,
    path: &str,
    header: &[u8],
    tensors: &[TensorView<'_>],
    order: &[usize],
    digests: bool,
    threads: NonZeroUsize,
) -> Result<Streamed> {
    let mut content = Content::default();
    content.push(header, None);
    for &index in order {
        let view = &tensors[index];
        let state_block = element_bytes(view.dtype).map(|size| size * BLOCK_ELEMENTS as usize);
        content.push(view.bytes, state_block.filter(|_| digests));
    }
    let about = FileHeader { size: header.len() as u64, blake3: blake3::hash(header).to_hex().to_string() };
    stream(writer, path, &content, Some(about), threads)
}

/// The file's bytes before the tensors, and the order of the tensors: wide elements first, so that every tensor is aligned,
/// then by name. The header is padded with spaces, as the format's own writer does, up to a whole page.
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
    let offsets =
        slices.iter().map(|(name, slice)| (name.clone(), serde_json::json!({ "saved_offsets": slice.offset })));
    about.insert(DCP_SHARDING_INFO.into(), serde_json::Value::Object(offsets.collect()).to_string().into());
    about.insert(DCP_VERSION.0.into(), DCP_VERSION.1.into());
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
    let json = serde_json::Value::Object(entries).to_string();
    let size = (8 + json.len()).next_multiple_of(PAGE_BYTES);
    let mut header = (size as u64 - 8).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header.resize(size, b' ');
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
