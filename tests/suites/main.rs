//! The end-to-end suites.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests say what failed, and where their evidence lies"
)]

mod abuse;
mod architecture;
mod burn_in;
mod causes;
mod checkpoints;
mod coordinator_away;
mod corruption;
mod disk;
mod export;
mod failing_trainers;
mod fork;
mod fork_sources;
mod gpus;
mod hangs;
mod hooks;
mod hostile_bytes;
mod hosts;
mod killed_trainers;
mod killed_workers;
mod late_writers;
mod malformed_specs;
mod many_jobs;
mod matrix;
mod object_store;
mod reading;
mod resharding;
mod resume;
mod saves;
mod state_hash;
mod stragglers;
mod tokenizer;
mod workers;
mod world_sizes;

/// The process that serves a file system of [`trainctl_faultfs`].
#[test]
fn faultfs_server() {
    trainctl_faultfs::serve_if_asked();
}
