//! `trainctl explain`

use clap::Args;

use super::{JobArgs, events};
use crate::exit::{Exit, Outcome};
use crate::explain;
use crate::output::{OutputArgs, json, line};

/// Say why a job lost generations or failed: the first cause, its rank and log, what followed, what to do
///
/// A run directory is read from its files, so that this works without a coordinator.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl explain runs/gpt2-124m")]
pub(super) struct Explain {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Explain {
    pub(super) async fn run(self) -> Outcome {
        let rows = events::rows(&self.job).await?;
        let job = self.job.job.as_deref().filter(|_| self.job.run_dir().is_none());
        let explanation = explain::read(&rows, job);
        if self.output.is_json() {
            json(&explanation)?;
        } else {
            line(&explain::text(&explanation))?;
        }
        Ok(Exit::Ok)
    }
}
