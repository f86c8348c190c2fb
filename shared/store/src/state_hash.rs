//! The digest of a training state that does not depend on how it is cut over ranks.
//!
//! - A tensor's bytes are its elements, row-major, little-endian. A **block** is 1,024 successive elements; the last one
//!   may be short. A block's digest is the blake3 of its bytes.
//! - A **tensor's digest** is the blake3 of its blocks' digests, one after the other.
//! - The **state hash** is the blake3 of one record for each tensor, in the byte order of the names:
//!   `len(name) as u32 · name · len(dtype) as u32 · dtype · number of axes as u32 · each axis as u64 · tensor digest`,
//!   integers little-endian, texts UTF-8, dtype in safetensors' spelling. Names are `model/<name>` and `optim/<name>`.
//!
//! `tests/state_hash.py` computes the same from the safetensors files of a checkpoint.

mod wide;

use std::collections::BTreeMap;
use std::ops::Range;

use trainctl_spec::report::TensorDigest;

use crate::shard::Slice;

/// Elements of a block.
pub const BLOCK_ELEMENTS: u64 = 1024;

/// Why digests do not make a state hash.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Two reports say different things about one tensor.
    #[error("tensor {name} is reported as {first} and as {second}")]
    Differs {
        /// The tensor.
        name: String,
        /// dtype and shape of the first report.
        first: String,
        /// Of a later one.
        second: String,
    },
    /// A block was reported twice.
    #[error("block {block} of tensor {name} is reported twice")]
    Overlap {
        /// The tensor.
        name: String,
        /// The block.
        block: u64,
    },
    /// A block was reported by no rank.
    #[error("block {block} of {blocks} of tensor {name} is reported by no rank")]
    Missing {
        /// The tensor.
        name: String,
        /// The first missing block.
        block: u64,
        /// How many the tensor has.
        blocks: u64,
    },
    /// A report reaches beyond the tensor's end.
    #[error("tensor {name} has {blocks} blocks, and a report goes up to block {end}")]
    TooMany {
        /// The tensor.
        name: String,
        /// How many it has.
        blocks: u64,
        /// One past the last one reported.
        end: u64,
    },
    /// A dtype of unknown size.
    #[error("dtype {0} is not known")]
    Dtype(String),
    /// The bytes are no whole number of elements.
    #[error("{bytes} bytes are no whole number of elements of {dtype}")]
    Bytes {
        /// Given.
        bytes: usize,
        /// The dtype.
        dtype: String,
    },
}

/// Bytes of one element, by safetensors' spelling.
pub fn element_bytes(dtype: &str) -> Option<usize> {
    match dtype {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => Some(1),
        _ => None,
    }
}

/// Elements of a shape; 1 for a scalar.
pub fn elements(shape: &[u64]) -> u64 {
    shape.iter().product()
}

/// Blocks of a shape.
pub fn blocks(shape: &[u64]) -> u64 {
    elements(shape).div_ceil(BLOCK_ELEMENTS)
}

/// Where a tensor of this shape may be cut along its first axis: after each multiple of the returned number of rows, which is
/// the least whose elements are whole blocks. Pieces cut elsewhere have no digests of their own.
pub fn row_step(shape: &[u64]) -> u64 {
    let row = elements(shape.get(1..).unwrap_or_default()).max(1);
    // A power of two divides 1,024 / gcd(1,024, row) exactly as far as it is missing in the row.
    BLOCK_ELEMENTS >> row.trailing_zeros().min(BLOCK_ELEMENTS.trailing_zeros())
}

/// Cuts a tensor along its first axis into `parts` ranges of rows, as even as [`row_step`] allows. Some are empty if there are
/// not enough rows. A scalar counts as one row.
pub fn row_cuts(shape: &[u64], parts: u64) -> Vec<Range<u64>> {
    let rows = shape.first().copied().unwrap_or(1);
    let step = row_step(shape);
    let steps = rows.div_ceil(step);
    let edge = |part: u64| (steps * part / parts.max(1) * step).min(rows);
    (0..parts.max(1)).map(|part| edge(part)..edge(part + 1)).collect()
}

/// The number of a piece's first block in its tensor, if it is a run of whole blocks.
pub(crate) fn first_block(slice: &Slice, shape: &[u64]) -> Option<u64> {
    if elements(shape) == 0 {
        return Some(0);
    }
    // Rows of leading axes of extent 1 are one run with the axis after them, if all later axes are whole.
    let cut = shape.iter().take_while(|extent| **extent == 1).count().min(shape.len().saturating_sub(1));
    if shape.iter().zip(&slice.shape).skip(cut + 1).any(|(part, whole)| part != whole) {
        return None;
    }
    let first = slice.offset.iter().zip(&slice.shape).fold(0, |flat, (at, extent)| flat * extent + at);
    let end = first + elements(shape);
    let whole =
        first.is_multiple_of(BLOCK_ELEMENTS) && (end.is_multiple_of(BLOCK_ELEMENTS) || end == elements(&slice.shape));
    whole.then_some(first / BLOCK_ELEMENTS)
}

