//! `trainctl data`

use std::io::ErrorKind;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use trainctl_dataset::corpus::{CorpusOptions, corpus};
use trainctl_dataset::inspect::{InspectOptions, Inspected, inspect};
use trainctl_dataset::preprocess::{PreprocessOptions, preprocess};
use trainctl_dataset::tokenizer::{TrainOptions, train};
use trainctl_dataset::{Counts, Progress};

use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json as print_json, line, people, size};

/// Make and look at training data
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainctl data preprocess text.jsonl --tokenizer tokenizer --output-prefix data/text"
)]
pub(super) struct Data {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Train a tokenizer
    #[command(
        after_help = "Example:\n  trainctl data tokenizer train text.jsonl --output-path tokenizer --vocab-size 4096"
    )]
    Tokenizer(Tokenizer),
    /// Tokenize a JSONL file into a Megatron .bin/.idx pair
    #[command(
        after_help = "Example:\n  trainctl data preprocess text.jsonl --tokenizer tokenizer --output-prefix data/text --append-eod"
    )]
    Preprocess(Preprocess),
    /// Show what is in a .bin/.idx pair
    #[command(
        after_help = "Example:\n  trainctl data inspect data/text_text_document --tokenizer tokenizer --documents 2"
    )]
    Inspect(Inspect),
    /// Write the source text of a Rust project's dependencies as JSONL: a real corpus for trying things out
    #[command(
        after_help = "Example:\n  trainctl data corpus --manifest Cargo.toml --output-path text.jsonl --max-bytes 40000000"
    )]
    Corpus(Corpus),
}

#[derive(Debug, Args)]
struct Tokenizer {
    #[command(subcommand)]
    verb: TokenizerVerb,
}

#[derive(Debug, Subcommand)]
enum TokenizerVerb {
    /// Train a byte-level BPE and write tokenizer.json
    #[command(
        after_help = "Example:\n  trainctl data tokenizer train text.jsonl --output-path tokenizer --vocab-size 4096"
    )]
    Train(Train),
}

