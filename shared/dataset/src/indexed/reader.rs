//! Reads a pair through memory maps and trusts nothing in it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{Dtype, HEADER, MAGIC, VERSION, strip, with_suffix};
use crate::error::{Error, Result};
use crate::map::{Map, bytes_at};

/// An open `.bin/.idx` pair. Shared between threads freely; reads are bounds-checked and unaligned.
#[derive(Debug)]
pub struct IndexedReader {
    prefix: PathBuf,
    bin_path: PathBuf,
    idx_path: PathBuf,
    bin: Map,
    idx: Map,
    dtype: Dtype,
    num_sequences: usize,
    num_bounds: usize,
    num_tokens: u64,
    has_modes: bool,
}

impl IndexedReader {
    /// Opens `<prefix>.bin` and `<prefix>.idx` and checks every invariant of the index in one pass over it.
    ///
    /// # Errors
    /// A missing file, or a header, length, offset or document bound that breaks the format, with file, offset and value.
    pub fn open(prefix: &Path) -> Result<Self> {
        let (bin_path, idx_path) = (with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx"));
        for path in [&idx_path, &bin_path] {
            if !path.is_file() {
                return Err(Error::MissingPair { prefix: strip(prefix), missing: path.display().to_string() });
            }
        }
        let (bin, idx) = (Map::open(&bin_path)?, Map::open(&idx_path)?);
        let header = Header::parse(&idx_path, &idx)?;
        let mut reader = Self {
            prefix: strip(prefix),
            bin_path,
            idx_path,
            bin,
            idx,
            dtype: header.dtype,
            num_sequences: header.num_sequences,
            num_bounds: header.num_bounds,
            num_tokens: 0,
            has_modes: header.has_modes,
        };
        reader.num_tokens = reader.check_sequences()?;
        reader.check_documents()?;
        Ok(reader)
    }

    /// Lengths are not negative, offsets are their running sum, and `.bin` holds exactly that many bytes.
    fn check_sequences(&self) -> Result<u64> {
        let item = self.dtype.size() as u64;
        let (mut bytes, mut tokens) = (0u64, 0u64);
        let lengths = self.idx[HEADER..HEADER + 4 * self.num_sequences].chunks_exact(4);
        let offsets = self.idx[HEADER + 4 * self.num_sequences..].chunks_exact(8);
        for (sequence, (length, offset)) in lengths.zip(offsets).enumerate() {
            let length = i32::from_le_bytes(bytes_at(length, 0).unwrap_or_default());
            let offset = i64::from_le_bytes(bytes_at(offset, 0).unwrap_or_default());
            let Ok(length) = u64::try_from(length) else {
                let at = (HEADER + 4 * sequence) as u64;
                return Err(Error::format(
                    &self.idx_path,
                    at,
                    format!("sequence {sequence} has length {length}, which is negative"),
                ));
            };
            if u64::try_from(offset) != Ok(bytes) {
                let at = (HEADER + 4 * self.num_sequences + 8 * sequence) as u64;
                let what = format!(
                    "sequence {sequence} starts at {offset} of the .bin file, but the lengths before it add up to {bytes} bytes"
                );
                return Err(Error::format(&self.idx_path, at, what));
            }
            tokens += length;
            bytes += length * item;
        }
        if self.bin.len() as u64 != bytes {
            let what = format!(
                "the file has {} bytes, but {} says {bytes}: the two files are not a pair, or one is cut off",
                self.bin.len(),
                self.idx_path.display()
            );
            return Err(Error::format(&self.bin_path, self.bin.len() as u64, what));
        }
        Ok(tokens)
    }

    /// Document bounds begin at 0, never fall, and end at the number of sequences.
    fn check_documents(&self) -> Result<()> {
        let mut before = 0;
        for document in 0..self.num_bounds {
            let bound = self.bound(document).unwrap_or(-1);
            if (document == 0 && bound != 0) || bound < before {
                let at = (HEADER + 12 * self.num_sequences + 8 * document) as u64;
                let what = format!(
                    "document bound {document} is {bound}; bounds begin at 0 and never fall (the one before is {before})"
                );
                return Err(Error::format(&self.idx_path, at, what));
            }
            before = bound;
        }
        if u64::try_from(before) != Ok(self.num_sequences as u64) {
            let at = (HEADER + 12 * self.num_sequences + 8 * (self.num_bounds - 1)) as u64;
            let what = format!("the last document bound is {before}, but there are {} sequences", self.num_sequences);
            return Err(Error::format(&self.idx_path, at, what));
        }
        Ok(())
    }

    fn bound(&self, document: usize) -> Option<i64> {
        if document >= self.num_bounds {
            return None;
        }
        bytes_at(&self.idx, HEADER + 12 * self.num_sequences + 8 * document).map(i64::from_le_bytes)
    }

    /// The prefix, without `.bin` or `.idx`.
    #[must_use]
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Path of the `.bin` file.
    #[must_use]
    pub fn bin_path(&self) -> &Path {
        &self.bin_path
    }

    /// Path of the `.idx` file.
    #[must_use]
    pub fn idx_path(&self) -> &Path {
        &self.idx_path
    }

    /// Type of the values.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of sequences. (Plain text has one per document that is not empty.)
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// Number of documents.
    #[must_use]
    pub fn num_documents(&self) -> usize {
        self.num_bounds - 1
    }

    /// Tokens of all sequences.
    #[must_use]
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Whether the index ends with the modes of multimodal data (they are not read).
    #[must_use]
    pub fn has_modes(&self) -> bool {
        self.has_modes
    }

    /// Tokens of one sequence; `None` beyond the last.
    #[must_use]
    pub fn sequence_length(&self, sequence: usize) -> Option<u32> {
        if sequence >= self.num_sequences {
            return None;
        }
        bytes_at(&self.idx, HEADER + 4 * sequence).map(u32::from_le_bytes)
    }

    /// The sequences of one document; `None` beyond the last.
    #[must_use]
    pub fn document(&self, document: usize) -> Option<Range<usize>> {
        let (from, to) = (self.bound(document)?, self.bound(document + 1)?);
        Some(usize::try_from(from).ok()?..usize::try_from(to).ok()?)
    }

    /// Appends the tokens `within` (counted from the sequence's first) of one sequence to `out`.
    ///
    /// # Errors
    /// A sequence that does not exist, or a range beyond its end.
    pub fn read_into(&self, sequence: usize, within: Range<usize>, out: &mut Vec<i64>) -> Result<()> {
        let Some(length) = self.sequence_length(sequence) else {
            let (id, len) = (sequence as u64, self.num_sequences as u64);
            return Err(Error::OutOfRange { what: "sequence", path: self.prefix.clone(), id, len });
        };
        if within.start > within.end || within.end > length as usize {
            let (id, len) = (within.end as u64, u64::from(length));
            return Err(Error::OutOfRange { what: "token", path: self.prefix.clone(), id, len });
        }
        let start =
            bytes_at(&self.idx, HEADER + 4 * self.num_sequences + 8 * sequence).map_or(0, u64::from_le_bytes) as usize;
        let size = self.dtype.size();
        let bytes = self.bin.get(start + within.start * size..start + within.end * size).unwrap_or_default();
        match self.dtype {
            Dtype::U8 => out.extend(bytes.iter().map(|byte| i64::from(*byte))),
            Dtype::I8 => out.extend(bytes.iter().map(|byte| i64::from(byte.cast_signed()))),
            Dtype::I16 => widen::<2>(bytes, out, |value| i64::from(i16::from_le_bytes(value))),
            Dtype::U16 => widen::<2>(bytes, out, |value| i64::from(u16::from_le_bytes(value))),
            Dtype::I32 => widen::<4>(bytes, out, |value| i64::from(i32::from_le_bytes(value))),
            Dtype::I64 => widen::<8>(bytes, out, i64::from_le_bytes),
        }
        Ok(())
    }

    /// All tokens of one sequence.
    ///
    /// # Errors
    /// A sequence that does not exist.
    pub fn sequence(&self, sequence: usize) -> Result<Vec<i64>> {
        let length = self.sequence_length(sequence).unwrap_or(0) as usize;
        let mut tokens = Vec::with_capacity(length);
        self.read_into(sequence, 0..length, &mut tokens)?;
        Ok(tokens)
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut Vec<i64>, value: impl Fn([u8; N]) -> i64) {
    out.extend(bytes.as_chunks::<N>().0.iter().map(|chunk| value(*chunk)));
}

/// What the first 34 bytes and the file's size say.
struct Header {
    dtype: Dtype,
    num_sequences: usize,
    num_bounds: usize,
    has_modes: bool,
}

impl Header {
    fn parse(path: &Path, idx: &[u8]) -> Result<Self> {
        if idx.len() < HEADER {
            return Err(Error::format(
                path,
                idx.len() as u64,
                format!("the file has {} bytes, fewer than the {HEADER} of a header", idx.len()),
            ));
        }
        if &idx[..9] != MAGIC {
            return Err(Error::format(
                path,
                0,
                format!("the first bytes are {:?}, not \"MMIDIDX\"", String::from_utf8_lossy(&idx[..9])),
            ));
        }
        let version = u64::from_le_bytes(bytes_at(idx, 9).unwrap_or_default());
        if version != VERSION {
            return Err(Error::format(path, 9, format!("version {version}; only 1 is known")));
        }
        let Some(dtype) = Dtype::from_code(idx[17]) else {
            let what =
                format!("type code {}; tokens have 1 (u8), 2 (i8), 3 (i16), 4 (i32), 5 (i64) or 8 (u16)", idx[17]);
            return Err(Error::format(path, 17, what));
        };
        let sequences = u64::from_le_bytes(bytes_at(idx, 18).unwrap_or_default());
        let bounds = u64::from_le_bytes(bytes_at(idx, 26).unwrap_or_default());
        if bounds == 0 {
            return Err(Error::format(
                path,
                26,
                "0 document bounds; there is always one more than there are documents",
            ));
        }
        // u128: counts from a damaged file must not wrap into a plausible size.
        let without_modes = HEADER as u128 + 12 * u128::from(sequences) + 8 * u128::from(bounds);
        let with_modes = without_modes + u128::from(sequences);
        let len = idx.len() as u128;
        if len != without_modes && len != with_modes {
            let what = format!(
                "{sequences} sequences and {bounds} document bounds need {without_modes} bytes ({with_modes} with modes), but the file has {len}"
            );
            return Err(Error::format(path, 18, what));
        }
        let has_modes = len != without_modes;
        // Both counts are smaller than the file's length, which is a usize.
        Ok(Self { dtype, num_sequences: sequences as usize, num_bounds: bounds as usize, has_modes })
    }
}
