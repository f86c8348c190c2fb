//! The coordinator: takes jobs, forms worlds, runs rendezvous, commits checkpoints, restarts what fails.
//!
//! - [`core`]: the state and what moves it, without I/O; [`decide`]: its decisions as pure functions.
//! - [`owner`]: the one task that holds the core; [`journal`] and [`record`]: what it must not forget.
//! - [`run_io`], [`rows`], [`runs`]: run directories, off the owner task.
//! - [`jobs`], [`workers`], [`grants`], [`follow`], [`answers`], [`refusal`]: the services, [`access`]: whose they are;
//!   [`rendezvous`]: key-value stores of forming generations.
//! - [`server`]: puts it together.

pub mod access;
pub mod answers;
pub mod core;
pub mod decide;
pub mod events;
pub mod exports;
pub mod follow;
pub mod grants;
pub mod hooks;
pub mod jobs;
pub mod journal;
pub mod owner;
pub mod record;
pub mod refusal;
pub mod rendezvous;
pub mod rows;
pub mod run_io;
pub mod runs;
pub mod server;
pub mod workers;
