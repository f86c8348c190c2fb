//! The daemon kit: what coordinator, worker, trainer and command line share and none of them owns.
//!
//! - [`clock`], [`backoff`]: time and retries as values, so that decisions can be tested and simulated.
//! - [`signals`], [`tasks`]: one place that listens to signals, one place that spawns tasks.
//! - [`telemetry`]: logs to stderr.
//! - [`endpoint`], [`auth`], [`certificates`], [`tls`], [`rpc`]: how a client finds a coordinator, proves itself, and dials.
//! - [`connections`]: how many connections a listener takes, and whose.
//! - [`page`]: where another process is, without a message.
//! - [`proc`]: process hygiene through `/proc` and prctl.

pub mod auth;
pub mod backoff;
pub mod certificates;
pub mod clock;
pub mod connections;
pub mod endpoint;
mod files;
pub mod page;
pub mod proc;
pub mod rpc;
pub mod signals;
pub mod tasks;
pub mod telemetry;
pub mod tls;
