//! Writes a pair so that no reader ever sees half of it.

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::{Dtype, MAGIC, VERSION, strip, with_suffix};
use crate::durable;
use crate::error::{Error, Result};

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Written {
    /// The prefix of the pair.
    pub prefix: PathBuf,
    /// Documents, empty ones included.
    pub num_documents: u64,
    /// Sequences.
    pub num_sequences: u64,
    /// Tokens.
    pub num_tokens: u64,
    /// Type of the values.
    pub dtype: Dtype,
}

/// Writes `<prefix>.bin` and `<prefix>.idx`.
///
/// Both grow under temporary names in the target's folder and are removed if the writer is dropped. [`finish`](Self::finish)
/// syncs them and renames `.bin`, then `.idx`: the `.idx` file is what makes a pair, so a crash leaves either
/// the whole pair or none. Memory: 4 bytes per sequence and 8 per document.
#[derive(Debug)]
pub struct IndexedWriter {
    prefix: PathBuf,
    dtype: Dtype,
    replace: bool,
    bin: BufWriter<NamedTempFile>,
    lengths: Vec<i32>,
    bounds: Vec<i64>,
    num_tokens: u64,
    scratch: Vec<u8>,
}

impl IndexedWriter {
    /// Starts a pair at `prefix`, making its folder.
    ///
    /// # Errors
    /// A pair that exists already, or a folder that cannot be written.
    pub fn create(prefix: &Path, dtype: Dtype) -> Result<Self> {
        Self::start(prefix, dtype, false)
    }

    /// Like [`create`](Self::create), but replaces a pair that exists. The old `.idx` goes first, so that it never describes the new `.bin`.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn create_or_replace(prefix: &Path, dtype: Dtype) -> Result<Self> {
        Self::start(prefix, dtype, true)
    }

    fn start(prefix: &Path, dtype: Dtype, replace: bool) -> Result<Self> {
        let (bin_path, idx_path) = (with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx"));
        if !replace && idx_path.exists() {
            return Err(Error::Exists(idx_path));
        }
        durable::create_folder_of(&bin_path)?;
        let bin = BufWriter::with_capacity(1 << 20, durable::temporary(&bin_path)?);
        let (lengths, bounds, scratch) = (Vec::new(), vec![0], Vec::new());
        Ok(Self { prefix: strip(prefix), dtype, replace, bin, lengths, bounds, num_tokens: 0, scratch })
    }

    /// Tokens so far.
    #[must_use]
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Appends one sequence to the open document.
    ///
    /// # Errors
    /// A token that the value type cannot hold, a sequence of 2³¹ tokens or more, or a failed write.
    pub fn push_sequence(&mut self, tokens: &[u32]) -> Result<()> {
        let path = with_suffix(&self.prefix, ".bin");
        let Ok(length) = i32::try_from(tokens.len()) else {
            return Err(Error::TooLarge {
                path,
                what: format!("a sequence of {} tokens; the format's limit is {}", tokens.len(), i32::MAX),
            });
        };
        let largest = tokens.iter().copied().max().unwrap_or(0);
        if i64::from(largest) > self.dtype.max_token() {
            let what = format!(
                "token {largest} does not fit type {:?}, whose largest is {}",
                self.dtype,
                self.dtype.max_token()
            );
            return Err(Error::TooLarge { path, what });
        }
        self.scratch.clear();
        let size = self.dtype.size();
        // Values fit and are not negative, so truncating the eight bytes of each is exact for every type.
        for token in tokens {
            self.scratch.extend_from_slice(&u64::from(*token).to_le_bytes()[..size]);
        }
        self.bin.write_all(&self.scratch).map_err(Error::io("write", &path))?;
        self.lengths.push(length);
        self.num_tokens += tokens.len() as u64;
        Ok(())
    }

    /// Ends the open document. Without a sequence it is an empty document, which the format allows.
    pub fn end_document(&mut self) {
        self.bounds.push(self.lengths.len() as i64);
    }

    /// One document of one sequence, the usual case of plain text.
    ///
    /// # Errors
    /// As [`push_sequence`](Self::push_sequence).
    pub fn push_document(&mut self, tokens: &[u32]) -> Result<()> {
        self.push_sequence(tokens)?;
        self.end_document();
        Ok(())
    }

    /// Makes the pair durable and visible. Sequences after the last [`end_document`](Self::end_document) are closed as one document.
    ///
    /// # Errors
    /// A pair that appeared meanwhile, or a failed write, sync or rename.
    pub fn finish(mut self) -> Result<Written> {
        if self.bounds.last() != Some(&(self.lengths.len() as i64)) {
            self.end_document();
        }
        let (bin_path, idx_path) = (with_suffix(&self.prefix, ".bin"), with_suffix(&self.prefix, ".idx"));
        let idx = durable::temporary(&idx_path)?;
        let mut out = BufWriter::with_capacity(1 << 20, idx);
        write_index(&mut out, self.dtype, &self.lengths, &self.bounds).map_err(Error::io("write", &idx_path))?;
        let idx = out.into_inner().map_err(|error| Error::Io {
            action: "write",
            path: idx_path.clone(),
            source: error.into_error(),
        })?;
        let bin = self.bin.into_inner().map_err(|error| Error::Io {
            action: "write",
            path: bin_path.clone(),
            source: error.into_error(),
        })?;
        if idx_path.exists() {
            if !self.replace {
                return Err(Error::Exists(idx_path));
            }
            std::fs::remove_file(&idx_path).map_err(Error::io("remove", &idx_path))?;
            durable::sync_folder(&idx_path)?;
        }
        idx.as_file().sync_all().map_err(Error::io("sync", &idx_path))?;
        durable::publish(bin, &bin_path)?;
        durable::publish(idx, &idx_path)?;
        durable::sync_folder(&idx_path)?;
        Ok(Written {
            prefix: self.prefix,
            num_documents: self.bounds.len() as u64 - 1,
            num_sequences: self.lengths.len() as u64,
            num_tokens: self.num_tokens,
            dtype: self.dtype,
        })
    }
}

fn write_index(out: &mut impl std::io::Write, dtype: Dtype, lengths: &[i32], bounds: &[i64]) -> std::io::Result<()> {
    out.write_all(MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&[dtype.code()])?;
    out.write_all(&(lengths.len() as u64).to_le_bytes())?;
    out.write_all(&(bounds.len() as u64).to_le_bytes())?;
    for length in lengths {
        out.write_all(&length.to_le_bytes())?;
    }
    // Offsets in 64 bits: in 32 they overflow at 2 GiB, a bug that both originals had.
    let mut offset = 0i64;
    for length in lengths {
        out.write_all(&offset.to_le_bytes())?;
        offset += i64::from(*length) * dtype.size() as i64;
    }
    for bound in bounds {
        out.write_all(&bound.to_le_bytes())?;
    }
    Ok(())
}
