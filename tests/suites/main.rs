//! The end-to-end suites.

#![expect(clippy::unwrap_used, reason = "tests")]

mod architecture;
mod coordinator_away;
mod failing_trainers;
mod hostile_bytes;
mod killed_trainers;
mod killed_workers;
mod malformed_specs;
mod reading;
mod resume;
mod state_hash;
mod world_sizes;
