//! What the training loop reads: one corpus or a blend, by sample id.
//!
//! A blend is Megatron's, bit for bit, when nothing was read of its corpora before (D1). A later phase of a run starts a blend at its own
//! sample 0, but each corpus goes on behind the samples that were used of it: every part has a first sample, and its index is built
//! for what was used and what is wanted together. Megatron's order within a corpus depends on the number of passes ([`passes`]), so
//! it is the same order as before as long as that number is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use trainctl_spec::job::Dataset;

use crate::blend::{self, BlendIndex};
use crate::cache::{Cache, Source};
use crate::describe::{Json, md5_hex};
use crate::error::{Error, Result};
use crate::gpt::{GptDataset, GptOptions};
use crate::index::Epochs;
use crate::indexed::strip;
use crate::npy::Ints;
use crate::split::Split;

const ARRAYS: &[(&str, usize)] = &[("dataset_index", 1), ("dataset_sample_index", 1)];

/// Samples of each corpus, by [`corpus_key`].
pub type CorpusCounts = BTreeMap<String, u64>;

/// The name of a corpus in [`CorpusCounts`]: its prefix.
#[must_use]
pub fn corpus_key(prefix: &Path) -> String {
    strip(prefix).to_string_lossy().into_owned()
}

/// Samples 0 … [`len`](Self::len) of a split. `Sync`: threads may read at once.
#[derive(Debug)]
pub struct Samples(Kind);

#[derive(Debug)]
enum Kind {
    One(Box<Part>),
    Blend { parts: Vec<Part>, index: BlendIndex, len: u64 },
}

/// A corpus from its sample `first` on.
#[derive(Debug)]
struct Part {
    dataset: GptDataset,
    first: u64,
}

impl Part {
    fn len(&self) -> u64 {
        self.dataset.len().saturating_sub(self.first)
    }

    fn tokens(&self, id: u64, out: &mut Vec<i64>) -> Result<()> {
        self.dataset.tokens(self.first.saturating_add(id), out)
    }

    fn prefix(&self) -> &Path {
        self.dataset.reader().prefix()
    }
}

/// Opens one split of a resolved `dataset` section.
///
/// `num_samples` is what the run will read (`max_steps · global_batch_size` for training); `None` = one epoch. One
/// corpus and a weighted blend repeat their data over as many epochs as that takes. An unweighted blend has every part exactly once, in proportion
/// to size; so a **training** request beyond it is an error (Megatron would end early), and other splits are cut to it.
///
/// # Errors
/// Missing or damaged files, a bad split, weights that do not blend, or too little data.
pub fn open_split(dataset: &Dataset, split: Split, num_samples: Option<u64>) -> Result<Samples> {
    open_split_after(dataset, split, num_samples, &CorpusCounts::new())
}

/// The same behind the samples that were used of each corpus before; corpora that the section does not name do not count. An unweighted
/// blend then has the rest of every part exactly once.
///
/// # Errors
/// As [`open_split`], and an unweighted blend of which a part is used up.
pub fn open_split_after(
    dataset: &Dataset,
    split: Split,
    num_samples: Option<u64>,
    used: &CorpusCounts,
) -> Result<Samples> {
    let plan = Plan::new(dataset, split, num_samples, used)?;
    let parts = plan.parts.iter().map(PartPlan::open).collect::<Result<Vec<_>>>()?;
    match plan.mix {
        Mix::One => {
            let [part] = <[Part; 1]>::try_from(parts)
                .map_err(|parts| Error::Blend(format!("{} parts where one belongs", parts.len())))?;
            Ok(Samples(Kind::One(Box::new(part))))
        }
        Mix::Unweighted => unweighted(dataset, split, parts, num_samples),
        Mix::Weighted { weights, size } => blended(dataset, split, parts, &weights, Some(size)),
    }
}

/// How often each corpus is gone through for such a request, and which passes are shuffled together. Reads lengths only and builds
/// nothing: two requests with equal passes have the same samples in the same order, as far as both go.
///
/// # Errors
/// As [`open_split_after`], too little data aside.
pub fn passes(
    dataset: &Dataset,
    split: Split,
    num_samples: Option<u64>,
    used: &CorpusCounts,
) -> Result<BTreeMap<String, Epochs>> {
    let plan = Plan::new(dataset, split, num_samples, used)?;
    let mut passes = BTreeMap::new();
    for part in &plan.parts {
        if let Some(epochs) = GptDataset::epochs(&part.options)? {
            passes.insert(corpus_key(&part.options.prefix), epochs);
        }
    }
    Ok(passes)
}

/// What is opened, and how it is mixed.
struct Plan {
    parts: Vec<PartPlan>,
    mix: Mix,
}

