//! What is in a `.bin/.idx` pair, for people and for `--output json`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::indexed::{Dtype, IndexedReader};
use crate::tokenizer::Tokenizer;

/// Tokens shown of each document.
const SHOWN_TOKENS: usize = 64;

/// What [`inspect`] needs.
#[derive(Clone, Debug, Default)]
pub struct InspectOptions {
    /// Prefix of the pair.
    pub prefix: PathBuf,
    /// Decodes the first documents, and every token must lie in its vocabulary.
    pub tokenizer: Option<PathBuf>,
    /// How many documents to show.
    pub num_documents: usize,
    /// Read the whole `.bin` for the largest token. Implied by a tokenizer.
    pub scan: bool,
}

/// The summary.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspected {
    /// Prefix of the pair.
    pub prefix: PathBuf,
    /// Size of `.bin`, bytes.
    pub bin_bytes: u64,
    /// Size of `.idx`, bytes.
    pub idx_bytes: u64,
    /// Version of the format.
    pub version: u64,
    /// Type of the values.
    pub dtype: Dtype,
    /// Its code in the header.
    pub dtype_code: u8,
    /// Sequences.
    pub num_sequences: u64,
    /// Documents.
    pub num_documents: u64,
    /// Documents without a sequence.
    pub num_empty_documents: u64,
    /// Tokens.
    pub num_tokens: u64,
    /// Whether the index carries multimodal modes.
    pub has_modes: bool,
    /// Tokens per sequence.
    pub sequence_lengths: Option<Distribution>,
    /// Smallest and largest token, if the values were read.
    pub token_range: Option<(i64, i64)>,
    /// Entries of the tokenizer, if one was given.
    pub vocabulary_size: Option<usize>,
    /// The first documents.
    pub first_documents: Vec<Document>,
}

/// Some quantiles (nearest rank) of a list of lengths.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// Shortest.
    pub min: u32,
    /// Half are no longer.
    pub median: u32,
    /// Nine in ten are no longer.
    pub p90: u32,
    /// Ninety-nine in a hundred are no longer.
    pub p99: u32,
    /// Longest.
    pub max: u32,
    /// Arithmetic mean.
    pub mean: f64,
}

/// The beginning of a document.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Document {
    /// Number, from 0.
    pub document: u64,
    /// Tokens of all its sequences.
    pub num_tokens: u64,
    /// The first tokens.
    pub tokens: Vec<i64>,
    /// Their text, if a tokenizer was given.
    pub text: Option<String>,
}

/// Opens a pair, which checks every invariant of its index, and sums it up.
///
/// # Errors
/// A missing or damaged pair, a negative token, or one that the tokenizer does not have.
pub fn inspect(options: &InspectOptions) -> Result<Inspected> {
    let reader = IndexedReader::open(&options.prefix)?;
    let tokenizer = options.tokenizer.as_deref().map(Tokenizer::load).transpose()?;
    let size = |path: &Path| {
        std::fs::metadata(path).map(|metadata| metadata.len()).map_err(Error::io("read the size of", path))
    };
    let token_range = if options.scan || tokenizer.is_some() { scan(&reader, tokenizer.as_ref())? } else { None };
    let documents = 0..reader.num_documents();
    Ok(Inspected {
        prefix: reader.prefix().to_owned(),
        bin_bytes: size(reader.bin_path())?,
        idx_bytes: size(reader.idx_path())?,
        version: crate::indexed::VERSION,
        dtype: reader.dtype(),
        dtype_code: reader.dtype().code(),
        num_sequences: reader.num_sequences() as u64,
        num_documents: reader.num_documents() as u64,
        num_empty_documents: documents
            .clone()
            .filter(|number| reader.document(*number).is_some_and(|range| range.is_empty()))
            .count() as u64,
        num_tokens: reader.num_tokens(),
        has_modes: reader.has_modes(),
        sequence_lengths: Distribution::of(
            (0..reader.num_sequences()).filter_map(|sequence| reader.sequence_length(sequence)).collect(),
        ),
        token_range,
        vocabulary_size: tokenizer.as_ref().map(Tokenizer::vocabulary_size),
        first_documents: documents
            .take(options.num_documents)
            .map(|number| show(&reader, number, tokenizer.as_ref()))
            .collect::<Result<_>>()?,
    })
}

/// Smallest and largest token; an error at the first that no tokenizer or not this one can have.
fn scan(reader: &IndexedReader, tokenizer: Option<&Tokenizer>) -> Result<Option<(i64, i64)>> {
    let limit = tokenizer.map_or(i64::MAX, |tokenizer| tokenizer.vocabulary_size() as i64);
    let (mut range, mut tokens, mut before) = (None, Vec::new(), 0u64);
    for sequence in 0..reader.num_sequences() {
        tokens.clear();
        let length = reader.sequence_length(sequence).unwrap_or(0) as usize;
        reader.read_into(sequence, 0..length, &mut tokens)?;
        for (position, token) in tokens.iter().enumerate() {
            if *token < 0 || *token >= limit {
                let offset = (before + position as u64) * reader.dtype().size() as u64;
                let allowed = if limit == i64::MAX {
                    "tokens are not negative".to_owned()
                } else {
                    format!("the tokenizer has 0 to {}", limit - 1)
                };
                return Err(Error::format(
                    reader.bin_path(),
                    offset,
                    format!("token {token} of sequence {sequence}; {allowed}"),
                ));
            }
            let (low, high) = range.unwrap_or((*token, *token));
            range = Some((low.min(*token), high.max(*token)));
        }
        before += length as u64;
    }
    Ok(range)
}

fn show(reader: &IndexedReader, number: usize, tokenizer: Option<&Tokenizer>) -> Result<Document> {
    let sequences = reader.document(number).unwrap_or(0..0);
    let num_tokens = sequences.clone().filter_map(|sequence| reader.sequence_length(sequence)).map(u64::from).sum();
    let mut tokens = Vec::new();
    for sequence in sequences {
        let length = reader.sequence_length(sequence).unwrap_or(0) as usize;
        reader.read_into(sequence, 0..length.min(SHOWN_TOKENS - tokens.len()), &mut tokens)?;
        if tokens.len() == SHOWN_TOKENS {
            break;
        }
    }
    let ids: Vec<u32> = tokens.iter().filter_map(|token| u32::try_from(*token).ok()).collect();
    let text = tokenizer.map(|tokenizer| tokenizer.decode(&ids)).transpose()?;
    Ok(Document { document: number as u64, num_tokens, tokens, text })
}

impl Distribution {
    fn of(mut lengths: Vec<u32>) -> Option<Self> {
        lengths.sort_unstable();
        let (min, max) = (*lengths.first()?, *lengths.last()?);
        let count = lengths.len();
        let quantile =
            |percent: usize| lengths.get((count * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or(max);
        let mean = lengths.iter().map(|length| u64::from(*length)).sum::<u64>() as f64 / count as f64;
        Some(Self { min, median: quantile(50), p90: quantile(90), p99: quantile(99), max, mean })
    }
}
