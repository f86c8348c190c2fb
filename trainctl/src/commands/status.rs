//! `trainctl status`

use clap::Args;

use super::JobArgs;
use crate::client;
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, line};
use crate::view::{JobView, job_block};

/// Show a job: state, steps, ranks, pointers
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl status gpt2-124m-7f3a1b2c")]
pub(super) struct Status {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Status {
    pub(super) async fn run(self) -> Outcome {
        let (mut client, id) = self.job.connect().await?;
        let job = client::get_job(&mut client, Some(&id)).await?;
        if self.output.is_json() {
            json(&JobView::from(job))?;
        } else {
            line(&job_block(&job))?;
        }
        Ok(Exit::Ok)
    }
}