struct PartPlan {
    options: GptOptions,
    first: u64,
}

enum Mix {
    One,
    /// Weights follow from what the parts have.
    Unweighted,
    Weighted {
        weights: Vec<f64>,
        size: u64,
    },
}

impl PartPlan {
    fn open(&self) -> Result<Part> {
        Ok(Part { dataset: GptDataset::open(&self.options)?, first: self.first })
    }
}

impl Plan {
    fn new(dataset: &Dataset, split: Split, num_samples: Option<u64>, used: &CorpusCounts) -> Result<Self> {
        let part = |prefix: &PathBuf, num_samples: Option<u64>| {
            let first = used.get(&corpus_key(prefix)).copied().unwrap_or(0);
            let options = GptOptions {
                prefix: prefix.clone(),
                split,
                split_shares: dataset.split.clone(),
                num_samples: num_samples.map(|wanted| wanted.saturating_add(first)),
                seq_length: dataset.seq_length,
                seed: dataset.seed,
                tokenizer: dataset.tokenizer.as_ref().map(|path| path.to_string_lossy().into_owned()),
                index_mapping_dir: dataset.index_mapping_dir.clone(),
            };
            PartPlan { options, first }
        };
        let paths = &dataset.paths;
        if paths.is_empty() {
            return Err(Error::Blend("the list of paths is empty".to_owned()));
        }
        if let [only] = paths.as_slice() {
            return Ok(Self { parts: vec![part(&only.prefix, num_samples)], mix: Mix::One });
        }
        let weights: Vec<Option<f64>> = paths.iter().map(|path| path.weight).collect();
        if let Some(why) = blend::objection(&weights) {
            return Err(Error::Blend(why));
        }
        let weights: Vec<f64> = weights.into_iter().flatten().collect();
        if weights.is_empty() {
            let parts = paths.iter().map(|path| part(&path.prefix, None)).collect();
            return Ok(Self { parts, mix: Mix::Unweighted });
        }
        let Some(wanted) = num_samples else {
            return Err(Error::Blend("a weighted blend has no natural size; say how many samples to read".to_owned()));
        };
        let normal = blend::normalize(&weights);
        let targets = blend::targets(&normal, wanted);
        let parts =
            paths.iter().zip(&targets).map(|(path, target)| part(&path.prefix, Some(blend::with_surplus(*target))));
        // Megatron normalises a second time, which can change the last bit.
        let mix = Mix::Weighted { weights: blend::normalize(&normal), size: targets.iter().sum() };
        Ok(Self { parts: parts.collect(), mix })
    }
}

fn unweighted(dataset: &Dataset, split: Split, parts: Vec<Part>, num_samples: Option<u64>) -> Result<Samples> {
    if let Some(part) = parts.iter().find(|part| part.len() == 0) {
        return Err(Error::Blend(format!(
            "a blend without weights has each sample once, and {} samples of {} were used before, which has {}; leave it out, or give every path a weight (then data repeats)",
            part.first,
            part.prefix().display(),
            part.dataset.len()
        )));
    }
    let sizes: Vec<f64> = parts.iter().map(|part| part.len() as f64).collect();
    let total: u64 = parts.iter().map(Part::len).sum();
    match num_samples {
        None => blended(dataset, split, parts, &sizes, None),
        Some(wanted) if wanted > total && split == Split::Train => Err(Error::Blend(format!(
            "{wanted} samples are to be read, but a blend without weights has each sample once, {total} in all; give every path a weight (then data repeats), lower max_steps, or add data"
        ))),
        Some(wanted) => blended(dataset, split, parts, &blend::normalize(&sizes), Some(wanted.min(total))),
    }
}

/// `size` absent: every sample of every part once, and `weights` are their lengths.
fn blended(dataset: &Dataset, split: Split, parts: Vec<Part>, weights: &[f64], size: Option<u64>) -> Result<Samples> {
    let lengths: Vec<u64> = parts.iter().map(Part::len).collect();
    let build = || {
        let index = size.map_or_else(|| blend::exhaustive(&lengths), |size| blend::weighted(weights, size));
        vec![index.part, index.sample]
    };
    let arrays = match &dataset.index_mapping_dir {
        // As in Megatron, the blend itself is cached only where a folder is named: it belongs to no single corpus.
        None => build(),
        Some(folder) => {
            let description = identity(&parts, split, weights, size).dumps();
            let stem = format!("{}-BlendedDataset-{}", md5_hex(&description), split.megatron_name());
            let source = Source { data: Vec::new(), rules: None, part_lengths: lengths.clone() };
            Cache::new(folder.clone(), stem, ARRAYS).load_or_build(&description, &source, || Ok(build()))?
        }
    };
    let Ok([part, sample]) = <[Ints; 2]>::try_from(arrays) else {
        return Err(Error::Blend("the blend's index has not two arrays".to_owned()));
    };
    check_use(&parts, &part, &lengths)?;
    let len = part.len() as u64;
    Ok(Samples(Kind::Blend { parts, index: BlendIndex { part, sample }, len }))
}

