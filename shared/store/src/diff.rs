//! Two checkpoints, tensor by tensor: how far apart are their values?
//!
//! Values are compared in fp64, whatever their types; memory does not grow with the tensors. Several threads take groups
//! of tensors that lie one behind the other, each with readers of its own.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use half::{bf16, f16};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::shard::{ShardReader, TensorInfo};
use crate::state_hash::elements;

/// Elements that are compared at a time.
const CHUNK: u64 = 1 << 20;
/// Bytes of the tensors that a thread takes at once: what shares a block is read together.
const GROUP_BYTES: u64 = 64 << 20;

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

/// Opens a reader of a checkpoint; called once by each thread.
pub type Open<'a> = &'a (dyn Fn() -> Result<ShardReader> + Sync);

/// Compares the tensors for which `wanted` holds. Blocks. `progress` gets bytes of the first checkpoint, done and in all.
///
/// # Errors
/// Those of reading; [`Error::Tensor`] for a type that is no number.
pub fn diff(
    first: Open<'_>,
    second: Open<'_>,
    wanted: &(dyn Fn(&str) -> bool + Sync),
    threads: NonZeroUsize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Diff> {
    let (a, b) = (first()?, second()?);
    let mut diff = Diff::default();
    let other: BTreeMap<&str, &TensorInfo> = b.tensors().filter(|(name, _)| wanted(name)).collect();
    let mut shared: BTreeMap<String, (TensorInfo, TensorInfo)> = BTreeMap::new();
    for (name, info) in a.tensors().filter(|(name, _)| wanted(name)) {
        match other.get(name) {
            None => diff.only_first.push(name.to_owned()),
            Some(found) if found.shape != info.shape => diff
                .misshapen
                .push(Misshapen { name: name.to_owned(), shapes: [info.shape.clone(), found.shape.clone()] }),
            Some(found) => drop(shared.insert(name.to_owned(), (info.clone(), (*found).clone()))),
        }
    }
    diff.only_second = other.keys().filter(|name| a.info(name).is_none()).map(|name| (*name).to_owned()).collect();
    let order: Vec<String> = a.in_file_order().into_iter().filter(|name| shared.contains_key(name)).collect();
    let groups = group(&order, &shared);
    drop((a, b));

    let work = Work {
        shared: &shared,
        groups: &groups,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        found: Mutex::default(),
        done: Mutex::new(0),
        total: shared.values().map(|(info, _)| info.bytes()).sum(),
        progress,
    };
    let threads = threads.get().min(groups.len()).max(1);
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(|| work.run(first, second))).collect();
        let ended = |handle: thread::ScopedJoinHandle<'_, Result<()>>| {
            handle.join().unwrap_or_else(|_| Err(Error::Stopped("a comparing thread panicked".to_owned())))
        };
        handles.into_iter().map(ended).collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    diff.tensors = work.found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    diff.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(diff)
}

/// Successive tensors of about [`GROUP_BYTES`] together.
fn group<'a>(order: &'a [String], infos: &BTreeMap<String, (TensorInfo, TensorInfo)>) -> Vec<&'a [String]> {
    let (mut groups, mut start, mut bytes) = (Vec::new(), 0, 0);
    for (index, name) in order.iter().enumerate() {
        bytes += infos.get(name).map_or(0, |(info, _)| info.bytes());
        if bytes >= GROUP_BYTES {
            groups.push(&order[start..=index]);
            (start, bytes) = (index + 1, 0);
        }
    }
    groups.extend((start < order.len()).then(|| &order[start..]));
    groups
}

struct Work<'a> {
    shared: &'a BTreeMap<String, (TensorInfo, TensorInfo)>,
    groups: &'a [&'a [String]],
    next: AtomicUsize,
    failed: AtomicBool,
    found: Mutex<Vec<TensorDiff>>,
    done: Mutex<u64>,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl Work<'_> {
    fn run(&self, first: Open<'_>, second: Open<'_>) -> Result<()> {
        let work = || -> Result<()> {
            let (mut a, mut b) = (first()?, second()?);
            while let Some(group) = self.groups.get(self.next.fetch_add(1, Ordering::Relaxed)) {
                for name in *group {
                    if self.failed.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                    let Some(infos) = self.shared.get(name) else { continue };
                    let tensor = self.compare(&mut a, &mut b, name, infos)?;
                    self.found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(tensor);
                }
            }
            Ok(())
        };
        let result = work();
        self.failed.fetch_or(result.is_err(), Ordering::Relaxed);
        result
    }

    fn compare(
        &self,
        a: &mut ShardReader,
        b: &mut ShardReader,
        name: &str,
        (first, second): &(TensorInfo, TensorInfo),
    ) -> Result<TensorDiff> {
        let number = |info: &TensorInfo| {
            let reason = || format!("has type {}, which is not compared", info.dtype);
            Number::new(&info.dtype).ok_or_else(|| Error::Tensor { name: name.to_owned(), reason: reason() })
        };
        let (number_a, number_b) = (number(first)?, number(second)?);
        let count = elements(&first.shape);
        let (mut bytes_a, mut bytes_b) = (Vec::new(), Vec::new());
        let mut sums = Sums::default();
        for start in (0..count).step_by(CHUNK as usize) {
            let size = (count - start).min(CHUNK);
            for (reader, number, bytes) in [(&mut *a, number_a, &mut bytes_a), (&mut *b, number_b, &mut bytes_b)] {
                let width = number.size() as u64;
                bytes.resize((size * width) as usize, 0);
                reader.read_tensor_range(name, start * width, bytes)?;
            }
            // Equal bits are equal values, NaN too.
            if number_a != number_b || bytes_a != bytes_b {
                sums.add(number_a.values(&bytes_a), number_b.values(&bytes_b));
            }
            let mut done = self.done.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *done += size * number_a.size() as u64;
            (self.progress)(*done, self.total);
        }
        Ok(TensorDiff {
            name: name.to_owned(),
            shape: first.shape.clone(),
            dtypes: [first.dtype.clone(), second.dtype.clone()],
            max: sums.max,
            rms: if count == 0 { 0.0 } else { (sums.squares / count as f64).sqrt() },
            unequal: sums.unequal,
            nonfinite: sums.nonfinite,
        })
    }
}

#[derive(Default)]
struct Sums {
    max: f64,
    squares: f64,
    unequal: u64,
    nonfinite: u64,
}

impl Sums {
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
        let open = |step| move || ShardReader::open(store.root(), CheckpointName { epoch: 0, step }, None);
        diff(&open(a), &open(b), &|_| true, NonZeroUsize::new(2).unwrap(), &|done, total| assert!(done <= total))
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
        let big: Vec<u8> = f32s(&(0..CHUNK + 3).map(|i| i as f32).collect::<Vec<_>>());
        let mut changed = big.clone();
        let last = changed.len() - 4;
        changed[last..].copy_from_slice(&((CHUNK + 2) as f32 - 8.0).to_le_bytes());
        let shape = [CHUNK + 3];
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
        let count = (CHUNK + 3) as f64;
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
