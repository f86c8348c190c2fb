//! One corpus as fixed-length training samples: Megatron's GPTDataset (D1).

use std::path::{Path, PathBuf};

use crate::cache::{Cache, Mark, Source};
use crate::describe::{Json, md5_hex};
use crate::error::{Error, Result};
use crate::index::{Epochs, Recipe, Rules};
use crate::indexed::IndexedReader;
use crate::npy::Ints;
use crate::split::{Split, SplitMatrix};

const ARRAYS: &[(&str, usize)] = &[("document_index", 1), ("sample_index", 2), ("shuffle_index", 1)];

/// What a [`GptDataset`] is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct GptOptions {
    /// Prefix of the `.bin/.idx` pair.
    pub prefix: PathBuf,
    /// Which share of the split string.
    pub split: Split,
    /// The split string, for example "99,1,0".
    pub split_shares: String,
    /// Samples asked for, over as many epochs as that takes; `None` = one epoch.
    pub num_samples: Option<u64>,
    /// Tokens of a sample, labels' extra token not counted.
    pub seq_length: u32,
    /// Seed of the shuffles.
    pub seed: u32,
    /// Name or path of the tokenizer, which is part of the cache's name.
    pub tokenizer: Option<String>,
    /// Where the index cache goes; default `<prefix>/cache/GPTDataset_indices`, as Megatron has it.
    pub index_mapping_dir: Option<PathBuf>,
}

/// A corpus cut into shuffled samples of `seq_length + 1` tokens.
#[derive(Debug)]
pub struct GptDataset {
    reader: IndexedReader,
    index_path: PathBuf,
    document: Ints,
    sample: Ints,
    shuffle: Ints,
    len: u64,
    sample_tokens: usize,
    identity: Json,
}

impl GptDataset {
    /// Opens the corpus and loads or builds its indices.
    ///
    /// # Errors
    /// A damaged or missing pair, a bad split string, or a split that gives no sample.
    pub fn open(options: &GptOptions) -> Result<Self> {
        let reader = IndexedReader::open(&options.prefix)?;
        let matrix = SplitMatrix::parse(&options.split_shares)?;
        let identity = identity(options, &matrix);
        let recipe = recipe(options, &matrix, &reader);
        let description = identity.dumps();
        let folder = options
            .index_mapping_dir
            .clone()
            .unwrap_or_else(|| reader.prefix().join("cache").join("GPTDataset_indices"));
        let stem = format!("{}-GPTDataset-{}", md5_hex(&description), options.split.megatron_name());
        let cache = Cache::new(folder, stem, ARRAYS);
        let marks = vec![Mark::of_data(reader.bin_path())?, Mark::of_data(reader.idx_path())?];
        let source = Source { data: marks, rules: Some(recipe.rules), part_lengths: Vec::new() };
        let arrays = cache.load_or_build(&description, &source, || build(&reader, options, &recipe))?;
        let Ok([document, sample, shuffle]) = <[Ints; 3]>::try_from(arrays) else {
            return Err(Error::format(&cache.path("*"), 0, "three arrays expected"));
        };
        // A request is an upper bound, as NeMo AutoModel has it; Megatron-core returns the whole last epoch.
        let len = options.num_samples.unwrap_or(u64::MAX).min(shuffle.len() as u64);
        let sample_tokens = options.seq_length as usize + 1;
        Ok(Self {
            reader,
            index_path: cache.path("sample_index.npy"),
            document,
            sample,
            shuffle,
            len,
            sample_tokens,
            identity,
        })
    }

    /// The passes over the corpus that the request takes, without building anything; `None` when the split holds no token.
    ///
    /// # Errors
    /// A damaged or missing pair, or a bad split string.
    pub fn epochs(options: &GptOptions) -> Result<Option<Epochs>> {
        let reader = IndexedReader::open(&options.prefix)?;
        let recipe = recipe(options, &SplitMatrix::parse(&options.split_shares)?, &reader);
        Ok(recipe.epochs(|sequence| reader.sequence_length(sequence).unwrap_or(0)))
    }

    /// Number of samples: the request, or one epoch's.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true for an opened data set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The corpus.
    #[must_use]
    pub fn reader(&self) -> &IndexedReader {
        &self.reader
    }

    pub(crate) fn identity(&self) -> &Json {
        &self.identity
    }

