//! `trainctl`: what people type.
//!
//! Data on stdout, everything else on stderr. Exit codes: 0 ok, 1 the job failed, 2 internal error, 64 usage, 69 no
//! coordinator or another holder, 75 queue me again.

mod attached;
mod begin;
mod client;
mod commands;
mod daemons;
mod exit;
mod explain;
mod follow;
mod held;
mod output;
mod overrides;
mod precheck;
mod progress;
mod run_place;
mod spec_file;
mod summary;
mod supervise;
mod view;
mod worker_view;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::commands::Cli;
use crate::exit::{Exit, Outcome};
use crate::output::note;

fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(overrides::rewrite(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let outcome = match cli.tied() {
        Some(tied) => tied.run(),
        None => start(cli),
    };
    match outcome {
        Ok(exit) => ExitCode::from(exit as u8),
        Err(failure) => {
            if !failure.message.is_empty() {
                note(&format!("trainctl: {}", failure.message));
            }
            ExitCode::from(failure.exit as u8)
        }
    }
}

/// One thread, and it is the main one: the kernel ties a child's life to the thread that spawned it (see [`supervise`]).
fn start(cli: Cli) -> Outcome {
    let level = if cli.is_attached() { "warn" } else { "error" };
    trainctl_runtime::telemetry::init_with_default("trainctl", level)
        .map_err(|error| exit::Failure::usage(error.to_string()))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| exit::Failure::internal(format!("start the runtime: {error}")))?;
    runtime.block_on(cli.run())
}

/// Help and version are data; anything else that clap says is a usage error (64).
fn usage(error: &clap::Error) -> ExitCode {
    let exit = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Ok,
        _ => Exit::Usage,
    };
    // A closed pipe is no reason to fail.
    error.print().unwrap_or_default();
    ExitCode::from(exit as u8)
}
