//! Tokenizers: reading Hugging Face's `tokenizer.json`, and training a byte-level BPE.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, TokenizerBuilder};

use crate::durable;
use crate::error::{Error, Result};
use crate::jsonl::{Records, Text};
use crate::progress::{Counts, Progress};

/// The end-of-document token of trained tokenizers.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// A tokenizer as `tokenizer.json` describes it, without truncation and padding.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    end_of_document: Option<u32>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`, or the directory it lies in.
    ///
    /// # Errors
    /// A file that is missing or not a tokenizer, or a `tokenizer_config.json` whose `eos_token` is not in the vocabulary.
    pub fn load(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let fail = |why: String| Error::Tokenizer { path: file.clone(), why };
        if !file.is_file() {
            return Err(fail("does not exist; give a Hugging Face tokenizer.json or its directory, or train one with `trainctl data tokenizer train`".into()));
        }
        let mut inner =
            tokenizers::Tokenizer::from_file(&file).map_err(|error| fail(format!("is not a tokenizer: {error}")))?;
        inner.with_truncation(None).map_err(|error| fail(error.to_string()))?;
        inner.with_padding(None);
        let named = end_of_document_name(&file)?;
        let end_of_document = match &named {
            Some(name) => {
                let id = inner.token_to_id(name);
                Some(id.ok_or_else(|| fail(format!("its eos_token \"{name}\" is not in the vocabulary")))?)
            }
            None => inner.token_to_id(END_OF_TEXT),
        };
        Ok(Self { path: file, inner, end_of_document })
    }

    /// The `tokenizer.json` that was read.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Entries, added tokens included: Python's `len(tokenizer)`.
    #[must_use]
    pub fn vocabulary_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Id of the end-of-document token: `eos_token` of `tokenizer_config.json`, else `<|endoftext|>` if there is one.
    #[must_use]
    pub fn end_of_document(&self) -> Option<u32> {
        self.end_of_document
    }

    /// Ids of several texts, computed on all cores. `special` adds what the tokenizer's own template adds (a BOS for Llama, nothing for GPT-2).
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn encode_batch(&self, texts: Vec<&str>, special: bool) -> Result<Vec<Vec<u32>>> {
        let encodings = self.inner.encode_batch_fast(texts, special).map_err(|error| self.fault(&error))?;
        Ok(encodings.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// Text of some ids, special tokens shown.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|error| self.fault(&error))
    }

    fn fault(&self, error: &tokenizers::Error) -> Error {
        Error::Tokenizer { path: self.path.clone(), why: error.to_string() }
    }
}

/// `eos_token` of the `tokenizer_config.json` beside the tokenizer: a string, or an object with `content`.
fn end_of_document_name(tokenizer: &Path) -> Result<Option<String>> {
    let path = tokenizer.with_file_name("tokenizer_config.json");
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read(&path).map_err(Error::io("read", &path))?;
    let config: Value = serde_json::from_slice(&text)
        .map_err(|error| Error::Tokenizer { path: path.clone(), why: format!("is not JSON: {error}") })?;
    let token = &config["eos_token"];
    Ok(token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned))
}

/// What [`train`] needs.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// JSONL file.
    pub input: PathBuf,
    /// Key of the text in each record.
    pub json_key: String,
    /// Directory that gets `tokenizer.json` and `tokenizer_config.json`.
    pub output: PathBuf,
    /// Entries, the 256 bytes and `<|endoftext|>` included.
    pub vocabulary_size: usize,
    /// Read every k-th document so that about this many bytes of the file are used; 0 = all.
    pub sample_bytes: u64,
    /// Replace a tokenizer that is there.
    pub replace: bool,
}

impl TrainOptions {
    /// Defaults: key "text", 4,096 entries, a sample of 10 MB.
    #[must_use]
    pub fn new(input: PathBuf, output: PathBuf) -> Self {
        Self {
            input,
            json_key: "text".to_owned(),
            output,
            vocabulary_size: 4096,
            sample_bytes: 10_000_000,
            replace: false,
        }
    }
}

