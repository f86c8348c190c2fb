//! A rank's share of the state in host memory.
//!
//! A [`Plan`] says which bytes of which tensors lie where in one buffer; it is made once. Filling the buffer is all that
//! training waits for, so the buffer's pages are touched before the first save, and the copy runs on as many threads as
//! the rank may use.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use tch::{Device, Kind, Tensor};
use trainctl_spec::report::SaveKind;
use trainctl_store::layout::Section;
use trainctl_store::shard::{Slice, TensorView};
use trainctl_store::state_hash::{BLOCK_ELEMENTS, element_bytes, elements};

use super::deal::{Piece, row_elements};
use super::{EXP_AVG, EXP_AVG_SQ, MASTER, digest, dtype};
use crate::Error;
use crate::optim::AdamW;
use crate::params::Parameters;

/// Items begin at multiples of this many bytes: a cache line, and every element's own alignment.
const ALIGNMENT: usize = 64;

/// Bytes that a thread takes at once.
const PIECE_BYTES: usize = 1 << 20;

/// The state to save.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// Weights.
    pub params: &'a Parameters,
    /// Moments.
    pub optimizer: &'a AdamW,
}

impl<'a> State<'a> {
    /// All tensors of a full save, whole, each with a number of its own.
    pub(super) fn tensors(self) -> impl Iterator<Item = (u64, &'a Tensor)> {
        let masters = self.params.has_masters().then_some(Source::Master);
        let sources = [Source::Value, Source::ExpAvg, Source::ExpAvgSq].into_iter().chain(masters);
        let entries = 0..self.params.entries().len();
        sources.flat_map(move |source| entries.clone().map(move |entry| (source.place(entry), source.of(self, entry))))
    }
}

/// Which tensor of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Value,
    Master,
    ExpAvg,
    ExpAvgSq,
}

impl Source {
    /// The tensor's number, the same on every rank.
    fn place(self, entry: usize) -> u64 {
        (self as u64) << 56 | entry as u64
    }

    fn of(self, state: State<'_>, entry: usize) -> &Tensor {
        match self {
            Self::Value => &state.params.values()[entry],
            Self::Master => &state.params.masters()[entry],
            Self::ExpAvg => &state.optimizer.moments().0[entry],
            Self::ExpAvgSq => &state.optimizer.moments().1[entry],
        }
    }
}

/// A piece of one tensor and its place in the buffer.
#[derive(Clone, Debug)]
pub(super) struct Item {
    source: Source,
    piece: Piece,
    kind: Kind,
    pub(super) section: Section,
    /// Name within its section.
    name: String,
    dtype: &'static str,
    /// Shape of the whole tensor.
    whole: Vec<u64>,
    /// Shape of the piece.
    shape: Vec<u64>,
    /// Where its bytes lie in the buffer.
    range: Range<usize>,
}

impl Item {
    pub(super) fn bytes(&self) -> u64 {
        self.range.len() as u64
    }

    /// As the store takes it, from a filled buffer.
    pub(super) fn view<'a>(&'a self, buffer: &'a [u8]) -> TensorView<'a> {
        let slice = (self.shape != self.whole).then(|| {
            let mut offset = vec![0; self.whole.len()];
            if let Some(first) = offset.first_mut() {
                *first = self.piece.rows.start;
            }
            Slice { shape: self.whole.clone(), offset }
        });
        TensorView {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
            bytes: &buffer[self.range.clone()],
            slice,
        }
    }
}

/// What one rank writes at a save of one kind.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) items: Vec<Item>,
    bytes: usize,
}

