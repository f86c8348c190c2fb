//! Megatron's IndexedDataset: a pair of files, `<prefix>.bin` with token values and `<prefix>.idx` that says where each sequence lies.
//!
//! Little-endian throughout. `.bin` is raw values, no header. `.idx`:
//!
//! | offset | type | meaning |
//! |---|---|---|
//! | 0 | 9 bytes | `MMIDIDX\0\0` |
//! | 9 | u64 | version, 1 |
//! | 17 | u8 | type code of the values ([`Dtype`]) |
//! | 18 | u64 | S, number of sequences |
//! | 26 | u64 | D, number of documents + 1 |
//! | 34 | i32\[S\] | tokens of each sequence |
//! | 34 + 4 S | i64\[S\] | byte offset of each sequence in `.bin` |
//! | 34 + 12 S | i64\[D\] | document d spans sequences \[d\[i\], d\[i+1\]); first 0, last S |
//! | end | i8\[S\] | optional modes of multimodal data |
//!
//! The header is 34 bytes long, so nothing behind it is aligned and all reads here are unaligned ones.
//! Source: megatron/core/datasets/indexed_dataset.py. Invariant D1: files written here equal megatron-core's byte for byte.

mod reader;
mod writer;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use reader::IndexedReader;
pub use writer::{IndexedWriter, Written};

pub(crate) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(crate) const VERSION: u64 = 1;
pub(crate) const HEADER: usize = 34;

/// Type of the token values in a `.bin` file. The codes are Megatron's `DType` (6 and 7 are floats, never tokens).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// Code 1.
    U8,
    /// Code 2.
    I8,
    /// Code 3.
    I16,
    /// Code 4.
    I32,
    /// Code 5.
    I64,
    /// Code 8.
    U16,
}

impl Dtype {
    /// The type that Megatron picks for a vocabulary (added tokens included): `u16` below 65,500 entries, else `i32`.
    #[must_use]
    pub fn for_vocabulary(num_entries: usize) -> Self {
        if num_entries < 65_500 { Self::U16 } else { Self::I32 }
    }

    /// From the code in a header; `None` for an unknown one and for the two float types.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::U8,
            2 => Self::I8,
            3 => Self::I16,
            4 => Self::I32,
            5 => Self::I64,
            8 => Self::U16,
            _ => return None,
        })
    }

    /// The code in a header.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::U16 => 8,
        }
    }

    /// Bytes per token.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Largest token id that fits.
    #[must_use]
    pub fn max_token(self) -> i64 {
        match self {
            Self::U8 => i64::from(u8::MAX),
            Self::I8 => i64::from(i8::MAX),
            Self::I16 => i64::from(i16::MAX),
            Self::I32 => i64::from(i32::MAX),
            Self::I64 => i64::MAX,
            Self::U16 => i64::from(u16::MAX),
        }
    }
}

/// `prefix` with `suffix` appended to its last component; a `.bin` or `.idx` at its end is dropped first.
pub(crate) fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = strip(prefix).into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

/// The prefix of a pair: a `.bin` or `.idx` at its end is dropped, as NeMo AutoModel does.
#[must_use]
pub fn strip(prefix: &Path) -> PathBuf {
    match prefix.extension() {
        Some(extension) if extension == "bin" || extension == "idx" => prefix.with_extension(""),
        _ => prefix.to_owned(),
    }
}
