//! Checkpoints and run directories: what is durable, in which order, and who may change it.
//!
//! Everything that trainctl keeps between two processes lies in a run directory (ARCHITECTURE.md); checkpoints may lie in
//! a bucket instead ([`location`]). Everything that changes them passes [`io`], the one module with mutating calls. On top
//! of it:
//!
//! - [`layout`]: the names of all files of a run directory.
//! - [`numbers`] and [`tenure`]: terms and generations (J2): who may act.
//! - [`manifest`] and [`checkpoints`]: commits, pointers, resolving, retention (C1 – C6, C9).
//! - [`shard`] and [`state_hash`]: the bytes of tensors, and the digest that does not depend on how they are cut.
//! - [`export`]: a checkpoint as a directory that `transformers` loads.
//! - [`diff`]: how far two checkpoints are apart.
//! - [`hugging_face`]: the weights of a directory that `transformers` saved.
//! - [`admission`]: whether a spec may run in its run directory, and from where.
//! - [`origin`]: the checkpoint of another run that a run begins with.
//! - [`write_job_spec`] and [`rows`]: `job.yaml` and the `.jsonl` files.
//! - [`space`]: room on a file system.
//!
//! Keys are relative paths with `/`, as an object store has them; [`io`] knows what is below.

pub mod admission;
mod batches;
pub mod checkpoints;
pub mod diff;
pub mod error;
pub mod export;
pub mod hugging_face;
pub mod io;
mod job_spec;
pub mod layout;
pub mod location;
pub mod manifest;
pub mod numbers;
pub mod origin;
pub mod rows;
pub mod shard;
pub mod space;
pub mod state_hash;
pub mod tenure;
mod wall;

pub use checkpoints::CheckpointStore;
pub use error::{Error, is_away};
pub use job_spec::write_job_spec;
pub use layout::{CheckpointName, RunDir};
pub use location::Location;
pub use manifest::Manifest;
pub use tenure::{Fence, Standing, Tenure, Unfenced};
pub use trainctl_fault as fault;
