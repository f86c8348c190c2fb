//! Whether the bytes of a checkpoint are the ones that its ranks hashed.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use trainctl_spec::report::ShardFile;

use super::CheckpointStore;
use crate::error::{Error, Result};
use crate::io::Disk;
use crate::layout::CheckpointName;
use crate::manifest::{Fault, Manifest};
use crate::shard::{BLOCK_BYTES, FileHasher};

/// How closely files are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// That they are there and have their sizes.
    Sizes,
    /// Every byte.
    Hashes,
}

/// One file that is not what the manifest says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFault {
    /// Relative to the checkpoint.
    pub path: String,
    /// In which way.
    pub reason: String,
}

impl fmt::Display for FileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path, self.reason)
    }
}

/// Result of reading a checkpoint through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Files looked at.
    pub files: usize,
    /// Their bytes, as the manifest says.
    pub bytes: u64,
    /// What is wrong; empty if nothing is.
    pub faults: Vec<FileFault>,
}

impl CheckpointStore {
    /// Reads and hashes every file of a committed checkpoint. `progress` gets the bytes done and the bytes in all, after
    /// each file.
    ///
    /// # Errors
    /// [`Error::NotCommitted`], [`Error::Manifest`], [`Error::Io`]; a damaged file is part of the answer.
    pub async fn verify(&self, name: CheckpointName, progress: &(dyn Fn(u64, u64) + Send + Sync)) -> Result<Verified> {
        let committed = self.read_manifest(name).await?;
        self.verify_files(&committed.manifest, progress).await
    }

    pub(super) async fn verify_files(
        &self,
        manifest: &Manifest,
        progress: &(dyn Fn(u64, u64) + Send + Sync),
    ) -> Result<Verified> {
        let total = manifest.total_bytes();
        let (mut done, mut faults) = (0, Vec::new());
        for file in &manifest.files {
            let (key, expected) = (manifest.name.key(&file.path), file.clone());
            let fault = self.io.run(move |disk| check_file(disk, &key, &expected)).await?;
            faults.extend(fault.map(|reason| FileFault { path: file.path.clone(), reason }));
            done += file.size;
            progress(done, total);
        }
        Ok(Verified { files: manifest.files.len(), bytes: total, faults })
    }

    /// The first file that is missing or has another size.
    pub(super) async fn check_sizes(&self, manifest: &Manifest) -> Result<Option<Fault>> {
        let name = manifest.name;
        let files: Vec<_> = manifest.files.iter().map(|file| (file.path.clone(), file.size)).collect();
        self.io
            .run(move |disk| {
                for (path, size) in files {
                    let reason = match disk.size(&name.key(&path))? {
                        None => "is missing".to_owned(),
                        Some(found) if found != size => format!("has {found} bytes instead of {size}"),
                        Some(_) => continue,
                    };
                    return Ok(Some(Fault::File { path, reason }));
                }
                Ok(None)
            })
            .await
    }
}

fn check_file(disk: &Disk, key: &str, expected: &ShardFile) -> Result<Option<String>> {
    let path = disk.path(key)?;
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Some("is missing".to_owned())),
        Err(e) => return Err(Error::io("open", &path, e)),
    };
    let mut hasher = FileHasher::default();
    let mut buffer = vec![0; BLOCK_BYTES];
    loop {
        match file.read(&mut buffer).map_err(|e| Error::io("read", &path, e))? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    let found = hasher.finish(&expected.path);
    if found.size != expected.size {
        return Ok(Some(format!("has {} bytes instead of {}", found.size, expected.size)));
    }
    if found == *expected {
        return Ok(None);
    }
    let block = found.block_blake3.iter().zip(&expected.block_blake3).position(|(a, b)| a != b);
    Ok(Some(match block {
        Some(block) => format!("has other bytes than were written, first in its 8 MiB block {block}"),
        None => "has other bytes than were written".to_owned(),
    }))
}
