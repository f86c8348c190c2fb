//! `trainctl cancel`

use clap::Args;
use trainctl_proto::v1;

use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, note};
use crate::view::{JobView, phase_name};

/// Stop a job: save after the running step, or at once with --now
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl cancel gpt2-124m-7f3a1b2c")]
pub(super) struct Cancel {
    /// Job id
    job: String,
    /// Stop at once; steps since the last checkpoint are lost
    #[arg(long)]
    now: bool,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Cancel {
    pub(super) async fn run(self) -> Outcome {
        let mut client = self.coordinator.connect().await?;
        let mode = if self.now { v1::CancelMode::Now } else { v1::CancelMode::Save };
        let request = v1::CancelRequest { job: self.job, mode: mode.into() };
        let job = client.cancel(request).await.map_err(|status| client::failure(&status))?.into_inner();
        note(&format!("{} is {}", job.id, phase_name(job.phase())));
        if self.output.is_json() {
            json(&JobView::from(job))?;
        }
        Ok(Exit::Ok)
    }
}
