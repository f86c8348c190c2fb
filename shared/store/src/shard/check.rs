//! Reading all files of a checkpoint through: whether every byte is the one that was written.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use trainctl_spec::report::ShardFile;

use super::fetch::prove_block;
use super::hash::{Proof, block_count, check_record};
use super::index::{Index, section_of};
use super::{BLOCK_BYTES, describe, workers};
use crate::error::Result;
use crate::io::{FileReader, Files};
use crate::manifest::Manifest;

/// What a reading thread keeps.
#[derive(Default)]
struct Worker {
    scratch: Vec<u8>,
    open: Option<(usize, FileReader)>,
}

/// What is wrong with the files of a committed checkpoint, by index into the manifest's files. `progress` gets the bytes of
/// each block that has been read.
///
/// # Errors
/// [`crate::Error::Io`] if a file cannot be read at all.
pub(crate) fn check_files(
    files: &Files,
    manifest: &Manifest,
    threads: NonZeroUsize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<(usize, String)>> {
    let mut faults = Vec::new();
    let mut blocks = Vec::new();
    let paths: Vec<String> = manifest.files.iter().map(|record| record.path.clone()).collect();
    let sizes = files.sizes(&manifest.name.to_string(), &paths)?;
    for ((file, record), size) in manifest.files.iter().enumerate().zip(sizes) {
        match check_record(manifest.format, record).err().or_else(|| size_fault(size, record)) {
            Some(reason) => {
                faults.push((file, reason));
                progress(record.size);
            }
            None => blocks.extend((0..block_count(record.size)).map(|block| (file, block))),
        }
    }
    let damaged = Mutex::new(Vec::new());
    workers::for_each(threads, blocks, |worker: &mut Worker, (file, block)| {
        let record = &manifest.files[file];
        if worker.open.as_ref().is_none_or(|(open, _)| *open != file) {
            worker.open = Some((file, files.reader(&manifest.name.key(&record.path))?));
        }
        let Some((_, reader)) = &worker.open else { return Ok(()) };
        let proof = Proof::new(manifest.format, record);
        if !prove_block(reader, &proof, block, &mut worker.scratch)? {
            damaged.lock().unwrap_or_else(PoisonError::into_inner).push((file, block));
        }
        progress((record.size - block * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64));
        Ok(())
    })?;
    let mut damaged = damaged.into_inner().unwrap_or_else(PoisonError::into_inner);
    damaged.sort_unstable();
    for blocks in damaged.chunk_by(|a, b| a.0 == b.0) {
        let (file, first) = blocks[0];
        let mut reason = explain(files, manifest, file, first);
        if blocks.len() > 1 {
            reason = format!("{reason}, and in {} more blocks of 8 MiB", blocks.len() - 1);
        }
        faults.push((file, reason));
    }
    faults.sort_unstable();
    Ok(faults)
}

/// That a file is missing or has another size.
pub(crate) fn size_fault(found: Option<u64>, record: &ShardFile) -> Option<String> {
    match found {
        None => Some("is missing".to_owned()),
        Some(found) if found != record.size => Some(format!("has {found} bytes instead of {}", record.size)),
        Some(_) => None,
    }
}

/// What lies in a damaged block, as far as the header still tells.
fn explain(files: &Files, manifest: &Manifest, file: usize, block: u64) -> String {
    let record = &manifest.files[file];
    let mut index = Index::default();
    if let Some(section) = section_of(&record.path) {
        let key = manifest.name.key(&record.path);
        match read_header(files, &key, record) {
            Ok(Some(json)) => {
                // The header may itself be damaged where the manifest has no hash of it; then nothing is named.
                if let Err(error) = index.add(file, &files.root().join(&key), section, record.size, &json) {
                    tracing::debug!(file = key, %error, "its header names no tensors");
                }
            }
            Ok(None) => return describe::HEADER.to_owned(),
            Err(error) => tracing::debug!(file = key, %error, "its header cannot be read"),
        }
    }
    describe::block(record, block, |from, to| index.at(file, from, to))
}

/// The JSON of a shard's header; `None` if it is not the one of the record.
fn read_header(files: &Files, key: &str, record: &ShardFile) -> Result<Option<Vec<u8>>> {
    let reader = files.reader(key)?;
    let mut length = [0; 8];
    reader.read_at(0, &mut length)?;
    let size = match &record.header {
        Some(header) => Some(header.size),
        None => u64::from_le_bytes(length).checked_add(8),
    };
    let Some(size) = size.filter(|size| (8..=record.size).contains(size)) else { return Ok(None) };
    let mut bytes = vec![0; size as usize];
    reader.read_at(0, &mut bytes)?;
    let right = record.header.as_ref().is_none_or(|header| blake3::hash(&bytes).to_hex().as_str() == header.blake3);
    Ok(right.then(|| bytes.split_off(8)))
}
