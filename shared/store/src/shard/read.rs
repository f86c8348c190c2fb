//! Reading a committed checkpoint by tensor, whatever the world size that wrote it (C8).
//!
//! Every byte that is handed out was hashed, by this reader or by a peer ([`Peers`]): what is read is read by whole blocks
//! of 8 MiB, and only those that hold something wanted. Several threads read at once, straight into the caller's buffers;
//! each has one piece of 256 KiB of its own besides. Tensors are named `model/<name>` and `optim/<name>`.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::fetch::{copy_block, read_block};
use super::hash::{Proof, check_record};
use super::index::{Index, TensorInfo, section_of};
use super::plan::{self, Region, Segment};
use super::{describe, workers};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::{Disk, FileReader, Files};
use crate::layout::{CheckpointName, MANIFEST, OLD_TRAINER_STATE, trainer_state};
use crate::location::Location;
use crate::manifest::Manifest;
use crate::state_hash::{Combiner, elements, whole_tensor};

/// Other files of a checkpoint up to this size are verified when it is opened, so that damage to one is noticed even if
/// nobody reads it.
const SMALL_FILE: u64 = 1 << 20;

/// Above so many runs that are wanted of a block, reading all of it is less work than reading each by a call.
const MOST_READS: usize = 64;

/// Which part of a tensor is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Indices of its first axis.
    Rows(Range<u64>),
    /// A box.
    Box {
        /// First index on each axis.
        offset: Vec<u64>,
        /// Extent on each axis.
        shape: Vec<u64>,
    },
}

/// A part of a tensor, and where it goes.
#[derive(Debug)]
pub struct Read<'a> {
    /// The tensor.
    pub name: &'a str,
    /// Of which this.
    pub part: Part,
    /// Row-major, and exactly the size of the part.
    pub out: &'a mut [u8],
}

/// Readers of one host that read the same parts of one checkpoint at the same time, as data-parallel ranks do. Each proves
/// its share of the blocks and takes the others as they are: all have them from the one page cache of the host. So what any
/// of them has read counts only when every one has returned without an error. Where each gets bytes of its own (from a bucket,
/// through FUSE, from a file system that is not known), it proves them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peers {
    /// This one's place among them, from 0. One that has no place among them proves everything.
    pub index: u32,
    /// How many there are, this one too.
    pub count: u32,
}

impl Peers {
    /// A reader that proves everything itself.
    pub const NONE: Self = Self { index: 0, count: 1 };

    /// Whether this reader proves the block.
    fn prove(self, file: usize, block: u64) -> bool {
        self.index >= self.count || (file as u64 + block) % u64::from(self.count) == u64::from(self.index)
    }
}

/// One committed checkpoint.
#[derive(Debug)]
pub struct ShardReader {
    files: Files,
    manifest: Manifest,
    hash: String,
    index: Index,
    threads: NonZeroUsize,
    peers: Peers,
}

/// What a reading thread keeps.
#[derive(Default)]
struct Worker {
    scratch: Vec<u8>,
    open: Option<(usize, FileReader)>,
}

impl ShardReader {
    /// Opens the checkpoint `name` in the directory `root`: reads and verifies the manifest, the headers of the shards and
    /// the small files. With `manifest_hash` it must be exactly that checkpoint (C9).
    ///
    /// # Errors
    /// [`Error::NotCommitted`], [`Error::Manifest`], [`Error::OtherManifest`], [`Error::Damaged`], [`Error::Tensor`] if
    /// the pieces of a tensor do not make up a whole, [`Error::Io`].
    pub fn open(root: impl Into<PathBuf>, name: CheckpointName, manifest_hash: Option<&str>) -> Result<Self> {
        Self::over(Disk::new(root).into(), name, manifest_hash)
    }

    /// The same in a directory or a bucket, where it downloads only the blocks that it needs.
    ///
    /// # Errors
    /// As [`ShardReader::open`], and [`Error::Object`].
    pub fn open_at(location: &Location, name: CheckpointName, manifest_hash: Option<&str>) -> Result<Self> {
        Self::over(Files::open(location)?, name, manifest_hash)
    }

    pub(crate) fn over(files: Files, name: CheckpointName, manifest_hash: Option<&str>) -> Result<Self> {
        let not_committed = || Error::NotCommitted { name: name.to_string() };
        files.pass(&name.key(MANIFEST), FailPoint::LOAD_MANIFEST)?;
        let bytes = files.read(&name.key(MANIFEST))?.ok_or_else(not_committed)?;
        let path = files.path(&name.key(MANIFEST))?;
        let (manifest, hash) = Manifest::parse(&bytes).map_err(|fault| Error::Manifest { path, fault })?;
        if let Some(wanted) = manifest_hash.filter(|wanted| *wanted != hash) {
            return Err(Error::OtherManifest { name: name.to_string(), wanted: wanted.to_owned(), found: hash });
        }
        for file in &manifest.files {
            let damaged = |reason| Error::Damaged { path: files.root().join(name.key(MANIFEST)), reason };
            check_record(manifest.format, file).map_err(damaged)?;
        }
        let threads = workers::readers(&files);
        let mut reader = Self { manifest, hash, index: Index::default(), threads, peers: Peers::NONE, files };
        reader.index = reader.read_index()?;
        reader.index.check()?;
        Ok(reader)
    }