#[derive(Debug, Args)]
struct Train {
    /// JSONL file
    input: PathBuf,
    /// Directory for tokenizer.json
    #[arg(long, value_name = "DIR")]
    output_path: PathBuf,
    /// Entries, the 256 bytes and <|endoftext|> included
    #[arg(long, value_name = "N", default_value_t = 4096)]
    vocab_size: usize,
    /// Key of the text in each record
    #[arg(long, value_name = "KEY", default_value = "text")]
    json_key: String,
    /// Use about this much of the file, evenly spread; 0 = all [default: 10 MB]
    #[arg(long, value_name = "BYTES")]
    sample_bytes: Option<u64>,
    /// Replace a tokenizer that is there
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct Preprocess {
    /// JSONL file
    input: PathBuf,
    /// tokenizer.json or its directory
    #[arg(long, value_name = "PATH")]
    tokenizer: PathBuf,
    /// The pair is PREFIX_KEY_document.bin/.idx
    #[arg(long, value_name = "PREFIX")]
    output_prefix: PathBuf,
    /// Key of the text in each record
    #[arg(long, value_name = "KEY", default_value = "text")]
    json_key: String,
    /// End each document with the tokenizer's end-of-document token
    #[arg(long)]
    append_eod: bool,
    /// Replace a pair that is there
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct Inspect {
    /// Path of the pair without .bin/.idx
    prefix: PathBuf,
    /// Decode the first documents, and check that every token is in this vocabulary
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// Documents to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    documents: usize,
    /// Read every token for the largest one
    #[arg(long)]
    scan: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct Corpus {
    /// Cargo.toml beside the Cargo.lock
    #[arg(long, value_name = "PATH", default_value = "Cargo.toml")]
    manifest: PathBuf,
    /// JSONL file to write
    #[arg(long, value_name = "FILE")]
    output_path: PathBuf,
    /// Largest size of that file [default: 40 MB]
    #[arg(long, value_name = "BYTES")]
    max_bytes: Option<u64>,
    /// Replace a file that is there
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl Data {
    pub(super) fn run(self) -> Outcome {
        match self.verb {
            Verb::Tokenizer(Tokenizer { verb: TokenizerVerb::Train(verb) }) => verb.run(),
            Verb::Preprocess(verb) => verb.run(),
            Verb::Inspect(verb) => verb.run(),
            Verb::Corpus(verb) => verb.run(),
        }
    }
}

/// A file that is not there or not what it should be is the person's affair, a disk that fails is not.
fn failure(error: trainctl_dataset::Error) -> Failure {
    match &error {
        trainctl_dataset::Error::Io { source, .. }
            if !matches!(source.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory | ErrorKind::AlreadyExists) =>
        {
            Failure::internal(error.to_string())
        }
        _ => Failure::usage(error.to_string()),
    }
}

impl Train {
    fn run(self) -> Outcome {
        let defaults = TrainOptions::new(self.input, self.output_path);
        let options = TrainOptions {
            json_key: self.json_key,
            vocabulary_size: self.vocab_size,
            sample_bytes: self.sample_bytes.unwrap_or(defaults.sample_bytes),
            replace: self.replace,
            ..defaults
        };
        let trained = train(&options, &mut Bar::new("training")).map_err(failure)?;
        if self.output.is_json() {
            print_json(
                &json!({ "path": trained.path, "vocab_size": trained.vocabulary_size, "documents": trained.documents }),
            )?;
        } else {
            let (entries, documents) = (people(trained.vocabulary_size as u64), people(trained.documents));
            line(&format!("{}: {entries} entries from {documents} documents", trained.path.display()))?;
        }
        Ok(Exit::Ok)
    }
}

impl Preprocess {
    fn run(self) -> Outcome {
        let options = PreprocessOptions {
            json_key: self.json_key,
            append_eod: self.append_eod,
            replace: self.replace,
            ..PreprocessOptions::new(self.input, self.tokenizer, self.output_prefix)
        };
        let made = preprocess(&options, &mut Bar::new("tokenizing")).map_err(failure)?;
        if self.output.is_json() {
            print_json(&json!({
                "prefix": made.prefix, "documents": made.documents, "skipped": made.skipped, "sequences": made.sequences,
                "tokens": made.tokens, "vocab_size": made.vocabulary_size,
            }))?;
        } else {
            let (documents, tokens) = (people(made.documents), people(made.tokens));
            let skipped =
                if made.skipped == 0 { String::new() } else { format!(", {} records skipped", people(made.skipped)) };
            line(&format!("{}.bin/.idx: {documents} documents, {tokens} tokens{skipped}", made.prefix.display()))?;
        }
        Ok(Exit::Ok)
    }
}

impl Inspect {
    fn run(self) -> Outcome {
        let options = InspectOptions {
            prefix: self.prefix,
            tokenizer: self.tokenizer,
            num_documents: self.documents,
            scan: self.scan,
        };
        let inspected = inspect(&options).map_err(failure)?;
        if self.output.is_json() {
            print_json(&inspected)?;
        } else {
            line(&describe(&inspected))?;
        }
        Ok(Exit::Ok)
    }
}

fn describe(pair: &Inspected) -> String {
    let mut lines = vec![
        format!("{}.bin/.idx", pair.prefix.display()),
        format!("  size       {} + {}", size(pair.bin_bytes), size(pair.idx_bytes)),
        format!("  values     {:?}", pair.dtype).to_lowercase(),
        format!("  documents  {} ({} empty)", people(pair.num_documents), people(pair.num_empty_documents)),
        format!("  sequences  {}", people(pair.num_sequences)),
        format!("  tokens     {}", people(pair.num_tokens)),
    ];
    if let Some(lengths) = &pair.sequence_lengths {
        let lengths =
            [lengths.min, lengths.median, lengths.p90, lengths.p99, lengths.max].map(|length| people(length.into()));
        let [min, median, p90, p99, max] = lengths;
        lines.push(format!("  lengths    min {min}, median {median}, p90 {p90}, p99 {p99}, max {max}"));
    }
    if let Some((smallest, largest)) = pair.token_range {
        lines.push(format!("  token ids  {smallest} to {largest}"));
    }
    if let Some(entries) = pair.vocabulary_size {
        lines.push(format!("  tokenizer  {} entries", people(entries as u64)));
    }
    for document in &pair.first_documents {
        let shown = document.text.as_ref().map_or_else(|| format!("{:?}", document.tokens), |text| format!("{text:?}"));
        lines.push(format!("  document {} ({} tokens): {shown}", document.document, people(document.num_tokens)));
    }
    lines.join("\n")
}

impl Corpus {
    fn run(self) -> Outcome {
        let defaults = CorpusOptions::new(self.manifest, self.output_path);
        let max_bytes = self.max_bytes.unwrap_or(defaults.max_bytes);
        let options = CorpusOptions { max_bytes, replace: self.replace, ..defaults };
        let made = corpus(&options, &mut Bar::new("reading")).map_err(failure)?;
        if self.output.is_json() {
            print_json(&json!({
                "path": made.path, "crates": made.crates, "documents": made.documents, "bytes": made.bytes, "capped": made.capped,
            }))?;
        } else {
            let cut = if made.capped { ", cut at the limit" } else { "" };
            let (documents, crates) = (people(made.documents), people(made.crates));
            line(&format!(
                "{}: {documents} documents of {crates} crates, {}{cut}",
                made.path.display(),
                size(made.bytes)
            ))?;
        }
        Ok(Exit::Ok)
    }
}

/// A progress bar on stderr; indicatif hides it when that is not a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new(doing: &'static str) -> Self {
        let bar = ProgressBar::no_length();
        if let Ok(style) =
            ProgressStyle::with_template("{msg} {bar:24} {bytes}/{total_bytes} {bytes_per_sec}  ETA {eta}")
        {
            bar.set_style(style);
        }
        bar.set_message(doing);
        Self(bar)
    }
}

impl Progress for Bar {
    fn update(&mut self, counts: &Counts) {
        if counts.total_bytes > 0 {
            self.0.set_length(counts.total_bytes);
        }
        self.0.set_position(counts.bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
