//! The three indices that turn a corpus into shuffled samples of equal length (D1). Pure arithmetic, no I/O.
//!
//! Source: megatron/core/datasets/gpt_dataset.py and helpers.cpp. With E epochs of T tokens, samples of L tokens and `extra` = 1 (the token that
//! labels look ahead): the *document index* lists the split's sequence ids, E times over, shuffled; the *sample index* has a row
//! (position in the document index, token offset) where each sample begins, and one more for the end; the *shuffle index* permutes samples.

use std::ops::Range;

use crate::npy::Ints;
use crate::numpy_random::RandomState;

/// The two switches that Megatron's file names do not carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Rules {
    /// A sample has one token more than its length, so that labels need no padding (`add_extra_token_to_sequence`).
    pub extra_token: bool,
    /// Leave out a last sample that would be short (`drop_last_partial_sequence`).
    pub drop_last: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { extra_token: true, drop_last: true }
    }
}

impl Rules {
    fn extra(self) -> u64 {
        u64::from(self.extra_token)
    }
}

/// How many passes over the corpus, and whether the last one is shuffled by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epochs {
    /// E.
    pub num_epochs: u64,
    /// T.
    pub tokens_per_epoch: u64,
    /// The last epoch is needed for less than 80 % of its samples, so it is shuffled apart: no sample of it comes early.
    pub separate_last: bool,
    /// Samples that the first E − 1 epochs give; absent with one epoch.
    pub samples_without_last: Option<u64>,
}

impl Epochs {
    /// E = 1 without a request, else the smallest E with E·T ≥ N·L + extra. `None` when T is 0.
    #[must_use]
    pub fn plan(tokens_per_epoch: u64, num_samples: Option<u64>, seq_length: u32, rules: Rules) -> Option<Self> {
        let (tokens, length, extra) = (tokens_per_epoch, u64::from(seq_length), rules.extra());
        if tokens == 0 || length == 0 {
            return None;
        }
        let wanted = num_samples.map_or(0, |samples| samples.saturating_mul(length).saturating_add(extra));
        let num_epochs = wanted.div_ceil(tokens).max(1);
        if num_epochs == 1 {
            return Some(Self { num_epochs, tokens_per_epoch, separate_last: false, samples_without_last: None });
        }
        let without_last = ((num_epochs - 1).saturating_mul(tokens) - extra) / length;
        let last = num_samples.unwrap_or(0).saturating_sub(without_last);
        let per_epoch = (tokens - extra) / length;
        // int(0.80 * per_epoch) in Python: an f64 product, truncated.
        let separate_last = last < (0.80 * per_epoch as f64) as u64;
        Some(Self { num_epochs, tokens_per_epoch, separate_last, samples_without_last: Some(without_last) })
    }

    /// Rows of the sample index less one.
    ///
    /// A kept partial sample makes the count ⌈(E·T − extra) ÷ L⌉ in **32-bit floats**, as helpers.cpp computes it: above 2²⁴ tokens
    /// it is inexact there, and so it is here.
    #[must_use]
    pub fn num_samples(&self, seq_length: u32, rules: Rules) -> u64 {
        let tokens = self.num_epochs.saturating_mul(self.tokens_per_epoch).saturating_sub(rules.extra());
        if rules.drop_last { tokens / u64::from(seq_length) } else { (tokens as f32 / seq_length as f32).ceil() as u64 }
    }
}

/// The three indices of one split.
#[derive(Debug)]
pub struct Indices {
    /// Sequence ids, i32.
    pub document: Ints,
    /// Flattened rows (position in `document`, token offset), i32 or i64.
    pub sample: Ints,
    /// Permutation of samples, u32 or i64.
    pub shuffle: Ints,
}

/// What the indices are built from.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Sequence ids of the split.
    pub sequences: Range<usize>,
    /// Samples asked for; `None` = one epoch.
    pub num_samples: Option<u64>,
    /// L.
    pub seq_length: u32,
    /// Seed of the one generator that shuffles documents, then samples.
    pub seed: u32,
    /// Switches.
    pub rules: Rules,
}

impl Recipe {
    /// Plans epochs over sequences whose lengths `length` gives. `None` when the split holds no token.
    #[must_use]
    pub fn epochs(&self, length: impl Fn(usize) -> u32) -> Option<Epochs> {
        let tokens = self.sequences.clone().map(|sequence| u64::from(length(sequence))).sum();
        Epochs::plan(tokens, self.num_samples, self.seq_length, self.rules)
    }

