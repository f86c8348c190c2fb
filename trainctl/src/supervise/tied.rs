//! A daemon that the kernel kills when its supervisor ends, whatever the daemon itself does about it.
//!
//! The child starts as this program, asks for the signal, looks whether its parent is still there, and only then becomes
//! the daemon: the request outlives `execve`. So there is no instant in which a `kill -9` of the supervisor leaves a
//! daemon running.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use trainctl_runtime::proc;

use crate::exit::{Failure, Outcome};

/// Hidden verb of the command line.
pub(crate) const VERB: &str = "tied-daemon";

/// Becomes a daemon tied to the life of the process that started it
#[derive(Debug, Args)]
pub(crate) struct Tied {
    program: PathBuf,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

impl Tied {
    /// Call on the main thread, before there is another one.
    pub(crate) fn run(&self) -> Outcome {
        proc::die_with_parent().map_err(|error| Failure::internal(error.to_string()))?;
        let error = Command::new(&self.program).args(&self.arguments).exec();
        Err(Failure::internal(format!("start {}: {error}", self.program.display())))
    }
}
