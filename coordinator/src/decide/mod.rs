//! The coordinator's decisions: pure functions that return the decision and its reason.
//!
//! Clock and seed are arguments; nothing here reads a file, a clock or a socket. The owner task gathers what a decision
//! needs, asks, and applies the answer.

pub mod admission;
pub mod burn_in;
pub mod commit;
pub mod deadlines;
pub mod health;
pub mod hooks;
pub mod liveness;
pub mod placement;
pub mod probes;
pub mod replicas;
pub mod restart;
pub mod rows;
pub mod saves;
pub mod stragglers;
pub mod verdict;
