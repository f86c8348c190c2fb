//! What the training loop reads: one corpus or a blend, by sample id.

use std::path::PathBuf;

use trainctl_spec::job::Dataset;

use crate::blend::{self, BlendIndex};
use crate::cache::{Cache, Source};
use crate::describe::{Json, md5_hex};
use crate::error::{Error, Result};
use crate::gpt::{GptDataset, GptOptions};
use crate::npy::Ints;
use crate::split::Split;

const ARRAYS: &[(&str, usize)] = &[("dataset_index", 1), ("dataset_sample_index", 1)];

/// Samples 0 … [`len`](Self::len) of a split. `Sync`: threads may read at once.
#[derive(Debug)]
pub struct Samples(Kind);

#[derive(Debug)]
enum Kind {
    One(Box<GptDataset>),
    Blend { parts: Vec<GptDataset>, index: BlendIndex, len: u64 },
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
    let part = |prefix: &PathBuf, num_samples: Option<u64>| {
        GptDataset::open(&GptOptions {
            prefix: prefix.clone(),
            split,
            split_shares: dataset.split.clone(),
            num_samples,
            seq_length: dataset.seq_length,
            seed: dataset.seed,
            tokenizer: dataset.tokenizer.as_ref().map(|path| path.to_string_lossy().into_owned()),
            index_mapping_dir: dataset.index_mapping_dir.clone(),
        })
    };
    let paths = &dataset.paths;
    if paths.is_empty() {
        return Err(Error::Blend("the list of paths is empty".to_owned()));
    }
    if let [only] = paths.as_slice() {
        return Ok(Samples(Kind::One(Box::new(part(&only.prefix, num_samples)?))));
    }
    let weights: Vec<Option<f64>> = paths.iter().map(|path| path.weight).collect();
    if let Some(why) = blend::objection(&weights) {
        return Err(Error::Blend(why));
    }
    let weights: Vec<f64> = weights.into_iter().flatten().collect();
    if weights.is_empty() {
        let parts = paths.iter().map(|path| part(&path.prefix, None)).collect::<Result<Vec<_>>>()?;
        return unweighted(dataset, split, parts, num_samples);
    }
    let Some(wanted) = num_samples else {
        return Err(Error::Blend("a weighted blend has no natural size; say how many samples to read".to_owned()));
    };
    let normal = blend::normalize(&weights);
    let targets = blend::targets(&normal, wanted);
    let parts = paths
        .iter()
        .zip(&targets)
        .map(|(path, target)| part(&path.prefix, Some(blend::with_surplus(*target))))
        .collect::<Result<Vec<_>>>()?;
    // Megatron normalises a second time, which can change the last bit.
    blended(dataset, split, parts, &blend::normalize(&normal), Some(targets.iter().sum()))
}

fn unweighted(dataset: &Dataset, split: Split, parts: Vec<GptDataset>, num_samples: Option<u64>) -> Result<Samples> {
    let sizes: Vec<f64> = parts.iter().map(|part| part.len() as f64).collect();
    let total: u64 = parts.iter().map(GptDataset::len).sum();
    match num_samples {
        None => blended(dataset, split, parts, &sizes, None),
        Some(wanted) if wanted > total && split == Split::Train => Err(Error::Blend(format!(
            "the run reads {wanted} samples, but a blend without weights has each sample once, {total} in all; give every path a weight (then data repeats), lower max_steps, or add data"
        ))),
        Some(wanted) => blended(dataset, split, parts, &blend::normalize(&sizes), Some(wanted.min(total))),
    }
}

/// `size` absent: every sample of every part once, and `weights` are their lengths.
fn blended(
    dataset: &Dataset,
    split: Split,
    parts: Vec<GptDataset>,
    weights: &[f64],
    size: Option<u64>,
) -> Result<Samples> {
    let lengths: Vec<u64> = parts.iter().map(GptDataset::len).collect();
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
fn check_use(parts: &[GptDataset], part: &Ints, lengths: &[u64]) -> Result<()> {
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
            part.reader().prefix().display()
        )))
    })
}

fn identity(parts: &[GptDataset], split: Split, weights: &[f64], size: Option<u64>) -> Json {
    let number = |weight: &f64| if size.is_none() { Json::Int(*weight as u64) } else { Json::Float(*weight) };
    Json::Map(vec![
        ("class", Json::Text("BlendedDataset".into())),
        ("datasets", Json::List(parts.iter().map(|part| part.identity().clone()).collect())),
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
            Kind::One(dataset) => dataset.len(),
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
            Kind::One(dataset) => dataset.tokens(id, out),
            Kind::Blend { parts, index, len } => {
                let at = |array: &Ints| array.get(id as usize).and_then(|value| u64::try_from(value).ok());
                let Some((part, sample)) = at(&index.part).zip(at(&index.sample)) else {
                    out.clear();
                    return Err(Error::OutOfRange { what: "sample", path: PathBuf::from("the blend"), id, len: *len });
                };
                match parts.get(part as usize) {
                    Some(dataset) => dataset.tokens(sample, out),
                    None => Err(Error::Blend(format!("the index names part {part}, but there are {}", parts.len()))),
                }
            }
        }
    }

    /// Which part of a blend a sample comes from; 0 for a single corpus, `None` beyond the end.
    #[must_use]
    pub fn part(&self, id: u64) -> Option<usize> {
        match &self.0 {
            Kind::One(dataset) => (id < dataset.len()).then_some(0),
            Kind::Blend { index, .. } => index.part.get(id as usize).and_then(|part| usize::try_from(part).ok()),
        }
    }
}
