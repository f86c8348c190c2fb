//! Which bytes of which files go where, for any part of any tensors.

use super::index::{Entry, Piece};
use super::{BLOCK_BYTES, Part};
use crate::state_hash::elements;

/// Bytes that lie side by side both in a file and in the wanted part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) file: usize,
    /// First byte in the file.
    pub(super) source: u64,
    /// First byte in the wanted part.
    pub(super) target: u64,
    pub(super) bytes: u64,
}

/// A box of a tensor: where it begins and how far it reaches on each axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) offset: Vec<u64>,
    pub(super) shape: Vec<u64>,
}

impl Region {
    /// The box that a part of a tensor of `whole` shape is; `None` if it reaches beyond it.
    pub(super) fn new(part: &Part, whole: &[u64]) -> Option<Self> {
        let region = match part {
            Part::Whole => Self { offset: vec![0; whole.len()], shape: whole.to_vec() },
            Part::Rows(rows) => {
                let mut region = Self { offset: vec![0; whole.len()], shape: whole.to_vec() };
                *region.offset.first_mut()? = rows.start;
                *region.shape.first_mut()? = rows.end.checked_sub(rows.start)?;
                region
            }
            Part::Box { offset, shape } => Self { offset: offset.clone(), shape: shape.clone() },
        };
        let axes = region.offset.len() == whole.len() && region.shape.len() == whole.len();
        let inside =
            |axis: usize| region.offset[axis].checked_add(region.shape[axis]).is_some_and(|end| end <= whole[axis]);
        (axes && (0..whole.len()).all(inside)).then_some(region)
    }
}

/// The runs that make up a part of a tensor, in its own order. A piece that is cut along its first axis is one run; along
/// a later axis, one run for each row.
///
/// # Errors
/// If pieces overlap, or bytes are in none.
pub(super) fn runs(entry: &Entry, region: &Region) -> Result<Vec<Run>, String> {
    let size = entry.info.element_bytes();
    let mut runs = Vec::new();
    for piece in &entry.pieces {
        piece_runs(piece, region, size, &mut runs);
    }
    runs.sort_unstable_by_key(|run| run.target);
    let mut end = 0;
    for run in &runs {
        if run.target != end {
            let how = if run.target < end { "overlap" } else { "leave a hole" };
            return Err(format!("its pieces {how} at byte {}", end.min(run.target)));
        }
        end += run.bytes;
    }
    let wanted = elements(&region.shape) * size;
    if end == wanted { Ok(runs) } else { Err(format!("its pieces end at byte {end} of {wanted}")) }
}

fn piece_runs(piece: &Piece, region: &Region, size: u64, runs: &mut Vec<Run>) {
    let axes = piece.shape.len();
    let mut first = Vec::with_capacity(axes);
    let mut extent = Vec::with_capacity(axes);
    for axis in 0..axes {
        let from = piece.offset[axis].max(region.offset[axis]);
        let to = (piece.offset[axis] + piece.shape[axis]).min(region.offset[axis] + region.shape[axis]);
        if from >= to {
            return;
        }
        first.push(from);
        extent.push(to - from);
    }
    // Axes from `inner` on are whole in both, so together with the one before them they are one run.
    let whole = |axis: usize| extent[axis] == piece.shape[axis] && extent[axis] == region.shape[axis];
    let inner = (0..axes).rev().take_while(|axis| whole(*axis)).count();
    let outer = (axes - inner).saturating_sub(1);
    let bytes = extent[outer.min(axes)..].iter().product::<u64>() * size;
    let mut index = first.clone();
    loop {
        let place = |offset: &[u64], shape: &[u64]| {
            (0..axes).fold(0, |flat, axis| flat * shape[axis] + index[axis] - offset[axis]) * size
        };
        runs.push(Run {
            file: piece.file,
            source: piece.start + place(&piece.offset, &piece.shape),
            target: place(&region.offset, &region.shape),
            bytes,
        });
        // The next index on the outer axes, the last one fastest.
        let mut axis = outer;
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            if index[axis] < first[axis] + extent[axis] {
                break;
            }
            index[axis] = first[axis];
        }
    }
}

/// Where bytes of a file go.
#[derive(Debug)]
pub(super) struct Segment<'a> {
    pub(super) file: usize,
    /// First byte in the file.
    pub(super) start: u64,
    pub(super) out: &'a mut [u8],
}

/// A block to read, and what is wanted of it.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) file: usize,
    pub(super) block: u64,
    /// By their place in the block.
    pub(super) wanted: Vec<(usize, &'a mut [u8])>,
}

/// The segments of the runs, which cover `out` in order.
pub(super) fn segments<'a>(runs: &[Run], mut out: &'a mut [u8], segments: &mut Vec<Segment<'a>>) {
    for run in runs {
        let (now, later) = out.split_at_mut(run.bytes as usize);
        segments.push(Segment { file: run.file, start: run.source, out: now });
        out = later;
    }
}

/// Cuts segments at the borders of blocks, so that each block that is touched is read once. In the order of the files.
pub(super) fn jobs(mut segments: Vec<Segment<'_>>) -> Vec<Job<'_>> {
    segments.sort_unstable_by_key(|segment| (segment.file, segment.start));
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for Segment { file, mut start, mut out } in segments {
        while !out.is_empty() {
            let (block, at) = (start / BLOCK_BYTES as u64, (start % BLOCK_BYTES as u64) as usize);
            let now = out.split_off_mut(..out.len().min(BLOCK_BYTES - at)).unwrap_or_default();
            start += now.len() as u64;
            // A segment of several blocks may reach past the start of the next one: look for its block among the last jobs.
            match jobs.iter_mut().rev().take_while(|job| job.file == file && job.block >= block).last() {
                Some(job) if job.block == block => job.wanted.push((at, now)),
                _ => jobs.push(Job { file, block, wanted: vec![(at, now)] }),
            }
        }
    }
    jobs
}
