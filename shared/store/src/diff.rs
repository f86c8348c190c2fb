//! Two checkpoints, tensor by tensor: how far apart are their values?
//!
//! Values are compared in fp64, whatever their types. Both are read in the order of the first one's files, batch by batch;
//! the tensors of a batch are compared on all cores, and memory does not grow with them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use serde::Serialize;

use crate::batches::{self, BATCH_BYTES, Whole};
use crate::error::{Error, Result};
use crate::shard::{ShardReader, TensorInfo, workers};
use crate::state_hash::elements;

/// Elements that a thread compares at a time.
const CHUNK: usize = 1 << 18;

/// A tensor that both have with the same shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorDiff {
    /// `model/<name>` or `optim/<name>`.
    pub name: String,
    /// Shape of both.
    pub shape: Vec<u64>,
    /// Types in the first and the second checkpoint.
    pub dtypes: [String; 2],
    /// Largest absolute difference of finite values.
    pub max: f64,
    /// Root of the mean squared difference of finite values.
    pub rms: f64,
    /// Elements that are not equal.
    pub unequal: u64,
    /// Elements of which one is NaN or infinite and the other one is something else.
    pub nonfinite: u64,
}

/// A tensor that both have with different shapes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Misshapen {
    /// `model/<name>` or `optim/<name>`.
    pub name: String,
    /// Shapes in the first and the second checkpoint.
    pub shapes: [Vec<u64>; 2],
}

/// The answer; every list in the order of names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    /// What both have.
    pub tensors: Vec<TensorDiff>,
    /// What only the first has.
    pub only_first: Vec<String>,
    /// What only the second has.
    pub only_second: Vec<String>,
    /// What both have with different shapes.
    pub misshapen: Vec<Misshapen>,
}

impl Diff {
    /// Whether they hold the same tensors, each within `tolerance` of the other by its largest difference.
    pub fn is_within(&self, tolerance: f64) -> bool {
        self.only_first.is_empty()
            && self.only_second.is_empty()
            && self.misshapen.is_empty()
            && self.tensors.iter().all(|tensor| tensor.nonfinite == 0 && tensor.max <= tolerance)
    }
}