/// What [`train`] made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Trained {
    /// The `tokenizer.json`.
    pub path: PathBuf,
    /// Entries; fewer than asked for when the text has too few repeated pairs.
    pub vocabulary_size: usize,
    /// Documents used.
    pub documents: u64,
    /// Every k-th document was used.
    pub every: u64,
}

/// Trains a byte-level BPE (GPT-2's pre-tokenization) and writes what Hugging Face tokenizers and transformers load.
///
/// The same input and options give the same bytes.
/// Measured in release on two busy cores (load 4): 4.2 s for 866 of the 3,461 documents of 40 MB of Rust sources, 4,096 entries.
///
/// # Errors
/// A bad record, a key that none has, a vocabulary too small for the 256 bytes, an existing tokenizer, or a failed write.
pub fn train(options: &TrainOptions, progress: &mut dyn Progress) -> Result<Trained> {
    let path = options.output.join("tokenizer.json");
    let fail = |why: String| Error::Tokenizer { path: path.clone(), why };
    if options.vocabulary_size < 257 {
        return Err(fail(format!(
            "{} entries are too few: the 256 bytes and {END_OF_TEXT} need 257",
            options.vocabulary_size
        )));
    }
    if path.exists() && !options.replace {
        return Err(Error::Exists(path));
    }
    let (texts, documents, every) = sample(options, progress)?;
    let alphabet: HashSet<char> = ByteLevel::alphabet().into_iter().collect();
    let mut trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(options.vocabulary_size)
        .min_frequency(2)
        .initial_alphabet(alphabet)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .build();
    let mut tokenizer = TokenizerBuilder::<BPE, NormalizerWrapper, ByteLevel, ByteLevel, ByteLevelDecoder>::new()
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_post_processor(Some(ByteLevel::new(false, false, true)))
        .with_decoder(Some(ByteLevelDecoder::default()))
        .build()
        .map_err(|error| fail(error.to_string()))?;
    tokenizer.train(&mut trainer, texts.iter()).map_err(|error| fail(format!("training: {error}")))?;
    let text = tokenizer.to_string(true).map_err(|error| fail(error.to_string()))?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "add_prefix_space": false,
        "clean_up_tokenization_spaces": false,
        "model_max_length": 1_000_000_000_u64,
    });
    durable::create_folder_of(&path)?;
    durable::write(&path.with_file_name("tokenizer_config.json"), format!("{config:#}\n").as_bytes())?;
    durable::write(&path, text.as_bytes())?;
    Ok(Trained { vocabulary_size: tokenizer.get_vocab_size(true), path, documents, every })
}

/// Every k-th document's texts, how many documents that is, and k.
fn sample(options: &TrainOptions, progress: &mut dyn Progress) -> Result<(Vec<String>, u64, u64)> {
    let mut records = Records::open(&options.input, &options.json_key)?;
    let every = if options.sample_bytes == 0 { 1 } else { records.total_bytes.div_ceil(options.sample_bytes).max(1) };
    let (mut texts, mut seen, mut used) = (Vec::new(), 0u64, 0u64);
    let counts = |records: &Records, used| Counts {
        bytes: records.bytes,
        total_bytes: records.total_bytes,
        documents: used,
        tokens: 0,
    };
    while let Some(text) = records.next()? {
        if let Text::Parts(parts) = text {
            if seen % every == 0 {
                texts.extend(parts);
                used += 1;
            }
            seen += 1;
        }
        if seen % 1024 == 0 {
            progress.update(&counts(&records, used));
        }
    }
    progress.update(&counts(&records, used));
    records.check_key()?;
    if texts.is_empty() {
        let why = format!("no record has any text under \"{}\"", options.json_key);
        return Err(Error::NothingUsable { path: records.path().to_owned(), why });
    }
    Ok((texts, used, every))
}
