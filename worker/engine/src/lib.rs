//! The engine of trainctl: models as lists of blocks, an executor that runs them block by block, AdamW, saving and
//! loading, and the training loop, on libtorch through `tch`.
//!
//! - [`job`]: what a rank is told and how it reports.
//! - [`train`]: the loop.
//! - [`schedule`]: when to validate, save and stop.
//! - [`model`]: GPT-2 as pure functions over parameters; [`params`]: the parameters with their flat gradients.
//! - [`executor`]: forward and backward block by block, with overlapped gradient reduction.
//! - [`head`]: linear + cross-entropy in chunks of rows.
//! - [`optim`]: clipping and AdamW.
//! - [`data`]: samples to tensors; [`validate`]: evaluation.
//! - [`checkpoint`]: snapshot, write, load.
//!
//! Everything random is drawn from (seed, step, index of the sequence in the global batch, place in the network), never
//! from a generator's hidden state (D3); that and a global loss normalisation make the numbers independent of world size.

mod burn_in;
pub mod checkpoint;
pub mod data;
mod error;
pub mod executor;
pub mod head;
pub mod job;
mod memory;
pub mod model;
pub mod optim;
pub mod parallel;
pub mod params;
pub mod pulse;
pub mod schedule;
mod setup;
pub mod train;
pub mod validate;

pub use error::{Error, TensorFault, TensorFaults};
pub use job::{FailedSave, Finished, Link, Requests, TrainJob};