/// Compares the tensors for which `wanted` holds. Blocks. `progress` gets bytes of the first checkpoint, done and in all.
///
/// # Errors
/// Those of reading; [`Error::Tensor`] for a type that is no number.
pub fn diff(
    first: &ShardReader,
    second: &ShardReader,
    wanted: &dyn Fn(&str) -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Diff> {
    diff_by(first, second, wanted, BATCH_BYTES, progress)
}

/// [`diff`] with another size of the batches, for tests.
fn diff_by(
    first: &ShardReader,
    second: &ShardReader,
    wanted: &dyn Fn(&str) -> bool,
    batch_bytes: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Diff> {
    let mut diff = Diff::default();
    let mut pairs = Vec::new();
    for name in first.in_file_order().into_iter().filter(|name| wanted(name)) {
        let Some(info) = first.info(&name) else { continue };
        match second.info(&name) {
            None => diff.only_first.push(name),
            Some(found) if found.shape != info.shape => {
                diff.misshapen.push(Misshapen { name, shapes: [info.shape.clone(), found.shape.clone()] });
            }
            Some(found) => pairs.push(Pair::new(name, info, found)?),
        }
    }
    let only_second = second.tensors().map(|(name, _)| name).filter(|name| wanted(name) && first.info(name).is_none());
    diff.only_second = only_second.map(str::to_owned).collect();
    diff.only_first.sort();
    diff.misshapen.sort_by(|a, b| a.name.cmp(&b.name));
    compare(first, second, &mut pairs, batch_bytes, progress)?;
    diff.tensors = pairs.into_iter().map(Pair::finish).collect();
    diff.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(diff)
}

/// A tensor that both have, with what was found so far.
struct Pair {
    name: String,
    shape: Vec<u64>,
    dtypes: [String; 2],
    numbers: [Number; 2],
    sums: Sums,
}

impl Pair {
    fn new(name: String, first: &TensorInfo, second: &TensorInfo) -> Result<Self> {
        let number = |info: &TensorInfo| {
            let reason = || format!("has type {}, which is not compared", info.dtype);
            Number::new(&info.dtype).ok_or_else(|| Error::Tensor { name: name.clone(), reason: reason() })
        };
        let numbers = [number(first)?, number(second)?];
        let dtypes = [first.dtype.clone(), second.dtype.clone()];
        Ok(Self { name, shape: first.shape.clone(), dtypes, numbers, sums: Sums::default() })
    }

    fn whole(&self, which: usize) -> Whole<'_> {
        Whole { name: &self.name, shape: &self.shape, element_bytes: self.numbers[which].size() as u64 }
    }

    fn finish(self) -> TensorDiff {
        let Self { name, shape, dtypes, sums, .. } = self;
        let count = elements(&shape).max(1) as f64;
        let rms = (sums.squares / count).sqrt();
        TensorDiff { name, shape, dtypes, max: sums.max, rms, unequal: sums.unequal, nonfinite: sums.nonfinite }
    }
}

fn compare(
    first: &ShardReader,
    second: &ShardReader,
    pairs: &mut [Pair],
    batch_bytes: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let wholes = [0, 1].map(|which| pairs.iter().map(|pair| pair.whole(which)).collect::<Vec<_>>());
    // Both buffers stay within the limit when the batches are cut for the wider type.
    let widest = |pair: &Pair| pair.numbers[0].size().max(pair.numbers[1].size()) as u64;
    let cut: Vec<_> = pairs.iter().zip(&wholes[0]).map(|(p, w)| Whole { element_bytes: widest(p), ..*w }).collect();
    let total: u64 = wholes[0].iter().map(|whole| elements(whole.shape) * whole.element_bytes).sum();
    let found: Mutex<BTreeMap<(usize, u64), Sums>> = Mutex::default();
    let mut begun = vec![0; pairs.len()];
    let (mut a, mut b, mut done) = (Vec::new(), Vec::new(), 0);
    for batch in batches::batches(&cut, batch_bytes) {
        batches::read(first, &wholes[0], &batch, &mut a)?;
        batches::read(second, &wholes[1], &batch, &mut b)?;
        let (mut rest_a, mut rest_b) = (a.as_slice(), b.as_slice());
        let mut work = Vec::new();
        for item in &batch {
            let (part_a, later_a) = rest_a.split_at(batches::bytes_of(&wholes[0], item));
            let (part_b, later_b) = rest_b.split_at(batches::bytes_of(&wholes[1], item));
            (rest_a, rest_b) = (later_a, later_b);
            let [number_a, number_b] = pairs[item.tensor].numbers;
            let chunks = part_a.chunks(CHUNK * number_a.size()).zip(part_b.chunks(CHUNK * number_b.size()));
            for (index, (a, b)) in chunks.enumerate() {
                work.push(((item.tensor, begun[item.tensor] + index as u64), (number_a, a), (number_b, b)));
            }
            begun[item.tensor] += item.elements.div_ceil(CHUNK as u64);
        }
        workers::for_each(workers::all_cores(), work, |_: &mut (), (place, (number_a, a), (number_b, b))| {
            // Equal bits are equal values, NaN too.
            if number_a != number_b || a != b {
                let mut sums = Sums::default();
                sums.add(number_a.values(a), number_b.values(b));
                found.lock().unwrap_or_else(PoisonError::into_inner).insert(place, sums);
            }
            Ok(())
        })?;
        done += a.len() as u64;
        progress(done, total);
    }
    // Added in the order of the elements: the sums do not depend on the threads.
    for ((tensor, _), sums) in found.into_inner().unwrap_or_else(PoisonError::into_inner) {
        pairs[tensor].sums.join(&sums);
    }
    Ok(())
}

#[derive(Default)]
struct Sums {
    max: f64,
    squares: f64,
    unequal: u64,
    nonfinite: u64,
}

impl Sums {
    fn join(&mut self, other: &Self) {
        self.max = self.max.max(other.max);
        self.squares += other.squares;
        self.unequal += other.unequal;
        self.nonfinite += other.nonfinite;
    }

    fn add(&mut self, a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) {
        for (a, b) in a.zip(b) {
            if a == b || (a.is_nan() && b.is_nan()) {
                continue;
            }
            self.unequal += 1;
            let difference = (a - b).abs();
            if difference.is_finite() {
                self.max = self.max.max(difference);
                self.squares += difference * difference;
            } else {
                self.nonfinite += 1;
            }
        }
    }
}

/// How the elements of a type become fp64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    F64,
    F32,
    Bf16,
    F16,
    I64,
    I32,
    U8,
}