    /// Replaces `out` by sample `id`: `seq_length + 1` token ids. Inputs are all but the last, labels all but the first.
    ///
    /// # Errors
    /// An id beyond the end, or an index that does not fit the corpus.
    pub fn tokens(&self, id: u64, out: &mut Vec<i64>) -> Result<()> {
        out.clear();
        if id >= self.len {
            return Err(Error::OutOfRange { what: "sample", path: self.reader.prefix().to_owned(), id, len: self.len });
        }
        let row = self.at(&self.shuffle, id as usize)?;
        let (first, from) = (self.at(&self.sample, 2 * row)?, self.at(&self.sample, 2 * row + 1)?);
        let (last, to) = (self.at(&self.sample, 2 * row + 2)?, self.at(&self.sample, 2 * row + 3)? + 1);
        for position in first..=last {
            let sequence = self.at(&self.document, position)?;
            let length = self.reader.sequence_length(sequence).unwrap_or(0) as usize;
            let begin = if position == first { from } else { 0 };
            let end = if position == last { to } else { length };
            self.reader.read_into(sequence, begin..end, out)?;
        }
        if out.len() != self.sample_tokens {
            let what =
                format!("sample {id} has {} tokens, not {}; delete the index cache", out.len(), self.sample_tokens);
            return Err(Error::format(&self.index_path, 0, what));
        }
        Ok(())
    }

    fn at(&self, array: &Ints, index: usize) -> Result<usize> {
        array.get(index).and_then(|value| usize::try_from(value).ok()).ok_or_else(|| {
            Error::format(&self.index_path, 0, format!("no usable value at {index}; delete the index cache"))
        })
    }
}

fn recipe(options: &GptOptions, matrix: &SplitMatrix, reader: &IndexedReader) -> Recipe {
    Recipe {
        sequences: matrix.range(options.split, reader.num_sequences()),
        num_samples: options.num_samples,
        seq_length: options.seq_length,
        seed: options.seed,
        rules: Rules::default(),
    }
}

fn build(reader: &IndexedReader, options: &GptOptions, recipe: &Recipe) -> Result<Vec<Ints>> {
    let length = |sequence: usize| reader.sequence_length(sequence).unwrap_or(0);
    let none = |why: String| Error::NoSamples { prefix: reader.prefix().to_owned(), split: options.split.name(), why };
    let shares = &options.split_shares;
    let range = &recipe.sequences;
    let Some(epochs) = recipe.epochs(length) else {
        let why = format!(
            "of {} sequences the split \"{shares}\" takes {} ({range:?}), which hold no token; give it a larger share or more documents",
            reader.num_sequences(),
            range.len()
        );
        return Err(none(why));
    };
    if epochs.num_samples(recipe.seq_length, recipe.rules) == 0 {
        let why = format!(
            "its {} tokens (sequences {range:?} of {}, split \"{shares}\") are fewer than one sample of {} + 1 tokens; shorten seq_length, give the split a larger share, or add documents",
            epochs.tokens_per_epoch,
            reader.num_sequences(),
            recipe.seq_length
        );
        return Err(none(why));
    }
    let indices = recipe.build(&epochs, length).map_err(none)?;
    Ok(vec![indices.document, indices.sample, indices.shuffle])
}

/// NeMo AutoModel's description: megatron-core's with the tokenizer's name after the split instead of its object at the end.
fn identity(options: &GptOptions, matrix: &SplitMatrix) -> Json {
    let shares = matrix.shares().iter().enumerate().map(|(index, share)| match share {
        None => Json::Null,
        // The running sum begins at the integer 0, so only the first bound prints without a fraction.
        Some((low, high)) => {
            Json::List(vec![if index == 0 { Json::Int(0) } else { Json::Float(*low) }, Json::Float(*high)])
        }
    });
    Json::Map(vec![
        ("class", Json::Text("GPTDataset".into())),
        ("dataset_path", Json::Text(path_text(&crate::indexed::strip(&options.prefix)))),
        ("num_samples", Json::optional(options.num_samples)),
        ("index_split", Json::Text(options.split.megatron_name().into())),
        ("tokenizer", options.tokenizer.clone().map_or(Json::Null, Json::Text)),
        ("random_seed", Json::Int(options.seed.into())),
        ("sequence_length", Json::Int(options.seq_length.into())),
        ("split", Json::Text(options.split_shares.clone())),
        ("split_matrix", Json::List(shares.collect())),
    ])
}

fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text and md5 that NeMo AutoModel makes of the same request.
    #[test]
    fn d1_description_equals_automodels() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../tests/fixtures/megatron_index.json")).unwrap();
        let golden = &golden["automodel_desc"];
        let options = GptOptions {
            prefix: "/data/a_0_text_document".into(),
            split: Split::Train,
            split_shares: "99,1,0".into(),
            num_samples: Some(11),
            seq_length: 4,
            seed: 1234,
            tokenizer: Some("openai-community/gpt2".into()),
            index_mapping_dir: None,
        };
        let text = identity(&options, &SplitMatrix::parse("99,1,0").unwrap()).dumps();
        assert_eq!(text, golden["text"]);
        assert_eq!(md5_hex(&text), golden["md5"]);
    }
}