impl Plan {
    /// The plan for a rank that saves `hand`.
    ///
    /// # Errors
    /// [`Error::Internal`] for a kind of tensor that has no file type.
    pub fn new(kind: SaveKind, params: &Parameters, hand: &[Piece]) -> Result<Self, Error> {
        let value = params.values().first().map_or(Kind::Float, Tensor::kind);
        let mut kinds = match kind {
            SaveKind::Full => vec![
                (Source::Value, Section::Model, "", value),
                (Source::ExpAvg, Section::Optim, EXP_AVG, Kind::Float),
                (Source::ExpAvgSq, Section::Optim, EXP_AVG_SQ, Kind::Float),
            ],
            SaveKind::Weights => vec![(Source::Value, Section::Model, "", Kind::BFloat16)],
        };
        if kind == SaveKind::Full && params.has_masters() {
            kinds.push((Source::Master, Section::Optim, MASTER, Kind::Float));
        }
        let mut plan = Self { items: Vec::with_capacity(kinds.len() * hand.len()), bytes: 0 };
        for (source, section, prefix, kind) in kinds {
            let dtype = dtype(kind).ok_or_else(|| Error::Internal(format!("{kind:?} has no file type")))?;
            let size = element_bytes(dtype).unwrap_or(0);
            for piece in hand {
                let entry = &params.entries()[piece.entry];
                let whole: Vec<u64> = entry.shape.iter().map(|n| n.unsigned_abs()).collect();
                let mut shape = whole.clone();
                if let Some(first) = shape.first_mut() {
                    *first = piece.rows.end - piece.rows.start;
                }
                let start = plan.bytes.next_multiple_of(ALIGNMENT);
                plan.bytes = start + elements(&shape) as usize * size;
                plan.items.push(Item {
                    source,
                    piece: piece.clone(),
                    kind,
                    section,
                    name: format!("{prefix}{}", entry.name),
                    dtype,
                    whole,
                    shape,
                    range: start..plan.bytes,
                });
            }
        }
        Ok(plan)
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> u64 {
        self.items.iter().map(Item::bytes).sum()
    }

    /// The digest of what a filled buffer holds, a part of the sum that [`digest`] takes of the state; `None` where the buffer
    /// holds no copies but conversions.
    pub(super) fn digest(&self, kind: SaveKind, buffer: &[u8]) -> Option<u128> {
        let digest = |item: &Item| {
            let row: u64 = item.whole.iter().skip(1).product();
            let size = element_bytes(item.dtype).unwrap_or(1);
            let first = item.piece.rows.start * row / BLOCK_ELEMENTS;
            digest::piece(item.source.place(item.piece.entry), first, size, &buffer[item.range.clone()])
        };
        (kind == SaveKind::Full).then(|| self.items.iter().map(digest).fold(0, u128::wrapping_add))
    }

    /// A buffer whose pages exist: the first save must not pay for them. Page-locked when the state is on a GPU.
    ///
    /// # Errors
    /// [`Error::Torch`] when there is not so much memory.
    pub fn buffer(&self, device: Device) -> Result<Buffer, Error> {
        let mut memory = Tensor::f_empty([self.bytes as i64], (Kind::Uint8, Device::Cpu))?;
        if device != Device::Cpu {
            memory = memory.f_pin_memory(device)?;
        }
        trainctl_collective::bytes_mut(&mut memory).map_err(Error::Shim)?.fill(0);
        Ok(Buffer { memory })
    }

    /// Copies the state into `buffer` on up to `threads` threads, this one among them.
    ///
    /// # Errors
    /// [`Error::Torch`], [`Error::Shim`].
    pub fn fill(&self, buffer: &mut Buffer, state: State<'_>, threads: u32) -> Result<(), Error> {
        let mut plain = Vec::with_capacity(self.items.len());
        for item in &self.items {
            let source = item.source.of(state, item.piece.entry);
            if source.kind() == item.kind && source.device() == Device::Cpu {
                let bytes = trainctl_collective::bytes(source).map_err(Error::Shim)?;
                let row = row_elements(&state.params.entries()[item.piece.entry]) as usize
                    * element_bytes(item.dtype).unwrap_or(0);
                let start = item.piece.rows.start as usize * row;
                plain.push((item.range.start, &bytes[start..start + item.range.len()]));
            } else {
                tch::no_grad(|| buffer.convert(item, source))?;
            }
        }
        let memory = trainctl_collective::bytes_mut(&mut buffer.memory).map_err(Error::Shim)?;
        copy(memory, &plain, threads.max(1) as usize);
        Ok(())
    }
}

/// Host memory for one snapshot.
#[derive(Debug)]
pub struct Buffer {
    /// `[bytes]` uint8.
    memory: Tensor,
}

impl Buffer {
    /// What it holds.
    ///
    /// # Errors
    /// [`Error::Shim`].
    pub fn bytes(&self) -> Result<&[u8], Error> {
        trainctl_collective::bytes(&self.memory).map_err(Error::Shim)
    }

    /// libtorch's copy: to another kind, or from another device.
    fn convert(&self, item: &Item, source: &Tensor) -> Result<(), Error> {
        let rows = match source.dim() {
            0 => source.shallow_clone(),
            _ => source.f_narrow(
                0,
                item.piece.rows.start as i64,
                (item.piece.rows.end - item.piece.rows.start) as i64,
            )?,
        };
        let place = self.memory.f_narrow(0, item.range.start as i64, item.range.len() as i64)?;
        let mut place = place.f_view_dtype(item.kind)?.f_view(rows.size().as_slice())?;
        place.f_copy_(&rows)?;
        Ok(())
    }
}

/// Copies each source to its offset in `memory`; offsets ascend. The threads take piece after piece, so that none has to
/// wait for one that was interrupted. The copy is read by the thread that writes it, long after, and need not be in a cache.
fn copy(memory: &mut [u8], sources: &[(usize, &[u8])], threads: usize) {
    let mut pieces: Vec<(&mut [u8], &[u8])> = Vec::with_capacity(sources.len());
    let (mut rest, mut at) = (memory, 0);
    for (offset, source) in sources {
        let (target, tail) = rest.split_at_mut(offset - at).1.split_at_mut(source.len());
        pieces.extend(target.chunks_mut(PIECE_BYTES).zip(source.chunks(PIECE_BYTES)));
        (rest, at) = (tail, offset + source.len());
    }
    let helpers = threads.min(pieces.len()).saturating_sub(1);
    let pieces = Mutex::new(pieces.into_iter());
    let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        while let Some((to, from)) = next() {
            trainctl_collective::copy_streaming(to, from);
        }
    };
    thread::scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(run);
        }
        run();
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_arrives_where_it_belongs(
            lengths in prop::collection::vec((0usize..300, prop_oneof![0usize..70, 0usize..3 * PIECE_BYTES]), 0..6),
            threads in 1usize..6,
        ) {
            let size: usize = lengths.iter().map(|(gap, length)| gap + length).sum();
            let data: Vec<u8> = (0..size).map(|i| (i % 251) as u8 + 1).collect();
            let (mut wanted, mut at, mut sources) = (vec![0; size], 0, Vec::new());
            for (gap, length) in &lengths {
                at += gap;
                wanted[at..at + length].copy_from_slice(&data[at..at + length]);
                sources.push((at, &data[at..at + length]));
                at += length;
            }
            let mut memory = vec![0; size];
            copy(&mut memory, &sources, threads);
            prop_assert_eq!(memory, wanted);
        }
    }
}