    /// Reads with so many threads; all cores without this call.
    #[must_use]
    pub fn with_threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// Shares the proof of what [`ShardReader::read_into`] reads with readers that read the same.
    #[must_use]
    pub fn with_peers(self, peers: Peers) -> Self {
        let peers = if self.files.are_read_through_one_cache() { peers } else { Peers::NONE };
        Self { peers, ..self }
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
        self.index.tensors.iter().map(|(name, entry)| (name.as_str(), &entry.info))
    }

    /// One tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.index.tensors.get(name).map(|entry| &entry.info)
    }

    /// All names in the order in which they lie on disk.
    pub fn in_file_order(&self) -> Vec<String> {
        let tensors = self.index.tensors.iter();
        let place = |pieces: &[super::index::Piece]| pieces.first().map(|piece| (piece.file, piece.start));
        let mut names: Vec<_> = tensors.map(|(name, entry)| (place(&entry.pieces), name.clone())).collect();
        names.sort();
        names.into_iter().map(|(_, name)| name).collect()
    }

    /// All names in file order, in groups of at most `bytes` bytes together (a larger tensor is alone): for whoever goes
    /// through a checkpoint with bounded memory. Reading a group at once reads the blocks that its tensors share once.
    pub fn groups(&self, bytes: u64) -> Vec<Vec<String>> {
        let mut groups: Vec<Vec<String>> = Vec::new();
        let mut room = 0;
        for name in self.in_file_order() {
            let size = self.info(&name).map_or(0, TensorInfo::bytes);
            match groups.last_mut() {
                Some(group) if size <= room => {
                    group.push(name);
                    room -= size;
                }
                _ => {
                    groups.push(vec![name]);
                    room = bytes.saturating_sub(size);
                }
            }
        }
        groups
    }

    /// Fills all buffers, with several threads. After an error they hold nothing of use.
    ///
    /// # Errors
    /// [`Error::Tensor`] for an unknown name, a part beyond the tensor or a buffer of another size (before anything is
    /// read), [`Error::Damaged`], [`Error::Io`].
    pub fn read_into<'a>(&self, reads: impl IntoIterator<Item = Read<'a>>) -> Result<()> {
        let mut segments = Vec::new();
        for Read { name, part, out } in reads {
            let fault = |reason: String| Error::Tensor { name: name.to_owned(), reason };
            let entry = self.index.tensors.get(name).ok_or_else(|| fault("is not in this checkpoint".to_owned()))?;
            let region = Region::new(&part, &entry.info.shape)
                .ok_or_else(|| fault(format!("has shape {:?}, which {part:?} leaves", entry.info.shape)))?;
            let bytes = elements(&region.shape) * entry.info.element_bytes();
            if bytes != out.len() as u64 {
                return Err(fault(format!("has {bytes} bytes there, the buffer {}", out.len())));
            }
            plan::segments(&plan::runs(entry, &region).map_err(fault)?, out, &mut segments);
        }
        self.fetch(segments, self.peers)
    }

    /// Fills `out` with a whole tensor, row-major. For many tensors [`ShardReader::read_into`] is faster.
    ///
    /// # Errors
    /// As there.
    pub fn read_tensor(&self, name: &str, out: &mut [u8]) -> Result<()> {
        self.read_into([Read { name, part: Part::Whole, out }])
    }

    /// What rank 0 keeps for a resume besides tensors; `None` in a checkpoint of weights alone.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
    pub fn read_trainer_state(&self) -> Result<Option<Vec<u8>>> {
        match self.read_file(&trainer_state(self.manifest.generation))? {
            None => self.read_file(OLD_TRAINER_STATE),
            found => Ok(found),
        }
    }

    /// Another file of the checkpoint, for example `optim/trainer.g7.json`; `None` if the manifest has none of that name.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
    pub fn read_file(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.manifest.files.iter().position(|file| file.path == path) else { return Ok(None) };
        let mut bytes = vec![0; self.manifest.files[file].size as usize];
        self.fetch(vec![Segment { file, start: 0, out: &mut bytes }], Peers::NONE)?;
        Ok(Some(bytes))
    }

    /// The state hash of the bytes on disk, to compare with the manifest's. Needs memory for the largest tensor, or 256
    /// MiB.
    ///
    /// # Errors
    /// As [`ShardReader::read_into`].
    pub fn state_hash(&self) -> Result<String> {
        let mut combiner = Combiner::default();
        let fault = |name: &str, fault: crate::state_hash::Fault| Error::Tensor {
            name: name.to_owned(),
            reason: fault.to_string(),
        };
        for group in self.groups(256 << 20) {
            let infos: Vec<&TensorInfo> = group.iter().filter_map(|name| self.info(name)).collect();
            let mut buffers: Vec<Vec<u8>> = infos.iter().map(|info| vec![0; info.bytes() as usize]).collect();
            self.read_into(group.iter().zip(&mut buffers).map(|(name, out)| Read { name, part: Part::Whole, out }))?;
            for ((name, info), bytes) in group.iter().zip(infos).zip(buffers) {
                let report = whole_tensor(name, &info.dtype, &info.shape, &bytes).map_err(|e| fault(name, e))?;
                combiner.add(&report).map_err(|e| fault(name, e))?;
            }
        }
        combiner.finish().map_err(|e| fault("state", e))
    }

    fn key(&self, file: usize) -> String {
        self.manifest.name.key(&self.manifest.files[file].path)
    }

    fn path(&self, file: usize) -> PathBuf {
        self.files.root().join(self.key(file))
    }

    fn read_index(&self) -> Result<Index> {
        let headers = Mutex::new(Vec::new());
        let files = (0..self.manifest.files.len()).collect();
        workers::for_each(self.threads, files, |_: &mut (), file: usize| {
            let record = &self.manifest.files[file];
            if let Some(section) = section_of(&record.path) {
                let header = self.read_header(file)?;
                headers.lock().unwrap_or_else(PoisonError::into_inner).push((file, section, header));
            } else if record.size <= SMALL_FILE {
                self.read_file(&record.path)?;
            }
            Ok(())
        })?;
        let mut headers = headers.into_inner().unwrap_or_else(PoisonError::into_inner);
        headers.sort_unstable_by_key(|(file, ..)| *file);
        let mut index = Index::default();
        for (file, section, header) in headers {
            index.add(file, &self.path(file), section, self.manifest.files[file].size, &header)?;
        }
        Ok(index)
    }

    /// The JSON of a shard's header.
    fn read_header(&self, file: usize) -> Result<Vec<u8>> {
        let record = &self.manifest.files[file];
        let damaged = |reason: String| Error::Damaged { path: self.path(file), reason };
        let length = |bytes: &[u8]| bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
        if let Some(header) = &record.header {
            if !(8..=record.size).contains(&header.size) {
                return Err(damaged(format!("has a header of {} bytes in {}", header.size, record.size)));
            }
            let mut bytes = vec![0; header.size as usize];
            self.files.reader(&self.key(file))?.read_at(0, &mut bytes)?;
            if blake3::hash(&bytes).to_hex().as_str() != header.blake3 || length(&bytes) != header.size.checked_sub(8) {
                return Err(damaged(describe::HEADER.to_owned()));
            }
            return Ok(bytes.split_off(8));
        }
        let mut first = [0; 8];
        let too_long = |length: u64| damaged(format!("has a header of {length} bytes in {}", record.size));
        if record.size < 8 {
            return Err(damaged(format!("has {} bytes, which is no safetensors file", record.size)));
        }
        self.fetch(vec![Segment { file, start: 0, out: &mut first }], Peers::NONE)?;
        let length = u64::from_le_bytes(first);
        if length.checked_add(8).is_none_or(|end| end > record.size) {
            return Err(too_long(length));
        }
        let mut header = vec![0; length as usize];
        self.fetch(vec![Segment { file, start: 8, out: &mut header }], Peers::NONE)?;
        Ok(header)
    }

    /// Reads by blocks, each of which must be the one that the manifest says, or is proved by one of the peers.
    fn fetch(&self, segments: Vec<Segment<'_>>, peers: Peers) -> Result<()> {
        workers::for_each(self.threads, plan::jobs(segments), |worker: &mut Worker, mut job: plan::Job<'_>| {
            let proof = Proof::new(self.manifest.format, &self.manifest.files[job.file]);
            if worker.open.as_ref().is_none_or(|(file, _)| *file != job.file) {
                worker.open = Some((job.file, self.files.reader(&self.key(job.file))?));
            }
            let Some((_, reader)) = &worker.open else { return Ok(()) };
            self.files.pass(&self.key(job.file), FailPoint::LOAD_BLOCK)?;
            if !peers.prove(job.file, job.block) && job.wanted.len() <= MOST_READS {
                return copy_block(reader, job.block, &mut job.wanted);
            }
            if read_block(reader, &proof, job.block, &mut job.wanted, &mut worker.scratch)? {
                return Ok(());
            }
            let reason = describe::block(proof.file(), job.block, |from, to| self.index.at(job.file, from, to));
            Err(Error::Damaged { path: self.path(job.file), reason })
        })
    }
}