/// Digests of the blocks of a run of elements that starts at a block's border.
///
/// # Errors
/// [`Fault::Dtype`], [`Fault::Bytes`].
pub fn block_digests(dtype: &str, bytes: &[u8]) -> Result<Vec<[u8; 32]>, Fault> {
    let size = element_bytes(dtype).ok_or_else(|| Fault::Dtype(dtype.to_owned()))?;
    if !bytes.len().is_multiple_of(size) {
        return Err(Fault::Bytes { bytes: bytes.len(), dtype: dtype.to_owned() });
    }
    let block_bytes = size * BLOCK_ELEMENTS as usize;
    let mut digests = vec![[0; 32]; bytes.len().div_ceil(block_bytes)];
    digest_blocks(block_bytes, bytes, &mut digests);
    Ok(digests)
}

/// Digests of successive blocks of `size` bytes, of which the last may be short. `out` has room for exactly that many.
pub(crate) fn digest_blocks(size: usize, bytes: &[u8], out: &mut [[u8; 32]]) {
    wide::digests(size, bytes, out);
}

/// The report of a rank that holds a whole tensor.
///
/// # Errors
/// [`Fault::Dtype`], [`Fault::Bytes`].
pub fn whole_tensor(name: &str, dtype: &str, shape: &[u64], bytes: &[u8]) -> Result<TensorDigest, Fault> {
    let blocks = block_digests(dtype, bytes)?;
    Ok(TensorDigest { name: name.to_owned(), dtype: dtype.to_owned(), shape: shape.to_owned(), first_block: 0, blocks })
}

/// Puts the ranks' reports together, in any order and any partition into whole blocks.
#[derive(Clone, Debug, Default)]
pub struct Combiner {
    tensors: BTreeMap<String, Partial>,
}

#[derive(Clone, Debug)]
struct Partial {
    dtype: String,
    shape: Vec<u64>,
    /// Digests by the number of their first block; no two runs overlap.
    runs: BTreeMap<u64, Vec<[u8; 32]>>,
}

impl Partial {
    /// The first of `count` blocks from `first` on that is there already.
    fn overlap(&self, first: u64, count: u64) -> Option<u64> {
        let end = |(start, run): (&u64, &Vec<[u8; 32]>)| start + run.len() as u64;
        if self.runs.range(..=first).next_back().map(end).is_some_and(|end| first < end) {
            return Some(first);
        }
        self.runs.range(first..first + count).next().map(|(start, _)| *start)
    }
}

impl Combiner {
    /// Adds a report.
    ///
    /// # Errors
    /// [`Fault::Differs`], [`Fault::Overlap`], [`Fault::TooMany`]; the combiner is of no use then.
    pub fn add(&mut self, report: &TensorDigest) -> Result<(), Fault> {
        let partial = self.tensors.entry(report.name.clone()).or_insert_with(|| Partial {
            dtype: report.dtype.clone(),
            shape: report.shape.clone(),
            runs: BTreeMap::new(),
        });
        if partial.dtype != report.dtype || partial.shape != report.shape {
            return Err(Fault::Differs {
                name: report.name.clone(),
                first: format!("{} {:?}", partial.dtype, partial.shape),
                second: format!("{} {:?}", report.dtype, report.shape),
            });
        }
        let end = report.first_block.saturating_add(report.blocks.len() as u64);
        if end > blocks(&report.shape) {
            return Err(Fault::TooMany { name: report.name.clone(), blocks: blocks(&report.shape), end });
        }
        if report.blocks.is_empty() {
            return Ok(());
        }
        if let Some(block) = partial.overlap(report.first_block, report.blocks.len() as u64) {
            return Err(Fault::Overlap { name: report.name.clone(), block });
        }
        partial.runs.insert(report.first_block, report.blocks.clone());
        Ok(())
    }

    /// The state hash, lower-case hexadecimal.
    ///
    /// # Errors
    /// [`Fault::Missing`].
    pub fn finish(&self) -> Result<String, Fault> {
        let mut state = blake3::Hasher::new();
        for (name, partial) in &self.tensors {
            let count = blocks(&partial.shape);
            let (mut tensor, mut block) = (blake3::Hasher::new(), 0);
            for (start, run) in &partial.runs {
                if *start != block {
                    break;
                }
                tensor.update(run.as_flattened());
                block = start + run.len() as u64;
            }
            if block != count {
                return Err(Fault::Missing { name: name.clone(), block, blocks: count });
            }
            for text in [name, &partial.dtype] {
                state.update(&(text.len() as u32).to_le_bytes());
                state.update(text.as_bytes());
            }
            state.update(&(partial.shape.len() as u32).to_le_bytes());
            for axis in &partial.shape {
                state.update(&axis.to_le_bytes());
            }
            state.update(tensor.finalize().as_bytes());
        }
        Ok(state.finalize().to_hex().to_string())
    }
}

