//! One error type for the crate: each variant says what, where and what to do next.

use std::io;
use std::path::{Path, PathBuf};

/// What went wrong with data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// Verb phrase, for example "open".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file is not what its format says.
    #[error("{} is damaged or not of the expected format: at byte {offset}: {what}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// The value found and what is allowed.
        what: String,
    },
    /// A prefix without its pair of files.
    #[error("no data at {}: {missing} does not exist; give the prefix of a .bin/.idx pair, as `trainctl data preprocess` prints it", .prefix.display())]
    MissingPair {
        /// The prefix as given.
        prefix: PathBuf,
        /// The file that is not there.
        missing: String,
    },
    /// Something is already where the result should go.
    #[error("{} already exists; choose another output prefix, or allow it to be replaced", .0.display())]
    Exists(PathBuf),
    /// A split string that cannot be understood.
    #[error("split \"{text}\": {why}; write train, validation and test shares, for example \"99,1,0\"")]
    Split {
        /// The string.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A split of a corpus that cannot give a single sample.
    #[error("{}: the {split} split has no sample: {why}", .prefix.display())]
    NoSamples {
        /// The corpus.
        prefix: PathBuf,
        /// train, validation or test.
        split: &'static str,
        /// The numbers, and what to change.
        why: String,
    },
    /// A list of corpora that cannot be blended.
    #[error("cannot blend the data sets: {0}")]
    Blend(String),
    /// A path pattern without a usable match.
    #[error("data path \"{pattern}\": {why}")]
    Pattern {
        /// As written.
        pattern: String,
        /// What is wrong, and the remedy.
        why: String,
    },
    /// A record of an input file that cannot be used.
    #[error("{}:{line}: {why}", .path.display())]
    Record {
        /// The input file.
        path: PathBuf,
        /// Line, counted from 1.
        line: u64,
        /// What is wrong, and the remedy.
        why: String,
    },
    /// A tokenizer that cannot be read, trained or used.
    #[error("tokenizer {}: {why}", .path.display())]
    Tokenizer {
        /// The tokenizer's file or directory.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A whole input without anything to use.
    #[error("{}: {why}", .path.display())]
    NothingUsable {
        /// The input.
        path: PathBuf,
        /// What was looked for, and the remedy.
        why: String,
    },
    /// A sample or sequence id beyond the end.
    #[error("{what} {id} of {} is out of range: it has {len}", .path.display())]
    OutOfRange {
        /// sample, sequence or document.
        what: &'static str,
        /// The corpus.
        path: PathBuf,
        /// The id asked for.
        id: u64,
        /// How many there are.
        len: u64,
    },
    /// A value that a file's format cannot hold.
    #[error("{}: {what}", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The value and the limit.
        what: String,
    },
    /// `cargo metadata` did not answer.
    #[error("cargo metadata for {}: {why}", .path.display())]
    Cargo {
        /// The manifest.
        path: PathBuf,
        /// What cargo said.
        why: String,
    },
}

impl Error {
    /// Adapter for `map_err` that names the action and the file.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn format(path: &Path, offset: u64, what: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), offset, what: what.into() }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
