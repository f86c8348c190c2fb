//! Training data: Megatron's files and sample order, bit for bit (D1), and the tools that make them.
//!
//! Sync and free of tokio and torch. From the spec to token ids: [`open_split`] gives [`Samples`] ([`open_split_after`] those of a later phase); [`batch`] says which ids a step and a
//! rank read.
//!
//! - [`indexed`]: `.bin/.idx` pairs · [`split`], [`index`], [`blend`]: which tokens are sample n · [`gpt`], [`Samples`]: reading them
//! - [`batch`]: steps, micro-batches, ranks (D2)
//! - [`corpus`], [`tokenizer`], [`preprocess`], [`inspect`](mod@inspect), [`paths`]: the tools, one options struct and one function each, with [`progress`]

pub mod batch;
pub mod blend;
mod cache;
pub mod corpus;
mod describe;
mod durable;
mod error;
pub mod gpt;
pub mod index;
pub mod indexed;
pub mod inspect;
mod jsonl;
mod map;
mod npy;
pub mod numpy_random;
pub mod paths;
pub mod preprocess;
pub mod progress;
mod samples;
pub mod split;
pub mod tokenizer;

pub use error::{Error, Result};
pub use npy::Ints;
pub use paths::expand_paths;
pub use progress::{Counts, Progress};
pub use samples::{CorpusCounts, Samples, corpus_key, open_split, open_split_after, passes};
pub use split::Split;