/// No part may be asked for more than it has.
fn check_use(parts: &[Part], part: &Ints, lengths: &[u64]) -> Result<()> {
    let mut used = vec![0u64; parts.len()];
    for number in part.iter() {
        match usize::try_from(number).ok().and_then(|number| used.get_mut(number)) {
            Some(count) => *count += 1,
            None => return Err(Error::Blend(format!("the index names part {number}, but there are {}", parts.len()))),
        }
    }
    let short = used.iter().zip(lengths).zip(parts).find(|((used, len), _)| used > len);
    short.map_or(Ok(()), |((used, len), part)| {
        Err(Error::Blend(format!(
            "{} would give {used} samples but has {len}; change the weights a little",
            part.prefix().display()
        )))
    })
}

fn identity(parts: &[Part], split: Split, weights: &[f64], size: Option<u64>) -> Json {
    let number = |weight: &f64| if size.is_none() { Json::Int(*weight as u64) } else { Json::Float(*weight) };
    Json::Map(vec![
        ("class", Json::Text("BlendedDataset".into())),
        ("datasets", Json::List(parts.iter().map(|part| part.dataset.identity().clone()).collect())),
        ("split", Json::Text(split.megatron_name().into())),
        ("weights", Json::List(weights.iter().map(number).collect())),
        ("size", Json::optional(size)),
    ])
}

impl Samples {
    /// Number of samples. A weighted blend may have up to one less than its number of parts more than was asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        match &self.0 {
            Kind::One(part) => part.len(),
            Kind::Blend { len, .. } => *len,
        }
    }

    /// Whether there is no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces `out` by sample `id`: `seq_length + 1` token ids. Inputs are all but the last, labels all but the first.
    ///
    /// # Errors
    /// An id beyond the end, or an index that does not fit the data.
    pub fn tokens(&self, id: u64, out: &mut Vec<i64>) -> Result<()> {
        match &self.0 {
            Kind::One(part) => part.tokens(id, out),
            Kind::Blend { parts, index, len } => {
                let at = |array: &Ints| array.get(id as usize).and_then(|value| u64::try_from(value).ok());
                let Some((part, sample)) = at(&index.part).zip(at(&index.sample)) else {
                    out.clear();
                    return Err(Error::OutOfRange { what: "sample", path: PathBuf::from("the blend"), id, len: *len });
                };
                match parts.get(part as usize) {
                    Some(part) => part.tokens(sample, out),
                    None => Err(Error::Blend(format!("the index names part {part}, but there are {}", parts.len()))),
                }
            }
        }
    }

    /// Which part of a blend a sample comes from; 0 for a single corpus, `None` beyond the end.
    #[must_use]
    pub fn part(&self, id: u64) -> Option<usize> {
        match &self.0 {
            Kind::One(part) => (id < part.len()).then_some(0),
            Kind::Blend { index, .. } => index.part.get(id as usize).and_then(|part| usize::try_from(part).ok()),
        }
    }

    /// Samples of each corpus that are used when all below sampler position `position` are read, those before this blend included.
    #[must_use]
    pub fn used(&self, position: u64) -> CorpusCounts {
        match &self.0 {
            Kind::One(part) => CorpusCounts::from([(corpus_key(part.prefix()), part.first + position.min(part.len()))]),
            Kind::Blend { parts, index, len } => {
                let mut counts = vec![None; parts.len()];
                let mut missing = parts.len();
                // Each part's samples come in order, so the last one below the position tells how many there were.
                for id in (0..position.min(*len) as usize).rev() {
                    let part = index.part.get(id).and_then(|part| usize::try_from(part).ok());
                    let sample = index.sample.get(id).and_then(|sample| u64::try_from(sample).ok());
                    if let (Some(count @ None), Some(sample)) = (part.and_then(|part| counts.get_mut(part)), sample) {
                        *count = Some(sample + 1);
                        missing -= 1;
                    }
                    if missing == 0 {
                        break;
                    }
                }
                let mut used = CorpusCounts::new();
                for (part, count) in parts.iter().zip(counts) {
                    // A corpus that is named twice gives the same samples twice.
                    let all = used.entry(corpus_key(part.prefix())).or_insert(0);
                    *all = (*all).max(part.first + count.unwrap_or(0));
                }
                used
            }
        }
    }
}
