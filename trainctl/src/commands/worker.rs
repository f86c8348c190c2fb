//! `trainctl worker`

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use trainctl_runtime::endpoint;

use crate::client::PlaceArgs;
use crate::daemons;
use crate::exit::{Failure, Outcome};

/// Run a worker in this terminal (becomes trainctl-worker)
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainctl worker --coordinator ~/trainctl-state --state-dir ~/trainctl-state/workers/w0"
)]
pub(super) struct Worker {
    /// Where it keeps its identity and its spool; one folder a worker [default: workers/w0 in the user's state directory]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    coordinator: PlaceArgs,
    /// The trainer's program [default: trainctl-trainer beside this one]
    #[arg(long, value_name = "PATH")]
    trainer: Option<PathBuf>,
    /// What the trainer computes on
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = ["cpu", "cuda"])]
    device: String,
}

impl Worker {
    pub(super) fn run(self) -> Outcome {
        let default = || endpoint::user_state_dir().map(|dir| dir.join("workers/w0"));
        let Some(state_dir) = self.state_dir.or_else(default) else {
            return Err(Failure::usage("neither HOME nor XDG_STATE_HOME is set: say --state-dir DIR"));
        };
        let coordinator = self.coordinator.locate()?.dir;
        let program = daemons::beside("trainctl-worker")?;
        let mut command = Command::new(&program);
        command.arg("--state-dir").arg(state_dir).arg("--coordinator").arg(coordinator);
        command.arg("--device").arg(self.device);
        if let Some(trainer) = self.trainer {
            command.arg("--trainer").arg(trainer);
        }
        let error = command.exec();
        Err(Failure::internal(format!("start {}: {error}", program.display())))
    }
}
