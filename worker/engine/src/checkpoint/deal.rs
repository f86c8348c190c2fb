//! Which rank saves what: a pure function of the shapes and the world size.
//!
//! The parameters lie one after the other on a line of elements, which is cut into one stretch for each rank. A cut falls
//! between two tensors or, inside a large one, between two rows at a border of the state hash's blocks, so that every rank
//! can report whole blocks. Moments and masters go with their parameter: they have its shape, so bytes are as even as
//! elements are.

use std::ops::Range;

use trainctl_store::state_hash::row_step;

use crate::params::Entry;

/// Successive rows of one parameter: indices along its first axis. A scalar has one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index into the parameters.
    pub entry: usize,
    /// Its rows.
    pub rows: Range<u64>,
}

/// Deals parameters to ranks. Returns the pieces of each rank, in the order of `entries`.
///
/// Each stretch differs from the fair share by at most the largest `unit` of the tensors at its ends.
pub fn deal(entries: &[Entry], world_size: u32) -> Vec<Vec<Piece>> {
    let world = u64::from(world_size.max(1));
    let mut starts = Vec::with_capacity(entries.len() + 1);
    let mut total = 0;
    for entry in entries {
        starts.push(total);
        total += elements(entry);
    }
    starts.push(total);
    let target = |rank: u64| (u128::from(total) * u128::from(rank) / u128::from(world)) as u64;
    let cuts: Vec<u64> = (0..=world).map(|rank| snap(entries, &starts, target(rank))).collect();
    cuts.windows(2).map(|cut| pieces(entries, &starts, cut[0]..cut[1])).collect()
}

/// Elements between two places where `entry` may be cut: whole rows and whole blocks.
pub(super) fn unit(entry: &Entry) -> u64 {
    let shape: Vec<u64> = entry.shape.iter().map(|n| n.unsigned_abs()).collect();
    (row_step(&shape) * row_elements(entry)).max(1)
}

/// Elements of one row of `entry`.
pub(crate) fn row_elements(entry: &Entry) -> u64 {
    entry.shape.iter().skip(1).map(|n| n.unsigned_abs()).product()
}

fn elements(entry: &Entry) -> u64 {
    entry.numel().unsigned_abs()
}

/// The place nearest to `target` where the line may be cut; the lower of equals.
fn snap(entries: &[Entry], starts: &[u64], target: u64) -> u64 {
    let index = starts.partition_point(|start| *start <= target).saturating_sub(1);
    let Some(entry) = entries.get(index) else { return target };
    let (start, end) = (starts[index], starts[index + 1]);
    let below = start + (target - start) / unit(entry) * unit(entry);
    let above = end.min(below + unit(entry));
    if target - below <= above - target { below } else { above }
}

fn pieces(entries: &[Entry], starts: &[u64], stretch: Range<u64>) -> Vec<Piece> {
    let mut found = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let (start, end) = (starts[index], starts[index + 1]);
        let (from, to) = (stretch.start.clamp(start, end) - start, stretch.end.clamp(start, end) - start);
        if from < to {
            let row = row_elements(entry);
            found.push(Piece { entry: index, rows: from / row..to / row });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainctl_store::state_hash::BLOCK_ELEMENTS;

    use super::*;

    fn entry(shape: &[i64]) -> Entry {
        Entry { name: format!("{shape:?}"), shape: shape.to_vec() }
    }

    fn load(entries: &[Entry], hand: &[Piece]) -> u64 {
        hand.iter().map(|p| (p.rows.end - p.rows.start) * row_elements(&entries[p.entry])).sum()
    }

    fn shape() -> impl Strategy<Value = Vec<i64>> {
        prop_oneof![
            Just(vec![]),
            prop::collection::vec(1i64..5000, 1),
            prop::collection::vec(1i64..400, 2),
            (1i64..40, 1i64..8).prop_map(|(rows, blocks)| vec![rows, blocks * 1024]),
            prop::collection::vec(1i64..30, 3),
        ]
    }

    proptest! {
        #[test]
        fn every_row_is_dealt_once_in_order_at_block_borders_and_evenly(
            shapes in prop::collection::vec(shape(), 1..12), world_size in 1u32..10,
        ) {
            let entries: Vec<Entry> = shapes.iter().map(|shape| entry(shape)).collect();
            let hands = deal(&entries, world_size);
            prop_assert_eq!(hands.len(), world_size as usize);
            let mut next = vec![0; entries.len()];
            for piece in hands.iter().flatten() {
                prop_assert_eq!(piece.rows.start, next[piece.entry], "a gap or an overlap: {:?}", piece);
                prop_assert!(piece.rows.start < piece.rows.end);
                prop_assert_eq!(piece.rows.start * row_elements(&entries[piece.entry]) % BLOCK_ELEMENTS, 0);
                next[piece.entry] = piece.rows.end;
            }
            for (entry, next) in entries.iter().zip(next) {
                prop_assert_eq!(next, entry.shape.first().map_or(1, |n| n.unsigned_abs()));
            }
            let total: u64 = entries.iter().map(elements).sum();
            let widest = entries.iter().map(|entry| unit(entry).min(elements(entry))).max().unwrap_or(0);
            for hand in &hands {
                let apart = load(&entries, hand).abs_diff(total / u64::from(world_size));
                prop_assert!(apart <= widest + 1, "{} of {} elements", load(&entries, hand), total);
            }
        }
    }

    #[test]
    fn gpt2_is_dealt_evenly_to_any_world_size() {
        // n_embd 640: nine tenths of such a model lie in tensors of more than a million elements.
        let mut entries = vec![entry(&[50257, 640]), entry(&[1024, 640])];
        for _ in 0..12 {
            entries.extend([&[640i64][..], &[640], &[640, 1920], &[1920], &[640, 640], &[640]].map(entry));
            entries.extend([&[640i64][..], &[640], &[640, 2560], &[2560], &[2560, 640], &[640]].map(entry));
        }
        for world_size in [1, 2, 3, 8, 64] {
            let loads: Vec<u64> = deal(&entries, world_size).iter().map(|hand| load(&entries, hand)).collect();
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            assert!(*most as f64 / *least as f64 <= 1.02, "{world_size} ranks: {loads:?}");
        }
    }
}