    /// Builds the three indices.
    ///
    /// # Errors
    /// A text that says which count does not fit the format (sequence ids are 32-bit) or memory.
    pub fn build(&self, epochs: &Epochs, length: impl Fn(usize) -> u32) -> Result<Indices, String> {
        let mut random = RandomState::new(self.seed);
        let document = self.document_index(epochs, &mut random)?;
        let num_samples = epochs.num_samples(self.seq_length, self.rules);
        let longest = self.sequences.clone().map(&length).max().unwrap_or(0);
        let rows = usize::try_from(num_samples).unwrap_or(usize::MAX).saturating_add(1).saturating_mul(2);
        // numpy's choice of type, which the files show: the larger of the two maxima must fit 32 bits.
        let sample = if document.len().max(longest as usize) <= i32::MAX as usize {
            let mut flat: Vec<i32> = reserve(rows)?;
            self.walk(&document, num_samples, &length, |position, offset| {
                flat.extend([position as i32, offset as i32])
            });
            Ints::I32(flat)
        } else {
            let mut flat: Vec<i64> = reserve(rows)?;
            self.walk(&document, num_samples, &length, |position, offset| flat.extend([position, offset]));
            Ints::I64(flat)
        };
        let shuffle = shuffle_index(epochs, num_samples, &mut random)?;
        Ok(Indices { document: Ints::I32(document), sample, shuffle })
    }

    /// E copies of the ids under one shuffle, or E − 1 copies and then one copy, each under its own.
    fn document_index(&self, epochs: &Epochs, random: &mut RandomState) -> Result<Vec<i32>, String> {
        let (from, to) = (i32::try_from(self.sequences.start), i32::try_from(self.sequences.end));
        let (Ok(from), Ok(to)) = (from, to) else {
            return Err(format!(
                "sequence ids up to {} do not fit the 32 bits that the format has for them",
                self.sequences.end
            ));
        };
        let copies = |count: u64, room: u64| {
            let mut ids = reserve(usize::try_from(room).unwrap_or(usize::MAX).saturating_mul(self.sequences.len()))?;
            ids.extend((0..count).flat_map(|_| from..to));
            Ok::<Vec<i32>, String>(ids)
        };
        if !epochs.separate_last {
            let mut all = copies(epochs.num_epochs, epochs.num_epochs)?;
            random.shuffle(&mut all);
            return Ok(all);
        }
        let (mut first, mut last) = (copies(epochs.num_epochs - 1, epochs.num_epochs)?, copies(1, 1)?);
        random.shuffle(&mut first);
        random.shuffle(&mut last);
        first.append(&mut last);
        Ok(first)
    }

    /// Walks the documents and pushes where each sample begins, then the end.
    fn walk(&self, document: &[i32], num_samples: u64, length: impl Fn(usize) -> u32, mut push: impl FnMut(i64, i64)) {
        let extra = self.rules.extra() as i64;
        let length_at = |position: usize| document.get(position).map_or(0, |id| i64::from(length(*id as usize)));
        let (mut position, mut offset) = (0usize, 0i64);
        push(0, 0);
        for _ in 0..num_samples {
            let mut remaining = i64::from(self.seq_length) + extra;
            loop {
                let available = length_at(position) - offset;
                remaining -= available;
                if remaining <= 0 {
                    offset += remaining + available - extra;
                    break;
                }
                if position + 1 >= document.len() {
                    offset = length_at(position) - extra;
                    break;
                }
                position += 1;
                offset = 0;
            }
            push(position as i64, offset);
        }
    }
}

/// One permutation of all samples, or one of the first epochs' and one of the last's.
fn shuffle_index(epochs: &Epochs, total: u64, random: &mut RandomState) -> Result<Ints, String> {
    let first = if epochs.separate_last { epochs.samples_without_last.unwrap_or(total).min(total) } else { total };
    if total >= u64::from(u32::MAX) - 1 {
        return shuffled(0..total as i64, first as usize, total as usize, random).map(Ints::I64);
    }
    shuffled(0..total as u32, first as usize, total as usize, random).map(Ints::U32)
}

fn shuffled<T>(
    ids: impl Iterator<Item = T>,
    first: usize,
    total: usize,
    random: &mut RandomState,
) -> Result<Vec<T>, String> {
    let mut all = reserve(total)?;
    all.extend(ids);
    let (head, tail) = all.split_at_mut(first);
    random.shuffle(head);
    random.shuffle(tail);
    Ok(all)
}

/// Room for `len` values, or a text: a mistyped `max_steps` must not abort the process.
fn reserve<T>(len: usize) -> Result<Vec<T>, String> {
    let mut values = Vec::new();
    match values.try_reserve_exact(len) {
        Ok(()) => Ok(values),
        Err(_) => Err(format!(
            "an index of {len} entries does not fit memory; ask for fewer samples (max_steps · global_batch_size)"
        )),
    }
}
