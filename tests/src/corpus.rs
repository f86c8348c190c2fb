//! A tiny corpus, made once and shared by all tests: pseudo-text → byte-level BPE of 512 entries → `.bin/.idx`.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainctl_dataset::preprocess::{PreprocessOptions, preprocess};
use trainctl_dataset::tokenizer::{TrainOptions, train};

use crate::programs;

/// Entries of the tokenizer.
pub const VOCABULARY: u32 = 512;

const DOCUMENTS: usize = 400;
const WORDS_PER_DOCUMENT: usize = 220;
/// Part of the folder's name: a corpus of another version is not this one.
const VERSION: u32 = 1;

/// Where it is.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// For `dataset.paths`.
    pub prefix: PathBuf,
    /// For `dataset.tokenizer`.
    pub tokenizer: PathBuf,
    /// For `dataset.index_mapping_dir`.
    pub index: PathBuf,
}

/// The corpus; the first test that asks makes it.
///
/// # Panics
/// If it cannot be made.
pub fn corpus() -> Corpus {
    let root = programs::scratch_root();
    fs::create_dir_all(&root).unwrap();
    let root = root.canonicalize().unwrap();
    let dir = root.join(format!("corpus-v{VERSION}"));
    once(&root.join("corpus.lock"), &dir, |dir| {
        let text = dir.join("text.jsonl");
        write_text(&text);
        let mut options = TrainOptions::new(text.clone(), dir.join("tokenizer"));
        options.vocabulary_size = VOCABULARY as usize;
        train(&options, &mut ()).unwrap();
        let mut options = PreprocessOptions::new(text, dir.join("tokenizer"), dir.join("data"));
        options.append_eod = true;
        preprocess(&options, &mut ()).unwrap();
    });
    Corpus { prefix: dir.join("data_text_document"), tokenizer: dir.join("tokenizer"), index: dir.join("index") }
}

/// Makes the folder `dir` by `make` unless it exists. Under a lock, and complete or not at all.
///
/// # Panics
/// If the file system refuses.
pub fn once(lock: &Path, dir: &Path, make: impl FnOnce(&Path)) {
    let lock = File::create(lock).unwrap();
    lock.lock().unwrap();
    if !dir.exists() {
        let temporary = dir.with_extension("tmp");
        if temporary.exists() {
            fs::remove_dir_all(&temporary).unwrap();
        }
        fs::create_dir_all(&temporary).unwrap();
        make(&temporary);
        #[expect(clippy::disallowed_methods, reason = "a cache of the tests, under their own lock")]
        fs::rename(&temporary, dir).unwrap();
    }
}

/// Sentences of a small vocabulary with Zipf's frequencies: a model learns them within tens of steps.
fn write_text(path: &Path) {
    let mut random = StdRng::seed_from_u64(7);
    let syllables = ["ka", "lo", "mi", "ren", "tu", "sa", "vel", "no", "shi", "dar", "e", "pon"];
    let words: Vec<String> = (0..300)
        .map(|_| (0..random.random_range(1..4)).map(|_| syllables[random.random_range(0..syllables.len())]).collect())
        .collect();
    let mut out = BufWriter::new(File::create(path).unwrap());
    for _ in 0..DOCUMENTS {
        let text: Vec<&str> = (0..WORDS_PER_DOCUMENT)
            .map(|_| {
                let position = random.random_range(0.0_f64..1.0).powi(3) * words.len() as f64;
                words[position as usize].as_str()
            })
            .collect();
        writeln!(out, "{}", serde_json::json!({ "text": format!("{}.", text.join(" ")) })).unwrap();
    }
    out.flush().unwrap();
}
