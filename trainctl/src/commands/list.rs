//! `trainctl list`

use clap::Args;
use trainctl_proto::v1;

use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Outcome};
use crate::output::{OutputArgs, json, line, moment, people, table};
use crate::view::{JobView, phase_name, stop_at};

/// List a coordinator's jobs, the newest last
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl list --output json")]
pub(super) struct List {
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl List {
    pub(super) async fn run(self) -> Outcome {
        let mut client = self.coordinator.connect().await?;
        let response = client.list(v1::ListRequest {}).await.map_err(|status| client::failure(&status))?;
        let mut jobs = response.into_inner().jobs;
        jobs.sort_by_key(|job| job.submitted_at_ms);
        if self.output.is_json() {
            json(&jobs.into_iter().map(JobView::from).collect::<Vec<_>>())?;
            return Ok(Exit::Ok);
        }
        let row = |job: &v1::Job| {
            vec![
                job.id.clone(),
                phase_name(job.phase()).to_owned(),
                format!("{}/{}", people(job.steps_done), people(stop_at(job))),
                job.world_size.to_string(),
                moment(job.submitted_at_ms),
                job.run_dir.clone(),
            ]
        };
        let rows: Vec<_> = jobs.iter().map(row).collect();
        line(&table(&["JOB", "STATE", "STEPS", "RANKS", "SUBMITTED", "RUN"], &rows))?;
        Ok(Exit::Ok)
    }
}