impl Number {
    fn new(dtype: &str) -> Option<Self> {
        Some(match dtype {
            "F64" => Self::F64,
            "F32" => Self::F32,
            "BF16" => Self::Bf16,
            "F16" => Self::F16,
            "I64" => Self::I64,
            "I32" => Self::I32,
            "U8" | "BOOL" => Self::U8,
            _ => return None,
        })
    }

    fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    fn values(self, bytes: &[u8]) -> Box<dyn Iterator<Item = f64> + '_> {
        match self {
            Self::F64 => Box::new(words(bytes).map(f64::from_le_bytes)),
            Self::F32 => Box::new(words(bytes).map(|word| f64::from(f32::from_le_bytes(word)))),
            Self::Bf16 => Box::new(words(bytes).map(|word| bf16::from_le_bytes(word).to_f64())),
            Self::F16 => Box::new(words(bytes).map(|word| f16::from_le_bytes(word).to_f64())),
            Self::I64 => Box::new(words(bytes).map(|word| i64::from_le_bytes(word) as f64)),
            Self::I32 => Box::new(words(bytes).map(|word| f64::from(i32::from_le_bytes(word)))),
            Self::U8 => Box::new(bytes.iter().map(|byte| f64::from(*byte))),
        }
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoints::CheckpointStore;
    use crate::layout::{CheckpointName, Section, ShardName};
    use crate::manifest::{Manifest, tests::example};
    use crate::shard::{ShardWriter, TensorView};
    use crate::{Error, Unfenced};

    /// More than two chunks.
    const BIG: u64 = 2 * CHUNK as u64 + 3;

