//! The job spec of trainctl: what a person writes, checked and resolved.
//!
//! Pure: no tokio, no I/O, no torch. Everything depends on this crate; it depends on nothing of ours.
//!
//! - [`ids`]: job, generation, term, rank, step.
//! - [`job`]: the spec's sections as types, with their defaults.
//! - [`mod@parse`]: `job.yaml` with positions, overrides and `${VAR}`; all faults at once ([`fault`]).
//! - [`mod@resolve`]: absolute paths, inlined model config, defaults that depend on something; [`mod@check`]: rules across keys.
//! - [`resume`]: what a resume may change. [`mod@schema`]: JSON Schema of the spec.
//! - [`model`]: architecture, tensors, FLOPs, memory. [`lr`]: the learning-rate schedule.
//! - [`report`]: what a rank reports. [`start`]: what a generation starts from. [`fork`]: what another run may begin with.
//! - [`state`]: the job's state machine, exits and causes.

pub mod check;
mod emit;
pub mod fault;
pub mod fork;
pub mod ids;
pub mod job;
pub mod lr;
pub mod model;
pub mod parse;
pub mod report;
pub mod resolve;
pub mod resume;
pub mod schema;
pub mod start;
pub mod state;

pub use check::{CorpusFacts, Facts, PretrainedFacts, check, prepare};
pub use emit::NotWritable;
pub use fault::{Fault, Faults, Origin, Severity, Spans};
pub use ids::{Generation, JobId, Rank, Step, Term};
pub use job::JobSpec;
pub use model::Architecture;
pub use parse::{Override, Parsed, parse};
pub use resolve::{Files, PathKind, Resolved, resolve};
pub use schema::schema;