/// Combines reports in one go.
///
/// # Errors
/// [`Fault`].
pub fn combine<'a>(reports: impl IntoIterator<Item = &'a TensorDigest>) -> Result<String, Fault> {
    let mut combiner = Combiner::default();
    for report in reports {
        combiner.add(report)?;
    }
    combiner.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(elements: u64) -> Vec<u8> {
        (0..elements * 4).map(|i| (i as u8).wrapping_mul(37)).collect()
    }

    /// The definition, spelled out.
    fn by_definition(name: &str, shape: &[u64], data: &[u8]) -> String {
        let mut digests = Vec::new();
        for block in data.chunks(4096) {
            digests.extend_from_slice(blake3::hash(block).as_bytes());
        }
        let mut record = (name.len() as u32).to_le_bytes().to_vec();
        record.extend_from_slice(name.as_bytes());
        record.extend_from_slice(b"\x03\0\0\0F32");
        record.extend_from_slice(&(shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|axis| record.extend_from_slice(&axis.to_le_bytes()));
        record.extend_from_slice(blake3::hash(&digests).as_bytes());
        blake3::hash(&record).to_hex().to_string()
    }

    fn piece(whole: &TensorDigest, from: usize, to: usize) -> TensorDigest {
        TensorDigest { first_block: from as u64, blocks: whole.blocks[from..to].to_vec(), ..whole.clone() }
    }

    proptest! {
        /// Any partition into whole blocks, in any order, gives the hash of the definition.
        #[test]
        fn the_hash_does_not_depend_on_the_partition(
            rows in 1u64..40, cuts in prop::collection::btree_set(0usize..20, 0..6), reversed in any::<bool>(),
        ) {
            let shape = [rows, 300];
            let data = bytes(rows * 300);
            let whole = whole_tensor("model/w", "F32", &shape, &data).unwrap();
            let count = whole.blocks.len();
            let mut edges: Vec<usize> = cuts.into_iter().filter(|cut| *cut < count).collect();
            edges.insert(0, 0);
            edges.push(count);
            let mut parts: Vec<_> = edges.windows(2).map(|edge| piece(&whole, edge[0], edge[1])).collect();
            if reversed {
                parts.reverse();
            }
            prop_assert_eq!(combine(&parts).unwrap(), by_definition("model/w", &shape, &data));
        }

        /// One changed bit anywhere changes the hash.
        #[test]
        fn every_bit_counts(at in 0usize..8000, bit in 0u8..8) {
            let mut data = bytes(2000);
            let before = combine([&whole_tensor("w", "F32", &[2000], &data).unwrap()]).unwrap();
            data[at] ^= 1 << bit;
            prop_assert_ne!(combine([&whole_tensor("w", "F32", &[2000], &data).unwrap()]).unwrap(), before);
        }
    }

    #[test]
    fn names_shapes_and_order() {
        let digest = |name: &str, shape: &[u64]| whole_tensor(name, "F32", shape, &bytes(6)).unwrap();
        let (a, b) = (digest("model/a", &[2, 3]), digest("optim/a", &[6]));
        assert_eq!(combine([&a, &b]).unwrap(), combine([&b, &a]).unwrap());
        assert_ne!(combine([&digest("w", &[2, 3])]).unwrap(), combine([&digest("w", &[3, 2])]).unwrap());
        assert_ne!(combine([&digest("w", &[6])]).unwrap(), combine([&digest("v", &[6])]).unwrap());
    }

    #[test]
    fn wrong_reports_are_named() {
        let whole = whole_tensor("w", "F32", &[5000], &bytes(5000)).unwrap();
        let fault = |reports: &[TensorDigest]| combine(reports).unwrap_err();
        let name = || "w".to_owned();
        assert_eq!(
            fault(&[piece(&whole, 0, 2), piece(&whole, 3, 5)]),
            Fault::Missing { name: name(), block: 2, blocks: 5 }
        );
        assert_eq!(fault(&[piece(&whole, 0, 3), piece(&whole, 2, 5)]), Fault::Overlap { name: name(), block: 2 });
        let shifted = TensorDigest { first_block: 1, ..whole.clone() };
        assert_eq!(fault(&[shifted]), Fault::TooMany { name: name(), blocks: 5, end: 6 });
        let other = TensorDigest { shape: vec![50, 100], ..whole.clone() };
        assert!(matches!(fault(&[whole, other]), Fault::Differs { .. }));
        assert_eq!(block_digests("F32", &[0; 6]), Err(Fault::Bytes { bytes: 6, dtype: "F32".into() }));
        assert_eq!(block_digests("Q4", &[]), Err(Fault::Dtype("Q4".into())));
    }
}