    /// Commits one shard of these tensors at `step`.
    async fn commit(store: &CheckpointStore, step: u64, tensors: &[TensorView<'_>]) {
        let path = ShardName { section: Section::Model, rank: 0, world_size: 1, generation: 2 };
        let writer = ShardWriter::new(store.root(), CheckpointName { epoch: 0, step });
        let file = writer.write_safetensors(&path.to_string(), tensors, &[]).unwrap();
        store.commit(&Unfenced, Manifest { files: vec![file], ..example(step, None) }, "seed: 1\n").await.unwrap();
    }

    fn view<'a>(name: &'a str, dtype: &'a str, shape: &'a [u64], bytes: &'a [u8]) -> TensorView<'a> {
        TensorView { name, dtype, shape, bytes, slice: None }
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn compare(store: &CheckpointStore, a: u64, b: u64) -> Result<Diff> {
        let [a, b] = [a, b].map(|step| store.reader(CheckpointName { epoch: 0, step }, None));
        let mut last = (0, 0);
        let (a, b) = (a?, b?);
        let found = diff(&a, &b, &|_| true, &mut |done, total| last = (done, total))?;
        assert_eq!(last.0, last.1);
        for batch_bytes in [1 << 18, 1 << 20] {
            assert_eq!(diff_by(&a, &b, &|_| true, batch_bytes, &mut |_, _| {})?.without_rms(), found.without_rms());
        }
        Ok(found)
    }

    impl Diff {
        /// Sums in another order differ in their last bits.
        fn without_rms(&self) -> Self {
            let rounded =
                |tensor: &TensorDiff| TensorDiff { rms: tensor.rms.max(1e-300).log2().round(), ..tensor.clone() };
            Self { tensors: self.tensors.iter().map(rounded).collect(), ..self.clone() }
        }
    }

    #[tokio::test]
    async fn values_are_compared_in_fp64_and_names_and_shapes_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(dir.path());
        let nan = f32::NAN;
        let (a, b) = (f32s(&[1.0, 2.0, nan, nan]), f32s(&[1.0, 2.5, nan, 3.0]));
        // bf16 of 1, 2, 3, 4, in which fp32's 2 + 2^-10 does not fit.
        let narrow: Vec<u8> = [0x3f80_u16, 0x4000, 0x4040, 0x4080].iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let wide = f32s(&[1.0, 2.0 + 1.0 / 1024.0, 3.0, 4.0]);
        let big: Vec<u8> = f32s(&(0..BIG).map(|i| i as f32).collect::<Vec<_>>());
        let mut changed = big.clone();
        let last = changed.len() - 4;
        changed[last..].copy_from_slice(&((BIG - 1) as f32 - 8.0).to_le_bytes());
        let shape = [BIG];
        let first = [
            view("bits", "F32", &[4], &a),
            view("types", "BF16", &[4], &narrow),
            view("shape", "F32", &[4], &a),
            view("gone", "F32", &[4], &a),
            view("big", "F32", &shape, &big),
        ];
        let second = [
            view("bits", "F32", &[4], &b),
            view("types", "F32", &[4], &wide),
            view("shape", "F32", &[2, 2], &a),
            view("new", "F32", &[4], &a),
            view("big", "F32", &shape, &changed),
        ];
        commit(&store, 3, &first).await;
        commit(&store, 4, &second).await;
        let diff = compare(&store, 3, 4).unwrap();
        assert_eq!(
            (&diff.only_first[..], &diff.only_second[..]),
            (&["model/gone".into()][..], &["model/new".into()][..])
        );
        let misshapen = Misshapen { name: "model/shape".into(), shapes: [vec![4], vec![2, 2]] };
        assert_eq!(diff.misshapen, [misshapen]);
        let summary = |t: &TensorDiff| (t.name.clone(), t.max, t.rms, t.unequal, t.nonfinite);
        let count = (BIG) as f64;
        let expected = [
            ("model/big".to_owned(), 8.0, (64.0 / count).sqrt(), 1, 0),
            ("model/bits".to_owned(), 0.5, 0.25, 2, 1),
            ("model/types".to_owned(), 1.0 / 1024.0, 0.5 / 1024.0, 1, 0),
        ];
        assert_eq!(diff.tensors.iter().map(summary).collect::<Vec<_>>(), expected);
        assert!(!diff.is_within(1e9));
        let same = compare(&store, 3, 3).unwrap();
        assert!(same.is_within(0.0), "equal NaNs are equal");
        assert!(same.tensors.iter().all(|tensor| tensor.max == 0.0 && tensor.unequal == 0));
    }

    #[tokio::test]
    async fn the_tolerance_is_the_largest_difference_that_passes() {
        let dir = tempfile::tempdir().unwrap();
        let store = CheckpointStore::open(dir.path());
        commit(&store, 3, &[view("w", "F32", &[2], &f32s(&[0.0, 1.0]))]).await;
        commit(&store, 4, &[view("w", "F32", &[2], &f32s(&[0.0, 1.25]))]).await;
        let diff = compare(&store, 3, 4).unwrap();
        assert!(diff.is_within(0.25) && !diff.is_within(0.249));
        let shard = ShardName { section: Section::Model, rank: 0, world_size: 1, generation: 2 }.to_string();
        let path = dir.path().join("epoch_0_step_4").join(shard);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(compare(&store, 3, 4), Err(Error::Damaged { .. })), "a damaged byte is no difference");
    }
}
