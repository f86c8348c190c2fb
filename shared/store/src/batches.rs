//! Going through a checkpoint with bounded memory: tensors in groups, and large ones in parts.
//!
//! What a batch holds is read in one call, with all cores, and each block that its parts share once.

use crate::error::Result;
use crate::shard::{Part, Read, ShardReader};
use crate::state_hash::elements;

/// Bytes that are read at a time. Larger ones read fewer blocks twice, at the batches' ends.
pub(crate) const BATCH_BYTES: u64 = 64 << 20;

/// A tensor to go through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole<'a> {
    /// Its name in the checkpoint.
    pub(crate) name: &'a str,
    /// Its shape.
    pub(crate) shape: &'a [u64],
    /// Bytes of an element.
    pub(crate) element_bytes: u64,
}

/// A part of a tensor: successive elements of its row-major form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Index of the tensor.
    pub(crate) tensor: usize,
    part: Part,
    /// Elements of the part.
    pub(crate) elements: u64,
}

/// Cuts the tensors, in their order, into batches of at most `limit` bytes (one element at least).
pub(crate) fn batches(tensors: &[Whole<'_>], limit: u64) -> Vec<Vec<Item>> {
    let (mut batches, mut room) = (Vec::<Vec<Item>>::new(), 0);
    for (tensor, whole) in tensors.iter().enumerate() {
        for (part, elements) in parts(whole.shape, limit / whole.element_bytes.max(1)) {
            let bytes = elements * whole.element_bytes;
            let item = Item { tensor, part, elements };
            match batches.last_mut() {
                Some(batch) if bytes <= room => {
                    batch.push(item);
                    room -= bytes;
                }
                _ => {
                    batches.push(vec![item]);
                    room = limit.saturating_sub(bytes);
                }
            }
        }
    }
    batches
}

/// Reads a batch into one buffer, its items one behind the other.
///
/// # Errors
/// As [`ShardReader::read_into`].
pub(crate) fn read(reader: &ShardReader, tensors: &[Whole<'_>], batch: &[Item], buffer: &mut Vec<u8>) -> Result<()> {
    buffer.resize(batch.iter().map(|item| bytes_of(tensors, item)).sum(), 0);
    let mut rest = buffer.as_mut_slice();
    let mut reads = Vec::with_capacity(batch.len());
    for item in batch {
        let (out, later) = rest.split_at_mut(bytes_of(tensors, item));
        reads.push(Read { name: tensors[item.tensor].name, part: item.part.clone(), out });
        rest = later;
    }
    reader.read_into(reads)
}

/// Bytes of an item in the buffer of [`read`].
pub(crate) fn bytes_of(tensors: &[Whole<'_>], item: &Item) -> usize {
    (item.elements * tensors[item.tensor].element_bytes) as usize
}

/// A tensor in parts of at most `limit` elements, in the order of its elements.
fn parts(shape: &[u64], limit: u64) -> Vec<(Part, u64)> {
    let limit = limit.max(1);
    let count = elements(shape);
    if count <= limit {
        return vec![(Part::Whole, count)];
    }
    // The first axis of which a slice fits; the axes before it are walked through index by index.
    let inner = |axis: usize| elements(&shape[axis + 1..]);
    let axis = (0..shape.len()).find(|axis| inner(*axis) <= limit).unwrap_or(shape.len().saturating_sub(1));
    let slices = (limit / inner(axis)).max(1);
    let mut parts = Vec::new();
    for outer in 0..elements(&shape[..axis]) {
        let mut offset = vec![0; shape.len()];
        let mut rest = outer;
        for before in (0..axis).rev() {
            offset[before] = rest % shape[before];
            rest /= shape[before];
        }
        for first in (0..shape[axis]).step_by(slices as usize) {
            offset[axis] = first;
            let mut extent = vec![1; axis];
            extent.push(slices.min(shape[axis] - first));
            extent.extend_from_slice(&shape[axis + 1..]);
            let count = elements(&extent);
            parts.push((Part::Box { offset: offset.clone(), shape: extent }, count));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flat index of the first element of a part.
    fn first_of(part: &Part, shape: &[u64]) -> u64 {
        match part {
            Part::Box { offset, .. } => offset.iter().zip(shape).fold(0, |flat, (index, size)| flat * size + index),
            _ => 0,
        }
    }

    #[test]
    fn parts_are_successive_and_small_enough_whatever_the_shape() {
        for shape in [&[][..], &[0], &[7], &[3, 5], &[2, 3, 4], &[1, 1, 9], &[4, 1, 6], &[5, 0, 2]] {
            for limit in 0..30 {
                let mut next = 0;
                for (part, count) in parts(shape, limit) {
                    assert_eq!(first_of(&part, shape), next, "{shape:?} by {limit}");
                    assert!(count <= limit.max(1), "{shape:?} by {limit}: {part:?}");
                    next += count;
                }
                assert_eq!(next, elements(shape), "{shape:?} by {limit}");
            }
        }
    }

    #[test]
    fn batches_keep_the_order_and_the_limit() {
        let shapes: [&[u64]; 4] = [&[2], &[3, 5], &[1], &[1]];
        let tensors = shapes.map(|shape| Whole { name: "w", shape, element_bytes: 4 });
        let batches = batches(&tensors, 24);
        let sizes: Vec<Vec<(usize, u64)>> =
            batches.iter().map(|batch| batch.iter().map(|item| (item.tensor, item.elements)).collect()).collect();
        assert_eq!(sizes, [vec![(0, 2)], vec![(1, 5)], vec![(1, 5)], vec![(1, 5), (2, 1)], vec![(3, 1)]]);
    }
}
