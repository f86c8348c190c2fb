//! `trainctl coordinator`

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use trainctl_runtime::endpoint;

use crate::daemons;
use crate::exit::{Failure, Outcome};

/// Run a coordinator in this terminal (becomes trainctl-coordinator)
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl coordinator --state-dir ~/trainctl-state")]
pub(super) struct Coordinator {
    /// Where it keeps its journal, tokens and endpoint.json [default: the user's state directory]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Address to listen on; TLS is on for everything but loopback
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    listen: String,
}

impl Coordinator {
    pub(super) fn run(self) -> Outcome {
        let state_dir = match self.state_dir.or_else(endpoint::user_state_dir) {
            Some(dir) => dir,
            None => return Err(Failure::usage("neither HOME nor XDG_STATE_HOME is set: say --state-dir DIR")),
        };
        let program = daemons::beside("trainctl-coordinator")?;
        let error = Command::new(&program).arg("--state-dir").arg(state_dir).arg("--listen").arg(self.listen).exec();
        Err(Failure::internal(format!("start {}: {error}", program.display())))
    }
}
